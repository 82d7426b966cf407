"""The `atomrl` command. A command's module is imported when it is called, so that help does not wait for torch."""

import argparse
import faulthandler
import importlib
import sys
import traceback
from collections.abc import Sequence

from atomrl.hints import did_you_mean

COMMANDS = {
    "init": "make a folder for a project of your own, which runs at once",
    "train": "train a model with reinforcement learning",
    "sft": "train a model on demonstrations",
    "reward-model": "train a reward model on pairs of completions",
    "dpo": "train a model on preferences (DPO and its family, KTO, ORPO, SimPO, CPO)",
    "pretrain": "train a model on plain text",
    "rollout": "draw completions into a rollout pool, which other processes train on",
    "pool": "list rollout pools; show, export, import or clear one",
    "eval": "score a model on held-out problems",
    "generate": "complete a prompt",
    "reward": "try rewards on a file of completions",
    "retriever": "serve the documents of a corpus to models that search",
    "data": "check a data file, make one from a task, or tokenize text",
    "plan": "say whether a run will fit, and how long it will take",
    "tune": "search for better values of a config's keys",
    "explain": "print the objective of a config: its equation, atoms and papers, and what is known to go wrong",
    "atoms": "list the atoms, or show one: equation, shapes, paper, example",
    "import": "turn a config of verl, TRL or OpenRLHF into one of ours, or a nanoGPT checkpoint into a model folder",
    "export": "merge a checkpoint's adapters and write a plain model folder",
    "rollouts": "look at the completions of a run, or write them to a file",
    "replay": "take a recorded step under another objective: losses and gradients, token by token",
    "lab": "score recorded completions with other rewards: what changes, and what a hack would earn",
    "compare": "put runs side by side: a table, the keys that differ, a picture",
    "diff": "say where two runs begin to differ",
    "plot": "draw the curves of a run",
    "ui": "look at runs in a browser: live curves, completions, comparison",
    "doctor": "say what is wrong with a run; without one, what this machine has and what will be used",
}
"""Command -> what it does. `atomrl.cli.NAME`, or the module of `MODULES`, has `add_arguments(parser)` and
`run(arguments) -> exit code`."""

MODULES = {
    **dict.fromkeys(("train", "sft", "dpo", "reward-model", "pretrain"), "training"),
    "import": "import_",  # a word that Python keeps for itself
}

USER_ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 2 for a mistake of the user's (one message on stderr), 130 after Ctrl-C, 1 for anything else.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0
    if given[0] == "--version":
        from atomrl import __version__

        print(f"atomrl {__version__}")
        return 0
    if given[0] == "--print-completion":
        return print_completion(given[1:])
    name, *rest = given
    if name not in COMMANDS:
        return fail(f"unknown command {name!r}; {did_you_mean(name, COMMANDS)}")
    return run_command(name, rest)


def print_completion(shells: list[str]) -> int:
    """The script that has a shell complete this command line."""
    try:
        from atomrl.cli.completion import script

        print(script(" ".join(shells)))
    except (ValueError, ImportError) as error:
        return fail(str(error))
    return 0


def run_command(name: str, arguments: list[str]) -> int:
    """Parse and run one of `COMMANDS`, turning errors into messages."""
    show_traceback = "--traceback" in arguments
    if sys.__stderr__ and not faulthandler.is_enabled():  # where native code ends the process, say what called it
        faulthandler.enable(sys.__stderr__)
    try:
        command = importlib.import_module(f"atomrl.cli.{MODULES.get(name, name)}")
        parser = argparse.ArgumentParser(
            prog=f"atomrl {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.set_defaults(command=name)
        parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        command.add_arguments(parser)
        prepare = getattr(command, "prepare", list)
        parsed = parser.parse_intermixed_args(prepare(arguments))
        return int(command.run(parsed))
    except KeyboardInterrupt as stopped:
        print(f"\ninterrupted{f': {stopped}' if str(stopped) else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0
    except (ValueError, OSError, ImportError) as error:  # ConfigError and DataError are ValueErrors
        if show_traceback:
            traceback.print_exc()
        return fail(str(error) or type(error).__name__)


def fail(message: str) -> int:
    """One message on stderr, and the exit code of a mistake of the user's."""
    print(f"error: {message}", file=sys.stderr)
    return USER_ERROR


def overview() -> str:
    """The help of `atomrl` itself."""
    commands = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    return (
        f"AtomRL: reinforcement learning for language models.\n\nusage: atomrl COMMAND ...\n\n{commands}\n\n"
        "atomrl COMMAND --help tells more; atomrl --version; atomrl --print-completion bash|zsh|fish."
    )


if __name__ == "__main__":
    sys.exit(main())
