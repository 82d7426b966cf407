"""Detect common RL failures from a run's metrics; each rule has a page in docs/guides/troubleshooting/."""
