# ruff: noqa: E501
"""Chat templates of the shape of published families, and tokenizers of five kinds, made here."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERMES_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}{{ '\n</tools>"
    "<|im_end|>\n' }}{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + "
    "'<|im_end|>\n' }}"
)
HERMES_CALLS = (
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments|tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
HERMES_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN25 = (
    HERMES_TOOLS + "{% else %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}" + HERMES_RESULT + "{% elif not (message.role == "
    "'system' and loop.first) %}{{ '<|im_start|>' + message.role + '\n' + message.content }}" + HERMES_CALLS + "{{ "
    "'<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    HERMES_TOOLS + "{% endif %}{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}{% if message.role == 'tool' %}" + HERMES_RESULT +
    "{% elif message.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}" + HERMES_CALLS + "{{ '<|im_end|>\n' }}{% elif not (message.role == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
THINKING = QWEN3.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}",
)
XML = QWEN25.replace(
    HERMES_CALLS,
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments|items %}{{ '<parameter=' + key + '>\n' + (value if value is string "
    "else value|tojson) + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}",
)
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content|trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}{% if tools %}"
    "{{ '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n\n' }}{% for tool in tools %}{{ tool|tojson(indent=4) }}"
    "{{ '\n\n' }}{% endfor %}{{ messages[0].content|trim + '<|eot_id|>' }}{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls|length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = message.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments|tojson + '}<|eot_id|>' }}{% elif message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ message.content|tojson }}{{ '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content|trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{% if tools and (loop.last or "
    "messages[loop.index0 + 1:]|selectattr('role', 'equalto', 'user')|list|length == 0) %}"
    "{{ '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for call in message.tool_calls %}{% if call.id|length != 9 %}{{ raise_exception('ids have nine characters') }}"
    '{% endif %}{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments|tojson + '
    "', \"id\": \"' + call.id + '\"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% elif message.role == 'tool' %}"
    "{% if not (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') %}"
    "{{ raise_exception('a result follows a call') }}{% endif %}"
    '{{ \'[TOOL_RESULTS]{"content": \' + message.content|tojson + \', "call_id": "\' + message.tool_call_id + '
    "'\"}[/TOOL_RESULTS]' }}{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content|trim + "
    "' [/INST]' }}{% elif message.role == 'assistant' %}{{ ' ' + message.content|trim + ' ' + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ '<start_of_turn>' + ('model' if "
    "message.role == 'assistant' else message.role) + '\n' + message.content|trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.tool = false %}{{ '<|User|>' + message.content }}{% elif message.role == 'assistant' %}"
    "{{ '<|tool_outputs_end|>' if ns.tool else '<|Assistant|>' }}{% set ns.tool = false %}"
    "{{ message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% elif message.role == 'tool' %}"
    "{{ '' if ns.tool else '<|tool_outputs_begin|>' }}{% set ns.tool = true %}"
    "{{ '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if ns.tool %}{{ '<|tool_outputs_end|>' }}{% elif add_generation_prompt %}{{ '<|Assistant|><think>\n' "
    "}}{% endif %}"
)
NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is first') }}{% endif %}" + PHI
)

TEMPLATES = {  # template, end of turn, special tokens beside it
    "qwen2.5": (QWEN25, "<|im_end|>", ["<|im_start|>"]),
    "qwen3": (QWEN3, "<|im_end|>", ["<|im_start|>"]),
    "thinking": (THINKING, "<|im_end|>", ["<|im_start|>"]),
    "xml": (XML, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": (MISTRAL, "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "llama2": (LLAMA2, "</s>", []),
    "gemma": (GEMMA, "<end_of_turn>", ["<start_of_turn>"]),
    "phi": (PHI, "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"]),
    "zephyr": (ZEPHYR, "</s>", []),
    "deepseek": (DEEPSEEK, "<|end_of_sentence|>", ["<|User|>", "<|Assistant|>", "<|tool_outputs_begin|>"]),
    "needs_system": (NEEDS_SYSTEM, "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"]),
}
TOOL_ROLE = {"qwen2.5", "qwen3", "thinking", "xml", "llama3", "mistral", "phi", "zephyr", "deepseek", "needs_system"}
"""Templates with a place for messages of tools."""

TEXT = [
    "The model writes, something answers, and the model goes on: how far is it from here to there?\n\nNobody knows.",
    'A result is {"temperature": 21.5, "city": "Zürich"}; an error is Error: there is no tool \'x\'.',
    "<think>\nWhat now?\n</think>\n\n  def f(x):\n    return x ** 2\n", "日本語 и русский 🙂 too",
    "answer quoted two x user assistant system tool model INST Functions Tools tools tool_response ipython",
]  # fmt: skip


def _byte_level(special: list[str]) -> Tokenizer:
    """GPT-2, Qwen, Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _added(special: list[str]) -> Tokenizer:
    """Byte-level, with tokens added that are not special: `<tool_call>`, `<think>`."""
    tokenizer = _byte_level(special)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"])
    return tokenizer


def _unigram(special: list[str]) -> Tokenizer:
    """Sentencepiece, as T5 and XLNet: white space is `▁`, one is put in front, and every character has a piece."""
    characters = sorted({*"".join(TEXT), *map(chr, range(32, 127))} - {" "})
    pieces = [(token, 0.0) for token in ("<unk>", *special)]
    pieces += [("▁", -2.0), ("▁the", -4.0), ("▁model", -5.0), ("er", -5.0), ("▁a", -4.0)]
    pieces += [(character, -6.0) for character in characters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _byte_fallback(special: list[str]) -> Tokenizer:
    """Llama 2, Mistral, Gemma: a BPE over characters, a space in front of every text, unknown ones as bytes."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    plain = Tokenizer(models.BPE())
    plain.train_from_iterator([text.replace(" ", "▁") for text in TEXT[:2]], trainer)
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    import json

    model = json.loads(plain.to_str())["model"]
    for token in sorted(model["vocab"], key=model["vocab"].get):
        vocabulary.setdefault(token, len(vocabulary))
    for character in map(chr, range(33, 127)):
        vocabulary.setdefault(character, len(vocabulary))
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _words(special: list[str]) -> Tokenizer:
    """A word level: every word, space and sign of the texts is a token."""
    split = Regex(r"\w+|\s|[^\w\s]")
    words = pre_tokenizers.Split(split, "isolated")
    pieces = {piece for text in TEXT for piece, _ in words.pre_tokenize_str(text)}
    pieces |= {*map(chr, range(32, 127)), "\n"}
    vocabulary = {token: index for index, token in enumerate(["<unk>", *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZERS = {
    "byte-level": _byte_level, "added": _added, "unigram": _unigram, "byte-fallback": _byte_fallback, "words": _words,
}  # fmt: skip


@cache
def make_tokenizer(kind: str, template: str, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind with a family's template and special tokens; like many it puts `<s>` before a text."""
    text, end, others = TEMPLATES[template]
    special = ["<pad>", "<s>", end, *others]
    tokenizer = TOKENIZERS[kind](special)
    tokenizer.add_special_tokens(special)
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=end,
        extra_special_tokens=others,
        chat_template=text,
        clean_up_tokenization_spaces=False,
    )
