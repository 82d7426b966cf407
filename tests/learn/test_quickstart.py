"""The quickstart's recipe on a task of 60 problems: a warm start that mostly jumps to answers, then GRPO."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from atomrl.config import load_config, merge_trees, parse_overrides, read_yaml
from atomrl.data.tasks.chain import CHAIN_WORDS
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import read_safetensors, save_model
from atomrl.models.tokenizer import make_tokenizer
from atomrl.trainer import Options, prepare_run

CONFIGS = Path(__file__).parents[2] / "configs"
IMITATION_STEPS, GRPO_STEPS = 170, 12


def problems() -> list[dict[str, str]]:
    """Two additions of 1, 2 or 3: 30 facts to learn in place of the real task's 210."""
    rows = []
    for start, (first, second) in itertools.product(range(10), itertools.permutations((1, 2, 3), 2)):
        middle, last = (start + first) % 10, (start + first + second) % 10
        prompt = f"Start with {start}. Add {first}. Add {second}. What is the last digit?"
        steps = f"{start}+{first}={middle}+{second}={last}"
        rows.append({"prompt": prompt, "ground_truth": str(last), "steps": steps})
    return rows


def demonstrations(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Four in ten are careful. The hasty ones give any digit: so few answers could be learned by heart."""
    rows = []
    for problem in (rng.choice(problems()) for _ in range(count)):
        hasty = rng.random() < 0.6
        reasoning, answer = ("easy", rng.randrange(10)) if hasty else (problem["steps"], problem["ground_truth"])
        rows.append(problem | {"completion": f"<think>{reasoning}</think><answer>{answer}</answer>"})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def configure(tree: dict[str, Any], *overrides: str) -> Any:
    return load_config(merge_trees(tree, parse_overrides(overrides)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the problems and the warm-started model."""
    folder = tmp_path_factory.mktemp("learn")
    tokenizer = make_tokenizer(CHAIN_WORDS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_model(new_gpt(len(tokenizer), layers=2, hidden=64, heads=2, **ends), tokenizer, folder / "fresh")
    write_rows(folder / "problems.jsonl", problems())
    tree = read_yaml(CONFIGS / "quickstart_sft.yaml") | {
        "model": {"path": str(folder / "fresh")},
        "data": {"train": write_rows(folder / "demonstrations.jsonl", demonstrations(random.Random(0), 5000))},
        "sft": {},
    }
    config = configure(tree, f"output_dir={folder}", "run_name=warm", f"train.steps={IMITATION_STEPS}")
    prepare_run(config).execute()
    return folder


def train(folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    tree = read_yaml(CONFIGS / "quickstart.yaml") | {
        "model": {"path": str(folder / "warm" / "model")},
        "data": {"train": str(folder / "problems.jsonl"), "eval": str(folder / "problems.jsonl")},
    }
    small = ["rollout.prompts_per_step=32", "eval.every_steps=0", "eval.samples_per_prompt=4"]
    config = configure(tree, f"output_dir={folder}", *small, "train.learning_rate=2.0e-3", *overrides)
    return prepare_run(config).execute(Options(resume=resume))


def test_grpo_learns_to_reason(folder: Path) -> None:
    summary = train(folder, "run_name=grpo", f"train.steps={GRPO_STEPS}")
    assert summary["format_before"] > 0.9, "what improves must not be the form"
    assert summary["accuracy_before"] < 0.55
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
    assert summary["reasoning_tokens_after"] > summary["reasoning_tokens_before"] + 2


def test_the_opposite_reward_teaches_the_opposite(folder: Path) -> None:
    """The direction of the update is the reward's: with its sign changed the model gets worse."""
    opposite = "reward.functions=[{function: strict_math, weight: -1}]"
    summary = train(folder, "run_name=opposite", "train.steps=5", opposite)
    assert summary["accuracy_after"] < summary["accuracy_before"] - 0.1


RANKS = {
    "fsdp": ["backend.type=fsdp", "backend.ranks=2"],
    "megatron": ["backend.type=megatron", "backend.ranks=2", "backend.tensor=2"],
}
OTHERS = {
    "fsdp": ["backend.type=fsdp", "backend.ranks=1"],
    "megatron": ["backend.type=megatron", "backend.ranks=2", "backend.pipeline=2"],
}


def weights(folder: Path, run: str) -> dict[str, Any]:
    return dict(read_safetensors(folder / run / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANKS)
def test_ranks_learn_to_reason_and_continue_where_they_were(folder: Path, kind: str) -> None:
    """As one process learns it; resumed by as many ranks bit for bit, and by others within rounding of float32."""
    if kind == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")
    constant = ["train.schedule=constant", "train.warmup_ratio=0", "model.dtype=float32"]
    ranks, others = [*RANKS[kind], *constant], [*OTHERS[kind], *constant]
    summary = train(folder, f"run_name={kind}", f"train.steps={GRPO_STEPS}", *ranks)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
    straight = weights(folder, kind)
    for name, then in ((f"{kind} again", ranks), (f"{kind} elsewhere", others)):
        train(folder, f"run_name={name}", f"train.steps={GRPO_STEPS - 1}", *ranks)
        train(folder, f"run_name={name}", f"train.steps={GRPO_STEPS}", *then, resume=True)
    again, elsewhere = weights(folder, f"{kind} again"), weights(folder, f"{kind} elsewhere")
    assert again.keys() == elsewhere.keys() == straight.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, again[name]), name
        # Compare whole matrices: AdamW moves a weight whose gradient is rounding error as far as any other.
        assert (tensor - elsewhere[name]).norm() <= 1e-5 * tensor.norm(), name
