"""A back end whose models are elsewhere: each call goes to the handle that has the model, and nothing else changes."""

from functools import partial
from typing import get_args

import pytest
import torch

from atomrl.backends.distributed import DistributedBackend
from atomrl.backends.local import LocalBackend
from atomrl.backends.rank_actors import BackendInActor
from atomrl.backends.roles import RoleName
from atomrl.config import ConfigError
from tests.backends.equality import case, locally, make_models, settings_of, train

APART = ("reference", "critic")
PPO = case("ppo", axes={"kl": {"coefficient": 0.1}})


class Here:
    """A handle of a back end in this process, called when its answer is waited for."""

    def __init__(self, build):
        self.inner, self.waited = BackendInActor(build), []

    def share(self, value):
        return value

    def start(self, method, *arguments):
        return partial(self._call, method, *arguments)

    def _call(self, method, *arguments):
        self.waited.append(method)
        return getattr(self.inner, method)(*arguments)

    def close(self):
        self.inner.close()


def apart(folder):
    settings = settings_of(PPO, folder)
    others = [role for role in get_args(RoleName) if role not in APART]
    handles = {role: Here(partial(LocalBackend, roles=[role], **settings)) for role in APART}
    return DistributedBackend(Here(partial(LocalBackend, roles=others, **settings)), handles)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def test_models_apart_train_the_same_to_the_last_bit(folder):
    """Metrics of the memory of each process come on top."""
    alone, backend = locally(PPO, folder), apart(folder)
    trained = train(backend, settings_of(PPO, folder)["algorithm"], PPO["rows"])
    assert all(torch.equal(tensor, alone["weights"][name]) for name, tensor in trained["weights"].items())
    for one, other in zip(trained["outputs"], alone["outputs"], strict=True):
        assert one.keys() == other.keys() >= {"ref_logprobs", "values"}
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    for one, other in zip(trained["metrics"], alone["metrics"], strict=True):
        assert other.items() <= one.items()
    assert {"train_step", "forward_only"} <= set(backend.apart["critic"].waited)
    assert set(backend.apart["reference"].waited) == {"forward_only"}, "it is not trained"


def test_checkpoints_go_to_and_fro(folder, tmp_path):
    settings = settings_of(PPO, folder)
    backend, alone, again = apart(folder), LocalBackend(**settings), apart(folder)
    train(backend, settings["algorithm"], PPO["rows"])
    backend.save(tmp_path / "apart")()
    alone.load(tmp_path / "apart")
    alone.save(tmp_path / "alone")
    again.load(tmp_path / "alone")
    first, second = (dict(each.weight_update(1).tensors) for each in (backend, again))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_folder_that_the_trainer_does_not_share_is_refused(folder, tmp_path):
    backend = apart(folder)
    for handle in (backend.trainer, backend.apart["critic"]):
        handle.inner.backend.save = lambda there: None  # it has written to a disk of its own
    with pytest.raises(ConfigError, match="not shared"):
        backend.save(tmp_path)()
