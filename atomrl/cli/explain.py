"""`atomrl explain`: print an objective or an atom, or replay a recorded step of a run under a changed objective."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.atoms.catalog import Atom, read_atoms
from atomrl.cli.arguments import add_config, check_config
from atomrl.cli.main import Run

if TYPE_CHECKING:
    from atomrl.tools.replay import Replayed
    from atomrl.tracking.reading.token_records import TokenTable

TOP = 10
"""Default number of tokens that a replay prints."""


def add_explain(parser: argparse.ArgumentParser) -> Run:
    """Print the objective that a config defines: equation, atoms with their lines and papers, and known faults.

    An atom's name instead of a config prints the atom: shapes, equation, paper, example.

    With --step, replay a recorded step of a run under a changed objective: losses and gradients per token. The step
    needs recorded tokens (`tracking.tokens`; by default of two groups per step). No model is loaded; the log-probs are
    those of the run. Advantages and loss weights are computed over the recorded rows only, in both columns, so compare
    the columns with each other. The gradient of a token is the derivative of the loss with respect to its log-prob.

    atomrl explain configs/algorithms/dapo.yaml
    atomrl explain configs/quickstart.yaml algorithm.name=gspo algorithm.kl.coefficient=0.01
    atomrl explain configs/algorithms/gmpo.yaml --latex
    atomrl explain runs/quickstart        # functions that a run's config names are not imported
    atomrl explain --atoms
    atomrl explain k3_kl
    atomrl explain runs/NAME --step 10 algorithm.clip.high=0.28
    atomrl explain runs/NAME --step last algorithm.name=cispo --out tokens.jsonl
    """
    add_config(parser, "CONFIG|RUN|ATOM")
    add = parser.add_argument
    add("--latex", action="store_true", help="print only the equation, as LaTeX")
    add("--atoms", action="store_true", help="list the atoms")
    add = parser.add_argument_group("replay of a run's step").add_argument
    add("--step", metavar="N|last", help="step number, or last: the newest with recorded tokens")
    add("--top", type=int, metavar="N", help=f"number of tokens to show, largest difference first ({TOP})")
    add("--out", type=Path, metavar="FILE", help="write every token to a JSONL file")
    return explain


def explain(arguments: argparse.Namespace) -> int:
    """Print an objective, the list of atoms, an atom, or a replay, by the options."""
    if arguments.step is not None:
        if arguments.latex or arguments.atoms:
            raise ValueError("--step cannot be combined with --latex or --atoms")
        return replay_step(arguments)
    for option in ("top", "out"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} needs --step N")
    if arguments.atoms or is_atom(arguments.config):
        return show_atoms(arguments)
    check_config(arguments)
    from atomrl.common.functions import imports_forbidden
    from atomrl.config import load_config
    from atomrl.config.objective import objective_in, setting_in
    from atomrl.objectives.explain import latex, page

    with imports_forbidden() if is_of_run(arguments.config) else nullcontext():
        config = load_config(arguments.config, arguments.overrides)
        objective = objective_in(config)
        print(latex(objective) if arguments.latex else page(objective, setting_in(config, objective)))
    return 0


def is_of_run(config: str | None) -> bool:
    """Return True if a config is in a run's folder. Its functions are not imported: it may be somebody else's."""
    if config is None:
        return False
    path = Path(config)
    return path.is_dir() or any((path.parent / name).exists() for name in ("env.json", "metrics.jsonl"))


def is_atom(name: str | None) -> bool:
    """Return True if the argument can only be the name of an atom: it is a valid name, and not a file."""
    return (
        bool(name and re.fullmatch(r"[A-Za-z_][\w.]*", name))
        and not str(name).endswith((".yaml", ".yml", ".json"))
        and not Path(str(name)).exists()
    )


def show_atoms(arguments: argparse.Namespace) -> int:
    """Print the list of atoms, or one atom."""
    if arguments.latex or arguments.overrides or (arguments.atoms and arguments.config):
        raise ValueError(
            "atoms have no overrides and no --latex; use `atomrl explain --atoms` or `atomrl explain k3_kl`"
        )
    atoms = read_atoms()
    print(listing(atoms) if arguments.atoms else describe(find(atoms, arguments.config)))
    return 0


def find(atoms: list[Atom], name: str) -> Atom:
    """Return the atom with a name, which may include its module.

    Raises:
        ValueError: there is none; the message suggests similar names.
    """
    leaf = name.rpartition(".")[2]
    for atom in atoms:
        if atom.name == leaf:
            return atom
    from atomrl.algorithms import ALGORITHMS, PREFERENCES
    from atomrl.objectives.advantage import Advantage
    from atomrl.objectives.overrides import choices_of

    if leaf in ALGORITHMS or leaf in PREFERENCES:
        raise ValueError(f"{leaf!r} is an algorithm: atomrl explain CONFIG algorithm.name={leaf}")
    if leaf in choices_of(Advantage):
        raise ValueError(f"{leaf!r} is an advantage: atomrl explain CONFIG algorithm.advantage.type={leaf}")
    names = [atom.name for atom in atoms]
    near = difflib.get_close_matches(leaf, names, n=3, cutoff=0.4) or [item for item in names if leaf in item][:3]
    raise ValueError(
        f"no file or atom {name!r}"
        + (f"; did you mean {' or '.join(near)}?" if near else "; see atomrl explain --atoms")
    )


def listing(atoms: list[Atom]) -> str:
    """Format names and summaries of atoms, by module."""
    width = max((len(atom.name) for atom in atoms), default=0)
    lines: list[str] = []
    for module, group in itertools.groupby(atoms, key=lambda atom: atom.module):
        lines += ["", module, *(f"  {atom.name:<{width}}  {atom.summary}" for atom in group)]
    return "\n".join(lines[1:])


def describe(atom: Atom) -> str:
    """Format the signature and the documentation of an atom."""
    return f"{atom.module}\n\n{atom.signature}\n\n{atom.docstring}"


def replay_step(arguments: argparse.Namespace) -> int:
    """Replay a recorded step under the run's objective and the changed one, and print how they differ."""
    from atomrl.common.files import check_writable, write_jsonl
    from atomrl.tools.replay import by_token, objectives, recorded, replay
    from atomrl.tracking.reading import load_run

    if arguments.config is None or not (folder := Path(arguments.config)).is_dir():
        raise ValueError("--step needs the folder of a run, as in: atomrl explain runs/NAME --step last")
    if arguments.step != "last" and not re.fullmatch(r"\d+", arguments.step):
        raise ValueError(f"--step {arguments.step}: must be a number or last")
    loaded = load_run(folder)
    before, after = objectives(folder, arguments.overrides)
    if arguments.out is not None:
        check_writable(arguments.out)
    table = recorded(folder, None if arguments.step == "last" else int(arguments.step))
    one, other = replay(table, before), replay(table, after)
    rows = by_token(table, one, other)
    print(report(table, one, other, arguments.overrides))
    print("\n" + differences(loaded.path, rows, TOP if arguments.top is None else arguments.top))
    if arguments.out is not None:
        print(f"\n{arguments.out}: {write_jsonl(rows, arguments.out, lenient=True):,} tokens")
    return 0


def report(table: TokenTable, one: Replayed, other: Replayed, overrides: list[str]) -> str:
    """Format the totals of both objectives, and the agreement of the replay with the recorded values."""
    import torch

    groups = len(set(table.rows["group_ids"].tolist()))
    lines = [
        f"step {table.step}: {len(table)} rows of {groups} group(s), {len(one.mask)} tokens, "
        f"{int(one.mask.sum())} of them trained on",
        own_check(table, one),
        "",
        f"{'':<26}{'the run':>14}{'changed':>14}   {' '.join(overrides) or '(nothing is changed)'}",
    ]
    for (name, mine), theirs in zip(one.summary().items(), other.summary().values(), strict=True):
        lines.append(f"{name:<26}{mine:>14.6g}{theirs:>14.6g}")
    both = one.gradient.norm() * other.gradient.norm()
    cosine = float(torch.dot(one.gradient, other.gradient) / both) if both > 0 else float("nan")
    differ = int((~torch.isclose(one.gradient, other.gradient, rtol=1e-4, atol=1e-12)).sum())
    lines += [f"{'cosine of the gradients':<26}{cosine:>14.6f}", f"{'gradients that differ':<26}{differ:>14}"]
    return "\n".join(lines)


def own_check(table: TokenTable, one: Replayed) -> str:
    """Compare the replay of the run's own objective with the values that the run recorded, as a check."""
    import torch

    advantages = torch.as_tensor(table.tokens["advantages"])
    gradient = torch.as_tensor(table.tokens["gradient"])
    off = float((advantages - one.advantages).abs().max())
    agreement = (
        "as recorded" if off <= 1e-4 else f"up to {off:.3g} from the recorded ones (computed over the whole step)"
    )
    both, line = gradient.norm() * one.gradient.norm(), f"the run's objective, replayed: advantages {agreement}"
    if both == 0:
        return f"{line}; no gradient"
    cosine, factor = float(torch.dot(gradient, one.gradient) / both), float(one.gradient.norm() / gradient.norm())
    return f"{line}; gradient {factor:.4g} times the recorded one, cosine {cosine:.6f}"


def differences(folder: Path, rows: list[dict[str, Any]], top: int) -> str:
    """Format the tokens whose gradients differ most; `completion` is the line in the step's `train.jsonl`, from 0."""
    from atomrl.common.terminal import printable
    from atomrl.tracking.reading.token_texts import token_texts

    def change(row: dict[str, Any]) -> float:
        return abs(float(row["changed_gradient"]) - float(row["gradient"]))

    largest = [row for row in sorted(rows, key=change, reverse=True)[:top] if change(row) > 0]
    if not largest:
        return "no token's gradient differs"
    lines = [f"{'completion':>10} {'token':>6}  {'ratio':>8} {'advantage':>20} {'gradient':>26}  text"]
    for row in largest:
        texts, _ = token_texts(folder, [row["token_id"]])
        text = printable(texts[0]).replace("\n", "\\n") if texts else str(row["token_id"])
        ratio = f"{math.exp(row['log_ratio']):.4f}"
        advantage = f"{row['advantage']:+.4f} -> {row['changed_advantage']:+.4f}"
        gradient = f"{row['gradient']:+.3e} -> {row['changed_gradient']:+.3e}"
        clipped = " (clipped)" if row["clipped"] else " (now clipped)" if row["changed_clipped"] else ""
        place = f"{row['completion']:>10} {row['token']:>6}"
        lines.append(f"{place}  {ratio:>8} {advantage:>20} {gradient:>26}  {text!r}{clipped}")
    return "\n".join(lines)
