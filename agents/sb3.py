"""Stable-Baselines3 (SB3) and sb3-contrib algorithms as agents of this project.

An SB3 model already has ``learn``, ``predict``, ``save`` and ``load``: it *is* an agent. What it
lacks is here: a way onto Gymnasium's native vector environments (`SB3VecEnv`) and the KL penalty to
a reference policy (`KLPenaltyVecEnv`), both in `agents.sb3_vec_env`. Only these two files import SB3.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

from agents.metrics import TrainingLog
from agents.policies.spaces import is_token_task
from agents.registry import SB3_PREFIXES, import_class
from agents.sb3_tokens import TokenFeatures
from agents.sb3_vec_env import KLPenaltyVecEnv, SB3VecEnv, check_beta, check_on_policy
from agents.schedules import schedule
from llmgym.checks import check_name

PACKAGES = {"sb3": "stable_baselines3", "sb3_contrib": "sb3_contrib"}
SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")


class _RunLogger(KVWriter):
    """Writes what SB3 logs as a run folder's metrics, and moves the progress bar."""

    def __init__(self, log: TrainingLog) -> None:
        self._log = log

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        numbers = {k: float(v) for k, v in key_values.items() if isinstance(v, int | float | np.number)}
        self._log.write_foreign(step, step, numbers)

    def close(self) -> None:
        pass


class _SaveBetweenRollouts(BaseCallback):
    """Calls ``save`` about every so many steps, where SB3 holds no unfinished rollout."""

    def __init__(self, every: int, save: Callable[[BaseAlgorithm, int], None]) -> None:
        super().__init__()
        self._every, self._save = every, save

    def _on_training_start(self) -> None:
        self._saved_at = self.num_timesteps

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps - self._saved_at >= self._every:
            self._saved_at = self.model.num_timesteps
            self._save(self.model, self.model.num_timesteps)

    def _on_step(self) -> bool:
        return True


def learn_in_folder(
    model: BaseAlgorithm,
    total_timesteps: int,
    run_dir: str | Path,
    progress_bar: bool,
    save_every: int,
    save: Callable[[BaseAlgorithm, int], None],
) -> None:
    """Train until the model has had ``total_timesteps``, with metrics in ``run_dir``.

    A loaded model goes on where it was saved, schedules included; what SB3 does not save (rollouts and
    replay buffers, random states, the environment) starts anew.

    Args:
        save_every: environment steps between two calls of ``save(model, step)``; there is one at the
            end too.
    """
    done = model.num_timesteps
    with TrainingLog(total_timesteps, run_dir, progress_bar, done, resume_at=done) as log:
        model.set_logger(Logger(None, [_RunLogger(log)]))
        model.learn(
            total_timesteps - done, _SaveBetweenRollouts(save_every, save), reset_num_timesteps=done == 0
        )
    save(model, model.num_timesteps)


# --------------------------------------------------------------------------- models


def sb3_names() -> list[str]:
    """The agent names of all algorithms that are installed."""
    return list(_classes())


def sb3_class(name: str) -> type[BaseAlgorithm]:
    """The algorithm class of ``"sb3:PPO"``, ``"sb3_contrib:TRPO"`` or ``"package.module:Subclass"``.

    Raises:
        ValueError: no such algorithm; the message has the nearest name and the list.
        ModuleNotFoundError: sb3-contrib, which is optional, is not installed.
    """
    prefix = name.partition(":")[0]
    if prefix not in SB3_PREFIXES:
        return import_class(name)
    package = PACKAGES.get(prefix)
    if package and find_spec(package) is None:
        pip_name = package.replace("_", "-")
        raise ModuleNotFoundError(f"agent {name!r} needs {pip_name}: pip install {pip_name}")
    classes = _classes()
    return classes[check_name("agent", name, list(classes))]


def sb3_factory(name: str) -> Callable[..., BaseAlgorithm]:
    """`make_sb3` for one algorithm: ``factory(env, seed=None, **config)``."""
    sb3_class(name)
    return partial(make_sb3, name)


def sb3_config_fields(name: str) -> set[str]:
    """Names of the arguments that the algorithm takes: its own, and beta if it is on-policy."""
    cls = sb3_class(name)
    own = {p for p in inspect.signature(cls).parameters if not p.startswith("_")}
    return own - {"env", "seed"} | ({"beta"} if issubclass(cls, OnPolicyAlgorithm) else set())


def wrap_env(env: gym.Env | VectorEnv | VecEnv) -> VecEnv:
    """The environment as SB3 trains on it, with episode returns recorded."""
    if isinstance(env, VecEnv):
        return env
    if isinstance(env, VectorEnv):
        venv = SB3VecEnv(env)
        return venv if all(venv.env_is_wrapped(Monitor)) else VecMonitor(venv)
    if isinstance(env, gym.Env):
        monitored = env if is_wrapped(env, Monitor) else Monitor(env)
        return DummyVecEnv([lambda: monitored])
    raise TypeError(
        f"env is a {type(env).__name__}; allowed: a gymnasium Env or VectorEnv, or an SB3 VecEnv"
    )


def make_sb3(
    name: str,
    env: gym.Env | VectorEnv | VecEnv,
    seed: int | None = None,
    *,
    beta: float = 0.0,
    policy: str | type = "auto",
    device: str = "cpu",
    **config: Any,
) -> BaseAlgorithm:
    """An SB3 model on ``env``: ``make_sb3("sb3:PPO", env, learning_rate="lin_0.001")``.

    Args:
        name: ``"sb3:CLASS"`` or ``"sb3_contrib:CLASS"``.
        env: scalar or vector environment (see `SB3VecEnv` for what a vector one needs).
        seed: of the model and of the environment's first reset. SB3 seeds the global generators of
            Python, numpy and torch with it.
        beta: coefficient of the KL to the reference in the reward (`KLPenaltyVecEnv`).
        policy: SB3's policy name or class; "auto" is MlpPolicy, MultiInputPolicy for ``Dict``.
        device: SB3's small networks are quickest on the CPU.
        config: the class's own arguments. ``learning_rate``, ``clip_range``, ``clip_range_vf`` also
            take schedules such as ``"lin_0.2"``; ``clip_range=None`` is the unclipped ratio. Token
            observations get `agents.sb3_tokens.TokenFeatures` as their feature extractor, unless
            ``policy_kwargs`` names another.

    Raises:
        ValueError: unknown name, argument or policy (with the nearest name); beta with an algorithm
            that is not on-policy; a vector environment that SB3 cannot train on.
    """
    cls = sb3_class(name)
    for key in config:
        check_name(f"config of {name}", key, sorted(sb3_config_fields(name)))
    # SB3 writes into such dicts (SAC into policy_kwargs), and the caller may use them again.
    config = {key: dict(v) if isinstance(v, dict) else v for key, v in config.items()}
    for key in SCHEDULED:
        if isinstance(config.get(key), str):
            config[key] = schedule(config[key], key)
    if "clip_range" in config and config["clip_range"] is None:
        config["clip_range"] = float("inf")  # clamping to (-inf, inf) is no clipping
    venv = wrap_env(env)
    if check_beta(beta) > 0:
        check_on_policy(cls, beta)
        venv = KLPenaltyVecEnv(venv, beta)
    if is_token_task(venv.observation_space, venv.action_space):
        given = config.get("policy_kwargs") or {}
        config["policy_kwargs"] = {"features_extractor_class": TokenFeatures} | given
    policy = _policy(cls, policy, venv.observation_space)
    model = cls(policy, venv, seed=seed, device=device, **config)
    return _attach(model, venv, beta)


def load_sb3(
    name: str, path: str | Path, env: gym.Env | VectorEnv | VecEnv, device: str = "cpu"
) -> BaseAlgorithm:
    """The model that ``save(path)`` wrote, on ``env``, with the KL penalty it was trained with."""
    model = sb3_class(name).load(path, env=wrap_env(env), device=device)
    beta, venv = getattr(model, "beta", 0.0), model.get_env()
    if beta > 0 and venv is not None:
        venv = KLPenaltyVecEnv(venv, beta)
        model.set_env(venv)
    return _attach(model, venv, beta)


def action_probabilities_sb3(model: BaseAlgorithm, observations: Any) -> np.ndarray | None:
    """Probabilities float64 [N, A] of a discrete on-policy model, without action masks.

    None where SB3 has no such distribution at hand (off-policy, recurrent or continuous): sample
    ``predict`` instead.
    """
    policy: Any = model.policy
    if not isinstance(model, OnPolicyAlgorithm) or hasattr(policy, "lstm_actor"):
        return None
    if not isinstance(model.action_space, gym.spaces.Discrete):
        return None
    policy.set_training_mode(False)
    with torch.no_grad():
        tensor, _ = policy.obs_to_tensor(observations)
        logits = policy.get_distribution(tensor).distribution.logits
        return torch.softmax(logits.double(), dim=-1).cpu().numpy()


def _attach(model: BaseAlgorithm, venv: VecEnv | None, beta: float) -> BaseAlgorithm:
    if isinstance(venv, KLPenaltyVecEnv):
        venv.model = model
        model.beta = beta  # type: ignore[attr-defined]  # saved with the model, for load_sb3
    return model


def _classes() -> dict[str, type[BaseAlgorithm]]:
    found = {}
    for prefix, package in PACKAGES.items():
        if find_spec(package) is None:
            continue
        for attribute in vars(importlib.import_module(package)).values():
            if inspect.isclass(attribute) and issubclass(attribute, BaseAlgorithm):
                found[f"{prefix}:{attribute.__name__}"] = attribute
    return dict(sorted(found.items()))


def _policy(cls: type[BaseAlgorithm], policy: str | type, space: gym.Space) -> str | type:
    aliases = cls.policy_aliases
    if policy == "auto":
        prefix = "MultiInput" if isinstance(space, gym.spaces.Dict) else "Mlp"
        policy = next((a for a in aliases if a.startswith(prefix)), prefix + "Policy")
    return check_name("policy", policy, list(aliases)) if isinstance(policy, str) else policy
