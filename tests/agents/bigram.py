"""A sequence policy that is easy to check: the next token depends on the last one, by a table."""

import numpy as np
import torch
from torch import nn

from agents.policies.base import Evaluation


class Bigram(nn.Module):
    """pi(b | a) = softmax(logits[a])[b], evaluated in plain loops over rows and positions."""

    reads_sequences = True

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(np.array(logits), dtype=torch.float32))

    def evaluate(self, observations, actions):
        logp = torch.log_softmax(self.logits, -1)
        pad = len(logp)
        rows = []
        for observation, action in zip(observations.tolist(), actions.tolist(), strict=True):
            seen = [token for token in observation if token != pad]
            taken = [token for token in action if token >= 0]
            values = [logp[seen[len(seen) - len(taken) + t], token] for t, token in enumerate(taken)]
            padding = [torch.zeros(())] * (len(action) - len(taken))
            rows.append(torch.stack(values + padding) if action else torch.zeros(0))
        log_prob = torch.stack(rows)
        return Evaluation(log_prob, torch.zeros_like(log_prob), torch.zeros_like(log_prob))

    def _last(self, observations):
        filled = (observations != len(self.logits)).sum(1)
        return observations[torch.arange(len(observations)), filled - 1]

    def sample(self, observations, generator, state=None, active=None):
        probabilities = torch.softmax(self.logits[self._last(observations)], -1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    def mode(self, observations, state=None, active=None):
        return self.logits[self._last(observations)].argmax(-1)

    def value(self, observations):
        return torch.zeros(len(observations))

    def new_state(self, n_rows):
        return None
