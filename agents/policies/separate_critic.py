"""A language model with a critic of its own, such as one that starts as the reward model.

The critic of `agents.policies.gpt.GPTPolicy` is a head on the policy's body. Here it is a second network:
what it learns does not move the policy, and it may start from other weights than the policy does.

Source: Stiennon et al., "Learning to summarize from human feedback" (2020), section 3.4: separate
networks, and a value function initialised to the reward model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from agents.policies.base import Evaluation
from agents.policies.gpt import GPT, GPTPolicy


class SeparateCritic(nn.Module):
    """Actions of one network, values of another: a sequence policy like `GPTPolicy`.

    ``V(tokens) = body(tokens)[last] @ weight + bias``.

    Args:
        actor: gives the actions; trained in place. Its own value head, if it has one, is not used.
        body: of the critic; copied.
        weight: [C], first weights of the critic's head; None: 0.
        bias: its first bias.
    """

    reads_sequences = True

    def __init__(
        self, actor: GPTPolicy, body: GPT, weight: Tensor | None = None, bias: Tensor | float = 0.0
    ) -> None:
        super().__init__()
        self.actor = actor
        self.body = copy.deepcopy(body)
        start = torch.zeros(body.n_embd) if weight is None else weight.detach().clone()
        self.weight = nn.Parameter(start)
        self.bias = nn.Parameter(torch.as_tensor(bias, dtype=start.dtype).detach().clone())

    def new_state(self, n_rows: int) -> Any:
        """As `GPTPolicy.new_state`: the critic reads nothing while decoding."""
        return self.actor.new_state(n_rows)

    def sample(
        self, observations: Tensor, generator: torch.Generator, state: Any = None, active: Any = None
    ) -> Tensor:
        return self.actor.sample(observations, generator, state, active)

    def mode(self, observations: Tensor, state: Any = None, active: Any = None) -> Tensor:
        return self.actor.mode(observations, state, active)

    def probabilities(self, observations: Tensor) -> Tensor:
        """pi(. | tokens so far); (B, L) -> (B, V)."""
        return self.actor.probabilities(observations)

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        """As `GPTPolicy.evaluate`, with the values of the critic."""
        if actions.ndim == 1:
            return Evaluation(*(x.squeeze(1) for x in self.evaluate(observations, actions.unsqueeze(1))))
        log_prob, entropy, _ = self.actor.evaluate(observations, actions)
        real, hidden = self.body.action_hidden(observations, actions)
        values = log_prob.new_zeros(actions.shape).masked_scatter(real, self._value(hidden))
        return Evaluation(log_prob, entropy, values)

    def value(self, observations: Tensor) -> Tensor:
        """V after the last token of each row; (B, L) -> (B,)."""
        return self._value(self.body.last_hidden(observations))

    def _value(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight + self.bias
