"""Metrics of agents that compare episodes, by hand; and the warning about a clip that stops too much."""

import warnings
from typing import Any

import numpy as np
import pytest
from task_world import task_env
from worlds import sync

import agents
from agents.groups import group_metrics
from agents.grpo import GRPO
from agents.metrics import METRICS
from agents.rollout import Episodes
from agents.training_run import TrainingRun
from llmgym.vector import AutoresetMode

SAME_STEP = AutoresetMode.SAME_STEP


def episodes(**info: Any) -> Episodes:
    """Three groups, not in order: [1, 3], [2, 2], [0, 0, 3]."""
    return Episodes(
        returns=np.array([1.0, 2, 0, 3, 2, 0, 3]), lengths=np.array([1, 2, 3, 4, 5, 6, 7]),
        task_ids=np.zeros(7, int), group_ids=np.array([5, 6, 9, 5, 6, 9, 9]),
        cut=np.array([1, 0, 0, 0, 0, 1, 0], bool), info={k: np.array(v) for k, v in info.items()},
    )  # fmt: skip


def test_rewards_lengths_and_cuts_by_hand():
    metrics = group_metrics(episodes())
    assert metrics == pytest.approx({
        "group/reward_mean": 11 / 7,
        "group/reward_std": (1 + 0 + np.sqrt(2)) / 3,  # of 0, 0, 3: the mean of 1, 1, 4 is 2
        "group/no_signal": 1 / 3,
        "group/length_mean": 4.0,
        "group/cut": 2 / 7,
    })  # fmt: skip


def test_the_pass_rate_is_of_the_episodes_that_say_so():
    nan = float("nan")
    for correct, rate in (([1, 0, 0, 1, 1, 0, 1], 4 / 7), ([1, nan, 0, 1, nan, 0, 1], 3 / 5)):
        assert group_metrics(episodes(correct=correct))["group/pass_rate"] == pytest.approx(rate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "group/pass_rate" not in group_metrics(episodes(correct=[nan] * 7))
    assert "group/pass_rate" not in group_metrics(episodes(proxy=[1.0] * 7))


GROUPED = ["rloo", "remax", "grpo"]


@pytest.mark.parametrize("name", GROUPED)
def test_an_update_reports_its_rollout(name):
    """Two updates at a time: the numbers are those of the rollout that the update is given."""
    env, _ = task_env("native", SAME_STEP, 4)
    agent = agents.make(name, env, seed=0, n_groups=6, num_generations=4, learning_rate=0.1)
    for _ in range(2):
        rollout = agent.collect()
        probabilities = agent.action_probabilities(np.arange(40))
        metrics = agent.update(rollout)
        sampled = rollout.episodes.group_ids >= 0
        table = rollout.episodes.select(sampled)
        groups = [table.returns[table.group_ids == g] for g in range(6)]
        assert all(len(group) == 4 for group in groups)
        expected = {
            "group/reward_mean": table.returns.mean(),
            "group/reward_std": np.mean([group.std() for group in groups]),
            "group/no_signal": np.mean([np.ptp(group) == 0 for group in groups]),
            "group/length_mean": table.lengths.mean(),
            "group/cut": (table.task_ids % 2 == 1).mean(),
            "group/pass_rate": table.info["correct"].mean(),
        }
        # Of the steps of sampled episodes: the entropy of the table, and log pi - log ref of the actions.
        index = rollout.episode_index.numpy()
        steps = (index >= 0) & sampled[index]
        observations, actions = rollout.observations[steps].numpy(), rollout.actions[steps].numpy()
        p = probabilities[observations]
        expected["train/entropy"] = -(p * np.log(p)).sum(1).mean()
        reference = np.log(1.0 / (observations // 8 + 2))
        expected["train/kl_ref"] = (np.log(p[np.arange(len(p)), actions]) - reference).mean()
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert set(metrics) <= set(METRICS)
    assert metrics["train/entropy"] < np.log(3)


def test_clip_fractions_low_and_high_by_hand():
    """One group of one-step episodes, two steps on it: the second finds the ratios that the first made."""
    env, _ = task_env("native", SAME_STEP, 8)
    agent = GRPO(env, seed=0, n_groups=1, num_generations=8, num_iterations=2, learning_rate=0.5, epsilon=0.1,
                 epsilon_high=0.3)  # fmt: skip
    agent.collector.draw_tasks = lambda n: np.zeros(n, int)
    rollout = agent.collect()
    batch = agent.prepare(rollout)
    actions, advantages = batch.actions[:, 0].numpy(), batch.advantages[:, 0].numpy()
    assert len(set(actions)) > 1
    # Adam's first step moves each logit by its learning rate, up where the advantages of its action add up
    # to more than its share of them (which is none: they sum to zero).
    sums = np.array([advantages[actions == a].sum() for a in range(3)])
    logits = 0.5 * np.sign(sums)
    ratio = (np.exp(logits) / np.exp(logits).sum() * 3)[actions]
    low, high = (ratio < 0.9) & (advantages < 0), (ratio > 1.3) & (advantages > 0)
    metrics = agent.update(rollout)
    assert low.any() or high.any()
    # Of two passes; nothing is clipped in the first.
    assert metrics["train/clip_fraction_low"] == pytest.approx(low.mean() / 2)
    assert metrics["train/clip_fraction_high"] == pytest.approx(high.mean() / 2)
    assert metrics["train/clip_fraction"] == pytest.approx((low.mean() + high.mean()) / 2)


# --- the warning ---


def recorded(fractions: list[float | None]) -> list[str]:
    """The warnings of one call of learn whose updates have these clip fractions."""
    agent = agents.make("grpo", sync("CartPole-v1"), seed=0)
    with warnings.catch_warnings(record=True) as caught, TrainingRun(agent, 100) as run:
        warnings.simplefilter("always")
        for fraction in fractions:
            run.record({"train/loss": 1.0} if fraction is None else {"train/clip_fraction": fraction})
    return [str(w.message) for w in caught]


def test_a_clip_that_stays_wide_open_is_warned_of_once():
    assert recorded([0.31] * 4) == []
    (message,) = recorded([0.5] * 4 + [0.41] + [0.6] * 20)
    assert "train/clip_fraction has been above 0.3 for 5 updates in a row (now 0.41)" in message
    assert "lower learning_rate" in message and "num_iterations" in message
    assert recorded([0.31] * 4 + [0.3] + [0.31] * 4) == []  # not in a row
    assert len(recorded([0.31] * 4 + [0.1] + [0.31] * 5)) == 1
    assert recorded([None] * 20) == [] == recorded([float("nan")] * 20)


@pytest.mark.parametrize(
    ("name", "config"),
    [("ppo", {"n_steps": 64, "batch_size": 32, "n_epochs": 10, "clip_range": 0.01, "learning_rate": 0.01}),
     ("grpo", {"n_groups": 2, "num_generations": 4, "num_iterations": 8, "epsilon": 0.01,
               "learning_rate": 0.05})],
)  # fmt: skip
def test_agents_with_a_clip_warn_where_they_were_called(name, config):
    agent = agents.make(name, sync("CartPole-v1"), seed=0, **config)
    updates = []
    with pytest.warns(UserWarning, match="clip_fraction has been above 0.3") as caught:
        agent.learn(10_000, callback=lambda a: updates.append(a.n_updates) or len(updates) < 8)
    assert len(caught) == 1 and caught[0].filename == __file__
