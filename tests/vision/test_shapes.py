"""The task of the vision quickstart."""

import base64
import io

import pytest
from PIL import Image

from atomrl.data.files import DataError
from atomrl.data.tasks import generate
from atomrl.data.tasks.shapes import CELL, CELLS, COLOURS


def shown(row):
    """Return the colours in the cells of a row's picture."""
    content = base64.b64decode(row["images"][0].partition(",")[2])
    image = Image.open(io.BytesIO(content))
    assert image.size == (CELLS * CELL, CELLS * CELL)
    centre = [image.getpixel((cell % CELLS * CELL + 4, cell // CELLS * CELL + 4)) for cell in range(CELLS**2)]
    names = {fill: name for name, fill in COLOURS.items()}
    return {cell: names[pixel] for cell, pixel in enumerate(centre) if pixel in names}


def test_the_answer_is_that_of_the_picture():
    rows = generate("shapes", 200, seed=0)
    assert len({row["images"][0] for row in rows}) > 190 and {row["data_source"] for row in rows} == {
        "shapes-colour", "shapes-count", "shapes-compare"
    }  # fmt: skip
    for row in rows:
        shapes = [part.partition(":") for part in row["scene"].split()]
        assert shown(row) == {int(cell): what.partition("-")[0] for cell, _, what in shapes}
        words = row["prompt"].removeprefix("<image>").rstrip("?").split()
        counts = [sum(word in what for _, _, what in shapes) for word in words]
        if words[0] == "Which":
            assert {what.partition("-")[0] for _, _, what in shapes} == {row["ground_truth"]}
        else:
            expected = str(counts[-1]) if words[0] == "How" else ("no", "yes")[counts[1] > counts[3]]
            assert row["ground_truth"] == expected


def test_the_control_shows_other_pictures_and_splits_are_apart():
    rows = generate("shapes", 100, seed=0, shuffled=True)
    scenes = [{int(part.partition(":")[0]) for part in row["scene"].split()} for row in rows]
    assert sum({*shown(row)} == scene for row, scene in zip(rows, scenes, strict=True)) < 10
    held_out = {row["images"][0] for row in generate("shapes", 100, split="eval")}
    assert not held_out & {row["images"][0] for row in generate("shapes", 500)}
    assert {row["data_source"] for row in generate("shapes", 9, kinds="count")} == {"shapes-count"}
    with pytest.raises(DataError, match="kinds='weigh': use colour, count, compare"):
        generate("shapes", 1, kinds="weigh")
