"""Print the objective that a config defines: equation, atoms with their lines and papers, and known faults.

atomrl explain configs/algorithms/dapo.yaml
atomrl explain configs/quickstart.yaml algorithm.name=gspo algorithm.kl.coefficient=0.01
atomrl explain configs/algorithms/gmpo.yaml --latex
atomrl explain runs/quickstart        # functions that a run's config names are not imported
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides

prepare = join_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--latex", action="store_true", help="print the equation alone, as LaTeX")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.config.explained import objective_in, setting_in
    from atomrl.functions import only_looking
    from atomrl.objective.explain import latex, page

    with only_looking() if is_of_run(arguments.config) else nullcontext():
        config = config_from(arguments)
        objective = objective_in(config)
        print(latex(objective) if arguments.latex else page(objective, setting_in(config, objective)))
    return 0


def is_of_run(config: str | None) -> bool:
    """Whether a config is that of a run's folder, perhaps somebody else's: it is looked at, and its functions are not
    imported."""
    if config is None:
        return False
    path = Path(config)
    return path.is_dir() or any((path.parent / name).exists() for name in ("env.json", "metrics.jsonl"))
