"""Agents by name, and what an agent has to be."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import agents
from agents import registry
from agents.agent import Agent, as_vector_env
from agents.grpo import GRPO
from agents.ppo import PPO
from agents.reinforce import Reinforce
from agents.remax import ReMax
from agents.rloo import RLOO


class Constant:
    """A whole agent: it always pushes to one side."""

    def __init__(self, env, seed=None, action=0):
        self.env, self.seed, self.action = env, seed, action

    def learn(self, total_timesteps):
        return self

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return self.action, None

    def save(self, path):
        pass

    @classmethod
    def load(cls, path, env):
        return cls(env)


class Unfinished:
    def __init__(self, env, seed=None):
        pass

    def learn(self, total_timesteps):
        return self


@pytest.fixture
def env():
    return gym.make("CartPole-v1")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of agents on the path; returns a function that adds a module to it."""
    folder = tmp_path / "some_agents"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, source: str) -> None:
        (folder / f"{name}.py").write_text(source)

    yield add
    for name in [n for n in sys.modules if n.split(".")[0] == "some_agents"]:
        del sys.modules[name]


def test_ours_are_agents(env):
    kinds = {"ppo": PPO, "reinforce": Reinforce, "rloo": RLOO, "remax": ReMax, "grpo": GRPO}
    for name, kind in kinds.items():
        agent = agents.make(name, env, seed=0, learning_rate=0.5)
        assert type(agent) is kind and isinstance(agent, Agent) and agent.config.learning_rate == 0.5
        assert type(agent).algorithm == name
    assert set(agents.names()) >= {"dpo", *kinds} and agents.names() == sorted(agents.names())


def test_env_and_vector_env_are_accepted_and_nothing_else(env):
    for given in (env, SyncVectorEnv([lambda: env] * 2), gym.make_vec("CartPole-v1", num_envs=3)):
        vector = agents.make("ppo", given).env
        assert vector is given or (given is env and vector.num_envs == 1 and vector.envs[0] is env)
    for wrong in ("CartPole-v1", None, [env], gym.Env):
        with pytest.raises(TypeError, match=r"env is a \w+; allowed: a gymnasium.Env .*VectorEnv"):
            agents.make("ppo", wrong)


def test_the_environment_stays_open(env):
    """It belongs to the caller: neither making an agent nor dropping it closes it."""

    class Door(gym.Wrapper):
        closed = False

        def close(self):
            self.closed = True
            super().close()

    door = Door(env)
    agent = agents.make("ppo", door, n_steps=4)
    assert not door.closed
    agent.learn(4)
    del agent
    assert not door.closed
    as_vector_env(door)
    assert not door.closed


def test_unknown_names_give_the_nearest(env):
    with pytest.raises(ValueError, match="unknown agent 'pppo'; did you mean 'ppo'.*reinforce.*sb3:PPO"):
        agents.make("pppo", env)
    listed = "registered: .*dpo, grpo, ppo, reinforce, remax, rloo"
    with pytest.raises(ValueError, match=f"unknown agent 'xyz'.*{listed}"):
        agents.make("xyz", env)


@pytest.mark.parametrize("name", ["ppo", "reinforce", "rloo", "remax", "grpo"])
def test_unknown_fields_give_the_nearest_and_all(env, name):
    with pytest.raises(TypeError, match="no field 'learning_rat'; did you mean 'learning_rate'.*policy"):
        agents.make(name, env, learning_rat=0.1)
    with pytest.raises(TypeError, match="no field 'zzz'.*Fields: learning_rate"):
        agents.make(name, env, zzz=0.1)


def test_config_fields(env):
    assert agents.config_fields("ppo") >= {"clip_range", "n_steps", "beta", "reference"}
    assert "clip_range" not in agents.config_fields("reinforce")
    agents.register("constant", Constant)
    assert agents.config_fields("constant") == {"action"}
    assert agents.config_fields(f"{__name__}:Constant") == {"action"}


def test_registered_factories_are_made_with_seed_and_config(env):
    agents.register("constant", Constant)
    assert "constant" in agents.names()
    agent = agents.make("constant", env, seed=5, action=1)
    assert type(agent) is Constant and agent.env is env and (agent.seed, agent.action) == (5, 1)
    agents.register("constant", Constant)  # a module that is imported twice
    with pytest.raises(ValueError, match="'constant' is taken; registered: constant, dpo, grpo"):
        agents.register("constant", lambda env, seed=None: Constant(env))
    with pytest.raises(ValueError, match="'ppo' is taken"):
        agents.register("ppo", Constant)
    with pytest.raises(ValueError, match="'a:b' must not contain ':'"):
        agents.register("a:b", Constant)


def test_class_paths(env, package):
    assert type(agents.make(f"{__name__}:Constant", env, action=1)) is Constant
    package("mine", f"from {__name__} import Constant as Agent")
    assert type(agents.make("some_agents.mine:Agent", env)) is Constant


def test_what_is_missing_behind_a_class_path(env, package):
    with pytest.raises(ValueError, match="no module 'some_agents.nothing' on the path.*PYTHONPATH"):
        agents.make("some_agents.nothing:Agent", env)
    with pytest.raises(ValueError, match="no module 'no_such_package.part' on the path"):
        agents.make("no_such_package.part:Agent", env)
    package("other", "class MyAgent: pass\nclass _Hidden: pass")
    with pytest.raises(ValueError, match="some_agents.other has no 'MyAgnt'; did you mean 'MyAgent'"):
        agents.make("some_agents.other:MyAgnt", env)
    # The module is there and something it imports is not: that is the error to see.
    package("needy", "import a_library_that_is_not_installed")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_installed"):
        agents.make("some_agents.needy:Agent", env)
    package("needy_inside", "import some_agents.missing_part")
    with pytest.raises(ModuleNotFoundError, match="some_agents.missing_part"):
        agents.make("some_agents.needy_inside:Agent", env)


def test_a_subclass_of_an_sb3_class_is_made_as_sb3s_own_are(env, tmp_path, monkeypatch):
    (tmp_path / "their_sb3.py").write_text("from stable_baselines3 import A2C\n\nclass Mine(A2C): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = agents.make("their_sb3:Mine", env, seed=0, learning_rate="lin_0.002", n_steps=4)
    assert type(agent).__name__ == "Mine" and agent.lr_schedule(0.5) == pytest.approx(0.001)
    assert {"n_steps", "beta"} <= agents.config_fields("their_sb3:Mine")


def test_a_path_to_something_else_is_refused(env):
    with pytest.raises(ValueError, match="METRICS is a dict, not a class"):
        agents.make("agents.metrics:METRICS", env)


def test_a_class_that_is_no_agent_lists_what_it_lacks(env):
    with pytest.raises(ValueError, match="lacks predict, save, load; an agent has learn"):
        agents.make(f"{__name__}:Unfinished", env)
    agents.register("unfinished", Unfinished)
    with pytest.raises(ValueError, match="'unfinished' lacks predict"):
        agents.make("unfinished", env)


def test_probabilities_of_any_agent_come_from_the_best_source(env):
    observations = np.array([0, 2])
    pool = gym.make_vec("llmgym:AnswerPool-v0", num_envs=2)
    ours = agents.make("ppo", pool, seed=0)
    np.testing.assert_allclose(
        agents.action_probabilities(ours, [0], 200), pool.unwrapped.pool.ref_probs, atol=1e-6
    )

    class Sampler(Constant):
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            assert not deterministic
            # 1 with probability observation / 4
            return int(self.seed.random() < observation / 4), None

    frequencies = agents.action_probabilities(Sampler(env, np.random.default_rng(0)), observations, 3, 4000)
    np.testing.assert_allclose(frequencies, [[1, 0, 0], [0.5, 0.5, 0]], atol=0.03)


def test_predict_takes_one_observation_or_a_batch():
    class Odd(gym.Env):
        observation_space = gym.spaces.Discrete(3, start=5)
        action_space = gym.spaces.Discrete(2, start=7)

        def reset(self, *, seed=None, options=None):
            return 5, {}

        def step(self, action):
            assert action in self.action_space
            return 6, 0.0, False, True, {}

    agent = agents.make("ppo", Odd(), seed=0, n_steps=8)
    action, state = agent.predict(5)
    assert np.ndim(action) == 0 and action in (7, 8) and state is None
    batch, _ = agent.predict(np.array([5, 6, 7] * 20))
    assert batch.shape == (60,) and set(batch.tolist()) == {7, 8}
    agent.learn(16)
    assert agent.action_probabilities(np.array([5, 7])).shape == (2, 2)

    control = agents.make("ppo", gym.make("Pendulum-v1"), seed=0)
    action, _ = control.predict(np.zeros(3, np.float32))
    assert action.shape == (1,) and -2 <= action[0] <= 2
    batch, _ = control.predict(np.zeros((4, 3), np.float32), deterministic=True)
    assert batch.shape == (4, 1) and (batch == batch[0]).all()


def test_predict_is_deterministic_or_sampled(env):
    agent = agents.make("ppo", env, seed=0)
    observations = np.zeros((200, 4), np.float32)
    assert len(set(agent.predict(observations, deterministic=True)[0].tolist())) == 1
    sampled = [agent.predict(observations)[0] for _ in range(2)]
    assert set(sampled[0].tolist()) == {0, 1} and (sampled[0] != sampled[1]).any()


def test_making_and_using_an_agent_touches_no_global_generator(env):
    torch.manual_seed(3)
    np.random.seed(3)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    for name in ("ppo", "reinforce", "rloo", "remax", "grpo"):
        agent = agents.make(name, env, seed=0)
        agent.predict(np.zeros(4, np.float32)) if name == "ppo" else agent.learn(1)
    assert torch.equal(state, torch.get_rng_state()) and (np.random.get_state()[1] == numpy_state).all()


def test_importing_agents_needs_no_algorithm_library():
    code = "import sys, agents; sys.exit('stable_baselines3' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
