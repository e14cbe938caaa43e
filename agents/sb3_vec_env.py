"""Environments as Stable-Baselines3 sees them: native vector ones, and ones with a KL penalty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from agents.vector_rows import (
    copy_observation,
    row_indices,
    row_reset,
    set_row,
    split_info,
    take_row,
)

ON_POLICY = ("sb3:A2C", "sb3:PPO", "sb3_contrib:MaskablePPO", "sb3_contrib:RecurrentPPO", "sb3_contrib:TRPO")


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
        self.beta = check_beta(beta)
        self._model: BaseAlgorithm | None = None
        self._log_prob: torch.Tensor | None = None

    @property
    def model(self) -> BaseAlgorithm | None:
        return self._model

    @model.setter
    def model(self, model: BaseAlgorithm) -> None:
        check_on_policy(type(model), self.beta)
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


def check_beta(beta: float) -> float:
    if not (np.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta={beta!r} is not allowed; it is a finite number >= 0")
    return float(beta)


def check_on_policy(cls: type[BaseAlgorithm], beta: float) -> None:
    if not issubclass(cls, OnPolicyAlgorithm):
        raise ValueError(
            f"beta={beta} with {cls.__name__}: the KL penalty needs the log-prob of each sampled "
            f"action, which the on-policy algorithms have: {', '.join(ON_POLICY)}"
        )
