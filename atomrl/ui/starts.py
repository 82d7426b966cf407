"""Starting points of a new run: a template, the configs that are here, or an earlier run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

import atomrl
from atomrl.ui.drafts import DraftError, edited, read

TEMPLATE = """# GRPO on a built-in task, with the model of `atomrl train configs/quickstart_sft.yaml`.
run_name: my-run
output_dir: runs
model:
  path: runs/quickstart-warm-start/model
data:
  train: chain
  train_size: 20000
  eval: chain
  eval_size: 500
rollout:
  prompts_per_step: 64
  completions_per_prompt: 8
  max_completion_tokens: 48
reward:
  functions: [strict_math]
algorithm:
  name: grpo
train:
  steps: 60
  learning_rate: 1.0e-3
"""
MAX_CONFIGS = 300


class Configs:
    """YAML files in the working directory, in `configs` there, and in the `configs` that come with a checkout."""

    def __init__(self) -> None:
        here, shipped = Path.cwd(), Path(atomrl.__file__).parents[1] / "configs"
        found = [
            *sorted(here.glob("*.yaml")),
            *sorted((here / "configs").rglob("*.yaml")),
            *sorted(shipped.rglob("*.yaml")),
        ]
        self._files: dict[str, tuple[str, Path]] = {}
        for path in dict.fromkeys(path.resolve() for path in found if path.is_file() and not path.is_symlink()):
            base = here if path.is_relative_to(here) else shipped.parent
            name = path.relative_to(base).as_posix()
            self._files.setdefault(hashlib.sha256(str(path).encode()).hexdigest()[:12], (name, path))

    def listed(self) -> list[dict[str, str]]:
        """`id`, `name` and `about`, the first line of comment, of each."""
        return [
            {"id": own, "name": name, "about": _comment(path)}
            for own, (name, path) in list(self._files.items())[:MAX_CONFIGS]
        ]

    def text(self, config_id: str) -> str:
        """The text of one.

        Raises:
            LookupError: there is none with this id.
        """
        if config_id not in self._files:
            raise LookupError("there is no such config")
        return self._files[config_id][1].read_text(encoding="utf-8", errors="replace")


def _comment(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(400)
    except OSError:
        return ""
    return first.strip("# \n") if first.startswith("#") else ""


def started_from(text: str, root: Path) -> dict[str, Any]:
    """A draft that is made of a config: in the folder of the runs, under a name that is free there.

    Returns:
        `yaml`, and what `drafts.read` says of it.
    """
    try:
        given = read(text)["given"]
        name = str(given.get("run_name") or "my-run")
        free, count = name, 2
        while (root / free).exists():
            free, count = f"{name}-{count}", count + 1
        if free != given.get("run_name"):
            text = edited(text, "run_name", yaml.safe_dump(free).partition("\n")[0])
        if given.get("output_dir") != str(root):
            text = edited(text, "output_dir", yaml.safe_dump(str(root)).partition("\n")[0])
        return {"yaml": text, **read(text)}
    except DraftError as error:
        return {"yaml": text, "given": {}, "lines": {}, "errors": [str(error)]}
