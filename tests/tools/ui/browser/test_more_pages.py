"""Studies, held-out answers, the first difference, the form of a new run, and why a run failed, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from atomrl.common.files import write_text
from tests.tools.ui.browser.conftest import until
from tests.tools.ui.made import log_evaluation, log_step, make_run, make_study, serving

pytest.importorskip("optuna", reason="the extra `tune` is not installed")


MARKUP = '<img src=x onerror="window.pwned=1">'
"""A folder's name."""
LOOKS = """
window.strokes = [];
const stroke = CanvasRenderingContext2D.prototype.stroke;
CanvasRenderingContext2D.prototype.stroke = function (...given) {
  window.strokes.push([this.strokeStyle, this.getLineDash().join()]);
  return stroke.apply(this, given);
};
"""
"""Notes with which colour and dashes each line is drawn."""


@pytest.fixture(scope="module")
def client(browser, tmp_path_factory):
    from tests.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("more")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_study(folder / "runs" / "tune-it")
    for name, right in (("one", 1), ("two", 3)):
        log_evaluation(make_run(folder / "runs" / name, steps=3), 3, right)
    path = folder / "runs" / "two" / "rollouts" / "step_000002" / "train.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace('"reward": 1.0', '"reward": 0.5') + "".join(lines[1:]))
    failed = make_run(folder / "runs" / "broken", steps=2)
    why = {"error": "ValueError: <b>no</b> rewards", "where": "rl.py:3 in step", "traceback": "Traceback\n  lines"}
    (failed / "failure.json").write_text(json.dumps(why))
    dropped = make_run(folder / "runs" / "turns", steps=0)
    log_step(dropped, 1, text="a line\n" * 80)
    give_turns(dropped)
    make_run(folder / "runs" / MARKUP, name="7")
    with serving(folder / "runs", "--allow-launch", cwd=folder) as (client, _):
        yield client


def is_listed(client, name: str) -> bool:
    """Return True once the page lists a run that was just made."""
    return any(run["name"] == name for run in client.get("/api/runs").json["runs"])


def give_turns(folder) -> None:
    """The first completion has three turns, the first of which the model no longer saw in the third."""
    path = folder / "rollouts" / "step_000001" / "train.jsonl"
    first, *rest = path.read_text().splitlines()
    turns = [{"model_tokens": 1, "reply_tokens": 0, "text": f"turn {n}", "reply": "", "labels": [], "seconds": 0.0,
              "sees_from": int(n == 2)} for n in range(3)]  # fmt: skip
    episode = {"opening_tokens": 0, "turns": turns, "ended": "answered"}
    path.write_text("\n".join([json.dumps(json.loads(first) | {"episode": episode}), *rest]) + "\n")


def study_of(client) -> str:
    [study] = client.get("/api/runs").json["studies"]
    return study["id"]


def prompt_of(client, name: str) -> str:
    row = client.get(f"/api/runs/{client.id_of(name)}/rollouts").json["rows"][0]
    return str(row["prompt_hash"])


def path_of(client, name: str) -> tuple[str, str]:
    ids = [client.id_of(one) for one in ("one", "two")]
    return {
        "study": (f"/study/{study_of(client)}", ".scatter"),
        "answers": (f"/compare/{','.join(ids)}", "table.answers"),
        "form": ("/new", "#check .finished, #check .failed"),
        "failed": (f"/run/{client.id_of('broken')}", ".verdict details"),
        "turns": (f"/run/{client.id_of('turns')}/rollouts/1/train/0", ".members details"),
        "history": (f"/run/{client.id_of('turns')}/rollouts/prompt/{prompt_of(client, 'turns')}", ".history pre"),
        "help": ("/", "table.runs"),
    }[name]


@pytest.mark.short
def test_a_study_is_shown(tab, client):
    page = tab(client).open("/", "table.runs")
    page.get_by_role("link", name="tune-it", exact=True).click()
    page.wait_for_selector(".scatter")
    assert "trial_004 is better than the original config" in page.locator(".verdict .first").inner_text()
    assert page.locator("figure.chart").count() == 3  # history and two keys
    assert "8 trials" in page.locator(".verdict").inner_text() and "1 failed" in page.locator(".verdict").inner_text()
    assert page.locator(".bars tr").count() == 2 and "%" in page.locator(".bars").inner_text()
    rows = page.get_by_role("region", name="Trials").locator("tbody tr")
    assert rows.count() == 8 and rows.nth(0).inner_text().split()[-1] == "rloo"
    assert page.locator(".mark.best").count() == 3 and page.locator(".mark.pruned").count() > 0
    finals = page.get_by_role("region", name="Final runs on fresh seeds").locator("tbody tr").all_inner_texts()
    assert finals[1].split() == ["trial_004", "★", "0.8", "0.84", "0.82"]
    rows.nth(2).get_by_role("link").click()
    page.wait_for_selector("h1:has-text('trial_002')")


def test_trials_are_in_the_list_where_they_are_asked_for(tab, client):
    page = tab(client).open("/", "table.runs")
    rows = page.locator("table.runs tbody tr")
    assert rows.count() == 5
    page.get_by_label("show trials").check()
    until(lambda: rows.count() == 13)


def test_a_curve_is_looked_at_closer_by_keyboard(tab, client):
    page = tab(client).open(f"/run/{client.id_of('one')}/charts", ".chart canvas")
    plot = page.locator(".plot").first
    whole = plot.get_attribute("aria-label")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("+")
    until(lambda: page.locator(".plot").first.get_attribute("aria-label") != whole)
    page.get_by_role("button", name="Reset zoom").click()
    until(lambda: page.locator(".plot").first.get_attribute("aria-label") == whole)


def test_a_page_begins_at_its_top(tab, client):
    page = tab(client, viewport={"width": 900, "height": 300}).open("/", "table.runs")
    page.evaluate("scrollTo(0, 10000)")
    page.get_by_role("link", name="one", exact=True).click()
    page.wait_for_selector(".verdict")
    assert page.evaluate("scrollY") == 0


@pytest.mark.short
def test_held_out_answers_stand_beside_each_other(tab, client):
    page = tab(client).open(*path_of(client, "answers"))
    rows = page.locator("table.answers tbody tr")
    assert rows.count() == 2  # those that are rewarded alike are left out
    cells = [text.split() for text in rows.nth(0).locator("td").all_inner_texts()]
    assert cells == [["Reward", "0", "it", "is", "unclear"], ["Reward", "1", "it", "is", "2"]]
    page.get_by_label("only prompts with different rewards").uncheck()
    until(lambda: rows.count() == 4)
    rows.nth(0).get_by_role("link").nth(1).click()
    page.wait_for_selector(".members li.chosen")
    assert "it is 1" in page.locator(".members li.chosen").inner_text()


def test_the_first_difference_is_found(tab, client):
    page = tab(client).open(*path_of(client, "answers"))
    page.get_by_role("button", name="Find").click()
    page.wait_for_selector("text=The first difference: rewards at step 2.")
    assert "reward: 1.0 | 0.5" in page.locator("pre.page").last.inner_text()
    page.get_by_role("link", name="this step of B").click()
    page.wait_for_selector("table.rollouts")
    assert "first_step=2&last_step=2" in page.url


@pytest.mark.short
def test_why_a_run_failed_is_said(tab, client):
    page = tab(client).open("/", "table.runs")
    row = page.locator("tr", has=page.get_by_role("link", name="broken"))
    assert "ValueError: <b>no</b> rewards" in row.inner_text()
    page = tab(client).open(*path_of(client, "failed"))
    assert "Failed at step 2 of 10: ValueError" in page.locator(".verdict .first").inner_text()
    page.get_by_text("rl.py:3 in step").click()
    assert "Traceback" in page.locator(".verdict pre").inner_text()


@pytest.mark.short
def test_curves_differ_in_more_than_their_colours(tab, client):
    one = tab(client)
    one.page.add_init_script(LOOKS)
    one.page.reload()
    ids = [client.id_of(name) for name in ("one", "two", "broken", "turns")]
    page = one.open(f"/compare/{','.join(ids)}", ".chart canvas")
    page.get_by_label("Mean and range over seeds").uncheck()
    marks = page.locator(".chart").first.locator(".legend .swatch")
    until(lambda: marks.count() == 4)
    palette = page.evaluate(
        "[...Array(8).keys()].map((i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i}`).trim())"
    )
    looks = {(stroke, dash) for stroke, dash in page.evaluate("window.strokes") if stroke in palette}
    assert dict(looks).keys() == set(palette[:4])
    assert len({dash for stroke, dash in looks}) == 4
    for shown in (marks, page.locator(".judged .swatch")):
        said = [one.get_attribute("style") for one in shown.all()]
        assert len({re.sub(r"--c\d", "", style) for style in said}) == 4, said


def test_the_algorithm_itself_spells_a_group_s_advantages_out(tab, client):
    folder = Path(client.get("/api/runs").json["folder"])
    run = make_run(folder / "relative", steps=1, algorithm={"name": "maxrl"})
    path = run / "rollouts" / "step_000001" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        mean = (1 + int(row["prompt_id"][-1])) / 4
        row["advantage"] = (row["reward"] - mean) / mean
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    until(lambda: is_listed(client, "relative"))
    page = tab(client).open(f"/run/{client.id_of('relative')}/rollouts/1/train/0", ".members li")
    page.wait_for_selector("text=A = (reward − 0.25) / 0.25 in this group")
    text = page.locator("aside.group").inner_text()
    assert "A_i = (r_i - mean_group r) / (mean_group r + eps)" in text and "A = (1 − 0.25) / 0.25 = 3" in text
    page.goto("about:blank")  # which asks for nothing that is gone
    shutil.rmtree(run)


def test_a_comparison_of_too_many_runs_names_how_many_are_left_out(tab, client):
    page = tab(client).open(f"/compare/{','.join([client.id_of('one')] * 18)}", ".chart canvas")
    page.wait_for_selector("text=Only the first 16 runs are compared; 2 more are not shown.")


def test_a_comparison_of_no_runs_says_where_to_choose_some(tab, client):
    page = tab(client).open("/compare", "p.empty")
    assert "Select two or more in the list of runs" in page.inner_text("p.empty")
    page.click("p.empty a")
    page.wait_for_selector("table.runs")


def test_a_counter_of_lacking_memory_is_no_memory(tab, client):
    page = tab(client).open("/", "table.runs")
    asked = """async (name) => {
        const { PANELS } = await import("/static/panels.js");
        return PANELS.filter(([, test]) => test(name)).map(([title]) => title);
    }"""
    assert page.evaluate(asked, "actor/out_of_memory") == []
    assert page.evaluate(asked, "perf/max_memory_allocated_gb") == ["memory"]


def test_a_folder_that_is_named_like_markup_is_shown_and_does_nothing(tab, client):
    run = client.id_of(MARKUP)
    for path in ("/", f"/run/{run}", f"/run/{run}/charts", f"/compare/{run},{client.id_of('one')}"):
        page = tab(client).open(path, "table.runs" if path == "/" else ".chart")
        page.wait_for_selector("text=<img src=x")
        assert page.evaluate("window.pwned") is None and page.locator("img").count() == 0


def test_a_variant_of_a_run_whose_name_is_in_quotes_has_another_name(tab, tmp_path):
    make_run(tmp_path / "runs" / "7")
    with serving(tmp_path / "runs", "--allow-launch", cwd=tmp_path) as (client, _):
        page = tab(client).open(f"/new?from={client.id_of('7')}", "#check .finished")
        assert "run_name: 7-2" in page.locator("#config").input_value().replace("'", "")
        assert "Valid config: rl, 10 steps" in page.locator("#check").inner_text()
        page.goto("about:blank")


def test_the_help_takes_the_focus_and_gives_it_back(tab, client):
    page = tab(client).open("/", "table.runs")
    page.get_by_role("link", name="one", exact=True).focus()
    page.keyboard.press("?")
    page.wait_for_selector("[role=dialog]")
    until(lambda: page.evaluate("document.activeElement.className") == "help")
    page.keyboard.press("Escape")
    until(lambda: page.evaluate("document.activeElement.textContent") == "one")


@pytest.mark.short
def test_turns_that_were_dropped_are_marked(tab, client):
    page = tab(client).open(*path_of(client, "turns"))
    page.get_by_text("3 turns").click()
    said = page.locator(".members details").inner_text()
    assert "Turn 1: dropped from the model's context at turn 3" in said and "1 dropped" in said
    assert page.locator("pre.dropped").all_inner_texts() == ["turn 0"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["study", "answers", "form", "failed", "turns", "history", "help"])
def test_nobody_is_kept_out(tab, client, name, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = tab(client, color_scheme=theme).open(*path_of(client, name))
    if name == "answers":
        page.get_by_role("button", name="Find").click()
        page.wait_for_selector("text=The first difference")
    if name == "turns":
        page.get_by_text("3 turns").click()
    if name == "help":
        page.keyboard.press("?")
        page.wait_for_selector("[role=dialog]")
    assert page.locator("pre.text:not([tabindex='0'])").count() == 0  # it may be too long to be shown whole
    page.wait_for_timeout(200)
    results = axe.run(page).response["violations"]
    assert [(violation["id"], [node["html"][:150] for node in violation["nodes"]][:3]) for violation in results] == []


@pytest.mark.parametrize("name", ["study", "answers", "form", "failed"])
def test_a_phone_shows_it_without_scrolling_sideways_and_in_chinese(tab, client, name):
    one = tab(client, viewport={"width": 390, "height": 800})
    page = one.open("/", "table.runs")
    page.get_by_label("Language").select_option("zh")
    page = one.open(*path_of(client, name))
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    text = page.locator("main").inner_text()
    assert not any(f"\n{key}\n" in text for key in ("study_of", "importance", "first_difference", "form"))
