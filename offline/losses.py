"""What CQL and IQL add to Q-learning, as pure functions.

Training uses d3rlpy's own code for these; the tests hold the two against each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cql_penalty(values: Tensor, log_densities: Tensor, data_values: Tensor) -> Tensor:
    """The regulariser of CQL(H) for continuous actions, a scalar.

        E_s[ log integral exp Q(s, a) da - E_{a ~ data} Q(s, a) ]

    (Kumar et al. 2020, equation 4.) The integral is estimated by importance sampling as in their appendix
    F, where a third of the actions are uniform and the others from the policy at s and at the next state:

        integral exp Q(s, a) da = (1 / N) sum_i exp Q(s, a_i) / p_i(a_i),   a_i ~ p_i.

    The estimate of the integral is unbiased; its logarithm is biased downwards, less with more samples.
    d3rlpy and the authors' code leave out the ``1 / N``: theirs is larger by ``log N``, a constant.

    ==============  ============  =====================================================================
    symbol          shape         meaning
    ==============  ============  =====================================================================
    values          [..., B, N]   Q(s, a_i) of sampled actions
    log_densities   [..., B, N]   log p_i(a_i) of the distribution that a_i was drawn from;
                                  ``-A log 2`` for uniform ones in [-1, 1]^A
    data_values     [..., B]      Q(s, a) of the logged actions
    ==============  ============  =====================================================================

    Leading axes, such as one of critics, are averaged over like the batch. Gradients flow through both
    kinds of values; give log-densities without any, for the penalty is not to train the policy.
    """
    log_integral = torch.logsumexp(values - log_densities, dim=-1) - math.log(values.shape[-1])
    return (log_integral - data_values).mean()


def discrete_cql_penalty(values: Tensor, actions: Tensor) -> Tensor:
    """The regulariser of CQL(H) for discrete actions, a scalar.

        E_s[ log sum_a exp Q(s, a) - E_{a ~ data} Q(s, a) ]

    (Kumar et al. 2020, equation 4.) This is the cross-entropy of the logged actions under softmax(Q), so it
    is not negative.

    Args:
        values: Q(s, .) [B, A].
        actions: the logged ones, int64 [B].
    """
    data_values = values.gather(1, actions[:, None])[:, 0]
    return (torch.logsumexp(values, dim=1) - data_values).mean()


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """The asymmetric squared loss of IQL's value, a scalar: ``mean |tau - 1(u < 0)| u^2``.

    (Kostrikov et al. 2021, equation 5.) With u = Q(s, a) - V(s) its minimum in V is the tau-expectile of
    Q(s, a) over the logged actions: the mean for tau = 1/2 (the loss is then half the squared error), and
    towards the largest Q as tau goes to 1.

    Args:
        difference: u, any shape.
        expectile: tau, above 0 and below 1.

    Raises:
        ValueError: tau is not between 0 and 1.
    """
    if not 0.0 < expectile < 1.0:
        raise ValueError(f"expectile={expectile!r} must be above 0 and below 1")
    weight = torch.where(difference < 0, 1.0 - expectile, expectile)
    return (weight * difference.square()).mean()
