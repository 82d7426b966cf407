"""Odd values, odd addresses, quick typing, and an evaluation as the last step, in a real browser."""

from __future__ import annotations

import json

from tests.tools.ui.browser.conftest import until
from tests.tools.ui.made import make_run, serving


def test_odd_values_are_shown(tab):
    page = tab().open("/%", "table.runs")  # no address that can be read
    shown = page.evaluate(
        """async () => {
            const { number, duration } = await import("/static/lib.js");
            const { setLanguage } = await import("/static/i18n.js");
            setLanguage("zh");
            const said = [...["1e-3", true, [1, 2], null, 0.5].map((value) => number(value)), duration(3700)];
            setLanguage("en");
            return [...said, duration(75)];
        }"""
    )
    assert shown == ["1e-3", "true", "1,2", "–", "0.5", "1 小时 1 分", "1 min 15 s"]


def test_filters_that_are_typed_in_quick_succession_are_all_kept(tab):
    page = tab().open("/run/{seed-1}/rollouts", "table.rollouts")
    page.evaluate(
        """() => {
            for (const [id, text] of [["f-text", "is"], ["f-min_reward", "0.5"], ["f-max_reward", "3"]]) {
                const field = document.getElementById(id);
                field.value = text;
                field.dispatchEvent(new Event("input", { bubbles: true }));
            }
        }"""
    )
    wanted = {"text=is", "min_reward=0.5", "max_reward=3"}
    until(lambda: wanted <= set(page.evaluate("location.hash").partition("?")[2].split("&")))


def test_an_evaluation_after_the_last_step_is_drawn(tab, tmp_path):
    folder = make_run(tmp_path / "live", steps=2)
    with serving(tmp_path) as (client, _):
        page = tab(client).open(f"/run/{client.id_of('live')}", ".chart")
        chart = page.locator(".chart", has_text="Held-out accuracy").locator(".plot")
        until(lambda: "0.25 (step 0)" in chart.get_attribute("aria-label"))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 2, "val-core/sums/acc/mean@1": 0.875}) + "\n")
        until(lambda: "to 0.875 (step 2)" in chart.get_attribute("aria-label"))
        page.goto("about:blank")


def test_a_finding_is_explained_in_chinese_above_the_doctors_own_words(tab):
    page = tab().open("/run/{sick}", ".finding")
    assert page.locator(".finding").inner_text().count("Half is cut.") == 1
    page.get_by_label("Language").select_option("zh")
    page.wait_for_selector(".finding :text('长度上限')")
    words = page.locator(".finding").inner_text()
    assert "许多回答在上限处被截断" in words and "Half is cut. Try: Raise it." in words
    assert "长度上限" in page.locator(".verdict").inner_text()
    assert page.locator(".finding [lang=en]").count() == 1
