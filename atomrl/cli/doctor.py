"""Say how a run went, what is wrong and what to try; without a run, what is installed and what will be used.

atomrl doctor runs/quickstart     # a run that is finished, under way, or was killed
atomrl doctor                     # this machine
atomrl doctor --engine sglang     # whether an engine works here, and what it lacks; with a config, for its model too

Exit code 1 where the doctor finds something.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

FOUND = 1
EXTRAS = {
    "peft": "adapters (model.lora)",
    "matplotlib": "atomrl plot, curves.png",
    "tensorboard": "tracking.sinks=[tensorboard]",
    "wandb": "tracking.sinks=[wandb]",
    "reasoning-gym": "data.train=reasoning_gym:NAME",
    "math-verify": "the boxed reward",
    "pyarrow": "Parquet files",
    "bm25s": "atomrl retriever",
    "faiss-cpu": "atomrl retriever --encoder",
}
"""Optional packages and what needs them."""
CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "pyyaml", "rich", "jaxtyping", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the folder of a run; none: this machine")
    parser.add_argument("--engine", metavar="NAME", help="whether this rollout engine works here; RUN may be a config")


def run(arguments: argparse.Namespace) -> int:
    if arguments.engine is not None:
        from atomrl.cli.engines import examine_engine

        return show([(arguments.engine, examine_engine(arguments.engine, arguments.run))])
    if arguments.run is not None:
        return examine_run(arguments.run)
    # Environment variables are never printed.
    return show((("installed", installed()), ("hardware", hardware()), ("will be used", used())))


def examine_run(folder: Path) -> int:
    """Print how a run went, the error that ended it, if one did, and all findings, from its folder."""
    from atomrl.doctor.hacks import quote
    from atomrl.doctor.watch import diagnose
    from atomrl.reading.lines import ReadError, metrics_of, read_mapping, read_metrics
    from atomrl.reading.outcome import completions_of, outcome
    from atomrl.reading.run import Run
    from atomrl.reading.state import FAILURE

    failure = read_mapping(folder / FAILURE, [])
    if failure:
        print(f"an error ended the run: {failure.get('error')}\n(all of it is in {folder / FAILURE})")
    rows = read_metrics(folder / "metrics.jsonl") if failure else metrics_of(folder)
    for number, row in enumerate(rows, start=1):
        if not is_row(row):
            raise ReadError(
                f"{folder}/metrics.jsonl, row {number}, is none of a run's: it needs a step and numbers, not "
                f"{str(row)[:80]}"
            )
    findings = diagnose(rows)
    run = Run(folder)
    print(*outcome(run), sep="\n")
    for finding in findings:
        print(replace(finding, quote=quote(finding.id, completions_of(run, finding.step))))
    if not findings and not failure:
        print("nothing is wrong that the doctor knows of")
    return FOUND if findings or failure else 0


def is_row(row: Any) -> bool:
    """Whether this is a step with metrics by name, each a number or null."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return all(value is None or isinstance(value, int | float) for value in row.values())


def show(parts: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> int:
    """Print names and texts under their titles; the exit status, by whether a text begins with `broken`."""
    broken = 0
    for title, lines in parts:
        for index, (name, text) in enumerate(lines):
            print(f"{title if index == 0 else '':<14}{name:<15} {text}")
            broken += text.startswith("broken")
    return FOUND if broken else 0


def installed() -> Iterator[tuple[str, str]]:
    """Versions of Python, of what AtomRL needs and of what it can use."""
    import platform

    from atomrl import __version__
    from atomrl.tracking.environment import installed_version

    yield "python", platform.python_version()
    yield "atomrl", __version__
    for package in CORE:
        yield package, installed_version(package) or f"broken: not installed (pip install {package})"
    for package, purpose in EXTRAS.items():
        yield package, installed_version(package) or f"not installed (pip install {package}); for {purpose}"


def hardware() -> Iterator[tuple[str, str]]:
    """CPU with the instructions that matter, cores, memory, GPUs, room on the disk."""
    import shutil

    import torch

    from atomrl.tracking.environment import describe_environment

    machine = describe_environment()
    yield "cpu", f"{machine['cpu']}, {machine['cpus']} cores, torch uses {torch.get_num_threads()} threads"
    yield "instructions", torch.backends.cpu.get_cpu_capability()
    yield "memory", f"{machine['memory_gib']} GiB, {available_gib():.1f} GiB available"
    unused = Path("/proc/driver/nvidia/version").exists()
    none = f"one is here, but torch {torch.__version__} cannot use it: install a CUDA build" if unused else "none"
    yield "gpu", "; ".join(machine["gpus"]) or none
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free here"


def available_gib() -> float:
    """Memory that a new process could take; NaN where the system does not say."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", path.read_text(encoding="utf-8")) if path.is_file() else None
    return int(found[1]) / 2**20 if found else float("nan")


def used() -> Iterator[tuple[str, str]]:
    """Device, dtype, engines and kernels of a run with the default config, each with the reason."""
    from atomrl.models.loading import compute_dtype
    from atomrl.rollout.kernel import load_kernels
    from atomrl.runs.build import device_name

    device = device_name()
    dtype = str(compute_dtype("auto", device)).removeprefix("torch.")
    has = "has" if dtype == "bfloat16" else "has no"
    yield "device", device
    yield "dtype", f"{dtype} (model.dtype=auto: this {device} {has} bfloat16 instructions)"
    yield "engine", "vLLM on a GPU where it is installed; else native for Llama, Qwen2 and Qwen3, hf for other models"
    yield "trainer", "one process, AdamW on float32 weights"
    if device == "cuda":
        yield "kernels", "torch's (the C++ kernels are for CPUs)"
    elif load_kernels() is not None:
        yield "kernels", "the C++ kernels: they compile here"
    else:
        yield "kernels", "torch's: the C++ kernels do not compile here (a g++ makes rollouts faster)"
