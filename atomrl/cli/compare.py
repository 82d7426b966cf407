"""Put runs side by side: what they are judged by, the keys of the config that differ, and with --out a picture.

Values are held-out accuracies at the end and at best, and means of the last 10 steps. Runs that differ in seed and name
alone have a line together, with mean and range. Where two begin to differ, `atomrl diff A B` says.

atomrl compare runs/a runs/b runs/c
atomrl compare runs/lr-* --out compared.png
"""

import argparse
from pathlib import Path

from atomrl.files import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw their curves into this picture")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.reading import load_run
    from atomrl.reading.comparison import table
    from atomrl.reading.curves import draw_curves

    if arguments.out is not None:
        check_writable(arguments.out)
    runs = [load_run(path) for path in arguments.runs]
    print(*table(runs), sep="\n")
    if arguments.out is not None:
        print(draw_curves(arguments.runs, arguments.out))
    return 0
