"""Pictures of rows: the forms in which data sets have them, and what is wrong with some."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atomrl.config import DataConfig
from atomrl.data.checks import check_data, first_rows
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader
from atomrl.data.image_reader import ImageReader
from atomrl.data.images import ImageStore
from atomrl.data.pictures import decoded
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.prompt_stream import PromptStream
from atomrl.models.loading import load_tokenizer, model_config_only
from tests.tiny_vision import IMAGE, make_tiny_vision_model, picture


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


ONE, TWO = encoded(picture(1)), encoded(picture(2, 84, 56))
ROW = {"prompt": "how many?", "ground_truth": "3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(tmp_path, model):
    """Load rows from a file beside one.png and two.png; returns the report, and keeps the store."""

    def load(*rows, run="run", **data):
        for name, content in (("one.png", ONE), ("two.png", TWO)):
            if not (tmp_path / name).exists():
                (tmp_path / name).write_bytes(content)
        file = tmp_path / "train.jsonl"
        if rows and isinstance(rows[0], Path):
            file = rows[0]
        else:
            file.write_text("\n".join(map(json.dumps, rows)))
        limits = data.get("min_pixels"), data.get("max_pixels")
        load.reader = ImageReader(tmp_path / run / "images", model, model_config_only(model), *limits)
        load.store = ImageStore(tmp_path / run / "images", data.get("images_field"), load.reader)
        convert = demonstration_reader("prompt", "completion") if data.pop("sft", False) else None
        config = DataConfig(train=str(file), **data)
        load.processor = DataProcessor(load_tokenizer(model), config, images=load.reader)
        return load_problems(config, convert=convert, images=load.store)

    return load


def url(content):
    return "data:image/png;base64," + base64.b64encode(content).decode()


def parts(*pictures, text="how many?"):
    shown = [{"type": "image", **({} if value is None else {"image": value})} for value in pictures]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


FORMS = {
    "list_of_paths": {"images": ["one.png", "two.png"]},
    "places_in_the_text": {"prompt": "<image><image>how many?", "images": ["one.png", "two.png"]},
    "objects_with_a_path": {"images": [{"bytes": None, "path": "one.png"}, {"path": "two.png"}]},
    "base64_urls": {"images": [url(ONE), url(TWO)]},
    "bare_base64": {"images": [base64.b64encode(ONE).decode(), base64.b64encode(TWO).decode()]},
    "parts_without_pictures": {"prompt": parts(None, None), "images": ["one.png", "two.png"]},
    "parts_with_paths": {"prompt": parts("one.png", "two.png")},
    "image_urls_of_openai": {
        "prompt": [{"role": "user", "content": [
            *({"type": "image_url", "image_url": {"url": url(each)}} for each in (ONE, TWO)),
            {"type": "text", "text": "how many?"}]}]
    },
    "messages_with_places": {
        "prompt": [{"role": "user", "content": "<image><image>how many?"}], "images": ["one.png", "two.png"]
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_may_have_pictures_in_any_usual_form(load, form):
    report = load(ROW | FORMS[form], ROW | {"prompt": "none"})
    first, text = report.problems
    assert [(image.height, image.width) for image in first.images] == [(56, 56), (56, 84)]
    assert text.images == () and text.columns["images"] is None
    load.store.write()
    assert [Path(path).read_bytes() for path in first.columns["images"]] == [ONE, TWO]
    prompt, _ = load.processor.to_prompts([("0", first), ("1", text)])
    words = load.processor.tokenizer.decode([token for token in prompt.token_ids if token != IMAGE])
    place = "<|vision_start|><|vision_end|>"
    assert words == f"<user>{place}{place}how many?<|im_end|><assistant>" and prompt.token_ids.count(IMAGE) == 4 + 6
    again = load(ROW | FORMS["list_of_paths"], ROW | {"prompt": "none"}, run="other").problems[0]
    assert again.images == first.images  # the same pictures, wherever they came from


def test_one_column_may_have_one_picture_and_another_name(load):
    report = load(ROW | {"image": "one.png"}, ROW | {"image": None})
    assert [len(problem.images) for problem in report.problems] == [1, 0]
    report = load(ROW | {"scan": ["two.png"]}, images_field="scan")
    assert report.problems[0].images[0].width == 84


def test_parquet_and_hub_features_have_bytes(load, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["how many?"] * 2, "ground_truth": ["3"] * 2, "images": [[ONE, TWO], [ONE]]}
    features = datasets.Features(
        prompt=datasets.Value("string"), ground_truth=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )  # fmt: skip
    columns = rows | {"images": [[{"bytes": each, "path": None} for each in row] for row in rows["images"]]}
    data = datasets.Dataset.from_dict(columns, features=features)
    data.to_parquet(tmp_path / "train.parquet")
    data.save_to_disk(tmp_path / "saved")
    names = []
    for file in ("train.parquet", "saved"):
        report = load(tmp_path / file)
        names.append([[image.name for image in problem.images] for problem in report.problems])
        assert len(load.store) == 2
    assert names[0] == names[1] and names[0][0][:1] == names[0][1]
    raw = datasets.Dataset.from_dict({"prompt": ["a"], "ground_truth": ["3"], "image": [ONE]})
    raw.to_parquet(tmp_path / "bytes.parquet")
    assert load(tmp_path / "bytes.parquet").problems[0].images[0].name == names[0][0][0]


BAD = {
    "more_pictures_than_places": ({"prompt": "<image>?", "images": ["one.png", "two.png"]},
                                  "has 1 places of pictures (<image>), and the row 2 pictures"),
    "more_places_than_pictures": ({"prompt": "<image><image>?", "images": ["one.png"]},
                                  "has 2 places of pictures (<image>), and the row 1 pictures"),
    "a_place_without_a_picture": ({"prompt": "<image>?"}, "the prompt has <image>, the place of a picture"),
    "no_file": ({"images": ["three.png"]}, "picture 1: {folder}/three.png cannot be read: No such file or directory"),
    "cut_short": ({"images": [url(ONE[:400])]}, "picture 1: the picture is damaged or cut short"),
    "not_a_picture": ({"images": ["one.png", url(b"hello, this is text")]},
                      "picture 2: not a picture that can be read (formats: BMP, GIF, JPEG, PNG, TIFF, WEBP)"),
    "empty": ({"images": [url(b"")]}, "the picture is empty (0 bytes)"),
    "huge": ({"images": [url(encoded(Image.new("1", (20_000, 6_000))))]},
             "the picture has 20000 x 6000 pixels, more than 100,000,000"),
    "far_too_huge": ({"images": [url(encoded(Image.new("1", (20_000, 10_000))))]},
                     "the picture has more than 100,000,000 pixels; make it smaller"),
    "a_thin_line": ({"images": [url(encoded(Image.new("L", (1000, 2))))]}, "1000 x 2 pixels: absolute aspect ratio"),
    "animated": ({"images": [url(encoded(picture(1), "GIF", save_all=True, append_images=[picture(2)]))]},
                 "animated or has pages (2 frames)"),
    "on_the_web": ({"images": ["https://example.org/a.png"]}, "https://example.org/a.png is on the web: download"),
    "a_number": ({"images": [7]}, "must be a path, bytes, base64 or an image of Pillow, not int"),
    "two_columns": ({"images": ["one.png"], "image": "two.png"}, "column 'images' and column 'image' have different"),
    "token_in_the_text": ({"prompt": "<|image_pad|>?", "images": ["one.png"]}, "write <image> where a picture is"),
    "in_the_answer": ({"prompt": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [
        {"type": "image", "image": "one.png"}]}]}, "a message of the assistant has a picture"),
    "film": ({"videos": ["a.mp4"]}, "column 'videos' has pictures, films or sound"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_picture_is_an_error_with_its_row(load, tmp_path, bad):
    row, message = BAD[bad]
    with pytest.raises(DataError) as error:
        load(ROW, ROW | row)
    assert "train.jsonl:2" in str(error.value) and message.replace("{folder}", str(tmp_path)) in str(error.value)


def test_a_prompt_is_never_cut_inside_a_picture(load):
    report = load(ROW | {"images": ["two.png"]}, max_prompt_tokens=20, overlong_prompt="truncate")
    with pytest.raises(DataError, match=r"train.jsonl:1: 35 prompt tokens, more than 20, and a prompt with pictures"):
        load.processor.filter_overlong(report.problems)
    report = load(ROW | {"images": ["two.png"]}, ROW, max_prompt_tokens=30)
    problems, _ = load.processor.filter_overlong(report.problems)
    assert [problem.problem_id for problem in problems] == ["train.jsonl:2"]


def test_limits_on_pixels_change_the_number_of_tokens(load):
    def tokens(**limits):
        problem = load(ROW | {"images": ["two.png"]}, **limits).problems[0]
        [prompt] = load.processor.to_prompts([("0", problem)])
        return prompt.token_ids.count(IMAGE)

    assert tokens() == 6 and tokens(max_pixels=28 * 28) == 1 and tokens(min_pixels=84 * 84, max_pixels=200 * 200) > 6
    with pytest.raises(DataError, match=r"data.min_pixels=9999999 is more than data.max_pixels=7056 .null"):
        tokens(min_pixels=9999999)
    with pytest.raises(ValueError, match=r"min_pixels=9 is more than max_pixels=8"):
        DataConfig(train="-", min_pixels=9, max_pixels=8)


def test_pictures_are_turned_as_exif_says_and_laid_on_white():
    upright = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decoded(encoded(upright.rotate(90, expand=True), exif=exif))
    assert turned.mode == "RGB" and np.array_equal(np.asarray(turned)[..., 0], np.asarray(upright))
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    palette = clear.quantize(4)
    for image in (clear, palette):
        assert decoded(encoded(image)).getpixel((1, 1)) == (255, 255, 255)
        assert decoded(encoded(image)).getpixel((0, 0)) == (255, 0, 0)
    grey = Image.new("L", (2, 2), 60)
    grey.info["transparency"] = 60
    assert decoded(encoded(grey, transparency=60)).getpixel((0, 0)) == (255, 255, 255)
    wide = Image.fromarray(np.full((2, 2), 200 << 8, np.uint16))
    assert decoded(encoded(wide)).getpixel((0, 0)) == (200, 200, 200)
    assert decoded(encoded(Image.new("CMYK", (2, 2), (0, 0, 0, 0)), "JPEG")).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("orientation", "size"), [(6, (84, 56)), (9, (56, 84))])  # 9 has no meaning
def test_a_turned_picture_has_the_size_after_the_turn(load, kind, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    report = load(ROW | {"images": [url(encoded(picture(1, 84, 56), kind, exif=exif))]})
    image = report.problems[0].images[0]
    assert (image.height, image.width) == size
    load.store.write()
    patches, grid = load.reader(image)
    assert grid.tolist() == [1, size[0] // 14, size[1] // 14]
    assert len(patches) == load.reader.patches(image) == 24


def test_a_changed_picture_changes_the_data_and_one_that_is_gone_is_in_the_folder(load, tmp_path):
    def fingerprint(**named):
        report = load(ROW | {"images": ["one.png"]}, **named)
        load.store.write()
        return PromptStream(report.problems).fingerprint

    first = fingerprint()
    assert fingerprint(run="elsewhere") == first
    (tmp_path / "one.png").unlink()
    file = tmp_path / "train.jsonl"
    load.store = ImageStore(tmp_path / "run" / "images")
    report = load_problems(DataConfig(train=str(file)), images=load.store)
    assert PromptStream(report.problems).fingerprint == first
    (tmp_path / "one.png").write_bytes(encoded(picture(9)))
    assert fingerprint() != first


def test_demonstrations_have_pictures_in_any_turn_of_others(load):
    from atomrl.data.tokenized import TokenizedSamples

    conversation = [
        *parts("one.png", text="first?"), {"role": "assistant", "content": "A"},
        *parts("two.png", text="second?"), {"role": "assistant", "content": "B <image>"},
    ]  # fmt: skip
    plain = {"prompt": "which?", "completion": "C", "images": ["two.png"]}
    report = load({"messages": conversation}, plain, sft=True)
    rows = TokenizedSamples(report, load.processor, "demonstrations").rows([("0:0", each) for each in report.problems])
    sizes = [[load.reader.tokens(image) for image in images] for images in rows.images.rows]
    assert sizes == [[4, 6], [6]] and [(row == IMAGE).sum() for row in rows.tokens] == [10, 6]
    assert not rows.loss_mask[rows.tokens == IMAGE].any()
    text = load.processor.tokenizer.decode(rows.tokens[0][rows.loss_mask[0]])
    assert text == "A<|im_end|>B <image><|im_end|>"
    cut = TokenizedSamples(report, load.processor, "demonstrations", max_row_tokens=45)
    assert [problem.problem_id for problem in cut.problems] == ["train.jsonl:2"]


def test_a_check_names_the_pictures_of_the_row_that_it_shows(load, tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "two.png").write_bytes(encoded(picture(2, 300, 150), exif=turned))
    report = load(ROW | {"images": ["one.png", "two.png"]}, *[ROW | {"prompt": str(k)} for k in range(4)])
    said = check_data(tmp_path / "train.jsonl").text()
    assert f"first picture: {tmp_path / 'one.png'}, 56 x 56 pixels\n" in said
    assert f"first picture: {tmp_path / 'two.png'}, 150 x 300 pixels\n" in said
    first, second, third = first_rows(report.problems, load.store)
    small = [Image.open(io.BytesIO(base64.b64decode(each["thumbnail"]))) for each in first["images"]]
    assert [(each.format, each.size) for each in small] == [("PNG", (56, 56)), ("PNG", (48, 96))]
    assert (second, third) == ({"prompt": "0", "images": []}, {"prompt": "1", "images": []})
