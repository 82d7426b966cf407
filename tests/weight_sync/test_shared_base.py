"""One copy of the frozen base: the engine uses the trainer's weights, and a run computes what it does with two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import atomrl
from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.config import LoraConfig, ModelConfig, TrainConfig
from atomrl.engines.generation import generate
from atomrl.engines.native import linear
from atomrl.engines.native.cache import run_prompts
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.requests import EngineOptions
from atomrl.models import kernel_switches, kernels, loading
from atomrl.models.loading import load_tokenizer
from atomrl.protocols import FrozenBase, RoundedWeights
from atomrl.trainer.build import ENGINES
from atomrl.types import SamplingParams
from atomrl.weight_sync.transfer import InProcessTransfer, WeightMismatch
from tests.prompts import prompts_of, response
from tests.tiny import make_tiny_model


class PagedEngine(NativeEngine):
    """The engine's layout on a GPU, computed by PyTorch."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, ops=PlainOps(), **kwargs)


def unlike(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text)) / (1 + len(text)) for text in completions]


def run(folder: Path, name: str, model: dict[str, Any], stop: int = 0, **sections: Any) -> tuple[Any, Any, Any]:
    """Train three steps. Returns the adapters, the completions, and the metrics that are no times and no memory.

    With `stop` the run is interrupted in this step, and resumed.
    """

    def interrupt(step: int, metrics: Any) -> None:
        if step == stop:
            raise KeyboardInterrupt

    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?", "ground_truth": "1"}}\n' for n in range(12)))
    config = {
        "run_name": name,
        "output_dir": str(folder / "runs"),
        "model": {"lora": {"rank": 4, "alpha": 32}, "dtype": "float32", "device": "cpu"} | model,
        "data": {"train": str(folder / "rows.jsonl")},
        "rollout": {
            "prompts_per_step": 4,
            "completions_per_prompt": 4,
            "max_completion_tokens": 12,
            "engine": "native",
        },
        "train": {"steps": 3, "learning_rate": 0.01},
        "eval": {"before": False, "after": False},
        "algorithm": {"name": "grpo"},
        **sections,
    }
    if stop:
        with pytest.raises(KeyboardInterrupt):
            atomrl.train(config, reward=unlike, callbacks=[interrupt])
    atomrl.train(config, reward=unlike, resume=bool(stop))
    made = folder / "runs" / name
    [adapters] = (made / "model").glob("*.safetensors")
    rows = [json.loads(line) for file in sorted(made.glob("rollouts/*/train.jsonl")) for line in file.open()]
    metrics = [json.loads(line) for line in (made / "metrics.jsonl").open()]
    told = [{k: v for k, v in row.items() if not k.startswith(("timing", "perf", "time", "memory"))} for row in metrics]
    return load_file(adapters), [(row["token_ids"], row["advantage"]) for row in rows], told


UNTIED = {"architecture": "qwen2", "tie_word_embeddings": False, "hidden_size": 128, "intermediate_size": 256}
SOME_LAYERS = {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}}


# Quantized weights are multiplied in the paged layout on a CPU, too: there the two differ in the last bits.
@pytest.mark.parametrize(
    ("engine", "shape", "model"),
    [
        pytest.param(NativeEngine, {}, {}, id="llama"),
        pytest.param(PagedEngine, {}, {}, id="llama-paged", marks=pytest.mark.slow),
        pytest.param(
            NativeEngine, UNTIED, {"gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.slow
        ),
        pytest.param(PagedEngine, UNTIED, {"gradient_checkpointing": True}, id="checkpointing-paged"),
        pytest.param(NativeEngine, {"architecture": "qwen3"}, SOME_LAYERS, id="some-layers", marks=pytest.mark.slow),
        pytest.param(PagedEngine, {"architecture": "qwen3"}, SOME_LAYERS, id="some-layers-paged"),
        pytest.param(PagedEngine, {}, {"dtype": "bfloat16"}, id="bfloat16-paged"),
        pytest.param(PagedEngine, {}, {"quantization": "int8"}, id="int8-paged"),
        pytest.param(PagedEngine, UNTIED, {"quantization": "nf4"}, id="nf4-paged"),
    ],
)
def test_one_copy_equals_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: type[NativeEngine],
    shape: dict[str, Any],
    model: dict[str, Any],
) -> None:
    monkeypatch.setitem(ENGINES, "native", engine)
    for module in (loading, linear):  # a CPU that multiplies bfloat16 does so in a layout of its own
        monkeypatch.setattr(module, "has_bfloat16", lambda device: False)
    path = str(make_tiny_model(tmp_path / "model", **shape))
    shared: list[FrozenBase | None] = []
    original = LocalBackend.frozen_base
    monkeypatch.setattr(LocalBackend, "frozen_base", lambda self: shared.append(original(self)) or shared[-1])
    one = run(tmp_path, "one", {"path": path} | model)
    assert shared[0] is not None and shared[0].bytes > 0
    shared[0].check()
    monkeypatch.setattr(LocalBackend, "frozen_base", lambda self: None)
    two = run(tmp_path, "two", {"path": path} | model)
    assert one[0].keys() == two[0].keys()
    assert max(float(b.abs().max()) for name, b in one[0].items() if "lora_B" in name)
    for name, adapter in one[0].items():
        assert torch.equal(adapter, two[0][name]), name
    assert one[1] == two[1]
    for first, second in zip(one[2], two[2], strict=True):
        assert first == pytest.approx(second, rel=1e-5, abs=1e-6), first["step"]


@pytest.mark.parametrize("model", [{}, {"gradient_checkpointing": True}])
def test_updates_round_weights_into_the_engines_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """With several updates in a step, whose weights the engine never samples from. bfloat16 is stored, as on a GPU."""
    monkeypatch.setitem(ENGINES, "native", PagedEngine)
    for module in (loading, linear):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: True)
    path = str(make_tiny_model(tmp_path / "model", **UNTIED))
    settings = {"path": path, "dtype": "bfloat16", "lora": None} | model
    train = {"steps": 2, "learning_rate": 0.001, "rows_per_update": 8}
    offered: list[RoundedWeights] = []
    original = LocalBackend.rounded_weights
    monkeypatch.setattr(LocalBackend, "rounded_weights", lambda self: offered.append(original(self)) or offered[-1])
    copies, stacked = [], kernel_switches.stacked
    for module in (kernels, kernel_switches):
        keep = lambda parts, dtype: copies.append(parts[0].dim()) or stacked(parts, dtype)  # noqa: E731
        monkeypatch.setattr(module, "stacked", keep)
    one = run(tmp_path, "one", settings, train=train)
    assert set(copies) == {1}  # biases
    assert "are held once" in (tmp_path / "runs" / "one" / "log.txt").read_text()
    assert len(offered[0].places) == 2 * 4  # q|k|v, o, gate|up and down of two layers
    monkeypatch.setattr(LocalBackend, "rounded_weights", lambda self: None)
    two = run(tmp_path, "two", settings, train=train)
    assert one[1:] == two[1:]
    for name, weight in one[0].items():
        assert torch.equal(weight, two[0][name]), name


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_a_resumed_run_with_one_copy_is_the_same(tmp_path: Path, kind: str | None) -> None:
    model = {"path": str(make_tiny_model(tmp_path / "model", **UNTIED)), "quantization": kind}
    straight = run(tmp_path, "straight", model)
    resumed = run(tmp_path, "resumed", model, stop=2, checkpoint={"every_steps": 1})
    assert straight[1] == resumed[1]
    for name, adapter in straight[0].items():
        assert torch.equal(adapter, resumed[0][name]), name


@pytest.mark.parametrize("kind", [None, "nf4"])
@pytest.mark.parametrize("engine", [NativeEngine, PagedEngine])
def test_an_asynchronous_run_samples_from_the_trainers_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[NativeEngine], kind: str | None
) -> None:
    """Adapters are written beside the weights between a forward pass and its backward pass."""
    monkeypatch.setitem(ENGINES, "native", engine)
    model = {"path": str(make_tiny_model(tmp_path / "model", **UNTIED)), "quantization": kind}
    _, completions, _ = run(tmp_path, "one", model, asynchronous={"max_staleness": 1})
    assert len(completions) == 48  # each transfer has compared the hashes of what the engine uses
    assert "are held once" in (tmp_path / "runs" / "one" / "log.txt").read_text()


def backend_and_engine(folder: Path, quantization: str | None) -> tuple[LocalBackend, NativeEngine, int]:
    """Return a trainer, an engine on its weights, and the bytes that the engine would need for its own."""
    path = str(make_tiny_model(folder / "model", **UNTIED))
    model = ModelConfig(path=path, dtype="float32", lora=LoraConfig(rank=4), quantization=quantization)
    backend = LocalBackend(model, TrainConfig(), objective_of({"name": "grpo"}).resolved(), total_updates=2)
    base = backend.frozen_base()
    assert base is not None
    options = EngineOptions(torch.float32, "cpu", 8, base=base)
    return backend, PagedEngine.from_pretrained(path, load_tokenizer(path), options), base.bytes


def last_logits(backend: LocalBackend, engine: NativeEngine, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits after the last token, of the trainer and of the engine."""
    model = backend.policy.model
    with torch.no_grad():
        of_engine = run_prompts(engine.model, engine.batch.cache.rope, [tokens.tolist()], lambda *_: None)
        return [model.forward_hidden(tokens[None])[0, -1] @ model.head_weight.t(), engine.model.logits(of_engine)[0]]


def storages(*holders: Any) -> int:
    """Sum of the bytes of all tensors that these objects reach, each storage once."""
    seen: dict[int, int] = {}
    reached: set[int] = set()
    stack = list(holders)
    while stack:
        each = stack.pop()
        if id(each) in reached:
            continue
        reached.add(id(each))
        if isinstance(each, torch.Tensor):
            seen[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list | tuple):
            stack += each
        elif type(each).__module__.startswith(("atomrl", "torch.nn", "peft")) and hasattr(each, "__dict__"):
            stack += vars(each).values()
    return sum(seen.values())


@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_base_weights_are_held_once(tmp_path: Path, kind: str | None) -> None:
    backend, engine, copy = backend_and_engine(tmp_path, kind)
    trainer = storages(backend.policy.model)
    InProcessTransfer(backend, engine)(1)
    adapters = sum(p.nbytes for p in backend.policy.model.parameters() if p.requires_grad)
    together = storages(backend.policy.model, engine.model)
    scratch = 0 if kind is None else 4 * 512 * (128 + 16)  # gate and up with the columns of their adapters
    # The engine adds A and B with their ranks padded to 16 columns, and stacked biases.
    assert together - trainer < 4 * adapters + scratch + 8192 < copy


def test_the_base_is_never_sent(tmp_path: Path) -> None:
    """Dequantized at once for the first transfer, it would take more memory than it saves."""
    backend, engine, _ = backend_and_engine(tmp_path, "int8")
    transfer, asked = InProcessTransfer(backend, engine, shared=True), []
    update = backend.weight_update
    backend.weight_update = lambda version, adapters_alone=False: asked.append(adapters_alone) or update(version, True)
    transfer(1)
    transfer(2)
    assert asked == [True, True]


@pytest.mark.parametrize("shared", [True, False])
def test_a_stray_write_into_the_base_is_found_at_the_next_transfer(tmp_path: Path, shared: bool) -> None:
    backend, engine, _ = backend_and_engine(tmp_path, None)
    transfer = InProcessTransfer(backend, engine, shared=shared)
    if not shared:
        transfer(1)
    with torch.no_grad():
        next(p for name, p in backend.policy.model.named_parameters() if "gate_proj.base" in name)[3, 3] += 1
    with pytest.raises(WeightMismatch, match=r"gate_proj"):
        transfer(2)


def test_weights_that_were_moved_away_end_the_run(tmp_path: Path) -> None:
    backend, engine, _ = backend_and_engine(tmp_path, None)
    backend.policy.model.to(torch.float64)
    with pytest.raises(RuntimeError, match="no longer those of the rollout engine"):
        InProcessTransfer(backend, engine)(1)


def test_the_trainer_continues_after_the_engine_is_closed(tmp_path: Path) -> None:
    backend, engine, _ = backend_and_engine(tmp_path, None)
    tokens = torch.arange(3, 20)[None]
    before = backend.policy.model.forward_hidden(tokens)
    engine.close()
    backend.save(tmp_path / "saved")
    assert torch.equal(backend.policy.model.forward_hidden(tokens), before)


@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_an_update_of_a_millionth_is_seen_by_the_engine(tmp_path: Path, kind: str | None) -> None:
    """A part of the size of 1e-6 of the product, added before it is rounded, in the trainer and in the engine."""
    backend, engine, _ = backend_and_engine(tmp_path, kind)
    tokens, transfer = torch.arange(3, 20), InProcessTransfer(backend, engine)
    transfer(1)
    before = last_logits(backend, engine, tokens)
    for name, parameter in backend.policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-6)
    transfer(2)
    moved = [now - then for now, then in zip(last_logits(backend, engine, tokens), before, strict=True)]
    assert float(moved[0].abs().max()) > 0
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 0.2


@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_log_probs_of_engine_and_trainer_agree(tmp_path: Path, kind: str | None) -> None:
    backend, engine, _ = backend_and_engine(tmp_path, kind)
    for name, parameter in backend.policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(0))
    InProcessTransfer(backend, engine)(1)
    first, second = (logits.softmax(-1) for logits in last_logits(backend, engine, torch.arange(3, 20)))
    assert float((first - second).abs().max()) < 1e-5


def test_a_sleeping_cache_grows_back_at_once(tmp_path: Path) -> None:
    """Otherwise each growth would capture CUDA graphs again, in every step."""
    _, engine, _ = backend_and_engine(tmp_path, "int8")
    sampling = SamplingParams(max_completion_tokens=70, min_completion_tokens=70, completions_per_prompt=3, seed=1)
    texts, grown = [], []
    for _ in range(2):
        before = engine.batch.cache.generation
        texts.append([response(each) for each in generate(engine, prompts_of([3, 4, 5]), sampling)])
        grown.append(engine.batch.cache.generation - before)
        engine.sleep()
        assert engine.batch.cache.pool == 0 and engine.model.scratch.memory.numel() == 0
        engine.wake()
    assert texts[0] == texts[1] and grown[1] < grown[0]
