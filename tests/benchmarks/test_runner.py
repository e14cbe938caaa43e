"""The runner with real worker processes."""

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
import runner_jobs
from rich.console import Console

from common.files import read_json, to_plain, write_json
from common.runner import Job, report_failures, run_jobs


def calls(folder):
    return len((folder / "calls").read_text())


def run(jobs, out, **kwargs):
    console = Console(file=StringIO(), width=200)
    outcomes = run_jobs(runner_jobs.work, jobs, out, console=console, **kwargs)
    return outcomes, console.file.getvalue()


def test_results_in_order_and_resume(tmp_path):
    jobs = [Job(f"group/run-{i}", {"value": i, "rates": (0.1, 0.2)}) for i in range(5)]
    outcomes, _ = run(jobs, tmp_path, workers=2)
    assert [outcome.result["double"] for outcome in outcomes] == [0, 2, 4, 6, 8]
    folder = tmp_path / "group" / "run-3"
    assert read_json(folder / "config.json") == {"value": 3, "rates": [0.1, 0.2]}
    record = read_json(folder / "result.json")
    assert record["result"] == {"double": 6, "array": [0, 1], "nan": None}
    assert record["seconds"] >= 0 and record["versions"]["python"] and record["versions"]["torch"]
    assert (folder / "output.txt").read_text() == "value 3\n"

    (tmp_path / "group" / "run-1" / "result.json").unlink()  # as if it had been killed
    jobs[4] = Job("group/run-4", {"value": 40})  # another config
    outcomes, text = run(jobs, tmp_path, workers=2)
    assert [outcome.result["double"] for outcome in outcomes] == [0, 2, 4, 6, 80]
    assert [calls(outcome.folder) for outcome in outcomes] == [1, 2, 1, 1, 2]
    assert "3 of 5 runs were done before" in text and "other versions" not in text


def test_results_of_other_versions_are_kept_and_named(tmp_path):
    jobs = [Job("a", {"value": 1})]
    run(jobs, tmp_path)
    record = read_json(tmp_path / "a" / "result.json")
    record["versions"]["commit"] = "another"
    write_json(tmp_path / "a" / "result.json", record)
    outcomes, text = run(jobs, tmp_path)
    assert calls(outcomes[0].folder) == 1 and "1 of them ran on other versions" in text


def test_half_a_result_is_no_result(tmp_path):
    jobs = [Job("a", {"value": 1})]
    run(jobs, tmp_path)
    (tmp_path / "a" / "result.json").write_text('{"result": {"dou')
    outcomes, _ = run(jobs, tmp_path)
    assert outcomes[0].result["double"] == 2 and calls(outcomes[0].folder) == 2


def test_failures_lose_no_other_run(tmp_path):
    actions = ["raise", None, "die", None, "exit", None, "unserialisable", None]
    jobs = [Job(f"run-{i}", {"value": i, "action": action}) for i, action in enumerate(actions)]
    outcomes, _ = run(jobs, tmp_path, workers=2)
    for outcome, action in zip(outcomes, actions, strict=True):
        assert (outcome.error is None) == (action is None)
        assert (outcome.folder / "result.json").exists() == (action is None)
        assert (outcome.folder / "error.txt").exists() == (action is not None)
    assert "ValueError: bad value 0" in outcomes[0].error
    assert "runner_jobs.py" in outcomes[0].error  # a traceback
    assert "exit code 7" in outcomes[2].error
    assert "SystemExit" in outcomes[4].error
    assert "has no JSON form" in outcomes[6].error

    console = Console(file=StringIO(), width=200)
    assert report_failures(outcomes, console) == 4
    text = console.file.getvalue()
    assert '{"value": 0, "action": "raise"}' in text and "bad value 0" in text

    # Failed runs are tried again, the others are not; a success removes the error.
    jobs[0] = Job("run-0", {"value": 0})
    outcomes, _ = run(jobs, tmp_path, workers=2)
    assert [calls(outcome.folder) for outcome in outcomes] == [2, 1, 2, 1, 2, 1, 2, 1]
    assert outcomes[0].error is None and not (tmp_path / "run-0" / "error.txt").exists()
    assert report_failures(outcomes, console) == 3


def test_more_deaths_than_workers(tmp_path):
    jobs = [Job(f"run-{i}", {"value": i, "action": "die"}) for i in range(3)]
    outcomes, _ = run([*jobs, Job("last", {"value": 9})], tmp_path, workers=1)
    assert [outcome.error is None for outcome in outcomes] == [False, False, False, True]


def test_one_thread_and_numbers_that_do_not_depend_on_order(tmp_path):
    jobs = [Job(f"seed-{seed}", {"seed": seed}) for seed in (1, 2, 3)]
    forward = run_jobs(runner_jobs.draw, jobs, tmp_path / "a", workers=1)
    backward = run_jobs(runner_jobs.draw, jobs[::-1], tmp_path / "b", workers=2)[::-1]
    assert [x.result["numbers"] for x in forward] == [x.result["numbers"] for x in backward]
    assert len({tuple(x.result["numbers"]) for x in forward}) == 3
    assert all(x.result["threads"] == [1, "1"] for x in forward + backward)
    assert os.environ.get("OMP_NUM_THREADS") == THREADS_BEFORE


THREADS_BEFORE = os.environ.get("OMP_NUM_THREADS")


def wait_for(condition, seconds=120):
    """Poll; the limit only bounds a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_blocked_sweep(out):
    """A sweep in a process group of its own, with one run done and one under way."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, runner_jobs; runner_jobs.sweep(sys.argv[1])", out],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: (out / "second" / "pid").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    wait_for(lambda: (out / "second" / "pid").read_text())
    return process, int((out / "second" / "pid").read_text())


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_stopped_sweep_continues_where_it_was(tmp_path, how):
    process, worker = start_blocked_sweep(tmp_path)
    if how == "kill":
        process.kill()  # cannot be caught: only the worker itself can notice
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C: to everybody
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    if how == "interrupt":
        assert output.count("KeyboardInterrupt") == 1
        assert not is_running(worker)
    wait_for(lambda: not is_running(worker))
    assert (tmp_path / "first" / "result.json").exists()
    assert not (tmp_path / "second" / "result.json").exists()

    (tmp_path / "go").touch()
    outcomes = runner_jobs.sweep(tmp_path)
    assert [outcome.result["double"] for outcome in outcomes] == [2, 4]
    assert [calls(outcome.folder) for outcome in outcomes] == [1, 2]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_workers_leave_interrupts_to_the_parent(tmp_path):
    process, worker = start_blocked_sweep(tmp_path)
    os.kill(worker, signal.SIGINT)
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "second" / "result.json").exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="same name: a"):
        run([Job("a", {}), Job("a", {"value": 1})], tmp_path)
    with pytest.raises(ValueError, match="workers is 0"):
        run([], tmp_path, workers=0)
    with pytest.raises(ValueError, match="by name"):
        run_jobs(lambda config, folder: {}, [], tmp_path)
    assert run([], tmp_path)[0] == []


def test_json_is_plain_and_written_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": (1, Path("p")), "y": float("inf")})
    assert json.loads(path.read_text()) == {"x": [1, "p"], "y": None}
    with pytest.raises(TypeError, match="no JSON form"):
        write_json(path, {"x": {1, 2}})
    assert json.loads(path.read_text())["x"] == [1, "p"]  # the old file is still whole
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]  # no temporary file is left
    assert read_json(tmp_path / "missing.json") is None
    assert to_plain(True) is True
