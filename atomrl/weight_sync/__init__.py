"""Weight sync from the trainer to the rollout engines. Updates are validated before and verified by hashes after."""

from atomrl.weight_sync.hashes import tensor_hash
from atomrl.weight_sync.transfer import InProcessTransfer, ReadBack, WeightMismatch, checked_update

__all__ = ["InProcessTransfer", "ReadBack", "WeightMismatch", "checked_update", "tensor_hash"]
