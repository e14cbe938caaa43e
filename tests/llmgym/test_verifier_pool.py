"""The processes that ask sympy: limits, replacement, threads, daemons, signals, absence."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmgym.verifiers import pool
from llmgym.verifiers.math import grade

ROOT = Path(__file__).parents[2]
HANGS = ("\\boxed{(x^2+2xy+y^2+z)^{400}}", "((x+y)^2+z)^{400}")  # true, and nothing that sympy can expand
SURD = ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}")
needs_sympy = pytest.mark.skipif(bool(pool.missing()), reason="expressions need pip install llmgym[llm]")


def grade_rows(rows, seconds):
    return grade([row[0] for row in rows], [row[1] for row in rows], time_limit=seconds)


@needs_sympy
def test_a_hanging_row_times_out_and_its_neighbours_are_graded():
    rows = [SURD, HANGS, SURD, ("#### 5", "5"), HANGS, SURD]
    assert grade_rows([SURD], 30.0).status[0] == "correct"
    grades = grade_rows(rows, 1.0)
    assert grades.status.tolist() == ["correct", "timed_out", "correct", "correct", "timed_out", "correct"]
    assert grades.score.tolist() == [1, 0, 1, 1, 0, 1]


@needs_sympy
def test_a_time_out_ends_the_child_and_keeps_the_interpreter():
    pool.close()
    assert grade_rows([SURD], 30.0).score[0] == 1
    (worker,) = pool.pool().all
    assert grade_rows([HANGS], 0.3).status[0] == "timed_out"
    assert pool.pool().all == {worker} and worker.process.poll() is None


@needs_sympy
def test_a_worker_that_was_killed_is_replaced():
    pool.close()
    assert grade_rows([SURD], 30.0).score[0] == 1
    (worker,) = pool.pool().all
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert grade_rows([SURD], 30.0).score[0] == 1
    assert worker not in pool.pool().all


@needs_sympy
def test_a_worker_that_is_silent_is_killed(monkeypatch):
    pool.close()
    assert grade_rows([SURD], 30.0).score[0] == 1
    (worker,) = pool.pool().all
    monkeypatch.setattr(pool, "GRACE", 0.2)
    os.killpg(worker.process.pid, signal.SIGSTOP)
    assert grade_rows([SURD], 0.2).status[0] == "timed_out"
    assert worker.process.poll() is not None
    monkeypatch.undo()
    assert grade_rows([SURD], 30.0).score[0] == 1


@needs_sympy
def test_threads_share_the_workers():
    results = []

    def work():
        results.append(grade_rows([SURD, ("#### 5", "5"), ("\\boxed{\\sqrt{7}}", "\\sqrt{8}")] * 5, 30.0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.status.tolist() for r in results] == [["correct", "correct", "wrong"] * 5] * 8
    assert len(pool.pool().all) <= pool.MAX_WORKERS


@needs_sympy
def test_no_signal_handler_or_timer_of_the_caller_changes():
    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT)]
    grade_rows([SURD, HANGS], 0.5)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def grade_in_daemon(connection):
    connection.send(grade_rows([SURD, ("#### 5", "6")], 30.0).status.tolist())


@needs_sympy
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_daemonic_process_can_grade(method):
    assert grade_rows([SURD], 30.0).score[0] == 1  # the fork inherits a pool that it must not use
    workers = set(pool.pool().all)
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=grade_in_daemon, args=(there,), daemon=True)
    process.start()
    assert here.poll(60)
    assert here.recv() == ["correct", "wrong"]
    process.join()
    assert pool.pool().all == workers
    assert grade_rows([SURD], 30.0).score[0] == 1


@needs_sympy
def test_workers_end_with_their_caller():
    code = (
        "from llmgym.verifiers.math import grade; from llmgym.verifiers import pool; import os, sys\n"
        f"assert grade([{SURD[0]!r}], [{SURD[1]!r}], time_limit=30.0).score[0] == 1\n"
        "print(*[w.process.pid for w in pool.pool().all]); sys.stdout.flush()\n"
        "HOW"
    )
    for how in ("pass", "os.kill(os.getpid(), 9)"):  # an orderly end, and one that leaves no time
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code.replace("HOW", how)], capture_output=True, text=True, env=environment
        )
        for pid in map(int, done.stdout.split()):
            for _ in range(200):
                if not is_running(pid):
                    break
                threading.Event().wait(0.05)
            assert not is_running(pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_sympy
def test_memory_is_limited():
    # 10^(10^7)-digit arithmetic would take gigabytes; either limit ends it, and the next row is graded.
    grades = grade_rows([("\\boxed{\\binom{999}{500}^{999}x}", "x+\\sqrt{2}"), SURD], 5.0)
    assert grades.status[0] in ("over_limits", "timed_out", "wrong") and grades.status[1] == "correct"


def test_without_sympy_numbers_are_graded_and_expressions_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(pool, "NEEDED", ("sympy_that_is_not_there",))
    monkeypatch.setattr(pool, "_warned", False)
    with pytest.warns(UserWarning, match=r"sympy_that_is_not_there.*pip install llmgym\[llm\]"):
        grades = grade_rows([SURD, ("#### 1/2", "0.5"), ("\\boxed{(1,2)}", "(1,2)")], 1.0)
    assert grades.status.tolist() == ["needs_extra", "correct", "correct"]
    assert grades.score.tolist() == [0, 1, 1]


def test_importing_the_grader_loads_no_sympy_and_starts_nothing():
    code = (
        "import sys, llmgym.verifiers.math, llmgym.verifiers.format\n"
        "assert not {'sympy', 'latex2sympy2_extended', 'torch', 'llmgym.verifiers.pool'} & set(sys.modules)\n"
        "assert llmgym.verifiers.math.is_correct('#### 5', '5')\n"
        "assert 'sympy' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
