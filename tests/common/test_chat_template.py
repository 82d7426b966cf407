"""How a turn ends, what a prompt has begun of one, and which variables a template reads: of ten families."""

import json
import time
from datetime import datetime

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from atomrl.common.chat_template import (
    THOUGHT_TAG,
    check_kwargs,
    end_of_turn,
    set_template,
    stop_tokens,
    thought_opening,
    turn_marks,
)
from atomrl.config import ConfigError, DataConfig, RewardConfig, load_config
from atomrl.data.conversations import continued
from atomrl.data.files import DataError
from atomrl.data.processor import DataProcessor
from atomrl.engines.fake import FakeEngine
from atomrl.engines.generation import generate
from atomrl.engines.stop_rule import eos_token_ids
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_policy, load_tokenizer, save_model
from atomrl.models.tokenizer import make_tokenizer
from atomrl.pool.codec import decode, encode
from atomrl.rewards.compute import build_rewards
from atomrl.tracking.resuming import config_changes, stopping_changes
from atomrl.trainer import prepare_run
from atomrl.trainer.build import build_engine, started
from atomrl.types import Problem, Prompt, SamplingParams
from tests import templates
from tests.data.templates import ALPACA, CHATML, FAMILIES, PHI4, family_tokenizer
from tests.tiny import make_tiny_model

REPLY = "<|im_start|>assistant\n"


def prompt_of(processor, prompt, place="d.jsonl:1"):
    (made,) = processor.to_prompts([("p", Problem(problem_id=place, prompt=prompt, ground_truth="4"))])
    return made, processor.tokenizer.decode(made.token_ids)


def processor_of(name, **data):
    return DataProcessor(family_tokenizer(name), DataConfig(train="-", **data))


# ---- Ends ----


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_is_what_the_template_writes(name):
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == (family.end or family.eos)


@pytest.mark.parametrize("kind", templates.TOKENIZERS)
@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_it_is_the_same_for_every_kind_of_tokenizer(kind, name):
    tokenizer = templates.make_tokenizer(kind, name)
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == templates.TEMPLATES[name][1]


TWO_ENDS = (
    "{% for m in messages %}{{ '<|user|>' + m.content if m.role == 'user' else '<|system|>' + m.content + '<|end|>' + "
    "eos_token }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ '<|user|>' }}{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
)
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PHI4
ALWAYS_OPEN = CHATML.replace("im_start", "user").replace("im_end", "end").replace("add_generation_prompt", "true")


@pytest.mark.parametrize("template, end", [
    (TWO_ENDS, "<|endoftext|>"), (PARTS, "<|end|>"), (SYSTEM_FIRST, "<|end|>"), (ALWAYS_OPEN, "<|end|>"),
    (ALPACA, "<|endoftext|>"), (None, "<|endoftext|>"), ("{{ raise_exception('never') }}", "<|endoftext|>"),
])  # fmt: skip
def test_the_end_of_templates_of_other_shapes(template, end):
    tokenizer = family_tokenizer("phi4")
    tokenizer.chat_template = template
    try:
        assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == end
    finally:
        tokenizer.chat_template = PHI4


def silent_model(folder, tokenizer, generation_eos):
    """A model whose logits are all equal, so that it always writes token 0 where it is greedy."""
    make_tiny_model(folder, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=1, bos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    model.generation_config = GenerationConfig(eos_token_id=generation_eos, pad_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ending(tmp_path):
    """A base model that writes the end of a turn, which its tokenizer and generation config do not name."""
    tokenizer = load_tokenizer(make_tiny_model(tmp_path / "names"))
    assert tokenizer.convert_ids_to_tokens(0) == "<|endoftext|>"
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    return silent_model(tmp_path / "base", tokenizer, generation_eos=2), tokenizer


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_engines_stop_at_the_end_that_training_teaches(ending, engine):
    folder, tokenizer = ending
    tree = {"run_name": "r", "model": {"path": str(folder)}, "data": {"train": "d"}, "rollout": {"engine": engine}}
    drawn = build_engine(load_config(tree), str(folder), tokenizer)
    prompt = Prompt(prompt_id="a", problem=Problem(problem_id="a", prompt="", ground_truth=""), token_ids=(9, 9))
    (trajectory,) = generate(drawn, [prompt], SamplingParams(max_completion_tokens=5, temperature=0))
    drawn.close()
    assert (trajectory.response_tokens, trajectory.finish_reason, trajectory.text) == (1, "stop", "")


def test_a_folder_that_is_saved_stops_there_in_transformers(ending, tmp_path):
    folder, tokenizer = ending
    save_model(load_policy(folder, device="cpu"), tokenizer, tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.generation_config.eos_token_id == [2, 1, 0] and model.generation_config.pad_token_id == 1
    assert model.generate(torch.tensor([[9, 9]]), max_new_tokens=5, do_sample=False).shape[1] == 3


def test_a_folder_without_generation_config_gets_one_where_it_is_needed(ending, tmp_path):
    folder, tokenizer = ending
    (folder / "generation_config.json").unlink()
    save_model(load_policy(folder, device="cpu"), tokenizer, tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [1, 2, 0]
    tokenizer.chat_template = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    save_model(load_policy(folder, device="cpu"), tokenizer, tmp_path / "plain")
    assert not (tmp_path / "plain" / "generation_config.json").exists()


class Named:
    def __init__(self, eos):
        self.eos_token_id = eos


@pytest.mark.parametrize("name", FAMILIES)
def test_stops_are_all_that_are_named_once(name, tmp_path):
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.stops or (family.eos,)]
    GenerationConfig(eos_token_id=ids).save_pretrained(tmp_path)
    letter = tokenizer.convert_tokens_to_ids("2")  # a class of configs has a default that is any token here
    stops = tokenizer.convert_ids_to_tokens(list(eos_token_ids(str(tmp_path), Named(letter), tokenizer)))
    assert sorted(stops) == sorted(
        {*(family.stops or (family.eos,)), family.eos, *([family.end] if family.end else [])}
    )
    assert stop_tokens(tokenizer, Named(letter))[0] == letter, "where there is no generation config, the config counts"


# ---- What prompts open, and rewards read ----


@pytest.mark.parametrize("text, opening", [
    ("2+2=\nAssistant: Let me see.\n<think>", "<think>"), ("<think>\n", "<think>\n"), ("a<reasoning> ", "<reasoning> "),
    ("a<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"), ("a<thinking></thinking>", "<thinking></thinking>"),
    ("a[THINK]", "[THINK]"), ("<|begin_of_thought|>\n\n", "<|begin_of_thought|>\n\n"), ("<seed:think>", "<seed:think>"),
    ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|><|END_THINKING|>"), ("<|END_THINKING|>", ""),
    ("a </think>", ""), ("<rethink>", ""), ("<thinker>", ""), ("Think in <think> tags", ""),
    ("<think>over</think>", ""), ("<think> and </think>.", ""), ("", ""),
])  # fmt: skip
def test_what_a_text_opens_at_its_end(text, opening):
    assert thought_opening(text) == opening


ASKED, PREFILLED = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "<think>\nWell,"}


@pytest.mark.parametrize("name, data, prompt, opening", [
    ("qwen3", {}, "2+2=", ""),
    ("qwen3-thinking", {}, "2+2=", "<think>\n"),
    ("r1-distill", {}, (ASKED,), "<think>\n"),
    ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, "2+2=", "<think>\n\n</think>\n\n"),
    ("smollm3", {"chat_template_kwargs": {"enable_thinking": False}}, (ASKED,), "<think>\n\n</think>\n"),
    ("glm", {"chat_template_kwargs": {"enable_thinking": False}}, "2+2=", "<think></think>"),
    ("chatml", {}, (ASKED, PREFILLED), "<think>\nWell,"),
    ("chatml", {"chat_template": "none"}, f"<|im_start|>user\n2+2=<|im_end|>\n{REPLY}Step by step.\n<think>",
     "Step by step.\n<think>"),
    ("alpaca", {"chat_template": "none"}, "2+2=\n<think>\n", "<think>\n"),
])  # fmt: skip
def test_what_a_prompt_has_of_the_turn(name, data, prompt, opening):
    encoded, text = prompt_of(processor_of(name, **data), prompt)
    assert encoded.opening == opening and text.endswith(opening)


WRITTEN = "2 and 2\n</think>\n\n<answer>4</answer>"


def drawn_by(name, prompt, text, **data):
    processor = processor_of(name, **data)
    tokenizer = processor.tokenizer
    engine = FakeEngine(lambda tokens, index: tokenizer.encode(text, add_special_tokens=False), tokenizer)
    made, _ = prompt_of(processor, prompt)
    (item,) = generate(engine, [made], SamplingParams())
    return item


@pytest.mark.parametrize("function", ["strict_math", "strict_format"])
def test_rewards_read_what_the_prompt_has_opened(function):
    rewards = build_rewards(RewardConfig(functions=[{"function": function}]))
    item = drawn_by("qwen3-thinking", "2+2=", WRITTEN + "<|im_end|>")
    assert rewards([item])[0].reward == 1.0 and item.text == WRITTEN
    assert rewards([drawn_by("qwen3", "2+2=", WRITTEN)])[0].reward == 0.0, "where nothing is open it has to be written"
    assert decode(encode([item]).payload)[0].turn == "<think>\n" + WRITTEN, "a pool keeps it"
    rewards.close()


@pytest.mark.parametrize("text, seen", [
    ("<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
     "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4"),
    ("<|call|>4", "<|call|>4"), ("<|return|>", ""), ("4<|return|><|return|>", "4<|return|>"), ("", ""),
])  # fmt: skip
def test_rewards_read_special_tokens_but_for_the_end(text, seen):
    texts = []
    rewards = build_rewards(
        RewardConfig(functions=[{"function": "mine"}]),
        local={"mine": lambda prompts, completions, **columns: texts.extend(completions) or [1.0]},
    )
    rewards([drawn_by("gpt-oss", "2+2=", text)])
    assert texts == [seen]


def test_a_special_token_that_completes_a_stop_string_is_text():
    tokenizer = family_tokenizer("phi4")
    engine = FakeEngine(lambda tokens, index: tokenizer.encode("4<|/tool|>", add_special_tokens=False), tokenizer)
    prompt = Prompt(prompt_id="a", problem=Problem(problem_id="a", prompt="", ground_truth=""), token_ids=(9,))
    rule = engine.rule_of(SamplingParams())
    assert generate(engine, [prompt], SamplingParams())[0].text == "4"
    kept = type(rule)(SamplingParams(stop=("<|/tool|>",)), (), tokenizer, len(tokenizer), torch.device("cpu"))
    tokens = tokenizer.encode("4<|/tool|>", add_special_tokens=False)
    assert kept.written(tokens, True) == tokens


# ---- Variables ----


def test_variables_of_the_template_reach_it():
    assert (
        "Reasoning: low" in prompt_of(processor_of("gpt-oss", chat_template_kwargs={"reasoning_effort": "low"}), "a")[1]
    )
    dated = processor_of("llama3", chat_template_kwargs={"date_string": "26 Jul 2024"})
    assert "Today Date: 26 Jul 2024\n" in prompt_of(dated, "a")[1]


def test_a_variable_that_the_template_does_not_read_is_refused():
    with pytest.raises(DataError, match=r"'enable_thinkng'.*'enable_thinking'"):
        processor_of("qwen3", chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(DataError, match="'enable_thinking'; it has none"):
        processor_of("chatml", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(DataError, match="chat_template=none"):
        processor_of("qwen3", chat_template="none", chat_template_kwargs={"enable_thinking": False})
    bare = family_tokenizer("chatml")
    bare.chat_template = None
    try:
        with pytest.raises(ValueError, match="no chat template"):
            check_kwargs(bare, {"enable_thinking": False})
    finally:
        bare.chat_template = CHATML


@pytest.mark.parametrize("key", ["tools", "add_generation_prompt", "continue_final_message", "tokenize", "messages"])
def test_variables_that_atomrl_sets_are_refused(key):
    tree = {"run_name": "a", "model": {"path": "m"}, "data": {"train": "d", "chat_template_kwargs": {key: True}}}
    with pytest.raises(ConfigError, match=f"chat_template_kwargs.*'{key}'"):
        load_config(tree)


def test_other_variables_are_another_run():
    tree = {"run_name": "a", "model": {"path": "m"}, "data": {"train": "d"}}
    now = load_config({**tree, "data": {"train": "d", "chat_template_kwargs": {"enable_thinking": False}}})
    assert stopping_changes(config_changes(load_config(tree).to_tree(), now), now)


# ---- The date ----


@pytest.mark.parametrize("name, day", [
    ("llama3", "26 Nov 2026"), ("smollm3", "26 November 2026"), ("gpt-oss", "2026-11-26"),
])  # fmt: skip
def test_a_template_that_prints_the_date_prints_that_of_the_start(name, day):
    tokenizer, config = family_tokenizer(name), DataConfig(train="-")
    _, text = prompt_of(DataProcessor(tokenizer, config, today=datetime(2026, 11, 26)), "a")
    assert day in text


def test_a_run_that_is_resumed_has_the_date_of_its_start(tmp_path):
    tree = {"run_name": "a", "output_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "d"}}
    config, now = load_config(tree), datetime.now()
    assert started(config) >= now
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "env.json").write_text(json.dumps({"time": "2024-05-06T12:00:00+00:00"}))
    assert started(config) >= now, "it did not come to a step, and begins now"
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert started(config).date() == datetime(2024, 5, 6).date()
    assert started(config).strftime("%Z") == datetime.now().strftime("%Z"), "as what is not resumed writes it"


# ---- Prompts that carry their template ----


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_carries_its_template_is_taken_as_it_is(name, caplog):
    processor = processor_of(name, max_prompt_tokens=9999)
    once, text = prompt_of(processor, "2+2=")
    assert not caplog.records
    twice, _ = prompt_of(processor, text, "d.jsonl:7")
    assert (twice.token_ids, twice.opening) == (once.token_ids, once.opening)
    (record,) = caplog.records
    assert (
        "d.jsonl:7: the prompt already contains the chat template" in record.message
        and "chat_template=none" in record.message
    )
    begun, _ = prompt_of(processor, f"{text}It is")
    assert begun.token_ids[: len(once.token_ids)] == once.token_ids and begun.opening == f"{once.opening}It is"


def test_control_tokens_of_a_template_are_refused_beside_it():
    carried = f"<|im_start|>user\n2+2=<|im_end|>\n{REPLY}"
    with pytest.raises(DataError, match=r"d.jsonl:1:.*data.system_prompt"):
        prompt_of(processor_of("chatml", system_prompt="Be brief."), carried)
    with pytest.raises(DataError, match=r"data.chat_template_kwargs"):
        prompt_of(processor_of("qwen3", chat_template_kwargs={"enable_thinking": False}), carried)


@pytest.mark.parametrize("prompt", [
    "What does <|im_end|> mean?", ({"role": "user", "content": "a<|im_end|>"},),
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
])  # fmt: skip
def test_tokens_of_the_template_in_a_prompt_are_warned_of_once(prompt, caplog):
    processor = processor_of("chatml")
    for place in ("d.jsonl:3", "d.jsonl:4"):
        prompt_of(processor, prompt, place)
    (record,) = caplog.records
    assert "d.jsonl:3" in record.message and "data.prompt_field" in record.message


def test_tags_of_thoughts_are_no_tokens_of_the_template(caplog):
    prompt_of(processor_of("qwen3"), "Write your thoughts between <think> and </think>.")
    assert not caplog.records and "<think>" not in turn_marks(family_tokenizer("r1-distill")).special


def test_a_system_message_that_the_template_leaves_out_is_refused():
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    try:
        with pytest.raises(DataError, match=r"d\.jsonl:1.*system prompt"):
            prompt_of(processor_of("chatml"), ({"role": "system", "content": "Be brief."}, ASKED))
    finally:
        tokenizer.chat_template = CHATML


def test_openings_are_found_in_linear_time():
    started = time.process_time()
    for text in ("<" + "a_" * 50_000, "<" + "a_" * 50_000 + "think", "<think>" * 20_000, "<think>" + " " * 10**5 + "x"):
        assert thought_opening(text) == "" or text.endswith("<think>")
        THOUGHT_TAG.search(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("prompt", "completion", "rest"),
    [
        ("a [THINK]", "so[/THINK]4", "so[/THINK]4"),
        ("a <|begin_of_thought|>\n", "<|begin_of_thought|>\nso<|end_of_thought|>4", "so<|end_of_thought|>4"),
        ("a <seed:think>", "4", None),
    ],
)
def test_thoughts_in_other_tags_are_gone_on_with(prompt, completion, rest):
    assert continued(thought_opening(prompt), completion) == rest


# ---- Named ----


def sft_config(tmp_path, **data):
    """A model whose tokenizer has no template, and a row of messages."""
    folder, tokenizer = tmp_path / "model", family_tokenizer("qwen2.5")
    tokenizer.chat_template = None
    save_model(new_gpt(len(tokenizer), layers=1, hidden=32, heads=1), tokenizer, folder)
    turns = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    tree = {
        "run_name": "r", "output_dir": str(tmp_path / "runs"), "sft": {}, "model": {"path": str(folder)},
        "data": {"train": str(tmp_path / "rows.jsonl"), **data}, "train": {"steps": 1, "rows_per_update": 1},
    }  # fmt: skip
    return load_config(tree)


@pytest.mark.parametrize("named", ["chatml", "mine.jinja"])
def test_a_tokenizer_without_a_template_takes_one_by_name_and_keeps_it(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"data\.chat_template=chatml"):
        prepare_run(sft_config(tmp_path))
    run = prepare_run(sft_config(tmp_path, chat_template=named))
    run.execute()
    written = load_tokenizer(tmp_path / "runs" / "r" / "model")
    text = written.apply_chat_template([{"role": "user", "content": "2+2"}], tokenize=False, add_generation_prompt=True)
    assert (
        text
        == {"chatml": f"<|im_start|>user\n2+2<|im_end|>\n{REPLY}", "mine.jinja": "user: 2+2<|im_end|>assistant: "}[
            named
        ]
    )


def test_a_template_that_cannot_be_named_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jinja"):
        prepare_run(sft_config(tmp_path, chat_template="absent.jinja"))
    with pytest.raises(ConfigError, match="chat_template"):
        sft_config(tmp_path, chat_template="llama")
    with pytest.raises(ValueError, match="im_start"):
        set_template(make_tokenizer(), "chatml")
