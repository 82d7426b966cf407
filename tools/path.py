"""Count what somebody reads who follows a GRPO run from a JSONL row to a gradient: files, functions, lines of code.

    python tools/path.py

`PATH` names the functions by hand, in the order in which they are called by a run of configs/quickstart.yaml on a file.
Left out are the internals of an engine, a model, an atom and a reward function; checks; what only records or reports;
and small helpers of tensors and records (`split_turns`, `map_fields`).
Fails if a function that is named there does not exist.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from count import FUNCTION, ROOT, line_sets

PATH: Mapping[str, Sequence[str]] = {
    "the command and its config": [
        "cli/main.py::main",
        "cli/train.py::train",
        "config/loading.py::load_config",
        "config/loading.py::read_tree",
        "config/overrides.py::parse_overrides",
        "common/yaml_files.py::read_yaml",
        "config/trees.py::merge_trees",
        "algorithms/__init__.py::objective_of",
        "objectives/objective.py::Objective.override",
        "objectives/overrides.py::changed",
        "objectives/overrides.py::_choice_after",
        "objectives/overrides.py::validated",
    ],
    "the run and its data": [
        "trainer/__init__.py::prepare_run",
        "trainer/rl.py::RLRun.__init__",
        "trainer/rl.py::choose_engine",
        "trainer/rl.py::open_rewards",
        "trainer/rl.py::open_encoder",
        "trainer/rl.py::load_split",
        "data/problems.py::load_problems",
        "data/problems.py::read_source",
        "data/files.py::read_rows",
        "data/files.py::parse_line",
        "data/problems.py::to_problems",
        "data/problems.py::problem_reader.convert",
        "data/processor.py::DataProcessor.filter_overlong",
        "data/processor.py::DataProcessor._encode",
        "data/processor.py::DataProcessor.rendered",
    ],
    "trainer, engine and the loop": [
        "trainer/restart.py::run_to_end",
        "trainer/base.py::PreparedRun.execute",
        "trainer/build.py::build_trainer",
        "trainer/base.py::PreparedRun._open_run",
        "trainer/rl.py::RLRun.open",
        "trainer/rl.py::RLRun._open_engine",
        "trainer/build.py::build_engine",
        "trainer/loop.py::fit",
    ],
    "sampling": [
        "trainer/rollout_training.py::RolloutTraining.collect",
        "trainer/sources.py::RefillingSource.collect",
        "trainer/sources.py::EngineSource.draw",
        "data/curriculum.py::Curriculum.take",
        "data/processor.py::DataProcessor.to_prompts",
        "engines/generation.py::generate",
        "engines/generation.py::requests_of",
        "engines/requests.py::RequestEngine.submit",
        "engines/requests.py::RequestEngine.poll",
        "engines/requests.py::RequestEngine._outputs",
        "engines/generation.py::to_trajectory",
    ],
    "rewards": [
        "rewards/compute.py::Rewards.__call__",
        "rewards/calling.py::Task.payload",
        "rewards/calling.py::call",
        "rewards/verifiable.py::strict_math",
        "rewards/answers.py::answers_equal",
        "rewards/calling.py::_parse_result",
        "rewards/calling.py::_parse_score",
        "rewards/compute.py::Rewards.judge",
    ],
    "rows and advantages": [
        "data/rows.py::by_group",
        "data/curriculum.py::Curriculum.accepts",
        "data/rows.py::to_rows",
        "trainer/loop.py::compute_advantages",
        "data/rows.py::with_advantages",
        "batches.py::concat_turns",
        "objectives/policy.py::PolicyObjective.advantages",
        "objectives/advantage.py::Shaping.__call__",
        "objectives/advantage.py::GroupAdvantage.__call__",
        "atoms/advantages.py::group_zscore",
        "trainer/loop.py::update_policy",
        "data/rows.py::to_training_batches",
        "objectives/policy.py::PolicyObjective.loss_weights",
        "objectives/policy_loss.py::LossAggChoice.__call__",
        "atoms/policy_losses.py::token_mean",
    ],
    "the update": [
        "backends/base.py::BaseBackend.train_step",
        "backends/base.py::BaseBackend.gradients",
        "backends/base.py::BaseBackend._in_micro_batches",
        "batches.py::micro_batches",
        "backends/base.py::BaseBackend._accumulate",
        "batches.py::select_rows",
        "batches.py::batch_to_device",
        "backends/base.py::BaseBackend.forward",
        "backends/roles.py::sources",
        "models/stream.py::states_before",
        "atoms/logprobs.py::row_logprobs",
        "atoms/logprobs.py::fused_token_logprobs",
        "objectives/policy.py::PolicyObjective.loss",
        "objectives/choice.py::Choice.__call__",
        "atoms/policy_losses.py::token_log_ratio",
        "objectives/policy_loss.py::PPOClip.__call__",
        "atoms/policy_losses.py::clipped_policy_loss",
        "atoms/policy_losses.py::weighted_sum",
    ],
}
"""Part of the path -> its functions, as `FILE::NAME` with the file below `atomrl/`."""


def functions_in(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of a module by qualified name (`Class.method`, `function.inner`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, *FUNCTION)):
            yield f"{prefix}{node.name}", node
            yield from functions_in(node, f"{prefix}{node.name}.")
        else:
            yield from functions_in(node, prefix)


def measure(names: Sequence[str]) -> tuple[int, int, int]:
    """Return the number of files, of functions, and of the functions' lines of code.

    Raises:
        LookupError: a function does not exist; names all that do not.
    """
    absent, lines = [], 0
    by_file: dict[str, list[str]] = {}
    for file, _, name in (each.partition("::") for each in names):
        by_file.setdefault(file, []).append(name)
    for file, wanted in by_file.items():
        if not (ROOT / "atomrl" / file).is_file():
            absent += [f"{file}::{name}" for name in wanted]
            continue
        source = (ROOT / "atomrl" / file).read_text(encoding="utf-8")
        tree = ast.parse(source)
        code, functions = line_sets(source, tree)[0], dict(functions_in(tree))
        absent += [f"{file}::{name}" for name in wanted if name not in functions]
        for node in (functions[name] for name in wanted if name in functions):
            lines += len(code & {*range(node.lineno, node.end_lineno + 1)})
    if absent:
        raise LookupError(f"not in the package: {', '.join(absent)}")
    return len(by_file), len(names), lines


def main() -> None:
    """Print a row for each part of `PATH` and one for all of it."""
    whole = [name for names in PATH.values() for name in names]
    for part, names in {**PATH, "in all": whole}.items():
        files, functions, lines = measure(names)
        print(f"{part:<30} {files:>3} files {functions:>4} functions {lines:>6,} lines")


if __name__ == "__main__":
    main()
