"""Saving an agent, and checkpoints from which training resumes to the same numbers.

A saved agent is one file: configuration, weights, optimiser, random state, counters. A checkpoint is
the same file and beside it what a ``learn`` call needs to go on as if it had never stopped: where the
call began and ends (so that a schedule continues), the state of the environment and of the collector
(current observations, unfinished episodes), and the global generators of Python, NumPy and torch, which
an environment may draw from. So ``PPO.load(checkpoint, env)`` works too.

The environment's part is a pickle, and a pickle can run code when it is read. Only resume from a run
folder that this project wrote; `load_agent` never reads that part.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.env_state import UnsavableEnvironment, dump_environment, load_environment
from agents.files import replace_file

KEEP = 2  # checkpoints of a run


def agent_state(agent: Any) -> dict[str, Any]:
    """Configuration, weights, optimiser, random state and counters of one of our agents."""
    config = dict(vars(agent.config))
    if not isinstance(config["policy"], str):
        config["policy"] = None  # given as an object: must be given again
    return {
        "algorithm": agent.algorithm,
        "config": config,
        "reference": agent.reference is not None,
        "policy": agent.policy.state_dict(),
        # Where the policy started, of agents that have it as their reference.
        "start": agent.start.state_dict() if hasattr(agent, "start") else None,
        "optimizer": agent.optimizer.state_dict(),
        "generator": agent.generator.get_state(),
        "num_timesteps": agent.num_timesteps,
        "n_updates": agent.n_updates,
    }


def save_agent(path: str | Path, agent: Any) -> None:
    """Write one of our agents to a file, atomically."""
    write_state(Path(path), agent_state(agent))


def load_agent(path: str | Path, kind: Any, env: Any, reference: Any, policy: Any) -> Any:
    """An agent of class ``kind`` from `save_agent`'s file.

    Raises:
        ValueError: as `read_state`; or a reference or policy that was given as an object is missing;
            or the environment's spaces do not fit the saved weights.
    """
    state = read_state(path, kind.algorithm)
    config = state["config"]
    for name, given, needed in (
        ("reference", reference, state["reference"]),
        ("policy", policy, config["policy"] is None),
    ):
        if needed and given is None:
            raise ValueError(f"{path} was trained with a {name} of its own; pass {name}= to load it")
    if policy is not None:
        config = {**config, "policy": policy}
    agent = kind(env, reference=reference, **config)
    restore_agent(agent, state, path)
    return agent


def restore_agent(agent: Any, state: dict[str, Any], path: str | Path) -> None:
    """Put `agent_state` into an agent that was made with the same configuration."""
    load_weights(agent, state, path)
    if state.get("start") is not None:
        agent.start.load_state_dict(state["start"])
    agent.optimizer.load_state_dict(state["optimizer"])
    agent.generator.set_state(state["generator"])
    agent.num_timesteps = state["num_timesteps"]
    agent.n_updates = state["n_updates"]


def load_weights(agent: Any, state: dict[str, Any], path: str | Path) -> None:
    """Only the policy's weights of `agent_state`, of whichever of our algorithms.

    Raises:
        ValueError: they do not fit the agent's policy.
    """
    try:
        agent.policy.load_state_dict(state["policy"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the weights in {path} do not fit a {type(agent.policy).__name__} for observations "
            f"{agent.env.single_observation_space} and actions {agent.env.single_action_space}: {reason}"
        ) from error


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically: a reader sees the old file or the new one, never half of one."""
    with replace_file(path, "wb") as file:
        torch.save(state, file)


def read_state(path: str | Path, algorithm: str | None = None) -> dict[str, Any]:
    """Read what `write_state` wrote; nothing in the file is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a saved agent, or one of another algorithm (None takes any).
    """
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a saved agent: {error}") from error
    found = state.get("algorithm") if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or "policy" not in state or algorithm not in (None, found):
        wanted = "one of our agents" if algorithm is None else repr(algorithm)
        raise ValueError(f"{path} holds {found!r}, expected an agent saved by {wanted}")
    return state


# --------------------------------------------------------------------------- checkpoints of a run


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    return sorted((Path(run_dir) / "checkpoints").glob("[0-9]*.pt"), reverse=True)


def newest_state(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest readable checkpoint of a run; None where there is none yet."""
    for path in checkpoints(run_dir):
        try:
            return read_state(path)
        except ValueError as error:  # a power cut can damage a file that a kill cannot
            warnings.warn(f"{error}; taking the checkpoint before it", stacklevel=2)
    return None


def write_checkpoint(run_dir: str | Path, agent: Any, call: dict[str, Any]) -> str | None:
    """Write a checkpoint and delete all but the last `KEEP`.

    Args:
        call: of the ``learn`` call, plain numbers: where it began, its length, whether it is exact.

    Returns:
        None, or why the environment's state could not be saved, so that resuming will not be exact.
    """
    beside = {
        "collector": agent.collector.state_dict(),
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    }
    reason, world = None, None
    try:
        dumped = dump_environment(agent.env, beside)
        world = torch.frombuffer(bytearray(dumped), dtype=torch.uint8)
    except UnsavableEnvironment as error:
        reason = str(error)
    path = Path(run_dir) / "checkpoints" / f"{agent.num_timesteps:012d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, {**agent_state(agent), "call": call, "world": world, "inexact": reason})
    for old in checkpoints(run_dir)[KEEP:]:
        old.unlink(missing_ok=True)
    return reason


def restore_checkpoint(run_dir: str | Path, agent: Any) -> dict[str, Any] | None:
    """Put the newest checkpoint into an agent freshly made as the saved one was, and into its environment.

    Returns:
        The ``call`` of `write_checkpoint`, with ``exact`` False where the environment could not be
        restored: it then starts new episodes, seeded from the agent's generator. None: no checkpoint.

    Raises:
        ValueError: the agent, its configuration or its environment is not the one that was saved.
    """
    for unfinished in (Path(run_dir) / "checkpoints").glob("*.tmp"):
        unfinished.unlink(missing_ok=True)
    state = newest_state(run_dir)
    if state is None:
        return None
    if state["algorithm"] != agent.algorithm:
        raise ValueError(f"{run_dir} is a run of {state['algorithm']!r}, not of {agent.algorithm!r}")
    config = agent_state(agent)["config"]
    for name, value in state["config"].items():
        if config[name] != value:
            raise ValueError(f"{name}={config[name]!r}, but {run_dir} is a run with {name}={value!r}")
    restore_agent(agent, state, run_dir)
    call, reason = state["call"], state["inexact"]
    if state["world"] is not None:
        try:
            beside = load_environment(agent.env, state["world"].numpy().tobytes())
        except (UnsavableEnvironment, ImportError, AttributeError, EOFError) as error:
            reason = str(error)  # for instance a class that another version no longer has
    if reason is None:
        agent.collector.load_state_dict(beside["collector"])
        random.setstate(beside["random"][0])
        np.random.set_state(beside["random"][1])
        torch.set_rng_state(beside["random"][2])
        return call
    warnings.warn(
        f"resumed at step {agent.num_timesteps}, but not exactly: unfinished episodes start anew, because "
        f"{reason}",
        stacklevel=3,
    )
    agent.collector.restart(int(torch.randint(2**31, (), generator=agent.generator)))
    return {**call, "exact": False}
