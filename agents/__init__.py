"""Agents: policies, rollouts, estimators, losses, and one file per algorithm.

``agents.make("ppo", env)`` builds one; see `agents.registry.make` for the names it takes.
"""

from agents.agent import Agent, action_probabilities
from agents.registry import config_fields, make, names, register

__all__ = ["Agent", "action_probabilities", "config_fields", "make", "names", "register"]
