"""Utilities of all other folders: files, processes, threads, errors, metrics. Imports none of the others.

Start with `errors.py` (messages that name the nearest valid key, and waiting for services), `processes.py` (workers
that can be killed, launchers, detection of hangs) and `functions.py` (users' functions by the name in a config).
"""
