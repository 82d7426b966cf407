"""Back ends of several ranks for tests: the same training on each, and what came of it."""

from functools import partial

from atomrl.config import FSDPConfig
from atomrl.training.fsdp import FSDPBackend
from atomrl.training.ranks import RankedBackend


def build(fsdp, settings, ranks, device):
    return FSDPBackend(fsdp, collective=ranks, device=device, **settings)


def ranked(ranks, *, fsdp=None, tokenizer=None, **settings):
    """A back end on so many ranks; `settings` as of `LocalBackend`."""
    chosen = FSDPConfig(**({"ranks": ranks, "timeout_s": 60.0} | (fsdp or {})))
    return RankedBackend(partial(build, chosen, settings), chosen, "cpu", tokenizer)
