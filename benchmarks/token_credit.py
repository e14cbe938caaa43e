"""What do process rewards buy? PPO paid with every token beside PPO paid at the end of the response.

    python benchmarks/token_credit.py
    python benchmarks/token_credit.py --quick
    python benchmarks/token_credit.py --beta 0.3 --gae-lambda 1.0

The default task of TokenGeneration-v0 pays for patterns of letters. With reward_at="token" each token is
paid what it adds to the total, with "end" the last token is paid all of it. The total of a response is the
same, so both have the same objective and the same exact optimum; only the credit comes sooner. A GPT with
random weights is trained by PPO with everything else equal: samples, seeds and settings, for each lambda of
GAE. In the limit of a perfect critic there would be nothing to buy.

Measured with the defaults (four CPU minutes): at lambda 0.95 a reward for each token ends at an objective of
1.84 [1.49, 2.20], one at the end at 1.06 [1.04, 1.09]; at lambda 1 it is 2.05 [1.41, 2.67] and 1.13 [1.09,
1.16]. The gain is there at both lambdas, so it is not only what a lambda below 1 forgets. With each token,
the same two of the five seeds end near what "end" reaches (1.2 to 1.3), the others at 2.2 to 2.8. All are
far from the optimum, 4.65.

The curve is J = reward - beta KL(policy || reference) of each rollout, before it is learned from. The
distance to the optimum is exact in it: KL(policy || optimum) = (J* - J) / beta.

The command continues a comparison that was stopped. Under --out it leaves `summary.json` and
`token_credit.png`.
"""

from __future__ import annotations

import itertools
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
from common.files import write_json
from common.plots import draw_curves, new_figure, save_figure
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs, versions
from common.stats import Estimate, estimate
from common.tables import interval, make_console, number, print_table
from llmgym.syllable_task import syllable_task
from llmgym.token_solution import TokenSolution

REWARD_AT = ("token", "end")
LAST = 0.1  # share of the rollouts, at the end, whose mean is a run's result
SMOOTHED = 10  # rollouts in the moving mean of a curve


@dataclass(frozen=True)
class Args:
    """Credit assignment: rewards with every token against a reward at the end, at equal samples."""

    beta: float = 0.1
    """Weight of the KL to the reference."""
    gae_lambda: tuple[float, ...] = (0.95, 1.0)
    """Lambdas of generalised advantage estimation, each with both rewards."""
    steps: int = 60_000
    """Tokens that a run samples."""
    runs: int = 5
    """Seeds of each arm."""
    seed: int = 0
    """The first seed; the others count up from it."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/token_credit")
    """Folder for the runs, the summary and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """15,000 tokens, two seeds and lambda 0.95 only, in results/token_credit_quick."""


QUICK: dict[str, Any] = {
    "steps": 15_000, "runs": 2, "gae_lambda": (0.95,), "out": Path("results/token_credit_quick")
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One arm: means over its runs, of the last tenth of their rollouts.

    objective: J. kl_opt: distance to the optimum in nats. crossed: tokens until the objective is the
    reference's own, 0.24 (a random policy begins far below); None where a run never came so far.
    """

    reward_at: str
    gae_lambda: float
    runs: int
    reward: Estimate
    kl: Estimate
    objective: Estimate
    kl_opt: Estimate
    crossed: Estimate


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("steps", "runs", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    if not args.beta > 0:
        raise ValueError(f"--beta is {args.beta}, must be above 0: at 0 there is no distance to the optimum")
    if not args.gae_lambda or not all(0 <= value <= 1 for value in args.gae_lambda):
        raise ValueError(f"--gae-lambda is {args.gae_lambda}: one or more values from 0 to 1")


def make_jobs(args: Args) -> list[Job]:
    """A run for each lambda, reward and seed."""
    return [
        Job(
            f"{reward_at}_lambda-{gae_lambda:g}/seed-{seed}",
            {"reward_at": reward_at, "gae_lambda": gae_lambda, "beta": args.beta, "steps": args.steps,
             "seed": seed},
        )
        for gae_lambda, reward_at in itertools.product(args.gae_lambda, REWARD_AT)
        for seed in range(args.seed, args.seed + args.runs)
    ]  # fmt: skip


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run: tokens sampled before each rollout, and its mean reward and KL. For ``run_jobs``."""
    task = syllable_task(reward_at=config["reward_at"])
    env = gym.make_vec("TokenGeneration-v0", num_envs=64, task=task, autoreset_mode="disabled")
    agent = agents.make(
        "ppo", env, seed=config["seed"], batch_size=32, n_epochs=4, learning_rate=1e-3, gamma=1.0,
        gae_lambda=config["gae_lambda"], beta=config["beta"],
    )  # fmt: skip
    curve: dict[str, list[float]] = {"tokens": [], "reward": [], "kl": []}
    while agent.num_timesteps < config["steps"]:
        rollout = agent.collect()
        episodes = rollout.episodes
        curve["tokens"].append(agent.num_timesteps)
        curve["reward"].append(float(episodes.returns.mean()))
        log_ratios = rollout.flat(rollout.log_probs - rollout.ref_log_probs)
        curve["kl"].append(float(log_ratios.sum()) / len(episodes.returns))
        agent.num_timesteps += rollout.env_steps
        agent.update(rollout)
    env.close()
    return curve


def objective(curve: dict[str, list[float]], beta: float) -> np.ndarray:
    """J of each rollout, [R]."""
    return np.array(curve["reward"]) - beta * np.array(curve["kl"])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean of the last `SMOOTHED` values at each place, of fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - SMOOTHED, 0)
    return (sums[stop] - sums[start]) / (stop - start)


def crossing(curve: dict[str, list[float]], beta: float, level: float) -> float | None:
    """Tokens sampled until the smoothed objective is above the level; None: never."""
    above = np.flatnonzero(smoothed(objective(curve, beta)) > level)
    return curve["tokens"][above[0]] if len(above) else None


def make_rows(args: Args, outcomes: Sequence[Outcome], optimum: float, reference: float) -> list[Row]:
    """A row for each arm."""
    arms: dict[tuple[str, float], list[dict[str, list[float]]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            config = outcome.job.config
            arms.setdefault((config["reward_at"], config["gae_lambda"]), []).append(outcome.result)

    def last(values: Sequence[float] | np.ndarray) -> float:
        return float(np.mean(values[-max(1, round(LAST * len(values))) :]))

    rows = []
    for (reward_at, gae_lambda), curves in arms.items():
        final = [last(objective(curve, args.beta)) for curve in curves]
        crossed = [crossing(curve, args.beta, reference) for curve in curves]
        rows.append(
            Row(
                reward_at, gae_lambda, len(curves),
                reward=estimate([last(curve["reward"]) for curve in curves]),
                kl=estimate([last(curve["kl"]) for curve in curves]),
                objective=estimate(final),
                kl_opt=estimate([(optimum - j) / args.beta for j in final]),
                crossed=estimate(crossed if None not in crossed else []),
            )
        )  # fmt: skip
    return rows


def verdicts(args: Args, outcomes: Sequence[Outcome]) -> list[str]:
    """By how much the objective at the end is higher with a reward for each token, in pairs of a seed."""
    final = {
        (o.job.config["gae_lambda"], o.job.config["seed"], o.job.config["reward_at"]): objective(
            o.result, args.beta
        )
        for o in outcomes
        if o.result is not None
    }
    lines = []
    for gae_lambda in args.gae_lambda:
        pairs = [
            (final[gae_lambda, seed, "token"], final[gae_lambda, seed, "end"])
            for lam, seed, reward_at in final
            if lam == gae_lambda and reward_at == "token" and (lam, seed, "end") in final
        ]
        gains = [float(smoothed(token)[-1] - smoothed(end)[-1]) for token, end in pairs]
        means = [float(token.mean() - end.mean()) for token, end in pairs]
        lines.append(
            f"lambda {gae_lambda:g}: a reward for each token is worth {interval(estimate(gains), 2)} of the "
            f"objective at the end of training, {interval(estimate(means), 2)} on average over it "
            f"({len(pairs)} pairs of a seed)."
        )
    return lines


def draw(args: Args, outcomes: Sequence[Outcome], optimum: float, reference: float) -> Path:
    """The objective over training, a panel for each lambda."""
    figure, grid = new_figure(1, len(args.gae_lambda), width=5.2, sharey=True)
    for axes, gae_lambda in zip(grid[0], args.gae_lambda, strict=True):
        for index, reward_at in enumerate(REWARD_AT):
            curves = [
                o.result for o in outcomes
                if o.result is not None
                and (o.job.config["reward_at"], o.job.config["gae_lambda"]) == (reward_at, gae_lambda)
            ]  # fmt: skip
            lines = [(np.array(c["tokens"]), smoothed(objective(c, args.beta))) for c in curves]
            label = "with each token" if reward_at == "token" else "at the end"
            draw_curves(axes, lines, f"reward {label}", index)
        axes.axhline(reference, color="black", linestyle=":", linewidth=1.2, label="the reference itself")
        axes.set_title(f"GAE lambda {gae_lambda:g}")
        axes.set_xlabel("tokens sampled")
    grid[0, 0].set_ylabel(f"reward - {args.beta:g} KL to the reference")
    grid[0, 0].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"PPO from random weights, {args.runs} seeds (optimum {optimum:.2f})")
    return save_figure(figure, args.out / "token_credit.png")


def report(console: Console, args: Args, outcomes: Sequence[Outcome]) -> None:
    """Print the table and the verdicts, draw the figure and write the summary."""
    solution = TokenSolution(syllable_task())
    optimum = solution.optimal_objective(args.beta)
    reference = solution.objective(solution.reference_policy(), args.beta)
    rows = make_rows(args, outcomes, optimum, reference)
    print_table(
        console,
        f"PPO on the default token task, beta {args.beta:g}, {args.steps:,} tokens, {args.runs} seeds",
        ["paid", "lambda", "reward", "KL ref.", "objective", "KL to optimum", f"tokens to {reference:.2f}"],
        [
            [f"at {row.reward_at}", f"{row.gae_lambda:g}", interval(row.reward, 2), number(row.kl.value, 1),
             interval(row.objective, 2), interval(row.kl_opt, 1), interval(row.crossed, 0)]
            for row in rows
        ],
        caption=f"Mean [95% interval] over seeds, of the last {LAST:.0%} of the rollouts. Optimum: objective "
        f"{optimum:.2f}. Last column: tokens sampled until the objective is the reference's own.",
    )  # fmt: skip
    lines = verdicts(args, outcomes)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    figure = draw(args, outcomes, optimum, reference)
    summary = {
        "args": args, "versions": versions(), "verdicts": lines, "optimum": optimum, "reference": reference,
        "rows": rows, "figure": figure,
        "runs": [o.job.config | o.result for o in outcomes if o.result is not None],
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for path in (figure, args.out / "summary.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Run the comparison and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    try:
        outcomes = run_jobs(train, make_jobs(args), args.out, args.workers, console=console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    if any(outcome.result is not None for outcome in outcomes):
        report(console, args, outcomes)
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
