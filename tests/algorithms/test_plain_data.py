"""An algorithm is plain data, with rewards at any token and functions of one's own on its axes."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import ALGORITHMS, objective_of
from atomrl.common.metrics import Max, Mean, Sum, merge, values
from atomrl.objectives import PolicyObjective
from atomrl.objectives.explain import table
from tests.algorithms.batches import LIMIT, loss_gradient, make_rows, moved_logprobs, training_batch
from tests.objectives.test_numbers import two_rows

THERE = """
import pickle, sys
from tests.algorithms.batches import loss_gradient, training_batch
for name, algorithm, rows, logprobs in pickle.load(sys.stdin.buffer):
    loss, gradient = loss_gradient(algorithm, training_batch(algorithm, rows), logprobs)
    print(name, loss.hex(), gradient.sum().item().hex())
"""


def test_every_algorithm_gives_the_same_loss_to_the_last_bit_in_a_fresh_process():
    rows, here, sent = make_rows(), [], []
    logprobs = moved_logprobs(rows)
    for name in ALGORITHMS:
        algorithm = objective_of({"name": name}).resolved(max_completion_tokens=LIMIT)
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm
        loss, gradient = loss_gradient(algorithm, training_batch(algorithm, rows), logprobs)
        here.append(f"{name} {loss.hex()} {gradient.sum().item().hex()}")
        sent.append((name, algorithm, rows, logprobs))
    completed = subprocess.run([sys.executable, "-c", THERE], input=pickle.dumps(sent), capture_output=True, check=True)
    assert completed.stdout.decode().splitlines() == here


def advantages(rows, **axes):
    return PolicyObjective().override(axes).resolved().advantages(rows).advantages


def test_rewards_at_a_token_count_where_they_were_given_and_in_the_total():
    """Rewards 1 and 0, and 2 for the second row's first token; the return from its second token on has none of it."""
    given = torch.zeros(2, 4, dtype=torch.float64)
    given[1, 1] = 2.0
    rows = two_rows(token_rewards=given)
    returns = torch.tensor([1, 1, 2, 0, 0], dtype=torch.float64)
    actual = advantages(rows, advantage={"type": "reinforce_pp", "eps": 0.0})[rows.loss_mask]
    torch.testing.assert_close(actual, (returns - returns.mean()) / returns.std())
    assert advantages(rows, advantage="raw")[:, 1].tolist() == [1, 2]
    assert advantages(rows, advantage="rloo")[:, 1].tolist() == [-1, 1]


def test_a_reward_of_the_environment_counts_for_the_models_last_token_before_it():
    mask = torch.tensor([[False, True, False, True]] * 2)
    given = torch.tensor([[4.0, 0.0, 2.0, 0.0], [0.0] * 4], dtype=torch.float64)
    rows = two_rows(loss_mask=mask, lengths=torch.tensor([4, 4]), token_rewards=given)
    objective = PolicyObjective().override({"advantage": {"type": "gae", "lam": 1.0, "whiten": False}})
    batch = objective.advantages(replace(rows, values=torch.zeros(2, 4, dtype=torch.float64)))
    assert batch.returns is not None and batch.returns[:, [1, 3]].tolist() == [[7, 1], [0, 0]]


def my_advantage(inputs, scale=1.0):
    return scale * (inputs.rewards - inputs.rewards.mean())


def my_clip(inputs):
    return -inputs.log_ratio.exp() * inputs.advantages, torch.zeros_like(inputs.mask)


MINE = {"type": "custom", "function": f"{__name__}:my_advantage", "args": {"scale": 3.0}}


def test_a_function_of_ones_own_is_an_advantage_and_a_clip():
    algorithm = PolicyObjective().override(
        {"advantage": MINE, "clip": {"type": "custom", "function": f"{__name__}:my_clip"}}
    )
    rows = two_rows()
    assert algorithm.advantages(rows).advantages[:, 1].tolist() == [1.5, -1.5]
    plain = PolicyObjective().override({"advantage": MINE, "clip": "none"})
    logprobs = rows.old_logprobs + 0.1
    actual, wanted = (loss_gradient(each, training_batch(each, rows), logprobs) for each in (algorithm, plain))
    assert actual[0] == wanted[0] and torch.equal(actual[1], wanted[1])
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_a_function_of_ones_own_may_be_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("def twice(inputs):\n    return 2 * inputs.rewards\n")
    named = {"type": "custom", "function": f"{tmp_path}/mine.py:twice"}
    rows = two_rows()
    actual = PolicyObjective().override({"advantage": named}).advantages(rows).advantages
    assert torch.equal(actual[:, 1], 2 * rows.rewards)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "no_such_module:f",
            r"algorithm.advantage.function: 'no_such_module:f': module 'no_such_module' cannot be imp",
        ),
        ("no_such.module:f", r"\./no_such/module\.py:f"),
        (f"{__name__}:nothing", "has no function 'nothing'"),
        (f"{__name__}:my_advantages", "did you mean 'my_advantage'"),
        ("f", "names no module; write my_module:my_function"),
    ],
)
def test_a_function_that_is_not_there_is_named(function, said):
    with pytest.raises(ValueError, match=said):
        PolicyObjective().override({"advantage": {"type": "custom", "function": function}})


def test_a_path_in_the_place_of_a_type_is_answered_with_how_it_is_written():
    with pytest.raises(ValueError, match=r"type: custom, function: './mine.py:f'"):
        PolicyObjective().override({"advantage": "./mine.py:f"})


def a_scalar(inputs):
    return inputs.rewards.mean()


def too_few(inputs):
    return inputs.rewards[:-1]


def a_list(inputs):
    return inputs.rewards.tolist()


def not_finite(inputs):
    return inputs.rewards / 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (a_scalar, r"must return a tensor \[2\] or \[2, 4\], but returned \[\]"),
        (too_few, r"must return a tensor \[2\] or \[2, 4\], but returned \[1\]"),
        (a_list, "but returned list"),
        (not_finite, "returned non-finite advantages"),
    ],
)
def test_the_result_of_a_custom_function_is_checked(function, said):
    """A scalar would broadcast unseen, and NaN would only show as updates that are left out."""
    path = f"{__name__}:{function.__name__}"
    algorithm = PolicyObjective().override({"advantage": {"type": "custom", "function": path}})
    with pytest.raises(ValueError, match=f"{path}.*{said}"):
        algorithm.advantages(two_rows())


def by_completion(inputs):
    return inputs.advantages.sum(1)


def test_a_clip_of_ones_own_gives_a_number_for_each_token():
    algorithm = PolicyObjective().override({"clip": {"type": "custom", "function": f"{__name__}:by_completion"}})
    rows = two_rows()
    with pytest.raises(ValueError, match=r"tensor \[2, 4\]"):
        loss_gradient(algorithm, training_batch(algorithm, rows), rows.old_logprobs)


def test_arguments_of_a_function_of_ones_own_are_checked_before_the_run():
    said = r"advantage.function: '.*my_advantage' takes \(inputs, scale=1.0\), not \(inputs, scael=...\)"
    with pytest.raises(ValueError, match=said):
        PolicyObjective().override({"advantage": MINE | {"args": {"scael": 3.0}}})


def test_a_function_of_ones_own_may_be_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text('def half(inputs):\n    """Half of it."""\n    return inputs.rewards / 2\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    algorithm = PolicyObjective().override({"advantage": {"type": "custom", "function": "./mine.py:half"}})
    assert algorithm.advantages(two_rows()).advantages[:, 1].tolist() == [0.5, 0.0]
    explained = table(algorithm)
    assert "    Half of it.\n    half  " in explained and "mine.py:1" in explained


def test_gpg_makes_up_for_groups_without_a_signal_as_in_the_paper_or_as_verl_does():
    """Two groups of two, one all right: B / (B - M) is 4 / 2; verl counts three completions with a reward, 4 / 3."""
    rows = make_rows(groups=1, rewards=torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    rows = replace(rows, group_ids=torch.tensor([0, 0, 1, 1]), loss_mask=torch.ones_like(rows.loss_mask))
    assert advantages(rows, advantage="gpg")[:, 0].tolist() == [0, 0, 1, -1]
    assert advantages(rows, advantage={"type": "gpg", "alpha": "verl"})[:, 0].tolist() == pytest.approx(
        [0, 0, 2 / 3, -2 / 3]
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_reads_no_number_back_from_the_device(name, monkeypatch):
    """Metrics are tensors until `values` fetches them, all at once."""
    algorithm = objective_of({"name": name}).resolved(max_completion_tokens=LIMIT)
    rows = make_rows()
    batch, logprobs, reads = training_batch(algorithm, rows), moved_logprobs(rows), []
    for read in ("item", "tolist", "__float__", "__int__", "__bool__"):
        plain = getattr(torch.Tensor, read)
        monkeypatch.setattr(torch.Tensor, read, lambda self, plain=plain, read=read: reads.append(read) or plain(self))
    given = {"logprobs": logprobs, "entropy": logprobs, "values": logprobs}
    if "distributions" in algorithm.outputs:
        from atomrl.protocols import Distributions

        places = batch.loss_mask.flatten().nonzero()[:, 0]
        two = Distributions(torch.ones(len(places), 1).double(), torch.zeros(2, 1).double(), places)
        given |= {"distributions": two, "teacher_distributions": two}
    reads.clear()
    from atomrl.protocols import ModelOutputs

    metrics = algorithm.loss(ModelOutputs(**given), batch).metrics
    assert reads == []
    assert all(isinstance(value, float) for value in values(merge([metrics, metrics])).values())
    assert reads.count("tolist") == 1


def test_metrics_of_tensors_and_of_numbers_are_the_same():
    one = {"a": Mean(torch.tensor(3), torch.tensor(2)), "b": Sum(torch.tensor(0.5)), "c": Max(torch.tensor(1.0))}
    two = {"a": Mean(1.0, 2.0), "b": Sum(1.0), "c": Max(2.0)}
    assert values(merge([one, two])) == {"a": 1.0, "b": 1.5, "c": 2.0}
