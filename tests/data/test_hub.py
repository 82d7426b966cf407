"""Data sets by their name on the Hugging Face hub, from caches that are made here, without a network."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.config import DataConfig
from atomrl.data.checks import check_data
from atomrl.data.files import DataError
from atomrl.data.hub import HubSource, find_hub_source, pinned
from atomrl.data.problems import load_problems, read_source
from tests.arithmetic import arithmetic_run
from tests.tiny import make_tiny_model

A, B = "a" * 40, "b" * 40
ROWS = [{"question": f"{n}+{n}=", "answer": f"So it is\n#### {2 * n}"} for n in range(5)]
FIELDS = {"prompt_field": "question", "answer_field": "answer", "answer_pattern": r"####\s*(.+)"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty home of the hub's client and of `datasets`, which are offline."""
    datasets = pytest.importorskip("datasets", reason="needs the extra hub")
    import huggingface_hub.constants

    home = tmp_path / "hf"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return home


def downloaded(home: Path, name: str, commit: str, files: dict[str, list[dict]], card: str = "", ref: str = "main"):
    """As `hf download --repo-type dataset` leaves a data set of JSONL and Parquet files."""
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for path, rows in files.items():
        file = folder / "snapshots" / commit / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".parquet"):
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if card:
        (folder / "snapshots" / commit / "README.md").write_text(card)


GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture
def gsm8k(cache):
    files = {
        "main/train-0.parquet": ROWS[:2], "main/train-1.parquet": ROWS[2:4], "main/test-0.parquet": ROWS[4:],
        "socratic/train-0.parquet": ROWS[:1],
    }  # fmt: skip
    downloaded(cache, "openai/gsm8k", A, files, GSM8K_CARD)
    return cache


def read_before(home: Path, name: str, kind: str, commit: str, splits: dict[str, list[dict]]) -> None:
    """As `datasets.load_dataset` leaves what it has read."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    owner, _, own = name.partition("/")
    folder = home / "datasets" / f"{owner}___{own}" / kind / "0.0.0" / commit
    folder.mkdir(parents=True)
    infos = datasets.SplitDict(dataset_name=own)
    for split, rows in splits.items():
        with ArrowWriter(
            path=str(folder / f"{own}-{split}.arrow"), features=datasets.Dataset.from_list(rows).features
        ) as to:
            for row in rows:
                to.write(row)
            to.finalize()
        infos[split] = datasets.SplitInfo(name=split, num_examples=len(rows), dataset_name=own)
    features = datasets.Dataset.from_list(rows).features
    datasets.DatasetInfo(
        features=features, splits=infos, config_name=kind, dataset_name=own,
        builder_name="parquet", version="0.0.0",
    ).write_to_directory(str(folder))  # fmt: skip


def problems(source: str, split="train", **changes):
    given = {"train": source, "eval": source if split == "eval" else None}
    return load_problems(DataConfig(**given, **{**FIELDS, **changes}), split).problems


@pytest.mark.parametrize("layout", ["files", "rows"])
def test_problems_by_name(cache, layout):
    if layout == "files":
        downloaded(cache, "openai/gsm8k", A, {"main/train-0.parquet": ROWS[:4], "main/test-0.jsonl": ROWS[4:]}, "")
        (cache / "hub/datasets--openai--gsm8k/snapshots" / A / "main/test-0.jsonl").unlink()
        downloaded(cache, "openai/gsm8k", A, {"main/test-0.parquet": ROWS[4:]}, GSM8K_CARD.replace("socratic", "other"))
        downloaded(cache, "openai/gsm8k", A, {"other/train-0.parquet": ROWS[:1]})
    else:
        read_before(cache, "openai/gsm8k", "main", A, {"train": ROWS[:4], "test": ROWS[4:]})
    loaded = problems("openai/gsm8k:main:train")
    assert [problem.prompt for problem in loaded] == ["0+0=", "1+1=", "2+2=", "3+3="]
    assert [problem.ground_truth for problem in loaded] == ["0", "2", "4", "6"]
    assert loaded[1].problem_id == "openai/gsm8k:main:train:2" and loaded[1].columns["answer"].startswith("So it is")
    assert [problem.prompt for problem in problems("openai/gsm8k:main:test", "eval")] == ["4+4="]
    assert pinned("openai/gsm8k:main:train") == f"openai/gsm8k:main:train@{A}"
    assert [row.row for row in read_source(pinned("openai/gsm8k:main:train"))] == ROWS[:4]


def test_the_split_of_train_is_train_and_that_of_eval_has_to_be_named(gsm8k):
    assert len(problems("openai/gsm8k:main")) == 4 and len(problems("openai/gsm8k:socratic")) == 1
    with pytest.raises(DataError, match="openai/gsm8k:main has no split"):
        problems("openai/gsm8k:main", "eval")
    assert [problem.prompt for problem in problems("openai/gsm8k:main:train[:50%]")] == ["0+0=", "1+1="]
    assert len(problems("openai/gsm8k:main:train+test")) == 5


def test_only_the_rows_of_train_size_are_read(gsm8k):
    bad = gsm8k / "hub/datasets--openai--gsm8k/snapshots" / A / "main/train-1.parquet"
    bad.write_bytes(b"PAR1 and no more")
    downloaded(gsm8k, "openai/gsm8k", A, {"main/train-0.parquet": ROWS[:1] * 1000})  # rows are read by the thousand
    assert len(problems("openai/gsm8k:main:train", train_size=2)) == 2
    with pytest.raises(DataError, match="Hugging Face hub"):
        problems("openai/gsm8k:main:train")


@pytest.mark.parametrize(("source", "message"), [
    ("openai/gsm8k", r"openai/gsm8k: Config name is missing.*main.*socratic"),
    ("openai/gsm8k:train", "openai/gsm8k:train: .*not found.*for a split alone openai/gsm8k::SPLIT"),
    ("openai/gsm8k:main:dev", "openai/gsm8k:main:dev has no split 'dev'; it has train, test"),
])  # fmt: skip
def test_missing_splits_and_configs_are_named(gsm8k, source, message):
    with pytest.raises(DataError, match=message):
        problems(source)


def test_a_revision_is_the_one_that_is_read(cache):
    downloaded(cache, "me/sums", A, {"train.jsonl": ROWS[:1]}, ref="main")
    downloaded(cache, "me/sums", B, {"train.jsonl": ROWS[:3]}, ref="v2")
    sizes = {
        source: len(problems(source)) for source in ("me/sums", f"me/sums@{A}", "me/sums@v2", f"me/sums::train@{B}")
    }
    assert list(sizes.values()) == [1, 1, 3, 3]
    assert pinned(["me/sums", "me/sums@v2"]) == [f"me/sums@{A}", f"me/sums@{B}"]
    for unknown in ("me/sums@v3", "me/sums@" + "c" * 40):
        with pytest.raises(DataError, match="cache"):
            problems(unknown)


def test_rows_of_another_revision_are_not_taken(cache):
    """The cache of `datasets` gives its latest by itself, whatever revision is asked for."""
    read_before(cache, "me/sums", "default", A, {"train": ROWS[:1]})
    read_before(cache, "me/sums", "default", B, {"train": ROWS[:3]})
    assert [len(problems(f"me/sums@{commit}")) for commit in (A, B)] == [1, 3]
    with pytest.raises(DataError, match="cache"):
        problems("me/sums@" + "c" * 40)


LAYOUTS = [
    ([{"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}], "demonstrations"),
    ([{"prompt": "2+2=", "chosen": "4", "rejected": "5"}], "preferences"),
    ([{"prompt": [{"role": "user", "content": "2+2="}], "reward_model": {"ground_truth": "4"}}], "problems"),
    ([{"instruction": "Add.", "input": "2, 2", "output": "4"}], "demonstrations"),
    ([{"prompt": "2+2=", "ground_truth": 4}], "problems"),
]


@pytest.mark.parametrize(("rows", "kind"), LAYOUTS)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_each_kind_of_rows(cache, rows, kind, suffix):
    downloaded(cache, "me/rows", A, {f"data/train-00000-of-00001.{suffix}": rows})
    field = "reward_model.ground_truth" if "reward_model" in rows[0] else "ground_truth"
    report = check_data("me/rows", DataConfig(train="me/rows", answer_field=field))
    assert (report.kind, report.rows, report.ok) == (kind, 1, True)


def test_files_and_data_sets_of_the_hub_are_read_together(gsm8k, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps(ROWS[4]) + "\n")
    config = DataConfig(train=["own.jsonl", "openai/gsm8k:main:test", "openai/gsm8k:socratic:train"], **FIELDS)
    assert [sample.problem_id for sample in load_problems(config).problems] == [
        "own.jsonl:1", "openai/gsm8k:main:test:1", "openai/gsm8k:socratic:train:1",
    ]  # fmt: skip


def test_a_bad_row_has_its_place(cache):
    downloaded(cache, "me/sums", A, {"train.jsonl": [ROWS[0], {"question": "1+1=", "answer": "2"}]})
    with pytest.raises(DataError, match="me/sums::train:2: field 'answer'"):
        problems("me/sums")
    assert len(problems("me/sums", on_bad_row="skip")) == 1


def test_without_network_and_cache_one_error_says_what_to_do(cache):
    with pytest.raises(DataError) as error:
        problems("openai/gsm8k:main:train")
    said = str(error.value)
    assert "'openai/gsm8k:main:train' is not a file or folder" in said and "HF_HUB_OFFLINE is set" in said
    assert "atomrl data check openai/gsm8k:main:train" in said
    assert "datasets.load_dataset('openai/gsm8k', 'main', split='train').to_parquet('gsm8k.parquet')" in said
    assert "\n" not in said and error.value.__cause__ is None


def test_without_the_library_one_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match="pip install 'datasets"):
        list(read_source("openai/gsm8k:main:train"))


def test_the_library_is_imported_only_where_it_is_used(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2=", "ground_truth": 4}\n')
    code = "import sys; from atomrl.data.problems import read_source; list(read_source('a.jsonl')); "
    code += "print('datasets' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "False"


@pytest.mark.parametrize("source", [
    "train.jsonl", "data/train.jsonl", "data/train.parquet", "data/train.csv.gz", "./data/train", "../train",
    "/data/train",
    "~/train", "a/b/c", "gsm8k", "arithmetic", "reasoning_gym:chain_sum", "data/TRAIN.JSONL", "data/rows.txt",
    "here/rows",
])  # fmt: skip
def test_a_path_is_no_name(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert find_hub_source(source) is None


def test_a_path_that_is_there_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    (tmp_path / "openai" / "gsm8k").write_text('{"prompt": "2+2=", "ground_truth": 4}\n')
    assert len(load_problems(DataConfig(train="openai/gsm8k")).problems) == 1
    with pytest.raises(DataError, match=r"data file openai/gsm.*openai/gsm::train"):
        load_problems(DataConfig(train="openai/gsm"))
    assert find_hub_source("openai/gsm::train") == HubSource("openai/gsm", None, "train")


@pytest.mark.parametrize("source", [
    "openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:train", "openai/gsm8k::train", "openai/gsm8k@v1",
    "Org/prompts-v0.1",
    f"openai/gsm8k:main:train@{A}", "a/b:all:train[:10%]+test@refs/convert/parquet",
])  # fmt: skip
def test_a_name_is_written_as_it_is_read(source):
    assert str(find_hub_source(source)) == source


def test_a_run_records_the_commit_and_reads_it_again(cache, tmp_path, capsys):
    from atomrl.cli.main import main

    model = make_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in range(9)]
    downloaded(cache, "me/sums", A, {"train.jsonl": rows[:8], "test.jsonl": rows[8:]})
    sources = ["data.train=me/sums", "data.eval=me/sums::test", "data.train_size=null", "train.steps=1"]
    assert main(["train", *arithmetic_run(model, "r", "strict_math"), *sources]) == 0
    config = tmp_path / "runs" / "r" / "config.yaml"
    assert f"train: me/sums@{A}" in config.read_text() and f"eval: me/sums::test@{A}" in config.read_text()
    downloaded(cache, "me/sums", B, {"train.jsonl": rows[1:], "test.jsonl": rows[:1]})
    capsys.readouterr()
    assert main(["train", *arithmetic_run(model, "r", "strict_math"), *sources, "--resume"]) == 2
    assert "data" in capsys.readouterr().err, "the hub has moved on"
    assert main(["train", str(config), "--resume"]) == 0
