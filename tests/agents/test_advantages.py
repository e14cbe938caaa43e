"""GAE, returns, KL rewards and whitening against hand calculations and brute-force sums."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.advantages import discounted_returns, gae, kl_in_reward, masked_gae, token_rewards, whiten

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)

# id, rewards, values, next_values, terminated, truncated, gamma, lambda, expected advantages
GAE_CASES = [
    # A truncation in the middle cuts the sum and keeps the bootstrap: treated as terminal it would be
    # [.5, -2, 1.5, 2], without the cut [1.84375, 3.375, 1.5, 2].
    ("B01", [1, 2, 3, 4], [2, 4, 6, 8], [4, 10, 8, 12], [0] * 4, [0, 1, 0, 0], 0.5, 0.5,
     [1.75, 3.0, 1.5, 2.0]),
    # A done flag read one step late gives A1 = 34.
    ("B03", [-1, -1, -1], [3, 5, 40], [5, 40, 20], [0, 1, 0], [0] * 3, 1.0, 0.0, [1.0, -6.0, -21.0]),
    # Both flags: termination wins.
    ("B04", [1, 2], [0.5, 0.5], [0.5, 100], [0, 1], [0, 1], 0.9, 1.0, [2.3, 1.5]),
    ("B06", [0, 0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0], [0, 0, 0, 0, 1], [0] * 5,
     1.0, 1.0, [0.9, 0.8, 0.7, 0.6, 0.5]),
    ("B13-not-done", [1], [2], [10], [0], [0], 0.9, 0.95, [8.0]),
    ("B13-terminated", [1], [2], [10], [1], [0], 0.9, 0.95, [-1.0]),
    ("B14-lam0", [1, 0, 2], [1, 1, 1], [1, 1, 99], [0, 0, 1], [0] * 3, 0.5, 0.0, [0.5, -0.5, 1.0]),
    ("B14-lam1", [1, 0, 2], [1, 1, 1], [1, 1, 99], [0, 0, 1], [0] * 3, 0.5, 1.0, [0.5, 0.0, 1.0]),
]


@pytest.mark.parametrize("case", GAE_CASES, ids=[case[0] for case in GAE_CASES])
def test_gae_by_hand(case):
    *arguments, expected = case[1:]
    np.testing.assert_allclose(gae(*arguments), expected, atol=1e-6)
    # The same as the second of three columns: rows of a batch do not touch each other.
    rewards, values, next_values, terminated, truncated = (
        np.stack([np.ones(len(x)), x, np.zeros(len(x))], 1) for x in arguments[:5]
    )
    columns = gae(rewards, values, next_values, terminated, truncated, *arguments[5:])
    np.testing.assert_allclose(columns[:, 1], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "returns"),
    [(GAE_CASES[0], [3.75, 7.0, 7.5, 10.0]), (GAE_CASES[3], [1, 1, 1, 1, 1])],
    ids=["B01", "B06"],
)
def test_returns_are_advantages_plus_values(case, returns):
    np.testing.assert_allclose(gae(*case[1:-1]) + torch.tensor(case[2]), returns, atol=1e-6)


def test_folding_the_bootstrap_into_the_reward_is_the_same_B05():
    rewards, values, final_value = np.array([1.0, 2.0]), np.array([2.0, 4.0]), 10.0
    truncated, gamma, lam = np.array([False, True]), 0.5, 0.5
    folded = rewards + gamma * np.where(truncated, final_value, 0.0)
    np.testing.assert_allclose(folded, [1.0, 7.0])

    # The recursion that knows only "done", as many libraries have it.
    advantages, running = np.zeros(2), 0.0
    following = [values[1], 123.0]
    for t in (1, 0):
        alive = 1.0 - truncated[t]
        running = folded[t] + gamma * alive * following[t] - values[t] + gamma * lam * alive * running
        advantages[t] = running
    np.testing.assert_allclose(advantages, [1.75, 3.0])
    np.testing.assert_allclose(
        gae(rewards, values, [4.0, final_value], [0, 0], truncated, gamma, lam), advantages, atol=1e-12
    )


def gae_by_double_sum(rewards, values, next_values, terminated, truncated, gamma, lam, mask):
    """A_t = sum_k (gamma * lam)^k delta_{t+k} over the rest of the episode, one column at a time."""
    advantages = np.zeros(rewards.shape)
    for n in range(rewards.shape[1]):
        for t in range(rewards.shape[0]):
            total, k = 0.0, 0
            while mask[t, n] and t + k < rewards.shape[0] and mask[t + k, n]:
                s = t + k
                bootstrap = 0.0 if terminated[s, n] else gamma * next_values[s, n]
                total += (gamma * lam) ** k * (rewards[s, n] + bootstrap - values[s, n])
                if terminated[s, n] or truncated[s, n]:
                    break
                k += 1
            advantages[t, n] = total
    return advantages


@PROPERTY
@given(
    seed=st.integers(0, 10_000), steps=st.integers(1, 12), rows=st.integers(1, 4),
    ends=st.floats(0, 1), masked=st.floats(0, 1),
    gamma=st.floats(0, 1), lam=st.floats(0, 1),
)  # fmt: skip
def test_gae_is_the_discounted_sum_of_td_errors(seed, steps, rows, ends, masked, gamma, lam):
    rng = np.random.default_rng(seed)
    shape = (steps, rows)
    rewards, values, next_values = rng.normal(size=(3, *shape))
    terminated, truncated = rng.random((2, *shape)) < ends / 2
    mask = rng.random(shape) >= masked
    expected = gae_by_double_sum(rewards, values, next_values, terminated, truncated, gamma, lam, mask)
    result = gae(rewards, values, next_values, terminated, truncated, gamma, lam, mask)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_gae_never_reads_what_does_not_count():
    nan, inf = float("nan"), float("inf")
    result = gae([1.0, nan, 1.0], [0.5, nan, inf], [inf, nan, nan], [1, 0, 1], [0, 1, 1], 0.9, 0.9, [1, 0, 0])
    assert result.tolist() == [0.5, 0.0, 0.0]


def test_gae_carries_no_gradient_and_leaves_its_inputs_alone():
    rewards, values = torch.ones(3, 2), torch.full((3, 2), 0.5, requires_grad=True)
    zeros = torch.zeros(3, 2)
    assert not gae(rewards, values, values, zeros, zeros, 0.9, 0.9).requires_grad
    assert (rewards == 1).all() and (values == 0.5).all()
    assert gae([], [], [], [], [], 0.9, 0.9).shape == (0,)


def test_results_have_the_dtype_of_the_rewards():
    floats = np.ones((2, 3), np.float32)
    doubles, flags = np.ones((2, 3)), np.zeros((2, 3), bool)
    assert gae(floats, doubles, doubles, flags, flags, 0.9, 0.9).dtype == torch.float32
    assert masked_gae(floats, doubles, ~flags, 0.9, 0.9).dtype == torch.float32
    assert masked_gae(np.ones((2, 3), int), doubles, ~flags, 0.9, 0.9).dtype == torch.float32
    assert kl_in_reward(floats, doubles, doubles, 0.1).dtype == torch.float32
    assert token_rewards(doubles, floats, ~flags, [1, 2], 0.1).dtype == torch.float64


@pytest.mark.parametrize(("gamma", "lam", "name"), [(1.1, 0.9, "gamma=1.1"), (0.9, -0.1, "gae_lambda=-0.1"),
                                                    (float("nan"), 0.9, "gamma=nan")])  # fmt: skip
def test_gae_names_a_factor_out_of_range(gamma, lam, name):
    with pytest.raises(ValueError, match=name):
        gae([1.0], [0.0], [0.0], [0], [0], gamma, lam)


def test_gae_names_the_shapes_that_differ():
    with pytest.raises(ValueError, match=r"next_values.*\(2,\)"):
        gae([1.0], [0.0], [0.0, 1.0], [0], [0], 0.9, 0.9)
    with pytest.raises(ValueError, match=r"mask.*\(1, 2\)"):
        masked_gae([[1.0]], [[1.0]], [[1, 1]], 0.9, 0.9)


# id, rewards, values, mask, gamma, lambda, advantages. B07: the critic's values on padding (50, -70) are
# not read. B08: tokens that the policy did not write (a tool's text) lie between trainable ones.
MASKED_CASES = [
    ("B07", [[0, 0, 2, 0, 0]], [[1, 1, 1, 50, -70]], [[1, 1, 1, 0, 0]], 1.0, 0.5, [[0.25, 0.5, 1.0, 0, 0]]),
    ("B08", [[0, 0, 0, 1]], [[0.5, 9, 9, 0.25]], [[1, 0, 0, 1]], 1.0, 0.5, [[0.125, 0, 0, 0.75]]),
]


@pytest.mark.parametrize("case", MASKED_CASES, ids=[case[0] for case in MASKED_CASES])
def test_masked_gae_by_hand(case):
    *arguments, expected = case[1:]
    np.testing.assert_allclose(masked_gae(*arguments), expected, atol=1e-6)


def test_masked_gae_returns_B07():
    _, rewards, values, mask, gamma, lam, _ = MASKED_CASES[0]
    returns = (masked_gae(rewards, values, mask, gamma, lam) + torch.tensor(values)) * torch.tensor(mask)
    np.testing.assert_allclose(returns, [[1.25, 1.5, 2.0, 0, 0]], atol=1e-6)


@PROPERTY
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), steps=st.integers(1, 9),
       density=st.floats(0, 1), gamma=st.floats(0, 1), lam=st.floats(0, 1))  # fmt: skip
def test_masked_gae_is_gae_of_the_trainable_tokens(seed, rows, steps, density, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, rows, steps))
    mask = rng.random((rows, steps)) < density
    expected = np.zeros((rows, steps))
    for b in range(rows):
        r, v = rewards[b, mask[b]][:, None], values[b, mask[b]][:, None]
        end = np.zeros(r.shape, bool)
        end[-1:] = True
        following = np.concatenate([v[1:], np.full((min(1, len(v)), 1), 77.0)])
        packed = gae_by_double_sum(r, v, following, end, ~np.ones_like(end), gamma, lam, np.ones_like(end))
        expected[b, mask[b]] = packed[:, 0]
    rewards[~mask], values[~mask] = np.nan, np.inf  # never read
    np.testing.assert_allclose(masked_gae(rewards, values, mask, gamma, lam), expected, atol=1e-12)


def test_discounted_returns_stop_at_each_end_B16():
    np.testing.assert_allclose(discounted_returns([1, 1, 1, 1], [0, 1, 0, 1], 0.5), [1.5, 1, 1.5, 1])


@PROPERTY
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), ends=st.floats(0, 1), gamma=st.floats(0, 1))
def test_discounted_returns_are_the_sum_of_rewards_to_come(seed, steps, ends, gamma):
    rng = np.random.default_rng(seed)
    rewards, dones = rng.normal(size=(steps, 2)), rng.random((steps, 2)) < ends
    expected = np.zeros((steps, 2))
    for n in range(2):
        for t in range(steps):
            stop = next((s for s in range(t, steps) if dones[s, n]), steps - 1)
            expected[t, n] = sum(gamma ** (s - t) * rewards[s, n] for s in range(t, stop + 1))
    np.testing.assert_allclose(discounted_returns(rewards, dones, gamma), expected, atol=1e-12)


def test_discounted_returns_of_masked_steps_are_zero():
    result = discounted_returns([1.0, 1.0, float("nan"), 1.0], [0, 1, 0, 0], 0.5, [1, 1, 0, 1])
    assert result.tolist() == [1.5, 1.0, 0.0, 1.0]


TOKENS = {
    "logp": [[-1, -2, -0.5, -9]], "ref_logp": [[-1.5, -1, -0.5, -1]], "mask": [[1, 1, 1, 0]],
    "score": [2.0], "beta": 0.1,
}  # fmt: skip


def test_token_rewards_penalise_each_token_and_score_the_last_B17():
    rewards = token_rewards(**TOKENS)
    np.testing.assert_allclose(rewards, [[-0.05, 0.1, 2.0, 0.0]], atol=1e-6)
    assert rewards.sum().item() == pytest.approx(2.05)


def test_token_rewards_of_odd_rows():
    zeros = torch.zeros(3, 3)
    mask = [[0, 0, 0], [0, 1, 0], [1, 0, 1]]
    logp = torch.where(torch.tensor(mask).bool(), 0.0, torch.nan)
    rewards = token_rewards(logp, zeros, mask, [5, 6, 7], 0.3)
    assert rewards.tolist() == [[0, 0, 0], [0, 6, 0], [0, 0, 7]]


def test_kl_in_reward_by_hand():
    rewards = kl_in_reward([1.0, 2.0], [-1.0, -2.0], [-1.5, -1.0], 0.2)
    np.testing.assert_allclose(rewards, [0.9, 2.2], atol=1e-6)
    with pytest.raises(ValueError, match="ref_logp"):
        kl_in_reward([1.0, 2.0], [-1.0, -2.0], [-1.5], 0.2)
    logp = torch.zeros(2, requires_grad=True)
    assert not kl_in_reward([1.0, 2.0], logp, [0.0, 0.0], 0.2).requires_grad


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [(0, [-1.3416408, -0.4472136, 0.4472136, 1.3416408]), (1, [-1.161895, -0.3872983, 0.3872983, 1.161895])],
    ids=["C08-population", "C08-sample"],
)
def test_which_deviation_whitens(ddof, expected):
    np.testing.assert_allclose(whiten([1, 2, 3, 4], ddof=ddof, eps=0), expected, atol=1e-6)


def test_constants_whiten_to_zero_C09():
    assert whiten([5, 5, 5]).tolist() == [0, 0, 0]
    # The mean of these is not exact: a deviation computed from it is tiny and not zero.
    assert whiten(torch.full((7,), 0.1), eps=0.0).tolist() == [0] * 7
    assert whiten([5, 5, 5], shift_mean=False).tolist() == [5, 5, 5]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]], ids=["C11-none", "C11-one"])
def test_whitening_nothing_or_one_value_is_finite(mask, ddof):
    assert whiten([5, 7, 9], mask, ddof=ddof).tolist() == [0, 0, 0]
    result = whiten([5, 7, 9], mask, ddof=ddof, shift_mean=False)
    assert result.tolist() == [0, 7 * mask[1], 0]


def test_whitening_without_shift_only_scales_C12():
    assert whiten([2, 6], [1, 1], shift_mean=False, eps=0).tolist() == [1, 3]


@PROPERTY
@given(seed=st.integers(0, 10_000), n=st.integers(3, 20), ddof=st.integers(0, 1), shift=st.booleans(),
       density=st.floats(0.3, 1))  # fmt: skip
def test_whitening_is_numpys(seed, n, ddof, shift, density):
    rng = np.random.default_rng(seed)
    x, mask = 3.0 + 2.0 * rng.normal(size=(n, 2)), rng.random((n, 2)) < density
    if mask.sum() < 2:
        mask[:2] = True
    valid = x[mask]
    expected = np.where(mask, (x - shift * valid.mean()) / (valid.std(ddof=ddof) + 0.01), 0.0)
    x[~mask] = np.nan
    np.testing.assert_allclose(whiten(x, mask, shift_mean=shift, ddof=ddof, eps=0.01), expected, atol=1e-10)


def test_whitening_names_a_mask_of_another_shape():
    with pytest.raises(ValueError, match=r"mask.*\(2,\)"):
        whiten([1.0, 2.0, 3.0], [1, 0])
    assert whiten([]).shape == (0,)
