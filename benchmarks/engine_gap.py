"""Difference between vLLM and the trainer: log-probs in float32, tokens in flight, probabilities in bfloat16.

    python benchmarks/engine_gap.py [--parts float32 bfloat16 still] [--heads tied untied] [--ways in_process actor]
        [--steps 50] [--updates 3] [--model DIR] [--out DIR]

`float32`: vLLM's log-probs beside a float64 forward pass of transformers, with weights that change between tokens: each
token beside the policy of the version that drew it. The bar is 5e-5. `bfloat16`: the quickstart's task for `--steps`
steps with vLLM in bfloat16; the mean gap in probabilities (`training/rollout_probs_diff_mean`) of all steps must be
under 0.01. `still`: the same at a learning rate of 1e-30, where no weight changes and the gap must be flat: the mean of
the second half of the steps within a quarter of the first's. All of it with a tied and an untied head, and with vLLM in
this process or in a Ray actor. `--model` is what the quickstart starts from; without it the warm start is made first.

Needs vLLM, and Ray for `actor`; runs, and the table as `engine_gap.json`, are in `--out` (a folder of its own unless
given). It ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from atomrl.cli.main import main as atomrl
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig, ResourceConfig
from atomrl.engines.generation import requests_of
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.vllm import VLLMEngine
from atomrl.protocols import RolloutEngine, WeightUpdate
from atomrl.types import GenerationOutput, Problem, Prompt, SamplingParams
from atomrl.weight_sync import InProcessTransfer

ROOT = Path(__file__).parents[1]
VOCABULARY, BAR, BAR_BFLOAT16, FLAT = 128, 5e-5, 0.01, 1.25


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
    """Return the largest error of a log-prob, relative to a float64 forward pass of the policy that sampled it."""
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


def build(path: str) -> VLLMEngine:
    """The engine in float32, here or in an actor."""
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=16)
    return VLLMEngine.from_pretrained(path, AutoTokenizer.from_pretrained(path), options)


def open_engine(way: str, path: str) -> RolloutEngine:
    """The engine of a way."""
    if way == "in_process":
        return build(path)
    config = ClusterConfig(replicas=1, resources={"rollout": ResourceConfig(num_cpus=0.5)})
    return ReplicatedEngine(partial(build, path), RayCluster(config, ["rollout"]))


@torch.no_grad()
def float32(way: str, head: str, updates: int, folder: str) -> dict[str, Any]:
    """Completions of different lengths, during which the weights change."""
    path = make_model(Path(folder), tied=head == "tied")
    policies = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)]
    trainer = Source(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    starts = {f"p{index}": tuple(range(5 + index, 12 + 2 * index)) for index in range(4)}
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=300, ignore_eos=True, seed=1)
    outputs, versions = list[GenerationOutput](), 0
    with closing(open_engine(way, str(path))) as engine:
        transfer = InProcessTransfer(trainer, engine)  # type: ignore[arg-type]
        transfer(0)
        for name, ids in starts.items():
            prompt = Prompt(prompt_id=name, problem=Problem(problem_id=name, prompt="", ground_truth=""), token_ids=ids)
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
        if isinstance(engine, ReplicatedEngine):
            engine.cluster.close()
    worst, segments = largest_error(policies, outputs, starts), max(len(output.segments) for output in outputs)
    return {
        "updates": versions,
        "versions_in_one_completion": segments,
        "largest_error": worst,
        "good": worst <= BAR and segments > 1,
    }


def untied(model: Path, folder: Path) -> Path:
    """The same model with a head of its own."""
    found = AutoModelForCausalLM.from_pretrained(model)
    found.config.tie_word_embeddings = False
    found.lm_head.weight = torch.nn.Parameter(found.lm_head.weight.detach().clone())
    found.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def gaps(part: str, way: str, head: str, steps: int, model: Path, out: Path) -> dict[str, Any]:
    """The gap of each step of a run of the quickstart's task with vLLM in bfloat16."""
    name = f"{part}-{head}-{way}"
    arguments = ["train", str(ROOT / "configs/quickstart.yaml"), f"run_name={name}", f"output_dir={out}"]
    arguments += [f"model.path={model}", "model.dtype=bfloat16", "rollout.engine=vllm", f"train.steps={steps}"]
    arguments += ["rollout.prompts_per_step=16", "data.eval=null", "tracking.log_completions=false"]
    arguments += ["train.learning_rate=1e-30"] if part == "still" else []
    # Less than a CPU each: a machine with two is enough.
    arguments += ["cluster={replicas: 1, resources: {rollout: {num_cpus: 0.5}}}"] if way == "actor" else []
    if atomrl(arguments):
        raise SystemExit(f"the run {name} failed")
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [row["training/rollout_probs_diff_mean"] for row in rows if "training/rollout_probs_diff_mean" in row]
    drift = fmean(found[len(found) // 2 :]) / fmean(found[: len(found) // 2])
    flat = part == "bfloat16" or 1 / FLAT <= drift <= FLAT
    return {
        "updates": len(found),
        "gap_mean": fmean(found),
        "gap_first": found[0],
        "gap_last": found[-1],
        "gap_largest": max(found),
        "second_half_over_first": drift,
        "good": fmean(found) < BAR_BFLOAT16 and flat and len(found) == steps,
    }


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    numbers = (f"{key} {value:.2g}" for key, value in row.items() if isinstance(value, float))
    counts = (f"{key} {value}" for key, value in row.items() if type(value) is int)
    name = f"{row['part']:9}{row['head']:7}{row['way']:11}{'good' if row['good'] else 'BAD':5}"
    print(name + ", ".join([*counts, *numbers]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (
        ("parts", ["float32", "bfloat16", "still"]),
        ("heads", ["tied", "untied"]),
        ("ways", ["in_process", "actor"]),
    ):
        parser.add_argument(f"--{name}", nargs="+", default=choices, choices=choices)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--updates", type=int, default=3, help="in flight")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="engine-gap-"))
    out.mkdir(parents=True, exist_ok=True)
    model = args.model or out / "quickstart-warm-start/model"
    if not model.exists():
        atomrl(["train", str(ROOT / "configs/quickstart_sft.yaml"), f"output_dir={out}"])
    models = {"tied": model, "untied": untied(model, out / "untied")}
    rows = []
    for part in args.parts:
        for head in args.heads:
            for way in args.ways:
                if part == "float32":
                    with tempfile.TemporaryDirectory() as folder:
                        found = float32(way, head, args.updates, folder)
                else:
                    found = gaps(part, way, head, args.steps, models[head], out)
                rows.append({"part": part, "head": head, "way": way} | found)
                show(rows[-1])
                (out / "engine_gap.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print()
    for row in rows:
        show(row)
    raise SystemExit(0 if all(row["good"] for row in rows) else "a bar is missed")


if __name__ == "__main__":
    main()
