"""A back end of which one rank does what it should not, at its N-th forward pass."""

import os
import signal
import time
from functools import partial

import torch

from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.rank_group import start_ranks
from atomrl.config import ConfigError, FSDPConfig, ModelConfig, TrainConfig
from tests.backends.batches import follow_outputs, make_algorithm, make_batch


class Late:
    """An object that is slow to unpickle, like a back end that is slow to import."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return time.sleep, (self.seconds,)


class Fault:
    """Strikes at a forward pass, on rank 1 unless it is `bad for all` or `of rank 0`; where rank 0 `is late`, that one
    comes there seconds after the others."""

    def __init__(self, kind, at):
        self.kind, self.at, self.calls = kind, at, 0

    def __call__(self, rank, output):
        self.calls += 1
        if self.kind == "bad for all" and self.calls == self.at:
            raise ValueError("of this nobody can make anything")
        kind, _, more = self.kind.partition(", ")
        if rank == 0 and self.calls == self.at and more == "rank 0 is late":
            time.sleep(4)
        if rank == (0 if more == "of rank 0" else 1) and self.calls == self.at:
            return commit(kind, output)
        return output


def commit(kind, output):
    """The fault; of what is not finite, what comes of the forward pass in the place of `output`."""
    if kind == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    if kind == "error":
        raise IndexError("index 9 is out of bounds")
    if kind == "hangs":
        time.sleep(3600)
    if kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "not finite":
        nan = float("nan")
        return {name: tensor * nan for name, tensor in output.items()} if isinstance(output, dict) else output * nan
    return output


def build(fault, at, config, settings, ranks, device):
    if fault == "stopped before it listens" and ranks.rank == 1:
        ranks.receive = lambda: commit("SIGSTOP", None)
    if fault == "not built":
        raise ConfigError("of this none can be built")
    fault, settings = Fault(fault, at), {"collective": ranks, "device": device, **settings}
    if isinstance(config, FSDPConfig):
        made = FSDPBackend(config, **settings)
        follow_outputs(made, lambda micro, outputs: fault(ranks.rank, outputs))
        return made
    from atomrl.backends.megatron.backend import MegatronBackend

    made = MegatronBackend(config, **settings)
    made.policy.model.register_forward_hook(lambda stage, given, output: fault(ranks.rank, output))
    return made


def ranked(folder, fault="", at=0, kind=FSDPConfig, ranks=2, timeout_s=60.0, cut=None, **train):
    settings = {
        "model": ModelConfig(path=str(folder), dtype="float32"),
        "train": TrainConfig(**({"learning_rate": 0.01} | train)),
        "algorithm": make_algorithm(),
        "total_updates": 9,
    }
    name = "fsdp" if kind is FSDPConfig else "megatron"
    config = kind(type=name, ranks=ranks, timeout_s=timeout_s, **(cut or {}))
    return start_ranks(partial(build, fault, at, config, settings), config, "cpu")


if __name__ == "__main__":  # a process that is killed: it says which ranks it started, and waits
    import sys

    from tests.backends import misbehaving  # by that name other ranks find its functions

    backend = misbehaving.ranked(sys.argv[1], *sys.argv[2:3], at=1, ranks=3 if sys.argv[2:] else 2, timeout_s=20.0)
    print(*(worker.process.pid for worker in backend.trainer.processes.values()), flush=True)
    if sys.argv[2:]:
        backend.train_step(make_batch(), make_algorithm())
    time.sleep(300)
