"""Entry point of the `atomrl` command: lists all commands, dispatches to them, and prints errors as messages.

The module of a command is imported when the command is called, and imports torch only where it is needed, so that help
is fast.
"""

import argparse
import faulthandler
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.common.redaction import without_secrets
from atomrl.common.terminal import printable_output

Run = Callable[[argparse.Namespace], int]
"""Executes a command and returns the exit code."""
SHELLS = ("bash", "zsh", "fish")
USER_ERROR, INTERRUPTED = 2, 130
HELP = ("-h", "--help")
ELSEWHERE = {
    **dict.fromkeys(("sft", "dpo", "kto", "grpo", "rloo", "reward-model", "pretrain"), "train CONFIG"),
    "rollout": "pool fill CONFIG",
    "retriever": "data serve CORPUS",
    "atoms": "explain --atoms",
    "replay": "explain RUN --step N key=value",
    "lab": "reward NAME RUN",
    "diff": "compare A B --diff",
    "plot": "compare RUN --plot FILE",
}
"""Command names of older versions and of TRL -> the command to use."""


class Command(NamedTuple):
    """A command: `add_NAME(parser)` in `atomrl.cli.NAME` adds arguments and returns the `Run`; its docstring is the
    help."""

    summary: str
    """One line for `atomrl --help`."""
    subcommands: Mapping[str, str] = {}
    """Name -> one line for help; a command with subcommands has one `add_NAME_SUBCOMMAND` for each."""


GROUPS = {
    "prepare": {
        "init": Command("make a project of your own: config, reward, test and data"),
        "import": Command("turn a script or config of TRL, verl or OpenRLHF into a config"),
        "data": Command(
            "check a data file; make, tokenize or serve data",
            {
                "check": "read a data file as a run would, and report every error",
                "make": "write the problems of a task to a file",
                "prepare": "tokenize text for pretraining",
                "serve": "serve the documents of a corpus to models that search",
            },
        ),
        "reward": Command("score the completions of a file or a run with rewards"),
        "explain": Command("print a config's objective: equation, atoms, papers"),
        "plan": Command("estimate the memory and the time of a run"),
    },
    "train": {
        "run": Command("run a script or notebook of TRL or unsloth as it is"),
        "train": Command("train by a config: RL, SFT, preferences, reward model, pretraining"),
        "tune": Command("search for better values of a config's keys"),
        "pool": Command(
            "sample rollouts in separate processes, into rollout pools",
            {
                "fill": "sample completions into a rollout pool",
                "list": "list the rollout pools of a folder",
                "stats": "print number and age of a pool's groups",
                "export": "write a pool's completions to a file",
                "import": "read completions from a file into a pool",
                "clear": "remove all groups that no trainer holds",
            },
        ),
    },
    "inspect": {
        "doctor": Command("diagnose a run, or this machine"),
        "rollouts": Command("show a run's completions, or write them to a file"),
        "compare": Command("compare runs: table, curves, or the first difference of two"),
        "ui": Command("show runs in a browser, live"),
    },
    "use a model": {
        "eval": Command("score a model on held-out problems"),
        "generate": Command("complete a prompt"),
        "export": Command("write a checkpoint as a plain model folder, adapters merged"),
    },
}
"""Commands by purpose, as in `atomrl --help`."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0; 2 for a user error (one message on stderr); 130 after Ctrl-C; 1 otherwise.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0] == "--version":
        from atomrl import __version__

        print(f"atomrl {__version__}")
        return 0
    if words[0] == "--print-completion":
        return print_completion(words[1:])
    name, *rest = words
    if name not in COMMANDS:
        if name in ELSEWHERE:
            return fail(f"unknown command {name!r}: use `atomrl {ELSEWHERE[name]}`")
        return fail(f"unknown command {name!r}; {did_you_mean(name, COMMANDS)}")
    path = [name]
    if subcommands := COMMANDS[name].subcommands:
        if not rest or rest[0] in HELP:
            print(overview_of(name))
            return 0
        if rest[0] not in subcommands:
            return fail(f"unknown command '{name} {rest[0]}'; {did_you_mean(rest[0], subcommands)}")
        path.append(rest.pop(0))

    with printable_output():
        return run_command(path, rest)


class Parser(argparse.ArgumentParser):
    """A parser whose error about an unknown option names the one that was meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit."""
        from atomrl.cli.arguments import near_option

        options = [option for action in self._actions for option in action.option_strings]
        if message.startswith("unrecognized arguments") and (unknown := re.search(r"--[\w-]+", message)):
            near = near_option(unknown[0], options)
            message += f"; did you mean {near}?" if near else ""
        super().error(message)


def run_command(path: Sequence[str], rest: Sequence[str]) -> int:
    """Parse the arguments of a command and run it; print errors as messages.

    Args:
        path: the command and, if it has some, its subcommand.
        rest: its arguments.
    """
    show_traceback = "--traceback" in rest
    if sys.__stderr__ and not faulthandler.is_enabled():  # print the Python stack if native code crashes
        faulthandler.enable(sys.__stderr__)
    try:
        parser = Parser(formatter_class=argparse.RawDescriptionHelpFormatter)
        run = fill_parser(parser, path)
        prepare = parser.get_default("prepare") or list
        return run(parser.parse_intermixed_args(prepare(list(rest))))
    except KeyboardInterrupt as stopped:
        print(f"\ninterrupted{f': {stopped}' if str(stopped) else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        sys.stderr.close()
        return 0
    except (ValueError, OSError, ImportError) as error:  # ConfigError and DataError are ValueErrors
        if show_traceback:
            traceback.print_exc()
        return fail(str(error) or type(error).__name__)


def fill_parser(parser: argparse.ArgumentParser, path: Sequence[str]) -> Run:
    """Add the help and the arguments of a command to a parser, and return the command's `Run`."""
    name = path[0] + "_" * iskeyword(path[0])  # import_.py: Python has no module `import`
    module = importlib.import_module(f"atomrl.cli.{name}")
    add = getattr(module, f"add_{'_'.join(path)}")
    parser.prog, parser.description = " ".join(["atomrl", *path]), inspect.getdoc(add)
    setattr(parser, "color", False)  # Python 3.14 would colour the help  # noqa: B010
    parser.set_defaults(command=" ".join(path))
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    run: Run = add(parser)
    return run


def fail(message: str) -> int:
    """Print a message on stderr, and return the exit code of a user error."""
    print(f"error: {without_secrets(message)}", file=sys.stderr)
    return USER_ERROR


def overview() -> str:
    """Format the help of `atomrl` itself, in 80 columns and 24 rows."""
    lines = ["usage: atomrl COMMAND ...     AtomRL: reinforcement learning for language models"]
    for title, commands in GROUPS.items():
        lines += [title, *(f"  {name:<9} {command.summary}" for name, command in commands.items())]
    lines += ["", "`atomrl COMMAND --help` tells more. --version, --print-completion bash|zsh|fish"]
    return "\n".join(lines)


def overview_of(name: str) -> str:
    """Format the help of a command with subcommands."""
    command = COMMANDS[name]
    lines = [f"usage: atomrl {name} COMMAND ...", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
    lines += [f"  {own:<9} {summary}" for own, summary in command.subcommands.items()]
    return "\n".join([*lines, "", f"atomrl {name} COMMAND --help tells more."])


def print_completion(shells: list[str]) -> int:
    """Print the completion script of a shell."""
    try:
        print(completion(" ".join(shells)))
    except (ValueError, ImportError) as error:
        return fail(str(error))
    return 0


def completion(shell: str) -> str:
    """Return the script with which a shell completes commands, options and file names.

    Raises:
        ValueError: the shell is not in `SHELLS`.
        ImportError: shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(f"--print-completion takes one of {', '.join(SHELLS)}, not {shell!r}")
    with reraise_as(ImportError, "completion needs: pip install 'atomrl[completion]'", ImportError):
        import shtab
    whole = argparse.ArgumentParser(prog="atomrl")
    parsers = whole.add_subparsers()
    for name, command in COMMANDS.items():
        parser = parsers.add_parser(name, help=command.summary)
        if not command.subcommands:
            _completed(parser, (name,), shtab.FILE)
            continue
        inner = parser.add_subparsers()
        for own, summary in command.subcommands.items():
            _completed(inner.add_parser(own, help=summary), (name, own), shtab.FILE)
    return str(shtab.complete(whole, shell))


def _completed(parser: argparse.ArgumentParser, path: Sequence[str], files: Mapping[str, Any]) -> None:
    """Fill a parser, and mark arguments that take a file for completion of file names."""
    fill_parser(parser, path)
    for action in parser._actions:
        if (not action.option_strings or action.type is Path) and action.choices is None:
            action.complete = files  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
