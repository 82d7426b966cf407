"""AtomRL: reinforcement learning for language models, every algorithm a page of atoms."""

__version__ = "0.1.0"
