"""A run of several ranks goes on after one of them is lost: with a new group, from the newest checkpoint."""

import json
import logging
from collections.abc import Callable
from typing import Any

from atomrl.launcher import launched
from atomrl.runs.base import PreparedRun
from atomrl.training.group import RankFailed, RankLost, RankOutOfMemory

log = logging.getLogger(__name__)


def run_to_end(
    run: PreparedRun, prepare: Callable[[], PreparedRun], resume: bool = False, **given: Any
) -> dict[str, Any]:
    """`PreparedRun.execute`, again from the newest checkpoint where a rank died, stood still or ran out of memory.

    The steps since that checkpoint are made once more and are the same to the last bit. After too little memory all
    ranks take smaller micro-batches, or compute layers twice: the gradient is the same sum in more parts.

    Args:
        run: made, and not executed.
        prepare: makes it anew.
        resume, given: as `PreparedRun.execute` takes them.

    Returns:
        As it does.

    Raises:
        RankFailed: it happened more often than `backend.restarts` allows, or a launcher has started the ranks; and
            what else `PreparedRun.execute` raises.
    """
    done, settings = 0, dict[str, dict[str, object]]()
    while True:
        try:
            return run.execute(resume, settings=settings, **given)
        except (RankLost, RankOutOfMemory) as error:
            backend = run.config.backend
            if backend is None or launched() is not None or done >= backend.restarts:
                raise
            reason: RankFailed = error
            if isinstance(error, RankOutOfMemory):
                if error.tokens is None:
                    settings["model"] = {"gradient_checkpointing": True}
                else:
                    settings["train"] = {"tokens_per_micro_batch": error.tokens}
        done, resume = done + 1, True
        flat = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
        named = [f"{key}={json.dumps(value)}" for key, value in flat.items()]
        log.warning(
            "%s: a new group of ranks goes on from the newest checkpoint%s (%d of backend.restarts=%d)",
            reason, f", with {' '.join(named)}" if named else "", done, backend.restarts,
        )  # fmt: skip
        del reason  # and with it the tensors that its traceback holds
        run = prepare()
