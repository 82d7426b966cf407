"""Commands and snippets that the documentation shows, and a folder in which they can be run as printed.

A block is run unless a comment before it says why not, which readers of the source see:

    <!-- not run: takes minutes -->                     the whole block
    <!-- not run (make quickstart): takes minutes -->   its commands that begin so

Of what is not run, every `atomrl` command must exist and have the options that are named.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from atomrl.cli.main import COMMANDS, fill_parser, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "README.zh-CN.md", *(ROOT / "docs").rglob("*.md")])
PROGRAMS = ("atomrl", ".venv/bin/atomrl", "python", "pytest", "make", "uv", "pip", "curl", "torchrun", "accelerate")
NOT_RUN = re.compile(r"<!-- not run(?: \((?P<which>[^)]*)\))?: (?P<reason>.*?) -->")
PATHS = [(name, *own) for name, command in COMMANDS.items() for own in ([[n] for n in command.subcommands] or [[]])]
"""Every command that does something: its name, and that of its subcommand."""
REWARDS = """
def brevity(prompts, completions, max_words=20, **columns):
    return [float(len(text.split()) <= max_words) for text in completions]

def lively(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""
HELP_NOT_RUN = {
    "atomrl data prepare books": "its tokenizer is on the hub",
    "atomrl doctor --engine sglang": "needs SGLang",
    "atomrl import": "the files are the reader's own; tests/tools/importers and tests/models/test_nanogpt.py have such",
    "atomrl init my-project --model": "its model is on the hub",
    "atomrl plan configs/quickstart.yaml --probe": "probes for a minute; tests/planner/test_plan.py does",
    "atomrl plan configs/qwen2.5-1.5b": "its model is on the hub",
    "atomrl pool fill configs": "draws for half a minute; tests/trainer/test_pool.py runs both",
    "atomrl train configs/quickstart.yaml run_name=pooled": "likewise",
    "atomrl data serve": "serves until it is told to end, a corpus of 14 GB",
    "atomrl reward http": "needs a service",
    "atomrl rollouts runs/quickstart --prompt": "the problem is one of the whole run",
    "atomrl tune": "runs for two hours; tests/tools/test_tuning.py has short ones",
    "atomrl ui": "serves until it is told to end",
}
"""Commands of `--help` that begin so, and why they are not run."""
LINE = re.compile(r"^(?: {4}|\$ )?(?P<text>(?:" + "|".join(map(re.escape, PROGRAMS)) + r")(?: .*)?)$")


@dataclass(frozen=True)
class Command:
    """A shell command of a page; `reason` says why it is not run."""

    place: str
    text: str
    reason: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def is_atomrl(self) -> bool:
        return self.words[0].endswith("atomrl")


def commands(page: Path) -> list[Command]:
    """The commands of a page's indented and fenced blocks, in order; continued lines are one."""
    return commands_in(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def help_commands(path: Sequence[str]) -> list[Command]:
    """The examples in the help of a command, whose lines stand at the margin."""
    parser = argparse.ArgumentParser()
    fill_parser(parser, path)
    commands = commands_in(textwrap.indent(parser.description or "", "    "), f"atomrl {' '.join(path)} --help")
    reasons = [
        next((HELP_NOT_RUN[begin] for begin in HELP_NOT_RUN if c.text.startswith(begin)), None) for c in commands
    ]
    return [replace(command, reason=reason) for command, reason in zip(commands, reasons, strict=True)]


def commands_in(text: str, place: str) -> list[Command]:
    """The commands of a page's text."""
    commands, exceptions, in_block, fenced = [], [], False, False
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if line.startswith("```"):
            fenced = not fenced
            continue
        exception = NOT_RUN.search(line)
        if exception:
            exceptions.append((exception["which"], exception["reason"]))
            continue
        if line.strip() and not fenced and not line.startswith("    "):
            exceptions = []
        in_block = fenced or line.startswith("    ")
        match = LINE.match(line) if in_block else None
        if not match:
            continue
        text = match["text"]
        while text.endswith("\\"):
            text = text[:-1] + " " + next(lines)[1].strip()
        reasons = [reason for which, reason in exceptions if which is None or text.startswith(which)]
        commands.append(Command(f"{place}:{number}", text, reasons[0] if reasons else None))
    return commands


def python_snippets(page: Path) -> list[tuple[int, str]]:
    """Line and text of every fenced Python block that is run and has no prompts."""
    text = page.read_text(encoding="utf-8")
    snippets = []
    for match in re.finditer(r"(?ms)(?:^(?P<not><!-- not run[^\n]*-->)\n+)?^```python\n(?P<code>.*?)^```", text):
        if not match["not"] and ">>>" not in match["code"]:  # tests/docs/test_examples.py runs those
            snippets.append((text[: match.start()].count("\n") + 1, match["code"]))
    return snippets


def small(config: dict[str, Any]) -> dict[str, Any]:
    """A shipped config with so few steps and rows that it runs in a second; its choices stay.

    A second reward tells completions apart, because the tiny model never solves a problem, and dynamic sampling would
    end the run.
    """
    less = {
        "data": {"train_size": 64, "eval_size": 4, "max_prompt_tokens": 256},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 8, "max_completion_tokens": 12},
        "train": {"steps": 1, "rows_per_update": 8},
        "eval": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
        "pretrain": {"window_tokens": 16, "eval_windows": 2, "sample_every_steps": 0},
    }
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in config.items()}
    for section, values in less.items():
        there = result.get(section)
        if isinstance(there, dict):
            there |= {key: value for key, value in values.items() if there.get(key)}
    result.setdefault("eval", {})["every_steps"] = 0
    result.setdefault("checkpoint", {})["every_steps"] = 1
    if (result.get("reward") or {}).get("functions"):
        result["reward"]["functions"] = [*result["reward"]["functions"], {"function": "my_rewards.lively"}]
    for section in ("sft", "pretrain"):
        shape = (result.get(section) or {}).get("gpt")
        if shape:
            shape |= {"layers": 1, "hidden": 32, "heads": 2} | ({"intermediate": 64} if "intermediate" in shape else {})
    return result


def make_scratch(folder: Path) -> None:
    """The repository's configs made small, its examples, and the runs and files that pages speak of.

    The current folder must be `folder`.
    """
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("benchmarks", "tests", "atomrl", "train.py"):
        (folder / name).symlink_to(ROOT / name)
    for file in [*(folder / "configs").rglob("*.yaml"), *(folder / "examples").rglob("*.yaml")]:
        if file.name != "grpo_config.yaml":
            file.write_text(yaml.safe_dump(small(yaml.safe_load(file.read_text(encoding="utf-8")))), encoding="utf-8")
    for name, scorer in (("my_rewards", "mine"), ("my_reward", "score")):
        (folder / f"{name}.py").write_text(f"{REWARDS}\n{scorer} = lively\n", encoding="utf-8")
    for config in ("configs/quickstart_sft.yaml", "configs/quickstart.yaml"):
        assert main(["train", config]) == 0, config
    for step in (10, 30):
        shutil.copytree("runs/quickstart/rollouts/step_000001", f"runs/quickstart/rollouts/step_{step:06d}")
    shutil.copytree("runs/quickstart", "runs/NAME")
    for name in ("a", "b", "c", "lr-1", "lr-2", "no-std", "tools"):
        (folder / "runs" / name).symlink_to("NAME")
    (folder / "MODEL").symlink_to("runs/NAME/model")
    rows = [{"prompt": f"What is 2+{k}?", "ground_truth": str(2 + k), "level": 1} for k in range(8)]
    asked = [{"question": row["prompt"], "answer": f"#### {row['ground_truth']}"} for row in rows]
    pairs = [{"prompt": row["prompt"], "chosen": row["ground_truth"], "rejected": "none"} for row in rows] * 8
    done = [row | {"completion": f"It is \\boxed{{{row['ground_truth']}}}"} for row in rows]
    labelled = [{"prompt": r["prompt"], "completion": r["completion"], "label": k % 2 == 0} for k, r in enumerate(done)]
    files = {"train.jsonl": rows, "held_out.jsonl": rows, "completions.jsonl": done, "labelled.jsonl": labelled * 8}
    files |= {"gsm8k.jsonl": asked, "pairs.jsonl": pairs}
    for name, content in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    (folder / "input.txt").write_text("ROMEO: it is the east, and Juliet is the sun.\n" * 60, encoding="utf-8")
