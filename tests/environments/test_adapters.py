"""Other people's environments, played by a scripted player in this process; the packages are optional."""

import ast
import inspect
import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from atomrl.common.functions import find_function
from atomrl.config import ConfigError, load_config
from atomrl.data.tasks import generate
from atomrl.environments.adapters import shown
from atomrl.environments.worker import Cut, EpisodeError, as_replies, find_environment
from atomrl.environments.worker import play as play_environment
from atomrl.trainer.checks.environment import check_environment, check_outcome
from atomrl.types import Problem, Reply
from tests.environments.my_tools import wait_until
from tests.templates import make_tokenizer

ADAPTERS = Path(__file__).parents[2] / "atomrl" / "environments" / "adapters.py"


def played(name, args, player, prompt="Play.", truth=None, most=40, **columns):
    """Play an environment; return replies, rewards of turns, and the outcome. `player` is given the last reply."""
    said, rewards = [], []
    function = find_environment(name, args)

    def say(words):
        (reply,) = as_replies(words) or [None]
        if reply:
            said.append(reply.text)
            rewards.append(reply.reward)
        assert len(said) < most
        return player(said)

    problem = Problem(problem_id="a", prompt=prompt, ground_truth=truth, columns=columns)
    return said, rewards, play_environment(function, problem, args, 0, say)


NAMES = ("gymnasium", "openenv", "reasoning_gym_retries", "skyrl_gym", "textarena", "textworld")


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_short(name):
    """At most thirty lines of code: statements without docstrings and blank lines."""
    lines = ADAPTERS.read_text().splitlines()
    functions = [node for node in ast.parse(ADAPTERS.read_text()).body if isinstance(node, ast.FunctionDef)]
    (function,) = (node for node in functions if node.name == name)
    code = lines[function.body[0].end_lineno : function.end_lineno]
    assert 0 < len([line for line in code if line.strip()]) <= 30


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_says_as_whom_it_speaks(name):
    """By which a run finds out beforehand whether the chat template has a place for it."""
    function = find_function(f"atomrl.environments.adapters.{name}")
    assert inspect.signature(function).parameters["role"].default == "user"


LAKE = {"id": "FrozenLake-v1", "actions": ["left", "Down", "right", "up"], "args": {"is_slippery": False}}


@pytest.mark.parametrize("name, args, words", [
    ("python", {"timeout_s": 0}, "args: timeout_s is a number above 0, not 0"),
    ("python", {"timeout_s": -3.0}, "timeout_s is a number above 0"),
    ("python", {"memory_mb": "lots"}, "args.memory_mb: Input should be a valid integer, not 'lots'"),
    ("python", {"memory_mb": -1}, "memory_mb is a whole number above 0"),
    ("python", {"max_calls": "x"}, "args.max_calls: Input should be a valid integer"),
    ("search_r1", {"topk": 2.5}, "args.topk: Input should be a valid integer"),
    ("gymnasium", {**LAKE, "role": "assistant"}, "args.role: Input should be '', 'tool' or 'user', not 'assistant'"),
    ("gymnasium", {**LAKE, "id": "FrozenLke-v1"}, "args: id: .*FrozenLake"),
    ("gymnasium", {**LAKE, "actions": []}, "args: actions: name all of them"),
    ("gymnasium", {**LAKE, "actions": "left"}, "args.actions: "),
    ("gymnasium", {**LAKE, "args": {"is_slipery": False}}, "args: args: .*is_slipery"),
    ("gymnasium", {"id": "tests.environments.pixels:Pixels-v0", "actions": ["a", "b"]}, r"shape \(64, 64, 3\), .*1000"),
])  # fmt: skip
def test_args_that_are_wrong_are_refused_before_the_run(name, args, words):
    if name == "gymnasium":
        pytest.importorskip("gymnasium")
    with pytest.raises(EpisodeError, match=words):
        find_environment(name, args)


def config_with(**environment):
    tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "environment": environment}
    return load_config(tree)


def test_games_that_begin_need_the_prompt_open():
    pytest.importorskip("gymnasium")
    tokenizer = make_tokenizer("added", "qwen2.5")
    with pytest.raises(ConfigError, match=r"environment\.opening"):
        check_environment(config_with(function="gymnasium", args=LAKE), tokenizer)
    check_environment(config_with(function="gymnasium", args=LAKE, opening=True), tokenizer)
    check_environment(config_with(function="gymnasium", args={**LAKE, "role": ""}), tokenizer)


@pytest.mark.parametrize("name", ["search_r1", "python"])
def test_an_environment_without_an_outcome_needs_a_reward(name):
    config = config_with(function=name)
    with pytest.raises(ConfigError, match="set a reward"):
        check_outcome(config)


def test_gymnasium_is_played_by_names_of_actions():
    pytest.importorskip("gymnasium")
    way = iter(["I go DOWN.", "hm", "not right: down", "right", "right", "down", "right"])
    said, rewards, outcome = played("gymnasium", LAKE, lambda said: next(way))
    assert said[0] == "\n[S]FFF\nFHFH\nFFFH\nHFFG" and said[1].splitlines()[2] == "[F]HFH"
    assert said[2] == "Name an action: left, Down, right, up." and outcome == 1.0
    assert rewards == [None, 0.0, None, 0.0, 0.0, 0.0, 0.0]
    way = iter(["down", "right"])
    assert played("gymnasium", LAKE, lambda said: next(way))[2] == 0.0
    cards = {"id": "Blackjack-v1", "actions": ["stick", "hit"]}
    games = [played("gymnasium", cards, lambda said: "stick", seed=seed) for seed in (1, 1, 2, 3)]
    assert games[0] == games[1] and len({tuple(game[0]) for game in games}) > 1 and games[0][0][0].startswith("\n(")
    taxi = {"id": "Taxi-v4", "actions": ["south", "north", "east", "west", "pickup", "dropoff"]}
    said, rewards, _ = played("gymnasium", taxi, lambda said: "north", most=300, seed=3)
    assert "(R)" in said[0] and "<Y>" in said[0] and "[ ]" in said[0] and set(rewards[1:]) == {-1.0}


def test_textarena_shows_only_what_is_new():
    pytest.importorskip("textarena")

    def player(said):
        low, high = 1, 20
        for answer in said[1:]:  # bisects
            guess = (low + high) // 2
            low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
        return f"[{(low + high) // 2}]"

    said, _, outcome = played("textarena", {"id": "GuessTheNumber-v0"}, player, seed=5)
    assert outcome == 1.0 and "Guess The Number" in said[0] and len(said[1]) < 60, "only what is new"
    wrong = [played("textarena", {"id": "GuessTheNumber-v0"}, lambda said: "no", seed=5) for _ in range(2)]
    assert wrong[0] == wrong[1] and wrong[0][2] < 1 and "invalid move" in wrong[0][0][1]


def test_textworld_is_won_by_its_walkthrough(tmp_path):
    textworld = pytest.importorskip("textworld")
    options = textworld.GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = 2, 3, 2, 5
    options.path, options.force_recompile = str(tmp_path / "game.z8"), True
    file, game = textworld.make(options)
    commands = iter(["", *game.metadata["walkthrough"]])
    said, rewards, outcome = played("textworld", {}, lambda said: f"I think.\n{next(commands)}\n", game=file)
    assert outcome == 1.0 and sum(reward or 0 for reward in rewards) == 0 and "TextWorld" in said[0]


def test_skyrl_gym_scores_a_second_try():
    pytest.importorskip("skyrl_gym")
    answers = iter(["It is 4.\n#### 4", "#### 3"])
    said, rewards, outcome = played(
        "skyrl_gym", {"id": "gsm8k_multi_turn", "extras": {"max_turns": 3}}, lambda said: next(answers), truth="3"
    )
    assert outcome == 1.0 and rewards == [pytest.approx(0.2 / 3)] and "tentative numeric answer" in said[0]


def test_skyrl_gym_shows_the_pictures_of_its_observations():
    skyrl_gym = pytest.importorskip("skyrl_gym")
    skyrl_gym.register(id="screens", entry_point="tests.environments.screens:Screens")
    seen = []
    function = find_environment("skyrl_gym", {"id": "screens"})

    def say(words):
        seen.extend(as_replies(words))
        return "on"

    problem = Problem(problem_id="a", prompt="Play.", ground_truth=None)
    assert play_environment(function, problem, {"id": "screens"}, 0, say) == 1.0
    assert [reply.text for reply in seen] == ["It is <image> now\n<image>", "dark"]
    assert [[picture[:4] for picture in reply.images] for reply in seen] == [[b"\x89PNG", b"\x89PNG"], []]


@pytest.mark.parametrize("part, words", [
    ({"type": "video", "video": "a.mp4"}, "an observation: 'content' must be text, or parts of text; one is 'video'"),
    ({"type": "image"}, "a picture of a Reply: must be a path, bytes, base64 or an image of Pillow, not NoneType"),
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "is on the web"),
    (7, "one is 'int'"),
])  # fmt: skip
def test_an_observation_that_is_not_text_and_pictures_is_refused(part, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        text, images = shown("an observation", [{"role": "user", "content": [part]}])
        as_replies(Reply(text=text, role="user", images=images))


def test_reasoning_gym_gives_as_many_tries_as_set():
    pytest.importorskip("reasoning_gym")
    (row,) = generate("reasoning_gym:leg_counting", 1)
    given = {"prompt": row["prompt"], "truth": row["ground_truth"], "reasoning_gym": row["reasoning_gym"]}
    answers = iter(["<answer>0</answer>", f"<answer>{row['ground_truth']}</answer>"])
    said, _, outcome = played("reasoning_gym", {"tries": 3}, lambda said: next(answers), **given)
    assert outcome == 1.0 and len(said) == 1 and "not right" in said[0]
    said, _, outcome = played("reasoning_gym", {"tries": 3}, lambda said: "I do not know", **given)
    assert outcome == 0.0 and len(said) == 2


OPENENV_SERVER = """
import base64
import io
import sys
import uvicorn
from PIL import Image
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

content = io.BytesIO()
Image.new("RGB", (56, 56), (255, 0, 0)).save(content, "PNG")
URL = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()

class Guess(Action):
    message: str

class Hint(Observation):
    hint: str | list

class Game(Environment):
    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.count = 7, 0
        return Hint(hint="Guess.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **more):
        self.count += 1
        right = int(action.message) == self.number
        seen = [{"type": "text", "text": "larger"}, {"type": "image_url", "image_url": {"url": URL}}]
        return Hint(hint=seen if self.count > 1 else "larger", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self):
        return self._state

uvicorn.run(create_fastapi_app(Game, Guess, Hint), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def test_openenv_is_played_over_its_server(tmp_path):
    pytest.importorskip("openenv")
    pytest.importorskip("PIL")
    (tmp_path / "game.py").write_text(OPENENV_SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(tmp_path / "game.py"), str(port)])
    try:

        def there():
            with closing(socket.socket()) as one:
                return one.connect_ex(("127.0.0.1", port)) == 0

        wait_until(there, 90.0)
        guesses = iter(["3", "5", "7"])
        args = {"url": f"http://127.0.0.1:{port}", "action": "message", "observation": "hint"}
        said, rewards, outcome = played("openenv", args, lambda said: next(guesses))
        assert said == ["Guess.", "larger", "larger<image>"] and rewards == [None, -0.1, -0.1] and outcome == 1.0
    finally:
        server.kill()
        server.wait()
    with pytest.raises(ConnectionError):
        played("openenv", args, lambda said: "1")


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"] + OPENING}

    async def step(self, states, **kwargs):
        self.turns += 1
        right = states["action_text"] == states["label"]
        shown = f"</s>{states['observation_text']}|{states['action_text']}"
        states["sampling_params"].__dict__.update(CHANGED)
        return {"rewards": 0.5 + right, "environment_feedback": shown, "done": right,
                "sampling_params": states["sampling_params"]}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def agent(folder, name="agent", opening="''", changed="{}", text=AGENT):
    """Write an agent of OpenRLHF, and return the arguments that play it."""
    (folder / f"{name}.py").write_text(text.replace("OPENING", opening).replace("CHANGED", changed))
    return {"path": str(folder / f"{name}.py")}


def test_an_agent_of_openrlhf_sees_the_prompt_as_rendered_and_gives_the_sum_of_its_rewards(tmp_path):
    def episode(args, turns):
        said = []

        def say(reply):
            said.extend(as_replies(reply))
            if not turns:
                raise Cut
            return turns.pop(0)

        function = find_environment("openrlhf_agent", args)
        return play_environment(function, PROBLEM, args, 0, say, "<user>q"), said

    outcome, said = episode(agent(tmp_path), ["a", "7"])
    assert outcome == 2.0 and said == [Reply(text="</s><user>q|a", special_tokens=True)]
    outcome, said = episode(agent(tmp_path, "opens", "' Go:'"), ["a", "b"])
    assert outcome == 1.0, "what it had when there was no room for another turn"
    assert [reply.text for reply in said[:2]] == [" Go:", "</s><user>q Go:|a"]
    assert said[2].text == "</s><user>q Go:a</s><user>q Go:|a|b"
    with pytest.raises(ValueError, match="its step changes the sampling parameters"):
        episode(agent(tmp_path, "changes", changed="{'stop': ['x']}"), ["a"])
    other = agent(tmp_path, "other", text=AGENT.replace('states["observation"] + OPENING', "'my own'"))
    with pytest.raises(ValueError, match="its reset changes the prompt"):
        episode(other, ["a"])


PROBLEM = Problem(problem_id="a", prompt="q", ground_truth="7")


def test_an_agent_of_openrlhf_that_samples_by_itself_is_refused(tmp_path):
    own = AGENT.replace("        super()", "        pass\n\n    async def execute(self, **kwargs):\n        super()")
    with pytest.raises(EpisodeError, match=r"args: path: AgentExecutor of .*own\.py samples by itself"):
        find_environment("openrlhf_agent", agent(tmp_path, "own", text=own))
