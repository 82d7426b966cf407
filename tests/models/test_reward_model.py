"""Reward models as rewards, against transformers' own pipeline."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from atomrl.cli.main import main
from atomrl.config import ConfigError, RewardConfig
from atomrl.models.loading import load_tokenizer
from atomrl.models.reward_model import Reader, RewardModel
from atomrl.models.scalar import load_scalar, save_scalar
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.errors import RewardError
from atomrl.types import Problem, Segment, Trajectory
from tests.data.templates import family_tokenizer
from tests.tiny import make_tiny_deberta, make_tiny_model

QUESTIONS = ["what is 2+2?", "say a word", "3*3=?"]
ANSWERS = [["it is 4.", "5"], ["a longer answer, with more words than the others", "word"], ["9", ""]]


def rollouts(prompts=QUESTIONS, answers=ANSWERS, tokenizer=None, prompt_text=str, end=()):
    """A batch; with a tokenizer its tokens are those of the texts, else they are of no tokenizer."""

    def tokens(text):
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else (9999,)

    problems = [Problem(problem_id=f"s{n}", prompt=prompt, ground_truth=None) for n, prompt in enumerate(prompts)]
    return [
        Trajectory(
            prompt_id=problem.problem_id,
            index=index,
            problem=problem,
            segments=(
                Segment(origin="prompt", token_ids=tokens(prompt_text(problem.prompt))),
                Segment(origin="model", token_ids=(*tokens(text), *end)),
            ),
            text=text,
            finish_reason="stop",
        )
        for problem, group in zip(problems, answers, strict=True)
        for index, text in enumerate(group)
    ]


def scores(path, batch, **args):
    return RewardModel(str(path), dtype="float32", **args)(batch)


def classifier(path):
    made = pipeline("text-classification", model=str(path), function_to_apply="none", top_k=None)
    return lambda text, **options: made([text], **options)[0][0]["score"]


@pytest.fixture
def own(tmp_path):
    """A reward model as its run saves it, without a chat template."""
    base = make_tiny_model(tmp_path / "base", "llama")
    model, tokenizer = load_scalar(base, dtype="float32"), load_tokenizer(base)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    tokenizer.chat_template = None
    save_scalar(model, tokenizer, tmp_path / "own")
    return tmp_path / "own"


def test_pairs_are_scored_as_by_transformers_pipeline(tmp_path):
    folder = make_tiny_deberta(tmp_path)
    theirs = classifier(folder)
    expected = [theirs({"text": q, "text_pair": a}) for q, group in zip(QUESTIONS, ANSWERS, strict=True) for a in group]
    assert len({round(score, 4) for score in expected}) == 6
    assert scores(folder, rollouts()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    messages = [({"role": "user", "content": question},) for question in QUESTIONS]
    assert scores(folder, rollouts(messages)) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_chat_template_writes_the_conversation(tmp_path, own):
    tokenizer = load_tokenizer(tmp_path / "base")
    tokenizer.save_pretrained(own)
    theirs = classifier(own)
    template = AutoTokenizer.from_pretrained(own)

    def text(question, answer):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return template.apply_chat_template(turns, tokenize=False)

    pairs = [(q, a) for q, group in zip(QUESTIONS, ANSWERS, strict=True) for a in group]
    expected = [theirs(text(q, a), add_special_tokens=False) for q, a in pairs]
    assert scores(own, rollouts()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    begun = tuple(({"role": "user", "content": q}, {"role": "assistant", "content": "so "}) for q in QUESTIONS)
    expected = [theirs(text(q, "so " + a), add_special_tokens=False) for q, a in pairs]
    assert scores(own, rollouts(begun)) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_tokens_that_were_sampled_are_taken_as_they_are(own):
    tokenizer = load_tokenizer(own)
    whole = rollouts(tokenizer=tokenizer, end=(1, tokenizer.eos_token_id))  # <s> within a text: only the tokens tell
    theirs = AutoModelForSequenceClassification.from_pretrained(own)
    expected = []
    for item in whole:
        ids = torch.tensor([item.token_ids])
        expected.append(theirs(ids, attention_mask=torch.ones_like(ids)).logits.item())
    assert scores(own, whole) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    plain = scores(own, rollouts(tokenizer=tokenizer, end=(tokenizer.eos_token_id,)))
    assert plain != pytest.approx(expected, abs=1e-3)
    assert scores(own, rollouts()) == pytest.approx(plain, abs=1e-6), "tokens of another tokenizer: the text is read"


@pytest.mark.parametrize("kind", ["pairs", "own"])
def test_neither_order_nor_padding_nor_batches_matter(kind, own, tmp_path):
    folder = own if kind == "own" else make_tiny_deberta(tmp_path / "deberta")
    together = scores(folder, rollouts())
    assert scores(folder, rollouts(), tokens_per_batch=1) == pytest.approx(together, rel=1e-5, abs=1e-5)
    reverse = scores(folder, rollouts(QUESTIONS[::-1], [group[::-1] for group in ANSWERS[::-1]]))
    assert reverse[::-1] == pytest.approx(together, rel=1e-5, abs=1e-5)


def test_the_end_of_a_long_text_is_cut_with_a_warning(own, tmp_path, caplog):
    folder = make_tiny_deberta(tmp_path / "deberta", max_position_embeddings=16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = classifier(folder)({"text": "what", "text_pair": "b" * 40}, truncation=True, max_length=16)
    model = RewardModel(str(folder), dtype="float32")
    batch = rollouts(["what"], [["b" * 40, "b" * 60]])
    assert model(batch) == pytest.approx((expected, expected), abs=1e-5)
    assert [len(row) for row in model.reader.token_ids(batch)] == [16, 16]
    assert model.reader.token_ids(batch)[0][-1] == tokenizer.sep_token_id
    warnings = [record for record in caplog.records if "are truncated" in record.getMessage()]
    assert len(warnings) == 1 and "at most 16 tokens, and s0 has" in caplog.text
    (row,) = RewardModel(str(own)).reader.token_ids(rollouts(["a" * 500], [["b" * 500]]))
    assert len(row) == 512


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "does not exist"),
        (lambda folder: make_tiny_model(folder), "LlamaForCausalLM, which has no score head; "),
        (lambda folder: make_tiny_deberta(folder, labels=3), "3 labels"),
        (lambda folder: make_tiny_deberta(folder, type_vocab_size=2), "type_vocab_size"),
    ],
)
def test_other_models_are_refused_as_reward_models_before_a_run(make, message, tmp_path):
    path = make(tmp_path)
    config = RewardConfig(functions=[{"function": "reward_model", "args": {"path": str(path)}}])
    with pytest.raises(ConfigError, match=message):
        build_rewards(config)


def test_missing_things_are_named(tmp_path):
    folder = make_tiny_deberta(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        RewardModel(str(folder))
    with pytest.raises(RewardError, match="'reward_model' needs args:"):
        build_rewards(RewardConfig(functions=[{"function": "reward_model"}]))
    with pytest.raises(RewardError, match="no argument 'pth'"):
        build_rewards(RewardConfig(functions=[{"function": "reward_model", "args": {"path": "p", "pth": 1}}]))


def test_a_conversation_without_a_template_is_refused(tmp_path):
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    with pytest.raises(ConfigError, match=r"s0:.*chat template"):
        RewardModel(str(make_tiny_deberta(tmp_path)))(rollouts([turns], [["d"]]))


def test_it_is_loaded_once_and_runs_beside_other_rewards(tmp_path, monkeypatch):
    from atomrl.models import reward_model

    loads = []

    def load(*args, **options):
        loads.append(args)
        return load_scalar(*args, **options)

    monkeypatch.setattr(reward_model, "load_scalar", load)
    folder = make_tiny_deberta(tmp_path)
    items = [{"function": "reward_model", "args": {"path": str(folder)}}, {"function": "length_penalty", "weight": 0}]
    with_both = build_rewards(RewardConfig(functions=items))
    first, again = with_both(rollouts()), with_both(rollouts())
    given = [[item.reward for item in batch] for batch in (first, again)]
    assert given[0] == given[1] == [item.reward_parts["reward_model"] for item in first] and len(loads) == 1
    assert set(first[0].reward_parts) == {"reward_model", "length_penalty"}


def test_the_reward_command_takes_it(tmp_path, capsys):
    folder = make_tiny_deberta(tmp_path / "model")
    rows = [{"prompt": q, "completion": group[0]} for q, group in zip(QUESTIONS, ANSWERS, strict=True)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    given = ["reward", "reward_model", str(tmp_path / "in.jsonl"), "--out", str(out), f"path={folder}", "dtype=float32"]
    assert main(given) == 0
    rewards_read = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert rewards_read == pytest.approx(scores(folder, rollouts())[::2], abs=1e-5)
    assert main([*given[:-2], f"path={tmp_path / 'absent'}"]) == 2
    assert "does not exist" in capsys.readouterr().err


REMOTE = """
from transformers import AutoModel, LlamaConfig, LlamaForSequenceClassification, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaModel):
    config_class = OwnConfig
AutoModel.register(OwnConfig, OwnModel)
class OwnForSequenceClassification(LlamaForSequenceClassification):
    config_class = OwnConfig
"""


def test_code_of_a_reward_model_runs_where_the_run_trusts_it(own):
    expected = scores(own, rollouts())
    (own / "own.py").write_text(REMOTE)
    file = own / "config.json"
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnForSequenceClassification"}
    changes = {"model_type": "own", "auto_map": named, "architectures": ["OwnForSequenceClassification"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    item = {"function": "reward_model", "args": {"path": str(own), "dtype": "float32"}}
    config = RewardConfig(functions=[item])
    with pytest.raises(ConfigError, match="trust_remote_code"):
        build_rewards(config)
    rewards = build_rewards(config, trust_remote_code=True)
    values = [trajectory.reward for trajectory in rewards(rollouts())]
    rewards.close()
    assert values == pytest.approx(expected, abs=1e-5)


def test_preferences_with_calls_and_tools_are_read_as_the_template_writes_them():
    tokenizer = family_tokenizer("qwen2.5")
    reader = Reader(tokenizer, SimpleNamespace(num_labels=1, max_position_embeddings=None, architectures=[]), "model")
    tools = ({"type": "function", "function": {"name": "get"}},)
    call = {"type": "function", "function": {"name": "get", "arguments": {"c": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    offline, online = {"completions": (), "tools": tools}, {"tools": json.dumps(tools)}
    problems = [Problem(problem_id="a", prompt="w?", ground_truth=None, columns=each) for each in (offline, online)]
    turns = [{"role": "user", "content": "w?"}, message]
    expected = tokenizer.apply_chat_template(turns, tools=[*tools], tokenize=False)
    assert [tokenizer.decode(reader.row(each, [], [], message)) for each in problems] == [expected] * 2
