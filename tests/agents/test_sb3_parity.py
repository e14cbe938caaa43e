"""Our PPO's loss and gradient beside Stable-Baselines3's, on the same rollout and the same weights."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO as SB3PPO
from torch.nn import functional as F

from agents.batch import Batch
from agents.policies.mlp import MLPPolicy
from agents.ppo import PPO

SETTINGS = {"n_steps": 64, "batch_size": 64, "ent_coef": 0.01, "vf_coef": 0.5, "clip_range": 0.2}


def trained(env_id: str, **settings: float) -> tuple[SB3PPO, Batch]:
    """An SB3 model after one update, and the rollout of that update as a batch of ours."""
    env = gym.make(env_id)
    model = SB3PPO("MlpPolicy", env, seed=0, device="cpu", **SETTINGS | settings)
    model.learn(64)
    buffer = next(model.rollout_buffer.get())
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    return model, Batch(
        observations=buffer.observations,
        actions=buffer.actions.flatten().long() if discrete else buffer.actions,
        old_log_probs=buffer.old_log_prob,
        ref_log_probs=None,
        advantages=(buffer.advantages - buffer.advantages.mean()) / (buffer.advantages.std() + 1e-8),
        returns=buffer.returns,
        old_values=buffer.old_values,
    )


def copy_weights(model: SB3PPO, policy: MLPPolicy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Put SB3's weights into our policy; pairs of (our gradient's source, SB3's) to compare later."""
    actor, critic = model.policy.mlp_extractor.policy_net, model.policy.mlp_extractor.value_net
    with torch.no_grad():
        for layer, index in enumerate((0, 2)):
            for which, net in enumerate((actor, critic)):
                policy.weights[layer][which] = net[index].weight.T
                policy.biases[layer][which, 0] = net[index].bias
        policy.actor_weight.copy_(model.policy.action_net.weight.T)
        policy.actor_bias.copy_(model.policy.action_net.bias)
        policy.critic_weight.copy_(model.policy.value_net.weight.T)
        policy.critic_bias.copy_(model.policy.value_net.bias)
        if policy.log_std is not None:
            policy.log_std.copy_(model.policy.log_std)
    return [(policy.actor_weight, model.policy.action_net.weight),
            (policy.critic_weight, model.policy.value_net.weight)]  # fmt: skip


def sb3_loss(model: SB3PPO, batch: Batch) -> torch.Tensor:
    """The loss of SB3's ``PPO.train``, from its own policy's ``evaluate_actions``."""
    values, log_prob, entropy = model.policy.evaluate_actions(batch.observations, batch.actions)
    values = values.flatten()
    ratio = torch.exp(log_prob - batch.old_log_probs)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    policy_loss = -torch.min(batch.advantages * ratio, batch.advantages * clipped).mean()
    return policy_loss + 0.5 * F.mse_loss(batch.returns, values) - 0.01 * entropy.mean()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_loss_and_gradient_are_sb3s(env_id):
    model, batch = trained(env_id)
    ours = PPO(gym.make(env_id), seed=1, **SETTINGS)
    pairs = copy_weights(model, ours.policy)
    terms, theirs = ours.loss(batch), sb3_loss(model, batch)
    assert float(terms.total.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6, abs=1e-6)
    # Off the policy that collected: else the clipped branch would be idle and the test blind to it.
    assert float((terms.ratio.detach() - 1).abs().max()) > 1e-3
    mine = torch.autograd.grad(terms.total, [a for a, _ in pairs])
    other = torch.autograd.grad(theirs, [b for _, b in pairs])
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_allclose(a.T.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_the_loss_that_sb3_logs_is_ours_on_its_first_minibatch():
    """Not our transcription of it: the loss that ``PPO.train`` itself computed and logged."""
    # With learning rate 0 the weights stay, so the logged loss can be computed again.
    model, batch = trained("CartPole-v1", n_epochs=1, learning_rate=0.0)
    ours = PPO(gym.make("CartPole-v1"), seed=1, **SETTINGS)
    copy_weights(model, ours.policy)
    logged = model.logger.name_to_value
    terms = ours.loss(batch)
    assert float(terms.total.detach()) == pytest.approx(logged["train/loss"], rel=1e-6, abs=1e-6)
    assert float(terms.value.detach()) == pytest.approx(logged["train/value_loss"], rel=1e-5)
    assert float(terms.entropy.detach()) == pytest.approx(-logged["train/entropy_loss"], rel=1e-5)
