"""Rows and rewards of a TRL script, as sections of a config."""

import json
import os
from pathlib import Path
from typing import Any

from atomrl.importers.script_rows import Rows
from atomrl.importers.translation import Translation
from atomrl.importers.trl_script import ScriptArguments

FIELDS = {
    "sft": {"prompt": "data.prompt_field", "completion": "sft.completion_field"},
    "dpo": {"prompt": "data.prompt_field", "chosen": "preference.chosen_field",
            "rejected": "preference.rejected_field"},
    "reward": {"prompt": "data.prompt_field", "chosen": "preference.chosen_field",
               "rejected": "preference.rejected_field"},
    "grpo": {"prompt": "data.prompt_field"},
}  # fmt: skip
"""Kind of trainer -> its columns -> the key that names them."""
THINK_FORMAT = '''
def think_format_reward(prompts, completions, **columns):
    """1 for a text that begins with <think>, opens it once, and closes it."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]
'''


def put_rows(t: Translation, script: ScriptArguments, kind: str, out: Path) -> None:
    """`data`, of what a script loads and does to its rows."""
    kind = "grpo" if kind == "rloo" else kind
    for split, rows, argument in (("train", script.train, "train_dataset"), ("eval", script.held_out, "eval_dataset")):
        if rows is None:
            continue
        if split == "eval" and t("eval_strategy") in ("no", None):
            t.nearly("eval_dataset is not used: eval_strategy is no")
            continue
        t.to_do += [line for line in rows.to_do if line not in t.to_do]
        t.nearly_all(line for line in rows.ignored)
        if rows.literal is not None:
            name = f"{out.stem}_{split}.jsonl"
            t.files[name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.literal)
            t.put(f"data.{split}", os.path.join(str(out.parent), name), because="the rows that the script writes out")
        elif rows.sources:
            where = rows.sources[0] if len(rows.sources) == 1 else rows.sources
            why = (
                "" if all(map(_is_named, rows.sources)) else "a data set of the hub is named with its owner: OWNER/NAME"
            )
            t.given[argument] = " + ".join(rows.sources)
            t.put(f"data.{split}", where, argument, because=why)
        else:
            continue
        if rows.size is not None:
            t.put(f"data.{split}_size", rows.size, argument)
        if split == "train":
            t.rows_are_put = True
            _put_fields(t, rows, kind, argument)
    if script.train is not None and not t.rows_are_put:
        t.put("data.train", "train.jsonl", because="the rows are made when the script runs")
        t.rows_are_put = True


def _is_named(source: str) -> bool:
    return source.startswith((".", "/", "~")) or "/" in source or Path(source).suffix != ""


def _put_fields(t: Translation, rows: Rows, kind: str, argument: str) -> None:
    for column, source in rows.fields.items():
        key = FIELDS[kind].get(column)
        if key is not None:
            t.put(key, source, argument)
        elif kind != "grpo":
            t.to_do.append(
                f"the column {column} is {source} in the data, and no key names it: write the rows to a file "
                "with that name"
            )
    if rows.system:
        t.put("data.system_prompt", rows.system, argument)


def put_rewards(t: Translation, script: ScriptArguments, out: Path) -> None:
    """`reward.functions`: of functions that are copied, of TRL's own, and of reward models."""
    weights = t("reward_weights")
    weights = [1.0] * len(script.rewards) if weights is None else weights
    weights = list(weights) if isinstance(weights, list | tuple) else [weights]
    if len(weights) != len(script.rewards):
        t.nearly(
            f"reward_weights={weights} are not as many as the rewards that the script names: each has the weight 1"
        )
        weights = [1.0] * len(script.rewards)
    rows = script.train or Rows()
    functions, own = [], f"./{out.stem}_rewards.py"
    needs: list[str] = []
    for reward, weight in zip(script.rewards, weights, strict=True):
        if "copied" in reward:
            item: dict[str, Any] = {"function": f"{own}:{reward['copied']}", "completions": "messages"}
        elif "model" in reward:
            item = {"function": "reward_model", "args": {"path": reward["model"]}}
        elif "path" in reward:
            item = {"function": _relative(reward["path"], out), "completions": "messages"}
            if rows.conversational or _renamed(rows):
                t.to_do.append(
                    f"{reward['path']}: the script makes messages of its rows, or names columns anew, which "
                    "are text and "
                    "have their own names in the data: the reward has to read them so"
                )
        else:
            item = trl_reward(t, reward["trl"], reward["args"], own, needs)
        functions.append(item | ({"weight": float(weight)} if float(weight) != 1.0 else {}))
    if not functions:
        t.nearly("the script names no reward function; reward.functions is strict_math")
        return
    text = ""
    if script.copies is not None:
        text = script.copies.text(rows.system or "" if rows.conversational else None, _renamed(rows))
    if needs:
        text = (text or '"""Rewards that atomrl import wrote."""\n') + "\n" + "\n".join(needs)
    if text:
        t.files[f"{out.stem}_rewards.py"] = text
    if "reward_funcs" not in t.given:
        t.given["reward_funcs"] = ", ".join(str(next(iter(reward.values()))) for reward in script.rewards)
    t.put("reward.functions", functions, "reward_funcs", "reward_weights")


def _renamed(rows: Rows) -> dict[str, str]:
    """Columns that rewards read by the script's names -> the name that they have in the data."""
    return {new: old for new, old in rows.fields.items() if new != old and new != "prompt"}


def trl_reward(t: Translation, name: str, args: dict[str, Any], own: str, needs: list[str]) -> dict[str, Any]:
    """A reward of TRL's own as one of ours.

    Args:
        own: the file beside the config.
        needs: gets the source of what goes to that file.
    """
    if name in ("accuracy_reward", "reasoning_accuracy_reward"):
        t.put("data.answer_field", "solution", because=f"the column that {name} reads")
        theirs = "the first match of math-verify, and no value where the solution cannot be read"
        t.differ(f"reward {name}", theirs, "boxed: the last box; a solution that cannot be read is an error")
        if name == "reasoning_accuracy_reward":
            t.differ(f"reward {name}", "0 without </think>", "boxed reads the box wherever it is")
        return {"function": "boxed"}
    if name == "think_format_reward":
        if THINK_FORMAT not in needs:
            needs.append(THINK_FORMAT)
        return {"function": f"{own}:think_format_reward"}
    if name == "get_soft_overlong_punishment":
        most = int(args.get("max_completion_len", 1280))
        free = most - int(args.get("soft_punish_cache", 256))
        return {"function": "length_penalty", "args": {"free_tokens": free, "max_tokens": most}}
    if name == "get_repetition_penalty_reward":
        t.differ("reward repetition_penalty", "n-grams of tokens", "n-grams of words")
        return {"function": "repetition_penalty", "args": args} if args else {"function": "repetition_penalty"}
    raise t.refuse(
        "reward_funcs", name, "of TRL's rewards there are accuracy_reward, reasoning_accuracy_reward, "
        "think_format_reward, "
        "get_soft_overlong_punishment and get_repetition_penalty_reward; write this one as a function "
        "(docs/guides/rewards.md)"
    )  # fmt: skip


def _relative(path: str, out: Path) -> str:
    """A file by its way from the config's folder, where it lies below it; a module as it is."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return path
    found, folder = Path(file).resolve(), out.parent.resolve()
    return f"./{found.relative_to(folder)}:{name}" if found.is_relative_to(folder) else f"{found}:{name}"
