"""Mistakes of a first hour: each is one message that says where and what to do, before weights are read."""

from __future__ import annotations

import shutil

import pytest

from atomrl.cli.main import main

CONFIG = {
    "run_name": "r",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "rows.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 4},
    "reward": {"functions": ["exact_match"]},
    "train": {"steps": 1},
}
REWARDS = """
def short(completions, **kwargs):
    return [0.0]

def wants(completions, solution, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.fixture
def folder(working_directory, model):
    made = working_directory(
        CONFIG,
        rows=[{"prompt": f"{n}+1=", "ground_truth": str(n + 1)} for n in range(4)],
        no_roles=[{"prompt": [{"content": "hi"}], "ground_truth": "1"}],
        long=[{"prompt": "a" * 60, "ground_truth": "1"}],
        empty=[],
    )
    (made / "rewards.py").write_text(REWARDS)
    (made / "syntax.py").write_text("def f(completions, **kwargs):\n    return [0.0 for c in completions\n")
    (made / "file").write_text("x")
    (made / "nothing.yaml").write_text("")
    (made / "indent.yaml").write_text("model:\n  path: model\n   dtype: float32\n")
    (made / "twice.yaml").write_text("seed: 1\nrun_name: r\nseed: 2\n")
    for name in ("without_tokenizer", "bad_template"):
        shutil.copytree(model, made / name)
    for file in (*(made / "without_tokenizer").glob("tokenizer*"), *(made / "without_tokenizer").glob("vocab*")):
        file.unlink()
    (made / "bad_template" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    return made


@pytest.mark.parametrize(("given", "words"), [
    ("absent.yaml", "config file absent.yaml does not exist"),
    ("nothing.yaml", "nothing.yaml is empty; a config has at least"),
    ("indent.yaml", "in indent.yaml, line 3"),
    ("twice.yaml", "duplicate key 'seed', in lines 1 and 3"),
    ("c.yaml train.stepz=3", "did you mean 'train.steps'"),
    ("c.yaml train.steps=many", "train.steps: "),
    ("c.yaml data.train=absent.jsonl", "data.train: data file absent.jsonl does not exist"),
    ("c.yaml data.train=empty.jsonl", "data.train: empty.jsonl has no usable row"),
    ("c.yaml data.eval=empty.jsonl", "data.eval: empty.jsonl has no usable row"),
    ("c.yaml data.prompt_field=question", "rows.jsonl:1: field 'question' is missing (has 'prompt', 'ground_truth'; "),
    ("c.yaml data.train=no_roles.jsonl", "no_roles.jsonl:1: the prompt: message 1: 'role' must be text"),
    ("c.yaml data.train=long.jsonl", "longer than 32 tokens (data.max_prompt_tokens"),
    ("c.yaml model.path=./absent", "model.path: model folder ./absent does not exist"),
    ("c.yaml model.path=without_tokenizer", "has no tokenizer: copy"),
    ("c.yaml model.path=bad_template", "not valid Jinja; fix chat_template.jinja"),
    ("c.yaml data.chat_template=./absent.jinja", "data.chat_template=./absent.jinja: the file does not exist"),
    ("c.yaml model.lora.target_modules=[q_prj]", "model.lora.target_modules: 'q_prj' matches no module"),
    ("c.yaml rollout.engine=vlm", "rollout.engine: unknown engine 'vlm'"),
    ("c.yaml rollout.completions_per_prompt=3 train.rows_per_update=4", "train.rows_per_update=4 does not divide"),
    ("c.yaml output_dir=file", "cannot write to file/r (output_dir/run_name)"),
    ("c.yaml reward.functions=[./syntax.py:f]", "syntax.py', 2"),
    ("c.yaml reward.functions=[./absent.py:f]", "no file ./absent.py"),
    ("c.yaml reward.functions=[./rewards.py:short]", "it returned 1 values for 2 completions"),
    ("c.yaml reward.functions=[./rewards.py:wants]", "rows.jsonl:1: it needs a column 'solution'"),
])  # fmt: skip
def test_it_is_one_message_before_anything_is_written(given, words, folder, capsys):
    assert main(["train", *given.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and said.count("error: ") == 1
    assert not (folder / "runs").exists()
