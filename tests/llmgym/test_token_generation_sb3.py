"""TokenGeneration-v0 under Stable-Baselines3 and sb3-contrib, through their own vector environments."""

import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import llmgym  # noqa: F401 (registers the id)

# make_vec_env asks every environment for pictures, and Gymnasium warns that there are none.
pytestmark = pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array':UserWarning")
SETTINGS = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": 0, "device": "cpu"}


def test_masks_as_sb3_contrib_calls_them():
    env = make_vec_env("TokenGeneration-v0", n_envs=3, seed=0)
    assert is_masking_supported(env)
    env.reset()
    np.testing.assert_array_equal(get_action_masks(env), np.ones((3, 20)))


@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO])
def test_learning_changes_the_policy(algorithm):
    env = make_vec_env("TokenGeneration-v0", n_envs=4, seed=0)
    model = algorithm("MlpPolicy", env, **SETTINGS)
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(256)
    assert model.num_timesteps == 256
    assert len(model.ep_info_buffer) > 0 and all(1 <= e["l"] <= 20 for e in model.ep_info_buffer)
    changed = [not p.equal(old) for p, old in zip(model.policy.parameters(), before, strict=True)]
    assert any(changed) and all(p.isfinite().all() for p in model.policy.parameters())
