"""Every registered id: Gymnasium's and Stable-Baselines3's checkers, imports, API shapes."""

import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.utils.env_checker import data_equivalence
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import llmgym
from llmgym.registration import ENVIRONMENTS, register_environments

IDS = [environment.id for environment in ENVIRONMENTS]
IDS_FOR_SB3 = [env_id for env_id in IDS if env_id != "MathText-v0"]  # SB3 knows no Text spaces


def run_python(code: str) -> str:
    root = str(Path(llmgym.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_checker_has_no_complaint(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(gym.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", IDS_FOR_SB3)
def test_sb3_checker_has_no_complaint(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb3_check_env(gym.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", IDS)
def test_native_vector_environment_is_what_make_vec_makes(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make_vec(env_id, num_envs=3)
    assert not isinstance(env.unwrapped, gym.vector.SyncVectorEnv)
    assert env.num_envs == 3
    single = gym.make(env_id)
    assert env.single_observation_space == single.observation_space
    assert env.single_action_space == single.action_space
    observations, _ = env.reset(seed=0)
    assert observations in env.observation_space
    if not isinstance(single.observation_space, Text):
        assert observations.dtype == env.observation_space.dtype


@pytest.mark.parametrize("env_id", IDS)
def test_api_shapes(env_id):
    """reset -> (obs, dict), step -> (obs, float, bool, bool, dict); keywords seed and options."""
    env = gym.make(env_id).unwrapped
    parameters = inspect.signature(env.reset).parameters
    assert {"seed", "options"} <= set(parameters)
    observation, info = env.reset(seed=0, options={})
    assert type(info) is dict and observation in env.observation_space
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
    assert type(info) is dict and observation in env.observation_space
    kind = type(observation) if isinstance(observation, str) else observation.dtype
    assert kind == env.observation_space.dtype


@pytest.mark.parametrize("env_id", IDS)
def test_action_space_has_its_own_seed(env_id):
    """env.reset(seed=s) does not seed action_space.sample(); action_space.seed(s) does."""
    env = gym.make(env_id)

    def sample(seed_actions: bool) -> list[str]:
        env.reset(seed=5)
        if seed_actions:
            env.action_space.seed(5)
        return [str(env.action_space.sample()) for _ in range(20)]

    assert sample(True) == sample(True)
    assert sample(False) != sample(False)


@pytest.mark.parametrize("env_id", IDS)
def test_factory_survives_cloudpickle(env_id):
    factory = cloudpickle.loads(cloudpickle.dumps(lambda: gym.make(env_id)))
    ours, theirs = gym.make(env_id), factory()
    assert data_equivalence(ours.reset(seed=3), theirs.reset(seed=3))
    action = ours.action_space.sample()
    assert data_equivalence(ours.step(action), theirs.step(action))


def test_registering_again_is_silent_and_changes_nothing():
    before = {env_id: gym.registry[env_id] for env_id in IDS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_environments()
    assert all(gym.registry[env_id] is spec for env_id, spec in before.items())


@pytest.mark.parametrize("env_id", IDS)
def test_make_with_module_prefix_needs_no_import(env_id):
    code = (
        "import gymnasium as gym\n"
        f"env = gym.make('llmgym:{env_id}'); env.reset(seed=0)\n"
        f"vec = gym.make_vec('llmgym:{env_id}', num_envs=2); vec.reset(seed=0)\n"
        "print(env.spec.id, vec.num_envs)"
    )
    assert run_python(code) == f"{env_id} 2"


def test_import_is_cheap():
    code = (
        "import sys, llmgym\n"
        "heavy = {'torch', 'scipy', 'pandas', 'matplotlib', 'agents', 'llmgym.answer_pool_env'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_unknown_id_names_the_nearest():
    with pytest.raises(gym.error.NameNotFound, match="AnswerPool"):
        gym.make("AnswerPol-v0")


def test_observations_of_calls_are_separate_arrays():
    env = gym.make_vec("AnswerPool-v0", num_envs=4, pool=llmgym.AnswerPool.random(5, 3, seed=0))
    first, _ = env.reset(seed=0)
    kept = first.copy()
    first[:] = 99
    second, *_ = env.step(np.zeros(4, dtype=np.int64))
    assert second.max() < 5
    again, _ = env.reset(seed=0)
    np.testing.assert_array_equal(again, kept)
