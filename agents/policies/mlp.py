"""A multilayer perceptron for actor and critic, evaluated in one fused forward."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from agents.policies import heads
from agents.policies.base import Evaluation
from agents.policies.spaces import flat_size

ACTOR, CRITIC = 0, 1
MINUS_ONE = torch.tensor(-1.0)


def _orthogonal(rows: int, columns: int, gain: float, generator: torch.Generator) -> Tensor:
    weight = torch.empty(rows, columns)
    nn.init.orthogonal_(weight, gain, generator=generator)
    return weight


def _tanh_layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``tanh(inputs @ weight + bias)`` for both networks; [2, B, in] -> [2, B, out].

    As ``2 sigmoid(2z) - 1``, within 2e-7 of tanh in float32: torch's sigmoid takes a fifth of the time
    of its tanh, which is the largest single cost of a network of this size.
    """
    doubled = torch.baddbmm(bias, inputs, weight, beta=2, alpha=2)
    return torch.add(MINUS_ONE, torch.sigmoid(doubled), alpha=2)


class MLPPolicy(nn.Module):
    """Separate tanh networks for actor and critic, as Stable-Baselines3's MlpPolicy.

    The two networks share no weights, but each layer of both is stored as one tensor and multiplied in
    one call: for networks of this size the number of calls is what costs time. Orthogonal
    initialisation with gain sqrt(2) in the body, 0.01 for the actor's head and 1 for the critic's,
    biases 0 (the values of Stable-Baselines3 and of Andrychowicz et al., "What Matters in On-Policy
    RL?" (2021)).

    Discrete actions: a categorical head, logits [B, A]. Box actions: a diagonal Gaussian with a
    state-independent log standard deviation that starts at 0.

    Args:
        observation_space: Box or MultiBinary (flattened), or Discrete (one-hot).
        action_space: Discrete or Box of shape [D].
        generator: source of the initial weights.
        net_arch: widths of the hidden layers, the same for both networks, at least one.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        generator: torch.Generator,
        net_arch: tuple[int, ...] = (64, 64),
    ) -> None:
        super().__init__()
        if not net_arch:
            raise ValueError("net_arch=() is not allowed; give at least one layer width: (64, 64)")
        n_inputs = flat_size(observation_space)
        self.one_hot = n_inputs if isinstance(observation_space, spaces.Discrete) else 0
        self.discrete = isinstance(action_space, spaces.Discrete)
        outputs = flat_size(action_space)  # logits, or one mean per dimension

        self.weights = nn.ParameterList()  # one [2, in, out] per hidden layer: actor, critic
        self.biases = nn.ParameterList()  # one [2, 1, out] per hidden layer
        for n_in, n_out in pairwise([n_inputs, *net_arch]):
            pair = [_orthogonal(n_in, n_out, math.sqrt(2.0), generator) for _ in (ACTOR, CRITIC)]
            self.weights.append(nn.Parameter(torch.stack(pair)))
            self.biases.append(nn.Parameter(torch.zeros(2, 1, n_out)))
        # Indexing a ParameterList takes longer than one of its layers: keep the same parameters as pairs.
        self._layers = list(zip(self.weights, self.biases, strict=True))
        self.actor_weight = nn.Parameter(_orthogonal(net_arch[-1], outputs, 0.01, generator))
        self.actor_bias = nn.Parameter(torch.zeros(outputs))
        self.critic_weight = nn.Parameter(_orthogonal(net_arch[-1], 1, 1.0, generator))
        self.critic_bias = nn.Parameter(torch.zeros(1))
        self.log_std = None if self.discrete else nn.Parameter(torch.zeros(outputs))

    def _features(self, observations: Tensor) -> Tensor:
        if observations.is_floating_point():
            return observations
        if self.one_hot:
            return F.one_hot(observations, self.one_hot).float()
        return observations.flatten(1).float() if observations.ndim > 1 else observations.unsqueeze(1).float()

    def _tower(self, observations: Tensor, which: int) -> Tensor:
        """Last hidden layer of the actor or the critic alone: [B, H]."""
        hidden = self._features(observations)
        for weight, bias in self._layers:
            hidden = torch.addmm(bias[which], hidden, weight[which]).tanh()
        return hidden

    def actor(self, observations: Tensor) -> Tensor:
        """Logits [B, A] or means [B, D] without the critic: all that a step of collection needs."""
        return torch.addmm(self.actor_bias, self._tower(observations, ACTOR), self.actor_weight)

    def value(self, observations: Tensor) -> Tensor:
        hidden = self._tower(observations, CRITIC)
        return torch.addmm(self.critic_bias, hidden, self.critic_weight).squeeze(-1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Actor output [B, A] or [B, D] and values [B] in one pass."""
        hidden = self._features(observations).expand(2, -1, -1)  # [2, B, D]
        for weight, bias in self._layers:
            hidden = _tanh_layer(hidden, weight, bias)  # [2, B, H]
        actor, critic = hidden
        output = torch.addmm(self.actor_bias, actor, self.actor_weight)
        return output, torch.addmm(self.critic_bias, critic, self.critic_weight).squeeze(-1)

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        output = self.actor(observations)
        if self.log_std is None:
            return heads.categorical_sample(output, generator)
        return heads.gaussian_sample(output, self.log_std, generator)

    def mode(self, observations: Tensor) -> Tensor:
        output = self.actor(observations)
        return output.argmax(-1) if self.log_std is None else output

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        output, value = self(observations)
        if self.log_std is None:
            logp, entropy = heads.categorical_log_prob_and_entropy(output, actions)
        else:
            logp = heads.gaussian_log_prob(output, self.log_std, actions)
            entropy = heads.gaussian_entropy(output, self.log_std)
        return Evaluation(logp, entropy, value)

    def probabilities(self, observations: Tensor) -> Tensor:
        """pi(.|s) of a categorical head: [B, A]."""
        if not self.discrete:
            raise ValueError("probabilities are defined for Discrete actions; this policy is Gaussian")
        return torch.softmax(self.actor(observations), -1)
