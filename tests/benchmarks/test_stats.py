"""Statistics against hand calculations, enumeration of all resamples, and other libraries."""

import itertools

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm

from common.stats import (
    bootstrap_interval,
    censored_median,
    episodes_to_threshold,
    estimate,
    has_collapsed,
    last_mean,
    moving_mean,
    probability_larger,
    std_after_threshold,
)


def exact_bca(values):
    """BCa interval of the mean from all n**n resamples (Efron and Tibshirani 1993, 14.9-14.15)."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    means = np.array([values[list(rows)].mean() for rows in itertools.product(range(n), repeat=n)])
    below = (means < values.mean()).mean() / 2 + (means <= values.mean()).mean() / 2
    z0 = norm.ppf(below)
    left_out = np.array([np.delete(values, i).mean() for i in range(n)])
    d = left_out.mean() - left_out
    acceleration = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    ends = []
    for tail in (0.025, 0.975):
        z = z0 + norm.ppf(tail)
        ends.append(np.quantile(means, norm.cdf(z0 + z / (1 - acceleration * z))))
    return ends


@pytest.mark.parametrize(
    "values",
    [[1.0, 2.2, 3.1, 4.3, 5.7], [10.0, 11.0, 12.5, 30.0, 14.0], [-3.0, 8.0, 8.5, 9.0, 9.9]],
)
def test_interval_of_the_mean_agrees_with_all_resamples(values):
    found = estimate(values)
    low, high = exact_bca(values)
    assert found.value == pytest.approx(np.mean(values)) and found.n == 5
    # Monte Carlo with 5,000 resamples, on a discrete distribution: a few percent of the width.
    assert [found.low, found.high] == pytest.approx([low, high], abs=0.05 * (high - low))


def test_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    samples = generator.normal(size=(20, 400))  # 400 experiments of 20 runs in one call
    low, high = bootstrap_interval(samples, resamples=500)
    covered = ((low <= 0) & (high >= 0)).mean()
    assert 0.90 <= covered <= 0.97


def test_interval_follows_the_statistic():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0]
    assert estimate(values, np.median).high <= 8.0 < estimate(values, np.mean).high


def test_same_seed_gives_same_interval():
    assert estimate([1.0, 5.0, 2.0]) == estimate([1.0, 5.0, 2.0])


def test_identical_values_have_zero_width():
    found = estimate([0.1] * 7)
    assert found.low == found.value == found.high == pytest.approx(0.1)


def test_too_few_values():
    one = estimate([3.0])
    assert (one.value, one.low, one.high, one.n) == (3.0, None, None, 1)
    none = estimate([None, None])
    assert (none.value, none.low, none.high, none.n) == (None, None, None, 0)
    assert estimate([None, 1.0, 3.0]).value == 2.0


def test_band_treats_each_column_alone():
    values = np.array([[1.0, 7.0], [2.0, 7.0], [4.0, 7.0]])
    low, high = bootstrap_interval(values)
    single_low, single_high = bootstrap_interval(values[:, 0])
    assert low[0] <= 7 / 3 <= high[0] and (low[0], high[0]) == pytest.approx(
        (float(single_low), float(single_high)), abs=0.35
    )
    assert low[1] == high[1] == 7.0


def test_censored_median_counts_never_as_last():
    # Seven runs, two of them never: the 4th of 3 4 5 6 9 never never is 6.
    found = censored_median([9, 3, None, 4, 6, None, 5])
    assert found.value == 6
    # P(median <= k-th) = P(Binomial(7, k/7) >= 4): 0.012, 0.096 for k = 1, 2; symmetric above.
    assert (found.low, found.high) == (4, None)
    assert censored_median([9, 3, 8, 4, 6, 7, 5]).high == 8


def test_censored_median_is_none_when_half_never_arrive():
    assert censored_median([1, None]).value is None
    assert censored_median([None, None, None]) == censored_median([None] * 3)
    assert censored_median([]).n == 0
    assert censored_median([5]).value == 5 and censored_median([5]).low is None


@pytest.mark.parametrize("ties", [False, True])
def test_probability_larger_is_mann_whitney_u(ties):
    generator = np.random.default_rng(0)
    a, b = generator.normal(0.3, 1, 6), generator.normal(0, 1, 8)
    if ties:
        a, b = a.round(), b.round()
    u = mannwhitneyu(a, b).statistic
    assert probability_larger(list(a), list(b)).value == pytest.approx(u / 48)


def test_probability_larger_interval_agrees_with_all_resamples():
    a, b = [1.0, 4.0, 6.0], [0.0, 2.0, 5.0]
    rows = list(itertools.product(range(3), repeat=3))
    wins = np.array([[x > y for y in b] for x in a])
    exact = [wins[np.ix_(i, j)].mean() for i in rows for j in rows]
    found = probability_larger(a, b)
    assert found.value == pytest.approx(6 / 9)
    # The resampled value moves in steps of 1/9.
    assert [found.low, found.high] == pytest.approx(np.quantile(exact, [0.025, 0.975]), abs=1 / 9)


def test_probability_larger_with_never_and_too_few():
    assert probability_larger([None, None], [3, 4]).low == 1.0
    assert probability_larger([None, None], [None, None]).high == 0.5
    assert probability_larger([1.0], [0.0]).low is None
    assert probability_larger([], [0.0]).value is None


def test_moving_mean_is_a_convolution():
    values = np.random.default_rng(0).normal(size=250)
    full = moving_mean(values, 100)
    assert np.isnan(full[:99]).all()
    assert full[99:] == pytest.approx(np.convolve(values, np.full(100, 0.01), "valid"))
    partial = moving_mean(values, 100, partial=True)
    assert partial[99:] == pytest.approx(full[99:])
    assert partial[:3] == pytest.approx([values[0], values[:2].mean(), values[:3].mean()])
    assert len(moving_mean(np.empty(0))) == 0


def test_episodes_to_threshold_by_hand():
    returns = np.array([0.0, 10, 10, 10, 0, 10])
    # Means of three: -, -, 6.67, 10, 6.67, 6.67.
    assert episodes_to_threshold(returns, 6.6, window=3) == 3
    assert episodes_to_threshold(returns, 10.0, window=3) == 4
    assert episodes_to_threshold(returns, 10.1, window=3) is None
    assert episodes_to_threshold(np.full(99, 500.0), 450.0) is None  # no full window yet
    assert episodes_to_threshold(np.full(100, 500.0), 450.0) == 100


def test_std_after_threshold_by_hand():
    returns = np.array([0.0, 10, 10, 10, 0, 4])
    # After episode 4: 0 and 4, with sample standard deviation sqrt(8).
    assert std_after_threshold(returns, 10.0, window=3) == pytest.approx(np.sqrt(8))
    assert std_after_threshold(returns[:5], 10.0, window=3) is None
    assert std_after_threshold(returns, 11.0, window=3) is None


def test_last_mean():
    returns = np.arange(150.0)
    assert last_mean(returns) == pytest.approx(99.5)
    assert last_mean(returns[:10]) == pytest.approx(4.5)
    assert last_mean(np.empty(0)) is None


RANDOM = np.array([12.0, 32.0] * 50)  # mean 22, standard error of a 100-episode mean 1


@pytest.mark.parametrize(
    ("returns", "collapsed"),
    [
        (np.r_[np.full(100, 22.0), np.full(300, 500.0)], False),  # learned and kept it
        (np.r_[np.full(300, 500.0), np.full(100, 200.0)], True),  # keeps 178 of a gain of 478
        (np.r_[np.full(300, 500.0), np.full(100, 270.0)], False),  # keeps 248 of 478
        (np.full(300, 9.4), True),  # stuck below random play
        (np.full(300, 21.0), False),  # no worse than random play, within its noise
        (np.linspace(22.0, 60.0, 300), False),  # slow, but rising
        (np.full(30, 9.4), True),  # fewer episodes than the window
        (np.empty(0), False),
    ],
)
def test_collapse(returns, collapsed):
    assert has_collapsed(returns, RANDOM) is collapsed


def test_collapse_with_negative_returns():
    random_play = np.full(100, -500.0)
    learned = np.r_[np.full(100, -500.0), np.full(100, -90.0)]
    assert not has_collapsed(learned, random_play)
    assert has_collapsed(np.r_[learned, np.full(100, -400.0)], random_play)
