"""The process that asks sympy: run by llmgym/verifiers/pool.py as ``python -m llmgym.verifiers.worker``.

It imports sympy once and then forks itself (it has one thread, so that is safe): the child reads one job
per line from standard input, ``{"answer", "truth", "seconds"}``, and writes one line, the status. Before
each job the child starts a timer whose signal ends it; the parent sees that, writes "timed_out" in its
place and forks again, which costs milliseconds where a new interpreter with sympy costs seconds. Address
space is limited for both. When standard input closes both end.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from llmgym.verifiers.answers import parse
from llmgym.verifiers.compare import same, separates
from llmgym.verifiers.normalise import OverLimits

MEMORY = 2 * 2**30  # bytes of address space
JOBS = 500  # per child: sympy's caches grow
OUT_OF_MEMORY, RECYCLE = 77, 78
REPLIES = 3  # the file descriptor; what libraries print must not look like an answer


def say(word: str) -> None:
    """Write one line where the caller reads."""
    os.write(REPLIES, word.encode() + b"\n")


def serve() -> None:
    """Answer jobs until standard input closes."""
    say("ready")
    while True:
        child = os.fork()
        if child == 0:
            work()
        _, wait_status = os.waitpid(child, 0)
        if os.WIFEXITED(wait_status) and os.WEXITSTATUS(wait_status) == 0:
            return
        if os.WIFSIGNALED(wait_status):
            # Anything but the timer is the kernel: out of memory, or out of stack in C.
            timer = os.WTERMSIG(wait_status) == signal.SIGALRM
            say("timed_out" if timer else "over_limits")
        elif os.WEXITSTATUS(wait_status) != RECYCLE:
            say("over_limits")


def read_line() -> bytes:
    """One line of standard input, byte for byte: what lies behind it belongs to the next child."""
    line = bytearray()
    while True:
        chunk = os.read(0, 65536)
        line += chunk
        if not chunk or chunk.endswith(b"\n"):
            return bytes(line)


def work() -> None:
    """The child's loop; never returns."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for _ in range(JOBS):
        line = read_line()
        if not line:
            os._exit(0)
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        try:
            status = judge(job["answer"], job["truth"])
        except (MemoryError, RecursionError):
            os._exit(OUT_OF_MEMORY)
        except OverLimits:
            status = "over_limits"
        except BaseException:  # sympy raises anything; an answer that it cannot read is not right
            status = "wrong"
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(status)
    os._exit(RECYCLE)


def judge(answer: str, truth: str) -> str:
    """The status of an answer: "correct", "wrong" or "unparsable_truth"."""
    from llmgym.verifiers.symbolic import Unreadable, oracle  # loaded by `main`, under its limits

    wanted = parse(truth)
    try:
        same(wanted, wanted, oracle)
    except Unreadable:
        return "unparsable_truth"
    try:
        return "correct" if same(parse(answer, separates(wanted)), wanted, oracle) else "wrong"
    except Unreadable:
        return "wrong"


def main() -> None:
    """Limit, import, serve."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(1, REPLIES)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import llmgym.verifiers.symbolic  # noqa: F401  before the fork, once for all children

    serve()


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
