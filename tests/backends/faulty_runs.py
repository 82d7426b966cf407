"""A run as a user starts it, of which one rank does what it should not, once: `atomrl ARGUMENTS` with `FAULT` set.

    FAULT='{"fault": "SIGKILL", "where": "backward", "at": 7, "once": "FILE"}'

When it comes for the `at`-th time to a `forward` pass, into a `backward` pass, to a `step` of an optimizer, or to the
`write` of a checkpoint, if the file is not there yet, rank 1 makes the file and then the fault.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from torch import nn

from atomrl.backends.fsdp import FSDPBackend
from atomrl.cli.main import main
from atomrl.trainer import build
from tests.backends.batches import follow_outputs
from tests.backends.misbehaving import commit

HONEST = build.build_trainer


class Once:
    """Strikes on rank 1 in one run and never again."""

    def __init__(self, given):
        self.given, self.calls = given, 0

    def __call__(self, rank, output, where="forward"):
        if where != self.given["where"]:
            return output
        self.calls += 1
        once = Path(self.given["once"])
        if rank != 1 or self.calls < self.given["at"] or once.exists():
            return output
        once.write_text(str(time.time()))
        return commit(self.given["fault"], output)


def build_trainer(given, *arguments, **options):
    """`build.build_trainer`, with the fault."""
    made, fault = HONEST(*arguments, **options), Once(given)
    strike_elsewhere(made, partial(fault, made.collective.rank))
    if isinstance(made, FSDPBackend):
        follow_outputs(made, lambda micro, outputs: fault(made.collective.rank, outputs))
        return made
    for role in made.roles.values():  # Megatron's stages, of which an outcome is no dict
        role.model.register_forward_hook(lambda stage, given, output: fault(made.collective.rank, output))
    return made


def strike_elsewhere(made, strike):
    """Call `strike(output, where)` in what is no forward pass."""

    def into_backward(layer, given, output):
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(lambda gradient: strike(gradient, "backward"))

    def before(plain, where):
        return lambda *given: (strike(None, where), plain(*given))[1]

    for name, optimizer in made.trained.items():
        layers = next(part for part in made.roles[name].model.modules() if isinstance(part, nn.ModuleList))
        layers[-1].register_forward_hook(into_backward)
        optimizer.step = before(optimizer.step, "step")
    plain = made.write_in_background
    made.write_in_background = lambda folder, jobs: plain(folder, [*jobs, before(lambda: None, "write")])


if __name__ == "__main__":
    from tests.backends import faulty_runs  # by that name other ranks find its function

    build.build_trainer = partial(faulty_runs.build_trainer, json.loads(os.environ["FAULT"]))
    sys.exit(main(sys.argv[1:]))
