"""Code that attacks the sandbox or its verdict, in the real sandbox, which has to survive all of it.

Probes that could fail for the wrong reason are also run without a sandbox, where they have to succeed.
"""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from code_attacks import CONTAINED, PROGRAMS, REFUSED, WAITING, block

from llmgym.verifiers.code import CallTest, Limits, ProgramTest, SandboxUnavailableError, grade
from llmgym.verifiers.sandbox.host import Sandbox
from llmgym.verifiers.sandbox.plain_data import encode

LIMITS = Limits(
    cpu_seconds=1, wall_seconds=60, memory_bytes=128 << 20, file_bytes=1 << 20, output_bytes=1 << 16
)
SECRET = "expected-" + "7f3a91"


def _problem() -> str:
    try:
        Sandbox(LIMITS).close()
    except SandboxUnavailableError as error:
        return str(error)
    return ""


PROBLEM = _problem()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=f"needs the sandbox: {PROBLEM}")


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file and a folder that everybody on this machine may read and write."""
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    for parent in [*folder.parents][:2]:
        parent.chmod(0o755)
    file = folder / "tests.py"
    file.write_text(SECRET)
    file.chmod(0o666)
    return [str(file), str(folder)]


@pytest.fixture(scope="module")
def graded(outside: list[str]) -> dict[str, tuple[str, float, str]]:
    """Status, score and detail of every attack, all in one batch, two at a time."""
    nothing = [CallTest("f", [outside], "nothing")]
    rows = {("contained", name): (code, nothing) for name, code in CONTAINED.items()}
    rows |= {("refused", name): (code, nothing) for name, (code, _) in REFUSED.items()}
    program = [ProgramTest("7\n", "7")]
    rows |= {
        ("program", name): (code, program) for name, (code, _) in PROGRAMS.items() if name not in WAITING
    }
    batch = [(block(code), tests) for code, tests in rows.values()]
    grades = grade([row[0] for row in batch], [row[1] for row in batch], limits=LIMITS, workers=2)
    assert grades.sandboxed
    return {
        "/".join(key): (str(status), float(score), detail)
        for key, status, score, detail in zip(rows, grades.status, grades.score, grades.detail, strict=True)
    }


@pytest.mark.parametrize("name", CONTAINED)
def test_attack_achieves_nothing(name: str, graded: dict[str, tuple[str, float, str]]) -> None:
    status, score, detail = graded[f"contained/{name}"]
    assert (status, score) == ("passed", 1.0), detail


@pytest.mark.parametrize("name", REFUSED)
def test_attack_does_not_pass(name: str, graded: dict[str, tuple[str, float, str]]) -> None:
    status, score, detail = graded[f"refused/{name}"]
    expected = REFUSED[name][1]
    assert status in ((expected,) if isinstance(expected, str) else expected), detail
    assert score == 0.0


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in WAITING])
def test_program(name: str, graded: dict[str, tuple[str, float, str]]) -> None:
    status, score, detail = graded[f"program/{name}"]
    assert status == PROGRAMS[name][1], detail
    assert score == float(status == "passed")


@pytest.mark.parametrize("name", WAITING)
def test_code_that_waits_is_ended(name: str) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=1)
    grades = grade([block(PROGRAMS[name][0])], [[ProgramTest("", "")]], limits=limits)
    assert grades.status[0] == "timed_out"


def test_nothing_is_left_outside(outside: list[str], graded: dict[str, tuple[str, float, str]]) -> None:
    assert Path(outside[0]).read_text() == SECRET
    assert os.listdir(outside[1]) == ["tests.py"]


def test_no_process_outlives_its_sandbox() -> None:
    """Every process of a sandbox has the launcher's command line, whoever its parent is by now."""
    limits = Limits(cpu_seconds=1, memory_bytes=(128 << 20) + os.getpid())  # to tell it from others
    mark = f'"memory_bytes": {limits.memory_bytes}'.encode()

    def number_of_processes() -> int:
        count = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has just ended
                count += mark in path.read_bytes()
        return count

    sandbox = Sandbox(limits)
    assert sandbox.run("def f(): return 1", "f", encode([[], {}])).code == 0
    assert number_of_processes() == 2  # launcher and server: the search finds what there is
    request = {"source": "while True: pass", "function": None, "input": ""}
    sandbox._send(json.dumps(request).encode() + b"\n")
    while number_of_processes() < 3:
        time.sleep(0.01)
    sandbox.close()  # in the middle of it
    while number_of_processes():  # the kernel ends the namespace; a hang here is the failure
        time.sleep(0.01)


def test_expected_outputs_are_not_found_inside() -> None:
    """The search of `own_memory`, where the test does expect a string that it would recognise."""
    tests = [CallTest("f", [[]], SECRET)]
    grades = grade([block(CONTAINED["own_memory"])], [tests], limits=LIMITS)
    assert grades.status[0] == "failed"
    assert grades.detail[0] == 'returned "nothing"'
    # It does find one that is an argument.
    found = grade([block(CONTAINED["own_memory"])], [[CallTest("f", [[SECRET]], "nothing")]], limits=LIMITS)
    assert SECRET in found.detail[0]


def test_each_test_starts_afresh() -> None:
    """A solution cannot count its calls, nor leave itself notes."""
    code = """
import os, sys, builtins
def f():
    before = len(os.listdir(".")), hasattr(builtins, "note"), "note" in sys.modules, os.getcwd()
    open("note", "w").close()
    builtins.note = sys.modules["note"] = 1
    return before
"""
    tests = [CallTest("f", [], (0, False, False, "/box"))] * 3
    assert grade([block(code)] * 2, [tests] * 2, workers=1).test_status == [("passed",) * 3] * 2


def test_probes_succeed_without_the_sandbox(outside: list[str]) -> None:
    """What is contained above is there to be had: the probes do not fail by themselves."""
    arguments = encode([[outside], {}])
    with Sandbox(Limits(), namespaces=False) as sandbox:
        for name in ("files_of_tests", "symbolic_links", "writing_outside"):
            ended = sandbox.run(CONTAINED[name].replace('os.walk("/")', "[]"), "f", arguments)
            assert outside[0 if name == "files_of_tests" else 1].encode() in ended.result, name
            Path(outside[1], "planted").unlink(missing_ok=True)
            Path(outside[1], "new").unlink(missing_ok=True)
