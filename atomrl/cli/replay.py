"""Replay a recorded step under another objective: losses and gradients, token by token.

atomrl replay runs/NAME --step 10 algorithm.clip.high=0.28
atomrl replay runs/NAME --step 10 algorithm.advantage=rloo algorithm.loss_agg=sequence_mean --top 20
atomrl replay runs/NAME --step 10 algorithm.name=cispo --out tokens.jsonl

The step needs recorded tokens (`tracking.tokens`: of two groups of each step, unless told otherwise). No model is
loaded; the log-probs are those of the run. Advantages and the weights of the loss are taken over the recorded rows
alone, on both sides, so compare the two columns with each other. The gradient of a token is that of the loss in its
log-prob.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.config_arguments import join_overrides

if TYPE_CHECKING:
    from atomrl.objective import PolicyObjective
    from atomrl.reading.tokens import TokenTable
    from atomrl.runs.replay import Replayed

OPTIONS = ("--step", "--top", "--out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in algorithm.clip.high=0.28")
    parser.add_argument("--step", type=int, help="which step (the newest with recorded tokens)")
    parser.add_argument("--top", type=int, default=10, help="how many of the tokens that differ most to show (10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every token to a JSONL file")


def prepare(arguments: list[str]) -> list[str]:
    return join_overrides(arguments, OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    from atomrl.files import check_writable, write_jsonl
    from atomrl.reading import load_run
    from atomrl.runs.replay import replay

    loaded = load_run(arguments.run)
    before, after = objectives(arguments.run, arguments.overrides)
    if arguments.out is not None:
        check_writable(arguments.out)
    table = recorded(arguments.run, arguments.step)
    one, other = replay(table, before), replay(table, after)
    rows = by_token(table, one, other)
    print(report(table, one, other, arguments.overrides))
    print("\n" + differences(loaded.path, rows, arguments.top))
    if arguments.out is not None:
        print(f"\n{arguments.out}: {write_jsonl(rows, arguments.out, lenient=True):,} tokens")
    return 0


def objectives(folder: Path, overrides: list[str]) -> tuple[PolicyObjective, PolicyObjective]:
    """The run's, and that with the changes.

    Raises:
        ConfigError: a change is none of the objective, or the run's is not one of rollouts.
    """
    from atomrl.cli.config_arguments import read_tree
    from atomrl.config import ConfigError, build_config, merge_trees, parse_overrides
    from atomrl.objective import PolicyObjective

    changes = parse_overrides(overrides)
    if set(changes) - {"algorithm"}:
        wrong = ", ".join(sorted(set(changes) - {"algorithm"}))
        raise ConfigError(f"{wrong}: a replay changes keys of `algorithm` alone; other keys would change the rollouts")
    path, found = folder / "config.yaml", []
    tree = {key: value for key, value in read_tree(path, {}).items() if key != "tracking"}  # the run has been recorded
    axes = changes.get("algorithm", {})
    # Another name is another set of axes: those of the run, which are all written out, are no changes of it.
    changed = {**tree, "algorithm": axes} if "name" in axes else merge_trees(tree, changes)
    for which in (tree, changed):
        config = build_config(which, str(path))
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"{config.algorithm.name} has no loss by token; a replay is of policy gradients")
        found.append(config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens))
    if found[0].shaping.mask_truncated and not found[1].shaping.mask_truncated:
        raise ConfigError("algorithm.shaping.mask_truncated: the run masked those tokens, and has no log-probs of them")
    return found[0], found[1]


def recorded(folder: Path, step: int | None) -> TokenTable:
    """The recorded tokens of a step, or of the newest that has some.

    Raises:
        ValueError: there are none.
    """
    from atomrl.reading import load_run
    from atomrl.reading.tokens import recorded_steps

    steps = list(recorded_steps(folder / "rollouts"))
    if not steps:
        raise ValueError(f"{folder} has no recorded tokens: train with tracking.tokens=1 or more")
    table = load_run(folder).tokens(steps[-1] if step is None else step)
    if table is None:
        shown = ", ".join(map(str, steps[:5])) + (f", ..., {steps[-1]}" if len(steps) > 5 else "")
        raise ValueError(f"step {step} has no recorded tokens; these have: {shown}")
    return table


def report(table: TokenTable, one: Replayed, other: Replayed, overrides: list[str]) -> str:
    """Both sides of the whole record, and how true the replay of the run's own objective is."""
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
    """What the replay of the run's own objective has to do with what the run recorded."""
    import torch

    advantages = torch.as_tensor(table.tokens["advantages"])
    gradient = torch.as_tensor(table.tokens["gradient"])
    off = float((advantages - one.advantages).abs().max())
    told = "as recorded" if off <= 1e-4 else f"up to {off:.3g} from the recorded ones (they were of the whole step)"
    both, said = gradient.norm() * one.gradient.norm(), f"the run's objective, replayed: advantages {told}"
    if both == 0:
        return f"{said}; no gradient"
    cosine, factor = float(torch.dot(gradient, one.gradient) / both), float(one.gradient.norm() / gradient.norm())
    return f"{said}; gradient {factor:.4g} times the recorded one, cosine {cosine:.6f}"


def by_token(table: TokenTable, one: Replayed, other: Replayed) -> list[dict[str, Any]]:
    """A row for each token."""
    columns: dict[str, Any] = {
        "token_id": table.tokens["tokens"], "trained": one.mask, "logprob": table.tokens["logprobs"],
        "log_ratio": one.log_ratio, "advantage": one.advantages, "loss": one.loss, "gradient": one.gradient,
        "clipped": one.clipped, "changed_log_ratio": other.log_ratio, "changed_advantage": other.advantages,
        "changed_loss": other.loss, "changed_gradient": other.gradient, "changed_clipped": other.clipped,
    }  # fmt: skip
    lists = {name: values.tolist() for name, values in columns.items()}
    rows, places = [], table.rows["trajectory_index"].tolist()
    for row, place in enumerate(places):
        own = table.span(row)
        for number in range(own.start, own.stop):
            about = {"step": table.step, "completion": place, "token": number - own.start}
            rows.append(about | {name: values[number] for name, values in lists.items()})
    return rows


def differences(folder: Path, rows: list[dict[str, Any]], top: int) -> str:
    """The tokens whose gradients differ most; a completion is named by its line in `train.jsonl`, from 0."""
    from atomrl.cli.rollouts import printable
    from atomrl.reading.token_texts import token_texts

    def moved(row: dict[str, Any]) -> float:
        return abs(float(row["changed_gradient"]) - float(row["gradient"]))

    most = [row for row in sorted(rows, key=moved, reverse=True)[:top] if moved(row) > 0]
    if not most:
        return "no token's gradient differs"
    lines = [f"{'completion':>10} {'token':>6}  {'ratio':>8} {'advantage':>20} {'gradient':>26}  text"]
    for row in most:
        texts, _ = token_texts(folder, [row["token_id"]])
        text = printable(texts[0]).replace("\n", "\\n") if texts else str(row["token_id"])
        ratio = f"{2.718281828459045 ** row['log_ratio']:.4f}"
        advantage = f"{row['advantage']:+.4f} -> {row['changed_advantage']:+.4f}"
        gradient = f"{row['gradient']:+.3e} -> {row['changed_gradient']:+.3e}"
        clipped = " (clipped)" if row["clipped"] else " (now clipped)" if row["changed_clipped"] else ""
        place = f"{row['completion']:>10} {row['token']:>6}"
        lines.append(f"{place}  {ratio:>8} {advantage:>20} {gradient:>26}  {text!r}{clipped}")
    return "\n".join(lines)
