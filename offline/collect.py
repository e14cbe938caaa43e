"""Collect a dataset: any policy in any environment, as a D4RL HDF5 file or a Minari folder.

    python -m offline.collect --env HalfCheetah-v5 --policy medium --steps 100000 --out cheetah.hdf5
    python -m offline.collect --env Hopper-v5 --policy mixed --steps 100000 --out hopper-mixed.hdf5
    python -m offline.collect --env Hopper-v5 --policy replay --steps 100000 --out hopper-replay.hdf5
    python -m offline.collect --env AnswerPool-v0 --policy reference --steps 20000 --out answers.hdf5
    python -m offline.collect --env CartPole-v1 --policy sb3:PPO --load model.zip --out cartpole.hdf5

`--policy` is one or several of: "medium", which is shipped for some environments; "random"; "mixed", which
is short for "medium random"; "reference", the policy that an environment such as AnswerPool-v0 names as
such; "replay", all that a new SAC (for discrete actions DQN) meets in --steps steps of training, at some
8 ms each; a file that `offline.train_behaviour` wrote; a run folder of `llmgym train`; or an agent's name,
with `--load` for what it has saved. Of several policies each gives an equal share of the rows, one after
the other. They act by their distributions, not by their best actions.

Rows and columns: floats are float32, as D4RL has them; actions are as the environment got them. An
episode's last row holds the true final observation. The last episode of each policy is cut as a timeout,
so that there are exactly --steps rows. Beside D4RL's columns, infos has `reset_seed` (of the episode's
reset; -1 in replay), `policy` (the number of the policy, where there are several), and, where they are
known, `behaviour_logp`, the log-probability of the action under the policy that took it, and `ref_logp`,
under the environment's reference.

The result depends on the seed, not on --workers. A collection that was stopped continues: what it has is
in OUT.parts until it is done.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.progress import Progress, TextColumn

from agents.cli import parse_settings
from agents.run_folder import UserError, versions
from offline.acting import find, make
from offline.collection import Columns, Plan, environment, record_all
from offline.datasets import Dataset, make_dataset
from offline.files import HDF5_SUFFIXES, write
from offline.recorder import check_spaces

COLUMNS = (*Progress.get_default_columns(), TextColumn("{task.completed:,.0f} of {task.total:,} rows"))


@dataclass(frozen=True)
class Args:
    """Collect a dataset: any policy in any environment, as a D4RL HDF5 file or a Minari folder."""

    env: str
    """Environment id: of Gymnasium, of this project (`llmgym envs`), or 'package.module:Env-v0'."""
    out: Path
    """What to write: FILE.hdf5 in D4RL's layout, or a folder, as Minari has it."""
    policy: tuple[str, ...] = ("medium",)
    """One or several of medium, random, mixed, reference, replay, a path, or the name of an agent."""
    steps: int = 100_000
    """Rows, one for each step of the environment."""
    seed: int = 0
    """Of resets and actions."""
    workers: int = 1
    """Processes. They change the time that it takes, not the result."""
    load: Path | None = None
    """What the agent that --policy names has saved."""
    env_kwargs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Arguments of the environment, as JSON or else text."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace --out if it exists, once the new data is complete."""


def collect(
    env_id: str,
    policy: str | Sequence[str] = "medium",
    steps: int = 100_000,
    seed: int = 0,
    *,
    workers: int = 1,
    load: Path | None = None,
    env_kwargs: dict[str, Any] | None = None,
    parts: Path | None = None,
    console: Console | None = None,
) -> Dataset:
    """Collect a dataset; see the module's docstring.

    Args:
        env_id: environment id.
        policy: one policy, or several that share the rows.
        steps: rows of the dataset, at least one for each policy.
        seed: of resets and actions, >= 0.
        workers: processes; the result does not depend on them.
        load: what the agent named by ``policy`` has saved.
        env_kwargs: arguments of the environment.
        parts: folder for what is finished, from which a collection that was stopped continues. The caller
            deletes it. None: a temporary one.
        console: shows a progress bar on it.

    Returns:
        ``steps`` rows; the parts of several policies one after the other. Metadata: environment, policies
        (with the files they come from and the mean returns of their whole episodes), seed, versions.

    Raises:
        UserError: an unknown environment or policy, or one that does not fit the other; ``parts`` holds
            another collection.
        ValueError: another argument is out of range; spaces that a dataset cannot hold.
    """
    names = (policy,) if isinstance(policy, str) else tuple(policy)
    names = tuple(n for name in names for n in (("medium", "random") if name == "mixed" else (name,)))
    if not names or (load is not None and len(names) > 1):
        raise ValueError(f"policy={names!r} must be at least one, and only one with load")
    for field, value, low in (("steps", steps, len(names)), ("seed", seed, 0), ("workers", workers, 1)):
        if value < low:
            raise ValueError(f"{field}={value} must be at least {low}")
    env = environment(env_id, env_kwargs or {})
    check_spaces(env)
    sources = tuple(find(name, env_id, load) for name in names)
    plan = Plan(env_id, env_kwargs or {}, sources, steps, seed)
    # Made here as well, so that one that does not fit fails before anything is recorded.
    abouts = [{} if source.kind == "replay" else make(source, env, seed).about for source in sources]
    with ExitStack() as stack:
        folder = parts or Path(stack.enter_context(TemporaryDirectory()))
        bar = stack.enter_context(Progress(*COLUMNS, console=console, disable=console is None))
        task = bar.add_task(env_id, total=steps)
        recorded = record_all(plan, folder, workers, partial(bar.advance, task))
    metadata = plan.as_json() | {"policy": " ".join(names)} | _describe_spaces(env)
    env.close()
    for entry, about, columns in zip(metadata["policies"], abouts, recorded, strict=True):
        entry |= {"about": about} | _describe_rows(columns)
    metadata["mean_return"] = _mean_return(metadata["policies"])
    return _dataset(recorded, metadata | {"versions": versions()})


def _describe_spaces(env: gym.Env) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(env.observation_space, Discrete) and env.observation_space.start == 0:
        found["n_observations"] = int(env.observation_space.n)
    action = env.action_space
    if isinstance(action, Discrete):
        found |= {"n_actions": int(action.n), "action_start": int(action.start)}
    elif isinstance(action, Box) and action.is_bounded():
        found |= {"action_low": action.low.tolist(), "action_high": action.high.tolist()}
    return found


def _describe_rows(columns: Columns) -> dict[str, Any]:
    """Rows, whole episodes and their mean return."""
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"])
    rows, whole = len(columns["rewards"]), len(ends)
    total = columns["rewards"][: ends[-1] + 1].sum(dtype=np.float64) if whole else 0.0
    return {"rows": rows, "episodes": whole, "mean_return": float(total) / whole if whole else None}


def _mean_return(policies: list[dict[str, Any]]) -> float | None:
    """Of the whole episodes of all policies."""
    counted = [p for p in policies if p["episodes"]]
    if not counted:
        return None
    return sum(p["episodes"] * p["mean_return"] for p in counted) / sum(p["episodes"] for p in counted)


def _dataset(parts: list[Columns], metadata: dict[str, Any]) -> Dataset:
    # The record makes an unfinished last episode a timeout; so no part may run on into the next.
    for columns in parts:
        columns["timeouts"][-1] |= not columns["terminals"][-1]
    joined: dict[str, Any] = {}
    for name in list(parts[0]):
        joined[name] = np.concatenate([part.pop(name) for part in parts])
    infos = {name: joined.pop(name) for name in list(joined) if name.startswith("infos/")}
    infos = {name.removeprefix("infos/"): x for name, x in infos.items() if not np.isnan(x).all()}
    if len(parts) > 1:
        rows = [policy["rows"] for policy in metadata["policies"]]
        infos["policy"] = np.repeat(np.arange(len(parts)), rows)
    return make_dataset(**joined, metadata=metadata, infos=infos)


# --------------------------------------------------------------------------- the command line


def run(args: Args, console: Console) -> None:
    """Collect and write what the command line asks for.

    Raises:
        UserError, ValueError: see `collect`; ``out`` exists, or is of no known format.
    """
    check_out(args.out, args.overwrite)
    parts = parts_of(args.out)
    dataset = collect(
        args.env, args.policy, args.steps, args.seed, workers=args.workers, load=args.load,
        env_kwargs=parse_settings("env-kwargs", args.env_kwargs), parts=parts, console=console,
    )  # fmt: skip
    write_in_place(dataset, args.out, parts)
    shutil.rmtree(parts)
    for policy in dataset.metadata["policies"]:
        mean = policy["mean_return"]
        returns = "" if mean is None else f", mean return {mean:,.1f}"
        rows = f"{policy['rows']:,} rows, {policy['episodes']:,} whole episodes"
        console.print(f"{policy['name']}: {rows}{returns}", highlight=False, soft_wrap=True)
    console.print(f"wrote {args.out}", highlight=False, soft_wrap=True)


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse, before anything is collected, what could not be written or must not be replaced."""
    if out.suffix and out.suffix.lower() not in HDF5_SUFFIXES:
        allowed = f"{' or '.join(HDF5_SUFFIXES)}, or a folder, without suffix"
        raise UserError(f"out={str(out)!r} has an unknown suffix; allowed: {allowed}")
    if not out.exists():
        return
    if not overwrite:
        raise UserError(f"out={str(out)!r} exists; give another --out, or --overwrite to replace it")
    if out.is_dir():
        from offline.minari_io import data_folder

        if data_folder(out) is None:
            raise UserError(f"out={str(out)!r} is a folder that holds no Minari data; it is not replaced")


def write_in_place(dataset: Dataset, out: Path, parts: Path) -> None:
    """Write the data whole or not at all; what is replaced goes when the new data is complete."""
    if out.suffix:
        write(dataset, out)
        return
    new = parts.resolve() / "new"
    shutil.rmtree(new, ignore_errors=True)  # of an attempt that was broken off
    write(dataset, new)
    if out.exists():
        out.rename(parts / "old")
    new.rename(out)


def parts_of(out: Path) -> Path:
    """The folder in which a collection grows."""
    return out.with_name(out.name + ".parts")


def main(args: Args) -> int:
    """Collect; the exit status: 0 done, 2 an error, 130 interrupted."""
    console = Console()
    again = f"what is finished is in {parts_of(args.out)}: the same command goes on from there"
    try:
        run(args, console)
    except (UserError, ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BrokenProcessPool:
        console.print(f"error: a process was killed; {again}", style="red", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(f"interrupted; {again}", markup=False, highlight=False, soft_wrap=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, prog="python -m offline.collect", description=__doc__)))
