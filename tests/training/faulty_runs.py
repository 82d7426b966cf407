"""A run as a user starts it, of which one rank does what it should not, once: `atomrl ARGUMENTS` with `FAULT` set.

    FAULT='{"fault": "SIGKILL", "at": 7, "once": "FILE"}'

At its `at`-th forward pass, if the file is not there yet, rank 1 makes the file and then the fault.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from atomrl.cli.main import main
from atomrl.runs import build
from atomrl.training.fsdp import FSDPBackend

HONEST = build.rank_trainer


class Faulty(FSDPBackend):
    given, calls = {}, 0

    def _outputs(self, micro, names):
        self.calls += 1
        found, once = super()._outputs(micro, names), Path(self.given["once"])
        if self.collective.rank == 1 and self.calls >= self.given["at"] and not once.exists():
            once.write_text(str(time.time()))
            if self.given["fault"] == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            if self.given["fault"] == "not finite":
                return {name: tensor * float("nan") for name, tensor in found.items()}
            os.kill(os.getpid(), getattr(signal, self.given["fault"]))
        return found


def rank_trainer(given, *arguments):
    """`build.rank_trainer`, with the fault."""
    made = HONEST(*arguments)
    made.__class__, made.given = Faulty, given
    return made


if __name__ == "__main__":
    from tests.training import faulty_runs  # by that name other ranks find its function

    build.rank_trainer = partial(faulty_runs.rank_trainer, json.loads(os.environ["FAULT"]))
    sys.exit(main(sys.argv[1:]))
