"""Recording of episodes on the environment's side."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from common.environments import EpisodeLog, make_env, random_returns

# Lengths of the successive episodes of the environment seeded with 7, 8, 9.
SCRIPTS = {7: [3, 1, 9], 8: [2, 2, 9], 9: [4, 9]}


class ScriptedEnv(gym.Env):
    """Episodes of known lengths; in the environment of seed s, step k pays 100 s + k."""

    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.script = seed, list(SCRIPTS[seed])
        self.length, self.k = self.script.pop(0), 0
        return 0, {}

    def step(self, action):
        self.k += 1
        ended = self.k == self.length
        # The odd seeds end by truncation: it ends an episode as termination does.
        return self.k, 100.0 * self.seed + self.k, ended and self.seed % 2 == 0, ended, {}


gym.register("Scripted-v0", ScriptedEnv, disable_env_checker=True)


def rows(log):
    return [tuple(episode) for episode in log.episodes]


def test_vector_episodes_are_logged_in_order_of_completion():
    log = EpisodeLog()
    env = make_env("Scripted-v0", 3, log, seed=7)
    assert isinstance(env, SyncVectorEnv)
    env.reset()
    for _ in range(6):
        env.step(np.zeros(3, dtype=int))
    # Vector step, with r where next-step autoreset only resets, * where an episode ends:
    #   seed 7:  1 2 3* r 1* r      seed 8:  1 2* r 1 2* r      seed 9:  1 2 3 4* r 1
    # Real steps after each vector step: 3, 6, 8, 10, 12, 13; within one, in the order of the index.
    assert rows(log) == [
        (5, 1603.0, 2),  # seed 8 in vector step 2, before seed 9 stepped
        (7, 2106.0, 3),  # seed 7 in vector step 3; seed 8 only reset
        (10, 3610.0, 4),  # seed 9 in vector step 4; seed 7 only reset
        (11, 701.0, 1),  # seeds 7 and 8 both in vector step 5
        (12, 1603.0, 2),
    ]
    assert log.steps == 13


def test_plain_env_and_reward_scale():
    log = EpisodeLog()
    env = make_env("Scripted-v0", 1, log, reward_scale=0.5, seed=8)
    assert not isinstance(env, gym.vector.VectorEnv)
    env.reset()
    assert [env.step(0)[1] for _ in range(2)] == [400.5, 401.0]  # the agent sees the scaled ones
    assert rows(log) == [(2, 1603.0, 2)]


def test_reward_scale_in_a_vector_env():
    log = EpisodeLog()
    env = make_env("Scripted-v0", 2, log, reward_scale=2.0, seed=7)
    env.reset()
    assert env.step(np.zeros(2, dtype=int))[1].tolist() == [1402.0, 1602.0]


def test_the_seed_of_the_agent_wins():
    log = EpisodeLog()
    env = make_env("Scripted-v0", 1, log, seed=7)
    env.reset(seed=9)
    assert env.step(0)[1] == 901.0
    env.reset()  # and the environment's own seed is not used later
    assert env.step(0)[1] == 901.0 and env.unwrapped.length == 9


def test_abandoned_and_unfinished_episodes_are_not_logged():
    log = EpisodeLog()
    env = make_env("Scripted-v0", 1, log, seed=7)
    env.reset()
    env.step(0)
    env.reset()  # leaves an episode of 3 steps after 1; the next has 1 step
    env.step(0)
    env.reset()
    env.step(0)
    assert rows(log) == [(2, 701.0, 1)] and log.steps == 3


def test_steps_after_an_end_are_refused():
    env = make_env("Scripted-v0", 1, EpisodeLog(), seed=8)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)


def test_agrees_with_gymnasiums_statistics():
    log = EpisodeLog()
    env = gym.wrappers.vector.RecordEpisodeStatistics(make_env("CartPole-v1", 4, log, seed=3))
    env.action_space.seed(0)
    env.reset(seed=3)
    expected = []
    for _ in range(300):
        info = env.step(env.action_space.sample())[4]
        for i in np.flatnonzero(info.get("_episode", [])):
            expected.append((info["episode"]["r"][i], info["episode"]["l"][i]))
    assert len(expected) > 20
    assert [(e.total, e.length) for e in log.episodes] == expected


def test_save_and_load(tmp_path):
    log = EpisodeLog()
    env = make_env("Scripted-v0", 1, log, seed=8)
    env.reset()
    env.step(0)
    env.step(0)
    log.episodes.append(log.episodes[0]._replace(step=9, total=0.1 + 0.2))
    path = tmp_path / "deep" / "episodes.csv"
    log.save(path)
    assert path.read_text().splitlines()[:2] == ["episode,step,return,length", "1,2,1603.0,2"]
    assert EpisodeLog.load(path).episodes == log.episodes  # to the last digit
    assert EpisodeLog.load(path).returns.tolist() == [1603.0, 0.1 + 0.2]
    assert EpisodeLog.load(path).end_steps.tolist() == [2, 9]
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="columns"):
        EpisodeLog.load(path)
    EpisodeLog().save(path)
    assert len(EpisodeLog.load(path).returns) == 0


def test_random_returns():
    returns = random_returns("CartPole-v1", 100, seed=0)
    assert len(returns) == 100 and returns.tolist() == random_returns("CartPole-v1").tolist()
    # Published as 22 or so; the standard error here is 1.2.
    assert 17 < returns.mean() < 27


def test_number_of_environments_is_checked():
    with pytest.raises(ValueError, match="n_envs is 0"):
        make_env("CartPole-v1", 0, EpisodeLog())
