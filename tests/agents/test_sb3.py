"""SB3 and sb3-contrib models as agents, and the KL penalty in their reward."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from agents.sb3 import (
    KLPenaltyVecEnv,
    SB3VecEnv,
    action_probabilities_sb3,
    load_sb3,
    make_sb3,
    sb3_class,
    sb3_config_fields,
    sb3_factory,
)
from llmgym import AnswerPool
from llmgym.vector import AutoresetMode

POOL = AnswerPool.random(3, 6, seed=0)
SMALL_NET = {"net_arch": [32]}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def answer_pool(num_envs: int = 8, **kwargs) -> VectorEnv:
    return gym.make_vec("AnswerPool-v0", num_envs=num_envs, **{"pool": POOL, **kwargs})


def sync(env_id: str, num_envs: int = 2, **kwargs) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make(env_id, **kwargs)] * num_envs)


def parameters(model) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()]).numpy()


class Masked(gym.Env):
    """Two of four actions are allowed, other ones at each step; any other is an error."""

    observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.time = int(self.np_random.integers(4)), 0
        return self.state, {}

    def step(self, action):
        if not self.action_masks()[action]:
            raise AssertionError(f"action {action} is masked in state {self.state}")
        reward, info = float(action == self.state), {"ref_logp": np.log(0.5)}
        self.state, self.time = int(self.np_random.integers(4)), self.time + 1
        return self.state, reward, self.time == 3, False, info

    def action_masks(self):
        mask = np.zeros(4, bool)
        mask[[self.state, (self.state + 1) % 4]] = True
        return mask


class NativeMasked(VectorEnv):
    """The same, native: same-step autoreset, one call of action_masks() for all rows."""

    def __init__(self, num_envs: int):
        self.num_envs, self.rows = num_envs, [Masked() for _ in range(num_envs)]
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.single_action_space = gym.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = self.observation_space

    def reset(self, *, seed=None, options=None):
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        return np.array([r.reset(seed=s)[0] for r, s in zip(self.rows, seeds, strict=True)]), {}

    def step(self, actions):
        steps = [row.step(action) for row, action in zip(self.rows, actions, strict=True)]
        obs, rewards, terminated = (np.array([s[k] for s in steps]) for k in range(3))
        ref_logp, all_rows = np.full(self.num_envs, np.log(0.5)), np.ones(self.num_envs, bool)
        info = {"ref_logp": ref_logp, "_ref_logp": all_rows}
        if terminated.any():  # all rows end together
            info = {"final_obs": obs, "_final_obs": all_rows, "final_info": info}
            obs = np.array([row.reset()[0] for row in self.rows])
        return obs, rewards, terminated, np.zeros_like(terminated), info

    def action_masks(self):
        return np.stack([row.action_masks() for row in self.rows])


SHORT = {"n_steps": 16, "policy_kwargs": SMALL_NET}
PPO_SHORT = SHORT | {"batch_size": 16, "n_epochs": 2}
OFF_POLICY = {
    "learning_starts": 20,
    "batch_size": 16,
    "buffer_size": 500,
    "policy_kwargs": SMALL_NET,
}


@pytest.mark.parametrize(
    "name, make_env, config",
    [
        ("sb3:PPO", lambda: sync("CartPole-v1"), PPO_SHORT),
        ("sb3:PPO", lambda: gym.make_vec("CartPole-v1", num_envs=2), PPO_SHORT),
        ("sb3:PPO", lambda: gym.make("CartPole-v1"), PPO_SHORT),
        ("sb3:PPO", lambda: sync("Pendulum-v1", max_episode_steps=20), PPO_SHORT),
        ("sb3:PPO", answer_pool, PPO_SHORT),
        ("sb3:PPO", lambda: gym.make("AnswerPool-v0"), PPO_SHORT),
        ("sb3:A2C", lambda: sync("CartPole-v1"), SHORT),
        ("sb3:A2C", answer_pool, SHORT),
        ("sb3:DQN", lambda: sync("CartPole-v1"), OFF_POLICY),
        ("sb3:DQN", answer_pool, OFF_POLICY),
        ("sb3:SAC", lambda: sync("Pendulum-v1", max_episode_steps=20), OFF_POLICY),
        ("sb3_contrib:TRPO", lambda: sync("CartPole-v1"), SHORT | {"batch_size": 32}),
        ("sb3_contrib:TRPO", answer_pool, SHORT | {"batch_size": 32}),
        ("sb3_contrib:MaskablePPO", lambda: SyncVectorEnv([Masked] * 2), PPO_SHORT),
        ("sb3_contrib:MaskablePPO", lambda: NativeMasked(2), PPO_SHORT),
        ("sb3_contrib:RecurrentPPO", answer_pool, SHORT | {"batch_size": 32}),
    ],
)
def test_short_runs(name, make_env, config):
    env = make_env()
    model = make_sb3(name, env, seed=0, **config)
    before = parameters(model)
    model.learn(120)
    assert model.num_timesteps >= 120
    assert np.isfinite(parameters(model)).all() and not np.array_equal(before, parameters(model))
    assert model.ep_info_buffer and model.verbose == 0 and model.device.type == "cpu"
    observation, _ = env.reset(seed=0)
    actions, _ = model.predict(observation)
    assert env.action_space.contains(actions)


@pytest.mark.parametrize("name", ["sb3:PPO", "sb3:SAC"])
def test_training_on_a_vector_env_is_training_on_sb3s_own(name):
    def make():
        return gym.make("Pendulum-v1", max_episode_steps=20)

    config = PPO_SHORT if name == "sb3:PPO" else OFF_POLICY
    ours = make_sb3(name, SyncVectorEnv([make] * 2), seed=3, **config).learn(150)
    assert SMALL_NET == {"net_arch": [32]}  # SB3's SAC writes into its policy_kwargs: not into ours
    config = config | {"policy_kwargs": dict(SMALL_NET)}
    theirs = sb3_class(name)("MlpPolicy", make_vec_env(make, 2), seed=3, device="cpu", **config)
    theirs.learn(150)
    np.testing.assert_array_equal(parameters(ours), parameters(theirs))
    assert [e["r"] for e in ours.ep_info_buffer] == pytest.approx(
        [e["r"] for e in theirs.ep_info_buffer], abs=1e-3
    )


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_ppo_solves_the_identity_pool(mode):
    pool = AnswerPool(np.eye(4), np.eye(4), np.full((4, 4), 0.25))
    config = {
        "n_steps": 4,
        "batch_size": 64,
        "learning_rate": "lin_0.01",
        "policy_kwargs": SMALL_NET,
    }
    model = make_sb3("sb3:PPO", answer_pool(32, pool=pool, autoreset_mode=mode), seed=0, **config)
    probabilities = action_probabilities_sb3(model, np.arange(4))
    assert pool.expected(probabilities, "proxy") == pytest.approx(0.25, abs=0.02)
    model.learn(128 * 20)
    assert pool.expected(action_probabilities_sb3(model, np.arange(4)), "proxy") > 0.97
    assert model.predict(np.arange(4), deterministic=True)[0].tolist() == [0, 1, 2, 3]


def test_maskable_ppo_learns_on_a_native_env():
    model = make_sb3(
        "sb3_contrib:MaskablePPO", NativeMasked(8), seed=0, n_steps=24, batch_size=48,
        learning_rate=0.01, policy_kwargs=SMALL_NET,
    ).learn(8 * 24 * 10)  # fmt: skip
    assert np.mean([e["r"] for e in model.ep_info_buffer]) > 2.5  # 1.5 at random, 3 at best


class Rollouts(BaseCallback):
    """Keeps each rollout with the log-probs that the policy of that rollout gives its actions."""

    def __init__(self):
        super().__init__()
        self.env_rewards, self.ref_logp, self.rollouts = [], [], []

    def _on_step(self):
        self.ref_logp.append([info["ref_logp"] for info in self.locals["infos"]])
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        actions = buffer.actions[..., 0].astype(int)  # [T, N]
        observations = buffer.observations.reshape(actions.shape).astype(int)
        with torch.no_grad():
            features = self.model.policy.mlp_extractor(torch.eye(POOL.n_prompts))[0]
            logits = self.model.policy.action_net(features).double().numpy()  # [P, A]
        log_policy = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        by_hand = log_policy[observations, actions]
        raw = POOL.proxy[observations, actions]
        reference = np.log(POOL.ref_probs)[observations, actions]
        self.rollouts.append(
            (buffer.rewards.copy(), buffer.log_probs.copy(), by_hand, raw, reference)
        )


@pytest.mark.parametrize("name", ["sb3:PPO", "sb3:A2C", "sb3_contrib:TRPO"])
def test_penalty_is_the_hand_computation_with_the_stored_log_probs(name):
    config = SHORT | ({} if name == "sb3:A2C" else {"batch_size": 32})
    model = make_sb3(name, answer_pool(), seed=0, beta=0.7, learning_rate=0.02, **config)
    callback = Rollouts()
    model.learn(8 * 16 * 3, callback=callback)
    assert len(callback.rollouts) == 3
    np.testing.assert_allclose(np.concatenate([r[4] for r in callback.rollouts]), callback.ref_logp)
    for rewards, stored, by_hand, raw, reference in callback.rollouts:
        np.testing.assert_allclose(stored, by_hand, atol=1e-5)
        np.testing.assert_allclose(rewards, raw - 0.7 * (stored - reference), atol=1e-6)
        np.testing.assert_allclose(rewards, raw - 0.7 * (by_hand - reference), atol=1e-5)
    # Later policies differ from the first, so a penalty from a stale policy would have shown.
    assert np.abs(callback.rollouts[2][2] - callback.rollouts[0][2]).max() > 0.01
    # Episode statistics are of the environment's own reward.
    last_raw = np.concatenate([r[3].ravel() for r in callback.rollouts])[-100:]
    np.testing.assert_allclose([e["r"] for e in model.ep_info_buffer], last_raw, atol=1e-5)


@pytest.mark.parametrize("make_env", [lambda: SyncVectorEnv([Masked] * 2), lambda: NativeMasked(2)])
def test_penalty_uses_the_masked_distribution(make_env):
    config = PPO_SHORT | {"learning_rate": 0.05, "policy_kwargs": SMALL_NET}
    model = make_sb3("sb3_contrib:MaskablePPO", make_env(), seed=0, beta=1.0, **config)

    class Check(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            b = self.model.rollout_buffer
            states, actions = (
                b.observations.reshape(-1).astype(int),
                b.actions.reshape(-1).astype(int),
            )
            with torch.no_grad():
                pi = self.model.policy
                logits = pi.action_net(pi.mlp_extractor(torch.eye(4))[0]).double().numpy()[states]
            rows = np.arange(len(states))
            allowed = logits[rows, states], logits[rows, (states + 1) % 4]
            by_hand = logits[rows, actions] - np.logaddexp(*allowed)
            expected = (actions == states) - (by_hand - np.log(0.5))
            np.testing.assert_allclose(b.rewards.reshape(-1), expected, atol=1e-5)
            self.checked = getattr(self, "checked", 0) + 1

    callback = Check()
    model.learn(2 * 16 * 3, callback=callback)
    assert callback.checked == 3


def test_ppo_with_the_penalty_reaches_the_closed_form_optimum_and_without_it_does_not():
    optimum, kl = POOL.optimal_policy(1.0), {}
    for beta in (1.0, 0.0):
        model = make_sb3(
            "sb3:PPO", answer_pool(128), seed=0, beta=beta, n_steps=4, batch_size=256, n_epochs=4,
            gae_lambda=1.0, learning_rate="lin_0.003", policy_kwargs=SMALL_NET,
        ).learn(512 * 40)  # fmt: skip
        kl[beta] = POOL.kl(action_probabilities_sb3(model, np.arange(3)), optimum)
    assert kl[1.0] < 0.005
    assert kl[0.0] > 0.5


def test_penalty_on_a_scalar_env():
    model = make_sb3("sb3:PPO", gym.make("AnswerPool-v0", pool=POOL), seed=0, beta=0.5, **PPO_SHORT)
    callback = Rollouts()
    model.learn(32, callback=callback)
    rewards, stored, _, raw, reference = callback.rollouts[0]
    np.testing.assert_allclose(rewards, raw - 0.5 * (stored - reference), atol=1e-6)


def test_penalty_errors():
    with pytest.raises(ValueError, match=r"beta=0.1 with DQN.*sb3:A2C, sb3:PPO.*MaskablePPO"):
        make_sb3("sb3:DQN", answer_pool(), beta=0.1)
    with pytest.raises(ValueError, match=r"beta=0.1 with SAC"):
        make_sb3("sb3:SAC", sync("Pendulum-v1"), beta=0.1)
    for beta in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="finite number >= 0"):
            make_sb3("sb3:PPO", answer_pool(), beta=beta)
    with pytest.raises(ValueError, match=r"info\['ref_logp'\] of row 0 is None; beta=0.1"):
        make_sb3("sb3:PPO", sync("CartPole-v1"), beta=0.1, **PPO_SHORT).learn(32)

    no_model = KLPenaltyVecEnv(SB3VecEnv(answer_pool(2)), beta=0.1)
    no_model.reset()
    with pytest.raises(RuntimeError, match="not sampled by the model"):
        no_model.step(np.zeros(2, int))
    model = make_sb3("sb3:PPO", answer_pool(), seed=0, beta=0.1, **PPO_SHORT).learn(16)
    with pytest.raises(RuntimeError, match="not sampled by the model"):
        model.get_env().step(np.zeros(8, int))  # the log-probs of the last rollout are used up
    with pytest.raises(RuntimeError, match="evaluate on an environment without the KL penalty"):
        evaluate_policy(model, model.get_env(), n_eval_episodes=8)


def test_unknown_names_and_bad_values():
    with pytest.raises(ValueError, match=r"did you mean 'sb3:PPO'.*sb3_contrib:TRPO"):
        make_sb3("sb3:PPOO", answer_pool())
    with pytest.raises(ValueError, match="did you mean 'sb3_contrib:MaskablePPO'"):
        sb3_factory("sb3:MaskablePPO")
    with pytest.raises(ValueError, match=r"config of sb3:PPO.*did you mean 'n_epochs'"):
        make_sb3("sb3:PPO", answer_pool(), n_epoch=3)
    with pytest.raises(ValueError, match=r"config of sb3:PPO: got 'env_'"):
        make_sb3("sb3:PPO", answer_pool(), env_=None)
    with pytest.raises(ValueError, match=r"policy.*did you mean 'MlpPolicy'"):
        make_sb3("sb3:PPO", answer_pool(), policy="MlpPolicyy")
    with pytest.raises(ValueError, match="learning_rate='cos_0.1'"):
        make_sb3("sb3:PPO", answer_pool(), learning_rate="cos_0.1")
    with pytest.raises(TypeError, match="env is a str"):
        make_sb3("sb3:PPO", "CartPole-v1")


def test_sb3_contrib_is_optional(monkeypatch):
    packages = {"sb3": "stable_baselines3", "sb3_contrib": "package_that_is_not_there"}
    monkeypatch.setattr("agents.sb3.PACKAGES", packages)
    assert sb3_class("sb3:PPO") is PPO
    with pytest.raises(ModuleNotFoundError, match="'sb3_contrib:TRPO' needs .* pip install"):
        sb3_class("sb3_contrib:TRPO")


def test_config_fields():
    assert {"n_steps", "clip_range", "beta", "policy", "device"} <= sb3_config_fields("sb3:PPO")
    assert not {"env", "seed", "_init_setup_model"} & sb3_config_fields("sb3:PPO")
    assert "beta" not in sb3_config_fields("sb3:DQN")
    assert "clip_range" not in sb3_config_fields("sb3_contrib:TRPO")


def test_schedules_and_the_unclipped_ratio():
    model = make_sb3("sb3:PPO", answer_pool(), learning_rate="lin_0.001", clip_range="lin_0.2")
    for progress in (1.0, 0.25, 0.0):
        assert model.lr_schedule(progress) == pytest.approx(0.001 * progress)
        assert model.clip_range(progress) == pytest.approx(0.2 * progress)
    runs = {}
    for clip_range in (None, 1e6, 0.01):
        config = PPO_SHORT | {"clip_range": clip_range, "learning_rate": 0.05}
        runs[clip_range] = parameters(
            make_sb3("sb3:PPO", answer_pool(), seed=0, **config).learn(256)
        )
    np.testing.assert_array_equal(runs[None], runs[1e6])
    assert not np.array_equal(runs[None], runs[0.01])


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_save_and_load(tmp_path, beta):
    config = PPO_SHORT | {"learning_rate": "lin_0.01"}
    model = make_sb3("sb3:PPO", answer_pool(), seed=0, beta=beta, **config).learn(256)
    model.save(tmp_path / "model")
    loaded = load_sb3("sb3:PPO", tmp_path / "model", answer_pool(4))
    np.testing.assert_array_equal(parameters(loaded), parameters(model))
    np.testing.assert_array_equal(
        action_probabilities_sb3(loaded, np.arange(3)),
        action_probabilities_sb3(model, np.arange(3)),
    )
    assert loaded.lr_schedule(0.5) == pytest.approx(0.005) and loaded.n_envs == 4
    callback = Rollouts()
    loaded.learn(64, callback=callback, reset_num_timesteps=False)  # goes on, with its penalty
    rewards, stored, _, raw, reference = callback.rollouts[0]
    np.testing.assert_allclose(rewards, raw - beta * (stored - reference), atol=1e-6)


def test_equal_runs_for_equal_seeds():
    def run(seed):
        return parameters(make_sb3("sb3:PPO", answer_pool(), seed=seed, **PPO_SHORT).learn(256))

    np.testing.assert_array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_action_probabilities():
    model = make_sb3("sb3:PPO", answer_pool(), seed=0, **PPO_SHORT).learn(256)
    probabilities = action_probabilities_sb3(model, np.arange(3))
    assert probabilities.shape == (3, 6) and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-12)
    # Against frequencies of predict(); 4 standard errors of 20,000 draws.
    actions, _ = model.predict(np.full(20_000, 2))
    frequencies = np.bincount(actions, minlength=6) / 20_000
    np.testing.assert_allclose(frequencies, probabilities[2], atol=4 * 0.5 / np.sqrt(20_000))

    assert action_probabilities_sb3(make_sb3("sb3:DQN", answer_pool()), np.arange(3)) is None
    recurrent = make_sb3("sb3_contrib:RecurrentPPO", answer_pool())
    assert action_probabilities_sb3(recurrent, np.arange(3)) is None
    continuous = make_sb3("sb3:PPO", sync("Pendulum-v1"))
    assert action_probabilities_sb3(continuous, np.zeros((1, 3))) is None


def test_dict_observations_get_the_multi_input_policy():
    class Two(gym.Env):
        observation_space = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Box(-1, 1, (3,)))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": 1, "b": np.zeros(3, np.float32)}, {}

        def step(self, action):
            return {"a": 0, "b": np.ones(3, np.float32)}, 1.0, True, False, {}

    model = make_sb3("sb3:PPO", SyncVectorEnv([Two] * 2), seed=0, **PPO_SHORT).learn(32)
    assert type(model.policy).__name__ == "MultiInputActorCriticPolicy"
    with pytest.raises(ValueError, match="policy: got 'MultiInputPolicy'"):
        make_sb3("sb3_contrib:ARS", SyncVectorEnv([Two] * 2))


def test_an_sb3_vec_env_is_used_as_it_is():
    venv = DummyVecEnv([lambda: gym.make("AnswerPool-v0", pool=POOL)])
    assert make_sb3("sb3:PPO", venv, **PPO_SHORT).get_env() is venv
    assert isinstance(make_sb3("sb3:PPO", venv), PPO)
