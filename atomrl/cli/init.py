"""`atomrl init`: create a project folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from atomrl.cli.main import Run
from atomrl.common.files import new_folder, write_jsonl, write_text

REWARDS = '''"""Reward functions: they get lists, and return a list with the reward of each completion.

Every column of the data is passed by its name; `ground_truth` is the answer.
"""

import re


def correct(prompts, completions, ground_truth, **columns):
    """1 if the text between <answer> and </answer> is the ground truth, else 0."""
    return [float(answer(text) == str(truth)) for text, truth in zip(completions, ground_truth)]


def short(prompts, completions, **columns):
    """Penalty on length: 0 to -1 at 200 characters, so that of two correct answers the shorter one is better."""
    return [-min(1.0, len(text) / 200) for text in completions]


def answer(text):
    """Return the text in the last <answer>...</answer>, or None."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return answers[-1].strip() if answers else None
'''
TEST = '''"""Tests of the rewards: python -m pytest."""

from rewards import correct, short


def test_only_the_right_answer_counts():
    texts = ["<answer>7</answer>", "<answer> 8 </answer>", "7", "<answer>8</answer> or <answer>7</answer>"]
    assert correct(["?"] * 4, texts, ground_truth=["7"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_shorter_is_better():
    long, brief = short(["?"] * 2, ["x" * 500, "x" * 20])
    assert long == -1.0 and brief == -0.1
'''
WARM_START = """# A small GPT from scratch imitates demonstrations of the built-in task `chain`: half a minute on a CPU.
run_name: warm-start
model: {dtype: float32}
data: {train: chain, train_size: 20000}
sft:
  gpt: {layers: 2, hidden: 64, heads: 2, intermediate: 512, max_tokens: 512}
train:
  steps: 1000
  rows_per_update: 64
  tokens_per_micro_batch: 1536
  learning_rate: 4.0e-3
  schedule: cosine
  warmup_ratio: 0.05
  min_lr_ratio: 0.05
  adam_beta2: 0.98
"""
OF_FRESH = """  kl: {coefficient: 0.1}
train:
  steps: 60
  tokens_per_micro_batch: 1536
  learning_rate: 1.0e-3  # of a GPT of 0.2 million weights
  schedule: cosine
  warmup_ratio: 0.05
  min_lr_ratio: 0.1
  adam_eps: 3.0e-3
"""
OF_MODEL = """train:
  steps: 60
  learning_rate: 1.0e-6
"""
GRPO = """# GRPO on your data with your rewards. Keys: docs/reference/config.md; the equation: atomrl explain grpo.yaml
run_name: grpo
model:
  path: {model}
data:
  train: data/train.jsonl  # rows with prompt, ground_truth, and any columns that the rewards want
  eval: data/eval.jsonl
rollout:
  prompts_per_step: 64
  completions_per_prompt: 8
  max_completion_tokens: {tokens}
reward:
  functions:
    - ./rewards.py:correct
    # - {{function: ./rewards.py:short, weight: 0.1}}
algorithm:
  name: grpo
{rest}eval:
  every_steps: 20
  temperature: 0.0
"""
README = """# {name}

    {first}atomrl train grpo.yaml                # GRPO; results are in runs/grpo
    atomrl doctor runs/grpo               # diagnose the run
    atomrl rollouts runs/grpo             # completions and their rewards
    python -m pytest                      # test the rewards

Before a long run: `atomrl plan grpo.yaml --probe` says whether it fits and how long it takes, `atomrl reward
./rewards.py:correct FILE` scores a file of completions.

| file | what it is |
|---|---|
| `grpo.yaml` | the run; `atomrl train grpo.yaml train.steps=200 run_name=longer` changes keys |
{warm}| `rewards.py` | the reward functions; `test_rewards.py` tests them |
| `data/` | problems, one JSON object per line; replace them with yours |
"""
PROBLEMS, HELD_OUT = 4000, 200


def add_init(parser: argparse.ArgumentParser) -> Run:
    """Create a project folder: configs, a reward, data, a test. It runs at once, on a CPU.

    atomrl init my-project
    atomrl init my-project --model Qwen/Qwen2.5-0.5B-Instruct   # or a folder
    """
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--model", metavar="MODEL", help="model to train: a folder or a hub name (default: a tiny GPT)")
    return make_project


def resolve_model(name: str) -> str:
    """Return a hub name as it is, and the absolute path of a folder, so that the project can be moved.

    Raises:
        ConfigError: the folder does not exist, or has no causal language model.
    """
    from atomrl.models.loading import model_config_only
    from atomrl.models.transformers_model import check_causal

    if not Path(name).is_dir() and name.count("/") < 2 and not name.startswith((".", "/", "~")):
        return name
    check_causal(model_config_only(name), name)
    return str(Path(name).resolve())


def make_project(arguments: argparse.Namespace) -> int:
    """Write the project's files."""
    from atomrl.data.tasks import generate

    splits: tuple[tuple[Literal["train", "eval"], int], ...] = (("train", PROBLEMS), ("eval", HELD_OUT))

    fresh = arguments.model is None
    model = "runs/warm-start/model" if fresh else resolve_model(arguments.model)
    with new_folder(arguments.folder) as folder:
        files = {
            "rewards.py": REWARDS,
            "test_rewards.py": TEST,
            "grpo.yaml": GRPO.format(
                model=f"{model}\n  dtype: float32" if fresh else model,
                tokens=48 if fresh else 256,
                rest=OF_FRESH if fresh else OF_MODEL,
            ),
            "README.md": README.format(
                name=arguments.folder.name,
                first="atomrl train warm_start.yaml          # makes the model, from scratch\n    " if fresh else "",
                warm="| `warm_start.yaml` | makes the tiny GPT that it starts from |\n" if fresh else "",
            ),
            ".gitignore": "runs/\n__pycache__/\n",
        } | ({"warm_start.yaml": WARM_START} if fresh else {})
        for name, text in files.items():
            write_text(folder / name, text)
        (folder / "data").mkdir()
        for split, size in splits:
            write_jsonl(generate("chain", size, 0, split), folder / "data" / f"{split}.jsonl")
    print(f"created {arguments.folder}; next:\n\n    cd {arguments.folder}")
    print(
        *([line for line in ["    atomrl train warm_start.yaml"] if fresh] + ["    atomrl train grpo.yaml"]), sep="\n"
    )
    return 0
