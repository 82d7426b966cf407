"""The page New run in a real browser: what is wrong stands beside its key before anything is started."""

from __future__ import annotations

import json

import pytest
import yaml
from PIL import Image

from tests.tools.ui.browser.conftest import CONFIG, until
from tests.tools.ui.made import make_run, serving

TEXT = "# Mine.\nrun_name: mine\n" + yaml.safe_dump(CONFIG, sort_keys=False)


@pytest.fixture(scope="module")
def client(browser, tmp_path_factory):
    from tests.tiny import make_tiny_model
    from tests.tiny_vision import make_tiny_vision_model

    folder = tmp_path_factory.mktemp("new")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(TEXT)
    make_tiny_vision_model(folder / "sees")
    Image.new("RGB", (300, 150), "red").save(folder / "red.png")
    row = {"prompt": "<image><b>how</b> many?", "images": ["red.png"], "ground_truth": "1"}
    (folder / "seen.jsonl").write_text((json.dumps(row) + "\n") * 8)
    seeing = {
        "model": {"path": "sees"},
        "data": {"train": "seen.jsonl"},
        "rollout": CONFIG["rollout"] | {"engine": "hf"},
    }
    (folder / "seeing.yaml").write_text(yaml.safe_dump({**CONFIG, "run_name": "sees", **seeing}))
    make_run(folder / "runs" / "old")
    with serving(folder / "runs", "--allow-launch", cwd=folder) as (client, _):
        yield client


def opened(tab, client, name="mine.yaml", **options):
    """The page, started from a config in the working directory."""
    [config] = [one["id"] for one in client.get("/api/starts").json["configs"] if one["name"] == name]
    return tab(client, **options).open(f"/new?config={config}", ".field")


def field(page, key: str):
    return page.locator(f"[id='form-{key}']")


def beside(page, key: str) -> str:
    return page.locator(f"[id='form-{key}-about'] .error").inner_text()


@pytest.mark.short
def test_the_form_and_the_text_are_one_config(tab, client):
    page = opened(tab, client)
    text = page.locator("#config")
    assert field(page, "train.steps").input_value() == "4" and text.input_value().startswith("# Mine.")
    field(page, "train.steps").fill("7")
    until(lambda: "steps: 7" in text.input_value())
    assert "# Mine." in text.input_value(), "comments stay"
    text.fill(text.input_value().replace("steps: 7", "steps: 9"))
    until(lambda: field(page, "train.steps").input_value() == "9")
    page.get_by_label("Unset train.steps").click()
    until(lambda: "steps:" not in text.input_value())
    assert field(page, "train.steps").get_attribute("placeholder") == "100"
    page.wait_for_selector("text=Valid config: rl, 100 steps")


def test_keys_are_found_by_what_they_mean(tab, client):
    page = opened(tab, client)
    page.get_by_placeholder("Search").fill("lora matrices")
    until(lambda: page.locator(".field").count() in (1, 2, 3))
    assert "Columns of each adapter's two matrices" in page.locator(".form").inner_text()
    field(page, "model.lora.rank").fill("4")
    until(lambda: "rank: 4" in page.locator("#config").input_value())


@pytest.mark.short
def test_errors_are_shown_beside_their_keys_while_typing(tab, client):
    page = opened(tab, client)
    field(page, "train.steps").fill("many")
    assert "must be an integer" in beside(page, "train.steps"), "at once: nothing is asked"
    assert field(page, "train.steps").get_attribute("aria-invalid") == "true"
    field(page, "train.steps").fill("0")
    assert "must be at least 1" in beside(page, "train.steps")
    assert page.get_by_role("button", name="Review and launch").is_disabled()
    field(page, "train.steps").fill("4")
    field(page, "run_name").fill("old")
    page.wait_for_selector("[id='form-run_name-about'] .error")
    assert "already exists" in beside(page, "run_name")


def test_an_unknown_key_is_renamed_or_removed(tab, client):
    page = opened(tab, client)
    text = page.locator("#config")
    text.fill(text.input_value().replace("steps: 4", "stepz: 4") + "zzz: 1\n")
    page.wait_for_selector(".stray >> text=did you mean")
    until(lambda: page.locator(".mark-wrong").count() == 2)
    page.get_by_role("button", name="Rename to train.steps").click()
    until(lambda: "steps: 4" in text.input_value())
    page.get_by_role("button", name="Remove").click()
    page.wait_for_selector("text=Valid config: rl, 4 steps")
    assert "zzz" not in text.input_value()
    text.fill("train: [1")
    page.wait_for_selector("text=not valid YAML")
    assert page.get_by_role("button", name="Review and launch").is_disabled()


def test_a_run_that_does_not_fit_is_not_started(tab, client):
    page = opened(tab, client)
    field(page, "rollout.prompts_per_step").fill("400000")
    page.get_by_placeholder("Search").fill("micro_batch")
    field(page, "train.tokens_per_micro_batch").fill("9000000000")
    page.get_by_placeholder("Search").fill("")
    page.wait_for_selector("text=Valid config: rl, 4 steps")
    page.get_by_role("button", name="Review and launch").click()
    page.wait_for_selector("text=It does not fit in memory.", timeout=120_000)
    assert page.get_by_role("button", name="Launch", exact=True).is_disabled()
    page.get_by_role("button", name="Back to the config").click()
    assert "does not fit" in beside(page, "train.tokens_per_micro_batch")
    answer = client.post("/api/launches", {"yaml": page.locator("#config").input_value()})
    assert answer.status == 409 and "does not fit" in answer.json["detail"]
    assert not any(run["name"] == "mine" for run in client.get("/api/runs").json["runs"])


def test_a_run_is_shown_as_yaml_before_it_starts_and_opens_when_it_has(tab, client):
    page = opened(tab, client, viewport={"width": 390, "height": 800})
    page.wait_for_selector("text=Valid config: rl, 4 steps")
    page.get_by_role("button", name="Review and launch").click()
    assert "# Mine." in page.locator("dialog pre[aria-label='config.yaml']").inner_text()
    page.wait_for_selector("dialog >> text=It fits", timeout=120_000)
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
    page.get_by_role("button", name="Launch", exact=True).click()
    page.wait_for_selector("h1:has-text('mine')", timeout=120_000)


def test_six_sections_become_the_own_layout(tab, client):
    page = opened(tab, client)
    train = {"train_dataset": "t.jsonl", "n_grpo_steps": 7}
    six = {"model_config": {"model_name_or_path": "model"}, "train_config": train}
    page.locator("#config").fill(json.dumps(six))
    until(lambda: field(page, "train.steps").input_value() == "7")
    assert "model_config" not in page.locator("#config").input_value()


def test_the_first_rows_are_shown_with_their_pictures_before_the_run_starts(tab, client):
    page = opened(tab, client, name="seeing.yaml")
    page.get_by_role("button", name="Review and launch").click()
    picture = page.get_by_alt_text("red.png, 300 × 150")
    picture.first.wait_for(timeout=120_000)
    assert picture.count() == 3 and picture.first.evaluate("image => image.naturalWidth") == 96
    assert "<b>how</b> many?" in page.locator("dialog").inner_text()
