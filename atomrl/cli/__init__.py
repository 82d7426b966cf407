"""The command line: `main.py` has the list of commands, and each module the commands of one subject."""
