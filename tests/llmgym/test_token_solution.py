"""The exact optimum against enumeration of every response."""

import numpy as np
import pytest
from token_worlds import CUT, EOS, all_words, as_arrays, custom_task, reward_of, tiny_task

from llmgym.syllable_task import syllable_task
from llmgym.token_solution import TokenSolution

BETAS = (0.05, 0.3, 1.0, 7.0)
# Order of the reference, most new tokens, limit of the context: three to five tokens remain.
CASES = ((1, 4, None), (2, 5, None), (3, 4, None), (2, 5, 7))


class Enumeration:
    """All responses of a prompt: rewards, reference log-probs, and the optimum by its formula."""

    def __init__(self, task, task_id):
        self.words = all_words(task, task_id)
        self.rewards = np.array([word.reward for word in self.words])
        self.ref_logp = np.array([word.ref_logp for word in self.words])
        self.lengths = np.array([len(word.tokens) for word in self.words])
        self.cut = np.array([word.tokens[-1] != EOS for word in self.words])

    def log_z(self, beta):
        exponents = self.ref_logp + self.rewards / beta
        return exponents.max() + np.log(np.exp(exponents - exponents.max()).sum())

    def optimum(self, beta):
        return self.ref_logp + self.rewards / beta - self.log_z(beta)


def world(order, max_new_tokens, context_length):
    task = tiny_task(order, max_new_tokens, context_length=context_length)
    return task, TokenSolution(task), [Enumeration(task, k) for k in range(task.num_tasks)]


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_is_a_distribution(case):
    _, _, prompts = world(*case)
    for prompt in prompts:
        assert np.exp(prompt.ref_logp).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", CASES)
def test_optimum_is_the_closed_form_over_all_responses(case, beta):
    task, solution, prompts = world(*case)
    policy = solution.optimal_policy(beta)
    assert solution.optimal_objective(beta) == pytest.approx(
        np.mean([beta * prompt.log_z(beta) for prompt in prompts]), abs=1e-10
    )
    for task_id, prompt in enumerate(prompts):
        responses = task.responses(task_id, *as_arrays(prompt.words))
        logp = solution.log_probs(policy, responses)
        np.testing.assert_allclose(logp.sum(axis=1), prompt.optimum(beta), atol=1e-9)
        assert not logp[np.arange(logp.shape[1]) >= prompt.lengths[:, None]].any()
        ref_logp = solution.log_probs(solution.reference_policy(), responses)
        np.testing.assert_allclose(ref_logp.sum(axis=1), prompt.ref_logp, atol=1e-12)
        # What is still to be had from a prompt, and the credit of each token.
        start = solution.values(beta)[task.limits[task_id], solution.starts[task_id]]
        assert start == pytest.approx(beta * prompt.log_z(beta), abs=1e-10)
        advantages = solution.advantages(beta, responses)
        np.testing.assert_allclose(advantages.sum(axis=1), prompt.rewards - start, atol=1e-9)
        np.testing.assert_allclose(advantages, beta * (logp - ref_logp), atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_value_after_every_prefix(case):
    """beta log of the sum over the completions of a prefix, less what it has been paid already."""
    beta = 0.3
    task, solution, prompts = world(*case)
    for task_id, prompt in enumerate(prompts):
        responses = task.responses(task_id, *as_arrays(prompt.words))
        steps_left, pairs, _ = solution._locate(responses)
        values = solution.values(beta)
        for row, word in enumerate(prompt.words):
            for place in range(len(word.tokens)):
                same = np.array([w.tokens[:place] == word.tokens[:place] for w in prompt.words])
                exponents = (prompt.ref_logp + prompt.rewards / beta)[same]
                total = np.log(np.exp(exponents).sum())
                before = np.log(np.exp(prompt.ref_logp[same]).sum())
                so_far = _paid_before(word.tokens[:place])
                expected = beta * (total - before) - so_far
                value = values[steps_left[row, place], pairs[row, place]]
                assert value == pytest.approx(expected, abs=1e-9)


def _paid_before(prefix):
    """The reward of a response that is not at its end: without the payment for a cut."""
    return sum(reward_of(prefix).values()) - CUT if prefix else 0.0


@pytest.mark.parametrize("case", CASES)
def test_without_a_penalty_the_best_responses_share(case):
    task, solution, prompts = world(*case)
    best = np.array([prompt.rewards.max() for prompt in prompts])
    assert solution.optimal_objective(0.0) == pytest.approx(best.mean(), abs=1e-12)
    policy = solution.optimal_policy(0.0)
    assert solution.evaluate(policy, 0.0).reward == pytest.approx(best.mean(), abs=1e-12)
    for task_id, prompt in enumerate(prompts):
        responses = task.responses(task_id, *as_arrays(prompt.words))
        probs = np.exp(solution.log_probs(policy, responses).sum(axis=1))
        assert probs.sum() == pytest.approx(1.0, abs=1e-12)
        assert (prompt.rewards[probs > 0] > best[task_id] - 1e-12).all()


@pytest.mark.parametrize("case", CASES)
def test_expectations_of_any_policy(case):
    """Of the policy that is optimal for another beta, whose probabilities are known in closed form."""
    task, solution, prompts = world(*case)
    beta, other = 0.3, 1.0
    value = solution.evaluate(solution.optimal_policy(other), beta)
    sums = np.zeros(5)
    for prompt in prompts:
        logp = prompt.optimum(other)
        terms = (
            prompt.rewards,
            logp - prompt.ref_logp,
            logp - prompt.optimum(beta),
            prompt.lengths,
            prompt.cut,
        )
        sums += [np.exp(logp) @ term for term in terms]
    reward, kl, kl_to_optimum, length, cut = sums / len(prompts)
    assert value.reward == pytest.approx(reward, abs=1e-10)
    assert value.kl_to_reference == pytest.approx(kl, abs=1e-10)
    assert value.kl_to_optimum == pytest.approx(kl_to_optimum, abs=1e-10)
    assert value.response_length == pytest.approx(length, abs=1e-10)
    assert value.cut == pytest.approx(cut, abs=1e-10)
    assert value.objective == pytest.approx(reward - beta * kl, abs=1e-10)
    regret = solution.optimal_objective(beta) - value.objective
    assert regret == pytest.approx(beta * value.kl_to_optimum, abs=1e-10) and regret > 0.01


def test_samples_have_the_policys_frequencies_and_kl():
    task, solution, prompts = world(2, 4, None)
    n, beta = 40_000, 0.5
    policy = solution.optimal_policy(beta)
    responses = solution.sample(policy, np.full(n, 1), np.random.default_rng(0))
    drawn = [tuple(t[:k].tolist()) for t, k in zip(responses.tokens, responses.lengths, strict=True)]
    probs = dict(zip((w.tokens for w in prompts[1].words), np.exp(prompts[1].optimum(beta)), strict=True))
    likely = sorted(probs, key=probs.__getitem__)[-6:]
    for word in likely:
        p = probs[word]
        assert abs(drawn.count(word) - n * p) < 4 * np.sqrt(n * p * (1 - p))
    assert (responses.stop_reasons == np.where([d[-1] == EOS for d in drawn], "eos", "length")).all()
    # The estimate of KL(policy || optimum) that agents make from their samples.
    of_reference = solution.sample(
        solution.reference_policy(), np.repeat(np.arange(4), n // 4), np.random.default_rng(1)
    )
    ratios = (
        solution.log_probs(solution.reference_policy(), of_reference)
        - solution.log_probs(policy, of_reference)
    ).sum(axis=1)
    exact = solution.evaluate(solution.reference_policy(), beta).kl_to_optimum
    assert abs(ratios.mean() - exact) < 4 * ratios.std() / np.sqrt(n)


def test_a_tiny_beta_and_a_float32_policy():
    task, solution, _ = world(2, 5, None)
    assert solution.optimal_objective(1e-300) == pytest.approx(
        solution.optimal_objective(0.0), abs=1e-9
    )
    optimum = solution.optimal_policy(0.3)
    value = solution.evaluate(optimum.astype(np.float32), 0.3)
    assert abs(value.kl_to_optimum) < 1e-5
    # The optimum is nowhere but at the best, the reference everywhere: infinite, and no NaN.
    value = solution.evaluate(solution.reference_policy(), 1e-310)
    assert value.kl_to_optimum == np.inf and value.kl_to_reference == 0.0
    assert solution.evaluate(solution.optimal_policy(0.0), 0.0).kl_to_optimum is None


def test_default_task_has_the_documented_figures():
    solution = TokenSolution(syllable_task())
    rows = [
        [float(cell) for cell in line.split("|")[1:-1]]
        for line in syllable_task.__doc__.splitlines()
        if line.strip().startswith("| ") and line.split("|")[1].strip().replace(".", "").isdigit()
    ]
    assert [row[0] for row in rows] == [0, 0.05, 0.1, 0.2, 0.3, 0.5, 1]
    reference = solution.evaluate(solution.reference_policy(), 0.05)
    assert round(reference.objective, 2) == 0.24 and reference.kl_to_reference == 0.0
    for beta, objective, reward, kl in rows:
        value = solution.evaluate(solution.optimal_policy(beta), beta)
        assert round(value.objective, 2) == objective and round(value.reward, 2) == reward
        assert round(value.kl_to_reference, 1) == kl
        assert solution.optimal_objective(beta) == pytest.approx(value.objective, abs=1e-9)


def test_other_rewards_and_references_are_refused():
    with pytest.raises(TypeError, match="reference: got NoneType; allowed: NGram"):
        TokenSolution(custom_task())
    with pytest.raises(TypeError, match="reward: got function; allowed: AutomatonReward"):
        TokenSolution(custom_task(vocab_size=4, eos_id=2, prompts=[[0]], reference=tiny_task().reference))


def test_bad_tables_and_betas():
    solution = TokenSolution(tiny_task())
    with pytest.raises(ValueError, match=r"policy: got shape \(2,\); allowed: \[H, M, V\] = \(4, "):
        solution.evaluate(np.zeros(2), 0.1)
    table = np.array(solution.reference_policy())
    table[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"probabilities at \[1, 2\] sum to nan; allowed: log-prob"):
        solution.evaluate(table, 0.1)
    for call in (solution.values, solution.optimal_policy, solution.optimal_objective):
        with pytest.raises(ValueError, match="beta: got -1.0; allowed: a finite number >= 0"):
            call(-1.0)
    with pytest.raises(ValueError, match="read-only"):
        solution.optimal_policy(0.5)[0] = 0.0
