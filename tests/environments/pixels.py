"""A game of Gymnasium whose observations are pictures. Importing registers it."""

import gymnasium
import numpy as np


class Pixels(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)


gymnasium.register("Pixels-v0", Pixels)
