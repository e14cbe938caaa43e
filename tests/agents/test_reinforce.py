"""REINFORCE: exact expectations over a small pool, its baselines, learning."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from worlds import POOL, Identity, ascent_direction, enumeration, parameters, sync

from agents.advantages import discounted_returns
from agents.policies import TablePolicy
from agents.reinforce import Reinforce
from llmgym import AnswerPool


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# --- exact expectations ---


@pytest.mark.parametrize("baseline", ["none", "batch_mean", "value"])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_expected_gradient_is_the_pools_policy_gradient(baseline, beta):
    """Whatever the baseline: here the batch is the whole distribution, so its mean is a constant."""
    agent, logits = enumeration(lambda env: Reinforce(env, baseline=baseline, beta=beta))
    agent.policy.values.data = torch.tensor([0.3, -1.2])
    batch = agent.prepare(agent.collect())
    np.testing.assert_allclose(ascent_direction(agent, batch), POOL.policy_gradient(logits, beta), atol=1e-6)


@pytest.mark.parametrize(("baseline", "factor"), [("none", 1.0), ("batch_mean", 1 / 2), ("value", 1.0)])
def test_the_batch_mean_shrinks_the_expected_gradient_by_1_over_B(baseline, factor):
    """All 9 pairs of actions of two rows, each with its probability."""
    pool = AnswerPool.random(1, 3, seed=4)
    probabilities = np.array([0.2, 0.5, 0.3])
    expected = np.zeros((1, 3))
    for pair in itertools.product(range(3), repeat=2):
        env = gym.make_vec("AnswerPool-v0", num_envs=2, pool=pool)
        agent = Reinforce(env, baseline=baseline, beta=0.4)
        agent.policy.logits.data = torch.tensor(np.log(probabilities)[None], dtype=torch.float32)
        agent.policy.values.data = torch.tensor([0.8])
        agent.policy.sample = lambda observations, generator, pair=pair: torch.tensor(pair)
        gradient = ascent_direction(agent, agent.prepare(agent.collect()))
        expected += probabilities[pair[0]] * probabilities[pair[1]] * gradient
    exact = pool.policy_gradient(np.log(probabilities)[None], 0.4)
    np.testing.assert_allclose(expected, factor * exact, atol=1e-6)


# --- what is credited to an action ---


@pytest.mark.parametrize("baseline", ["none", "batch_mean", "value"])
def test_advantages_are_returns_less_the_baseline(baseline):
    agent = Reinforce(sync("CartPole-v1", 3), seed=0, n_episodes=2, gamma=0.9, baseline=baseline)
    rollout = agent.collect()
    batch = agent.prepare(rollout)
    assert rollout.episodes.lengths.sum() == rollout.n_steps == len(batch)
    assert len(rollout.episodes.lengths) == 6
    returns = rollout.flat(
        discounted_returns(rollout.rewards, rollout.terminated | rollout.truncated, 0.9, rollout.mask)
    )
    np.testing.assert_allclose(batch.returns, returns, rtol=1e-5)
    # CartPole pays 1 a step: the return of the first step is (1 - 0.9^L) / (1 - 0.9).
    first = (1 - 0.9 ** rollout.episodes.lengths) / 0.1
    assert np.abs(returns.numpy() - first[:, None]).min(axis=1).max() < 1e-4
    subtracted = {"none": 0.0, "batch_mean": returns.mean(), "value": batch.old_values}[baseline]
    np.testing.assert_allclose(batch.advantages, returns - subtracted, atol=1e-4)


def test_only_the_critic_bootstraps_a_truncated_episode():
    def returns(baseline):
        env = SyncVectorEnv([Identity])
        agent = Reinforce(env, seed=0, baseline=baseline, gamma=0.5, policy=TablePolicy(5, 5))
        agent.policy.values.data = torch.full((5,), 8.0)
        return agent.prepare(agent.collect()).returns[-1].item()

    assert returns("none") in (0.0, 1.0)
    assert returns("value") in (4.0, 5.0)


def test_normalised_advantages():
    agent = Reinforce(sync("CartPole-v1", 3), seed=0, normalize_advantage=True)
    advantages = agent.prepare(agent.collect()).advantages
    assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
    assert advantages.std().item() == pytest.approx(1, abs=1e-4)


def test_the_loss_adds_up_its_terms():
    config = {"ent_coef": 0.3, "vf_coef": 0.7}
    agent = Reinforce(SyncVectorEnv([Identity] * 2), seed=0, **config)
    batch = agent.prepare(agent.collect())
    terms = agent.loss(batch)
    policy = -(batch.old_log_probs * batch.advantages).mean().item()
    value = (batch.old_values - batch.returns).square().mean().item()
    assert terms.policy.item() == pytest.approx(policy, rel=1e-5)
    assert terms.value.item() == pytest.approx(value, rel=1e-5)
    assert terms.entropy.item() == pytest.approx(np.log(5), rel=1e-5)
    assert terms.total.item() == pytest.approx(policy + 0.7 * value - 0.3 * np.log(5), rel=1e-5)
    assert (terms.ratio - 1).abs().max() <= 1e-5


def test_without_a_critic_the_values_are_not_trained():
    agent = Reinforce(SyncVectorEnv([Identity] * 2), seed=0, baseline="batch_mean")
    agent.learn(200)
    assert (agent.policy.values == 0).all() and (agent.policy.logits != 0).any()


# --- learning ---


@pytest.mark.parametrize(
    ("baseline", "policy"), [("value", "table"), ("value", "mlp"), ("batch_mean", "table")]
)
def test_the_identity_environment_is_solved(baseline, policy):
    agent = Reinforce(SyncVectorEnv([Identity] * 8), seed=0, gamma=0.0, baseline=baseline, policy=policy,
                      learning_rate=0.1 if policy == "table" else 0.02)  # fmt: skip
    agent.learn(20_000)
    assert agent.predict(np.arange(5), deterministic=True)[0].tolist() == [0, 1, 2, 3, 4]
    assert np.diag(agent.action_probabilities(np.arange(5))).min() > 0.9


def test_kl_in_the_reward_leads_to_the_closed_form():
    pool = AnswerPool.random(2, 5, seed=4)
    env = gym.make_vec("AnswerPool-v0", num_envs=512, pool=pool)
    agent = Reinforce(env, seed=0, beta=0.5, learning_rate="lin_0.1", max_grad_norm=None)
    agent.learn(512 * 400)
    policy = agent.action_probabilities(np.arange(2))
    assert pool.kl(policy, pool.optimal_policy(0.5)) < 0.003
    assert pool.kl(pool.ref_probs, pool.optimal_policy(0.5)) > 0.1


def test_equal_seeds_give_equal_runs():
    def run(seed):
        return parameters(Reinforce(sync("CartPole-v1"), seed=seed).learn(500))

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_total_timesteps_counts_whole_episodes():
    agent = Reinforce(SyncVectorEnv([Identity] * 2), seed=0, n_episodes=3)
    assert agent.learn(100) is agent
    assert agent.num_timesteps == 120 and agent.n_updates == 1  # 2 environments, 3 episodes of 20 steps
    agent.learn(121)
    assert agent.num_timesteps == 120 + 240 and agent.n_updates == 3
    rates = []
    agent = Reinforce(SyncVectorEnv([Identity]), learning_rate="lin_0.4")
    agent.learn(80, callback=lambda a: rates.append(a.optimizer.param_groups[0]["lr"]))
    np.testing.assert_allclose(rates, [0.3, 0.2, 0.1, 0.0])


def test_a_stale_rollout_is_refused():
    agent = Reinforce(SyncVectorEnv([Identity]), seed=0)
    rollout = agent.collect()
    agent.update(rollout)
    with pytest.raises(ValueError, match="policy version 0, the policy is at version 1"):
        agent.update(rollout)
