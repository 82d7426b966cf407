"""A run's newest weights as a file, which producers in other processes read."""

from __future__ import annotations

import json
from pathlib import Path

from atomrl.protocols import Adapter, RolloutEngine, TrainingBackend, WeightUpdate
from atomrl.tracking.checkpoints import disk_full_named
from atomrl.tracking.run_directory import PUBLISHED_WEIGHTS
from atomrl.weights import checked_update


class PublishedWeights:
    """The weights of a run in pool mode, as safetensors in its folder, with their version and the run's name in the
    pool. Of a policy with adapters it has the adapters alone: producers start from the same base.

    It is replaced whole by a rename, so whoever has it open reads on in the one that it opened.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PUBLISHED_WEIGHTS

    def write(self, trainer: TrainingBackend, version: int, run: str) -> None:
        """Publish the trainer's weights as they are now.

        Raises:
            OSError: the disk is full; the file from before stays.
        """
        from safetensors.torch import save_file

        update = trainer.weight_update(version)
        tensors, seen = {}, set()
        for name, tensor in () if update.adapters else update.tensors:
            if tensor.data_ptr() not in seen:  # of a tied weight one name is enough
                tensors[name] = tensor.detach().contiguous()
                seen.add(tensor.data_ptr())
        for name, adapter in update.adapters.items():
            tensors[f"a:{name}"], tensors[f"b:{name}"] = adapter.a.contiguous(), adapter.b.contiguous()
        forms = {name: [adapter.scale, adapter.transposed] for name, adapter in update.adapters.items()}
        about = {"version": version, "run": run, "adapters": forms}
        aside = self.path.with_name(f".{self.path.name}.partial")
        with disk_full_named(self.path.parent, f"the weights of step {version} were not published"):
            save_file(tensors, aside, metadata={"atomrl": json.dumps(about)})
            aside.replace(self.path)

    def read(self, current: tuple[str, int]) -> tuple[str, WeightUpdate] | None:
        """The run's name in the pool, and the weights; None where they are `current`, (name, version), or there are
        none."""
        from safetensors import safe_open

        try:
            file = safe_open(self.path, framework="pt")
        except FileNotFoundError:
            return None
        with file as opened:
            about = json.loads(opened.metadata()["atomrl"])
            if (about["run"], about["version"]) == current:
                return None
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no dict
        adapters = {
            name: Adapter(tensors.pop(f"a:{name}"), tensors.pop(f"b:{name}"), scale, transposed)
            for name, (scale, transposed) in about["adapters"].items()
        }
        return about["run"], WeightUpdate(about["version"], list(tensors.items()), adapters)


class WeightFollower:
    """Brings the weights that a run publishes to an engine.

    Attributes:
        run: whose weights the engine has; empty as long as they are those it started with.
    """

    def __init__(self, engine: RolloutEngine, published: PublishedWeights) -> None:
        self.engine, self.published, self.run = engine, published, ""

    def update(self) -> bool:
        """Give the engine what is new; whether there was something.

        Raises:
            ValueError: names or shapes do not fit the engine.
        """
        found = self.published.read((self.run, self.engine.version))
        if found is None:
            return False
        run, update = found
        self.engine.update_weights(checked_update(update, self.engine.weight_shapes()))
        self.run = run
        return True
