"""The built-in environments by name."""

ENVIRONMENTS = {
    "python": "atomrl.environments.python.python",
    "places": "atomrl.environments.places.places",
    "search_r1": "atomrl.environments.search.search_r1",
}
"""By their dotted path: imported in a worker, or when a config is checked."""

CHECKS = {"python": "atomrl.environments.python.refuse"}
"""Functions that are called with the `args` when a config is checked, and raise a RuntimeError where it cannot be
played on this machine."""
