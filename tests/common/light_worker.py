"""A worker that imports neither PyTorch nor pytest."""

import os

from atomrl.common.workers import send_answer


def worker_main(connection):
    """Send the environment of this process."""
    send_answer(connection, dict(os.environ))
