"""Draw the curves of a run, or of several in one picture: reward, accuracy, completion length and entropy.

atomrl plot runs/quickstart
atomrl plot runs/quickstart runs/no-std --out compared.png
"""

import argparse
from pathlib import Path

from atomrl.files import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run; several are compared")
    parser.add_argument("--out", type=Path, help="the picture (default: RUN/curves.png; of several ./curves.png)")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.reading.curves import draw_curves

    if arguments.out is not None:
        check_writable(arguments.out)
    print(draw_curves(arguments.runs, arguments.out))
    return 0
