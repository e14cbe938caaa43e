"""Reinforcement learning of language models as Gymnasium environments with known optima.

Importing the package registers its ids: ``gym.make("AnswerPool-v0")`` works after it, and
``gym.make("llmgym:AnswerPool-v0")`` without it.
"""

from llmgym.answer_pool import AnswerPool
from llmgym.registration import register_environments
from llmgym.vector import AutoresetMode

__all__ = ["AnswerPool", "AutoresetMode"]

register_environments()
