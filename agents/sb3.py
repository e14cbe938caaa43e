"""Stable-Baselines3 (SB3) and sb3-contrib algorithms as agents of this project.

An SB3 model already has ``learn``, ``predict``, ``save`` and ``load``: it *is* an agent. What it
lacks is here: a way onto Gymnasium's native vector environments (`SB3VecEnv`) and the KL penalty to
a reference policy (`KLPenaltyVecEnv`). This is the only file that imports SB3.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from agents.metrics import TrainingLog
from agents.registry import SB3_PREFIXES, import_class
from agents.schedules import schedule
from agents.vector_rows import (
    copy_observation,
    row_indices,
    row_reset,
    set_row,
    split_info,
    take_row,
)
from llmgym.checks import check_name

PACKAGES = {"sb3": "stable_baselines3", "sb3_contrib": "sb3_contrib"}
SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")


class SB3VecEnv(VecEnv):
    """A Gymnasium ``VectorEnv`` of N rows as SB3's ``VecEnv``, equal to what ``DummyVecEnv`` shows.

    SB3 resets a finished row within the same ``step``: the returned observation is the reset's,
    ``infos[i]["terminal_observation"]`` is the final one, ``infos[i]["TimeLimit.truncated"]`` says
    whether to bootstrap from it, and the info of the reset is in ``reset_infos``. Gymnasium's
    vector info (arrays with ``_key`` masks) becomes one dict per row.

    The autoreset mode is read from ``env.metadata["autoreset_mode"]``. Same-step and disabled work
    for every environment; next-step for those of llmgym, for Gymnasium's ``SyncVectorEnv`` and its
    ``CartPoleVectorEnv``, whose rows can be reset one by one. Other next-step environments reset a
    row only while they step the others, which SB3 cannot express.

    Raises:
        ValueError: a next-step environment whose rows cannot be reset one by one.
    """

    def __init__(self, vector_env: VectorEnv) -> None:
        self.vector_env = vector_env
        self._row_reset = row_reset(vector_env)
        self._actions: np.ndarray | None = None
        super().__init__(
            vector_env.num_envs, vector_env.single_observation_space, vector_env.single_action_space
        )
        self.metadata = vector_env.metadata

    def reset(self) -> Any:
        """Reset all rows: row i with seed s + i after ``seed(s)``. Seed and options serve once."""
        observation, info = self.vector_env.reset(
            seed=self._seeds[0], options=self._options[0] or None
        )
        self.reset_infos = split_info(info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return copy_observation(observation, self.observation_space)

    def set_options(self, options: list[dict] | dict | None = None) -> None:
        """Options of the next reset: one dict for the whole batch (values may be arrays [N])."""
        if isinstance(options, list):
            raise ValueError(
                f"options={options!r} is a list; allowed: one dict for all rows, with arrays of "
                "length num_envs as values where rows differ"
            )
        super().set_options(options)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict]]:
        step = self.vector_env.step(self._actions)
        observation = copy_observation(step[0], self.observation_space)
        terminated, truncated = np.asarray(step[2], bool), np.asarray(step[3], bool)
        dones = terminated | truncated
        if self._row_reset is None:
            infos = self._split_same_step(step[4], dones)
        else:
            infos = split_info(step[4], self.num_envs)
            fresh = self._row_reset(dones) if dones.any() else {}
            for i, (row, reset_info) in fresh.items():
                infos[i]["terminal_observation"] = take_row(observation, i)
                set_row(observation, i, row)
                self.reset_infos[i] = reset_info
        for i, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        # SB3 adds bootstrap values to the rewards in place, so the environment must not share them.
        return observation, np.array(step[1], dtype=np.float32), dones, infos

    def _split_same_step(self, info: dict[str, Any], dones: np.ndarray) -> list[dict[str, Any]]:
        """Finished rows: ``final_*`` becomes the step's info, the rest that of the reset."""
        final = ("final_obs", "final_info")
        infos = split_info(
            {k: v for k, v in info.items() if k.removeprefix("_") not in final}, self.num_envs
        )
        if not dones.any():
            return infos
        if "final_obs" not in info:
            raise ValueError(
                f"{self.vector_env} declares same-step autoreset, but info has no 'final_obs' for "
                f"the finished rows {row_indices(dones)}; it has {sorted(info)}"
            )
        final_infos = split_info(info.get("final_info", {}), self.num_envs)
        for i in row_indices(dones):
            self.reset_infos[i] = infos[i]
            infos[i] = final_infos[i] | {"terminal_observation": take_row(info["final_obs"], i)}
        return infos

    def close(self) -> None:
        self.vector_env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(self.vector_env.render() or [None] * self.num_envs)

    # These methods act on sub-environments where there are any. A native environment is one object
    # for all rows: an attribute is the same for each, a method is called once for the batch.

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        rows, env = self._get_indices(indices), self.vector_env.unwrapped
        if isinstance(env, SyncVectorEnv):
            return [env.envs[i].get_wrapper_attr(attr_name) for i in rows]
        return [getattr(env, attr_name) for _ in rows]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        rows, env = list(self._get_indices(indices)), self.vector_env.unwrapped
        if isinstance(env, SyncVectorEnv):
            for i in rows:
                env.envs[i].set_wrapper_attr(attr_name, value)
        elif sorted(rows) == list(range(self.num_envs)):
            setattr(env, attr_name, value)
        else:
            raise ValueError(
                f"indices={rows}: all rows of {env} share {attr_name!r}; allowed: None"
            )

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """One result per row of ``indices``; a native result of length N is taken apart by row."""
        rows, env = list(self._get_indices(indices)), self.vector_env.unwrapped
        if isinstance(env, SyncVectorEnv):
            methods = [env.envs[i].get_wrapper_attr(method_name) for i in rows]
            return [method(*method_args, **method_kwargs) for method in methods]
        result = getattr(env, method_name)(*method_args, **method_kwargs)
        sequence = isinstance(result, np.ndarray | list | tuple) and np.ndim(result) > 0
        per_row = sequence and len(result) == self.num_envs
        return [result[i] if per_row else result for i in rows]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None
    ) -> list[bool]:
        rows, env = self._get_indices(indices), self.vector_env.unwrapped
        if isinstance(env, SyncVectorEnv):
            return [is_wrapped(env.envs[i], wrapper_class) for i in rows]
        return [False for _ in rows]


# --------------------------------------------------------------------------- KL to the reference


class KLPenaltyVecEnv(VecEnvWrapper):
    """Subtract the k1 estimate of KL(policy || reference) from each step's reward.

    ``reward - beta * (log pi(a|s) - info["ref_logp"])``, the reward of Ziegler et al. 2019 (arXiv
    1909.08593, eq. 2); for one-step tasks its optimum is ``ref * exp(r / beta)``, normalised.

    ``log pi`` is that of the policy which chose the action, read from the forward pass in which
    SB3 sampled it: the very number in SB3's rollout buffer (with action masks or gSDE noise; for a
    ``Box``, of the action before SB3 clips it). Statistics recorded below this wrapper keep the
    environment's own reward. ``model`` must be set after construction; `make_sb3` does it.

    Raises:
        ValueError: beta is negative or not finite; the model is not on-policy; ``info`` of a step
            lacks a finite ``ref_logp``.
        RuntimeError: a step whose actions did not come from the model's sampling (no ``model``, or
            ``predict``): evaluate on the environment itself.
    """

    def __init__(self, venv: VecEnv, beta: float) -> None:
        super().__init__(venv)
        self.beta = _check_beta(beta)
        self._model: BaseAlgorithm | None = None
        self._log_prob: torch.Tensor | None = None

    @property
    def model(self) -> BaseAlgorithm | None:
        return self._model

    @model.setter
    def model(self, model: BaseAlgorithm) -> None:
        _check_on_policy(type(model), self.beta)
        self._model = model
        model.policy.register_forward_hook(self._remember)

    def _remember(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._log_prob = output[2].detach()  # on-policy forward: actions, values, log-probs, ...

    def reset(self) -> Any:
        self._log_prob = None
        return self.venv.reset()

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict]]:
        observation, rewards, dones, infos = self.venv.step_wait()
        if self._log_prob is None:
            raise RuntimeError(
                f"beta={self.beta}: these actions were not sampled by the model while learning, so "
                "their log-prob is unknown; evaluate on an environment without the KL penalty"
            )
        log_prob, self._log_prob = self._log_prob.cpu().numpy(), None
        ref_logp = np.array([_reference_logp(info, i, self.beta) for i, info in enumerate(infos)])
        penalised = rewards - self.beta * (log_prob.astype(np.float64) - ref_logp)
        return observation, penalised.astype(np.float32), dones, infos


def _reference_logp(info: dict[str, Any], row: int, beta: float) -> float:
    value = info.get("ref_logp")
    if value is None or not np.isfinite(value):
        raise ValueError(
            f"info['ref_logp'] of row {row} is {value}; beta={beta} needs the finite log-prob of "
            f"the action under the reference policy at every step (info has {sorted(info)})"
        )
    return float(value)


def _check_beta(beta: float) -> float:
    if not (np.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta={beta!r} is not allowed; it is a finite number >= 0")
    return float(beta)


def _check_on_policy(cls: type[BaseAlgorithm], beta: float) -> None:
    if not issubclass(cls, OnPolicyAlgorithm):
        allowed = [n for n, c in _classes().items() if issubclass(c, OnPolicyAlgorithm)]
        raise ValueError(
            f"beta={beta} with {cls.__name__}: the KL penalty needs the log-prob of each sampled "
            f"action, which the on-policy algorithms have: {', '.join(allowed)}"
        )


# --------------------------------------------------------------------------- runs


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
            take schedules such as ``"lin_0.2"``; ``clip_range=None`` is the unclipped ratio.

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
    if _check_beta(beta) > 0:
        _check_on_policy(cls, beta)
        venv = KLPenaltyVecEnv(venv, beta)
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
