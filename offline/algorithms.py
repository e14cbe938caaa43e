"""Offline algorithms by name, and the agent that each of them becomes.

    agent = make("iql", dataset, seed=0, total_steps=100_000)
    agent.fit(dataset, 100_000, run_dir="runs/iql")
    action, _ = agent.predict(observation, deterministic=True)
    agent.save("iql.pt")
    agent = OfflineAgent.load("iql.pt", env)

The mathematics is d3rlpy's, whose ``impl.update`` takes each gradient step; a fit here has the numbers
of d3rlpy's own on the same batches. What is added: batches that keep timeouts (`offline.d3rlpy_data`),
random states that are the agent's own, files that cannot run code, and training that resumes exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import d3rlpy
import numpy as np
import torch
from d3rlpy.base import LearnableConfig
from d3rlpy.torch_utility import TorchMiniBatch

from offline import fitting
from offline.configs import IMITATES, READS_NEXT_ACTION, fit_scalers, make_config, names
from offline.d3rlpy_data import Sampler
from offline.datasets import Dataset
from offline.saving import FORMAT, read_state, write_state
from offline.spaces import Spaces
from offline.streams import Stream


def make(
    name: str,
    source: Any,
    seed: int | None = None,
    device: str = "cpu",
    *,
    total_steps: int = 1_000_000,
    **overrides: Any,
) -> OfflineAgent:
    """An untrained agent.

    Args:
        name: of `offline.configs`: "bc", "cql" ("cql-1", "cql-10"), "iql", "td3bc", "rebrac", "sac",
            "discrete-bc", "discrete-cql".
        source: the record to train on, from which observation and reward scalers are fitted; or an
            environment, for algorithms that have none.
        seed: of the networks and of all training. None draws one.
        device: "cpu", "cuda" or "cuda:N".
        total_steps: gradient steps over which learning rates with a schedule (IQL's policy) decay.
        overrides: fields of d3rlpy's configuration of the algorithm.

    Raises:
        ValueError: unknown algorithm; one for the other kind of actions; scalers that cannot be fitted.
        TypeError: unknown field; source is neither a Dataset nor an environment.
    """
    config = make_config(name, total_steps, overrides)
    spaces = Spaces.of(source)
    if spaces.discrete != name.startswith("discrete-"):
        kind = "discrete actions" if spaces.discrete else "actions of a Box"
        allowed = ", ".join(names(spaces.discrete))
        raise ValueError(f"algorithm={name!r}, but there are {kind}; allowed: {allowed}")
    config = fit_scalers(config, spaces, source if isinstance(source, Dataset) else None)
    return OfflineAgent(name, config, spaces, seed, device)


class OfflineAgent:
    """A d3rlpy algorithm as an agent of this project; built by `make` or `load`.

    Attributes:
        algorithm: its name.
        algo: d3rlpy's algorithm object, with ``config`` and ``impl``.
        spaces: what observations and actions look like.
        num_steps: gradient steps taken so far.
    """

    def __init__(
        self, name: str, config: LearnableConfig, spaces: Spaces, seed: int | None = None, device: str = "cpu"
    ) -> None:
        self.algorithm, self.spaces = name, spaces
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.device = "cuda:0" if device == "cuda" else device
        training, acting, rows = np.random.SeedSequence(self.seed).generate_state(3).tolist()
        self.training, self.acting = Stream(training, self.device), Stream(acting, self.device)
        self.generator = torch.Generator().manual_seed(rows)
        # What it is after a way through JSON, so that a loaded agent has the very same.
        self.algo: Any = type(config).deserialize(config.serialize()).create(self.device)
        with self.training.active():
            self.algo.create_impl(spaces.network_shape, spaces.action_size)

    @property
    def config(self) -> LearnableConfig:
        return self.algo.config

    @property
    def num_steps(self) -> int:
        return self.algo.grad_step

    # ----------------------------------------------------------------- training

    def fit(
        self,
        dataset: Dataset,
        n_steps: int,
        *,
        callback: Callable[[OfflineAgent, int], Any] | None = None,
        eval_every: int | None = None,
        run_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        progress_bar: bool = False,
    ) -> list[dict[str, float]]:
        """Take ``n_steps`` gradient steps on batches of the record; see `offline.fitting.fit`."""
        return fitting.fit(
            self, dataset, n_steps, callback, eval_every, run_dir, checkpoint_every, resume, progress_bar
        )

    def step(self, batch: TorchMiniBatch) -> dict[str, float]:
        """One gradient step (d3rlpy's); its losses. Call it while ``agent.training`` is active."""
        losses = self.algo.impl.update(batch, self.num_steps)
        self.algo.set_grad_step(self.num_steps + 1)
        return losses

    def sampler(self, dataset: Dataset) -> Sampler:
        """Batches of a record for this algorithm, drawn with the agent's own generator.

        Imitation uses every row. Values are learned from `Dataset.trainable` rows; for ReBRAC, whose
        critic reads the action that followed, not from timeouts, behind which nobody knows it.
        """
        if self.algorithm in IMITATES:
            usable = np.ones(len(dataset), bool)
        elif self.algorithm in READS_NEXT_ACTION:
            usable = ~dataset.timeouts
        else:
            usable = dataset.trainable
        rows = np.flatnonzero(usable)
        return Sampler(dataset, self.spaces, self.config, self.generator, self.device, rows)

    # ----------------------------------------------------------------- acting

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Actions for one observation or a batch [N, ...] of them, and ``state`` as it came.

        Deterministic: the policy's mode (the tanh of its mean; the action of largest probability or
        value). Otherwise drawn from the policy, where it has a distribution (not in BC, TD3+BC, ReBRAC
        and discrete CQL).
        """
        array = np.asarray(observation)
        single = array.ndim == len(self.spaces.shape)
        encoded = self.spaces.encode(array[None] if single else array)
        with self.acting.active():
            if self.spaces.discrete and not deterministic and self.algorithm in IMITATES:
                actions = torch.multinomial(torch.from_numpy(self._probabilities(encoded)), 1)[:, 0].numpy()
            else:
                actions = self.algo.predict(encoded) if deterministic else self.algo.sample_action(encoded)
        if self.spaces.discrete:
            actions = actions.astype(np.int64) + self.spaces.start
        else:
            low, high = np.array([self.spaces.low, self.spaces.high], np.float32)
            actions = np.clip(actions, low, high)
        return (actions[0] if single else actions), state

    def predict_value(self, observations: Any, actions: Any) -> np.ndarray:
        """Q(s, a), the mean over critics, float32 [N], in the units of scaled rewards.

        Raises:
            NotImplementedError: the algorithm has no critic.
        """
        encoded = self.spaces.encode_actions(np.asarray(actions))
        encoded = encoded[:, 0].astype(np.int64) if self.spaces.discrete else encoded
        return self.algo.predict_value(self.spaces.encode(observations), encoded)

    def action_probabilities(self, observations: Any) -> np.ndarray:
        """pi(.|s) of discrete actions, float64 [N, A]: one for the greedy action of discrete CQL.

        Raises:
            ValueError: actions are continuous.
        """
        if not self.spaces.discrete:
            raise ValueError(f"{self.algorithm} has continuous actions: they have no probabilities")
        return self._probabilities(self.spaces.encode(observations))

    def _probabilities(self, encoded: np.ndarray) -> np.ndarray:
        if self.algorithm not in IMITATES:
            return np.eye(self.spaces.action_size)[self.algo.predict(encoded)]
        x = torch.from_numpy(encoded).to(self.device)
        with torch.no_grad():
            if self.config.observation_scaler:
                x = self.config.observation_scaler.transform(x)
            self.algo.impl.modules.set_eval()
            return self.algo.impl.modules.imitator(x).logits.double().softmax(dim=1).cpu().numpy()

    # ----------------------------------------------------------------- files

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, as plain data and tensors."""
        modules = self.algo.impl.modules
        parts = {f.name: getattr(modules, f.name) for f in fields(modules)}
        return {
            "format": FORMAT,
            "algorithm": self.algorithm,
            "config": self.config.serialize(),
            "spaces": asdict(self.spaces),
            "seed": self.seed,
            "num_steps": self.num_steps,
            "modules": {k: v.state_dict() for k, v in parts.items() if v is not None},
            "random": {
                "training": self.training.states,
                "acting": self.acting.states,
                "rows": self.generator.get_state(),
            },
            "d3rlpy": d3rlpy.__version__,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put `state_dict` into an agent with the same configuration and spaces.

        Raises:
            ValueError: it is of another algorithm, configuration or spaces.
        """
        saved, mine = (
            {"algorithm": name, **json.loads(config), **spaces}
            for name, config, spaces in (
                (state["algorithm"], state["config"], state["spaces"]),
                (self.algorithm, self.config.serialize(), asdict(self.spaces)),
            )
        )
        for name in saved.keys() | mine.keys():
            if saved.get(name) != mine.get(name):
                raise ValueError(f"{name} of the saved agent is {saved.get(name)}, not {mine.get(name)}")
        for name, part in state["modules"].items():
            getattr(self.algo.impl.modules, name).load_state_dict(part)
        self.algo.set_grad_step(state["num_steps"])
        self.seed = state["seed"]
        self.training.load(state["random"]["training"])
        self.acting.load(state["random"]["acting"])
        self.generator.set_state(state["random"]["rows"])

    def save(self, path: str | Path) -> None:
        """Write the agent to a file, atomically: configuration, weights, optimisers, random states."""
        write_state(Path(path), self.state_dict())

    def save_checkpoint(self, path: Path, call: dict[str, int]) -> None:
        """`save`, with what a `fit` call needs to go on."""
        write_state(path, self.state_dict() | {"call": call})

    def load_checkpoint(self, path: Path) -> dict[str, int]:
        """Put `save_checkpoint` into this agent; returns its ``call``."""
        state = read_state(path)
        self.load_state_dict(state)
        return state["call"]

    @classmethod
    def load(cls, path: str | Path, env: Any = None, device: str = "cpu") -> OfflineAgent:
        """The agent that `save` wrote. Nothing in the file is executed.

        Args:
            env: an environment whose spaces must be the agent's, or a record whose rows must be; None
                checks neither.

        Raises:
            ValueError: not such a file, or one that does not fit ``env``.
        """
        state = read_state(path)
        kind = type(make_config(state["algorithm"], 1, {}))
        spaces = Spaces(**state["spaces"])
        if isinstance(env, Dataset):
            spaces.check_dataset(env)
        elif env is not None:
            spaces.check_env(env)
        agent = cls(state["algorithm"], kind.deserialize(state["config"]), spaces, state["seed"], device)
        agent.load_state_dict(state)
        return agent


def load_d3rlpy(path: str | Path, source: Any, trusted: bool = False, device: str = "cpu") -> OfflineAgent:
    """An agent from a ``.d3`` file that d3rlpy's ``algo.save`` wrote.

    Such a file is a pickle, and reading a pickle runs what its author put into it. It has no step
    counter and no random states: training goes on from it, but not to the numbers of an unbroken run.

    Args:
        source: the record or environment whose spaces the agent acts in.
        trusted: read it all the same. This project writes no pickles (`OfflineAgent.save` does not), so
            every such file is somebody else's.

    Raises:
        ValueError: not trusted; weights without their configuration; an algorithm that is not in
            `offline.configs`; other spaces.
    """
    if not trusted:
        raise ValueError(
            f"{path} is a file of d3rlpy's, a pickle, which can run any code when it is read, and this "
            "project did not write it; pass trusted=True if you know where it comes from"
        )
    if Path(path).read_bytes()[:2] == b"PK":  # a zip archive of torch's, which save_model writes
        raise ValueError(
            f"{path} holds weights without their configuration; make the agent with it, then "
            "agent.algo.load_model(path)"
        )
    algo = d3rlpy.load_learnable(str(path), device=device)
    found = [name for name in names() if type(make_config(name, 1, {})) is type(algo.config)]
    if not found:
        raise ValueError(f"{path} holds {type(algo).__name__}; allowed: {', '.join(names())}")
    agent = OfflineAgent(found[0], algo.config, Spaces.of(source), None, device)
    sizes = tuple(algo.impl.observation_shape), algo.impl.action_size
    wanted = agent.spaces.network_shape, agent.spaces.action_size
    if sizes != wanted:
        raise ValueError(f"{path} has observations and actions of sizes {sizes}; allowed: {wanted}")
    agent.algo = algo
    return agent
