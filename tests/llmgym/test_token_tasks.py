"""Token tasks: limits, responses, text, checks of what a reward function returns."""

import re

import numpy as np
import pytest
from token_worlds import custom_task, tiny_task

from llmgym.ngram import NGram
from llmgym.syllable_task import syllable_task
from llmgym.token_rewards import RewardError, Scores
from llmgym.token_tasks import Alphabet


def test_context_limit_shortens_the_response():
    """Context 8, prompt of 6, max_new_tokens 10: min(10, 8 - 6) tokens may come."""
    task = custom_task(prompts=[[0] * 6, [1]], max_new_tokens=10, context_length=8)
    assert task.limits.tolist() == [2, 7]
    assert task.sequence_length == 8
    assert custom_task(prompts=[[0] * 6, [1]], max_new_tokens=10).sequence_length == 16


@pytest.mark.parametrize("length", [8, 9])
def test_a_prompt_that_leaves_no_room_is_an_error(length):
    with pytest.raises(
        ValueError,
        match=f"prompt 1 has {length} tokens and leaves no room for a response; allowed: at most 7",
    ):
        custom_task(prompts=[[0], [0] * length], context_length=8)


def test_lengths_and_not_token_values_tell_what_is_real():
    """Cut without end-of-sequence then padded with 0; and padded with the end-of-sequence id."""
    task = custom_task(eos_id=2, prompts=[[0]], max_new_tokens=3)
    responses = task.responses(0, [[5, 6, 7, 0, 0], [5, 6, 2, 2, 2]], [3, 3])
    np.testing.assert_array_equal(
        responses.tokens != task.pad, [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    )
    assert responses.stop_reasons.tolist() == ["length", "eos"]


def test_end_of_sequence_at_the_limit_is_end_of_sequence():
    task = custom_task(max_new_tokens=3)
    responses = task.responses([0, 1, 1], [[1, 2, 5], [1, 2, 3], [1, 9, 9]], [3, 3, 1])
    assert responses.stop_reasons.tolist() == ["eos", "length", ""]


def test_text_leaves_out_the_last_end_of_sequence():
    letters = Alphabet("abcdefgh")
    task = custom_task(decode=letters)
    assert task.text(np.array([0, 1, 5])) == "ab" and task.text(np.array([5])) == ""
    assert task.text(np.array([5, 0])) == "fa" and task.text(np.array([], dtype=int)) == ""
    assert custom_task().text(np.array([7, 0, 5])) == "7 0"
    assert letters.encode("cab").tolist() == [2, 0, 1] and letters(letters.encode("cab")) == "cab"
    with pytest.raises(ValueError, match="text: got 'x'; allowed: 'a', 'b'"):
        letters.encode("ax")
    with pytest.raises(ValueError, match="allowed: each only once"):
        Alphabet("aba")


def test_default_prompts_tell_the_time_left():
    task = syllable_task()
    texts = [task.text(prompt) for prompt in task.prompts]
    assert not any(a != b and b.startswith(a) for a in texts for b in texts)
    assert len(set(task.prompt_lengths.tolist())) == 4
    assert task.vocab_size == 20 and task.sequence_length == 25


def test_reference_of_any_order():
    for order in (2, 3):
        assert syllable_task(order=order).reference.order == order
    with pytest.raises(ValueError, match="order: got 1; allowed: at least 2"):
        syllable_task(order=1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"prompts": []}, ValueError, "prompts: got none; allowed: at least one"),
        ({"prompts": [[0], []]}, ValueError, r"prompt 1 has shape \(0,\); allowed: \[length >= 1"),
        ({"prompts": [[0], [0, 8]]}, ValueError, "prompt 1 has 8 at place 1; allowed: 0 to 7"),
        ({"prompts": [[0.0]]}, TypeError, "prompt 0 has float64 values; allowed: integers"),
        ({"eos_id": 8}, ValueError, "eos_id: got 8; allowed: 0 to 7"),
        ({"eos_id": -1}, ValueError, "eos_id: got -1"),
        ({"vocab_size": 0}, ValueError, "vocab_size: got 0; allowed: an integer >= 1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0; allowed: an integer >= 1"),
        ({"context_length": 0}, ValueError, "context_length: got 0; allowed: an integer >= 1"),
        ({"reward_at": "ends"}, ValueError, "reward_at: got 'ends' .did you mean 'end'"),
        ({"reward": 3.0}, TypeError, "reward: got float; allowed: a function"),
        ({"reward": tiny_task().reward}, ValueError, "reward: made for a vocabulary of 4.* has 8"),
        (
            {"reference": NGram(np.log([[0.5, 0.5]]), 1)},
            ValueError,
            "reference: made for a vocabulary of 2; the task has 8",
        ),
    ],
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        custom_task(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [1, 2], [2]), r"got shapes \(2,\), \(1,\); allowed: \[N, T\], \[N\]"),
        ((0, [[1, 2]], [3]), "lengths: row 0 has 3; allowed: integers 1 to 2"),
        ((0, [[1, 2]], [0]), "lengths: row 0 has 0; allowed: integers 1 to 2"),
        ((2, [[1, 2]], [2]), "task_id: row 0 has 2; allowed: integers 0 to 1"),
        ((0, [[1, 2], [1, 8]], [2, 2]), "tokens: row 1 has 8; allowed: integers 0 to 7"),
        ((0, [[5, 1, 5]], [3]), "row 0 has the end-of-sequence id 5 at place 0 of 3"),
        ((1, [[1] * 6], [6]), r"lengths: row 0 \(task 1\) has 6; allowed: at most 5"),
    ],
)
def test_bad_responses(arguments, message):
    with pytest.raises(ValueError, match=message):
        custom_task().responses(*arguments)


def judge(reward):
    task = custom_task(reward=reward, decode=Alphabet("abcdefgh"))
    responses = task.responses([0, 1, 1], [[1, 5, 9], [0, 0, 1], [2, 9, 9]], [2, 3, 1])
    return task.judge(responses, np.array([40, 41, 47]))


def test_scores_come_back_as_given():
    scores = judge(
        lambda r: Scores(r.lengths, {"even": r.lengths % 2 == 0}, ["scored", "error", "timed_out"])
    )
    assert scores.total.tolist() == [2.0, 3.0, 1.0] and scores.total.dtype == np.float64
    assert scores.components["even"].tolist() == [1.0, 0.0, 0.0]
    assert scores.status.tolist() == ["scored", "error", "timed_out"]
    assert judge(lambda r: Scores([1, 2, 3])).status.tolist() == ["scored"] * 3


def raise_for_short(responses):
    if (responses.lengths == 1).any():
        raise KeyError("too short")
    return Scores(responses.lengths)


def raise_for_many(responses):
    if len(responses) > 1:
        raise MemoryError("too many")
    return Scores(responses.lengths)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raise_for_short, "KeyError: 'too short'; raised for row 47 (task 1, response 'c')"),
        (
            raise_for_many,
            "MemoryError: too many; raised for a batch of 3 responses, "
            "rows 40 (task 0), 41 (task 1), 47 (task 1)",
        ),
        (lambda r: r.lengths, "got ndarray for a batch of 3 responses, rows 40 (task 0)"),
        (lambda r: None, "got NoneType for a batch"),
        (lambda r: Scores(r.lengths[:2]), "got shape (2,) of int64 for a batch of 3 responses"),
        (lambda r: Scores(1.0), "got shape () of float64"),
        (lambda r: Scores(["1", "2", "3"]), "got shape (3,) of <U1"),
        (
            lambda r: Scores(np.where(r.lengths == 3, np.nan, 1.0)),
            "reward: got nan for row 41 (task 1, response 'aab'); allowed: finite numbers",
        ),
        (
            lambda r: Scores(r.lengths, {"x": r.lengths / [1, 1, np.inf] - [np.inf, 0, 0]}),
            "reward component 'x': got -inf for row 40 (task 0, response 'b')",
        ),
        (
            lambda r: Scores(r.lengths, {}, ["scored", "scored", "broken"]),
            "got 'broken' for row 47 (task 1, response 'c'); allowed: 'scored', 'unparsed'",
        ),
        (lambda r: Scores(r.lengths, {}, ["scored"]), "reward status: got shape (1,) for a batch"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_row(reward, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        judge(reward)


def test_the_failing_row_is_found_in_a_large_batch_with_few_calls():
    calls = []

    def reward(responses):
        calls.append(len(responses))
        if (responses.tokens[:, 0] == 7).any():
            raise ZeroDivisionError("seven")
        return Scores(responses.lengths)

    task = custom_task(reward=reward)
    tokens = np.zeros((1000, 1), dtype=int)
    tokens[637] = 7
    with pytest.raises(RewardError, match="ZeroDivisionError: seven; raised for row 637 ") as caught:
        task.score(task.responses(0, tokens, np.ones(1000, dtype=int)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(calls) <= 12 and sum(calls) < 3000
