"""The built-in environments by name."""

ENVIRONMENTS = {
    "search_r1": "atomrl.environments.search.search_r1",
    "tools": "atomrl.environments.tools.call_tools",
}
"""By their dotted path: imported in a worker, or when a config is checked."""
