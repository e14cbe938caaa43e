"""Agents by name: ours, Stable-Baselines3's, and anybody's class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from agents.agent import as_vector_env
from llmgym.checks import did_you_mean

Factory = Callable[..., Any]


# Module, class and configuration of our own agents: imported when one is made.
OURS = {
    "ppo": ("agents.ppo", "PPO", "PPOConfig"),
    "reinforce": ("agents.reinforce", "Reinforce", "ReinforceConfig"),
    "rloo": ("agents.rloo", "RLOO", "RLOOConfig"),
    "remax": ("agents.remax", "ReMax", "ReMaxConfig"),
    "grpo": ("agents.grpo", "GRPO", "GRPOConfig"),
    "dpo": ("agents.dpo", "DPO", "DPOConfig"),
}


def _ours(name: str) -> Factory:
    module, kind, _ = OURS[name]

    def make_ours(env: Any, **config: Any) -> Any:
        return getattr(importlib.import_module(module), kind)(env, **config)

    return make_ours


_FACTORIES: dict[str, Factory] = {name: _ours(name) for name in OURS}
SB3_PREFIXES = ("sb3", "sb3_contrib")
SB3_PACKAGES = ("stable_baselines3", "sb3_contrib")


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_FACTORIES)


def register(name: str, factory: Factory) -> None:
    """Make ``factory(env, seed=..., **config)`` available as ``make(name, env)``.

    Raises:
        ValueError: the name contains a colon (those are class paths), or is taken by another factory.
    """
    if ":" in name:
        raise ValueError(f"name={name!r} must not contain ':'; names with a colon are class paths")
    if _FACTORIES.get(name, factory) is not factory:
        raise ValueError(f"name={name!r} is taken; registered: {', '.join(names())}")
    _FACTORIES[name] = factory


def make(name: str, env: Any, seed: int | None = None, **config: Any) -> Any:
    """Build an agent.

    Args:
        name: a registered name ("ppo", "reinforce", or one given to `register`); "sb3:PPO" or
            "sb3_contrib:TRPO" for any class of those packages; "package.module:Class" for any class
            with the methods of `agents.agent.Agent`, called as ``Class(env, seed=seed, **config)``.
        env: a Gymnasium Env or VectorEnv.
        seed: seeds the agent and its environment's first reset.
        config: the agent's own configuration.

    Raises:
        ValueError: unknown name, with the nearest one; a class that lacks a method of the protocol.
        TypeError: env is neither an Env nor a VectorEnv; unknown configuration field.
    """
    as_vector_env(env)
    agent = resolve(name)(env, seed=seed, **config)
    missing = [m for m in ("learn", "predict", "save", "load") if not callable(getattr(agent, m, None))]
    if missing:
        raise ValueError(
            f"agent {name!r} lacks {', '.join(missing)}; an agent has learn, predict, save and load"
        )
    return agent


def load(name: str, path: Any, env: Any) -> Any:
    """The agent that ``make(name, env).save(path)`` wrote, on ``env``."""
    if is_sb3(name):
        from agents.sb3 import load_sb3

        return load_sb3(name, path, env)
    factory = resolve(name)
    kind: Any = factory if inspect.isclass(factory) else type(factory(env))
    return kind.load(path, env)


def resolve(name: str) -> Factory:
    """The factory behind a name, called as ``factory(env, seed=seed, **config)``; see `make`."""
    _, colon, attribute = name.partition(":")
    if not colon:
        if name not in _FACTORIES:
            raise ValueError(
                f"unknown agent {name!r}; {did_you_mean(name, names(), '', ' ')}"
                f"registered: {', '.join(names())}; "
                "also 'sb3:PPO', 'sb3_contrib:TRPO' and 'package.module:Class'"
            )
        return _FACTORIES[name]
    if is_sb3(name):
        from agents.sb3 import sb3_factory

        return sb3_factory(name)
    found = import_class(name)
    if not callable(found):
        raise ValueError(f"agent {name!r}: {attribute} is a {type(found).__name__}, not a class")
    return found


def is_sb3(name: str) -> bool:
    """Whether a name is that of an SB3 or sb3-contrib class, or of somebody's subclass of one."""
    prefix, colon, _ = name.partition(":")
    if not colon or prefix in SB3_PREFIXES:
        return bool(colon)
    bases = getattr(import_class(name), "__mro__", ())
    return any(base.__module__.partition(".")[0] in SB3_PACKAGES for base in bases)


def import_class(name: str) -> Any:
    """What ``"package.module:Class"`` names.

    Raises:
        ValueError: no such module, or nothing of that name in it, with the nearest name.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module exists, and something it imports does not
        raise ValueError(
            f"agent {name!r}: there is no module {module_name!r} on the path "
            "(run from its folder, or set PYTHONPATH)"
        ) from error
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if inspect.isclass(v) and not n.startswith("_")]
        hint = did_you_mean(attribute, public)
        raise ValueError(f"agent {name!r}: {module_name} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def config_fields(name: str) -> set[str]:
    """Names of the configuration fields that the agent accepts.

    For ours the fields of its configuration class; for others the keyword parameters of the class.
    """
    if name in OURS:
        module, _, config = OURS[name]
        return {f.name for f in fields(getattr(importlib.import_module(module), config))} | {"reference"}
    if is_sb3(name):
        from agents.sb3 import sb3_config_fields

        return sb3_config_fields(name)
    return set(inspect.signature(resolve(name)).parameters) - {"self", "env", "seed"}
