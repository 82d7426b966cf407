"""A back end of which one rank does what it should not, at its N-th forward pass."""

import os
import signal
from functools import partial

import torch

from atomrl.config import FSDPConfig, ModelConfig, TrainConfig
from atomrl.training.fsdp import FSDPBackend
from atomrl.training.ranks import RankedBackend
from tests.training.batches import make_algorithm


class Misbehaving(FSDPBackend):
    fault, at, calls = "", 0, 0

    def _outputs(self, micro, names):
        self.calls += 1
        found = super()._outputs(micro, names)
        if self.fault == "bad for all" and self.calls == self.at:
            raise ValueError("of this nobody can make anything")
        if self.collective.rank == 1 and self.calls == self.at:
            if self.fault == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            if self.fault == "error":
                raise IndexError("index 9 is out of bounds")
            if self.fault in ("SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), getattr(signal, self.fault))
            if self.fault == "not finite":
                return {name: tensor * float("nan") for name, tensor in found.items()}
        return found


def build(fault, at, settings, ranks, device):
    made = Misbehaving(FSDPConfig(type="fsdp"), collective=ranks, device=device, **settings)
    made.fault, made.at = fault, at
    return made


def ranked(folder, fault="", at=0, ranks=2, timeout_s=60.0, **train):
    settings = {
        "model": ModelConfig(path=str(folder), dtype="float32"),
        "train": TrainConfig(**({"learning_rate": 0.01} | train)),
        "algorithm": make_algorithm(),
        "total_updates": 9,
    }
    group = FSDPConfig(type="fsdp", ranks=ranks, timeout_s=timeout_s)
    return RankedBackend(partial(build, fault, at, settings), group, "cpu")


if __name__ == "__main__":  # a process that is killed: it says which ranks it started, and waits
    import sys
    import time

    from tests.training import misbehaving  # by that name other ranks find its functions

    backend = misbehaving.ranked(sys.argv[1])
    print(*(worker.process.pid for worker in backend.processes.values()), flush=True)
    time.sleep(300)
