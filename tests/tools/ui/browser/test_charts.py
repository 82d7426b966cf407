"""How curves are looked at: smoothed, on other axes, filtered, enlarged, saved and compared, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.ui.browser.conftest import until
from tests.tools.ui.made import finish, make_run, serving

STEPS = 5000


@pytest.fixture(scope="module")
def client(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts")
    make_long(folder / "long")
    for rate in (0.1, 0.2):
        for seed in range(3):
            make_seed(folder / f"rate{rate}-{seed}", seed, rate)
    with serving(folder) as (client, _):
        yield client


def make_long(folder: Path) -> None:
    """5,000 steps with one spike of the loss, a metric that is missing for a while, one that is everywhere missing, two
    that are the same, one that never changes, and evaluations of 4 completions a prompt."""
    make_run(folder, steps=0, train={"steps": STEPS})
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {
                "step": step, "critic/score/mean": step / STEPS, "reward/sum/mean": step / STEPS,
                "actor/grad_norm": 100.0 if step == 1234 else 1.0 + step % 2 / 10,
                "actor/entropy": None if 2000 < step <= 3000 else 1 / step, "actor/lr": 1e-6, "text/nothing": None,
                "timing_s/step": 2.0, "perf/total_num_tokens": 1000.0,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                values = {"mean": 0.25, "maj": 0.5, "best": 0.75}
                values_of_step = {f"val-core/sums/acc/{name}@4": v * step / STEPS for name, v in values.items()}
                file.write(json.dumps({"step": step} | values_of_step) + "\n")


def make_seed(folder: Path, seed: int, rate: float) -> None:
    make_run(folder, steps=3, seed=seed, train={"steps": 3, "learning_rate": rate})
    accuracy = {0.1: (0.50, 0.52, 0.48), 0.2: (0.53, 0.51, 0.54)}[rate][seed]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "val-core/sums/acc/mean@1": accuracy}) + "\n")
    finish(folder)


def charts(tab, client, query: str = "", **options):
    path = f"/run/{client.id_of('long')}/charts{query}"
    return tab(client, **options).open(path, ".chart canvas")


def address(page) -> str:
    return str(page.evaluate("location.hash"))


def pointed(page) -> str:
    """Return the label of the first chart at a new pointer position."""
    page.mouse.move(0, 0)
    page.locator(".u-over").first.hover()
    page.wait_for_timeout(100)  # it is drawn with the next frame
    return str(page.locator(".chart .at").first.inner_text())


def chart(page, title: str):
    return page.locator("figure.chart", has=page.get_by_role("heading", name=title, exact=True))


@pytest.mark.short
def test_panels_that_are_the_same_are_one_and_what_never_changes_is_a_number(tab, client):
    page = charts(tab, client)
    titles = page.locator(".chart h3").all_inner_texts()
    assert titles[:4] == ["Reward", "Held-out accuracy", "Entropy (nats per token)", "Gradient norm"]
    assert not any("nothing" in title or "rate" in title for title in titles)
    assert "critic/score/mean = sum/mean" in chart(page, "Reward").locator(".legend").inner_text()
    page.get_by_text("Constant metrics: 3").click()
    assert page.locator(".flat dl").inner_text().split()[:2] == ["actor/lr", "1.00e-6"]


@pytest.mark.short
def test_how_charts_are_looked_at_is_in_the_address(tab, client):
    page = charts(tab, client)
    page.get_by_role("combobox", name="Axis").select_option("tokens")
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_role("searchbox").fill("grad norm")
    gradient = chart(page, "Gradient norm")
    gradient.hover()
    gradient.get_by_role("button", name="Log scale").click()
    until(lambda: all(part in address(page) for part in ("x=tokens", "smooth=0.9", "find=grad", "log=gradient")))
    page.reload()
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart h3").all_inner_texts() == ["Gradient norm"]
    assert (
        page.get_by_role("combobox", name="Axis").input_value() == "tokens"
        and page.get_by_label("Smoothing").input_value() == "0.9"
    )
    pressed = gradient.get_by_role("button", name="Log scale").get_attribute("aria-pressed")
    assert pressed == "true" and "(raw " in gradient.locator(".legend").inner_text()


@pytest.mark.short
def test_one_step_is_pointed_at_in_all_charts_and_said(tab, client):
    page = charts(tab, client)
    page.locator(".u-over").first.hover()
    said = page.locator(".chart .at")
    until(lambda: said.nth(0).inner_text().startswith("steps 2,4"))
    assert len(set(said.all_inner_texts())) == 1
    assert "–" in chart(page, "Entropy (nats per token)").locator(".legend").inner_text()  # a missing value
    held_out = chart(page, "Held-out accuracy").locator(".legend").inner_text()
    assert "(step 2,000)" in held_out or "(step 3,000)" in held_out  # of which an evaluation is
    page.get_by_role("combobox", name="Axis").select_option("time")
    until(lambda: "min · steps 2,4" in pointed(page))
    page.locator(".plot").first.focus()
    page.keyboard.press("End")
    until(lambda: "4,993 to 5,000" in chart(page, "Reward").get_by_role("status").inner_text())


@pytest.mark.short
def test_a_long_run_is_summed_up_and_every_step_is_seen_close_up(tab, client):
    page = charts(tab, client)
    page.wait_for_selector("text=5,000 steps: each point is the mean of 13 steps")
    page = charts(tab, client, "?from=1230&to=1240")
    assert page.get_by_text("each point is the mean").count() == 0
    plot = chart(page, "Gradient norm").locator(".plot")
    plot.focus()
    for key in ("Home", *["ArrowRight"] * 4):
        page.keyboard.press(key)
    until(lambda: "step 1,234, actor/grad_norm 100" in chart(page, "Gradient norm").get_by_role("status").inner_text())
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_selector("text=5,000 steps: each point is the mean of 13 steps")


@pytest.mark.short
def test_a_chart_fills_the_window_and_is_saved(tab, client):
    page = charts(tab, client)
    gradient = chart(page, "Gradient norm")
    gradient.hover()
    gradient.get_by_role("button", name="Enlarge Gradient norm").click()
    page.wait_for_selector("dialog canvas")
    until(lambda: "chart=gradient" in address(page) and page.locator("dialog .plot").bounding_box()["width"] > 1000)
    page.wait_for_selector("dialog :text('mean of 4 steps')")  # finer than in the small one
    with page.expect_download() as saved:
        page.locator("dialog").get_by_role("button", name="as PNG").click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG") and saved.value.suggested_filename.startswith("long-")
    with page.expect_download() as saved:
        page.locator("dialog").get_by_role("link", name="as CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert len(lines) == 1 + STEPS and lines[1234] == "long,1234,2468.0,1234000.0,100.0"
    page.keyboard.press("Escape")
    until(lambda: page.locator("dialog").count() == 0 and "chart=" not in address(page))
    assert page.evaluate("document.activeElement.className") == "enlarge"


def test_a_curve_is_hidden_and_shown_again(tab, client):
    page = charts(tab, client)
    one = chart(page, "Held-out accuracy")
    entry = one.get_by_role("button", name="maj@4")
    entry.click()
    until(lambda: "maj@4" not in one.locator(".plot").get_attribute("aria-label"))
    assert entry.get_attribute("aria-pressed") == "false"
    entry.click()
    until(lambda: "maj@4" in one.locator(".plot").get_attribute("aria-label"))


@pytest.mark.short
def test_groups_of_seeds_are_compared_with_the_interval_and_their_configs_beside_the_curves(tab, client):
    pytest.importorskip("scipy", reason="scipy is not installed: the intervals need it")
    ids = ",".join(client.id_of(f"rate{rate}-{seed}") for rate in (0.1, 0.2) for seed in range(3))
    page = tab(client, viewport={"width": 1400, "height": 900}).open(f"/compare/{ids}", ".chart canvas")
    said = " ".join(page.get_by_role("region", name="Difference").locator("li").inner_text().split())
    assert said.startswith("learning_rate=0.2 − learning_rate=0.1 = +0.0267 [95% −0.0148 to +0.0681], n = 3:")
    assert said.endswith("not significant; about 5 seeds per group needed")
    config, curves = page.locator(".beside aside").bounding_box(), page.locator(".beside .charts").bounding_box()
    assert config["x"] > curves["x"] + curves["width"] and config["y"] < curves["y"]
    page.get_by_label("All metrics").check()
    page.locator(".flat").get_by_text("timing_s/gen").wait_for(state="attached")  # which never changes here
    until(lambda: "all=1" in address(page))
    page.get_by_role("combobox", name="Axis").select_option("time")
    until(lambda: pointed(page) in ("2 s · step 1", "4 s · step 2"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nobody_is_kept_out_of_charts(tab, client, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = charts(tab, client, "?smooth=0.6&log=gradient", color_scheme=theme)
    page.get_by_text("Constant metrics: 3").click()
    for place in ("page", "dialog"):
        if place == "dialog":
            page.get_by_role("button", name="Enlarge Reward").click()
            page.wait_for_selector("dialog canvas")
        page.wait_for_timeout(300)
        results = axe.run(page).response["violations"]
        assert [
            (violation["id"], [node["html"][:150] for node in violation["nodes"]][:3]) for violation in results
        ] == []


def test_a_phone_shows_charts_in_chinese_without_scrolling_sideways(tab, client):
    one = tab(client, viewport={"width": 390, "height": 800})
    one.open("/", "table.runs").get_by_label("Language").select_option("zh")
    page = one.open(f"/run/{client.id_of('long')}/charts?chart=reward", "dialog canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('dialog').scrollWidth") <= 390
    text = page.locator("main").inner_text()
    assert "主要图表" in text and not any(word in text for word in ("section_", "flat_metrics", "axis_", "smoothing"))
