"""The processes that rewards run in.

The trainer starts each as a fresh interpreter (no fork of a process with threads), so one that hangs costs a fraction
of a second to replace. It does not import torch, unless a user's reward does.

What a worker gets is pickled by the trainer; what it answers is JSON, so that nothing that ran beside a model's
output is ever unpickled by the trainer.
"""

from multiprocessing.connection import Connection
from typing import Any

from atomrl.rewards.calling import Scorer, call, find_scorer, instantiate
from atomrl.rewards.table import POOLED
from atomrl.worker_process import say, seed_everything


def serve(connection: Connection) -> None:
    """Answer each (name, args, payloads) with what went wrong when the reward was loaded, None if nothing did, and then
    with the outcome of each payload.

    Args:
        connection: to the trainer.
    """
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                loaded[key] = _loaded(name, args)
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            say(connection, f"{type(error).__name__}: {error}")
            continue
        say(connection, None)
        for payload in payloads:
            seed_everything(payload["seed"])
            say(connection, call(loaded[key], payload))


def _loaded(name: str, args: dict[str, Any]) -> Scorer:
    scorer = find_scorer(name, args)
    if scorer.name in POOLED:
        POOLED[scorer.name].warm_up()
    return instantiate(scorer)
