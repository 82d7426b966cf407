"""The fault of one rank ends all ranks, and the error names it; an error of all ranks is raised as it is."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from datetime import timedelta

import pytest
import torch

from atomrl.backends import group, launcher, rank_group
from atomrl.backends.group import RankFailed, RankLost
from atomrl.common.metrics import values
from atomrl.common.workers import WorkerProcess
from atomrl.config import ConfigError, RunConfig
from atomrl.trainer.build import given_to_rank
from atomrl.weight_sync.broadcast import LOOPBACK, open_store
from benchmarks.rank_faults import Outcome, distance, prepare
from tests.backends.batches import make_algorithm, make_batch, weights_of
from tests.backends.misbehaving import Late, ranked
from tests.tiny import make_tiny_model

SLOW = pytest.mark.slow
SOON_S = 200.0
"""On a busy machine; the time-out of a collective operation is five minutes, but where it is waited for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "base")


def ended(pid):
    with suppress(ProcessLookupError, FileNotFoundError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return True


def fails_soon(ranks, said):
    """Two steps of which one fails, and says why; the processes of the other ranks."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=said):
        for _ in range(2):
            ranks.train_step(make_batch(), make_algorithm())
    assert time.monotonic() - began < SOON_S
    return [worker.process.pid for worker in ranks.trainer.processes.values()]


def test_a_rank_that_hangs_before_it_has_joined_is_named(folder, monkeypatch):
    start = WorkerProcess.start

    def frozen(module):
        worker = start(module)
        worker.process.send_signal(signal.SIGSTOP)
        return worker

    monkeypatch.setattr(WorkerProcess, "start", frozen)
    monkeypatch.setattr(rank_group, "START_S", 1.0)
    with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) has not started within 1 s"):
        ranked(folder)


def test_a_rank_0_that_a_launcher_has_started_and_that_hangs_is_named(monkeypatch):
    store, port = open_store(LOOPBACK, timedelta(seconds=60))
    del store  # nothing listens there any longer
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launcher, "PREPARE_S", 0.1)
    with pytest.raises(RankLost, match=f"rank 0 does not answer at {LOOPBACK}:{port} "):
        launcher.join_launched("cpu", 10.0, None)


def test_a_rank_that_a_launcher_has_started_and_that_hangs_is_named_alone(monkeypatch):
    monkeypatch.setattr(launcher, "START_S", 1.0)
    monkeypatch.setattr(launcher, "STOPPED_S", 0.0)
    store, port = open_store(LOOPBACK, timedelta(seconds=60))
    store.set("config/0", "{}")
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 4}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    store.set("config/3", "{}")
    with pytest.raises(RankLost, match=r"^rank 2 has not started within 1 s$"):
        launcher.join_launched("cpu", 10.0, None)


@pytest.fixture
def four(monkeypatch):
    """Three of four ranks, in this process and without a process group; rank 1 is frozen. Each broadcast times out."""

    def late(*given, **settings):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    for name, replaced in {"init_process_group": None, "new_group": None, "broadcast": late}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", replaced or (lambda *given, **settings: None))
    monkeypatch.setattr(group, "STOPPED_S", 2.0)
    store, _ = open_store(LOOPBACK, timedelta(seconds=60))
    made = {rank: group.Ranks(store, rank, 4, torch.device("cpu"), 1.0) for rank in (0, 2, 3)}
    yield made
    for one in made.values():
        one.close()


def test_a_rank_that_forwards_a_command_is_not_blamed_for_a_frozen_one(four):
    with pytest.raises(RankFailed, match="no command arrives: Timed out"):
        four[2].receive()
    four[0].exited = lambda: {2: "(pid 2) died with exit code 1"}
    with pytest.raises(RankLost, match=r"^rank 1 does not respond"):
        four[0].send("step")


def test_other_configs_of_ranks_are_named():
    configs = torch.distributed.HashStore()
    given = {"train.learning_rate": 1e-3, "data.train": "a.jsonl", "contents of a.jsonl": "12ab"}
    without_file = {key: value for key, value in given.items() if not key.startswith("contents")}
    for rank, each in enumerate((given, without_file, given)):
        configs.set(str(rank), json.dumps(each))
    launcher.check_same_configs(configs, 3)
    configs.set("2", json.dumps(given | {"train.learning_rate": 1e-4, "contents of a.jsonl": "34cd", "seed": 1}))
    said = (
        "train.learning_rate: 0.0001 on rank 2, 0.001 on rank 0; contents of a.jsonl: '34cd' on rank 2, '12ab' on rank "
        "0; seed: 1 on rank 2, None on rank 0"
    )
    with pytest.raises(ConfigError, match=said):
        launcher.check_same_configs(configs, 3)


def test_data_and_model_of_a_rank_are_compared_by_their_contents(tmp_path, monkeypatch):
    for name, number in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(number))
    model, data = tmp_path / "model", tmp_path / "a.jsonl"
    model.mkdir()
    config = RunConfig.model_validate(
        {"run_name": "a", "model": {"path": str(model)}, "data": {"train": [str(data), "OWNER/NAME"]}, "sft": {}}
    )
    given = [given_to_rank(config)]
    for path in (data, data, model / "config.json"):
        path.write_text(path.read_text() + " " if path.exists() else "{}")
        given.append(given_to_rank(config))
    contents = [{key.removeprefix("contents of "): one[key] for key in one if "contents" in key} for one in given]
    assert [[*one] for one in contents] == [[str(model)], *[[str(data), str(model)]] * 3]
    assert len({one.get(str(data)) for one in contents}) == 3
    assert len({one[str(model)] for one in contents}) == 2


FAULTS = {
    "out of memory": r"rank 1: OutOfMemory: out of memory with \d+ padded .*use train.tokens_per_micro",
    "error": r"rank 1: IndexError: index 9 is out of bounds; train_step was interrupted",
    "SIGKILL": r"rank 1 \(pid \d+\) died by SIGKILL; train_step was interrupted",
    "SIGSTOP": r"rank 1 does not respond \(backend.timeout_s=\d+\)",
    "SIGSTOP, rank 0 is late": r"^rank 1 (does not respond|has not joined the others) \(backend.timeout_s",
    "SIGKILL, rank 0 is late": r"^rank 1 \(pid \d+\) died by SIGKILL",
    "hangs": r"^rank 1 has not joined the others \(backend.timeout_s=\d+\)",
}
"""Error message of each fault."""


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ("SIGKILL", 1),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (("out of memory", 4), ("error", 1), ("SIGKILL", 4), ("SIGSTOP", 4))
        ),
    ],
)
def test_all_end_and_name_the_rank(folder, fault, at):
    with closing(
        ranked(folder, fault, at, timeout_s=20 if fault == "SIGSTOP" else 300, rows_per_micro_batch=2)
    ) as both:
        pids = fails_soon(both, FAULTS[fault])
        with pytest.raises(RankFailed, match="ranks have ended"):
            both.train_step(make_batch(), make_algorithm())
    assert all(map(ended, pids))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGSTOP, rank 0 is late", "SIGKILL, rank 0 is late", "hangs"])
def test_the_rank_that_others_wait_for_is_named(folder, fault):
    """And not the other one, which gave up before rank 0 did, and has ended."""
    with closing(ranked(folder, fault, 1, ranks=3, timeout_s=20)) as three:
        pids = fails_soon(three, FAULTS[fault])
    assert all(map(ended, pids))


@pytest.mark.slow
def test_another_rank_reports_that_rank_0_hangs(folder):
    command = [sys.executable, "-m", "tests.backends.misbehaving", str(folder), "SIGSTOP, of rank 0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        said = next(line for line in iter(process.stderr.readline, "") if line.startswith("error: rank 0"))
        process.kill()
    assert "rank 0 does not respond (backend.timeout_s=20)" in said
    assert len(pids) == 2


@pytest.mark.slow
def test_a_non_finite_gradient_on_one_rank_is_skipped_on_all(folder):
    with closing(ranked(folder, "not finite", 1)) as both:
        before = {name: tensor.clone() for name, tensor in weights_of(both).items()}
        metrics = values(both.train_step(make_batch(), make_algorithm()))
        assert metrics["actor/skipped_updates"] == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(both).items())
        assert "actor/skipped_updates" not in values(both.train_step(make_batch(), make_algorithm()))


def test_an_error_that_all_meet_is_raised_as_it_is_and_the_ranks_continue(folder):
    with closing(ranked(folder)) as both:
        for _ in range(2):
            with pytest.raises(ValueError, match="without a reference"):
                both.forward_only(make_batch(), frozenset({"ref_logprobs"}))
        assert values(both.train_step(make_batch(), make_algorithm()))["actor/grad_norm"] > 0


@pytest.mark.slow
def test_an_error_that_all_meet_while_they_are_built_is_said_once_however_late_one_is(folder, capfd, monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 1.0)
    with pytest.raises(ConfigError, match="can be built"):
        ranked(folder, "not built", at=Late(4.0))
    assert "Traceback" not in capfd.readouterr().err, "the other ranks'"


@pytest.mark.slow
def test_a_death_while_the_others_are_idle_interrupts_the_run(folder):
    with closing(ranked(folder)) as both:
        (worker,) = both.trainer.processes.values()
        worker.process.send_signal(signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 .* died by SIGKILL"):
            time.sleep(SOON_S)


@pytest.mark.slow
def test_a_rank_that_stops_between_two_commands_is_named_at_the_next(folder):
    with closing(ranked(folder, "stopped before it listens", timeout_s=10)) as both:
        pids = fails_soon(both, FAULTS["SIGSTOP"])
    assert all(map(ended, pids))


@pytest.mark.slow
def test_no_rank_outlives_the_process_that_started_it(folder):
    command = [sys.executable, "-m", "tests.backends.misbehaving", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1 and not any(map(ended, pids))
        os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + SOON_S
    while not all(map(ended, pids)):
        assert time.monotonic() < until
        time.sleep(0.1)


def gradients(outcome):
    """Return the gradient norms of the updates that the run kept, by step."""
    rows = [json.loads(line) for line in (outcome.out / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder, 2, timeout_s=120)  # nothing hangs here, and machines are slow at times
    run = Outcome(folder, "alone", "none", 10**9)
    assert run.code == 0, run.said
    return folder, run


@pytest.mark.slow
def test_after_a_death_a_new_group_continues_bit_for_bit(alone):
    folder, untouched = alone
    run = Outcome(folder, "killed", "SIGKILL", 13)
    assert run.code == 0 and run.struck and not run.left(), run.said
    assert "new ranks continue from the newest checkpoint (1 of backend.restarts=2)" in run.said
    assert distance(run.weights(), untouched.weights()) == 0 and gradients(run) == gradients(untouched)


@pytest.mark.slow
def test_out_of_memory_on_a_rank_shrinks_micro_batches_on_all_and_keeps_the_gradient(alone):
    folder, untouched = alone
    run = Outcome(folder, "small", "out of memory", 13)
    assert run.code == 0 and run.struck and "newest checkpoint, with train.tokens_per_micro_batch=" in run.said
    for step, norm in gradients(untouched).items():
        assert gradients(run)[step] == pytest.approx(norm, rel=1e-4)
    assert distance(run.weights(), untouched.weights()) < 1e-4


@pytest.mark.slow
def test_a_row_that_does_not_fit_turns_checkpointing_on_for_all_ranks_and_keeps_the_gradient(alone):
    folder, untouched = alone
    run = Outcome(folder, "single", "out of memory", 13, "train.rows_per_micro_batch=1")
    assert run.code == 0 and run.struck and "with model.gradient_checkpointing=true (1 of" in run.said, run.said
    assert distance(run.weights(), untouched.weights()) < 1e-4


@pytest.mark.slow
def test_restarts_are_bounded(alone):
    folder, _ = alone
    run = Outcome(folder, "once", "SIGKILL", 2, "backend.restarts=0")
    assert run.code == 2 and "died by SIGKILL" in run.said and not run.left()
    assert "--resume continues from the newest checkpoint." in run.said
