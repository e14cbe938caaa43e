"""Self-test of the RLHF pipeline on the small task: each stage against what is exactly true of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch

from agents.losses import clip_fraction
from agents.policies.gpt import GPTPolicy
from agents.reward_model import RewardModel
from agents.training import make_generator, single_thread
from common.rlhf_measure import (
    Listed,
    exact_measures,
    list_all,
    policy_log_probs,
    sample_policy,
)
from common.rlhf_pipeline import (
    ENV,
    RewardReport,
    draw_preferences,
    learned_task,
    make_policy,
    make_ppo,
    sample_reference,
    small_task,
    train_reward_model,
    train_sft,
    with_prompts,
)
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import TokenTask

BETAS = (0.0, 0.05, 0.5, 2.0)
BETA = 0.5  # of the PPO run
HELD_OUT = 2_000


@dataclass(frozen=True)
class Setup:
    """The trained stages that the checks look at."""

    task: TokenTask
    policy: GPTPolicy
    sft: dict[str, float]
    model: RewardModel
    report: RewardReport
    listed: Listed


Check = Callable[[Setup], str]


class CheckFailed(Exception):
    """What a check found wrong."""


def make_setup(seed: int = 0) -> Setup:
    """SFT and reward model at small settings, a few seconds."""
    task = small_task()
    policy = make_policy(task, seed, n_embd=32)
    sft = train_sft(task, policy, 5_000, seed, learning_rate="lin_0.005", n_epochs=2)
    model, report = train_reward_model(
        task, policy, draw_preferences(task, 3_000, seed), seed, HELD_OUT,
        learning_rate="lin_0.01", n_epochs=3,
    )  # fmt: skip
    return Setup(task, policy, sft, model, report, list_all(task, model))


def run_selftest(
    report: Callable[[str], None], setup: Setup | None = None, checks: Sequence[Check] | None = None
) -> list[str]:
    """Run checks (None: every one), tell ``report`` a line of each, and return the reasons of failures."""
    setup = setup or make_setup()
    failures = []
    for check in CHECKS if checks is None else checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            report(f"ok      {name}: {check(setup)}")
        except CheckFailed as error:
            failures.append(f"{name}: {error}")
            report(f"FAILED  {name}: {error}")
    return failures


def _require(condition: bool | np.bool_, found: str) -> str:
    if not condition:
        raise CheckFailed(found)
    return found


# ------------------------------------------------------------------------------------------ the checks


def check_gold_reward_in_units_of_the_reference(s: Setup) -> str:
    """Mean 0 and deviation 1 under the reference, exactly and on the samples that set the unit."""
    mean = s.listed.expected(s.listed.ref, s.listed.gold)
    deviation = np.sqrt(s.listed.expected(s.listed.ref, s.listed.gold**2))
    return _require(
        abs(mean) < 1e-9 and abs(deviation - 1) < 0.02, f"mean {mean:.1e}, deviation {deviation:.3f}"
    )


def check_optimum_by_enumeration_equals_soft_value_iteration(s: Setup) -> str:
    """Objective and policy of the gold optimum at several betas, by two routes that share no code."""
    solution, worst = TokenSolution(s.task), 0.0
    for beta in BETAS:
        objective, log_probs = s.listed.optimum(s.listed.gold, beta)
        along = solution.log_probs(solution.optimal_policy(beta), s.listed.responses).sum(axis=1)
        worst = max(
            worst, abs(objective - solution.optimal_objective(beta)),
            float(np.abs(np.exp(log_probs) - np.exp(along)).max()),
        )  # fmt: skip
    return _require(worst < 1e-8, f"largest difference {worst:.1e} over beta {BETAS}")


def check_sft_close_to_the_reference(s: Setup) -> str:
    """The held-out loss is close to that of the reference itself, and not below it by more than noise."""
    excess = s.sft["loss"] - s.sft["floor"]
    kl = s.listed.kl(s.listed.ref, policy_log_probs(s.listed, s.policy))
    return _require(
        -0.01 < excess < 0.05 and 0 <= kl < 0.25,
        f"loss {excess:+.4f} above the reference's own, exact KL(reference || SFT) {kl:.3f} a response",
    )


def check_probabilities_of_all_responses_sum_to_one(s: Setup) -> str:
    """Teacher-forced log-probs of every response to a prompt: a distribution over responses."""
    log_probs = s.listed.by_prompt(policy_log_probs(s.listed, s.policy))
    off = max(abs(float(np.exp(part).sum()) - 1.0) for part in log_probs)
    complete = len(log_probs) == s.task.num_tasks
    return _require(complete and off < 1e-4, f"off by {off:.1e} for {len(log_probs)} prompts")


def check_stepwise_and_teacher_forced_log_probs_agree(s: Setup) -> str:
    """Generated with the cache in the environment, scored token by token and in one pass."""
    n, generator = 64, make_generator(1)
    env = gym.make_vec(ENV, num_envs=n, task=s.task, autoreset_mode="disabled")
    observations, _ = env.reset(seed=1)
    state, ended = s.policy.new_state(n), np.zeros(n, bool)
    stepwise, actions, last = [], [], observations.copy()
    with single_thread(), torch.no_grad():
        while not ended.all():
            seen = torch.from_numpy(observations.copy())
            drawn = s.policy.sample(seen, generator, state, torch.from_numpy(~ended))
            stepwise.append(
                torch.where(torch.from_numpy(ended), 0.0, s.policy.evaluate(seen, drawn).log_prob)
            )
            actions.append(torch.where(torch.from_numpy(ended), -1, drawn))
            last[~ended] = observations[~ended]
            observations, _, terminated, _, _ = env.step(drawn.numpy())
            ended = ended | terminated
        whole = s.policy.evaluate(torch.from_numpy(last), torch.stack(actions, 1)).log_prob
    env.close()
    off = float((whole - torch.stack(stepwise, 1)).abs().max())
    return _require(off < 1e-5, f"largest difference {off:.1e}")


def check_samples_follow_the_log_probs(s: Setup) -> str:
    """The mean log-prob of samples against its exact expectation: the sampler draws what is scored."""
    log_probs = policy_log_probs(s.listed, s.policy)
    exact = s.listed.expected(log_probs, log_probs)
    sampled = sample_policy(s.task, s.model, s.policy, 2_000, seed=2).log_probs
    error = sampled.std() / np.sqrt(len(sampled))
    off = abs(sampled.mean() - exact) / error
    return _require(off < 4, f"{sampled.mean():.3f} against {exact:.3f}, {off:.1f} standard errors apart")


def check_reward_model_normalised(s: Setup) -> str:
    """Mean 0 and deviation 1 on reference samples other than those that set them."""
    r = s.report
    return _require(
        abs(r.mean) < 0.1 and abs(r.deviation - 1) < 0.1, f"mean {r.mean:.3f}, deviation {r.deviation:.3f}"
    )


def check_reward_model_above_chance(s: Setup) -> str:
    """Accuracy on held-out pairs by four standard errors, and not above what the gold reward reaches."""
    error, r = 0.5 / np.sqrt(HELD_OUT), s.report
    return _require(
        0.5 + 4 * error < r.accuracy < r.gold_accuracy + 4 * error,
        f"accuracy {r.accuracy:.3f}, gold reward {r.gold_accuracy:.3f}, chance 0.5 +- {error:.3f}",
    )


def check_value_model_starts_as_the_reward_model(s: Setup) -> str:
    """V after a whole response is its score."""
    agent = make_ppo(learned_task(s.task, s.model), s.policy, seed=3, model=s.model)
    tokens = torch.from_numpy(with_prompts(s.task, sample_reference(s.task, 100, seed=3)))
    with torch.no_grad():
        off = float((agent.policy.value(tokens) - s.model.score_tokens(tokens)).abs().max())
    return _require(off < 1e-4, f"largest difference {off:.1e}")


def check_ratio_one_and_kl_zero_to_a_frozen_copy(s: Setup) -> str:
    """Before an update; after one the KL is not 0, and the reference has not moved."""
    before = copy.deepcopy(s.policy.state_dict())
    agent = make_ppo(
        learned_task(s.task, s.model), s.policy, seed=4, model=s.model, reference=s.policy, beta=0.1,
        normalize_advantage=False, batch_size=64, n_epochs=4, learning_rate=3e-3,
    )  # fmt: skip
    rollout = agent.collect()
    batch = agent.prepare(rollout)
    with torch.no_grad():
        ratio = agent.loss(batch).ratio
    assert rollout.ref_log_probs is not None
    kl = float((rollout.log_probs - rollout.ref_log_probs).abs().max())
    off, clipped = float((ratio - 1).abs().max()), float(clip_fraction(ratio, 0.2).mean())
    agent.update(rollout)
    after = agent.collect()
    assert after.ref_log_probs is not None and isinstance(agent.reference, GPTPolicy)
    moved = float((after.log_probs - after.ref_log_probs).abs().max())
    same = all(torch.equal(x, before[name]) for name, x in agent.reference.state_dict().items())
    return _require(
        off < 1e-5 and clipped == 0 and kl < 1e-5 and moved > 1e-3 and same,
        f"ratio off by {off:.1e}, log-ratio to the copy {kl:.1e}, after an update {moved:.2f}; "
        f"reference {'unchanged' if same else 'CHANGED'}",
    )


def check_kl_in_the_reward(s: Setup) -> str:
    """With gamma and lambda 1 the first return is the score less beta times the whole log-ratio."""
    agent = make_ppo(learned_task(s.task, s.model), s.policy, seed=5, model=s.model, beta=0.3, gae_lambda=1.0)
    rollout = agent.collect()
    batch = agent.prepare(rollout)
    assert batch.ref_log_probs is not None
    expected = rollout.episodes.info["reward/proxy"] - 0.3 * (
        (batch.old_log_probs - batch.ref_log_probs).sum(1).numpy()
    )
    off = float(np.abs(batch.returns[:, 0].numpy() - expected).max())
    return _require(off < 1e-4, f"largest difference {off:.1e}")


def check_ppo_improves_the_proxy_and_nears_its_optimum(s: Setup) -> str:
    """A few updates on the learned reward, measured over all responses."""
    optimum, _ = s.listed.optimum(s.listed.proxy, BETA)
    agent = make_ppo(
        learned_task(s.task, s.model), s.policy, seed=6, model=s.model, beta=BETA, batch_size=32,
        n_epochs=4, learning_rate="lin_0.001", n_envs=128,
    )  # fmt: skip
    before = exact_measures(s.listed, policy_log_probs(s.listed, s.policy), BETA)
    agent.learn(12_000)
    after = exact_measures(s.listed, policy_log_probs(s.listed, agent.policy), BETA)
    a, b = before["kl_learned"], after["kl_learned"]
    assert a is not None and b is not None and after["objective"] is not None
    assert before["proxy"] is not None and after["proxy"] is not None
    gap = abs(optimum - after["objective"] - BETA * b)
    return _require(
        after["proxy"] > before["proxy"] + 0.1 and b < a / 3 and gap < 1e-3,
        f"proxy {before['proxy']:.2f} to {after['proxy']:.2f}, KL to the optimum {a:.3f} to {b:.3f}, and "
        f"objective* - objective = beta KL within {gap:.0e}",
    )


CHECKS: tuple[Check, ...] = (
    check_gold_reward_in_units_of_the_reference,
    check_optimum_by_enumeration_equals_soft_value_iteration,
    check_sft_close_to_the_reference,
    check_probabilities_of_all_responses_sum_to_one,
    check_stepwise_and_teacher_forced_log_probs_agree,
    check_samples_follow_the_log_probs,
    check_reward_model_normalised,
    check_reward_model_above_chance,
    check_value_model_starts_as_the_reward_model,
    check_ratio_one_and_kl_zero_to_a_frozen_copy,
    check_kl_in_the_reward,
    check_ppo_improves_the_proxy_and_nears_its_optimum,
)
