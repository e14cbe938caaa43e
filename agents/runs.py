"""Training in a run folder, going on with a stopped run, and evaluating what a run has learned.

Our agents resume exactly (see `agents.checkpoint`). Others are saved and loaded by their own methods: a
resumed run of theirs goes on from their last save, but not to the same numbers.
"""

from __future__ import annotations

import inspect
import random
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import llmgym  # noqa: F401  (registers its ids with Gymnasium)
from agents.files import write_json
from agents.run_folder import (
    RunConfig,
    UserError,
    clear_unfinished,
    foreign_saves,
    read_config,
    save_foreign,
    steps_of,
)
from llmgym.checks import did_you_mean

EVALUATION_SEED = 10_000  # of the first episode: not one that training has seen


def is_foreign(agent_name: str) -> bool:
    """Whether an agent is a class of neither this project nor SB3."""
    from agents.registry import SB3_PREFIXES

    module, colon, _ = agent_name.partition(":")
    return bool(colon) and module not in SB3_PREFIXES


def make_env(config: RunConfig, scalar: bool = False) -> Any:
    """The environment of a run: a VectorEnv, or a plain Env for one row or if ``scalar``.

    Raises:
        UserError: unknown id, with the nearest one; arguments that it does not take.
    """
    with user_errors(f"environment {config.env!r}"):
        try:
            gym.spec(config.env)
        except gym.error.UnregisteredEnv as error:
            hint = did_you_mean(config.env, gym.registry) or "; for your own: 'package.module:Env-v0'."
            raise UserError(
                f"unknown environment {config.env!r}{hint} (`llmgym envs` lists ours)"
            ) from error
        if scalar or config.n_envs == 1:
            # How finished rows start anew is a matter of vector environments alone.
            kwargs = {k: v for k, v in config.env_kwargs.items() if k != "autoreset_mode"}
            return gym.make(config.env, **kwargs)
        return gym.make_vec(config.env, num_envs=config.n_envs, **config.env_kwargs)


def make_agent(config: RunConfig, env: Any) -> Any:
    """The agent of a run, with the weights of `config.init`.

    Raises:
        UserError: unknown name or configuration field; weights that do not fit.
    """
    from agents import registry
    from agents.checkpoint import load_weights, newest_state

    with user_errors(f"agent {config.agent!r}", show_place=is_foreign(config.agent)):
        agent = registry.make(config.agent, env, seed=config.seed, **config.config)
        if config.init is None:
            return agent
        if not is_ours(agent):
            raise UserError(f"init={config.init!r} needs one of our agents, not {config.agent!r}")
        read_config(Path(config.init))
        state = newest_state(config.init)
        if state is None:
            raise UserError(f"init={config.init!r} has no checkpoint of one of our agents")
        load_weights(agent, state, config.init)
        return agent


def is_ours(agent: Any) -> bool:
    """Whether the agent is checkpointed and resumed by `agents.training_run`."""
    return hasattr(agent, "algorithm") and hasattr(agent, "collector")


def load_agent(folder: Path, config: RunConfig, env: Any) -> tuple[Any, Path]:
    """The agent at its newest checkpoint, and that checkpoint.

    Raises:
        UserError: there is none yet.
    """
    from agents import registry
    from agents.checkpoint import checkpoints

    with user_errors(f"run {folder}"):
        for path in [*checkpoints(folder), *foreign_saves(folder)]:
            return registry.load(config.agent, path if path.is_file() else path / "agent", env), path
    raise UserError(f"{folder} has no checkpoint yet: `llmgym resume {folder}` trains on")


@contextmanager
def user_errors(what: str, show_place: bool = False) -> Iterator[None]:
    """Errors of building something become a `UserError`; ``show_place`` names the line in foreign code."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, AttributeError, gym.error.Error) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        foreign = show_place and Path(place.filename).parent != Path(__file__).parent
        where = f" ({place.filename}, line {place.lineno})" if foreign else ""
        kind = f"{type(error).__name__}: " if foreign else ""
        prefix = "" if str(error).startswith(what) else f"{what}: "
        raise UserError(f"{prefix}{kind}{error}{where}") from error


# --------------------------------------------------------------------------- training


def build(config: RunConfig) -> tuple[Any, Any]:
    """The environment and the agent of a run as they are before its first step.

    Raises:
        UserError: as `make_env` and `make_agent`.
    """
    import torch

    make_env(config, scalar=True).close()  # the one to be evaluated in must be possible too
    env = make_env(config)
    random.seed(config.seed)  # for environments and agents that draw from the global generators
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    return env, make_agent(config, env)


def train(
    folder: Path, config: RunConfig, env: Any, agent: Any, progress_bar: bool, resume: bool = False
) -> dict[str, Any]:
    """Train in a run folder to the end and evaluate; returns what `result.json` holds.

    Args:
        env, agent: freshly built (see `build`).
        resume: go on from the newest checkpoint, if there is one.

    Raises:
        UserError: training failed; `error.txt` then holds the traceback.
    """
    try:
        agent, exact = _learn(folder, config, env, agent, progress_bar, resume)
        evaluation = evaluate(agent, config, episodes=20)
    except Exception as error:
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise UserError(f"{type(error).__name__}: {error} (traceback in {folder / 'error.txt'})") from error
    finally:
        env.close()
    (folder / "error.txt").unlink(missing_ok=True)
    newest = newest_save(folder)
    result = {
        "steps": steps_of(newest), "exact": exact, "checkpoint": str(newest.relative_to(folder)),
        "evaluation": evaluation,
    }  # fmt: skip
    write_json(folder / "result.json", result)
    return result


def _learn(
    folder: Path, config: RunConfig, env: Any, agent: Any, progress_bar: bool, resume: bool
) -> tuple[Any, bool]:
    """Train to the end; the trained agent, and whether it is that of an unbroken run."""
    if is_ours(agent):
        from agents.checkpoint import newest_state

        every = config.checkpoint_every or max(1, config.steps // 20)
        agent.learn(
            config.steps, run_dir=folder, progress_bar=progress_bar, checkpoint_every=every, resume=resume
        )
        state = newest_state(folder)
        assert state is not None
        return agent, state["call"]["exact"]
    from agents import registry

    clear_unfinished(folder)
    done = 0
    saves = foreign_saves(folder) if resume else []
    if saves:
        done = steps_of(saves[0])
        agent = registry.load(config.agent, saves[0] / "agent", env)
        warnings.warn(
            f"resumed at step {done}, but not exactly: {config.agent} saves itself, without the states of "
            "the environment and of the random generators",
            stacklevel=2,
        )
    if done < config.steps and not is_foreign(config.agent):
        from agents.sb3 import learn_in_folder

        every = config.checkpoint_every or max(1, config.steps // 20)
        learn_in_folder(agent, config.steps, folder, progress_bar, every, partial(save_foreign, folder))
    elif done < config.steps:  # a class of anybody's
        _learn_foreign(folder, config, agent, done, progress_bar)
    return agent, not saves


def _learn_foreign(folder: Path, config: RunConfig, agent: Any, done: int, progress_bar: bool) -> None:
    """One ``learn`` call, or calls of ``checkpoint_every`` steps with a save behind each."""
    offered = {"run_dir": folder, "progress_bar": progress_bar}
    taken = {k: v for k, v in offered.items() if k in inspect.signature(agent.learn).parameters}
    while done < config.steps:
        piece = min(config.checkpoint_every or config.steps, config.steps - done)
        agent.learn(piece, **taken)
        done += piece
        save_foreign(folder, agent, done)


def newest_save(folder: Path) -> Path:
    from agents.checkpoint import checkpoints

    return [*checkpoints(folder), *foreign_saves(folder)][0]


def evaluate(
    agent: Any, config: RunConfig, episodes: int, deterministic: bool = False, seed: int = EVALUATION_SEED
) -> dict[str, Any]:
    """Returns of whole episodes in a fresh plain environment, undiscounted and without any KL penalty.

    One environment runs them one after the other: of several in parallel the first to finish would be
    the short ones.
    """
    env = make_env(config, scalar=True)
    returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        state, start, ended = None, True, False
        while not ended:
            action, state = agent.predict(
                observation, state=state, episode_start=np.array([start]), deterministic=deterministic
            )
            observation, reward, terminated, truncated, _ = env.step(action)
            returns[episode] += float(reward)
            lengths[episode] += 1
            start, ended = False, bool(terminated or truncated)
    env.close()
    error = float(returns.std(ddof=1) / np.sqrt(episodes)) if episodes > 1 else None
    return {
        "episodes": episodes, "deterministic": deterministic, "return_mean": float(returns.mean()),
        "return_standard_error": error, "length_mean": float(lengths.mean()), "returns": returns.tolist(),
    }  # fmt: skip
