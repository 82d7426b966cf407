"""Rewards under attack, and how well graders agree with labels.

    python benchmarks/rewards.py [--shared FOLDER] [--only attack speed ...] [--out FILE.json]

1. 200 pathological expressions among 400 ordinary ones, on 2 workers: whether every ordinary score is right, and
   whether the pool scores the next batch. Then 40 pathological ones alone: how long a call took beyond its time-out.
2. 1,000 ordinary expressions through `boxed` on 2 workers that are up.
3. 40 completions that carry code through every built-in reward, in processes with an audit hook that records what is
   compiled, run, opened for writing, imported because of it, or started.
4. 500 random batches, permuted, with completions dropped and failing in every way.
5. Agreement with the labels of real model solutions (with --shared), and with math-verify's own judgement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.config import RewardConfig
from atomrl.rewards.compute import Rewards, build_rewards
from atomrl.rewards.table import REWARDS
from atomrl.types import Problem, Trajectory
from benchmarks.agreement import agreement
from benchmarks.audited import AUDIT_LOG, PAYLOAD_MARK
from tests.rewards.batches import rollouts

TIMEOUT_S = 2.0


def pathological(count: int) -> list[str]:
    """Expressions that keep a computer algebra system or its parser busy, each with numbers of its own."""
    kinds = [
        "9^{{9^{{9^{{{n}}}}}}}", "{n}^{{{n}^{{{n}^{{{n}}}}}}}", "(10^{{8}}+{n})!", "((({n}!)!)!)!",
        r"\sum_{{i=1}}^{{10^9+{n}}} \sin(i^i)", r"\prod_{{i=1}}^{{10^8}} (i^2+{n})", r"\sin(10^{{10^{{10^{{{n}}}}}}})",
        r"\int_0^1 e^{{x^{{{n}}}}} \sin(x^x)\, dx", r"\binom{{10^9+{n}}}{{5 \cdot 10^8}}", "(1+x)^{{{n}00000}}",
        "(" * 300 + "x+{n}" + ")" * 300, r"\frac{{1}}{{" * 120 + "{n}" + "}}" * 120,
        r"\sqrt{{" * 150 + "{n}" + "}}" * 150,
        "+".join(f"x_{{{{{i}}}}}^{{{{{i}}}}}" for i in range(150)) + "+{n}", "{n}" * 3000,
        r"\lim_{{x \to 0}} x^{{x^{{{n}}}}}",
        "a" * 400 + "{n}", r"\{{" + ",".join(f"x^{i}" for i in range(200)) + r",{n}\}}", r"2^{{2^{{{n}00}}}} \bmod 7",
        r"\frac{{x^{{{n}00}}-1}}{{x-1}} - \frac{{x^{{{n}01}}-1}}{{x-1}}",
    ]  # fmt: skip
    return [kinds[n % len(kinds)].format(n=11 + n // len(kinds)) for n in range(count)]


def ordinary(n: int) -> tuple[str, str, float]:
    """(answer, truth, label): numbers, fractions, algebra; every second one wrong."""
    wrong = n % 2
    shapes = [(f"{n + wrong}", f"{n}.0"), (f"\\frac{{{n + wrong}}}{{7}}", f"\\frac{{{2 * n}}}{{14}}"),
              (f"{n + wrong} + x", f"x + {n}"), (f"{n + wrong}\\sqrt{{2}}", f"\\sqrt{{2}} \\cdot {n}")]  # fmt: skip
    answer, truth = shapes[n // 2 % 4]
    return answer, truth, 1.0 - wrong


def make_rewards(function: str = "boxed", workers: int = 2, **item: Any) -> Rewards:
    config = RewardConfig(functions=[{"function": function, "timeout_s": TIMEOUT_S, **item}], workers=workers)
    return build_rewards(config, patience=None)


def scored(rewards: Rewards, rows: list[tuple[str, str, float]]) -> list[Trajectory]:
    """The rows as prompts of one completion each."""
    samples = {
        str(n): Problem(problem_id=str(n), prompt="p", ground_truth=truth) for n, (_, truth, _) in enumerate(rows)
    }
    return rewards(rollouts({str(n): [f"\\boxed{{{answer}}}"] for n, (answer, _, _) in enumerate(rows)}, **samples))


def attack() -> dict[str, Any]:
    bombs = [(text, "x", 0.0) for text in pathological(200)]
    rows = bombs + [ordinary(n) for n in range(400)]
    random.Random(0).shuffle(rows)
    rewards = make_rewards()
    scored(rewards, [ordinary(1)])
    started = time.perf_counter()
    result = scored(rewards, rows)
    wall = time.perf_counter() - started
    is_bomb = [row in set(bombs) for row in rows]
    lost = [n for n, row in enumerate(rows) if not is_bomb[n] and result[n].reward != row[2]]
    kinds: dict[str, int] = {}
    for failure in (failure for item in result for failure in item.reward_failures):
        kinds[failure.kind] = kinds.get(failure.kind, 0) + 1
    after = scored(rewards, [ordinary(n) for n in range(40)])
    whole = all(after[n].reward == ordinary(n)[2] for n in range(40)) and len(rewards.pool.pids) == 2
    rewards.close()
    with ThreadPoolExecutor(2) as threads:  # two workers at once, as in the batch; each gets all kinds
        lengths = [length for part in threads.map(call_seconds, (bombs[:20], bombs[20:40])) for length in part]
    return {"expressions": 200, "timeout_s": TIMEOUT_S, "ended_as": kinds, "longest_call_s": round(max(lengths), 3),
            "over_limit": sum(length > TIMEOUT_S + 0.5 for length in lengths), "other_scores": 400,
            "other_scores_lost": len(lost), "pool_whole_after": whole, "wall_s": round(wall, 1)}  # fmt: skip


def call_seconds(bombs: list[tuple[str, str, float]]) -> list[float]:
    """Seconds of a call with each expression alone. An ordinary one goes before it, so that its worker is up."""
    rewards, seconds = make_rewards(workers=1), []
    for row in bombs:
        scored(rewards, [ordinary(1)])
        started = time.perf_counter()
        scored(rewards, [row])
        seconds.append(time.perf_counter() - started)
    rewards.close()
    return seconds


def speed() -> dict[str, Any]:
    rewards = make_rewards()
    scored(rewards, [ordinary(n) for n in range(16)])
    rows = [ordinary(n) for n in range(1000, 2000)]
    before = sum(map(cpu_seconds, rewards.pool.pids))
    started = time.perf_counter()
    result = scored(rewards, rows)
    seconds = time.perf_counter() - started
    spent = sum(map(cpu_seconds, rewards.pool.pids)) - before
    right = sum(result[n].reward == row[2] for n, row in enumerate(rows))
    rewards.close()
    return {
        "expressions": 1000,
        "right": right,
        "wall_s": round(seconds, 2),
        "cpu_s_of_both_workers": round(spent, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def payloads() -> list[str]:
    mark = PAYLOAD_MARK
    codes = [
        f"__import__('os').system('touch {mark}')", f"exec(\"open('{mark}','w')\")", f"eval('open(\"{mark}\",\"w\")')",
        f"open('{mark}', 'w').write('x')", f"__import__('subprocess').run(['touch', '{mark}'])",
        f"(lambda: __import__('pathlib').Path('{mark}').touch())()", f"().__class__.__base__.__subclasses__() # {mark}",
        f"compile('{mark}', 'x', 'exec')", f"\\input{{{mark}}} \\write18{{touch {mark}}}", f"{{{{7*7}}}} {mark}",
    ]  # fmt: skip
    forms = ["{}", "<think>x</think><answer>{}</answer>", "\\boxed{{{}}}", "#### {}"]
    return [form.format(code) for code in codes for form in forms]


def audit() -> dict[str, Any]:
    """Each built-in reward by way of `benchmarks.audited`, whose import sets the hook, in a worker."""
    log = Path(tempfile.mkdtemp()) / "audit.jsonl"
    os.environ[AUDIT_LOG] = str(log)
    texts, calls = payloads(), {}
    for name in sorted(REWARDS.keys() - {"code"}):  # it runs programs, in a sandbox: benchmarks/sandbox.py
        calls[name] = audited_call(name, texts)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    hooks = sum(line["event"] == "hook" for line in lines)
    found = [line for line in lines if line["event"] != "hook"]
    audited_call("guilty", texts)
    control = sum(json.loads(line)["event"] != "hook" for line in log.read_text().splitlines()) - len(found)
    return {"payloads": len(texts), "rewards": len(REWARDS), "scored": calls, "processes_with_a_hook": hooks,
            "executions": len(found), "seen": found[:5], "mark_exists": Path(PAYLOAD_MARK).exists(),
            "seen_of_a_reward_that_parses_completions": control}  # fmt: skip


def audited_call(name: str, texts: list[str]) -> int:
    """Return the number of texts that one reward scored, in a worker with the hook."""
    columns = {"numbers": [9, 9], "reasoning_gym": {}}
    samples = {
        str(n): Problem(problem_id=str(n), prompt="p", ground_truth="18", columns=columns) for n in range(len(texts))
    }
    if name == "reasoning_gym":
        samples |= reasoning_gym_samples(len(texts))
    rewards = make_rewards(f"benchmarks.audited.{name}")
    result = rewards(rollouts({str(n): [text] for n, text in enumerate(texts)}, **samples))
    rewards.close()
    return sum(item.reward is not None for item in result)


def reasoning_gym_samples(count: int) -> dict[str, Any]:
    """Problems of the tasks whose own scorers evaluate answers."""
    from atomrl.data.tasks import generate
    from atomrl.rewards.tasks import ARITHMETIC_TASKS, FORMULA_TASKS, LITERAL_TASKS

    names = [*ARITHMETIC_TASKS, *FORMULA_TASKS, *LITERAL_TASKS]
    rows = {name: next(iter(generate(f"reasoning_gym:{name}", 1))) for name in names}
    return {
        str(n): Problem(problem_id=str(n), prompt="p", ground_truth="18",
                       columns={"reasoning_gym": rows[names[n % len(names)]]["reasoning_gym"]})
        for n in range(count)
    }  # fmt: skip


def alignment(batches: int = 500) -> dict[str, Any]:
    """Every completion's text says what it must earn, or how it fails."""
    rewards = make_rewards("tests.rewards.misbehaving.obey_score")
    rng, wrong, rows = random.Random(0), 0, 0
    bad = ["raise", "nan", "string", "sysexit", "none", "inf"]
    for number in range(batches):
        sizes = [rng.randrange(6) for _ in range(rng.randint(1, 6))]
        lethal = ["exit", "killed"] if number % 10 == 0 else []
        groups = {
            str(p): [
                rng.choice(bad + lethal) if rng.random() < 0.3 else f"{p}.{g}1" for g in rng.sample(range(6), size)
            ]
            for p, size in rng.sample(list(enumerate(sizes)), len(sizes))
        }
        result = rewards(rollouts(groups))
        fails = {*bad, *lethal}
        expected = [None if text in fails else float(text) for texts in groups.values() for text in texts]
        wrong += [item.reward for item in result] != expected
        rows += sum(sizes)
    rewards.close()
    return {"batches": batches, "completions": rows, "batches_with_a_wrong_reward": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["attack", "speed", "audit", "alignment", "agreement"])
    parser.add_argument("--shared", type=Path, help="a folder with data/gsm8k and data/preferences")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only:
        if name == "agreement" and arguments.shared is None:
            continue
        results[name] = agreement(arguments.shared) if name == "agreement" else globals()[name]()
        print(name, json.dumps(results[name], indent=1), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
