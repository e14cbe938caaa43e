"""The runs of the D4RL benchmark: one for each dataset, then one for each algorithm and seed on it.

Algorithms are trained by gradient steps on fixed data and evaluated every so many steps, all on the same
seeds of the environment: differences between their scores are not those of easy and hard starts.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_json, to_plain, write_json
from offline import acting, files
from offline.collect import collect
from offline.collection import environment
from offline.d4rl import gymnasium_id, normalized_score
from offline.datasets import Dataset, episode_lengths, episode_returns

GAMMA = 0.99  # of every critic here
EVALUATION_SEED = 10_000_000  # of the first episode; others follow
VALUE_ROWS = 2_000  # rows of the data at which a critic is asked
AHEAD = 500  # steps that a row of a cut episode must have before the cut: 0.99^500 is below 1%
KINDS = ("medium", "random", "mixed", "replay")  # what can be collected
ROBOTS = ("halfcheetah", "hopper", "walker2d")


def plain_name(name: str) -> str:
    """A dataset's name without its version: "hopper-medium-v2" is "hopper-medium"."""
    return re.sub(r"-v\d+$", "", name)


def find_file(name: str, folder: Path | None) -> Path | None:
    """The HDF5 file of a dataset in a folder, as D4RL names it or without a version; None: there is none."""
    if folder is None:
        return None
    names = [f"{name}-v2.hdf5", f"{name}.hdf5"]
    return next((folder / n for n in names if (folder / n).is_file()), None)


def data_config(name: str, folder: Path | None, steps: int, seed: int) -> dict[str, Any]:
    """The config of a dataset's job: the file in the folder, or else what collecting it depends on.

    Raises:
        ValueError: there is no file, and it cannot be collected.
        UserError: the policy to collect with is not there.
    """
    robot, _, kind = name.partition("-")
    if robot not in ROBOTS:
        raise ValueError(f"--datasets has {name!r}: a name begins with one of {', '.join(ROBOTS)}")
    path = find_file(name, folder)
    if path is not None:  # size and time: another file in its place is other data
        stat = path.stat()
        return {"dataset": name, "file": str(path.resolve()), "bytes": stat.st_size, "time": stat.st_mtime_ns}
    if kind not in KINDS:
        where = "and no --data" if folder is None else f"but {folder} has no {name}-v2.hdf5 or {name}.hdf5"
        known = ", ".join(f"{robot}-{k}" for k in KINDS)
        raise ValueError(f"--datasets has {name!r}, {where}; what can be collected: {known}")
    policy = acting.find("medium", gymnasium_id(name)).sha256 if kind in ("medium", "mixed") else None
    return {"dataset": name, "file": None, "steps": steps, "seed": seed, "policy": policy}


def data_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Collect a dataset unless it is given, and say what is in it; `config` is of `data_config`."""
    name, path = config["dataset"], config["file"]
    if path is None:
        path = folder / f"{name}.hdf5"
        parts = folder / "parts"  # a collection that was stopped continues from there
        kind = name.partition("-")[2]
        files.write(collect(gymnasium_id(name), kind, config["steps"], config["seed"], parts=parts), path)
        shutil.rmtree(parts)
    dataset = files.read(path)
    returns = episode_returns(dataset)
    rows, to_go = value_rows(dataset)
    collected = "versions" in dataset.metadata  # which D4RL's own files have not
    policies = dataset.metadata["policies"] if collected else []
    counted = [p for p in policies if len(policies) > 1 and p["mean_return"] is not None]
    return {
        "path": str(path), "collected": collected, "rows": len(dataset),
        "episodes": len(returns), "return_mean": returns.mean(), "return_std": returns.std(),
        "score": normalized_score(name, returns.mean()),
        # Of mixed data: random episodes are short, and many in half of the rows.
        "parts": {p["name"]: normalized_score(name, p["mean_return"]) for p in counted},
        "discounted_rows": to_go.mean() if len(rows) else None,
    }  # fmt: skip


def returns_to_go(dataset: Dataset, gamma: float = GAMMA) -> np.ndarray:
    """Discounted sum of the rewards from each row to the end of its episode, float64 [n]."""
    found = np.zeros(len(dataset))
    after = 0.0
    ends = dataset.terminals | dataset.timeouts
    for i in range(len(dataset) - 1, -1, -1):
        after = float(dataset.rewards[i]) + (0.0 if ends[i] else gamma * after)
        found[i] = after
    return found


def value_rows(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Up to `VALUE_ROWS` rows at which critics are asked, and the behaviour's discounted returns from them.

    In an episode that was cut, only rows at least `AHEAD` steps before the cut have a return that is known.
    """
    lengths = episode_lengths(dataset)
    last = np.cumsum(lengths) - 1
    left = np.repeat(last, lengths) - np.arange(len(dataset))
    known = np.repeat(dataset.terminals[last], lengths) | (left >= AHEAD)
    rows = np.flatnonzero(known)
    if len(rows) > VALUE_ROWS:
        rows = np.sort(np.random.default_rng(0).choice(rows, VALUE_ROWS, replace=False))
    return rows, returns_to_go(dataset)[rows]


def play(agent: Any, env_id: str, episodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts [episodes, D], returns and discounted returns [episodes] of the deterministic policy.

    Episode i starts with seed `EVALUATION_SEED` + i. They run side by side, for the network's sake, and each
    environment stops at its own end.
    """
    envs = [environment(env_id, {}) for _ in range(episodes)]
    starts = np.stack([env.reset(seed=EVALUATION_SEED + i)[0] for i, env in enumerate(envs)])
    observations, going = starts.copy(), np.arange(episodes)
    returns, discounted, weight = np.zeros(episodes), np.zeros(episodes), 1.0
    while len(going):
        actions, _ = agent.predict(observations[going], deterministic=True)
        ended = np.zeros(len(going), bool)
        for k, (i, action) in enumerate(zip(going, actions, strict=True)):
            observations[i], reward, terminated, truncated, _ = envs[i].step(action)
            returns[i] += float(reward)
            discounted[i] += weight * float(reward)
            ended[k] = terminated or truncated
        going, weight = going[~ended], weight * GAMMA
    for env in envs:
        env.close()
    return starts, returns, discounted


def train_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one algorithm on a dataset and evaluate it on the way.

    A run that was stopped goes on from its last evaluation, to the numbers of one that was not.
    """
    from offline import algorithms  # here: d3rlpy takes seconds to import

    dataset = files.read(config["path"])
    widths = {} if config["hidden"] is None else two_layers(config["algo"], config["hidden"])
    agent = algorithms.make(config["algo"], dataset, config["seed"], total_steps=config["steps"], **widths)
    rows, _ = value_rows(dataset)
    env_id = gymnasium_id(config["dataset"])
    log, training = folder / "evaluations.json", folder / "training"
    before = read_json(log)
    if before is None or before["config"] != to_plain(config):
        shutil.rmtree(training, ignore_errors=True)
        before = {"config": to_plain(config), "evaluations": []}
    evaluations = before["evaluations"]

    def evaluate(agent: Any, step: int) -> None:
        # The log is written before the checkpoint: a stop between the two repeats the evaluation.
        found = measure(agent, config["dataset"], env_id, config["episodes"], dataset, rows)
        evaluations[:] = [e for e in evaluations if e["step"] < step] + [{"step": step} | found]
        write_json(log, before)
        print(f"step {step}: score {found['score']:.1f}", flush=True)

    agent.fit(dataset, config["steps"], callback=evaluate, eval_every=config["eval_every"], run_dir=training,
              checkpoint_every=config["eval_every"], resume=True)  # fmt: skip
    return {"seed": config["seed"], "evaluations": evaluations}


def two_layers(algo: str, width: int) -> dict[str, Any]:
    """Fields of an algorithm's configuration that give every network two hidden layers of so many units."""
    from d3rlpy.models import VectorEncoderFactory

    from offline.configs import make_config

    found = {}
    for name, factory in vars(make_config(algo, 1, {})).items():
        if name.endswith("encoder_factory"):
            kept = factory if isinstance(factory, VectorEncoderFactory) else VectorEncoderFactory()
            found[name] = replace(kept, hidden_units=[width, width])  # ReBRAC's LayerNorm stays
    return found


def measure(
    agent: Any, name: str, env_id: str, episodes: int, dataset: Dataset, rows: np.ndarray
) -> dict[str, Any]:
    """One evaluation; what a critic says is None where there is none."""
    starts, returns, discounted = play(agent, env_id, episodes)
    actions, _ = agent.predict(starts, deterministic=True)
    at_starts = action_values(agent, starts, actions)
    at_rows = action_values(agent, dataset.observations[rows], dataset.actions[rows]) if len(rows) else None
    return {
        "return_mean": returns.mean(),
        "score": normalized_score(name, returns.mean()),
        "returns": returns,
        "discounted": discounted.mean(),
        "predicted": None if at_starts is None else at_starts.mean(),
        "predicted_rows": None if at_rows is None else at_rows.mean(),
    }


def action_values(agent: Any, observations: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
    """Q(s, a) [N] in the units of the environment's rewards; None without a critic."""
    try:
        values = agent.predict_value(observations, actions)
    except NotImplementedError:
        return None
    scaler = agent.config.reward_scaler  # here only one that multiplies (IQL's)
    return values if scaler is None else values / float(scaler.transform_numpy(np.ones(1))[0])
