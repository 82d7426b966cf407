"""An environment of `trl_class.yaml`, as TRL's `environment_factory` takes them."""

import random


class GuessNumber:
    def reset(self, seed: int, **row) -> str:
        self.number = random.Random(seed).randint(1, 100)
        self.right = False
        return " It is between 1 and 100."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess
        """
        self.right = number == self.number
        return "right" if self.right else "too small" if number < self.number else "too large"

    def get_reward(self) -> float:
        return float(self.right)
