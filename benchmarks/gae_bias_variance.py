"""Which lambda is best for GAE? Bias and variance of the lambda-return, against exact values.

    python benchmarks/gae_bias_variance.py
    python benchmarks/gae_bias_variance.py --quick

Trajectories of 100 steps whose rewards are noisy, and a critic that is wrong by an error that belongs to
the state. A small lambda believes the critic (bias), a large one the rewards (variance). The lambda-return
is `agents.advantages.gae` plus the value that it was measured against; `common.lambda_return` derives its
squared bias and variance, measures them apart, and gives the lambda with the smallest sum.

Measured with the defaults: every squared bias and variance is within 1.2% of its formula, 1.6 standard
errors. At a value error ten times the reward noise the best lambda is 0.905 (measured 0.904 [0.901, 0.906]);
it rises from 0.09 for a critic three times better than the rewards to 0.995 for one a hundred times worse.

Under --out it leaves `summary.json` and `gae_bias_variance.png`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from matplotlib.axes import Axes
from rich.console import Console

from common.compare import MARGIN, Comparison, compare
from common.files import write_json
from common.lambda_return import (
    analytic_squared_bias,
    analytic_variance,
    best_lambda,
    best_lambda_endless,
    search_grid,
    simulate,
)
from common.plots import PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import versions
from common.tables import make_console, print_table

TOLERANCE = 0.05  # relative deviation that the full run may show
RESAMPLES = 500  # for the interval of the best lambda


@dataclass(frozen=True)
class Args:
    """Squared bias and variance of GAE's lambda-return over lambda, measured and exact."""

    lambdas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
    """Values of lambda."""
    steps: int = 100
    """Steps of a trajectory."""
    reward_noise: float = 0.3
    """Standard deviation of the reward of a step."""
    value_error: float = 3.0
    """Standard deviation of the critic's error in a state."""
    value_errors: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    """Value errors for which the best lambda is looked for."""
    pairs: int = 40_000
    """Pairs of trajectories behind every bias and variance."""
    search_pairs: int = 5_000
    """Pairs of trajectories behind every best lambda."""
    seed: int = 0
    """Seed of the noise and of the critics' errors."""
    out: Path = Path("results/gae_bias_variance")
    """Folder for the summary and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """4,000 pairs, 1,000 for every best lambda, in results/gae_bias_variance_quick."""


QUICK: dict[str, Any] = {
    "pairs": 4_000,
    "search_pairs": 1_000,
    "out": Path("results/gae_bias_variance_quick"),
}


@dataclass(frozen=True)
class Point:
    """One lambda: squared bias and variance beside their analytic values."""

    gae_lambda: float
    squared_bias: Comparison
    variance: Comparison


@dataclass(frozen=True)
class Best:
    """The best lambda at one value error: by the formulas, and measured with its 95% interval."""

    value_error: float
    analytic: float
    measured: float
    low: float
    high: float
    squared_error_analytic: float
    squared_error_measured: float


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("steps", "pairs", "search_pairs"):
        if getattr(args, name) < 2:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 2")
    for name in ("reward_noise", "value_error"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be above 0")
    if not args.lambdas or min(args.lambdas) < 0 or max(args.lambdas) > 1:
        raise ValueError(f"--lambdas {args.lambdas} is not allowed: one or more numbers in [0, 1]")
    if not args.value_errors or not min(args.value_errors) > 0:
        raise ValueError(f"--value-errors {args.value_errors} is not allowed: one or more numbers above 0")


def measure(args: Args) -> list[Point]:
    """Squared bias and variance at each lambda."""
    rng = np.random.default_rng([args.seed, 0])
    bias, noise = simulate(
        np.array(args.lambdas), args.pairs, args.steps, args.reward_noise, args.value_error, rng
    )
    return [
        Point(
            lam,
            compare(float(analytic_squared_bias(lam, args.value_error, args.steps)), bias[i] ** 2),
            compare(float(analytic_variance(lam, args.reward_noise, args.steps)), noise[i] ** 2),
        )
        for i, lam in enumerate(args.lambdas)
    ]


def find_best(args: Args, value_error: float, rng: np.random.Generator) -> Best:
    """The best lambda at one value error on fresh trajectories, with a bootstrap interval over pairs."""
    seed = int(rng.integers(2**32))

    def squared_errors(grid: np.ndarray) -> np.ndarray:
        """On the same trajectories for every grid: ``[len(grid), pairs]``."""
        bias, noise = simulate(
            grid, args.search_pairs, args.steps, args.reward_noise, value_error, np.random.default_rng(seed)
        )
        return bias**2 + noise**2

    coarse = search_grid(31)
    around = int(squared_errors(coarse).mean(axis=1).argmin())
    grid = np.linspace(coarse[max(around - 2, 0)], coarse[min(around + 2, len(coarse) - 1)], 41)
    squares = squared_errors(grid)
    means = squares.mean(axis=1)
    weights = rng.multinomial(args.search_pairs, np.full(args.search_pairs, 1 / args.search_pairs), RESAMPLES)
    low, high = np.quantile(grid[(weights @ squares.T).argmin(axis=1)], [0.025, 0.975])
    best = best_lambda(value_error, args.reward_noise, args.steps)
    smallest = analytic_squared_bias(best, value_error, args.steps) + analytic_variance(
        best, args.reward_noise, args.steps
    )
    return Best(
        value_error, best, float(grid[means.argmin()]), float(low), float(high), float(smallest),
        float(means.min()),
    )  # fmt: skip


def relative_deviations(points: list[Point]) -> list[float]:
    """|measured / analytic - 1| of every squared bias and variance whose analytic value is not 0."""
    both = [c for point in points for c in (point.squared_bias, point.variance)]
    return [abs(c.measured / c.analytic - 1) for c in both if c.analytic > 0]


def verdicts(points: list[Point], bests: list[Best]) -> list[str]:
    """What the numbers say, one sentence a line."""
    both = [c for point in points for c in (point.squared_bias, point.variance)]
    worst, largest = max(abs(c.z) for c in both), max(relative_deviations(points))
    inside = sum(b.low <= b.analytic <= b.high for b in bests)
    return [
        f"Within {TOLERANCE:.0%} of the formulas: {'yes' if largest <= TOLERANCE else 'NO'}, at most "
        f"{largest:.1%} off.",
        f"Within {MARGIN:g} standard errors: {'yes' if worst <= MARGIN else 'NO'}, at most {worst:.1f}.",
        f"Best lambda: the formulas' lies within the measured 95% interval at {inside} of {len(bests)} "
        "value errors.",
    ]


def draw_parts(axes: Axes, args: Args, points: list[Point]) -> None:
    """Squared bias, variance and their sum over lambda."""
    grid = search_grid(400)
    bias = analytic_squared_bias(grid, args.value_error, args.steps)
    variance = analytic_variance(grid, args.reward_noise, args.steps)
    lambdas = [p.gae_lambda for p in points]
    measured = {
        "squared bias": (bias, [p.squared_bias.measured for p in points]),
        "variance": (variance, [p.variance.measured for p in points]),
        "sum": (bias + variance, [p.squared_bias.measured + p.variance.measured for p in points]),
    }
    for (name, (line, dots)), colour, marker in zip(measured.items(), PALETTE, "os^", strict=False):
        axes.plot(grid, line, color=colour, alpha=0.6)
        axes.plot(lambdas, dots, marker, color=colour, label=name, markersize=5)
    best = best_lambda(args.value_error, args.reward_noise, args.steps)
    axes.axvline(best, color="black", linewidth=1, linestyle=":")
    axes.annotate(f"best: {best:.3f}", (best, 1), xycoords=("data", "axes fraction"), xytext=(-4, -10),
                  textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    axes.set_xlabel("lambda")
    axes.set_ylabel("squared error of the lambda-return")
    axes.set_title(f"Critic wrong by {args.value_error:g}, rewards noisy by {args.reward_noise:g}")
    axes.legend(loc=(0.33, 0.62), title="dots measured, lines exact")


def draw_best(axes: Axes, args: Args, bests: list[Best]) -> None:
    """The best lambda over the value error."""
    errors = np.geomspace(min(args.value_errors) / 1.5, max(args.value_errors) * 1.5, 200)
    finite = [best_lambda(e, args.reward_noise, args.steps) for e in errors]
    endless = [best_lambda_endless(e, args.reward_noise) for e in errors]
    axes.plot(errors, endless, color="black", linestyle=":", label="exact, T without end")
    axes.plot(errors, finite, color=PALETTE[0], alpha=0.6, label=f"exact, T = {args.steps}")
    axes.errorbar(
        [b.value_error for b in bests], [b.measured for b in bests],
        yerr=np.array([(b.measured - b.low, b.high - b.measured) for b in bests]).clip(0).T,
        fmt="o", color=PALETTE[0], capsize=4, label="measured, 95% interval",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("deviation of the critic's error")
    axes.set_ylabel("best lambda")
    axes.set_ylim(0, 1.05)
    axes.set_title("The worse the critic, the longer the return")
    axes.legend(loc="lower right")


def show(console: Console, args: Args, points: list[Point], bests: list[Best]) -> None:
    """Print the tables and the verdicts, draw the figure and write the files."""
    print_table(
        console,
        f"{args.steps} steps, reward noise {args.reward_noise:g}, value error {args.value_error:g}, "
        f"{args.pairs:,} pairs of trajectories",
        ("lambda", "squared bias", "analytic", "off by (SE)", "variance", "analytic", "off by (SE)"),
        [
            (f"{p.gae_lambda:g}",
             *(text for c in (p.squared_bias, p.variance)
               for text in (f"{c.measured:.4f}", f"{c.analytic:.4f}", f"{c.z:+.1f}")))
            for p in points
        ],
        "SE: standard errors of the measurement",
    )  # fmt: skip
    print_table(
        console,
        "Best lambda",
        ("value error", "measured", "95% interval", "analytic", "squared error", "analytic"),
        [
            (f"{b.value_error:g}", f"{b.measured:.3f}", f"[{b.low:.3f}, {b.high:.3f}]", f"{b.analytic:.3f}",
             f"{b.squared_error_measured:.3f}", f"{b.squared_error_analytic:.3f}")
            for b in bests
        ],
    )  # fmt: skip
    lines = verdicts(points, bests)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    figure, axes = new_figure(1, 2, width=5.6, height=4.0)
    draw_parts(axes[0, 0], args, points)
    draw_best(axes[0, 1], args, bests)
    path = save_figure(figure, args.out / "gae_bias_variance.png")
    summary = {
        "args": args, "versions": versions(), "verdicts": lines,
        "largest_relative_deviation": max(relative_deviations(points)), "points": points,
        "best_lambda": bests,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for written in (path, args.out / "summary.json"):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Measure, report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    torch.set_num_threads(1)
    with console.status("measuring"):
        points = measure(args)
        rng = np.random.default_rng([args.seed, 1])
        bests = [find_best(args, error, rng) for error in args.value_errors]
    show(console, args, points, bests)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
