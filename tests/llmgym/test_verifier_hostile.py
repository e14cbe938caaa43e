"""Answers that attack the grader: code, hangs, depth, memory. Everything runs in a limited process of its
own."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = [json.loads(line) for line in (HERE / "data" / "answers.jsonl").read_text().splitlines()]
HOSTILE = [case for case in CASES if case["tag"] in ("exec", "dos", "robust")]
# Against a truth that needs sympy, so that the text goes all the way to the worker.
CODE = [
    "__import__('os').system('touch pwned')",
    "open('pwned','w').write('x')",
    "\\text{open('pwned','w')}",
    "exec(\"open('pwned','w')\")",
    "x.__class__.__mro__[1].__subclasses__()",
    "lambda: open('pwned', 'w')",
    "\\operatorname{system}(touch pwned)",
    "\\input{/etc/passwd}",
    "\\write18{touch pwned}",
    "sqrt(2) if open('pwned','w') else 1",
]
HANGING = [
    "x^{999^{999^{9}}}",
    "(x^2+2xy+y^2+z+w)^{400}",
    "((x+y)^{80}+z)^{80}",
    "\\sqrt{\\sqrt{\\sqrt{x+\\sqrt{y+\\sqrt{z}}}}+\\sqrt{x}}^{99}",
    "999!!x",
    "10^{10^{10}}x",
    "\\binom{9999}{500}x",
]

LONG = [
    "(" * 100_000,
    "1" * 190_000,
    "1," * 90_000,
    "1, " * 60_000,
    "111,111," * 200 + "x",
    "$" * 100_000,
    "\\(" * 50_000,
    "####" * 45_000,
    "\\boxed{" * 25_000,
    "\\boxed{}" * 20_000 + "5",
    "answer is " * 15_000,
    "answer to " * 15_000,
    "A:" * 90_000,
    "<<" * 90_000,
    "<think>" * 25_000,
    "#### " + "1^" * 4_000 + "1",
    "#### " + "-" * 9_000 + "5",
    "#### " + "\\frac" * 1_900,
    "#### " + "=" * 9_000,
    "#### " + "x<" * 4_000,
    "#### " + "1:" * 4_000,
    "#### " + "±" * 9_000,
    "#### " + "∪" * 9_000,
    "#### " + "1" * 9_999 + "x",
    "#### " + "1.1" * 3_000,
    "#### " + "a " * 4_000,
    "#### 5 " + "cm " * 3_000,
    "\ud800#### 5\udfff",
    "#### " + "9^" * 50 + "9",
    "#### 9e99999999999999999999",
    "#### 1/3" + "/3" * 3_000,
]

# The child has 2 GB and 30 s of processor time; every attempt to run, compile or write while grading is
# reported.
CHILD = textwrap.dedent(
    """
    import json, resource, sys, time
    resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    from llmgym.verifiers.math import grade
    from llmgym.verifiers import pool
    events, watching = [], False
    def hook(event, args):
        if not watching:
            return
        if event in ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "import"):
            events.append(event)
        if event == "subprocess.Popen" and "llmgym.verifiers.worker" not in args[1]:
            events.append(event)
        if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            events.append(f"open {args[0]}")
    sys.addaudithook(hook)
    watching = WATCH
    results = []
    for row in json.load(sys.stdin):
        start = time.perf_counter()
        grades = grade([row["response"]], [row["truth"]], time_limit=row.get("limit", 1.0))
        results.append([grades.score[0], grades.status[0], time.perf_counter() - start])
    watching = False
    print(json.dumps([results, events]))
    """
)


def grade_in_child(rows, folder, watch):
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("WATCH", str(watch))],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_hostile_cases_are_graded_without_running_or_writing_anything(tmp_path):
    assert len(HOSTILE) == 25
    results, events = grade_in_child(HOSTILE, tmp_path, watch=True)
    for case, (score, status, _) in zip(HOSTILE, results, strict=True):
        assert bool(score) == case["correct"], (case["id"], case["why"], status)
    assert events == []
    assert list(tmp_path.iterdir()) == []


def test_numbers_need_no_process(tmp_path):
    # Not one of the hostile cases starts a worker: a plain number as truth is settled in Python.
    rows = [case for case in HOSTILE if case["truth"].isdigit()]
    code = CHILD.replace("WATCH", "False").replace("print(json", "assert pool._pool is None; print(json")
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_code_does_not_run_in_the_worker_either(tmp_path):
    pytest.importorskip("latex2sympy2_extended")
    rows = [
        {"response": f"\\boxed{{{text}}}", "truth": truth}
        for text in CODE
        for truth in ("\\sqrt{2}", "x^2+1", "\\text{pwned}")
    ]
    results, _ = grade_in_child(rows, tmp_path, watch=False)
    assert [score for score, _, _ in results] == [0] * len(rows)
    assert list(tmp_path.iterdir()) == []


def test_hanging_expressions_cost_their_limit_and_no_more(tmp_path):
    pytest.importorskip("latex2sympy2_extended")
    rows = [{"response": f"\\boxed{{{text}}}", "truth": "x+y+z+\\sqrt{w}", "limit": 0.5} for text in HANGING]
    rows.append({"response": "\\boxed{2\\sqrt{2}}", "truth": "\\sqrt{8}", "limit": 30.0})
    results, _ = grade_in_child(rows, tmp_path, watch=False)
    assert [score for score, _, _ in results] == [0] * len(HANGING) + [1]
    statuses = {status for _, status, _ in results[:-1]}
    assert "timed_out" in statuses and statuses <= {"timed_out", "over_limits", "wrong"}


def test_long_and_odd_texts_are_read_in_linear_time(tmp_path):
    rows = [{"response": text, "truth": "5000001"} for text in LONG]
    # Together they take about two seconds; a quadratic pattern on any of them takes minutes.
    results, _ = grade_in_child(rows, tmp_path, watch=False)
    assert [score for score, _, _ in results] == [0] * len(rows)


def test_a_response_beyond_the_limit_is_not_read(tmp_path):
    results, _ = grade_in_child([{"response": "#### 5\n" * 100_000, "truth": "5"}], tmp_path, watch=False)
    assert results[0][:2] == [0, "over_limits"]
