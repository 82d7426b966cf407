"""Two ranks make the steps of one process, quickly: one case of each way to share the work, all in one pair.

Every algorithm, four ranks and all options: test_fsdp.py, test_tensor_parallel.py, test_sequence.py, test_shards.py and
test_rank_weights.py, in `make test-all`.
"""

from functools import partial

import pytest
import torch

from atomrl.backends.local import LocalBackend
from atomrl.config import LoraConfig
from tests.backends.batches import weights_of, written
from tests.backends.comparison import compare
from tests.backends.continuing import alike, go_on, step
from tests.backends.equality import (
    all_cases,
    case,
    few,
    locally,
    make_models,
    run_ranks,
    settings_of,
    shared,
    with_ranks,
)

CASES = {
    "shards": case("grpo"),
    "shards, critic": case("ppo", train={"rows_per_micro_batch": 1}),
    "a rank without rows": case("grpo", few),
    "tensor parallel": case("ppo", fsdp={"tensor": 2}),
    "tensor parallel, adapters": case("grpo", lora=LoraConfig(rank=4), fsdp={"tensor": 2}),
    "sequence parallel": case(
        "grpo", shared, train={"tokens_per_micro_batch": 80, "learning_rate": 3e-5}, fsdp={"sequence": 2}
    ),
}
SAVED = case("ppo")


def work(folder, checkpoint, ranks):
    """Return the results of a rank: the steps of all cases, weights for an engine, and steps around a checkpoint."""
    steps = all_cases(CASES, folder, ranks)
    backend, algorithm = with_ranks(SAVED, folder, ranks)
    sent = {name: tensor.clone() for name, tensor in backend.weight_update(1).tensors}
    for number in range(2):
        step(backend, algorithm, number)
    written(backend.save(checkpoint))
    ranks.max(0)  # both have written
    straight = go_on(backend, algorithm)
    again, _ = with_ranks(SAVED, folder, ranks)
    again.load(checkpoint)
    return {"steps": steps, "sent": sent, "straight": straight, "again": go_on(again, algorithm)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    return run_ranks(partial(work, folder, folder / "saved"), 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_steps_of_one_process(folder, results, name):
    compare([rank["steps"][name] for rank in results], locally(CASES[name], folder))


def test_an_engine_is_sent_the_weights_of_one_process(folder, results):
    expected = weights_of(LocalBackend(**settings_of(SAVED, folder)))
    sent = results[0]["sent"]
    assert sent and all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def test_a_checkpoint_continues_exactly_and_in_one_process(folder, results):
    straight, again = results[0]["straight"], results[0]["again"]
    assert straight[0] == again[0], "bit for bit"
    assert all(torch.equal(tensor, again[1][name]) for name, tensor in straight[1].items())
    settings = settings_of(SAVED, folder)
    alone = LocalBackend(**settings)
    alone.load(folder / "saved")
    alike(go_on(alone, settings["algorithm"]), straight)
