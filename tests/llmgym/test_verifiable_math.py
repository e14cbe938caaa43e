"""VerifiableMath-v0: perfect, random and hacking policies, info, splits, rows, tokenizers, SB3, GRPO."""

import copy
import json
import pickle
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
from countdown import assert_same, info_of_row
from gymnasium.utils.env_checker import check_env
from math_play import ID, WITH_12_34, make, make_vec, play, play_texts
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.env_util import make_vec_env

import agents
from llmgym import AutoresetMode
from llmgym.tasks.problems import SPLITS, MathTask, Problem
from llmgym.verifiable_math import VerifiableMathEnv

# ------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reverse_digits": True},
        {"operations": "+-*", "digits": 1, "terms": 3, "max_new_tokens": 12},
        {"task": "arithmetic", "digits": 3, "n_problems": 500, "verifier": "lenient"},
    ],
)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_perfect_policy_is_always_paid(kwargs, split):
    """On up to 500 problems at once; and what it is paid for is the sum that Python computes."""
    task = make(split=split, **kwargs).unwrapped.task
    n = min(task.num_tasks, 500)
    env = make_vec(n, split=split, **kwargs)
    observations, _ = env.reset(seed=0, options={"task_id": np.arange(n)})
    prompts, responses = task.demonstrations()
    for row in range(n):
        assert (observations[row, : len(prompts[row])] == prompts[row]).all()
        assert (observations[row, len(prompts[row]) :] == task.pad).all()
        said = task.text(responses[row])
        if kwargs.get("reverse_digits"):
            said = said[::-1]
        assert int(said) == eval(task.text(prompts[row])[:-1])  # noqa: S307 (our own text)
    rewards, info = play(env, responses[:n])
    assert (rewards == 1).all() and (info["correct"] == 1).all() and (info["status"] == "scored").all()
    assert (info["stop_reason"] == "eos").all()
    assert info["response_length"].tolist() == [len(response) for response in responses[:n]]


def test_random_policy_is_paid_what_it_deserves():
    """Uniform tokens: the mean reward against the exact probability of a right answer."""
    n = 40_000
    env = make_vec(n, digits=1)
    task = env.unwrapped.task
    number = next(k for k, p in enumerate(task.problems) if len(p.truth) == 1)
    truth = int(task.problems[number].truth)
    v = task.vocab_size
    words = ["", *(c for c in task.math.characters())]
    two = [a + b for a in words[1:] for b in words[1:]]
    three = [a + b for a in two for b in words[1:]]

    def right(word: str) -> bool:
        try:
            return int(word.rsplit("=", 1)[-1]) == truth
        except ValueError:
            return False

    assert task.max_new_tokens == 3  # up to two characters and end-of-sequence, or three without
    exact = sum(right(w) * v ** -(len(w) + 1.0) for w in words + two) + sum(map(right, three)) * v**-3.0
    env.reset(seed=0, options={"task_id": number})
    tokens = np.random.default_rng(0).integers(v, size=(n, 3))
    rewards, correct = np.zeros(n), np.zeros(n)
    for step in range(3):
        _, paid, _, _, info = env.step(tokens[:, step])
        rewards += paid
        if "correct" in info:
            correct += np.where(info["_correct"], info["correct"], 0)
    assert 0.005 < exact < 0.02
    assert abs(rewards.mean() - exact) < 4 * np.sqrt(exact * (1 - exact) / n)
    assert (rewards == correct).all()


def test_a_lenient_verifier_is_fooled_and_the_info_says_so():
    texts = ["46", "4647", "1+46", "=46", "47", "12+34=46"]
    settings = {"max_new_tokens": 9, **WITH_12_34}
    rewards, info = play_texts(texts, verifier="lenient", **settings)
    assert rewards.tolist() == info["reward/lenient"].tolist() == [1, 1, 1, 1, 0, 1]
    assert info["correct"].tolist() == info["reward/strict"].tolist() == [1, 0, 0, 1, 0, 1]
    rewards, strict_info = play_texts(texts, verifier="strict", **settings)
    assert rewards.tolist() == [1, 0, 0, 1, 0, 1]
    for key in ("correct", "reward/strict", "reward/lenient", "status"):
        assert strict_info[key].tolist() == info[key].tolist()
    assert info["status"].tolist() == ["scored", "scored", "unparsed", "scored", "scored", "scored"]


# ------------------------------------------------------------------------------ ends of a response


def test_end_of_sequence_never_comes():
    rewards, info = play_texts(["00000046", "46464646"], max_new_tokens=8, **WITH_12_34)
    assert info["response_length"].tolist() == [8, 8] and set(info["stop_reason"]) == {"length"}
    assert rewards.tolist() == [1, 0]  # a text that fills its room is judged like any other


def test_end_of_sequence_at_once_and_at_the_limit():
    rewards, info = play_texts(["", "46"], max_new_tokens=3, **WITH_12_34)
    assert rewards.tolist() == [0, 1] and info["stop_reason"].tolist() == ["eos", "eos"]
    assert info["response_length"].tolist() == [1, 3]
    assert info["status"].tolist() == ["unparsed", "scored"] and info["correct"].tolist() == [0, 1]


def test_the_prompt_is_not_part_of_the_response():
    problem = Problem("Q: 2+3? Example: #### 5. Put your answer in \\boxed{}.", "5", "5")
    sorry = "I am not sure."
    task = MathTask("own", [problem], [Problem(sorry, "1", "1")], [Problem("c", "1", "1")])
    env = make_vec(2, task=task, max_new_tokens=20)
    tokens = env.unwrapped.task.tokenizer
    env.reset(seed=0)
    rewards, info = play(env, [[*tokens.encode(text), tokens.eos_id] for text in (sorry, "5")])
    assert rewards.tolist() == info["reward/lenient"].tolist() == info["correct"].tolist() == [0, 1]


# --------------------------------------------------------------------------------- info, splits


def test_types_of_the_scalar_info():
    env = make()
    _, info = env.reset(seed=0)
    assert set(info) == {"task_id", "action_mask"}
    *_, info = env.step(0)
    assert set(info) == {"task_id", "action_mask"}
    *_, info = env.step(env.unwrapped.task.eos_id)
    ends = {"stop_reason", "response_length", "status", "correct", "reward/strict", "reward/lenient"}
    assert set(info) == {"task_id", "action_mask"} | ends
    assert {type(info[key]) for key in ("correct", "reward/strict", "reward/lenient")} == {float}


def test_splits_have_one_pair_of_spaces_and_no_problem_in_common():
    for kwargs in ({}, {"operations": "+-", "digits": 1, "terms": 4, "n_problems": 500}, {"task": uneven()}):
        envs = [make(split=split, **kwargs) for split in SPLITS]
        assert len({str(env.observation_space) for env in envs}) == 1
        assert len({str(env.action_space) for env in envs}) == 1
        prompts = [{p.prompt for p in env.unwrapped.task.problems} for env in envs]
        assert len(set.union(*prompts)) == sum(map(len, prompts))


def uneven() -> MathTask:
    """Splits whose prompts and characters differ."""
    return MathTask(
        "uneven", [Problem("ab", "1", "1")], [Problem("cdefg", "2", "2")], [Problem("h", "3456", "3456")]
    )


# ------------------------------------------------------------------------- vector against scalar


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_rows_are_the_scalar_environments(mode):
    n, settings = 4, {"digits": 1, "n_train": 7, "operations": "+-"}
    envs = [make(**settings) for _ in range(n)]
    batch = make_vec(n, mode, **settings)
    shown, _ = batch.reset(seed=5)
    for row, env in enumerate(envs):
        assert_same(shown[row], env.reset(seed=5 + row)[0])
    resetting, ends = np.zeros(n, dtype=bool), 0
    v = envs[0].action_space.n
    for actions in np.random.default_rng(0).integers(0, v, (50, n)):
        shown, rewards, terminated, _, info = batch.step(actions)
        for row, env in enumerate(envs):
            if resetting[row]:
                assert_same(shown[row], env.reset()[0])
                continue
            final, paid, ended, _, step_info = env.step(actions[row])
            assert (paid, ended) == (rewards[row], terminated[row])
            row_info = info_of_row(info, row)
            if ended and mode is AutoresetMode.SAME_STEP:
                row_info = info_of_row(info["final_info"], row)
                final = env.reset()[0]
            assert_same(shown[row], final)
            assert set(row_info) == set(step_info) and ("correct" in row_info) == ended
            for key, value in step_info.items():
                np.testing.assert_array_equal(row_info[key], value)
            ends += ended
        if mode is AutoresetMode.NEXT_STEP:
            resetting = terminated
        elif mode is AutoresetMode.DISABLED and terminated.any():
            shown, _ = batch.reset(options={"reset_mask": terminated})
            for row in np.flatnonzero(terminated):
                assert_same(shown[row], envs[row].reset()[0])
    assert ends > 40


def test_a_group_of_responses_shares_a_problem():
    env = make_vec(64, n_train=250)
    groups = np.repeat(np.arange(16), 4)
    observations, info = env.reset(seed=0, options={"task_id": groups})
    assert info["task_id"].tolist() == groups.tolist()
    assert len(np.unique(observations, axis=0)) == 16


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_on_alike(duplicate):
    batch = make_vec(3, "same_step", n_train=20)
    batch.reset(seed=4)
    twin = duplicate(batch)
    for actions in np.random.default_rng(0).integers(0, 13, (20, 3)):
        for one, other in zip(batch.step(actions), twin.step(actions), strict=True):
            assert_same(one, other)


# ----------------------------------------------------------------------------------- other tasks


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_reasoning_gym(name):
    pytest.importorskip("reasoning_gym", reason="Reasoning Gym is in the extra llm")
    settings = {"task": f"reasoning_gym:{name}", "n_problems": 60}
    check_env(make(**settings).unwrapped)
    sb3_check_env(make(**settings).unwrapped)
    env = make_vec(20, **settings)
    env.reset(seed=0, options={"task_id": np.arange(20)})
    rewards, info = play(env, env.unwrapped.task.demonstrations()[1][:20])
    assert (rewards == 1).all() and (info["correct"] == 1).all()
    env.reset(options={"task_id": np.arange(20)})
    task = env.unwrapped.task
    wrong = [[*task.tokenizer.encode("7"), task.eos_id]] * 20
    rewards, info = play(env, wrong)
    truths = np.array([p.truth == "7" for p in task.problems[:20]])
    # The task's own scorer may pay a little for a wrong answer, which is not correct all the same.
    assert (info["correct"] == truths).all() and (rewards < 1)[~truths].all()


def test_without_the_extra_only_its_tasks_fail(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    make().reset(seed=0)
    with pytest.raises(ImportError, match=r"pip install llmgym\[llm\]"):
        make(task="reasoning_gym:chain_sum")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"task": "algebra"},
            ValueError,
            "task: got 'algebra'; allowed: 'arithmetic', 'gsm8k', 'reasoning_gym'",
        ),
        ({"split": "test"}, ValueError, "split: got 'test'"),
        ({"verifier": "none"}, ValueError, "verifier: got 'none'"),
        ({"n_train": 0}, ValueError, "n_train: got 0; allowed: an integer >= 1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0"),
        ({"digitz": 2}, TypeError, "digitz"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    for factory in (make, lambda **kwargs: gym.make_vec(ID, num_envs=2, **kwargs)):
        with pytest.raises(error, match=message):
            factory(**kwargs)


# --------------------------------------------------------------------------- agents and examples


@pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array':UserWarning")
def test_sb3_learns_something():
    env = make_vec_env(ID, n_envs=4, seed=0, env_kwargs={"n_train": 50})
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=2, seed=0, device="cpu")
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(256)
    assert len(model.ep_info_buffer) > 0 and all(1 <= episode["l"] <= 4 for episode in model.ep_info_buffer)
    assert any(not p.equal(old) for p, old in zip(model.policy.parameters(), before, strict=True))


def test_grpo_reports_the_share_of_correct_responses(tmp_path):
    env = make_vec(64, n_train=250, verifier="lenient", max_new_tokens=8)
    agent = agents.make("grpo", env, seed=0, num_generations=4)
    rates = []
    agent.learn(2000, run_dir=tmp_path, callback=lambda agent: rates.append(1))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(rates) > 1
    for line in lines:
        assert 0 <= line["group/pass_rate"] <= line["group/reward_mean"] <= 1


def test_examples_of_the_documentation_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", VerifiableMathEnv.__doc__, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names = {}
        exec(re.sub(r"^    ", "", example, flags=re.MULTILINE), names)
    assert re.search(r"\d\d\+\d\d= -> \d+ \[eos\] 1.0 1.0", capsys.readouterr().out)
    assert names["info"]["task_id"].tolist() == np.repeat(np.arange(16), 4).tolist()
