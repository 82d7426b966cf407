"""TRL's trainers on given rows: SFT, DPO and reward models. Batches are of one process; their steps are ours."""

from typing import Any

from atomrl.importers.sources import Given
from atomrl.importers.translation import Translation
from atomrl.importers.trl_shared import put_steps

SFT_DEFAULTS: Given = {
    "learning_rate": 2e-5,
    "max_length": 1024,
    "loss_type": "chunked_nll",
    "assistant_only_loss": False,
    "packing": False,
}
DPO_DEFAULTS: Given = {
    "learning_rate": 1e-6,
    "max_length": 1024,
    "loss_type": ["sigmoid"],
    "beta": 0.1,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
    "use_weighting": False,
    "sync_ref_model": False,
}
REWARD_DEFAULTS: Given = {"learning_rate": 1e-4, "max_length": 1024}

LOSSES = {
    "sigmoid": "sigmoid",
    "sigmoid_norm": "sigmoid",
    **{
        name: name
        for name in (
            "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop",
        )
    },
}  # fmt: skip
"""TRL's loss -> ours."""
PER_TOKEN = {"ipo", "sigmoid_norm"}
"""Losses whose scores are means over tokens."""
SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}
"""Losses that read `label_smoothing`."""
LOG_RATIOS = {"aot", "aot_unpaired", "apo_zero", "apo_down"}
"""Losses that take the log-ratios themselves, whatever the divergence."""
NO_LIMIT = 2**20


def translate_sft(t: Translation, processes: int) -> None:
    """Translate SFT's own arguments."""
    if (loss := t("loss_type")) not in ("nll", "chunked_nll", None):
        raise t.refuse("loss_type", loss, "the likelihood of every token weighs the same here")
    if t("completion_only_loss") is not None and not t.flag("completion_only_loss"):
        raise t.refuse("completion_only_loss", False, "only what the assistant says is trained on")
    if "sft" not in t.tree:  # a Python script may rename the column
        t.put("sft.completion_field", "completion")
    t.name_of(["loss_type", "completion_only_loss"])
    if not t.flag("assistant_only_loss"):
        t.differ(
            "tokens of rows with messages that are trained (assistant_only_loss=False)",
            "all, of every role",
            "the assistant's; rows with prompt and completion are the same",
        )
    if t.is_given("dataset_text_field"):
        t.to_do.append(
            f"dataset_text_field={t('dataset_text_field')}: plain text is trained on by a config with the section "
            "`pretrain` (docs/guides/pretraining.md)"
        )
    if t.flag("packing"):
        t.differ(
            "a row of a batch (packing=True)",
            "a block of max_length tokens with several demonstrations",
            "a demonstration: raise train.rows_per_update by how many fit into a block",
        )
    _batches(t, processes, rows_of_one=1)
    _lengths(t, "cut")


def translate_dpo(t: Translation, processes: int) -> None:
    """Translate DPO's own arguments."""
    t.refuse_given(
        {
            "use_weighting": "pairs all weigh the same here",
            "reference_free": "algorithm.score={type: logprob} compares log-probs; say so yourself",
        }
    )
    t.put("algorithm.name", "dpo")
    _losses(t)
    _batches(t, processes, rows_of_one=2)
    _lengths(t, "cut")


def translate_reward(t: Translation, processes: int) -> None:
    """Translate a reward model's own arguments."""
    t.refuse_given({"use_peft": "reward models are trained whole"})
    t.put("algorithm.name", "reward_model")
    t.put(
        "algorithm.centring",
        t.number("center_rewards_coefficient") if t("center_rewards_coefficient") is not None else 0.0,
        "center_rewards_coefficient",
    )
    t.put(
        "algorithm.margin",
        1.0,
        because="TRL takes a column margin where the rows have one; here also what score_chosen and score_rejected "
        "say, and 0 leaves both out",
    )
    _batches(t, processes, rows_of_one=2)
    _lengths(t, "left out")


def _batches(t: Translation, processes: int, rows_of_one: int) -> None:
    """TRL's batches of one process; of a pair both rows are in a forward pass."""
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    t.put("train.rows_per_update", each * processes * accumulated, *names)
    t.put("train.rows_per_micro_batch", each * rows_of_one, names[0])
    t.put("data.shuffle", True)
    t.name_of(["shuffle_dataset"])
    t.put("data.answer_field", None)
    put_steps(t, updates=1)
    t.differ("draws", f"seed={t.whole('seed')} of its own generators", "other rows first by the same seed")
    if t.whole("max_steps") <= 0:
        t.differ(
            "end of an epoch",
            "a smaller batch of the rows that are left",
            "a whole one, with the next epoch's first rows",
        )


def _lengths(t: Translation, overlong: str) -> None:
    length = None if t("max_length") is None else t.whole("max_length")
    mode = t("truncation_mode")
    if length is None:
        t.put("data.max_prompt_tokens", NO_LIMIT, "max_length", because="no limit but the model's context")
        return
    if mode == "keep_end":
        raise t.refuse("truncation_mode", mode, "rows are cut at their end")
    t.put("train.max_row_tokens", length, "max_length", "truncation_mode")
    if overlong == "left out":
        t.differ(f"rows over {length} tokens", "left out", "cut")
    t.put("data.max_prompt_tokens", length - 1, "max_length")  # of a longer prompt nothing is left to train on
    if t("max_prompt_length") is not None:
        t.put(
            "data.max_prompt_tokens",
            t.count("max_prompt_length"),
            "max_prompt_length",
            because="longer prompts are left out",
        )


def _losses(t: Translation) -> None:
    """`loss_type` with its weights, as the losses of a preference objective and the likelihood beside them."""
    given = t("loss_type")
    kinds = [str(kind) for kind in (given if isinstance(given, list | tuple) else [given])]
    weights = [1.0] * len(kinds) if t("loss_weights") is None else t.numbers("loss_weights", len(kinds))
    named = dict(zip(kinds, weights, strict=True))
    likelihood = named.pop("sft", 0.0) + (t.number("rpo_alpha") if t("rpo_alpha") is not None else 0.0)
    divergence = str(t("f_divergence_type")).rpartition(".")[2].lower()
    beta, smoothing = t.number("beta"), t.number("label_smoothing")
    if not named:
        raise t.refuse("loss_type", given, "the likelihood alone is SFT (the section `sft`)")
    if named.keys() & PER_TOKEN and named.keys() - PER_TOKEN:
        raise t.refuse("loss_type", given, "a run has one score: means over tokens (ipo, sigmoid_norm), or sums")
    if divergence != "reverse_kl" and (odd := sorted(named.keys() & LOG_RATIOS)):
        raise t.refuse("f_divergence_type", divergence, f"TRL's {', '.join(odd)} takes log-ratios all the same")
    losses: list[dict[str, Any]] = []
    for kind, weight in named.items():
        loss: dict[str, Any] = {"type": t.choice("loss_type", kind, LOSSES), "beta": beta}
        loss |= {"label_smoothing": smoothing} if kind in SMOOTHED else {}
        loss |= {"tau": t.number("discopop_tau")} if kind == "discopop" else {}
        losses.append(loss | ({"weight": weight} if weight != 1.0 else {}))
    t.put("algorithm.loss", losses, "loss_type", "loss_weights", "beta", "label_smoothing", "discopop_tau")
    if smoothing and not named.keys() & SMOOTHED:
        t.nearly(
            f"label_smoothing={smoothing:g}: TRL's {', '.join(named)} does not read it (with sigmoid earlier versions "
            "did, which is cDPO: algorithm.loss.label_smoothing)"
        )
    if named.keys() & {"aot", "aot_unpaired"}:
        t.differ("ranks of aot", "within a forward pass of one process", "within the optimizer step")
    score: dict[str, Any] = {"type": "log_ratio", "divergence": divergence}
    score |= {"alpha": t.number("f_alpha_divergence_coef")} if divergence == "alpha_divergence" else {}
    score |= {} if t("ld_alpha") is None else {"ld_alpha": t.number("ld_alpha")}
    score |= {"length_normalised": True} if named.keys() & PER_TOKEN else {}
    t.put("algorithm.score", score, "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha")
    if likelihood:
        t.put("algorithm.nll", {"coefficient": likelihood}, "loss_type", "rpo_alpha")
        t.differ("mean of the likelihood", "over the tokens of a forward pass", "over those of the optimizer step")
