"""Compare the losses of small trainings with those of TRL itself.

    pip install --target TRL --no-deps trl==1.16.0
    python tools/trl_losses.py TRL [--only TEXT] [--out docs/development/trl_losses.md]

Each case is a training of three steps, each step on all rows, so the order of the rows does not matter. This script
runs twice, unchanged: with TRL, and by `atomrl run`. Rows, arguments and the initial model are the same: a random Qwen2
of two layers in float32. Equal losses of all three steps mean that the same tokens were trained by the same loss,
optimizer and schedule.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SAME = 1e-4
"""Largest relative difference of a loss that counts as rounding."""
PROMPTS = "What is 1+1?", "Say hi", "Colour of the sky?", "Name a fruit please"
GOOD = " It is two.", " hi!", " blue", " an apple"
BAD = " three", " go away now", " it is green, I think", " stone"
TURN = "{{- '<|im_start|>' + m.role + '\\n' }}"
OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
MARKED = (
    "{%- for m in messages %}" + TURN + "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}"
    "{% endgeneration %}{{- '\\n' }}{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" + OPEN
)
"""A template that marks what `assistant_only_loss` trains."""
THINKING = (
    "{%- for m in messages %}"
    + TURN
    + "{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}" + OPEN
)
"""A template that writes an empty thought into the last turn, as Qwen 3's."""


def user(text: str, answer: str = "") -> list[dict[str, str]]:
    """Return a question, and its answer if there is one, as messages."""
    return [{"role": "user", "content": text}, *(assistant(answer) if answer else [])]


def assistant(text: str) -> list[dict[str, str]]:
    """Return an answer as messages."""
    return [{"role": "assistant", "content": text}]


TRIPLES = list(zip(PROMPTS, GOOD, BAD, strict=True))
TEXT = [{"text": prompt + good} for prompt, good, _ in TRIPLES]
PAIRS = [{"prompt": prompt, "completion": good} for prompt, good, _ in TRIPLES]
ASKED = [{"prompt": user(prompt), "completion": assistant(good)} for prompt, good, _ in TRIPLES]
LONG = [{"prompt": user(p), "completion": assistant(good) + user("And?", bad)} for p, good, bad in TRIPLES]
MESSAGES = [{"messages": user(prompt, good) + user("And?", bad)} for prompt, good, bad in TRIPLES]
PREFERRED = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in TRIPLES]
CHATS = [{"prompt": user(p), "chosen": assistant(good), "rejected": assistant(bad)} for p, good, bad in TRIPLES]
IMPLICIT = [{"chosen": user(prompt, good), "rejected": user(prompt, bad)} for prompt, good, bad in TRIPLES]
WHOLE = [{"chosen": prompt + good, "rejected": prompt + bad} for prompt, good, bad in TRIPLES]
JUDGED = [{**row, "label": bool(number % 2)} for number, row in enumerate(PAIRS)]
JUDGED_CHATS = [{**row, "label": bool(number % 2)} for number, row in enumerate(ASKED)]
LOSSES = (
    "ipo", "hinge", "robust", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
)  # fmt: skip

Case = tuple[str, list[dict[str, Any]], Mapping[str, Any]]
"""Trainer, rows and arguments; `template`, `bos` and `lora` are read here, all others are of the config."""
CASES: Mapping[str, Case] = {
    "SFT, text": ("SFT", TEXT, {}),
    "SFT, text, truncated": ("SFT", TEXT, {"max_length": 8}),
    "SFT, text, a token at the beginning": ("SFT", TEXT, {"bos": True}),
    "SFT, text, weight decay, cosine, warm-up": ("SFT", TEXT, {
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1,
    }),
    "SFT, text, gradient accumulation": ("SFT", TEXT, {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
    }),
    "SFT, text, packed": ("SFT", TEXT * 2, {"packing": True, "max_length": 256}),
    "SFT, text, packed, cut anywhere": ("SFT", TEXT * 2, {
        "packing": True, "packing_strategy": "wrapped", "max_length": 64, "per_device_train_batch_size": 3,
    }),
    "SFT, prompt and completion": ("SFT", PAIRS, {}),
    "SFT, prompt and completion, all trained": ("SFT", PAIRS, {"completion_only_loss": False}),
    "SFT, prompt and completion, eos_token": ("SFT", PAIRS, {"eos_token": "<|endoftext|>"}),
    "SFT, prompt and completion of messages": ("SFT", ASKED, {}),
    "SFT, prompt and completion of messages, an empty thought": ("SFT", ASKED, {"template": THINKING}),
    "SFT, a completion of several turns": ("SFT", LONG, {}),
    "SFT, messages": ("SFT", MESSAGES, {}),
    "SFT, messages, assistant_only_loss": ("SFT", MESSAGES, {"template": MARKED, "assistant_only_loss": True}),
    "SFT, messages, LoRA": ("SFT", MESSAGES, {"lora": True}),
    "DPO, text": ("DPO", PREFERRED, {}),
    "DPO, text, a token at the beginning": ("DPO", PREFERRED, {"bos": True}),
    "DPO, messages": ("DPO", CHATS, {}),
    "DPO, messages, an empty thought": ("DPO", CHATS, {"template": THINKING}),
    "DPO, whole conversations": ("DPO", IMPLICIT, {}),
    "DPO, messages, LoRA": ("DPO", CHATS, {"lora": True}),
    "DPO, label_smoothing": ("DPO", PREFERRED, {"label_smoothing": 0.1}),
    "DPO, sigmoid and sft": ("DPO", PREFERRED, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "DPO, js_divergence": ("DPO", PREFERRED, {"f_divergence_type": "js_divergence"}),
    "DPO, ld_alpha": ("DPO", PREFERRED, {"ld_alpha": 0.5}),
    **{f"DPO, {name}": ("DPO", PREFERRED, {"loss_type": [name]}) for name in LOSSES},
    "KTO, text": ("KTO", JUDGED, {}),
    "KTO, messages": ("KTO", JUDGED_CHATS, {}),
    "KTO, apo_zero_unpaired, weights": ("KTO", JUDGED, {"loss_type": "apo_zero_unpaired", "desirable_weight": 1.5}),
    "CPO, text": ("CPO", PREFERRED, {}),
    "SimPO, text": ("CPO", PREFERRED, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "reward model, text": ("Reward", WHOLE, {}),
    "reward model, prompt and text": ("Reward", PREFERRED, {}),
    "reward model, messages": ("Reward", CHATS, {}),
    "reward model, whole conversations, centred": ("Reward", IMPLICIT, {"center_rewards_coefficient": 0.1}),
}  # fmt: skip


def make_models(folder: Path) -> None:
    """Save the policy and a reward model that both libraries start from."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl_scripts import make_model

    policy = make_model(folder / "policy")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder / "reward")


def tokenizer_of(path: Path, template: str | None, bos: bool) -> Any:
    """Load the tokenizer, with another template or with a token that it writes at the beginning of a text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template or tokenizer.chat_template
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<think>"})
        begin = [("<think>", tokenizer.convert_tokens_to_ids("<think>"))]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<think> $A", pair="<think> $A $B", special_tokens=begin
        )
    return tokenizer


def classes(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a trainer and its config, of `trl` or of its experimental part."""
    trl = importlib.import_module("trl")
    if not hasattr(trl, f"{kind}Trainer"):
        trl = importlib.import_module(f"trl.experimental.{kind.lower()}")
    return getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")


def losses(case: Case, models: Path, out: Path) -> list[float]:
    """Train and return the losses of the three steps."""
    from datasets import Dataset
    from peft import LoraConfig

    kind, rows, given = case
    arguments = {
        "output_dir": str(out), "max_steps": 3, "per_device_train_batch_size": len(rows), "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "seed": 1, **given,
    }  # fmt: skip
    template, bos, lora = (arguments.pop(name, None) for name in ("template", "bos", "lora"))
    trainer, config = classes(kind)
    model = models / ("reward" if kind == "Reward" else "policy")
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]) if lora else None
    training = trainer(
        model=str(model), args=config(**arguments), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(model, template, bool(bos)), peft_config=adapters,
    )  # fmt: skip
    training.train()
    return [row["loss"] for row in training.state.log_history if "loss" in row]


def train_all(names: list[str], models: Path, out: Path) -> None:
    """Train the cases, and write their losses, or the error of each."""
    results: dict[str, Any] = {}
    for number, name in enumerate(names):
        try:
            results[name] = losses(CASES[name], models, out / str(number))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    (out / "losses.json").write_text(json.dumps(results))


def compare(library: Path, names: list[str], out: Path) -> None:
    """Run the cases with both libraries, and write the table."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_models(folder)
        both = []
        here = Path(__file__).resolve()
        for name, path, start in (("trl", library.resolve(), []), ("atomrl", here.parents[1], ["-m", "atomrl", "run"])):
            (folder / name).mkdir()
            paths = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, *start, str(here), "--train", str(folder), name, *names]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}, check=True)
            both.append(json.loads((folder / name / "losses.json").read_text()))
    lines = [
        "# Losses beside TRL's", "",
        "Written by `tools/trl_losses.py`: the losses of three steps of the same script with TRL 1.16 and by",
        "`atomrl run`, on the same rows and initial weights, in float32 on a CPU. Two differ: the first update of a",
        "warm-up has the learning rate 0 in TRL, and KTO's mismatched pairs depend on the order of the rows.", "",
        "| training | TRL | `atomrl run` | largest difference |", "|---|---|---|---|",
    ]  # fmt: skip
    for name in names:
        theirs, ours = both[0][name], both[1][name]
        if isinstance(theirs, str) or isinstance(ours, str):
            lines.append(f"| {name} | {theirs} | {ours} | |")
            continue
        most = max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(theirs, ours, strict=True))
        shown = [", ".join(f"{loss:.5f}" for loss in one) for one in (theirs, ours)]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {'rounding' if most < SAME else f'{most:.1e}'} |")
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Compare, or train with the library that `trl` is in this process."""
    if sys.argv[1:2] == ["--train"]:
        train_all(sys.argv[4:], Path(sys.argv[2]), Path(sys.argv[2]) / sys.argv[3])
        return
    parser = argparse.ArgumentParser(description="Compare losses with TRL's.")
    parser.add_argument("library", type=Path, metavar="TRL", help="folder in which TRL is installed")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--out", type=Path, default=Path("docs/development/trl_losses.md"))
    arguments = parser.parse_args()
    compare(arguments.library, [name for name in CASES if arguments.only in name], arguments.out)


if __name__ == "__main__":
    main()
