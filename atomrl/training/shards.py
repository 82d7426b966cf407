"""What several ranks need to go on, in shards: each writes its own, and any number of them reads (PyTorch's DCP).

The files are safetensors, whose headers say where a shard lies in its tensor, so nothing is unpickled from a disk.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atomrl.config import ConfigError
from atomrl.hints import said_as
from atomrl.training.collective import Collective
from atomrl.training.optimizer import Optimizer
from atomrl.training.role_models import SHARDS, STATE_FOLDER
from atomrl.training.roles import RoleName

COUNTS = "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_shards(trained: Mapping[RoleName, Optimizer], ranks: Collective, updates: int, folder: Path) -> None:
    """Write weights and moments of every optimizer, random states and counts; all ranks call it."""
    state = folder / STATE_FOLDER
    if ranks.rank == 0:
        (state / SHARDS).mkdir(parents=True)
    ranks.max(0)  # the folder is there from here on
    writer = HuggingFaceStorageWriter(str(state / SHARDS), save_distributed=True)
    save(_tensors(trained), storage_writer=writer)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state()
    save_file(random, state / f"random_{ranks.rank}.safetensors")
    if ranks.rank == 0:
        found = {
            "updates": updates,
            "ranks": ranks.world,
            "skipped_in_a_row": {name: optimizer.skipped_in_a_row for name, optimizer in trained.items()},
            "steps": {name: _steps(optimizer) for name, optimizer in trained.items()},
        }
        (state / COUNTS).write_text(json.dumps(found) + "\n", encoding="utf-8")


def load_shards(trained: Mapping[RoleName, Optimizer], ranks: Collective, folder: Path) -> int:
    """Read what `save_shards` wrote, on as many ranks as there are now.

    Returns:
        How many updates were done.

    Raises:
        ConfigError: there is none, or it is another model's.
    """
    state = folder / STATE_FOLDER
    if any(optimizer.train.optimizer != "adamw" for optimizer in trained.values()):
        raise ConfigError(f"train.optimizer: checkpoint {folder} of several ranks has the moments of adamw; take that")
    if not (state / SHARDS).is_dir():
        raise ConfigError(
            f"{folder} holds no {STATE_FOLDER}/{SHARDS}: it is no checkpoint of several ranks; go on without the "
            "section backend, or start a new run from its model"
        )
    saved = json.loads((state / COUNTS).read_text(encoding="utf-8"))
    if saved["skipped_in_a_row"].keys() != trained.keys():
        critic = "" if "critic" in saved["skipped_in_a_row"] else "out"
        raise ConfigError(f"checkpoint {folder} was written with{critic} a critic")
    for name, optimizer in trained.items():
        _make_moments(optimizer, saved["steps"][name])
        optimizer.skipped_in_a_row = saved["skipped_in_a_row"][name]
    tensors, reader = _tensors(trained), HuggingFaceStorageReader(str(state / SHARDS))
    with said_as(ConfigError, f"checkpoint {folder} cannot be read", SafetensorError, OSError):
        there: Any = reader.read_metadata().state_dict_metadata
    known = {key: tuple(found.size) for key, found in there.items()}
    wrong = [key for key, tensor in tensors.items() if known.get(key) != tuple(tensor.shape)]
    if wrong or len(known) != len(tensors):
        example = wrong[0] if wrong else min(known.keys() - tensors.keys())
        raise ConfigError(f"checkpoint {folder} is of another model: {example} has shape {known.get(example)} there")
    load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    if saved["ranks"] == ranks.world:
        random = load_file(state / f"random_{ranks.rank}.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return int(saved["updates"])


def _tensors(trained: Mapping[RoleName, Optimizer]) -> dict[str, Any]:
    """Weights, and the moments of those that were stepped."""
    found: dict[str, Tensor] = {}
    for role, optimizer in trained.items():
        for name, weight in optimizer.weights.items():
            found[f"{role}/weight/{name}"] = weight.detach()
            state: Mapping[str, Any] = optimizer.adamw.state.get(weight, {})
            found |= {f"{role}/{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
    return found


def _steps(optimizer: Optimizer) -> dict[str, int]:
    states = {name: optimizer.adamw.state.get(weight, {}) for name, weight in optimizer.weights.items()}
    return {name: int(state["step"]) for name, state in states.items() if state}


def _make_moments(optimizer: Optimizer, steps: Mapping[str, int]) -> None:
    """Room for the moments of the weights that were stepped."""
    optimizer.adamw.state.clear()
    for name, count in steps.items():
        if (weight := optimizer.weights.get(name)) is not None:
            state = optimizer.adamw.state[weight]
            state["step"] = torch.tensor(float(count), device=weight.device)
            state |= {moment: torch.zeros_like(weight).detach() for moment in MOMENTS}
