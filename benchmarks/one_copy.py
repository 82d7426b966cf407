"""Measure the memory of a run with adapters, part by part, beside the estimate of `atomrl plan`.

    python benchmarks/one_copy.py [--layers 24] [--bases float32 int8 nf4]

Trains a step of GRPO on a random model of 300M weights on a CPU, each base in a process of its own. Printed are the
bytes of all tensors after a transfer to the engine, each storage once (`held`; `stays` is its estimate), and the peak
of the process's resident memory from then on (`peak`; `planned`), beyond that of a process that has only imported
everything. It uses public names alone, so it also runs on older commits (PYTHONPATH), which hold the base twice.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # after PYTHONPATH

import torch

ROWS, PROMPT, LIMIT = 4, 16, 8


def model_of(folder: Path, layers: int) -> Path:
    """Save a Llama with random weights in float32, and a tokenizer of its letters."""
    from tests.tiny import make_tiny_model

    shape = {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "tie_word_embeddings": False,
    }  # fmt: skip
    return make_tiny_model(folder, scale=0.02, **shape)


def config_of(folder: Path, base: str) -> dict[str, Any]:
    """Return the config of the run."""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?", "ground_truth": "1"}}\n' for n in range(4)))
    return {
        "run_name": base,
        "output_dir": str(folder / "runs"),
        "model": {
            "path": str(folder / "model"), "lora": {"rank": 16}, "dtype": "float32", "device": "cpu",
            "quantization": None if base == "float32" else base, "gradient_checkpointing": True,
        },
        "data": {"train": str(folder / "rows.jsonl"), "max_prompt_tokens": PROMPT},
        "rollout": {
            "prompts_per_step": 2, "completions_per_prompt": ROWS // 2, "max_completion_tokens": LIMIT,
            "min_completion_tokens": LIMIT, "engine": "native",
        },
        "train": {"steps": 1, "tokens_per_micro_batch": 256},
        "eval": {"before": False, "after": False},
        "tracking": {"save_rollouts": False},
        "algorithm": {"name": "grpo"},
    }  # fmt: skip


def tensor_bytes() -> int:
    """Sum the bytes of all tensors of this process, each storage once."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    sizes = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if not each.is_mkldnn
    }
    return sum(sizes.values())


def measure(folder: Path, base: str) -> dict[str, int]:
    """Train in this process; return bytes."""
    import bitsandbytes  # noqa: F401  (imported first, so that it counts as an import)
    import peft  # noqa: F401

    import atomrl
    from atomrl.common.memory import process_memory
    from atomrl.trainer import rl

    imported, held = process_memory("VmRSS"), list[int]()
    transfer = rl.InProcessTransfer.__call__

    def counted(self: Any, version: int) -> None:
        transfer(self, version)
        gc.collect()
        held.append(tensor_bytes())
        if len(held) == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again: without that of loading

    rl.InProcessTransfer.__call__ = counted  # type: ignore[method-assign]
    config = config_of(folder, base)

    def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        return [len(set(text)) / (1 + len(text)) for text in completions]

    atomrl.train(config, reward=reward)
    from atomrl.config import load_config
    from atomrl.planner import planning
    from atomrl.trainer.build import algorithm_of

    loaded = load_config(config | {"reward": {"functions": [{"function": "strict_math"}]}})
    plan = planning.memory_by_phase(loaded, algorithm_of(loaded), device="cpu")
    planned = plan.resident + max(plan.phases.values())
    return {"held": held[0], "stays": plan.resident, "peak": process_memory("VmHWM") - imported, "planned": planned}


def main() -> None:
    """Measure each base in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--bases", nargs="+", default=["float32", "int8", "nf4"])
    parser.add_argument("--inside", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(Path(arguments.inside), *arguments.bases)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model_of(Path(folder) / "model", arguments.layers)
        for base in arguments.bases:
            command = [sys.executable, __file__, "--inside", folder, "--bases", base]
            shown = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            )
            print(base, *(f"{name} {size / 2**20:.0f} MiB" for name, size in shown.items()), flush=True)


if __name__ == "__main__":
    main()
