"""Read the arguments of a TRL trainer in a Python script: model, config, adapters, rows and rewards."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.copied_functions import CopiedFunctions, Rows, rows_of
from atomrl.tools.importers.python_script import PythonScript, Unknown
from atomrl.tools.importers.sources import Settings

MAY_BE_UNREAD = frozenset({
    "output_dir", "run_name", "logging_dir", "report_to", "project", "hub_model_id", "hub_token", "push_to_hub",
    "vllm_server_host", "vllm_server_base_url", "vllm_server_port", "deepspeed",
})  # fmt: skip
"""Arguments of a config that do not affect training."""
POSITIONS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "reward": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}
"""Positional arguments of a trainer."""
REFUSED = {
    "tools": "tools are a section of the config here (docs/guides/tool_calling.md)",
    "rollout_func": "episodes have another interface here (docs/guides/environments.md)",
    "environment_factory": "environments have another interface here (docs/guides/environments.md)",
    "compute_loss_func": "the config sets the loss",
    "formatting_func": "write its rows to a file, and set data.train to it",
    "data_collator": "AtomRL collates rows itself; write its changes into the rows",
    "optimizers": "the config sets the optimizer: train.optimizer",
    "optimizer_cls_and_kwargs": "the config sets the optimizer: train.optimizer",
}
"""Arguments of a trainer that affect what is trained and have no counterpart."""
IGNORED = {
    "callbacks": "a callback is a function f(step, metrics) of atomrl.train (docs/reference/python_api.md)",
    "compute_metrics": "evaluation has its own metrics",
    "preprocess_logits_for_metrics": "evaluation has its own metrics",
    "reward_processing_classes": "a reward model uses its own tokenizer",
    "model_init": "",
}
LOADERS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForImageTextToText")
MODEL_ARGUMENTS = {"torch_dtype": "dtype", "pretrained_model_name_or_path": "model"}
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
        "bias": "lora_bias"}  # fmt: skip
PEFT_DEFAULTS: Settings = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of `LoraConfig` itself."""
HARMLESS = {
    "gradient_checkpointing_enable", "enable_input_require_grads", "print_trainable_parameters", "train", "eval", "to",
    "cuda", "config", "generation_config", "save_pretrained", "push_to_hub", "pad_token", "pad_token_id",
    "padding_side",
    "truncation_side", "encode", "decode", "batch_decode", "apply_chat_template", "eos_token", "eos_token_id",
    "generate",
    "name_or_path", "tokenize", "device", "model_max_length", "bos_token", "unk_token", "parameters", "num_parameters",
    "named_parameters", "get_memory_footprint", "is_parallelizable", "model_parallel", "from_pretrained",
}  # fmt: skip
"""Attributes of a model or tokenizer that do not affect training."""


@dataclass
class ScriptArguments:
    """The arguments of a trainer in a script, by their names in its config and in TRL's command line."""

    settings: Settings = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Arguments that are not exactly the same here."""
    to_do: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Arguments without a counterpart -> the reason."""
    train: Rows | None = None
    held_out: Rows | None = None
    rewards: list[dict[str, Any]] = field(default_factory=list)
    """A dict per reward: `copied` (a name in `copies`), `trl` with `args`, `model`, or `path`."""
    copies: CopiedFunctions | None = None
    places: dict[str, str] = field(default_factory=dict)
    """Argument -> file and line."""
    used: set[str] = field(default_factory=set)
    """Flags of the command line that the script itself reads."""


class ScriptReader:
    """Reads the call of a trainer in a script.

    Args:
        script: the parsed script.
        kind: `grpo`, `sft`, ...
        called: prefix of the names of the trainer and its config.
        rewards_file: name of the file with copied rewards.
    """

    def __init__(self, script: PythonScript, kind: str, called: str, rewards_file: str) -> None:
        self.script, self.kind, self.called = script, kind, called
        self.result = ScriptArguments()
        self.copies = CopiedFunctions(script, rewards_file)

    def read(self) -> ScriptArguments:
        """Read the arguments.

        Raises:
            ConfigError: an argument that affects training is only known when the script runs, or has no counterpart.
        """
        script, result = self.script, self.result
        self._refuse_subclasses()
        calls = script.calls([f"{self.called}Trainer"])
        if len(calls) > 1:
            others = ", ".join(str(call.lineno) for call in calls[1:])
            result.to_do.append(
                f"{script.place(calls[0])}: this {self.called}Trainer was used; those of line {others} are separate "
                "runs"
            )
        configs = script.calls([f"{self.called}Config"])
        arguments = script.arguments(calls[0], POSITIONS[self.kind]) if calls else {}
        self._config(arguments.pop("args", None), configs)
        for name, value in arguments.items():
            self._argument(name, value)
        if not calls:
            result.to_do.append(
                f"{script.path.name} does not create a {self.called}Trainer: model, data and rewards are not in it"
            )
            self._lora(script.calls(["LoraConfig"]))
        self._touched(arguments)
        result.lines += script.notes
        result.used = script.used
        result.to_do += self.copies.to_do
        result.copies = self.copies if self.copies.names else None
        return result

    def _refuse_subclasses(self) -> None:
        names = {f"{self.called}Trainer", f"{self.called}Config"}
        for node in ast.walk(self.script.module):
            if isinstance(node, ast.ClassDef) and (base := names & {self.script.called(one) for one in node.bases}):
                raise ConfigError(
                    f"{self.script.path}:{node.lineno}: class {node.name} changes {min(base)}, which is not "
                    "translated: write it as a choice of the objective (docs/reference/new_objectives.md), or remove "
                    "the class"
                )

    # ---- The config ----

    def _config(self, args: ast.expr | None, configs: list[ast.Call]) -> None:
        script = self.script
        if args is not None:
            made = script.resolved(args)
            if isinstance(made, ast.Constant) and made.value is None:
                return
            if (parsed := script.parsed_class(args)) is not None:
                self._from_flags(args, parsed)
                return
            if not isinstance(made, ast.Call) or not script.called(made).endswith(("Config", "Arguments")):
                raise script.only_when_run(args, f"{self.called}Trainer", "args")
            configs = [made]
        elif configs and self.script.calls([f"{self.called}Trainer"]):
            self.result.to_do.append(
                f"{script.place(configs[0])}: this {self.called}Config is not passed to the trainer, which then uses "
                "TRL's defaults: it was read anyway"
            )
        if not configs:
            return
        call = configs[0]
        arguments = script.arguments(call, ["output_dir"]) | script.set_later(call)
        for name, value in arguments.items():
            try:
                self._give(name, value)
            except Unknown as reason:
                if isinstance(value, ast.Call) and script.called(value) == "LoraConfig":
                    continue
                if name not in MAY_BE_UNREAD:
                    if "from the command line" in str(reason):
                        raise self._needs_command(value, str(reason)) from None
                    raise script.only_when_run(value, script.called(call), name) from None
                self.result.lines.append(
                    f"{script.place(value)}: {script.called(call)}({name}={ast.unparse(value)}) is not a literal, so "
                    "it was not read"
                )

    def _give(self, name: str, value: ast.expr) -> None:
        """Store the value of an argument, with file and line."""
        self.result.settings[name] = self.script.value(value)
        self.result.places[name] = f"{self.script.path}:{value.lineno}"

    def _from_flags(self, args: ast.expr, parsed: str) -> None:
        if not self.script.has_command_line:
            name = parsed or "argparse"
            self.result.to_do.append(
                f"{self.script.place(args)}: {name} is read from the command line, which is not given: TRL's defaults "
                "were used. Import the shell script with the command, or give its flags: atomrl import "
                f"{self.script.path.name} --out FILE -- --learning_rate ..."
            )
        self.result.settings |= self.script.flags

    def _needs_command(self, node: ast.expr, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.script.path}:{node.lineno}: {reason}, which is not given: import the shell script with the "
            f"command, or give its flags: atomrl import {self.script.path.name} --out FILE -- --name value ..."
        )

    # ---- The trainer's arguments ----

    def _argument(self, name: str, value: ast.expr) -> None:
        script, result = self.script, self.result
        resolved = script.resolved(value)
        if isinstance(resolved, ast.Constant) and resolved.value is None:
            return
        if name == "model":
            self._model(value)
        elif name in ("train_dataset", "eval_dataset"):
            self._rows(name, value, resolved)
        elif name == "peft_config":
            self._peft(value, resolved)
        elif name == "reward_funcs" and self.kind in ("grpo", "rloo"):
            self._rewards(value)
        elif name in ("processing_class", "tokenizer"):
            self._tokenizer(resolved)
        elif name == "ref_model":
            self._reference(value, resolved)
        elif name == "quantization_config":
            self._quantization(value, resolved)
        elif name in REFUSED:
            raise ConfigError(
                f"{script.path}:{value.lineno}: {self.called}Trainer({name}={_short(value)}) has no counterpart and "
                f"affects training: {REFUSED[name]}"
            )
        elif name in IGNORED:
            result.left[f"{name}={_short(value)}"] = IGNORED[name]
        else:
            raise ConfigError(f"{script.path}:{value.lineno}: {self.called}Trainer of TRL has no argument {name!r}")

    def _model(self, value: ast.expr) -> None:
        script = self.script
        made = script.resolved(value)
        if isinstance(made, ast.Call):
            called = script.called(made)
            if called in ("get_peft_model", "prepare_model_for_kbit_training"):
                arguments = script.arguments(made, ["model", "peft_config"])
                self._model(arguments["model"])
                if "peft_config" in arguments:
                    self._peft(arguments["peft_config"], script.resolved(arguments["peft_config"]))
                return
            if called == "from_pretrained":
                owner = ast.unparse(made.func.value) if isinstance(made.func, ast.Attribute) else ""
                if script.called(made.func.value) not in LOADERS if isinstance(made.func, ast.Attribute) else True:
                    raise ConfigError(
                        f"{script.path}:{made.lineno}: {owner}.from_pretrained has no counterpart: use a causal "
                        "language model (with adapters: merge them first)"
                    )
                self._loaded(made)
                return
            if (returned := script.returned(made)) is not None:
                self._model(returned)
                return
        try:
            self._give("model", value)
        except Unknown as reason:
            if "from the command line" in str(reason):
                raise self._needs_command(value, str(reason)) from None
            raise script.only_when_run(value, f"{self.called}Trainer", "model") from None

    def _loaded(self, call: ast.Call) -> None:
        """Read the name and the arguments of `from_pretrained`."""
        for name, value in self.script.arguments(call, ["model"]).items():
            self._loaded_with(MODEL_ARGUMENTS.get(name, name), value)

    def _loaded_with(self, name: str, value: ast.expr) -> None:
        script = self.script
        resolved = script.resolved(value)
        if name == "quantization_config":
            self._quantization(value, resolved)
            return
        if name == "num_labels":
            with suppress(Unknown):
                if script.value(value) == 1:  # a reward model has one score
                    return
            raise ConfigError(
                f"{script.place(value)}: num_labels={_short(value)} has no counterpart: a reward model has one score"
            )
        try:
            self._give(name, value)
        except Unknown as reason:
            if name in ("device_map", "attn_implementation", "token", "cache_dir", "use_cache", "max_memory"):
                self.result.left[f"{name}={_short(value)}"] = "how the model is loaded, not what is trained"
                return
            if "from the command line" in str(reason):
                raise self._needs_command(value, str(reason)) from None
            raise script.only_when_run(value, "from_pretrained", name) from None

    def _quantization(self, value: ast.expr, made: ast.expr) -> None:
        script = self.script
        if not isinstance(made, ast.Call) or script.called(made) != "BitsAndBytesConfig":
            if isinstance(made, ast.Call) and script.called(made) == "get_quantization_config":
                return  # TRL's own, of its flags
            raise script.only_when_run(value, "from_pretrained", "quantization_config")
        for name, part in script.arguments(made).items():
            try:
                self._give(name, part)
            except Unknown:
                raise script.only_when_run(part, "BitsAndBytesConfig", name) from None
        if self.result.settings.get("load_in_4bit") and "bnb_4bit_quant_type" not in self.result.settings:
            self.result.lines.append(
                f"{script.place(made)}: BitsAndBytesConfig(load_in_4bit=True) is fp4, bitsandbytes' default; here nf4"
            )

    def _peft(self, value: ast.expr, made: ast.expr) -> None:
        if not isinstance(made, ast.Call) or self.script.called(made) not in ("LoraConfig", "get_peft_config"):
            raise self.script.only_when_run(value, f"{self.called}Trainer", "peft_config")
        if self.script.called(made) == "LoraConfig":  # else TRL's own, of its flags
            self._lora([made])

    def _lora(self, calls: list[ast.Call]) -> None:
        if not calls:
            return
        settings: Settings = {}
        for name, part in self.script.arguments(calls[0], ["task_type"]).items():
            try:
                settings[LORA.get(name, name)] = self.script.value(part)
                self.result.places[LORA.get(name, name)] = f"{self.script.path}:{part.lineno}"
            except Unknown:
                if name == "task_type":  # TaskType.CAUSAL_LM
                    continue
                raise self.script.only_when_run(part, "LoraConfig", name) from None
        self.result.settings |= PEFT_DEFAULTS | settings | {"use_peft": True}

    def _tokenizer(self, made: ast.expr) -> None:
        script = self.script
        if isinstance(made, ast.Call) and script.called(made) == "from_pretrained":
            names = script.arguments(made, ["tokenizer"])
            try:
                self._give("tokenizer", names.get("tokenizer", made))
                return
            except Unknown as reason:
                if "from the command line" in str(reason):  # the model's own, in TRL's scripts
                    return
        self.result.to_do.append(
            f"{script.place(made)}: the tokenizer {_short(made)} is known only when it runs: set model.tokenizer"
        )

    def _reference(self, value: ast.expr, made: ast.expr) -> None:
        script = self.script
        model = self.result.settings.get("model")
        name: Any = None
        if isinstance(made, ast.Call) and script.called(made) == "from_pretrained":
            made = script.arguments(made, ["model"]).get("model", made)
        with suppress(Unknown):
            name = script.value(made)
        if name is None or name != model:
            raise ConfigError(
                f"{script.path}:{value.lineno}: {self.called}Trainer(ref_model={_short(value)}) has no counterpart and "
                "affects training: the reference is the initial model"
            )

    def _rows(self, name: str, value: ast.expr, resolved: ast.expr) -> None:
        if isinstance(resolved, ast.IfExp):  # `dataset[...] if args.eval_strategy != "no" else None`
            value = resolved.body
        rows = rows_of(self.script, value)
        if name == "train_dataset":
            self.result.train = rows
        else:
            self.result.held_out = rows

    # ---- Rewards ----

    def _rewards(self, value: ast.expr) -> None:
        rewards = self.script.resolved(value)
        if isinstance(rewards, ast.Call) and (returned := self.script.returned(rewards)) is not None:
            made = self.script.resolved(returned)
            rewards = made if isinstance(made, ast.List | ast.Tuple) else rewards  # else it makes one reward
        if isinstance(rewards, ast.List | ast.Tuple):
            for one in rewards.elts:
                self._reward(one)
        elif isinstance(rewards, ast.Dict) and isinstance(value, ast.Subscript):
            raise self.script.only_when_run(value, f"{self.called}Trainer", "reward_funcs")
        else:
            self._reward(value)

    def _reward(self, node: ast.expr) -> None:
        script, rewards = self.script, self.result.rewards
        made = script.resolved(node)
        if isinstance(made, ast.Call) and script.called(made) == "from_pretrained":
            self._reward_model(made)
            return
        try:
            name = script.value(node)
            if isinstance(name, str):
                rewards.append({"model": name})
                return
        except Unknown:
            pass
        if isinstance(made, ast.ListComp | ast.Subscript | ast.IfExp):
            raise script.only_when_run(node, f"{self.called}Trainer", "reward_funcs")
        source = made.func if isinstance(made, ast.Call) else made
        full = self._full_name(source)
        if full.startswith("trl."):
            arguments = script.arguments(made) if isinstance(made, ast.Call) else {}
            try:
                rewards.append(
                    {"trl": full.rpartition(".")[2], "args": {k: script.value(v) for k, v in arguments.items()}}
                )
            except Unknown:
                raise script.only_when_run(made, script.called(made)) from None
            return
        if full and not isinstance(made, ast.Call):
            self._imported_reward(node, full)
            return
        if isinstance(made, ast.Name) and script.lookup(made.id, made) is None:
            raise ConfigError(f"{script.path}:{node.lineno}: the reward {made.id} is not defined in the script")
        rewards.append({"copied": self.copies.add(node)})

    def _reward_model(self, call: ast.Call) -> None:
        try:
            self.result.rewards.append({"model": self.script.value(self.script.arguments(call, ["model"])["model"])})
        except (Unknown, KeyError):
            raise self.script.only_when_run(call, f"{self.called}Trainer", "reward_funcs") from None

    def _full_name(self, node: ast.expr) -> str:
        """Return the dotted name of something imported; "" if it is not."""
        names = self.script.imports()
        if isinstance(node, ast.Name):
            binding = self.script.lookup(node.id, node)
            imported = binding is not None and isinstance(binding.statement, ast.Import | ast.ImportFrom)
            return names.get(node.id, "") if imported else ""
        if isinstance(node, ast.Attribute):
            owner = self._full_name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def _imported_reward(self, node: ast.expr, full: str) -> None:
        """Add a reward of another module: a file next to the script, or an installed package."""
        module, _, name = full.rpartition(".")
        file = self.script.path.parent.joinpath(*module.strip(".").split(".")).with_suffix(".py")
        if file.is_file():
            self.result.rewards.append({"path": f"{file}:{name}"})
            return
        self.result.rewards.append({"path": f"{module.strip('.')}:{name}"})
        self.result.to_do.append(
            f"{self.script.place(node)}: the reward {full} is in a module that is not next to the script: it must be "
            "installed, or in the folder of the config, where the run starts"
        )

    # ---- Other changes to model and tokenizer ----

    def _touched(self, arguments: Mapping[str, ast.expr]) -> None:
        names = {
            value.id: name
            for name, value in arguments.items()
            if isinstance(value, ast.Name) and name in ("model", "processing_class", "tokenizer")
        }
        for node in ast.walk(self.script.module):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            owner, parent = names.get(node.value.id), self.script.parents[node]
            if node.attr == "add_callback" and isinstance(parent, ast.Call):
                self.result.left[f"{self.script.place(node)}: {_short(parent)}"] = IGNORED["callbacks"]
            stored = isinstance(node.ctx, ast.Store)
            if owner is None or node.attr in HARMLESS or not (stored or isinstance(parent, ast.Call)):
                continue
            text = _short(parent) if isinstance(parent, ast.expr | ast.stmt) else node.attr
            if node.attr == "chat_template":
                raise ConfigError(
                    f"{self.script.path}:{node.lineno}: {text}: the chat template is read from the tokenizer: save it "
                    "with the model as chat_template.jinja"
                )
            self.result.to_do.append(f"{self.script.place(node)}: {text}: its effect on the {owner} is not translated")


def trainers_in(script: PythonScript, trainers: Mapping[str, str]) -> set[str]:
    """Return the kinds of trainers that a script creates, or else creates configs for.

    Args:
        trainers: kind -> prefix of the class names.
    """
    classes = [node for node in ast.walk(script.module) if isinstance(node, ast.ClassDef)]
    bases = {script.called(base) for node in classes for base in node.bases}
    made = {
        kind for kind, called in trainers.items() if script.calls([f"{called}Trainer"]) or f"{called}Trainer" in bases
    }
    return made or {kind for kind, called in trainers.items() if script.calls([f"{called}Config"])}


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."
