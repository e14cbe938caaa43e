"""What keeps the code of a child process in: Linux namespaces, no capabilities, a system call filter.

Python has no call for most of this before 3.12, so libc is called through ctypes.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

USER = 1000  # the user and group id of untrusted code inside the user namespace
HOME = "/box"  # its working directory

CLONE_NEWNS = 0x00020000
# Mounts, control groups, host name, System V and POSIX queues, users, process ids, network.
ALL_NAMESPACES = CLONE_NEWNS | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
CLONE_THREAD = 0x00010000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR = 442  # the same number on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY_NOSUID_NODEV = 1 | 2 | 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38

# The system calls that untrusted code does not get, by architecture: (x86_64, aarch64), in this order:
# - new processes and other programs, so that one process and its memory limit are all there is: fork,
#   vfork, execve, execveat;
# - other processes: kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, pidfd_getfd, ptrace,
#   process_vm_readv, process_vm_writev, process_madvise, kcmp;
# - their rank (without root, the server belongs to the same user; slowed down, or with lower limits, it
#   would fail the rows that it grades next): setpriority, ioprio_set, sched_setaffinity, sched_setscheduler,
#   sched_setparam, sched_setattr, migrate_pages, move_pages;
# - network: socket; memory that no limit counts: memfd_create, memfd_secret, shmget, shmat, semget, msgget,
#   mq_open;
# - parts of the kernel with a history: mount, umount2, pivot_root, chroot, unshare, setns, open_tree,
#   move_mount, fsopen, mount_setattr, bpf, perf_event_open, userfaultfd;
# - io_uring_setup, open_by_handle_at, add_key, request_key, keyctl, personality.
_DENIED = {
    "x86_64": (
        *(57, 58, 59, 322),
        *(62, 200, 129, 297, 424, 438, 101, 310, 311, 440, 312),
        *(141, 251, 203, 144, 142, 314, 256, 279),
        *(41, 319, 447, 29, 30, 64, 68, 240),
        *(165, 166, 155, 161, 272, 308, 428, 429, 430, 442, 321, 298, 323),
        *(425, 304, 248, 249, 250, 135),
    ),
    "aarch64": (
        *(221, 281),
        *(129, 130, 138, 240, 424, 438, 117, 270, 271, 440, 272),
        *(140, 30, 122, 119, 118, 274, 238, 239),
        *(198, 279, 447, 194, 196, 190, 186, 180),
        *(40, 39, 41, 51, 97, 268, 428, 429, 430, 442, 280, 241, 282),
        *(425, 265, 217, 218, 219, 92),
    ),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FILTER_KNOWN = sys.platform == "linux" and platform.machine() in _DENIED

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> None:
    """Leave every namespace of the caller; the next child is process 1 of a new one.

    The user ids have to be mapped from outside afterwards (`host._map_users`).

    Raises:
        OSError: the kernel, or the container that this runs in, does not allow it.
    """
    _check(_libc.unshare(ALL_NAMESPACES), "unshare")


def replace_root(libraries: Sequence[str]) -> None:
    """A new root: `libraries` (folders) read-only, without their site-packages, and nothing else.

    Raises:
        OSError: a mount that the kernel does not allow, or a kernel before 5.12.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Where the new root is put together: any folder but those that libraries are bound from.
    root = "/proc"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for library in libraries:
        os.makedirs(root + library, exist_ok=True)
        _mount(library, root + library, None, MS_BIND | MS_REC)
    for folder in (folder for library in libraries for folder in _site_packages(root + library)):
        _mount("tmpfs", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    os.mkdir(root + HOME)
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", READ_ONLY_NOSUID_NODEV, 0, 0, 0), 32)
    _check(
        _libc.syscall(
            ctypes.c_long(MOUNT_SETATTR),
            ctypes.c_long(AT_FDCWD),
            ctypes.c_char_p(root.encode()),
            ctypes.c_long(AT_RECURSIVE),
            attributes,
            ctypes.c_size_t(32),
        ),
        "mount_setattr",
    )
    os.chdir(root)
    # Both names being the same, the old root lies on top of the new one until it is detached.
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _site_packages(library: str) -> list[Path]:
    """The folders of installed packages in a folder of libraries."""
    patterns = ("site-packages", "dist-packages", "python*/site-packages", "python*/dist-packages")
    return [folder for pattern in patterns for folder in Path(library).glob(pattern)]


def enter_home(file_bytes: int) -> None:
    """An empty working directory in memory, for this process only; it goes when the process does."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    options = f"size={file_bytes},nr_inodes=256,mode=700,uid={USER},gid={USER}"
    _mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir(HOME)


def drop_privileges() -> None:
    """Become an ordinary user without capabilities."""
    if os.getuid() == 0:  # else the only user there is
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")


def filter_system_calls() -> None:
    """Refuse the calls above, and every new process that is no thread, from here on and for good."""
    machine = platform.machine()
    load, equal, at_least, any_bit, done = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
    # One instruction: operation, how many to skip if it holds, and if not, operand.
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (done, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
        (at_least, 0, 1, 0x40000000),  # x32, a second set of numbers on x86_64
        (done, 0, 0, refuse),
    ]
    for number in _DENIED[machine]:
        program += [(equal, 0, 1, number), (done, 0, 0, refuse)]
    program += [
        # Its flags lie in memory, where a filter cannot look; libc takes clone instead.
        (equal, 0, 1, _CLONE3),
        (done, 0, 0, unknown),
        (equal, 0, 4, _CLONE[machine]),
        (load, 0, 0, 16),  # the flags
        (any_bit, 0, 1, CLONE_THREAD),
        (done, 0, 0, allow),
        (done, 0, 0, refuse),
        (equal, 0, 4, _PRLIMIT[machine]),
        (load, 0, 0, 16),  # the process, 0 for the caller's own limits
        (equal, 0, 1, 0),
        (done, 0, 0, allow),
        (done, 0, 0, refuse),
        (done, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions)), 16
    )
    _prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, first: int, second: int) -> None:
    zero = ctypes.c_ulong(0)
    arguments = (ctypes.c_ulong(first), ctypes.c_ulong(second), zero, zero)
    _check(_libc.prctl(ctypes.c_int(option), *arguments), "prctl")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    code = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _check(code, f"mount of {source} on {target}")


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
