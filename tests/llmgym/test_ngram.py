"""The n-gram model: contexts, log-probs, sampling, bad tables."""

import pickle

import numpy as np
import pytest

from llmgym.ngram import NGram


def random_model(order: int, vocab_size: int = 4, seed: int = 0) -> NGram:
    logits = np.random.default_rng(seed).standard_normal(((vocab_size + 1) ** (order - 1), vocab_size))
    return NGram.from_logits(logits, order, eos_id=1, eos_prob=0.2)


def test_contexts_are_digits_of_the_last_tokens():
    tokens = np.array([[3, 0, 2, 9], [1, 9, 9, 9], [0, 1, 2, 3]])
    lengths = np.array([3, 1, 4])
    assert random_model(1).contexts(tokens, lengths).tolist() == [0, 0, 0]
    assert random_model(2).contexts(tokens, lengths).tolist() == [2, 1, 3]
    # The digit 4 stands before the first token.
    assert random_model(3).contexts(tokens, lengths).tolist() == [0 * 5 + 2, 4 * 5 + 1, 2 * 5 + 3]
    assert random_model(4).contexts(tokens, lengths).tolist() == [3 * 25 + 2, 4 * 30 + 1, 25 + 13]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_next_contexts_agree_with_contexts(order):
    model = random_model(order)
    tokens = np.random.default_rng(1).integers(0, 4, (6, 7))
    contexts = model.contexts(tokens, np.zeros(6, dtype=int))
    for place in range(7):
        contexts = model.next_contexts(contexts, tokens[:, place])
        np.testing.assert_array_equal(contexts, model.contexts(tokens, np.full(6, place + 1)))


def test_log_prob_reads_the_table():
    model = random_model(3)
    logp = model.log_prob(np.array([[0, 3, 1], [2, 4, 4]]), np.array([3, 1]), np.array([2, 0]))
    assert logp.tolist() == [model.log_probs[3 * 5 + 1, 2], model.log_probs[4 * 5 + 2, 0]]


def test_end_of_sequence_has_its_probability_in_every_context():
    model = random_model(3)
    np.testing.assert_allclose(np.exp(model.log_probs[:, 1]), 0.2, rtol=1e-12)
    np.testing.assert_allclose(np.exp(model.log_probs).sum(axis=1), 1.0, rtol=1e-12)


def test_samples_have_the_models_frequencies():
    model, n = random_model(2), 40_000
    contexts = np.full(n, 3)
    tokens, lengths = model.sample(contexts, np.full(n, 6), 1, np.random.default_rng(2))
    probs = np.exp(model.log_probs)

    def check(count: int, p: float) -> None:
        assert abs(count - n * p) < 4 * np.sqrt(n * p * (1 - p))

    for first in range(4):
        check((tokens[:, 0] == first).sum(), probs[3, first])
    check(((tokens[:, 0] == 2) & (tokens[:, 1] == 0)).sum(), probs[3, 2] * probs[2, 0])
    check((lengths == 3).sum(), 0.8**2 * 0.2)
    check((lengths == 6).sum(), 0.8**5)
    places = np.arange(6)
    np.testing.assert_array_equal(tokens == 4, places >= lengths[:, None])
    ended = tokens == 1
    assert (ended.argmax(axis=1) == lengths - 1)[ended.any(axis=1)].all()


def test_samples_keep_to_the_limit_of_each_row():
    model = random_model(2)
    limits = np.array([1, 2, 5] * 200)
    _, lengths = model.sample(np.zeros(600, dtype=int), limits, 1, np.random.default_rng(0))
    for limit in (1, 2, 5):
        assert lengths[limits == limit].max() == limit
        assert (lengths[limits == limit] >= 1).all()


def test_table_is_a_read_only_copy_also_after_pickling():
    table = np.log(np.full((5, 4), 0.25))
    model = NGram(table, 2)
    table[:] = 0.0
    for one in (model, pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(one.log_probs, np.log(0.25))
        with pytest.raises(ValueError, match="read-only"):
            one.log_probs[0, 0] = 1.0


@pytest.mark.parametrize(
    ("table", "order", "message"),
    [
        (np.log(np.full((4, 4), 0.25)), 2, r"got shape \(4, 4\); allowed: \[C, V\].*order 2"),
        (np.log(np.full((5, 4), 0.25)), 0, "order: got 0; allowed: an integer >= 1"),
        (np.zeros((5, 4)), 2, "probabilities of context 0 sum to 4.0; allowed: 1 within 1e-06"),
        (np.array([[0.0, -np.inf]]), 1, "context 0, token 1 has -inf; allowed: finite numbers"),
        (np.zeros(3), 1, r"got shape \(3,\)"),
    ],
)
def test_bad_tables(table, order, message):
    with pytest.raises(ValueError, match=message):
        NGram(table, order)


def test_bad_end_probability():
    with pytest.raises(ValueError, match="eos_prob: got 1.0; allowed: between 0 and 1"):
        NGram.from_logits(np.zeros((1, 3)), 1, 0, 1.0)
