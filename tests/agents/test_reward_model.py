"""The reward model: closed forms on a table, tokens read at the right place, normalised, stable."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch

from agents.policies.base import Policy
from agents.policies.gpt import GPTPolicy
from agents.ppo import PPO
from agents.preferences import (
    Responses,
    bradley_terry_preferences,
    build_responses,
    full_sequences,
    make_preferences,
    pairs_within,
)
from agents.reward_model import RewardModel, RewardTrainer, TableScore, reward_model_from, with_critic
from llmgym import AnswerPool

V = 6
POOL = AnswerPool.random(2, 8, seed=5)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def gpt(seed=0, length=12):
    observations, actions = gym.spaces.Box(0, V, (length,), np.int64), gym.spaces.Discrete(V)
    policy = GPTPolicy(observations, actions, torch.Generator().manual_seed(seed), n_layer=1, n_embd=32)
    # Scores of fresh weights are all but equal: spread them out.
    for p in policy.parameters():
        p.data.mul_(4)
    return policy


def answers(pool):
    """Every answer to every prompt, and its proxy reward."""
    shape = pool.proxy.shape
    prompt, answer = np.indices(shape).reshape(2, -1)
    return Responses(torch.from_numpy(prompt), torch.from_numpy(answer)), pool.proxy.reshape(-1)


def texts(n=50, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 5, rng.integers(1, 4)).tolist() for _ in range(n)]
    completions = [rng.integers(0, 5, rng.integers(0, 6)).tolist() for _ in range(n)]
    return prompts, completions


# --- learning scores ---


def test_a_table_recovers_the_rewards_behind_the_preferences():
    """Up to a constant per prompt, which no preference shows."""
    responses, rewards = answers(POOL)
    preferences = bradley_terry_preferences(responses, rewards, pairs_within(responses.observations))
    model = RewardModel(TableScore(2, 8))
    trainer = RewardTrainer(model, learning_rate="lin_0.1", n_epochs=400, max_grad_norm=None)
    trainer.fit(preferences)
    learned = model.score(responses).numpy().reshape(2, 8)
    np.testing.assert_allclose(
        learned - learned.mean(1, keepdims=True), POOL.proxy - POOL.proxy.mean(1, keepdims=True), atol=1e-3
    )
    # The loss is then the entropy of the labels, and the accuracy that of the best possible guess.
    p = preferences.labels.double().numpy()
    metrics = trainer.evaluate(preferences)
    assert metrics["rm/loss"] == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(), rel=1e-4)
    assert metrics["rm/accuracy"] == pytest.approx(np.maximum(p, 1 - p).mean(), rel=1e-4)


def test_held_out_accuracy_comes_close_to_the_best_possible(tmp_path):
    responses, rewards = answers(POOL)
    generator = torch.Generator().manual_seed(0)
    pairs = pairs_within(responses.observations)
    drawn = pairs[torch.randint(len(pairs), (20_000,), generator=generator)]
    train = bradley_terry_preferences(responses, rewards, drawn, generator)
    held_out = bradley_terry_preferences(responses, rewards, pairs.repeat(400, 1), generator)
    trainer = RewardTrainer(
        RewardModel(TableScore(2, 8)), seed=0, learning_rate="lin_0.1", batch_size=256, n_epochs=3
    )
    lines = trainer.fit(train, run_dir=tmp_path)
    p = bradley_terry_preferences(responses, rewards, pairs).labels.double().numpy()
    best = np.maximum(p, 1 - p).mean()
    error = 4 * np.sqrt(best * (1 - best) / len(held_out))
    accuracy = trainer.evaluate(held_out)["rm/accuracy"]
    # 0.01: what errors in the scores of nearly equal answers cost.
    assert best - error - 0.01 < accuracy < best + error
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(written) == len(lines) > 10 and written[-1]["rm/loss"] < written[0]["rm/loss"]


def test_margins_push_the_scores_apart():
    """One pair with a margin and a soft label: c - r - m = logit(q)."""
    chosen, rejected = (Responses(torch.tensor([0]), torch.tensor([a])) for a in (0, 1))
    model = RewardModel(TableScore(1, 2))
    preferences = make_preferences(chosen, rejected, margins=[1.5], labels=[0.8])
    RewardTrainer(model, learning_rate="lin_0.1", n_epochs=400).fit(preferences)
    difference = (model.score(chosen) - model.score(rejected)).item()
    assert difference == pytest.approx(1.5 + np.log(0.8 / 0.2), abs=1e-3)


def test_huge_scores_still_have_useful_gradients():
    """Scores that are wrong by 2000 are put right, and none becomes NaN."""
    chosen, rejected = (Responses(torch.tensor([0]), torch.tensor([a])) for a in (0, 1))
    scorer = TableScore(1, 2)
    scorer.table.data = torch.tensor([[-1000.0, 1000.0]])
    trainer = RewardTrainer(RewardModel(scorer), learning_rate=50.0, n_epochs=60, max_grad_norm=1.0)
    lines = trainer.fit(make_preferences(chosen, rejected))
    assert lines[0]["rm/loss"] == 2000.0 and lines[0]["rm/accuracy"] == 0.0
    assert lines[-1]["rm/loss"] == 0.0 and lines[-1]["rm/accuracy"] == 1.0


# --- tokens ---


def test_the_score_is_read_at_the_last_real_token():
    """Padded in a batch or alone, also where the end-of-sequence id ends the prompt (E10)."""
    model = reward_model_from(gpt(), seed=0)
    prompts, completions = [[4, 2], [1, 2, 3]], [[5, 1, 2], [5, 1, 3, 3, 0, 2]]
    together = model.score(build_responses(prompts, completions, V))
    scorer = model.scorer
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([prompt + completion])
        hidden = scorer.body(ids)[0, len(prompt) + len(completion) - 1]
        assert together[row].item() == pytest.approx((hidden @ scorer.weight).item(), abs=1e-5)
        # A shorter reading of the same ids is another score.
        assert abs(model.score_tokens(ids[:, :-1]).item() - together[row].item()) > 1e-3


def test_padding_and_batches_do_not_change_scores():
    model = reward_model_from(gpt(), seed=0)
    responses = build_responses(*texts(), V, eos=5)
    scores = model.score(responses)
    np.testing.assert_allclose(model.score(responses, batch_size=7), scores, atol=1e-5)
    tokens = torch.nn.functional.pad(full_sequences(responses, V), (0, 1), value=V)
    np.testing.assert_allclose(model.score_tokens(tokens, batch_size=3), scores, atol=1e-5)


def test_a_language_model_learns_what_is_preferred():
    """The reward is the number of zeros in the response: held-out pairs are ranked by it."""
    prompts, completions = texts(400)
    responses = build_responses(prompts, completions, V, eos=5)
    rewards = [4.0 * completion.count(0) for completion in completions]
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1)).reshape(-1, 2)
    preferences = bradley_terry_preferences(responses, rewards, order)
    informative = torch.nonzero((preferences.labels - 0.5).abs() > 0.4).squeeze(1)
    train, held_out = informative[:80], informative[80:]
    trainer = RewardTrainer(
        reward_model_from(gpt(), seed=0), seed=0, learning_rate=3e-3, batch_size=16, n_epochs=15
    )
    before = trainer.evaluate(preferences.select(held_out))["rm/accuracy"]
    trainer.fit(preferences.select(train))
    assert len(held_out) > 20 and before < 0.8
    assert trainer.evaluate(preferences.select(held_out))["rm/accuracy"] > 0.9


def test_the_policy_it_starts_from_is_not_trained():
    policy = gpt()
    before = [p.detach().clone() for p in policy.parameters()]
    model = reward_model_from(policy, seed=0)
    responses = build_responses(*texts(8), V, eos=5)
    preferences = make_preferences(responses, build_responses(*texts(8, seed=1), V, eos=5))
    body = model.scorer.body.token_embedding.detach().clone()
    RewardTrainer(model, seed=0).fit(preferences)
    assert not torch.equal(body, model.scorer.body.token_embedding)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


# --- normalisation ---


def test_scores_of_the_reference_samples_get_mean_0_and_deviation_1():
    model = reward_model_from(gpt(), seed=0)
    samples, others = (build_responses(*texts(60, seed=s), V, eos=5) for s in (0, 1))
    raw, raw_others = model.score(samples), model.score(others)
    model.normalise(samples)
    scores = model.score(samples).double()
    assert scores.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    expected = (raw_others - raw.mean()) / raw.std(correction=0)
    np.testing.assert_allclose(model.score(others), expected, atol=1e-4)
    model.normalise(samples)  # again: nothing changes
    np.testing.assert_allclose(model.score(samples), scores, atol=1e-5)
    state = model.state_dict()
    copy = reward_model_from(gpt(), seed=1)
    copy.load_state_dict(state)
    np.testing.assert_allclose(copy.score(samples), scores, atol=1e-5)


def test_scores_that_are_all_the_same_cannot_be_normalised():
    model = RewardModel(TableScore(2, 8))
    with pytest.raises(ValueError, match="scores of 16 samples lie from 0.0 to 0.0"):
        model.normalise(answers(POOL)[0])


# --- a critic that starts as the reward model ---


def test_the_critic_starts_as_the_normalised_score():
    policy, model = gpt(), reward_model_from(gpt(seed=3), seed=0)
    responses = build_responses(*texts(20), V, eos=5)
    model.normalise(responses)
    both = with_critic(policy, model)
    assert isinstance(both, Policy)
    tokens = full_sequences(responses, V)
    np.testing.assert_allclose(both.value(tokens).detach(), model.score(responses), atol=1e-4)

    evaluation = both.evaluate(responses.observations, responses.actions)
    alone = policy.evaluate(responses.observations, responses.actions)
    assert torch.equal(evaluation.log_prob, alone.log_prob)
    assert torch.equal(evaluation.entropy, alone.entropy)
    for row in range(len(responses)):
        seen = responses.observations[row]
        filled, n = int((seen != V).sum()), int(responses.lengths[row])
        for t in range(n):
            expected = model.score_tokens(seen[None, : filled - n + t + 1]).item()
            assert evaluation.value[row, t].item() == pytest.approx(expected, abs=1e-4)
        assert (evaluation.value[row, n:] == 0).all()


def test_critic_and_policy_do_not_move_each_other():
    both = with_critic(gpt(), reward_model_from(gpt(), seed=0))
    responses = build_responses(*texts(6), V, eos=5)
    evaluation = both.evaluate(responses.observations, responses.actions)
    evaluation.value.sum().backward()
    assert all(p.grad is None for p in both.actor.parameters())
    assert all(p.grad is not None for p in both.body.parameters())
    state, generator = both.new_state(6), torch.Generator().manual_seed(0)
    wide = torch.nn.functional.pad(responses.observations, (0, 12 - responses.observations.shape[1]), value=V)
    drawn = both.sample(wide, generator, state, None)
    assert torch.equal(drawn, both.actor.sample(wide, torch.Generator().manual_seed(0)))
    assert torch.equal(both.mode(wide), both.actor.mode(wide))


def test_ppo_trains_policy_and_critic():
    """The critic starts as the reward model, and so knows the reward of a response at its end."""
    env = gym.make_vec("TokenGeneration-v0", num_envs=16)
    spaces = env.single_observation_space, env.single_action_space
    actor = GPTPolicy(*spaces, torch.Generator().manual_seed(0), n_layer=1, n_embd=32)
    both = with_critic(actor, reward_model_from(actor, seed=0))
    agent = PPO(env, seed=0, policy=both, batch_size=8, n_epochs=2)
    before = {name: p.detach().clone() for name, p in both.named_parameters()}
    agent.learn(200)
    still = [name for name, p in both.named_parameters() if torch.equal(p, before[name])]
    assert [name for name in still if not name.startswith("actor.value_head")] == []


def test_a_table_is_no_critic_of_tokens():
    with pytest.raises(ValueError, match="scorer is a TableScore; allowed: SequenceScore"):
        with_critic(gpt(), RewardModel(TableScore(2, 8)))
