"""PPO on the answer pool: does a trained policy reach the optimum that is known in closed form?

    python benchmarks/answer_pool_ppo.py
    python benchmarks/answer_pool_ppo.py --quick
    python benchmarks/answer_pool_ppo.py --agent sb3:PPO --samples 64
    python benchmarks/answer_pool_ppo.py --agent my_package.my_module:MyAgent

Each round samples answers from the policy, rewards them with the proxy less
`beta * log(pi_old / pi_ref)`, whitens the advantages and makes a few epochs of clipped updates. The
optimum of that objective is `ref * exp(proxy / beta)`, normalised, so the last column but one is the
distance to the truth. As beta falls the policy follows the proxy further from the reference, and the
gold reward, which nobody trains on, first rises and then falls.

A command that was stopped continues. Under --out it leaves the result of every run,
`summary.json`, `summary.csv` and `frontier.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import tyro
from rich.console import Console

import agents
from agents.runs import is_foreign
from common.environments import EpisodeLog, make_env
from common.files import write_json
from common.plots import MARKERS, PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs
from common.stats import Estimate, estimate
from common.tables import interval, make_console, number, print_table, write_csv
from llmgym import AnswerPool

MEASURES = ("proxy", "gold", "kl_ref", "kl_opt", "p_max", "p_best")


@dataclass(frozen=True)
class Args:
    """Train an agent on AnswerPool-v0 over a range of betas and compare it with the exact optimum."""

    agent: str = "ppo"
    """An agent as agents.make takes it: ppo, reinforce, sb3:PPO, package.module:Class. One without a
    field beta is trained on the plain reward, beta 0."""
    beta: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    """Weights of the KL to the reference policy."""
    samples: tuple[int, ...] = (64, 256)
    """Answers sampled in each round."""
    rounds: int = 300
    """Rounds: each is one rollout and one update."""
    epochs: int = 4
    """Passes over the answers of a round."""
    learning_rate: float | None = None
    """Step size, constant. By default 0.03 for our agents, whose policy is a table here, 0.001 for
    SB3's, whose policy is a network, and a custom class's own."""
    clip: float = 0.05
    """Clip range of the probability ratio."""
    runs: int = 10
    """Independent runs of each row."""
    seed: int = 0
    """Seed of the first run; the following ones count up. The defaults were chosen on seeds 100 to
    115."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/answer_pool_ppo")
    """Folder for the runs, tables and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Three runs of 64 answers a round only, in results/answer_pool_ppo_quick."""


QUICK: dict[str, Any] = {
    "samples": (64,),
    "runs": 3,
    "out": Path("results/answer_pool_ppo_quick"),
}

# The largest median KL(policy || optimum) that a faithful PPO may show, by (beta, samples).
TARGETS = {(1.0, 64): 0.02, (0.3, 64): 0.03, (0.3, 256): 0.01}
TARGET_P_BEST = 0.99


@dataclass(frozen=True)
class Row:
    """The runs of one beta and number of samples; measures are medians over runs."""

    agent: str
    samples: int
    beta: float
    runs: int
    proxy: Estimate
    gold: Estimate
    kl_ref: Estimate
    kl_opt: Estimate
    p_max: Estimate
    p_best: Estimate


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("rounds", "epochs", "runs", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    if not args.beta or min(args.beta) < 0 or not np.isfinite(args.beta).all():
        raise ValueError(f"--beta {args.beta} is not allowed: one or more finite numbers >= 0")
    if not args.samples or min(args.samples) < 2:
        raise ValueError(f"--samples {args.samples} is not allowed: one or more numbers >= 2")
    if not args.clip > 0:
        raise ValueError(f"--clip is {args.clip}, must be above 0")


def agent_config(args: Args, beta: float, samples: int) -> dict[str, Any]:
    """The settings of this benchmark, as far as the agent has such fields.

    They were chosen for our agents and SB3's: a custom class runs on its own, but for beta and for a
    learning rate that was asked for.
    """
    # A step in a table moves one answer, a step in a network's weights moves all of them.
    rate = 0.03 if ":" not in args.agent else 0.001
    settings: dict[str, Any] = {
        "n_steps": 1,
        "batch_size": samples,
        "n_epochs": args.epochs,
        "learning_rate": rate,
        "clip_range": args.clip,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "normalize_advantage": True,
        "baseline": "batch_mean",
        "ent_coef": 0.0,
    }
    if is_foreign(args.agent):
        settings = {}
    settings["beta"] = beta
    if args.learning_rate is not None:
        settings["learning_rate"] = args.learning_rate
    fields = agents.config_fields(args.agent)
    return {name: value for name, value in settings.items() if name in fields}


def make_jobs(args: Args) -> list[Job]:
    """One job for each number of samples, beta and seed."""
    foreign = is_foreign(args.agent)
    betas = args.beta if "beta" in agents.config_fields(args.agent) else (0.0,)
    return [
        Job(
            f"{args.agent.replace(':', '-')}_samples-{samples}_beta-{beta:g}/seed-{seed}",
            {
                "agent": args.agent,
                "samples": samples,
                "beta": beta,
                "rounds": args.rounds,
                "n_envs": 1 if foreign else samples,
                "seed": seed,
                "agent_config": agent_config(args, beta, samples),
            },
        )
        for samples in args.samples
        for beta in betas
        for seed in range(args.seed, args.seed + args.runs)
    ]


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one agent and measure its final policy exactly. For ``common.runner.run_jobs``."""
    pool = AnswerPool.default()
    if config["n_envs"] == 1:
        env: Any = make_env("AnswerPool-v0", 1, EpisodeLog(), seed=config["seed"])
    else:
        env = gym.make_vec("AnswerPool-v0", num_envs=config["n_envs"])
    agent = agents.make(config["agent"], env, seed=config["seed"], **config["agent_config"])
    agent.learn(config["rounds"] * config["samples"])
    policy = agents.action_probabilities(agent, np.arange(pool.n_prompts), pool.n_answers)
    env.close()
    return measure(pool, policy, config["beta"])


def measure(pool: AnswerPool, policy: np.ndarray, beta: float) -> dict[str, float | None]:
    """What the table shows of a policy [P, A]; the distance to the optimum is None at beta 0."""
    best = pool.proxy.argmax(axis=1)[:, None]
    return {
        "proxy": pool.expected(policy, "proxy"),
        "gold": pool.expected(policy, "gold"),
        "kl_ref": pool.kl(policy, pool.ref_probs),
        "kl_opt": pool.kl(policy, pool.optimal_policy(beta)) if beta > 0 else None,
        "p_max": float(policy.max(axis=1).mean()),
        "p_best": float(np.take_along_axis(policy, best, axis=1).mean()),
    }


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Medians with bootstrap intervals over the runs that succeeded, a row per setting."""
    groups: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            config = outcome.job.config
            key = (config["agent"], config["samples"], config["beta"])
            groups.setdefault(key, []).append(outcome.result)
    return [
        Row(*key, len(runs), *(estimate([r[m] for r in runs], np.median) for m in MEASURES))
        for key, runs in groups.items()
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each target that these rows can be held against."""
    lines = []
    for row in rows:
        limit, kl = TARGETS.get((row.beta, row.samples)), row.kl_opt.value
        if limit is not None and kl is not None:
            met = "met" if kl <= limit else "MISSED"
            lines.append(
                f"beta {row.beta:g}, {row.samples} answers a round: median KL(policy || optimum) "
                f"{kl:.4f}, target {limit:g} or less: {met}"
            )
        if row.beta == 0 and row.p_best.value is not None:
            met = "met" if row.p_best.value >= TARGET_P_BEST else "MISSED"
            lines.append(
                f"beta 0, {row.samples} answers a round: median probability of the proxy-best answer "
                f"{row.p_best.value:.4f}, target {TARGET_P_BEST} or more: {met}"
            )
    gold = {(row.samples, row.beta): row.gold.value for row in rows}
    for samples in sorted({row.samples for row in rows}):
        free, held = gold.get((samples, 0.0)), gold.get((samples, 0.3))
        if free is not None and held is not None:
            met = "yes" if free < held else "NO"
            lines.append(
                f"{samples} answers a round: E[gold] at beta 0 below that at beta 0.3 "
                f"({free:.2f} against {held:.2f}): {met}"
            )
    return lines


def print_rows(console: Console, args: Args, rows: Sequence[Row]) -> None:
    """The table of the trained policies beside the exact optimum."""
    pool = AnswerPool.default()
    table = []
    for row in rows:
        exact = measure(pool, pool.optimal_policy(row.beta), row.beta)
        shown = [("proxy", 3), ("gold", 3), ("kl_ref", 3), ("p_max", 4)]
        kl_exact = "0" if row.beta > 0 else "-"
        table.append(
            [f"{row.beta:g}", str(row.samples), str(row.runs)]
            + [number(getattr(row, name).value, digits) for name, digits in shown]
            + [interval(row.kl_opt, 4)]
        )
        table.append(
            ["  optimum", "", ""] + [number(exact[name], digits) for name, digits in shown] + [kl_exact]
        )
    print_table(
        console,
        f"{args.agent} on AnswerPool-v0, {args.rounds} rounds",
        ["beta", "answers", "runs", "E[proxy]", "E[gold]", "KL to ref.", "largest p", "KL to optimum"],
        table,
        caption="answers: sampled a round. Medians over the runs, of the last policy, with the 95% "
        "bootstrap interval for the distance to the optimum; KL in nats",
    )


def frontier_figure(args: Args, outcomes: Sequence[Outcome], path: Path) -> Path:
    """Reward against KL to the reference: the exact curve, and where each run ended."""
    pool = AnswerPool.default()
    curve = pool.frontier(np.geomspace(0.02, 30.0, 300))
    ends: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            key = (outcome.job.config["beta"], outcome.job.config["samples"])
            ends.setdefault(key, []).append(outcome.result)
    betas, samples = sorted({beta for beta, _ in ends}), sorted({n for _, n in ends})
    figure, axes = new_figure(1, 2, width=5.6, height=4.4)
    for panel, reward in zip(axes[0], ("proxy", "gold"), strict=True):
        panel.plot(curve.kl, getattr(curve, reward), color="black", zorder=1, label="exact optimum")
        for (beta, n), runs in sorted(ends.items()):
            x, y = [r["kl_ref"] for r in runs], [r[reward] for r in runs]
            style = {
                "color": PALETTE[betas.index(beta) % len(PALETTE)],
                "marker": MARKERS[samples.index(n) % len(MARKERS)],
            }
            panel.scatter(x, y, s=18, alpha=0.3, linewidths=0, **style)
            label = f"beta {beta:g}, {n} answers a round"
            median = ([np.median(x)], [np.median(y)])
            panel.scatter(*median, s=60, edgecolors="black", linewidths=0.8, zorder=3, label=label, **style)
        panel.set_xlabel("KL(policy || reference), nats")
        panel.set_ylabel(f"E[{reward}]")
    axes[0, 0].set_title("the reward that is trained on")
    axes[0, 1].set_title("the reward that is meant")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(
        f"{args.agent} on AnswerPool-v0: last policy of {max(map(len, ends.values()))} runs a setting "
        "(faint), and their median"
    )
    return save_figure(figure, path)


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
        jobs = make_jobs(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    if "beta" not in agents.config_fields(args.agent):
        console.print(f"{args.agent} has no field beta: it is trained on the plain reward, beta 0")
    try:
        outcomes = run_jobs(train, jobs, args.out, args.workers, console=console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130

    rows = make_rows(outcomes)
    if rows:
        print_rows(console, args, rows)
        lines = verdicts(rows)
        for line in lines:
            console.print(line, markup=False, highlight=False)
        figure = frontier_figure(args, outcomes, args.out / "frontier.png")
        runs = [o.job.config | o.result for o in outcomes if o.result is not None]
        write_json(
            args.out / "summary.json",
            {"args": args, "rows": rows, "targets": lines, "runs": runs, "figure": figure},
        )
        write_csv(args.out / "summary.csv", [vars(row) for row in rows])
        for path in (figure, args.out / "summary.json", args.out / "summary.csv"):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
