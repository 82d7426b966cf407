"""Contents of a run's first page and of the manual's pages."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from atomrl.common.files import write_text
from atomrl.tools.ui import catalog
from atomrl.tools.ui.catalog import Catalog, held_out
from atomrl.tools.ui.docs import TAGS, TEXTS, Manual
from atomrl.tools.ui.rollouts import BadQuestion, before_after, glimpse, page
from atomrl.tracking.doctor import RULES
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.rollouts import RolloutIndex
from atomrl.tracking.reading.state import FIRST_STEP_S, SILENCE_S, WRITTEN, silence
from tests.tools.ui.made import log_evaluation, log_step, make_run


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose evaluation went from one prompt of four to another three."""
    folder = make_run(tmp_path / "run", steps=3)
    log_evaluation(folder, 0, right=1)
    path = folder / "rollouts" / "step_000003" / "eval.jsonl"
    log_evaluation(folder, 3, right=3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_text(path, "".join(json.dumps(row | {"reward": 1.0 - (n == 0)}) + "\n" for n, row in enumerate(rows)))
    return folder


def test_a_prompt_before_and_after(run):
    index = RolloutIndex(run / "rollouts")
    prompts = before_after(index, {})
    assert (prompts["split"], prompts["splits"]) == ("eval", ["eval", "train"])
    assert prompts["counts"] == {"all": 4, "better": 3, "worse": 1, "same": 0}
    assert (prompts["shown"], prompts["at"], prompts["previous"]) == (4, 0, None)
    better = before_after(index, {"change": "better"})
    assert better["shown"] == 3 and better["prompt"]["prompt"] == "1 + 1 = ?"
    assert (better["prompt"]["before"]["step"], better["prompt"]["after"]["step"]) == (0, 3)
    assert (better["prompt"]["before"]["mean"], better["prompt"]["after"]["mean"]) == (0.0, 1.0)
    after = before_after(index, {"change": "better", "prompt": better["next"]})
    assert (after["at"], after["prompt"]["prompt"]) == (1, "2 + 1 = ?")
    trained = before_after(index, {"split": "train"})
    assert (trained["counts"]["same"], trained["prompt"]["after"]["of"]) == (2, 4)
    assert before_after(index, {"change": "same"})["prompt"] is None
    with pytest.raises(BadQuestion):
        before_after(index, {"change": "odd"})


def test_the_newest_and_the_worst_completions(run):
    given = (1, 1), (0, -1), (0, -3), (None, None)
    rows = [{"reward": reward, "advantage": advantage} for reward, advantage in given]
    path = run / "rollouts" / "step_000004" / "train.jsonl"
    more = {"step": 4, "completion": "x" * 9999, "prompt": "p", "prompt_tokens": 1, "completion_index": 0}
    write_text(path, "".join(json.dumps(row | more | {"prompt_id": str(n)}) + "\n" for n, row in enumerate(rows)))
    glimpsed = glimpse(RolloutIndex(run / "rollouts"))
    assert (glimpsed["step"], glimpsed["completions"], glimpsed["mean"]) == (4, 4, pytest.approx(1 / 3))
    assert [row["place"] for row in glimpsed["newest"]] == [0, 1, 2]
    assert [row["place"] for row in glimpsed["worst"]] == [2, 1]  # of equals the one whose group did better
    assert glimpsed["newest"][0]["cut_short"] and len(glimpsed["newest"][0]["completion"]) < 2000
    write_text(path, path.read_text().splitlines()[1] + '\n{"half')
    glimpsed = glimpse(RolloutIndex(run / "rollouts"))
    assert glimpsed["completions"] == 1 and glimpsed["worst"] == []  # none is worse than another


def test_a_run_without_completions_has_none(tmp_path):
    index = RolloutIndex(tmp_path / "rollouts")
    assert glimpse(index)["step"] is None and before_after(index, {})["prompt"] is None
    assert page(index, {"newest": "true"})["around"] == dict.fromkeys(("first", "previous", "next", "newest"))
    pairs = tmp_path / "rollouts" / "step_000001" / "eval.jsonl"
    write_text(pairs, '{"problem_id": "a", "rewards": [0.1, 0.2]}\n')  # as an evaluation of preferences keeps them
    index.refresh()
    assert len(index) == 0 and index.problems == []


def test_a_page_shows_few_of_very_many_completions(tmp_path):
    row = {"prompt": "p", "completion": "c", "prompt_tokens": 1, "completion_tokens": 1}
    for step in (1, 10**14):
        own = ({"prompt": f"p{n // 4}", "prompt_id": n // 4, "reward": float(n % 4 < step)} for n in range(10_000))
        write_text(tmp_path / f"step_{step:06d}" / "train.jsonl", "".join(json.dumps(row | one) + "\n" for one in own))
    index = RolloutIndex(tmp_path)
    assert before_after(index, {})["counts"] == {"all": 2500, "better": 2500, "worse": 0, "same": 0}
    rows = page(index, {"newest": "true", "limit": "100000"})
    assert (rows["total"], rows["of"], len(rows["rows"])) == (10_000, 20_000, 200)
    assert rows["around"] == {"first": 1, "previous": 1, "next": None, "newest": 10**14}


def test_the_duration_and_the_best_checkpoint_of_a_run(run):
    (run / "summary.json").write_text(json.dumps({"finished": True, "wall_s": 61.5}))
    (run / "best").symlink_to("checkpoints/step_000002/model")
    summary = catalog.outcome(Run(run))
    assert (
        summary["seconds"] == 61.5
        and summary["best"] == {"path": str(run / "best"), "step": 2}
        and not summary["newest"]
    )


def test_rewards_that_are_not_right_or_wrong_are_called_reward(run):
    with (run / "metrics.jsonl").open("w") as file:
        for step, reward in ((0, -1.5), (5, 2.5), (6, 2.0)):
            row = {"step": step, "val-core/a/reward/mean@1": reward, "val-core/all/reward/mean@1": reward}
            file.write(json.dumps(row) + "\n")
    of_all, of_one = held_out(Run(run))
    assert (of_all["kind"], of_all["source"], of_one["source"]) == ("reward", "all", "a")
    assert (of_all["first"], of_all["last"], of_all["largest"]) == ([0, -1.5], [6, 2.0], [5, 2.5])


def test_a_run_that_hangs_is_distinguished(run, monkeypatch):
    monkeypatch.setattr(catalog, "is_locked", lambda _: True)
    monkeypatch.setattr("atomrl.tracking.reading.state.is_locked", lambda _: True)
    entry = Catalog(run.parent).entry(catalog.id_of("run"))
    of = Catalog(run.parent).card
    before, lively = entry.current_stamp(), of(entry)
    assert (lively["status"], lively["silent_s"]) == ("running", None)
    long_ago = time.time() - SILENCE_S - 5
    for name in WRITTEN:
        if (run / name).exists():
            os.utime(run / name, (long_ago, long_ago))
    assert silence(run, 2.0) > SILENCE_S and silence(run, 60.0) is None  # ten of its steps take longer
    assert silence(run, None) is None and FIRST_STEP_S > SILENCE_S  # it loads its model
    still = entry.current_stamp()
    assert before[-1] == 1 and still[-1] == 2 and of(entry)["silent_s"] > SILENCE_S
    log_step(run, 4)
    assert of(entry)["silent_s"] is None


def nodes(tree):
    for one in tree:
        if not isinstance(one, str):
            yield one
            yield from nodes(one[2])


def test_every_finding_has_its_page_and_links_lead_to_pages_and_their_anchors():
    manual = Manual()
    assert {f"guides/troubleshooting/{rule.id}" for rule in RULES} <= set(manual.pages)
    allowed = {*TAGS.values(), *TEXTS.values(), "a", "h1", "h2", "h3", "h4"}
    trees = {name: list(nodes(manual.tree(name))) for name in manual.pages}
    anchors = {name: {attributes.get("id") for _, attributes, _ in tags} for name, tags in trees.items()}
    for tags in trees.values():
        assert {tag for tag, _, _ in tags} <= allowed
        for _, attributes, _ in tags:
            target = attributes.get("href", "https://")
            assert re.match(r"https?://|#/docs/", target) and set(attributes) <= {"href", "id"}
            if target.startswith("#"):
                name, _, at = target.removeprefix("#/docs/").partition("?at=")
                assert not at or at in anchors[name], target
    links = [attributes["href"] for tag, attributes, _ in trees["guides/troubleshooting/skipped_updates"] if tag == "a"]
    assert "#/docs/guides/checkpoints?at=gradients-that-are-not-finite" in links
    assert {"gradients-that-are-not-finite"} <= anchors["guides/checkpoints"]
    assert "which-engine" in anchors["guides/distributed_rollout"]
    with pytest.raises(LookupError):
        manual.tree("../pyproject")


def test_an_installed_package_says_where_its_documentation_is(tmp_path):
    manual = Manual(tmp_path)
    assert manual.titles() == {}
    with pytest.raises(LookupError, match="docs/ in the repository"):
        manual.tree("guides/checkpoints")


def test_a_page_is_no_markup(tmp_path):
    (tmp_path / "evil.md").write_text(
        "# <b>T</b>\n\n<script>window.pwned=1</script>\n\n[a](javascript:alert(1)) [b](data:text/html,x) "
        "[c](/etc/passwd) [d](//elsewhere/x) ![e](https://elsewhere/x.png) <https://good>\n\n```html\n<i>\n```\n"
    )
    manual = Manual()
    manual.pages = {"evil": tmp_path / "evil.md"}
    tree = manual.tree("evil")
    assert [attributes for _, attributes, _ in nodes(tree) if attributes] == [{"id": "t"}, {"href": "https://good"}]
    assert ["pre", {}, ["<i>"]] in tree and "pwned" not in str(tree)
