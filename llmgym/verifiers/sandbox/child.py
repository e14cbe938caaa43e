"""Runs inside the sandbox: forks a process for each request, which runs the code that came with it.

    host (the caller's process) ── launcher ── server (process 1 inside) ── one worker per request

The launcher makes the namespaces. The server is what the host trusts in here: it forks a worker, reads
what the worker has to say, ends it at its limits, and tells the host how it ended. It never sees a
request. The worker reads its request, and nothing else is ever in its memory; it gives up every
privilege, and then runs the untrusted code. Expected outputs are never sent to any of them.
"""

import base64
import builtins
import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from typing import Any

from . import isolation
from .plain_data import decode, encode

REQUESTS, REPLIES, NULL, RESULT = 0, 1, 2, 3  # file descriptors; RESULT is the worker's
READY = b"!"  # the first byte of a result: all privileges are given up, the code starts
CHUNK = 1 << 16
# Imported by the server once, rather than by nearly every solution.
OFTEN_USED = ("bisect", "collections", "functools", "heapq", "itertools", "math", "re", "string", "typing")
TASKS_OF_SANDBOX = 3  # launcher, server and worker, of the limit on threads


def main() -> None:
    """Serve the host until it closes its end: `sys.argv` is limits as JSON, and how to isolate."""
    for name in OFTEN_USED:
        importlib.import_module(name)
    limits = json.loads(sys.argv[1])
    namespaces = sys.argv[2] == "namespaces"
    # Python's handler would let a worker of the same user interrupt the server; process 1 gets no signal
    # from inside that it does not handle.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if namespaces:
            _isolate()
        _say({"ready": True})
    except OSError as error:
        _say({"error": str(error)})
        return
    serve(limits, namespaces)


def _isolate() -> None:
    """Enter the namespaces; returns in the server, while the launcher waits for its end."""
    if not isolation.FILTER_KNOWN:
        raise OSError(f"no system call filter for {sys.platform} on this processor")
    isolation.enter_namespaces()
    _say({"map": True})
    os.read(REQUESTS, 1)  # the host has mapped the users
    server = os.fork()
    if server:
        os.close(REQUESTS)
        os.close(REPLIES)
        os.waitpid(server, 0)
        os._exit(0)
    prefixes = {sys.base_prefix, sys.base_exec_prefix}
    prefixed = [f"{prefix}/{name}" for prefix in sorted(prefixes) for name in ("lib", "lib64")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    isolation.replace_root([path for path in [*system, *prefixed, *sys.path] if os.path.isdir(path)])


def serve(limits: Mapping[str, int], namespaces: bool) -> None:
    """One worker for each request, until the host closes its end."""
    requests = select.poll()
    requests.register(REQUESTS, select.POLLIN)
    while requests.poll()[0][1] & select.POLLIN:
        home = None if namespaces else tempfile.mkdtemp(prefix="llmgym-code-")
        (result, result_end), (output, output_end) = os.pipe(), os.pipe()
        worker = os.fork()
        if not worker:
            _work(limits, home, result_end, output_end)
        os.close(result_end)
        os.close(output_end)
        ended = _watch(worker, {result: bytearray(), output: bytearray()}, limits)
        if home is None:
            _end_everything()
        else:
            if not isolation.FILTER_KNOWN:  # then it may have had children, in its process group
                with contextlib.suppress(OSError):
                    os.killpg(worker, signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)
        _say(ended)


def _watch(worker: int, channels: dict[int, bytearray], limits: Mapping[str, int]) -> dict[str, Any]:
    """Read a worker's result and output until it ends, or has to be ended."""
    deadline = time.monotonic() + limits["wall_seconds"]
    poll = select.poll()
    for reader in channels:
        poll.register(reader, select.POLLIN)
    why, opened = "", set(channels)
    # A worker can close its end and live on, so the end of both is not yet its own.
    while not (ended := os.wait4(worker, os.WNOHANG))[0]:
        left = deadline - time.monotonic()
        if left <= 0.0:
            why = "timed_out"
        elif max(map(len, channels.values())) > limits["output_bytes"]:
            why = "over_limits"
        if why:
            os.kill(worker, signal.SIGKILL)
            ended = os.wait4(worker, 0)
            break
        for reader, _ in poll.poll(min(left, 0.05) * 1000.0 if opened else 1.0):
            if data := os.read(reader, CHUNK):
                channels[reader] += data
            else:
                poll.unregister(reader)
                opened.discard(reader)
    for reader in opened:  # what it wrote between the last look and its end
        os.set_blocking(reader, False)
        while len(channels[reader]) <= limits["output_bytes"] and (data := _read_now(reader)):
            channels[reader] += data
    for reader in channels:
        os.close(reader)
    if not why and max(map(len, channels.values())) > limits["output_bytes"]:
        why = "over_limits"
    _, status, usage = ended
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU)
    # Far below the limit, since the kernel holds the limit against ticks: on a loaded machine a process
    # is charged a whole tick of which it ran a part, while its usage says what it really ran.
    if not why and killed and usage.ru_utime + usage.ru_stime > 0.25 * limits["cpu_seconds"]:
        why = "timed_out"
    result, output = (base64.b64encode(data).decode() for data in channels.values())
    return {"why": why, "code": os.waitstatus_to_exitcode(status), "result": result, "output": output}


def _read_now(reader: int) -> bytes:
    try:
        return os.read(reader, CHUNK)
    except BlockingIOError:
        return b""


def _end_everything() -> None:
    """Kill what a worker may have left behind. The server is process 1: all others are inside."""
    if os.getpid() != 1:
        raise RuntimeError("not process 1 of a namespace")
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _say(message: object) -> None:
    """One line of JSON to the host."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(REPLIES, data) :]


def _work(limits: Mapping[str, int], home: str | None, result: int, output: int) -> None:
    """The worker: read the request, give up all privileges, run the code, exit. Does not return."""
    os.setsid()  # or a signal to its process group would reach the launcher, outside
    line = bytearray()
    while not line.endswith(b"\n"):
        # The host sends the next one after the reply, so this never takes a part of that.
        if not (data := os.read(REQUESTS, CHUNK)):
            os._exit(0)
        line += data
    request = json.loads(line)
    program = request["function"] is None
    files = [_readable(request["input"].encode()), output] if program else [NULL, NULL]
    for place, file in enumerate([*files, NULL, result]):
        os.dup2(file, 100 + place)  # out of the way of those that are still to be copied
    os.closerange(0, 100)
    for place in range(4):
        os.dup2(100 + place, place)
    os.closerange(4, 200)
    try:
        _confine(limits, home)
    except Exception as error:
        os.write(RESULT, str(error).encode())
        os._exit(1)
    os.write(RESULT, READY)
    if program:
        _run_program(request["source"])
    else:
        _call(request["source"], request["function"], request["input"])


def _confine(limits: Mapping[str, int], home: str | None) -> None:
    """Go to the working directory and give up all privileges, for good."""
    if home is None:
        isolation.enter_home(limits["file_bytes"])
    else:
        os.chdir(home)
    _limit(limits, processes=home is None)
    if home is None:
        isolation.drop_privileges()
    if isolation.FILTER_KNOWN:
        isolation.filter_system_calls()


def _readable(data: bytes) -> int:
    """A file that holds `data`, to be read from its start."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("input")
    else:
        file, path = tempfile.mkstemp()
        os.unlink(path)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _limit(limits: Mapping[str, int], processes: bool) -> None:
    """Limits that the process cannot raise again. Soft and hard are the same, so there is no warning."""
    values = {
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_CPU": limits["cpu_seconds"],
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_SIGPENDING": 64,
    }
    if processes:  # outside of a user namespace all processes of the user count
        values["RLIMIT_NPROC"] = limits["threads"] + TASKS_OF_SANDBOX
    for name, value in values.items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (value, value))


def _module(source: str, name: str) -> dict[str, Any]:
    """Run a source as a module that others find under its name, as dataclasses have to."""
    sys.argv = [name]
    # What `site` adds, and programs use.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "<solution>", "exec"), module.__dict__)
    return module.__dict__


def _run_program(source: str) -> None:
    """A program that reads standard input; it ends as programs do, by what it leaves to the end too."""
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
    try:
        _module(source, "__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        _tell({"error": _describe(error)})
        os._exit(1)
    os.close(RESULT)
    raise SystemExit(0)


def _call(source: str, function: str, arguments: Any) -> None:
    """Call a function of the source and write what it returns, in plain data."""
    tell, leave, described, encoded = _tell, os._exit, _describe, encode
    try:
        positional, named = decode(arguments)
        namespace = _module(source, "solution")
        if function not in namespace:
            raise NameError(f"no function {function!r} in the code")
        reply = {"value": encoded(namespace[function](*positional, **named))}
    except BaseException as error:  # of SystemExit, too: a function that exits returns nothing
        reply = {"error": described(error)}
    tell(reply)
    leave(0)


def _describe(error: BaseException) -> list[str]:
    """Type and message of an exception, for people to read."""
    try:
        return [type(error).__name__, str(error)[:500]]
    except BaseException:
        return [type(error).__name__, ""]


def _tell(message: object, *, dumps: Any = json.dumps, write: Any = os.write) -> None:
    """Write the worker's result. It may be forged: all that it can do is to stand for an output."""
    data = dumps(message).encode()
    while data:
        data = data[write(RESULT, data) :]
