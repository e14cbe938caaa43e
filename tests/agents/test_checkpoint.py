"""Resuming from a checkpoint gives the numbers of a run that never stopped, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import agents
from agents.checkpoint import checkpoints, newest_state, read_state
from agents.env_state import UnsavableEnvironment, dump_environment, load_environment
from agents.files import cut_lines, replace_file
from agents.ppo import PPO

os.environ.setdefault("MUJOCO_GL", "egl")
needs_mujoco = pytest.mark.skipif(
    importlib.util.find_spec("mujoco") is None,
    reason="mujoco is not installed: pip install gymnasium[mujoco]",
)

# n_steps is odd and prime so that rollouts end in the middle of episodes.
PPO_SMALL = {
    "n_steps": 37, "batch_size": 50, "n_epochs": 2, "learning_rate": "lin_0.003", "clip_range": "lin_0.3",
}  # fmt: skip
REINFORCE_SMALL = {"n_episodes": 2, "learning_rate": "lin_0.003"}
GROUPED_SMALL: dict[str, dict[str, Any]] = {
    "rloo": {"n_groups": 2, "num_generations": 2, "learning_rate": "lin_0.003"},
    # A greedy CartPole soon stands for hundreds of steps: learned slowly, the run has several rollouts.
    "remax": {"n_groups": 2, "learning_rate": "lin_0.0003"},
    "grpo": {"n_groups": 3, "num_generations": 2, "batch_size": 4, "num_iterations": 2,
             "dynamic_sampling": True, "learning_rate": "lin_0.003"},
}  # fmt: skip


def make_env(env_id: str, mode: str | None = None, n_envs: int = 3, **kwargs: Any) -> Any:
    if mode == "plain":
        return gym.make(env_id, **kwargs)
    return gym.make_vec(env_id, num_envs=n_envs, vectorization_mode=mode, **kwargs)


class Killed(Exception):
    pass


def kill_at(step: float) -> Callable[[Any], None]:
    """A callback that breaks off at the first iteration behind a step, as a kill does."""

    def callback(agent: Any) -> None:
        if agent.num_timesteps >= step:
            raise Killed

    return callback


def train(folder: Path, name: str, env: Any, config: dict[str, Any], steps: int, **kwargs: Any) -> Any:
    agent = agents.make(name, env, seed=5, **config)
    try:
        return agent.learn(steps, run_dir=folder, **{"checkpoint_every": 150, **kwargs})
    finally:
        env.close()


def assert_same_run(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    a, b = newest_state(one), newest_state(other)
    assert a is not None and b is not None
    assert a["call"] == b["call"] and a["num_timesteps"] == b["num_timesteps"] > 0
    assert a["n_updates"] == b["n_updates"] > 0
    assert torch.equal(a["generator"], b["generator"])
    assert a["policy"].keys() == b["policy"].keys()
    for key in a["policy"]:
        assert torch.equal(a["policy"][key], b["policy"][key]), key
    for x, y in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        for key in x:
            assert torch.equal(x[key], y[key]), key


ENVIRONMENTS = {
    "cartpole-native": ("CartPole-v1", {"mode": None}),
    "cartpole-sync": ("CartPole-v1", {"mode": "sync"}),
    "cartpole-plain": ("CartPole-v1", {"mode": "plain"}),
    "pendulum-sync": ("Pendulum-v1", {"mode": "sync", "max_episode_steps": 30}),
    "answer-pool": ("AnswerPool-v0", {"mode": None, "noise": 0.5}),
    "answer-pool-disabled": ("AnswerPool-v0", {"mode": None, "noise": 0.5, "autoreset_mode": "disabled"}),
    "answer-pool-plain": ("AnswerPool-v0", {"mode": "plain", "noise": 0.5}),
}


@pytest.mark.parametrize(
    "name, config", [("ppo", PPO_SMALL), ("reinforce", REINFORCE_SMALL), *GROUPED_SMALL.items()]
)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_resume_equals_an_unbroken_run(tmp_path, environment, name, config):
    env_id, kwargs = ENVIRONMENTS[environment]
    steps = 60 if name != "ppo" and env_id == "AnswerPool-v0" else 1000
    every = {"checkpoint_every": steps // 7}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "unbroken", name, make_env(env_id, **kwargs), config, steps, **every)
        for share in (0.4, 0.7):  # two kills, the second one after a resume
            with pytest.raises(Killed):
                train(
                    tmp_path / "broken", name, make_env(env_id, **kwargs), config, steps, **every,
                    callback=kill_at(share * steps), resume=share > 0.5,
                )  # fmt: skip
        state = newest_state(tmp_path / "broken")
        assert state is not None and 0 < state["num_timesteps"] < steps
        train(tmp_path / "broken", name, make_env(env_id, **kwargs), config, steps, **every, resume=True)
    assert_same_run(tmp_path / "unbroken", tmp_path / "broken")


@needs_mujoco
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5"])
def test_resume_in_mujoco_equals_an_unbroken_run(tmp_path, env_id):
    def env() -> Any:
        return make_env(env_id, "sync", n_envs=2)

    config = {**PPO_SMALL, "n_steps": 29}
    train(tmp_path / "unbroken", "ppo", env(), config, 400, checkpoint_every=100)
    with pytest.raises(Killed):
        train(tmp_path / "broken", "ppo", env(), config, 400, checkpoint_every=100, callback=kill_at(240))
    train(tmp_path / "broken", "ppo", env(), config, 400, checkpoint_every=100, resume=True)
    assert_same_run(tmp_path / "unbroken", tmp_path / "broken")


@needs_mujoco
def test_a_changed_mujoco_model_is_not_taken_for_the_saved_one():
    env, fresh = gym.make("Hopper-v5"), gym.make("Hopper-v5")
    env.reset(seed=0)
    env.unwrapped.model.body_mass[1] += 1.0
    with pytest.raises(UnsavableEnvironment, match="MuJoCo model"):
        load_environment(fresh, dump_environment(env))


def test_resume_without_its_parts_differs(tmp_path):
    """The comparison above can fail: without the environment's state the metrics differ."""
    train(tmp_path / "a", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    with pytest.raises(Killed):
        train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000, callback=kill_at(500))
    agent = agents.make("ppo", make_env("CartPole-v1"), seed=5, **PPO_SMALL)
    path = checkpoints(tmp_path / "b")[0]
    state = read_state(path)
    torch.save({**state, "world": None, "inexact": "it was taken out"}, path)
    with pytest.warns(UserWarning, match="not exactly.*taken out"):
        agent.learn(1000, run_dir=tmp_path / "b", checkpoint_every=150, resume=True)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() != (tmp_path / "b/metrics.jsonl").read_bytes()


def test_a_second_learn_call_resumes_with_its_own_schedule(tmp_path):
    def agent(folder: Path, resume: bool = False) -> Any:
        made = agents.make("ppo", make_env("CartPole-v1"), seed=5, **PPO_SMALL)
        return made if resume else made.learn(300, run_dir=folder, checkpoint_every=150)

    agent(tmp_path / "a").learn(700, run_dir=tmp_path / "a", checkpoint_every=150)
    with pytest.raises(Killed):
        agent(tmp_path / "b").learn(
            700, run_dir=tmp_path / "b", checkpoint_every=150, callback=kill_at(700)
        )
    agent(tmp_path / "b", True).learn(700, run_dir=tmp_path / "b", checkpoint_every=150, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    rates = [json.loads(line)["train/learning_rate"] for line in (tmp_path / "b/metrics.jsonl").open()]
    assert 0.0 in rates[:-1] and rates[-1] == 0.0  # both calls end at 0


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 300)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 300, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_before_the_first_checkpoint_starts_afresh(tmp_path):
    train(tmp_path / "a", "ppo", make_env("CartPole-v1"), PPO_SMALL, 300)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/metrics.jsonl").write_text('{"step": 111, "train/loss": 1.0}\n{"step"')
    train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 300, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_metrics_and_events_have_no_step_twice(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "a", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    with pytest.raises(Killed):
        train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000, callback=kill_at(600))
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write('{"step": 99')  # a line that a kill cut off
    train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    curves = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        events = EventAccumulator(str(folder))
        events.Reload()
        curves.append([(e.step, e.value) for e in events.Scalars("train/loss")])
    assert curves[0] == curves[1] and len(curves[0]) > 6


def test_two_checkpoints_are_kept_and_load_as_agents(tmp_path):
    trained = train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    files = checkpoints(tmp_path)
    assert len(files) == 2 and len(list((tmp_path / "checkpoints").iterdir())) == 2
    loaded = PPO.load(files[0], make_env("CartPole-v1"))
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    assert np.array_equal(
        loaded.action_probabilities(observations), trained.action_probabilities(observations)
    )


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path):
    train(tmp_path / "a", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    newest, before = checkpoints(tmp_path / "b")
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="before it"):
        train(tmp_path / "b", "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 900}, "total_timesteps=900.*1000"),
        ({"name": "reinforce", "config": REINFORCE_SMALL}, "run of 'ppo'"),
        ({"config": {**PPO_SMALL, "gamma": 0.9}}, r"gamma=0\.9, but .* gamma=0\.99"),
        ({"env": {"n_envs": 2}}, r"\[3\].*\[2\]"),
        ({"env": {"mode": "sync"}}, "layers"),
    ],
)
def test_resume_refuses_another_run(tmp_path, change, message):
    train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 1000)
    env = make_env("CartPole-v1", **change.get("env", {}))
    with pytest.raises(ValueError, match=message):
        train(
            tmp_path, change.get("name", "ppo"), env, change.get("config", PPO_SMALL),
            change.get("steps", 1000), resume=True,
        )  # fmt: skip


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path):
    train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 300)
    with pytest.raises(ValueError, match="resume=True"):
        train(tmp_path, "ppo", make_env("CartPole-v1"), PPO_SMALL, 300)


def test_checkpoints_need_a_folder():
    agent = agents.make("ppo", make_env("CartPole-v1"), seed=0, **PPO_SMALL)
    for wrong in ({"checkpoint_every": 10}, {"resume": True}):
        with pytest.raises(ValueError, match="run_dir"):
            agent.learn(100, **wrong)
    with pytest.raises(ValueError, match="checkpoint_every=0"):
        agent.learn(100, run_dir="unused", checkpoint_every=0)


# --------------------------------------------------------------------------- the environment's state


def actions_of(env: Any, n: int) -> list[Any]:
    env.action_space.seed(3)
    return [env.action_space.sample() for _ in range(n)]


@pytest.mark.parametrize(
    "env_id, mode",
    [
        ("CartPole-v1", None), ("CartPole-v1", "sync"), ("CartPole-v1", "plain"), ("Acrobot-v1", "sync"),
        ("MountainCar-v0", "plain"), ("MountainCarContinuous-v0", "sync"), ("Pendulum-v1", "sync"),
        ("AnswerPool-v0", None), ("AnswerPool-v0", "sync"), ("FrozenLake-v1", "sync"),
    ],
)  # fmt: skip
def test_an_environment_goes_on_as_if_it_had_not_been_saved(env_id, mode):
    env, fresh = make_env(env_id, mode), make_env(env_id, mode)
    env.reset(seed=11)
    actions = actions_of(env, 260)
    ended = False
    for action in actions[:50]:
        if mode == "plain" and ended:
            env.reset()
        *_, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated if mode == "plain" else False
    if ended:
        env.reset()
    load_environment(fresh, dump_environment(env))
    for action in actions[50:]:
        one, other = env.step(action), fresh.step(action)
        for x, y in zip(one[:4], other[:4], strict=True):
            assert np.array_equal(x, y)
        if mode == "plain" and (one[2] or one[3]):
            assert np.array_equal(env.reset()[0], fresh.reset()[0])


def test_what_layers_share_is_shared_again():
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    shared = [1, 2]
    env.mine, env.unwrapped.theirs = shared, shared  # type: ignore[attr-defined]
    fresh = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    beside = load_environment(fresh, dump_environment(env, beside={"also": shared, "env": env.unwrapped}))
    assert fresh.mine is fresh.unwrapped.theirs is beside["also"]
    assert fresh.mine == [1, 2] and fresh.mine is not shared
    assert beside["env"] is fresh.unwrapped


def test_functions_stay_with_the_fresh_environment():
    def make() -> gym.Env:
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda r: 2.0 * r)

    env, fresh = make(), make()
    env.reset(seed=0)
    load_environment(fresh, dump_environment(env))
    assert fresh.step(0)[1] == 2.0


class Unsavable(gym.Wrapper):
    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lock = threading.Lock()


@pytest.mark.filterwarnings("ignore:checkpoints of this run")
def test_an_unsavable_environment_is_named_at_the_first_checkpoint(tmp_path):
    def env() -> Any:
        return SyncVectorEnv([lambda: Unsavable(gym.make("CartPole-v1")) for _ in range(2)])

    with pytest.raises(UnsavableEnvironment, match=r"Unsavable\.lock"):
        dump_environment(env())
    with pytest.warns(UserWarning, match=r"not resume exactly.*Unsavable\.lock") as record:
        train(tmp_path / "a", "ppo", env(), PPO_SMALL, 600)
        assert len(record) == 1  # once a run, not once a checkpoint
        with pytest.raises(Killed):
            train(tmp_path / "b", "ppo", env(), PPO_SMALL, 600, callback=kill_at(350))
    for _ in range(2):  # the second resume, of a finished run, still says so
        with pytest.warns(UserWarning, match="resumed at step .* not exactly"):
            train(tmp_path / "b", "ppo", env(), PPO_SMALL, 600, resume=True)
    state = newest_state(tmp_path / "b")
    assert state is not None and state["num_timesteps"] >= 600 and state["call"]["exact"] is False


def test_the_state_of_another_environment_is_refused():
    saved = dump_environment(make_env("CartPole-v1", "sync"))
    fresh = make_env("Pendulum-v1", "sync")
    with pytest.raises(ValueError, match="CartPoleEnv.*PendulumEnv"):
        load_environment(fresh, saved)


# --------------------------------------------------------------------------- files


def test_replace_file_is_all_or_nothing(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replace_file(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replace_file(path) as file:
        file.write("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "last_step, kept", [(0, 0), (9, 0), (10, 1), (20, 2), (10**9, 3)]
)
def test_lines_are_cut_behind_a_step(tmp_path, last_step, kept):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 10}\n', '{"step": 20}\n', '{"step": 30}\n', '{"step": 4']
    path.write_text("".join(lines))
    cut_lines(path, last_step)
    assert path.read_text() == "".join(lines[:kept])
