"""The algorithms by name: d3rlpy's configurations with the settings of the papers.

====================  ================================================================================
name                  settings beside d3rlpy's defaults, and where they come from
====================  ================================================================================
bc                    batch 256. Squared error of a deterministic policy, two layers of 256.
cql-1, cql-10         CQL(H) with a fixed alpha of 1 or 10: ``conservative_weight``, with
                      ``alpha_learning_rate=0``. Three layers of 256, policy rate 1e-4, critic rate
                      3e-4, 10 sampled actions (Kumar et al. 2020). The paper tunes alpha by a
                      Lagrangian; for D4RL's locomotion data its authors' repository later recommends
                      none, a ``min_q_weight`` of 5 or 10 and policy rates of 1e-4 or 3e-4.
cql                   cql-10: the weight of d3rlpy's own reproduction on hopper-medium, and of CORL's on
                      halfcheetah-, hopper- and walker2d-medium-v2.
iql                   weight_temp (beta) 3, expectile 0.7, rates 3e-4, cosine schedule of the policy's
                      rate to 0 over ``total_steps``, rewards scaled by the range of returns to 1000
                      (Kostrikov et al. 2021 and their code).
td3bc                 alpha 2.5, observations standardised (Fujimoto & Gu 2021).
rebrac                three layers of 256, LayerNorm in the critic, batch 1024, rates 1e-3 (Tarasov et
                      al. 2023). The paper tunes ``actor_beta`` and ``critic_beta`` on each dataset;
                      0.01 and 0.01 are what d3rlpy's reproduction falls back on.
sac                   SAC on the data as if it were a replay buffer, rates 3e-4: no conservatism, the
                      arm that shows over-estimation.
discrete-bc           cross-entropy alone: d3rlpy's penalty on logits is off (``beta=0``).
discrete-cql          CQL with double DQN, alpha 1, rate 3e-4, batch 256, targets copied every 1000
                      steps. d3rlpy's defaults are for 50 million steps on Atari.
====================  ================================================================================

A configuration is d3rlpy's dataclass; it goes through JSON with ``config.serialize()`` and
``type(config).deserialize(text)``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from d3rlpy import algos, preprocessing
from d3rlpy.base import LearnableConfig
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.optimizers import AdamFactory, CosineAnnealingLRFactory

from llmgym.checks import check_name, did_you_mean
from offline.datasets import Dataset, episode_returns, observation_statistics
from offline.spaces import Spaces

DEEP = [256, 256, 256]
ACTION_BOUND = 1.0  # of the tanh that d3rlpy's policies end with


def _bc(total_steps: int) -> LearnableConfig:
    return algos.BCConfig(batch_size=256)


def _cql(weight: float) -> Callable[[int], LearnableConfig]:
    return lambda total_steps: algos.CQLConfig(
        conservative_weight=weight,
        alpha_learning_rate=0.0,
        alpha_threshold=0.0,  # a constant in the loss where alpha is fixed
        actor_encoder_factory=VectorEncoderFactory(list(DEEP)),
        critic_encoder_factory=VectorEncoderFactory(list(DEEP)),
    )


def _iql(total_steps: int) -> LearnableConfig:
    schedule = CosineAnnealingLRFactory(T_max=total_steps)
    return algos.IQLConfig(
        actor_optim_factory=AdamFactory(lr_scheduler_factory=schedule),
        reward_scaler=preprocessing.ReturnBasedRewardScaler(multiplier=1000.0),
    )


def _td3bc(total_steps: int) -> LearnableConfig:
    return algos.TD3PlusBCConfig(observation_scaler=preprocessing.StandardObservationScaler())


def _rebrac(total_steps: int) -> LearnableConfig:
    return algos.ReBRACConfig(
        actor_encoder_factory=VectorEncoderFactory(list(DEEP)),
        critic_encoder_factory=VectorEncoderFactory(list(DEEP), use_layer_norm=True),
        observation_scaler=preprocessing.StandardObservationScaler(),
        actor_beta=0.01,
        critic_beta=0.01,
    )


def _sac(total_steps: int) -> LearnableConfig:
    return algos.SACConfig()


def _discrete_bc(total_steps: int) -> LearnableConfig:
    return algos.DiscreteBCConfig(batch_size=256, beta=0.0)


def _discrete_cql(total_steps: int) -> LearnableConfig:
    return algos.DiscreteCQLConfig(batch_size=256, learning_rate=3e-4, target_update_interval=1000)


ALGORITHMS: dict[str, Callable[[int], LearnableConfig]] = {
    "bc": _bc,
    "cql": _cql(10.0),
    "cql-1": _cql(1.0),
    "cql-10": _cql(10.0),
    "iql": _iql,
    "td3bc": _td3bc,
    "rebrac": _rebrac,
    "sac": _sac,
    "discrete-bc": _discrete_bc,
    "discrete-cql": _discrete_cql,
}
IMITATES = ("bc", "discrete-bc")  # learn from the state and action of a row alone
READS_NEXT_ACTION = ("rebrac",)


def names(discrete: bool | None = None) -> list[str]:
    """The algorithms, or those for discrete (continuous) actions."""
    return [name for name in ALGORITHMS if discrete in (None, name.startswith("discrete-"))]


def make_config(name: str, total_steps: int, overrides: dict[str, Any]) -> LearnableConfig:
    """d3rlpy's configuration of an algorithm.

    Args:
        total_steps: gradient steps over which learning rates with a schedule decay.
        overrides: fields of the configuration. A factory or scaler is a d3rlpy object, or what its JSON
            has: ``{"type": "vector", "params": {"hidden_units": [32, 32]}}``.

    Raises:
        ValueError: unknown algorithm, with the nearest name.
        TypeError: unknown field, with the nearest name and all of them.
    """
    check_name("algorithm", name, names())
    config = ALGORITHMS[name](total_steps)
    known = {f.name: f for f in fields(config)}
    values = {}
    for field, value in overrides.items():
        if field not in known:
            hint = did_you_mean(field, known)
            raise TypeError(f"{name} has no field {field!r}{hint} Fields: {', '.join(sorted(known))}")
        if isinstance(value, dict):
            value = known[field].metadata["dataclasses_json"]["decoder"](value)
        # NumPy's numbers, as a sweep over linspace has them, are not JSON.
        value = value.item() if isinstance(value, np.generic) else value
        values[field] = copy.deepcopy(value)  # scalers are fitted in place of the caller's
    return replace(config, **values)


def fit_scalers(config: LearnableConfig, spaces: Spaces, dataset: Dataset | None) -> LearnableConfig:
    """The configuration with its scalers fitted on all rows of the record.

    Actions outside [-1, 1] get a scaler from their bounds, since d3rlpy's policies end with a tanh.

    Raises:
        ValueError: a scaler needs data and there is none; returns, or a component of the
            observations, that do not vary where a scaler divides by their range; a scaler that cannot be
            fitted; actions without finite bounds.
    """
    observation, action, reward = config.observation_scaler, config.action_scaler, config.reward_scaler
    if action is None and not spaces.discrete:
        low, high = np.array(spaces.low), np.array(spaces.high)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(f"actions have the bounds {low} to {high}; allowed: finite ones")
        if (low != -ACTION_BOUND).any() or (high != ACTION_BOUND).any():
            action = preprocessing.MinMaxActionScaler(minimum=low, maximum=high)
    unfitted = [s for s in (observation, action, reward) if s is not None and not s.built]
    if unfitted and dataset is None:
        kinds = ", ".join(type(s).__name__ for s in unfitted)
        raise ValueError(f"{kinds} must be fitted to data: make the agent with the dataset")
    fitted = {id(s): _fit(s, dataset) for s in unfitted if dataset is not None}
    observation, action, reward = (fitted.get(id(s), s) for s in (observation, action, reward))
    return replace(config, observation_scaler=observation, action_scaler=action, reward_scaler=reward)


def _fit(scaler: Any, dataset: Dataset) -> Any:
    """One scaler with its statistics over all rows, however long the episodes are."""
    if isinstance(scaler, preprocessing.StandardObservationScaler):
        mean, std = observation_statistics(dataset)
        return replace(scaler, mean=mean, std=std)
    if isinstance(scaler, preprocessing.MinMaxObservationScaler | preprocessing.MinMaxActionScaler):
        of_actions = isinstance(scaler, preprocessing.MinMaxActionScaler)
        name, array = ("actions", dataset.actions) if of_actions else ("observations", dataset.observations)
        low, high = array.min(axis=0), array.max(axis=0)
        _check_range(f"{type(scaler).__name__}: {name}", low, high)
        return replace(scaler, minimum=low, maximum=high)
    if isinstance(scaler, preprocessing.ReturnBasedRewardScaler):
        low, high = episode_returns(dataset).min(), episode_returns(dataset).max()
        _check_range(f"reward_scaler={type(scaler).__name__}: episode returns", low, high)
        return replace(scaler, return_min=float(low), return_max=float(high))
    if isinstance(scaler, preprocessing.MinMaxRewardScaler):
        low, high = dataset.rewards.min(), dataset.rewards.max()
        _check_range(f"reward_scaler={type(scaler).__name__}: rewards", low, high)
        return replace(scaler, minimum=float(low), maximum=float(high))
    if isinstance(scaler, preprocessing.StandardRewardScaler):
        rewards = dataset.rewards.astype(np.float64)
        return replace(scaler, mean=float(rewards.mean()), std=float(rewards.std()))
    raise ValueError(f"{type(scaler).__name__} cannot be fitted here; give it fitted")


def _check_range(what: str, low: Any, high: Any) -> None:
    if np.any(low == high):
        raise ValueError(f"{what} do not vary (all are {low}): there is no range to scale by")
