"""TokenGeneration-v0: rows and the scalar environment, info, tasks, masks, memory, text, bad input."""

import copy
import pickle
import re
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from countdown import assert_same, info_of_row
from token_worlds import custom_task, make_vec, tiny_task

from llmgym import AutoresetMode
from llmgym.syllable_task import syllable_task
from llmgym.token_generation import TokenGenerationEnv, TokenGenerationVectorEnv
from llmgym.token_rewards import Scores
from llmgym.token_tasks import TokenTask

END_KEYS = {"stop_reason", "response_length", "status"}


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
