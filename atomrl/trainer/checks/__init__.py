"""Checks of a run before weights are loaded: each raises a `ConfigError` that names the key, or logs a warning."""
