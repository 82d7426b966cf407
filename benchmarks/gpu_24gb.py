"""Does the configuration for Qwen2.5-1.5B on GSM8K fit one card of 24 GB? A few real steps under that limit.

    python benchmarks/gpu_24gb.py [--steps 3] [--limit-gb 24] [key=value ...]

The weights are random, of that model's shape, and the tokenizer has one token per character, so that nothing is
downloaded; problems are made (`countdown`), prompts padded by a long system prompt, and completions forced to their
full length, which is the worst case for memory. The allocator may not hold more than the limit. Prints seconds per
step by phase and the peak of memory; every setting of the config can be overridden as on the command line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from atomrl.cli.main import main as atomrl
from tests.tiny import make_tiny_model

CONFIG = Path(__file__).parents[1] / "configs/qwen2.5-1.5b-gsm8k-24gb.yaml"
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-gb", type=float, default=24.0, help="in GiB")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 thousand parameters, to try the script")
    arguments, overrides = parser.parse_known_args()
    cuda = torch.cuda.is_available()
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.limit_gb * 2**30 / total))
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", "qwen2", **({} if arguments.tiny else SHAPE | {"scale": 0.02}))
        settings = {
            "model.path": model,
            "output_dir": folder,
            "run_name": "fits",
            "data.train": "countdown",
            "data.train_size": 1000,
            "data.eval": "null",
            "data.eval_size": "null",
            "data.answer_pattern": "null",
            "data.prompt_field": "prompt",
            "data.answer_field": "ground_truth",
            "train.steps": arguments.steps,
            "eval.every_steps": 0,
            "checkpoint.every_steps": 0,
            "rollout.min_completion_tokens": 640,
        }
        given = {override.partition("=")[0] for override in overrides}
        options = [f"{key}={value}" for key, value in settings.items() if key not in given]
        code = atomrl(["train", str(CONFIG), *options, *overrides])
        if code:
            raise SystemExit(code)
        lines = (Path(folder) / "fits/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        print({name: round(value, 2) for name, value in row.items() if name.startswith(("step", "timing_s", "perf"))})
    if cuda:
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"{torch.cuda.get_device_name()}: peak {peak / 2**30:.2f} GiB used, {held / 2**30:.2f} GiB held")


if __name__ == "__main__":
    main()
