"""The files of a checkpoint: what is written is read, and what another version wrote is refused with its place."""

import json

import pytest

from atomrl.config import ConfigError
from atomrl.tracking.checkpoint_format import CRITIC, STATE_FOLDER, Counts, read_counts, record_from
from atomrl.trainer.loop import Progress


@pytest.fixture
def state(tmp_path):
    (tmp_path / STATE_FOLDER).mkdir()
    return tmp_path / STATE_FOLDER


def test_counts_are_read_as_written_with_those_of_a_critic_of_its_own(state):
    Counts(7, {"policy": 1}, 2, {"policy": {"w": 6}}).write(state)
    Counts(7, {"critic": 3}).write(state, CRITIC)
    assert read_counts(state.parent) == Counts(7, {"policy": 1, "critic": 3}, 2, {"policy": {"w": 6}})


def test_a_checkpoint_of_an_older_version_has_defaults(state):
    (state / "trainer.json").write_text(json.dumps({"updates": 7, "skipped_in_a_row": {"policy": 0}}))
    assert read_counts(state.parent).ranks == 1


def test_a_model_without_training_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no training_state/trainer\.json"):
        read_counts(tmp_path)


@pytest.mark.parametrize("stored", [{"updates": 1, "skipped_in_a_row": {}, "tokens": 5}, {"updates": 1}])
def test_a_field_of_another_version_is_refused_with_its_file(state, stored):
    (state / "trainer.json").write_text(json.dumps(stored))
    with pytest.raises(
        ConfigError, match=r"training_state/trainer\.json is of another version.*(tokens|skipped_in_a_row)"
    ):
        read_counts(state.parent)


def test_progress_of_another_version_is_refused_with_its_file(tmp_path):
    assert record_from(Progress, {"step": 3}, tmp_path).step == 3
    with pytest.raises(ConfigError, match=r"progress\.json is of another version.*outcomes"):
        record_from(Progress, {"outcomes": []}, tmp_path / "progress.json")
