"""Losses on preference pairs: pure, differentiable functions that return one value per pair.

All of them are a mean, over the two ways to label a pair, of a loss of one number: by how much the
model puts the chosen answer above the rejected one. ``labels`` [B] is the probability that the chosen
answer is the better one: 1 for an ordinary preference, anything from 0 to 1 for a soft one. Label
smoothing is another label (`conservative_labels`, `robust_labels`), so that each loss is written once.

Sources:
    Bradley, Terry, "Rank Analysis of Incomplete Block Designs" (1952), for the model of preferences.
    Rafailov et al., "Direct Preference Optimization" (2023), eq. 7.
    Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023),
    eq. 17, for IPO.
    Mitchell, "A note on DPO with noisy preferences & relationship to IPO" (2023), for conservative,
    Chowdhury et al., "Provably Robust DPO: Aligning Language Models with Noisy Feedback" (2024), for
    robust label smoothing.
    Amini et al., "Direct Preference Optimization with an Offset" (2024), for the margin in DPO.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "robust", "ipo", "ipo_norm")


def logistic_loss(logits: Tensor, labels: Tensor | float = 1.0) -> Tensor:
    """``-q log sigmoid(z) - (1 - q) log sigmoid(-z)`` of logits z and labels q, [B].

    Linear for large wrong logits, in value and gradient, in float16 too: nothing is exponentiated.
    """
    return -labels * F.logsigmoid(logits) - (1.0 - labels) * F.logsigmoid(-logits)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, labels: Tensor | None = None
) -> Tensor:
    """`logistic_loss` of ``chosen - rejected - margin``: the loss of a reward model, [B].

    Args:
        chosen, rejected: scores, [B] or, as a linear layer gives them, [B, 1].
        margins: [B] or [B, 1], by how much the chosen score should be the higher one; None: 0. They
            are inside the sigmoid: the loss falls until the scores differ by more than the margin.
        labels: [B] or [B, 1]; None: 1.

    Raises:
        ValueError: numbers of pairs differ (nothing is broadcast).
    """
    chosen = _per_pair("chosen", chosen)
    logits = chosen - _per_pair("rejected", rejected, chosen)
    if margins is not None:
        logits = logits - _per_pair("margins", margins, chosen)
    return logistic_loss(logits, 1.0 if labels is None else _per_pair("labels", labels, chosen))


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    labels: Tensor | None = None,
    margins: Tensor | None = None,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
) -> Tensor:
    """The loss of direct preference optimisation per pair, [B].

    With ``h = chosen - rejected``, the difference of the log-ratios, and labels of 1:

    ============  =================================================================================
    loss_type     loss
    ============  =================================================================================
    sigmoid       ``-log sigmoid(beta h)``; its population optimum is ``ref * exp(r / beta)`` where
                  preferences follow the Bradley-Terry model of rewards r. Label smoothing e makes it
                  conservative: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``
    robust        ``(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)``: where a
                  share e of the labels is flipped, its mean is that of sigmoid on the true labels.
                  May be negative
    ipo           ``(h - 1 / (2 beta))**2``: h has a finite target, however sure the preference is
    sigmoid_norm  sigmoid and ipo with each answer's log-ratio divided by its number of tokens. (What
    ipo_norm      TRL calls "ipo" is "ipo_norm" here: the paper's loss is on sums.)
    ============  =================================================================================

    Args:
        chosen, rejected: log-ratios ``log pi(y|x) - log ref(y|x)``, sums over the tokens, [B].
        beta: weight of the KL to the reference behind the loss, > 0 (tau in IPO).
        label_smoothing: e, at least 0 and below 0.5; conservative except with "robust".
        labels: [B], probability that the chosen answer is the better one; None: 1.
        margins: [B], subtracted from ``beta h``; not for IPO, which has a target of its own.
        chosen_lengths, rejected_lengths: [B], tokens per answer, for the normalised types. An empty
            answer, whose log-ratio is 0, counts as one token.

    Raises:
        ValueError: an unknown type; lengths missing; margins with IPO; numbers of pairs differ.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type={loss_type!r} is unknown; allowed: {', '.join(LOSS_TYPES)}")
    chosen = _per_pair("chosen", chosen)
    rejected = _per_pair("rejected", rejected, chosen)
    if loss_type.endswith("_norm"):
        if chosen_lengths is None or rejected_lengths is None:
            raise ValueError(f"loss_type={loss_type!r} needs chosen_lengths and rejected_lengths")
        chosen = chosen / _per_pair("chosen_lengths", chosen_lengths, chosen).clamp(min=1)
        rejected = rejected / _per_pair("rejected_lengths", rejected_lengths, chosen).clamp(min=1)
    labels = torch.ones_like(chosen) if labels is None else _per_pair("labels", labels, chosen)
    smooth = robust_labels if loss_type == "robust" else conservative_labels
    labels = smooth(labels, label_smoothing)

    difference = chosen - rejected
    if loss_type.startswith("ipo"):
        if margins is not None and bool(margins.any()):
            raise ValueError(f"margins are defined for the logistic losses, not for {loss_type!r}")
        target = 1.0 / (2.0 * beta)
        return labels * (difference - target).square() + (1.0 - labels) * (difference + target).square()
    logits = beta * difference
    if margins is not None:
        logits = logits - _per_pair("margins", margins, chosen)
    return logistic_loss(logits, labels)


def conservative_labels(labels: Tensor, label_smoothing: float) -> Tensor:
    """Labels of which a share e is taken to be flipped: ``q (1 - e) + (1 - q) e``."""
    return labels * (1.0 - 2.0 * label_smoothing) + label_smoothing


def robust_labels(labels: Tensor, label_smoothing: float) -> Tensor:
    """Labels whose mean, over flips with probability e, is the true label: ``(q - e) / (1 - 2 e)``.

    The inverse of `conservative_labels`. Beyond 0 and 1, so that a loss may be negative.
    """
    return (labels - label_smoothing) / (1.0 - 2.0 * label_smoothing)


def preference_accuracy(margin: Tensor, labels: Tensor) -> Tensor:
    """Probability per pair that the better answer has the higher score; a tie counts half. [B].

    Args:
        margin: [B], score of the chosen answer less that of the rejected one.
        labels: [B], probability that the chosen answer is the better one.
    """
    above = 0.5 * (1.0 + torch.sign(margin))
    return labels * above + (1.0 - labels) * (1.0 - above)


def _per_pair(name: str, x: Tensor, like: Tensor | None = None) -> Tensor:
    """x as [B]; a tensor [B, 1] beside one [B] would broadcast to [B, B] without a word."""
    flat = x.squeeze(-1) if x.ndim == 2 and x.shape[1] == 1 else x
    if flat.ndim != 1 or (like is not None and flat.shape != like.shape):
        wanted = "[B] or [B, 1]" if like is None else f"({len(like)},) or ({len(like)}, 1), as chosen"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {wanted}")
    return flat
