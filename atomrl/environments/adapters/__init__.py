"""Other people's environments: each of their interfaces as an episode."""

import hashlib

from atomrl.types import Sample


def seed_of(sample: Sample) -> int:
    """What a game is made with: the row's column `seed`, else a number of its own, so that all completions of a prompt
    play the same game."""
    digest = hashlib.blake2b(sample.sample_id.encode(), digest_size=4).digest()
    return int(sample.columns.get("seed", int.from_bytes(digest, "little") >> 1))
