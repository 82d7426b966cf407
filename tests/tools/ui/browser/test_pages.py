"""Every page in a real browser: what it shows, live, by keyboard, in both languages and themes; and texts are inert."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest

from tests.tools.ui.browser.conftest import new_page, until
from tests.tools.ui.made import log_step, make_run, serving

PAGES = {
    "runs": ("/", "table.runs"),
    "run": ("/run/{real}", ".verdict"),
    "sick": ("/run/{sick}", ".finding"),
    "charts": ("/run/{real}/charts", ".chart canvas"),
    "rollouts": ("/run/{real}/rollouts/1/train/0", ".members li"),
    "config": ("/run/{real}/config", "pre.page"),
    "log": ("/run/{real}/log", "pre.log"),
    "compare": ("/compare/{seed-1},{seed-2},{sick}", ".chart canvas"),
    "new": ("/new", "#check .status"),
    "docs": ("/docs/guides/troubleshooting/length_limit", "article code"),
}


@pytest.mark.short
def test_the_list_shows_searches_sorts_and_groups(tab):
    page = tab().open("/", "table.runs")
    assert page.locator("table.runs tbody tr").count() == 5
    real = page.locator("tr", has=page.get_by_role("link", name="real"))
    assert "finished" in real.inner_text() and "4 / 4" in real.inner_text()
    assert page.locator("table.runs tbody tr").first.inner_text().split() != []
    page.get_by_role("searchbox").fill("length_limit sick")
    until(lambda: page.locator("table.runs tbody tr").count() == 1)
    page.get_by_role("searchbox").fill("")
    page.get_by_label("Group by config").check()
    until(lambda: page.locator("tr.group").count() == 4)
    assert any("× 2" in text for text in page.locator("tr.group").all_inner_texts())
    page.get_by_label("Group by config").uncheck()
    head = page.get_by_role("columnheader", name="Name")
    for order in ("ascending", "descending"):
        head.get_by_role("button").click()
        until(lambda order=order: head.get_attribute("aria-sort") == order)
        names = page.locator("table.runs th[scope=row] a:first-child").all_inner_texts()
        assert names == sorted(names, reverse=order == "descending")
    page.get_by_role("columnheader", name="Reward").get_by_role("button").click()
    until(lambda: "0.6" in page.locator("table.runs tbody tr").first.inner_text())


@pytest.mark.short
def test_a_run_has_a_verdict_curves_and_facts(tab):
    page = tab().open("/run/{real}", ".chart")
    assert page.locator(".verdict .first").inner_text() == "Finished after 4 steps."
    tiles = page.locator(".tiles").inner_text()
    assert "Held-out accuracy sums" in tiles and "Step 4" in tiles and "runs/real/model" in tiles
    titles = page.locator(".chart figcaption").all_inner_texts()
    assert {"Reward", "Accuracy", "Entropy (nats per token)"} <= set(titles)
    assert page.locator(".plot").first.get_attribute("aria-label").startswith("Reward: critic/score from")


def test_a_finding_leads_to_its_completions(tab):
    page = tab().open("/run/{sick}", ".finding")
    assert "bad" in page.locator(".verdict").get_attribute("class").split()
    page.get_by_role("link", name="Completions of steps 2 to 4").click()
    page.wait_for_selector("table.rollouts")
    assert page.locator("text=6 of 48 completions").count() == 1  # those that were cut


def test_a_step_of_a_curve_leads_to_its_completions_by_mouse_and_by_keyboard(tab):
    page = tab().open("/run/{seed-1}/charts", ".chart canvas")
    page.locator(".u-over").first.click()
    page.wait_for_selector("table.rollouts")
    assert re.search(r"first_step=(\d+)&last_step=\1$", page.url)
    page.go_back()
    page.wait_for_selector(".chart canvas")
    page.locator(".plot").first.focus()
    for key in ("Home", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("table.rollouts")
    assert "first_step=2&last_step=2" in page.url


@pytest.mark.short
def test_completions_are_filtered_sorted_and_searched(tab):
    page = tab().open("/run/{seed-1}/rollouts", "table.rollouts")
    status, shown = page.locator(".bar [role=status]"), page.locator("table.rollouts tbody tr")
    assert status.inner_text() == "8 of 48 completions"  # of the newest step
    page.get_by_role("button", name="Previous step").click()
    until(lambda: set(page.locator("table.rollouts td:first-child").all_inner_texts()) == {"5"})
    page.get_by_role("textbox", name="Step").fill("2-4")
    page.keyboard.press("Enter")
    until(lambda: status.inner_text() == "24 of 48 completions")
    page.get_by_role("button", name="All steps").click()
    until(lambda: status.inner_text() == "48 of 48 completions")
    page.get_by_label("Reward ≤").fill("0")
    until(lambda: status.inner_text() == "30 of 48 completions")
    page.get_by_label("Text").fill("IT IS 3")
    until(lambda: status.inner_text() == "12 of 48 completions")
    page.get_by_label("Truncated").check()
    page.get_by_role("button", name="More filters").click()
    page.get_by_label("Tokens ≥").fill("7")
    page.wait_for_selector("text=No matches.")
    page.reload()  # the address has all of it
    page.wait_for_selector("text=No matches.")
    assert page.get_by_label("Tokens ≥").input_value() == "7" and page.get_by_label("Truncated").is_checked()
    page.get_by_role("button", name="Reset").click()
    until(lambda: status.inner_text() == "8 of 48 completions")
    page.get_by_role("columnheader", name="Tokens").get_by_role("button").click()
    until(lambda: shown.first.locator("td").nth(5).inner_text() == "6")


@pytest.mark.short
def test_a_group_spells_its_arithmetic_out(tab):
    page = tab().open("/run/{seed-1}/rollouts/3/train/0", ".members li")
    text = page.locator("aside.group").inner_text()
    assert "mean = (1 + 0 + 0 + 0) / 4 = 0.25" in text and "std = 0.5" in text
    assert "No simple formula" in text  # what was recorded is ±1, which none gives
    assert page.locator(".members li.chosen").count() == 1 and page.locator(".members li").count() == 4


def test_the_arithmetic_of_a_real_run_is_its_algorithm_s(tab, server):
    real = server.id_of("real")
    mixed = server.get(f"/api/runs/{real}/rollouts?split=train&mixed=true&limit=1").json["rows"]
    if not mixed:  # an untrained model may never be right
        assert server.get(f"/api/runs/{real}/rollouts?split=train&max_reward=0").json["total"] == 64
        return
    row = mixed[0]
    page = tab().open(f"/run/{{real}}/rollouts/{row['step']}/train/{row['place']}", ".members li")
    assert "Advantage A = (reward − mean) / std" in page.locator("aside.group").inner_text()


def test_tokens_of_a_real_run_are_its_tokenizer_s(tab, server):
    page = tab().open("/run/{real}/rollouts/1/train/0", ".members li")
    text = page.locator(".members li").first.locator("pre").inner_text()
    page.locator(".members li").first.get_by_role("button", name="Tokens").click()
    page.wait_for_selector(".tokens[role=group] span")
    shown = "".join(page.locator(".tokens[role=group] > span").all_inner_texts())
    assert shown.replace("</s>", "").strip() == text.strip()


def test_recorded_tokens_are_coloured_and_told(tab):
    page = tab().open("/run/{seed-1}/rollouts/1/train/1", ".members li")
    second = page.locator(".members > li").nth(1)
    second.get_by_role("button", name="Tokens").click()
    page.wait_for_selector(".tokens.coloured span")
    assert second.get_by_label("Color by").input_value() == "ratio", "the first that differs between its tokens"
    assert "Same for all tokens of this completion: advantage -1" in second.inner_text()
    assert second.locator(".coloured [class*=minus]").count() == 2
    second.get_by_label("Color by").select_option("advantage")
    until(lambda: second.locator(".coloured span.minus4").count() == 3)
    assert second.locator(".coloured span.clipped").count() == 1
    second.locator(".coloured").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    told = second.locator(".token-numbers")
    until(lambda: "Token 3 of 3" in told.inner_text() and "clipped" in told.inner_text())
    assert "log-ratio to the reference\n0.5" in told.inner_text()
    second.locator(".coloured [data-i]").nth(0).click()
    until(lambda: "Token 1 of 3" in told.inner_text() and told.locator(".lines li").count() == 3)
    told.locator("div", has_text="advantage").get_by_role("button").click()
    until(lambda: told.locator(".lines li.chosen").inner_text().startswith("advantage"))
    lines = told.locator(".lines").inner_text()
    assert "rho_{i,t} = pi(a_t) / pi_old(a_t)" in lines and "min(1 · (-1), clip(1, 1 - 0.2, 1 + 0.2) · (-1))" in lines
    second.locator(".coloured [data-i]").nth(2).hover()
    assert "clipped" in second.locator(".coloured span").nth(2).get_attribute("title")


def test_one_prompt_through_the_run(tab):
    page = tab().open("/run/{seed-1}/rollouts/3/train/0", ".members li")
    page.get_by_role("link", name="This prompt over training: 6 step(s)").click()
    page.wait_for_selector(".history li")
    assert page.locator(".history > li").count() == 6


def test_keys_go_through_the_completions(tab):
    page = tab().open("/run/{seed-1}/rollouts", "table.rollouts")
    chosen = page.locator("tr.chosen a")
    for keys, step in (("j", "6"), ("jj", "6"), ("k", "6"), ("[", "5"), ("]", "6")):
        for key in keys:
            page.keyboard.press(key)
            page.wait_for_selector(".members li.chosen")
        until(
            lambda step=step: (chosen.count() == 1 and chosen.inner_text() == step) or f"rollouts/{step}/" in page.url
        )
    page.keyboard.press("Escape")
    until(lambda: page.locator("aside.group").count() == 0)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "f-text"


def test_everything_is_reached_by_tab_and_the_content_can_be_skipped_to(tab):
    page = tab().open("/", "table.runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent"))
    assert {"real", "sick", "evil"} <= reached


def test_config_is_shown_with_what_differs_and_its_equation(tab):
    page = tab().open("/run/{real}/config", "pre.page")
    page.wait_for_selector("text=Non-default keys")
    assert page.locator("thead th").all_inner_texts() == ["Key", "Value", "Default"]
    assert page.locator("tr", has_text="rollout.completions_per_prompt").inner_text().split() == [
        "rollout.completions_per_prompt", "4", "8",
    ]  # fmt: skip
    assert "grpo: maximise" in page.locator("pre.page").first.inner_text()


def test_a_config_of_another_version_is_shown_and_said(tab, project, server):
    make_run(project / "runs" / "old", nonsense={"a": 1})
    try:
        until(lambda: any(run["name"] == "old" for run in server.get("/api/runs").json["runs"]))
        page = tab().open(f"/run/{server.id_of('old')}/config", "pre.page")
        page.wait_for_selector("text=This version of AtomRL does not accept this config")
        assert "unknown key 'nonsense'" in page.locator(".failure").inner_text()
        page.goto("about:blank")  # which asks for nothing that is gone
    finally:
        shutil.rmtree(project / "runs" / "old")


def test_all_runs_that_are_shown_are_chosen_at_once(tab):
    page = tab().open("/", "table.runs")
    page.get_by_role("searchbox").fill("seed-")
    until(lambda: page.locator("table.runs tbody tr").count() == 2)
    page.get_by_label("Select all").check()
    assert page.get_by_role("link", name="Compare 2 runs").is_visible()
    page.get_by_label("Select all").uncheck()
    assert page.get_by_role("link", name="Compare").count() == 0


def test_a_log_opens_at_its_end_and_continues_there(tab, tmp_path):
    folder = make_run(tmp_path / "long")
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(300)))
    with serving(tmp_path) as (client, _):
        page = tab(client).open(f"/run/{client.id_of('long')}/log", "pre.log")
        from_end = "node => node.scrollHeight - node.scrollTop - node.clientHeight"
        until(lambda: page.locator("pre.log").evaluate(from_end) < 8)
        with (folder / "log.txt").open("a") as file:
            file.write("the last line\n" * 9)
        until(lambda: "the last line" in page.locator("pre.log").inner_text())
        assert page.locator("pre.log").evaluate(from_end) < 8
        page.goto("about:blank")


@pytest.mark.short
def test_runs_are_compared(tab):
    page = tab().open("/", "table.runs")
    for name in ("seed-1", "seed-2", "sick"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("link", name="Compare 3 runs").click()
    page.wait_for_selector(".chart canvas")
    keys = page.get_by_role("region", name="Config differences")
    assert keys.locator("thead").inner_text().split() == ["Key", "learning_rate=0.001", "×2", "sick"]
    rows = keys.locator("tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["seed", "1,", "2", "0"], ["train.learning_rate", "0.001", "0.5"]]
    line = page.locator("tr.group")
    assert line.count() == 1 and "mean [min, max] over seeds 1, 2" in line.inner_text()
    assert "0.35 [0.35, 0.35]" in line.inner_text()  # the mean of six steps' rewards
    legend = page.locator(".legend").first
    assert "learning_rate=0.001 ×2" in legend.inner_text() and "0.6 [0.6, 0.6]" in legend.inner_text()
    page.get_by_label("Mean and range over seeds").uncheck()
    until(lambda: "seed-2" in page.locator(".legend").first.inner_text())
    assert line.count() == 0
    rows = keys.locator("tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["seed", "1", "2", "0"], ["train.learning_rate", "0.001", "0.001", "0.5"]]


@pytest.mark.short
def test_a_link_that_is_followed_before_the_first_paint_is_not_lost(browser, server):
    page = new_page(browser)
    page.add_init_script("addEventListener('DOMContentLoaded', () => { location.hash = '#/new'; });")
    page.goto(server.address)
    page.wait_for_selector("#check .status")
    page.context.close()


@pytest.mark.short
def test_pages_are_live(tab, project):
    live = make_run(project / "runs" / "live", steps=2)
    try:
        lists, one = tab(), tab()
        page = lists.open("/", "text=live")
        run = lists.client.id_of("live")
        chart = one.open(f"/run/{run}", ".chart").locator(".plot").first
        row = page.locator("tr", has=page.get_by_role("link", name="live"))
        assert "2 / 10" in row.inner_text()
        log_step(live, 3)
        until(lambda: "3 / 10" in row.inner_text())
        until(lambda: "to 0.3 (step 3)" in chart.get_attribute("aria-label"))
        lines = (live / "metrics.jsonl").read_text().splitlines(keepends=True)
        (live / "metrics.jsonl").write_text("".join(lines[:2]))  # it was resumed from before
        log_step(live, 2)
        until(lambda: "2 / 10" in row.inner_text())
        until(lambda: "(step 2)" in chart.get_attribute("aria-label"))
    finally:
        lists.may_miss = one.may_miss = True
        shutil.rmtree(live)
    until(lambda: page.get_by_role("link", name="live").count() == 0)


@pytest.mark.short
def test_texts_that_look_like_markup_are_shown_and_do_nothing(tab):
    one = tab()
    for path, wait in (
        ("/", "table.runs"), ("/run/{evil}", ".finding"), ("/run/{evil}/charts", ".chart canvas"),
        ("/run/{evil}/config", "pre.page"), ("/run/{evil}/rollouts/7/train/0", ".members li"),
        ("/compare/{evil},{sick}", ".chart canvas"),
    ):  # fmt: skip
        page = one.open(path, wait)
        page.wait_for_timeout(300)
        assert page.evaluate("window.pwned") is None and page.locator("img").count() == 0
    page = one.open("/run/{evil}/rollouts/7/train/0", ".members li")
    text = page.locator(".members li").first.inner_text()
    assert "<img src=x onerror=" in text and "U+202E" in text and "U+0007" in text


@pytest.mark.short
def test_a_run_is_launched_stopped_and_resumed(tab, project, server):
    config = {**json.loads((project / "c.yaml").read_text()), "run_name": "launched", "checkpoint": {"every_steps": 50}}
    config["train"] = {"steps": 30_000, "learning_rate": 1e-3}  # it ends when it is told to
    page = tab().open("/new", "#check .status")
    area = page.locator("#config")
    area.fill("run_name: launched\ndata: {trian: x}\n")
    page.wait_for_selector("text=unknown key 'data.trian'")
    area.fill(json.dumps(config))
    page.wait_for_selector("text=Valid config: rl, 30000 steps")
    page.get_by_role("button", name="Review and launch").click()
    page.wait_for_selector("dialog >> text=It fits", timeout=120_000)
    page.get_by_role("button", name="Launch", exact=True).click()
    starting = page.locator("text=launched is starting")  # until it has started, and its page opens
    starting.or_(page.locator("h1", has_text="launched")).first.wait_for(timeout=120_000)

    def state():
        runs = {run["name"]: run for run in server.get("/api/runs").json["runs"]}
        launch = runs.get("launched", {"status": "none", "step": 0})
        return launch["status"], launch["step"] > 0

    try:
        until(lambda: state() == ("running", True), 240)
        run = server.id_of("launched")
        page = tab().open(f"/run/{run}", "text=Running: step")
        page.get_by_role("button", name="Stop after this step").click()
        page.wait_for_selector("text=Stopped by request after step", timeout=120_000)
        page.get_by_role("link", name="Log").click()
        page.wait_for_selector("pre.log")
        until(lambda: "stopped early" in page.locator("pre.log").inner_text())
        page.get_by_role("link", name="Overview").click()
        page.get_by_role("button", name="Resume").click()
        page.wait_for_selector("text=Running: step", timeout=240_000)
        assert server.post("/api/launches", {"yaml": json.dumps(config)}).status == 409
        outside = config | {"output_dir": "/tmp/elsewhere"}
        assert server.post("/api/launches", {"yaml": json.dumps(outside)}).status == 409
    finally:
        server.post(f"/api/runs/{server.id_of('launched')}/stop", {})
        until(lambda: state()[0] == "stopped", 120)


def test_server_browser_and_run_may_end_at_any_moment(browser, project):
    """A run outlives the server, and a page of the next one shows it, and its end."""
    config = json.loads((project / "c.yaml").read_text())
    config |= {"run_name": "survivor", "train": {"steps": 30_000, "learning_rate": 1e-3}}
    with serving(project / "runs", "--allow-launch", cwd=project) as (client, process):
        started = client.post("/api/launches", {"yaml": json.dumps(config)}).json
        metrics = project / "runs" / "survivor" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("critic/score") > 2, 240)
        process.kill()
    seen = metrics.read_text().count("critic/score")
    until(lambda: metrics.read_text().count("critic/score") > seen + 2)
    with serving(project / "runs", cwd=project) as (client, _):
        page = new_page(browser)
        page.goto(client.address)
        page.goto(f"{client.base}/#/run/{client.id_of('survivor')}")
        page.wait_for_selector("text=Running: step")
        os.kill(started["process"], signal.SIGKILL)
        page.wait_for_selector("text=Crashed at step")
        page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.short) for name in PAGES])
def test_nobody_is_kept_out(tab, name, theme):
    """axe finds nothing, in either theme."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    path, wait = PAGES[name]
    page = tab(color_scheme=theme).open(path, wait)
    page.wait_for_timeout(200)
    results = axe.run(page).response["violations"]
    assert [(violation["id"], [node["html"][:150] for node in violation["nodes"]][:3]) for violation in results] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nobody_is_kept_out_of_coloured_tokens(tab, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = tab(color_scheme=theme).open("/run/{seed-1}/rollouts/1/train/1", ".members li")
    for button in page.get_by_role("button", name="Tokens", exact=True).all():
        button.click()
    until(lambda: page.locator(".tokens.coloured").count() == 4)
    page.locator(".tokens.coloured").nth(1).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".token-numbers .lines")
    results = axe.run(page).response["violations"]
    assert [(violation["id"], [node["html"][:150] for node in violation["nodes"]][:3]) for violation in results] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_speak_chinese(tab, name):
    one = tab()
    page = one.open("/", "table.runs")
    page.get_by_label("Language").select_option("zh")
    page.wait_for_selector("text=/共 [0-9]+ 个运行/")
    path, wait = PAGES[name]
    page = one.open(path, wait)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert re.search(r"[\u4e00-\u9fff]{2}", page.locator("main").inner_text())


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(tab, name):
    path, wait = PAGES[name]
    page = tab(viewport={"width": 390, "height": 800}).open(path, wait)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_phone_folds_filters_and_says_how_many_are_set(tab):
    page = tab(viewport={"width": 390, "height": 800}).open("/run/{seed-1}/rollouts", "table.rollouts")
    assert page.get_by_role("button", name="Newest").is_visible() and not page.get_by_label("Text").is_visible()
    page.get_by_role("button", name="More filters").click()
    page.get_by_label("Text").fill("it is 3")
    page.get_by_role("button", name="More filters (1)").click()
    assert not page.get_by_label("Text").is_visible()


def test_every_word_is_there_in_both_languages(tab):
    page = tab().open("/", "table.runs")
    missing = page.evaluate(
        """async () => {
            const { WORDS } = await import('/static/i18n.js');
            const names = (text) => [...text.matchAll(/\\{(\\w+)\\}/g)].map((match) => match[1]).sort().join();
            const good = (words) => words.length === 2 && names(words[0]) === names(words[1]);
            return Object.keys(WORDS).filter((key) => !good(WORDS[key]));
        }"""
    )
    assert missing == []
