"""tools/import_corpus.py brings public repositories to their commits and scores their files."""

import importlib
import subprocess
from pathlib import Path

import pytest

CONFIG = "model_name_or_path: m\ndataset: d\ndo_train: true\nstage: {}\nfinetuning_type: full\n"


def test_files_of_a_commit_are_fetched_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    tool = importlib.import_module("import_corpus")
    theirs, checkouts = tmp_path / "org" / "name", tmp_path / "checkouts"
    (theirs / "a").mkdir(parents=True)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", "-C", theirs, *identity, *words], text=True).strip()

    def committed(**files: str) -> str:
        for name, stage in files.items():
            (theirs / "a" / f"{name}.yaml").write_text(CONFIG.format(stage))
        (theirs / "weights.bin").write_bytes(b"0")
        git("add", ".")
        git("commit", "-qm", "one")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    first, later = committed(good="sft"), committed(good="ppo", more="rm")
    monkeypatch.setattr(tool, "LIST", tmp_path / "list.txt")

    def scored(commit: str, fetch: bool) -> list[tuple[str, str]]:
        tool.LIST.write_text(f"# a comment\norg/name@{commit[:9]} a/*.yaml\n")
        if fetch:
            tool.fetch(checkouts, tmp_path.as_uri())
        return [(name, tool.result(path)[0]) for _, name, path in tool.listed(checkouts)]

    with pytest.raises(SystemExit, match=f"is not at {first[:9]} of org/name: --fetch"):
        scored(first, fetch=False)
    assert scored(first, fetch=True) == [("a/good.yaml", "left to you")]
    with pytest.raises(SystemExit, match=f"is not at {later[:9]}"):
        scored(later, fetch=False)
    assert scored(later, fetch=True) == [("a/good.yaml", "refused"), ("a/more.yaml", "left to you")]
    assert not (checkouts / "org+name" / "weights.bin").exists()
