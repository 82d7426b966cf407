"""Pages in a real browser while runs change, while the page is hidden, and after the server was replaced."""

from __future__ import annotations

import json

from atomrl.common.files import write_text
from tests.tools.ui.browser.conftest import new_page, until
from tests.tools.ui.made import log_step, make_run, serving


def held_back(page, path: str, change, meanwhile) -> None:
    """After a change, between the first answer to what is asked at a path and its arrival, `meanwhile` is called, and
    has time to be told."""
    held, asked = [], []

    def hold(route) -> None:
        asked.append(route)
        if len(asked) == 1:
            held.append((route, route.fetch()))
        else:
            route.continue_()

    page.route(path, hold)
    change()
    for _ in range(600):
        page.wait_for_timeout(100)
        if held:
            break
    [(route, answer)] = held
    meanwhile()
    page.wait_for_timeout(1500)
    route.fulfill(response=answer)


def test_a_change_that_comes_during_a_request_is_shown(tab, tmp_path):
    folder = make_run(tmp_path / "live", steps=2)
    with serving(tmp_path) as (client, _):
        one = tab(client)
        page = one.open("/", "text=live")
        row = page.locator("tr", has=page.get_by_role("link", name="live"))
        held_back(page, "**/card", lambda: log_step(folder, 3), lambda: log_step(folder, 4))
        until(lambda: "4 / 10" in row.inner_text())
        page = one.open(f"/run/{client.id_of('live')}", ".chart")
        chart = page.locator(".plot").first
        held_back(page, "**/tail*", lambda: log_step(folder, 5), lambda: log_step(folder, 6))
        until(lambda: "to 0.6 (step 6)" in chart.get_attribute("aria-label"))
        page.goto("about:blank")


def test_curves_of_a_run_that_was_resumed_and_is_further_by_now_are_its_new_ones(tab, tmp_path):
    folder = make_run(tmp_path / "live", steps=3)
    with serving(tmp_path) as (client, _):
        page = tab(client).open(f"/run/{client.id_of('live')}", ".chart")
        chart = page.locator(".plot").first
        until(lambda: "from 0.1 (step 1) to 0.3 (step 3)" in chart.get_attribute("aria-label"))
        write_text(folder / "env.json", json.dumps({"resumed": [{"first_step": 1}]}))
        rows = [{"step": step, "critic/score/mean": 0.9} for step in range(1, 5)]
        write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        until(lambda: "from 0.9 (step 1) to 0.9 (step 4)" in chart.get_attribute("aria-label"))
        page.goto("about:blank")


def test_a_page_says_that_the_server_was_restarted(browser, tmp_path):
    make_run(tmp_path / "one")
    with serving(tmp_path) as (client, _):
        page = new_page(browser)
        page.goto(client.address)
        page.wait_for_selector("table.runs")
    with serving(tmp_path, "--port", str(client.port)) as (again, _):
        page.wait_for_selector("text=The server was restarted")
        page.goto(again.address)
        page.wait_for_selector("table.runs")
        until(lambda: page.locator("header .lost").inner_text() == "")
        page.context.close()
