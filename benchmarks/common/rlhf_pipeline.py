"""The stages of RLHF on a token task whose optimum is known: task, SFT, preferences, reward model, PPO.

    gold_task --> train_sft --> draw_preferences --> train_reward_model --> learned_task --> make_ppo

Rewards have one unit throughout, the deviation of the reward of the reference policy's responses: the
gold reward and the learned one both have mean 0 and deviation 1 there. So a beta means the same for both,
and the optimum of the gold reward is exact at that beta (`llmgym.token_solution`).

Every function takes its seed and returns plain data or one trained module. Nothing here measures or draws.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

import agents
from agents.policies.base import Policy
from agents.policies.gpt import GPTPolicy
from agents.ppo import PPO
from agents.preferences import Preferences, bradley_terry_preferences
from agents.preferences import Responses as Records
from agents.reward_model import RewardModel, RewardTrainer, reward_model_from, with_critic
from agents.sft import SFT
from agents.training import make_generator
from llmgym.automaton import Automaton, AutomatonReward, pattern_rewards, repeat_rewards
from llmgym.ngram import NGram
from llmgym.syllable_task import syllable_task
from llmgym.token_rewards import Responses, Scores
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import Alphabet, TokenTask

ENV = "TokenGeneration-v0"
UNIT_SAMPLES = 100_000  # reference responses that fix the unit of the reward, always the same ones


# ------------------------------------------------------------------------------------------- tasks


def gold_task() -> TokenTask:
    """The default task of `TokenGeneration-v0`, its reward in deviations (see `standardised`)."""
    return standardised(syllable_task())


def small_task() -> TokenTask:
    """A task like it, small enough that every response can be listed: 5 tokens, at most 6 of them.

    Each of the two prompts has 6,825 responses. The reward pays 2 for "kob", 1 for "ab", -1 for "oo"
    and -0.5 for repeats, and is standardised.
    """
    letters = Alphabet("aobk.")
    size, eos_id = 5, 4
    logits = np.random.Generator(np.random.PCG64(5)).standard_normal((size + 1, size))
    patterns = [(letters.encode(word).tolist(), worth) for word, worth in
                (("kob", 2.0), ("ab", 1.0), ("oo", -1.0))]  # fmt: skip
    return standardised(
        TokenTask(
            prompts=[letters.encode(word) for word in ("ba", "ok")],
            vocab_size=size,
            eos_id=eos_id,
            max_new_tokens=6,
            reward=AutomatonReward(
                {"patterns": pattern_rewards(size, patterns), "repeats": repeat_rewards(size, -0.5)}
            ),
            reference=NGram.from_logits(logits, 2, eos_id, eos_prob=0.15),
            decode=letters,
        )
    )


def standardised(task: TokenTask) -> TokenTask:
    """The task with its automaton's reward R replaced by ``(R - mean) / deviation`` of the reference.

    Still an automaton, so the optimum stays exact: payments are divided by the deviation, and every
    response, which ends once, is charged the mean at its end (the component "mean").
    """
    solution = TokenSolution(task)
    assert isinstance(task.reward, AutomatonReward)
    mean = solution.evaluate(solution.reference_policy(), 0.0).reward
    deviation = float(task.score(sample_reference(task, UNIT_SAMPLES, seed=0)).std())
    at_eos = np.where(np.arange(task.vocab_size) == task.eos_id, -mean, 0.0)[None]
    charge = Automaton(np.zeros((1, task.vocab_size), dtype=np.int64), at_eos, np.array([-mean]))
    parts = {**task.reward.components, "mean": charge}
    scaled = {
        name: Automaton(part.transitions, part.rewards / deviation, part.cut / deviation)
        for name, part in parts.items()
    }
    return replace(task, reward=AutomatonReward(scaled))


def sample_reference(task: TokenTask, n: int, seed: int) -> Responses:
    """n responses of the task's n-gram reference, to prompts drawn uniformly."""
    rng = np.random.default_rng(seed)
    return _reference_responses(task, rng.integers(task.num_tasks, size=n), rng)


def _reference_responses(task: TokenTask, task_ids: np.ndarray, rng: np.random.Generator) -> Responses:
    reference = task.reference
    assert isinstance(reference, NGram)
    prompts = prompt_tokens(task)
    contexts = reference.contexts(prompts, task.prompt_lengths)[task_ids]
    tokens, lengths = reference.sample(contexts, task.limits[task_ids], task.eos_id, rng)
    return task.responses(task_ids, tokens, lengths)


def prompt_tokens(task: TokenTask) -> np.ndarray:
    """The prompts int64 [P, longest], padded behind."""
    prompts = np.full((task.num_tasks, int(task.prompt_lengths.max())), task.pad)
    for number, prompt in enumerate(task.prompts):
        prompts[number, : task.prompt_lengths[number]] = prompt
    return prompts


def with_prompts(task: TokenTask, responses: Responses) -> np.ndarray:
    """Prompts and whole responses as one array int64 [N, L], padded behind: a last observation."""
    begin = task.prompt_lengths[responses.task_ids]
    sequences = np.full((len(responses), task.sequence_length), task.pad)
    prompts = prompt_tokens(task)
    sequences[:, : prompts.shape[1]] = prompts[responses.task_ids]
    row, place = np.nonzero(np.arange(responses.tokens.shape[1]) < responses.lengths[:, None])
    sequences[row, begin[row] + place] = responses.tokens[row, place]
    return sequences


def as_records(task: TokenTask, responses: Responses) -> Records:
    """Responses as the trainers of `agents` take them: the last token is an action and no observation."""
    observations = with_prompts(task, responses)
    rows, lengths = np.arange(len(responses)), responses.lengths
    observations[rows, task.prompt_lengths[responses.task_ids] + lengths - 1] = task.pad
    real = np.arange(responses.tokens.shape[1]) < lengths[:, None]
    actions = np.where(real, responses.tokens, -1)
    return Records(torch.from_numpy(observations), torch.from_numpy(actions))


# ------------------------------------------------------------------- policy, preferences, reward model


def make_policy(task: TokenTask, seed: int, **sizes: Any) -> GPTPolicy:
    """A GPT with random weights for the task; sizes as `GPTPolicy` takes them."""
    env = gym.make(ENV, task=task)
    policy = GPTPolicy(env.observation_space, env.action_space, make_generator(seed), **sizes)
    env.close()
    return policy


def train_sft(
    task: TokenTask, policy: GPTPolicy, n_samples: int, seed: int, **config: Any
) -> dict[str, float]:
    """Fine-tune the policy, in place, on samples of the reference.

    Returns:
        ``loss`` of 2,000 held-out samples, in nats a token, and ``floor``, the reference's own on them.
    """
    trainer = SFT(policy, seed=seed, **config)
    trainer.fit(as_records(task, sample_reference(task, n_samples, seed)))
    held_out = sample_reference(task, 2_000, seed + 500_000)
    loss = trainer.evaluate(as_records(task, held_out))["sft/loss"]
    solution = TokenSolution(task)
    log_probs = solution.log_probs(solution.reference_policy(), held_out)
    return {"loss": loss, "floor": float(-log_probs.sum() / held_out.lengths.sum())}


def draw_preferences(task: TokenTask, n_pairs: int, seed: int) -> Preferences:
    """Preferences between two reference responses to a prompt each, drawn from their gold rewards.

    The first of a pair wins with probability ``sigmoid(gold_1 - gold_2)``.
    """
    rng = np.random.default_rng(seed)
    task_ids = np.repeat(rng.integers(task.num_tasks, size=n_pairs), 2)
    responses = _reference_responses(task, task_ids, rng)
    pairs = torch.arange(2 * n_pairs).view(n_pairs, 2)
    return bradley_terry_preferences(
        as_records(task, responses), task.score(responses), pairs, make_generator(seed)
    )


def gold_accuracy(task: TokenTask, preferences: Preferences) -> float:
    """Share of the preferences that agree with the gold reward, ties counting half: the best there is."""
    chosen, rejected = (score_records(task, part) for part in (preferences.chosen, preferences.rejected))
    return float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected)))


def score_records(task: TokenTask, records: Records) -> np.ndarray:
    """The task's reward [N] of the trainers' records; the inverse of `as_records`, then the reward."""
    return task.score(as_responses(task, records.observations.numpy(), records.actions.numpy()))


def as_responses(task: TokenTask, observations: np.ndarray, actions: np.ndarray) -> Responses:
    """Records back to responses; the prompt of each row is found by its tokens.

    Args:
        observations: int64 [N, L], actions: int64 [N, T], as in `agents.preferences`.

    Raises:
        ValueError: a row begins with no prompt of the task.
    """
    lengths = (actions >= 0).sum(axis=1)
    begin = (observations != task.pad).sum(axis=1) - lengths + 1
    prompts = prompt_tokens(task)
    width = min(prompts.shape[1], observations.shape[1])
    seen = np.where(np.arange(width) < begin[:, None], observations[:, :width], task.pad)
    same = (seen[:, None] == prompts[None, :, :width]).all(axis=2)
    if not same.any(axis=1).all():
        raise ValueError(f"observations: row {int(same.any(axis=1).argmin())} has no prompt of the task")
    return task.responses(same.argmax(axis=1), np.where(actions >= 0, actions, task.pad), lengths)


class RewardReport(NamedTuple):
    """How good a reward model is on pairs, and on reference responses, that it was not trained on.

    accuracy, loss: on held-out pairs. gold_accuracy: that of the gold reward itself on the same pairs.
    correlation: of the scores with the gold reward. mean, deviation: of the scores.
    """

    accuracy: float
    loss: float
    gold_accuracy: float
    correlation: float
    mean: float
    deviation: float


def train_reward_model(
    task: TokenTask,
    policy: GPTPolicy,
    preferences: Preferences,
    seed: int,
    held_out_pairs: int = 4_000,
    **config: Any,
) -> tuple[RewardModel, RewardReport]:
    """A reward model on the body of the policy, trained on the pairs and normalised on reference samples."""
    model = reward_model_from(policy, seed)
    trainer = RewardTrainer(model, seed, **config)
    trainer.fit(preferences)
    model.normalise(as_records(task, sample_reference(task, 5_000, seed + 600_000)))

    held_out = draw_preferences(task, held_out_pairs, seed + 700_000)
    found = trainer.evaluate(held_out)
    others = sample_reference(task, 5_000, seed + 800_000)
    scores, gold = model.score(as_records(task, others)).numpy(), task.score(others)
    report = RewardReport(
        accuracy=found["rm/accuracy"],
        # The loss is that of the scores as they were trained, before their scale was set.
        loss=_raw_loss(model, held_out),
        gold_accuracy=gold_accuracy(task, held_out),
        correlation=float(np.corrcoef(scores, gold)[0, 1]),
        mean=float(scores.mean()),
        deviation=float(scores.std()),
    )
    return model, report


def _raw_loss(model: RewardModel, preferences: Preferences) -> float:
    margin = (model.score(preferences.chosen) - model.score(preferences.rejected)) * model.deviation
    return float(-torch.nn.functional.logsigmoid(margin).mean())


# --------------------------------------------------------------------------------------------- PPO


class LearnedReward:
    """A reward function for `TokenTask`: the reward model's score of each whole response.

    Components ``proxy``, the same score, and ``gold``, the reward that is meant, which nobody trains on.

    Args:
        task: has the gold reward.
        model: scores token sequences.
    """

    def __init__(self, task: TokenTask, model: RewardModel) -> None:
        self.task, self.model = task, model

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.task.vocab_size

    def __call__(self, responses: Responses) -> Scores:
        proxy = self.scores(responses)
        return Scores(proxy, {"proxy": proxy, "gold": self.task.score(responses)})

    def scores(self, responses: Responses) -> np.ndarray:
        """The reward model's scores, float64 [N]."""
        tokens: Tensor = torch.from_numpy(with_prompts(self.task, responses))
        return self.model.score_tokens(tokens).double().numpy()


def learned_task(task: TokenTask, model: RewardModel) -> TokenTask:
    """The task with the reward model's score as its reward; its reference is still the n-gram."""
    return replace(task, reward=LearnedReward(task, model))


def make_ppo(
    task: TokenTask,
    policy: GPTPolicy,
    seed: int,
    model: RewardModel | None = None,
    reference: Policy | None = None,
    n_envs: int = 64,
    **config: Any,
) -> PPO:
    """PPO on whole responses, from a copy of the policy.

    Args:
        task: what to train on, such as `learned_task`.
        policy: where it starts, such as the SFT policy; not changed.
        model: the value model starts as this reward model and is a network of its own. None: the value
            head of the policy.
        reference: policy for the KL; None is the task's own reference, which the environment reports as
            ``ref_logp``. Then the optimum is exact; for a fine-tuned reference it is not known.
        n_envs: responses in each rollout.
        config: fields of `agents.ppo.PPOConfig`; gamma is 1.
    """
    actor = copy.deepcopy(policy)
    start: Any = actor if model is None else with_critic(actor, model)
    env = gym.make_vec(ENV, num_envs=n_envs, task=task, autoreset_mode="disabled")
    return agents.make("ppo", env, seed=seed, reference=reference, policy=start, **({"gamma": 1.0} | config))
