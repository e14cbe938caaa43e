"""AnswerPool-v0: rewards and info, vector against scalar, tasks, noise, pickling, bad input."""

import copy
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from llmgym import AnswerPool, AutoresetMode

POOL = AnswerPool.random(n_prompts=6, n_answers=4, seed=5)
N = 8


def make_vec(mode="same_step", n: int = N, **kwargs) -> gym.vector.VectorEnv:
    return gym.make_vec(
        "AnswerPool-v0", num_envs=n, autoreset_mode=mode, **{"pool": POOL, **kwargs}
    )


@pytest.mark.parametrize("reward", ["proxy", "gold"])
def test_scalar_pays_from_the_table(reward):
    env = gym.make("AnswerPool-v0", pool=POOL, reward=reward)
    assert env.observation_space == gym.spaces.Discrete(6)
    assert env.action_space == gym.spaces.Discrete(4)
    for task in range(6):
        for answer in range(4):
            prompt, info = env.reset(options={"task_id": task})
            assert prompt == task and info == {"task_id": task}
            prompt, paid, terminated, truncated, info = env.step(answer)
            assert prompt == task and terminated and not truncated
            assert paid == getattr(POOL, reward)[task, answer]
            assert info == {
                "task_id": task,
                "proxy": POOL.proxy[task, answer],
                "gold": POOL.gold[task, answer],
                "ref_logp": np.log(POOL.ref_probs[task, answer]),
            }
            assert [type(value) for value in info.values()] == [int, float, float, float]


@pytest.mark.parametrize("check_env", [gymnasium_check_env, sb3_check_env])
def test_checkers_pass_with_prompts_and_noise(check_env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("AnswerPool-v0", pool=POOL, noise=0.5).unwrapped)


def test_default_pool_and_attributes():
    for env in (gym.make("AnswerPool-v0"), gym.make_vec("AnswerPool-v0", num_envs=2)):
        np.testing.assert_array_equal(env.unwrapped.pool.proxy, AnswerPool.default().proxy)
        logp = env.unwrapped.reference_logp
        np.testing.assert_allclose(np.exp(logp), AnswerPool.default().ref_probs, rtol=1e-12)
        assert logp.shape == (1, 200) and logp.dtype == np.float64


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_rows_are_the_scalar_environments(mode, noise):
    envs = [gym.make("AnswerPool-v0", pool=POOL, noise=noise) for _ in range(N)]
    batch = make_vec(mode, noise=noise)
    prompts, info = batch.reset(seed=40)
    starts = [env.reset(seed=40 + row) for row, env in enumerate(envs)]
    assert prompts.tolist() == [start[0] for start in starts]
    assert info["task_id"].tolist() == [start[1]["task_id"] for start in starts]
    for actions in np.random.default_rng(0).integers(0, 4, (150, N)):
        shown, rewards, terminated, truncated, info = batch.step(actions)
        steps = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        assert terminated.all() and not truncated.any()
        np.testing.assert_allclose(rewards, [step[1] for step in steps], rtol=1e-12)
        final = info["final_info"] if mode is AutoresetMode.SAME_STEP else info
        for key in ("task_id", "proxy", "gold", "ref_logp"):
            assert final[key].tolist() == [step[4][key] for step in steps]
            assert final["_" + key].all()
        final_prompts = info["final_obs"] if mode is AutoresetMode.SAME_STEP else shown
        assert list(final_prompts) == [step[0] for step in steps]

        if mode is AutoresetMode.NEXT_STEP:
            shown, rewards, terminated, _, info = batch.step(actions)
            assert not rewards.any() and not terminated.any()
        elif mode is AutoresetMode.DISABLED:
            shown, info = batch.reset(options={"reset_mask": terminated})
        prompts = [env.reset()[0] for env in envs]
        assert shown.tolist() == prompts == info["task_id"].tolist()
        assert set(info) - {"final_obs", "_final_obs", "final_info", "_final_info"} == {
            "task_id",
            "_task_id",
        }


def test_default_mode_is_same_step():
    env = gym.make_vec("AnswerPool-v0", num_envs=2)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_group_of_answers_shares_a_prompt():
    env = make_vec("disabled")
    tasks = np.repeat([3, 5], 4)
    prompts, info = env.reset(seed=0, options={"task_id": tasks})
    assert prompts.tolist() == info["task_id"].tolist() == tasks.tolist()
    _, rewards, *_ = env.step(np.arange(N) % 4)
    np.testing.assert_array_equal(rewards, POOL.proxy[[3, 5]].ravel())
    tasks[:] = 0  # the environment keeps no view of the caller's array
    assert env.step(np.zeros(N, dtype=int))[0].tolist() == [3] * 4 + [5] * 4


def test_prompts_are_uniform():
    env = make_vec(n=600)
    prompts, _ = env.reset(seed=0)
    seen = [prompts]
    for _ in range(50):
        seen.append(env.step(np.zeros(600, dtype=int))[0])
    counts = np.bincount(np.concatenate(seen), minlength=6)
    np.testing.assert_allclose(counts / counts.sum(), 1 / 6, atol=0.01)


def test_noise_has_the_stated_deviation_and_leaves_info_clean():
    env = make_vec("disabled", n=5000, noise=0.7)
    env.reset(seed=0, options={"task_id": 2})
    _, rewards, _, _, info = env.step(np.full(5000, 1))
    errors = rewards - POOL.proxy[2, 1]
    assert abs(errors.mean()) < 0.03 and abs(errors.std() - 0.7) < 0.03
    assert (info["proxy"] == POOL.proxy[2, 1]).all()


def test_nothing_is_drawn_where_nothing_is_random():
    env = gym.make("AnswerPool-v0").unwrapped
    env.reset(seed=3)
    before = copy.deepcopy(env.np_random.bit_generator.state)
    env.step(0)
    env.reset()
    assert env.np_random.bit_generator.state == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_in_mid_episode_go_on_alike(duplicate):
    scalar = gym.make("AnswerPool-v0", pool=POOL, noise=0.3)
    scalar.reset(seed=4)
    twin = duplicate(scalar)
    for answer in (0, 3, 1):
        assert scalar.step(answer) == twin.step(answer)
        assert scalar.reset() == twin.reset()
    batch = make_vec(noise=0.3)
    batch.reset(seed=4)
    batch.step(np.zeros(N, dtype=int))
    twins = duplicate(batch)
    for _ in range(100):
        left, right = batch.step(np.ones(N, dtype=int)), twins.step(np.ones(N, dtype=int))
        np.testing.assert_array_equal(left[0], right[0])
        np.testing.assert_array_equal(left[1], right[1])


def test_gymnasium_wrappers_count_one_step_episodes():
    scalar = gym.wrappers.RecordEpisodeStatistics(gym.make("AnswerPool-v0", pool=POOL))
    scalar.reset(seed=0)
    *_, info = scalar.step(1)
    assert info["episode"]["l"] == 1 and info["episode"]["r"] == pytest.approx(info["proxy"])
    batch = gym.wrappers.vector.RecordEpisodeStatistics(make_vec("disabled"))
    batch.reset(seed=0)
    *_, terminated, _, info = batch.step(np.ones(N, dtype=int))
    np.testing.assert_allclose(info["episode"]["r"], info["proxy"])
    assert (info["episode"]["l"] == 1).all()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"reward": "prox"}, ValueError, "reward: got 'prox' .did you mean 'proxy'.*'gold'"),
        ({"noise": -1.0}, ValueError, "noise: got -1.0; allowed: a finite number >= 0"),
        ({"noise": float("nan")}, ValueError, "noise: got nan"),
        ({"pool": np.zeros((1, 2))}, TypeError, "pool: got ndarray; allowed: AnswerPool or None"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        gym.make("AnswerPool-v0", **kwargs)
    with pytest.raises(error, match=message):
        gym.make_vec("AnswerPool-v0", num_envs=2, **kwargs)


def test_bad_vector_arguments():
    with pytest.raises(ValueError, match="'next_step', 'same_step', 'disabled'"):
        make_vec("never")
    with pytest.raises(ValueError, match="num_envs: got 0; allowed: an integer >= 1"):
        make_vec(n=0)


def test_bad_tasks_and_actions_name_rows_values_and_range():
    env = make_vec()
    with pytest.raises(ValueError, match="task_id: row 1 has 6, row 2 has -1; allowed: .* 0 to 5"):
        env.reset(options={"task_id": np.array([0, 6, -1, 5, 0, 0, 0, 0])})
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action: row 7 has 4; allowed: integers 0 to 3"):
        env.step(np.array([0, 1, 2, 3, 0, 1, 2, 4]))
    scalar = gym.make("AnswerPool-v0", pool=POOL)
    with pytest.raises(ValueError, match="task_id: row 0 has 6; allowed: integers 0 to 5"):
        scalar.reset(options={"task_id": 6})
