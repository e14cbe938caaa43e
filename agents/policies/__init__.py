"""Policies: a table, an MLP with a categorical or a Gaussian head, and a small GPT for token tasks.

Every policy is an ``nn.Module`` with one interface (`Policy`), so an algorithm never asks which one
it trains. `make_policy` chooses by the environment's spaces.
"""

from agents.policies.base import Evaluation, Policy, make_policy
from agents.policies.gpt import GPT, GPTPolicy
from agents.policies.mlp import MLPPolicy
from agents.policies.table import TablePolicy

__all__ = ["GPT", "Evaluation", "GPTPolicy", "MLPPolicy", "Policy", "TablePolicy", "make_policy"]
