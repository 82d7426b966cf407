"""Commands of the README, docs/ and `--help` run as printed, in a copy whose configs have few steps and rows."""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from atomrl.cli.main import COMMANDS, fill_parser, main
from tests.documented import PAGES, PATHS, ROOT, Command, commands, help_commands, make_scratch, python_snippets

RUNS_PROGRAMS = "configs/quickstart_python.yaml"
"""Runs programs that a model writes, in a sandbox."""
WITH_COMMANDS = [page for page in PAGES if commands(page)]
WITH_PYTHON = [page for page in PAGES if python_snippets(page)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


QUICK_AND_OTHERS = [
    page if name(page) == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in WITH_COMMANDS
]
"""`make test` runs the commands of the README alone."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented") / "scratch"
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_scratch(folder)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def scratch(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "scratch", symlinks=True)
    monkeypatch.chdir(tmp_path / "scratch")
    monkeypatch.syspath_prepend(str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def run(command: Command) -> int:
    """The exit code of a command; of `atomrl`'s in this process, which has imported torch already."""
    words = [match for word in command.words for match in sorted(glob.glob(word)) or [word]]
    if command.is_atomrl:
        if words[1] == "train" and not {"--resume", "--dry-run"} & set(words):  # a reader has no such run yet
            given = dict(word.split("=", 1) for word in words[3:] if "=" in word)
            name = given.get("run_name") or yaml.safe_load(Path(words[2]).read_text(encoding="utf-8"))["run_name"]
            place = Path("runs") / name
            place.unlink() if place.is_symlink() else shutil.rmtree(place, ignore_errors=True)
        return main(words[1:])
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "pytest", "-n", "0"]
    assert words[0] in ("python", "pytest"), f"{command.place}: cannot run {words[0]!r} here; mark it as not run"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run([*program, *words[1:]], env=os.environ | {"PYTHONPATH": path}).returncode


def path_of(words: list[str]) -> list[str]:
    """The command that the words of a line begin with, and its subcommand."""
    return words[: 2 if COMMANDS[words[0]].subcommands else 1]


def options(path: list[str]) -> set[str]:
    """The options of an `atomrl` command."""
    parser = argparse.ArgumentParser()
    fill_parser(parser, path)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("page", QUICK_AND_OTHERS, ids=[name(page) for page in WITH_COMMANDS])
def test_commands_run_as_printed(page, scratch, capfd, request):
    for command in commands(page):
        if command.reason is None:
            if RUNS_PROGRAMS in command.words:
                request.getfixturevalue("sandbox")
            assert run(command) == 0, f"{command.place}: {command.text}\n{capfd.readouterr().err[-2000:]}"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_that_are_not_run_have_their_options(page):
    for command in commands(page):
        if command.reason is not None:
            assert len(command.reason) > 5, f"{command.place}: say why it is not run, <!-- not run: ... -->"
            if command.is_atomrl:
                words = command.words[1:] or ["--help"]
                if words[0] in ("--print-completion", "--help"):  # of the whole program
                    continue
                assert words[0] in COMMANDS, f"{command.place}: `atomrl {words[0]}` is no command"
                own = command.text.partition(" -- ")[0]  # behind it are a script's
                named = set(re.findall(r"--[a-z][a-z-]*", own)) - {"--help"}
                assert not named or named <= options(path_of(words)), (
                    f"{command.place}: {command.text!r} has no {named - options(path_of(words))}"
                )


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs_as_printed(page, scratch):
    mask = torch.tensor([[False, True, True], [False, True, False]])
    given = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0]), "mask": mask}
    given |= {"logprobs": -mask.float(), "old_logprobs": -mask.float()}
    for line, code in python_snippets(page):
        exec(compile(code, f"{name(page)}:{line}", "exec"), given)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_commands_of_help_run_as_printed(path, scratch, capfd):
    if path[0] == "export":
        shutil.copytree("runs/quickstart/checkpoints/step_000001", "runs/quickstart/checkpoints/step_000060")
    if path[0] == "pool":
        assert main(["pool", "fill", "configs/quickstart.yaml", "--groups", "8"]) == 0
        for file in ("groups.jsonl", "groups.parquet"):
            assert main(["pool", "export", "runs/pools/quickstart.sqlite", file]) == 0
    for command in help_commands(path):
        assert command.reason or run(command) == 0, f"{command.place}: {command.text}\n{capfd.readouterr().err[-2000:]}"


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_names_what_is_there(path, capsys):
    """A help has an example, the configs that it names are shipped, and its commands exist."""
    assert help_commands(path), f"write an example into the help of `{' '.join(path)}` (atomrl/cli)"
    with pytest.raises(SystemExit):
        main([*path, "--help"])
    text = capsys.readouterr().out
    for config in re.findall(r"configs/[\w./-]+\.yaml", text):
        assert (ROOT / config).is_file(), f"the help names {config}, which is not shipped"
    for other in re.findall(r"\batomrl ([a-z][a-z-]*)", text):
        assert other in COMMANDS, f"the help names `atomrl {other}`, which is no command"


def test_the_script_of_the_readme_trains(scratch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = next(code for code in re.findall(r"(?ms)^```python\n(.*?)^```", text) if "GRPOTrainer" in code)
    smaller = script.replace('"Qwen/Qwen2.5-0.5B-Instruct"', '"MODEL"').replace("range(2, 30)", "range(2, 4)")
    exec(compile(smaller, "README.md", "exec"), {"__name__": "__main__"})
    metrics = Path("runs/addition/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
