"""The built-in environments by name."""

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """What is known of an environment before it is imported."""

    path: str
    """Dotted; imported in a worker, or when a config is checked."""
    package: str = ""
    """What to install, of one that needs another package; that one's module has the environment's name."""
    check: str = ""
    """A function that is called with the `args` when a config is checked: it raises a RuntimeError where the
    environment cannot be played on this machine, a ValueError where the `args` are wrong."""
    begins: bool = False
    """It speaks before the model does."""
    scored_by: str = ""
    """Of one without an outcome: a reward that judges the answer."""


_ADAPTERS = "atomrl.environments.adapters"
ENVIRONMENTS = {
    "python": BuiltIn(
        "atomrl.environments.python.python", check="atomrl.environments.python.refuse", scored_by="exact_match"
    ),
    "places": BuiltIn("atomrl.environments.places.places"),
    "search_r1": BuiltIn("atomrl.environments.search.search_r1", scored_by="search_r1_em"),
    "tools": BuiltIn("atomrl.environments.tools.call_tools"),
    "gymnasium": BuiltIn(
        f"{_ADAPTERS}.gymnasium_text.play", "gymnasium", f"{_ADAPTERS}.gymnasium_text.refuse", begins=True
    ),
    "textarena": BuiltIn(f"{_ADAPTERS}.text_arena.play", "textarena", begins=True),
    "textworld": BuiltIn(f"{_ADAPTERS}.text_world.play", "textworld", begins=True),
    "skyrl_gym": BuiltIn(f"{_ADAPTERS}.skyrl.play", "skyrl-gym"),
    "openenv": BuiltIn(f"{_ADAPTERS}.openenv_client.play", "openenv-core", begins=True),
    "reasoning_gym": BuiltIn(f"{_ADAPTERS}.retries.play", "reasoning-gym"),
}
