"""The shapes that atoms share: B rows (completions) of T tokens and K turns, and P pairs. `pytest` checks them at
every call.
"""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

PerToken = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
PerRow = Float[Tensor, " B"]
Rewards = Shaped[Tensor, " B"]
"""Floats, whole numbers or bools."""
TokenRewards = Shaped[Tensor, "B T"]
Ids = Int[Tensor, " B"]
TokenIds = Int[Tensor, "B T"]
PerTurn = Float[Tensor, "B K"]
"""Of each turn of a row; NaN where the row has no such turn."""
TurnIds = Int[Tensor, "B K"]
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
