"""The caller's side of the sandbox: start it, send requests, read how each of them ended."""

import binascii
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from llmgym.checks import check_count
from llmgym.verifiers.sandbox.child import READY
from llmgym.verifiers.sandbox.isolation import USER

# The child's package is looked for last, so that no file beside it takes the place of a standard one.
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv.pop()); from sandbox.child import main; sys.path.pop(); main()"
)
_NOBODY = 65534  # the user, outside, whom the code belongs to when the caller is root
START_SECONDS = 120.0  # until a sandbox that says nothing counts as broken
GRACE_SECONDS = 60.0  # beyond its time limit, until a server that says nothing counts as broken
SMALLEST_MEMORY = 64 << 20  # bytes; the interpreter alone takes about half of it


class SandboxUnavailableError(RuntimeError):
    """This machine does not let the sandbox be made; the message says what failed and what to do."""


class SandboxError(RuntimeError):
    """The sandbox, not the code in it, failed: nothing was judged."""


@dataclass(frozen=True)
class Limits:
    """What one run of untrusted code, that is one test, may use.

    | field | unit | meaning |
    |---|---|---|
    | `cpu_seconds` | whole seconds | processor time, of all threads together |
    | `wall_seconds` | whole seconds | time from start to end: for code that waits, not computes |
    | `memory_bytes` | bytes, at least 64 MiB | address space, the interpreter's included |
    | `file_bytes` | bytes | size of a file, and of all files in the working directory together |
    | `output_bytes` | bytes | standard output, and what a function returns, as text |
    | `threads` | | threads at a time; there is never more than one process |
    """

    cpu_seconds: int = 2
    wall_seconds: int = 20
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    output_bytes: int = 1 << 20
    threads: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_count(name, value)
        if self.memory_bytes < SMALLEST_MEMORY:
            raise ValueError(
                f"memory_bytes: got {self.memory_bytes}; allowed: at least {SMALLEST_MEMORY} (64 MiB)"
            )


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    | field | meaning |
    |---|---|
    | `why` | "timed_out", "over_limits" (of output), "broken" (the server inside died), or "" |
    | `code` | the exit code, negative for a signal |
    | `result` | what the code claims that the function returned, or that went wrong: JSON, or not |
    | `output` | the standard output of a program |
    """

    why: str
    code: int
    result: bytes
    output: bytes


class Sandbox:
    """A running sandbox. Every request runs in a fresh process of it; one request at a time.

    Args:
        limits: of each request.
        namespaces: False for no namespaces, where the kernel has none: files and other processes of
            the user are then within reach.

    Raises:
        SandboxUnavailableError: namespaces are not allowed here.
    """

    def __init__(self, limits: Limits, namespaces: bool = True) -> None:
        self.limits = limits
        how = "namespaces" if namespaces else "none"
        verifiers = str(Path(__file__).resolve().parents[1])
        flags = ["-S", "-s", "-P", "-B", "-X", "utf8"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP, json.dumps(asdict(limits)), how, verifiers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            # Nothing of the caller's. One arena, or each thread would reserve 128 MiB of the memory.
            env={"MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        self._unread = bytearray()
        problem = self._start()
        if problem:
            self.close()
            raise SandboxUnavailableError(
                f"no sandbox here ({problem}): it takes Linux 5.14 or later that allows user namespaces "
                "(containers often do not); allow_unsandboxed=True runs the code without one, as the "
                "user who trains, with resource limits only"
            )

    def _start(self) -> str:
        """Bring the sandbox up; what failed, or "" if nothing did."""
        try:
            message = self._hear(START_SECONDS)
            if message is not None and "map" in message:
                _map_users(self._process.pid)
                self._send(b"\n")
                message = self._hear(START_SECONDS)
        except OSError as error:
            return str(error)
        if message is None:
            return "the interpreter ended at once"
        return message.get("error", "")

    def run(self, source: str, function: str | None, value: Any) -> Ended:
        """Run a source in a fresh process.

        Args:
            source: Python code.
            function: what to call in it; None: it is a program.
            value: `plain_data.encode` of [positional, named] arguments; of a program: its input.

        Raises:
            SandboxError: the process could not be set up. The sandbox is of no use any more.
        """
        request = {"source": source, "function": function, "input": value}
        try:
            self._send(json.dumps(request).encode() + b"\n")
            reply = self._hear(self.limits.wall_seconds + GRACE_SECONDS)
        except OSError:
            reply = None
        if reply is None:
            return Ended("broken", 0, b"", b"")
        result, output = (binascii.a2b_base64(reply[name]) for name in ("result", "output"))
        if not result.startswith(READY) and not reply["why"]:
            raise SandboxError(
                f"a process for the code could not be set up: {result.decode(errors='replace')}"
            )
        return Ended(reply["why"], reply["code"], result[len(READY) :], output)

    def close(self) -> None:
        """End it and everything in it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            # Process 1 of the namespace is in the group: when it is gone, so is all that was inside.
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        while data:
            data = data[os.write(self._process.stdin.fileno(), data) :]

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        """The next message of the child; None if it has ended, or says nothing for so long."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(file, select.POLLIN)
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0.0 or not poll.poll(left * 1000.0):
                return None
            if not (data := os.read(file, 1 << 16)):
                return None
            self._unread += data
        line, _, rest = self._unread.partition(b"\n")
        self._unread = bytearray(rest)
        return json.loads(line)


def _map_users(process: int) -> None:
    """Give a process of a new user namespace its users.

    Root maps two: root, who makes the mounts, and nobody, as whom the code runs (the kernel exempts
    root from the limit on processes). Others have only themselves to give.
    """
    if os.geteuid() == 0:
        users, groups = f"0 0 1\n{USER} {_NOBODY} 1\n", f"0 0 1\n{USER} {_NOBODY} 1\n"
    else:
        users, groups = f"{USER} {os.geteuid()} 1\n", f"{USER} {os.getegid()} 1\n"
        Path(f"/proc/{process}/setgroups").write_text("deny")
    Path(f"/proc/{process}/uid_map").write_text(users)
    Path(f"/proc/{process}/gid_map").write_text(groups)
