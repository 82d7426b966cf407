"""Cost of a decode step of the native engine on a GPU, counted on a machine without one.

    python benchmarks/decode_step.py [--parts launches memory schedules compile] [--schedules 1000]

The parts:

    launches   operators and Triton kernels of one step at the shape of Qwen2.5-1.5B (28 layers), counted on tensors
               without memory; beside the step over slots that a CPU takes
    memory     of the cache for 256 ragged rows, beside the tokens that are there and slots of the longest row
    schedules  random requests, aborts, continuations and new weights: pages draw the tokens that slots draw
    compile    every Triton kernel of the step for sm_80, sm_86, sm_89 and sm_90 at shapes of many models: shared
               memory and matrix instructions (needs Triton, no GPU; takes minutes)
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
QWEN = {
    "layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "head_dim": 128, "intermediate": 8960, "vocab": 151_936,
    "norm_eps": 1e-6, "tied_head": True, "qkv_bias": True, "output_bias": False, "mlp_bias": False, "qk_norm": False,
    "max_positions": 4096,
}  # fmt: skip
LAUNCH_NOTHING = {
    "view", "_unsafe_view", "slice", "select", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "split",
    "split_with_sizes", "unbind", "as_strided", "detach", "alias", "unfold", "empty", "new_empty", "empty_like",
    "empty_strided",
}  # fmt: skip
"""Operators that make views or room."""


class Operators(TorchDispatchMode):
    """Counts operators by name; all but `allowed` are an error, where that is given."""

    def __init__(self, allowed: set[str] | None = None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.allowed = allowed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.allowed is not None and name not in self.allowed:
            raise RuntimeError(f"{name} has no place in a step that a CUDA graph holds")
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def launches(self) -> int:
        return sum(count for name, count in self.counts.items() if name not in LAUNCH_NOTHING)


STEP = LAUNCH_NOTHING | {"embedding", "mm", "addmm", "addmm_"}
"""All that a step may consist of beside Triton kernels: one kernel each, of shapes that are known before, no copy from
the host and no look at a value."""


@contextmanager
def triton_ops() -> Iterator[types.ModuleType]:
    """`atomrl.engines.native.triton_ops`, also without Triton: kernels are then names that can be launched."""
    try:
        import triton  # noqa: F401
    except ImportError:
        pass
    else:
        from atomrl.engines.native import triton_ops as module

        yield module
        return

    class Kernel:
        def __init__(self, function) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid):
            return lambda *args, **named: self.run(*args, grid=grid, warmup=False, **named)

        def run(self, *args, **named):
            raise NotImplementedError

    fake, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    fake.jit = lambda function=None, **_: Kernel(function) if function else Kernel
    fake.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    fake.cdiv = lambda a, b: -(-a // b)
    fake.language, language.constexpr = language, int
    added = {"triton": fake, "triton.language": language}
    sys.modules.update(added)
    try:
        import atomrl.engines.native.triton_ops as module
    finally:
        for name in (
            *added,
            "atomrl.engines.native.triton_kernels",
            "atomrl.engines.native.triton_ops",
        ):
            sys.modules.pop(name, None)
    yield module


@contextmanager
def recorded(module: types.ModuleType) -> Iterator[list]:
    """Launches of the module's kernels, as (kernel, arguments, named arguments); none runs."""
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    found: list = []
    for name, kernel in kernels.items():
        kernel.run = lambda *args, name=name, kernel=kernel, **named: found.append((name, kernel, args, named))
    try:
        yield found
    finally:
        for kernel in kernels.values():
            del kernel.run


def step_on(module, device: torch.device, rows: int, adapters: int = 0, dtype=torch.bfloat16, **shape):
    """A step of `rows` rows as a function, all of its tensors on a device."""
    from atomrl.engines.native.cache import DecodeBatch
    from atomrl.engines.native.decode_step import DecodeStep
    from atomrl.engines.native.decoder import DecoderModel
    from atomrl.engines.native.linear import WideLinear
    from atomrl.engines.native.paged_cache import PagedKVCache
    from atomrl.engines.native.step_ops import Drawing, StepRows
    from atomrl.models.decoder_spec import DecoderSpec
    from atomrl.protocols import Adapter

    spec = DecoderSpec(**(QWEN | shape))
    model = DecoderModel(spec, dtype, device, None, WideLinear)
    if adapters:
        sizes = {name: weight.weight_of(part).shape for name, (weight, part) in model.linears.items()}
        room = torch.zeros(2, max(max(shape) for shape in sizes.values()), adapters, device=device)
        model.set_adapters({
            name: Adapter(room[0, : shape[1]].t(), room[1, : shape[0]], 1.0)
            for name, shape in sizes.items() if name.endswith("_proj.weight")
        })  # fmt: skip
    rope = torch.zeros(2, spec.max_positions, spec.head_dim // 2, device=device)
    cache = PagedKVCache(model, (rope[0], rope[1]), rows)
    ops = module.TritonOps(spec)
    state = torch.zeros(10, rows, dtype=torch.int64, device=device)
    tables = torch.zeros(2, rows, 32, dtype=torch.int32, device=device)
    batch = DecodeBatch(*([state[0]] * 5), 1, 1, 1, 1, 1)
    tiles = torch.zeros(rows, ops.tile, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    drawing = Drawing(
        False, False, one, one.long(), torch.zeros(spec.vocab, dtype=torch.int8, device=device),
        torch.zeros(rows, 256, dtype=torch.int32, device=device), torch.zeros(rows, 256, device=device),
    )  # fmt: skip
    step, held = DecodeStep(model, cache, ops), StepRows(state, tiles, tables[0], tables[1], batch)
    return lambda: step(held, drawing)


def example_rows(cache):
    """Four rows of two groups, for a cache that holds 33 tokens of each."""
    from atomrl.engines.native.batching import GROUP, LENGTH, MEMBER, PROMPT_LENGTH, SLOT
    from atomrl.engines.native.cache import DecodeBatch
    from atomrl.engines.native.step_ops import StepRows, tiles_of

    state = torch.zeros(10, 4, dtype=torch.int64)
    state[SLOT], state[GROUP], state[MEMBER] = torch.arange(4), torch.tensor([0, 0, 1, 0]), torch.tensor([0, 1, 0, 2])
    state[PROMPT_LENGTH], state[LENGTH] = torch.tensor([40, 40, 5, 40]), torch.tensor([1, 33, 2, 9])
    batch = DecodeBatch(*state[:4], state[LENGTH] - 1, 33, 40, 4, 2, 3)
    return StepRows(state, tiles_of([0, 0, 1, 0], 4, 1), cache.own.device, cache.prompts.device, batch)


def count_step(adapters: int = 0, rows: int = 256) -> tuple[Counter[str], Counter[str]]:
    """Operators and Triton kernels of a step at 28 layers, none of which a CUDA graph refuses."""
    with triton_ops() as module, torch.inference_mode():
        step = step_on(module, torch.device("meta"), rows, adapters)
        with recorded(module) as launched, Operators(STEP) as operators:
            step()
    return operators.counts, Counter(name for name, *_ in launched)


def count_slots() -> int:
    """Operators of a step over slots in PyTorch at 28 layers, with the draw."""
    from atomrl.engines.generation import requests_of
    from atomrl.types import SamplingParams
    from tests.prompts import prompts_of

    with tempfile.TemporaryDirectory() as folder:
        engine = tiny_engine(Path(folder), num_hidden_layers=QWEN["layers"])
        sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=8, ignore_eos=True)
        engine.submit(
            [request for prompt in prompts_of((5, 6), (7, 8, 9)) for request in requests_of(prompt, sampling)]
        )
        with torch.inference_mode():
            engine.batch.admit(0)
            engine.batch.decode_step()
            with Operators() as operators:
                engine.batch.decode_step()
    return operators.launches()


def tiny_engine(folder: Path, ops=None, **shape):
    """The native engine with a tiny model in float32, by slots in PyTorch or by pages."""
    from transformers import AutoTokenizer

    from atomrl.engines.native.engine import NativeEngine
    from atomrl.engines.requests import EngineOptions
    from tests.tiny import make_tiny_model

    if not (folder / "config.json").exists():
        make_tiny_model(folder, "qwen2", seed=1, scale=0.2, **shape)
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return NativeEngine.from_pretrained(str(folder), tokenizer, options, use_kernel=False, ops=ops)


def launches() -> None:
    """Print the part."""
    print("| decode step of 28 layers | operators | Triton kernels | launches |\n|---|---|---|---|")
    before = count_slots()
    print(f"| slots, PyTorch | {before} | | {before} |")
    for name, rank in (("pages", 0), ("pages, adapters of rank 32", 32)):
        operators, kernels = count_step(rank)
        own = sum(count for operator, count in operators.items() if operator not in LAUNCH_NOTHING)
        print(f"| {name} | {own} | {kernels.total()} | {own + kernels.total()}, and one graph replay for them |")
        print(f"<!-- {dict(operators)} {dict(kernels)} -->")


def ragged_memory(rows: int = 256, members: int = 8, prompt: int = 250, mean: float = 300.0, most: int = 1024):
    """Bytes that a cache in pages holds for ragged rows of groups, of their tokens alone, and of slots.

    Returns:
        Pages, tokens (a prompt once for its group), slots of the longest row (likewise), slots with a prompt each.
    """
    from atomrl.engines.native.decoder import DecoderModel
    from atomrl.engines.native.linear import WideLinear
    from atomrl.engines.native.paged_cache import PagedKVCache
    from atomrl.models.decoder_spec import DecoderSpec

    chance = random.Random(0)
    spec = DecoderSpec(**QWEN)
    with torch.inference_mode():
        model = DecoderModel(spec, torch.bfloat16, torch.device("meta"), None, WideLinear)
        cache = PagedKVCache(model, (torch.zeros(1, device="meta"),) * 2, rows)
        lengths = [min(most, 16 + int(chance.expovariate(1 / mean))) for _ in range(rows)]
        prompts = [chance.randint(prompt // 2, prompt) for _ in range(rows // members)]
        cache.reserve(rows, 1, most)
        cache.reserve_prompts(len(prompts), max(prompts))
        cache.allocate_prompts(dict(enumerate(prompts)))
        for begin in range(0, most, 8):  # as they grow
            cache.allocate({slot: min(length, begin + 8) for slot, length in enumerate(lengths)})
    token = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    slots = rows * max(lengths) + len(prompts) * max(prompts)
    return (
        cache.used_bytes,
        token * (sum(lengths) + sum(prompts)),
        token * slots,
        token * rows * (max(lengths) + max(prompts)),
    )


def memory() -> None:
    """Print the part."""
    pages, tokens, slots, unshared = ragged_memory()
    print("\n| cache of 256 ragged rows, 32 prompts, Qwen2.5-1.5B | GiB |\n|---|---|")
    for name, size in (
        ("tokens alone", tokens),
        ("pages", pages),
        ("slots", slots),
        ("slots, a prompt each", unshared),
    ):
        print(f"| {name} | {size / 2**30:.2f} |")


def run_schedule(engine, seed: int, weights) -> dict:
    """Random calls; what came of each request, as tokens, versions, reason and log-probs."""
    from atomrl.protocols import WeightUpdate
    from atomrl.types import GenerationRequest, SamplingParams

    chance, found, number, kept = random.Random(seed), {}, 0, []
    engine.batch.max_rows = chance.choice((1, 2, 5, 16))
    engine.batch.retained.limit = engine.batch.max_rows
    engine.update_weights(WeightUpdate(0, weights[0].items()))
    asked: dict = {}

    def keep(outputs) -> None:
        for output in outputs:
            parts = [(part.token_ids, part.policy_version) for part in output.segments]
            rates = [rate for part in output.segments for rate in part.logprobs]
            found[output.request_id] = parts, output.finish_reason, rates
            request = asked[output.request_id]
            if request.keep_cache and output.finish_reason != "abort":
                kept.append((request, [token for part in output.segments for token in part.token_ids]))

    def submit(prompt, group, continues=None) -> None:
        nonlocal number
        sampling = SamplingParams(
            max_completion_tokens=chance.choice((1, 5, 20, 34, 40)), temperature=chance.choice((1.0, 0.7, 0)),
            ignore_eos=chance.random() < 0.5, top_k=chance.choice((0, 0, 9)),
        )  # fmt: skip
        requests = []
        for _ in range(1 if continues else chance.randint(1, 4)):
            number += 1
            requests.append(GenerationRequest(
                request_id=f"r{number}", group_id=f"{group}", prompt_token_ids=prompt, sampling=sampling,
                seed=chance.randrange(2**62), keep_cache=chance.random() < 0.4, continues=continues,
            ))  # fmt: skip
        asked.update({request.request_id: request for request in requests})
        engine.submit(requests)

    for turn in range(chance.randint(3, 8)):
        prompt = tuple(chance.choices(range(5, 102), k=chance.choice((1, 3, 31, 32, 33, 50))))
        act = chance.random()
        if act < 0.5 or not engine.held:
            submit(prompt, f"g{turn}")
        elif act < 0.6:
            keep(engine.abort(chance.sample(sorted(engine.held), chance.randint(1, len(engine.held)))))
        elif act < 0.75:
            engine.update_weights(WeightUpdate(turn + 1, weights[turn % 2].items()))
        if kept and chance.random() < 0.7:
            request, tokens = kept.pop()
            longer = (*request.prompt_token_ids, *tokens, *chance.choices(range(5, 102), k=3))
            submit(longer, f"c{turn}", request.request_id)
        keep(engine.poll(0.0))
    while engine.held:
        keep(engine.poll())
    engine.abort()
    return found


def compare_schedules(count: int, slots=None, pages=None) -> tuple[int, int, float]:
    """Tokens drawn in random schedules, those that pages drew otherwise than slots, and the largest difference of a
    log-prob."""
    from atomrl.engines.native.step_ops import PlainOps

    with tempfile.TemporaryDirectory() as folder:
        slots, pages = (tiny_engine(Path(folder), ops, num_hidden_layers=1) for ops in (None, PlainOps()))
        state = {name: tensor.clone() for name, tensor in slots.model.held()}
        weights = state, {name: tensor * 1.1 for name, tensor in state.items()}
        drawn = other = 0
        worst = 0.0
        for seed in range(count):
            one, two = (run_schedule(engine, seed, weights) for engine in (slots, pages))
            assert one.keys() == two.keys()
            for name, (parts, reason, rates) in one.items():
                drawn += len(rates)
                same = (parts, reason) == two[name][:2]
                other += 0 if same else len(rates)
                if same:
                    worst = max([worst, *(abs(a - b) for a, b in zip(rates, two[name][2], strict=True))])
            assert not pages.batch.cache.own.pages or not pages.batch.rows
    return drawn, other, worst


SHAPES = (
    {},
    {"heads": 32, "kv_heads": 8, "qk_norm": True},
    {"heads": 14, "head_dim": 64},
    {"heads": 32, "kv_heads": 32, "head_dim": 80},
    {"heads": 24, "kv_heads": 8, "head_dim": 96},
    {"heads": 16, "kv_heads": 1, "head_dim": 256},
    {"heads": 8, "kv_heads": 4, "head_dim": 256},
)
"""Shapes of heads: 1 to 16 query heads per key head, and every head size of common models."""


def compile_kernels(capabilities, dtype=torch.bfloat16, shapes=SHAPES) -> list[dict]:
    """Every kernel that a step launches, at shapes of many models, for these GPUs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.int8: "i8"}

    def signature(kernel, args) -> tuple[dict, dict, dict]:
        types_, constants, aligned = {}, {}, {}
        for place, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
            if parameter.is_constexpr:
                types_[parameter.name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types_[parameter.name] = f"*{names[value.dtype]}"
                aligned[(place,)] = [["tt.divisibility", 16]]
            else:
                types_[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    aligned[(place,)] = [["tt.divisibility", 16]]
        return types_, constants, aligned

    found = []
    with triton_ops() as module, torch.inference_mode():
        launched: dict[str, tuple] = {}
        for shape in shapes:
            step = step_on(module, torch.device("meta"), 16, dtype=dtype, layers=1, **shape)
            with recorded(module) as calls:
                step()
            for name, kernel, args, named in calls:
                constants = tuple(value for value in args if isinstance(value, int | float))
                launched[f"{name} {constants}"] = (name, kernel, args, named, shape)
        for name, kernel, args, named, shape in launched.values():
            types_, constants, aligned = signature(kernel, args)
            options = {key: value for key, value in named.items() if key in ("num_warps", "num_stages")}
            for capability in capabilities:
                target = GPUTarget("cuda", capability, 32)
                done = triton.compile(ASTSource(kernel, types_, constants, aligned), target=target, options=options)
                found.append({
                    "kernel": name, "sm": capability, "shape": shape,
                    "shared": done.metadata.shared, "cubin": len(done.asm["cubin"]),
                    "mma": done.asm["ptx"].count("mma.sync") + done.asm["ptx"].count("wgmma.mma_async"),
                })  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["launches", "memory", "schedules", "compile"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:3])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--capabilities", nargs="+", type=int, default=[80, 86, 89, 90])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="compile for the first of SHAPES")
    parser.add_argument("--json", action="store_true", help="print the part compile as JSON")
    arguments = parser.parse_args()
    if "launches" in arguments.parts:
        launches()
    if "memory" in arguments.parts:
        memory()
    if "schedules" in arguments.parts:
        drawn, other, worst = compare_schedules(arguments.schedules)
        print(f"\n{arguments.schedules} schedules: {drawn} tokens, {other} in completions that differ, "
              f"log-probs within {worst:.1e}")  # fmt: skip
    if "compile" in arguments.parts:
        found = compile_kernels(arguments.capabilities, shapes=SHAPES[: arguments.shapes])
        print(json.dumps(found) if arguments.json else "\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
