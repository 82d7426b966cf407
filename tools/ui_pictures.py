"""Takes the pictures of docs/guides/web_interface.md, light and dark, in a real browser.

python tools/ui_pictures.py FOLDER RUN STEP [PICTURE ...]

of a run in a folder of runs; for `tokens` it recorded tokens at that step, for `chinese` the doctor found something.
`compare` and `answers` take several runs as RUN, with commas between, `study` a study: only where they are named.

It needs what `make test-ui` installs, Pillow, and a chromium (or one named in ATOMRL_BROWSER).
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tools.ui.made import serving

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PAGES = {
    "runs": ("/", "table.runs"),
    "run": ("/run/{run}", ".before-after"),
    "charts": ("/run/{run}/charts", ".chart canvas"),
    "rollouts": ("/run/{run}/rollouts/{step}/train/{place}?first_step={step}&last_step={step}", "aside.group .members"),
    "tokens": ("/run/{run}/rollouts/{step}/train/{place}?first_step={step}&split=train", "aside.group pre.math"),
    "config": ("/run/{run}/config", "text=Non-default keys"),
    "log": ("/run/{run}/log", "pre"),
    "new": ("/new", ".launch .finished"),
    "chinese": ("/run/{run}", ".chart"),
    "phone": ("/run/{run}", ".chart"),
}
ASKED = {
    "compare": ("/compare/{run}", ".chart canvas"),
    "answers": ("/compare/{run}", "table.answers"),
    "study": ("/study/{run}", ".scatter"),
}
"""Name of a picture -> the page, and what it has when it is there."""
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
TIMEOUT_MS = 600_000
COLOURS = 256


def main(folder: Path, name: str, step: int, pictures: list[str]) -> None:
    """Write the pictures that are asked for, or all."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("ATOMRL_BROWSER") or shutil.which("chromium")
    with serving(folder, "--allow-launch") as (client, _), sync_playwright() as playwright:
        listed = client.get("/api/runs").json
        ids = {one["name"]: one["id"] for one in listed["runs"] + listed["studies"]}
        run = ",".join(ids[one] for one in name.split(","))
        about = {} if set(pictures) & set(ASKED) else client.get(f"/api/runs/{run}/rollouts/{step}/train/0/tokens").json
        recorded = about.get("recorded") or [0]
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        for theme in ("light", "dark"):
            for picture in pictures or list(PAGES):
                place, shown = (PAGES | ASKED)[picture]
                size, language = PHONE if picture == "phone" else WIDE, "zh-CN" if picture == "chinese" else "en"
                context = browser.new_context(locale=language, color_scheme=theme, viewport=size)
                context.set_default_timeout(TIMEOUT_MS)
                page = context.new_page()
                page.goto(client.address)
                page.goto(f"{client.base}/#{place.format(run=run, step=step, place=recorded[0])}")
                page.wait_for_selector(shown)
                if picture == "tokens":
                    colour_tokens(page)
                if picture == "answers":
                    page.get_by_role("heading", name="Held-out answers").evaluate("node => node.scrollIntoView()")
                    page.mouse.wheel(0, -60)  # from below the head of the page
                page.wait_for_timeout(1000)  # curves are drawn when they have come
                ending = "_dark" if theme == "dark" else ""
                save(page.screenshot(), IMAGES / f"ui_{picture}{ending}.png")
                context.close()


def colour_tokens(page: Any) -> None:
    """Show the tokens of the group's second completion, coloured by entropy, and how the loss of one was made."""
    page.locator("aside.group").get_by_role("button", name="Tokens").nth(1).click()
    page.get_by_label("Color by").select_option("entropy")
    page.locator(".tokens.coloured [data-i]").nth(3).click()
    page.wait_for_selector(".lines")
    page.locator(".strip").evaluate("node => node.scrollIntoView({block: 'start'})")


def save(picture: bytes, path: Path) -> None:
    """With few colours, for a small file."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
