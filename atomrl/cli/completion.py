"""Completion of the command line by a shell: `atomrl --print-completion bash`."""

import argparse
import importlib
from pathlib import Path

from atomrl.cli.main import COMMANDS, MODULES
from atomrl.hints import said_as

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """What a shell has to read to complete commands, options and names of files.

    Raises:
        ValueError: it is none of `SHELLS`.
        ImportError: shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(f"--print-completion takes one of {', '.join(SHELLS)}, not {shell!r}")
    with said_as(ImportError, "completion needs: pip install 'atomrl[completion]'", ImportError):
        import shtab
    parser = argparse.ArgumentParser(prog="atomrl")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about.replace("%", "%%"))
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
        importlib.import_module(f"atomrl.cli.{MODULES.get(name, name)}").add_arguments(command)
        for action in command._actions:
            takes_file = not action.option_strings or action.type is Path
            if takes_file and action.choices is None and not isinstance(action, argparse._SubParsersAction):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
