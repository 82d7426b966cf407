"""Searches, as in the quickstart of them, with vLLM: a run whose episodes have several turns."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.cli.main import main
from atomrl.data.tasks import generate as problems
from atomrl.tracking.reading.lines import read_metrics
from atomrl.trainer import sources as groups
from tests.distributed.test_episodes import BLOCK, largest_error, lengths_after_turns
from tests.tiny import make_tiny_model

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_search.yaml"
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """One that searches at random: each place of some problems is a search that is a token."""
    folder = make_tiny_model(tmp_path_factory.mktemp("searches") / "model", scale=0.2, head_dim=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chains = [row["chain"] for row in problems("places", 40, hops=[2])]
    tokenizer.add_tokens([f"<search>{name}</search>" for name in sorted({name for chain in chains for name in chain})])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loaded.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The trajectories that a run is trained on."""
    outputs, generate = [], groups.generate

    def kept(*args):
        outputs.append(generate(*args))
        return outputs[-1]

    monkeypatch.setattr(groups, "generate", kept)
    return outputs


@pytest.fixture
def cached(vllm, monkeypatch) -> dict[str, int]:
    """How many tokens of a turn's prompt vLLM had cached, in this process."""
    from vllm import LLMEngine

    counts, step = {}, LLMEngine.step

    def counted(self):
        outputs = step(self)
        counts.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(LLMEngine, "step", counted)
    return counts


@pytest.mark.parametrize("where", ["here", "actor"])
def test_a_run_of_searches_on_vllm(cached, drawn, model, tmp_path, where):
    """Training gets the sampled tokens, with the log-probs of the weights that sampled them."""
    small = [f"model.path={model}", f"output_dir={tmp_path}", "data.train_size=64", "data.eval=null"]
    small += ["data.max_prompt_tokens=160", "rollout.prompts_per_step=4", "rollout.completions_per_prompt=4"]
    small += ["rollout.max_completion_tokens=330", "environment.max_turn_tokens=40", "environment.max_reply_tokens=50"]
    small += [f"train.steps={STEPS}", "train.learning_rate=0.01", "train.warmup_ratio=0", "checkpoint.every_steps=1"]
    reward = "reward.functions=[{function: tests.distributed.test_replicas.even_tokens}]"
    small += [reward, "rollout.engine=vllm", "checkpoint.keep=9"]
    if where == "actor":
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed; `make distributed` has it")
        small += ["cluster={replicas: 1, timeout_s: 300, resources: {rollout: {num_cpus: 0.5}}}"]
    assert main(["train", str(CONFIG), *small]) == 0
    run = tmp_path / "quickstart-search"
    assert json.loads((run / "summary.json").read_text())["finished"]
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "training/rollout_probs_diff_max" in row]
    assert len(rows) == STEPS == len(drawn)
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 5e-5
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert [{part.policy_version for t in step for part in t.segments} - {None} for step in drawn] == [{0}, {1}, {2}]
    outputs = [item for step in drawn for item in step]
    turns = [len(item.episode.turns) for item in outputs]
    assert len(outputs) == 16 * STEPS and sum(turns) > 2 * len(outputs) and max(turns) > 3

    def trained(policy, version):
        if version:
            at = run / "checkpoints" / f"step_{version:06d}"
            policy.load_state_dict(AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64).state_dict())

    assert largest_error(str(model), outputs, trained) < 5e-5
    if where == "here":
        later = [(item, lengths_after_turns(item)[:-1]) for item in drawn[-1]]
        sizes = {f"{item.trajectory_id}#{n}": size for item, ends in later for n, size in enumerate(ends, start=1)}
        assert {name: cached[name] for name in sizes} == {n: (size - 1) // BLOCK * BLOCK for n, size in sizes.items()}
        assert any(size > BLOCK for size in sizes.values())
