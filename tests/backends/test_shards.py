"""A checkpoint of several ranks: exact on as many, and the same on fewer and on more."""

import os
import warnings
from functools import partial

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from atomrl.backends.local import LocalBackend
from atomrl.backends.shards import ShardReader, read_whole
from atomrl.config import ConfigError, CriticConfig, LoraConfig
from atomrl.tracking.checkpoints import step_folders, writing_checkpoint
from tests.backends.batches import weights_of
from tests.backends.continuing import alike, go_on, step
from tests.backends.equality import case, make_models, run_ranks, settings_of, with_ranks
from tests.backends.one_rank import one_rank

CASES = {
    "critic": case("ppo", critic=CriticConfig(learning_rate=1e-3)),
    "transformers": case("grpo", model="other"),
    "adapters": case("grpo", lora=LoraConfig(rank=3, dropout=0.3)),
    "modules beside adapters": case("grpo", model="untied", lora=LoraConfig(rank=3, modules_to_save=["lm_head"])),
}


def save_and_go_on(folder, checkpoints, ranks):
    """Two steps, a checkpoint, two more steps; and the same again from the checkpoint."""
    results = {}
    for name, given in CASES.items():
        backend, algorithm = with_ranks(given, folder, ranks)
        for number in range(2):
            step(backend, algorithm, number)
        backend.checkpoint_part_bytes = 20_000  # several files, some of each rank
        backend.save(checkpoints / name)
        if name == "critic":  # what is written is what was when it began
            saved = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
            step(backend, algorithm, 9)
            backend.saved()
            now = weights_of(backend)
            if ranks.rank == 0:
                theirs = AutoModelForCausalLM.from_pretrained(checkpoints / name).state_dict()
                assert len(list((checkpoints / name).glob("model-*-of-*.safetensors"))) > 2
                assert all(torch.equal(tensor, theirs[key]) for key, tensor in saved.items())
                assert any(not torch.equal(tensor, theirs[key]) for key, tensor in now.items())
            ranks.max(0)
            backend.load(checkpoints / name)
        backend.saved()
        straight = go_on(backend, algorithm)
        again, _ = with_ranks(given, folder, ranks)
        again.load(checkpoints / name)
        results[name] = straight, go_on(again, algorithm)
    return results


def load_and_go_on(folder, checkpoints, ranks):
    results = {}
    for name, given in CASES.items():
        backend, algorithm = with_ranks(given, folder, ranks)
        backend.load(checkpoints / name)
        results[name] = go_on(backend, algorithm)
    return results


def test_one_process_reads_shards_without_a_warning(tmp_path):
    folder = make_models(tmp_path)
    given = case("grpo")
    with one_rank() as ranks:
        backend, algorithm = with_ranks(given, folder, ranks)
        step(backend, algorithm, 0)
        backend.save(tmp_path / "checkpoint")
        backend.saved()
    alone = LocalBackend(**settings_of(given, folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        alone.load(tmp_path / "checkpoint")
    assert alone.updates == 1


@pytest.mark.slow
def test_two_ranks_then_one_then_three(tmp_path):
    folder = make_models(tmp_path)
    by_two, by_one = tmp_path / "two", tmp_path / "one"
    (tmp_path / "ran_2").mkdir()
    (tmp_path / "ran_3").mkdir()
    first, _ = run_ranks(partial(save_and_go_on, folder, by_two), 2, tmp_path / "ran_2")
    for name, (straight, again) in first.items():
        assert straight[0] == again[0], "bit for bit"
        assert all(torch.equal(tensor, again[1][key]) for key, tensor in straight[1].items()), name
    with one_rank() as ranks:
        for name, given in CASES.items():
            backend, algorithm = with_ranks(given, folder, ranks)
            backend.load(by_two / name)
            backend.save(by_one / name)
            backend.saved()
            if name != "adapters":  # whose dropout is another with other ranks
                alike(go_on(backend, algorithm), first[name][0])
    third = run_ranks(partial(load_and_go_on, folder, by_one), 3, tmp_path / "ran_3")[0]
    for name in CASES.keys() - {"adapters"}:
        alike(third[name], first[name][0])
    assert third["adapters"][1].keys() == first["adapters"][0][1].keys()


def test_a_checkpoint_is_complete_plain_and_of_its_model(tmp_path, monkeypatch):
    folder, given = make_models(tmp_path), CASES["critic"]
    with one_rank() as ranks:
        backend, algorithm = with_ranks(given, folder, ranks)
        step(backend, algorithm, 0)
        backend.save(tmp_path / "checkpoint")
        backend.saved()
        files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}, "nothing is pickled"
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights_of(backend).items())
        headers, plain = [], HuggingFaceStorageReader.read_metadata
        monkeypatch.setattr(HuggingFaceStorageReader, "read_metadata", lambda s: headers.append(s) or plain(s))
        backend.load(tmp_path / "checkpoint")
        reader = ShardReader(tmp_path / "checkpoint")
        for name, weight in list(backend.trained["policy"].weights.items())[:3]:  # one by one, as Megatron does
            key = f"policy/weight/{name}"
            assert torch.equal(read_whole({key: tuple(weight.shape)}, reader)[key], weight.full_tensor())
        assert len(headers) == 2, "each time headers of all files are read once"
        other, _ = with_ranks(CASES["transformers"], folder, ranks)
        with pytest.raises(ConfigError, match="with a critic"):
            other.load(tmp_path / "checkpoint")
        other.save(tmp_path / "other")
        other.saved()
        untied, _ = with_ranks(case("grpo", model="untied"), folder, ranks)
        with pytest.raises(ConfigError, match="of another model"):
            untied.load(tmp_path / "other")
        (shard,) = (tmp_path / "checkpoint" / "training_state" / "shards").iterdir()
        shard.write_bytes(shard.read_bytes()[:100])
        with pytest.raises(ConfigError, match="cannot be read"):
            backend.load(tmp_path / "checkpoint")
        with pytest.raises(ConfigError, match="several ranks"):
            backend.load(tmp_path)


WRITE_ERRORS = {
    "shards": CheckpointException("write", {1: (OSError(28, "No space left on device"), None)}),
    "unnamed": CheckpointException("write", {}),
    "file": SafetensorError("I/O error: File too large (os error 27)"),
    "another rank": None,
}


@pytest.mark.parametrize("kind", WRITE_ERRORS)
def test_a_write_error_of_any_rank_ends_the_save(tmp_path, monkeypatch, kind):
    def fail(*given, **settings):
        if WRITE_ERRORS[kind] is not None:
            raise WRITE_ERRORS[kind]

    with one_rank() as ranks:
        backend, _ = with_ranks(CASES["transformers"], make_models(tmp_path), ranks)
        monkeypatch.setattr("atomrl.backends.shards.save", fail)
        if kind == "another rank":
            monkeypatch.setattr(ranks, "union", lambda names: [*names, "rank 1: OSError: no space"])
        with (
            pytest.raises(OSError, match=r"rank [01]: |the disk is full"),
            writing_checkpoint(tmp_path / "checkpoints", 1) as folder,
        ):
            backend.save(folder)
            backend.saved()
    assert not step_folders(tmp_path / "checkpoints")


def test_a_truncated_file_is_no_checkpoint(tmp_path):
    said = pytest.raises(OSError, match=r"part\.safetensors was not written in full")
    with said, writing_checkpoint(tmp_path, 1) as folder:
        save_file({"a": torch.zeros(9)}, folder / "part.safetensors")
        os.truncate(folder / "part.safetensors", 80)
    assert not step_folders(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_one_process_continues_from_shards(tmp_path, name):
    folder, given = make_models(tmp_path), CASES[name]
    with one_rank() as ranks:
        backend, algorithm = with_ranks(given, folder, ranks)
        step(backend, algorithm, 0)
        backend.save(tmp_path / "checkpoint")
        backend.saved()
        expected = go_on(backend, algorithm)
    alone = LocalBackend(**settings_of(given, folder))
    alone.load(tmp_path / "checkpoint")
    alike(go_on(alone, algorithm), expected)
