"""Questions about drawn shapes: the task of the vision quickstart.

A picture has two to `MOST` shapes (circle, square, triangle) in three colours, each in a cell of a grid of 4 x 4. A
question asks which colour they have, where it is one, how many there are of a colour or of a form, or whether there are
more of one colour than of another. It cannot be answered without the picture.

Demonstrations answer right half of the time, and else give an answer of the right kind at random. So a model that
imitates them can answer, but has to learn by reinforcement to look.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.data.files import DataError

CELLS, CELL, MOST = 4, 8, 8
"""Cells in a row, pixels of a cell, and most shapes in a picture."""
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
FORMS = ("circle", "square", "triangle")
COLOUR, COUNT, MORE, THAN = "Which colour", "How many ", "More ", " than "
KINDS = ("colour", "count", "compare")
RIGHT = 0.5
"""Share of demonstrations that are right whatever they draw."""
WORDS = (COLOUR, COUNT, MORE, THAN, *COLOURS, *FORMS, "yes", "no", "?")
"""Strings that a tokenizer for this task encodes as one token each."""
Scene = list[tuple[int, str, str]]
"""(cell, colour, form) of each shape."""


def make(rng: random.Random, kinds: str = "colour,count,compare", shuffled: bool = False) -> dict[str, Any]:
    """Draw a problem.

    Args:
        kinds: kinds of questions, with commas between them: `colour`, `count`, `compare`.
        shuffled: show the picture of another problem, as a control: no answer can then be known.

    Raises:
        ValueError: an unknown kind.

    Example:
        >>> row = make(random.Random(0))
        >>> row["prompt"], row["ground_truth"], row["images"][0][:22]
        ('<image>How many triangle?', '3', 'data:image/png;base64,')
    """
    chosen = kinds.split(",")
    if not {*chosen} <= {*KINDS}:
        raise ValueError(f"kinds={kinds!r}: use {', '.join(KINDS)}, or several with commas")
    kind = rng.choice(chosen)
    scene = draw_scene(rng, kind == "colour")
    if kind == "colour":
        prompt, truth = f"{COLOUR}?", scene[0][1]
    elif kind == "count":
        what = rng.choice([*COLOURS, *FORMS])
        prompt, truth = f"{COUNT}{what}?", str(sum(what in shape for shape in scene))
    else:
        one, two = rng.sample([*COLOURS], 2)
        counts = [sum(colour == each for _, each, _ in scene) for colour in (one, two)]
        prompt, truth = f"{MORE}{one}{THAN}{two}?", "yes" if counts[0] > counts[1] else "no"
    shown = draw_scene(rng, kind == "colour") if shuffled else scene
    return {
        "prompt": f"<image>{prompt}",
        "ground_truth": truth,
        "data_source": f"shapes-{kind}",
        "images": [picture(shown)],
        "scene": " ".join(f"{cell}:{colour}-{form}" for cell, colour, form in scene),
    }


def draw_scene(rng: random.Random, one_colour: bool = False) -> Scene:
    """Draw the shapes of a picture, each in a cell of its own."""
    cells = sorted(rng.sample(range(CELLS * CELLS), rng.randint(2, MOST)))
    colours = [rng.choice([*COLOURS])] if one_colour else [*COLOURS]
    return [(cell, rng.choice(colours), rng.choice(FORMS)) for cell in cells]


def picture(scene: Scene) -> str:
    """Draw a picture; return it as a data URL.

    Raises:
        DataError: Pillow is not installed.
    """
    with reraise_as(DataError, "the task shapes draws pictures with Pillow: pip install 'atomrl[vision]'", ImportError):
        from PIL import Image, ImageDraw
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for cell, colour, form in scene:
        x, y = cell % CELLS * CELL, cell // CELLS * CELL
        box, fill = (x + 1, y + 1, x + CELL - 2, y + CELL - 2), COLOURS[colour]
        if form == "circle":
            draw.ellipse(box, fill)
        elif form == "square":
            draw.rectangle(box, fill)
        else:
            draw.polygon([(x + CELL // 2, y + 1), (x + 1, y + CELL - 2), (x + CELL - 2, y + CELL - 2)], fill)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def demonstrate(rng: random.Random, row: dict[str, Any]) -> str:
    """Return the right answer half of the time, else one of the same kind at random."""
    truth = str(row["ground_truth"])
    if rng.random() < RIGHT:
        return truth
    kinds: tuple[Sequence[str], ...] = (tuple(COLOURS), ("yes", "no"))
    return rng.choice(next((kind for kind in kinds if truth in kind), "01234"))


def split_by(row: dict[str, Any]) -> str:
    """Return the scene: problems of one picture are in one split."""
    return str(row["scene"])
