"""One training run of any agent on a control task, and the settings the benchmarks compare on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agents
from agents.runs import is_foreign
from common.environments import EpisodeLog, make_env

# RL Baselines3 Zoo's tuned PPO settings for CartPole-v1 (hyperparams/ppo.yml), for 8 environments.
ZOO_N_ENVS = 8
ZOO_CARTPOLE: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "ent_coef": 0.0,
    "learning_rate": "lin_0.001",
    "clip_range": "lin_0.2",
}


def default_n_envs(agent: str) -> int:
    """8 environments for our agents and Stable-Baselines3's, a plain ``Env`` for any other."""
    return 1 if is_foreign(agent) else ZOO_N_ENVS


def agent_config(agent: str, **chosen: Any) -> dict[str, Any]:
    """Config of an agent: the Zoo's settings if it has all of those fields, and those of `chosen`
    that it has (see ``agents.config_fields``). An agent with other fields runs on its own defaults.
    """
    fields = agents.config_fields(agent)
    settings = ZOO_CARTPOLE if set(ZOO_CARTPOLE) <= fields else {}
    return settings | {name: value for name, value in chosen.items() if name in fields}


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one agent and write `episodes.csv`. For ``common.runner.run_jobs``.

    `config` has the keys env, agent, n_envs, reward_scale, steps, seed and agent_config.
    """
    log = EpisodeLog()
    env = make_env(config["env"], config["n_envs"], log, config["reward_scale"], config["seed"])
    try:
        agent = agents.make(config["agent"], env, seed=config["seed"], **config["agent_config"])
        agent.learn(config["steps"])
    finally:
        log.save(folder / "episodes.csv")  # of a run that failed too: they may show why
        env.close()
    return {"episodes": len(log.episodes), "steps": log.steps}
