"""The same training on one process and on ranks: every algorithm, five steps of two updates each."""

import multiprocessing
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM, GPT2Config

from atomrl.algorithms import ALGORITHMS, PREFERENCES, objective_of
from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.group import Ranks
from atomrl.backends.local import LocalBackend
from atomrl.batches import flat_fields
from atomrl.common.metrics import values
from atomrl.config import CriticConfig, FSDPConfig, LoraConfig, ModelConfig, TrainConfig
from atomrl.data.rows import to_training_batches
from atomrl.models import kernel_library as cpp
from atomrl.weight_sync.broadcast import LOOPBACK, open_store
from tests.algorithms.batches import changed, flat_rows, make_rows, with_turns
from tests.algorithms.test_preferences import step_rows
from tests.backends.batches import weights_of
from tests.tiny import make_tiny_model

# A larger epsilon than Adam's: with that, a weight whose gradient is nothing but rounding moves by its sign.
TRAIN = {"learning_rate": 3e-4, "adam_eps": 1e-3, "tokens_per_micro_batch": 40}
STEPS, UPDATES = 5, 2


def single(rows):
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors(rows).items()}


def tensors(rows):
    return {name: value for name, value in flat_fields(rows).items() if isinstance(value, torch.Tensor)}


def drawn(seed):
    """Twelve rollouts of unequal length, one of them without a token that is trained on."""
    return flat_rows(**(single(make_rows(seed=seed)) | {"old_logprobs": None}))


def turns(seed):
    return flat_rows(**(single(with_turns(make_rows(seed=seed))) | {"old_logprobs": None}))


def compared(seed):
    """With labels, pairs, and completions of other prompts, which are only measured."""
    return flat_rows(**(single(step_rows()) | {"old_logprobs": None}))


def pairs(seed):
    rows = flat_rows(**{name: value[:10] for name, value in tensors(drawn(seed)).items()})
    labels = torch.tensor([1, -1]).repeat(rows.rows // 2)
    return changed(rows, labels=labels, pair_ids=torch.arange(rows.rows) // 2, pair_margins=torch.ones(rows.rows))


def shared(seed):
    """Groups whose rows have the same prompt, of six tokens."""
    given = tensors(drawn(seed))
    before = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(seed)).repeat_interleave(4, 0)
    wide = {name: F.pad(part, (6, 0)) for name, part in given.items() if part.shape == given["tokens"].shape}
    wide["tokens"][:, :6] = before
    heads = torch.arange(11) < given["prompt_lengths"][:, None]
    wide["tokens"][:, 6:][heads] = 7
    longer = {name: given[name] + 6 for name in ("lengths", "prompt_lengths")}
    return flat_rows(**(given | wide | longer))


def few(seed):
    """One row, so that most ranks have none."""
    return flat_rows(**{name: value[:1] for name, value in tensors(drawn(seed)).items()} | {"old_logprobs": None})


def masked(seed):
    """Half of the rows without a token that is trained on."""
    rows = drawn(seed)
    return replace(rows, loss_mask=rows.loss_mask & (torch.arange(rows.rows) % 2 == 0)[:, None])


def case(name, rows=drawn, *, axes=None, model="base", lora=None, train=None, fsdp=None, **settings):
    return {
        "name": name, "rows": rows, "axes": axes or {}, "model": model, "lora": lora, "fsdp": fsdp or {},
        "train": TRAIN | (train or {}), "settings": settings,
    }  # fmt: skip


CASES = {name: case(name) for name in ALGORITHMS if name not in ("trpo", "gigpo")} | {"gigpo": case("gigpo", turns)}
CASES |= {name: case(name, compared) for name in PREFERENCES}
CASES |= {
    "reward_model": case("reward_model", pairs),
    "sft of transformers": case("grpo", model="other"),
    "ppo of transformers": case("ppo", model="other", critic=CriticConfig(path="base", learning_rate=1e-3)),
    "shared prompts": case("grpo", shared, train={"tokens_per_micro_batch": 80, "learning_rate": 3e-5}),
    "one row": case("grpo", few),
    "one row and a critic": case("ppo", few),
    "masked rows": case("ppo", masked),
    "masked rows and a group": case("gspo", masked),
    "adapters": case("grpo", lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}),
    "modules beside adapters": case(
        "grpo",
        model="untied",
        lora=LoraConfig(rank=4, modules_to_save=["lm_head", "embed_tokens"]),
        axes={"kl": {"coefficient": 0.1}},
    ),
    "adapters of a reward model": case("reward_model", pairs, lora=LoraConfig(rank=4)),
    "adapters of transformers": case("grpo", model="other", lora=LoraConfig(rank=4)),
    "summed once": case("ppo", fsdp={"reduce": "update"}, train={"rows_per_micro_batch": 1}),
    "many micro-batches": case("grpo", train={"rows_per_micro_batch": 1}),
    "clipped": case("ppo", train={"max_grad_norm": 0.05}),
    "checkpointed": case("grpo", checkpointed=True),
    "checkpointed transformers": case("grpo", model="other", checkpointed=True),
    "untied": case("grpo", model="untied"),
}
"""Name -> what is trained, and how."""
ON_FOUR = (
    "grpo", "ppo", "dapo", "gspo", "dpo", "kto", "gkd", "reward_model", "one row", "masked rows", "adapters",
    "summed once", "shared prompts",
)  # fmt: skip
HYBRID = {"copies of shards": case("ppo", fsdp={"replicas": 2}), "copies, summed once": case(
    "grpo", fsdp={"replicas": 2, "reduce": "update"})}  # fmt: skip


def make_models(folder):
    make_tiny_model(folder / "base", "qwen2")
    make_tiny_model(folder / "untied", tie_word_embeddings=False)
    make_tiny_model(folder / "teacher", "qwen2", seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = GPT2Config(vocab_size=102, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "other")
    return folder


def settings_of(settings, folder):
    """Return the arguments of `LocalBackend`."""
    algorithm = objective_of({"name": settings["name"], **settings["axes"]})
    if hasattr(algorithm, "resolved"):
        limit = {"max_completion_tokens": 8} if settings["name"] in ALGORITHMS else {}
        algorithm = algorithm.resolved(**limit)
    given = dict(settings["settings"])
    critic = given.get("critic") or CriticConfig(learning_rate=1e-3)
    return {
        "model": ModelConfig(
            path=str(folder / settings["model"]), dtype=given.pop("dtype", "float32"), lora=settings["lora"],
            quantization=given.pop("quantization", None),
            gradient_checkpointing=given.pop("checkpointed", False), pack_rows=given.pop("pack_rows", None),
        ),
        "train": TrainConfig(**settings["train"]),
        "algorithm": algorithm,
        "total_updates": STEPS * UPDATES,
        "critic": critic.model_copy(update={"path": str(folder / critic.path)}) if critic.path else critic,
        "teacher": str(folder / "teacher"),
    }  # fmt: skip


def train(backend, algorithm, rows):
    """Train five steps; return metrics of each update, outputs without gradient of each step, weights at the end."""
    metrics, outputs, state = [], [], {}
    for step in range(STEPS):
        made = backend.forward_only(rows(step), algorithm.needs)
        outputs.append({name: getattr(made, name) for name in sorted(algorithm.needs)})
        credited = algorithm.advantages(made, state)
        state = dict(credited.state)
        for part in to_training_batches(credited, algorithm, updates=UPDATES, epochs=1, seed=0, step=step):
            metrics.append(values(backend.train_step(part, algorithm)))
    weights = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    return {"metrics": metrics, "outputs": outputs, "weights": weights}


def locally(case, folder):
    settings = settings_of(case, folder)
    return train(LocalBackend(**settings), settings["algorithm"], case["rows"])


def alone_by_pytorch(settings, folder):
    """One process, by PyTorch's own operations: where gradients grow from step to step, what the C++ kernels round
    otherwise comes to some 1e-5 of their norm, and is not what is compared."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpp, "usable", lambda x: False)
        return locally(settings, folder)


def with_ranks(given, folder, ranks, kind=FSDPBackend):
    """A rank's back end of a case, and its algorithm."""
    settings = settings_of(given, folder)
    backend = kind(FSDPConfig(type="fsdp", **given["fsdp"]), collective=ranks, device="cpu", **settings)
    return backend, settings["algorithm"]


def all_cases(cases, folder, ranks):
    """Run all cases on one rank, each with its own back end; rank 0 returns the weights."""
    results = {}
    for name, given in cases.items():
        backend, algorithm = with_ranks(given, folder, ranks)
        results[name] = train(backend, algorithm, given["rows"])
        backend.close()
    return results


def rank_main(work, rank, world, port, results):
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300))
    ranks = Ranks(store, rank, world, torch.device("cpu"), 300.0)
    torch.save(work(ranks), results / f"{rank}.pt")
    ranks.close()


def run_ranks(work, world, results):
    """`work(ranks)` in so many processes, and what each gave."""
    store, port = open_store(LOOPBACK, timedelta(seconds=300))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports take longer than most of this work
    processes = [context.Process(target=rank_main, args=(work, rank, world, port, results)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, codes
    del store
    return [torch.load(results / f"{rank}.pt") for rank in range(world)]
