"""Weight transfer: how a trainer's weights come to an engine, checked before and verified after."""

from atomrl.weight_sync.transfer import InProcessTransfer, ReadBack, WeightMismatch, checked_update, tensor_hash

__all__ = ["InProcessTransfer", "ReadBack", "WeightMismatch", "checked_update", "tensor_hash"]
