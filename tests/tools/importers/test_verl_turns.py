"""verl's scripts with tools and interactions: what their keys become, and two steps of training."""

import json
import re
from pathlib import Path

import pytest
import yaml

from atomrl.cli.main import main
from atomrl.config import ConfigError
from atomrl.tracking.reading.lines import read_metrics
from tests.environments.verl_classes import CLASSES, tool
from tests.tiny import make_tiny_model
from tests.tools.importers.conftest import Read

R, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model.path=m"
TURNS, AGENT = f"{R}multi_turn.", f"{R}agent."
PPO = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {MODEL} {TURNS}enable=True"
CALL = '<tool_call>{"name": "check", "arguments": {"answer": "7"}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}{% for message in "
    "messages %}{{ ('<|assistant|>' if message.role == 'assistant' else '<|user|>') + message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments|tojson }}}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def files(tmp_path: Path) -> str:
    """The words of a script that name a file of tools and one of interactions."""
    quiz = {"class_name": f"{CLASSES}.Quiz", "config": {"no": "no"}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool(word="yes")]}))
    (tmp_path / "talk.yaml").write_text(yaml.safe_dump({"interaction": [quiz]}))
    return f"{TURNS}tool_config_path=$(pwd)/tools.yaml {TURNS}interaction_config_path=$(pwd)/talk.yaml"


def test_turns_are_the_environment_of_verls_classes(read: Read, files: str, tmp_path: Path) -> None:
    keys = f"{TURNS}max_assistant_turns=5 {TURNS}max_user_turns=3 {TURNS}format=hermes {AGENT}num_workers=3 "
    keys += f"{TURNS}max_tool_response_length=99 {TURNS}tool_response_truncate_side=left data.return_raw_chat=True "
    keys += f"{AGENT}default_agent_loop=tool_agent {TURNS}max_parallel_calls=2 data.max_response_length=700"
    text = f"{PPO} {files} {keys}"
    imported = read(text)
    environment = imported.config.environment
    assert environment is not None and environment.function == "verl" and imported.to_do == ()
    assert environment.args == {
        "tools": str(tmp_path / "tools.yaml"), "interactions": str(tmp_path / "talk.yaml"), "max_parallel_calls": 2,
        "max_tool_response_length": 99, "tool_response_truncate_side": "left", "timeout_s": 60.0,
    }  # fmt: skip
    assert (environment.max_turns, environment.max_reply_tokens, environment.workers) == (4, 700, 3)
    assert f"the run imports {CLASSES}.Check, {CLASSES}.Quiz" in imported.report()
    said = "\n".join([*imported.carried, *imported.without_counterpart])
    keys_of_turns = re.findall(rf"({R}(?:multi_turn|agent)\.\w+)=", text)
    assert len(keys_of_turns) == 11 and all(f"{key}=" in said for key in keys_of_turns)
    for of in ("text that a reward reads", "tool_response_truncate_side=left", "an interaction's last message"):
        assert any(of in line for line in imported.differences)
    assert not any("agent_name" in line for line in imported.differences)


def test_without_limits_on_turns_the_tokens_are_the_limit(read: Read, files: str) -> None:
    imported = read(f"{PPO} {files} data.max_response_length=300")
    assert imported.config.environment is not None and imported.config.environment.max_turns == 300
    assert any("rows without agent_name" in line for line in imported.differences)


def test_without_tools_a_completion_has_one_turn(read: Read) -> None:
    imported = read(f"{PPO} {TURNS}max_user_turns=2")
    assert imported.config.environment is None
    assert any("neither tools nor interactions" in line for line in imported.approximated)
    assert any("max_user_turns=2" in line for line in imported.without_counterpart)


def test_a_file_that_is_not_there_is_left_to_the_user(read: Read) -> None:
    imported = read(f"{PPO} {TURNS}tool_config_path=/nowhere/tools.yaml")
    assert "tool_config_path=/nowhere/tools.yaml is not there" in imported.to_do[0]
    assert imported.config.environment is not None


def test_search_tools_score_their_rows(read: Read, files: str) -> None:
    sources = read(f"{PPO} {files} data.train_files=x/searchR1_direct/train.parquet").tree["reward"]["by_data_source"]
    assert sources["searchR1_nq"] == "search_r1_em"


@pytest.mark.parametrize(("keys", "message"), [
    (f"{AGENT}agent_loop_config_path=agents.yaml", "agent_loop_config_path=agents.yaml .* an environment"),
    (f"{AGENT}default_agent_loop=my_agent", "default_agent_loop=my_agent .* single_turn_agent, tool_agent"),
    (f"{AGENT}default_agent_loop=single_turn_agent", "multi_turn.enable is on"),
    (f"{TURNS}completion_callback=my.Callback", "completion_callback"),
    (f"{TURNS}function_tool_path=f.py", "section tools"),
    (f"{TURNS}num_repeat_rollouts=3", "num_repeat_rollouts=3"),
    (f"{TURNS}tool_config_path=$(pwd)/mcp.yaml", "tool_config_path: my.Search: type 'mcp' is not supported"),
    (f"{TURNS}tool_config_path=$(pwd)/empty.yaml", "it has no list 'tools'"),
    (f"{TURNS}tool_config_path=$(pwd)/tools.yaml {TURNS}tool_response_truncate_side=up", "left, middle, right"),
    (f"{TURNS}enable=False data.tool_config_path=t.yaml", "multi_turn.enable is off"),
])  # fmt: skip
def test_what_has_no_counterpart_is_refused(keys: str, message: str, read: Read, files: str, tmp_path: Path) -> None:
    (tmp_path / "mcp.yaml").write_text("tools: [{class_name: my.Search, config: {type: mcp}}]")
    (tmp_path / "empty.yaml").write_text("interaction: []")
    with pytest.raises(ConfigError, match=message):
        read(f"{PPO} {keys}")


def test_an_imported_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="verl's rows are Parquet: needs pyarrow")
    import pyarrow
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", "qwen2", vocab_size=103)
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens([CALL])  # so that a model that writes at random calls the tool
    tokenizer.save_pretrained("model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "agent_name": "tool_agent",
            "extra_info": {
                "need_tools_kwargs": True,
                "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "7"}}},
                "interaction_kwargs": {"name": "quiz", "ground_truth": str(number + 1)},
            },
        }
        for number in range(4)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return extra_info['num_turns'] / 10 + len(solution_str) % 2\n"
    )
    (tmp_path / "conf").mkdir()
    base = {"model": {"custom_chat_template": TEMPLATE}, "rollout": {"multi_turn": {"enable": True}}}
    (tmp_path / "conf" / "turns.yaml").write_text(
        yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], "actor_rollout_ref": base})
    )
    (tmp_path / "run.sh").write_text(
        f"""D=$(pwd)
        python3 -m verl.trainer.main_ppo --config-path=$D/conf --config-name=turns algorithm.adv_estimator=grpo \
        data.train_files=$D/train.parquet data.train_batch_size=2 data.max_response_length=96 {R}n=2 {R}name=hf \
        actor_rollout_ref.model.path=$D/model actor_rollout_ref.actor.ppo_mini_batch_size=2 {TURNS}max_user_turns=3 \
        custom_reward_function.path=$D/reward.py trainer.total_training_steps=2 trainer.n_gpus_per_node=1 \
        trainer.logger=console trainer.experiment_name=turns trainer.test_freq=-1 {files}"""
    )
    assert main(["import", "run.sh", "--out", "ours.yaml"]) == 0
    assert Path("ours.jinja").read_text() == TEMPLATE
    sets = ["data.eval=null", "model.dtype=float32", "backend=null", "environment.workers=1"]
    assert main(["train", "ours.yaml", *sets]) == 0
    lines = read_metrics(tmp_path / "runs" / "turns" / "metrics.jsonl")
    assert len(lines) == 2 and all(line["actor/grad_norm"] > 0 for line in lines)
    episodes = [
        json.loads(line)["episode"]
        for path in (tmp_path / "runs" / "turns" / "rollouts").glob("*/train.jsonl")
        for line in path.read_text().splitlines()
    ]
    labels = {label for episode in episodes for turn in episode["turns"] for label in turn["labels"]}
    assert labels == {"check", "interaction"}
    assert not any(episode.get("failure") for episode in episodes)
    assert max(len(episode["turns"]) for episode in episodes) <= 4
