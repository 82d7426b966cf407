"""Functions of the user: passed from Python, saved with the run, and tried before it."""
