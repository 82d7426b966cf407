"""Run a user's script of TRL or unsloth as it is, with `trl` and `unsloth` resolved to AtomRL's."""

import json
import runpy
import sys
import tempfile
import tokenize
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.data.files import DataError
from atomrl.rewards.errors import RewardError

RUN_CELLS = ("capture", "time")
"""Magics of cells that are Python code."""


def notebook_code(path: Path) -> tuple[str, list[str]]:
    """Join the code cells of a notebook; lines for the shell and for IPython become comments.

    Returns:
        The code, and the lines that were left out.

    Raises:
        ConfigError: it is not a notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a notebook") from None
    codes, left_out = list[str](), list[str]()
    for cell in cells:
        if cell.get("cell_type") == "code":
            codes.append(
                _cell_code(cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]), left_out)
            )
    return "\n".join(codes) + "\n", left_out


def _cell_code(source: str, left_out: list[str]) -> str:
    """Return the Python code of a cell; other lines are added to `left_out`."""
    if source.lstrip().startswith("%%"):
        magic, _, rest = source.lstrip().partition("\n")
        if magic.split()[0][2:] not in RUN_CELLS:
            left_out.append(f"{magic} (its cell)")
            return ""
        source = rest
    lines, continues = list[str](), False
    for line in source.splitlines():
        words = line.lstrip()
        if continues or (words.startswith(("!", "%")) and not _is_open(lines)):
            left_out.append(words)
            lines.append("" if continues else line[: len(line) - len(words)] + "pass")
            continues = line.rstrip().endswith("\\")
        else:
            lines.append(line)
    return "\n".join(lines)


def _is_open(lines: list[str]) -> bool:
    """Return True if these lines end within a string or within brackets."""
    try:
        for _ in tokenize.generate_tokens(iter([*(f"{line}\n" for line in lines), ""]).__next__):
            pass
    except tokenize.TokenError:
        return True
    except SyntaxError:
        pass  # Python names its place
    return False


class _Shell:
    """The object of `get_ipython()`, for notebooks that were exported as scripts."""

    def __init__(self, script: Path) -> None:
        self._script = script

    def system(self, command: str) -> list[str]:
        """Leave a command for the shell out."""
        print(f"{self._script}: left out: !{command}", file=sys.stderr)
        return []

    getoutput = system

    def run_line_magic(self, name: str, line: str = "", *_: Any) -> None:
        """Leave a magic out."""
        print(f"{self._script}: left out: %{name.lstrip('%')} {line}", file=sys.stderr)

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Run the code of a cell; leave out one for another program."""
        left_out: list[str] = []
        code = _cell_code(f"%%{name} {line}".rstrip() + f"\n{cell}", left_out)
        for each in left_out:
            print(f"{self._script}: left out: {each}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="atomrl-cell-") as folder:
            path = Path(folder) / "cell.py"
            path.write_text(code, encoding="utf-8")
            # the cell's names are the script's, also those that the script sets later
            SourceFileLoader("__main__", str(path)).exec_module(sys.modules["__main__"])


def run_script(script: Path, arguments: Sequence[str], dry_run: bool = False, config_out: Path | None = None) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` does. With `dry_run` or `config_out` it ends where its first trainer
    would train, with the plan or the config of the run.

    Returns:
        The exit code of the script.

    Raises:
        ConfigError: there is no such script, or `config_out` exists.
    """
    from atomrl import redirect
    from atomrl.trl import trainer
    from atomrl.trl.older_transformers import accepted

    if not script.is_file():
        raise ConfigError(f"script {script} does not exist")
    if config_out is not None and config_out.exists():
        raise ConfigError(f"{config_out} exists; give another name")
    redirect.install()
    trainer.begun = set()
    plans: list[str] = []
    if dry_run or config_out is not None:
        trainer.planning = lambda made, config: _stop(made, config, config_out, plans)
    path, place = script.resolve(), None
    if script.suffix == ".ipynb":
        code, left_out = notebook_code(script)
        if left_out:
            print(f"{script}: left out: {'; '.join(left_out)}", file=sys.stderr)
        place = tempfile.TemporaryDirectory(prefix="atomrl-notebook-")
        path = Path(place.name) / f"{script.stem}.py"
        path.write_text(code, encoding="utf-8")
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        shell = _Shell(script)
        with accepted():
            runpy.run_path(str(path), {"get_ipython": lambda: shell}, run_name="__main__")
    except SystemExit as ended:
        if plans:
            return 0
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception as error:
        line = _line(error, path)
        if isinstance(error, ConfigError | DataError | RewardError) or getattr(error, "name", None) in redirect.SOURCES:
            raise ConfigError(f"{script}:{line}: {error}" if place is None else f"{script}: {error}") from error
        traceback.print_exception(error)  # the script's own
        return 1
    finally:
        sys.argv, sys.path[:] = before
        trainer.planning = trainer.begun = None
        if place is not None:
            place.cleanup()
    if dry_run or config_out is not None:
        raise ConfigError(f"{script} ended without a call of trainer.train()")
    return 0


def _line(error: Exception, path: Path) -> int:
    """Return the innermost line of a script in an error's traceback; 0 if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == str(path)), 0)


def _stop(made: Any, config: Any, config_out: Path | None, plans: list[str]) -> None:
    """Print the plan of a trainer's run, write its config, and end the script."""
    from atomrl.config import dump_config
    from atomrl.trainer import prepare_run

    run = prepare_run(config, made._local or None)
    plans.append(type(made).__name__)
    for title, lines in run.describe():
        print(title, *(f"  {line}" for line in lines), sep="\n")
    print("differences", *(f"  {line}" for line in made.notes()), sep="\n")
    if config_out is not None:
        if made._local:
            names = ", ".join(made._local)
            print(
                f"the reward {names} is in the script: put it into a file, and name it FILE.py:{names}", file=sys.stderr
            )
        config_out.write_text(dump_config(config), encoding="utf-8")
        print(f"wrote {config_out}; its rows and objects are in {made.run_dir / 'inputs'}", file=sys.stderr)
    print(
        f"stopped where {plans[0]} would train (a trainer that comes after it in the script was not reached)",
        file=sys.stderr,
    )
    raise SystemExit(0)
