"""Environments of the tests whose replies have pictures, as a user would write them."""

import io
import random

from PIL import Image

from atomrl.environments import Reply


def colour(seed, size=(56, 56)):
    """A picture of one colour, with a line."""
    rng = random.Random(seed)
    picture = Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))
    picture.paste(tuple(rng.randrange(256) for _ in range(3)), (0, rng.randrange(40), size[0], rng.randrange(41, 50)))
    return picture


def screen(problem, *, role="user", turns=2, opening=False, wide=84):
    """Shows a screen that depends on what was written: on turn 1 a wide one, on turn 2 two in the text, then text."""
    text = yield Reply(text="begin with", images=[colour(problem.prompt)]) if opening else None
    for turn in range(turns):
        name = f"{problem.prompt}/{turn}/{text}"
        if turn % 3 == 0:
            text = yield Reply(text="you see", role=role, label="screen", images=[colour(name, (wide, 56))])
        elif turn % 3 == 1:
            shown = [colour(name), colour(name + "b", (56, 112))]
            text = yield Reply(text="first<image>then<image>!", role=role, reward=0.5, images=shown)
        else:
            text = yield Reply(text="only <image> words", role=role)
    return float(len(text))


def calls(problem):
    """Answers two calls, of which the second has a picture."""
    text = yield None
    text = yield [Reply(text="a<image>", role="tool"), Reply(text="b", role="tool", images=[colour(text)])]
    return 1.0


def broken(problem):
    """Replies as the problem says."""
    yield None
    values = {
        "cut": [b"\x89PNG\r\n\x1a\n"], "empty": [b""], "gone": ["nowhere.png"], "web": ["https://example.com/a.png"],
        "number": [7], "bare": colour("a"), "places": [colour("a"), colour("b")], "narrow": [colour("a", (2, 2000))],
        "frames": [animated()],
    }  # fmt: skip
    text = "one <image>" if problem.prompt == "places" else "it is " + "long " * 200 if problem.prompt == "long" else ""
    yield Reply(text=text, images=values.get(problem.prompt, [colour("a")]))
    return 1.0


def animated():
    """A GIF of two frames."""
    content = io.BytesIO()
    colour("a").save(content, "GIF", save_all=True, append_images=[colour("b")])
    return content.getvalue()
