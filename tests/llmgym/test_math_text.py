"""MathText-v0: responses as text, rows and the scalar environment, spaces, info, bad input, examples."""

import copy
import pickle
import re

import gymnasium as gym
import numpy as np
import pytest
from countdown import assert_same, info_of_row
from gymnasium.spaces import Text, Tuple
from gymnasium.utils.env_checker import check_env

from llmgym import AutoresetMode
from llmgym.math_text import MathTextEnv
from llmgym.tasks.problems import SPLITS, MathTask, Problem

ID = "MathText-v0"
END_KEYS = {"task_id", "correct", "status", "reward/strict", "reward/lenient"}


def make(**kwargs):
    return gym.make(ID, **kwargs)


def solve(prompt: str) -> str:
    return str(eval(prompt.rstrip("=")))  # noqa: S307 (our own text)


def own_task(prompt: str, truth: str) -> MathTask:
    return MathTask(
        "own", [Problem(prompt, truth, truth)], [Problem("b", "1", "1")], [Problem("c", "1", "1")]
    )


# ------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("split", SPLITS)
def test_a_model_that_computes_is_always_paid_and_one_that_does_not_never(split):
    n = 300
    env = gym.make_vec(ID, num_envs=n, split=split, operations="+-", digits=2, autoreset_mode="disabled")
    problems, info = env.reset(seed=0, options={"task_id": np.arange(n)})
    assert len(set(problems)) == n and info["task_id"].tolist() == list(range(n))
    said = [f"The answer is {int(solve(p)) + k % 2}." for k, p in enumerate(problems)]
    _, rewards, terminated, truncated, info = env.step(said)
    assert terminated.all() and not truncated.any()
    assert rewards.tolist() == info["correct"].tolist() == [1 - k % 2 for k in range(n)]


def test_rewards_status_and_types():
    env = make(split="train", verifier="lenient")
    problem, info = env.reset(seed=3)
    truth = int(solve(problem))
    assert set(info) == {"task_id"} and env.unwrapped.problems[info["task_id"]].prompt == problem
    expected = {
        f"{truth}": (1, 1, "scored"),
        f"No, \\boxed{{{truth}}}!": (1, 1, "scored"),
        f"{problem}{truth}": (1, 1, "scored"),
        f"{truth} or {truth + 1}": (0, 1, "scored"),
        f"{truth + 1}": (0, 0, "scored"),
        problem: (0, 0, "unparsed"),
        "": (0, 0, "unparsed"),
    }
    for text, (strict, lenient, status) in expected.items():
        env.reset(options={"task_id": info["task_id"]})
        shown, reward, terminated, truncated, final = env.step(text)
        assert (shown, terminated, truncated) == (problem, True, False) and set(final) == END_KEYS
        assert (final["correct"], final["reward/strict"]) == (strict, strict), text
        assert (reward, final["reward/lenient"], final["status"]) == (lenient, lenient, status), text
        assert type(reward) is type(final["correct"]) is float and type(final["status"]) is str


@pytest.mark.parametrize("verifier", ["strict", "lenient"])
def test_the_prompt_is_never_an_answer_and_an_answer_is_extracted_once(verifier):
    prompt = "Q: 2+3? Example: #### 5. Put your answer in \\boxed{}."
    for task, text, paid in [
        (own_task(prompt, "5"), "I am not sure.", 0.0),
        (own_task("Which two?", "2, 3"), "\\boxed{2, 3}", 1.0),
    ]:
        env = make(task=task, verifier=verifier)
        env.reset(seed=0)
        _, reward, _, _, info = env.step(text)
        assert reward == info["correct"] == info["reward/strict"] == info["reward/lenient"] == paid


# ------------------------------------------------------------------------------- rows and scalar


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_rows_are_the_scalar_environments(mode):
    n, settings = 4, {"n_train": 9, "digits": 1}
    envs = [make(**settings) for _ in range(n)]
    batch = gym.make_vec(ID, num_envs=n, autoreset_mode=mode, **settings)
    shown, info = batch.reset(seed=5)
    rng, resetting, ends, paid_rows = np.random.default_rng(0), np.zeros(n, bool), 0, 0
    for row, env in enumerate(envs):
        start, start_info = env.reset(seed=5 + row)
        assert shown[row] == start and info_of_row(info, row) == start_info
    for _ in range(30):
        texts = [solve(shown[row]) if rng.random() < 0.5 else "7" for row in range(n)]
        shown, rewards, terminated, _, info = batch.step(texts)
        assert type(shown) is tuple and shown in batch.observation_space
        for row, env in enumerate(envs):
            if resetting[row]:
                assert shown[row] == env.reset()[0] and rewards[row] == 0
                continue
            final, paid, ended, _, step_info = env.step(texts[row])
            assert (paid, ended) == (rewards[row], terminated[row])
            row_info = info_of_row(info, row)
            if mode is AutoresetMode.SAME_STEP:
                assert info["final_obs"][row] == final
                row_info = info_of_row(info["final_info"], row)
                final = env.reset()[0]
            assert shown[row] == final and row_info == step_info
            ends, paid_rows = ends + ended, paid_rows + paid
        if mode is AutoresetMode.NEXT_STEP:
            resetting = terminated
        elif mode is AutoresetMode.DISABLED:
            shown, _ = batch.reset(options={"reset_mask": terminated})
            assert list(shown) == [env.reset()[0] for env in envs]
    assert ends >= 60 and 0.3 * ends < paid_rows < 0.8 * ends


def test_gymnasiums_own_vector_environment_agrees():
    settings = {"num_envs": 3, "n_train": 9}
    native = gym.make_vec(ID, autoreset_mode="next_step", **settings)
    sync = gym.make_vec(ID, vectorization_mode="sync", **settings)
    assert native.reset(seed=2)[0] == sync.reset(seed=2)[0]
    assert native.observation_space == sync.observation_space and native.action_space == sync.action_space
    for step in range(8):
        texts = (str(20 + step), "100", "no")
        ours, theirs = native.step(texts), sync.step(texts)
        assert ours[0] == theirs[0] and ours[1].tolist() == theirs[1].tolist()
        for key in set(theirs[4]) & END_KEYS:
            assert ours[4][key][ours[4]["_" + key]].tolist() == theirs[4][key][theirs[4]["_" + key]].tolist()


def test_a_group_of_responses_shares_a_problem():
    env = gym.make_vec(ID, num_envs=8)
    problems, info = env.reset(seed=0, options={"task_id": np.repeat([3, 5], 4)})
    assert len(set(problems[:4])) == len(set(problems[4:])) == 1 and problems[0] != problems[4]
    final = env.step(["1"] * 8)[4]["final_info"]
    assert final["task_id"].tolist() == [3] * 4 + [5] * 4


def test_problems_are_uniform():
    _, info = gym.make_vec(ID, num_envs=2000, n_train=8).reset(seed=0)
    counts = np.bincount(info["task_id"], minlength=8)
    assert (np.abs(counts - 250) < 4 * np.sqrt(2000 / 8 * 7 / 8)).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_on_alike(duplicate):
    batch = gym.make_vec(ID, num_envs=3, n_train=20)
    batch.reset(seed=4)
    twin = duplicate(batch)
    for _ in range(10):
        one, other = batch.step(("100",) * 3), twin.step(("100",) * 3)
        assert one[0] == other[0]
        assert_same(one[4]["final_info"], other[4]["final_info"])


# ---------------------------------------------------------------------------- spaces, bad input


def test_spaces_list_their_characters():
    env = make(operations="+-", max_length=50)
    assert env.observation_space == Text(6, min_length=1, charset="+-0123456789=")
    assert env.action_space.max_length == 50 and env.action_space.min_length == 0
    assert set("aZ09 \n\t.,\\{}+=<>") < env.action_space.character_set
    assert "" in env.action_space and "é" not in env.action_space
    spaces = [make(split=split, operations="+-").observation_space for split in SPLITS]
    assert spaces[0] == spaces[1] == spaces[2]
    batch = gym.make_vec(ID, num_envs=2)
    assert isinstance(batch.observation_space, Tuple)
    own = make(task=own_task("Wie groß?", "5")).unwrapped
    assert "ß" in own.observation_space.character_set and "ß" in own.action_space.character_set
    assert make(characters="ab1").action_space.character_set == frozenset("ab1")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "it is \N{SNOWMAN}",
            ValueError,
            r"action: row 0 has '☃' \(U\+2603\) at place 6; allowed: the characters",
        ),
        ("12345678901", ValueError, "action: row 0 has 11 characters; allowed: 0 to 10"),
        (46, TypeError, "action: row 0 has int; allowed: a text"),
        (["46"], TypeError, "action: row 0 has list; allowed: a text"),
    ],
)
def test_bad_actions_of_the_scalar_environment(text, error, message):
    env = make(max_length=10).unwrapped
    problem, _ = env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(text)
    assert env.step(solve(problem))[1] == 1.0  # the episode goes on


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["1", "é"], ValueError, r"action: row 1 has 'é' \(U\+00E9\) at place 0"),
        (["1", 2], TypeError, "action: row 1 has int; allowed: a text"),
        (["1"], ValueError, "action: got list of 1; allowed: 2 texts, one per row"),
        ("12", ValueError, "action: got str of 2; allowed: 2 texts, one per row"),
        (3, ValueError, "action: got int; allowed: 2 texts"),
    ],
)
def test_bad_actions_of_the_vector_environment(texts, error, message):
    env = gym.make_vec(ID, num_envs=2)
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(texts)
    assert env.step(np.array(["1", "2"]))[2].all()  # arrays of texts will do


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"task": "algebra"}, ValueError, "task: got 'algebra'"),
        ({"split": "test"}, ValueError, "split: got 'test'"),
        ({"verifier": "none"}, ValueError, "verifier: got 'none'"),
        ({"max_length": 0}, ValueError, "max_length: got 0; allowed: an integer >= 1"),
        ({"digitz": 2}, TypeError, "digitz"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    for factory in (make, lambda **kwargs: gym.make_vec(ID, num_envs=2, **kwargs)):
        with pytest.raises(error, match=message):
            factory(**kwargs)


# ------------------------------------------------------------------------- other tasks, examples


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_reasoning_gym(name):
    pytest.importorskip("reasoning_gym", reason="Reasoning Gym is in the extra llm")
    settings = {"task": f"reasoning_gym:{name}", "n_problems": 60, "split": "held_out"}
    check_env(make(**settings).unwrapped)
    env = make(**settings)
    for task_id, problem in enumerate(env.unwrapped.problems):
        for text, correct in [(f"So: <answer>{problem.truth}</answer>", 1.0), ("<answer>1.5</answer>", 0.0)]:
            env.reset(options={"task_id": task_id})
            _, reward, _, _, info = env.step(text)
            assert info["correct"] == correct and (reward == 1) == (correct == 1)


def test_examples_of_the_documentation_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", MathTextEnv.__doc__, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names = {}
        exec(re.sub(r"^    ", "", example, flags=re.MULTILINE), names)
    assert capsys.readouterr().out == "1.0\n"
    sums = [eval(problem[:-1]) for problem in names["problems"]]  # noqa: S307 (our own text)
    assert names["correct"].tolist() == [float(total == 42) for total in sums]
