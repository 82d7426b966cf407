"""Runs on pictures: RL with a resume and from a pool, SFT, preferences, adapters, and what is refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.config import ConfigError, load_config
from atomrl.data.files import DataError
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.tools.ui import rollouts
from atomrl.tracking.reading.rollouts import RolloutIndex
from atomrl.trainer import Options, prepare_run
from tests.tiny import make_tiny_model
from tests.tiny_vision import make_tiny_vision_model, picture

ROWS = [{"prompt": "what colour?", "images": ["one.png"], "ground_truth": "a"},
        {"prompt": "<image>and<image>?", "images": ["two.png", "one.png"], "ground_truth": "b"},
        {"prompt": "no picture", "ground_truth": "c"}]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Two pictures and rows with them, as problems, demonstrations and preferences."""
    picture(1, 84, 56).save(tmp_path / "one.png")
    picture(2).save(tmp_path / "two.png")
    rows = {"rl": ROWS, "sft": [row | {"completion": "yes"} for row in ROWS],
            "dpo": [row | {"chosen": "yes", "rejected": "no"} for row in ROWS]}  # fmt: skip
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    make_tiny_vision_model(tmp_path / "model")
    return tmp_path


def config(folder, name="run", **sections):
    tree = {
        "run_name": name, "output_dir": str(folder), "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "rl.jsonl")},
        "rollout": {"engine": "hf", "prompts_per_step": 3, "completions_per_prompt": 2, "max_completion_tokens": 4},
        "reward": {"functions": [{"function": "bright"}]}, "train": {"steps": 2, "learning_rate": 0.01},
        "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    for section, keys in sections.items():
        tree[section] = keys if keys is None else {**(tree.get(section) or {}), **keys}
    return load_config({section: keys for section, keys in tree.items() if keys is not None})


def bright(prompts, completions, images=(), **columns):
    """Open each picture of a completion."""
    from PIL import Image

    for pictures in images:
        for path in pictures or []:
            Image.open(path).load()
    return [float(sum(map(ord, text)) % 7) for text in completions]


def run(made, resume=False):
    prepared = prepare_run(made, {"bright": bright} if made.kind == "rl" else None)
    prepared.execute(Options(resume=resume))
    return load_file(made.run_dir / "model" / "model.safetensors")


def lines(made):
    return [json.loads(line) for line in (made.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_needs_no_other_file_and_ends_bit_for_bit_the_same(folder):
    whole = run(config(folder, "whole"))
    stored = sorted((folder / "whole" / "inputs" / "images").glob("*.png"))
    assert [file.read_bytes() for file in stored] == [
        (folder / name).read_bytes()
        for name in sorted(("one.png", "two.png"), key=lambda name: stored_name(folder, name))
    ]
    assert max(row["training/rollout_probs_diff_max"] for row in lines(config(folder, "whole"))) < 1e-5
    before = load_file(folder / "model" / "model.safetensors")
    assert {name for name in whole if whole[name].equal(before[name])} == {n for n in whole if "visual" in n}

    run(config(folder, "cut", train={"steps": 1}))
    for name in ("one.png", "two.png"):
        (folder / name).rename(folder / f"gone_{name}")
    later = config(folder, "cut", train={"steps": 2})
    prepare_run(later, {"bright": bright}).execute(Options(resume=True, allow_changes=True))
    again = load_file(later.run_dir / "model" / "model.safetensors")
    assert all(again[name].equal(whole[name]) for name in whole)
    picture(5).save(folder / "one.png")
    with pytest.raises(ConfigError, match=r"data \(data.train\)"):
        prepare_run(config(folder, "whole", train={"steps": 3}), {"bright": bright}).execute(Options(resume=True))


def stored_name(folder, name):
    import hashlib

    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_a_dry_run_of_resuming_says_what_resuming_says(folder, capsys):
    """And changes nothing."""

    def said(*words):
        capsys.readouterr()
        code = main(["train", str(folder / "run.yaml"), "--resume", *words])
        printed = capsys.readouterr()
        return code, printed.err if code else printed.out

    made = config(folder, reward={"functions": [{"function": "exact_match"}]}, train={"steps": 1})
    (folder / "run.yaml").write_text(json.dumps(made.model_dump(mode="json", exclude_unset=True)))
    assert said("--dry-run") == said() and "no run to resume" in said()[1]
    assert main(["train", str(folder / "run.yaml")]) == 0
    files = {file: file.read_bytes() for file in made.run_dir.rglob("*") if file.is_file()}
    code, shown = said("--dry-run", "train.steps=2")
    assert code == 0 and "train.steps: 1 -> 2" in shown and "continues after step 1" in shown
    for changed in (lambda: picture(5).save(folder / "one.png"), lambda: (folder / "rl.jsonl").write_text(
            json.dumps(ROWS[0]))):  # fmt: skip
        changed()
        assert said("--dry-run") == said() and "data (data.train): changed since" in said("--dry-run")[1]
    assert said("--dry-run", "seed=3") == said("seed=3") and "seed: 0 -> 3" in said("seed=3")[1]
    assert said("--dry-run", "--allow-changes")[0] == 0
    assert {file: file.read_bytes() for file in made.run_dir.rglob("*") if file.is_file()} == files


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_demonstrations_and_preferences_train_on_pictures(folder, kind):
    """The first step of the same rows with another picture is another one."""
    section = {"sft": {}} if kind == "sft" else {"algorithm": {"name": "dpo"}}
    section |= {"data": {"train": str(folder / f"{kind}.jsonl")}, "rollout": None, "reward": None}
    first = run(config(folder, "first", train={"steps": 1, "rows_per_update": 3}, **section))
    picture(7, 84, 56).save(folder / "one.png")
    second = run(config(folder, "second", train={"steps": 1, "rows_per_update": 3}, **section))
    assert any(not first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("changes", [{"lora": {"rank": 2}}, {"freeze_vision": False}], ids=["adapters", "tower"])
def test_adapters_leave_the_tower_alone_and_it_may_be_trained(folder, changes):
    made = config(folder, model=changes, train={"steps": 1})
    prepare_run(made, {"bright": bright}).execute()
    [metrics] = lines(made)
    assert metrics["actor/grad_norm"] > 0 and metrics["training/rollout_probs_diff_max"] < 1e-5
    if "lora" in changes:
        assert not any("visual" in name for name in load_file(made.run_dir / "model" / "adapter_model.safetensors"))
    else:
        after, before = (load_file(at / "model.safetensors") for at in (made.run_dir / "model", folder / "model"))
        assert any("visual" in name and not after[name].equal(before[name]) for name in after)


def test_groups_of_a_pool_have_their_pictures(folder):
    from atomrl.trainer.pool_fill import fill

    made = config(folder, rollout={"source": "pool"}, train={"steps": 1}, pool={"timeout_s": 5})
    prepared = prepare_run(made, {"bright": bright})
    fill(prepared, groups=3, report=lambda line: None)
    for name in ("one.png", "two.png"):
        (folder / name).unlink()
    prepare_run(made, {"bright": bright}).execute()
    assert lines(made)[0]["training/rollout_probs_diff_max"] < 1e-5


EPISODES = {"environment": {"function": "tests.vision.played.screen", "images": True, "max_turn_tokens": 4},
            "rollout": {"max_completion_tokens": 150}}  # fmt: skip


def test_a_run_shows_the_pictures_of_its_environment(folder, capsys):
    """One row of the data has pictures too; the reward gets those that the model has seen."""
    seen = []

    def counted(prompts, completions, images, **columns):
        seen.extend(images)
        return bright(prompts, completions, images)

    made = config(folder, **EPISODES, train={"steps": 1})
    prepare_run(made, {"bright": counted}).execute()
    assert max(row["training/rollout_probs_diff_max"] for row in lines(made)) < 1e-5
    assert lines(made)[-1]["environment/replies/screen"] > 0
    rows = [
        json.loads(line)
        for line in (made.run_dir / "rollouts" / "step_000001" / "train.jsonl").read_text().splitlines()
    ]
    stored = {file.name for file in (made.run_dir / "inputs" / "images").glob("*.png")}
    for row, paths in zip(rows, seen, strict=False):
        turns = [turn.get("images", []) for turn in row["episode"]["turns"]]
        assert [len(names) for names in turns] == [1, 2, 0]
        of_replies = [name for names in turns for name in names]
        assert {*of_replies} <= stored
        assert [Path(path).name for path in paths] == [*row.get("images", []), *of_replies]
    place, row = next((place, row) for place, row in enumerate(rows) if len(row.get("images", [])) == 2)
    assert len(seen[place]) == 5

    capsys.readouterr()
    assert main(["rollouts", str(made.run_dir), "--full", "--step", "1"]) == 0
    shown = capsys.readouterr().out
    for each in rows:
        for name in (*each.get("images", []), *each["episode"]["turns"][0]["images"]):
            assert f"picture: inputs/images/{name}\n" in shown
    shown = rollouts.group(RolloutIndex(made.run_dir / "rollouts"), 1, "train", place)
    assert shown["images"] == row["images"]
    pictures = [turn["images"] for turn in shown["members"][0]["episode"]["turns"]]
    assert pictures == [turn.get("images", []) for turn in row["episode"]["turns"]]


WAYS = {
    "ahead": {"asynchronous": {"max_staleness": 2}},
    "aborted": {"asynchronous": {"max_staleness": 1, "on_update": "abort"}},
    "two_ranks": {"backend": {"type": "fsdp", "ranks": 2}, "model": {"freeze_vision": False}},
}


@pytest.mark.parametrize("way", ["ahead", *(pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:])])
def test_rows_have_the_pictures_of_their_episodes_in_every_loop(folder, way):
    """The weights hardly change, so the log-probs of stale rows are the trainer's too."""
    sections = {**EPISODES, **WAYS[way], "train": {"steps": 3, "learning_rate": 1e-10}}
    made = config(folder, **sections)
    prepare_run(made, {"bright": bright}).execute()
    rows = lines(made)
    assert [row["environment/replies/screen"] for row in rows] == [1.0] * 3
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-5
    if "asynchronous" in sections:
        assert max(row["async/staleness_max"] for row in rows) > 0


@pytest.mark.slow
def test_a_resumed_run_with_pictures_of_an_environment_ends_bit_for_bit_the_same(folder):
    whole = run(config(folder, "whole", **EPISODES))
    run(config(folder, "cut", **EPISODES, train={"steps": 1}))
    later = config(folder, "cut", **EPISODES)
    prepare_run(later, {"bright": bright}).execute(Options(resume=True, allow_changes=True))
    again = load_file(later.run_dir / "model" / "model.safetensors")
    assert all(again[name].equal(whole[name]) for name in whole)


REFUSED = {
    "replies_for_sglang": (EPISODES | {"rollout": {"engine": "sglang"}, "data": {"train": "text.jsonl"}},
                           "SGLangEngine does not take pictures, and the run has some"),
    "replies_for_a_model_of_text": (EPISODES | {"data": {"train": "text.jsonl"}, "model": {"path": "text"}},
                                    "environment.images: text (llama) reads text alone; use a model with a vision"),
    "sglang": ({"rollout": {"engine": "sglang"}}, "SGLangEngine does not take pictures, and the run has some"),
    "vllm": ({"rollout": {"engine": "vllm", "temperature": 0.7}}, "those of pictures may not: use"),
    "vllm_elsewhere": ({"rollout": {"engine": "vllm-server", "server": "http://127.0.0.1:1"}, "cluster": {}},
                       "rollout.server: pictures are sent in the encoding of vllm, which is not installed here"),
    "critic": ({"algorithm": {"name": "ppo"}}, "model cannot be used as a critic: model_type 'qwen2_5_vl' is not one"),
    "critic_of_text": ({"algorithm": {"name": "ppo"}}, "algorithm.name=ppo: a critic reads text alone"),
    "packed": ({"model": {"pack_rows": True}}, "model.pack_rows=true: rows with pictures are padded"),
    "packing": ({"sft": {"packing": "bfd"}, "train": {"max_row_tokens": 200}, "rollout": None, "reward": None},
                "sft.packing: rows with pictures are not packed"),
    "megatron": ({"backend": {"type": "megatron", "ranks": 2}}, "backend.type=megatron: trains on text alone"),
    "sequence": ({"backend": {"type": "fsdp", "ranks": 2, "sequence": 2}}, "backend.sequence, backend.tensor: rows"),
    "reward_model": ({"algorithm": {"name": "reward_model"}, "rollout": None, "reward": None},
                     "reward models read text alone"),
    "no_picture": ({"data": {"max_pixels": 99}}, "data.max_pixels: no row of the data has a picture; remove the key"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_text_alone_is_refused_before_weights_are_read(folder, case, monkeypatch):
    sections, message = REFUSED[case]
    if case == "reward_model":
        sections = sections | {"data": {"train": str(folder / "dpo.jsonl")}}
    if case == "packing":
        sections = sections | {"data": {"train": str(folder / "sft.jsonl")}}
    if case == "critic_of_text":
        shape = json.loads((folder / "model" / "config.json").read_text())["text_config"]
        critic = make_tiny_model(folder / "text", vocab_size=shape["vocab_size"])
        for file in critic.glob("tokenizer*"):  # it has the policy's
            file.unlink()
        sections = sections | {"critic": {"path": str(critic)}}
    if case == "no_picture":
        (folder / "rl.jsonl").write_text(json.dumps(ROWS[2] | {"images": []}))
    if case.startswith("replies"):
        monkeypatch.chdir(folder)
        make_tiny_model(folder / "text")
        (folder / "text.jsonl").write_text(json.dumps(ROWS[2]))
    for engine in (VLLMEngine, SGLangEngine):
        monkeypatch.setattr(engine, "package", None)  # it need not be installed to be refused
    monkeypatch.setattr(VLLMServerEngine, "package_version", classmethod(lambda cls: None))
    (folder / "model" / "model.safetensors").unlink()
    made = config(folder, **sections)
    with pytest.raises(DataError if case == "packing" else ConfigError) as error:
        prepare_run(made, {"bright": bright} if made.kind == "rl" else None)
    assert message in str(error.value)


def test_a_dry_run_without_the_model_reads_the_pictures(folder, capsys):
    (folder / "run.yaml").write_text(json.dumps({
        "run_name": "run", "model": {"path": "some/vision-model"}, "data": {"train": str(folder / "rl.jsonl")},
        "reward": {"functions": [{"function": "exact_match"}]}, "algorithm": "grpo",
    }))  # fmt: skip
    assert main(["train", str(folder / "run.yaml"), "--dry-run"]) == 0
    assert "train: 3 problems" in capsys.readouterr().out
    (folder / "two.png").unlink()
    assert main(["train", str(folder / "run.yaml"), "--dry-run"]) == 2
    assert "two.png cannot be read" in capsys.readouterr().err


def test_a_picture_for_a_model_of_text_is_refused(folder):
    make_tiny_model(folder / "text")
    with pytest.raises(DataError, match=r"rl.jsonl:1: column 'images' has pictures"):
        prepare_run(config(folder, model={"path": str(folder / "text")}), {"bright": bright})
    assert not Path(folder / "run").exists()
