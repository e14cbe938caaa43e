"""Exact values against sums over all groups and against gradient flow; simulations against the agents."""

import itertools
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from scipy.integrate import quad

import agents
import estimator_lab as script
from agents.kl import bias_corrected, k2, k3
from agents.rollout import concatenate
from common import lab_gradient as gradient
from common import lab_length as length
from common import lab_theory as theory
from common.files import to_plain
from common.lab_arms import ARMS, resting_point
from common.lab_training import training_job
from common.runner import Outcome
from llmgym import AnswerPool

BINARY = AnswerPool(
    np.array([[1, 0, 1, 0], [0, 0, 0, 1.0]]), np.zeros((2, 4)), [[0.4, 0.3, 0.1, 0.2], [0.5, 0.2, 0.2, 0.1]]
)
REAL = AnswerPool(
    np.array([[1.0, -2, 0.7], [0.1, 0.2, 3]]), np.zeros((2, 3)), [[0.5, 0.2, 0.3], [0.3, 0.6, 0.1]]
)
ARM = {arm.name: arm for arm in ARMS}


def all_groups(pool: AnswerPool, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every batch of one group a prompt, [n, P, G], and its probability under the reference."""
    groups = list(itertools.product(range(pool.n_answers), repeat=group_size))
    actions = np.array(list(itertools.product(groups, repeat=pool.n_prompts)))
    picked = pool.ref_probs[np.arange(pool.n_prompts)[:, None], actions]
    return actions, picked.prod(axis=(1, 2))


@pytest.mark.parametrize("pool, size", [(BINARY, 2), (BINARY, 3), (REAL, 2), (REAL, 3), (REAL, 4)])
@pytest.mark.parametrize("estimator", theory.ESTIMATORS)
def test_exact_moments_are_those_over_all_batches(estimator, pool, size):
    exact = theory.moments(estimator, pool, pool.ref_probs, size)
    if not exact.exact:
        return  # only a limit is claimed
    actions, weights = all_groups(pool, size)
    advantages = gradient.advantages(estimator, pool, pool.ref_probs, actions)
    estimates = gradient.gradients(pool.ref_probs, actions, advantages)
    mean = np.einsum("n,npa->pa", weights, estimates)
    np.testing.assert_allclose(exact.mean, mean, atol=1e-10)
    variance = np.einsum("n,npa->p", weights, (estimates - mean) ** 2)
    np.testing.assert_allclose(exact.variance, variance, rtol=1e-8)


def test_only_these_are_limits():
    limits = {
        (e, name) for e in theory.ESTIMATORS for name, pool in (("binary", BINARY), ("real", REAL))
        if not theory.moments(e, pool, pool.ref_probs, 2).exact
    }  # fmt: skip
    whole_batch = {(e, p) for e in ("REINFORCE, batch mean", "PPO, whitened") for p in ("binary", "real")}
    assert limits == whole_batch | {("GRPO, batch std", "real")}


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_weight_of_a_prompt_is_that_of_its_exact_gradient(size):
    pool = theory.binary_pool(16, 8, seed=1)
    exact = theory.moments("GRPO, group std", pool, pool.ref_probs, size).mean
    rates = (pool.ref_probs * pool.proxy).sum(axis=1)
    weighted = theory.prompt_weight(rates, size)[:, None] * theory.reward_gradient(pool, pool.ref_probs)
    np.testing.assert_allclose(exact, weighted, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64, None])
def test_the_objective_has_these_weights_as_derivative(size):
    for p in (0.05, 0.3, 0.8):
        integral = quad(lambda t: float(theory.prompt_weight(np.array(t), size)), 0, p)[0]
        assert float(theory.prompt_objective(np.array(p), size)) == pytest.approx(integral, rel=1e-6)


def test_groups_of_two_and_three_keep_the_objective_and_large_ones_tend_to_the_arcsine():
    rates = np.linspace(0.02, 0.98, 25)
    for size in (2, 3):
        assert np.ptp(theory.prompt_weight(rates, size)) < 1e-12
    assert np.ptp(theory.prompt_weight(rates, 4)) > 0.05
    limit = theory.prompt_weight(rates, None)
    np.testing.assert_allclose(theory.prompt_weight(rates, 20_000), limit, rtol=2e-3)
    # No weight exceeds that of a prompt that is never solved, (G - 1) / sqrt(G).
    assert theory.prompt_weight(np.array(0.0), 16) == pytest.approx(15 / 4, rel=1e-3)


def test_groups_of_two_see_only_the_order_of_real_rewards():
    # The gradient of the probability of beating a frozen opponent: pi_k (P(r_k wins) - P(r_k loses)) / 2 * c.
    mean = theory.moments("GRPO, group std", REAL, REAL.ref_probs, 2).mean
    for pi, r, row in zip(REAL.ref_probs, REAL.proxy, mean, strict=True):
        wins = pi * (np.sign(r[:, None] - r[None, :]) @ pi)
        ratio = row / wins
        np.testing.assert_allclose(ratio, 0.5 * np.sqrt(2), rtol=1e-2)  # but for epsilon in the deviation


def test_pools_without_equal_numbers_of_rewards_are_refused():
    pool = AnswerPool([[0, 1.0], [1, 1]], np.zeros((2, 2)), np.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"prompts have \[1, 2\] distinct rewards"):
        theory.moments("RLOO", pool, pool.ref_probs, 2)


SIZE, ROWS = 4, 16
AGENTS = {
    "REINFORCE": ("reinforce", {"baseline": "none", "gamma": 1.0}),
    "REINFORCE, batch mean": ("reinforce", {"baseline": "batch_mean", "gamma": 1.0}),
    "PPO, whitened": ("ppo", {"n_steps": 1, "batch_size": ROWS * SIZE, "vf_coef": 0.0}),
    "ReMax": ("remax", {"n_groups": ROWS, "num_generations": SIZE}),
    "RLOO": ("rloo", {"n_groups": ROWS, "num_generations": SIZE}),
    "GRPO, no std": ("grpo", {"n_groups": ROWS, "num_generations": SIZE, "scale_rewards": "none"}),
    "GRPO, batch std": ("grpo", {"n_groups": ROWS, "num_generations": SIZE, "scale_rewards": "batch"}),
    "GRPO, group std": ("grpo", {"n_groups": ROWS, "num_generations": SIZE, "scale_rewards": "group"}),
}


@pytest.mark.parametrize("estimator", theory.ESTIMATORS)
@pytest.mark.parametrize("kind", gradient.POOLS)
def test_the_simulation_is_the_agents_own_gradient(estimator, kind):
    pool = theory.binary_pool(ROWS, 8, 0) if kind == "binary" else AnswerPool.random(ROWS, 8, seed=0)
    name, config = AGENTS[estimator]
    env = gym.make_vec("llmgym:AnswerPool-v0", num_envs=ROWS * SIZE, pool=pool)
    agent = agents.make(name, env, seed=3, **config)
    with torch.no_grad():
        agent.policy.values.copy_(torch.from_numpy((pool.ref_probs * pool.proxy).sum(axis=1)))
    tasks = np.arange(ROWS)
    groups = tasks.repeat(SIZE)
    rollout = agent.collector.collect_tasks(groups, groups)
    actions = rollout.actions.flatten().numpy().reshape(1, ROWS, SIZE)
    if name == "remax":
        rollout = concatenate([rollout, agent.collector.collect_tasks(tasks, -2 - tasks, greedy=True)])
    batch = agent.prepare(rollout)
    parts = list(agent.minibatches(batch)) if name == "ppo" else [batch]  # PPO whitens there
    (found,) = torch.autograd.grad(agent.loss(parts[0]).total, agent.policy.logits)
    advantages = gradient.advantages(estimator, pool, pool.ref_probs, actions)
    simulated = gradient.gradients(pool.ref_probs, actions, advantages)[0] / ROWS
    np.testing.assert_allclose(-found.numpy(), simulated, atol=2e-6)


@pytest.mark.parametrize("kind", gradient.POOLS)
def test_measured_values_within_four_standard_errors(kind):
    pool = gradient.make_pool(kind)
    rng = np.random.default_rng(5)
    batches = [gradient.sample_actions(pool.ref_probs, 4, 12, rng) for _ in range(40)]
    for estimator in theory.ESTIMATORS:
        result = gradient.measure(kind, pool, estimator, 4, batches)
        compared = [getattr(result, name) for name in script.COMPARED]
        if result.exact:
            assert all(c.agrees for c in compared), estimator
        else:  # a batch of 256: its mean and deviation are those of the population but for a few percent
            assert result.length.measured == pytest.approx(result.length.analytic, rel=0.1)
            assert result.variance.measured == pytest.approx(result.variance.analytic, rel=0.1)
        if estimator == "GRPO, no std":
            assert result.length.analytic == pytest.approx(0.75)
        if estimator == "GRPO, group std" and kind == "real":
            cosine = result.cosine
            upper = cosine.measured + 4 * cosine.standard_error
            assert cosine.analytic < 0.92 and upper < 1


@pytest.mark.parametrize(
    "name", [a.name for a in ARMS if a.kl_in == "loss" and a.name != "k1, no std" and "batch" not in a.name]
)
def test_the_expected_gradient_is_zero_at_the_resting_point(name):
    # By brute force over all groups: the package's loss, differentiated, has mean zero there.
    arm, beta = ARM[name], 2.0
    pool = AnswerPool([[1.0, 0, 0]], [[0.0, 0, 0]], [[0.2, 0.5, 0.3]])
    size = 2 if arm.group_size == 2 else 4
    config = arm.settings | {"num_generations": size, "n_groups": 1, "policy": "table", "beta": beta}
    env = gym.make_vec("llmgym:AnswerPool-v0", num_envs=size, pool=pool)
    agent = agents.make("grpo", env, seed=0, **(config | {"dynamic_sampling": False}))
    small = type(arm)(arm.name, arm.agent, arm.estimator, size, arm.config)
    rest = resting_point(small, pool, beta)
    assert pool.kl(rest, pool.ref_probs) > 1e-3  # it has left the reference
    with torch.no_grad():
        agent.policy.logits.copy_(torch.log(torch.from_numpy(rest)))
    rollout = agent.collector.collect_tasks(np.zeros(size, int), np.zeros(size, int))
    total, kept = np.zeros(3), 0.0
    for group in itertools.product(range(3), repeat=size):
        actions = np.array(group)
        rewards = torch.tensor(pool.proxy[0, actions], dtype=torch.float32)
        if arm.config.get("dynamic_sampling") and bool((rewards == rewards[0]).all()):
            continue
        rollout.actions[0] = torch.from_numpy(actions)
        rollout.rewards[0] = rewards
        rollout.episodes.returns[:] = rewards.numpy()
        rollout.log_probs[0] = torch.log(torch.tensor(rest[0, actions]))
        assert rollout.ref_log_probs is not None
        rollout.ref_log_probs[0] = torch.log(torch.tensor(pool.ref_probs[0, actions]))
        (found,) = torch.autograd.grad(agent.loss(agent.prepare(rollout)).total, agent.policy.logits)
        total += rest[0, actions].prod() * found[0].numpy()
        kept += rest[0, actions].prod()
    np.testing.assert_allclose(total / kept, 0.0, atol=2e-5)


def test_resting_points_that_are_known():
    pool, beta = gradient.make_pool("binary"), 0.3
    for arm in ARMS:
        if arm.kl_in == "reward":
            np.testing.assert_array_equal(resting_point(arm, pool, beta), pool.optimal_policy(beta))
    # The own reward in the mean of two halves the reward's gradient: the optimum for twice beta.
    for name, size in (("k2, no std, G = 2", 2), ("k2, no std", 8), ("k1 with ratio, no std", 8)):
        rest = resting_point(ARM[name], pool, beta)
        np.testing.assert_allclose(rest, pool.optimal_policy(beta / (1 - 1 / size)), atol=1e-9)
    for name in ("k1, no std", "k2, batch std"):
        assert pool.expected(resting_point(ARM[name], pool, beta), "proxy") == pytest.approx(1.0)


def test_k3_with_the_ratio_has_the_gradient_of_k2_on_policy():
    logp = torch.log(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).requires_grad_()
    ref = torch.log(torch.tensor([0.3, 0.4, 0.2], dtype=torch.float64))
    (of_k2,) = torch.autograd.grad(k2(logp, ref).sum(), logp)
    (of_k3,) = torch.autograd.grad(bias_corrected(k3(logp, ref), logp, logp.detach()).sum(), logp)
    torch.testing.assert_close(of_k2, of_k3)


def test_training_ends_near_the_resting_point(tmp_path):
    config = {"seed": 0, "beta": 0.3, "learning_rate": 0.2, "answers": 61_440}
    near = training_job(config | {"arm": "RLOO"}, tmp_path)
    assert near["updates"] == 120 and near["answers"] == 61_440 and near["kl_optimum"] < 0.01
    held = training_job(config | {"arm": "k2, no std, G = 2"}, tmp_path)
    assert held["kl_rest"] < 0.03 < 0.1 < held["kl_optimum"]  # at rest, and that is not the optimum


@pytest.mark.parametrize("stop", [0.1, 0.3, 0.6])
def test_exact_length_gradients(stop):
    # dE[r] by finite differences in theta; of "grpo" that of E[(r - b) / L] with b held fixed.
    p = length.length_probabilities
    assert p(stop).sum() == pytest.approx(1.0)
    theta, h = np.log(stop / (1 - stop)), 1e-5
    low, high = (1 / (1 + np.exp(-theta - step)) for step in (-h, h))
    slope = (length.expected_reward(high) - length.expected_reward(low)) / (2 * h)
    centred = (length.PASS_RATES - length.expected_reward(stop)) / length.LENGTHS
    per_token = (p(high) - p(low)) @ centred / (2 * h) * length.mean_length(stop)
    for kind, expected in (("dr_grpo", slope), ("dapo", slope), ("grpo", per_token)):
        assert length.exact_gradient(kind, stop) == pytest.approx(expected, abs=1e-7)


def test_measured_length_gradients_and_where_they_rest():
    for result in length.measure_lengths(60, 0, (0.12, 0.3)):
        assert result.gradient.agrees, result
    best = np.linspace(0.05, 0.6, 2_000)
    top = best[np.argmax([length.expected_reward(q) for q in best])]
    assert length.resting_stop("dr_grpo") == length.resting_stop("dapo") == pytest.approx(top, abs=1e-3)
    assert length.mean_length(length.resting_stop("grpo")) > 1.5 * length.mean_length(top)


@pytest.mark.parametrize(
    "change, message",
    [({"seeds": 1}, "--seeds is 1"), ({"answers": 100}, "--answers is 100"),
     ({"group_sizes": (1, 4)}, r"--group-sizes (1, 4)"), ({"beta": 0.0}, "--beta is 0.0"),
     ({"learning_rate": np.nan}, "--learning-rate is nan")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    assert script.main(script.Args(**change)) == 2
    assert message in capsys.readouterr().out


def in_process(function, jobs, out, workers, title, console):
    """`run_jobs` without processes, whose start costs more than these jobs."""
    return [Outcome(j, out / j.name, json.loads(json.dumps(to_plain(function(j.config, out))))) for j in jobs]


def test_the_script_end_to_end(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(script, "run_jobs", in_process)
    options = {"--gradient-answers": "20000", "--answers": "1024", "--length-batches": "2"}
    command = ["--quick", "--seeds", "2", "--out", str(tmp_path), "--group-sizes", "2", "8"]
    args = tyro.cli(script.Args, args=[*command, *itertools.chain.from_iterable(options.items())])
    assert script.main(args) == 0
    assert "Groups of 8 divided by their deviation" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["name"] for row in summary["table"]] == [arm.name for arm in ARMS]
    assert len(summary["gradients"]) == 2 * 2 * len(theory.ESTIMATORS)
    for row in summary["table"]:
        assert len(row["runs"]) == 2 and row["kl_optimum"]["n"] == 2
        assert (row["binary"] is None) == (row["kl_in"] == "loss" or row["name"] == "RLOO, G = 64")
    for result in summary["gradients"]:
        for name in script.COMPARED:
            assert set(result[name]) == {"analytic", "measured", "standard_error", "z"}
    assert (tmp_path / "estimator_lab.png").stat().st_size > 50_000
    assert (tmp_path / "table.csv").read_text().count("\n") == 1 + len(ARMS)
    assert (tmp_path / "gradients.csv").exists()
