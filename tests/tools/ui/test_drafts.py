"""A config that is written in a form and as text at once: changes leave the rest as it was, whatever its form."""

from itertools import product
from pathlib import Path

import pytest
import yaml

from atomrl.config.overrides import scalar
from atomrl.config.trees import merge_trees, nest
from atomrl.tools.ui.new_run import TEMPLATE, DraftError, edited, plan_problems, problems, read, started_from

SHIPPED = Path(__file__).parents[3] / "configs"
TEXT = """# A run.
run_name: x  # its name
model: {path: m}
train:
  # how long
  steps: 60

  learning_rate: 1.0e-3
algorithm:
  name: grpo
  clip: cispo
reward:
  functions:
    - strict_math
# the end
"""


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("train.steps", "7", "  steps: 7\n"),
        ("train.warmup_ratio", "0.1", "  learning_rate: 1.0e-3\n  warmup_ratio: 0.1\n"),
        ("run_name", "a: b: c", "run_name: 'a: b: c'  # its name\n"),
        ("run_name", "7", "run_name: 7  # its name\n"),
        ("model.lora.rank", "8", "model: {path: m, lora: {rank: 8}}\n"),
        ("algorithm.clip", "ppo", "  clip: ppo\n"),
        ("eval.every_steps", "5", "    - strict_math\neval:\n  every_steps: 5\n# the end\n"),
        ("train.adam_eps", "1e-6", "  adam_eps: 1.0e-06\n"),
    ],
)
def test_a_change_leaves_the_rest_of_the_text_as_it_is(key, value, line):
    text = edited(TEXT, key, value)
    assert line in text and "# how long" in text and "# the end" in text
    assert yaml.safe_load(text) == merge_trees(yaml.safe_load(TEXT), nest(key, scalar(value)))


def test_a_field_of_an_axis_that_is_given_by_its_name_alone():
    text = edited(TEXT, "algorithm.clip.high", "3")
    assert yaml.safe_load(text)["algorithm"]["clip"] == {"type": "cispo", "high": 3}


def test_removing_the_last_key_removes_its_section():
    text = edited(edited(TEXT, "train.steps", None), "train.learning_rate", None)
    assert "train" not in yaml.safe_load(text) and "# its name" in text
    assert edited(TEXT, "train.nothing", None) == TEXT


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_changed_as_a_command_line_changes_it(path):
    text = path.read_text()
    given = read(text)["given"]
    keys = [*list(given)[:: max(1, len(given) // 6)], "train.steps", "model.lora.rank", "seed"]
    for key, value in product(keys, ("3", "[a, b]", "some text")):
        assert yaml.safe_load(edited(text, key, value)) == merge_trees(yaml.safe_load(text), nest(key, scalar(value)))
    for key in given:
        assert key not in read(edited(text, key, None))["given"]


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1", 1), ("a: 1\nb: }\n", 1), ("- 1", None), ("a: &a [*a]", None), ("7: 1", None)]
)
def test_invalid_yaml_is_refused_with_its_line(text, line):
    with pytest.raises(DraftError) as caught:
        read(text)
    assert caught.value.line == line or line is None


def test_a_new_run_has_a_name_that_is_free_and_is_in_the_folder_that_is_shown(tmp_path):
    (tmp_path / "my-run").mkdir()
    draft = started_from(TEMPLATE, tmp_path)
    assert draft["given"]["run_name"] == "my-run-2" and draft["given"]["output_dir"] == str(tmp_path)
    assert draft["yaml"].startswith("# GRPO")
    assert started_from("- 1", tmp_path)["errors"]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("  rollout.temperature: Input should be greater than or equal to 0 (got -1)", "rollout.temperature"),
        ("unknown key 'trainer'; verl's section: its parts are train, eval here", "trainer"),
        ("reward.functions.0.weight: Input should be a valid number", "reward.functions"),
        ("train.rows_per_update=5 does not divide the 512 rows of a step", "train.rows_per_update"),
        ("algorithm: unknown name 'kl'; valid are score, loss", "algorithm"),
        ("model.path: is required (a folder or a hub name)", "model.path"),
        ("it is odd", None),
    ],
)
def test_a_problem_is_shown_beside_its_key(line, key):
    assert problems([line])[0]["key"] == key


def test_a_plan_that_does_not_fit_names_the_settings_that_take_less():
    said = """   1287.87 GiB of    19.08 GiB (this machine): does not fit
each of these reduces memory:
  train.tokens_per_micro_batch=912                  50.21 GiB, not enough alone: smaller micro-batches
  model.gradient_checkpointing=true   858.72 GiB, not enough alone: recomputes layers: updates a third slower
"""
    keys = [one["key"] for one in plan_problems(said)]
    assert keys == ["train.tokens_per_micro_batch", "model.gradient_checkpointing"]
    assert [one["key"] for one in plan_problems("no single setting reduces memory")] == ["model.path"]
