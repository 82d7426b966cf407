"""The order in which samples are handed out. One integer is the whole state."""

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cached_property

from atomrl.data.problems import DataError
from atomrl.types import Sample


class PromptStream:
    """Samples without end: every epoch hands out each sample exactly once, in an order of its own.

    The order of an epoch is a function of the seed and the epoch's number, so `position`, the number of samples handed
    out since the start of the run, alone resumes a stream.

    Example:
        >>> samples = [Sample(sample_id=name, prompt=name, ground_truth="") for name in "abc"]
        >>> stream = PromptStream(samples, seed=0, shuffle=False)
        >>> [prompt_id for prompt_id, _ in stream.take(4)]
        ['0:a', '0:b', '0:c', '1:a']
        >>> stream.position = 2
        >>> [prompt_id for prompt_id, _ in stream.take(1)]
        ['0:c']
    """

    def __init__(self, samples: Sequence[Sample], seed: int = 0, shuffle: bool = True) -> None:
        """
        Raises:
            DataError: there are no samples, or two have the same id.
        """
        if not samples:
            raise DataError("a stream needs at least one sample")
        ids = {sample.sample_id for sample in samples}
        if len(ids) < len(samples):
            raise DataError(f"sample ids must be unique: {len(samples)} samples have {len(ids)} ids")
        self.samples = tuple(samples)
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[str, Sample]]:
        """The next `count` samples, each with its prompt id `epoch:sample_id`; a batch may cross epochs."""
        taken = [self.at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def at(self, position: int) -> tuple[str, Sample]:
        """The sample at a position since the start of the run, with its prompt id."""
        epoch, index = divmod(position, len(self.samples))
        sample = self.samples[self._epoch_order(epoch)[index]]
        return f"{epoch}:{sample.sample_id}", sample

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.samples)))
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "little")).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples and their order; a checkpoint stores it, so that changed data are noticed."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            content = [sample.sample_id, sample.prompt, sample.ground_truth, sample.data_source, dict(sample.columns)]
            digest.update(json.dumps(content, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()
