"""The Ray cluster of a run: placement of actors on machines and GPUs, and actors that never outlive the run."""
