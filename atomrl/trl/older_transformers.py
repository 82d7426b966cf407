"""Arguments of transformers before version 5, for scripts that were written for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BITS = ("load_in_4bit", "load_in_8bit")


@contextmanager
def accepted() -> Iterator[None]:
    """Let `TrainingArguments` and the loaders of models take older arguments within the block."""
    import transformers
    from transformers.models.auto import auto_factory

    from atomrl.trl.configs import PlainArguments

    loaders: Any = auto_factory._BaseAutoModelClass
    before = transformers.TrainingArguments, loaders.from_pretrained
    transformers.TrainingArguments = PlainArguments  # type: ignore[misc]
    loaders.from_pretrained = classmethod(
        lambda cls, *given, **named: before[1].__func__(cls, *given, **loading(named))
    )
    try:
        yield
    finally:
        transformers.TrainingArguments, loaders.from_pretrained = before  # type: ignore[misc]


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
