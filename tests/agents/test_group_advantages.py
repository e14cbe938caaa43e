"""Advantages within groups, by hand and against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.advantages import equal_groups, greedy_baseline, group_advantages, leave_one_out

NAN = float("nan")
PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)


def one_group(rewards, std="sample", eps=0.0, scale="group"):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), [0] * len(rewards), std, eps, scale)


@pytest.mark.parametrize(
    ("std", "expected"),
    [("population", [1.7320508, -0.5773503, -0.5773503, -0.5773503]), ("sample", [1.5, -0.5, -0.5, -0.5]),
     (None, [0.75, -0.25, -0.25, -0.25])],
    ids=["D01-population", "D01-sample", "D01-no-std"],
)  # fmt: skip
def test_which_deviation_divides(std, expected):
    np.testing.assert_allclose(one_group([1, 0, 0, 0], std), expected, atol=1e-6)


def test_half_right_is_one_deviation_with_the_population():
    assert one_group([1, 1, 0, 0], "population").tolist() == [1, 1, -1, -1]
    np.testing.assert_allclose(one_group([1, 1, 0, 0]), np.array([1, 1, -1, -1]) * np.sqrt(3) / 2)
    # The epsilon is added to the deviation: 0.5 / (0.5 + 0.5).
    assert one_group([1, 1, 0, 0], "population", eps=0.5).tolist() == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize("std", ["population", "sample", None])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_equal_rewards_give_exact_zeros_D02(std, eps):
    result = group_advantages([1, 1, 1, 1, 0, 0, 0, 0], [0] * 4 + [1] * 4, std, eps)
    assert result.tolist() == [0] * 8
    assert leave_one_out([1, 1, 1, 1, 0, 0, 0, 0], [0] * 4 + [1] * 4).tolist() == [0] * 8
    # One such group beside another that has a signal.
    mixed = group_advantages([1.0, 1, 2, 4], [7, 7, 3, 3], std, eps)
    assert mixed[:2].tolist() == [0, 0] and mixed[2] < 0 < mixed[3]


@pytest.mark.parametrize("std", ["population", "sample", None])
def test_equal_rewards_whose_mean_is_rounded_D03(std):
    """The mean of three times 0.1 is not 0.1: without a test for equality all would be -1."""
    rewards = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    assert rewards.sum() / 3 != 0.1
    assert one_group([0.1, 0.1, 0.1], std).tolist() == [0, 0, 0]
    assert leave_one_out(rewards, [0, 0, 0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("std", ["population", "sample", None])
def test_a_group_of_one_has_no_signal_D04(std):
    assert group_advantages([0.7, 0.2], [0, 1], std, 0.0).tolist() == [0, 0]
    assert leave_one_out([0.7, 0.2], [0, 1]).tolist() == [0, 0]


def test_leave_one_out_D09_D10():
    np.testing.assert_allclose(leave_one_out([1, 0, 0, 0], [0] * 4), [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-6)
    assert leave_one_out([3, 1, 5, 5], [0, 0, 1, 1]).tolist() == [2, -2, 0, 0]


def test_greedy_rewards_belong_to_their_group_D11():
    rewards, ids, greedy = [1, 0, 1, 0], [0, 0, 1, 1], [0.5, 0.1]
    expected = [0.5, -0.5, 0.9, -0.1]
    np.testing.assert_allclose(greedy_baseline(rewards, ids, greedy, [0, 1]), expected, atol=1e-6)
    # In whatever order the groups and their greedy answers come.
    shuffled = greedy_baseline([1, 0, 0, 1], [1, 0, 1, 0], [0.1, 0.5], [1, 0])
    np.testing.assert_allclose(shuffled, [0.9, -0.5, -0.1, 0.5], atol=1e-6)
    for greedy_ids in ([0], [0, 0], [0, 2], []):
        with pytest.raises(ValueError, match="each group needs exactly one greedy completion"):
            greedy_baseline(rewards, ids, [0.5] * len(greedy_ids), torch.tensor(greedy_ids, dtype=torch.long))


# --- missing rewards ---


def test_a_missing_reward_is_left_out_of_the_mean_D22():
    """A completion without a trainable token is one whose reward is missing: mean (1 + 3) / 2."""
    assert one_group([NAN, 1, 3], None).tolist() == [0, -1, 1]
    assert one_group([NAN, 1, 3], "population").tolist() == [0, -1, 1]
    np.testing.assert_allclose(one_group([NAN, 1, 3], "sample"), np.array([0, -1, 1]) / np.sqrt(2))
    assert leave_one_out([NAN, 1, 3], [0, 0, 0]).tolist() == [0, -2, 2]
    assert greedy_baseline([NAN, 1, 3], [0, 0, 1], [0.5, NAN], [0, 1]).tolist() == [0, 0.5, 0]


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("std", ["population", "sample", None])
def test_groups_that_were_not_scored_leave_no_trace_D24(std, scale):
    """All of a group missing, or equal: zeros, and the deviation of the batch without the missing."""
    scored = group_advantages([1.0, 0, 4, 2], [0, 0, 1, 1], std, 0.0, scale)
    more = group_advantages([1.0, 0, 4, 2, NAN, NAN], [0, 0, 1, 1, 2, 2], std, 0.0, scale)
    assert more.tolist() == [*scored.tolist(), 0, 0]
    assert group_advantages([NAN, NAN, 5.0], [0, 0, 1], std, 0.0, scale).tolist() == [0, 0, 0]
    assert equal_groups([1.0, 0, NAN, NAN, 5, NAN], [0, 0, 2, 2, 1, 1]).tolist() == [False, True, True]


# --- against plain loops ---


def by_loops(rewards, ids, std, eps, scale):
    result = np.zeros(len(rewards))
    valid = ~np.isnan(rewards)
    ddof = int(std == "sample")
    for i in range(len(rewards)):
        own = rewards[(ids == ids[i]) & valid]
        if not valid[i] or len(own) < 2 or own.max() == own.min():
            continue
        pool = own if scale == "group" else rewards[valid]
        result[i] = (rewards[i] - own.mean()) / (1.0 if std is None else pool.std(ddof=ddof) + eps)
    return result


@PROPERTY
@given(seed=st.integers(0, 10_000), n=st.integers(1, 12), missing=st.floats(0, 0.6),
       std=st.sampled_from(["sample", "population", None]), scale=st.sampled_from(["group", "batch"]),
       eps=st.sampled_from([0.0, 1e-4, 0.1]))  # fmt: skip
def test_group_advantages_are_those_of_the_loops(seed, n, missing, std, scale, eps):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, n) * 0.1
    rewards[rng.random(n) < missing] = np.nan
    ids = rng.integers(-2, 3, n) * 5
    result = group_advantages(rewards, ids, std, eps, scale)
    assert result.dtype == torch.float64 and not result.requires_grad
    np.testing.assert_allclose(result, by_loops(rewards, ids, std, eps, scale), atol=1e-12)

    expected = np.zeros(n)
    for i in range(n):
        others = rewards[(ids == ids[i]) & ~np.isnan(rewards) & (np.arange(n) != i)]
        if len(others) and not np.isnan(rewards[i]):
            expected[i] = rewards[i] - others.mean()
    np.testing.assert_allclose(leave_one_out(rewards, ids), expected, atol=1e-12)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="std='smaple' is unknown; allowed: 'sample', 'population', None"):
        group_advantages([1.0, 2.0], [0, 0], "smaple")
    with pytest.raises(ValueError, match="scale='all' is unknown; allowed: 'group', 'batch'"):
        group_advantages([1.0, 2.0], [0, 0], "sample", scale="all")
    with pytest.raises(ValueError, match=r"group_ids.*\(3,\)"):
        leave_one_out([1.0, 2.0], [0, 0, 1])
    assert group_advantages([], torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert leave_one_out([], torch.zeros(0, dtype=torch.long)).shape == (0,)
