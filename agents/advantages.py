"""Returns and advantages: pure functions of recorded rewards and values.

All arguments may be tensors, arrays or lists; results are tensors without gradient, in the dtype of
the first argument (integers become the default float type). Control tasks are time-major ``[T]`` or
``[T, N]`` (step, environment); functions for padded token rows say ``[B, T]``.

symbol        shape      meaning
------------  ---------  ---------------------------------------------------------------------------
rewards       [T, N]     reward of step t
values        [T, N]     V(s_t), the observation the action of step t was chosen for
next_values   [T, N]     V of the TRUE next observation of step t: at an episode end the final
                         observation, never that of the episode that an autoreset began
terminated    [T, N]     the task ended: nothing follows, the next value counts as zero
truncated     [T, N]     a limit from outside ended the episode: the next value still counts
mask          [T, N]     1 where an action was really executed (a reset step of next-step autoreset
                         and a row that waits are 0)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _floats(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.as_tensor(x).detach()
    if dtype is not None:
        return tensor.to(dtype)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _same_shape(**arrays: Tensor) -> None:
    shapes = {name: tuple(a.shape) for name, a in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ, all must be equal: {shapes}")


def gae(
    rewards: Any,
    values: Any,
    next_values: Any,
    terminated: Any,
    truncated: Any,
    gamma: float,
    gae_lambda: float,
    mask: Any = None,
) -> Tensor:
    """Generalised advantage estimation; the return for the critic is ``advantages + values``.

    ``delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)`` and
    ``A_t = delta_t + gamma * gae_lambda * (1 - terminated_t | truncated_t) * A_{t+1}``: termination
    zeroes the next value, either end cuts the recursion, and a truncated step bootstraps from the
    value of its final observation. Where both flags are set, termination wins. The last step
    bootstraps from ``next_values[-1]`` unless it terminated. Steps with ``mask`` 0 get advantage 0
    and pass nothing backwards.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016), eq. 16; ends as in Pardo et al., "Time Limits in Reinforcement Learning" (2018).

    Args:
        rewards, values, next_values, terminated, truncated, mask: [T] or [T, N], see the module.
        gamma: discount per step, in [0, 1].
        gae_lambda: in [0, 1]; 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        advantages, shape of ``rewards``.

    Raises:
        ValueError: shapes differ, or gamma or gae_lambda lies outside [0, 1].
    """
    for name, x in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0.0 <= x <= 1.0:
            raise ValueError(f"{name}={x} must lie in [0, 1]")
    rewards = _floats(rewards)
    values, next_values = _floats(values, rewards.dtype), _floats(next_values, rewards.dtype)
    terminated, truncated = torch.as_tensor(terminated).bool(), torch.as_tensor(truncated).bool()
    mask = torch.ones_like(terminated) if mask is None else torch.as_tensor(mask).bool()
    _same_shape(rewards=rewards, values=values, next_values=next_values,
                terminated=terminated, truncated=truncated, mask=mask)

    # `where`, not a product: a value that must not be read may be NaN or infinite.
    delta = rewards + gamma * torch.where(terminated, 0.0, next_values) - values
    delta = torch.where(mask, delta, 0.0)
    decay = gamma * gae_lambda * (mask & ~terminated & ~truncated).to(delta.dtype)
    advantages = torch.empty_like(delta)
    running = torch.zeros_like(delta[0]) if len(delta) else delta
    for t in range(len(delta) - 1, -1, -1):
        running = torch.addcmul(delta[t], decay[t], running)
        advantages[t] = running
    return advantages


def masked_gae(rewards: Any, values: Any, mask: Any, gamma: float, gae_lambda: float) -> Tensor:
    """GAE of padded token rows, ``[B, T]``; every row is one episode that ends at its last real token.

    Convention: the recursion runs over the trainable tokens alone, one decay per trainable token.
    Padding behind a response and masked tokens inside it (text that a tool or the prompt inserted)
    are as if they were not there: their values are never read, and a reward on one of them belongs
    to no action and is ignored. They get advantage 0.

    Args:
        rewards, values: [B, T].
        mask: [B, T], 1 at trainable tokens.

    Returns:
        advantages [B, T]; the returns for the critic are ``advantages + values`` where mask is 1.

    Raises:
        ValueError: shapes differ, or gamma or gae_lambda lies outside [0, 1].
    """
    rewards, mask = _floats(rewards), torch.as_tensor(mask).bool()
    values = _floats(values, rewards.dtype)
    _same_shape(rewards=rewards, values=values, mask=mask)
    # Move the trainable tokens of each row to its front (stable: order is kept), run the ordinary
    # recursion there, and move the result back.
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    packed_mask = mask.gather(1, order)
    packed_values = torch.where(packed_mask, values.gather(1, order), 0.0)
    last = packed_mask & ~torch.nn.functional.pad(packed_mask[:, 1:], (0, 1))
    next_values = torch.nn.functional.pad(packed_values[:, 1:], (0, 1))
    packed = gae(
        rewards.gather(1, order).T, packed_values.T, next_values.T,
        last.T, torch.zeros_like(last).T, gamma, gae_lambda, packed_mask.T,
    ).T
    return torch.zeros_like(rewards).scatter(1, order, packed)


def discounted_returns(rewards: Any, dones: Any, gamma: float, mask: Any = None) -> Tensor:
    """``G_t = r_t + gamma * (1 - done_t) * G_{t+1}``: the sum stops at each episode end.

    Args:
        rewards, dones, mask: [T] or [T, N]; done is terminated or truncated. Nothing is bootstrapped.

    Returns:
        returns, shape of ``rewards``; 0 where mask is 0.
    """
    rewards = _floats(rewards)
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros, dones, torch.zeros_like(rewards), gamma, 1.0, mask)


def kl_in_reward(rewards: Any, logp: Any, ref_logp: Any, beta: float) -> Tensor:
    """``r_t - beta * (log pi_old(a_t) - log pi_ref(a_t))``: the per-step KL penalty, with k1.

    The log-probs are those of the policy that sampled the actions. Summed over an episode the penalty
    is an unbiased estimate of KL(pi_old || pi_ref), so the optimum of the penalised reward is that of
    the regularised objective ``E[r] - beta * KL(pi || pi_ref)``.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), eq. 2.

    Args:
        rewards, logp, ref_logp: equal shapes.

    Raises:
        ValueError: shapes differ.
    """
    rewards = _floats(rewards)
    logp, ref_logp = _floats(logp, rewards.dtype), _floats(ref_logp, rewards.dtype)
    _same_shape(rewards=rewards, logp=logp, ref_logp=ref_logp)
    return rewards - beta * (logp - ref_logp)


def token_rewards(logp: Any, ref_logp: Any, mask: Any, score: Any, beta: float) -> Tensor:
    """Rewards of padded token rows: the KL penalty at every token plus the score at the last real one.

    Args:
        logp, ref_logp, mask: [B, T]; mask is 1 at the tokens of the response.
        score: [B], the outcome reward of each response.

    Returns:
        rewards [B, T], 0 where mask is 0. A row without a real token has no place for its score: 0.
    """
    mask = torch.as_tensor(mask).bool()
    logp = _floats(logp)
    penalty = kl_in_reward(torch.zeros(mask.shape, dtype=logp.dtype), logp, ref_logp, beta)
    penalty = torch.where(mask, penalty, 0.0)
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    return penalty + torch.where(positions == last, _floats(score, logp.dtype).unsqueeze(1), 0.0)


def group_advantages(
    rewards: Any, group_ids: Any, std: str | None = "sample", eps: float = 1e-4, scale: str = "group"
) -> Tensor:
    """GRPO: ``A_i = (r_i - mean(group)) / (std + eps)``; ``r_i - mean(group)`` with ``std=None``.

    Dividing by the deviation of the group changes the objective: it weighs a prompt with pass rate p by
    ``1 / sqrt(p (1 - p))``, so that nearly solved and nearly hopeless prompts count more, which without
    it is the gradient of the expected reward (times ``1 - 1/G``, because the mean includes the sample).

    Conventions: a reward that is NaN is missing: it is left out of its group's mean and deviation, and
    its advantage is 0. A group of equal rewards, or with fewer than two, has advantages of exactly 0,
    whatever rounding says of its deviation. ``std="population"`` divides the squares by n,
    ``std="sample"`` by n - 1 (torch's, and TRL's).

    Sources: Shao et al., "DeepSeekMath" (2024), section 4.1.2; without the deviation Liu et al.,
    "Understanding R1-Zero-Like Training" (2025), section 3.1 (Dr. GRPO); the deviation of the whole batch
    Liu et al., "Tricks or Traps?" (2025), and TRL's ``scale_rewards="batch"``.

    Args:
        rewards: [E], one per completion.
        group_ids: [E], any integers: which completions are compared with each other.
        std: "sample", "population" or None.
        eps: added to the deviation.
        scale: "group": the deviation of the own group; "batch": of all rewards.

    Returns:
        advantages [E], without gradient.
    """
    rewards, group, count, mean = _group_means(rewards, group_ids)
    valid = ~torch.isnan(rewards)
    centred = torch.where(valid, rewards - mean[group], 0.0)
    equal = _equal_groups(rewards, group)
    centred = torch.where(equal[group], 0.0, centred)
    if std is None:
        return centred
    if std not in ("sample", "population"):
        raise ValueError(f"std={std!r} is unknown; allowed: 'sample', 'population', None")
    if scale not in ("group", "batch"):
        raise ValueError(f"scale={scale!r} is unknown; allowed: 'group', 'batch'")
    ddof = int(std == "sample")
    if scale == "batch":
        pool = rewards[valid]
        spread = bool(len(pool) > 1 and pool.max() > pool.min())
        return centred / (pool.std(correction=ddof) + eps) if spread else torch.zeros_like(centred)
    squares = torch.zeros_like(mean).index_add_(0, group, centred.square())
    deviation = (squares / (count - ddof).clamp(min=1)).sqrt()
    # Groups without spread are 0 / (0 + eps): with eps=0 that needs a stand-in.
    return centred / torch.where(equal, 1.0, deviation + eps)[group]


def leave_one_out(rewards: Any, group_ids: Any) -> Tensor:
    """RLOO: ``A_i = r_i - mean of the other rewards of the group``; unbiased, unlike the group's mean.

    Equals ``n / (n - 1) * (r_i - mean)``. A NaN reward is missing, as in `group_advantages`; alone in its
    group a reward has nothing to be compared with, and its advantage is 0. That of equal rewards is 0 too,
    exactly.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019); Ahmadian et al.,
    "Back to Basics" (2024), eq. 7.

    Args:
        rewards, group_ids: [E].

    Returns:
        advantages [E], without gradient.
    """
    rewards, group, count, mean = _group_means(rewards, group_ids)
    n = count[group]
    factor = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    nothing = torch.isnan(rewards) | _equal_groups(rewards, group)[group]
    return torch.where(nothing, 0.0, factor * (rewards - mean[group]))


def greedy_baseline(rewards: Any, group_ids: Any, greedy_rewards: Any, greedy_group_ids: Any) -> Tensor:
    """ReMax: ``A_i = r_i - reward of the greedy answer to the same prompt``.

    Source: Li et al., "ReMax" (2024), eq. 5. The greedy answer itself is not trained on.

    Args:
        rewards, group_ids: [E], the sampled completions.
        greedy_rewards, greedy_group_ids: [G], one greedy completion per group, in any order.

    Returns:
        advantages [E], without gradient; 0 where either reward is missing (NaN).

    Raises:
        ValueError: a group without exactly one greedy completion.
    """
    rewards, group_ids = _floats(rewards), torch.as_tensor(group_ids)
    greedy_ids, order = torch.as_tensor(greedy_group_ids).sort()
    greedy_rewards = _floats(greedy_rewards, rewards.dtype)[order]
    position = torch.searchsorted(greedy_ids, group_ids)
    if len(greedy_ids.unique()) < len(greedy_ids) or not bool(torch.isin(group_ids, greedy_ids).all()):
        raise ValueError("each group needs exactly one greedy completion: "
                         f"groups {group_ids.unique().tolist()}, greedy {greedy_ids.tolist()}")
    return torch.nan_to_num(rewards - greedy_rewards[position], nan=0.0)


def equal_groups(rewards: Any, group_ids: Any) -> Tensor:
    """Which groups carry no signal: all their rewards that are not missing are equal; bool [G].

    Groups are in ascending order of their ids.
    """
    rewards = _floats(rewards)
    _, group = torch.as_tensor(group_ids).unique(return_inverse=True)
    return _equal_groups(rewards, group)


def _group_means(rewards: Any, group_ids: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards [E], number of each one's group [E], and of each group the valid count and mean [G]."""
    rewards = _floats(rewards)
    ids, group = torch.as_tensor(group_ids).unique(return_inverse=True)
    _same_shape(rewards=rewards, group_ids=group)
    valid = ~torch.isnan(rewards)
    zeros = torch.zeros(len(ids), dtype=rewards.dtype)
    count = zeros.index_add(0, group, valid.to(rewards.dtype))
    total = zeros.index_add(0, group, torch.where(valid, rewards, 0.0))
    return rewards, group, count, total / count.clamp(min=1)


def _equal_groups(rewards: Tensor, group: Tensor) -> Tensor:
    n_groups = int(group.max()) + 1 if len(group) else 0
    low = torch.full((n_groups,), torch.inf, dtype=rewards.dtype)
    low = low.scatter_reduce(0, group, torch.nan_to_num(rewards, nan=torch.inf, posinf=torch.inf), "amin")
    high = torch.full((n_groups,), -torch.inf, dtype=rewards.dtype)
    high = high.scatter_reduce(0, group, torch.nan_to_num(rewards, nan=-torch.inf, neginf=-torch.inf), "amax")
    return low >= high


def whiten(
    x: Any, mask: Any = None, *, shift_mean: bool = True, ddof: int = 0, eps: float = 1e-8
) -> Tensor:
    """``(x - mean) / (std + eps)`` over the entries where mask is 1; 0 elsewhere.

    Conventions: ``ddof=0`` is the population deviation (numpy's default), ``ddof=1`` the sample
    deviation (torch's and Stable-Baselines3's). ``shift_mean=False`` only divides,
    ``x / (std + eps)``: the mean is kept as a multiple of the deviation, not added back afterwards.
    Where the deviation is not defined (no valid entry, or one with ``ddof=1``) or zero, nothing is
    divided: constant input gives exact zeros, never NaN.

    Args:
        x: any shape.
        mask: None or the shape of x.

    Returns:
        tensor of the shape of x, without gradient.
    """
    x = _floats(x)
    if mask is not None:
        mask = torch.as_tensor(mask).bool()
        _same_shape(x=x, mask=mask)
    valid = x if mask is None else x[mask]
    # Equal values have no spread, whatever rounding of their mean says.
    if valid.numel() <= max(ddof, 0) or bool(valid.max() == valid.min()):
        whitened = torch.zeros_like(x) if shift_mean else x
    else:
        centred = x - valid.mean() if shift_mean else x
        whitened = centred / (valid.std(correction=ddof) + eps)
    return whitened if mask is None else torch.where(mask, whitened, 0.0)
