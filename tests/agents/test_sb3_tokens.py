"""SB3 and sb3-contrib on token ids: the features by hand, and learning that needs them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import agents
from agents.sb3_tokens import TokenFeatures
from llmgym.token_rewards import Responses, Scores
from llmgym.token_tasks import TokenTask

V, L, C = 5, 6, 3
SPACE = spaces.Box(0, V, (L,), np.int64)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@torch.no_grad()
def test_features_by_hand():
    features = TokenFeatures(SPACE, n_embd=C, n_last=2)
    rows = [[1, 4, 0, 4], [2], [3, 3, 1, 0, 2, 4]]
    observations = np.full((3, L), V)
    for i, row in enumerate(rows):
        observations[i, : len(row)] = row
    table, lengths = features.tokens.weight.numpy(), features.length.weight.numpy()
    expected = []
    for row in rows:
        before = table[row[-2]] if len(row) > 1 else np.zeros(C)
        expected.append(np.concatenate([table[row[-1]], before, table[row].mean(0), lengths[len(row)]]))
    got = features(torch.from_numpy(observations).float())  # floats, as SB3 passes them
    assert features.features_dim == got.shape[1] == 4 * C
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_padding_has_no_features_and_no_gradient():
    features = TokenFeatures(SPACE, n_embd=C)
    short = torch.tensor([[2, 1, V, V, V, V]])
    features(short).square().sum().backward()
    assert (features.tokens.weight[V] == 0).all() and (features.tokens.weight.grad[V] == 0).all()
    assert (features(short)[0, 2 * C : 4 * C] == 0).all()  # the two places before the first token


def successor_task() -> TokenTask:
    """Pays 1 for each token that follows the one before it in a fixed order, prompts included."""
    after = np.array([3, 0, 6, 5, 7, 1, 4, 2, 8])
    prompts = [*([i] for i in range(8)), [1, 2], [7, 0, 5]]
    last = np.array([prompt[-1] for prompt in prompts])

    def reward(responses: Responses) -> Scores:
        before = np.concatenate([last[responses.task_ids][:, None], responses.tokens[:, :-1]], 1)
        real = np.arange(responses.tokens.shape[1]) < responses.lengths[:, None]
        follows = responses.tokens == after[np.where(real, before, 0)]
        return Scores((real & follows & (responses.tokens != 8)).sum(1))

    return TokenTask(prompts, vocab_size=9, eos_id=8, max_new_tokens=6, reward=reward, reward_at="token")


@pytest.mark.parametrize("name", ["sb3:PPO", "sb3_contrib:MaskablePPO"])
def test_learning_from_token_ids(name, tmp_path):
    """With the ids as magnitudes the same network has about 1 of 6 after these steps."""
    env = gym.make_vec("TokenGeneration-v0", num_envs=16, task=successor_task())
    model = agents.make(
        name, env, seed=0, n_steps=32, batch_size=128, n_epochs=6, learning_rate=5e-3, gamma=0.0,
        policy_kwargs={"net_arch": [32]},
    )  # fmt: skip
    assert isinstance(model.policy.features_extractor, TokenFeatures)
    model.learn(4096)
    assert np.mean([episode["r"] for episode in model.ep_info_buffer]) > 5.0
    model.save(tmp_path / "model.zip")
    loaded = agents.load(name, tmp_path / "model.zip", env)
    observation, _ = env.reset(seed=0)
    for _ in range(2):
        actions, _ = model.predict(observation, deterministic=True)
        assert (loaded.predict(observation, deterministic=True)[0] == actions).all()
        observation = env.step(actions)[0]


@pytest.mark.parametrize(
    ("space", "kwargs", "message"),
    [
        (spaces.Box(0, 1, (4,), np.float32), {}, r"Box\(0, V, \(L,\), int64\), got Box"),
        (spaces.Box(0, 5, (4, 2), np.int64), {}, r"Box\(0, V, \(L,\), int64\), got Box"),
        (spaces.Discrete(4), {}, r"Box\(0, V, \(L,\), int64\), got Discrete"),
        (SPACE, {"n_last": 0}, "n_last=0 must be an integer >= 1"),
    ],
)
def test_errors_say_what_is_allowed(space, kwargs, message):
    with pytest.raises(ValueError, match=message):
        TokenFeatures(space, **kwargs)
