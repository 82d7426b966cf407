"""Arguments of transformers before version 5, for scripts that were written for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOADERS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
BITS = ("load_in_4bit", "load_in_8bit")


@contextmanager
def accepted() -> Iterator[None]:
    """Let `TrainingArguments` and the loaders of models take older arguments within the block."""
    import transformers

    from atomrl.trl.configs import PlainArguments

    loaders: list[Any] = [getattr(transformers, name) for name in LOADERS]
    before = transformers.TrainingArguments, [loader.from_pretrained for loader in loaders]
    transformers.TrainingArguments = PlainArguments  # type: ignore[misc]
    for loader in loaders:
        loader.from_pretrained = _with_older(loader.from_pretrained)
    try:
        yield
    finally:
        transformers.TrainingArguments = before[0]  # type: ignore[misc]
        for loader, load in zip(loaders, before[1], strict=True):
            loader.from_pretrained = load


def _with_older(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: load(*given, **loading(named))


def loading(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` with today's names.

    Example:
        >>> loading({"use_auth_token": "x", "use_flash_attention_2": True})
        {'token': 'x', 'attn_implementation': 'flash_attention_2'}
    """
    today = {name: value for name, value in arguments.items() if name not in OLDER}
    if arguments.get("use_auth_token") is not None:
        today.setdefault("token", arguments["use_auth_token"])
    if arguments.get("use_flash_attention_2"):
        today.setdefault("attn_implementation", "flash_attention_2")
    if bits := {name: True for name in BITS if arguments.get(name)}:
        from transformers import BitsAndBytesConfig

        if today.get("quantization_config") is None:
            today["quantization_config"] = BitsAndBytesConfig(**bits)
    return today


OLDER = ("use_auth_token", "use_flash_attention_2", *BITS)
"""Arguments of `from_pretrained` that transformers 5 does not have."""
