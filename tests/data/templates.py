# ruff: noqa: E501
"""The chat templates of published families, shortened to what decides how a conversation is written."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: " + date_string + "\n\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {%- set first = messages[0].content|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, respond with a call.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + "\n\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

_HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}{%- for tool in tools %}{{- "\n" + tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
DEFAULT{%- endif %}"""
_RESULT = """
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

QWEN25 = (
    _HERMES.replace("DEFAULT", "{%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}")
    + """
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""
    + _RESULT
    + """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

QWEN3 = (
    _HERMES.replace("DEFAULT", "")
    + """
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""
    + _RESULT
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)

QWEN3_THINKING = (
    QWEN3.partition("\n    {%- if enable_thinking")[0].replace(
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}",
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n<think>\n' }}",
    )
    + "\n{%- endif %}"
)

GEMMA3 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set first = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif %}
    {%- set role = "model" if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + (first if loop.first else "") }}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- else %}{%- for item in message.content %}{{ item.text | trim }}{%- endfor %}{%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"""

PHI4 = """
{%- for message in messages %}
    {%- if message.role == 'system' and message.tools %}{{- '<|system|>' + message.content + '<|tool|>' + message.tools + '<|/tool|><|end|>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}"""

_DEEPSEEK = """{{ bos_token }}{%- set ns = namespace(is_tool=false) %}
{%- for message in messages %}{%- if message.role == 'system' %}{{ message.content }}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{{ '<|User|>' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set ns.is_tool = false %}
        {{- '<|Assistant|>' + ('' if message.content is none else message.content) + '<|calls_begin|>' }}
        {%- for call in message.tool_calls %}{{ '<|call_begin|>' + call.type + '<|sep|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```<|call_end|>' }}{%- endfor %}
        {{- '<|calls_end|><|end_of_sentence|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- ('<|outputs_end|>' if ns.is_tool else '<|Assistant|>') + content + '<|end_of_sentence|>' }}
        {%- set ns.is_tool = false %}
    {%- endif %}
    {%- if message.role == 'tool' %}{{ ('' if ns.is_tool else '<|outputs_begin|>') + '<|output_begin|>' + message.content + '<|output_end|>' }}{%- set ns.is_tool = true %}{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<|outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>OPENING' }}{%- endif %}"""
DEEPSEEK = _DEEPSEEK.replace("OPENING", "")
R1_DISTILL = _DEEPSEEK.replace("OPENING", "<think>\n")

SMOLLM3 = """
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful AI assistant named SmolLM.' %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + mode + '\n\n' + system }}
{%- if tools %}{{- '\n\n### Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + tool | string }}{%- endfor %}{{- '\n</tools>' }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {%- if mode == '/think' %}{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') }}{%- endif %}"""

GLM = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\n# Tools\n<tools>' }}{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}{{ '\n</tools>' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|user|>\n' + message.content + ('/nothink' if enable_thinking is defined and not enable_thinking else '') }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}{%- set thought = '' %}{%- set content = message.content %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}{{ '\n<think>' + thought.strip() + '</think>' }}{%- else %}{{ '\n<think></think>' }}{%- endif %}
        {%- if content.strip() %}{{ '\n' + content.strip() }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}{%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|observation|>' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- elif message.role == 'system' %}{{ '<|system|>\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + ('\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}{%- endif %}"""

GPT_OSS = """
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now("%Y-%m-%d") + '\n\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}{%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + ('# Instructions\n\n' + developer + '\n\n' if developer else '') }}
    {%- if tools %}{{- '# Tools\n\nnamespace functions {\n' }}{%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: ' + (tool.function.parameters or {}) | tojson + ') => any;\n' }}{%- endfor %}{{- '}' }}{%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}{%- endif %}
        {%- set later = namespace(final=false) %}
        {%- for other in loop_messages[loop.index:] %}{%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}{%- endfor %}
        {%- if message.content and not later.final %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- elif message.thinking and not later.final %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
        {%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

OLMO = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ '<|system|>\n' + message.content + '\n' }}
    {%- elif message.role == 'user' %}{{ '<|user|>\n' + message.content + '\n' }}
    {%- elif message.role == 'assistant' %}{{ '<|assistant|>\n' + message.content + eos_token + ('' if loop.last else '\n') }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}
{%- endfor %}"""

ALPACA = """
{%- for message in messages %}{{- ('### Response:\n' if message.role == 'assistant' else '### Instruction:\n') + message.content + '\n\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}"""


class Family(NamedTuple):
    """A chat template with its special tokens."""

    template: str
    end: str | None
    """The token that the template writes behind the assistant's last words."""
    eos: str
    """The tokenizer's."""
    special: tuple[str, ...] = ()
    """Other special tokens."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    stops: tuple[str, ...] = ()
    """In generation_config.json, where they are others than the tokenizer's."""


_IM = ("<|im_start|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
FAMILIES = {
    "llama3": Family(LLAMA3, "<|eot_id|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")),
    "qwen2.5": Family(QWEN25, "<|im_end|>", "<|im_end|>", _IM, _TAGS[:4]),
    "qwen-base": Family(QWEN25, "<|im_end|>", "<|endoftext|>", ("<|im_start|>", "<|im_end|>"), _TAGS[:4]),
    "qwen3": Family(QWEN3, "<|im_end|>", "<|im_end|>", _IM, _TAGS),
    "qwen3-thinking": Family(QWEN3_THINKING, "<|im_end|>", "<|im_end|>", _IM, _TAGS),
    "gemma3": Family(GEMMA3, "<end_of_turn>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), (), ("<eos>", "<end_of_turn>")),
    "phi4": Family(PHI4, "<|end|>", "<|endoftext|>", ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>")),
    "mistral": Family(MISTRAL, "</s>", "</s>", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "deepseek": Family(DEEPSEEK, "<|end_of_sentence|>", "<|end_of_sentence|>", ("<|User|>", "<|Assistant|>"), ("<|calls_begin|>", "<|calls_end|>", "<|call_begin|>", "<|call_end|>", "<|sep|>", "<|outputs_begin|>", "<|outputs_end|>", "<|output_begin|>", "<|output_end|>")),
    "r1-distill": Family(R1_DISTILL, "<|end_of_sentence|>", "<|end_of_sentence|>", ("<|User|>", "<|Assistant|>"), ("<think>", "</think>", "<|calls_begin|>", "<|calls_end|>", "<|call_begin|>", "<|call_end|>", "<|sep|>", "<|outputs_begin|>", "<|outputs_end|>", "<|output_begin|>", "<|output_end|>")),
    "smollm3": Family(SMOLLM3, "<|im_end|>", "<|im_end|>", ("<|im_start|>",), ("<think>", "</think>")),
    "glm": Family(GLM, None, "<|endoftext|>", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gpt-oss": Family(GPT_OSS, "<|return|>", "<|return|>", ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|endoftext|>"), (), ("<|return|>", "<|endoftext|>", "<|call|>")),
    "olmo": Family(OLMO, "<|endoftext|>", "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|system|>")),
    "alpaca": Family(ALPACA, None, "</s>"),
    "chatml": Family(CHATML, "<|im_end|>", "<|im_end|>", ("<|im_start|>",)),
}  # fmt: skip
"""Names of model families -> their templates."""


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, a token for each ASCII character, with a family's template and special tokens."""
    family = FAMILIES[name]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<pad>", "<s>", *dict.fromkeys((family.eos, *family.special, *((family.end,) if family.end else ())))]
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(family.added))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=family.eos,
        extra_special_tokens=[token for token in special[2:] if token != family.eos],
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
