"""The shapes that atoms share: B rows (completions) of T tokens, and P pairs. `pytest` checks them at every call."""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

PerToken = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
PerRow = Float[Tensor, " B"]
Rewards = Shaped[Tensor, " B"]
"""Floats, whole numbers or bools."""
TokenRewards = Shaped[Tensor, "B T"]
Ids = Int[Tensor, " B"]
PerItem = Float[Tensor, " N"]
"""What belongs to no step's rows: single completions, states."""
PerPair = Float[Tensor, " P"]
Scalar = Float[Tensor, ""]
AnyShape = Float[Tensor, "*shape"]
AnyMask = Bool[Tensor, "*shape"]
PerPosition = Float[Tensor, "*batch"]
Vocabulary = Float[Tensor, "*batch V"]
Flat = Float[Tensor, " D"]
"""All trained weights in one vector."""
