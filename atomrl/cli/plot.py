"""Draw the curves of a run: reward, accuracy, completion length and entropy.

atomrl plot runs/quickstart
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the picture (default: RUN/curves.png)")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.tracking.curves import draw_curves

    print(draw_curves(arguments.run_folder, arguments.out))
    return 0
