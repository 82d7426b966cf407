"""Print the objective that a config defines: equation, atoms with their lines and papers, and known faults.

atomrl explain configs/algorithms/dapo.yaml
atomrl explain configs/quickstart.yaml algorithm.name=gspo algorithm.kl.coefficient=0.01
atomrl explain configs/algorithms/gmpo.yaml --latex
"""

from __future__ import annotations

import argparse

from atomrl.cli.door import add_config_arguments, config_from, join_overrides

prepare = join_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--latex", action="store_true", help="print the equation alone, as LaTeX")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.algorithms.table import objective_of
    from atomrl.assembly import make_schedule
    from atomrl.objective import PreferenceObjective, explain_preference, with_limit
    from atomrl.objective.cautions import Facts, cautions
    from atomrl.objective.explain import equation, latex, table

    config = config_from(arguments)
    rollout, algorithm, schedule = config.rollout, config.algorithm, make_schedule(config)
    chosen = objective_of(algorithm.name, algorithm.axes)
    if isinstance(chosen, PreferenceObjective):
        chosen.algorithm(algorithm.name)  # what does not go together shows now
        print(explain_preference.latex(chosen) if arguments.latex else explain_preference.page(algorithm.name, chosen))
        return 0
    objective = with_limit(chosen, rollout.max_completion_tokens)
    if arguments.latex:
        print(latex(objective))
        return 0
    weights = [item.weight for item in config.reward.functions if item.weight]
    facts = Facts(
        completions_per_prompt=rollout.completions_per_prompt,
        updates_per_step=schedule.updates_per_epoch * schedule.epochs_per_step,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        logprobs_over_kept=rollout.logprobs_over == "kept",
        max_completion_tokens=rollout.max_completion_tokens,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
    )
    print(f"{algorithm.name}: {equation(objective)}\n\n{table(objective)}")
    found = cautions(objective, facts)
    print(
        "\n" + ("\n".join(f"! {message}" for message in found) if found else "nothing is known to go wrong with this")
    )
    return 0
