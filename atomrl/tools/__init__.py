"""Tools that read runs and configs, and that no run imports.

`ui` is the web interface (start with `ui/routes.py`), `importers` converts configs and scripts of TRL, verl and
OpenRLHF, `tuning.py` searches hyperparameters, `replay.py` recomputes recorded steps under other objectives or rewards.
"""
