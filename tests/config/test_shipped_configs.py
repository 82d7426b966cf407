"""Every shipped config passes, or is refused by, one preparation that a dry run and a run share."""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pandas
import pytest

from atomrl import trainer as runs
from atomrl.cli.main import main
from atomrl.config import load_config
from atomrl.environments.builtin import ENVIRONMENTS
from atomrl.models.loading import load_tokenizer
from atomrl.models.scalar import load_scalar, save_scalar
from tests.templates import QWEN3, QWEN25
from tests.tiny import make_tiny_model
from tests.tiny_vision import make_tiny_vision_model, picture

ROOT = Path(__file__).parents[2]
CONFIGS = sorted([*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
MODELS = [
    "runs/quickstart-warm-start/model",
    "runs/quickstart/model",
    "runs/quickstart-search-warm-start/model",
    "runs/quickstart-search/model",
    "runs/quickstart-python-warm-start/model",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-3B",
]
"""Models and data that the configs start from."""
VISION_MODELS = [
    "runs/quickstart-vision-model",
    "runs/quickstart-vision-warm-start/model",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
]
HUB = {"openai": "data/gsm8k", "hiyouga": "data/geometry3k"}
"""Owner of data on the hub -> folder of rows like them."""
REWARD_MODEL = "runs/rlhf-reward-model/model"
TEXTS = {"char": "data/shakespeare_char", "model": "data/corpus_gpt2"}
"""Folders of tokens, by what makes them."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A working directory with all that the configs name, small."""
    folder = tmp_path_factory.mktemp("scratch")
    for path in MODELS:
        make_tiny_model(folder / path, "qwen2", max_position_embeddings=8192)
    for path in VISION_MODELS:
        make_tiny_vision_model(folder / path)
    model = folder / MODELS[0]
    save_scalar(load_scalar(str(model), dtype="float32"), load_tokenizer(model), folder / REWARD_MODEL)
    problem, gsm8k = {"prompt": "1+1=", "ground_truth": "2"}, {"question": "1+1=", "answer": "so\n#### 2"}
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    picture(1).save(folder / "angle.png")
    geometry = {"problem": "<image>Find x.", "answer": "2", "images": [str(folder / "angle.png")]}
    for name in ("1.5B", "3B", "7B", "14B", "32B"):
        (folder / f"Qwen/Qwen2.5-{name}-Instruct/chat_template.jinja").write_text(QWEN25)
    (folder / "Qwen/Qwen3-8B/chat_template.jinja").write_text(QWEN3 + "{% if enable_thinking %}{% endif %}")
    game = {"prompt": "Play.", "seed": 1, "game": "games/1.z8"}
    files = {
        "data/games.jsonl": game, "data/textworld.jsonl": game,
        "data/geometry3k/train.jsonl": geometry, "data/geometry3k/test.jsonl": geometry,
        "data/gsm8k/train.jsonl": gsm8k, "data/gsm8k/test.jsonl": gsm8k, "data/train.jsonl": problem,
        "data/eval.jsonl": problem, "runs/rlhf/pairs.jsonl": pair, "runs/rlhf/held_out_pairs.jsonl": pair,
    }  # fmt: skip
    for name, row in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((json.dumps(row) + "\n") * 20)
    asked = {"prompt": [{"role": "user", "content": "Who?"}], "golden_answers": ["A", "B"], "data_source": "nq"}
    (folder / "data" / "nq_hotpotqa_train").mkdir()
    for name in ("train", "test"):
        pandas.DataFrame([asked] * 20).to_parquet(folder / "data" / "nq_hotpotqa_train" / f"{name}.parquet")
    text = folder / "text.txt"
    text.write_text("The sun is the east,\nand it is fair.\n" * 2000)
    for maker, out in TEXTS.items():
        tokenizer = str(model) if maker == "model" else maker
        assert main(["data", "prepare", str(text), "--tokenizer", tokenizer, "--out", str(folder / out)]) == 0
    return folder


@pytest.fixture
def inside(scratch, monkeypatch):
    monkeypatch.chdir(scratch)
    return scratch


def given(path):
    """The kind of a config, and the arguments of `atomrl train`; generators make few problems."""
    own = [f"model.path={MODELS[0]}"] if path.stem == "stories260k-gsm8k" else []  # which has no model of its own
    config = load_config(path, own)
    for key, file in (("train", "train"), ("eval", "test")):  # of the hub
        name = str(getattr(config.data, key)).partition("/")[0]
        if name in HUB:
            own.append(f"data.{key}={HUB[name]}/{file}.jsonl")
    sizes = [name for name in ("train_size", "eval_size") if getattr(config.data, name) is not None]
    return config.kind, [str(path), *own, *(f"data.{name}=16" for name in sizes)]


def test_there_are_configs_of_every_kind():
    assert len(CONFIGS) > 60 and {given(path)[0] for path in CONFIGS} == set(runs.KINDS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_a_dry_run_prepares_what_a_run_does(path, inside, capsys, monkeypatch, request):
    _, arguments = given(path)
    config = load_config(path, arguments[1:])
    environment = config.environment
    if config.model.quantization == "nf4" and find_spec("bitsandbytes") is None:
        pytest.skip("the extra `quant` is not installed")
    known = ENVIRONMENTS.get(environment.function) if environment else None
    if known and known.package and find_spec(environment.function) is None:
        if load_config(path, arguments[1:]).data.train.startswith(environment.function):
            pytest.skip(f"{environment.function}, which makes its data, is not installed")
        absent = ModuleType(
            environment.function
        )  # a config is prepared without it: it is imported as episodes are played
        absent.__spec__ = ModuleSpec(environment.function, None)
        monkeypatch.setitem(sys.modules, environment.function, absent)
    if environment and environment.function == "python":
        request.getfixturevalue("sandbox")
    prepared = []
    monkeypatch.setattr(
        runs.PreparedRun, "execute", lambda self, *options, **named: prepared.append(self) or {"updates": 1}
    )
    before = sorted(inside.rglob("*"))
    assert main(["train", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "data    " in shown and "run     " in shown
    assert main(["train", *arguments]) == 0, capsys.readouterr().err
    (run,) = prepared
    assert run.identity and isinstance(run.config, runs.RunConfig)
    assert len(prepared) == 1 and sorted(inside.rglob("*")) == before, "nothing was run or written"


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ("configs/quickstart.yaml", "model.path=./absent", "./absent does not exist"),
        ("configs/quickstart.yaml", "rollout.engine=x", "unknown engine 'x'"),
        ("configs/quickstart.yaml", "reward.functions=[{function: strictmath}]", "strict_math"),
        ("configs/quickstart.yaml", "model.device=cuda:99", "model.device=cuda:99"),
        ("configs/quickstart.yaml", "rollout.completions_per_prompt=1", "completions_per_prompt"),
        ("configs/quickstart.yaml", "train.max_row_tokens=2", "max_row_tokens"),
        ("configs/algorithms/gkd.yaml", "teacher.path=./absent", "teacher.path"),
        ("configs/algorithms/ppo.yaml", "critic.path=./absent", "critic.path"),
        ("configs/pretrain_shakespeare_char.yaml", "pretrain.window_tokens=512", "pretrain.window_tokens=512"),
        ("configs/quickstart_sft.yaml", "sft.gpt.max_tokens=16", "sft.gpt.max_tokens"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_run_refuses(config, change, said, inside, capsys):
    _, arguments = given(ROOT / config)
    messages = []
    for more in ([], ["--dry-run"]):
        assert main(["train", *arguments, change, "run_name=refused", *more]) == 2, change
        messages.append(capsys.readouterr().err.partition("error: ")[2])
    assert said in messages[0] and messages[0] == messages[1], messages
    assert not (inside / "runs" / "refused").exists()
