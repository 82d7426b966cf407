"""The `atomrl` command: `main.py` lists all commands, each other module implements those of one subject."""
