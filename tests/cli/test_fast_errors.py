"""Mistakes in names of files and options are named before the libraries are imported that take seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atomrl.cli.main import COMMANDS, main

SCRIPT = """
import sys
from atomrl.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "pydantic"} & {*sys.modules}
sys.exit(f"imported {heavy}" if heavy else code)
"""
ABSENT = [
    ("train absent.yaml", "config file absent.yaml does not exist"),
    ("train", "no config file given"),
    ("train --model.path x", "no config file given"),
    ("train rows.jsonl", "rows.jsonl is a data file; give a config, and the data as data.train=rows.jsonl"),
    ("train broken.yaml", "broken.yaml is not valid YAML"),
    ("plan", "no config file given"),
    ("plan absent.yaml --gpu 4090", "config file absent.yaml does not exist"),
    ("tune absent.yaml --space s.yaml", "config file absent.yaml does not exist"),
    ("pool fill absent.yaml", "config file absent.yaml does not exist"),
    ("pool stats absent.sqlite", "rollout pool absent.sqlite does not exist"),
    ("explain absent.yaml", "config file absent.yaml does not exist"),
    ("eval m --config absent.yaml", "config file absent.yaml does not exist"),
    ("eval m --data absent.jsonl", "data file absent.jsonl does not exist"),
    ("generate m --prompt p --config absent.yaml", "config file absent.yaml does not exist"),
    ("reward gsm8k absent.jsonl", "data file absent.jsonl does not exist"),
    ("data check absent.jsonl", "data file absent.jsonl does not exist"),
    ("data prepare absent.txt --tokenizer char --out o", "text file absent.txt does not exist"),
    ("doctor absent", "no metrics in absent"),
    ("compare absent", "absent does not exist"),
    ("export absent out", "absent is not a checkpoint"),
]


def test_absent_files_are_named_before_heavy_imports(tmp_path):
    (tmp_path / "broken.yaml").write_text("model: {path: [\n")
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, *line.split()], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for line, _ in ABSENT
    ]
    for (line, words), process in zip(ABSENT, started, strict=True):
        stderr = process.communicate()[1]
        assert words in stderr and process.returncode == 2, (line, stderr)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("train c.yaml --resum", "--resume"),
        ("train c.yaml --resme", "--resume"),
        ("train c.yaml --dryrun", "--dry-run"),
        ("train c.yaml --allow-change --resume", "--allow-changes"),
        ("tune c.yaml --sead 3 --spase s.yaml", "--space"),
        ("eval m --data d.jsonl --limt 3", "--limit"),
        ("rollouts r --mxied", "--mixed"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(line, option, capsys):
    try:
        assert main(line.split()) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert f"did you mean {option}?" in capsys.readouterr().err


def test_every_command_with_a_config_is_tried_with_an_absent_one():
    tried = {line.split()[0] for line, _ in ABSENT}
    assert {*COMMANDS} - tried == {"init", "import", "run", "rollouts", "ui"}
