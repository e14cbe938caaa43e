"""check_agent: every check passes on good agents, and a broken agent trips the check meant for it."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
from agents.batch import Batch
from agents.checking import CHECKS, Report, Result, check_agent
from agents.grpo import GRPO
from agents.policies.heads import categorical_sample
from agents.ppo import PPO
from agents.reinforce import Reinforce
from agents.rloo import RLOO
from agents.training import FlatAdam

NAMES = [check.name for check in CHECKS]
GENERAL = NAMES[: NAMES.index("first_ratio")]
SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "learning_rate": 1e-2}


class Small(PPO):
    """PPO with short rollouts, so that a check takes a fraction of a second."""

    def __init__(self, env: Any, seed: int | None = None, **config: Any) -> None:
        super().__init__(env, seed=seed, **{**SMALL, **config})


def by_status(report: Report, status: str) -> set[str]:
    return {result.name for result in report.results if result.status == status}


def message(report: Report, name: str) -> str:
    return next(result.message for result in report.results if result.name == name)


# --------------------------------------------------------------------------- good agents


def test_ppo_passes_everything_that_applies() -> None:
    report = check_agent(Small)
    assert report.passed, str(report)
    assert by_status(report, "skipped") == {"one_task_per_group"}
    assert [result.name for result in report.results] == NAMES


def test_reinforce_passes_everything_that_applies() -> None:
    # The whole update is one batch, so there are no minibatches.
    report = check_agent(functools.partial(agents.make, "reinforce", learning_rate=5e-3))
    assert report.passed, str(report)
    assert by_status(report, "skipped") == {"minibatches", "one_task_per_group"}


GRPO_SMALL = {"n_groups": 2, "num_generations": 4, "batch_size": 4, "num_iterations": 2}


@pytest.mark.parametrize(
    ("name", "config", "env_id", "skipped"),
    [("rloo", {"n_groups": 2}, "CartPole-v1", {"minibatches"}),
     ("remax", {"n_groups": 8}, "AnswerPool-v0", {"minibatches"}),
     ("grpo", GRPO_SMALL, "CartPole-v1", set()),
     ("grpo", {**GRPO_SMALL, "loss_type": "bnpo"}, "TokenGeneration-v0", set())],
    ids=["rloo", "remax", "grpo", "grpo-tokens"],
)  # fmt: skip
def test_agents_of_whole_episodes_pass_everything_that_applies(
    name: str, config: dict[str, Any], env_id: str, skipped: set[str]
) -> None:
    report = check_agent(functools.partial(agents.make, name, learning_rate=5e-3, **config), env_id)
    assert report.passed, str(report)
    assert by_status(report, "skipped") == skipped
    # The policies have a critic that these algorithms do not use; the report says so.
    unused = {"CartPole-v1": "critic_bias, critic_weight", "AnswerPool-v0": "values",
              "TokenGeneration-v0": "value_head.bias, value_head.weight"}  # fmt: skip
    assert message(report, "weights_change").endswith(f"not used, and left out: {unused[env_id]}")


def test_a_gaussian_policy_on_a_scalar_environment_passes() -> None:
    # A Gaussian's mean needs more samples per update than a choice among three.
    config = {"n_steps": 128, "learning_rate": 3e-3, "gamma": 0.9}
    report = check_agent(lambda env, seed: Small(env, seed, **config), "Pendulum-v1", n_envs=1)
    assert report.passed, str(report)
    assert by_status(report, "skipped") == {"one_task_per_group"}


@pytest.mark.parametrize(("name", "config"), [("sb3:PPO", {"n_steps": 32, "n_epochs": 4}), ("sb3:A2C", {})])
def test_sb3_passes_the_general_part(name: str, config: dict[str, Any]) -> None:
    report = check_agent(functools.partial(agents.make, name, learning_rate=5e-3, **config))
    assert by_status(report, "passed") == set(GENERAL), str(report)
    assert by_status(report, "skipped") == set(NAMES) - set(GENERAL)
    assert message(report, "first_ratio") == "the agent has no collect, prepare, loss"


class Grouped(Small):
    """Episodes in groups of two, as a group-relative algorithm has them."""

    tasks_per_group = 1

    def collect(self) -> Any:
        rollout = super().collect()
        numbers = np.arange(len(rollout.episodes.returns))
        rollout.episodes.group_ids = numbers // 2  # type: ignore[attr-defined]
        rollout.episodes.task_ids = numbers // 2 if self.tasks_per_group == 1 else numbers
        return rollout


def test_groups_of_one_task_pass() -> None:
    report = check_agent(functools.partial(Grouped, n_steps=128))
    assert report.passed and by_status(report, "skipped") == set(), str(report)


# --------------------------------------------------------------------------- broken agents


class ColdSampling(Small):
    """Samples at temperature 0.5 and scores without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        probabilities = self.policy.probabilities
        self.policy.sample = lambda obs, rng: categorical_sample(2.0 * probabilities(obs).log(), rng)


class DropoutWhileCollecting(Small):
    """Drops weights of the hidden layers while it collects; so few that the entropy hardly changes."""

    def collect(self) -> Any:
        hidden = list(getattr(self.policy, "weights", []))
        kept = [weight.detach().clone() for weight in hidden]
        with torch.no_grad():
            for weight in hidden:
                weight.mul_(torch.rand(weight.shape, generator=self.generator) > 0.02)
            rollout = super().collect()
            for weight, value in zip(hidden, kept, strict=True):
                weight.copy_(value)
        return rollout


class ShiftedReference(Small):
    """Takes the reference's log-probs of the step before."""

    def collect(self) -> Any:
        rollout = super().collect()
        ref = rollout.ref_log_probs
        return rollout if ref is None else replace(rollout, ref_log_probs=ref.roll(1, 0))


class AdvantagesKeepGradient(Reinforce):
    """Advantages from the current values, without detach."""

    def __init__(self, env: Any, seed: int | None = None, **config: Any) -> None:
        super().__init__(env, seed=seed, **{"learning_rate": 5e-3, **config})

    def prepare(self, rollout: Any) -> Batch:
        batch = super().prepare(rollout)
        return replace(batch, advantages=batch.returns - self.policy.value(batch.observations))


class RatioOfOne(Small):
    """Computes the old log-probs anew in the loss."""

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> Any:
        with torch.no_grad():
            now = self.policy.evaluate(batch.observations, batch.actions).log_prob
        return super().loss(replace(batch, old_log_probs=now), progress_remaining)


class FrozenLayer(Small):
    """The optimiser does not hold the last parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        *_, last = self.policy.parameters()
        last.requires_grad_(False)
        self.optimizer = FlatAdam(self.policy)
        last.requires_grad_(True)


class DetachedCritic(Small):
    """Reports a value loss that no gradient comes from."""

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> Any:
        terms = super().loss(batch, progress_remaining)
        value = self.config.vf_coef * terms.value
        return terms._replace(total=terms.total - value + value.detach())


class FrozenBias(RLOO):
    """The optimiser does not hold the bias of the actor, which a critic out of use does not excuse."""

    def __init__(self, env: Any, seed: int | None = None, **config: Any) -> None:
        super().__init__(env, seed=seed, **{"learning_rate": 1e-2, "n_groups": 2, **config})
        bias = dict(self.policy.named_parameters()).get("actor_bias")
        if bias is not None:  # a table has none
            bias.requires_grad_(False)
            self.optimizer = FlatAdam(self.policy)
            bias.requires_grad_(True)


class AveragedOverPadding(Small):
    """Divides the sum over executed steps by the number of all steps."""

    def prepare(self, rollout: Any) -> Batch:
        self.share = rollout.mask.float().mean()
        return super().prepare(rollout)

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> Any:
        terms = super().loss(batch, progress_remaining)
        return terms._replace(total=terms.total * self.share)


class CriticFitsMaskedSteps(Small):
    """Pulls the critic to the recorded values of masked steps."""

    def prepare(self, rollout: Any) -> Batch:
        idle = ~rollout.mask
        self.idle = rollout.observations[idle], rollout.values[idle]
        return super().prepare(rollout)

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> Any:
        terms = super().loss(batch, progress_remaining)
        observations, values = self.idle
        error = (self.policy.value(observations) - values).square().sum() / 100
        return terms._replace(total=terms.total + error)


class FixedDivisor(Small):
    """Divides the summed loss of a minibatch by batch_size, whatever its size."""

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> Any:
        terms = super().loss(batch, progress_remaining)
        return terms._replace(total=terms.total * len(batch) / self.config.batch_size)


class ReturnsShuffledApart(Small):
    """Shuffles the critic's targets apart from the rest."""

    def minibatches(self, batch: Batch) -> Any:
        for part in super().minibatches(batch):
            yield replace(part, returns=part.returns.flip(0))


class DropsLastMinibatch(Small):
    """Leaves out the minibatch that is not full, as DataLoader(drop_last=True) does."""

    def minibatches(self, batch: Batch) -> Any:
        return (part for part in super().minibatches(batch) if len(part) == self.config.batch_size)


class TornBatch(Batch):
    """Selects all fields by the index but one, which stays in its order."""

    def select(self, index: torch.Tensor) -> Batch:
        return replace(super().select(index), returns=self.returns[index.sort().values])


class TornSelection(Small):
    def prepare(self, rollout: Any) -> Batch:
        return TornBatch(**vars(super().prepare(rollout)))


class TornEpisodes(GRPO):
    """The same where a sample is a whole episode."""

    def __init__(self, env: Any, seed: int | None = None, **config: Any) -> None:
        super().__init__(env, seed=seed, **{**GRPO_SMALL, "learning_rate": 1e-2, **config})

    def minibatches(self, batch: Batch) -> Any:
        return (replace(part, returns=part.returns.flip(0)) for part in super().minibatches(batch))


class StaleAccepted(Small):
    """Does not compare policy versions."""

    def prepare(self, rollout: Any) -> Batch:
        return super().prepare(replace(rollout, policy_version=self.collector.policy_version))


class ForgetsWeights(Small):
    """Loads everything but the weights."""

    @classmethod
    def load(cls, path: Any, env: Any, **kwargs: Any) -> Any:
        agent = super().load(path, env, **kwargs)
        agent.policy.load_state_dict(cls(env, seed=1).policy.state_dict())
        return agent


class ForgetsOptimiser(Small):
    """Loads everything but Adam's moments."""

    @classmethod
    def load(cls, path: Any, env: Any, **kwargs: Any) -> Any:
        agent = super().load(path, env, **kwargs)
        agent.optimizer = FlatAdam(agent.policy)
        return agent


class ResumesWithoutOptimiser(Small):
    """Forgets Adam's moments when it goes on from a checkpoint."""

    forget = False

    @functools.wraps(PPO.learn)
    def learn(self, *args: Any, resume: bool = False, **kwargs: Any) -> Any:
        self.forget = resume
        return super().learn(*args, resume=resume, **kwargs)

    def collect(self) -> Any:
        if self.forget:
            self.optimizer, self.forget = FlatAdam(self.policy), False
        return super().collect()


class UnseededSampling(Small):
    """Its generator is seeded for the weights and by chance for the actions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator.seed()


class LearnsTheOpposite(Small):
    """The sign of the reward is wrong, so it never learns."""

    def prepare(self, rollout: Any) -> Batch:
        return super().prepare(replace(rollout, rewards=-rollout.rewards))


class TakesFourTimesTheSteps(Small):
    @functools.wraps(PPO.learn)
    def learn(self, total_timesteps: int, *args: Any, **kwargs: Any) -> Any:
        return super().learn(4 * total_timesteps, *args, **kwargs)


class OutOfRange(Small):
    """Adds 1 to the actions of a batch."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        action, state = super().predict(*args, **kwargs)
        return (action + 1 if np.ndim(action) else action), state


class IgnoresDeterministic(Small):
    def predict(self, observation: Any, *args: Any, deterministic: bool = False, **kwargs: Any) -> Any:
        return super().predict(observation, *args, **kwargs)


class PredictResetsTheEnvironment(Small):
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.env.reset(seed=0)
        return super().predict(*args, **kwargs)


class PredictSeedsEverything(Small):
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        random.seed(0)
        return super().predict(*args, **kwargs)


class ClipsInPlace(Small):
    """Clips observations in the caller's array."""

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(observation):
            np.clip(observation, -0.5, 0.5, out=observation)
        return super().predict(observation, *args, **kwargs)


class MixedGroups(Grouped):
    """Two tasks in a group."""

    tasks_per_group = 2


BROKEN: list[tuple[type, set[str]]] = [
    (OutOfRange, {"actions"}),
    (IgnoresDeterministic, {"deterministic"}),
    # Two runs with one seed differ, and a resumed run is compared with another run.
    (UnseededSampling, {"seed", "resume"}),
    # Without its weights an agent cannot train on as if nothing had happened either.
    (ForgetsWeights, {"save_load", "training_after_load"}),
    (LearnsTheOpposite, {"learning"}),
    (TakesFourTimesTheSteps, {"timesteps"}),
    (PredictResetsTheEnvironment, {"environment_random_state"}),
    (PredictSeedsEverything, {"global_random_state"}),
    (ClipsInPlace, {"inputs_unchanged"}),
    (DropoutWhileCollecting, {"first_ratio"}),
    (ColdSampling, {"sampling"}),
    (ShiftedReference, {"reference_kl"}),
    (AdvantagesKeepGradient, {"no_gradient_in_data"}),
    (RatioOfOne, {"ratio_moves"}),
    (FrozenLayer, {"weights_change"}),
    (DetachedCritic, {"weights_change"}),
    (FrozenBias, {"weights_change"}),
    (AveragedOverPadding, {"padding"}),
    (CriticFitsMaskedSteps, {"masked_steps"}),
    # Minibatches are made by the same select.
    (TornSelection, {"minibatch_order", "minibatches"}),
    # Its loss does not read the returns that are torn off.
    (TornEpisodes, {"minibatches"}),
    (FixedDivisor, {"accumulation"}),
    (ReturnsShuffledApart, {"minibatches"}),
    (DropsLastMinibatch, {"minibatches"}),
    (StaleAccepted, {"stale_rollout"}),
    (ForgetsOptimiser, {"training_after_load"}),
    (ResumesWithoutOptimiser, {"resume"}),
    (MixedGroups, {"one_task_per_group"}),
]


@pytest.mark.parametrize(("broken", "tripped"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_agent_trips_the_check_meant_for_it(broken: Any, tripped: set[str]) -> None:
    factory = functools.partial(broken, n_steps=128) if issubclass(broken, Grouped) else broken
    # The slowest learner, whose advantages disturb its critic, needed 5,000 steps at most over ten seeds.
    report = check_agent(factory, budget=20_000)
    assert by_status(report, "failed") == tripped, str(report)
    assert not report.passed
    for name in tripped:
        text = message(report, name)
        assert text.startswith("seen: ") and "\nexpected: " in text and "\nusual causes: " in text


def test_every_check_but_the_first_has_a_broken_agent() -> None:
    assert set().union(*(tripped for _, tripped in BROKEN)) == set(NAMES) - {"construction"}


# --------------------------------------------------------------------------- what cannot be checked


def test_an_object_that_is_no_agent_fails_and_the_rest_is_skipped() -> None:
    report = check_agent(lambda env, seed: object())
    assert by_status(report, "failed") == {"construction"}
    assert by_status(report, "skipped") == set(NAMES) - {"construction"}
    assert "object has no learn, predict, save, load" in message(report, "construction")


def test_a_constructor_that_crashes_is_named() -> None:
    def factory(env: Any, seed: int) -> Any:
        raise OSError("no such weights")

    report = check_agent(factory)
    text = message(report, "construction")
    assert text.startswith("crashed with OSError: no such weights (test_checking.py:")


class NoBatches(Small):
    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(observation) == 2:
            raise NotImplementedError("one at a time")
        return super().predict(observation, *args, **kwargs)


class CannotSave(NoBatches):
    def save(self, path: Any) -> None:
        raise PermissionError("read-only")


def test_a_check_that_crashes_has_failed_and_batches_are_optional() -> None:
    report = check_agent(CannotSave)
    assert by_status(report, "failed") == {"save_load", "training_after_load"}
    text = message(report, "save_load")
    assert text.startswith("crashed with PermissionError: read-only (test_checking.py:")
    assert message(report, "actions") == (
        "predict takes no batch of observations (NotImplementedError: one at a time)"
    )


class NeverReturns(Small):
    def learn(self, total_timesteps: int, **kwargs: Any) -> Any:
        self.env.reset(seed=0)
        while True:
            self.env.step(self.env.action_space.sample())


def test_learn_that_never_returns_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.check_tools.MAX_STEPS", 500)
    report = check_agent(NeverReturns)
    assert "still stepping the environment after 500 steps" in message(report, "timesteps")


# --------------------------------------------------------------------------- the report


def test_report_as_text_and_json() -> None:
    results = [Result("seed", "passed", ""), Result("actions", "failed", "seen: [7]")]
    report = Report("mine", "CartPole-v1", results)
    assert json.loads(report.to_json()) == {
        "agent": "mine", "env_id": "CartPole-v1", "passed": False,
        "results": [
            {"name": "seed", "status": "passed", "message": ""},
            {"name": "actions", "status": "failed", "message": "seen: [7]"},
        ],
    }
    text = str(report)
    assert "mine on CartPole-v1: 1 passed, 1 failed, 0 skipped" in text
    assert "seen: [7]" in text  # brackets are text here, not rich's markup


def test_checking_leaves_global_generators_and_threads_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    threads = torch.get_num_threads()
    check_agent(functools.partial(agents.make, "sb3:A2C"), budget=1)  # SB3 seeds all three
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert torch.get_num_threads() == threads


def test_wrong_arguments_are_errors_and_not_failures() -> None:
    with pytest.raises(ValueError, match="did you mean 'ppo'"):
        check_agent("pp0")
    with pytest.raises(gym.error.Error):
        check_agent("ppo", "NoSuchEnvironment-v0")
    with pytest.raises(ValueError, match="n_envs=0 must be >= 1"):
        check_agent("ppo", n_envs=0)
