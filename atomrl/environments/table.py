"""The built-in environments by name."""

ENVIRONMENTS = {
    "places": "atomrl.environments.places.places",
    "search_r1": "atomrl.environments.search.search_r1",
}
"""By their dotted path: imported in a worker, or when a config is checked."""
