"""The folder of a run: written while it trains, read afterwards, and diagnosed.

Start with `run_directory.py`, whose docstring lists the files of a run. `recorder.py` logs each step there, to trackers
and to the terminal (`console.py`). `checkpoints.py` makes checkpoints atomic, `reading` loads and compares runs, and
`doctor` detects common failures in the metrics.
"""
