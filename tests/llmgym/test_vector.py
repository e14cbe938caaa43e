"""The vector and the scalar shell: equal numbers, the three modes, copies."""

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from countdown import (
    MODES,
    CountdownTransition,
    N,
    PairEnv,
    actions,
    assert_same,
    info_of_row,
    scalar,
    vector,
)

from llmgym.scalar import BatchOfOneEnv
from llmgym.vector import AutoresetMode, BatchVectorEnv, as_autoreset_mode, autoreset_mode


@pytest.mark.parametrize("mode", MODES)
def test_vector_rows_are_the_scalar_environments(mode):
    """200 steps, a hand-written loop round N scalar environments as the oracle."""
    envs, batch = [scalar() for _ in range(N)], vector(mode)
    observations, info = batch.reset(seed=7)
    for row, env in enumerate(envs):
        observation, row_info = env.reset(seed=7 + row)
        assert_same(observations[row], observation)
        assert_same(info_of_row(info, row), row_info)
    last = [None] * N  # (observation, terminated) of finished rows
    for step_actions in actions(200):
        observations, rewards, terminated, truncated, info = batch.step(step_actions)
        assert not truncated.any()
        for row, env in enumerate(envs):
            if last[row] is not None and mode is AutoresetMode.NEXT_STEP:
                observation, row_info = env.reset()
                expected = (observation, 0.0, False, row_info)
                last[row] = None
            elif last[row] is not None:  # disabled: the row waits
                expected = (last[row], 0.0, True, {})
            else:
                observation, reward, done, _, row_info = env.step(step_actions[row])
                expected = (observation, reward, done, row_info)
                if done and mode is AutoresetMode.SAME_STEP:
                    assert info["_final_obs"][row] and info["_final_info"][row]
                    assert_same(info["final_obs"][row], observation)
                    assert_same(info_of_row(info["final_info"], row), row_info)
                    observation, row_info = env.reset()
                    expected = (observation, reward, done, row_info)
                elif done:
                    last[row] = observation
            assert_same(observations[row], expected[0])
            assert_same(rewards[row], expected[1])
            assert terminated[row] == expected[2]
            assert_same(info_of_row(info, row), expected[3])
        if mode is AutoresetMode.DISABLED and terminated.sum() >= 3:
            mask = terminated.copy()
            observations, info = batch.reset(options={"reset_mask": mask})
            for row in np.flatnonzero(mask):
                observation, row_info = envs[row].reset()
                assert_same(observations[row], observation)
                assert_same(info_of_row(info, row), row_info)
                last[row] = None


@pytest.mark.parametrize("mode", MODES)
def test_vector_is_what_sync_vector_env_makes_of_the_scalars(mode):
    """Everything, also the structure of info, against Gymnasium's own implementation."""
    kwargs: dict[str, Any] = {}
    if hasattr(gym.vector, "AutoresetMode"):
        kwargs["autoreset_mode"] = mode
    elif mode is not AutoresetMode.NEXT_STEP:
        pytest.skip("this Gymnasium has next-step autoreset only")
    theirs = gym.vector.SyncVectorEnv([PairEnv] * N, **kwargs)
    ours = vector(mode)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert autoreset_mode(ours) == autoreset_mode(theirs) == mode
    seeds = [3, 1, 4, 1, 5]
    for seed in (20, seeds, [None, 2, None, 3, None], None):
        left, right = ours.reset(seed=seed), theirs.reset(seed=seed)
        assert_same(left[0], right[0])
        assert_same(left[1], right[1])
        for step_actions in actions(40):
            left, right = ours.step(step_actions), theirs.step(step_actions)
            for one, other in zip(left[:4], right[:4], strict=True):
                assert_same(one, other)
            assert_same(left[4], right[4])
            if mode is AutoresetMode.DISABLED and left[2].any():
                # SyncVectorEnv lets no row wait and removes the mask from the options.
                options = {"reset_mask": left[2]}
                left, right = ours.reset(options=options), theirs.reset(options=options.copy())
                assert_same(left[0], right[0])
                assert_same(left[1], right[1])


def test_sub_environments_get_consecutive_seeds():
    """reset(seed=7) on 3 rows seeds them 7, 8, 9; they do not all start alike; twice is equal."""
    env = vector(n=3)
    first, _ = env.reset(seed=7)
    assert env.np_random_seed == (7, 8, 9)
    assert len(np.unique(first[:, 2])) == 3
    second, _ = env.reset(seed=7)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("mode", MODES)
def test_info_masks_tell_which_rows_have_a_key(mode):
    env = vector(mode, n=2)
    env.reset(seed=0, options={"task_id": np.array([0, 3])})
    *_, info = env.step(np.array([1, 1]))
    if mode is AutoresetMode.SAME_STEP:
        assert info["_noise"].tolist() == [False, True]
        assert info["noise"][0] == 0.0 and info["noise"][1] != 0.0
        assert info["_task_id"].tolist() == [True, False]
        return
    assert info["_noise"].tolist() == [True, True]
    *_, info = env.step(np.array([1, 1]))
    assert info["_noise"].tolist() == [False, True]
    assert info["noise"][0] == 0.0
    assert info["mask"].shape == (2, 4)
    has_reset = mode is AutoresetMode.NEXT_STEP
    assert ("_task_id" in info) == has_reset
    if has_reset:
        assert info["_task_id"].tolist() == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_final_observation_by_mode(mode):
    env = vector(mode, n=2)
    env.reset(seed=0, options={"task_id": np.array([0, 3])})
    observations, _, terminated, _, info = env.step(np.array([1, 1]))
    assert terminated.tolist() == [True, False]
    if mode is AutoresetMode.SAME_STEP:
        assert info["_final_obs"].tolist() == [True, False]
        assert info["final_obs"][1] is None
        final = info["final_obs"][0]
        assert final in env.single_observation_space and final.dtype == np.float32
        assert final[1] == 0.0  # no steps left
        assert observations[0, 1] == observations[0, 0] + 1  # the reset one has all its steps
        assert "final_observation" not in info
    else:
        assert observations[0, 1] == 0.0
        assert "final_obs" not in info and "final_info" not in info
    assert observations in env.observation_space and observations.dtype == np.float32


@pytest.mark.parametrize(("mode", "step_calls"), [("next_step", 7), ("same_step", 6)])
def test_counting_steps(mode, step_calls):
    """Two episodes of three steps: in next-step mode the reset step counts for neither."""
    env = vector(mode, n=1)
    task = {"task_id": 2}
    env.reset(seed=0, options=task)
    lengths, calls, length, previous_done = [], 0, 0, False
    while len(lengths) < 2:
        _, reward, terminated, *_ = env.step(np.array([1]))
        calls += 1
        if previous_done and mode == "next_step":
            assert reward[0] == 0.0
        else:
            length += 1
        if terminated[0]:
            lengths.append(length)
            length = 0
        previous_done = terminated[0]
        if len(lengths) == 1 and length == 0 and (mode == "same_step" or not terminated[0]):
            env._transition.state[0, :2] = [2, 3]  # the drawn task may be a shorter one
    assert (calls, lengths) == (step_calls, [3, 3])


def test_disabled_rows_wait_until_reset():
    env = vector("disabled", n=3)
    env.reset(seed=0, options={"task_id": np.array([0, 1, 3])})
    env.step(np.array([1, 1, 1]))
    before, rewards, terminated, _, info = env.step(np.array([99, 1, 1]))  # 99 is ignored
    assert terminated.tolist() == [True, True, False]
    assert rewards[0] == 0.0 and info["_noise"].tolist() == [False, True, True]
    after, rewards, terminated, _, info = env.step(np.array([99, 99, 1]))
    np.testing.assert_array_equal(after[:2], before[:2])
    assert terminated.tolist() == [True, True, False]

    options = {"reset_mask": np.array([True, False, False]), "task_id": np.array([2, 77, 77])}
    observations, info = env.reset(options=options)
    assert set(options) == {"reset_mask", "task_id"}  # a wrapper may read them afterwards
    assert info["_task_id"].tolist() == [True, False, False] and info["task_id"][0] == 2
    np.testing.assert_array_equal(observations[1:], after[1:])
    *_, terminated, _, _ = env.step(np.array([1, 99, 1]))
    assert terminated.tolist() == [False, True, True]

    env.step(np.array([1, 1, 1]))
    *_, terminated, _, _ = env.step(np.array([1, 1, 1]))
    assert terminated.all()
    _, rewards, terminated, _, info = env.step(np.array([0, 0, 0]))  # all wait
    assert terminated.all() and info == {} and not rewards.any()
    _, info = env.reset()
    assert info["_task_id"].all()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_options_do_not_outlive_their_episode(mode):
    env = vector(mode, n=50)
    _, info = env.reset(seed=0, options={"task_id": 0})
    assert (info["task_id"] == 0).all()
    *_, info = env.step(np.ones(50, dtype=int))
    if mode == "next_step":
        *_, info = env.step(np.ones(50, dtype=int))
    assert set(info["task_id"].tolist()) == {0, 1, 2, 3}


def test_episodes_after_a_seeded_mask_reset_are_those_of_the_seed():
    env, other = vector("disabled", n=3), vector("disabled", n=3)
    env.reset(seed=0)
    other.reset(seed=50)
    mask = np.array([False, True, False])
    observations, _ = env.reset(seed=50, options={"reset_mask": mask})
    np.testing.assert_array_equal(observations[1], other.reset(seed=50)[0][1])
    assert env.np_random_seed == (0, 51, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_vector_copy_in_mid_episode_goes_on_alike(mode, duplicate):
    env = vector(mode)
    env.reset(seed=1)
    for step_actions in actions(7):
        env.step(step_actions)
    twin = duplicate(env)
    for step_actions in actions(300):  # beyond the block of numbers read ahead
        left, right = env.step(step_actions), twin.step(step_actions)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
        if mode is AutoresetMode.DISABLED and left[2].any():
            options = {"reset_mask": left[2]}
            np.testing.assert_array_equal(
                env.reset(options=options)[0], twin.reset(options=options)[0]
            )


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_scalar_copy_in_mid_episode_goes_on_alike(duplicate):
    env = scalar()
    env.reset(seed=1, options={"task_id": 3})
    env.step(1)
    twin = duplicate(env)
    for _ in range(20):
        left, right = env.step(2), twin.step(2)
        assert_same(left[0], right[0])
        assert left[1:4] == right[1:4]
        assert_same(left[4], right[4])
        if left[2]:
            assert_same(env.reset()[0], twin.reset()[0])


def test_scalar_randomness_is_np_random():
    """Assigning np_random, or restoring the state of its bit generator, decides what is drawn."""
    env, other = scalar(), scalar()
    env.reset(seed=1)
    other.reset(seed=2)
    other.np_random = np.random.default_rng(9)
    env.np_random = np.random.default_rng(9)
    assert_same(env.reset()[0], other.reset()[0])
    state = copy.deepcopy(env.np_random.bit_generator.state)
    first = env.reset()[0]
    env.np_random.bit_generator.state = state
    assert_same(env.reset()[0], first)


def test_unseeded_environments_differ():
    assert not np.array_equal(vector().reset()[0], vector().reset()[0])
    assert not np.array_equal(scalar().reset()[0], scalar().reset()[0])


# --- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_declared_and_read_through_wrappers(mode):
    env = vector(mode)
    assert env.metadata["autoreset_mode"] is mode
    wrapped = gym.wrappers.vector.TransformReward(env, np.negative)
    assert autoreset_mode(wrapped) is mode
    wrapped.metadata = {}
    assert autoreset_mode(wrapped) is mode


def test_mode_names():
    for mode in MODES:
        for name in (mode, mode.value, mode.name.lower(), mode.name):
            assert as_autoreset_mode(name) is mode
    message = "autoreset_mode: got 'sometimes'; allowed: 'next_step', 'same_step', 'disabled'"
    for wrong in ("sometimes", None, 3):
        with pytest.raises(ValueError, match="'next_step', 'same_step', 'disabled'"):
            vector(wrong)
    with pytest.raises(ValueError, match=message):
        vector("sometimes")
    assert autoreset_mode(gym.make("CartPole-v1")) is AutoresetMode.NEXT_STEP
    assert [mode.value for mode in MODES] == ["NextStep", "SameStep", "Disabled"]


class SharedTransition(CountdownTransition):
    """Tells all rows the same table, another one at a reset; and the rows that end a word."""

    def reset_rows(self, rows, random, task_ids):
        info = super().reset_rows(rows, random, task_ids)
        return info | {"table": np.broadcast_to(np.array([0, 1]), (len(rows), 2))}

    def step_rows(self, rows, random, actions):
        rewards, terminated, info = super().step_rows(rows, random, actions)
        info["table"] = np.broadcast_to(np.array([5, 6]), (len(rows), 2))
        info["word"] = np.where(terminated, "end", "").astype("<U3")
        info["_word"] = terminated
        return rewards, terminated, info


@pytest.mark.parametrize("mode", MODES)
def test_info_of_some_rows_and_info_that_rows_share(mode):
    env = BatchVectorEnv(SharedTransition(3), 3, mode)
    env.reset(seed=0, options={"task_id": np.array([0, 1, 3])})
    *_, info = env.step(np.array([1, 1, 1]))
    final = info.get("final_info", info)
    assert final["word"].tolist() == ["end", "", ""]
    assert final["_word"].tolist() == [True, False, False]
    assert final["table"][0].tolist() == [5, 6] and info["table"][1:].tolist() == [[5, 6]] * 2
    if mode is AutoresetMode.SAME_STEP:
        # Row 0 was reset: the rows do not share a table in this step.
        assert info["table"][0].tolist() == [0, 1] and info["_table"].all()
        return
    assert info["table"].strides[0] == 0  # one row in memory
    *_, info = env.step(np.array([1, 1, 1]))
    assert info["word"][1] == "end" and info["_word"].tolist() == [False, True, False]
    assert info["table"][1:].tolist() == [[5, 6]] * 2
    reset = mode is AutoresetMode.NEXT_STEP
    assert info["_table"].tolist() == [reset, True, True]
    assert not reset or info["table"][0].tolist() == [0, 1]


def test_scalar_info_leaves_out_what_the_row_does_not_have():
    env = BatchOfOneEnv(SharedTransition(1))
    env.reset(seed=0, options={"task_id": 1})
    *_, info = env.step(1)
    assert "word" not in info and "_word" not in info and info["table"].tolist() == [5, 6]
    *_, info = env.step(1)
    assert info["word"] == "end" and type(info["word"]) is str
