"""Behaviour policies against the SAC actors that they are copied from."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import agents
from offline.behaviour import BehaviourPolicy
from offline.train_behaviour import policy_of


class Arm(gym.Env):
    """Three observations and two actions with bounds that are neither equal nor symmetric."""

    observation_space = Box(-1, 1, (3,), np.float32)
    action_space = Box(np.array([-1, 0], np.float32), np.array([3, 10], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.fixture(scope="module")
def model():
    """An actor whose heads were moved, so that means, deviations and both clamps are far from 0."""
    model = agents.make("sb3:SAC", Arm(), seed=0, policy_kwargs={"net_arch": [16, 8]}, buffer_size=10)
    with torch.no_grad():
        model.policy.actor.mu.weight.mul_(5)
        model.policy.actor.log_std.weight.mul_(200)
    return model


@pytest.fixture(scope="module")
def policy(model):
    return policy_of(model, {"env": "Arm-v0", "steps": 12})


OBSERVATIONS = np.random.default_rng(0).uniform(-3, 3, (2000, 3)).astype(np.float32)


def test_mean_and_deviation_are_those_of_the_actor(model, policy):
    mean, std = policy.distribution(OBSERVATIONS)
    with torch.no_grad():
        expected_mean, log_std, _ = model.policy.actor.get_action_dist_params(torch.from_numpy(OBSERVATIONS))
    assert log_std.min() == -20 and log_std.max() == 2  # both clamps are met
    assert mean.shape == std.shape == (2000, 2) and mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(std, log_std.exp(), rtol=1e-3)


def test_deterministic_actions_are_those_of_the_model(model, policy):
    expected, _ = model.predict(OBSERVATIONS, deterministic=True)
    actions, state = policy.predict(OBSERVATIONS, deterministic=True)
    assert state is None and actions.dtype == np.float32
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)
    one, _ = policy.predict(OBSERVATIONS[7], deterministic=True)
    np.testing.assert_allclose(one, expected[7], rtol=1e-4, atol=1e-4)


def test_drawn_actions_are_of_the_actors_distribution(model, policy):
    """Of 20,000 draws at one observation: the means, and our quantiles, within 5 errors."""
    means, stds = policy.distribution(OBSERVATIONS)
    chosen = ((np.abs(means) < 2) & (stds > 0.05) & (stds < 1)).all(axis=1).argmax()
    mean, std = means[chosen], stds[chosen]
    assert (std > 0.05).all() and (std < 1).all()
    many = np.tile(OBSERVATIONS[chosen], (20_000, 1))
    policy.seed(1)
    ours, _ = policy.predict(many)
    torch.manual_seed(1)
    theirs, _ = model.predict(many)
    for array in (ours, theirs):
        assert (array >= Arm.action_space.low).all() and (array <= Arm.action_space.high).all()
    error = np.sqrt(2 * theirs.var(axis=0) / len(many))
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * error + 1e-6).all()
    # The median action is the squashed mean, the upper quartile that of mean + 0.6745 std.
    span = Arm.action_space.high - Arm.action_space.low
    for z, expected in ((0.0, 0.5), (0.6745, 0.75)):
        quantile = Arm.action_space.low + (np.tanh(mean + z * std) + 1) / 2 * span
        below = (ours <= quantile).mean(axis=0)
        assert (np.abs(below - expected) < 5 * np.sqrt(0.25 / len(many))).all()


def test_equal_seeds_draw_equal_actions(policy):
    def draw(seed):
        policy.seed(seed)
        return np.stack([policy.predict(OBSERVATIONS)[0] for _ in range(2)])

    first = draw(4)
    assert (first == draw(4)).all()
    assert (first != draw(5)).any() and (first[0] != first[1]).any()


def test_a_file_gives_the_same_policy_and_holds_no_pickle(policy, tmp_path):
    path = tmp_path / "policy.npz"
    policy.save(path)
    with np.load(path, allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)
    loaded = BehaviourPolicy.load(path, Arm())
    assert loaded.about == {"env": "Arm-v0", "steps": 12}
    for policy_ in (policy, loaded):
        policy_.seed(3)
    assert (policy.predict(OBSERVATIONS)[0] == loaded.predict(OBSERVATIONS)[0]).all()


def test_a_pickle_is_not_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("exploded").touch, ())

    names = {"weight_0", "bias_0", "low", "high", "about"}
    np.savez(tmp_path / "bomb.npz", **{name: np.array(Bomb(), object) for name in names})
    with pytest.raises(ValueError, match="allow_pickle"):
        BehaviourPolicy.load(tmp_path / "bomb.npz")
    assert not (tmp_path / "exploded").exists()


def test_another_npz_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", weight_0=np.zeros((2, 2)), low=np.zeros(2))
    with pytest.raises(ValueError, match="lacks about, bias_0, high"):
        BehaviourPolicy.load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    "spaces",
    [
        {"observation_space": Box(-1, 1, (4,), np.float32)},
        {"action_space": Box(-1, 1, (3,), np.float32)},
        {"action_space": Discrete(2)},
        {"observation_space": Discrete(3)},
    ],
)
def test_an_environment_with_other_spaces_is_refused(policy, spaces):
    env = Arm()
    policy.check_spaces(env)
    policy.check_spaces(gym.vector.SyncVectorEnv([Arm]))
    for name, space in spaces.items():
        setattr(env, name, space)
    with pytest.raises(ValueError, match="trained on Arm-v0"):
        policy.check_spaces(env)
