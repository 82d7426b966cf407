"""The config: files, overrides, and errors that name the key."""

import re
import sys
from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
import yaml
from pydantic import BaseModel

from atomrl.cli.arguments import join_overrides
from atomrl.common.functions import find_function
from atomrl.config import (
    ConfigError,
    RunConfig,
    dump_config,
    known_keys,
    load_config,
    merge_trees,
    nest,
    parse_overrides,
    read_yaml,
)
from atomrl.config.keys import foreign_names
from atomrl.objectives import PolicyObjective
from atomrl.objectives.policy_loss import CISPOClip
from tools import config_keys

MINIMAL = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def build(**changes):
    return load_config(merge_trees(MINIMAL, changes), name="c.yaml")


def test_dump_and_load_give_the_same_config():
    config = build(train={"learning_rate": 1e-6}, model={"lora": {"rank": 4}}, algorithm={"clip": {"high": 0.28}})
    assert load_config(yaml.safe_load(dump_config(config))) == config


def test_a_config_cannot_be_written():
    with pytest.raises(ValueError, match="frozen"):
        build().train.steps = 3


def sections(model=RunConfig):
    yield model
    for info in model.model_fields.values():
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind)


def test_every_section_refuses_unknown_keys():
    all_sections = list(sections())
    assert RunConfig in all_sections and PolicyObjective in all_sections and len(all_sections) > 20
    assert not [section.__name__ for section in all_sections if section.model_config["extra"] != "forbid"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train": {"learning_rte": 1e-6}}, r"unknown key 'train.learning_rte'; did you mean 'train.learning_rate'\?"),
        (
            {"train": {"temperature": 1}},
            r"unknown key 'train.temperature'; did you mean '(rollout|eval).temperature'\?",
        ),
        (
            {"reward": {"functions": [{"function": "m.f", "max_words": 3}]}},
            r"unknown key 'reward.functions.0.max_words'; did you mean 'reward.functions.0.args.max_words'\?",
        ),
        (
            {"reward": {"functions": [{"function": "m.f", "wieght": 3}]}},
            r"'reward.functions.0.wieght'; did you mean 'reward.functions.0.weight'\?",
        ),
        ({"cluster": {"resources": {"rollout": {"gpus": 1}}}}, r"did you mean 'cluster.resources.rollout.num_gpus'\?"),
        ({"cluster": {"resources": {"rolout": {}}}}, r"cluster.resources.rolout: Input should be 'rollout', 'trainer'"),
        ({"trian": {}}, r"unknown key 'trian'; did you mean 'train'\?"),
        ({"learning_rate": 1}, r"unknown key 'learning_rate'; did you mean 'train.learning_rate'\?"),
        ({"zzzqqq": 1}, r"unknown key 'zzzqqq'$"),
        ({"train": {"steps": "many"}}, r"train.steps: .*integer.*\(got 'many'\)"),
        ({"train": {"steps": 0}}, r"train.steps: .*\(got 0\)"),
        ({"seed": 2**63}, r"seed: Input should be less than 9223372036854775808 "),
        ({"seed": -1}, r"seed: .*\(got -1\)"),
        ({"train": 3}, r"train: must be a mapping of keys \(got 3\)"),
        ({"train": {"learning_rate": float("inf")}}, r"train.learning_rate: .*finite"),
        ({"algorithm": 7}, r"c.yaml:\n  algorithm must be a mapping with a name, as in {name: dapo}, got 7$"),
        (
            {"algorithm": {"aggregate": "token_mean"}},
            r"'algorithm.aggregate'; did you mean 'algorithm.loss_agg.type'\?",
        ),
        (
            {"algorithm": {"token_filter": {"type": "all", "fraction": 0.2}}},
            r"token_filter of type all has no parameters, got .*give algorithm.token_filter=all",
        ),
        ({"model": {"path": None}, "sft": {"gpt": {"hidden": 64, "heads": 3}}}, r"heads=3 must divide hidden=64"),
        ({"model": {"dtype": "float8"}}, r"model.dtype: .*'float8'"),
        ({"rollout": {"top_p": 0}}, r"rollout.top_p: "),
        ({"train": {"rows_per_update": 48}}, r"rows_per_update=48 does not divide the 128 rows of a step"),
        ({"data": {"system_prompt": "a", "system_prompt_file": "b"}}, r"system_prompt or system_prompt_file, not both"),
        ({"rollout": {"min_completion_tokens": 300}}, r"rollout.min_completion_tokens must be between"),
        (
            {"rollout": {"min_completion_tokens": 9}, "eval": {"max_completion_tokens": 8}},
            r"min_completion_tokens=9 applies to evaluation too",
        ),
        ({"rollout": {"server": ["http://a:1", "http://a:1"]}}, r"rollout.server has a duplicate: http://a:1"),
        ({"rollout": {"server": "a:1"}}, r"rollout.server.0: .*\(got 'a:1'\)"),
        (
            {"rollout": {"server": "http://a:1"}, "cluster": {"replicas": 2}},
            r"rollout.server: one engine distributes .* use cluster.replicas=1",
        ),
        ({"model": {"path": None}}, r"model.path: is required"),
        ({"reward": {"functions": []}}, r"reward.functions is empty"),
        (
            {"reward": {"functions": [{"function": "strict_math", "weight": float("nan")}]}},
            r"reward.functions.0.weight: .*finite number",
        ),
        ({"reward": {"functions": [3]}}, r"reward.functions.0: must be a mapping of keys \(got 3\)"),
        ({"run_name": "../r"}, r"run_name: must be a name without slashes.* \(got '../r'\)"),
        ({"model": {"device": "gpu"}}, r"model.device: must be auto, cpu, cuda or cuda:N \(got 'gpu'\)"),
        ({"run_name": ""}, r"run_name: "),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(**changes)
    assert str(caught.value).startswith("c.yaml:\n")


@pytest.mark.parametrize("given", [{"algorithm": {"name": "dpo"}}, {"sft": {}}])
def test_rows_that_are_given_need_not_divide_rollouts(given):
    assert build(**given, train={"rows_per_update": 24}).items_per_step == 24


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config({"run_name": "r", "train": {"steps": 0, "stepz": 1}})
    text = str(caught.value)
    assert "data: is required" in text and "train.steps: " in text and "'train.stepz'" in text


def test_a_runs_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.yaml").write_text("run_name: mine\nmodel: {path: m}\ndata: {train: chain}\n")
    config = load_config(tmp_path, ["seed=3"])
    assert (config.run_name, config.seed) == ("mine", 3)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.yaml"))):
        load_config(tmp_path, ["sead=3"])


def test_overrides_in_all_forms():
    given = ["train.steps=3", "--rollout.temperature=0.5", "--model.path", "x", "train.learning_rate=1e-6"]
    assert parse_overrides(join_overrides(ArgumentParser(), given)) == {
        "train": {"steps": 3, "learning_rate": 1e-6},
        "rollout": {"temperature": 0.5},
        "model": {"path": "x"},
    }


@pytest.mark.parametrize(
    "text, value",
    [
        ("a=", None), ("a=null", None), ("a=true", True), ("a=[1, x]", [1, "x"]), ("a={b: 1}", {"b": 1}),
        ("a=b=c", "b=c"), ("a='3'", "3"), ("a=a: b: c", "a: b: c"), ("a=1e-6", 1e-6),
    ],
)  # fmt: skip
def test_values_of_overrides_are_yaml(text, value):
    assert parse_overrides([text]) == {"a": value}


@pytest.mark.parametrize("given, steps, epochs", [
    (["train.steps=3"], 3, None), (["train.total_epochs=2"], 7, 2.0),
    (["train.steps=3", "train.total_epochs=null"], 3, None),
    (["train.learning_rate=1"], 7, 5.0),
])  # fmt: skip
def test_steps_of_the_command_line_replace_passes_over_the_data_of_the_file(given, steps, epochs):
    """Public scripts count epochs; somebody who tries two steps of one gets two."""
    train = load_config(merge_trees(MINIMAL, {"train": {"steps": 7, "total_epochs": 5}}), given).train
    assert (train.steps, train.total_epochs) == (steps, epochs)


def test_steps_and_passes_over_the_data_of_the_command_line_are_one_error():
    with pytest.raises(ConfigError, match=r"train\.steps=3 and train\.total_epochs=2 both set the length"):
        load_config(MINIMAL, ["train.steps=3", "train.total_epochs=2"])


@pytest.mark.parametrize("given", [["train"], ["--train.steps"], ["a=1", "a.b=2"]])
def test_malformed_overrides_are_refused(given):
    with pytest.raises(ValueError, match="override"):
        parse_overrides(join_overrides(ArgumentParser(), given))


def test_merging_goes_key_by_key_and_replaces_lists():
    assert merge_trees({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}}


def test_a_field_of_an_axis_that_is_given_by_name_keeps_the_name():
    tree = merge_trees({**MINIMAL, "algorithm": {"clip": "cispo"}}, parse_overrides(["algorithm.clip.high=4.0"]))
    assert load_config(tree).algorithm.clip == CISPOClip(high=4.0)


@pytest.mark.parametrize(
    "content, message", [("a: [1", "not valid YAML"), ("- 1", "mapping"), ("", "is empty"), ("\xff", "YAML")]
)
def test_files_that_are_no_config(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "content, key, lines",
    [
        ("run_name: a\nseed: 1\nrun_name: b\n", "run_name", (1, 3)),
        ("train:\n  steps: 1\n  learning_rate: 1\n  steps: 2\n", "steps", (2, 4)),
        ("a: 1\nmodel: {path: x}\n\nmodel: {dtype: auto}\n", "model", (2, 4)),
    ],
)
def test_a_key_that_is_given_twice_is_an_error_with_both_lines(tmp_path, content, key, lines):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"'{key}'.*lines {lines[0]} and {lines[1]}"):
        read_yaml(path)


def test_a_key_that_is_merged_from_an_anchor_may_be_given_again(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {z: 3}\nc:\n  <<: *a\n  x: 5\n")
    assert read_yaml(path)["c"] == {"x": 5, "y": 2}


@pytest.mark.parametrize(
    "given, answer",
    [  # verl
        ("data.train_batch_size", "'rollout.prompts_per_step' (prompts in a step, as in verl;"),
        ("data.max_response_length", "'rollout.max_completion_tokens'"),
        ("data.train_files", "'data.train'"),
        ("actor_rollout_ref", "verl's section: its parts are model, rollout and train here"),
        ("trainer", "verl's section"),
        ("train.ppo_mini_batch_size", "'train.rows_per_update' (completions in an optimizer step; verl"),
        ("algorithm.adv_estimator", "'algorithm.name'"),
        ("algorithm.kl_coef", "'algorithm.kl.coefficient'"),
        ("train.total_epochs_", "'train.total_epochs'"),
        ("rollout.n", "'rollout.completions_per_prompt'"),
        # TRL
        ("rollout.num_generations", "'rollout.completions_per_prompt'"),
        ("train.max_steps", "'train.steps'"),
        ("train.per_device_train_batch_size", "'train.rows_per_micro_batch' (completions in a forward pass)"),
        ("train.gradient_accumulation_steps", "'train.rows_per_update' (completions in an optimizer step)"),
        ("train.num_iterations", "'train.epochs_per_step' (passes over a step)"),
        ("train.num_train_epochs", "'train.total_epochs' (passes over the data)"),
        ("warmup_ratio", "'train.warmup_ratio'"),
        ("beta", "'algorithm.kl.coefficient' (in DPO and its family algorithm.loss.beta)"),
        ("algorithm.beta", "'algorithm.kl.coefficient' (in DPO and its family"),
        ("algorithm.epsilon_high", "'algorithm.clip.high'"),
        ("checkpoint.save_steps", "'checkpoint.every_steps'"),
        ("train.max_length", "'train.max_row_tokens' (prompt and completion together; longer rows are cut)"),
        ("train.warmup_steps", "'train.warmup_ratio' (a share of all updates)"),
        ("model.use_peft", "'model.lora.rank'"),
        ("critic.lr", "'critic.learning_rate'"),
        # OpenRLHF
        ("rollout.n_samples_per_prompt", "'rollout.completions_per_prompt'"),
        ("rollout_batch_size", "'rollout.prompts_per_step' (prompts in a step; OpenRLHF counts prompts as well)"),
        ("train.micro_train_batch_size", "'train.rows_per_micro_batch' (completions in a forward pass)"),
        ("model.lora_rank", "'model.lora.rank'"),
        ("algorithm.eps_clip", "'algorithm.clip.low' (and algorithm.clip.high)"),
        ("actor_learning_rate", "'train.learning_rate'"),
        # neither
        ("rollout.group_size", "'rollout.completions_per_prompt'"),
        ("lr", "'train.learning_rate'"),
        ("train.lr", "'train.learning_rate'"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_answered_with_the_key_here(given, answer):
    with pytest.raises(ConfigError) as caught:
        load_config(merge_trees(MINIMAL, nest(given, 1)))
    assert given in str(caught.value) and answer in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "fdsp"}, "backend.type: 'fdsp' is not one of 'fsdp', 'megatron'"),
        ({"ranks": 2}, "backend.type: is required"),
        ({"type": "fsdp", "sequenc": 2}, "unknown key 'backend.sequenc'; did you mean 'backend.sequence'"),
        ({"type": "megatron", "tensor": 0}, "backend.tensor: Input should be greater than or equal to 1"),
        (
            {"type": "fsdp", "pipeline": 2},
            "unknown key 'backend.pipeline' for this backend.type; it is an option of megatron",
        ),
        ({"type": "megatron", "ranks": 3, "tensor": 2}, "backend.tensor=2 x pipeline=1 does not divide ranks=3"),
    ],
    ids=str,
)
def test_a_backend_that_is_none_is_refused_by_its_key(given, message):
    with pytest.raises(ConfigError) as caught:
        build(backend=given)
    assert message in str(caught.value)


def test_every_answer_to_a_foreign_name_is_a_key():
    assert {key for key, _ in foreign_names().values()} <= set(known_keys())


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (
            "data.train_batch_size",
            "'rollout.prompts_per_step' (prompts in a step, as in verl; OpenRLHF's is train.rows",
        ),
        ("gen_batch_size", "'rollout.prompts_per_step' (prompts in a step)?"),
        ("rollout.group_size", "'rollout.completions_per_prompt'?"),
        ("rollout.num_generations", "'rollout.completions_per_prompt'?"),
        ("lr", "'train.learning_rate'?"),
        ("critic.optim.lr", "'critic.learning_rate'?"),
        ("actor_rollout_ref.actor.optim.lr", "'train.learning_rate'?"),
        ("actor_rollout_ref.rollout.n", "'rollout.completions_per_prompt'?"),
        ("trainer.total_epochs", "'train.total_epochs' (passes over the data)?"),
        ("per_device_train_batch_size", "'train.rows_per_micro_batch' (completions in a forward pass)?"),
        ("generation_batch_size", "'rollout.prompts_per_step' (prompts in a step; TRL counts completions)?"),
        ("prompt_data", "'data.train'?"),
        ("val_files", "'data.eval'?"),
        ("reward_weights", "'reward.functions.weight' (of each function)?"),
        ("scale_rewards", "'algorithm.advantage.type' (grpo_no_std does not divide by the deviation)?"),
        ("algorithm.kl_ctrl.kl_coef", "'algorithm.kl.coefficient'?"),
        ("algorithm.use_kl_in_reward", "'algorithm.kl.apply_to' (loss or reward)?"),
        ("algorithm.lam", "'algorithm.advantage.lam'?"),
    ],
)
def test_names_of_other_libraries_are_answered(given, answer):
    with pytest.raises(ConfigError) as caught:
        build(**nest(given, 1))
    message = str(caught.value)
    assert answer in message and f"unknown key '{given}'" in message.replace(".kl_ctrl'", ".kl_ctrl.kl_coef'")
    assert message.count("did you mean") == 1


def test_a_section_is_no_answer_to_a_key_of_another():
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.mode'$"):
        build(rollout={"mode": "async"})


def test_known_keys_reach_all_depths():
    assert {"train", "train.steps", "model.lora.rank", "sft.gpt.layers", "run_name"} <= set(known_keys())


def test_every_key_is_described_below_its_field():
    without = [
        item["key"] for item in config_keys.all_keys() if not item["about"] and not item["key"].startswith("algorithm.")
    ]
    assert not without, f"add a docstring below the field in atomrl/config/schema.py, then `make keys`: {without}"


def test_the_generated_descriptions_of_keys_are_those_of_the_schema():
    stale = [
        str(path.relative_to(config_keys.ROOT))
        for path, text in ((config_keys.FILE, config_keys.json_text()), (config_keys.PAGE, config_keys.page()))
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"run `make keys`: it writes {', '.join(stale)}"
    _, gone = config_keys.untranslated()
    assert not gone, f"run `make keys`: it removes the texts of {gone}"


def test_the_short_forms_that_the_page_shows_are_valid(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    config = load_config(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert (
        config.backend.tensor == 2 and config.algorithm.clip == CISPOClip() and config.asynchronous.max_staleness == 1
    )


def dotted(tree, prefix=""):
    for key, value in tree.items():
        yield prefix + key
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from dotted(item, f"{prefix}{key}.")


def test_functions_beside_the_config_are_found_from_python_too(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text("def mine(inputs):\n    return inputs.rewards\n")
    (tmp_path / "run.yaml").write_text(
        "run_name: r\nmodel: {path: m}\ndata: {train: chain, train_size: 8}\n"
        "algorithm: {name: grpo, advantage: {type: custom, function: './beside_me.py:mine'}}\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "run.yaml").algorithm.advantage.function == "./beside_me.py:mine"


def test_each_of_two_configs_finds_the_functions_beside_it(tmp_path, monkeypatch):
    """Files of one name in one process: the second config must not train with the functions of the first."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir("/")
    for name, factor in (("first", 2), ("second", 3), ("first", 2)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "mine.py").write_text(f"def scaled(inputs):\n    return {factor} * inputs.rewards\n")
        tree = TREE + "run_name: r\nalgorithm: {name: grpo, advantage: {type: custom, function: './mine.py:scaled'}}\n"
        (tmp_path / name / "run.yaml").write_text(tree)
        function = find_function(load_config(tmp_path / name / "run.yaml").algorithm.advantage.function)
        assert function(SimpleNamespace(rewards=1)) == factor


TREE = "model: {path: 1e5}\ndata: {train: chain, train_size: 10}\n"


@pytest.mark.parametrize(
    "text", ["2024", "007", "1e5", "1_000", "0x1f", "12:30:00", "2024-01-01", "true", "off", "1.50"]
)
def test_a_text_key_takes_what_looks_like_a_number(text, tmp_path):
    """In a file of either layout and on the command line, as it is written."""
    (tmp_path / "c.yaml").write_text(f"run_name: {text}\n{TREE}")
    config = load_config(tmp_path / "c.yaml", [f"output_dir={text}", f"rollout.stop=[{text}, a]", "seed=007"])
    assert (config.run_name, config.output_dir, config.rollout.stop) == (text, text, (text, "a"))
    assert config.model.path == "1e5" and config.seed == 7
    six = f"model_config: {{model_name_or_path: {text}}}\ntrain_config: {{train_dataset: {text}}}\n"
    (tmp_path / "six.yaml").write_text(f"{six}wandb_config: {{run_name: {text}}}\n")
    config = load_config(tmp_path / "six.yaml")
    assert (config.run_name, config.model.path, config.data.train) == (text, text, text)


def test_quoted_text_null_and_other_types_are_as_yaml_has_them(tmp_path):
    (tmp_path / "c.yaml").write_text(f'run_name: "7"\n{TREE}')
    config = load_config(tmp_path / "c.yaml", ["data.eval=null", "reward.functions=[{function: gsm8k, args: {x: 7}}]"])
    assert config.run_name == "7" and config.data.eval is None and config.reward.functions[0].args == {"x": 7}
    with pytest.raises(ConfigError, match="run_name"):
        load_config(tmp_path / "c.yaml", ["run_name=null"])


def test_an_algorithm_is_named_alone(tmp_path):
    (tmp_path / "c.yaml").write_text(f"run_name: r\nalgorithm: rloo\n{TREE}")
    assert load_config(tmp_path / "c.yaml").algorithm.name == "rloo"
    changed = load_config(tmp_path / "c.yaml", ["algorithm=grpo", "algorithm.kl.coefficient=0.25"]).algorithm
    assert changed.name == "grpo" and changed.kl.coefficient == 0.25
    kept = load_config(tmp_path / "c.yaml", ["algorithm.kl.coefficient=0.25"]).algorithm
    assert kept.name == "rloo" and kept.kl.coefficient == 0.25
    assert load_config(load_config(tmp_path / "c.yaml"), ["algorithm=dapo"]).algorithm.name == "dapo"


@pytest.mark.parametrize(("name", "section"), [("sft", "sft"), ("SFT", "sft"), ("pretrain", "pretrain")])
def test_a_kind_of_run_that_is_no_algorithm_names_its_section(name, section, tmp_path):
    (tmp_path / "c.yaml").write_text(f"run_name: r\nalgorithm: {name}\n{TREE}")
    with pytest.raises(ConfigError, match=f"a section `{section}` makes such a run"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("override", ["model=abc", "reward=gsm8k", "data=rows.jsonl", "rollout=vllm"])
def test_a_value_in_the_place_of_a_section_is_answered_with_a_key(override, tmp_path):
    (tmp_path / "c.yaml").write_text(f"run_name: r\n{TREE}")
    section = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{section}: must be a mapping of keys .*, such as {section}\."):
        load_config(tmp_path / "c.yaml", [override])
