"""TRL: a Python file that makes a trainer, the YAML of `trl dpo --config` and others, a script with flags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atomrl.config import ConfigError, read_yaml
from atomrl.hints import did_you_mean
from atomrl.importers import trl_given, trl_grpo, trl_shared
from atomrl.importers.gpus import put_gpus
from atomrl.importers.python_script import PythonScript
from atomrl.importers.shell import read_script
from atomrl.importers.sources import Given, flag_words, read_flags, text_of
from atomrl.importers.translation import Translation
from atomrl.importers.trl_rows import put_rewards, put_rows
from atomrl.importers.trl_script import ScriptArguments, ScriptReader, trainers_in


@dataclass(frozen=True)
class Trainer:
    """One of TRL's trainers."""

    called: str
    """The beginning of the names of its classes."""
    defaults: Given
    translate: Callable[[Translation, int], None]
    """Translates the trainer's own arguments, given the number of processes."""
    marks: frozenset[str]
    """Keys that it alone has."""
    draws: bool = False
    """It draws completions."""


TRAINERS: Mapping[str, Trainer] = {
    "grpo": Trainer("GRPO", trl_grpo.DEFAULTS, trl_grpo.translate, frozenset({
        "scale_rewards", "delta", "importance_sampling_level", "top_entropy_quantile",
    }), draws=True),
    "rloo": Trainer("RLOO", trl_grpo.RLOO_DEFAULTS, trl_grpo.translate_rloo, frozenset({
        "normalize_advantages", "reward_clip_range",
    }), draws=True),
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
PROGRAM = r"(^|/)trl$|\.py$|^trl\."
OWN = r"trl/scripts/\w+\.py$|examples/scripts/\w+\.py$"
"""TRL's own scripts, which are known by their flags."""
DRAWING = frozenset({
    "num_generations", "reward_funcs", "max_completion_length", "num_iterations", "epsilon", "generation_batch_size",
    "steps_per_generation", "use_vllm",
})  # fmt: skip
"""Keys of GRPO and RLOO: with one of these alone it is GRPO."""
OF_ALL = frozenset({
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "model_name_or_path",
    "data_files", "reward_funcs", "reward_model_name_or_path", "reward_weights", "report_to", "output_dir",
    "eval_dataset_name", "dataset_revision", "lora_r", "lora_alpha", "lora_dropout",
    "max_steps", "warmup_ratio", "eval_steps", "lora_target_modules", "use_rslora", "save_strategy",
    "max_prompt_length",
})  # fmt: skip


@dataclass
class Reading:
    """The content of a file of TRL."""

    kind: str
    given: Given
    notes: list[str]
    processes: int | None
    said: str
    """The setting that says how many processes there are."""
    script: ScriptArguments | None = None
    flags: Given = field(default_factory=dict)
    """Flags of a script's command line."""
    own_flags: bool = False
    """Flags may be a script's own, and not TRL's."""


def translate(
    path: Path, out: Path, processes: int | None = None, trainer: str | None = None, command: list[str] | None = None
) -> Translation:
    """TRL's file as a translation.

    Args:
        out: where the config goes.
        processes: where the file does not say how many there are.
        trainer: whose config it is, a key of `TRAINERS`, where the file does not say.
        command: the flags that a Python file is started with.
    """
    reading = _read(path, trainer, command, out)
    which = TRAINERS[reading.kind]
    t = Translation("TRL", reading.given, {**trl_shared.DEFAULTS, **which.defaults}, path)
    t.places = reading.script.places if reading.script else {}
    if (said := processes or reading.processes) is not None:
        put_gpus(t, said, f"--processes {processes}" if processes else reading.said)
    elif path.suffix != ".sh":
        t.nearly("how many processes there are is not in the file: 1 was taken; --processes N says otherwise")
    script = reading.script
    if script is not None:
        put_rows(t, script, reading.kind, out)
    trl_shared.translate_shared(t, path)
    which.translate(t, said or 1)
    if which.draws:
        rewards = script if script is not None and script.rewards else ScriptArguments(rewards=trl_grpo.flag_rewards(t))
        put_rewards(t, rewards, out)
    for note in [*reading.notes, *(script.lines if script else [])]:
        t.nearly(note)
    if script is not None:
        t.to_do += script.to_do
        for name, why in script.left.items():
            t.leave_said(name, why)
    _check_names(t, path, reading)
    if "path" not in t.tree.get("model", {}):
        made = f"give {which.called}Trainer(model=...)" if path.suffix == ".py" else "give --model_name_or_path"
        raise ConfigError(f"{path} names no model: {made}")
    return t


def _check_names(t: Translation, path: Path, reading: Reading) -> None:
    """Refuse an argument that TRL does not have; of a script with flags of its own, name it."""
    if reading.script is not None:
        t.name_of(reading.script.used)
        for name in reading.flags.keys() - reading.script.used - t.given.keys():
            t.to_do.append(f"--{name}={reading.flags[name]}: what the script does with it is not translated")
    known = sorted({*t.known, *t.reasons, *t.defaults, *OF_ALL})
    called = f"{TRAINERS[reading.kind].called}Config"
    for name in t.unread:
        if name in OF_ALL:
            t.leave(name, "nothing here reads it")
        elif reading.own_flags:
            t.to_do.append(f"--{name}={t.given[name]} is the script's own flag: what it does is not translated")
            t.leave(name, "the script's own flag")
        else:
            place = reading.script.places.get(name, path) if reading.script else path
            raise ConfigError(f"{place}: TRL's {called} has no argument {name!r}; {did_you_mean(name, known)}")


def _read(path: Path, trainer: str | None, command: list[str] | None, out: Path) -> Reading:
    if path.suffix == ".py":
        flags = {key.replace("-", "_"): value for key, value in flag_words(command)} if command else None
        return _read_python(path, trainer, flags, out)
    wanted = rf"\btrl {trainer}\b|\b{trainer}\.py\b|trl\.scripts\.{trainer}\b" if trainer else None
    if path.suffix not in (".yaml", ".yml") and len(_trainers_of(path)) < 2:
        wanted = None
    flags, notes, launcher, program = read_flags(path, PROGRAM, "trl, or of a Python file", wanted)
    given = {key.replace("-", "_"): value for key, value in flags.items()}
    for name in [name for name, value in given.items() if name.startswith("no_") and value is True]:
        given[name.removeprefix("no_")] = not given.pop(name)  # as argparse has it for what is on by default
    if "config" in given:
        notes = [*notes, f"--config {given.pop('config')} was not read; import it by itself"]
    given.pop("env", None)
    launched = {key.replace("-", "_"): value for key, value in launcher.items()}
    setting = path.parent / str(launched.get("config_file", ""))
    if setting.suffix in (".yaml", ".yml") and setting.is_file():  # of accelerate
        launched = {**read_yaml(setting), **launched}
    processes, said = _processes(launched | given, given)
    beside = path.parent / program
    if program.endswith(".py") and beside.is_file() and not re.search(OWN, str(beside.resolve())):
        reading = _read_python(beside, trainer, given, out)
        reading.notes += notes
        reading.processes, reading.said = processes, said
        return reading
    named = set() if path.suffix in (".yaml", ".yml") else _trainers_of(path)
    named = named or {name for name, one in TRAINERS.items() if one.marks & given.keys()}
    if not named and DRAWING & given.keys():
        named = {"grpo"}
    own = program.endswith(".py") and Path(program).stem not in TRAINERS
    if own:
        notes.append(f"{program} is not beside {path.name}: what it does with its flags was not read")
    return Reading(_only(path, named, trainer), given, notes, processes, said, own_flags=own)


def _read_python(path: Path, trainer: str | None, flags: Given | None, out: Path) -> Reading:
    script = PythonScript(path, flags)
    there = trainers_in(script, {kind: one.called for kind, one in TRAINERS.items()})
    if not there:
        known = ", ".join(f"{one.called}Trainer(...)" for one in TRAINERS.values())
        raise ConfigError(f"{path} calls no {known.replace(', Reward', ' or Reward')}")
    kind = _only(path, there, trainer)
    found = ScriptReader(script, kind, TRAINERS[kind].called, f"{out.stem}_rewards.py").read()
    return Reading(kind, found.given, [], None, "", found, flags or {}, own_flags=bool(flags))


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


def _processes(flags: Given, own: Given) -> tuple[int | None, str]:
    """How many processes a launcher's flags say, and which; `num_processes` is no key of TRL's config."""
    own.pop("num_processes", None)
    if isinstance(found := flags.get("num_processes"), int):  # of all machines
        return found, f"num_processes={found}"
    each, machines = flags.get("nproc_per_node"), flags.get("nnodes", 1)
    if isinstance(each, int) and isinstance(machines, int):
        return each * machines, f"nproc_per_node={each}" + f" x nnodes={machines}" * (machines > 1)
    each = flags.get("num_gpus")  # deepspeed
    return (each, f"num_gpus={each}") if isinstance(each, int) else (None, "")
