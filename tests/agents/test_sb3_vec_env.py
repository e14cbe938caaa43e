"""The adapter to SB3 against SB3's own DummyVecEnv, step by step."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import llmgym  # noqa: F401  (registers the ids)
from agents.sb3_vec_env import SB3VecEnv
from llmgym.vector import AutoresetMode

N = 3
needs_gymnasium_modes = pytest.mark.skipif(
    not hasattr(gym.vector, "AutoresetMode"), reason="Gymnasium 1.0 has next-step autoreset only"
)


class Wanderer(gym.Env):
    """Terminates, truncates, or both, at random; info has numbers, text, arrays, gaps, a dict."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, dict_observation: bool = False):
        self.dict_observation = dict_observation
        if dict_observation:
            parts = {"position": self.observation_space, "time": gym.spaces.Discrete(1000)}
            self.observation_space = gym.spaces.Dict(parts)

    def _observe(self):
        # The same array each time: whoever keeps it without a copy sees it change.
        self.position[:] = self.np_random.normal(size=2)
        return (
            {"position": self.position, "time": self.time}
            if self.dict_observation
            else self.position
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.time = np.zeros(2, np.float32), 0
        scale = (options or {}).get("scale", 1.0)
        return self._observe(), {"start": scale * float(self.np_random.random()), "time": 0}

    def step(self, action):
        self.time += 1
        u = self.np_random.random()
        info = {"time": self.time, "name": f"step {self.time}", "pair": np.array([u, -u])}
        info["nested"] = {"u": float(u)}
        if self.time % 2:
            info["odd"] = 0.0
        terminated, truncated = bool(u < 0.15), bool(0.1 < u < 0.25)
        return self._observe(), float(action + u), terminated, truncated, info

    def action_masks(self):
        return np.arange(3) <= self.time


class NativeWanderer(VectorEnv):
    """Wanderers as one native environment in the autoreset modes that Gymnasium 1.0 lacks."""

    def __init__(self, num_envs: int, mode: AutoresetMode, dict_observation: bool = False):
        self.rows = [Wanderer(dict_observation) for _ in range(num_envs)]
        self.num_envs, self.mode, self.metadata = num_envs, mode, {"autoreset_mode": mode}
        self.single_observation_space = self.rows[0].observation_space
        self.single_action_space = Wanderer.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.last = [None] * num_envs

    def _batch(self):
        if not self.rows[0].dict_observation:
            return np.stack(self.last)
        return {key: np.stack([row[key] for row in self.last]) for key in self.last[0]}

    def reset(self, *, seed=None, options=None):
        mask, info = (options or {}).get("reset_mask", np.ones(self.num_envs, bool)), {}
        for i in np.flatnonzero(mask):
            row_seed = None if seed is None else seed + int(i)
            self.last[i], row_info = self.rows[i].reset(seed=row_seed, options=options)
            info = self._add_info(info, row_info, i)
        return self._batch(), info

    def step(self, actions):
        rewards, ends, info, final_info = np.zeros(self.num_envs), [], {}, {}
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i, row in enumerate(self.rows):
            self.last[i], rewards[i], *end, row_info = row.step(actions[i])
            ends.append(end)
            if any(end) and self.mode == AutoresetMode.SAME_STEP:
                final_info = self._add_info(final_info, row_info, i)
                final_obs[i] = {k: np.copy(v) for k, v in self.last[i].items()} \
                    if row.dict_observation else self.last[i].copy()  # fmt: skip
                self.last[i], row_info = row.reset()
            info = self._add_info(info, row_info, i)
        terminated, truncated = np.array(ends).T
        if final_info:
            done = terminated | truncated
            info |= {"final_obs": final_obs, "_final_obs": done}
            info |= {"final_info": final_info, "_final_info": done}
        return self._batch(), rewards, terminated, truncated, info


def sync(make, **kwargs):
    return SB3VecEnv(SyncVectorEnv([make] * N, **kwargs))


def assert_same_runs(ours, theirs, n_steps: int, min_ends: int = 6) -> None:
    """Same seed, same actions: everything SB3 sees is equal, over several ends in each row."""
    ours.seed(7)
    theirs.seed(7)
    np.testing.assert_equal(ours.reset(), theirs.reset())
    np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
    theirs.action_space.seed(0)
    ends, history = np.zeros(N, int), []
    for _ in range(n_steps):
        actions = np.stack([theirs.action_space.sample() for _ in range(N)])
        got, expected = ours.step(actions), theirs.step(actions)
        np.testing.assert_equal(got, expected)
        np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
        assert got[1].dtype == np.float32
        ends += got[2]
        history.append((got[0], expected[0]))
    assert ends.min() >= min_ends, ends
    np.testing.assert_equal(*zip(*history, strict=True))  # what was handed out has not changed
    # The seed is used once: a second reset goes on with the streams, and they agree.
    np.testing.assert_equal(ours.reset(), theirs.reset())


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    "make, n_steps",
    [
        (lambda: gym.make("CartPole-v1"), 250),
        (lambda: gym.make("Pendulum-v1", max_episode_steps=20), 130),
        (Wanderer, 100),
        (lambda: Wanderer(dict_observation=True), 100),
        (lambda: gym.make("AnswerPool-v0"), 10),
    ],
    ids=["CartPole", "Pendulum", "Wanderer", "dict Wanderer", "AnswerPool"],
)
def test_sync_vector_env_equals_dummy_vec_env(make, n_steps, copy):
    assert_same_runs(sync(make, copy=copy), DummyVecEnv([make] * N), n_steps)


@needs_gymnasium_modes
@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("dict_observation", [False, True])
def test_sync_vector_env_in_the_other_modes(mode, dict_observation):
    def make():
        return Wanderer(dict_observation)

    ours = sync(make, autoreset_mode=AutoresetMode[mode])
    assert_same_runs(ours, DummyVecEnv([make] * N), 100)


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("dict_observation", [False, True])
def test_native_env_equals_dummy_vec_env(mode, dict_observation):
    ours = SB3VecEnv(NativeWanderer(N, AutoresetMode[mode], dict_observation))
    assert_same_runs(ours, DummyVecEnv([lambda: Wanderer(dict_observation)] * N), 100)


@pytest.mark.parametrize("mode", ["same_step", "disabled", "next_step"])
def test_answer_pool_equals_dummy_vec_env(mode):
    pool = llmgym.AnswerPool.random(5, 7, seed=0)
    native = gym.make_vec("AnswerPool-v0", num_envs=N, pool=pool, autoreset_mode=mode)
    scalar = [lambda: gym.make("AnswerPool-v0", pool=pool)] * N
    assert_same_runs(SB3VecEnv(native), DummyVecEnv(scalar), 30)


def test_cartpole_vector_env_of_one_row_is_the_native_sequence_without_reset_steps():
    raw, ours = CartPoleVectorEnv(1, max_episode_steps=30), SB3VecEnv(CartPoleVectorEnv(1, 30))
    ours.seed(3)
    np.testing.assert_equal(ours.reset(), raw.reset(seed=3)[0])
    rng, ends = np.random.default_rng(0), 0
    for _ in range(200):
        action = rng.integers(2, size=1)
        obs, reward, terminated, truncated, _ = raw.step(action)
        got_obs, got_reward, done, infos = ours.step(action)
        assert got_reward == reward == 1.0 and done == (terminated | truncated)
        if done:
            ends += 1
            np.testing.assert_equal(infos[0]["terminal_observation"], obs[0])
            assert infos[0]["TimeLimit.truncated"] == (truncated[0] and not terminated[0])
            obs = raw.step(action)[0]  # the reset step, whose action is ignored
        np.testing.assert_equal(got_obs, obs)
    assert ends > 5


def test_cartpole_vector_env_resets_no_row_but_the_finished_ones():
    native = CartPoleVectorEnv(N, max_episode_steps=15)
    ours = SB3VecEnv(native)
    ours.reset()
    scalar, rng, length, ends = CartPoleEnv(), np.random.default_rng(0), np.zeros(N, int), 0
    scalar.reset()
    for _ in range(120):
        states, actions = native.state.copy(), rng.integers(2, size=N)
        obs, rewards, dones, infos = ours.step(actions)
        length += 1
        for i in range(N):
            scalar.state, scalar.steps_beyond_terminated = tuple(states[:, i]), None
            expected, _, terminated, _, _ = scalar.step(int(actions[i]))
            assert rewards[i] == 1.0 and dones[i] == (terminated or length[i] == 15)
            final = infos[i]["terminal_observation"] if dones[i] else obs[i]
            np.testing.assert_allclose(final, expected, rtol=1e-5, atol=1e-6)
            if dones[i]:
                assert np.abs(obs[i]).max() <= 0.05  # where CartPole starts
                length[i], ends = 0, ends + 1
    assert ends > 5 * N


def test_seeds_and_options():
    ours = sync(Wanderer)
    assert list(ours.seed(11)) == [11, 12, 13]
    first = ours.reset()
    for i in range(N):
        np.testing.assert_equal(first[i], Wanderer().reset(seed=11 + i)[0])
    ours.seed(11)
    ours.set_options({"scale": 0.0})
    np.testing.assert_equal(ours.reset(), first)
    assert [info["start"] for info in ours.reset_infos] == [0.0] * N
    ours.reset()
    assert all(info["start"] > 0.0 for info in ours.reset_infos)  # options are used once, too
    with pytest.raises(ValueError, match="one dict for all rows"):
        ours.set_options([{"scale": 0.0}] * N)

    pool = llmgym.AnswerPool.random(5, 7, seed=0)
    native = SB3VecEnv(gym.make_vec("AnswerPool-v0", num_envs=N, pool=pool))
    native.set_options({"task_id": np.array([4, 0, 2])})
    assert native.reset().tolist() == [4, 0, 2]


def test_attributes_and_methods_of_sub_environments():
    ours = sync(lambda: Monitor(Wanderer()))
    ours.reset()
    assert ours.get_attr("time", indices=[0, 2]) == [0, 0]
    ours.set_attr("time", 1, indices=1)
    assert ours.get_attr("time") == [0, 1, 0]
    masks = ours.env_method("action_masks")
    assert np.array(masks).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    assert ours.has_attr("action_masks") and not ours.has_attr("nothing")
    assert ours.env_is_wrapped(Monitor) == [True] * N and ours.render_mode is None


def test_attributes_and_methods_of_a_native_environment():
    native = NativeWanderer(N, AutoresetMode.SAME_STEP)
    native.action_masks = lambda: np.array([[True, False, False]] * 2 + [[True, True, True]])
    native.total = lambda: 12.5
    ours = SB3VecEnv(native)
    assert [mask.tolist() for mask in ours.env_method("action_masks", indices=[2])] == [[True] * 3]
    assert ours.env_method("total") == [12.5] * N
    assert ours.has_attr("action_masks") and not ours.has_attr("nothing")
    assert ours.env_is_wrapped(Monitor) == [False] * N
    ours.set_attr("difficulty", 4)
    assert native.difficulty == 4 and ours.get_attr("difficulty") == [4] * N
    with pytest.raises(ValueError, match="all rows .* share 'difficulty'"):
        ours.set_attr("difficulty", 5, indices=[0])
    pool_env = SB3VecEnv(gym.make_vec("AnswerPool-v0", num_envs=N))
    assert [p is pool_env.vector_env.unwrapped.pool for p in pool_env.get_attr("pool")] == [
        True
    ] * N


def test_rendering_gives_one_frame_a_row():
    class Painter(Wanderer):
        metadata = {"render_modes": ["rgb_array"]}
        render_mode = "rgb_array"

        def render(self):
            return np.full((2, 2, 3), self.time, np.uint8)

    ours = sync(Painter)
    ours.reset()
    assert ours.render_mode == "rgb_array" and len(ours.get_images()) == N
    assert ours.render().shape == (4, 4, 3)  # tiled two by two


def test_next_step_environments_whose_rows_cannot_be_reset_are_refused():
    unknown = NativeWanderer(N, AutoresetMode.NEXT_STEP)
    wrapped = RecordEpisodeStatistics(SyncVectorEnv([Wanderer] * N))
    for env in (unknown, wrapped, AsyncVectorEnv([Wanderer])):
        with pytest.raises(ValueError, match='next-step autoreset.*autoreset_mode="same_step"'):
            SB3VecEnv(env)
        env.close()


def test_a_same_step_environment_without_final_obs_is_refused():
    class Liar(NativeWanderer):
        def step(self, actions):
            *step, info = super().step(actions)
            return *step, {k: v for k, v in info.items() if "final" not in k}

    ours = SB3VecEnv(Liar(N, AutoresetMode.SAME_STEP))
    ours.seed(0)
    ours.reset()
    with pytest.raises(ValueError, match="no 'final_obs' for the finished rows"):
        for _ in range(100):
            ours.step(np.zeros(N, int))
