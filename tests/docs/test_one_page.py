"""The one-page example runs as it stands, and its pieces do what they say."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atomrl.data.tasks.chain import CHAIN_WORDS
from atomrl.models.gpt import GPT, new_gpt
from atomrl.models.tokenizer import make_tokenizer

PAGE = Path(__file__).parents[2] / "examples" / "one_page_grpo.py"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return runpy.run_path(str(PAGE))


@pytest.fixture
def model() -> GPT:
    return new_gpt(len(make_tokenizer(CHAIN_WORDS)), layers=1, hidden=32, heads=1, eos_token_id=1, pad_token_id=0)


def test_the_page_runs(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--imitation-steps", "2", "--grpo-steps", "1", "--held-out", "4"]
    monkeypatch.setattr(sys, "argv", [str(PAGE), *arguments])
    page["main"]()
    printed = capsys.readouterr().out
    assert "Before GRPO: accuracy" in printed and "After GRPO: accuracy" in printed


def test_it_is_a_page() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 160


def test_a_completion_counts_up_to_its_end(page: dict[str, Any], model: GPT) -> None:
    tokens = torch.tensor([[5, 6, 7, 1, 0, 0], [5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 9]])
    logprobs, mask = page["logprobs_and_mask"](model, tokens, prompt_tokens=2, eos=1)
    assert mask.int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    expected = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs[:, 1:], expected * mask[:, 1:])


def test_right_completions_become_likelier(page: dict[str, Any], model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of plain gradient descent on GRPO's loss, with completions and rewards that are given."""
    rng, tokenizer = random.Random(0), make_tokenizer(CHAIN_WORDS)
    kept: dict[str, Any] = {}

    def sample(model: GPT, prompts: torch.Tensor, eos: int) -> torch.Tensor:
        texts = ["<think>easy</think><answer>1</answer><|end|>", "<think>easy</think><answer>2</answer><|end|>"]
        endings = torch.tensor(tokenizer(texts)["input_ids"])
        kept["tokens"] = torch.cat([prompts, endings.repeat(len(prompts) // 2, 1)], dim=1)
        return kept["tokens"]

    def score(tokenizer: Any, tokens: torch.Tensor, prompt_tokens: int, problems: list) -> tuple[torch.Tensor, list]:
        kept["prompt_tokens"] = prompt_tokens
        return torch.tensor([1.0, 0.0] * (len(tokens) // 2)), []

    monkeypatch.setitem(page["grpo"].__globals__, "sample", sample)
    monkeypatch.setitem(page["grpo"].__globals__, "score", score)
    loss, reward, _ = page["grpo"](model, tokenizer, rng, prompts_per_step=3, completions_per_prompt=2)
    assert reward == 0.5

    def totals() -> torch.Tensor:
        logprobs, _ = page["logprobs_and_mask"](model, kept["tokens"], kept["prompt_tokens"], tokenizer.eos_token_id)
        return logprobs.sum(1).detach()

    before = totals()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    change = totals() - before
    assert (change[0::2] > change[1::2]).all()
