"""The records that SFT, reward models and DPO learn from."""

import numpy as np
import pytest
import torch
from bigram import Bigram

from agents.policies import TablePolicy
from agents.policies.mlp import MLPPolicy
from agents.preferences import (
    Responses,
    answer_log_probs,
    bradley_terry_preferences,
    build_responses,
    full_sequences,
    make_preferences,
    pairs_within,
)

PAD = 20


def whole(responses, row, pad=PAD):
    """Ids and completion mask of a row, put together from the record by hand."""
    seen = [t for t in responses.observations[row].tolist() if t != pad]
    taken = [t for t in responses.actions[row].tolist() if t >= 0]
    prompt = seen[: len(seen) - len(taken) + 1]
    return prompt + taken, [0] * len(prompt) + [1] * len(taken)


def numbered(n):
    """n answers that can be told apart."""
    return Responses(torch.arange(n), torch.arange(n) + 100)


# --- tokens ---


@pytest.mark.parametrize("completion", [[7, 8], [7, 8, 2]])
@pytest.mark.parametrize("prompt", [[1, 5], [5]])
def test_bos_and_eos_exactly_once_E12(prompt, completion):
    responses = build_responses([prompt], [completion], PAD, bos=1, eos=2)
    assert whole(responses, 0) == ([1, 5, 7, 8, 2], [0, 0, 1, 1, 1])
    assert responses.observations.tolist() == [[1, 5, 7, 8]] and responses.actions.tolist() == [[7, 8, 2]]


def test_without_a_bos_id_none_is_put_in_E13():
    responses = build_responses([[5]], [[7]], PAD, bos=None, eos=2)
    assert whole(responses, 0)[0] == [5, 7, 2]


def test_a_completion_that_was_cut_off_gets_no_eos():
    assert whole(build_responses([[5]], [[7, 8]], PAD), 0)[0] == [5, 7, 8]


def test_rows_of_different_lengths_are_padded_behind():
    responses = build_responses([[1], [1, 2, 3]], [[4, 5, 6], [7]], PAD)
    assert responses.observations.tolist() == [[1, 4, 5], [1, 2, 3]]
    assert responses.actions.tolist() == [[4, 5, 6], [7, -1, -1]]
    assert responses.lengths.tolist() == [3, 1]
    assert full_sequences(responses, PAD).tolist() == [[1, 4, 5, 6], [1, 2, 3, 7]]


def test_the_first_response_token_is_in_the_sum_E02():
    """ids 10 11 12 13, of which 12 and 13 are the response; log-probs of 11, 12, 13: -.1, -.2, -.4."""
    logits = np.zeros((PAD, PAD))
    for before, after, logp in ((10, 11, -0.1), (11, 12, -0.2), (12, 13, -0.4)):
        logits[before] = np.log((1 - np.exp(logp)) / (PAD - 1))
        logits[before, after] = logp
    responses = build_responses([[10, 11]], [[12, 13]], PAD)
    assert answer_log_probs(Bigram(logits), responses).item() == pytest.approx(-0.6, abs=1e-6)


def test_eos_within_the_prompt_is_not_taken_for_the_end_E10():
    """ids 4 2 5 6 2 where 2 ends both prompt and text: the last real token is number 4."""
    responses = build_responses([[4, 2], [1, 2, 3]], [[5, 6, 2], [5, 6, 7, 2]], PAD, eos=2)
    tokens = full_sequences(responses, PAD)
    assert tokens[0].tolist() == [4, 2, 5, 6, 2, PAD, PAD]
    assert (tokens[0] != PAD).nonzero().max().item() == 4


def test_an_empty_completion_counts_nothing_E14():
    responses = build_responses([[5, 6], [5]], [[], [7]], PAD)
    log_probs = answer_log_probs(Bigram(np.zeros((PAD, PAD))), responses)
    assert responses.lengths.tolist() == [0, 1]
    np.testing.assert_allclose(log_probs.detach(), [0.0, -np.log(PAD)], rtol=1e-6)
    assert full_sequences(responses, PAD).tolist() == [[5, 6, PAD], [5, 7, PAD]]
    nothing = build_responses([[5, 6]], [[]], PAD)
    assert answer_log_probs(Bigram(np.zeros((PAD, PAD))), nothing).tolist() == [0.0]


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [([[1]], [[2], [3]], "prompts has 1 rows and completions has 2"), ([], [], "at least one"),
     ([[1], []], [[2], [3]], "prompts: row 1 is empty"),
     ([[1], [4]], [[2], [3, 20]], "completions: row 1 has id 20; allowed: 0 to 19"),
     ([[-1]], [[2]], "prompts: row 0 has id -1")],
)  # fmt: skip
def test_bad_tokens_are_named(prompts, completions, message):
    with pytest.raises(ValueError, match=message):
        build_responses(prompts, completions, PAD)


# --- log-probs of whole answers ---


def test_the_log_prob_of_one_action_is_that_of_the_policy():
    rng = np.random.default_rng(0)
    logp = np.log(rng.dirichlet(np.ones(4), 3))
    responses = Responses(torch.tensor([0, 2, 1]), torch.tensor([3, 1, 0]))
    np.testing.assert_allclose(
        answer_log_probs(TablePolicy(3, 4, logp), responses).detach(), logp[[0, 2, 1], [3, 1, 0]], rtol=1e-5
    )
    assert responses.lengths.tolist() == [1, 1, 1]


def test_the_log_prob_of_an_episode_sums_its_steps():
    rng = np.random.default_rng(1)
    logp = np.log(rng.dirichlet(np.ones(4), 3))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    responses = Responses(torch.tensor([[0, 2, 1], [1, 0, 0]]), torch.tensor([[3, 1, 0], [2, 0, 0]]), mask)
    expected = [logp[0, 3] + logp[2, 1] + logp[1, 0], logp[1, 2]]
    np.testing.assert_allclose(
        answer_log_probs(TablePolicy(3, 4, logp), responses).detach(), expected, rtol=1e-5
    )
    assert responses.lengths.tolist() == [3, 1]
    assert responses.select(torch.tensor([1])).lengths.tolist() == [1]


def test_continuous_actions_are_one_answer():
    from gymnasium.spaces import Box

    policy = MLPPolicy(Box(-1, 1, (3,)), Box(-1, 1, (2,)), torch.Generator().manual_seed(0))
    responses = Responses(torch.zeros(5, 3), torch.ones(5, 2))
    assert responses.lengths.tolist() == [1] * 5
    assert answer_log_probs(policy, responses).shape == (5,)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="observations has 2 rows and actions has 3"):
        Responses(torch.arange(2), torch.arange(3))


# --- preferences ---


def test_a_missing_margin_is_zero_for_its_own_pair_E16():
    preferences = make_preferences(numbered(3), numbered(3), margins=[0.1, None, 0.3])
    np.testing.assert_allclose(preferences.margins, [0.1, 0.0, 0.3])
    order = torch.tensor([2, 0, 1])
    shuffled = preferences.select(order)
    np.testing.assert_allclose(shuffled.margins, [0.3, 0.1, 0.0])
    assert shuffled.chosen.actions.tolist() == [102, 100, 101] == shuffled.rejected.actions.tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"margins": [0.1]}, "margins has 1 rows, chosen has 2"), ({"labels": [1, 0, 1]}, "labels has 3 rows"),
     ({"labels": [0.5, 1.5]}, r"labels: row 1 has 1.5; allowed: probabilities"),
     ({"labels": [float("nan"), 1]}, "labels: row 0 has nan"),
     ({"margins": [0.1, float("inf")]}, "margins: row 1 has inf; allowed: finite")],
)  # fmt: skip
def test_bad_preferences_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make_preferences(numbered(2), numbered(2), **fields)
    with pytest.raises(ValueError, match="rejected has 3 rows, chosen has 2"):
        make_preferences(numbered(2), numbered(3))


def test_all_pairs_of_a_group():
    pairs = pairs_within([7, 5, 7, 7])
    assert pairs.tolist() == [[0, 2], [0, 3], [2, 3]]
    assert pairs_within([1, 2]).shape == (0, 2)


def test_preferences_are_drawn_by_the_bradley_terry_model():
    n, rewards = 40_000, [0.3, -0.9]
    pairs = torch.tensor([[0, 1], [1, 0]]).repeat(n // 2, 1)
    preferences = bradley_terry_preferences(numbered(2), rewards, pairs, torch.Generator().manual_seed(0))
    won = (preferences.chosen.observations == 0).numpy()
    p = 1 / (1 + np.exp(-1.2))
    for side in (slice(0, None, 2), slice(1, None, 2)):  # whichever answer is named first
        assert abs(won[side].mean() - p) < 4 * np.sqrt(p * (1 - p) / (n / 2))
    assert bool((preferences.chosen.observations != preferences.rejected.observations).all())
    assert bool((preferences.labels == 1).all())


def test_without_a_generator_labels_are_the_probabilities():
    preferences = bradley_terry_preferences(numbered(3), [0.0, 1.0, 1000.0], pairs_within([0, 0, 0]))
    np.testing.assert_allclose(preferences.labels, [1 / (1 + np.e), 0, 0], atol=1e-6)
    assert preferences.chosen.actions.tolist() == [100, 100, 101]
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\); allowed: \(3,\), finite"):
        bradley_terry_preferences(numbered(3), [0.0, 1.0], pairs_within([0, 0, 0]))
