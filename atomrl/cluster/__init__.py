"""A Ray cluster for one run: who goes where in it, and processes that end with the run."""
