"""Automata against counting by hand."""

import pickle

import numpy as np
import pytest
from token_worlds import EOS, PATTERNS, all_words, as_arrays, tiny_task

from llmgym.automaton import (
    Automaton,
    AutomatonReward,
    length_rewards,
    pattern_rewards,
    product,
    repeat_rewards,
)


def paid(automaton: Automaton, tokens) -> list[float]:
    state, payments = 0, []
    for token in tokens:
        payments.append(float(automaton.rewards[state, token]))
        state = automaton.transitions[state, token]
    return payments


def test_patterns_pay_at_their_last_token_and_overlap():
    automaton = pattern_rewards(3, [([0, 1, 0], 1.0), ([1, 0], 0.25), ([2], -0.5), ([2], -0.5)])
    assert paid(automaton, [0, 1, 0, 1, 0, 2, 2]) == [0, 0, 1.25, 0, 1.25, -1, -1]


def test_patterns_against_counting_in_random_text():
    rng = np.random.default_rng(0)
    words = {tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()): rng.normal() for _ in range(8)}
    automaton = pattern_rewards(3, list(words.items()))
    for _ in range(50):
        text = tuple(rng.integers(0, 3, 30).tolist())
        for end, payment in enumerate(paid(automaton, text), start=1):
            expected = sum(w for word, w in words.items() if text[:end][-len(word) :] == word)
            assert payment == pytest.approx(expected, abs=1e-12)


def test_repeats_and_length():
    assert paid(repeat_rewards(3, -2.0), [1, 1, 1, 0, 1, 0, 0]) == [0, -2, -2, 0, 0, 0, -2]
    automaton = length_rewards(3, 1, 0.5, cut=-1.0)
    assert paid(automaton, [0, 2, 1]) == [0.5, 0.5, 0.0] and automaton.cut.tolist() == [-1.0]


def test_product_runs_all_at_once():
    parts = [pattern_rewards(4, PATTERNS), repeat_rewards(4, -0.4), length_rewards(4, EOS, 0.1, -1)]
    automaton, states = product(parts)
    assert automaton.n_states == len(np.unique(states, axis=0)) < np.prod([p.n_states for p in parts])
    text = np.random.default_rng(1).integers(0, 4, 40)
    sums = np.sum([paid(part, text) for part in parts], axis=0)
    np.testing.assert_allclose(paid(automaton, text), sums, atol=1e-12)
    np.testing.assert_array_equal(automaton.cut, -1.0)


def test_reward_of_every_response_with_its_components():
    task = tiny_task(max_new_tokens=5)
    words = all_words(task, 0)
    tokens, lengths = as_arrays(words)
    scores = task.judge(task.responses(0, tokens, lengths))
    np.testing.assert_allclose(scores.total, [word.reward for word in words], atol=1e-12)
    for name in ("patterns", "repeats", "length"):
        expected = [word.components[name] for word in words]
        np.testing.assert_allclose(scores.components[name], expected, atol=1e-12)
    assert (scores.status == "scored").all()
    again = pickle.loads(pickle.dumps(task)).score(task.responses(0, tokens, lengths))
    np.testing.assert_array_equal(again, scores.total)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([0, 1], np.zeros((1, 2)), [0.0]), r"transitions: got shape \(2,\)"),
        (([[0.0, 0.0]], np.zeros((1, 2)), [0.0]), "of float64; allowed: .* integers"),
        (([[0, 1]], np.zeros((1, 2)), [0.0]), "state 0, token 1 leads to 1; allowed: 0 to 0"),
        (([[0, 0]], np.zeros((2, 2)), [0.0]), r"rewards: got shape \(2, 2\); allowed: \(1, 2\)"),
        (([[0, 0]], [[0.0, np.nan]], [0.0]), r"rewards: got nan at \(0, 1\); allowed: finite"),
        (([[0, 0]], np.zeros((1, 2)), [np.inf]), r"cut: got inf at \(0,\); allowed: finite"),
    ],
)
def test_bad_automata(fields, message):
    with pytest.raises(ValueError, match=message):
        Automaton(*fields)


def test_bad_parts():
    with pytest.raises(ValueError, match=r"patterns: got \(0, 3\); allowed: .* 0 to 2"):
        pattern_rewards(3, [([0, 3], 1.0)])
    with pytest.raises(ValueError, match=r"patterns: got \(\); allowed: at least one token"):
        pattern_rewards(3, [([], 1.0)])
    with pytest.raises(ValueError, match=r"vocabularies of \[3, 4\]; allowed: one size"):
        AutomatonReward({"a": repeat_rewards(3, 1.0), "b": repeat_rewards(4, 1.0)})
