"""Answers and preferences between them: the data of SFT, reward models and DPO.

Both records hold what a policy's ``evaluate`` takes, so that the trainers are the same for a table
over whole answers and for a language model over tokens:

====================  ===============  ===================================================  ===========
kind of answer        observations     actions                                              mask
====================  ===============  ===================================================  ===========
one action            [B, ...]         [B] or float [B, D]                                  None
tokens of a sequence  int64 [B, L]     int64 [B, T], -1 behind the last token               None
an episode of steps   [B, K, ...]      [B, K] or float [B, K, D]                            bool [B, K]
====================  ===============  ===================================================  ===========

A sequence is the prompt and the response without its last token, then padding: what the policy saw
before its last action. The padding id is the number of tokens V, outside the vocabulary, so that an
end-of-sequence id within a prompt is never taken for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from agents.policies.base import Policy

Tokens = Sequence[int]


@dataclass
class Responses:
    """Answers to prompts, one per row; the fields are those of the table above.

    Raises:
        ValueError: the fields differ in their number of rows.
    """

    observations: Tensor
    actions: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.observations) != len(self.actions):
            raise ValueError(
                f"observations has {len(self.observations)} rows and actions has {len(self.actions)}; "
                "each answer is one row of both"
            )

    def __len__(self) -> int:
        return len(self.actions)

    def select(self, index: Tensor) -> Responses:
        """The rows at ``index``."""
        mask = None if self.mask is None else self.mask[index]
        return Responses(self.observations[index], self.actions[index], mask)

    @property
    def lengths(self) -> Tensor:
        """Tokens or steps of each answer, int64 [B]; 1 where one action is the answer."""
        if self.mask is not None:
            return self.mask.sum(1)
        if self.actions.ndim == 2 and not self.actions.is_floating_point():
            return (self.actions >= 0).sum(1)
        return torch.ones(len(self), dtype=torch.int64)


def build_responses(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    pad: int,
    bos: int | None = None,
    eos: int | None = None,
) -> Responses:
    """Token ids to the record of a policy that reads sequences, as wide as the longest row.

    Args:
        prompts, completions: one list of ids per row.
        pad: number of tokens V; ids are 0 to V - 1.
        bos: id put before each prompt that does not begin with it; None puts nothing.
        eos: id put behind each completion that does not end with it, so that it is trained on; None
            leaves them as they are, which is right for sampled ones that were cut off by their length.

    An empty completion (without eos) is a row of its whole prompt and no action: it counts as a row,
    with log-prob 0.

    Raises:
        ValueError: numbers of rows differ; a prompt is empty; an id is not in 0 to V - 1.
    """
    if len(prompts) != len(completions) or not len(prompts):
        raise ValueError(
            f"prompts has {len(prompts)} rows and completions has {len(completions)}; allowed: as many, "
            "at least one"
        )
    observations, actions = [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt, completion = list(prompt), list(completion)
        if bos is not None and prompt[:1] != [bos]:
            prompt = [bos, *prompt]
        if eos is not None and completion[-1:] != [eos]:
            completion = [*completion, eos]
        for field, ids in (("prompts", prompt), ("completions", completion)):
            wrong = [token for token in ids if not 0 <= token < pad]
            if wrong:
                raise ValueError(f"{field}: row {row} has id {wrong[0]}; allowed: 0 to {pad - 1}")
        if not prompt:
            raise ValueError(f"prompts: row {row} is empty; the first token needs something to follow")
        observations.append(prompt + completion[:-1])
        actions.append(completion)
    return Responses(_padded(observations, pad), _padded(actions, -1))


def full_sequences(responses: Responses, pad: int) -> Tensor:
    """Prompts with their whole responses, int64 [B, L + 1]: what a reward model reads.

    Args:
        responses: token ids, with observations padded by ``pad``.
    """
    tokens = torch.nn.functional.pad(responses.observations, (0, 1), value=pad)
    lengths = responses.lengths
    rows = torch.nonzero(lengths).squeeze(1)  # an empty response adds nothing to its prompt
    last = responses.actions[rows, lengths[rows] - 1]
    tokens[rows, (tokens[rows] != pad).sum(1)] = last
    return tokens


def answer_log_probs(policy: Policy, responses: Responses) -> Tensor:
    """Log-prob of each whole answer, the sum over its tokens or steps; [B], differentiable."""
    mask = responses.mask
    if mask is None:
        log_prob = policy.evaluate(responses.observations, responses.actions).log_prob
        return log_prob.flatten(1).sum(1) if log_prob.ndim > 1 else log_prob
    flat = policy.evaluate(responses.observations[mask], responses.actions[mask]).log_prob
    return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat).sum(1)


@dataclass
class Preferences:
    """Pairs of answers to one prompt, of which one is preferred. Made by `make_preferences`.

    ========  =====================================================================================
    chosen    B answers
    rejected  B others to the same prompts
    margins   [B], by how much the chosen answer should score higher (see `preference_losses`)
    labels    [B], probability that the chosen answer is the better one
    ========  =====================================================================================
    """

    chosen: Responses
    rejected: Responses
    margins: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> Preferences:
        """The pairs at ``index``: one index for every field, so that none is shuffled apart."""
        return Preferences(
            self.chosen.select(index), self.rejected.select(index), self.margins[index], self.labels[index]
        )


def make_preferences(
    chosen: Responses,
    rejected: Responses,
    margins: Sequence[float | None] | Tensor | None = None,
    labels: ArrayLike | Tensor | None = None,
) -> Preferences:
    """Check and complete the fields of `Preferences`.

    Args:
        margins: one per pair, None where a pair has none (its margin is 0); None: no pair has one.
        labels: [B]; None: all 1.

    Raises:
        ValueError: numbers of pairs differ; a margin that is not finite, or a label not in [0, 1].
    """
    n = len(chosen)
    given = [0.0] * n if margins is None else [0.0 if m is None else float(m) for m in margins]
    tensors = {
        "margins": torch.tensor(given, dtype=torch.float32),
        "labels": torch.ones(n) if labels is None else torch.as_tensor(labels).to(torch.float32),
    }
    for name, rows in {"rejected": len(rejected), **{k: len(x) for k, x in tensors.items()}}.items():
        if rows != n:
            raise ValueError(f"{name} has {rows} rows, chosen has {n}; each pair is one row of both")
    for name, bad, allowed in (
        ("margins", ~tensors["margins"].isfinite(), "finite numbers"),
        ("labels", ~((tensors["labels"] >= 0) & (tensors["labels"] <= 1)), "probabilities, 0 to 1"),
    ):
        if bad.any():
            row = int(torch.nonzero(bad)[0])
            raise ValueError(f"{name}: row {row} has {tensors[name][row].item()}; allowed: {allowed}")
    return Preferences(chosen, rejected, **tensors)


def pairs_within(groups: ArrayLike) -> Tensor:
    """All pairs (i, j), i < j, of rows with the same group; groups [B] -> int64 [M, 2]."""
    ids = np.asarray(groups)
    pairs = []
    for group in np.unique(ids):
        rows = np.flatnonzero(ids == group)
        first, second = np.triu_indices(len(rows), k=1)
        pairs.append(np.stack([rows[first], rows[second]], axis=1))
    return torch.from_numpy(np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64))


def bradley_terry_preferences(
    responses: Responses, rewards: ArrayLike, pairs: Tensor, generator: torch.Generator | None = None
) -> Preferences:
    """Preferences in which answer i beats j with probability ``sigmoid(rewards[i] - rewards[j])``.

    Args:
        responses: B answers.
        rewards: [B], finite; their scale says how sure the preferences are.
        pairs: int64 [M, 2], rows of ``responses`` (see `pairs_within`).
        generator: draws each preference. None draws nothing: the first answer of a pair is called
            chosen and the probability is its label, which is the expectation over all draws.

    Raises:
        ValueError: rewards of another shape or not finite.
    """
    r = torch.from_numpy(np.array(rewards, dtype=np.float64))  # a copy: a pool is read-only
    if r.shape != (len(responses),) or not bool(r.isfinite().all()):
        raise ValueError(f"rewards has shape {tuple(r.shape)}; allowed: ({len(responses)},), finite numbers")
    first, second = pairs.unbind(1)
    first_is_better = torch.sigmoid(r[first] - r[second])
    if generator is None:
        return make_preferences(responses.select(first), responses.select(second), labels=first_is_better)
    wins = torch.rand(len(pairs), generator=generator, dtype=torch.float64) < first_is_better
    chosen, rejected = torch.where(wins, first, second), torch.where(wins, second, first)
    return make_preferences(responses.select(chosen), responses.select(rejected))


def _padded(rows: list[list[int]], value: int) -> Tensor:
    """Lists of different lengths as one int64 array [B, longest]."""
    array = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return torch.from_numpy(array)
