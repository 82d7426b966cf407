"""What a machine with an NVIDIA GPU has to show, in under nine minutes: tests, engines, and a GRPO step at real sizes.

    python benchmarks/gpu_check.py [--out gpu_check.md] [--parts tests engine-1.5b native ...] [--limit-gb 24]
    python benchmarks/gpu_check.py --cpu        # every part at tiny shapes, to try the script

The parts, each a process of its own with a time limit, so that one that fails or hangs leaves the others:

    tests         the tests marked gpu
    engine-SIZE   tokens per second of the native engine and of transformers' `generate`, bfloat16, 64 prompts of 128
                  tokens, 4 completions of 256 tokens each
    native, native-adapters, native-no-graphs
                  the same at 1.5B with the native engine alone: milliseconds, kernels and graphs a decode step; with
                  adapters of rank 32 on every projection; and without CUDA graphs
    step          two steps of configs/qwen2.5-1.5b-gsm8k-24gb.yaml under an allocator's limit of 24 GiB: made problems
                  (`countdown`), prompts padded by the config's system prompt, completions forced to their full length,
                  which is the worst case for memory. The second step's seconds count.

Weights are random, of the shapes of Qwen2.5; the tokenizer has one token per character, so nothing is downloaded. Where
pydantic or pytest is missing, they come from `wheels/` (`make wheels`, before the files travel). Prints a table,
writes it as Markdown, and ends with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/qwen2.5-1.5b-gsm8k-24gb.yaml"
WHEELS = ROOT / "wheels"
LIMITS_S = {
    "tests": 120,
    "engine-0.5b": 60,
    "engine-1.5b": 95,
    "native": 45,
    "native-adapters": 35,
    "native-no-graphs": 35,
    "step": 145,
}  # 535 s in all
QWEN = {"vocab_size": 151_936, "max_position_embeddings": 4096, "num_key_value_heads": 2, "scale": 0.02}
SHAPES = {
    "0.5b": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                    "head_dim": 64},
    "1.5b": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                    "num_attention_heads": 12, "head_dim": 128},
}  # fmt: skip
Row = tuple[str, str]


def install_missing() -> None:
    """pydantic and pytest from `wheels/`, where they are missing.

    Raises:
        SystemExit: one is missing, and so are the wheels.
    """
    missing = [name for name in ("pydantic", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        if not WHEELS.is_dir():
            raise SystemExit(f"{', '.join(missing)}: not installed, and no {WHEELS}; run `make wheels` where pip works")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(WHEELS)]
        subprocess.run([*command, *missing], check=True)


def model_folder(work: Path, size: str, tiny: bool) -> Path:
    """A random model of a size, made once."""
    from tests.tiny import make_tiny_model

    folder = work / size
    if not (folder / "tokenizer.json").is_file():
        make_tiny_model(folder, "qwen2", **({"max_position_embeddings": 4096} if tiny else SHAPES[size]))
    return folder


def peak_gib() -> float:
    """Of the GPU's memory, since the last call."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def tests(work: Path, arguments: argparse.Namespace) -> list[Row]:
    """The tests marked gpu."""
    options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", *options, "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    if done.returncode or ("skipped" in done.stdout and not arguments.cpu):
        raise SystemExit("the GPU tests failed, or found no GPU")
    return [("GPU tests", done.stdout.strip().splitlines()[-1].strip("= "))]


def engines(work: Path, arguments: argparse.Namespace) -> list[Row]:
    """Tokens per second of both engines at one size, after a short warm-up."""
    import torch

    size = arguments.part.removeprefix("engine-")
    folder = model_folder(work, size, arguments.cpu)
    device, dtype = ("cpu", torch.float32) if arguments.cpu else ("cuda", torch.bfloat16)
    prompts, prompt_tokens, members, tokens = (2, 8, 2, 4) if arguments.cpu else (64, 128, 4, 256)
    ids = torch.randint(5, 100, (prompts, prompt_tokens), generator=torch.Generator().manual_seed(0))
    rows = []
    for name, generate in (("native", native), ("transformers", transformers)):
        draw = generate(folder, ids, members, device, dtype)
        draw(4)
        peak_gib()
        begin = time.perf_counter()
        drawn = draw(tokens)
        seconds = time.perf_counter() - begin
        assert drawn == prompts * members * tokens, (name, drawn)
        rate = f"{drawn / seconds:,.0f} tokens/s ({seconds:.1f} s), peak {peak_gib():.1f} GiB"
        rows.append((f"{name}, {size}, {prompts} x {members} completions of {tokens} tokens", rate))
        del draw
        if not arguments.cpu:
            torch.cuda.empty_cache()
    return rows


def native_engine(folder, rows, device, dtype):
    """The native engine, by pages on a CPU too."""
    from atomrl.models.loading import load_tokenizer
    from atomrl.rollout.decode_step import PlainOps
    from atomrl.rollout.native import NativeEngine
    from atomrl.rollout.requests import EngineOptions

    options = EngineOptions(dtype, device, max_concurrent_completions=rows)
    ops = PlainOps() if device == "cpu" else None
    return NativeEngine.from_pretrained(str(folder), load_tokenizer(str(folder)), options, ops=ops)


def native(folder, ids, members, device, dtype):
    """The native engine, as a function of the number of tokens that counts what it drew."""
    return drawer(native_engine(folder, len(ids) * members, device, dtype), ids, members)


def drawer(engine, ids, members):
    """An engine of ours, likewise."""
    from atomrl.rollout.generate import generate as complete
    from atomrl.types import Prompt, Sample, SamplingParams

    prompts = [
        Prompt(prompt_id=str(n), sample=Sample(sample_id=str(n), prompt="", ground_truth=""), token_ids=tuple(row))
        for n, row in enumerate(ids.tolist())
    ]

    def draw(tokens: int) -> int:
        sampling = SamplingParams(completions_per_prompt=members, max_completion_tokens=tokens, ignore_eos=True)
        return sum(drawn.response_tokens for drawn in complete(engine, prompts, sampling))

    return draw


def decode(work: Path, arguments: argparse.Namespace) -> list[Row]:
    """Decode steps of the native engine at 1.5B: their time, their kernels, and whether graphs are replayed."""
    import torch

    from atomrl.protocols import Adapter, WeightUpdate

    folder = model_folder(work, "1.5b", arguments.cpu)
    device, dtype = ("cpu", torch.float32) if arguments.cpu else ("cuda", torch.bfloat16)
    prompts, prompt_tokens, members, tokens = (2, 8, 2, 24) if arguments.cpu else (64, 128, 4, 256)
    ids = torch.randint(5, 100, (prompts, prompt_tokens), generator=torch.Generator().manual_seed(0))
    engine = native_engine(folder, prompts * members, device, dtype)
    if arguments.part == "native-adapters":
        sizes = {name: shape for name, shape in engine.weight_shapes().items() if name.endswith("_proj.weight")}
        adapters = {
            name: Adapter(torch.randn(32, shape[1]) * 0.01, torch.randn(shape[0], 32) * 0.01, 1.0)
            for name, shape in sizes.items()
        }
        engine.update_weights(WeightUpdate(1, adapters=adapters))
    if arguments.part == "native-no-graphs":
        engine.batch.graphs.capture = None
    draw = drawer(engine, ids, members)
    draw(tokens)  # kernels are compiled, graphs captured
    peak_gib()
    times = {}
    for count in (tokens // 4, tokens):  # the difference is decode steps alone
        begin = time.perf_counter()
        draw(count)
        times[count] = time.perf_counter() - begin
    step_s = (times[tokens] - times[tokens // 4]) / (tokens - tokens // 4)
    few, many = (kernels_of(lambda count=count: draw(count), device) for count in (8, 24))
    kernels, graphs = ((after - before) / 16 for before, after in zip(few, many, strict=True))
    what = f"{arguments.part}, 1.5b, {prompts * members} rows"
    kind = f"{type(engine.batch.step.ops).__name__}, graphs {'on' if engine.batch.graphs.capture else 'off'}"
    return [
        (f"{what}: whole", f"{prompts * members * tokens / times[tokens]:,.0f} tokens/s, peak {peak_gib():.1f} GiB"),
        (f"{what}: decode step", f"{1000 * step_s:.2f} ms, {kernels:.0f} kernels, {graphs:.2f} graphs ({kind})"),
    ]


def kernels_of(action, device: str) -> tuple[int, int]:
    """Kernels that ran on the GPU meanwhile, and graphs that were launched."""
    from torch.profiler import ProfilerActivity, profile

    if device == "cpu":
        action()
        return 0, 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        action()
    events = found.key_averages()
    kernels = sum(event.count for event in events if event.device_type.name == "CUDA")
    return kernels, sum(event.count for event in events if event.key == "cudaGraphLaunch")


def transformers(folder, ids, members, device, dtype):
    """`generate` of transformers, likewise."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ids = ids.to(device)

    def draw(tokens: int) -> int:
        settings = {"do_sample": True, "top_k": 0, "num_return_sequences": members, "pad_token_id": 0}
        with torch.no_grad():
            rows = model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, **settings
            )
        return sum(map(len, rows[:, ids.shape[1] :].tolist()))  # a list waits for the device

    return draw


def step(work: Path, arguments: argparse.Namespace) -> list[Row]:
    """Two GRPO steps of the 24 GB config: seconds of the second by phase, and the peak of memory."""
    import torch

    from atomrl.cli.main import main as atomrl

    if not arguments.cpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.limit_gb * 2**30 / total))
    settings = {
        "model.path": model_folder(work, "1.5b", arguments.cpu),
        "output_dir": work / "runs",
        "run_name": "step",
        "data.train": "countdown",
        "data.train_size": 1000,
        "data.eval": "null",
        "data.eval_size": "null",
        "data.answer_pattern": "null",
        "data.prompt_field": "prompt",
        "data.answer_field": "ground_truth",
        "train.steps": 2,
        "eval.every_steps": 0,
        "checkpoint.every_steps": 0,
        "rollout.min_completion_tokens": 640,
    }
    if arguments.cpu:
        settings |= {"rollout.min_completion_tokens": 8, "rollout.max_completion_tokens": 8,
                     "rollout.prompts_per_step": 2, "train.rows_per_update": 8}  # fmt: skip
    code = atomrl(["train", str(CONFIG), *(f"{key}={value}" for key, value in settings.items())])
    if code:
        raise SystemExit(code)
    lines = (work / "runs/step/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    last = [row for row in metrics if "timing_s/step" in row][-1]
    rows = [
        (f"GRPO step, {name.removeprefix('timing_s/')}", f"{value:.2f} s")
        for name, value in last.items()
        if name.startswith("timing_s/")
    ]
    # A run says the peak of each step and begins the next at nothing: what is asked of torch now is after the last one.
    used, held = (
        max(row.get(f"perf/max_memory_{what}_gb", 0.0) for row in metrics) for what in ("allocated", "reserved")
    )
    return [*rows, ("GRPO step, peak memory", f"{used:.1f} GiB used, {held:.1f} GiB held")]


PARTS = {"tests": tests, "engine-0.5b": engines, "engine-1.5b": engines, "native": decode, "native-adapters": decode,
         "native-no-graphs": decode, "step": step}  # fmt: skip


def run_part(part: str, work: Path, arguments: argparse.Namespace) -> tuple[list[Row], bool]:
    """A part in a process of its own: its rows, and whether it went through."""
    command = [sys.executable, __file__, "--part", part, "--work", str(work), "--limit-gb", str(arguments.limit_gb)]
    command += ["--cpu"] if arguments.cpu else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin = time.perf_counter()
    try:
        code = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=LIMITS_S[part]).returncode
        failure = f"failed with {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"ended after its {LIMITS_S[part]} s"
    file = work / f"{part}.json"
    rows = [tuple(row) for row in json.loads(file.read_text())] if file.is_file() else []
    print(f"{part}: {failure or 'done'} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)
    return [*rows, *([(part, f"**{failure}**")] if failure else [])], not failure


def machine(cpu: bool) -> str:
    """One line: the device and the versions."""
    import torch
    import transformers

    device = "CPU, tiny shapes: no figures" if cpu else torch.cuda.get_device_name()
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{device}; Python {python}, torch {torch.__version__}, transformers {transformers.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="every part at tiny shapes, to try the script")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit-gb", type=float, default=24.0, help="GiB that the step may hold")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        rows = PARTS[arguments.part](arguments.work, arguments)
        (arguments.work / f"{arguments.part}.json").write_text(json.dumps(rows))
        return 0
    install_missing()
    import torch

    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --cpu tries every part at tiny shapes")
    with tempfile.TemporaryDirectory() as work:
        results = [run_part(part, Path(work), arguments) for part in arguments.parts]
    table = [f"{machine(arguments.cpu)}\n", "| | |", "|---|---|"]
    table += [f"| {what} | {figure} |" for rows, _ in results for what, figure in rows]
    arguments.out.write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table))
    return 0 if all(passed for _, passed in results) else 1


if __name__ == "__main__":
    sys.exit(main())
