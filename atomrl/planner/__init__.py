"""Plans of a run before it starts, for the CLI: its memory and time, settings with which it fits a GPU, a dry run."""
