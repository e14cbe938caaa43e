"""Train a behaviour policy of medium quality: SAC with a small network, stopped at a return.

    python -m offline.train_behaviour --env Hopper-v5
    python -m offline.train_behaviour --env Pendulum-v1 --target -300 --out pendulum.npz

This is D4RL's recipe for its "medium" data (Fu et al. 2020, section 5): SAC, stopped early, and its
stochastic policy then acts. The policy is the first whose mean return over ``--final-episodes`` episodes
lies within ``--tolerance`` of the target. Environments train side by side, one process and one core each,
at about 8 ms a step.

The shipped policies are those of the defaults: HalfCheetah after 105,000 steps, Hopper after 85,000 and
Walker2d after 305,000. A policy that stops when it is measured to be near enough was measured with luck: in
100,000 fresh rows of each the mean returns are 4576, 1348 and 2640 (targets 4770, 1422 and 2853).

The folder ``--work`` holds evaluations as CSV and all that is needed to go on after a stop: SB3's model and
replay buffer (a pickle: only continue folders of your own).
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn

import agents
from agents.sb3 import load_sb3
from offline.behaviour import WEIGHTS, BehaviourPolicy
from offline.collection import environment

# Mean returns of the episodes in D4RL's medium data.
MEDIUM_RETURNS = {"HalfCheetah-v5": 4770.0, "Hopper-v5": 1422.0, "Walker2d-v5": 2853.0}


@dataclass(frozen=True)
class Args:
    """Train a behaviour policy of medium quality."""

    env: str
    """Environment id, with a Box action space."""
    target: float | None = None
    """Mean return to stop at; D4RL's for HalfCheetah-v5, Hopper-v5 and Walker2d-v5."""
    tolerance: float = 0.05
    """The policy's mean return may lie so far from the target, relatively."""
    out: Path | None = None
    """The policy's file; default: offline/weights/ENV-medium.npz, where collection looks for it."""
    work: Path | None = None
    """Folder to train in and to continue from; default: runs/behaviour/ENV."""
    max_steps: int = 2_000_000
    """Give up after so many steps."""
    hidden: int = 128
    """Width of the two hidden layers of actor and critics."""
    eval_every: int = 5_000
    """Steps between two evaluations."""
    eval_episodes: int = 10
    """Episodes of each."""
    final_episodes: int = 100
    """Episodes that decide whether a checkpoint is at the target."""
    seed: int = 0
    """Of training; evaluation seeds follow from it."""


def policy_of(model: Any, about: dict[str, Any]) -> BehaviourPolicy:
    """The actor of an SB3 SAC model as plain arrays."""
    actor = model.policy.actor
    layers = [layer for layer in actor.latent_pi if isinstance(layer, torch.nn.Linear)]
    heads = (actor.mu, actor.log_std)
    weights = [layer.weight.detach().numpy().T.copy() for layer in layers]
    biases = [layer.bias.detach().numpy().copy() for layer in layers]
    weights.append(np.concatenate([head.weight.detach().numpy().T for head in heads], axis=1))
    biases.append(np.concatenate([head.bias.detach().numpy() for head in heads]))
    space = model.action_space
    return BehaviourPolicy(weights, biases, space.low, space.high, about)


def episode_returns(policy: BehaviourPolicy, env_id: str, episodes: int, seed: int) -> np.ndarray:
    """Returns of ``episodes`` episodes in which the policy acts by its distribution, float64 [episodes]."""
    env = environment(env_id, {})
    policy.seed(seed)
    returns = np.zeros(episodes)
    for i in range(episodes):
        observation, _ = env.reset(seed=seed + i)
        done = False
        while not done:
            action, _ = policy.predict(observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            returns[i] += float(reward)
            done = terminated or truncated
    env.close()
    return returns


def start_or_continue(args: Args, work: Path) -> Any:
    """The SAC model, as it was left in ``work`` if it was."""
    env = environment(args.env, {})
    if (work / "replay.pkl").exists():
        model: Any = load_sb3("sb3:SAC", work / "model.zip", env)
        model.load_replay_buffer(work / "replay.pkl")
        return model
    return agents.make(
        "sb3:SAC",
        env,
        seed=args.seed,
        learning_starts=5_000,
        policy_kwargs={"net_arch": [args.hidden, args.hidden]},
    )


def save(model: Any, work: Path) -> None:
    """Write model and replay buffer; a stop leaves each of them whole, the new one or the earlier."""
    for name, write in (("model.zip", model.save), ("replay.pkl", model.save_replay_buffer)):
        part = work / f"part-{name}"
        write(part)
        part.replace(work / name)


def train(args: Args, console: Console) -> BehaviourPolicy | None:
    """Train until a checkpoint is at the target; None if that takes more than ``max_steps``."""
    target = MEDIUM_RETURNS.get(args.env) if args.target is None else args.target
    if target is None:
        known = ", ".join(MEDIUM_RETURNS)
        raise ValueError(f"--target is missing: there is none for {args.env}, only for {known}")
    work = args.work or Path("runs/behaviour") / args.env
    work.mkdir(parents=True, exist_ok=True)
    model = start_or_continue(args, work)
    margin = args.tolerance * abs(target)
    columns = (*Progress.get_default_columns(), TextColumn("return {task.fields[mean]:.0f}"))
    with Progress(*columns, console=console) as progress, open(work / "evaluations.csv", "a") as file:
        done = model.num_timesteps
        bar = progress.add_task(args.env, total=args.max_steps, completed=done, mean=float("nan"))
        while model.num_timesteps < args.max_steps:
            model.learn(args.eval_every, reset_num_timesteps=model.num_timesteps == 0)
            step = model.num_timesteps
            policy = policy_of(model, {"env": args.env, "algorithm": "SAC", "steps": step, "target": target})
            mean = episode_returns(policy, args.env, args.eval_episodes, 10_000_000 + args.seed).mean()
            csv.writer(file).writerow([step, args.eval_episodes, round(float(mean), 1)])
            file.flush()
            progress.update(bar, completed=step, mean=mean)
            # Ten episodes are a noisy mean, so candidates come from twice the margin.
            if abs(mean - target) <= 2 * margin:
                returns = episode_returns(policy, args.env, args.final_episodes, 20_000_000 + args.seed)
                csv.writer(file).writerow([step, args.final_episodes, round(float(returns.mean()), 1)])
                if abs(returns.mean() - target) <= margin:
                    policy.about |= {
                        "mean_return": round(float(returns.mean()), 1),
                        "std_return": round(float(returns.std()), 1),
                        "episodes": args.final_episodes,
                    }
                    return policy
            if step % (10 * args.eval_every) == 0:
                save(model, work)
    return None


def main(args: Args) -> int:
    """Train and write the policy; the exit status."""
    torch.set_num_threads(1)
    console = Console()
    try:
        policy = train(args, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    if policy is None:
        console.print(f"no policy came within {args.tolerance:.0%} of the target in {args.max_steps:,} steps")
        return 1
    out = args.out or WEIGHTS / f"{args.env}-medium.npz"
    out.parent.mkdir(parents=True, exist_ok=True)
    policy.save(out)
    console.print(f"wrote {out}: {policy.about}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
