"""Weight transfer: how a trainer's weights come to an engine, checked before and verified after."""

from atomrl.weights.hashing import tensor_hash
from atomrl.weights.transfer import InProcessTransfer, ReadBack, WeightMismatch, checked_update

__all__ = ["InProcessTransfer", "ReadBack", "WeightMismatch", "checked_update", "tensor_hash"]
