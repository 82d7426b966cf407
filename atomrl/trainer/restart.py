"""Restart after a lost rank: new ranks continue from the newest checkpoint."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atomrl.backends.group import RankFailed, RankLost, RankOutOfMemory
from atomrl.common.launchers import launched
from atomrl.trainer.base import Options, PreparedRun

log = logging.getLogger(__name__)


def run_to_end(
    run: PreparedRun,
    prepare: Callable[[], PreparedRun],
    options: Options = Options(),  # noqa: B008 (it is frozen)
) -> dict[str, Any]:
    """Execute a run; restart it from the newest checkpoint if a rank dies, hangs or runs out of memory.

    The steps since that checkpoint are repeated bit for bit. After a lack of memory, ranks use smaller micro-batches or
    gradient checkpointing, with the same gradient.

    Args:
        run: a run that was not executed yet.
        prepare: creates the run again.
        options: of `PreparedRun.execute`.

    Returns:
        The run's summary.

    Raises:
        RankFailed: after `backend.restarts` restarts, or if a launcher started the ranks. Other errors are those of
            `PreparedRun.execute`.
    """
    done, settings = 0, dict[str, dict[str, object]]()
    while True:
        try:
            return run.execute(options)
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
        done, options = done + 1, replace(options, resume=True, settings=settings)
        flat = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
        named = [f"{key}={json.dumps(value)}" for key, value in flat.items()]
        log.warning(
            "%s: new ranks continue from the newest checkpoint%s (%d of backend.restarts=%d)",
            reason, f", with {' '.join(named)}" if named else "", done, backend.restarts,
        )  # fmt: skip
        del reason  # releases the tensors that its traceback holds
        run = prepare()
