"""Ranks of which there is one."""

from contextlib import contextmanager
from datetime import timedelta

import torch

from atomrl.backends.group import Ranks
from atomrl.weight_sync.broadcast import LOOPBACK, open_store


@contextmanager
def one_rank():
    store, _ = open_store(LOOPBACK, timedelta(seconds=60))
    ranks = Ranks(store, 0, 1, torch.device("cpu"), 60.0)
    yield ranks
    ranks.close()
