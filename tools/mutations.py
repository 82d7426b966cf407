"""Break the package in one place at a time and see whether the quick tests notice.

    python tools/mutations.py              # all of them, some minutes
    python tools/mutations.py clip seed    # those whose name holds one of these words
    python tools/mutations.py --list

Each mutation is a mistake that somebody could make: a sign, a shift by one, a lost row. It is applied to a copy of the
tree, and the tests of `make test` in the files that it names are run there. Exit code 0: all were caught.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST_FAILED = 1
"""pytest's exit code where a test failed; others mean that tests could not be run, which catches nothing."""


@dataclass(frozen=True)
class Mutation:
    """A mistake, and the quick tests that should notice it."""

    name: str
    old: str
    """Stands once in the package, in whichever file."""
    new: str
    tests: tuple[str, ...]
    """Files or folders of tests."""


MUTATIONS = (
    Mutation(
        "sign of the advantage",
        "return _filled(exact - group_mean(exact, group_ids), rewards, missing)",
        "return _filled(group_mean(exact, group_ids) - exact, rewards, missing)",
        ("tests/atoms/test_advantages.py",),
    ),
    Mutation(
        "mask begins one token late",
        "loss_mask = versions >= 0",
        "loss_mask = (versions >= 0) & (versions.roll(1, 1) >= 0)",
        ("tests/trainer/test_collect.py",),
    ),
    Mutation(
        "log-probs not shifted",
        "at = wanted.flatten().nonzero()[:, 0] - 1",
        "at = wanted.flatten().nonzero()[:, 0]",
        ("tests/models/test_shared_prefix.py",),
    ),
    Mutation(
        "a weight is not transferred",
        "self.model.load(update.tensors)",
        "self.model.load(list(update.tensors)[1:])",
        ("tests/weight_sync/test_updates.py",),
    ),
    Mutation(
        "wrong version on a segment",
        "self.versions.append((len(self.token_ids), version))",
        "self.versions.append((len(self.token_ids), max(0, version - 1)))",
        ("tests/engines/test_stress.py",),
    ),
    Mutation(
        "a row is lost between updates",
        "shuffled = units[torch.randperm(len(units), generator=generator)]",
        "shuffled = units[torch.randperm(len(units), generator=generator)[1:]]",
        ("tests/algorithms/test_properties.py", "tests/backends/test_turns.py"),
    ),
    Mutation(
        "bounds of the clip swapped",
        "free * advantages, ratio.clamp(1 - clip_low, 1 + clip_high)",
        "free * advantages, ratio.clamp(1 - clip_high, 1 + clip_low)",
        ("tests/atoms/test_policy_atoms.py",),
    ),
    Mutation(
        "sign of the KL term",
        "difference = -token_log_ratio(logprobs, ref_logprobs, mask)",
        "difference = token_log_ratio(logprobs, ref_logprobs, mask)",
        ("tests/atoms/test_kl_and_corrections.py",),
    ),
    Mutation(
        "denominator of the reduction",
        "return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)",
        "return mask / (mask.shape[1] * rows)",
        ("tests/atoms/test_loss_properties.py", "tests/atoms/test_policy_atoms.py"),
    ),
    Mutation(
        "completions of a group share a seed",
        'key = f"{sampling.seed}/{sampling.step}/{prompt.prompt_id}/{index}".encode()',
        'key = f"{sampling.seed}/{sampling.step}/{prompt.prompt_id}".encode()',
        ("tests/engines/test_sampling.py",),
    ),
    Mutation(
        "resuming skips a batch",
        "CurriculumState(self.stream.position, pending,",
        "CurriculumState(self.stream.position + 4, pending,",
        ("tests/trainer/test_kills.py",),
    ),
    Mutation(
        "rewards in another order",
        "for index, score in zip(task.rows, outcome.scores, strict=True):",
        "for index, score in zip(reversed(task.rows), outcome.scores, strict=True):",
        ("tests/rewards/test_compute.py",),
    ),
    Mutation(
        "the end token is not trained on",
        "versions += [segment.policy_version or 0 if by_model else -1] * size",
        "versions += ([segment.policy_version or 0 if by_model else -1] * size)[: size - 1] + [-1] * min(1, size)",
        ("tests/trainer/test_collect.py",),
    ),
    Mutation(
        "positions begin anew after a shared prompt",
        "return Stream(source, source % width, ",
        "return Stream(source, torch.cat([torch.arange(len(piece)) for piece in pieces]), ",
        ("tests/models/test_shared_prefix.py",),
    ),
    Mutation(
        "scale of LoRA, as an engine is told it",
        "module.scaling[ADAPTER],",
        "1.0,",
        ("tests/models/test_lora.py",),
    ),
    Mutation(
        "scale of LoRA, in the trainer",
        "tuple(linear.scaling[ADAPTER] if adapted else 0.0 for linear in linears)",
        "tuple(1.0 if adapted else 0.0 for linear in linears)",
        ("tests/models/test_adapted.py",),
    ),
    Mutation(
        "temperature not applied by the engine",
        "scores = scores / sampling.temperature",
        "scores = scores * 1.0",
        ("tests/engines/test_sampling.py",),
    ),
    Mutation(
        "temperature not applied by the trainer",
        'states, model.head_weight, tokens, own, self.temperature, None, "entropy" in wanted, *lists',
        'states, model.head_weight, tokens, own, 1.0, None, "entropy" in wanted, *lists',
        ("tests/backends/test_candidates.py",),
    ),
    Mutation(
        "log-probs of the reference from the policy",
        "adapters = adapters_disabled(model) if role.without_adapters else nullcontext()",
        "adapters = nullcontext()",
        ("tests/conformance/test_backends.py",),
    ),
    Mutation(
        "padding is trained on",
        "versions = torch.full((len(rows), longest), -1, dtype=torch.int32)",
        "versions = torch.full((len(rows), longest), 0, dtype=torch.int32)",
        ("tests/trainer/test_collect.py",),
    ),
    Mutation(
        "completions in other groups",
        "group_ids=_integers(groups[item.prompt_id] for item in items)",
        "group_ids=_integers(number % len(groups) for number, item in enumerate(items))",
        ("tests/trainer/test_collect.py", "tests/algorithms/test_loop.py"),
    ),
    Mutation(
        "gradients added twice",
        "torch.autograd.backward(result.loss)",
        "torch.autograd.backward(result.loss * 2)",
        ("tests/conformance/test_backends.py",),
    ),
    Mutation(
        "gradients kept from the update before",
        "self.adamw.zero_grad(set_to_none=True)",
        "pass",
        ("tests/backends/test_local.py",),
    ),
    Mutation(
        "every rank has the rows of the first",
        "mine = split[replica::replicas]",
        "mine = split[0::replicas]",
        ("tests/backends/test_two_ranks.py",),
    ),
)


def place_of(mutation: Mutation, root: Path = ROOT) -> Path:
    """The file of the package that holds a mutation's text.

    Raises:
        LookupError: none does, or it stands in several places.
    """
    found = {path: path.read_text(encoding="utf-8").count(mutation.old) for path in root.glob("atomrl/**/*.py")}
    places = [path for path, count in found.items() if count]
    if sum(found.values()) != 1:
        names = ", ".join(str(path.relative_to(root)) for path in places) or "no file"
        raise LookupError(f"{mutation.name!r}: its text must stand once in atomrl/, and is in {names}: {mutation.old}")
    return places[0]


def copy_tree(folder: Path) -> Path:
    """A copy of what git tracks or would add, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The tree with the mistake in it."""
    place = place_of(mutation, tree)
    text = place.read_text(encoding="utf-8")
    place.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        place.write_text(text, encoding="utf-8")


class FirstFailure:
    """A plugin of pytest that keeps the id of the first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def run_pytest(tree: str, arguments: list[str], answer: Connection) -> None:
    """In a process of its own: pytest's exit code, and the first test that failed."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree  # of processes that tests start
    sys.path.insert(0, tree)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    noted = FirstFailure()
    answer.send((int(pytest.main(arguments, plugins=[noted])), noted.test))


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run the quick ones of some tests until one fails: pytest's exit code, and which one failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils", "hypothesis"])  # seconds, which all need
    here, there = context.Pipe(duplex=False)
    arguments = ["-x", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    process = context.Process(target=run_pytest, args=(str(tree), arguments, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:  # the process has ended
        return -1, ""
    finally:
        process.join()


def main() -> int:
    """Run the mutations that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="say where each mutation is, and run nothing")
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if not given.words or any(word in one.name for word in given.words)]
    if given.list:
        for one in chosen:
            print(f"{one.name}: {place_of(one).relative_to(ROOT)}")
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.setdefault("ATOMRL_SHARED", str(ROOT.parent / "shared"))
    noticed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder) / "tree")
        for one in chosen:
            began = time.monotonic()
            with applied(one, tree):
                code, test = run_tests(tree, one.tests)
            caught = code == TEST_FAILED
            noticed += [test] * caught
            how = f"caught by {test}" if caught else f"MISSED (pytest ended with {code})"
            print(f"{one.name}: {how}  [{time.monotonic() - began:.0f} s]", flush=True)
        print(f"{len(noticed)} of {len(chosen)} caught")
        code, test = run_tests(tree, list(dict.fromkeys(noticed))) if noticed else (0, "")
        if code:
            print(f"but without a mutation {test or 'something'} fails too (pytest ended with {code})")
    return int(bool(code) or len(noticed) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
