"""The command as a user meets it: help, mistakes of every kind, exit codes."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atomrl import trainer as runs
from atomrl.backends.group import RankFailed, RankLost, RankOutOfMemory
from atomrl.backends.optimizer import Diverged
from atomrl.cli.arguments import join_overrides
from atomrl.cli.main import COMMANDS, ELSEWHERE, GROUPS, fill_parser, main
from atomrl.cli.train import ADVICE
from atomrl.cluster.ray_cluster import ActorDied
from atomrl.common import functions
from atomrl.config import read_tree

ROOT = Path(__file__).parents[2]
CONFIG = """
run_name: r
output_dir: {folder}/runs
model: {{path: {folder}/model}}
data: {{train: {folder}/train.jsonl}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return path


def fails(capsys, arguments, code=2):
    """The message of a command that must fail: on stderr, and no traceback."""
    assert main([str(argument) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


PATHS = [(name, *own) for name, command in COMMANDS.items() for own in ([[n] for n in command.subcommands] or [[]])]
"""Every command that does something: its name, and that of its subcommand."""


def test_help_names_every_command_and_fits_on_a_screen(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS) and set(GROUPS) < set(lines)
    assert main([]) == 0 and capsys.readouterr().out.splitlines() == lines
    assert main(["--version"]) == 0


def test_help_of_a_command_names_its_subcommands(capsys):
    for name, command in COMMANDS.items():
        if command.subcommands:
            assert main([name]) == 0 and all(
                f"\n  {own} " in capsys.readouterr().out for own in [*command.subcommands][:1]
            )
            assert main([name, "--help"]) == 0
            shown = capsys.readouterr().out
            assert all(f"\n  {own} " in shown for own in command.subcommands)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_other_versions_and_trl_have_is_answered_with_ours(name, capsys):
    command, *more = ELSEWHERE[name].split()
    assert f"use `atomrl {command} " in fails(capsys, [name, "x"])
    subcommands = COMMANDS[command].subcommands
    parser = argparse.ArgumentParser()
    fill_parser(parser, [command, more[0]] if subcommands else [command])
    assert not subcommands or more[0] in subcommands
    options = {option for action in parser._actions for option in action.option_strings}
    assert {word for word in more if word.startswith("--")} <= options


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_what_there_is(shell, capsys):
    pytest.importorskip("shtab", reason="the extra `completion` is not installed")
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for path in PATHS for word in path) and "allow-launch" in script and "dry-run" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_bash_completes_commands_options_and_files(tmp_path, capsys):
    pytest.importorskip("shtab", reason="the extra `completion` is not installed")
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "grpo.yaml").touch()
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    for words, wanted in (
        ("atomrl roll", "rollouts"),
        ("atomrl pool f", "fill"),
        ("atomrl data check --aga", "--against"),
        ("atomrl data check gr", "grpo.yaml"),
        ("atomrl train --al", "--allow-changes"),
        ("atomrl train gr", "grpo.yaml"),
    ):
        asked = f"""source ./completion; COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; COMP_LINE='{words}'
            COMP_POINT={len(words)}; _shtab_atomrl; echo "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True)
        assert wanted in done.stdout.split(), (words, done.stdout, done.stderr)


def test_another_shell_is_named(capsys):
    assert "one of bash, zsh, fish, not 'csh'" in fails(capsys, ["--print-completion", "csh"])


@pytest.mark.parametrize("arguments", [["--help"], *([*path, "--help"] for path in PATHS)], ids=" ".join)
def test_help_answers_without_heavy_imports(arguments):
    code = (
        "import sys\ntry:\n    from atomrl.cli.main import main; main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules), 'a heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: atomrl" in done.stdout, done.stderr


def test_unknown_command_and_option(capsys):
    assert "unknown command 'trian'; did you mean 'train'?" in fails(capsys, ["trian"])
    with pytest.raises(SystemExit) as caught:
        main(["compare", "x", "--plott", "y"])
    assert caught.value.code == 2
    assert "unknown command 'data chek'; did you mean 'check'?" in fails(capsys, ["data", "chek", "x"])
    assert "a reward model is trained by `atomrl train CONFIG`" in fails(capsys, ["reward", "c.yaml", "x=1"])


def test_mistakes_in_a_config(capsys, config):
    assert "config file absent.yaml does not exist" in fails(capsys, ["train", "absent.yaml"])
    assert "config file . is not a file" in fails(capsys, ["train", "."])
    assert "no config file" in fails(capsys, ["train"])
    assert "did you mean 'train.learning_rate'?" in fails(capsys, ["train", config, "train.learning_rte=1"])
    assert "train.steps: " in fails(capsys, ["train", config, "--train.steps", "many"])
    assert "'stepz' is not an override" in fails(capsys, ["train", config, "stepz"])
    assert "an override needs a value" in fails(capsys, ["train", config, "--train.steps"])
    assert fails(capsys, ["train", "--config"]) == "error: --config needs a value: --config VALUE\n"
    config.write_text("model: [")
    assert "c.yaml is not valid YAML" in fails(capsys, ["train", config])


def test_overrides_may_have_dashes():
    given = ["--model.path", "m", "--dry-run", "--config", "c", "--seed=3", "train.steps=1"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    assert join_overrides(parser, given) == ["c", "model.path=m", "--dry-run", "seed=3", "train.steps=1"]


def test_traceback_is_shown_on_demand(capsys):
    assert main(["train", "absent.yaml", "--traceback"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.endswith("error: config file absent.yaml does not exist\n")


def test_explain_describes_an_atom_and_corrects_its_name(capsys):
    assert main(["explain", "--atoms"]) == 0
    listing = capsys.readouterr().out
    assert "atomrl.atoms.kl" in listing and "  k3_kl " in listing and "_" in listing
    assert main(["explain", "k3_kl"]) == 0
    page = capsys.readouterr().out
    assert 'logprobs: Float[Tensor, "B T"]' in page and "pi_ref" in page and "arXiv" in page and ">>>" in page
    assert main(["explain", "atomrl.atoms.kl.k3_kl"]) == 0 and capsys.readouterr().out == page
    assert "did you mean k3_kl" in fails(capsys, ["explain", "k3kl"])
    assert "algorithm.name=rloo" in fails(capsys, ["explain", "rloo"])
    assert "algorithm.advantage.type=grpo_no_std" in fails(capsys, ["explain", "grpo_no_std"])


def test_every_atom_says_what_it_needs_to():
    from atomrl.atoms.catalog import read_atoms

    atoms = read_atoms()
    assert len(atoms) > 10
    for atom in atoms:
        assert atom.summary.endswith(".") and "Example:" in atom.docstring and "Returns:" in atom.docstring, atom.name


def test_data_make_and_check(capsys, tmp_path):
    out = tmp_path / "made" / "train.jsonl"
    assert main(["data", "make", "countdown", "--size", "5", "--seed", "1", "--out", str(out), "min_numbers=4"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5 and all(len(row["numbers"]) == 4 for row in rows)
    assert main(["data", "check", str(out)]) == 0
    assert "5 rows, no problems" in capsys.readouterr().out


def test_mistakes_in_data(capsys, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "ground_truth": "1"}\nnot json\n{"prompt": "", "ground_truth": "1"}\n')
    message = fails(capsys, ["data", "check", bad])
    assert "bad.jsonl:2" in message and "bad.jsonl:3" in message and "bad.jsonl:1:" not in message
    bad.write_text("")
    assert "is empty" in fails(capsys, ["data", "check", bad])
    assert "does not exist" in fails(capsys, ["data", "check", tmp_path / "absent.jsonl"])
    assert "--prompt-field question" in fails(capsys, ["data", "check", bad, "data.prompt_field=question"])
    assert "--help" in fails(capsys, ["data", "check", bad, "train.steps=3"])
    assert "unknown task 'countdwn'; did you mean 'countdown'?" in fails(
        capsys, ["data", "make", "countdwn", "--size", 1, "--out", bad]
    )
    assert "has no argument 'steps'" in fails(
        capsys, ["data", "make", "countdown", "--size", 1, "--out", bad, "steps=1"]
    )


def test_compare_plots_and_names_its_mistakes(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    assert main(["compare", str(tmp_path), "--plot", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").is_file()
    assert "does not exist" in fails(capsys, ["compare", tmp_path / "absent"])
    assert "is a folder; name a file" in fails(capsys, ["compare", tmp_path, "--plot", tmp_path])
    assert "--diff needs exactly two runs" in fails(capsys, ["compare", tmp_path, "--diff"])
    assert "--tolerance needs --diff" in fails(capsys, ["compare", tmp_path, "--tolerance", "0.1"])
    under = tmp_path / "metrics.jsonl" / "new" / "curves.png"
    assert f"{under} cannot be written: " in fails(capsys, ["compare", tmp_path, "--plot", under])
    assert main(["compare", str(tmp_path), "--plot", str(tmp_path / "new" / "curves.png")]) == 0


def test_export_names_its_mistakes(capsys, tmp_path):
    assert "is not a checkpoint" in fails(capsys, ["export", tmp_path, tmp_path / "out"])
    (tmp_path / "run" / "model").mkdir(parents=True)
    model = str(tmp_path / "run" / "model")
    assert model in fails(capsys, ["export", tmp_path / "run", tmp_path / "out"])
    assert model in fails(capsys, ["generate", tmp_path / "run", "--prompt", "x"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "already exists" in fails(capsys, ["export", tmp_path, tmp_path / "full"])


def test_ctrl_c_says_how_to_continue(capsys, config, monkeypatch):
    def interrupted(config):
        config.run_dir.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "prepare_run", interrupted)
    given = ["train.steps=3", "reward.functions=[{function: exact_match}]"]
    message = fails(capsys, ["train", config, *given], code=130)
    shown = message.partition("continue with: ")[2].strip()
    assert shown == f"atomrl train {config} train.steps=3 'reward.functions=[{{function: exact_match}}]' --resume"
    assert shlex.split(shown) == ["atomrl", "train", str(config), *given, "--resume"], "as a shell reads it"


def test_out_of_memory_names_the_settings_to_change(capsys, config, monkeypatch):
    import torch

    def greedy(config):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runs, "prepare_run", greedy)
    assert "train.tokens_per_micro_batch" in fails(capsys, ["train", config])


def test_train_py_runs_the_same_command_line():
    done = subprocess.run(
        [sys.executable, "train.py", "--config", "configs/grpo_config.yaml", "--train_config.learning_rat", "1"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "did you mean 'train_config.learning_rate'?" in done.stderr


@pytest.mark.parametrize("command", [["train"], ["pool", "fill"]], ids=" ".join)
def test_sigterm_is_said_from_the_start(command):
    """Also before a config is read; it takes seconds until torch is imported."""
    program = (
        "import os, signal, sys; from atomrl import config; from atomrl.cli import main\n"
        "config.load_config = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(main.main([*{command!r}, 'c.yaml']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (130, "\ninterrupted\n")


def test_a_crash_in_native_code_shows_the_python_stack():
    program = (
        "import os, sys, types; from atomrl.cli import main\n"
        "main.COMMANDS['crash'] = main.Command('end as native code does')\n"
        "sys.modules['atomrl.cli.crash'] = types.SimpleNamespace(\n"
        "    add_crash=lambda parser: lambda arguments: os.abort())\n"
        "main.main(['crash'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr and "in main" in ended.stderr


def test_advice_is_for_errors_that_there_are():
    known = (torch.OutOfMemoryError, Diverged, RankFailed, RankLost, RankOutOfMemory, ActorDied)
    assert set(ADVICE) == {kind.__name__ for kind in known}


def test_a_runs_own_config_finds_the_functions_that_the_run_found(tmp_path, monkeypatch):
    """They stand beside the config that the run was started with, and what it keeps is a copy."""
    for name in ("project", "run", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "own_tools.py").write_text("def double(x):\n    return 2 * x\n")
    for name in ("project", "run"):
        (tmp_path / name / "config.yaml").write_text("tools: [./own_tools.py:double]\n")
    monkeypatch.chdir(tmp_path / "elsewhere")

    environment = (
        "import json, sys; from atomrl.config import read_tree; "
        "from atomrl.tracking.system_info import describe_system; "
        "read_tree(sys.argv[1], {}); print(json.dumps(describe_system()))"
    )
    program = [sys.executable, "-c", environment, str(tmp_path / "project" / "config.yaml")]
    run = {**os.environ, "PYTHONPATH": str(ROOT)}
    described = subprocess.run(program, capture_output=True, text=True, check=True, env=run).stdout
    (tmp_path / "run" / "env.json").write_text(described)
    monkeypatch.setattr(sys, "path", [*sys.path])
    read_tree(tmp_path / "run" / "config.yaml", {})
    assert functions.find_function("./own_tools.py:double")(4) == 8
