"""DPO against closed forms: on the answer pool, and on token sequences that can be enumerated."""

import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
from agents.collector import Collector
from agents.dpo import DPO, DPOConfig
from agents.policies import TablePolicy
from agents.policies.gpt import GPTPolicy
from agents.preferences import (
    Responses,
    answer_log_probs,
    bradley_terry_preferences,
    build_responses,
    make_preferences,
    pairs_within,
)
from llmgym import AnswerPool
from llmgym.token_rewards import Scores
from llmgym.token_tasks import TokenTask


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def answers(pool):
    """Every answer to every prompt, and its proxy reward."""
    prompt, answer = np.indices(pool.proxy.shape).reshape(2, -1)
    return Responses(torch.from_numpy(prompt), torch.from_numpy(answer)), pool.proxy.reshape(-1)


def all_pairs(pool):
    """The population: all pairs of answers to a prompt, labelled by the Bradley-Terry probabilities."""
    responses, rewards = answers(pool)
    return bradley_terry_preferences(responses, rewards, pairs_within(responses.observations))


def sampled_pairs(pool, prompts, generator):
    """For each of the prompts two answers drawn from the reference, and a preference drawn between them."""
    responses, rewards = answers(pool)
    drawn = torch.multinomial(torch.tensor(pool.ref_probs)[prompts], 2, replacement=True, generator=generator)
    return bradley_terry_preferences(responses, rewards, prompts[:, None] * pool.n_answers + drawn, generator)


def agent(pool, **config):
    return DPO(gym.make("AnswerPool-v0", pool=pool), seed=0, **config)


def full_batch(pool, preferences, epochs=300, **config):
    """Trained to convergence by gradient steps on all pairs; returns the policy [P, A]."""
    dpo = agent(pool, learning_rate="lin_0.3", n_epochs=epochs, batch_size=len(preferences),
                max_grad_norm=None, **config)  # fmt: skip
    dpo.fit(preferences)
    return probabilities(dpo)


def probabilities(dpo):
    return torch.softmax(dpo.policy.logits.detach().double(), -1).numpy()


# --- closed forms ---


def test_the_population_loss_leads_to_the_closed_form():
    pool, beta = AnswerPool.default(), 0.3
    optimum = pool.optimal_policy(beta)
    assert pool.kl(pool.ref_probs, optimum) > 4
    assert pool.kl(full_batch(pool, all_pairs(pool), beta=beta), optimum) < 1e-6


def test_minibatches_lead_there_too():
    pool, beta = AnswerPool.random(3, 20, seed=1), 0.5
    dpo = agent(pool, beta=beta, learning_rate="lin_0.1", n_epochs=60, batch_size=64)
    dpo.fit(all_pairs(pool))
    assert pool.kl(pool.ref_probs, pool.optimal_policy(beta)) > 0.5
    assert pool.kl(probabilities(dpo), pool.optimal_policy(beta)) < 1e-4


@pytest.mark.parametrize("tau", [0.1, 0.3])
def test_ipo_leads_to_its_own_closed_form(tau):
    """ref * exp(P(a beats a uniform answer) / tau): least squares on differences that do not add up."""
    pool = AnswerPool.random(2, 30, seed=2)
    wins = 1 / (1 + np.exp(pool.proxy[:, None, :] - pool.proxy[:, :, None]))  # [P, a, b]
    optimum = pool.ref_probs * np.exp(wins.mean(2) / tau)
    optimum /= optimum.sum(1, keepdims=True)
    assert pool.kl(pool.ref_probs, optimum) > 0.1
    assert pool.kl(full_batch(pool, all_pairs(pool), beta=tau, loss_type="ipo"), optimum) < 1e-6


def test_on_flipped_labels_robust_dpo_leads_to_the_closed_form_and_plain_dpo_does_not():
    pool, beta, flipped = AnswerPool.random(2, 10, seed=3), 1.0, 0.2
    clean = all_pairs(pool)
    noisy = make_preferences(clean.chosen, clean.rejected, labels=clean.labels * (1 - 2 * flipped) + flipped)
    optimum = pool.optimal_policy(beta)
    robust = full_batch(pool, noisy, beta=beta, loss_type="robust", label_smoothing=flipped)
    assert pool.kl(robust, optimum) < 1e-6
    assert pool.kl(full_batch(pool, noisy, beta=beta), optimum) > 0.01


def test_the_error_of_sampled_pairs_is_that_of_maximum_likelihood():
    """E KL(policy || optimum) = tr(F I^-1) / 2n, with the Fisher information I of one pair.

    F is the curvature of the KL at the optimum. Each prompt is the same problem with other data: their
    mean lies within 4 standard errors (and 5% for what the expansion leaves out).
    """
    one, beta, n, sets = AnswerPool.random(1, 6, seed=4), 1.0, 1000, 400
    pool = AnswerPool(*(np.repeat(table, sets, axis=0) for table in (one.proxy, one.gold, one.ref_probs)))
    ref, r, optimum = one.ref_probs[0], one.proxy[0], one.optimal_policy(beta)[0]
    win = 1 / (1 + np.exp(r[None] - r[:, None]))
    weight = beta**2 * np.outer(ref, ref) * win * (1 - win)
    information = 2 * (np.diag(weight.sum(1)) - weight)
    curvature = np.diag(optimum) - np.outer(optimum, optimum)
    expected = np.trace(curvature @ np.linalg.pinv(information)) / (2 * n)

    prompts = torch.arange(sets).repeat(n)
    pairs = sampled_pairs(pool, prompts, torch.Generator().manual_seed(0))
    policy = full_batch(pool, pairs, 60, beta=beta)
    kl = (policy * np.log(policy / optimum)).sum(1)
    assert abs(kl.mean() - expected) < 4 * kl.std() / np.sqrt(sets) + 0.05 * expected


# --- tokens ---

V, LONGEST = 4, 2  # id 3 ends a response


def tiny_gpt(seed=0):
    observations, actions = gym.spaces.Box(0, V, (1 + LONGEST,), np.int64), gym.spaces.Discrete(V)
    return GPTPolicy(observations, actions, torch.Generator().manual_seed(seed), n_layer=1, n_embd=32)


class TokenSpaces(gym.Env):
    """`fit` only needs the spaces."""

    observation_space, action_space = gym.spaces.Box(0, V, (1 + LONGEST,), np.int64), gym.spaces.Discrete(V)


def every_response():
    """All responses to prompt 0 of at most two tokens: they end by 3 or by their length."""
    completions = [[3]] + [[a, b] for a, b in itertools.product(range(3), range(V))]
    return build_responses([[0]] * len(completions), completions, V)


def test_a_language_model_reaches_the_closed_form_over_sequences():
    responses, beta = every_response(), 0.7
    rewards = np.random.default_rng(0).normal(size=len(responses))
    preferences = bradley_terry_preferences(responses, rewards, pairs_within(np.zeros(len(responses))))
    reference = tiny_gpt()
    dpo = DPO(TokenSpaces(), seed=0, reference=reference, policy=tiny_gpt(), beta=beta,
              learning_rate="lin_0.01", n_epochs=400, batch_size=len(preferences))  # fmt: skip
    with torch.no_grad():
        ref = answer_log_probs(reference, responses).double().exp().numpy()
    optimum = ref * np.exp(rewards / beta)
    optimum /= optimum.sum()
    dpo.fit(preferences)
    with torch.no_grad():
        logp = answer_log_probs(dpo.policy, responses).double().numpy()
    assert np.exp(logp).sum() == pytest.approx(1, abs=1e-5) and ref.sum() == pytest.approx(1, abs=1e-5)
    assert (ref * (np.log(ref) - np.log(optimum))).sum() > 0.3
    assert (np.exp(logp) * (logp - np.log(optimum))).sum() < 1e-4


def test_log_ratios_are_sums_over_response_tokens():
    """The loss of three pairs from single next-token probabilities; the prompt is in none of them."""
    policy, reference = tiny_gpt(1), tiny_gpt(2)
    for p in (*policy.parameters(), *reference.parameters()):
        p.data.mul_(5)
    chosen = build_responses([[0], [1], [2]], [[1, 3], [3], [0, 0]], V)
    rejected = build_responses([[0], [1], [2]], [[2, 2], [2, 1], [3]], V)

    def log_ratio(responses, row):
        seen = [t for t in responses.observations[row].tolist() if t != V]
        taken = [t for t in responses.actions[row].tolist() if t >= 0]
        total, text = 0.0, seen[:1]
        for token in taken:
            read = torch.tensor([text])
            total += (policy.probabilities(read).log() - reference.probabilities(read).log())[0, token].item()
            text = [*text, token]
        return total

    c, r = (np.array([log_ratio(x, row) for row in range(3)]) for x in (chosen, rejected))
    dpo = DPO(TokenSpaces(), seed=0, reference=reference, policy=policy, beta=0.4, batch_size=2)
    metrics = dpo.evaluate(make_preferences(chosen, rejected))
    margin = 0.4 * (c - r)
    expected = {
        "dpo/loss": np.log1p(np.exp(-margin)).mean(), "dpo/chosen_logratio": c.mean(),
        "dpo/rejected_logratio": r.mean(), "dpo/margin": margin.mean(), "dpo/accuracy": (margin > 0).mean(),
    }  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    normalised = DPO(TokenSpaces(), reference=reference, policy=policy, beta=0.4, loss_type="ipo_norm")
    lengths = np.array([[2, 1, 2], [2, 2, 1]])
    h = c / lengths[0] - r / lengths[1]
    loss = normalised.evaluate(make_preferences(chosen, rejected))["dpo/loss"]
    assert loss == pytest.approx(((h - 1.25) ** 2).mean(), rel=1e-5)


# --- the agent ---


def test_before_training_the_policy_is_its_reference():
    pool = AnswerPool.random(2, 5, seed=0)
    metrics = agent(pool).evaluate(all_pairs(pool))
    assert metrics == pytest.approx({
        "dpo/loss": np.log(2), "dpo/chosen_logratio": 0, "dpo/rejected_logratio": 0, "dpo/margin": 0,
        "dpo/accuracy": 0.5,
    }, abs=1e-6)  # fmt: skip


def test_the_reference_stays_what_it_was():
    pool = AnswerPool.random(2, 5, seed=0)
    own = agent(pool, learning_rate=0.1)
    other = TablePolicy(2, 5, np.log(AnswerPool.random(2, 5, seed=1).ref_probs))
    with_reference = DPO(gym.make("AnswerPool-v0", pool=pool), seed=0, reference=other, learning_rate=0.1)
    before = other.logits.detach().clone()
    for dpo, expected in ((own, torch.tensor(np.log(pool.ref_probs))), (with_reference, before)):
        dpo.fit(all_pairs(pool))
        dpo.fit(all_pairs(pool))
        pairs = dpo.with_reference(all_pairs(pool))
        chosen = pairs.preferences.chosen
        np.testing.assert_allclose(
            pairs.ref_chosen, torch.log_softmax(expected, -1)[chosen.observations, chosen.actions], rtol=1e-5
        )
        assert dpo.n_updates == 2 and not torch.allclose(dpo.policy.logits.double(), expected.double())
    assert torch.equal(other.logits, before)


def test_held_out_pairs_are_ranked_nearly_as_well_as_possible(tmp_path):
    pool = AnswerPool.random(2, 8, seed=5)
    generator = torch.Generator().manual_seed(0)
    train, held_out = (sampled_pairs(pool, torch.arange(2).repeat(n), generator) for n in (10_000, 5_000))
    dpo = agent(pool, beta=0.5, learning_rate="lin_0.1", batch_size=256, n_epochs=3)
    lines = dpo.fit(train, run_dir=tmp_path)
    _, rewards = answers(pool)
    row = [x.observations * 8 + x.actions for x in (held_out.chosen, held_out.rejected)]
    different = (row[0] != row[1]).numpy()
    gap = np.abs(rewards[row[0]] - rewards[row[1]])
    p = np.where(different, 1 / (1 + np.exp(-gap)), 0.5)
    error = 4 * np.sqrt((p * (1 - p)).sum()) / len(held_out)
    accuracy = dpo.evaluate(held_out)["dpo/accuracy"]
    assert p.mean() - error - 0.01 < accuracy < p.mean() + error
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(written) == len(lines) > 10 and written[-1]["dpo/loss"] < written[0]["dpo/loss"]
    assert written[-1]["step"] == dpo.n_updates == 3 * 79


# --- learning in an environment ---


def test_learn_draws_its_own_pairs_and_comes_close_to_the_closed_form():
    pool, beta = AnswerPool.random(3, 6, seed=2), 1.0
    env = gym.make_vec("AnswerPool-v0", num_envs=64, pool=pool)
    dpo = agents.make("dpo", env, seed=0, beta=beta, learning_rate="lin_0.1", n_pairs=512, batch_size=512)
    assert dpo.learn(512 * 200) is dpo
    assert dpo.num_timesteps == 512 * 200 and dpo.n_updates == 100
    policy = dpo.action_probabilities(np.arange(3))
    assert pool.kl(pool.ref_probs, pool.optimal_policy(beta)) > 0.1
    assert pool.kl(policy, pool.optimal_policy(beta)) < 0.01


@pytest.mark.parametrize("env_id", ["AnswerPool-v0", "TokenGeneration-v0", "CartPole-v1"])
def test_the_answers_of_a_pair_share_a_task_and_are_ranked_by_their_rewards(env_id):
    dpo = DPO(gym.make_vec(env_id, num_envs=4), seed=0, n_pairs=30)
    rollout = dpo.collect()
    preferences = dpo.label(rollout)
    episodes = rollout.episodes
    assert len(preferences) == 30 and len(episodes.returns) == 60
    for group in range(30):
        assert len(set(episodes.task_ids[episodes.group_ids == group])) == 1
    # The log-probs are those at which the episodes were sampled.
    with torch.no_grad():
        sides = (preferences.chosen, preferences.rejected)
        both = torch.cat([answer_log_probs(dpo.policy, side) for side in sides])
    index = rollout.episode_index
    recorded = torch.zeros(60).index_add(0, index[index >= 0], rollout.log_probs[index >= 0])
    np.testing.assert_allclose(both.sort().values, recorded.sort().values, atol=1e-4)
    lengths = torch.cat([preferences.chosen.lengths, preferences.rejected.lengths])
    assert sorted(lengths.tolist()) == sorted(episodes.lengths.tolist())
    if env_id == "CartPole-v1":  # a return is a length, and far apart the longer one always wins
        gap = preferences.chosen.lengths - preferences.rejected.lengths
        assert (gap < -15).sum() == 0 and (gap > 15).sum() > 3


def test_the_sampled_policy_is_the_reference_and_not_the_trained_one():
    pool = AnswerPool.random(1, 4, seed=0)
    env = gym.make_vec("AnswerPool-v0", num_envs=64, pool=pool)
    dpo = DPO(env, seed=0, learning_rate=1.0, n_pairs=512)
    dpo.learn(2_000)
    assert dpo.action_probabilities([0]).max() > 0.95
    counts = np.bincount(dpo.collect().actions.flatten(), minlength=4)
    n, ref = counts.sum(), pool.ref_probs[0]
    assert (np.abs(counts / n - ref) < 4 * np.sqrt(ref * (1 - ref) / n)).all()


def count_zeros(responses):
    """Two for every token 0 of a response."""
    return Scores(2.0 * (responses.tokens == 0).sum(1))


def test_a_language_model_learns_from_samples_of_its_reference():
    """Zeros are paid for: fresh pairs are ranked, and responses have more of them, if no more than 4."""
    task = TokenTask(prompts=[[1], [2, 3]], vocab_size=5, eos_id=4, max_new_tokens=4, reward=count_zeros)
    env = gym.make_vec("TokenGeneration-v0", num_envs=32, task=task)
    dpo = DPO(env, seed=0, beta=1.0, learning_rate=3e-3, batch_size=32, n_pairs=256,
              policy_kwargs={"n_layer": 1, "n_embd": 32})  # fmt: skip
    dpo.learn(10_000)
    fresh = dpo.collect()
    assert dpo.evaluate(dpo.label(fresh))["dpo/accuracy"] > 0.5 + 4 * 0.5 / np.sqrt(256)
    after = Collector(env, dpo.policy, dpo.generator, None).collect_episodes(8).episodes.returns
    assert after.mean() > 2 * fresh.episodes.returns.mean()


def test_a_saved_agent_keeps_the_reference_it_started_from(tmp_path):
    pool = AnswerPool.random(2, 5, seed=0)
    env = gym.make_vec("AnswerPool-v0", num_envs=8, pool=pool)
    dpo = DPO(env, seed=0, learning_rate=0.1, batch_size=4)
    dpo.fit(all_pairs(pool))
    dpo.save(tmp_path / "agent")
    loaded = agents.load("dpo", tmp_path / "agent", env)
    assert loaded.evaluate(all_pairs(pool)) == dpo.evaluate(all_pairs(pool))
    dpo.fit(all_pairs(pool))
    loaded.fit(all_pairs(pool))
    assert torch.equal(dpo.policy.logits, loaded.policy.logits)


def test_weights_loaded_before_training_are_the_reference():
    pool = AnswerPool.random(2, 5, seed=0)
    dpo = agent(pool)
    dpo.policy.logits.data.copy_(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))
    assert dpo.evaluate(all_pairs(pool))["dpo/loss"] == pytest.approx(np.log(2), abs=1e-6)


def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path):
    pool = AnswerPool.random(2, 5, seed=0)

    def run(folder, callback=None, resume=False):
        env = gym.make_vec("AnswerPool-v0", num_envs=8, pool=pool)
        dpo = DPO(env, seed=0, learning_rate="lin_0.05", n_pairs=32, n_epochs=2, batch_size=16)
        return dpo.learn(640, tmp_path / folder, callback=callback, checkpoint_every=64, resume=resume)

    whole = run("whole")
    run("stopped", callback=lambda dpo: dpo.num_timesteps < 320)
    resumed = run("stopped", resume=True)
    assert resumed.num_timesteps == whole.num_timesteps == 640
    assert torch.equal(resumed.policy.logits, whole.policy.logits)
    assert torch.equal(resumed.start.logits, whole.start.logits)
    lines = [(tmp_path / folder / "metrics.jsonl").read_text() for folder in ("whole", "stopped")]
    assert lines[0] == lines[1] and len(lines[0].splitlines()) == 10


def test_equal_seeds_give_equal_runs():
    pool = AnswerPool.random(2, 5, seed=0)

    def run(seed):
        dpo = DPO(gym.make("AnswerPool-v0", pool=pool), seed=seed, batch_size=4, n_epochs=2)
        dpo.fit(all_pairs(pool))
        return dpo.policy.logits.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("beta", 0.0, "> 0"), ("beta", -0.1, "> 0"), ("label_smoothing", 0.5, "below 0.5"),
     ("label_smoothing", -0.1, r"in \[0, 1\]"), ("loss_type", "sigmiod", "did you mean 'sigmoid'"),
     ("learning_rate", "fast", "lin_"), ("batch_size", 0, ">= 1"), ("n_epochs", 0, ">= 1"),
     ("max_grad_norm", -1.0, "> 0")],
)  # fmt: skip
def test_bad_fields_are_named(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}={value!r}.*{allowed}"):
        DPOConfig(**{field: value})
