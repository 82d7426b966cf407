"""The process that knows configs: a question a line in, an answer a line out, both JSON.

A config can name functions. They are never imported here: a config that is only looked at, of whoever's run it is, runs
no code. That they are there and take their arguments is seen when the run is started.
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
from atomrl.config.files import is_alternative_layout, parse_yaml, translate
from atomrl.config.run import objective_in, setting_in
from atomrl.objectives.base import page
from atomrl.tools.ui.arithmetic import advantages, token
from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.run import config_differences

NEEDED = ("run_name", "output_dir")


def about(config: RunConfig) -> dict[str, Any]:
    """Kind, equation, what is other than the defaults, and where the run will be."""
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
    """The config of this kind and algorithm in which all that can be left out is."""
    least: dict[str, Any] = {name: tree[name] for name in NEEDED}
    least["data"] = {"train": tree["data"]["train"]}
    least["algorithm"] = {"name": tree["algorithm"]["name"]}
    for section in ("sft", "pretrain"):
        given = tree.get(section)
        if given is not None:
            least[section] = {"gpt": given["gpt"]} if given.get("gpt") is not None else {}
    if tree["model"].get("path") is not None:
        least["model"] = {"path": tree["model"]["path"]}
    try:
        return build_config(least).to_tree()
    except ConfigError:  # some configs hold only together
        return merge_trees({}, tree)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked: about a config as it is in a run's folder, or as text; or about a step of a run with it."""
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


def said(line: str) -> str:
    """The answer to a question, both JSON. One that cannot be answered (a list that holds itself, which YAML can say)
    is answered by an error, so that the process is there for the next."""
    try:
        return json.dumps(answer(json.loads(line)), default=str)
    except Exception as error:
        return json.dumps({"errors": [f"it cannot be read: {error!r}"]})


def main() -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints, prints elsewhere
    with only_looking():
        for line in sys.stdin:
            answers.write(said(line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
