"""Agents: policies, rollouts, estimators, losses, and one file per algorithm.

``agents.make("ppo", env)`` builds one; see `agents.registry.make` for the names it takes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.agent import Agent, action_probabilities
    from agents.registry import config_fields, load, make, names, register

__all__ = ["Agent", "action_probabilities", "config_fields", "load", "make", "names", "register"]

_MODULES = {"Agent": "agents.agent", "action_probabilities": "agents.agent"}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line must answer ``--help`` without the seconds torch takes."""
    if name not in __all__:
        raise AttributeError(f"module 'agents' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES.get(name, "agents.registry")), name)
