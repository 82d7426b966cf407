"""Answers to questions about configs: the process of the web interface that imports torch and the config schema.

Reads JSON questions from stdin, one a line, and writes JSON answers to stdout: a config explained, the advantages of a
recorded step, or a token's loss. Functions that a config names are never imported here: showing a config, possibly
someone else's, runs no code. Whether they exist and take their arguments is checked when the run is started.

No equation is repeated: equations and values come from the algorithm's choices.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from atomrl.atoms.advantages import group_std
from atomrl.common.functions import imports_forbidden
from atomrl.common.yaml_files import parse_yaml
from atomrl.config import ConfigError, RunConfig, load_config, merge_trees
from atomrl.config.objective import objective_in, setting_in
from atomrl.config.six_sections import is_alternative_layout, translate
from atomrl.config.texts import mark_texts
from atomrl.data.rows import to_rows, with_advantages
from atomrl.objectives import PolicyObjective
from atomrl.objectives.advantage import NoAdvantage
from atomrl.objectives.choice import Custom
from atomrl.objectives.explain import equation, page
from atomrl.objectives.policy import COEFFICIENT
from atomrl.objectives.policy_loss import PolicyInputs
from atomrl.objectives.token_weights import RolloutInputs, rollout_is_product
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.run import config_differences
from atomrl.trainer.report.metrics import mean_advantages
from atomrl.types import Problem, Segment, Trajectory

NEEDED = ("run_name", "output_dir")


def describe(config: RunConfig) -> dict[str, Any]:
    """Describe a config: kind, equation, values that differ from the defaults, folder of the run."""
    objective = objective_in(config)
    tree = config.to_tree()
    return {
        "kind": config.kind,
        "equation": page(objective, setting_in(config, objective)),
        "changed": {key: list(both) for key, both in config_differences(default_tree(tree), tree).items()},
        "run_dir": str(config.run_dir),
        "command": shlex.join(["atomrl", "train", f"{config.run_name}.yaml"]),
        "steps": config.train.steps,
        "updates_per_step": config.updates_per_step,
        "values": flat_tree(tree),
        "errors": [],
    }


def default_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same kind and algorithm with all optional keys at their defaults."""
    minimal: dict[str, Any] = {name: tree[name] for name in NEEDED}
    minimal["data"] = {"train": tree["data"]["train"]}
    minimal["algorithm"] = {"name": tree["algorithm"]["name"]}
    for name in ("sft", "pretrain"):
        section = tree.get(name)
        if section is not None:
            minimal[name] = {"gpt": section["gpt"]} if section.get("gpt") is not None else {}
    if tree["model"].get("path") is not None:
        minimal["model"] = {"path": tree["model"]["path"]}
    try:
        return load_config(minimal).to_tree()
    except ConfigError:  # some values are only valid together with others
        return merge_trees({}, tree)


# --------------------------------------------------------------------------------------------------------------------
# The advantages of a recorded step, recomputed with the run's own algorithm.

ADVANTAGE_CLOSE = 1e-3
"""Tolerance between recorded and recomputed advantages, relative to the number or to the largest one."""
NOTHING = 1e-6
"""An advantage below this counts as 0."""


def advantages(config: RunConfig, rows: Sequence[Mapping[str, Any]], group: Sequence[int]) -> dict[str, Any]:
    """Recompute the advantages of a group.

    Args:
        config: config of the run.
        rows: all recorded rows that the step trained on.
        group: indices in `rows` of the group.

    Returns:
        `equation`; `computed`, the advantages of the group; `baseline` and `scale`, if A = (r - baseline) / scale holds
        for all of them; or `why` they cannot be computed.
    """
    objective = objective_in(config)
    if not isinstance(objective, PolicyObjective) or isinstance(objective.advantage, NoAdvantage):
        return {"why": "This algorithm computes no advantages from rewards"}
    choice = objective.advantage
    equation = "\n".join(line.text for line in (*objective.shaping.where(), choice.equation(), *choice.where()))
    if why := unknown(objective, rows):
        return {"equation": equation, "why": why}
    plain = objective.model_copy(update={"rollout_is": (), "token_filter": None})  # they do not affect advantages
    trajectories = [trajectory_of(row, config) for row in rows]
    try:
        by_row = mean_advantages(with_advantages(plain, to_rows(trajectories, config.train.max_row_tokens)))
    except ValueError as error:
        return {"equation": equation, "why": str(error)}
    computed = [by_row.get(place) for place in group]
    recorded = [rows[place]["advantage"] for place in group]
    pairs = list(zip(computed, recorded, strict=True))
    close = max(NOTHING, ADVANTAGE_CLOSE * max(abs(row["advantage"] or 0.0) for row in rows))
    if any((one is None) != (other is None) for one, other in pairs) or not all(
        math.isclose(one, other, rel_tol=ADVANTAGE_CLOSE, abs_tol=close) for one, other in pairs if one is not None
    ):
        return {"equation": equation, "why": "Recomputed advantages differ from the recorded ones"}
    rewards = [rows[place]["reward"] for place in group]
    return {"equation": equation, "computed": computed} | line_through(rewards, computed)


def unknown(objective: PolicyObjective, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reason why the advantages cannot be computed from recorded completions, or None."""
    needed = set(objective.advantage.required())
    if objective.kl.applied_to == "reward":
        needed |= {"old_logprobs", "ref_logprobs"}
    if needed:
        return f"They depend on per-token values that were not all recorded: {', '.join(sorted(needed))}"
    if objective.extra_rollouts and not any("baseline_reward" in row for row in rows):
        return "The rewards of the greedy completions were not recorded"
    turns = [turn for row in rows for turn in (row.get("episode") or {}).get("turns") or ()]
    if any(turn.get("reward") is not None for turn in turns):
        return "They depend on the rewards of an episode's turns"
    return None


def trajectory_of(row: Mapping[str, Any], config: RunConfig) -> Trajectory:
    """Build a trajectory from a recorded completion; the prompt's tokens are not recorded, only their number."""
    functions, parts = config.reward.functions, row["reward_parts"]
    weights = [item.weight for item in functions] if len(functions) == len(parts) else [1.0] * len(parts)
    written = Segment(origin="model", token_ids=tuple(row["token_ids"]), policy_version=0)
    return Trajectory(
        prompt_id=row["prompt_id"],
        index=row["completion_index"],
        problem=Problem(problem_id=row["prompt_id"], prompt="", ground_truth=None),
        segments=(Segment(origin="prompt", token_ids=(0,) * row["prompt_tokens"]), written),
        text="",
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        reward_parts=parts,
        part_weights=dict(zip(parts, weights, strict=True)),
        baseline_reward=row.get("baseline_reward"),
    )


def line_through(rewards: Sequence[float | None], computed: Sequence[float | None]) -> dict[str, float]:
    """Fit A = (r - baseline) / scale; returns `baseline` and `scale`, or an empty dict if the advantages are not linear
    in the rewards.

    Example:
        >>> line_through([1.0, 0.0, 0.5], [2.0, -2.0, 0.0])
        {'baseline': 0.5, 'scale': 0.25}
        >>> line_through([1.0, 0.0, 0.5], [0.5, 0.0, 0.0])
        {}
    """
    points = [(r, a) for r, a in zip(rewards, computed, strict=True) if r is not None and a is not None]
    (low, under), (high, over) = min(points, default=(0.0, 0.0)), max(points, default=(0.0, 0.0))
    if over - under < NOTHING or high == low:
        return {}
    scale = (high - low) / (over - under)
    baseline = low - scale * under
    close = ADVANTAGE_CLOSE * max(abs(a) for _, a in points)
    if not all(math.isclose(a, (r - baseline) / scale, rel_tol=ADVANTAGE_CLOSE, abs_tol=close) for r, a in points):
        return {}
    return {"baseline": baseline, "scale": scale}


# --------------------------------------------------------------------------------------------------------------------
# A token's loss, recomputed line by line: each equation with numbers in place of its symbols.

CLOSE = 2e-3
"""Relative tolerance between the recorded and the recomputed loss."""
INTEGERS = ("loss_mask", "clipped", "token_filter", "tokens")


def token(
    config: RunConfig,
    columns: Mapping[str, Sequence[float]],
    at: int,
    reward: float | None,
    rewards: Sequence[float],
    state: Mapping[str, float],
) -> dict[str, Any]:
    """Explain a token's loss.

    Args:
        columns: recorded numbers of its row, by name (`tracking/reading/token_records.py`).
        at: index of the token in them.
        reward: reward of its completion.
        rewards: rewards of its group.
        state: state of the algorithm in that update.

    Returns:
        `equation` of the algorithm; `lines`, each with `name`, `equation`, `numbers` (the equation with the token's
        values in place of symbols, or None) and `value`; `agrees`, whether the result equals the recorded loss (None if
        it cannot be compared); `why`, the reason for missing lines.
    """
    objective = objective_in(config)
    page: dict[str, Any] = {"equation": equation(objective), "lines": [], "agrees": None}
    if not isinstance(objective, PolicyObjective):
        return page | {"why": "This objective is defined on whole completions: single tokens have no loss"}
    if "logprobs" not in columns:
        return page | {"why": "This algorithm has its own update, which records no values of its loss"}
    if not columns["loss_mask"][at]:
        return page | {"why": "This token is not trained on"}
    return page | _Lines(objective, columns, at, reward, rewards, state).compute()


class _Lines:
    """Computes the lines that explain a token's loss under a policy objective."""

    def __init__(
        self, objective: PolicyObjective, columns: Mapping[str, Sequence[float]], at: int, reward: float | None,
        rewards: Sequence[float], state: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.objective, self.at, self.reward, self.rewards, self.state = objective, at, reward, rewards, state
        self.row: dict[str, Tensor] = {
            name: torch.tensor(
                [math.nan if value is None else value for value in values],
                dtype=torch.bool if name in INTEGERS[:3] else torch.float32,
            )[None]
            for name, values in columns.items()
        }
        self.mask, self.logprobs = self.row["loss_mask"], self.row["logprobs"]
        # With one update per step the policy is the old policy.
        trainer = self.logprobs if objective.old_policy else self.row.get("old_logprobs", self.logprobs)
        self.trainer, self.old = trainer, self.row["rollout_logprobs"] if objective.old_policy else trainer
        self.lines: list[dict[str, Any]] = []
        self.left_out = ""

    def compute(self) -> dict[str, Any]:
        """Return the lines of the page: ratio and advantage, the factors of the policy term and the term itself, then
        the terms that are added to it. `term` is their sum, `parts` the same as text."""
        objective, parts, term = self.objective, list[str](), 0.0
        used, clip = objective.used_axes(), objective.clip
        log_ratio = objective.ratio(self.logprobs, self.old, self.mask)
        ratio = self._at(log_ratio.exp())
        symbols = self._symbols() | {"rho_{i,t}": ratio, "rho": ratio}
        if used["clip"]:
            if "rho" in clip.equation().text:
                self._add("ratio", objective.ratio.equation().text, symbols, ratio)
            self._advantage(symbols)
        # Factors: the correction of off-policy tokens, and the token filter (0 or 1).
        factors = [self._correction(symbols)] if objective.rollout_is else []
        if self.row.get("token_filter") is not None and objective.token_filter and not objective.token_filter.adds:
            chosen = float(self._at(self.row["token_filter"].float()))
            self._add("filter", f"s_{{i,t}} = {objective.token_filter.equation().text}", {}, chosen)
            factors.append(chosen)
        if used["clip"] and isinstance(clip, Custom):  # a custom function is never run here
            self.left_out = clip.function
            self._add("policy_term", clip.equation().text, {}, None)
        elif used["clip"]:
            loss = clip(PolicyInputs(log_ratio, self.row["advantages"], self.logprobs, self.old, self.mask))
            value = -self._at(loss[0] if isinstance(loss, tuple) else loss)
            self._add("policy_term", clip.equation().text, symbols | _fields(clip, symbols["A"]), value)
            term = math.prod([value, *(factor for factor in factors if factor is not None)])
            parts.append(" · ".join(_format(each) for each in (*factors, value) if each is not None))
        # Terms in addition to the policy term: KL, entropy bonus.
        if objective.kl.applied_to == "loss" and "ref_logprobs" in self.row:
            kl = self._at(objective.kl(self.logprobs, self.row["ref_logprobs"], self.mask))
            beta = self.state.get(COEFFICIENT, objective.kl.coefficient)
            self._add("kl", objective.kl.equation().text, symbols, kl)
            term -= beta * kl
            parts.append(f"- {_format(beta)} · {_format(kl)}")
        if objective.entropy.coefficient and "entropy" in self.row:
            entropy, weight = self._at(self.row["entropy"]), objective.entropy.coefficient
            self._add("entropy", objective.entropy.equation().text, {}, entropy)
            term += weight * entropy
            parts.append(f"+ {_format(weight)} · {_format(entropy)}")
        if used["distillation"]:
            self.left_out = "the teacher's distributions"
        if objective.token_filter is not None and objective.token_filter.adds:
            self.left_out = objective.token_filter.type
        return self._finish(" ".join(parts), term)

    def _finish(self, parts: str, term: float) -> dict[str, Any]:
        """Add the lines of the loss weight, the loss and the gradient, and compare with the recorded loss."""
        weights, loss, gradient = (self.row.get(name) for name in ("loss_weights", "loss", "gradient"))
        recorded, agrees = self._at(loss) if loss is not None else None, None
        if weights is not None:
            weight = self._at(weights)
            number = 1 / weight if weight else 0.5
            fraction = f"1 / {round(number)}" if math.isclose(number, round(number), rel_tol=1e-5) else None
            self._add("weight", self.objective.loss_agg.equation().text, None, weight, fraction)
            computed, text = -weight * term, f"- w_{{i,t}} [{_terms(self.objective)}]"
            if self.left_out:
                self._add("loss", text, None, recorded)
            else:
                self._add("loss", text, None, computed, f"- {_format(weight)} · [{parts}]")
            if recorded is not None and self.objective.has_critic:
                self._add_critic(recorded - computed)
            elif recorded is not None and not self.left_out:
                agrees = math.isclose(computed, recorded, rel_tol=CLOSE, abs_tol=CLOSE * abs(weight))
        if gradient is not None:
            self._add("gradient", "d loss / d log pi(a_t)", {}, self._at(gradient))
        why = f"Not recomputed, because its inputs were not recorded: {self.left_out}" if self.left_out else None
        return {"lines": self.lines, "agrees": agrees, "why": why}

    def _add_critic(self, rest: float) -> None:
        """Add the critic's loss as the rest of the recorded loss: values are recorded at the start of the step only,
        not in the update."""
        columns = {symbol: self.row.get(name) for symbol, name in (("V", "values"), ("R", "returns"))}
        numbers = {symbol: self._at(values) for symbol, values in columns.items() if values is not None}
        value = self.objective.value
        self._add("critic", f"w_{{i,t}} c_v {value.equation().text}", numbers | _fields(value, 0.0), rest)

    def _advantage(self, symbols: dict[str, Any]) -> None:
        made = self.objective.advantage
        more: dict[str, Any] = _fields(made, symbols["A"])
        # Statistics of the group apply only where the equation takes the rewards as they are.
        if (
            not made.uses_token_rewards
            and not self.objective.shaping.changes_rewards
            and self.objective.kl.applied_to != "reward"
        ):
            own = torch.tensor(self.rewards, dtype=torch.float64)
            std = group_std(own, torch.zeros(len(own), dtype=torch.long))[0].item() if len(own) else math.nan
            others = (own.sum().item() - (self.reward or 0.0)) / max(1, len(own) - 1)
            more |= {
                "r_i": self.reward, "mean_group r": own.mean().item() if len(own) else None, "std_group r": std,
                "mean_{j in group, j != i} r_j": others,
            }  # fmt: skip
        values = self.row.get("values")
        if made.uses_token_rewards and values is not None:
            later = (self.mask[0, self.at + 1 :]).nonzero()
            following = self._at(values, self.at + 1 + int(later[0])) if len(later) else 0.0
            more |= {"V_{i,t+1}": following, "V_{i,t}": self._at(values)}
        text = "; ".join(line.text for line in (made.equation(), *made.where()) if line.text)
        self._add("advantage", text, more, symbols["A"])

    def _correction(self, symbols: dict[str, Any]) -> float | None:
        parts, rollout = self.objective.rollout_is, self.row.get("rollout_logprobs")
        joined = self.objective.correction().text
        if rollout is None or any(isinstance(part, Custom) for part in parts):
            self.left_out = joined
            return None
        inputs = RolloutInputs(self.trainer, rollout, self.logprobs, self.row["advantages"], self.mask)
        made = [self.row.get("rollout_is_weights"), rollout_is_product(parts, inputs, whole_step=False)]
        value = math.prod(self._at(factor) for factor in made if factor is not None)
        fields: dict[str, Any] = {}
        for part in parts:
            fields |= _fields(part, symbols["A"])
        self._add("correction", f"c_{{i,t}} = {joined}", symbols | fields, value)
        return value

    def _symbols(self) -> dict[str, Any]:
        """Return the values of the symbols that occur in several lines."""
        symbols: dict[str, Any] = {name: self._at(self.row["advantages"]) for name in ("A_{i,t}", "A_i", "A")}
        for name, symbol in (
            ("logprobs", "pi"),
            ("old", "pi_old"),
            ("ref_logprobs", "pi_ref"),
            ("rollout_logprobs", "mu"),
        ):
            values = self.old if name == "old" else self.row.get(name)
            if values is not None:
                value = self._at(values)
                total = float(values[self.mask].double().sum())
                symbols |= {
                    f"log {symbol}": value,
                    f"log {symbol}(a_t)": value,
                    f"{symbol}(o_i)": f"exp({_format(total)})",
                }
                symbols |= {symbol: math.exp(value), f"{symbol}(a_t)": math.exp(value)}
        return symbols | {"|o_i|": float(self.mask.sum()), "sg": None}

    def _at(self, values: Tensor, at: int | None = None) -> float:
        return float(values[0, self.at if at is None else at])

    def _add(
        self, name: str, text: str, symbols: Mapping[str, Any] | None, value: float | None, numbers: str | None = None
    ) -> None:
        put = substitute(text, symbols) if symbols else None
        self.lines.append({"name": name, "equation": text, "numbers": numbers or put, "value": value})


def _terms(objective: PolicyObjective) -> str:
    """Return the terms of the loss, as the algorithm's equation writes them."""
    return " + ".join(term.text for term in objective.formulation().goals[0].terms).replace(" + - ", " - ")


def _fields(choice: Any, advantage: float) -> dict[str, Any]:
    """Return the numeric fields of a choice; `X_positive` or `X_negative` is `X`, by the advantage."""
    numbers = {name: value for name, value in choice if isinstance(value, int | float) and not isinstance(value, bool)}
    ending = "_positive" if advantage > 0 else "_negative"
    return numbers | {name.removesuffix(ending): value for name, value in numbers.items() if name.endswith(ending)}


def substitute(text: str, symbols: Mapping[str, Any]) -> str | None:
    """Return the right side of an equation with numbers in place of its symbols; None if it contains none of them.

    Example:
        >>> substitute("min(rho A, clip(rho, 1 - low, 1 + high) A)", {"rho": 1.25, "A": -0.5, "low": 0.2, "high": 0.2})
        'min(1.25 · (-0.5), clip(1.25, 1 - 0.2, 1 + 0.2) · (-0.5))'
        >>> substitute("rho_{i,t} = pi(a_t) / pi_old(a_t)", {"pi(a_t)": 0.5, "pi_old(a_t)": 0.4, "pi": 1.0})
        '0.5 / 0.4'
        >>> substitute("w_{i,t} = 1 / sum_j |o_j|", {"rho": 1.0}) is None
        True
    """
    left, equals, right = text.partition(" = ")
    values = {name: value for name, value in symbols.items() if value is not None}
    names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
    source = right if equals else left
    substituted = re.sub(rf"(?<![\w.{{])(?:{names})(?![\w({{])", lambda match: _factor(values[match[0]]), source)
    # Adjacent factors are a product.
    return re.sub(r"(?<=[\d)\]]) (?=[\d(])", " · ", substituted) if substituted != source else None


def _factor(value: Any) -> str:
    text = _format(value)
    return f"({text})" if text.startswith("-") else text


def _format(value: Any) -> str:
    """Format a number for the page."""
    if isinstance(value, str):
        return value
    mantissa, exponent, power = f"{value:.3e}".partition("e")
    if 1e-3 <= abs(value) < 1e5 or not value:
        return f"{value:.4g}"
    return f"{float(mantissa):g}{exponent}{int(power)}"


# --------------------------------------------------------------------------------------------------------------------
# The process.


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question about a config (a tree, or YAML text), or about a step or a token of a run with that config."""
    try:
        if question.get("config") is not None:
            config = load_config(dict(question["config"]))  # a text would be read as a file
            if "token" in question:
                return token(config, **question["token"])
            return advantages(config, **question["step"]) if "step" in question else describe(config)
        text = str(question.get("yaml", ""))
        tree = parse_yaml(text, "the config", mark_texts)
        if not is_alternative_layout(tree):
            return describe(load_config(tree))
        own, _ = translate(tree, "the config", default_run_name="config")
        return describe(load_config(own)) | {"own": yaml.safe_dump(own, sort_keys=False, allow_unicode=True)}
    except (ConfigError, ValueError) as error:
        return {"errors": str(error).removeprefix("config:\n").splitlines()}


def answer_line(line: str) -> str:
    """Answer a JSON question as JSON. Unexpected errors (from a list that contains itself, which YAML allows) become an
    answer too, so that the process survives."""
    try:
        return json.dumps(answer(json.loads(line)), default=str)
    except Exception as error:
        return json.dumps({"errors": [f"cannot be read: {error!r}"]})


def main() -> None:
    """Answer questions until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other prints go to stderr
    with imports_forbidden():
        for line in sys.stdin:
            answers.write(answer_line(line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
