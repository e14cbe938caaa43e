"""Run folders: what is in one, made and read without torch.

    config.json      what was asked for: environment, agent, seed, steps (`RunConfig`)
    versions.json    what it ran on
    metrics.jsonl    one line per iteration, and TensorBoard event files with the same numbers
    checkpoints/     the last two: STEP.pt of our agents, STEP/agent as others save themselves
    result.json      written last: the steps taken, the final evaluation, the newest checkpoint
    error.txt        the traceback, where training failed
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from agents.files import write_json

PACKAGES = ("torch", "numpy", "gymnasium", "stable_baselines3", "sb3_contrib", "mujoco", "llmgym")
KEEP = 2  # saves of an agent that is not ours


class UserError(Exception):
    """Something that the user can put right; the message says how."""


@dataclass(frozen=True)
class RunConfig:
    """What defines a run; `config.json` in its folder.

    ====================  ==========================================================================
    env, env_kwargs       a Gymnasium id, and the arguments of the environment
    n_envs                1 makes a plain Env, more a VectorEnv (native where there is one)
    agent, config         a name for `agents.make`, and the agent's configuration
    seed                  of the agent and of its environment's first reset (row i: seed + i)
    steps                 environment steps of the whole run
    init                  run folder whose weights it starts from; None: the agent's own
    checkpoint_every      environment steps between checkpoints; None: a twentieth of the run, and for
                          agents that are neither ours nor SB3's one save at the end
    ====================  ==========================================================================
    """

    env: str
    env_kwargs: dict[str, Any]
    n_envs: int
    agent: str
    config: dict[str, Any]
    seed: int
    steps: int
    init: str | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("n_envs", 1), ("steps", 1), ("seed", 0), ("checkpoint_every", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"{name}={value} must be at least {low}")


def create_run(folder: Path, config: RunConfig) -> None:
    """Write the folder of a new run.

    Raises:
        UserError: there is something in it already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "a run" if (folder / "config.json").exists() else "files"
        raise UserError(
            f"{folder} holds {what} already: continue it with `llmgym resume {folder}`, or give another --out"
        )
    # Whole or not at all: without its config a folder could neither be resumed nor be made again.
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    write_json(temporary / "versions.json", versions())
    write_json(temporary / "config.json", asdict(config))
    temporary.replace(folder)


def read_config(folder: Path) -> RunConfig:
    """The configuration of a run.

    Raises:
        UserError: the folder is not a run folder.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return RunConfig(**{f.name: found[f.name] for f in fields(RunConfig)})
    except OSError as error:
        raise UserError(f"{folder} is not a run folder of `llmgym train`: it has no config.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a run's configuration: {error!r}") from error


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages that decide the numbers, and the git commit of this one."""
    found: dict[str, str | None] = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        found["commit"] = ran.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = None
    return found


# --------------------------------------------------------------------------- saves by the agents themselves


def save_foreign(folder: Path, agent: Any, step: int) -> None:
    """Let an agent save itself to ``checkpoints/STEP/agent``; the folder gets its name when it is whole."""
    final = folder / "checkpoints" / f"{step:012d}"
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    agent.save(str(temporary / "agent"))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in foreign_saves(folder)[KEEP:]:
        shutil.rmtree(old)


def clear_unfinished(folder: Path) -> None:
    """Delete the saves that a kill broke off."""
    for unfinished in (folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(unfinished)


def foreign_saves(folder: Path) -> list[Path]:
    """Folders with an agent's own save, the newest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted((p for p in found if p.is_dir() and p.suffix == ""), reverse=True)


def steps_of(save: Path) -> int:
    """The environment step of a checkpoint, which is its name."""
    return int(save.stem)
