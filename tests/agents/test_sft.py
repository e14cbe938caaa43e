"""Supervised fine-tuning: the loss by hand, and maximum likelihood that can be counted."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from bigram import Bigram

from agents.policies import TablePolicy
from agents.policies.gpt import GPTPolicy
from agents.preferences import Responses, build_responses
from agents.sft import SFT, SFTConfig, sft_loss

V = 6


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def gpt(length=12, seed=0):
    observations, actions = gym.spaces.Box(0, V, (length,), np.int64), gym.spaces.Discrete(V)
    return GPTPolicy(observations, actions, torch.Generator().manual_seed(seed), n_layer=1, n_embd=32)


def text(n=40, seed=0):
    """Prompts of 1 to 3 tokens and responses of 0 to 4 and an end (5)."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 5, rng.integers(1, 4)).tolist() for _ in range(n)]
    completions = [rng.integers(0, 5, rng.integers(0, 5)).tolist() for _ in range(n)]
    return build_responses(prompts, completions, V, eos=5)


def test_the_loss_is_the_mean_over_response_tokens():
    """Two rows of 1 and 3 tokens weigh 1 : 3, with log-probs from the table."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(V, V))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    responses = build_responses([[0, 1], [2]], [[3], [4, 4, 1]], V)
    expected = -(logp[1, 3] + logp[2, 4] + logp[4, 4] + logp[4, 1]) / 4
    assert sft_loss(Bigram(logits), responses).item() == pytest.approx(expected, rel=1e-5)


def test_prompts_are_not_trained_on():
    policy = Bigram(np.zeros((V, V)))
    responses = build_responses([[0, 1, 2, 3]], [[4]], V)
    sft_loss(policy, responses).backward()
    assert policy.logits.grad is not None
    assert (policy.logits.grad != 0).any(1).tolist() == [False, False, False, True, False, False]


def test_nothing_but_empty_completions_is_a_loss_of_zero_E14():
    policy = Bigram(np.zeros((V, V)))
    loss = sft_loss(policy, build_responses([[0], [1]], [[], []], V))
    assert loss.item() == 0.0
    assert SFT(policy).evaluate(build_responses([[0]], [[]], V)) == {"sft/loss": 0.0}


def test_gpt_loss_of_padded_rows_is_that_of_single_tokens():
    """Each token's probability is asked for by itself, with only what is before it."""
    policy, responses = gpt(), text(12)
    total = 0.0
    for observation, action in zip(responses.observations, responses.actions, strict=True):
        seen, taken = observation[observation != V], action[action >= 0]
        for t, token in enumerate(taken):
            before = seen[: len(seen) - len(taken) + 1 + t]
            total -= torch.log(policy.probabilities(before[None]))[0, token].item()
    expected = total / responses.lengths.sum().item()
    assert sft_loss(policy, responses).item() == pytest.approx(expected, rel=1e-5)


def test_a_table_learns_the_shares_of_the_answers():
    observations = torch.tensor([0] * 8 + [1] * 4)
    actions = torch.tensor([0] * 4 + [1] * 3 + [2] + [1] * 4)
    policy = TablePolicy(2, 3)
    SFT(policy, learning_rate="lin_0.3", n_epochs=300).fit(Responses(observations, actions))
    expected = [[1 / 2, 3 / 8, 1 / 8], [0, 1, 0]]
    np.testing.assert_allclose(policy.probabilities(torch.arange(2)).detach(), expected, atol=2e-3)


def test_a_bigram_learns_the_shares_of_the_tokens_behind_each():
    """Also in minibatches of rows of different lengths, on average; the last token of a prompt counts."""
    prompts, completions = [[3, 0], [0], [1], [0]], [[1, 1], [1, 2], [2], [2, 5]]
    policy = Bigram(np.zeros((V, V)))
    SFT(policy, learning_rate="lin_0.3", n_epochs=300).fit(build_responses(prompts, completions, V))
    learned = torch.softmax(policy.logits.detach(), -1)
    # Behind 0: 1, 1, 2. Behind 1: 1, 2, 2. Behind 2: 5. Nothing is predicted from 3.
    np.testing.assert_allclose(learned[0], [0, 2 / 3, 1 / 3, 0, 0, 0], atol=2e-3)
    np.testing.assert_allclose(learned[1], [0, 1 / 3, 2 / 3, 0, 0, 0], atol=2e-3)
    np.testing.assert_allclose(learned[2], [0, 0, 0, 0, 0, 1], atol=2e-3)
    np.testing.assert_allclose(learned[3], [1 / 6] * 6, atol=1e-6)


def test_gpt_learns_texts_by_heart(tmp_path):
    """Distinct prompts with one response each: the cross-entropy can fall to 0."""
    prompts = [[a, b] for a in range(4) for b in range(4)]
    completions = [[b, a, 3 - b] for a, b in prompts]
    data = build_responses(prompts, completions, V, eos=5)
    trainer = SFT(gpt(), seed=0, learning_rate="lin_0.01", n_epochs=60, batch_size=8)
    before = trainer.evaluate(data)["sft/loss"]
    lines = trainer.fit(data, run_dir=tmp_path)
    assert before == pytest.approx(np.log(V), abs=0.1)
    assert trainer.evaluate(data)["sft/loss"] < 0.01
    assert trainer.n_updates == 120
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": line["train/n_updates"], **line} for line in lines] == written
    assert written[-1]["step"] == 120 and written[0]["sft/loss"] > written[-1]["sft/loss"]
    mode = trainer.policy.mode(torch.tensor([[2, 3] + [V] * 10]))
    assert mode.tolist() == [3]


def test_evaluation_weighs_tokens_whatever_the_batch():
    policy, data = gpt(), text(30)
    losses = [SFT(policy, batch_size=size).evaluate(data)["sft/loss"] for size in (1, 7, 30)]
    np.testing.assert_allclose(losses, sft_loss(policy, data).item(), rtol=1e-5)


def test_equal_seeds_give_equal_runs():
    def run(seed):
        policy = gpt()
        SFT(policy, seed=seed, batch_size=8, n_epochs=2).fit(text())
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("learning_rate", -1.0, "lin_"), ("batch_size", 0, ">= 1"), ("n_epochs", 1.5, ">= 1"),
     ("max_grad_norm", 0.0, "> 0")],
)  # fmt: skip
def test_bad_fields_are_named(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}={value!r}.*{allowed}"):
        SFTConfig(**{field: value})


def test_no_data_is_an_error():
    nothing = Responses(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="no rows; there is nothing to fit"):
        SFT(TablePolicy(1, 2)).fit(nothing)
    with pytest.raises(TypeError, match=r"SFTConfig has no field 'epochs'; did you mean 'n_epochs'\?"):
        SFT(TablePolicy(1, 2), epochs=3)
