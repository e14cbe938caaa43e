"""Collected data: every row is what a fresh environment gives, whoever collects it and however often."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from rich.console import Console

import agents
from agents.run_folder import UserError
from offline import acting, collection, recorder
from offline.behaviour import BehaviourPolicy
from offline.collect import Args, collect, main, parts_of
from offline.datasets import episode_returns, episode_slices
from offline.train_behaviour import policy_of

COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    """An untrained Gaussian policy for Pendulum-v1."""
    settings = {"seed": 0, "policy_kwargs": {"net_arch": [16]}, "buffer_size": 10}
    model = agents.make("sb3:SAC", gym.make("Pendulum-v1"), **settings)
    path = tmp_path_factory.mktemp("policies") / "pendulum.npz"
    policy_of(model, {"env": "Pendulum-v1", "steps": 0}).save(path)
    return path


@pytest.fixture
def small_streams(monkeypatch):
    """Several shards of several streams in a few hundred rows."""
    monkeypatch.setattr(recorder, "STREAM_ROWS", 60)
    monkeypatch.setattr(recorder, "STREAMS", 2)


def assert_equal(a, b):
    for name in COLUMNS:
        assert getattr(a, name).dtype == getattr(b, name).dtype
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.infos.keys() == b.infos.keys()
    for name in a.infos:
        np.testing.assert_array_equal(a.infos[name], b.infos[name], err_msg=name)
    assert a.metadata == b.metadata


def replay(dataset, env_id, cut, **env_kwargs):
    """Play every episode again in an environment of its own; ``cut`` are timeouts that it does not have."""
    found_cuts = []
    env = gym.make(env_id, **env_kwargs)
    for rows in episode_slices(dataset):
        seeds = dataset.infos["reset_seed"][rows]
        assert (seeds == seeds[0]).all()
        observation, _ = env.reset(seed=int(seeds[0]))
        for i in range(rows.start, rows.stop):
            assert env.action_space.contains(dataset.actions[i])
            np.testing.assert_array_equal(dataset.observations[i], observation)
            observation, reward, terminated, truncated, _ = env.step(dataset.actions[i])
            np.testing.assert_array_equal(dataset.next_observations[i], observation)
            assert dataset.rewards[i] == np.float32(reward)
            assert dataset.terminals[i] == terminated
            if dataset.timeouts[i] != (truncated and not terminated):
                found_cuts.append(i)
    assert found_cuts == cut


# --------------------------------------------------------------------------- rows


def test_every_episode_can_be_played_again(small_streams):
    """CartPole within 15 steps ends both ways; only the last row of all is cut by the collection."""
    data = collect("CartPole-v1", "random", 401, seed=5, env_kwargs={"max_episode_steps": 15})
    assert len(data) == 401 and data.actions.dtype == np.int64
    assert data.terminals.sum() > 5 and data.timeouts.sum() > 5
    replay(data, "CartPole-v1", cut=[400], max_episode_steps=15)


def test_episodes_of_a_gaussian_policy_can_be_played_again(small_streams, policy_file):
    data = collect("Pendulum-v1", str(policy_file), 270, seed=2, env_kwargs={"max_episode_steps": 50})
    assert data.observations.dtype == data.next_observations.dtype == data.actions.dtype == np.float32
    replay(data, "Pendulum-v1", cut=[269], max_episode_steps=50)
    # Streams of 60 rows end with the second episode: 100 rows each.
    assert np.flatnonzero(data.timeouts).tolist() == [49, 99, 149, 199, 249, 269]


def test_mujoco_episodes_can_be_played_again(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    data = collect("Hopper-v5", "random", 130, seed=1)
    assert data.terminals.sum() > 2
    env = gym.make("Hopper-v5")
    for rows in episode_slices(data):
        observation, _ = env.reset(seed=int(data.infos["reset_seed"][rows.start]))
        for i in range(rows.start, rows.stop):
            np.testing.assert_array_equal(data.observations[i], observation.astype(np.float32))
            observation, reward, terminated, _, _ = env.step(data.actions[i])
            np.testing.assert_array_equal(data.next_observations[i], observation.astype(np.float32))
            assert data.rewards[i] == np.float32(reward) and data.terminals[i] == terminated
    assert list(tmp_path.iterdir()) == []  # no MUJOCO_LOG.TXT


def test_rows_are_those_of_a_plain_loop(policy_file):
    """The loop that anybody would write, with the seeds of the one stream of a small collection."""
    seed, steps = 11, 230
    data = collect("Pendulum-v1", str(policy_file), steps, seed=seed)
    policy = BehaviourPolicy.load(policy_file)
    policy.seed(int(np.random.SeedSequence([seed, 0, 0, 1]).generate_state(1)[0]))
    resets = np.random.default_rng([seed, 0, 0])
    env, done = gym.make("Pendulum-v1"), True
    for i in range(steps):
        if done:
            observation, _ = env.reset(seed=int(resets.integers(2**31)))
        action, _ = policy.predict(observation[None])
        np.testing.assert_array_equal(data.observations[i], observation)
        np.testing.assert_array_equal(data.actions[i], action[0])
        observation, reward, terminated, truncated, _ = env.step(action[0])
        np.testing.assert_array_equal(data.next_observations[i], observation)
        assert data.rewards[i] == np.float32(reward)
        done = terminated or truncated
    assert data.timeouts.nonzero()[0].tolist() == [199, 229]


def test_native_environments_of_one_step_log_their_final_observation():
    data = collect("AnswerPool-v0", "random", 50)
    assert data.terminals.all() and not data.timeouts.any() and data.n_episodes == 50
    assert (data.actions >= 0).all() and (data.actions < 200).all() and len(set(data.actions.tolist())) > 20
    replay(data, "AnswerPool-v0", cut=[])


@pytest.mark.parametrize("env_id", ["TokenGeneration-v0", "VerifiableMath-v0"])
def test_token_observations(small_streams, env_id):
    data = collect(env_id, "random", 200, seed=3)
    assert data.observations.dtype == np.int64 and data.observations.ndim == 2
    replay(data, env_id, cut=[] if data.terminals[-1] else [199])


class Endless(gym.Env):
    """Counts its steps and never ends; writes its observation into one array."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Box(-1, np.array([0.5, np.inf], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = np.zeros(1, np.float32)
        return self.count, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        return self.count, float(action[0]), False, False, {}


@pytest.fixture
def endless():
    gym.register("Endless-v0", Endless)
    yield "Endless-v0"
    del gym.registry["Endless-v0"]


def test_streams_that_never_end_are_cut(small_streams, endless):
    data = collect(endless, "random", 200)
    # Streams of 60 rows get as many again to end in; 200 rows are one of 120 and 80 of the next.
    assert np.flatnonzero(data.timeouts).tolist() == [119, 199] and not data.terminals.any()
    expected = np.concatenate([np.arange(120), np.arange(80)])[:, None]
    np.testing.assert_array_equal(data.observations, expected)
    np.testing.assert_array_equal(data.next_observations, expected + 1)


class Bold:
    """Acts outside the bounds, in another dtype."""

    def learn(self, total_timesteps): ...

    def save(self, path): ...

    @classmethod
    def load(cls, path, env):
        return cls()

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.tile(np.array([-5.0, 7.0]), (len(observation), 1)), None


def test_actions_are_logged_as_they_were_sent(endless, tmp_path):
    (tmp_path / "agent").write_text("")
    data = collect(endless, f"{__name__}:Bold", 5, load=tmp_path / "agent")
    assert data.actions.dtype == np.float32
    np.testing.assert_array_equal(data.actions, np.tile([-1, 7], (5, 1)))
    np.testing.assert_array_equal(data.rewards, -1)
    assert "action_low" not in data.metadata  # one component has no bound


class Alternating(Bold):
    """Carries a state: 0, 1, 0, 1 ... from the start of each episode, for one observation at a time."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        assert len(observation) == 1 and (state is None) == bool(episode_start[0])
        state = 0 if state is None else state
        return np.array([state % 2]), state + 1


def test_a_policy_with_a_state_has_one_for_every_episode(small_streams, tmp_path):
    (tmp_path / "agent").write_text("")
    data = collect("CartPole-v1", f"{__name__}:Alternating", 300, load=tmp_path / "agent")
    assert data.n_episodes > 4
    for rows in episode_slices(data):
        np.testing.assert_array_equal(data.actions[rows], np.arange(rows.stop - rows.start) % 2)


# --------------------------------------------------------------------------- log-probs


def test_density_of_squashed_actions_is_torchs():
    import torch
    from torch import distributions as d

    rng = np.random.default_rng(0)
    low, high = np.array([-1, 0], np.float32), np.array([3, 10], np.float32)
    mean, std = rng.normal(size=(100, 2)), rng.uniform(0.1, 1, (100, 2))
    actions = low + (np.tanh(mean + std * rng.normal(size=(100, 2))) + 1) / 2 * (high - low)
    base = d.Normal(torch.tensor(mean), torch.tensor(std))
    center, half = torch.tensor((high + low) / 2), torch.tensor((high - low) / 2)
    steps = [d.TanhTransform(), d.AffineTransform(center.double(), half.double())]
    expected = d.TransformedDistribution(base, steps).log_prob(torch.tensor(actions)).sum(1)
    found = acting.squashed_log_prob(mean, std, actions, low, high)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_density_of_squashed_actions_integrates_to_one():
    from scipy.integrate import quad

    bounds = np.array([-2.0]), np.array([3.0])

    def density(a):
        return math.exp(acting.squashed_log_prob(np.array([0.4]), np.array([0.7]), np.array([a]), *bounds))

    assert quad(density, -2, 3)[0] == pytest.approx(1, abs=1e-6)
    edge = acting.squashed_log_prob(np.zeros((2, 1)), np.ones((2, 1)), np.array([[-2.0], [3.0]]), *bounds)
    assert np.isfinite(edge).all() and edge[0] == pytest.approx(edge[1])


def test_log_probs_of_a_gaussian_policy_are_of_the_logged_actions(small_streams, policy_file):
    data = collect("Pendulum-v1", str(policy_file), 150)
    policy = BehaviourPolicy.load(policy_file)
    mean, std = policy.distribution(data.observations)
    u = np.arctanh(data.actions.astype(np.float64) / 2)  # Pendulum's torque is 2 tanh(u)
    expected = -0.5 * ((u - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))
    expected -= np.log(2 * (1 - np.tanh(u) ** 2))
    np.testing.assert_allclose(data.infos["behaviour_logp"], expected[:, 0], rtol=1e-4, atol=1e-4)
    assert "ref_logp" not in data.infos


def test_log_probs_of_uniform_actions():
    box = collect("Pendulum-v1", "random", 20)
    np.testing.assert_allclose(box.infos["behaviour_logp"], -math.log(4))  # torques from -2 to 2
    discrete = collect("CartPole-v1", "random", 20)
    np.testing.assert_allclose(discrete.infos["behaviour_logp"], -math.log(2))


@pytest.mark.parametrize("env_id", ["AnswerPool-v0", "TokenGeneration-v0"])
def test_the_reference_acts_with_the_probabilities_that_the_environment_says(small_streams, env_id):
    data = collect(env_id, "reference", 300, seed=4)
    np.testing.assert_allclose(data.infos["behaviour_logp"], data.infos["ref_logp"], rtol=1e-12)
    uniform = collect(env_id, "random", 300, seed=4)
    assert np.ptp(uniform.infos["ref_logp"]) > 0.1 and np.ptp(uniform.infos["behaviour_logp"]) == 0


def test_the_reference_draws_each_answer_as_often_as_it_says():
    """Pearson's statistic over 200 answers: of mean 199 and deviation 20 if the frequencies are right."""
    data = collect("AnswerPool-v0", "reference", 10_000, seed=8)
    expected = 10_000 * np.exp(gym.make("AnswerPool-v0").unwrapped.reference_logp[0])
    observed = np.bincount(data.actions, minlength=200)
    assert ((observed - expected) ** 2 / expected).sum() < 199 + 5 * 20


@pytest.mark.parametrize("name", ["ppo", "sb3:PPO"])
def test_agents_log_their_own_probabilities(small_streams, name, tmp_path):
    env = gym.make("CartPole-v1")
    agent = agents.make(name, env, seed=3)
    agent.save(tmp_path / "agent.zip")
    data = collect("CartPole-v1", name, 250, load=tmp_path / "agent.zip")
    probabilities = agents.action_probabilities(agent, data.observations, 2)
    expected = np.log(probabilities[np.arange(250), data.actions])
    np.testing.assert_allclose(data.infos["behaviour_logp"], expected, rtol=1e-5)
    assert 50 < data.actions.sum() < 200  # drawn, not the best ones
    assert_equal(data, collect("CartPole-v1", name, 250, load=tmp_path / "agent.zip"))


@pytest.mark.parametrize("name", ["reinforce", "sb3:PPO"])
def test_a_loaded_agent_draws_anew_in_every_shard_and_for_every_seed(small_streams, name, tmp_path):
    """A file holds the generator that the agent was saved with, or the seed that it was made with."""
    agents.make(name, gym.make("AnswerPool-v0"), seed=3).save(tmp_path / "agent.zip")
    first, second = (
        collect("AnswerPool-v0", name, 240, seed=seed, load=tmp_path / "agent.zip").actions for seed in (0, 1)
    )
    assert (first != second).mean() > 0.5
    assert (first[:120] != first[120:]).mean() > 0.5  # the one prompt, in two shards


def test_a_run_folder_is_a_policy(tmp_path):
    from agents.cli import main as llmgym

    command = "train --env AnswerPool-v0 --agent reinforce --steps 64 --n-envs 8 --json --out"
    assert llmgym([*command.split(), str(tmp_path / "run")]) == 0
    data = collect("AnswerPool-v0", str(tmp_path / "run"), 40)
    assert {"behaviour_logp", "ref_logp"} <= data.infos.keys()
    assert data.metadata["policies"][0]["agent"] == "reinforce"


# --------------------------------------------------------------------------- several policies, replay


def test_mixed_policies_share_the_rows(small_streams, policy_file, monkeypatch):
    monkeypatch.setattr(acting, "WEIGHTS", policy_file.parent)
    (policy_file.parent / "Pendulum-v1-medium.npz").write_bytes(policy_file.read_bytes())
    data = collect("Pendulum-v1", "mixed", 201, env_kwargs={"max_episode_steps": 30})
    assert data.infos["policy"].tolist() == [0] * 101 + [1] * 100
    assert data.timeouts[100] and data.timeouts[200]  # no episode goes on under the other policy
    np.testing.assert_allclose(data.infos["behaviour_logp"][101:], -math.log(4))
    assert (data.infos["behaviour_logp"][:101] != -math.log(4)).all()
    first, second = data.metadata["policies"]
    assert (first["name"], second["name"]) == ("medium", "random")
    assert first["about"]["env"] == "Pendulum-v1" and len(first["sha256"]) == 64
    assert str(policy_file.parent) not in json.dumps(data.metadata)  # whoever gets the data has other paths
    returns = episode_returns(data)
    assert first["rows"] == 101 and first["episodes"] == 3
    # The one that was cut, of 11 rows, is not counted.
    assert first["mean_return"] == pytest.approx(returns[:3].mean())
    assert data.metadata["mean_return"] == pytest.approx(np.delete(returns, [3, 7]).mean())
    replay(data, "Pendulum-v1", cut=[100, 200], max_episode_steps=30)


def pendulum_step(observation, action):
    """Pendulum's equations, written down anew: the next observation and the reward."""
    theta, speed = math.atan2(observation[1], observation[0]), float(observation[2])
    reward = -(theta**2 + 0.1 * speed**2 + 0.001 * action**2)
    speed = min(max(speed + (15 * math.sin(theta) + 3 * action) * 0.05, -8), 8)
    theta += speed * 0.05
    return [math.cos(theta), math.sin(theta), speed], reward


def test_replay_holds_the_training_and_continues_exactly(monkeypatch, tmp_path):
    from offline import replay as training

    monkeypatch.setattr(training, "SAVE_EVERY", 60)
    monkeypatch.setattr(training, "REPORT_EVERY", 10)
    settings = {"env_kwargs": {"max_episode_steps": 40}, "seed": 3}
    whole = collect("Pendulum-v1", "replay", 150, **settings)
    save = training._save

    def stop_at_120(model, folder):
        save(model, folder)
        if model.num_timesteps >= 120:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_save", stop_at_120)
    with pytest.raises(KeyboardInterrupt):
        collect("Pendulum-v1", "replay", 150, parts=tmp_path / "parts", **settings)
    monkeypatch.setattr(training, "_save", save)
    monkeypatch.setattr(agents, "make", None)  # it must not begin anew
    assert_equal(collect("Pendulum-v1", "replay", 150, parts=tmp_path / "parts", **settings), whole)

    # Every row obeys the equations, also those where the environment was reset behind it.
    assert np.flatnonzero(whole.timeouts).tolist() == [39, 79, 119, 149] and not whole.terminals.any()
    for i in range(150):
        observation, reward = pendulum_step(whole.observations[i], float(whole.actions[i, 0]))
        np.testing.assert_allclose(whole.next_observations[i], observation, atol=1e-4)
        assert whole.rewards[i] == pytest.approx(reward, abs=1e-4)
    assert np.abs(whole.actions).max() > 1  # stretched back to Pendulum's bounds of 2


def test_replay_of_discrete_actions():
    data = collect("CartPole-v1", "replay", 150)
    assert data.actions.dtype == np.int64 and data.terminals.sum() >= 3
    x, angle = data.next_observations[:, 0], data.next_observations[:, 2]
    np.testing.assert_array_equal(data.terminals, (np.abs(x) > 2.4) | (np.abs(angle) > 12 * math.pi / 180))


# --------------------------------------------------------------------------- processes, stopping


def test_the_result_does_not_depend_on_the_workers(small_streams):
    one, two = (collect("CartPole-v1", "random", 500, seed=7, workers=n) for n in (1, 2))
    assert_equal(one, two)
    other = collect("CartPole-v1", "random", 500, seed=8)
    assert not np.array_equal(other.observations, one.observations)


@pytest.fixture
def stop_after_two(monkeypatch):
    """Recording is interrupted when two shards are finished; ``calls`` counts the shards that were begun."""
    calls: list[int] = []

    def recording(shard, make_env, on_rows):
        calls.append(shard.first)
        if len(calls) == 3:
            on_rows(30)
            raise KeyboardInterrupt
        return recorder.record(shard, make_env, on_rows)

    monkeypatch.setattr(collection, "record", recording)
    return calls


def test_a_stopped_collection_continues_to_the_same_result(small_streams, stop_after_two, tmp_path):
    arguments = ("CartPole-v1", "random", 500)
    with pytest.raises(KeyboardInterrupt):
        collect(*arguments, parts=tmp_path / "parts")
    assert stop_after_two == [0, 2, 4]
    stopped = collect(*arguments, parts=tmp_path / "parts")
    assert stop_after_two == [0, 2, 4, 4, 6, 8]  # what was finished is not recorded again
    assert_equal(stopped, collect(*arguments))


def test_the_parts_of_another_collection_are_not_continued(tmp_path):
    collect("CartPole-v1", "random", 50, parts=tmp_path / "parts")
    with pytest.raises(UserError, match="another collection, with steps=50, seed=0"):
        collect("CartPole-v1", "random", 60, seed=1, parts=tmp_path / "parts")
    plan = json.loads((tmp_path / "parts" / "plan.json").read_text())
    plan["versions"]["numpy"] = "0.1"
    (tmp_path / "parts" / "plan.json").write_text(json.dumps(plan))
    with pytest.warns(UserWarning, match="other versions: numpy 0.1 ->"):
        collect("CartPole-v1", "random", 50, parts=tmp_path / "parts")


# --------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", ["data.hdf5", "data"])
def test_what_the_command_writes_is_what_was_collected(name, tmp_path, capsys):
    from offline.files import read

    pytest.importorskip("h5py" if name.endswith("hdf5") else "minari")
    out = tmp_path / name
    args = Args("CartPole-v1", out, ("random",), 120, seed=4)
    assert main(args) == 0
    data, expected = read(out), collect("CartPole-v1", "random", 120, seed=4)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(data, column), getattr(expected, column), err_msg=column)
    assert {"reset_seed", "behaviour_logp"} <= data.infos.keys()
    for key in ("env", "policy", "policies", "seed", "steps", "mean_return", "n_actions"):
        assert data.metadata[key] == expected.metadata[key]
    assert {"mujoco", "gymnasium", "numpy", "llmgym"} <= data.metadata["versions"].keys()
    assert not parts_of(out).exists() and "120 rows" in capsys.readouterr().out

    assert main(args) == 2
    assert "--overwrite" in capsys.readouterr().out
    assert main(replace(args, seed=5, overwrite=True)) == 0
    assert read(out).metadata["seed"] == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_an_interrupted_command_says_how_to_continue(small_streams, stop_after_two, tmp_path, capsys):
    pytest.importorskip("h5py")
    from offline.files import read

    args = Args("CartPole-v1", tmp_path / "d.hdf5", ("random",), 500)
    assert main(args) == 130
    assert "d.hdf5.parts: the same command goes on" in capsys.readouterr().out
    assert not args.out.exists() and len(list(parts_of(args.out).glob("*.npz"))) == 2
    assert main(args) == 0
    np.testing.assert_array_equal(read(args.out).actions, collect("CartPole-v1", "random", 500).actions)


def test_a_failed_write_keeps_what_was_collected(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    from offline import collect as module

    args = Args("CartPole-v1", tmp_path / "d.hdf5", ("random",), 50)
    assert main(args) == 0
    before = args.out.read_bytes()

    def full(dataset, path):
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "write", full)
    assert main(replace(args, seed=1, overwrite=True)) == 2
    assert args.out.read_bytes() == before and (parts_of(args.out) / "plan.json").exists()


def test_a_folder_of_other_things_is_not_replaced(tmp_path, capsys):
    pytest.importorskip("minari")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    assert main(Args("CartPole-v1", tmp_path / "home", ("random",), 50, overwrite=True)) == 2
    assert "no Minari data" in capsys.readouterr().out
    assert (tmp_path / "home" / "letter").read_text() == "dear"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"policy": ()}, "policy=() must be at least one"),
        ({"policy": ("random", "ppo"), "load": Path("x")}, "only one with load"),
        ({"policy": ("random",), "load": Path("x")}, "goes with the name of an agent"),
        ({"policy": ("medium",)}, "offline.train_behaviour --env CartPole-v1"),
        ({"policy": ("radnom",)}, "did you mean 'random'?"),
        ({"policy": ("ppo",), "load": Path("nowhere.pt")}, "load='nowhere.pt' does not exist"),
        ({"policy": ("nowhere.npz",)}, "does not exist"),
        ({"policy": (__file__,)}, "neither a .npz file nor a run folder"),
        ({"policy": ("reference",)}, "CartPole-v1 names no reference policy"),
        ({"env": "CartPole-v7"}, "CartPole-v1"),
        ({"env": "MathText-v0"}, "observation_space=Text"),
        ({"env_kwargs": ("gravity",)}, "env-kwargs"),
        ({"env_kwargs": ("gravity=3",)}, "gravity"),
        ({"out": Path("data.csv")}, "unknown suffix"),
    ],
)
def test_errors_name_the_option_and_leave_nothing_behind(given, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    defaults = {"env": "CartPole-v1", "out": Path("d.hdf5"), "policy": ("random",), "steps": 20}
    assert main(Args(**defaults | given)) == 2
    assert message in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_another_environment_is_refused(policy_file, tmp_path):
    with pytest.raises(UserError, match="trained on Pendulum-v1"):
        collect("CartPole-v1", str(policy_file), 20)
    (tmp_path / "broken.npz").write_text("no archive")
    with pytest.raises(UserError, match="broken.npz"):
        collect("Pendulum-v1", str(tmp_path / "broken.npz"), 20)


def test_the_progress_bar_ends_at_the_number_of_rows(small_streams):
    console = Console(record=True, width=120, force_terminal=True)
    collect("CartPole-v1", "random", 300, console=console)
    assert "300 of 300 rows" in console.export_text()
