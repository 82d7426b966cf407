"""The commands of shell scripts, as bash runs them."""

from pathlib import Path

import pytest

from atomrl.config import ConfigError
from atomrl.tools.importers import import_config
from atomrl.tools.importers.shell import read_script


@pytest.mark.parametrize(("text", "words"), [
    ("a=1\nb=${a}2\nrun $b '$b' \"$b\"", ["run", "12", "$b", "12"]),
    ("run ${X:-d} ${Y-e}", ["run", "d", "e"]),
    ("x=\ny=${x:-4}\nrun $y", ["run", "4"]),
    ("p=a/b\nf=${f:-\"['$p', 'c']\"}\nrun \"k=$f\"", ["run", "k=[a/b, c]"]),
    ("# a comment \\\nrun a", ["run", "a"]),
    ("read -r -d '' words <<EOF\nmodule \\\n  --a 1\nEOF\nrun $words", ["run", "module", "--a", "1"]),
    ("x=$((2 * (3 + 4)))\nrun $x $((x / 2))", ["run", "14", "7"]),
    ("run a \\\n  b # c d\n", ["run", "a", "b"]),
    ("A=(x 'y z'  # why\n  w)\nrun \"${A[@]}\"", ["run", "x", "y z", "w"]),
    ("A=(x)\nA+=(y)\nrun ${A[@]}", ["run", "x", "y"]),
    ('f="[\'$q\']"\nq=1\nrun "$f"', ["run", "['$q']"]),
    ("run a#b", ["run", "a#b"]),
    ("A=16; B=4\nrun $A $B", ["run", "16", "4"]),
    ("A=16;\nrun $A", ["run", "16"]),
    ('run "a;b" 2>&1 | tee log', ["tee", "log"]),
    ("cd a && run 'b && c' $((4|1)) &", ["run", "b && c", "$((4|1))"]),
    ("while true; do run a; done", ["run", "a"]),
    ('run "$@" b', ["run", "b"]),
])  # fmt: skip
def test_words_of_a_script(text: str, words: list[str]) -> None:
    assert read_script(text, "s.sh").commands[-1] == words


@pytest.mark.parametrize(("line", "word"), [
    ("${path##*/}", "base.sh"), ("${path#*/}", "b/base.sh"), ("${path%.sh}", "a/b/base"), ("${path%%/*}", "a"),
    ("${path:2}", "b/base.sh"), ("${path:2:1}", "b"), ("${n:-${path}}", "4"),
    ("a${n:+-${n}}", "a-4"), ("a${none:+-x}", "a"), ("${none:-${path%%/*}}", "a"),
    ("${path/a/b}", "${path/a/b}"), ("x$1", "x$1"),
])  # fmt: skip
def test_parts_of_variables(line: str, word: str) -> None:
    script = read_script(f"n=4\npath=a/b/base.sh\nrun {line}", "s.sh")
    assert script.commands == [["run", word]] and (bool(script.notes) == ("$" in word or "none" in line))


CASE = 'case "$A" in\n x|"y")  n=1 ;;\n  z*) n=2\n    m=(a $((1 + 2)))\n  ;;\n *) n=3;; esac\nrun $n ${m[@]}'


@pytest.mark.parametrize(("text", "words"), [
    ('A=1; if [ "$A" = 1 ]; then n=2; else n=3; fi; run $n', "2"),
    ("A=0\nif [[ $A == 1 ]]; then\n n=1\nelif [ $A -lt 1 ] && [[ -n $A ]]\nthen n=2\nelse\n n=3\nfi\nrun $n", "2"),
    ('n=1; if [ "$big" ]; then n=2; fi; run $n', "1"),  # not set: empty
    ('if [ "${D:-gpu}" = gpu ] && { [ x = y ] || [ 2 -ge 2 ]; }; then n=1; fi; run $n', "1"),
    ("A=3; if (( A > 2 )); then n=1; fi; run $n", "1"), ("if ! [ -z $X ]; then n=1; fi; run ${n:-2}", "2"),
    ("n=1; while [ $# -gt 0 ]; do n=$1; shift; done; run $n", "1"), ('n=1; [ "$D" = npu ] && n=2; run $n', "1"),
    ("n=1; [ a = b ] || n=2; run $n", "2"),
    ("if [ a = b ]; then if [ a ]; then n=1; fi; fi; run ${n:-2}", "2"),
    (f"A=y\n{CASE}", "1 ${m[@]}"), (f"A=zz\n{CASE}", "2 a 3"), (f"A=b\n{CASE}", "3 ${m[@]}"),
    ('run "${N:="a b"}" x \\', "a b|x"),
    ('D=$(python3 -c "import torch_npu" 2>/dev/null && echo npu || echo gpu); run $D', "gpu"),
    ('n=1; if [ "$(nproc)" -gt 8 ]; then n=2; fi; run "$n" `a; b` "x;y"', "$n|`a; b`|x;y"),  # only the shell knows
    ("n=1; for f in a b; do n=2; done; run ${n:-3}", "${n:-3}"), ("f=1; for f in a b; do run $f; done", "$f"),
    ("n=1; if [ -f a ]; then n=2; fi; run $((n + 1))", "$((n|+|1))"), ("if [ -f a ]; then n=1; fi; run $n", "$n"),
])  # fmt: skip
def test_a_condition_is_decided_or_its_variables_are_not_known(text: str, words: str) -> None:
    expected = words.split("|") if "|" in words else words.split()
    assert read_script(text, "s.sh").commands[-1] == ["run", *expected]


def test_arguments_that_only_the_shell_knows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('E=()\nif [ -f x ]; then E+=(trainer.seed=1); fi\nrun algorithm.a=1 "${E[@]}"\n')
    with pytest.raises(ConfigError, match=r"\$\{E\[@\]\} is a part of the command.*\[ -f x \]"):
        import_config(tmp_path / "a.sh", "verl")


def test_values_that_double_in_each_line_are_an_error_and_long_arrays_are_read() -> None:
    with pytest.raises(ConfigError, match=r"has over 60,000 characters"):
        read_script("A=xxxx\n" + 'A="$A$A"\n' * 40 + "run $A", "s.sh")
    assert len(read_script("A=(\n" + "  a='b'\n" * 2000 + ')\nrun "${A[@]}"', "s.sh").commands[-1]) == 2001
