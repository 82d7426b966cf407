"""TRL: a Python file that makes a trainer's config, the YAML of `trl dpo --config` and others, a script with flags."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atomrl.config import ConfigError
from atomrl.importers import trl_given, trl_grpo, trl_shared
from atomrl.importers.python_calls import Name, read_calls
from atomrl.importers.shell import read_script
from atomrl.importers.sources import Given, read_flags, text_of
from atomrl.importers.translation import Translation

PEFT_DEFAULTS: Given = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig` itself."""
MAY_BE_UNREAD = frozenset({
    "0", "output_dir", "run_name", "logging_dir", "report_to", "project", "hub_model_id", "hub_token", "push_to_hub",
})  # fmt: skip
"""Of a config: what says nothing of the training."""
DATASETS = ("train_dataset", "eval_dataset")
PEFT_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules"}


@dataclass(frozen=True)
class Trainer:
    """One of TRL's trainers."""

    called: str
    """The beginning of the names of its classes."""
    defaults: Given
    translate: Callable[[Translation, int], None]
    """What is its own, with the number of processes."""
    marks: frozenset[str]
    """Keys that it alone has."""


TRAINERS: Mapping[str, Trainer] = {
    "grpo": Trainer("GRPO", trl_grpo.DEFAULTS, trl_grpo.translate, frozenset({
        "num_generations", "reward_funcs", "max_completion_length", "num_iterations", "epsilon", "scale_rewards",
        "generation_batch_size", "steps_per_generation", "use_vllm",
    })),
    "sft": Trainer("SFT", trl_given.SFT_DEFAULTS, trl_given.translate_sft, frozenset({
        "packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss",
        "dataset_text_field",
    })),
    "dpo": Trainer("DPO", trl_given.DPO_DEFAULTS, trl_given.translate_dpo, frozenset({
        "loss_weights", "ld_alpha", "f_divergence_type", "precompute_ref_log_probs", "use_weighting", "discopop_tau",
        "label_smoothing",
    })),
    "reward": Trainer("Reward", trl_given.REWARD_DEFAULTS, trl_given.translate_reward, frozenset({
        "center_rewards_coefficient",
    })),
}  # fmt: skip


def translate(path: Path, processes: int | None, trainer: str | None = None) -> Translation:
    """TRL's file as a translation.

    Args:
        processes: where the file does not say how many there are.
        trainer: whose config it is, a key of `TRAINERS`, where the file does not say.
    """
    name, given, notes, found = _read(path, trainer)
    which = TRAINERS[name]
    t = Translation("TRL", given, {**trl_shared.DEFAULTS, **which.defaults})
    said = processes or found
    if said is None:
        t.nearly("how many processes there are is not in the file: 1 was taken; --processes N says otherwise")
    trl_shared.translate_shared(t, path)
    which.translate(t, said or 1)
    for note in notes:
        t.nearly(note)
    return t


def _read(path: Path, trainer: str | None) -> tuple[str, Given, list[str], int | None]:
    """Whose config it is, what it gives, what could not be read, and how many processes there are."""
    if path.suffix == ".py":
        return *_read_python(path, trainer), None
    flags, notes, launcher = read_flags(path, r"(^|/)trl$|\.py$|^trl\.")
    given = {key.replace("-", "_"): value for key, value in flags.items()}
    for name in [name for name, value in given.items() if name.startswith("no_") and value is True]:
        given[name.removeprefix("no_")] = not given.pop(name)  # as argparse has it for what is on by default
    if "config" in given:
        notes = [*notes, f"--config {given.pop('config')} was not read; import it by itself"]
    found = _processes({key.replace("-", "_"): v for key, v in launcher.items()} | given, given)
    named = set() if path.suffix in (".yaml", ".yml") else _trainers_of(path)
    named = named or {name for name, one in TRAINERS.items() if one.marks & given.keys()}
    return _only(path, named, trainer), given, notes, found


def _read_python(path: Path, trainer: str | None) -> tuple[str, Given, list[str]]:
    names = [f"{one.called}{kind}" for one in TRAINERS.values() for kind in ("Config", "Trainer")]
    configs = [*(called for called in names if called.endswith("Config")), "LoraConfig"]
    calls, notes = read_calls(path, [*names, "LoraConfig", "load_dataset"], configs, MAY_BE_UNREAD)
    there = {name for name, one in TRAINERS.items() if f"{one.called}Config" in calls}
    if not there:
        known = ", ".join(f"{one.called}Config(...)" for one in TRAINERS.values())
        raise ConfigError(f"{path} calls no {known.replace(', Reward', ' or Reward')}")
    name = _only(path, there, trainer)
    given = dict(calls.get(f"{TRAINERS[name].called}Config", {}))
    if output := given.pop("0", None):
        given["output_dir"] = output
    taken = {"model": "model", "0": "model"}
    if name == "grpo":
        taken |= {"reward_funcs": "reward_funcs", "1": "reward_funcs"}
    called = f"{TRAINERS[name].called}Trainer"
    given |= {taken[key]: value for key, value in calls.get(called, {}).items() if key in taken}
    if isinstance(given.get("model"), Name):
        notes.append(f"{called}(model={given.pop('model')}) is made elsewhere; give model.path")
    given |= _loaded([call for key, call in calls.items() if key.startswith("load_dataset")], calls.get(called, {}))
    if "LoraConfig" in calls:
        lora = PEFT_DEFAULTS | {PEFT_NAMES.get(key, key): value for key, value in calls["LoraConfig"].items()}
        given |= lora | {"use_peft": True}
        for key in ("task_type", "bias"):  # of a causal model, and none
            given.pop(key, None)
    return name, given, notes


def _loaded(loads: Sequence[Given], trainer: Given) -> Given:
    """The data of a Python file, by what it loads and by what its trainer takes of that (`dataset["train"]`)."""
    loads = [one for one in loads if isinstance(one.get("0", one.get("path")), str)]
    if not loads:
        return {}
    taken = {key: re.search(r"""\[["']([^"']+)["']\]""", str(trainer.get(key, ""))) for key in DATASETS}
    train = next((one for one in loads if str(one.get("split", "train")).startswith("train")), loads[0])
    path, config = train.get("0", train.get("path")), train.get("1", train.get("name"))
    if path in ("json", "csv", "parquet") and "data_files" in train:
        return {"data_files": train["data_files"]}
    found = {"dataset_name": path, "dataset_config": config, "dataset_revision": train.get("revision")}
    found["dataset_train_split"] = train.get("split") or (taken["train_dataset"] and taken["train_dataset"][1])
    others = [one for one in loads if one is not train and one.get("split")]
    if others:
        found["eval_dataset_name"] = others[0].get("0", others[0].get("path"))
        found["dataset_test_split"] = others[0]["split"]
    elif taken["eval_dataset"]:
        found["dataset_test_split"] = taken["eval_dataset"][1]
    return {key: value for key, value in found.items() if isinstance(value, str) and not isinstance(value, Name)}


def _trainers_of(path: Path) -> set[str]:
    """The trainers that a script's commands name: `trl dpo`, `-m trl.scripts.dpo`, `dpo.py`."""
    found = set()
    for words in read_script(text_of(path), str(path)).commands:
        for before, word in zip(["", *words], words, strict=False):
            named = re.fullmatch(r"(?:.*/)?(\w+)\.py|trl\.scripts\.(\w+)", word)
            if named or re.search(r"(^|/)trl$", before):
                found.add((named[1] or named[2]) if named else word)
    return found & TRAINERS.keys()


def _only(path: Path, named: set[str], trainer: str | None) -> str:
    """The one trainer.

    Raises:
        ConfigError: there is none, there are several, or it is another than the one that is asked for.
    """
    if trainer is None and len(named) == 1:
        return next(iter(named))
    if trainer is None or (named and trainer not in named):
        said = f"is of TRL's {', '.join(sorted(named))}" if named else "does not say of which of TRL's trainers it is"
        raise ConfigError(f"{path} {said}: --trainer {'|'.join(sorted(named or TRAINERS))}")
    return trainer


def _processes(flags: Given, own: Given) -> int | None:
    """How many processes a launcher's flags say; `num_processes` is no key of TRL's config."""
    own.pop("num_processes", None)
    if "num_processes" in flags:  # of all machines
        found = flags["num_processes"]
    else:
        found, machines = flags.get("nproc_per_node"), flags.get("nnodes", 1)
        found = found * machines if isinstance(found, int) and isinstance(machines, int) else None
    return found if isinstance(found, int) else None
