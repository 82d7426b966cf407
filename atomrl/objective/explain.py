"""An objective read back from its axes: the equation, where each term is written, and what it is set to.

Nothing here knows an algorithm: equations are in the docstrings of the axes' functions, atoms are those that the
functions call, papers are in the atoms' docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from atomrl.objective.axis import Axis, parameters_of
from atomrl.objective.compose import Objective

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class AtomPlace:
    """Where an atom is, and what it says of its origin."""

    name: str
    place: str
    """`atomrl/atoms/kl.py:137`"""
    paper: str


@dataclass(frozen=True)
class Term:
    """One axis of an objective."""

    axis: str
    type: str
    summary: str
    text: str
    """The equation; empty where the choice adds nothing to it."""
    latex: str
    parameters: dict[str, Any]
    changed: frozenset[str]
    """The parameters that are not the function's default."""
    atoms: tuple[AtomPlace, ...]


def term(axis: Axis) -> Term:
    """What one choice says of itself.

    Example:
        >>> from atomrl.objective import Clip
        >>> found = term(Clip("ppo", high=0.28))
        >>> found.text, found.changed, found.atoms[0].name
        ('min(rho A, clip(rho, 1 - low, 1 + high) A)', frozenset({'high'}), 'clipped_policy_loss')
    """
    if axis.parts != (axis,):
        return _product(axis, [term(part) for part in axis.parts])
    summary, text, latex = _read(axis.function)
    defaults = parameters_of(axis.function)
    changed = frozenset(name for name, value in axis.parameters.items() if value != defaults[name].default)
    atoms = tuple(dict.fromkeys(_place(atom) for atom in atoms_of(axis.function)))
    return Term(axis.label, axis.type, summary, text, latex, axis.parameters, changed, atoms)


def _product(axis: Axis, parts: list[Term]) -> Term:
    """The term of several choices at once."""
    return Term(
        axis=axis.label,
        type=axis.type,
        summary=" ".join(part.summary for part in parts),
        text=" * ".join(f"({part.text})" for part in parts),
        latex=r" \cdot ".join(part.latex for part in parts),
        parameters=axis.parameters,
        changed=frozenset(f"{part.type}.{name}" for part in parts for name in part.changed),
        atoms=tuple(dict.fromkeys(atom for part in parts for atom in part.atoms)),
    )


def terms(objective: Objective) -> dict[str, Term]:
    """Every axis's term, by the axis's name."""
    return {item.name: term(getattr(objective, item.name)) for item in fields(objective)}


def equation(objective: Objective) -> str:
    """The objective as text: the sum, and then each symbol of it.

    Example:
        >>> print(equation(Objective()))
        maximise  sum_{i,t} w_{i,t} min(rho A, clip(rho, 1 - low, 1 + high) A)
        where
          w_{i,t} = 1 / sum_j |o_j|
          rho_{i,t} = pi(a_t) / pi_old(a_t)
          A_i = (r_i - mean_group r) / (std_group r + eps)
    """
    found = terms(objective)
    inner, where = found["clip"].text, [found["aggregate"].text]
    for name, symbol in (("selection", "s_{i,t}"), ("correction", "c_{i,t}")):
        if objective_has(objective, name) and not _adds(objective, name):
            inner = f"{symbol} {inner}"
            where.append(f"{symbol} = {found[name].text}")
    if _adds(objective, "selection"):
        inner = f"{inner} {found['selection'].text}"
    if objective.advantage.type == "none":
        inner = ""
    if objective.kl_in == "loss":
        inner = f"{inner} - beta KL_{{i,t}}"
    if in_use(objective, "entropy"):
        inner = f"{inner} + eta H_{{i,t}}"
        where.append(found["entropy"].text)
    if in_use(objective, "distillation"):
        inner = f"{inner} - alpha D_{{i,t}}".strip()
        where.append(found["distillation"].text)
    where += [found["ratio"].text] if "rho" in inner else []
    where += [found["advantage"].text] if found["advantage"].text else []
    where += _reward_lines(objective, found, latex=False)
    outside = re.sub(r"\([^()]*\)|\[.*?\]", "", inner)
    bracketed = f"[ {inner} ]" if inner.startswith("-") or re.search(" [+-] ", outside) else inner
    goals = [f"maximise  sum_{{i,t}} w_{{i,t}} {bracketed}"]
    if objective.has_critic:
        goals.append(f"minimise  sum_{{i,t}} w_{{i,t}} c_v {found['value'].text}")
        where.append("R_{i,t} = V_{i,t} + sum_{l >= 0} (gamma lam)^l delta_{i,t+l},   V = v at the start of the step")
    where += [f"theta <- {found['update'].text}"] if found["update"].text else []
    return "\n".join([*goals, "where", *(f"  {line}" for line in where)])


def latex(objective: Objective) -> str:
    r"""The objective for print, as an `aligned` block.

    Example:
        >>> print(latex(Objective()).splitlines()[1])
        \max_\theta \;& \frac{1}{\sum_j |o_j|} \sum_{i,t} \min\big(\rho_{i,t} \hat A_{i,t}, \operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h) \hat A_{i,t}\big) \\
    """  # noqa: E501
    found = terms(objective)
    inner = found["clip"].latex
    for name in ("selection", "correction"):
        if objective_has(objective, name) and not _adds(objective, name):
            inner = rf"{found[name].latex}\, {inner}"
    if _adds(objective, "selection"):
        inner = f"{inner} {found['selection'].latex}"
    if objective.advantage.type == "none":
        inner = ""
    if objective.kl_in == "loss":
        inner = rf"{inner} - \beta\, \mathrm{{KL}}_{{i,t}}"
    if in_use(objective, "entropy"):
        inner = rf"{inner} + \eta\, \mathcal{{H}}_{{i,t}}"
    if in_use(objective, "distillation"):
        inner = rf"{inner} - \alpha\, D_{{i,t}}".strip()
    if inner != found["clip"].latex:
        inner = rf"\Big[ {inner} \Big]"
    lines = [rf"\max_\theta \;& {found['aggregate'].latex} {inner}"]
    if objective.has_critic:
        lines += [rf"\min_\phi \;& {found['aggregate'].latex} c_v {found['value'].latex}"]
    lines += [f"& {found['ratio'].latex}"] if r"\rho" in inner else []
    lines += [f"& {found[name].latex}" for name in ("advantage", "distillation") if _printed(objective, found[name])]
    lines += [f"& {line}" for line in _reward_lines(objective, found, latex=True)]
    lines += [f"& {found['entropy'].latex}"] if in_use(objective, "entropy") else []
    if objective.has_critic:
        lines += [
            r"& R_{i,t} = V_{i,t} + \sum_{l \ge 0} (\gamma \lambda)^l \delta_{i,t+l}, \quad V = v_{\phi_{\mathrm{old}}}"
        ]
    lines += [rf"& \theta \leftarrow {found['update'].latex}"] if found["update"].latex else []
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _printed(objective: Objective, found: Term) -> bool:
    return bool(found.latex) and in_use(objective, found.axis)


def objective_has(objective: Objective, name: str) -> bool:
    """Whether an axis that can be left out (correction, selection, ...) is in use."""
    axis = getattr(objective, name)
    return axis != axis.__class__()


def atoms_of(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The atoms that a function calls, by itself or through other functions of this package."""
    yield from getattr(function, "atoms", ())
    used = getattr(function, "use", None)
    for inner in [function, *([used] if used else [])]:
        inner = inspect.unwrap(inner)
        names = list(_names(inner.__code__))
        for name in names:
            value = inner.__globals__.get(name)
            if isinstance(value, ModuleType) and value.__name__.startswith("atomrl.atoms."):
                yield from (vars(value)[item] for item in names if inspect.isfunction(vars(value).get(item)))
            elif inspect.isfunction(value) and value.__module__.startswith("atomrl.atoms."):
                yield value
            elif inspect.isfunction(value) and value.__module__ == inner.__module__ and value is not function:
                yield from atoms_of(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _place(atom: Callable[..., Any]) -> AtomPlace:
    plain = inspect.unwrap(atom)
    path = Path(plain.__code__.co_filename).resolve()
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    found = re.search(
        r"Paper: (?!none)(.*?)(?<!Dr)(?<!al)(?:\.\s|\.$|;|\n\s*\n)", (inspect.getdoc(plain) or "") + "\n\n", re.DOTALL
    )
    paper = " ".join(found[1].split()) if found else ""
    return AtomPlace(plain.__name__, f"{shown}:{plain.__code__.co_firstlineno}", paper)


def _read(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Summary, equation as text and as LaTeX, from a docstring."""
    text = inspect.getdoc(function) or ""
    body, _, print_form = text.partition("LaTeX:")
    equations = re.findall(r"^    (\S.*)$", body.partition("Example:")[0], re.MULTILINE)
    printed = " ".join(print_form.partition("Example:")[0].split())
    return text.partition("\n")[0], equations[0].strip() if equations else "", printed


def _adds(objective: Objective, name: str) -> bool:
    """Whether a choice is a summand of its own instead of a factor."""
    return any(hasattr(part.function, "use") for part in getattr(objective, name).parts)


SHAPING = {
    "soft_overlong": ("soft_overlong_penalty", "overlong_i", r"p^{\mathrm{overlong}}_i"),
    "repetition_ngram_tokens": ("repetition_penalty", "repetition_i", r"p^{\mathrm{repetition}}_i"),
}
"""What switches a penalty on -> its atom, and what the equation calls it."""


def _reward_lines(objective: Objective, found: dict[str, Term], *, latex: bool) -> list[str]:
    """Rewards by token, KL, shaping, dual clip and dynamic sampling, where there are any."""
    lines = []
    kl = (r"\mathrm{KL}_{i,t} = " if latex else "KL_{i,t} = ") + (found["kl"].latex if latex else found["kl"].text)
    in_reward = objective.kl_in == "reward"
    if objective.advantage.parameters.get("whiten"):
        lines.append(r"\hat A \leftarrow \operatorname{whiten}_B(\hat A)" if latex else "A <- whiten_batch(A)")
    if getattr(objective.advantage.function, "by_token", False):
        reward = r"r_{i,t} = r_i\,\mathbb{1}[t = |o_i|]" if latex else "r_{i,t} = r_i [t = last]"
        penalty = r" - \beta\, \mathrm{KL}_{i,t}" if latex else " - beta KL_{i,t}"
        lines.append(reward + (penalty if in_reward else ""))
    elif in_reward:
        penalty = (
            r"r_i \leftarrow r_i - \beta \sum_t \mathrm{KL}_{i,t}" if latex else "r_i <- r_i - beta sum_t KL_{i,t}"
        )
        lines.append(penalty)
    lines += [kl] if objective.kl_in else []
    shaping = objective.shaping
    penalties = [item[2 if latex else 1] for name, item in SHAPING.items() if getattr(shaping, name)]
    bounded = shaping.lowest is not None or shaping.highest is not None
    if penalties or bounded:
        total = " + ".join(["r_i", *penalties])
        bounds = r"\operatorname{clip}" if latex else "clip"
        lines.append((r"r_i \leftarrow " if latex else "r_i <- ") + (f"{bounds}({total})" if bounded else total))
    if objective.clip.parameters.get("dual") is not None:
        lines.append(r"\text{at least } c \hat A_{i,t} \text{ where } \hat A_{i,t} < 0" if latex else _DUAL)
    if shaping.mask_truncated:
        lines.append(r"w_{i,t} = 0 \text{ where } o_i \text{ is cut off}" if latex else "w_{i,t} = 0 where cut off")
    if objective.accept_group.type != "all":
        accepted = found["accept_group"]
        lines.append(rf"\text{{over groups with }} {accepted.latex}" if latex else f"over groups with {accepted.text}")
    return lines


_DUAL = "the minimum is at least dual A where A < 0"


def in_use(objective: Objective, name: str) -> bool:
    """Whether an axis has a part in the objective at all."""
    if name == "kl":
        return objective.kl_in is not None
    if name == "value":
        return objective.has_critic
    if name == "entropy":
        return objective.entropy.coefficient > 0
    if name == "distillation":
        return objective.distillation.coefficient != 0
    if name in ("ratio", "clip"):
        return objective.advantage.type != "none"
    return name not in ("correction", "selection", "shaping", "accept_group") or objective_has(objective, name)


def table(objective: Objective) -> str:
    """Each axis with its parameters (`*` marks what is not the type's default), its atoms, lines and papers."""
    lines = []
    off = {atom for name, (atom, *_) in SHAPING.items() if not getattr(objective.shaping, name)}
    off |= set() if objective.kl.k2_gradient else {"k2_gradient"}
    switches = {"length_alpha": "length_adaptive_lambda", "whiten": "masked_whiten"}
    off |= {atom for name, atom in switches.items() if not objective.advantage.parameters.get(name, True)}
    off |= {"clipped_reward"} if objective.shaping.lowest is objective.shaping.highest is None else set()
    for name, found in terms(objective).items():
        if not in_use(objective, name):
            lines.append(f"{name}: none")
            continue
        shown = ", ".join(f"{k}={v}{'*' if k in found.changed else ''}" for k, v in found.parameters.items())
        lines.append(f"{name}: {found.type}{f' ({shown})' if shown else ''}")
        lines.append(f"    {found.summary}")
        for atom in found.atoms:
            if atom.name not in off:
                lines.append(f"    {atom.name}  {atom.place}{f'  {atom.paper}' if atom.paper else ''}")
    return "\n".join(lines)
