"""TokenGeneration-v0: how an episode ends and what it is paid."""

import copy
import re

import gymnasium as gym
import numpy as np
import pytest
from token_worlds import EOS, all_words, as_arrays, custom_task, make_vec, tiny_task

from llmgym.token_rewards import RewardError, Scores
from llmgym.token_tasks import Alphabet

END_KEYS = {"stop_reason", "response_length", "status"}


def play(env, actions, task_id=0):
    """Observations and the steps of one episode."""
    env.reset(seed=0, options={"task_id": task_id})
    return [env.step(action) for action in actions]


# --------------------------------------------------------------------------- how an episode ends


def test_end_of_sequence_never_comes():
    env = gym.make("TokenGeneration-v0", task=custom_task(max_new_tokens=8))
    steps = play(env, [1] * 8)
    assert [step[2] for step in steps] == [False] * 7 + [True]
    assert not any(step[3] for step in steps)
    assert not any(END_KEYS & set(step[4]) for step in steps[:-1])
    info = steps[-1][4]
    assert info["stop_reason"] == "length" and info["response_length"] == 8
    with pytest.raises(gym.error.ResetNeeded):
        env.step(1)


def test_end_of_sequence_at_once():
    truth = "ba"
    letters = Alphabet("abcdefgh")

    def exact(responses):
        texts = [letters(t[t < 5]) for t in responses.tokens]
        return Scores([text == truth for text in texts])

    env = gym.make("TokenGeneration-v0", task=custom_task(exact, decode=letters), render_mode="ansi")
    [step] = play(env, [5])
    observation, reward, terminated, truncated, info = step
    assert terminated and not truncated and reward == 0.0
    assert info["stop_reason"] == "eos" and info["response_length"] == 1
    assert env.render() == "abc ->  [eos]"
    # One token counts: the end-of-sequence itself, which was an action.
    assert observation.tolist() == [0, 1, 2, 5, 8, 8, 8, 8]
    assert play(env, [1, 0, 5])[-1][1] == 1.0


def test_end_of_sequence_at_the_limit():
    env = gym.make("TokenGeneration-v0", task=custom_task(max_new_tokens=3))
    *_, last = play(env, [0, 1, 5])
    assert last[2] and not last[3] and last[4]["stop_reason"] == "eos"
    assert last[4]["response_length"] == 3


def test_end_of_sequence_is_an_action_of_the_response():
    env = gym.make("TokenGeneration-v0", task=custom_task(eos_id=2, prompts=[[0]]))
    observation = play(env, [5, 6, 2])[-1][0]
    assert observation.tolist() == [0, 5, 6, 2, 8, 8]
    np.testing.assert_array_equal((observation != 8)[1:4], [1, 1, 1])


@pytest.mark.parametrize("eos", [0, 7])
def test_ids_at_the_rim_and_in_the_prompt_are_no_padding(eos):
    """The end-of-sequence id 0 of zero-filled arrays, or V - 1 next to the padding."""
    env = gym.make("TokenGeneration-v0", task=custom_task(prompts=[[3, eos]], eos_id=eos))
    observation, _ = env.reset()
    assert (observation != 8).sum() == 2
    *_, last = play(env, [7 - eos, 3, eos])
    assert last[0].tolist() == [3, eos, 7 - eos, 3, eos, 8, 8] and last[4]["stop_reason"] == "eos"


def test_context_limit_ends_the_response():
    task = custom_task(prompts=[[0] * 6, [1]], max_new_tokens=10, context_length=8)
    env = gym.make("TokenGeneration-v0", task=task)
    assert env.observation_space.shape == (8,)
    steps = play(env, [1, 1])
    assert [step[2] for step in steps] == [False, True]
    assert steps[-1][4]["stop_reason"] == "length" and steps[-1][4]["response_length"] == 2
    assert play(env, [1] * 7, task_id=1)[-1][2]


def test_a_new_episode_shows_its_prompt_and_nothing_of_the_last():
    env = make_vec(custom_task(), 2, "next_step")
    env.reset(options={"task_id": 0})
    for _ in range(5):
        env.step(np.array([1, 2]))
    shown = env.step(np.array([1, 2]))[0]
    again, _ = env.reset(options={"task_id": np.array([1, 0])})
    assert again.tolist() == [[4] + [8] * 7, [0, 1, 2] + [8] * 5]
    assert all(row in (again[0].tolist(), again[1].tolist()) for row in shown.tolist())


def test_a_limit_from_outside_truncates():
    env = gym.wrappers.TimeLimit(gym.make("TokenGeneration-v0", task=custom_task()), 2)
    steps = play(env, [1, 1])
    assert [step[2:4] for step in steps] == [(False, False), (False, True)]
    assert not END_KEYS & set(steps[-1][4])


# ------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("reward_at", ["end", "token"])
@pytest.mark.parametrize("task_id", range(4))
def test_every_response_is_paid_what_counting_by_hand_says(task_id, reward_at):
    task = tiny_task(order=3, max_new_tokens=4, context_length=7, reward_at=reward_at)
    words = all_words(task, task_id)
    tokens, lengths = as_arrays(words)
    env = make_vec(task, len(words))
    env.reset(seed=0, options={"task_id": task_id})
    paid, ref_logp = np.zeros(len(words)), np.zeros(len(words))
    for place in range(tokens.shape[1]):
        observations, rewards, terminated, _, info = env.step(tokens[:, place])
        np.testing.assert_array_equal(terminated, lengths <= place + 1)
        if reward_at == "end":
            assert not rewards[~terminated].any()
        paid += rewards
        ref_logp += np.where(info["_ref_logp"], info["ref_logp"], 0.0)
        ended = lengths == place + 1
        np.testing.assert_array_equal(info["_status"], ended)
        for name in ("patterns", "repeats", "length"):
            expected = np.array([word.components[name] for word in words])
            np.testing.assert_allclose(info[f"reward/{name}"][ended], expected[ended], atol=1e-12)
            np.testing.assert_array_equal(info[f"_reward/{name}"], ended)
        reasons = np.where(tokens[ended, place] == EOS, "eos", "length")
        np.testing.assert_array_equal(info["stop_reason"][ended], reasons)
        np.testing.assert_array_equal(info["response_length"][ended], place + 1)
    np.testing.assert_allclose(paid, [word.reward for word in words], atol=1e-12)
    np.testing.assert_allclose(ref_logp, [word.ref_logp for word in words], atol=1e-12)
    start = task.prompt_lengths[task_id]
    np.testing.assert_array_equal((observations != 4).sum(axis=1), start + lengths)
    np.testing.assert_array_equal(observations[:, :start], [task.prompts[task_id].tolist()] * len(words))


def test_process_rewards_are_paid_with_their_token():
    """A reward function gives the running sum; each step is paid the growth."""

    def sevens(responses):
        return Scores(10.0 * (responses.tokens == 7).sum(axis=1) - 1.0)

    env = gym.make("TokenGeneration-v0", task=custom_task(sevens, reward_at="token"))
    assert [step[1] for step in play(env, [7, 0, 7, 1, 5])] == [9.0, 0.0, 10.0, 0.0, 0.0]
    assert [step[1] for step in play(env, [0, 7])] == [-1.0, 10.0]  # nothing is left of the last
    env = gym.make("TokenGeneration-v0", task=custom_task(sevens))
    assert [step[1] for step in play(env, [7, 0, 7, 1, 5])] == [0.0, 0.0, 0.0, 0.0, 19.0]


def test_what_the_reward_function_is_given():
    seen = []

    def reward(responses):
        seen.append(copy.deepcopy(responses))
        responses.tokens[:] = 3  # its arrays are its own
        return Scores(np.zeros(len(responses)))

    env = make_vec(custom_task(reward), 3)
    env.reset(options={"task_id": np.array([0, 1, 1])})
    env.step(np.array([1, 5, 2]))
    env.step(np.array([5, 0, 5]))
    observations, *_ = env.step(np.array([0, 0, 0]))
    assert observations.tolist() == [
        [0, 1, 2, 1, 5, 8, 8, 8],
        [4, 5, 8, 8, 8, 8, 8, 8],
        [4, 2, 5, 8, 8, 8, 8, 8],
    ]
    assert [s.task_ids.tolist() for s in seen] == [[1], [0, 1]]
    assert [s.tokens.tolist() for s in seen] == [[[5]], [[1, 5], [2, 5]]]
    assert [s.lengths.tolist() for s in seen] == [[1], [2, 2]]
    assert [s.stop_reasons.tolist() for s in seen] == [["eos"], ["eos", "eos"]]


@pytest.mark.parametrize("mode", ["disabled", "next_step", "same_step"])
def test_a_failing_judge_is_an_error_and_the_step_can_be_taken_again(mode):
    down = [True]

    def reward(responses):
        if down[0] and (responses.task_ids == 1).any():
            raise ConnectionError("no judge")
        return Scores(responses.lengths, status=["unparsed"] * len(responses))

    env = make_vec(custom_task(reward), 4, mode)
    env.reset(seed=0, options={"task_id": np.array([0, 1, 0, 1])})
    before, *_ = env.step(np.array([0, 1, 2, 3]))
    message = "ConnectionError: no judge; raised for row 3 (task 1, response '3')"
    for _ in range(2):
        with pytest.raises(RewardError, match=re.escape(message)):
            env.step(np.array([5, 0, 0, 5]))
    shown, _ = env.reset(options={"reset_mask": np.array([False, False, True, False])})
    np.testing.assert_array_equal(shown[[0, 1, 3]], before[[0, 1, 3]])
    down[0] = False
    observations, rewards, terminated, _, info = env.step(np.array([5, 0, 0, 5]))
    assert terminated.tolist() == [True, False, False, True] and rewards.tolist() == [2, 0, 0, 2]
    assert observations[1].tolist()[:3] == [4, 1, 0]
    final = info["final_info"] if mode == "same_step" else info
    assert final["status"][[0, 3]].tolist() == ["unparsed"] * 2


@pytest.mark.parametrize("reward_at", ["end", "token"])
def test_nan_is_an_error_that_names_row_and_task(reward_at):
    def reward(responses):
        return Scores(np.where(responses.task_ids == 1, np.nan, 1.0))

    env = make_vec(custom_task(reward, reward_at=reward_at), 3)
    env.reset(options={"task_id": np.array([0, 0, 1])})
    message = "reward: got nan for row 2 (task 1, response ''); allowed: finite numbers"
    with pytest.raises(RewardError, match=re.escape(message)):
        env.step(np.array([5, 5, 5]))
