"""Groups of whole episodes of one task: collected, recorded, and taken apart into minibatches."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from recording import collector
from scripted import DISABLED, HAS_MODES, NEXT_STEP, SAME_STEP
from task_world import N_ACTIONS, N_TASKS, WORLDS, CountOnes, task_env

import agents
import llmgym  # noqa: F401  (registers the ids)
from agents import groups
from agents.grpo import GRPO
from agents.policies import TablePolicy, make_policy
from agents.remax import ReMax
from agents.rollout import Rollout, concatenate, steps_of_episodes
from llmgym import AnswerPool


def task_policy() -> TablePolicy:
    """A stochastic policy of the task environment without a tie for the most probable action."""
    logits = np.random.default_rng(0).normal(size=(8 * N_TASKS, N_ACTIONS))
    return TablePolicy(8 * N_TASKS, N_ACTIONS, logits)


def episodes_of(rollout: Rollout) -> list[tuple[list[int], list[int], list[float]]]:
    """Observations, actions and rewards of each episode, in the order of the table."""
    index, mask = steps_of_episodes(rollout.episode_index, len(rollout.episodes.returns))
    fields = [x.flatten()[index] for x in (rollout.observations, rollout.actions, rollout.rewards)]
    return [tuple(x[e, mask[e]].tolist() for x in fields) for e in range(len(index))]  # type: ignore[misc]


# --- every episode is whole, and of the task that was asked for ---


@pytest.mark.parametrize("n_rows", [1, 3, 16])
@pytest.mark.parametrize(("kind", "mode"), WORLDS)
def test_collect_tasks_replayed_from_the_tasks_and_the_actions(kind, mode, n_rows):
    env, transitions = task_env(kind, mode, n_rows)
    collected = collector(env, task_policy())
    tasks = np.array([4, 4, 0, 0, 1, 1, 4, 4, 3, 3])
    ids = np.arange(5).repeat(2)
    for _ in range(2):  # the second time there is something to be forgotten
        before = sum(t.steps for t in transitions)
        rollout = collected.collect_tasks(tasks, ids)
        table = rollout.episodes
        assert sorted(zip(table.group_ids, table.task_ids, strict=True)) == list(zip(ids, tasks, strict=True))
        for e, (observations, actions, rewards) in enumerate(episodes_of(rollout)):
            task = int(table.task_ids[e])
            assert observations == [8 * task + t for t in range(task + 1)]
            assert rewards == [10 * task + a for a in actions] and table.returns[e] == sum(rewards)
            assert table.lengths[e] == len(actions) == task + 1
            assert table.cut[e] == bool(task % 2)
            assert table.info["correct"][e] == float(actions[-1] == 0)
        assert rollout.terminated.sum() == len(tasks) and rollout.n_steps == (tasks + 1).sum()
        assert rollout.env_steps == sum(t.steps for t in transitions) - before >= rollout.n_steps
        tasks_of_steps = rollout.observations[rollout.mask] // 8
        np.testing.assert_allclose(rollout.ref_log_probs[rollout.mask], -torch.log(tasks_of_steps + 2.0))
    # An ordinary rollout goes on from a fresh start, and nothing in it belongs to a group.
    rollout = collected.collect_episodes(1)
    assert (rollout.episodes.group_ids == -1).all() and len(rollout.episodes.returns) == n_rows


@pytest.mark.parametrize(("kind", "mode"), WORLDS)
def test_only_a_row_that_waits_takes_no_steps_for_nothing(kind, mode):
    """Tasks of one and of five steps at the same time: the short row's further steps are counted."""
    env, _ = task_env(kind, mode, 2)
    rollout = collector(env, task_policy()).collect_tasks(np.array([0, 4]), np.array([0, 1]))
    assert rollout.n_steps == 6
    if kind == "sync" or mode is DISABLED:  # one task at a time, or waiting
        assert rollout.env_steps - rollout.n_steps == (0 if kind == "native" else 6)
    else:
        assert rollout.env_steps > 6


@pytest.mark.parametrize("kind", ["native", "sync", "plain"])
def test_groups_of_the_answer_pool(kind):
    pool = AnswerPool.random(4, 6, seed=0)
    if kind == "native":
        env = gym.make_vec("AnswerPool-v0", num_envs=5, pool=pool)
    else:
        env = SyncVectorEnv([lambda: gym.make("AnswerPool-v0", pool=pool)] * (5 if kind == "sync" else 1))
    rollout = groups.collect_groups(collector(env, make_policy("auto", env, torch.Generator())), 7, 3)
    table = rollout.episodes
    assert np.bincount(table.group_ids).tolist() == [3] * 7
    for group in range(7):
        assert len(set(table.task_ids[table.group_ids == group])) == 1
    assert len(set(table.task_ids)) > 1
    index, _ = steps_of_episodes(rollout.episode_index, 21)
    actions, tasks = rollout.actions.flatten()[index[:, 0]], rollout.observations.flatten()[index[:, 0]]
    assert tasks.tolist() == table.task_ids.tolist()
    np.testing.assert_allclose(table.returns, pool.proxy[tasks, actions], rtol=1e-6)


def test_tasks_are_drawn_as_the_environment_draws_them():
    """Uniformly: of 4000 draws each of four tasks has 1000, within four standard errors of 27."""
    for num_envs in (1, 7):
        env = gym.make_vec("AnswerPool-v0", num_envs=num_envs, pool=AnswerPool.random(4, 6, seed=0))
        drawn = collector(env, make_policy("auto", env, torch.Generator())).draw_tasks(4000)
        assert np.abs(np.bincount(drawn, minlength=4) - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)


def test_equal_seeds_draw_equal_tasks_and_another_seed_others():
    def drawn(seed):
        env = gym.make_vec("AnswerPool-v0", num_envs=3, pool=AnswerPool.random(50, 2, seed=0))
        return collector(env, make_policy("auto", env, torch.Generator()), seed).draw_tasks(20).tolist()

    assert drawn(1) == drawn(1) != drawn(2)


CARTPOLES = ["native", "sync", "plain"] + (["sync-same-step", "sync-disabled"] if HAS_MODES else [])


def cartpole(kind: str) -> VectorEnv:
    if kind == "native":
        return gym.make_vec("CartPole-v1", num_envs=3)
    modes = {"sync": NEXT_STEP, "plain": NEXT_STEP, "sync-same-step": SAME_STEP, "sync-disabled": DISABLED}
    options = {"autoreset_mode": modes[kind]} if HAS_MODES else {}
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * (1 if kind == "plain" else 3), **options)


@pytest.mark.parametrize("kind", CARTPOLES)
def test_groups_without_tasks_are_whole_episodes_of_cartpole(kind):
    """Each recorded episode, played again from its first observation in a CartPole of our own."""
    env = cartpole(kind)
    rollout = groups.collect_groups(collector(env, make_policy("auto", env, torch.Generator())), 2, 2)
    table = rollout.episodes
    assert sorted(table.group_ids) == [0, 0, 1, 1] and (table.task_ids == -1).all()
    assert (table.returns == table.lengths).all() and not table.cut.any()
    index, mask = steps_of_episodes(rollout.episode_index, 4)
    observations = rollout.observations.flatten(0, 1)[index].numpy()
    actions = rollout.actions.flatten()[index].tolist()
    twin = gym.make("CartPole-v1")
    for e, length in enumerate(table.lengths):
        twin.reset()
        twin.unwrapped.state = observations[e, 0].astype(np.float64)
        assert np.abs(observations[e, 0]).max() <= 0.05 and mask[e].sum() == length
        for t in range(length):
            seen, _, terminated, _, _ = twin.step(actions[e][t])
            assert terminated == (t == length - 1)
            if t + 1 < length:
                np.testing.assert_allclose(seen, observations[e, t + 1], atol=1e-4)


def test_an_environment_without_any_info_is_one_task():
    rollout = groups.collect_groups(
        collector(SyncVectorEnv([CountOnes] * 3), TablePolicy(3, 2, np.zeros((3, 2)))), 2, 4
    )
    assert rollout.episodes.lengths.tolist() == [3] * 8 and rollout.ref_log_probs is None
    assert rollout.episodes.info == {} and not rollout.episodes.cut.any()
    with pytest.raises(ValueError, match="beta=0.1 asks for the KL"):
        groups.episode_rewards(rollout, 0.1)


# --- greedy episodes ---


@pytest.mark.parametrize(("kind", "mode"), WORLDS)
def test_greedy_episodes_are_greedy_and_not_trained_on(kind, mode):
    policy = task_policy()
    env, _ = task_env(kind, mode, 3)
    agent = ReMax(env, seed=0, policy=policy, n_groups=4, num_generations=2)
    rollout = agent.collect()
    table = rollout.episodes
    greedy = table.group_ids < 0
    assert sorted(table.group_ids) == [-5, -4, -3, -2, 0, 0, 1, 1, 2, 2, 3, 3]
    for group in range(4):  # a greedy episode is of its group's task
        members = (table.group_ids == group) | (table.group_ids == -2 - group)
        assert len(set(table.task_ids[members])) == 1
    best = policy.logits.argmax(-1)
    chosen = [actions == best[observations].tolist() for observations, actions, _ in episodes_of(rollout)]
    assert all(np.array(chosen)[greedy]) and not all(np.array(chosen)[~greedy])

    batch = agent.prepare(rollout)
    assert len(batch) == 8 and batch.mask.sum() == table.lengths[~greedy].sum()
    order = np.argsort(table.group_ids, kind="stable")[4:]
    baseline = {int(-2 - g): r for g, r in zip(table.group_ids[greedy], table.returns[greedy], strict=True)}
    expected = [table.returns[e] - baseline[int(table.group_ids[e])] for e in order]
    np.testing.assert_allclose(batch.advantages[:, 0], expected)
    assert (batch.observations[:, 0] // 8).tolist() == table.task_ids[order].tolist()
    # The recent returns are those of the sampled episodes.
    assert sorted(agent.collector.recent_returns) == sorted(table.returns[~greedy])
    metrics = agent.update(rollout)
    assert metrics["group/greedy_reward"] == pytest.approx(table.returns[greedy].mean())
    assert metrics["group/reward_mean"] == pytest.approx(table.returns[~greedy].mean())


# --- samples and minibatches ---


def test_a_batch_holds_the_episodes_of_a_group_side_by_side():
    env, _ = task_env("native", SAME_STEP, 4)
    tasks, ids = np.array([0, 1, 2, 0, 1, 2]), np.array([5, 3, 4, 5, 3, 4])
    rollout = collector(env, task_policy()).collect_tasks(tasks, ids)
    numbers = torch.arange(6, dtype=torch.float32)
    batch = groups.group_batch(rollout, numbers, 100 + numbers)
    order = np.argsort(rollout.episodes.group_ids, kind="stable")
    assert rollout.episodes.group_ids[order].tolist() == [3, 3, 4, 4, 5, 5]
    lengths = rollout.episodes.lengths[order]
    assert batch.mask.tolist() == [[t < n for t in range(3)] for n in lengths]
    for b, e in enumerate(order):
        observations, actions, _ = episodes_of(rollout)[e]
        n = lengths[b]
        assert batch.observations[b, :n].tolist() == observations
        assert batch.actions[b, :n].tolist() == actions
        assert batch.advantages[b].tolist() == [float(e)] * n + [0.0] * (3 - n)
        assert batch.returns[b].tolist() == [100.0 + e] * n + [0.0] * (3 - n)
        chosen = task_policy().evaluate(torch.tensor(observations), torch.tensor(actions)).log_prob
        np.testing.assert_allclose(batch.old_log_probs[b, :n], chosen.detach(), atol=1e-6)


def test_steps_that_count_are_told_by_lengths_and_not_by_tokens_D16():
    """Ids 5 6 7 | 0 0, cut without an end and padded with 0; ids 5 6 2 | 2 2, where 2 ends and pads."""
    ids = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 2, 2, 2], [1, 1, 1, 1, 1]])
    lengths = [3, 3, 5]
    episode = torch.tensor([[e if t < lengths[e] else -1 for e in range(3)] for t in range(5)])
    index, mask = steps_of_episodes(episode, 3)
    assert mask[:2].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert ids.T.flatten()[index][mask].tolist() == [5, 6, 7, 5, 6, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_minibatches_hold_whole_groups_and_every_key_moves_along_D07_C21(loss_type):
    env, _ = task_env("native", SAME_STEP, 4)
    agent = GRPO(env, seed=0, policy=task_policy(), n_groups=5, num_generations=3, batch_size=6,
                 num_iterations=2, loss_type=loss_type)  # fmt: skip
    batch = agent.prepare(agent.collect())
    numbers = torch.arange(15.0)
    tagged = replace(batch, returns=numbers.unsqueeze(1).expand_as(batch.mask))
    parts = list(agent.minibatches(tagged))
    assert [len(part) for part in parts] == [6, 6, 3] * 2
    orders = []
    for iteration in (parts[:3], parts[3:]):
        chosen = torch.cat([part.returns[:, 0] for part in iteration]).long()
        assert sorted(chosen.tolist()) == list(range(15))
        assert (chosen.view(5, 3) // 3 == chosen.view(5, 3)[:, :1] // 3).all()  # a group stays together
        orders.append(chosen.tolist())
    assert orders[0] != orders[1] != list(range(15))
    for part in parts:
        chosen = part.returns[:, 0].long()
        for name in ("observations", "actions", "old_log_probs", "ref_log_probs", "advantages", "mask"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[chosen]), name
        n, steps = (len(part), part.mask.sum()) if loss_type == "bnpo" else (15, batch.mask.sum())
        np.testing.assert_allclose(part.weights, part.mask * (n / steps), rtol=1e-6)


def test_rollouts_one_after_the_other_are_one():
    env, _ = task_env("sync", NEXT_STEP, 2)
    collected = collector(env, task_policy())
    asked = (([3, 1, 1], [0, 1, 1]), ([2], [2]))
    parts = [collected.collect_tasks(np.array(tasks), np.array(ids)) for tasks, ids in asked]
    whole = concatenate(parts)
    assert episodes_of(whole) == episodes_of(parts[0]) + episodes_of(parts[1])
    assert whole.episodes.group_ids.tolist() == [*parts[0].episodes.group_ids, 2]
    assert whole.env_steps == sum(p.env_steps for p in parts) and whole.n_steps == 4 + 2 + 2 + 3
    assert whole.episodes.info["stop_reason"].tolist() == ["length", "length", "length", "eos"]
    np.testing.assert_array_equal(
        groups.episode_rewards(whole), torch.cat([groups.episode_rewards(p) for p in parts])
    )


# --- policies that read sequences ---


@pytest.mark.parametrize("name", ["rloo", "remax", "grpo"])
@pytest.mark.parametrize("kind", ["next_step", "same_step", "disabled", "sync"])
def test_groups_of_token_sequences(name, kind):
    """One observation an episode: the prompt of its group's task, and all actions but the last."""
    if kind == "sync":
        env = SyncVectorEnv([lambda: gym.make("TokenGeneration-v0")] * 3)
        task = env.envs[0].unwrapped.task
    else:
        env = gym.make_vec("TokenGeneration-v0", num_envs=3, autoreset_mode=kind)
        task = env.unwrapped.task
    agent = agents.make(name, env, seed=0, n_groups=2, num_generations=4, beta=0.1)
    rollout = agent.collect()
    batch, table = agent.prepare(rollout), rollout.episodes
    assert len(batch) == 8
    order = np.argsort(table.group_ids, kind="stable")[-8:]
    pad = agent.policy.lm_head.out_features
    lengths = batch.mask.sum(1)
    for b, e in enumerate(order):
        seen = batch.observations[b][batch.observations[b] != pad].tolist()
        taken = batch.actions[b, : lengths[b]].tolist()
        assert lengths[b] == table.lengths[e] == table.info["response_length"][e]
        assert (batch.actions[b, lengths[b] :] == -1).all()
        assert seen == list(task.prompts[table.task_ids[e]]) + taken[:-1]
        assert table.cut[e] == (table.info["stop_reason"][e] == "length")
    ids = table.group_ids[order].reshape(2, 4)
    assert (ids == ids[:, :1]).all() and len({*ids[:, 0]}) == 2
    for group in ids[:, 0]:
        assert len(set(table.task_ids[table.group_ids == group])) == 1
    terms = agent.loss(batch)
    assert (terms.ratio - 1).abs().max() <= 1e-5 and len(terms.ratio) == lengths.sum()
    assert agent.update(rollout)["train/n_updates"] == 1
