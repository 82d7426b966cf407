"""Score `atomrl import` on public configs and scripts.

    python tools/import_corpus.py CHECKOUTS [--fetch] [--out docs/development/import_corpus.md]

`CHECKOUTS` holds a checkout of each repository that `tools/import_corpus.txt` names, at its commit; `--fetch` brings
them there from GitHub. Each file of a pattern there is imported, and the table has its result: the kind of
run, the number of steps left to the user, or the error. Nothing in the files is executed.
"""

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from atomrl.config import ConfigError
from atomrl.tools.importers import import_config

LIST = Path(__file__).with_suffix(".txt")
READ = "*.sh", "*.yaml", "*.yml", "*.py", "*.jinja", "dataset_info.json"


def fetch(checkouts: Path, source: str = "https://github.com") -> None:
    """Bring each repository of the list to its commit. Only files that an importer may read are written."""
    for line in LIST.read_text().splitlines():
        name, _, commit = line.partition(" ")[0].partition("@")
        if not commit:
            continue
        folder = checkouts / name.replace("/", "+")
        if not folder.exists():
            git("clone", "--quiet", "--filter=blob:none", "--no-checkout", f"{source}/{name}", str(folder))
        git("-C", str(folder), "sparse-checkout", "set", "--no-cone", *READ)
        git("-C", str(folder), "checkout", "--quiet", commit)


def git(*words: str) -> str:
    """Return what git prints.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(["git", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: failed")
    return done.stdout.strip()


def listed(checkouts: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (repository, path within it, path on this machine) of each file of the list.

    Raises:
        SystemExit: a repository is not at its commit, or a pattern matches no file.
    """
    for line in LIST.read_text().splitlines():
        repository, _, pattern = line.partition(" ")
        if not line or line.startswith("#"):
            continue
        name, _, commit = repository.partition("@")
        root = checkouts / name.replace("/", "+")
        if not root.is_dir() or not git("-C", str(root), "rev-parse", "HEAD").startswith(commit):
            raise SystemExit(f"{root} is not at {commit} of {name}: --fetch brings it there")
        text, _, unless = pattern.partition(" ")
        files = [path for path in sorted(root.glob(text)) if not unless or re.search(unless, path.read_text())]
        if not files:
            raise SystemExit(f"{repository} has no {text}")
        yield from ((repository, str(path.relative_to(root)), path) for path in files)


def result(path: Path) -> tuple[str, str]:
    """Return (`imported`, `left to you` or `refused`; kind of run or reason)."""
    try:
        imported = import_config(path, out="out.yaml")
    except ConfigError as error:
        return "refused", re.sub(r"\s+", " ", str(error).replace(str(path), path.name))[:140].rstrip().replace(
            "|", "\\|"
        )
    count = len(imported.to_do)
    return ("left to you" if count else "imported"), f"{imported.config.kind}" + f", {count} to do" * bool(count)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description="Score atomrl import on public files.")
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/development/import_corpus.md"))
    parser.add_argument("--fetch", action="store_true", help="bring the repositories to their commits, from GitHub")
    arguments = parser.parse_args()
    if arguments.fetch:
        fetch(arguments.checkouts)
    rows = [(repository, name, *result(path)) for repository, name, path in listed(arguments.checkouts)]
    repositories = list(dict.fromkeys(row[0] for row in rows))
    counts = Counter((row[0], row[2]) for row in rows)
    words = ("imported", "left to you", "refused")
    lines = [
        "# Public files through `atomrl import`", "",
        "Written by `tools/import_corpus.py`. *Left to you*: imported, and the report names steps that are left.", "",
        "| repository | files | imported | left to you | refused |", "|---|---|---|---|---|",
        *(
            f"| {name} | {sum(counts[name, word] for word in words)} | "
            f"{' | '.join(str(counts[name, word]) for word in words)} |"
            for name in repositories
        ),
    ]  # fmt: skip
    for repository in repositories:
        lines += ["", f"## {repository}", "", "| file | result | kind or reason |", "|---|---|---|"]
        lines += [f"| `{name}` | {word} | {text} |" for one, name, word, text in rows if one == repository]
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
