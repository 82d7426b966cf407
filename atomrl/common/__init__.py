"""What every other folder may use, and which imports none of them: files, processes, threads, errors, metrics.

Start with `errors.py` (messages that name the nearest valid key, and waiting for services), `processes.py` (workers
that can be killed, launchers, detection of hangs) and `functions.py` (users' functions by the name in a config).
"""
