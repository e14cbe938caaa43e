"""Run functions for test_runner.py, in a module of their own so that workers can import them."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from common.runner import Job, run_jobs


def work(config, folder):
    """Count the call, then do what the config says."""
    with (folder / "calls").open("a") as file:
        file.write("x")
    print("value", config["value"])
    action = config.get("action")
    if action == "raise":
        raise ValueError(f"bad value {config['value']}")
    if action == "exit":
        sys.exit(3)
    if action == "die":
        os._exit(7)
    if action == "unserialisable":
        return {"object": object()}
    if action == "block":
        (folder / "pid").write_text(str(os.getpid()))
        while not Path(config["until"]).exists():
            time.sleep(0.02)
    return {"double": 2 * config["value"], "array": np.arange(2), "nan": float("nan")}


def draw(config, folder):
    """Numbers of the global generators, and the threads."""
    return {
        "numbers": [random.random(), np.random.rand(), torch.rand(1).item()],
        "threads": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]],
    }


def sweep(out):
    """A sweep of a job that ends and one that blocks until the file `go` is there."""
    # Programs in the background of a shell script are started with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    go = str(Path(out) / "go")
    jobs = [
        Job("first", {"value": 1}),
        Job("second", {"value": 2, "action": "block", "until": go}),
    ]
    return run_jobs(work, jobs, Path(out), workers=1)
