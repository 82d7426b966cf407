"""Layouts of preferences, and what is wrong with a row, by file and line."""

import json
import random
import re

import pytest

from atomrl.config import DataConfig, PreferenceConfig
from atomrl.data.files import DataError
from atomrl.data.given import preference_reader
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.tasks import task_words
from atomrl.data.tasks.chain import chain_pair, make_chain
from atomrl.data.tokenized import TokenizedSamples
from atomrl.models.tokenizer import make_tokenizer

USER, GOOD, BAD = (
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
HH = "\n\nHuman: 2+2=\n\nAssistant: I think\n\nHuman: So?\n\nAssistant:"


def load_preferences(config, fields=None):
    read = preference_reader(config.prompt_field, fields or PreferenceConfig())
    return load_problems(config, convert=read, completions="pair")


def load(tmp_path, *rows, fields=None, **config):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_preferences(DataConfig(train=str(path), **config), PreferenceConfig(**(fields or {})))


@pytest.mark.parametrize(
    ("row", "prompt", "scored"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", (("4", 0.0), ("5", 0.0))),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 3}, "2+2=", (("4", 3.0), ("5", 0.0))),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, (USER,), (((GOOD,), 0.0), ((BAD,), 0.0))),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,), (((GOOD,), 0.0), ((BAD,), 0.0))),
        (
            {"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
            (USER, BAD, USER),
            (((GOOD,), 0.0), ((BAD,), 0.0)),
        ),
        ({"chosen": HH + " I say 4", "rejected": HH + " I say 5"}, HH, ((" I say 4", 0.0), (" I say 5", 0.0))),
        ({"chosen": "sum: 2+2 is 42", "rejected": "sum: 2+2 is 40"}, "sum: 2+2 is", ((" 42", 0.0), (" 40", 0.0))),
        ({"chosen": "so it is", "rejected": "so it is not"}, "so it", ((" is", 0.0), (" is not", 0.0))),
        (  # HuggingFaceH4/ultrafeedback_binarized
            {
                "prompt": "2+2=",
                "prompt_id": "ab",
                "chosen": [USER, GOOD],
                "rejected": [USER, BAD],
                "messages": [USER, GOOD],
                "score_chosen": 8.5,
                "score_rejected": 6.0,
            },
            (USER,),
            (((GOOD,), 8.5), ((BAD,), 6.0)),
        ),
        (  # openbmb/UltraFeedback
            {
                "source": "x",
                "instruction": "2+2=",
                "completions": [
                    {"response": text, "overall_score": score, "fine-grained_score": 1.0}
                    for text, score in (("3", 2.0), ("4", 9.0), ("four", 9.0), ("5", 1.0))
                ],
            },
            "2+2=",
            (("4", 9.0), ("5", 1.0)),
        ),
        ({"prompt": "2+2=", "completion": "4", "label": True}, "2+2=", (("4", 1.0),)),
        ({"prompt": [USER], "completion": [BAD], "label": False}, (USER,), (((BAD,), -1.0),)),
    ],
)
def test_layouts_of_preferences_are_read(tmp_path, row, prompt, scored):
    (sample,) = load(tmp_path, row).problems
    assert sample.prompt == prompt and sample.problem_id == "pairs.jsonl:1"
    assert sample.columns == {"completions": scored}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing or empty"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "field 'chosen' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, "one is text, the other a list"),
        ({"prompt": "a", "chosen": {"x": 1}, "rejected": "b"}, "'chosen' is neither text nor a list"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "prompt is empty"),
        ({"chosen": "b", "rejected": "c"}, "no common prefix"),
        ({"chosen": "a b", "rejected": "a b"}, "the same"),
        ({"chosen": HH + "4", "rejected": HH + " "}, "field 'rejected' is empty"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "the same"),
        ({"chosen": [USER, GOOD], "rejected": [BAD, BAD]}, "no common prompt"),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD]},
            "one assistant .*, not assistant",
        ),
        (
            {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]},
            "one assistant .*, not user, ass",
        ),
        ({"prompt": "3+3=", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not among the messages"),
        ({"chosen": [USER, {"role": "assistant"}], "rejected": [USER, BAD]}, "'chosen': message 2: 'content'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "'margin' is -1"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "'margin' must be a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": 2}, "lower score"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1}, "'score_rejected' is missing"),
        ({"prompt": "a", "completion": "b"}, "'label' is missing .*preference.label_field names the column"),
        ({"prompt": "a", "completion": "b", "label": 1}, "'label' must be true or false, not 1"),
        ({"prompt": "a", "completion": "b"}, "'label' is missing"),
        ({"completion": "b", "label": True}, "'prompt' is missing"),
        ({"prompt": "a", "completion": "", "label": True}, "'completion' is empty"),
        (
            {"instruction": "a", "completions": [{"response": "b", "overall_score": 1}]},
            "has 1 items; a preference needs two",
        ),
        ({"instruction": "a", "completions": [{"response": "b"}] * 2}, r"completions\[0\].overall_score' must be"),
        ({"instruction": "a", "completions": [{"response": "b", "overall_score": 1}] * 2}, "all completions have"),
        ({"instruction": "a", "completions": "b"}, "must be a list of objects"),
        ({"prompt": "a", "ground_truth": "b"}, "not a preference: it has 'prompt', 'ground_truth', but neither"),
    ],
)
def test_rows_with_problems_are_named(tmp_path, row, message):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=r"(?s)pairs.jsonl:2: .*" + message):
        load(tmp_path, good, row)
    report = load(tmp_path, good, row, on_bad_row="skip")
    assert len(report.problems) == 1 and len(report.errors) == 1 and re.search(message, report.errors[0])


def test_columns_can_have_other_names(tmp_path):
    row = {"question": "a", "yes": "b", "no": "c"}
    fields = {"chosen_field": "yes", "rejected_field": "no"}
    (sample,) = load(tmp_path, row, fields=fields, prompt_field="question").problems
    assert sample.prompt == "a" and sample.columns["completions"] == (("b", 0.0), ("c", 0.0))


def test_pairs_are_read_from_parquet(tmp_path):
    pd = pytest.importorskip("pandas")
    row = {
        "prompt": "2+2=",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 2.0,
        "score_rejected": 1.0,
    }
    pd.DataFrame([row, row]).to_parquet(tmp_path / "p.parquet")
    report = load_preferences(DataConfig(train=str(tmp_path / "p.parquet"), train_size=1))
    assert [sample.problem_id for sample in report.problems] == ["p.parquet:1"]
    assert report.problems[0].columns["completions"] == (((GOOD,), 2.0), ((BAD,), 1.0))


def test_pairs_of_a_task():
    report = load_preferences(DataConfig(train="chain", train_size=5))
    processor = DataProcessor(make_tokenizer(task_words("chain")), DataConfig(train="chain"))
    data, [sample, *_] = TokenizedSamples(report, processor, "preferences"), report.problems
    scored = data.completions("1", sample)
    assert scored == data.completions("1", sample) != data.completions("2", sample)
    assert [score for _, score in scored] == [0.0, 0.0]
    with pytest.raises(DataError, match=r"'countdown'.*chain"):
        load_preferences(DataConfig(train="countdown", train_size=5))


def test_the_wrong_solution_takes_one_false_step():
    for seed in range(200):
        rng = random.Random(seed)
        row = make_chain(rng)
        right, wrong = (text.replace(",", "=") for text in chain_pair(rng, row))
        assert right.endswith(f"<answer>{row['ground_truth']}</answer>")
        assert not wrong.endswith(f"<answer>{row['ground_truth']}</answer>")
        thought = re.sub(r"=(\d)=\1", r"=\1", wrong.split("<think>")[1].split("</think>")[0])
        steps = re.findall(r"(?=(?:^|=)(\d)([-+*])(\d)=(\d))", thought)
        results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
        false = [s for s in steps if results[s[1]](int(s[0]), int(s[2])) % 10 != int(s[3])]
        assert len(steps) == row["operations"] and len(false) == 1


def test_real_pairs_load(shared_dir):
    path = shared_dir / "data" / "preferences" / "gsm8k_solutions.jsonl"
    report = load_preferences(DataConfig(train=str(path)))
    assert len(report.problems) == 502 and not report.errors
