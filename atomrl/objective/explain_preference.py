"""A preference objective read back from its axes, as `explain` reads the others."""

from __future__ import annotations

from collections.abc import Callable

from atomrl.objective.compose_preference import PreferenceObjective
from atomrl.objective.explain import Term, term
from atomrl.objective.preference import RANKED, UNPAIRED


def terms(objective: PreferenceObjective) -> list[Term]:
    """Of the axes that are in use."""
    axes = [objective.score, *objective.loss]
    axes += [objective.nll] if objective.nll.coefficient else []
    axes += [objective.accept_group] if objective.accept_group.type != "all" else []
    return [term(axis) for axis in axes]


def equation(objective: PreferenceObjective) -> str:
    """The objective as text.

    Example:
        >>> print(equation(PreferenceObjective()))
        minimise  mean over pairs of L
        where
          L = -(1 - e) log sigmoid(beta (s_c - s_r) - gamma) - e log sigmoid(gamma - beta (s_c - s_r))
          s(y) = log pi(y) - log pi_ref(y)
          y_c, y_r = the completions of a prompt with the highest and the lowest reward
    """
    of = "labelled completions" if objective.unpaired else "pairs"
    losses = [term(loss).text for loss in objective.loss]
    if len(losses) > 1:
        inner = " + ".join(f"{weight:g} L{place}" for place, weight in enumerate(objective.loss_weights, start=1))
        where = [f"L{place} {text.removeprefix('L ')}" for place, text in enumerate(losses, start=1)]
    else:
        inner, where = "L", losses
    if objective.nll.coefficient:
        inner = f"[ {inner} + {objective.nll.coefficient:g} NLL ]"
        where.append(term(objective.nll).text)
    where.append(_score(objective, latex=False))
    if not objective.unpaired:
        where.append("y_c, y_r = the completions of a prompt with the highest and the lowest reward")
    if objective.accept_group.type != "all":
        where.append(f"over groups with {term(objective.accept_group).text}")
    return "\n".join([f"minimise  mean over {of} of {inner}", "where", *(f"  {line}" for line in where)])


def latex(objective: PreferenceObjective) -> str:
    r"""The objective for print, as an `aligned` block.

    Example:
        >>> print(latex(PreferenceObjective()).splitlines()[1])
        \min_\theta \;& \mathbb{E}_{(x, y_c, y_r)} \big[ L \big] \\
    """
    over = r"(x, y, \pm)" if objective.unpaired else "(x, y_c, y_r)"
    losses = [term(loss).latex for loss in objective.loss]
    if len(losses) > 1:
        inner = " + ".join(rf"{weight:g}\,L_{place}" for place, weight in enumerate(objective.loss_weights, start=1))
        losses = [rf"L_{place} {text.removeprefix('L ')}" for place, text in enumerate(losses, start=1)]
    else:
        inner = "L"
    if objective.nll.coefficient:
        inner = rf"{inner} + {objective.nll.coefficient:g}\,\mathrm{{NLL}}"
        losses.append(term(objective.nll).latex)
    lines = [rf"\min_\theta \;& \mathbb{{E}}_{{{over}}} \big[ {inner} \big]"]
    lines += [f"& {line}" for line in (*losses, _score(objective, latex=True))]
    if objective.accept_group.type != "all":
        lines.append(rf"& \text{{over groups with }} {term(objective.accept_group).latex}")
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def _score(objective: PreferenceObjective, *, latex: bool) -> str:
    """The score with what its parameters make of it."""
    score, found = objective.score, term(objective.score)
    text = found.latex if latex else found.text
    if score.ld_alpha != 1:
        text += (
            r"\ \text{(the longer one's surplus times } \alpha)" if latex else " (the longer one's surplus times alpha)"
        )
    if getattr(score, "divergence", "reverse_kl") != "reverse_kl":
        text += r",\ s \leftarrow f'(e^s)" if latex else f",   s <- f'(exp(s)) of the {score.divergence}"
    if score.length_normalised:
        text += r",\ s \leftarrow s / |y|" if latex else ",   s <- s / |y|"
    if getattr(score, "shape", 0.0):
        text += r",\ s \leftarrow (1 - e^{-a s}) / a" if latex else ",   s <- (1 - exp(-shape s)) / shape"
    return text


def table(objective: PreferenceObjective) -> str:
    """Each axis with its parameters (`*` marks what is not the type's default), its atoms, lines and papers."""
    lines = []
    for found in terms(objective):
        shown = ", ".join(f"{k}={v}{'*' if k in found.changed else ''}" for k, v in found.parameters.items())
        lines.append(f"{found.axis}: {found.type}{f' ({shown})' if shown else ''}")
        lines.append(f"    {found.summary}")
        for atom in found.atoms:
            if atom.name not in _off(objective):
                lines.append(f"    {atom.name}  {atom.place}{f'  {atom.paper}' if atom.paper else ''}")
    lines += [] if objective.nll.coefficient else ["nll: none"]
    return "\n".join(lines)


def _off(objective: PreferenceObjective) -> set[str]:
    """Atoms that the parameters leave without effect."""
    score = objective.score
    off = set() if score.ld_alpha != 1 else {"length_desensitised_logprob"}
    off |= set() if score.length_normalised else {"length_normalised"}
    off |= set() if getattr(score, "shape", 0.0) else {"alpha_score"}
    return off | ({"f_divergence_score"} if getattr(score, "divergence", "reverse_kl") == "reverse_kl" else set())


def falling_likelihood(o: PreferenceObjective) -> str | None:
    anchored = {"nca_pair", "bco_pair", "sppo_hard", "apo_zero", "odds_ratio"} | UNPAIRED
    if not o.nll.coefficient and not {loss.type for loss in o.loss} & anchored:
        return "note: only margins count, so the chosen completion may become less likely too; nll.coefficient mends it"
    return None


def smoothed_away(o: PreferenceObjective) -> str | None:
    if any(loss.parameters.get("label_smoothing") == 0.5 and loss.type != "exo_pair" for loss in o.loss):
        return "no effect: with label_smoothing of 0.5 a preference and its opposite are as likely; nothing is learned"
    return None


def overturned(o: PreferenceObjective) -> str | None:
    if any(loss.parameters.get("label_smoothing", 0) > 0.5 for loss in o.loss):
        return "biased: label_smoothing above 0.5 says that most preferences are wrong, and learns their opposite"
    return None


def no_pull(o: PreferenceObjective) -> str | None:
    if any(loss.parameters.get("beta") == 0 for loss in o.loss):
        return "no effect: with a beta of 0 no score has an influence"
    return None


def length_bias(o: PreferenceObjective) -> str | None:
    if o.score.type == "logprob" and not o.score.length_normalised:
        return "biased: a sum of log-probs is lower for a longer completion, whatever it says (score.length_normalised)"
    return None


def nothing_holds(o: PreferenceObjective) -> str | None:
    if o.score.type == "logprob" and not o.nll.coefficient and not _bounded(o):
        return "unstable: neither a reference nor a likelihood holds the policy; a small learning rate has to"
    return None


def _bounded(o: PreferenceObjective) -> bool:
    return all(loss.type in ("hinge", "ipo", "sppo_hard") for loss in o.loss)


def margin_of_reference(o: PreferenceObjective) -> str | None:
    if o.score.type == "log_ratio" and any(loss.parameters.get("target_margin") for loss in o.loss):
        return "note: target_margin is SimPO's, of log-probs; with a reference it asks for that much more of every pair"
    return None


def scale_of_beta(o: PreferenceObjective) -> str | None:
    small = [loss for loss in o.loss if loss.type == "sigmoid" and 0 < loss.beta < 1]
    if o.score.length_normalised and small:
        return "partly without effect: margins per token are small, and so is beta; 2 (SimPO) to 5 (Tulu 3) is usual"
    return None


def ranks_of_few(o: PreferenceObjective) -> str | None:
    if o.loss[0].type in RANKED:
        return "note: ranks are taken in a step, so how many pairs it has (train.rows_per_update) is a part of the loss"
    return None


RULES: tuple[Callable[[PreferenceObjective], str | None], ...] = (
    falling_likelihood,
    smoothed_away,
    overturned,
    no_pull,
    length_bias,
    nothing_holds,
    margin_of_reference,
    scale_of_beta,
    ranks_of_few,
)


def cautions(objective: PreferenceObjective) -> list[str]:
    """What the rules say of an objective, and what it costs to have a reference.

    Example:
        >>> cautions(PreferenceObjective().override({"loss": "apo_zero"}))
        ['note: a frozen copy of the start is loaded as the reference (none with model.lora)']
    """
    found = [message for rule in RULES if (message := rule(objective)) is not None]
    if objective.score.type == "log_ratio":
        found.append("note: a frozen copy of the start is loaded as the reference (none with model.lora)")
    return found


def page(name: str, objective: PreferenceObjective) -> str:
    """What `atomrl explain` prints."""
    found = [f"! {message}" for message in cautions(objective)]
    return f"{name}: {equation(objective)}\n\n{table(objective)}\n\n" + (
        "\n".join(found) if found else "nothing is known to go wrong with this"
    )
