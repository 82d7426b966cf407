"""The process that imports torch and the config schema: JSON questions on stdin, JSON answers on stdout, one a line.

Functions that a config names are never imported here: showing a config, possibly someone else's, runs no code. Whether
they exist and take their arguments is checked when the run is started.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from atomrl.common.functions import only_looking
from atomrl.config import ConfigError, RunConfig, build_config, merge_trees
from atomrl.config.loading import is_alternative_layout, parse_yaml, translate
from atomrl.config.run import objective_in, setting_in
from atomrl.objectives.base import page
from atomrl.tools.ui.arithmetic import advantages, token
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.run import config_differences

NEEDED = ("run_name", "output_dir")


def about(config: RunConfig) -> dict[str, Any]:
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
        return build_config(minimal).to_tree()
    except ConfigError:  # some values are only valid together with others
        return merge_trees({}, tree)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question about a config (a tree, or YAML text), or about a step or a token of a run with that config."""
    try:
        if question.get("config") is not None:
            config = build_config(question["config"])
            if "token" in question:
                return token(config, **question["token"])
            return advantages(config, **question["step"]) if "step" in question else about(config)
        text = str(question.get("yaml", ""))
        tree = parse_yaml(text, "the config")
        if not is_alternative_layout(tree):
            return about(build_config(tree))
        own, _ = translate(tree, "the config", default_run_name="config")
        return about(build_config(own)) | {"own": yaml.safe_dump(own, sort_keys=False, allow_unicode=True)}
    except (ConfigError, ValueError) as error:
        return {"errors": str(error).removeprefix("config:\n").splitlines()}


def answer_line(line: str) -> str:
    """Answer a JSON question as JSON. Unexpected errors (from a list that contains itself, which YAML allows) become an
    answer too, so that the process survives."""
    try:
        return json.dumps(answer(json.loads(line)), default=str)
    except Exception as error:
        return json.dumps({"errors": [f"it cannot be read: {error!r}"]})


def main() -> None:
    """Answer questions until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other prints go to stderr
    with only_looking():
        for line in sys.stdin:
            answers.write(answer_line(line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
