"""AnswerPool's exact methods against brute force, finite differences, autograd and hand sums."""

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, rel_entr, softmax

from llmgym import AnswerPool

POOL = AnswerPool.random(n_prompts=3, n_answers=5, seed=11)


def random_policy(pool: AnswerPool, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(pool.n_answers), pool.n_prompts)


# --- the default pool -------------------------------------------------------------------------


def test_default_pool_has_the_published_figures():
    pool = AnswerPool.default()
    assert (pool.n_prompts, pool.n_answers) == (1, 200)
    assert pool.expected(pool.ref_probs, "proxy") == pytest.approx(-0.12, abs=1e-12)
    assert pool.expected(pool.ref_probs, "gold") == pytest.approx(-0.35, abs=1e-12)
    assert pool.gold[0, pool.proxy[0].argmax()] == pytest.approx(0.66, abs=1e-12)
    assert pool.expected(pool.optimal_policy(0.3), "gold") > 0.9


def test_default_pool_is_plausible():
    pool = AnswerPool.default()
    assert 0.9 < pool.proxy.std() < 1.1
    best, second = np.sort(pool.proxy[0])[[-1, -2]]
    assert best - second > 0.1
    entropy = -(pool.ref_probs * np.log(pool.ref_probs)).sum()
    assert 0.99 * np.log(200) < entropy < np.log(200)
    assert 0.8 < np.corrcoef(pool.proxy[0], pool.gold[0])[0, 1] < 0.95


def test_default_pool_can_be_over_optimised():
    """Gold rises as beta falls, peaks at an interior beta, then falls to 0.66 at beta 0."""
    pool = AnswerPool.default()
    betas = np.concatenate([np.geomspace(10.0, 0.01, 60), [0.0]])
    gold = pool.frontier(betas).gold
    peak = int(gold.argmax())
    assert 0.1 < betas[peak] < 0.5
    assert (np.diff(gold[: peak + 1]) > 0).all()
    assert (np.diff(gold[peak:]) < 1e-12).all()
    assert gold[-1] == pytest.approx(0.66, abs=1e-12)


def test_default_pool_is_the_same_each_time():
    first, second = AnswerPool.default(), AnswerPool.default()
    np.testing.assert_array_equal(first.proxy, second.proxy)
    # These numbers must not drift with NumPy: published results refer to this pool.
    np.testing.assert_allclose(
        first.proxy[0, :3], [0.6639340172, -0.5072062995, 0.4003807670], rtol=0, atol=1e-9
    )
    assert first.proxy[0].argmax() == 163


# --- the optimum ------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0, 5.0])
def test_optimal_policy_is_what_a_numerical_optimiser_finds(beta):
    """BFGS on the objective written as a plain double loop over prompts and answers."""

    def loss(flat: np.ndarray) -> float:
        policy = softmax(flat.reshape(3, 5), axis=1)
        total = 0.0
        for x in range(3):
            for a in range(5):
                kl_term = np.log(policy[x, a] / POOL.ref_probs[x, a])
                total += policy[x, a] * (POOL.proxy[x, a] - beta * kl_term) / 3
        return -total

    found = minimize(loss, np.zeros(15), method="BFGS", options={"gtol": 1e-7})
    policy = softmax(found.x.reshape(3, 5), axis=1)
    np.testing.assert_allclose(POOL.optimal_policy(beta), policy, atol=2e-4)
    assert POOL.objective(POOL.optimal_policy(beta), beta) == pytest.approx(-found.fun, abs=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_no_other_policy_is_better(beta):
    best = POOL.objective(POOL.optimal_policy(beta), beta)
    for seed in range(200):
        mixed = 0.9 * POOL.optimal_policy(beta) + 0.1 * random_policy(POOL, seed)
        assert POOL.objective(mixed, beta) < best
        assert POOL.objective(random_policy(POOL, seed), beta) < best


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_objective_gap_is_beta_times_kl_to_the_optimum(beta):
    optimum = POOL.optimal_policy(beta)
    policy = random_policy(POOL, 0)
    gap = POOL.objective(optimum, beta) - POOL.objective(policy, beta)
    assert gap == pytest.approx(beta * POOL.kl(policy, optimum), rel=1e-9)


def test_optimum_has_value_beta_log_z():
    z = (POOL.ref_probs * np.exp(POOL.proxy / 0.4)).sum(axis=1)
    value = POOL.objective(POOL.optimal_policy(0.4), 0.4)
    assert value == pytest.approx(0.4 * np.log(z).mean(), rel=1e-12)


def test_limits_of_beta():
    arg_max = np.eye(5)[POOL.proxy.argmax(axis=1)]
    np.testing.assert_array_equal(POOL.optimal_policy(0.0), arg_max)
    for tiny in (1e-6, 1e-300, 5e-324):
        np.testing.assert_allclose(POOL.optimal_policy(tiny), arg_max, atol=1e-12)
    np.testing.assert_allclose(POOL.optimal_policy(1e6), POOL.ref_probs, atol=1e-5)
    assert POOL.objective(arg_max, 0.0) == pytest.approx(POOL.proxy.max(axis=1).mean())


def test_ties_share_equally_at_beta_zero():
    pool = AnswerPool(np.array([[1.0, 2.0, 2.0]]), np.zeros((1, 3)), np.array([[0.5, 0.4, 0.1]]))
    np.testing.assert_array_equal(pool.optimal_policy(0.0), [[0.0, 0.5, 0.5]])
    np.testing.assert_allclose(pool.optimal_policy(1e-6), [[0.0, 0.8, 0.2]], atol=1e-12)


# --- KL, expectations, gradient, frontier -----------------------------------------------------


def test_kl_is_the_sum_scipy_makes():
    p, q = random_policy(POOL, 1), random_policy(POOL, 2)
    assert POOL.kl(p, q) == pytest.approx(rel_entr(p, q).sum() / 3, rel=1e-12)
    assert POOL.kl(p, p) == 0.0


def test_kl_with_zeros():
    pool = AnswerPool(np.zeros((1, 2)), np.zeros((1, 2)), np.array([[0.25, 0.75]]))
    one = np.array([[1.0, 0.0]])
    assert pool.kl(one, pool.ref_probs) == pytest.approx(np.log(4.0))
    assert pool.kl(pool.ref_probs, one) == np.inf
    assert pool.kl(one, one) == 0.0


def test_expected_by_hand():
    pool = AnswerPool(
        np.array([[1.0, 3.0], [0.0, 8.0]]), np.array([[0.0, 4.0], [2.0, 2.0]]), np.full((2, 2), 0.5)
    )
    policy = np.array([[0.25, 0.75], [0.5, 0.5]])
    assert pool.expected(policy, "proxy") == pytest.approx((2.5 + 4.0) / 2)
    assert pool.expected(policy, "gold") == pytest.approx((3.0 + 2.0) / 2)


@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0])
def test_policy_gradient_is_the_finite_difference(beta):
    logits = np.random.default_rng(3).normal(size=(3, 5))
    step, numeric = 1e-6, np.zeros((3, 5))
    for index in np.ndindex(3, 5):
        change = np.zeros((3, 5))
        change[index] = step
        up = POOL.objective(softmax(logits + change, axis=1), beta)
        down = POOL.objective(softmax(logits - change, axis=1), beta)
        numeric[index] = (up - down) / (2 * step)
    np.testing.assert_allclose(POOL.policy_gradient(logits, beta), numeric, atol=1e-8)


@pytest.mark.parametrize("pool", [POOL, AnswerPool.default()], ids=["contextual", "default"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0])
def test_policy_gradient_is_autograd(pool, beta):
    logits = torch.randn(
        pool.proxy.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    log_policy = torch.log_softmax(logits, dim=1)
    proxy, ref = (torch.tensor(table) for table in (pool.proxy, pool.ref_probs))
    value = (log_policy.exp() * (proxy - beta * (log_policy - ref.log()))).sum(1).mean()
    (gradient,) = torch.autograd.grad(value, logits)
    ours = pool.policy_gradient(logits.detach().numpy(), beta)
    np.testing.assert_allclose(ours, gradient.numpy(), atol=1e-12)


def test_policy_gradient_vanishes_at_the_optimum():
    logits = np.log(POOL.optimal_policy(0.3))
    np.testing.assert_allclose(POOL.policy_gradient(logits, 0.3), 0.0, atol=1e-14)


def test_policy_gradient_stands_extreme_logits():
    logits = np.array([[1e4, 0.0, -1e4, 5.0, 5.0]] * 3)
    gradient = POOL.policy_gradient(logits, 0.3)
    assert np.isfinite(gradient).all()
    assert np.isfinite(log_softmax(logits, axis=1)).all()


def test_frontier_is_monotone_and_is_made_of_optima():
    betas = [10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.0]
    frontier = AnswerPool.default().frontier(betas)
    assert frontier.beta.tolist() == betas
    assert (np.diff(frontier.kl) > 0).all()
    assert (np.diff(frontier.proxy) > 0).all()
    pool = AnswerPool.default()
    optimum = pool.optimal_policy(0.3)
    assert frontier.kl[3] == pool.kl(optimum, pool.ref_probs)
    assert frontier.gold[3] == pool.expected(optimum, "gold")


def test_contextual_optimum_is_each_prompt_by_itself():
    for x in range(3):
        rows = slice(x, x + 1)
        alone = AnswerPool(POOL.proxy[rows], POOL.gold[rows], POOL.ref_probs[rows])
        np.testing.assert_allclose(
            POOL.optimal_policy(0.3)[x], alone.optimal_policy(0.3)[0], rtol=1e-12
        )


# --- making pools -----------------------------------------------------------------------------


def test_random_pool_follows_its_options():
    pool = AnswerPool.random(40, 500, seed=2, correlation=0.3, ref_spread=0.0)
    assert np.corrcoef(pool.proxy.ravel(), pool.gold.ravel())[0, 1] == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(pool.ref_probs, 1 / 500, rtol=1e-12)
    perfect = AnswerPool.random(2, 3, seed=2, correlation=1.0)
    np.testing.assert_array_equal(perfect.proxy, perfect.gold)
    same, other = (AnswerPool.random(40, 500, seed=s, correlation=0.3) for s in (2, 3))
    np.testing.assert_array_equal(same.proxy, pool.proxy)
    assert not np.array_equal(other.proxy, pool.proxy)


def test_tables_are_read_only_copies():
    proxy = np.zeros((1, 2))
    pool = AnswerPool(proxy, proxy, np.full((1, 2), 0.5))
    proxy[:] = 7.0
    assert pool.proxy.tolist() == [[0.0, 0.0]]
    for same in (pool, pickle.loads(pickle.dumps(pool)), copy.deepcopy(pool)):
        with pytest.raises(ValueError, match="read-only"):
            same.proxy[0, 0] = 1.0
        assert same.ref_probs.tolist() == [[0.5, 0.5]]


GOOD = np.full((2, 3), 1 / 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"proxy": np.zeros(3)}, r"proxy: got shape \(3,\); allowed: \[P, A\]"),
        ({"proxy": np.zeros((0, 3))}, r"proxy: got shape \(0, 3\)"),
        ({"gold": np.zeros((2, 4))}, r"gold: got shape \(2, 4\); allowed: .* \(2, 3\)"),
        ({"ref_probs": GOOD[:1]}, r"ref_probs: got shape \(1, 3\)"),
        (
            {"proxy": [[0, 0, 0], [0, np.nan, 0]]},
            "proxy: row 1, answer 1 has nan; allowed: finite",
        ),
        ({"gold": [[0, 0, np.inf], [0, 0, 0]]}, "gold: row 0, answer 2 has inf"),
        ({"ref_probs": [[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]}, "row 0, answer 2 has 0.0; .*> 0"),
        ({"ref_probs": [[0.5, 0.6, -0.1], [0.2, 0.2, 0.6]]}, "row 0, answer 2 has -0.1"),
        ({"ref_probs": [[0.2, 0.2, 0.6], [0.5, 0.5, 0.5]]}, r"row 1 sums to 1.5; allowed: 1 "),
        ({"ref_probs": GOOD * 1.00001}, "row 0 sums to 1.00001"),
    ],
)
def test_bad_pool_is_refused(fields, message):
    given = {"proxy": np.zeros((2, 3)), "gold": np.zeros((2, 3)), "ref_probs": GOOD, **fields}
    with pytest.raises(ValueError, match=message):
        AnswerPool(**given)


@pytest.mark.parametrize("beta", [-0.1, np.nan, np.inf])
def test_bad_beta_is_refused(beta):
    for call in (
        lambda: POOL.optimal_policy(beta),
        lambda: POOL.objective(POOL.ref_probs, beta),
        lambda: POOL.policy_gradient(np.zeros((3, 5)), beta),
        lambda: POOL.frontier([0.1, beta]),
    ):
        with pytest.raises(ValueError, match=r"beta: got .*; allowed: a finite number >= 0"):
            call()


def test_bad_policies_and_names_are_refused():
    with pytest.raises(ValueError, match=r"policy: got shape \(5,\); allowed: .*\(3, 5\)"):
        POOL.expected(np.full(5, 0.2), "proxy")
    with pytest.raises(ValueError, match="q: row 2 sums to 2"):
        POOL.kl(POOL.ref_probs, POOL.ref_probs * np.array([[1.0], [1.0], [2.0]]))
    with pytest.raises(ValueError, match="p: row 0, answer 0 has nan"):
        POOL.kl(np.full((3, 5), np.nan), POOL.ref_probs)
    with pytest.raises(ValueError, match="logits: row 0, answer 0 has inf"):
        POOL.policy_gradient(np.full((3, 5), np.inf), 0.1)
    with pytest.raises(ValueError, match="reward: got 'golf' .did you mean 'gold'.*'proxy'"):
        POOL.expected(POOL.ref_probs, "golf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_prompts": 0}, "n_prompts: got 0; allowed: an integer >= 1"),
        ({"n_answers": 2.5}, "n_answers: got 2.5"),
        ({"correlation": 1.5}, "correlation: got 1.5; allowed: -1 to 1"),
        ({"correlation": np.nan}, "correlation: got nan"),
        ({"ref_spread": -1.0}, "ref_spread: got -1.0"),
    ],
)
def test_bad_random_pool_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AnswerPool.random(**{"n_prompts": 2, "n_answers": 3, "seed": 0, **options})
