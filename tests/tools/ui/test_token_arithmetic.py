"""A token's loss, made again from its record, is the one that the algorithm computed; or what it lacks is said."""

from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import ALGORITHMS
from atomrl.batches import flat_fields
from atomrl.config.objective import objective_in
from atomrl.protocols import ModelOutputs
from atomrl.tools.ui.answers import substitute, token
from tests.algorithms.batches import make_rows, moved_logprobs, training_batch, with_turns
from tests.tracking.helpers import make_config

APART = {"gkd": "the teacher's distributions", "kl_cov": "kl_cov"}
"""Whose loss is made of what is not recorded of a token."""
TURNS = {"gigpo"}


def recorded(objective, rows):
    """Return the record of the first completion, as `TokenRecorder` gets it from the loss."""
    batch = training_batch(objective, rows)
    logprobs = moved_logprobs(rows)[:, : batch.tokens.shape[1]].requires_grad_()
    weights = batch.loss_weights.detach().requires_grad_()
    given = {"logprobs": logprobs}
    if "values" in objective.outputs:
        given["values"] = batch.values + 0.1
    if "entropy" in objective.outputs:
        given["entropy"] = batch.old_entropy
    loss = objective.loss(ModelOutputs(**given), replace(batch, loss_weights=weights)).loss
    loss.backward()
    columns = {name: values for name, values in flat_fields(batch).items() if isinstance(values, torch.Tensor)}
    columns |= {"logprobs": logprobs.detach(), "loss": weights.detach() * weights.grad, "gradient": logprobs.grad}
    columns["entropy"] = batch.old_entropy
    shape = batch.tokens.shape
    inside = slice(int(batch.prompt_lengths[0]), int(batch.lengths[0]))
    return {name: values[0, inside].tolist() for name, values in columns.items() if values.shape == shape}, batch


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_makes_the_loss_again_that_it_recorded_or_says_why_not(tmp_path, name):
    config = make_config(tmp_path, algorithm={"name": name})
    objective = objective_in(config)
    rows = make_rows(groups=2)
    rows = with_turns(rows) if name in TURNS else rows
    if name in APART:
        columns = {"loss_mask": [True], "logprobs": [-1.0], "old_logprobs": [-1.0], "advantages": [1.0]}
        told = token(config, columns | {"loss_weights": [0.1]}, 0, 1.0, [1.0, 0.0], {})
        assert APART[name] in told["why"] and told["agrees"] is None
        return
    columns, batch = recorded(objective, rows)
    rewards = rows.rewards[rows.group_ids == rows.group_ids[0]].tolist()
    for at in [place for place, trained in enumerate(columns["loss_mask"]) if trained][:3]:
        told = token(config, columns, at, float(rows.rewards[0]), rewards, dict(batch.state))
        lines = {line["name"]: line for line in told["lines"]}
        assert lines["gradient"]["value"] == pytest.approx(columns["gradient"][at], rel=1e-4, abs=1e-9)
        if objective.has_critic:
            assert lines["loss"]["value"] + lines["critic"]["value"] == pytest.approx(columns["loss"][at], rel=1e-4)
        else:
            assert told["agrees"] is True
            assert lines["loss"]["value"] == pytest.approx(columns["loss"][at], rel=1e-3, abs=1e-6)


def test_numbers_stand_where_the_equation_has_symbols(tmp_path):
    config = make_config(tmp_path, algorithm={"name": "grpo", "kl": {"coefficient": 0.5}})
    columns = {
        "loss_mask": [True, True], "logprobs": [-0.5, -1.0], "old_logprobs": [-0.75, -1.0],
        "ref_logprobs": [-0.5, -1.0], "advantages": [1.0, 1.0], "loss_weights": [0.25, 0.25], "loss": [-0.3, -0.25],
        "gradient": [0.0, -0.25],
    }  # fmt: skip
    told = token(config, columns, 0, 1.0, [1.0, 0.0], {})
    lines = {line["name"]: line["numbers"] for line in told["lines"]}
    assert lines["ratio"] == "0.6065 / 0.4724"
    assert lines["advantage"] == "(1 - 0.5) / (0.7071 + 1e-6)"
    assert lines["policy_term"] == "min(1.284 · 1, clip(1.284, 1 - 0.2, 1 + 0.2) · 1)"
    assert lines["weight"] == "1 / 4" and lines["loss"] == "- 0.25 · [1.2 - 0.5 · 0]"
    assert told["agrees"] is True and "maximise" in told["equation"]
    assert token(config, columns | {"loss": [-0.4, 0]}, 0, 1.0, [1.0, 0.0], {})["agrees"] is False


def test_objectives_without_a_token_loss_are_reported(tmp_path):
    dpo = make_config(tmp_path, algorithm={"name": "online_dpo"})
    assert "whole completions" in token(dpo, {"loss_mask": [True]}, 0, None, [], {})["why"]
    grpo = make_config(tmp_path, algorithm={"name": "grpo"})
    assert "not trained on" in token(grpo, {"loss_mask": [False], "logprobs": [0.0]}, 0, None, [], {})["why"]
    trpo = make_config(tmp_path, algorithm={"name": "trpo"})
    assert "its own update" in token(trpo, {"loss_mask": [True]}, 0, None, [], {})["why"]


def test_a_text_without_symbols_is_left_out():
    assert substitute("[t in a random sample]", {"A": 1.0}) is None
    assert substitute("A log pi(a_t)", {"A": -1.5, "log pi(a_t)": -0.25}) == "(-1.5) · (-0.25)"
