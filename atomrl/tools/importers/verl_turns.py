"""Translate verl's turns: `rollout.multi_turn`, `rollout.agent`, and the YAML files of tools and interactions."""

from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.environments.verl import FILES, items_of
from atomrl.tools.importers.sources import Settings
from atomrl.tools.importers.translation import Translation

R = "actor_rollout_ref.rollout."
M, AGENT = R + "multi_turn.", R + "agent."
LOOP, AGENTS = AGENT + "default_agent_loop", ("single_turn_agent", "tool_agent")
DEFAULTS: Settings = {
    M + "max_parallel_calls": 1,
    M + "max_tool_response_length": 256,
    M + "tool_response_truncate_side": "middle",
    LOOP: "single_turn_agent",
}
REFUSED = {
    M
    + "completion_callback": "turns are those of verl's tool_agent: write an environment (docs/guides/environments.md)",
    M + "num_repeat_rollouts": "each turn is sampled once",
    M + "function_tool_path": "name each function in the section tools, as ./FILE.py:FUNCTION "
    "(docs/guides/tool_calling.md)",
    AGENT + "agent_loop_config_path": "an agent of one's own is an environment (docs/guides/environments.md)",
    AGENT + "agent_loop_manager_class": "an agent of one's own is an environment (docs/guides/environments.md)",
}
"""Keys that affect training and have no counterpart, with the reason."""
REASONS = {
    M + "format": "the format of tool calls is read from the chat template",
    M + "use_inference_chat_template": "the tokens of a row are those that were sampled, and are never rendered again",
    M + "tokenization_sanity_check_mode": "the tokens of a row are those that were sampled, and are never rendered "
    "again",
    "data.tool_config_path": "the tools of multi_turn.tool_config_path are in the prompts",
    "data.need_tools_kwargs": "a row may have extra_info.tools_kwargs or not",
    AGENT + "num_workers": "environment.workers",
    AGENT + "custom_async_server.": "an option of verl's engine; section rollout sets where completions are sampled",
    R + "sglang_rollout_mode": "an option of verl's engine; section rollout sets where completions are sampled",
    R + "server.": "an option of verl's engine; section rollout sets where completions are sampled",
}
"""Key, or prefix of keys -> reason why it has no counterpart."""
SEARCH = tuple(
    f"searchR1_{name}" for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
)
"""Data sources of verl's preparation of Search-R1's rows."""
TIMEOUT_S = 120.0
"""`environment.timeout_s` of an imported config; a tool call may take half of it."""


def put_turns(t: Translation) -> None:
    """Translate the turns, if the file has any: the environment `verl`. Call it after the limits of tokens are set."""
    t.refuse_set(REFUSED)
    agent = t.choice(LOOP, t(LOOP), {name: name for name in AGENTS})
    on = t.flag(M + "enable")
    if on and agent == AGENTS[0] and t.is_set(LOOP):
        raise t.refuse(LOOP, agent, "multi_turn.enable is on: remove one of the two")
    if not on and agent == AGENTS[0]:
        if t("data.tool_config_path"):
            raise t.refuse("data.tool_config_path", t("data.tool_config_path"), "multi_turn.enable is off")
        for name in t.settings:
            if name.startswith(M):
                t.leave(name, "for multi_turn.enable, which is off")
        return
    files = {"tools": M + "tool_config_path", "interactions": M + "interaction_config_path"}
    paths = {argument: str(t(name)) for argument, name in files.items() if t(name) is not None}
    if not paths:
        names = [name for name in (M + "enable", LOOP) if t.is_set(name)]
        t.approximate(
            f"{', '.join(map(t.given, names))}: neither tools nor interactions are set, so a completion has one turn"
        )
        for name in t.settings:
            if name.startswith(M):
                t.leave(name, "without tools and interactions, a completion has one turn")
        return
    sides = {side: side for side in ("left", "middle", "right")}
    args: dict[str, Any] = {
        **paths,
        "max_parallel_calls": t.count(M + "max_parallel_calls"),
        "max_tool_response_length": t.count(M + "max_tool_response_length"),
        "tool_response_truncate_side": t.choice(
            M + "tool_response_truncate_side", t(M + "tool_response_truncate_side"), sides
        ),
        "timeout_s": TIMEOUT_S / 2,
    }
    classes = [name for argument, path in paths.items() for name in _classes(t, argument, path, files[argument])]
    t.put("environment.function", "verl", M + "enable", LOOP)
    for name, value in args.items():
        key = files.get(name, M + name)
        t.put(f"environment.args.{name}", value, *([key] if name != "timeout_s" else []))
    _limits(t)
    if classes:
        t.approximate(
            f"the run imports {', '.join(classes)}: those of verl's own need it (pip install verl, of the script's "
            "version, or start the run in its checkout)"
        )
    _differences(t, "interactions" in paths)


def _classes(t: Translation, argument: str, path: str, key: str) -> list[str]:
    """Return the classes that a YAML file names. A file that is not there is left to the user."""
    if not Path(path).expanduser().is_file():
        t.to_do.append(f"{t.given(key)} is not there: bring the file to that place; the run reads it")
        return []
    with reraise_as(ConfigError, t.named(key), ValueError):
        return [str(item["class_name"]) for item in items_of(path, FILES[argument])]


def _limits(t: Translation) -> None:
    """Translate the limits of an episode. verl's limit on the user's turns counts replies, of tools too."""
    limits = {M + "max_assistant_turns": 0, M + "max_user_turns": 1}
    given = {name: t.integer(name) + more for name, more in limits.items() if t(name)}
    tokens = int(t.tree["rollout"]["max_completion_tokens"])
    if given:
        t.put("environment.max_turns", min(given.values()), *given)
    else:
        t.put("environment.max_turns", tokens, because="verl has no limit but that of the tokens, and a turn has one")
    t.put("environment.max_reply_tokens", tokens, because="verl limits a reply by characters alone")
    if t.is_set(AGENT + "num_workers"):
        t.put("environment.workers", t.count(AGENT + "num_workers"), AGENT + "num_workers")
    t.put("environment.timeout_s", TIMEOUT_S)
    t.differ("time limit of a reply", "none", f"{TIMEOUT_S:g} s, of a tool call {TIMEOUT_S / 2:g} s")


def _differences(t: Translation, talks: bool) -> None:
    t.differ("text that a reward reads", "the whole row, with the replies", "what the model wrote")
    t.differ("added to extra_info of a reward function", "num_turns, tool_rewards, turn_scores", "num_turns alone")
    t.differ("tool calls", "also within thoughts, if they are closed", "outside of thoughts, the last may be open")
    t.differ(
        "a tool whose service is away",
        "an answer with the error's message",
        "the episode is repeated when it is back (environment.wait_s)",
    )
    if t(LOOP) == AGENTS[0]:
        t.differ(
            "rows without agent_name",
            "of 2026 one turn (rollout.agent.default_agent_loop=single_turn_agent)",
            "several, as multi_turn.enable says",
        )
    if t(M + "tool_response_truncate_side") in ("left", "right"):
        t.differ(
            f"{M}tool_response_truncate_side={t(M + 'tool_response_truncate_side')}",
            "before 2026-08 the other side",
            "characters of that side are left out",
        )
    if talks:
        t.differ("an interaction's last message", "in the row, not trained on", "left out")


def data_sources(t: Translation) -> dict[str, str]:
    """Return the rewards of data sources that a run with verl's search tool has."""
    return dict.fromkeys(SEARCH, "search_r1_em") if "searchr1" in str(t("data.train_files")).lower() else {}
