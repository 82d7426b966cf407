"""A quantised base and 8-bit moments: what they save, what they change, and whether the policy learns as well.

    python benchmarks/quantization.py [--seeds 0 1 2] [--out FOLDER] [--model runs/quickstart-warm-start/model]

Three tables. The base in memory: a GPT of 20M parameters beneath adapters, against bfloat16, and the moments of a whole
one, against float32, with the milliseconds of a step. The error of merging: what merging loses. The quickstart's task
with adapters, from its warm start (`make quickstart` first): accuracy before and after, and the largest distance of
engine and trainer (`training/rollout_probs_diff_mean`), of each kind and seed. What is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from atomrl.backends.optimizer import Optimizer
from atomrl.config import LoraConfig, TrainConfig
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_policy, load_transformers, save_model
from atomrl.models.lora import merge_adapters, save_adapters

ROOT = Path(__file__).parents[1]
LEARNING = ("train.learning_rate=3.0e-3", "train.adam_eps=1.0e-5", "model.lora={rank: 16}", "eval.every_steps=0")
"""Adapters take a higher rate than whole weights, and gradients that are that small a smaller epsilon."""
KINDS: dict[str, tuple[str, ...]] = {
    "adapters": (),
    "int8": ("model.quantization=int8",),
    "nf4": ("model.quantization=nf4",),
    "nf4, adamw8bit": ("model.quantization=nf4", "train.optimizer=adamw8bit"),
}


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def memory(folder: Path) -> None:
    """Bytes of the layers and of the whole base, and of the moments."""
    print(f"{'base':<16}{'layers':>12}{'of bfloat16':>13}{'all of it':>12}{'of bfloat16':>13}")
    sizes: dict[str, tuple[int, int]] = {}
    for kind in (None, "int8", "nf4"):
        policy = load_policy(folder, dtype=torch.bfloat16, lora=LoraConfig(rank=8), quantization=kind)
        own = {name: p for name, p in policy.named_parameters() if ".lora_" not in name}
        layers = nbytes(p for name, p in own.items() if ".base_layer." in name)
        sizes[kind or "bfloat16"] = layers, nbytes(own.values())
    for name, (layers, whole) in sizes.items():
        shares = layers / sizes["bfloat16"][0], whole / sizes["bfloat16"][1]
        print(f"{name:<16}{layers:>12,}{shares[0]:>13.3f}{whole:>12,}{shares[1]:>13.3f}")
    print(f"\n{'optimizer':<16}{'moments':>12}{'of float32':>13}{'ms a step':>12}")
    plain = 0
    for kind in ("adamw", "adamw8bit", *(["paged_adamw8bit"] if torch.cuda.is_available() else [])):
        model = load_policy(folder, dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
        optimizer = Optimizer("actor", model, TrainConfig(optimizer=kind), 1e-4, 10)
        for update in range(3):
            for weight in optimizer.weights.values():
                weight.grad = torch.full_like(weight, 1e-3)
            started = time.perf_counter()
            optimizer.step(update)
        seconds = time.perf_counter() - started
        held = nbytes(optimizer.state().values())
        plain = plain or held
        print(f"{kind:<16}{held:>12,}{held / plain:>13.3f}{1000 * seconds:>12.1f}")


def merging(folder: Path) -> None:
    """Print the errors that merging reports for adapters that add about a percent."""
    print(f"\n{'merged':<16}{'base off':>12}{'added':>13}{'rounding':>12}")
    for kind in (None, "int8", "nf4"):
        policy = load_policy(folder, dtype=torch.bfloat16, lora=LoraConfig(rank=8), quantization=kind)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0.0, 1.5e-3)
        with tempfile.TemporaryDirectory() as place:
            save_adapters(policy, place)
            _, error = merge_adapters(load_transformers(folder, torch.float32), place, torch.bfloat16)
        print(f"{kind or 'bfloat16':<16}{error.of_base:>12.2%}{error.added:>13.2%}{error.rounding:>12.2%}")
        del policy


def learning(model: Path, out: Path, seeds: list[int]) -> None:
    """The quickstart's task with adapters on each kind of base."""
    print(f"\n{'learning':<16}{'seed':>6}{'before':>9}{'after':>8}{'engine gap':>13}")
    for seed in seeds:
        for kind, settings in KINDS.items():
            name = f"{kind.replace(', ', '-')}-{seed}"
            folder = out / name
            if not (folder / "summary.json").exists():
                command = [sys.executable, "-m", "atomrl.cli.main", "train", str(ROOT / "configs/quickstart.yaml")]
                command += [f"run_name={name}", f"output_dir={out}", f"model.path={model}", f"seed={seed}"]
                with (out / f"{name}.log").open("w") as log:
                    subprocess.run([*command, *LEARNING, *settings], check=True, stdout=log, stderr=log)
            found = json.loads((folder / "summary.json").read_text())
            rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            gap = max(row.get("training/rollout_probs_diff_mean", 0.0) for row in rows)
            after = found["accuracy_after"]
            print(f"{kind:<16}{seed:>6}{found['accuracy_before']:>9.3f}{after:>8.3f}{gap:>13.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/quantization")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/quickstart-warm-start/model")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        save_model(new_gpt(vocab_size=2048, layers=6, hidden=512, heads=8), None, folder, dtype=torch.bfloat16)
        memory(folder)
        merging(folder)
    learning(arguments.model, arguments.out, arguments.seeds)


if __name__ == "__main__":
    main()
