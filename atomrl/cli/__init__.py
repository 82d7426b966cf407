"""The `atomrl` command. Start with `main.py`: it lists all commands and calls `add_NAME` of the module of each.

Modules are imported when their command is called, and import torch in functions, so that help is fast.
"""
