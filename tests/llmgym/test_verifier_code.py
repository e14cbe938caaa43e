"""The code verifier: verdicts on honest code, equality, extraction, the division of tests, and refusals."""

import builtins
import json
import math
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from code_attacks import block

from llmgym.verifiers import code_tests
from llmgym.verifiers.code import (
    CallTest,
    CodeTest,
    Limits,
    ProgramTest,
    SandboxError,
    SandboxUnavailableError,
    SplitTests,
    extract,
    grade,
    split_tests,
)
from llmgym.verifiers.sandbox import host
from llmgym.verifiers.sandbox.plain_data import MAX_DEPTH, canonical, decode, encode

LIMITS = Limits(wall_seconds=60)


@pytest.fixture(scope="module")
def sandbox() -> None:
    try:
        host.Sandbox(LIMITS).close()
    except SandboxUnavailableError as error:
        pytest.skip(f"needs the sandbox: {error}")


HONEST: dict[str, tuple[str, list[CodeTest]]] = {
    "plain": ("def add(a, b=10):\n    return a + b", [CallTest("add", (1, 2), 3), CallTest("add", [1], 11)]),
    "named arguments": ("def f(*, x): return -x", [CallTest("f", (), -4, {"x": 4})]),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, astuple\n"
        "@dataclass\nclass Point:\n    x: int\n    y: int\n"
        "def f(x): return astuple(Point(x, x))",
        [CallTest("f", (2,), (2, 2))],
    ),
    "subclasses of plain types": (
        "from collections import Counter, OrderedDict, namedtuple\nfrom enum import IntEnum\n"
        "class E(IntEnum):\n    A = 1\nP = namedtuple('P', 'x')\n"
        "def f(s): return [Counter(s), OrderedDict(b=1), P(3), E.A]",
        [CallTest("f", ("aab",), [{"a": 2, "b": 1}, {"b": 1}, (3,), 1])],
    ),
    "main is not run": (
        "def f(): return __name__ != '__main__'\nif __name__ == '__main__':\n    input()",
        [CallTest("f", (), True)],
    ),
    "prints": ("print('hello')\ndef f():\n    print('x')\n    return 1", [CallTest("f", (), 1)]),
    "shadows what the runner uses": (
        "list = dict = str = json = os = None\ndef encode(x): return 0\ndef f(): return [{'a': 1}]",
        [CallTest("f", (), [{"a": 1}])],
    ),
    "large integers": ("def f(n): return 10 ** n", [CallTest("f", (10_000,), 10**10_000)]),
    "files": (
        "def f():\n    open('x', 'w').write('12')\n    return open('x').read()",
        [CallTest("f", (), "12")],
    ),
    "asyncio": (
        "import asyncio\nasync def g(): return 5\ndef f(): return asyncio.run(g())",
        [CallTest("f", (), 5)],
    ),
    "standard library": (
        "import decimal, fractions, json, re, statistics, hashlib, random, datetime, zlib, sqlite3\n"
        "def f(x): return hashlib.sha256(x).hexdigest()[:8], str(fractions.Fraction(2, 4))",
        [CallTest("f", (b"abc",), ("ba7816bf", "1/2"))],
    ),
    "program": (
        "n = int(input())\nfor i in range(n):\n    print(*map(int, input().split()), sep='+', end=' \\n')",
        [ProgramTest("2\n1 2\n3 4", "1+2\n3+4\n\n")],
    ),
    "program in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def main():\n    print(sum(map(int, sys.stdin.read().split())))\n    exit()\n"
        "if __name__ == '__main__':\n    threading.Thread(target=main).start()",
        [ProgramTest("1\n2\n3\n", "6")],
    ),
    "program that reads its standard input as a file": (
        "import os\nprint(os.read(0, 100).decode() + open(0).read())\nquit()",
        [ProgramTest("é\n", "é")],
    ),
    "large input and output": (
        "import sys\nsys.stdout.write(sys.stdin.read())",
        [ProgramTest("0123456789\n" * 50_000, "0123456789\n" * 50_000)],
    ),
}


@pytest.mark.usefixtures("sandbox")
def test_honest_code_passes() -> None:
    codes, tests = zip(*HONEST.values(), strict=True)
    grades = grade([block(code) for code in codes], tests, limits=LIMITS, workers=2)
    wrong = {name: detail for name, detail in zip(HONEST, grades.detail, strict=True) if detail}
    assert wrong == {}
    assert grades.score.tolist() == [1.0] * len(HONEST)
    assert set(grades.status) == {"passed"}


@pytest.mark.usefixtures("sandbox")
def test_scores_statuses_and_order_of_rows() -> None:
    tests = [CallTest("f", (n,), n * n) for n in range(4)]
    codes = {
        "def f(n): return n * n": ((1.0, 1.0), "passed", ("passed",) * 4),
        "def f(n): return n": ((0.5, 0.0), "failed", ("passed", "passed", "failed", "failed")),
        "def f(n): return 0 // n": ((0.0, 0.0), "error", ("error", "failed", "failed", "failed")),
        "def f(n): return [n * n][n // 3]": ((0.75, 0.0), "error", ("passed",) * 3 + ("error",)),
        "def g(n): return n * n": ((0.0, 0.0), "error", ("error",) * 4),
        "def f(n) return n": ((0.0, 0.0), "error", ("error",) * 4),
    }
    responses = [*map(block, codes), "no code"]
    share = grade(responses, [tests] * 7, limits=LIMITS, workers=3)
    assert share.score.tolist() == [*(score[0] for score, _, _ in codes.values()), 0.0]
    assert share.status.tolist() == [*(status for _, status, _ in codes.values()), "no_code"]
    assert share.test_status == [*(statuses for _, _, statuses in codes.values()), ("no_code",)]
    assert share.detail[2].startswith("ZeroDivisionError") and "no function 'f'" in share.detail[4]
    strict = grade(responses, [tests] * 7, limits=LIMITS, score="all", workers=1)
    assert strict.score.tolist() == [*(score[1] for score, _, _ in codes.values()), 0.0]
    assert strict.status.tolist() == share.status.tolist()
    assert [len(statuses) for statuses in strict.test_status] == [4, 3, 1, 4, 1, 1, 1]
    assert strict.sandboxed


@pytest.mark.usefixtures("sandbox")
def test_works_in_other_threads_and_leaves_signals_alone() -> None:
    """Several callers at once, none of them the main thread; no handler is changed."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    scores: dict[int, float] = {}

    def call(i: int) -> None:
        tests = [CallTest("f", (), i)]
        scores[i] = float(grade([block(f"def f(): return {i}")], [tests], limits=LIMITS).score[0])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {0: 1.0, 1: 1.0, 2: 1.0}
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers


@pytest.mark.usefixtures("sandbox")
def test_expected_outputs_are_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = host.Sandbox._send
    monkeypatch.setattr(host.Sandbox, "_send", lambda self, data: (sent.append(data), send(self, data)))
    tests = [CallTest("f", ("given",), "expected"), ProgramTest("given", "expected")]
    grade([block("def f(x): return x")], [tests], limits=LIMITS)
    assert b"given" in b"".join(sent) and b"expected" not in b"".join(sent)


def refuse(_: int) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_without_namespaces_it_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_map_users", refuse)
    rows = [
        block("def f(): return 1"),
        block("while True: pass"),
        block("import os\ndef f(): return os.fork()"),
    ]
    tests = [[CallTest("f", (), 1)]] * 3
    with pytest.raises(SandboxUnavailableError, match="allow_unsandboxed=True"):
        grade(rows, tests)
    grades = grade(rows, tests, limits=Limits(cpu_seconds=1), allow_unsandboxed=True)
    assert grades.status.tolist() == ["passed", "timed_out", "error"]
    assert not grades.sandboxed


@pytest.mark.usefixtures("sandbox")
def test_failure_of_the_sandbox_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that could not be set up raises; one that dies is an error of its row only."""
    with pytest.raises(SandboxError, match="could not be set up: .*too large"):
        grade([block("def f(): return 1")], [[CallTest("f", (), 1)]], limits=Limits(file_bytes=2**80))
    run, runs = host.Sandbox.run, []

    def die_once(self: host.Sandbox, *arguments: Any) -> host.Ended:
        runs.append(self)
        if len(runs) == 2:
            os.killpg(self._process.pid, signal.SIGKILL)
        return run(self, *arguments)

    monkeypatch.setattr(host.Sandbox, "run", die_once)
    tests = [[CallTest("f", (), 1)]] * 3
    grades = grade([block("def f(): return 1")] * 3, tests, limits=LIMITS, workers=1)
    assert grades.status.tolist() == ["passed", "error", "passed"]
    assert "sandbox ended" in grades.detail[1]


# Equality ---------------------------------------------------------------------------------------------


def random_value(rng: random.Random, depth: int, hashable: bool = False) -> Any:
    """A small value of few kinds, so that equal ones are frequent."""
    kinds = (
        ["leaf", "tuple", "frozenset"] if hashable else ["leaf", "list", "tuple", "set", "frozenset", "dict"]
    )
    kind = rng.choice(kinds) if depth else "leaf"
    size = rng.randrange(3)
    if kind == "leaf":
        return rng.choice(
            [None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, 0.5, 1j, 1 + 0j, "", "1", b"1", 2**70, 2.0**70]
        )
    if kind == "dict":
        return {random_value(rng, depth - 1, True): random_value(rng, depth - 1) for _ in range(size)}
    inner = hashable or kind in ("set", "frozenset")
    return getattr(builtins, kind)(random_value(rng, depth - 1, inner) for _ in range(size))


def test_equality_is_that_of_python() -> None:
    rng = random.Random(0)
    equal = 0
    for _ in range(10_000):
        depth = rng.randrange(3)
        one, other = random_value(rng, depth), random_value(rng, depth)
        sent = json.loads(json.dumps(encode(other)))
        assert decode(sent) == other and type(decode(sent)) is type(other)
        assert (canonical(encode(one)) == canonical(sent)) == (one == other), (one, other)
        equal += one == other
    assert equal > 300


def test_equality_of_what_is_not_finite() -> None:
    trees = [json.loads(json.dumps(canonical(encode(x)))) for x in (math.nan, math.inf, -math.inf)]
    assert trees[0] == canonical(encode(float("nan")))
    assert len({json.dumps(tree) for tree in trees}) == 3


def test_equal_hashes_cost_no_quadratic_time() -> None:
    """Building this set would take 10^9 comparisons."""
    tree = json.dumps({"value": ["set", *(["int", format(i * (2**61 - 1), "x")] for i in range(1, 50_001))]})
    assert (
        code_tests._judge_call(host.Ended("", 0, tree.encode(), b""), CallTest("f", (), {1}))[0] == "failed"
    )


@pytest.mark.parametrize(
    "tree",
    [
        [],
        [1],
        ["unknown"],
        ["int", "x"],
        ["int"],
        ["int", 1],
        ["complex", 1],
        ["bytes", "0"],
        ["dict", [1]],
        {},
    ],
)
def test_what_is_no_tree_is_no_value(tree: Any) -> None:
    with pytest.raises(ValueError):
        canonical(tree)


def test_depth_is_limited_alike_on_both_sides() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH):
        value = [value]
    assert canonical(encode(value)) == canonical(json.loads(json.dumps(encode(value))))
    with pytest.raises(ValueError, match="100 levels"):
        encode([value])
    with pytest.raises(ValueError, match="100 levels"):
        canonical(["list", encode(value)])


# Extraction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nend", "x = 1\n"),
        ("```py\na\n```\n```python3\nb\n```", "b\n"),
        ("```python\na\n```\nOutput:\n```text\n3\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\na", None),
        ("x = 1", None),
        ("use `x` or ```x``` here", None),
        ("", None),
        ("```python\r\na\r\n  b\r\n```\r\n", "a\n  b\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("~~~ Python\na\n```\n~~~", "a\n```\n"),
        ("1. so:\n   ```python\n   def f():\n       return 1\n\n   ```", "def f():\n    return 1\n\n"),
        ("```python\n```", "\n"),
        ("```python title='x'\na\n```", "a\n"),
        ("`" * 100_000 + "\n" + "`" * 99_999, None),
    ],
)
def test_extract(response: str, code: str | None) -> None:
    assert extract(response) == code


# The division of tests --------------------------------------------------------------------------------


def test_parts_share_no_input_whatever_the_seed() -> None:
    tests: list[CodeTest] = [CallTest("f", (n % 7, [n % 7]), n) for n in range(20)]
    tests += [CallTest("f", (2.0, [True + 1]), 5), CallTest("g", (2, [2]), 5), ProgramTest("2\n", "2")]
    tests += [ProgramTest("2", "two")]
    seen = set()
    for seed in range(50):
        split = split_tests(tests, 3, seed)
        assert split == split_tests(tests, 3, seed)
        inputs = [{code_tests._input_key(test) for test in part} for part in (split.reward, split.evaluation)]
        assert not inputs[0] & inputs[1]
        assert (len(inputs[0]), len(inputs[1])) == (6, 3)
        assert sorted(map(repr, split.reward + split.evaluation)) == sorted(map(repr, tests))
        seen.add(frozenset(inputs[1]))
    assert len(seen) > 20


def test_equal_inputs_cannot_be_on_both_sides() -> None:
    reward = CallTest("f", (1, {"a": {2, 3}}), 1)
    with pytest.raises(ValueError, match="among those of reward"):
        SplitTests((reward,), (CallTest("f", (True, {"a": {3, 2}}), 7),))
    with pytest.raises(ValueError, match="evaluation: got no tests"):
        SplitTests((reward,), ())
    with pytest.raises(ValueError, match="num_evaluation: got 1; allowed: 1 to 0"):
        split_tests([reward, reward], 1, 0)


# Bad input --------------------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    test = CallTest("f", (), 1)
    with pytest.raises(ValueError, match="tests: got 1; allowed: 2"):
        grade(["", ""], [[test]])
    with pytest.raises(ValueError, match="row 1 has none"):
        grade(["", ""], [[test], []])
    with pytest.raises(ValueError, match="score: got 'shares' .did you mean 'share'"):
        grade([""], [[test]], score="shares")
    with pytest.raises(ValueError, match="workers: got 0"):
        grade([""], [[test]], workers=0)
    with pytest.raises(TypeError, match="response: got NoneType"):
        grade([None], [[test]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="memory_bytes: got 1000"):
        Limits(memory_bytes=1000)
    with pytest.raises(ValueError, match="cpu_seconds: got 0.5"):
        Limits(cpu_seconds=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected: object is not plain data"):
        CallTest("f", (), object())
    with pytest.raises(ValueError, match="args: ndarray is not plain data"):
        CallTest("f", (np.zeros(2),), 1)
    with pytest.raises(ValueError, match="stdin: .*surrogates not allowed"):
        ProgramTest("\ud800", "")


def test_no_rows_and_no_code_need_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_map_users", refuse)
    assert grade([], []).score.shape == (0,)
    assert grade(["none"], [[CallTest("f", (), 1)]]).status.tolist() == ["no_code"]


def test_the_child_imports_the_standard_library_only() -> None:
    folder = Path(host.__file__).parent
    names = set()
    for file in ("child.py", "isolation.py", "plain_data.py"):
        for line in (folder / file).read_text().splitlines():
            if line.startswith(("import ", "from ")) and not line.startswith("from ."):
                names.add(line.split()[1].split(".")[0])
    assert len(names) > 10 and names <= sys.stdlib_module_names
