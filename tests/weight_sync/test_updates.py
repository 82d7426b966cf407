"""Weight updates of engines: in place, without a second copy, adapters not rounded away."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.config import LoraConfig
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.native import decoder, linear
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import has_bfloat16, load_policy
from atomrl.models.lora import adapter_weights
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync import InProcessTransfer, WeightMismatch, checked_update, tensor_hash
from atomrl.weight_sync.broadcast import CollectiveChannel
from atomrl.weight_sync.channel import TransferBroken
from atomrl.weight_sync.files import FileChannel
from tests.prompts import logprobs_of, prompts_of
from tests.tiny import make_tiny_model

ENGINES = {"native": NativeEngine, "hf": HFEngine, "pages": partial(NativeEngine.from_pretrained, ops=PlainOps())}


def open_engine(folder, name="native", dtype=torch.float32):
    options = EngineOptions(dtype, "cpu", max_concurrent_completions=8)
    packs = name == "native" and linear.compute_dtype(dtype, torch.device("cpu")) == torch.bfloat16
    if packs and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bfloat16 on this CPU, not even by emulation")
    make = getattr(ENGINES[name], "from_pretrained", ENGINES[name])
    return make(str(folder), AutoTokenizer.from_pretrained(folder), options)


def compute_in(monkeypatch, dtype):
    """Whatever instructions the CPU has."""
    for module in (decoder, linear):
        monkeypatch.setattr(module, "compute_dtype", lambda *_: dtype)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 96}
    return make_tiny_model(tmp_path_factory.mktemp("large"), "qwen2", scale=0.02, **shape)


class Source:
    def __init__(self, tensors, adapters=None):
        self.tensors, self.adapters, self.asked = tensors, adapters or {}, []

    def weight_update(self, version, adapters_alone=False):
        self.asked.append(adapters_alone)
        tensors = () if adapters_alone else iter(self.tensors.items())
        return WeightUpdate(version=version, tensors=tensors, adapters=self.adapters)


def peak_bytes(action) -> int:
    """The most that torch held at once beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_count_of_bytes_can_fail():
    assert peak_bytes(lambda: [torch.ones(2**20) for _ in range(3)]) >= 2**22


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("stored,computed", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_a_sync_needs_no_second_engine(large_folder, name, stored, computed, monkeypatch):
    compute_in(monkeypatch, getattr(torch, computed))
    engine = open_engine(large_folder, name, getattr(torch, stored))
    state = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.float32).state_dict()
    smallest = getattr(torch, stored if name == "hf" else computed).itemsize
    size = sum(tensor.numel() for tensor in state.values()) * smallest
    state = {name: tensor * 1.5 for name, tensor in state.items() if name in engine.weight_shapes()}
    transfer = InProcessTransfer(Source(state), engine)
    assert peak_bytes(lambda: transfer(version=1)) <= 0.1 * size  # 1.0 and 1.99 before
    assert engine.version == 1


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("stored,computed", [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_sync_with_adapters_needs_no_second_engine(large_folder, name, stored, computed, monkeypatch):
    """Neither the first, which brings the base too, nor those after it, of adapters alone."""
    compute_in(monkeypatch, getattr(torch, computed))
    engine = open_engine(large_folder, name, getattr(torch, stored))
    state = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.float32).state_dict()
    size = sum(tensor.numel() for tensor in state.values()) * getattr(torch, stored).itemsize
    state = {name: tensor * 1.5 for name, tensor in state.items() if name in engine.weight_shapes()}
    layers = [(name, tensor.shape) for name, tensor in state.items() if "_proj.weight" in name]
    adapters = {name: Adapter(torch.ones(1, shape[1]), torch.ones(shape[0], 1), 1.0) for name, shape in layers}
    transfer = InProcessTransfer(Source(state, adapters), engine)
    if name == "pages":  # the first makes room beside each matrix in turn, and the profiler sees no old one freed
        transfer(version=1)
    for version in (1, 2):
        assert peak_bytes(lambda version=version: transfer(version=version)) <= 0.1 * size
    assert engine.version == 2


def test_new_weights_come_into_the_old_ones(large_folder):
    engine = open_engine(large_folder)
    linears = {id(linear): linear for linear, _ in engine.model.linears.values()}.values()
    own = [*engine.model.vectors.values(), *(linear.weight for linear in linears)]
    places = [tensor.data_ptr() for tensor in own]
    state = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.float32).state_dict()
    engine.update_weights(WeightUpdate(version=1, tensors=[(name, tensor + 1) for name, tensor in state.items()]))
    assert [tensor.data_ptr() for tensor in own] == places
    changed = state["model.embed_tokens.weight"] + 1
    assert torch.equal(engine.model.embedding, changed) and torch.equal(engine.model.head.weight.T, changed)


def test_a_tied_head_may_come_under_its_second_name():
    weight = torch.ones(3, 2)
    tensors = [("embed", weight), ("lm_head.weight", weight)]
    assert checked_update(WeightUpdate(version=1, tensors=tensors), {"embed": (3, 2)}).tensors == tensors[:1]
    with pytest.raises(ValueError, match=r"lm_head\.weight is unexpected"):
        checked_update(
            WeightUpdate(version=1, tensors=[("embed", weight), ("lm_head.weight", weight + 1)]), {"embed": (3, 2)}
        )


def test_the_base_is_sent_once(large_folder):
    engine = open_engine(large_folder)
    state = {name: torch.ones(shape) for name, shape in engine.weight_shapes().items()}
    adapter = Adapter(a=torch.ones(2, 384), b=torch.ones(384, 2), scale=1.0)
    source, notes = Source(state, {"model.layers.0.self_attn.q_proj.weight": adapter}), []
    transfer = InProcessTransfer(source, engine, notes.append)
    for version in (1, 2, 3):
        transfer(version)
    assert source.asked == [False, True, True]
    assert len(notes) == 1 and f"verified: {len(state) + 2} tensors read back from the engine" in notes[0]


def test_a_base_that_the_engine_has_read_itself_is_never_sent(large_folder, monkeypatch):
    engine, calls = open_engine(large_folder), []
    state = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.float32).state_dict()
    own = {name: tensor for name, tensor in state.items() if name in engine.weight_shapes()}
    take = engine.update_weights

    def noted(update):
        calls.append(list(update.tensors))
        take(replace(update, tensors=calls[-1]))

    monkeypatch.setattr(engine, "update_weights", noted)
    name = "model.layers.0.self_attn.q_proj.weight"
    source = Source(own, {name: Adapter(a=torch.ones(2, 384), b=torch.ones(384, 2), scale=1.0)})
    transfer = InProcessTransfer(source, engine)
    for version in (1, 2):
        transfer(version)
    assert calls == [[], []]
    source.tensors = {**own, name: own[name] + 1}  # as of a base in 4 bits
    InProcessTransfer(source, engine)(3)
    assert {name for name, _ in calls[2]} == {*engine.weight_shapes()}


def scored(engine, ids) -> torch.Tensor:
    """Log-prob of each token after the first."""
    if isinstance(engine, HFEngine):
        with torch.inference_mode():
            logits = engine.model(torch.tensor([ids])).logits[0, :-1]
    else:
        with torch.inference_mode():
            cache = engine.batch.cache
            cache.reserve_prompts(len(ids), len(ids))
            hidden = cache.prefill([ids[:end] for end in range(1, len(ids))], torch.arange(len(ids) - 1))
            logits = engine.model.logits(hidden)
    assert logits.dtype == torch.float32
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "computed", "most", "most_merged"),
    [(name, *case) for name in ENGINES for case in (("float32", 1.02, 0.3), ("bfloat16", 1.15, 0.45))],
)
def test_an_engine_makes_the_first_small_updates_of_adapters(
    large_folder, name, computed, most, most_merged, tmp_path, monkeypatch
):
    """Rank 32, alpha 64, learning rate 2e-5, weights in bfloat16. Merged into them the share was 0.01, and added to
    products that were rounded to bfloat16 already 0.46."""
    if computed == "bfloat16" and not has_bfloat16("cpu"):
        pytest.skip("needs a CPU that multiplies bfloat16")
    compute_in(monkeypatch, getattr(torch, computed))
    rounded = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.bfloat16)
    rounded.float().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(large_folder).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, dtype="float32", lora=LoraConfig(rank=32, alpha=64))
    ids = torch.randint(5, 102, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.tensor([ids])

    def trainer_logprobs() -> torch.Tensor:
        logits = torch.nn.functional.linear(policy.forward_hidden(tokens), policy.head_weight)[0, :-1]
        return logits.double().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]

    # The hf engine multiplies in the precision of its weights: bfloat16 numbers held in float32.
    engine = open_engine(tmp_path, name, getattr(torch, computed) if name == "hf" else torch.bfloat16)
    before, engine_before = trainer_logprobs(), scored(engine, ids)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=2e-5)
    (-before.mean()).backward()
    optimizer.step()
    with torch.no_grad():
        move = trainer_logprobs() - before
    adapters = {name.removesuffix(".weight") + ".weight": adapter for name, adapter in adapter_weights(policy).items()}
    engine.update_weights(WeightUpdate(version=1, adapters=adapters))
    ours = scored(engine, ids) - engine_before
    assert 0.98 <= float(ours @ move / (move @ move)) <= most

    merged = {name: adapter.b @ adapter.a * adapter.scale for name, adapter in adapters.items()}
    for name, parameter in rounded.float().named_parameters():
        merged[name] = (parameter.detach() + merged.get(name, 0.0)).bfloat16().float()
    engine.update_weights(WeightUpdate(version=2, tensors=[(n, merged[n]) for n in engine.weight_shapes()]))
    old_way = scored(engine, ids) - engine_before
    assert float(old_way @ move / (move @ move)) < most_merged


@pytest.mark.parametrize("name", ENGINES)
def test_logits_are_not_rounded_to_bfloat16(large_folder, name, monkeypatch):
    """A mean error of 1.2e-2 nats at logits of 20, where they were."""
    compute_in(monkeypatch, torch.bfloat16)
    engine = open_engine(large_folder, name, torch.bfloat16)
    head = engine.model.get_output_embeddings() if name == "hf" else engine.model.head
    weight = head.weight if name == "hf" else head.weight.T
    hidden = torch.randn(64, 384, generator=torch.Generator().manual_seed(0)).mul(40).bfloat16()
    with torch.inference_mode():
        actual, exact = head(hidden), hidden.double() @ weight.double().T
    assert actual.dtype == torch.float32 and exact.abs().max() > 20
    assert (actual.log_softmax(-1) - exact.log_softmax(-1)).abs().mean() < 1e-4
    assert (exact.bfloat16().float().log_softmax(-1) - exact.log_softmax(-1)).abs().mean() > 1e-2


def test_bfloat16_computed_in_bfloat16(large_folder, monkeypatch):
    """The layout that CPUs with bfloat16 instructions multiply takes new weights and adapters too."""
    compute_in(monkeypatch, torch.bfloat16)
    packed = open_engine(large_folder, dtype=torch.bfloat16)
    assert packed.model.layers[0].qkv.packed
    compute_in(monkeypatch, torch.float32)
    plain = open_engine(large_folder, dtype=torch.bfloat16)
    shapes, generator = packed.weight_shapes(), torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.03 for name, shape in shapes.items()}
    tensors |= {name: tensor + 1 for name, tensor in tensors.items() if "norm" in name}
    adapter = Adapter(a=torch.randn(4, 384) * 0.1, b=torch.randn(1024, 4) * 0.1, scale=1.0)
    adapters = {"model.layers.1.mlp.up_proj.weight": adapter}
    errors = []
    for engine in (packed, plain):
        engine.update_weights(WeightUpdate(version=1, tensors=tensors.items(), adapters=adapters))
        errors.append(scored(engine, list(range(5, 45))))
    assert (errors[0] - errors[1]).abs().mean() < 0.03
    for engine in (packed, plain):
        sampling = SamplingParams(max_completion_tokens=5)
        assert all(len(logprobs_of(t)) <= 5 for t in generate(engine, prompts_of((5, 6), (7,)), sampling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (513, 129), (3, 40_000), (1,), (4, 5, 6)])
def test_a_hash_sees_every_bit_and_every_place(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    whole, bits = tensor_hash(tensor, dtype), torch.int32 if dtype == torch.float32 else torch.int16
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        for bit in range(8 * dtype.itemsize - 1):
            changed = tensor.clone()
            changed.view(bits).view(-1)[place] ^= 1 << bit
            assert tensor_hash(changed, dtype) != whole
    if tensor.numel() > 1:
        assert tensor_hash(tensor.flip(0), dtype) != whole
    assert tensor_hash(tensor.float(), dtype) == whole  # what is rounded to it already
    assert 0 <= whole < 2**64


def test_a_hash_does_not_depend_on_the_layout():
    tensor = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
    for layout in (tensor.t().contiguous().t(), torch.stack([tensor, tensor], -1)[..., 0], tensor.t().clone().t()[:]):
        assert tensor_hash(layout, torch.float32) == tensor_hash(tensor, torch.float32)
    wide = torch.cat([tensor, tensor + 1]).t().contiguous()
    assert tensor_hash(wide[:, :700].t(), torch.float32) == tensor_hash(tensor, torch.float32)


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_a_stale_head_is_found(large_folder, computed, monkeypatch):
    """The head of a tied model is a copy of its own on a CPU; a layer may be packed."""
    compute_in(monkeypatch, computed)
    engine = open_engine(large_folder, dtype=torch.bfloat16)
    state = AutoModelForCausalLM.from_pretrained(large_folder, dtype=torch.float32).state_dict()
    source = Source({name: state[name] * 1.5 for name in engine.weight_shapes()})
    old = engine.model.head.weight.clone()
    transfer = InProcessTransfer(source, engine)
    transfer(version=1)
    monkeypatch.setattr(type(engine.model), "load", lambda *_: engine.model.head.weight.copy_(old))
    with pytest.raises(WeightMismatch, match=r"version 2: model\.embed_tokens\.weight"):
        transfer(version=2)


def test_a_version_that_is_not_the_trainers_is_found(large_folder):
    engine = open_engine(large_folder)
    transfer = InProcessTransfer(
        Source({name: torch.ones(shape) for name, shape in engine.weight_shapes().items()}), engine
    )
    load = engine.update_weights
    engine.update_weights = lambda update: load(replace(update, version=5))
    with pytest.raises(WeightMismatch, match="version 5, not 4"):
        transfer(4)


def test_a_base_that_changes_beneath_its_adapters_is_found(large_folder):
    engine = open_engine(large_folder, "hf")
    state = {name: torch.ones(shape) for name, shape in engine.weight_shapes().items()}
    adapter = Adapter(a=torch.ones(2, 384), b=torch.ones(384, 2), scale=0.5)
    transfer = InProcessTransfer(Source(state, {"model.layers.0.self_attn.q_proj.weight": adapter}), engine)
    transfer(1)
    adapter.a.add_(1)  # the trainer's own: the engine has copies
    transfer(2)
    with torch.no_grad():
        engine.model.get_parameter("model.layers.3.mlp.up_proj.weight")[0, 0] += 1
    with pytest.raises(WeightMismatch, match=r"version 3: model\.layers\.3\.mlp\.up_proj\.weight"):
        transfer(3)


def test_files_hold_tied_weights_and_adapters(tmp_path):
    weight, adapter = torch.randn(3, 2), Adapter(a=torch.ones(2, 2), b=torch.ones(3, 2), scale=0.5)
    channel = FileChannel(tmp_path / "weights")
    tensors = [("embed.weight", weight), ("lm_head.weight", weight), ("norm.weight", weight.bfloat16())]
    channel.publish(WeightUpdate(1, tensors), readers=1)
    update = channel.publish(WeightUpdate(2, (), {"layers.0.up.weight": adapter}), readers=1).open()
    assert not list(update.tensors) and update.version == 2
    whole = channel.republish().open()
    assert {name: tensor.tolist() for name, tensor in whole.tensors} == {n: t.tolist() for n, t in tensors}
    assert torch.equal(whole.adapters["layers.0.up.weight"].b, adapter.b * 0.5)
    (tmp_path / "weights" / ".weights-3-3.partial").mkdir()  # as a kill in the middle leaves it
    FileChannel(tmp_path / "weights")
    assert not list((tmp_path / "weights").iterdir())
    channel.publish(WeightUpdate(4, tensors), readers=1)
    channel.close()
    assert not list((tmp_path / "weights").iterdir())


def listening() -> set[str]:
    """Addresses and ports on which this process accepts connections."""
    sockets = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1])
    return addresses


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_broadcast_is_whole_and_stays_on_this_machine():
    before, weight = listening(), torch.randn(300, 20)
    channel = CollectiveChannel("127.0.0.1", "gloo", timeout_s=60)
    adapter = Adapter(a=torch.ones(2, 20), b=torch.ones(300, 2), scale=0.5)
    for update in (WeightUpdate(1, [("w", weight)]), WeightUpdate(2, (), {"w": adapter})):
        received = channel.publish(update, readers=1).open()
        tensors = dict(received.tensors)
        assert received.version == update.version and tensors.keys() == dict(update.tensors).keys()
        assert all(torch.equal(tensor, weight) for tensor in tensors.values())
    assert torch.equal(received.adapters["w"].b, adapter.b * 0.5)
    weight.zero_()  # what is kept is a copy
    again = channel.republish().open()
    assert dict(again.tensors)["w"].abs().sum() > 0 and again.adapters.keys() == {"w"}
    opened = listening() - before
    assert opened and {address.split(":")[0] for address in opened} == {"0100007F"}, opened  # 127.0.0.1
    channel.close()


def test_a_broadcast_without_readers_ends():
    channel = CollectiveChannel("127.0.0.1", "gloo", timeout_s=1)
    reference = channel.publish(WeightUpdate(1, [("w", torch.ones(3))]), readers=2)
    with pytest.raises(TransferBroken, match="was interrupted"):
        list(reference.open().tensors)
    assert torch.equal(dict(channel.republish().open().tensors)["w"], torch.ones(3))
    channel.close()
