"""The built-in environments by name."""

ENVIRONMENTS = {
    "python": "atomrl.environments.python.python",
    "places": "atomrl.environments.places.places",
    "search_r1": "atomrl.environments.search.search_r1",
    "tools": "atomrl.environments.tools.call_tools",
    "gymnasium": "atomrl.environments.adapters.gymnasium_text.play",
    "textarena": "atomrl.environments.adapters.text_arena.play",
    "textworld": "atomrl.environments.adapters.text_world.play",
    "skyrl_gym": "atomrl.environments.adapters.skyrl.play",
    "openenv": "atomrl.environments.adapters.openenv_client.play",
    "reasoning_gym": "atomrl.environments.adapters.retries.play",
}
"""By their dotted path: imported in a worker, or when a config is checked."""
PACKAGES = {
    "gymnasium": "gymnasium",
    "textarena": "textarena",
    "textworld": "textworld",
    "skyrl_gym": "skyrl-gym",
    "openenv": "openenv-core",
    "reasoning_gym": "reasoning-gym",
}
"""Of those that need one: what to install; the module has the environment's name."""
CHECKS = {
    "python": "atomrl.environments.python.refuse",
    "gymnasium": "atomrl.environments.adapters.gymnasium_text.refuse",
}
"""Functions that are called with the `args` when a config is checked, and raise a RuntimeError where it cannot be
played on this machine, a ValueError where the `args` are wrong."""
BEGINS = {"gymnasium", "textarena", "textworld", "openenv"}
"""Speak before the model does."""
UNSCORED = {"search_r1": "search_r1_em", "python": "exact_match"}
"""Have no outcome, and a reward that judges the answer."""
