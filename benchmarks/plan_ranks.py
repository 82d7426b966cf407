"""Memory of a rank for models that do not fit into one GPU, with what each choice of the back end saves.

    python benchmarks/plan_ranks.py                      8 and 64 GPUs of 80 GB, Qwen2.5-7B, 32B and 72B
    python benchmarks/plan_ranks.py --row 32768 --gpus 16

The numbers are those that `atomrl train CONFIG --dry-run` prints (`trainer/memory.py`), for a config with rows of at
most `--row` tokens, a micro-batch of one row, bfloat16, gradient checkpointing, and no reference model. Of the logits
and what a layer's backward pass takes the larger is counted: they are never there at the same time. Nothing is
downloaded, and nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.algorithms import objective_of
from atomrl.config import RunConfig, load_config
from atomrl.trainer.memory import memory_estimate, peak_of

GB = 1e9
MODELS: Mapping[str, Mapping[str, Any]] = {
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "intermediate_size": 27648, "vocab_size": 152064},
    "72B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 29568, "vocab_size": 152064},
}  # fmt: skip
"""Qwen2.5: numbers of their config.json."""
CHOICES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as said": ({}, {}),
    "`reduce: update`": ({"reduce": "update"}, {}),
    "`replicas: 2`": ({"replicas": 2}, {}),
    "`sequence: 4`": ({"sequence": 4}, {}),
    "`cpu_offload: true`": ({"cpu_offload": True}, {}),
    "without checkpointing": ({}, {"gradient_checkpointing": False}),
    "`lora.rank: 16`": ({}, {"lora": {"rank": 16}}),
}
"""Changes of `backend` and of `model`."""


STATE = ("trainer weights", "gradients", "optimizer")
TRAINERS = (
    *STATE, "gathered embedding", "gathered layers", "activations", "log-prob chunk", "backward pass",
)  # fmt: skip


def config_of(folder: Path, row: int, backend: dict[str, Any], model: dict[str, Any]) -> RunConfig:
    """A run whose longest row is the only one of a micro-batch."""
    return load_config(
        {
            "run_name": "r",
            "model": {"path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True, **model},
            "data": {"train": "arithmetic", "max_prompt_tokens": 1},
            "rollout": {"max_completion_tokens": row - 1},
            "train": {"tokens_per_micro_batch": row},
            "backend": {"type": "fsdp", **backend},
        }
    )


def parts_of(folder: Path, row: int, gpus: int, backend: dict[str, Any], model: dict[str, Any]) -> dict[str, float]:
    """GB of a rank that trains, by what they are; `peak` is the most at once, `CPU` what lies in its memory."""
    config = config_of(folder, row, backend, model)
    found = memory_estimate(config, objective_of({"name": "grpo"}), gpus, "cuda")
    state = sum(found[name] for name in STATE)
    parts = {
        "state": state,
        "gathered": found["gathered embedding"] + found["gathered layers"],
        "activations": found["activations"],
        "logits": found["log-prob chunk"],
        "backward pass": found["backward pass"],
        "peak": peak_of({name: size for name, size in found.items() if name in TRAINERS}),
        "CPU": found.get("in the CPU's memory", 0),
    }
    return {name: size / GB for name, size in parts.items()}


CELLS = ("state", "gathered", "activations", "logits", "backward pass")


def folders(place: Path) -> Iterator[tuple[str, Path]]:
    """Each model's name, and a folder with its config."""
    from transformers import Qwen2Config

    for name, numbers in MODELS.items():
        Qwen2Config(**numbers, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]).save_pretrained(
            place / name
        )
        yield name, place / name


def tables(gpus: list[int], row: int, memory: float) -> Iterator[str]:
    """Lines of both tables, in Markdown."""
    with tempfile.TemporaryDirectory() as place:
        models = dict(folders(Path(place)))
        names = "weights, gradients, moments | gathered | activations | logits | a layer's backward pass"
        yield f"| GB of a GPU | GPUs | {names} | most at once |"
        yield "|---|---|---|---|---|---|---|---|"
        for name, folder in models.items():
            for count in gpus:
                found = parts_of(folder, row, count, {}, {})
                cells = [f"{found[part]:.1f}" for part in CELLS]
                yield f"| {name} | {count} | {' | '.join(cells)} | {verdict(found['peak'], memory)} |"
        yield ""
        yield f"| most at once, on {gpus[0]} GPUs | {' | '.join(models)} |"
        yield "|---|" + "---|" * len(models)
        for name, (backend, model) in CHOICES.items():
            found = [parts_of(folder, row, gpus[0], backend, model) for folder in models.values()]
            beside = [f", {each['CPU']:.0f} in the CPU's" if each["CPU"] else "" for each in found]
            cells = [verdict(each["peak"], memory) + more for each, more in zip(found, beside, strict=True)]
            yield f"| {name} | {' | '.join(cells)} |"


def verdict(peak: float, memory: float) -> str:
    """A tenth is left to the allocator and to NCCL."""
    return f"**{peak:.0f}**" if peak <= 0.9 * memory else f"{peak:.0f}, does not fit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--row", type=int, default=8192, help="tokens of the longest row")
    parser.add_argument("--memory", type=float, default=80.0, help="GB of a GPU")
    asked = parser.parse_args()
    for line in tables(asked.gpus, asked.row, asked.memory):
        print(line)


if __name__ == "__main__":
    main()
