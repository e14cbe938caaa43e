"""TokenGeneration-v0: episodes, rewards, info, tasks, memory, bad input."""

import copy
import pickle
import re
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from countdown import assert_same, info_of_row
from token_worlds import EOS, all_words, as_arrays, custom_task, make_vec, tiny_task

from llmgym import AutoresetMode
from llmgym.syllable_task import syllable_task
from llmgym.token_generation import TokenGenerationEnv, TokenGenerationVectorEnv
from llmgym.token_rewards import RewardError, Scores
from llmgym.token_tasks import Alphabet, TokenTask

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


# ------------------------------------------------------------------------- vector against scalar


@pytest.mark.parametrize("reward_at", ["end", "token"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_rows_are_the_scalar_environments(mode, reward_at):
    n = 6
    task = tiny_task(order=3, max_new_tokens=3, context_length=6, reward_at=reward_at)
    envs = [gym.make("TokenGeneration-v0", task=task) for _ in range(n)]
    batch = make_vec(task, n, mode)
    shown, info = batch.reset(seed=11)
    for row, env in enumerate(envs):
        start, start_info = env.reset(seed=11 + row)
        assert_same(shown[row], start)
        assert_same(info_of_row(info, row), {k: np.asarray(v) for k, v in start_info.items()})
    done, ends = np.zeros(n, dtype=bool), 0
    for actions in np.random.default_rng(0).integers(0, 4, (60, n)):
        shown, rewards, terminated, truncated, info = batch.step(actions)
        assert not truncated.any()
        for row, env in enumerate(envs):
            if done[row]:  # next-step mode: this step was the reset
                assert_same(shown[row], env.reset()[0])
                assert rewards[row] == 0.0 and not END_KEYS & set(info_of_row(info, row))
                continue
            final, paid, ended, _, step_info = env.step(actions[row])
            assert (paid, ended) == (rewards[row], terminated[row])
            row_info = info_of_row(info, row)
            if ended and mode is AutoresetMode.SAME_STEP:
                assert_same(info["final_obs"][row], final)
                row_info = info_of_row(info["final_info"], row)
                final = env.reset()[0]
            assert_same(shown[row], final)
            assert set(row_info) == set(step_info)
            for key, value in step_info.items():
                np.testing.assert_array_equal(row_info[key], value)
            ends += ended
        if mode is AutoresetMode.NEXT_STEP:
            done = terminated
        elif mode is AutoresetMode.DISABLED and terminated.any():
            shown, _ = batch.reset(options={"reset_mask": terminated})
            for row in np.flatnonzero(terminated):
                assert_same(shown[row], envs[row].reset()[0])
    assert ends > 60


def test_gymnasiums_own_vector_environment_agrees():
    native = make_vec(tiny_task(), 3, "next_step")
    sync = gym.make_vec(
        "TokenGeneration-v0", num_envs=3, vectorization_mode="sync", task=tiny_task()
    )
    assert_same(native.reset(seed=2)[0], sync.reset(seed=2)[0])
    for actions in np.random.default_rng(1).integers(0, 4, (40, 3)):
        ours, theirs = native.step(actions), sync.step(actions)
        for left, right in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_array_equal(left, right)
        assert set(ours[4]) == set(theirs[4])
        for key in ("stop_reason", "status", "ref_logp"):
            if key in ours[4]:
                shown = ours[4]["_" + key]
                np.testing.assert_array_equal(ours[4][key][shown], theirs[4][key][shown])


def test_default_mode_is_next_step_and_spaces_are_as_documented():
    env = gym.make_vec("TokenGeneration-v0", num_envs=2)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert env.single_action_space == gym.spaces.Discrete(20)
    assert env.single_observation_space == gym.spaces.Box(0, 20, (25,), np.int64)
    assert env.unwrapped.task.text(env.unwrapped.task.prompts[1]) == "den"


def test_types_of_the_scalar_info():
    env = gym.make("TokenGeneration-v0")
    _, info = env.reset(seed=0)
    assert set(info) == {"task_id", "action_mask"} and type(info["task_id"]) is int
    *_, info = env.step(env.unwrapped.task.eos_id)
    components = {"reward/patterns", "reward/repeats", "reward/length"}
    assert set(info) == {"task_id", "action_mask", "ref_logp"} | END_KEYS | components
    assert type(info["stop_reason"]) is type(info["status"]) is str
    assert type(info["response_length"]) is int
    assert {type(info[key]) for key in components | {"ref_logp"}} == {float}
    assert info["ref_logp"] == pytest.approx(np.log(0.08))
    env = gym.make("TokenGeneration-v0", task=custom_task())
    env.reset(seed=0)
    assert set(env.step(0)[4]) == {"task_id", "action_mask"}  # nobody knows a reference


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_in_mid_episode_go_on_alike(duplicate):
    batch = make_vec(syllable_task("token"), 4, "same_step")
    batch.reset(seed=4)
    actions = np.random.default_rng(0).integers(0, 20, (70, 4))
    batch.step(actions[0])
    twin = duplicate(batch)
    for row_actions in actions[1:]:
        for one, other in zip(batch.step(row_actions), twin.step(row_actions), strict=True):
            assert_same(one, other)


# ---------------------------------------------------------------------------------------- tasks


def test_a_group_of_responses_shares_a_prompt():
    env = make_vec(None, 8)
    tasks = np.repeat([3, 5], 4)
    observations, info = env.reset(seed=0, options={"task_id": tasks})
    assert info["task_id"].tolist() == tasks.tolist()
    assert (observations[:4] == observations[0]).all() and (observations[4:] == observations[4]).all()
    tasks[:] = 0  # the environment keeps no view of the caller's array
    assert env.step(np.zeros(8, dtype=int))[4]["task_id"].tolist() == [3] * 4 + [5] * 4


def test_prompts_are_uniform():
    _, info = make_vec(None, 8000).reset(seed=0)
    counts = np.bincount(info["task_id"], minlength=8)
    assert (np.abs(counts - 1000) < 4 * np.sqrt(8000 / 8 * 7 / 8)).all()


def test_one_prompt_draws_nothing():
    env = gym.make("TokenGeneration-v0", task=custom_task(prompts=[[1]])).unwrapped
    env.reset(seed=3)
    before = copy.deepcopy(env.np_random.bit_generator.state)
    env.step(5)
    env.reset()
    assert env.np_random.bit_generator.state == before


# ----------------------------------------------------------------------------- masks and memory


def test_masks():
    env = gym.make("TokenGeneration-v0")
    _, info = env.reset(seed=0)
    masks = [info["action_mask"], env.step(3)[4]["action_mask"], env.unwrapped.action_masks()]
    batch = make_vec(None, 3)
    _, info = batch.reset(seed=0)
    masks += list(info["action_mask"]) + list(batch.unwrapped.action_masks())
    for mask in masks:
        assert mask.shape == (20,) and mask.dtype == np.int8 and mask.all()
        with pytest.raises(ValueError, match="read-only"):
            mask[0] = 0
    env.action_space.sample(mask=masks[0])  # int8 is what Gymnasium asks for
    assert batch.unwrapped.action_masks().shape == (3, 20)


def big_task(**kwargs) -> TokenTask:
    return TokenTask(
        prompts=[np.arange(5), np.arange(1000, 1020)],
        vocab_size=50_000,
        eos_id=49_999,
        max_new_tokens=12,
        reward=lambda responses: Scores((responses.tokens % 7 == 0).mean(axis=1)),
        **kwargs,
    )


@pytest.mark.parametrize("mode", ["disabled", "next_step", "same_step"])
@pytest.mark.parametrize("reward_at", ["end", "token"])
def test_a_large_vocabulary_costs_no_memory(mode, reward_at):
    """1024 rows of 50,000 tokens: one copied mask or one-hot array would be 51 MB or more."""
    env = make_vec(big_task(reward_at=reward_at), 1024, mode)
    actions = np.random.default_rng(0).integers(0, 50_000, (30, 1024))
    actions[5, :100] = 49_999
    tracemalloc.start()
    try:
        env.reset(seed=0)
        for row_actions in actions:
            info = env.step(row_actions)[4]
            assert "action_mask" not in info or info["action_mask"].shape == (1024, 50_000)
            env.unwrapped.action_masks()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


# ----------------------------------------------------------------------------------------- text


def test_text_so_far():
    env = gym.make("TokenGeneration-v0", render_mode="ansi")
    with pytest.raises(gym.error.ResetNeeded):
        env.unwrapped.render()
    env.reset(options={"task_id": 1})
    assert env.render() == "den -> "
    letters = env.unwrapped.task.decode
    for token in letters.encode("kobe"):
        env.step(token)
    assert env.render() == "den -> kobe"
    env.step(19)
    assert env.render() == "den -> kobe [eos]"
    batch = gym.make_vec("TokenGeneration-v0", num_envs=2, render_mode="ansi", task=custom_task())
    batch.reset(options={"task_id": np.array([0, 1])})
    for action in (1, 2, 3, 4, 6):
        batch.step(np.array([action, 0]))
    assert batch.render() == ("0 1 2 -> 1 2 3 4 6 [length]", "4 -> 0 0 0 0 0 [length]")
    assert gym.make("TokenGeneration-v0").unwrapped.render() is None


def test_examples_of_the_documentation_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", TokenGenerationEnv.__doc__, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names = {}
        exec(re.sub(r"^    ", "", example, flags=re.MULTILINE), names)
    assert " -> " in capsys.readouterr().out
    envs, task = names["envs"], names["task"]
    envs.reset(seed=0, options={"task_id": 0})
    envs.step(np.array([2, 3, 10, 4]))
    _, rewards, terminated, _, info = envs.step(np.array([10, 10, 0, 0]))
    assert rewards[:2].tolist() == [1, 0] and terminated.tolist() == [True, True, False, False]
    assert info["reward/digits"][:2].tolist() == [1, 1]
    assert task.judge(task.responses(0, [[10]], [1])).status.tolist() == ["unparsed"]


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"task": 3}, TypeError, "task: got int; allowed: TokenTask or None"),
        ({"tusk": None}, TypeError, "tusk"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        gym.make("TokenGeneration-v0", **kwargs)
    with pytest.raises(error, match=message):
        gym.make_vec("TokenGeneration-v0", num_envs=2, **kwargs)


def test_bad_render_modes():
    for make in (TokenGenerationEnv, TokenGenerationVectorEnv):
        with pytest.raises(TypeError, match="render_mode: got 'human'; allowed: 'ansi' or None"):
            make(render_mode="human")


def test_bad_tasks_and_actions_name_rows_values_and_range():
    env = make_vec(None, 3)
    with pytest.raises(ValueError, match="task_id: row 1 has 8; allowed: integers 0 to 7"):
        env.reset(options={"task_id": np.array([0, 8, 1])})
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action: row 2 has 20; allowed: integers 0 to 19"):
        env.step(np.array([0, 1, 20]))  # the padding is no action
    with pytest.raises(ValueError, match=r"action: got shape \(3, 20\)"):
        env.step(np.zeros((3, 20), dtype=int))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1.0], r"reference: got log-probs of shape \(1,\); allowed: \(2,\)"),
        ([-1.0, np.nan], r"row 1 \(task 1\), token 3 has log-prob nan; allowed: finite numbers <= 0"),
        ([-np.inf, -1.0], r"row 0 \(task 0\), token 2 has log-prob -inf"),
        ([-1.0, 0.5], r"row 1 \(task 1\), token 3 has log-prob 0.5"),
    ],
)
def test_a_reference_that_gives_no_log_probs(values, message):
    class Reference:
        def log_prob(self, tokens, lengths, actions):
            return np.array(values)

    env = make_vec(custom_task(reference=Reference()), 2)
    env.reset(options={"task_id": np.array([0, 1])})
    with pytest.raises(ValueError, match=message):
        env.step(np.array([2, 3]))
