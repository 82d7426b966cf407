"""The first page of a run, the list of runs and the manual, in a real browser."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.tools.ui.browser.conftest import until
from tests.tools.ui.made import EVIL, log_evaluation, log_step, make_run, serving


@pytest.fixture(scope="module")
def client(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview")
    for name, right in (("one", 3), ("evil", 4)):
        run = make_run(folder / name, steps=3)
        log_evaluation(run, 0, 1)
        log_evaluation(run, 3, right)
    log_step(run, 4, text=EVIL + "\u202e" + " long" * 2000)
    finding = {"id": "length_limit", "severity": "error", "step": 3, "what": "Half is cut.", "advice": "Raise it."}
    lines = (finding, finding | {"id": "of_another_version"})
    (folder / "one" / "findings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "nothing").mkdir()
    (folder / "nothing" / "config.yaml").write_text("{run_name: nothing, train: {steps: 5}}")
    with serving(folder) as (client, _):
        client.folder = folder
        yield client


def test_new_completions_appear_while_the_run_continues(tab, client):
    run = make_run(client.folder / "live", steps=2)
    page = tab(client).open("/", "text=live")
    try:
        page.goto(f"{client.base}/#/run/{client.id_of('live')}")
        page.wait_for_selector(".sample")
        writes = page.locator(".writes")
        assert "Step 2" in writes.inner_text() and writes.locator(".sample").count() == 4
        log_step(run, 3, text="now it is")
        until(lambda: "Step 3" in writes.inner_text() and "now it is" in writes.inner_text())
        page.locator(".tiles", has_text="0.1 → 0.3").wait_for()
        writes.get_by_role("link", name="Reward").last.click()
        page.wait_for_selector("aside.group")
        assert "first_step=3" in page.url
        page.goto("about:blank")
    finally:
        shutil.rmtree(run)


def test_a_run_that_is_removed_while_it_is_open_is_said_to_be_gone(tab, client):
    run = make_run(client.folder / "gone", steps=2)
    one = tab(client)
    one.open("/", "text=gone")
    page = one.open(f"/run/{client.id_of('gone')}", ".sample")
    one.may_miss = True
    shutil.rmtree(run)
    page.locator("[role=alert]", has_text="folder was deleted").wait_for()
    assert page.locator(".tiles").count() == 1  # what was read stays


def test_a_prompt_is_looked_at_before_and_after_and_another_one_chosen(tab, client):
    page = tab(client).open(f"/run/{client.id_of('one')}", ".before-after .side")
    part = page.locator(".before-after")
    assert "1 of 4" in part.inner_text()
    part.get_by_role("button", name="Better 2").click()
    until(lambda: "1 of 2" in part.inner_text())
    sides = part.locator(".side").all_inner_texts()
    assert "Step 0" in sides[0] and "it is unclear" in sides[0] and "Step 3" in sides[1] and "it is 2" in sides[1]
    part.get_by_role("button", name="Next").click()
    until(lambda: "2 of 2" in part.inner_text())
    page.reload()  # the address has it
    until(lambda: part.count() == 1 and "2 of 2" in part.inner_text())
    part.get_by_label("Prompts from").select_option("train")
    until(lambda: "Step 1" in part.locator(".side").first.inner_text())


def test_a_finding_leads_to_its_page_without_a_network(tab, client):
    page = tab(client).open(f"/run/{client.id_of('one')}", ".finding")
    assert page.locator(".finding").nth(1).get_by_role("link").count() == 1  # that one has no page here
    page.get_by_role("link", name="What it means and how to fix it").click()
    page.locator("article h1", has_text="Completions are cut at the limit").wait_for()
    page.get_by_role("link", name="missing_stop_token").click()
    page.locator("article h1", has_text="do not stop").wait_for()
    page.get_by_role("navigation").get_by_role("link", name="Docs").click()
    page.get_by_role("searchbox").fill("grpo group")
    until(lambda: page.locator(".titles a").count() == 1)
    page.locator(".titles a").click()
    page.locator("article pre").first.wait_for()


def test_help_closes_when_the_page_changes(tab, client):
    page = tab(client).open("/", "table.runs")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.get_by_role("link", name="Guide to the web interface").click()
    page.locator("article").wait_for()
    assert page.get_by_role("dialog").count() == 0


def test_runs_that_died_are_marked_and_one_without_anything_is_shown(tab, client):
    page = tab(client).open("/", "table.runs")
    assert page.locator("tr.broken").count() == page.locator("table.runs tbody tr").count()
    assert "Crashed without an error message" in page.locator("tr", has_text="nothing").inner_text()
    page.get_by_role("link", name="nothing").click()
    page.wait_for_selector(".verdict")
    assert page.locator(".sample").count() == 0
    page.get_by_role("link", name="Rollouts").click()
    page.wait_for_selector("text=No completions recorded yet")


def test_texts_of_the_model_are_inert_and_cut(tab, client):
    page = tab(client).open(f"/run/{client.id_of('evil')}", ".sample")
    text = page.locator(".writes .wrote").first.inner_text()
    assert "<img src=x onerror=" in text and "U+202E" in text and len(text) < 2500 and text.endswith("…")
    assert page.evaluate("window.pwned") is None and page.locator("main img").count() == 0
