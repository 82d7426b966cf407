"""How far vLLM is from the trainer: log-probs in float32, tied and untied; tokens in flight; probabilities in bfloat16.

    python benchmarks/engine_gap.py [--steps 50] [--parts float32 bfloat16 still] [--model DIR] [--out DIR]

`float32`: vLLM's log-probs beside a forward pass of transformers, of models with and without a tied head, with weights
that change between tokens: each token beside the policy of the version that drew it. The bar is 5e-5. `bfloat16`: the
quickstart's task for `--steps` steps with vLLM in bfloat16; the mean gap in probabilities of every step
(`training/rollout_probs_diff_mean`), of which the mean must be under 0.01. `still`: the same at a learning rate of
1e-30, where no weight changes and the gap must be flat: within twice its first value. `--model` is what the quickstart
starts from; without it the warm start is made first.

Needs vLLM; runs are in `--out` (a folder of its own unless given).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from atomrl.cli.main import main as atomrl
from atomrl.protocols import WeightUpdate
from atomrl.rollout.generate import requests_of
from atomrl.rollout.requests import EngineOptions
from atomrl.rollout.vllm import VLLMEngine
from atomrl.types import GenerationOutput, Prompt, Sample, SamplingParams
from atomrl.weights import InProcessTransfer

ROOT = Path(__file__).parents[1]
VOCABULARY, BAR, BAR_BFLOAT16 = 128, 5e-5, 0.01


def make_model(folder: Path, tied: bool) -> Path:
    """A random model, large enough in its weights that its distributions are not flat."""
    from tokenizers import Tokenizer, models

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0").save_pretrained(folder)
    return folder


class Source:
    """Gives a model's weights, as a trainer does."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        return WeightUpdate(version, self.model.state_dict().items())


def largest_error(policies: list[Any], outputs: list[GenerationOutput], starts: dict[str, tuple[int, ...]]) -> float:
    """Of the log-prob of any token, beside a float64 forward pass of the policy that drew it."""
    worst = 0.0
    for output in outputs:
        start = starts[output.request_id.partition("/")[0]]
        drawn = [token for segment in output.segments for token in segment.token_ids]
        begin = len(start) - 1
        for segment in output.segments:
            assert segment.logprobs is not None and segment.policy_version is not None
            logits = policies[segment.policy_version](torch.tensor([[*start, *drawn]])).logits[0]
            end = begin + len(segment.token_ids)
            tokens = torch.tensor(segment.token_ids)[:, None]
            expected = logits[begin:end].log_softmax(-1).gather(-1, tokens)[:, 0]
            worst = max(worst, float((expected - torch.tensor(segment.logprobs)).abs().max()))
            begin = end
    return worst


@torch.no_grad()
def float32(updates: int) -> bool:
    """Tied and untied; updates in flight."""
    good = True
    for tied in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(Path(folder), tied)
            tokenizer = AutoTokenizer.from_pretrained(path)
            options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=16)
            engine = VLLMEngine.from_pretrained(str(path), tokenizer, options)
            policies = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)]
            trainer = Source(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
            transfer = InProcessTransfer(trainer, engine)  # type: ignore[arg-type]
            transfer(0)
            starts = {f"p{index}": tuple(range(5 + index, 12 + 2 * index)) for index in range(4)}
            sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=300, ignore_eos=True, seed=1)
            outputs, versions = [], 0
            for name, ids in starts.items():
                sample = Sample(sample_id=name, prompt="", ground_truth="")
                prompt = Prompt(prompt_id=name, sample=sample, token_ids=ids)
                for number, request in enumerate(requests_of(prompt, sampling)):
                    # Of different lengths, so that a poll returns while others are under way.
                    length = replace(request.sampling, max_completion_tokens=20 + 60 * number)
                    engine.submit([replace(request, sampling=length)])
            while found := engine.poll():
                outputs += found
                if versions < updates:
                    versions += 1
                    for parameter in trainer.model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.01)
                    policies.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
                    policies[-1].load_state_dict(trainer.model.state_dict())
                    transfer(versions)
            segments = max(len(output.segments) for output in outputs)
            worst = largest_error(policies, outputs, starts)
            engine.close()
            good &= worst <= BAR and segments > 1
            print(
                f"float32, {'tied' if tied else 'untied'}: {versions} updates in flight, up to {segments} versions in "
                f"one completion, largest error of a log-prob {worst:.1e} (bar {BAR:.0e})",
                flush=True,
            )
    return good


def gaps(out: Path, name: str, model: Path, steps: int, *settings: str) -> list[float]:
    """The gap of each step of a run of the quickstart's task with vLLM in bfloat16."""
    arguments = ["train", str(ROOT / "configs/quickstart.yaml"), f"run_name={name}", f"output_dir={out}"]
    arguments += [f"model.path={model}", "model.dtype=bfloat16", "rollout.engine=vllm", f"train.steps={steps}"]
    arguments += ["rollout.prompts_per_step=16", "data.eval=null", "tracking.log_completions=false", *settings]
    if atomrl(arguments):
        raise SystemExit(f"the run {name} failed")
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["training/rollout_probs_diff_mean"] for row in rows if "training/rollout_probs_diff_mean" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["float32", "bfloat16", "still"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--updates", type=int, default=3, help="in flight")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="engine-gap-"))
    good = "float32" not in args.parts or float32(args.updates)
    model = args.model or out / "quickstart-warm-start/model"
    if not model.exists():
        atomrl(["sft", str(ROOT / "configs/quickstart_sft.yaml"), f"output_dir={out}"])
    for part, settings in (("bfloat16", ()), ("still", ("train.learning_rate=1e-30",))):
        if part in args.parts:
            found = gaps(out, part, model, args.steps, *settings)
            flat = part == "bfloat16" or max(found) <= 2 * found[0]
            good &= fmean(found) < BAR_BFLOAT16 and flat
            print(
                f"{part}: gap in probabilities, mean {fmean(found):.4f} (bar {BAR_BFLOAT16}), first {found[0]:.4f}, "
                f"last {found[-1]:.4f}, largest {max(found):.4f} of {len(found)} steps",
                flush=True,
            )
    raise SystemExit(0 if good else "a bar is missed")


if __name__ == "__main__":
    main()
