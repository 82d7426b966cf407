"""OpenRLHF's trainers on given rows: `train_sft`, `train_dpo` and `train_rm`. Their batches are of all GPUs."""

from collections.abc import Mapping
from typing import Any

from atomrl.importers.openrlhf_names import SCHEDULES, listed, source_file
from atomrl.importers.sources import Given
from atomrl.importers.translation import Moves, Translation

SHARED: Given = {
    "data.apply_chat_template": False,
    "data.dataset_split": "train",
    "data.max_samples": 1000000,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.seed": 42,
    "adam.betas": [0.9, 0.95],
    "adam.eps": 1e-8,
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "max_norm": 1.0,
    "model.gradient_checkpointing_enable": False,
    "eval.steps": -1,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0.0,
    "ds.lora.target_modules": "all-linear",
    "optim": "adam",
}
DEFAULTS: Mapping[str, Given] = {
    "sft": {
        **SHARED,
        "train.max_epochs": 2,
        "train.micro_batch_size": 8,
        "data.max_len": 2048,
        "data.input_key": "input",
        "data.input_template": "User: {}\nAssistant: ",
        "adam.lr": 5e-6,
        "eval.split": "train",
        "logger.wandb.project": "openrlhf_train_sft",
    },
    "dpo": {
        **SHARED,
        "train.micro_batch_size": 8,
        "data.max_len": 512,
        "data.chosen_key": "chosen",
        "data.rejected_key": "rejected",
        "adam.lr": 1e-5,
        "model.beta": 0.1,
        "model.label_smoothing": 0.0,
        "model.nll_loss_coef": 0.0,
        "eval.split": "test",
        "logger.wandb.project": "openrlhf_train_dpo",
    },
    "rm": {
        **SHARED,
        "train.micro_batch_size": 1,
        "data.max_len": 512,
        "data.chosen_key": "chosen",
        "data.rejected_key": "rejected",
        "adam.lr": 9e-6,
        "model.loss_type": "sigmoid",
        "eval.split": "train",
        "logger.wandb.project": "openrlhf_train_rm",
    },
}
"""OpenRLHF's defaults, of the flags that have a counterpart."""
RENAMED = {"chosen_key": "data.chosen_key", "rejected_key": "data.rejected_key", "dataset": "data.dataset",
           "beta": "model.beta", "learning_rate": "adam.lr", "max_len": "data.max_len",
           "prompt_key": "data.prompt_key", "output_key": "data.output_key", "lr_warmup_ratio": "lr_warmup_ratio",
           "actor.adam.lr": "adam.lr", "actor.lr_warmup_ratio": "lr_warmup_ratio", "actor.lr_scheduler": "lr_scheduler",
           "actor.adam.betas": "adam.betas", "actor.adam.weight_decay": "adam.weight_decay",
           "actor.max_norm": "max_norm", "label_smoothing": "model.label_smoothing", "ipo": "model.ipo_enable",
           "nll_loss_coef": "model.nll_loss_coef", "input_template": "data.input_template"}  # fmt: skip
"""Flags of older versions and of the README -> as they are now."""
MOVES: Moves = {
    "model.path": ("model.model_name_or_path", str),
    "model.gradient_checkpointing": ("model.gradient_checkpointing_enable", bool),
    "seed": ("train.seed", int),
    "train.rows_per_update": ("train.batch_size", int),
    "train.total_epochs": ("train.max_epochs", float),
    "train.learning_rate": ("adam.lr", float),
    "train.adam_beta1": ("adam.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": ("adam.betas", lambda betas: float(betas[1])),
    "train.adam_eps": ("adam.eps", float),
    "train.weight_decay": ("adam.weight_decay", float),
    "train.min_lr_ratio": ("min_lr_ratio", float),
    "train.max_grad_norm": ("max_norm", float),
    "eval.every_steps": ("eval.steps", lambda steps: max(0, int(steps))),
    "checkpoint.every_steps": ("ckpt.save_steps", lambda steps: max(0, int(steps))),
    "checkpoint.keep": ("ckpt.max_num", int),
    "tracking.wandb_project": ("logger.wandb.project", str),
}


def renamed(name: str) -> str:
    """A flag's name of today; `actor.X` of the README is `model.X`."""
    name = RENAMED.get(name, name)
    if name in ("actor.model_name_or_path", "actor.gradient_checkpointing_enable"):
        return name.replace("actor.", "model.")
    return name


def translate(t: Translation, kind: str) -> None:
    """A run of a kind, `sft`, `dpo` or `rm`."""
    if t("optim") != "adam":
        raise t.refuse("optim", t("optim"), "the optimizer is AdamW")
    t.refuse_given({
        "model.aux_loss_coef": "the loss that balances a mixture's experts is not computed",
        "model.pretrain_mode_enable": "plain text is trained on by a config with the section `pretrain`",
    })  # fmt: skip
    t.move(MOVES)
    _data(t)
    pair = 1 if kind == "sft" else 2
    t.put("train.rows_per_micro_batch", t.count("train.micro_batch_size") * pair, "train.micro_batch_size")
    length = t.count("data.max_len")
    t.put("train.max_row_tokens", length, "data.max_len")
    t.put("data.max_prompt_tokens", length - 1, "data.max_len")
    schedule = t("lr_scheduler")
    t.put("train.schedule", t.choice("lr_scheduler", schedule, SCHEDULES), "lr_scheduler")
    warmup = 0.0 if schedule == "constant" else t.number("lr_warmup_ratio")
    t.put("train.warmup_ratio", warmup, "lr_scheduler" if schedule == "constant" else "lr_warmup_ratio")
    t.put("eval.before", False)
    t.put(
        "model.dtype", t.choice("ds.param_dtype", t("ds.param_dtype") or "bf16", {"bf16": "bfloat16"}), "ds.param_dtype"
    )
    _adapters(t, kind)
    {"sft": _sft, "dpo": _dpo, "rm": _reward_model}[kind](t)
    if warmup:
        t.differ("first update of the warm-up", "a learning rate of 0", "a part of it, as in the second of OpenRLHF's")
    t.differ("draws", f"seed={t.whole('train.seed')} of its own generators", "other rows first by the same seed")


def _data(t: Translation) -> None:
    t.put("data.answer_field", None)
    for key, name, split in (
        ("data.train", "data.dataset", "data.dataset_split"),
        ("data.eval", "eval.dataset", "eval.split"),
    ):
        found = [source_file(given.strip(), t(split) or "train") for given in listed(t(name))]
        if found:
            t.put(key, found[0] if len(found) == 1 else found, name, split)
    if t("data.dataset_probs") is not None:
        t.to_do.append(
            f"data.dataset_probs={t('data.dataset_probs')}: all rows of each data set are used: join them to a file"
        )
    if t.is_given("data.max_samples"):
        t.put("data.train_size", t.count("data.max_samples"), "data.max_samples")
    t.name_of(["data.max_samples"])


def _adapters(t: Translation, kind: str) -> None:
    rank = t.whole("ds.lora.rank")
    names = [f"ds.lora.{name}" for name in ("alpha", "dropout", "target_modules")]
    t.name_of(names)
    if t.flag("ds.load_in_4bit"):
        if not rank:
            raise t.refuse(
                "ds.load_in_4bit", True, "quantised weights are not trained: give adapters too (ds.lora.rank)"
            )
        t.put("model.quantization", "nf4", "ds.load_in_4bit")
    if not rank:
        return
    if kind == "rm":
        raise t.refuse("ds.lora.rank", rank, "reward models are trained whole")
    t.put("model.lora.rank", rank, "ds.lora.rank")
    t.put("model.lora.alpha", t.number(names[0]), names[0])
    t.put("model.lora.dropout", t.number(names[1]), names[1])
    modules: Any = t(names[2])
    t.put(
        "model.lora.target_modules",
        [modules] if isinstance(modules, str) and modules != "all-linear" else modules,
        names[2],
    )


def _template(t: Translation) -> None:
    """`data.input_template`, which is put around a prompt where no chat template is."""
    template = t("data.input_template")
    if template and not t.flag("data.apply_chat_template"):
        said = str(template).removeprefix("$")
        t.differ("a prompt", f"within data.input_template={said!r}", "the text alone: write the template into the rows")


def _sft(t: Translation) -> None:
    prompt, completion = str(t("data.input_key")), t("data.output_key")
    t.put("data.prompt_field", prompt, "data.input_key")
    t.put("sft.completion_field", str(completion or "completion"), "data.output_key")
    if completion is None:
        t.to_do.append(
            f"data.output_key is not given: rows have whole conversations in {prompt!r}; here such a column is "
            "`messages` or "
            "`conversations` (docs/guides/data.md)"
        )
    if not t.flag("data.multiturn"):
        t.differ("answers before the last of a conversation", "not trained (data.multiturn is off)", "trained")
    _template(t)


def _dpo(t: Translation) -> None:
    reference = t("ref.model_name_or_path")
    if reference not in (None, t("model.model_name_or_path")):
        raise t.refuse("ref.model_name_or_path", reference, "the reference is the model at the start")
    t.put("algorithm.name", "dpo")
    beta, smoothing = t.number("model.beta"), t.number("model.label_smoothing")
    loss: dict[str, Any] = {"type": "ipo", "beta": beta} if t.flag("model.ipo_enable") else {
        "type": "sigmoid", "beta": beta, "label_smoothing": smoothing,
    }  # fmt: skip
    t.put("algorithm.loss", [loss], "model.beta", "model.label_smoothing", "model.ipo_enable")
    if weight := t.number("model.nll_loss_coef"):
        t.put("algorithm.nll", {"coefficient": weight}, "model.nll_loss_coef")
        t.differ(
            "mean of the likelihood", "over a row's tokens, then over rows", "over all tokens of the optimizer step"
        )
    _pairs(t)


def _reward_model(t: Translation) -> None:
    t.put("algorithm.name", "reward_model")
    t.choice("model.loss_type", t("model.loss_type"), {"sigmoid": "", "logexp": ""})  # the same equation
    t.put("algorithm.centring", 0.0)
    t.put("algorithm.margin", 1.0 if t.flag("model.margin_loss_enable") else 0.0, "model.margin_loss_enable")
    t.leave("model.compute_fp32_loss_enable", "the loss is computed in float32 anyway")
    _pairs(t)


def _pairs(t: Translation) -> None:
    t.put("preference.chosen_field", str(t("data.chosen_key")), "data.chosen_key")
    t.put("preference.rejected_field", str(t("data.rejected_key")), "data.rejected_key")
    if t("data.prompt_key") is not None:
        t.put("data.prompt_field", str(t("data.prompt_key")), "data.prompt_key")
    _template(t)
