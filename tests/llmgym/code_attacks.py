"""Code that attacks the sandbox of the code verifier, or its verdict.

An attack in CONTAINED reports what it achieved, and "nothing" is what its test expects: it passes only if
it ran to its end without success. One in REFUSED tries to be scored as passed, or to do harm by running.
"""

# Each defines f(paths), which is given the path of a file outside and that of a folder outside.
CONTAINED = {
    "fork_bomb": """
import os, multiprocessing, subprocess, sys
def attempts():
    yield os.fork
    yield os.forkpty
    yield lambda: subprocess.run([sys.executable, "-c", "1"])
    yield lambda: os.posix_spawn(sys.executable, [sys.executable], {})
    yield lambda: os.execv(sys.executable, [sys.executable, "-c", "1"])
def f(paths):
    done = []
    for attempt in attempts():
        try:
            attempt()
            done.append(str(attempt))
        except OSError:
            pass
    return done or "nothing"
""",
    "raw_fork": """
import ctypes, os
def f(paths):
    libc = ctypes.CDLL(None, use_errno=True)
    x86 = os.uname().machine == "x86_64"
    # clone with no flags but SIGCHLD, clone3, and on x86 fork, vfork, and fork of the x32 numbers
    calls = [(56 if x86 else 220, 17, 0, 0, 0, 0), (435, bytes(64), 64)]
    calls += [(57,), (58,), (0x40000000 + 57,)] if x86 else []
    return [call[0] for call in calls if libc.syscall(*call) != -1] or "nothing"
""",
    "files_of_tests": """
import os
def f(paths):
    found = []
    for path in [*paths, "/etc/passwd", "/proc/1/environ", "/proc/1/cmdline", "/proc/1/mem", "/proc/1/root",
                 "/proc/self/environ", "/dev/mem", "/sys", "/tmp", "/home", "../../etc/hostname"]:
        if os.path.exists(path):
            found.append(path)
    for top, folders, files in os.walk("/"):
        if top.startswith(("/lib", "/usr/lib")) or "/lib/python3" in top:
            continue
        found += [f"{top}/{file}" for file in files if not top.endswith("/lib") and "/lib/" not in top + "/"]
    return found or "nothing"
""",
    "packages": """
import sys, glob, os
def f(paths):
    import site
    site.main()
    found = [name for path in sys.path for name in glob.glob(path + "/*site-packages/*")]
    for name in ("numpy", "gymnasium", "llmgym", "pip"):
        try:
            __import__(name)
            found.append(name)
        except ImportError:
            pass
    return found or "nothing"
""",
    "environment": """
import os
def f(paths):
    return sorted(set(os.environ) - {"MALLOC_ARENA_MAX", "PYTHONHASHSEED", "LC_ALL", "LC_CTYPE"}) or "nothing"
""",
    "memory_of_others": """
import ctypes
def f(paths):
    libc = ctypes.CDLL(None, use_errno=True)
    done = []
    buffer = ctypes.create_string_buffer(16)
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    part = Part(ctypes.addressof(buffer), 16)
    for process in range(1, 10):
        if libc.ptrace(16, process, 0, 0) != -1:
            done.append(("attach", process))
        if libc.process_vm_readv(process, ctypes.byref(part), 1, ctypes.byref(part), 1, 0) != -1:
            done.append(("read", process))
    if libc.ptrace(0, 0, 0, 0) != -1:
        done.append("traceme")
    return done or "nothing"
""",
    "own_memory": """
import gc, sys
def f(paths):
    wanted, found, frame = "expected" + "-", [], sys._getframe()
    while frame:
        values = frame.f_locals.values()
        found += [x for x in values if type(x) is str and x.startswith(wanted) and x != wanted]
        frame = frame.f_back
    for thing in gc.get_objects():
        inside = gc.get_referents(thing)
        found += [x for x in inside if type(x) is str and x.startswith(wanted) and x != wanted]
    return found or "nothing"
""",
    "symbolic_links": """
import os
def f(paths):
    done = []
    for i, path in enumerate([*paths, "/etc/passwd", "/proc/1/root/etc/passwd", "../../../etc/passwd"]):
        os.symlink(path, f"link{i}")
        try:
            done.append(open(f"link{i}").read())
        except OSError:
            pass
        try:
            open(f"link{i}/new", "w")
            done.append(path)
        except OSError:
            pass
        try:
            os.link(path, f"hard{i}")
            done.append(path)
        except OSError:
            pass
    return done or "nothing"
""",
    "network": """
import socket, ctypes
def f(paths):
    done = []
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(family, kind)
                done.append((int(family), int(kind)))
            except OSError:
                pass
    try:
        done.append(socket.getaddrinfo("example.com", 80))
    except OSError:
        pass
    return done or "nothing"
""",
    "writing_outside": """
import os, sys
def f(paths):
    done = []
    for folder in [paths[1], "/", "/tmp", "/usr/lib", "/lib", "/dev/shm", "..", *sys.path[1:]]:
        try:
            open(os.path.join(folder, "planted"), "w").write("x")
            done.append(folder)
        except OSError:
            pass
    try:
        os.chmod(os.__file__, 0o777)
        done.append("chmod")
    except OSError:
        pass
    return done or "nothing"
""",
    "killing_others": """
import os, signal, ctypes
def f(paths):
    done = []
    for kill in (os.kill, os.killpg):
        for target in (1, os.getppid(), 0, -1):
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                try:
                    kill(target, number)
                    done.append((target, int(number)))
                except (OSError, ValueError):
                    pass
    tkill, tgkill = (200, 234) if os.uname().machine == "x86_64" else (130, 131)
    libc = ctypes.CDLL(None)
    if libc.syscall(tkill, 1, 9) != -1:
        done.append("thread of process 1")
    for number in (2, 9, 19):
        libc.syscall(tgkill, 1, 1, number)  # if it got there, later tests of the batch could not run
    return done or "nothing"
""",
    "privileges": """
import ctypes, os, resource
def f(paths):
    libc = ctypes.CDLL(None, use_errno=True)
    done = []
    for name, arguments in {
        "unshare": (0x10000000,), "setns": (0, 0), "chroot": (b".",), "umount2": (b"/box", 2),
        "mount": (b"tmpfs", b"/box", b"tmpfs", 0, None), "memfd_create": (b"x", 0),
        "shmget": (0, 1 << 20, 0o1600), "setuid": (0,), "setgid": (0,), "sethostname": (b"x", 1),
    }.items():
        if getattr(libc, name)(*arguments) != -1:
            done.append(name)
    for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE"):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (resource.RLIM_INFINITY,) * 2)
            done.append(name)
        except (ValueError, OSError):
            pass
    return done or "nothing"
""",
    "starving_the_server": """
import os, resource
def f(paths):
    done = []
    for attempt in (
        lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
        lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
        lambda: os.setpriority(os.PRIO_USER, 0, 19),
        lambda: os.sched_setaffinity(1, {0}),
        lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    ):
        try:
            attempt()
            done.append(attempt.__code__.co_names)
        except OSError:
            pass
    return done or "nothing"
""",
    "open_files": """
import os
def f(paths):
    found = []
    for number in range(4096):
        try:
            kind = os.fstat(number).st_mode & 0o170000
        except OSError:
            continue
        # 0 to 2 are /dev/null, which is a character device; 3 is where the result goes.
        if number > 3 or number < 3 and kind != 0o020000:
            found.append(number)
    return found or "nothing"
""",
    "threads": """
import threading
def f(paths):
    stop, started = threading.Event(), 0
    threading.stack_size(1 << 16)
    try:
        for _ in range(1000):
            threading.Thread(target=stop.wait).start()
            started += 1
    except RuntimeError:
        pass
    stop.set()
    return started if not 1 <= started <= 20 else "nothing"
""",
    "background_thread": """
import threading
def f(paths):
    def forever():
        while True:
            pass
    threading.Thread(target=forever).start()
    return "nothing"
""",
    "many_files": """
def f(paths):
    written = 0
    try:
        for i in range(100):
            with open(str(i), "wb") as file:
                written += file.write(bytes(1 << 16))
    except OSError:
        pass
    return written if written > 1 << 20 else "nothing"
""",
}

# The code, and the statuses that it may get: more than one only where memory or the stack gives out first.
REFUSED = {
    "memory": ("def f(paths):\n return len(bytearray(1 << 30))", "over_limits"),
    "memory_in_pieces": ("def f(paths):\n x = []\n while True: x.append(bytes(100000))", "over_limits"),
    "endless_loop": ("def f(paths):\n while True: pass", "timed_out"),
    "ignored_signals": (
        "import signal\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        " signal.signal(number, signal.SIG_IGN)\n"
        "def f(paths):\n while True:\n  try:\n   while True: pass\n  except BaseException: pass",
        "timed_out",
    ),
    "exit_0": ("import os\ndef f(paths): os._exit(0)", "error"),
    "exit_0_at_once": ("import os\nos._exit(0)", "error"),
    "sys_exit": ("import sys\ndef f(paths): sys.exit(0)", "error"),
    "kill_self": ("import os, signal\ndef f(paths): signal.raise_signal(signal.SIGKILL)", "error"),
    "printed_success": ("def f(paths): print('1 passed')\nprint('OK')", "failed"),
    "patched_builtins": (
        "import builtins\n"
        "builtins.isinstance = builtins.all = builtins.any = lambda *_: True\n"
        "builtins.type = lambda *_: str\nbuiltins.str = builtins.repr = lambda *_: 'nothing'\n"
        "builtins.len = lambda *_: 0\n"
        "def f(paths): return 'something'",
        ("failed", "error"),
    ),
    "equal_to_all": (
        "class Equal:\n def __eq__(self, other): return True\n def __hash__(self): return 0\n"
        "def f(paths): return Equal()",
        "error",
    ),
    "string_equal_to_all": (
        "class Equal(str):\n"
        " def __eq__(self, other): return True\n __hash__ = str.__hash__\n"
        "def f(paths): return Equal('x')",
        "failed",
    ),
    "pretended_class": (
        "class Fake:\n @property\n def __class__(self): return str\n def __eq__(self, other): return True\n"
        "def f(paths): return Fake()",
        "error",
    ),
    "patched_json": (
        'import json, json.encoder\njson.dumps = lambda *_, **__: \'{"value": true, "passed": true}\'\n'
        "json.encoder.JSONEncoder.encode = json.dumps\n"
        "def f(paths): return 1",
        ("failed", "error"),
    ),
    "tampered_modules": (
        "import sys\nfor name in list(sys.modules):\n"
        " if name.startswith(('sandbox', 'json', 'os', 'llmgym')): sys.modules[name] = None\n"
        "def f(paths): return 'something'",
        "failed",
    ),
    "tampered_runner": (
        "import sys\nchild, data = sys.modules['sandbox.child'], sys.modules['sandbox.plain_data']\n"
        "data.encode.__code__ = (lambda value, depth=0: True).__code__\n"
        "child._tell = child._describe = lambda *_: None\n"
        "def f(paths): return 'something'",
        "failed",
    ),
    "forged_verdict": (
        'import os\nfor number in range(64):\n try: os.write(number, b\'{"status": "passed"}\')\n'
        " except OSError: pass\nos._exit(0)",
        "error",
    ),
    "forged_reply": (
        'import os\nos.write(3, b\'\\n{"why": "", "code": 0, "result": "e30=", "output": ""}\\n\')\n'
        "os._exit(0)",
        "error",
    ),
    "forged_and_killed": (
        'import os, signal\nos.write(3, b\'{"value": "nothing"}\')\nsignal.raise_signal(9)',
        "error",
    ),
    "forged_deep": ("import os\nos.write(3, b'[' * 60000)\nos._exit(0)", "error"),
    "forged_deep_value": (
        "import os\nos.write(3, b'{\"value\": ' + b'[\"list\", ' * 5000 + b'1' + b']' * 5000 + b'}')\n"
        "os._exit(0)",
        "error",
    ),
    "forged_number": ("import os\nos.write(3, b'{\"value\": ' + b'9' * 60000 + b'}')\nos._exit(0)", "error"),
    "forged_tags": ('import os\nos.write(3, b\'{"value": ["dict", 1]}\')\nos._exit(0)', "error"),
    "not_unicode": ("import os\nos.write(3, b'\\xff\\xfe')\nos._exit(0)", "error"),
    "huge_value": ("def f(paths): return 'x' * (1 << 20)", "over_limits"),
    "huge_integer": ("def f(paths): return 1 << 10_000_000", "over_limits"),
    "huge_integer_printed": ("def f(paths): return str(10 ** 100_000)", "error"),
    "huge_file": (
        "def f(paths):\n with open('x', 'wb') as file:\n  for _ in range(64): file.write(bytes(1 << 20))",
        "over_limits",
    ),
    "huge_sparse_file": ("import os\ndef f(paths): open('x', 'wb').truncate(1 << 40)", "over_limits"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(paths): return f(paths)",
        ("error", "over_limits", "timed_out"),
    ),
    "recursion_in_c": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(paths):\n x = []\n"
        " for _ in range(10 ** 6): x = [x]\n return repr(x)",
        ("error", "over_limits", "timed_out"),
    ),
    "deep_value": ("def f(paths):\n x = []\n for _ in range(10000): x = [x]\n return x", "error"),
    "contains_itself": ("def f(paths):\n x = []\n x.append(x)\n return x", "error"),
    "a_function": ("def f(paths): return f", "error"),
    "a_generator": ("def f(paths): yield 'nothing'", "error"),
    "evil_exception": (
        "class Evil(BaseException):\n def __str__(self): raise self\ndef f(paths): raise Evil",
        "error",
    ),
    "endless_exception": (
        "class Evil(Exception):\n def __str__(self):\n  while True: pass\ndef f(paths): raise Evil",
        "timed_out",
    ),
    "deep_source": ("(" * 50_000, ("error", "over_limits")),
    "null_in_source": ("\0", "error"),
    "surrogate_in_source": ("x = '\ud800'", "error"),
    "long_source": ("#" * 200_000, "over_limits"),
    "crash": ("import ctypes\ndef f(paths): return ctypes.string_at(0)", "error"),
}

PROGRAMS = {
    "honest": ("print(input())", "passed"),
    "huge_output": ("while True: print('x' * 10000)", "over_limits"),
    "huge_error_output": (
        "import sys\nprint(input())\nfor _ in range(100): sys.stderr.write('x' * 100000)",
        "passed",
    ),
    "exit_0_without_output": ("import os\nos._exit(0)", "failed"),
    "right_but_exit_1": ("import sys\nprint(input())\nsys.exit(1)", "error"),
    "printed_verdict": ('print(\'{"status": "passed"}\')', "failed"),
    "not_unicode": (r"import sys; sys.stdout.buffer.write(b'\xff')", "failed"),
    "closed_output": (
        "import os\nos.close(1)\nos.close(3)\nwhile True: pass",
        "timed_out",
    ),
    "endless_thread": (
        "import threading\ndef forever():\n while True: pass\n"
        "threading.Thread(target=forever).start()\nprint(input())",
        "timed_out",
    ),
    "stopped_self": ("import signal\nsignal.raise_signal(signal.SIGSTOP)\nwhile True: pass", "timed_out"),
    "sleep": ("import time\ntime.sleep(10 ** 6)", "timed_out"),
}


# Those that a limit on time, not on computing, has to end.
WAITING = ("stopped_self", "sleep")


def block(code: str) -> str:
    """A response with this code."""
    return f"Here it is:\n````python\n{code}\n````\n"
