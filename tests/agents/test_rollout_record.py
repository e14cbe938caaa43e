"""What the rollout records: observations, actions, log-probs, the reference; and batches made of it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from recording import collector, table
from scripted import DISABLED, MODES, NEXT_STEP, SAME_STEP, Script, ScriptedEnv, vector

import llmgym  # noqa: F401  (registers the ids)
from agents.batch import Batch, make_batch
from agents.policies import make_policy
from agents.training import minibatches
from llmgym import AnswerPool

# --- the record itself ---


def test_the_record_is_a_replay_of_the_environment():
    """CartPole stepped by hand with the recorded actions gives the recorded rewards and observations."""
    env = SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=17)] * 2)
    policy = make_policy("auto", env, torch.Generator().manual_seed(3))
    rollout = collector(env, policy, seed=5).collect(60)
    assert rollout.truncated.any() and rollout.terminated.any()
    for row in range(2):
        plain = gym.make("CartPole-v1", max_episode_steps=17)
        observation, _ = plain.reset(seed=5 + row)
        over = False
        for t in range(60):
            np.testing.assert_array_equal(rollout.observations[t, row], observation)
            assert bool(rollout.mask[t, row]) is not over
            if over:
                observation, _ = plain.reset()
                over = False
                continue
            step = plain.step(int(rollout.actions[t, row]))
            observation, reward, terminated, truncated, _ = step
            over = terminated or truncated
            recorded = [x[t, row].item() for x in (rollout.rewards, rollout.terminated, rollout.truncated)]
            assert recorded == [reward, terminated, truncated]
            if not terminated:
                value = policy.value(torch.tensor(observation)[None]).item()
                assert rollout.next_values[t, row].item() == pytest.approx(value, abs=1e-6)


def test_observations_are_copied():
    """An environment that writes every observation into one array."""

    class Reuser(gym.Env):
        observation_space = gym.spaces.Box(-1000, 1000, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.state = np.zeros(1, np.float32)
            return self.state, {}

        def step(self, action):
            self.state += 1
            return self.state, 0.0, False, bool(self.state[0] % 3 == 0), {}

    env = SyncVectorEnv([Reuser], copy=False)
    policy = make_policy("auto", env, torch.Generator().manual_seed(0))
    rollout = collector(env, policy).collect(7)
    assert rollout.observations.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2]
    value = policy.value(torch.tensor([[3.0]])).item()
    assert rollout.next_values[2, 0].item() == pytest.approx(value, abs=1e-6)


def test_first_evaluation_has_ratio_one_C01():
    env = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4)
    policy = make_policy("auto", env, torch.Generator().manual_seed(0))
    rollout = collector(env, policy).collect(64)
    again = policy.evaluate(rollout.observations.flatten(0, 1), rollout.actions.flatten())
    ratio = torch.exp(again.log_prob - rollout.log_probs.flatten())
    assert (ratio - 1).abs().max() <= 1e-5
    for t in range(64):
        alone = policy.evaluate(rollout.observations[t, :1], rollout.actions[t, :1]).log_prob
        assert alone.item() == pytest.approx(rollout.log_probs[t, 0].item(), abs=1e-5)
    assert not any(x.requires_grad for x in vars(rollout).values() if isinstance(x, torch.Tensor))


def test_executed_actions_are_the_recorded_ones():
    row = ScriptedEnv([Script([0, 1, 1, 1], [1, 1, 1], "truncated")], 2)
    rollout = collector(SyncVectorEnv([lambda: row]), table([0.0, 0.0])).collect(40)
    assert rollout.actions[rollout.mask].tolist() == row.actions
    assert set(row.actions) == {0, 1}


def test_box_actions_are_clipped_for_the_environment_and_recorded_as_sampled():
    class Bounded(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Box(-0.5, 0.5, (1,), np.float32)
        seen: list[float] = []

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.seen.append(float(action[0]))
            return np.zeros(2, np.float32), 0.0, False, False, {}

    env = SyncVectorEnv([Bounded])
    policy = make_policy("auto", env, torch.Generator().manual_seed(0))
    rollout = collector(env, policy).collect(100)
    raw = rollout.actions.flatten()
    assert (raw.abs() > 0.5).any()
    np.testing.assert_allclose(raw.clamp(-0.5, 0.5), Bounded.seen, atol=1e-6)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(raw)  # mean 0 at observation 0
    np.testing.assert_allclose(rollout.log_probs.flatten(), expected, atol=1e-5)


# --- the reference ---


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_reference_log_probs_come_from_the_info_of_each_step(kind, mode):
    rows = [[Script([0, 1, 1], [1, 1], "terminated", [-0.25, -0.5])],
            [Script([0, 1, 1, 1], [1, 1, 1], "truncated", [-1, -2, -3])]]  # fmt: skip
    rollout = collector(vector(kind, mode, rows, 2), table([0.0, 0.0])).collect(8)
    assert rollout.ref_log_probs is not None and rollout.ref_log_probs.isfinite().all()
    for row, cycle in enumerate(([-0.25, -0.5], [-1, -2, -3])):
        recorded = rollout.ref_log_probs[rollout.mask[:, row], row].tolist()
        assert recorded == [cycle[t % len(cycle)] for t in range(len(recorded))]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_reference_log_probs_of_the_answer_pool(mode):
    pool = AnswerPool.random(3, 6, seed=0)
    env = gym.make_vec("AnswerPool-v0", num_envs=4, pool=pool, autoreset_mode=mode)
    rollout = collector(env, make_policy("auto", env, torch.Generator())).collect(6)
    assert rollout.ref_log_probs is not None
    observations, actions = rollout.flat(rollout.observations), rollout.flat(rollout.actions)
    expected = np.log(pool.ref_probs)[observations, actions]
    np.testing.assert_allclose(rollout.flat(rollout.ref_log_probs), expected, atol=1e-6)
    # The table starts at the reference, so both are the policy's own.
    np.testing.assert_allclose(rollout.flat(rollout.log_probs), expected, atol=1e-6)
    np.testing.assert_allclose(rollout.flat(rollout.rewards), pool.proxy[observations, actions], rtol=1e-6)
    tasks = rollout.observations[rollout.mask & rollout.terminated]
    assert rollout.episodes.task_ids.tolist() == tasks.tolist()


def test_an_explicit_reference_takes_precedence():
    rows = [[Script([0, 1, 1], [1, 1], "terminated", [-0.25, -0.5])]]
    reference = table([0.0, 0.0])
    reference.logits.data = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    collected = collector(vector("sync", NEXT_STEP, rows, 2), table([0.0, 0.0]), reference=reference)
    rollout = collected.collect(9)
    expected = torch.log_softmax(reference.logits.detach(), -1)[rollout.observations, rollout.actions]
    np.testing.assert_allclose(rollout.ref_log_probs, expected, atol=1e-6)


@pytest.mark.parametrize("ref_logp", [None, [-0.5, None]], ids=["never", "some steps"])
def test_without_a_reference_for_every_step_there_is_none(ref_logp):
    rows = [[Script([0, 1, 1], [1, 1], "terminated", ref_logp)]]
    rollout = collector(vector("sync", NEXT_STEP, rows, 2), table([0.0, 0.0])).collect(4)
    assert rollout.ref_log_probs is None
    assert make_batch(rollout, rollout.rewards, rollout.rewards).ref_log_probs is None


def test_reference_log_probs_may_be_arrays_of_no_dimension():
    """Then Gymnasium's info is an array of objects, with None in the rows that have none."""
    rows = [[Script([0, 1, 1], [1, 1], "terminated", [np.array(-0.25), np.array(-0.5)])],
            [Script([0, 1, 1, 1], [1] * 3, "terminated", [np.array(-0.25)] * 3)]]  # fmt: skip
    rollout = collector(vector("sync", NEXT_STEP, rows, 2), table([0.0, 0.0])).collect(3)
    assert rollout.ref_log_probs is not None
    assert rollout.ref_log_probs[:, 0].tolist() == [-0.25, -0.5, 0.0]


# --- errors ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_names_its_row_and_step(bad):
    good = Script([0, 1, 1, 1, 1], [1, 1, 1, 1], "terminated")
    broken = Script([0, 1, 1, 1], [1, 1, bad], "terminated")
    env = vector("sync", NEXT_STEP, [[good], [good], [broken]], 2)
    with pytest.raises(ValueError, match=rf"reward={bad} of environment row 2 at step 2"):
        collector(env, table([0.0, 0.0])).collect(4)


# --- batches of executed steps ---


def batch(n: int) -> Batch:
    x = torch.arange(n, dtype=torch.float32)
    return Batch(x, x + 100, x + 200, None, x + 300, x + 400, x + 500)


def test_one_permutation_for_all_fields_D07():
    sample = Batch(
        observations=torch.tensor([ord(c) for c in "abcd"]), actions=torch.arange(4), ref_log_probs=None,
        old_log_probs=torch.zeros(4), old_values=torch.zeros(4),
        advantages=torch.tensor([0.5, -0.5, -1, 1]), returns=torch.tensor([1.0, 0, 10, 12]),
    )  # fmt: skip
    shuffled = sample.select(torch.tensor([2, 0, 3, 1]))
    assert shuffled.returns.tolist() == [10, 1, 12, 0]
    assert shuffled.advantages.tolist() == [-1, 0.5, 1, -0.5]
    assert "".join(map(chr, shuffled.observations.tolist())) == "cadb"


def test_minibatches_hold_every_sample_once_C21():
    generator = torch.Generator().manual_seed(0)
    orders = []
    for _ in range(3):
        parts = list(minibatches(batch(10), 4, generator))
        assert [len(p) for p in parts] == [4, 4, 2]
        order = torch.cat([p.observations for p in parts])
        assert sorted(order.tolist()) == list(range(10))
        for part in parts:  # no field is shuffled apart from the others
            fields = (part.actions, part.old_log_probs, part.advantages, part.returns, part.old_values)
            for k, x in enumerate(fields, 1):
                assert torch.equal(x, part.observations + 100 * k)
        orders.append(order.tolist())
    assert orders[0] != orders[1] != orders[2]
    assert [len(p) for p in minibatches(batch(10), 3, generator)] == [3, 3, 3, 1]
    assert [len(p) for p in minibatches(batch(10), 10, generator)] == [10]
