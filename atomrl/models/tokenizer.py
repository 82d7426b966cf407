"""A tokenizer for a model from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + ('<|end|>' if message['role'] == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token for each of `words` and for each byte, so that any text can be written; with a chat template.

    Args:
        words: texts that are one token each. They are no special tokens, so decoding keeps them.

    Returns:
        A tokenizer that is saved as a stock `tokenizer.json`. Pad is 0, end of sequence 1.

    Example:
        >>> tokenizer = make_tokenizer(["<think>"])
        >>> tokenizer.convert_ids_to_tokens(tokenizer("<think>2+2")["input_ids"])
        ['<think>', '2', '+', '2']
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    return chat_tokenizer(tokenizer)


def chat_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that has SPECIAL_TOKENS, with a chat template of them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
