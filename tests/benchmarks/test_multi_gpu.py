"""The script for a machine with several GPUs fails where a run of ranks is not that of one process, and names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import same_runs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.sh"
STAND_IN = """#!{python}
import os, shutil, sys
said = " ".join(sys.argv[1:])
if "same_runs.py" in said:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if "quickstart_sft.yaml" in said:
    given = dict(part.split("=", 1) for part in sys.argv if "=" in part)
    like = given["run_name"] if os.path.isdir(os.path.join({made!r}, given["run_name"])) else "one_process"
    shutil.copytree(os.path.join({made!r}, like), os.path.join(given["output_dir"], given["run_name"]))
elif sys.argv[1] == "-c":
    print(0)
"""
"""An interpreter that trains nothing, and copies runs."""


def write_run(folder, loss=1.5, norm=2.0, weight=0.5, steps=2):
    """Write the files of a finished run; `loss` is that of the last step."""
    (folder / "model").mkdir(parents=True)
    common = {"actor/grad_norm": norm, "timing_s/update_actor": 0.1}
    rows = [{"step": 1, "sft/nll_per_token": 2.5} | common, {"step": steps, "sft/nll_per_token": loss} | common]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([weight, -2.0])}
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "code"), [(0.5 + 1e-6, 0), (0.501, 1)])
def test_the_script_ends_with_1_where_a_run_differs(tmp_path, weight, code):
    write_run(tmp_path / "made" / "one_process")
    write_run(tmp_path / "made" / "hybrid", weight=weight)
    (tmp_path / "out" / "model").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, made=str(tmp_path / "made")))
    python.chmod(0o755)
    given = {"CHECK_ON": "cpu", "OUT": str(tmp_path / "out"), "PYTHON": str(python)}
    done = subprocess.run(["sh", str(SCRIPT)], env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "other than one_process: hybrid\n" in done.stdout and done.stdout.endswith("FAILED: same\n")
    else:
        assert "all parts passed" in done.stdout


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"loss": 1.5 + 1e-6, "norm": 2.0 - 1e-6, "weight": 0.5 + 1e-6}, "2 steps, update 0.100 s"),
        ({"loss": 1.501}, "DIFFERS: sft/nll_per_token of step 2 is 6.7e-04 away, and 0.0001 are allowed"),
        ({"norm": float("nan")}, "DIFFERS: actor/grad_norm of step 1 is nan away"),
        ({"weight": 0.501}, "DIFFERS: b is 5.0e-04 away"),
        ({"weight": float("inf")}, "DIFFERS: b is inf away"),
        ({"steps": 3}, "DIFFERS: steps [1, 3], and [1, 2] in one"),
    ],
    ids=["rounding", "loss", "not finite", "weight", "infinite weight", "steps"],
)
def test_differences_are_named(tmp_path, monkeypatch, capsys, other, said):
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "same"), write_run(tmp_path / "other", **other)]
    monkeypatch.setattr(sys, "argv", ["same_runs.py", *map(str, runs), "--within", "1e-4"])
    differs = "DIFFERS" in said
    assert same_runs.main() == int(differs)
    first, second, *last = capsys.readouterr().out.splitlines()
    assert first.startswith("same ") and "DIFFERS" not in first
    assert said in second and last == ["other than one: other"] * differs
