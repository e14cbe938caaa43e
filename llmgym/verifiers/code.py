"""Whether the Python code in a response passes unit tests, found out without trusting the code.

The code runs in a sandbox and maps inputs to outputs; it is compared with the expected outputs here, in
the caller's process. These are never sent to the sandbox, so there is no verdict in there to be forged:
exiting early, patching `assert`, `json` or `__eq__`, or writing to the channel of results yields an output
like any other, which is right or wrong. What a function returns comes back as plain data (JSON with
tags; never pickle), and its own `__eq__` and `__repr__` are never called here.

The sandbox
-----------
Each test runs in a process of its own, forked from an interpreter without site-packages and with an empty
environment. That process has

- namespaces of its own (user, process ids, mounts, network, System V and POSIX queues, host name, control
  groups): no other process, no network, no `/proc`, no `/dev`, no file but the standard library and the
  system's shared libraries (read-only) and an empty working directory in memory, which ends with it;
- no capabilities, and a system call filter: no new processes, programs, sockets, memory files, shared memory,
  tracing, mounts or namespaces;
- limits on processor time, time, memory, size of files, output and threads (`Limits`).

It takes Linux 5.14 or later, on x86_64 or aarch64, that allows user namespaces; elsewhere grading is refused
unless `allow_unsandboxed=True`. Without namespaces the limits, the empty directory and, on Linux, the system
call filter remain, but the code reads and writes what the user may: for code that you trust.

What it does not protect against
--------------------------------
- Errors in the kernel. For code of an adversary with much to gain, run all of this in a virtual machine.
- Side channels, such as timing, between the sandbox and other processes on the machine; and the load itself:
  `workers` times the limits is what the code can use.
- Tests that are too weak. A table of the inputs seen in training passes the tests used as reward, which is
  why evaluation has tests of its own (`split_tests`); and whoever knows the inputs can look the outputs up.
- Code that recognises that it is tested, or that costs up to its limits for every test.
- Files of the standard library's folder and of /lib and /usr/lib can be read: keep no secrets there.
- The time limits are of this machine: a solution near a limit passes or not by chance. No other status
  depends on speed.
"""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmgym.checks import check_count, check_name
from llmgym.verifiers.code_tests import CallTest, CodeTest, ProgramTest, SplitTests, run_test, split_tests
from llmgym.verifiers.sandbox.host import Limits, Sandbox, SandboxError, SandboxUnavailableError

__all__ = [
    "CallTest",
    "CodeTest",
    "Grades",
    "Limits",
    "ProgramTest",
    "SandboxError",
    "SandboxUnavailableError",
    "SplitTests",
    "extract",
    "grade",
    "split_tests",
]

STATUSES = ("passed", "failed", "error", "timed_out", "over_limits", "no_code")
STATUS_DTYPE = np.dtype("<U11")
SCORES = ("share", "all")
LANGUAGES = ("", "python", "python3", "py")
MAX_SOURCE = 100_000  # characters


@dataclass(frozen=True, eq=False)
class Grades:
    """The grades of N responses.

    | field | type | meaning |
    |---|---|---|
    | `score` | float64 [N] | the share of tests passed, or 1 if all are and else 0 |
    | `status` | str [N] | of STATUSES: "passed", or that of the first test that is not |
    | `test_status` | N tuples of str | of each test that was run |
    | `detail` | N str | why the first test did not pass; words of the code itself: do not trust them |
    | `sandboxed` | bool | False: `allow_unsandboxed` was needed |

    "error" is an exception, a crash, or a result that is no plain data. That "over_limits" is about
    memory or files is what the code says; it could have been another failure.
    """

    score: NDArray[np.float64]
    status: NDArray[np.str_]
    test_status: list[tuple[str, ...]]
    detail: list[str]
    sandboxed: bool


def extract(response: str) -> str | None:
    """The code of a response: its last fenced block that is Python or names no language; None: none.

    Fences are as in CommonMark (at least three backticks or tildes alone on a line, closed by at least as
    many), at any indentation. A block that is not closed is cut off, and does not count.
    """
    if not isinstance(response, str):
        raise TypeError(f"response: got {type(response).__name__}; allowed: a text")
    code, fence, indent, wanted = None, "", 0, False
    lines: list[str] = []
    for line in response.replace("\r\n", "\n").split("\n"):
        text = line.strip()
        run = text[: len(text) - len(text.lstrip(text[0]))] if text and text[0] in "`~" else ""
        if not fence:
            language = text[len(run) :].strip()
            if len(run) >= 3 and "`" not in language:
                fence, indent, lines = run, len(line) - len(line.lstrip()), []
                wanted = (language.split() or [""])[0].lower() in LANGUAGES
        elif text == run and run[:1] == fence[0] and len(run) >= len(fence):
            if wanted:
                code = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    return code


def grade(
    responses: Sequence[str],
    tests: Sequence[Sequence[CodeTest]],
    *,
    score: str = "share",
    limits: Limits | None = None,
    workers: int = 4,
    allow_unsandboxed: bool = False,
) -> Grades:
    """Run the code of N responses on their tests. Any thread may call; no signal is set or sent here.

    Args:
        responses: N texts; their code is `extract`'s.
        tests: N sequences, those of each response's task.
        score: "share" of the tests passed, or "all": 1 or 0, and no test is run after one not passed.
        limits: of each test; None: `Limits()`.
        workers: sandboxes, and so untrusted processes, at a time.
        allow_unsandboxed: where there can be no sandbox, run the code without one.

    Raises:
        SandboxUnavailableError: there can be no sandbox here.
        SandboxError: the sandbox failed, not the code; nothing is graded.
        TypeError, ValueError: a response that is no text, a row without tests, unequal lengths.
    """
    check_name("score", score, SCORES)
    check_count("workers", workers)
    if len(tests) != len(responses):
        raise ValueError(f"tests: got {len(tests)}; allowed: {len(responses)}, one sequence per response")
    for row, row_tests in enumerate(tests):
        if not row_tests:
            raise ValueError(f"tests: row {row} has none; allowed: at least one")
    codes = [extract(response) for response in responses]
    graded: list[list[tuple[str, str]]] = [[] for _ in responses]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for row, code in enumerate(codes):
        if code is None:
            graded[row] = [("no_code", "no closed block of Python code")]
        elif len(code) > MAX_SOURCE:
            graded[row] = [("over_limits", f"more than {MAX_SOURCE} characters of code")]
        else:
            waiting.put(row)

    def work() -> bool:
        """Grade rows that are waiting until there are none; whether that was in the sandbox."""
        runner = _Runner(limits or Limits(), allow_unsandboxed)
        try:
            while True:
                row = waiting.get_nowait()
                for test in tests[row]:
                    graded[row].append(runner.judge(codes[row] or "", test))
                    if score == "all" and graded[row][-1][0] != "passed":
                        break
        except queue.Empty:
            return runner.sandboxed
        finally:
            runner.close()

    with ThreadPoolExecutor(min(workers, max(waiting.qsize(), 1)), "grade-code") as pool:
        jobs = [pool.submit(work) for _ in range(min(workers, waiting.qsize()))]
        try:
            sandboxed = [job.result() for job in jobs]
        except BaseException:  # the others need not go on
            while not waiting.empty():
                waiting.get()
            raise
    passed = [sum(status == "passed" for status, _ in row) for row in graded]
    share = np.array(passed, np.float64) / [len(row_tests) for row_tests in tests] if passed else np.zeros(0)
    first = [next((one for one in row if one[0] != "passed"), ("passed", "")) for row in graded]
    return Grades(
        score=share if score == "share" else (share == 1.0).astype(np.float64),
        status=np.array([status for status, _ in first], STATUS_DTYPE),
        test_status=[tuple(status for status, _ in row) for row in graded],
        detail=[detail for _, detail in first],
        sandboxed=all(sandboxed),
    )


class _Runner:
    """One sandbox, made when it is first needed and again when it broke."""

    def __init__(self, limits: Limits, allow_unsandboxed: bool) -> None:
        self.sandboxed = True
        self._limits = limits
        self._allow_unsandboxed = allow_unsandboxed
        self._sandbox: Sandbox | None = None

    def judge(self, code: str, test: CodeTest) -> tuple[str, str]:
        """Status and detail of one test."""
        if self._sandbox is None:
            self._sandbox = self._open()
        status, detail = run_test(self._sandbox, code, test)
        if status == "broken":
            self.close()
            return "error", "the sandbox ended before the code did"
        return status, detail

    def _open(self) -> Sandbox:
        try:
            return Sandbox(self._limits)
        except SandboxUnavailableError:
            if not self._allow_unsandboxed:
                raise
        self.sandboxed = False
        return Sandbox(self._limits, namespaces=False)

    def close(self) -> None:
        """End the sandbox, if there is one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
