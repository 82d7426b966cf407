"""Groups come out of a pool as they went in."""

import math
from contextlib import closing
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from atomrl.data.rows import to_rows
from atomrl.pool.codec import decode, encode, problem_json
from atomrl.pool.exports import export_rows, import_rows, write_rows
from atomrl.pool.store import RolloutPool
from atomrl.types import Episode, Problem, RaggedIds, Turn
from tests.pool.made import group, rich_episode, rich_group, settings


def test_a_group_is_restored():
    made = group(3, version=7)
    assert decode(encode(made).payload) == made


def test_turns_versions_candidates_and_failures_return():
    ragged = RaggedIds(torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 7, 1], dtype=torch.int32))
    made = rich_group(ragged)
    decoded = decode(encode(made).payload)
    again = decoded[0].segments[2].candidates
    assert again.counts.equal(ragged.counts) and again.ids.equal(ragged.ids) and again.counts.dtype == torch.int32
    segments = [replace(part, candidates=ragged if part.candidates else None) for part in decoded[0].segments]
    assert [replace(decoded[0], segments=tuple(segments)), decoded[1]] == made


def utf8(episode):
    """Without a lone surrogate, which no environment's worker lets through."""
    if episode is None:
        return None
    return replace(episode, turns=tuple(replace(turn, text="é") for turn in episode.turns))


def test_an_episode_is_restored():
    ragged = RaggedIds(torch.tensor([1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
    decoded = decode(encode(rich_group(ragged)).payload)
    assert [item.episode for item in decoded] == [rich_episode(), None]
    defaults = {field.name: field.default for kind in (Episode, Turn) for field in fields(kind)}
    episode = decoded[0].episode
    given = [*vars(episode).items(), *vars(episode.turns[0]).items()]
    plain = {name for name, value in given if value == defaults[name]}
    assert not plain, f"these are not tested: {plain}"


def test_rows_of_a_group_from_a_pool_are_those_of_the_group():
    """Log-probs of any float: they are trained as float32."""
    made = group(1)
    odd = replace(made[0].segments[1], logprobs=(-0.1, -1e-9, -30.3, -2 / 3, -1.1))
    made[0] = replace(made[0], segments=(made[0].segments[0], odd))
    before, after = to_rows(made), to_rows(decode(encode(made).payload))
    assert all(
        value.equal(getattr(after, name)) for name, value in vars(before).items() if isinstance(value, torch.Tensor)
    )


def test_a_baseline_that_is_no_number_stays_one():
    made = [replace(item, baseline_reward=math.nan) for item in group(1)]
    assert all(math.isnan(item.baseline_reward) for item in decode(encode(made).payload))


def test_the_digest_is_of_tokens_alone():
    digest = encode(group(1)).digest
    assert encode(group(1, version=5, rewards=(0.0, 0.0))).digest == digest
    assert encode(group(1, salt=1)).digest != digest
    first, second = group(1)
    moved = replace(first, segments=(*first.segments[:1], replace(first.segments[1], token_ids=(1, 2, 3, 4, 6))))
    assert encode([moved, second]).digest != digest


def test_the_ends_of_completions_are_kept():
    """Equal tokens, one after the other, cut at another place."""

    def cut(*sizes):
        made, ids, start = [], tuple(range(6)), 0
        for item, size in zip(group(1), sizes, strict=True):
            part = replace(item.segments[1], token_ids=ids[start : start + size], logprobs=(0.0,) * size)
            made.append(replace(item, segments=(item.segments[0], part)))
            start += size
        return encode(made).digest

    assert cut(2, 4) != cut(3, 3)


def test_mixed_groups_and_other_objects_are_refused():
    with pytest.raises(ValueError, match="one prompt"):
        encode([*group(1), *group(2)])
    with pytest.raises(ValueError, match="one prompt"):
        encode([])
    with pytest.raises(ValueError, match=r"float32.*columns"):
        problem_json(Problem(problem_id="a", prompt="", ground_truth=np.float32(1)))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_episode_is_in_an_export_and_returns(tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    ragged = RaggedIds(torch.tensor([1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
    made = [replace(item, episode=utf8(item.episode)) for item in rich_group(ragged)]
    with closing(RolloutPool(tmp_path / "pool.sqlite", settings())) as pool:
        pool.put([made])
        assert write_rows(export_rows(pool), tmp_path / f"rows.{form}") == 2
    with closing(RolloutPool(tmp_path / "other.sqlite", settings())) as other:
        assert import_rows(other, tmp_path / f"rows.{form}") == (1, 1)
        ((_, trajectories),) = other.groups()
    assert [item.episode for item in trajectories] == [utf8(rich_episode()), None]
