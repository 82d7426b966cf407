"""Pictures in engine and trainer: log-probs of both agree, whatever is beside a row, and a mistake would be seen."""

from dataclasses import replace

import pytest
import torch

from atomrl.algorithms.grpo import GRPO
from atomrl.backends.local import LocalBackend
from atomrl.batches import select_rows
from atomrl.config import DataConfig, ModelConfig, TrainConfig
from atomrl.data.files import RawRow
from atomrl.data.image_reader import ImageReader
from atomrl.data.images import ImageStore
from atomrl.data.problems import problem_reader, to_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows, to_training_batches, with_advantages
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_policy, load_tokenizer, model_config_only
from atomrl.models.vision import Vision
from atomrl.types import SamplingParams
from tests.tiny_vision import FAMILIES, IMAGE, SPECIAL, make_tiny_vision_model, picture

ROWS = [
    {"prompt": "what colour?", "images": [picture(1, 84, 56)]},
    {"prompt": "<image>and<image> which is longer?", "images": [picture(2, 100, 140), picture(3)]},
    {"prompt": "no picture at all"},
    {"prompt": "what colour?", "images": [picture(4, 84, 56)]},
]
"""One picture, two of different sizes, none; and the tokens of the first row with another picture."""


class Case:
    """A tiny model with prompts, and completions of an engine."""

    def __init__(self, family, folder, start=HFEngine.from_pretrained, wide=False, **sampling):
        self.path = make_tiny_vision_model(folder / "model", family, wide=wide)
        self.tokenizer, shape = load_tokenizer(self.path), model_config_only(self.path)
        self.reader = ImageReader(folder / "images", self.path, shape)
        store = ImageStore(folder / "images", reader=self.reader)
        raw = [RawRow(f"rows:{number}", row) for number, row in enumerate(ROWS)]
        problems, errors = to_problems(raw, problem_reader(DataConfig(train="-", answer_field=None)), images=store)
        assert not errors
        store.write()
        processor = DataProcessor(self.tokenizer, DataConfig(train="-"), images=self.reader)
        self.prompts = processor.to_prompts([(str(number), problem) for number, problem in enumerate(problems)])
        options = EngineOptions(dtype=torch.float32, device="cpu", max_concurrent_completions=16, images=self.reader)
        self.engine = start(str(self.path), self.tokenizer, options)
        sampling = {"completions_per_prompt": 2, "max_completion_tokens": 8, "ignore_eos": True} | sampling
        self.sampling = SamplingParams(**sampling)
        self.trajectories = generate(self.engine, self.prompts, self.sampling)
        self.rows = to_rows([self.rewarded(item) for item in self.trajectories])

    @staticmethod
    def rewarded(item):
        return replace(item, reward=float(item.index))

    def backend(self, *, model=None, **train):
        model = ModelConfig(**({"path": str(self.path), "dtype": "float32", "device": "cpu"} | (model or {})))
        train = TrainConfig(**({"steps": 1, "learning_rate": 0.01} | train))
        return LocalBackend(model, train, GRPO, total_updates=1, images=self.reader)

    def difference(self, rows=None, **train):
        """Return the largest difference of a log-prob between trainer and engine."""
        rows = self.rows if rows is None else rows
        scored = self.backend(**train).forward_only(rows, {"old_logprobs"})
        return float(((scored.old_logprobs - rows.rollout.logprobs) * rows.loss_mask).abs().max())

    def batch(self):
        return next(to_training_batches(with_advantages(GRPO, self.rows), GRPO, updates=1, epochs=1, seed=0, step=1))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_log_probs_of_engine_and_trainer_agree(case):
    """In one padded micro-batch, row by row, and in the reverse order."""
    assert case.rows.rows == 8 and [len(row) for row in case.rows.images.rows] == [1, 1, 2, 2, 0, 0, 1, 1]
    # Linear attention is computed in chunks by the trainer, and token by token in generation.
    close = 4e-5 if "qwen3_5" in str(case.path) else 1e-5
    assert case.difference() < close
    assert case.difference(rows_per_micro_batch=1) < close
    assert case.difference(select_rows(case.rows, torch.arange(7, -1, -1))) < close


def test_a_prompt_without_pictures_forgets_those_of_the_batch_before(case):
    again = generate(case.engine, case.prompts[2:3], case.sampling)
    for one, two in zip(again, case.trajectories[4:6], strict=True):
        assert one.token_ids == two.token_ids
        assert one.segments[1].logprobs == pytest.approx(two.segments[1].logprobs, abs=4e-5)


def test_a_prompt_is_what_the_template_writes_with_each_picture_expanded(case):
    """The picture's text is that of the chat template for content in parts."""
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"},
             {"type": "text", "text": " which is longer?"}]  # fmt: skip
    text = case.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    ids = case.tokenizer(text, add_special_tokens=False)["input_ids"]
    sizes = iter([case.reader.tokens(image) for image in case.prompts[1].problem.images])
    expected = [each for token in ids for each in ([token] * next(sizes) if token == IMAGE else [token])]
    assert list(case.prompts[1].token_ids) == expected and expected.count(IMAGE) > 4


MISTAKES = {
    "no_token_types": lambda named, images: named | {"mm_token_type_ids": None},
    "flat_positions": lambda named, images: {
        name: value for name, value in named.items() if name == "mm_encoder_outputs"
    },
    "no_pixels": lambda named, images: {},
    "pictures_of_another_row": None,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_pictures_shows_in_the_log_probs(case, monkeypatch, mistake):
    real = Vision.inputs

    def wrong(vision, tokens, images):
        if mistake == "pictures_of_another_row":
            one, two = case.prompts[0].problem.images[0], case.prompts[3].problem.images[0]  # of the same size
            swapped = {one.name: two, two.name: one}
            return real(vision, tokens, [[swapped.get(image.name, image) for image in row] for row in images])
        return MISTAKES[mistake](real(vision, tokens, images), images)

    monkeypatch.setattr(Vision, "inputs", wrong)
    try:
        assert case.difference() > 1e-3
    except ValueError:
        assert mistake == "no_token_types"


def test_a_row_without_all_tokens_of_its_pictures_is_an_error(case):
    """A prompt may have been cut, or a completion may have a sampled token of a picture."""
    for row, place, token in ((0, int((case.rows.tokens[0] == IMAGE).nonzero()[0]), 20), (4, -1, IMAGE)):
        tokens = case.rows.tokens.clone()
        tokens[row, place] = token
        with pytest.raises(ValueError, match=r"row \d has \d+ tokens of pictures, but its pictures have"):
            case.difference(replace(case.rows, tokens=tokens))


def test_the_gradient_does_not_depend_on_the_split_or_the_order(case):
    """Nor on rows without pictures; the tower is frozen, or gets a gradient."""
    whole, gradients = case.batch(), []
    for frozen in (True, False):
        for batch, train in (
            (whole, {}),
            (whole, {"rows_per_micro_batch": 1}),
            (whole, {"rows_per_micro_batch": 3}),
            (select_rows(whole, torch.arange(7, -1, -1)), {}),
        ):
            backend = case.backend(model={"freeze_vision": frozen}, **train)
            backend.gradients(batch, GRPO)
            gradients.append(
                {
                    name: weight.grad
                    for name, weight in backend.policy.model.named_parameters()
                    if weight.grad is not None
                }
            )
        first, *others = gradients[-4:]
        assert any("visual" in name for name in first) != frozen
        largest = max(float(each.abs().max()) for each in first.values())
        for other in others:
            assert other.keys() == first.keys()
            assert max(float((other[name] - first[name]).abs().max()) for name in first) < 1e-5 * max(largest, 1)


def test_a_frozen_tower_computes_each_picture_once(case):
    backend = case.backend(rows_per_micro_batch=1)
    backend.forward_only(case.rows, {"old_logprobs"})
    backend.train_step(case.batch(), GRPO)
    assert backend.policy.model.vision.computed == 4
    trained = case.backend(model={"freeze_vision": False})
    trained.train_step(case.batch(), GRPO)
    assert trained.policy.model.vision.computed == 4  # once in its only micro-batch


def test_tokens_of_pictures_are_never_sampled(tmp_path):
    """Although this model gives them nearly all probability; log-probs stay those of the whole vocabulary."""
    case = Case("qwen2_5_vl", tmp_path)
    head = case.engine.model.get_output_embeddings()
    plain = head.forward
    head.forward = lambda hidden: plain(hidden).index_fill(
        -1, torch.tensor([SPECIAL.index(name) for name in SPECIAL[2:]]), 9.0
    )
    for extra in ({}, {"min_completion_tokens": 3, "ignore_eos": False}, {"temperature": 0.0}):
        drawn = generate(case.engine, case.prompts, SamplingParams(max_completion_tokens=8, **extra))
        written = [token for item in drawn for token in item.token_ids[item.prompt_tokens :]]
        assert written and not {*written} & {SPECIAL.index(name) for name in SPECIAL[2:]}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_float32_weights_compute_as_a_model_in_bfloat16(case, frozen):
    states = []
    for trainable in (True, False):
        policy = load_policy(case.path, dtype=torch.bfloat16, trainable=trainable, freeze_vision=frozen)
        policy.vision = Vision(policy.inner, case.reader)
        states.append(policy.forward_hidden(case.rows.tokens, case.rows.images.rows))
    states[0].float().square().mean().backward()
    first, second = states
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second) or (not frozen and torch.allclose(first, second, atol=0.1))
