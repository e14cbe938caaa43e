"""What does a baseline do to the policy gradient? Bias and variance of five, against exact values.

    python benchmarks/policy_gradient_variance.py
    python benchmarks/policy_gradient_variance.py --quick

A softmax policy over K actions with fixed rewards; the gradient of its expected reward J in the logits is
`g_k = pi_k (r_k - J)`. An estimate samples n actions and is the gradient of `policy_gradient_loss`, with one
of five baselines: none, the exact J, the mean of all n rewards (the sample's own among them), the mean of
the n - 1 others, the reward of the likeliest action. `common.bandit` derives mean and variance of each.

Measured with the defaults: all are unbiased but for the batch mean, which multiplies the gradient by
1 - 1/n = 0.9375 and owes its low variance to that alone (it is leave-one-out's estimate times 0.9375).
Leave-one-out costs 8% more variance than knowing J, no baseline 4.1 times and the greedy reward 2.1 times.

Everything is done once more with a constant added to all rewards, on the same actions. That changes
neither g nor an estimate with a baseline, but the variance without one.

Under --out it leaves `summary.json` and `policy_gradient_variance.png`.
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

from common.bandit import (
    BASELINES,
    Bandit,
    analytic_mean,
    analytic_variance,
    estimate_gradients,
    make_bandit,
)
from common.compare import MARGIN, Comparison, compare
from common.files import write_json
from common.plots import PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import versions
from common.tables import make_console, print_table


@dataclass(frozen=True)
class Args:
    """Bias and variance of policy-gradient estimates with five baselines, against exact values."""

    actions: int = 10
    """Actions of the policy; logits are standard normal, rewards uniform in [0, 1]."""
    samples: int = 16
    """Sampled actions in an estimate."""
    repetitions: int = 20_000
    """Independent estimates."""
    shift: float = 10.0
    """What is added to all rewards in the second round."""
    seed: int = 0
    """Seed of the policy, the rewards and the sampling."""
    out: Path = Path("results/policy_gradient_variance")
    """Folder for the summary and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """2,000 repetitions, in results/policy_gradient_variance_quick."""


QUICK: dict[str, Any] = {"repetitions": 2_000, "out": Path("results/policy_gradient_variance_quick")}


@dataclass(frozen=True)
class Result:
    """Estimates with one baseline beside their analytic values.

    gradient[k] compares the mean of component k with the exact gradient; bias_z is the largest |z| among
    them. length is the mean of the component along the exact gradient in units of its norm (1: unbiased),
    and length_bias_z its distance from 1. variance is the sum over components (the trace of the
    covariance), component_variance its parts.
    """

    baseline: str
    shift: float
    gradient: list[Comparison]
    bias_z: float
    length: Comparison
    length_bias_z: float
    variance: Comparison
    component_variance: list[Comparison]


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, least in (("actions", 2), ("samples", 2), ("repetitions", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least {least}")
    if not np.isfinite(args.shift):
        raise ValueError(f"--shift is {args.shift}, must be finite")


def measure(baseline: str, bandit: Bandit, shift: float, actions: np.ndarray) -> Result:
    """Estimate on the sampled actions ``[R, n]`` and compare with the analytic values."""
    n, gradient = actions.shape[1], bandit.gradient
    estimates = estimate_gradients(baseline, bandit, actions)
    components = [compare(g, x) for g, x in zip(gradient, estimates.T, strict=True)]
    along = estimates @ gradient / (gradient @ gradient)
    expected_length = float(analytic_mean(baseline, bandit, n) @ gradient / (gradient @ gradient))
    # R/(R-1): the mean of these squares is then the unbiased sample variance.
    squares = (estimates - estimates.mean(axis=0)) ** 2 * len(estimates) / (len(estimates) - 1)
    variance = analytic_variance(baseline, bandit, n)
    return Result(
        baseline=baseline,
        shift=shift,
        gradient=components,
        bias_z=max(abs(c.z) for c in components),
        length=compare(expected_length, along),
        length_bias_z=compare(1.0, along).z,
        variance=compare(float(variance.sum()), squares.sum(axis=1)),
        component_variance=[compare(v, x) for v, x in zip(variance, squares.T, strict=True)],
    )


def run(args: Args) -> tuple[Bandit, list[Result]]:
    """All baselines without and with the shift, on the same sampled actions."""
    rng = np.random.default_rng(args.seed)
    bandit = make_bandit(args.actions, rng)
    size = (args.repetitions, args.samples)
    actions = rng.choice(args.actions, size=size, p=bandit.probabilities)
    shifts = (0.0, args.shift)
    return bandit, [measure(b, bandit.shifted(s), s, actions) for s in shifts for b in BASELINES]


def growth(results: list[Result]) -> list[dict[str, Any]]:
    """How the shift multiplies the variance of each baseline, analytic and measured."""
    half = len(results) // 2
    return [
        {
            "baseline": before.baseline,
            "analytic": after.variance.analytic / before.variance.analytic,
            "measured": after.variance.measured / before.variance.measured,
        }
        for before, after in zip(results[:half], results[half:], strict=True)
    ]


def verdicts(results: list[Result], samples: int) -> list[str]:
    """What the numbers say, one sentence a line."""
    plain = results[: len(results) // 2]
    unbiased = [r for r in results if r.baseline != "batch mean"]
    worst = max(r.bias_z for r in unbiased)
    biased = next(r for r in plain if r.baseline == "batch mean")
    variance = max(abs(r.variance.z) for r in results)
    grown = {row["baseline"]: row for row in growth(results)}
    others = max(abs(row["measured"] - 1) for name, row in grown.items() if name != "none")
    return [
        f"Unbiased but for the batch mean: {'yes' if worst <= MARGIN else 'NO'}, the largest bias of a "
        f"component is {worst:.1f} standard errors.",
        f"The batch mean shortens the gradient to {biased.length.measured:.4f}, 1 - 1/{samples} = "
        f"{biased.length.analytic:.4f}: {abs(biased.length_bias_z):.1f} standard errors below 1.",
        f"Variances as computed: {'yes' if variance <= MARGIN else 'NO'}, at most {variance:.1f} standard "
        "errors off.",
        f"The shift multiplies the variance without a baseline by {grown['none']['measured']:.0f} "
        f"(analytic {grown['none']['analytic']:.0f}); with one it changes by {others:.0e} of itself.",
    ]


def draw(axes: np.ndarray, results: list[Result], shift: float) -> None:
    """Bias by component, length along the gradient, and variance; axes ``[3]``."""
    plain, moved = results[: len(results) // 2], results[len(results) // 2 :]
    rows = np.arange(len(plain))
    names = ["greedy\n(ReMax)" if r.baseline == "greedy" else r.baseline for r in plain]
    draw_bias(axes[0], plain)
    for y, result in zip(rows, plain, strict=True):
        length = result.length
        axes[1].errorbar(length.measured, y, xerr=MARGIN * length.standard_error, fmt="o", capsize=4,
                         color=PALETTE[0])  # fmt: skip
        axes[1].plot(length.analytic, y, "|", color=PALETTE[1], markersize=26, markeredgewidth=2)
        if result.baseline == "batch mean":
            axes[1].annotate(f"1 - 1/n = {length.analytic:.4f}", (length.analytic, y), xytext=(0, 17),
                             textcoords="offset points", color=PALETTE[1], fontsize=9)  # fmt: skip
    axes[1].axvline(1.0, color="black", linewidth=1)
    axes[1].set_xlabel("mean length along the exact gradient\n(4 standard errors; 1: unbiased)")
    axes[1].set_title("The batch mean shrinks the step")
    for group, label, colour in ((plain, "rewards in [0, 1]", PALETTE[0]),
                                 (moved, f"rewards shifted by {shift:g}", PALETTE[2])):  # fmt: skip
        offset = 0.18 * (1 if group is moved else -1)
        measured = [r.variance.measured for r in group]
        axes[2].plot(measured, rows + offset, "o", color=colour, label=f"measured, {label}")
        axes[2].plot([r.variance.analytic for r in group], rows + offset, "|", color=PALETTE[1],
                     markersize=16, markeredgewidth=2, linestyle="none",
                     label="analytic" if group is moved else None)  # fmt: skip
        for x, y in zip(measured, rows + offset, strict=True):
            axes[2].annotate(f"{x:.3g}", (x, y), xytext=(9, 0), textcoords="offset points", va="center",
                             fontsize=8)  # fmt: skip
    axes[2].set_xscale("log")
    axes[2].set_xlabel("variance of an estimate, summed over components")
    axes[2].margins(x=0.15)
    axes[2].set_title("Without a baseline a shift is noise")
    axes[2].legend(fontsize=8)
    for panel in axes:
        panel.set_yticks(rows, names)
        panel.set_ylim(len(plain) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")


def draw_bias(axes: Axes, results: list[Result]) -> None:
    """The bias of every component in standard errors."""
    axes.axvspan(-MARGIN, MARGIN, color="black", alpha=0.07, linewidth=0)
    axes.axvline(0.0, color="black", linewidth=1)
    for y, result in enumerate(results):
        z = np.array([c.z for c in result.gradient])
        axes.plot(z, np.full(len(z), y), "o", color=PALETTE[0], alpha=0.6)
    axes.set_xlabel("bias of each component in standard errors\n(shaded: within 4)")
    axes.set_title("Is the estimate right on average?")


def show(console: Console, args: Args, bandit: Bandit, results: list[Result]) -> None:
    """Print the table and the verdicts, draw the figure and write the files."""
    grown = {row["baseline"]: row for row in growth(results)}
    rows = []
    for result in results:
        factor = f"x {grown[result.baseline]['measured']:.4g}" if result.shift else ""
        rows.append(
            (
                result.baseline, f"{result.shift:g}", f"{result.bias_z:.1f}",
                f"{result.length.measured:.4f}", f"{result.length.analytic:.4f}",
                f"{result.variance.measured:.5f}", f"{result.variance.analytic:.5f}",
                f"{result.variance.z:+.1f}", factor,
            )
        )  # fmt: skip
    print_table(
        console,
        f"{args.samples} samples an estimate, {args.repetitions:,} estimates",
        ("baseline", "shift", "bias (SE)", "length", "analytic", "variance", "analytic", "off by (SE)",
         "growth"),
        rows,
        "SE: standard errors of the measurement; bias: the largest of a component; length: of the mean\n"
        "along the exact gradient, 1 if unbiased",
    )  # fmt: skip
    lines = verdicts(results, args.samples)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    figure, axes = new_figure(1, 3, width=5.0, height=3.9)
    draw(axes[0], results, args.shift)
    path = save_figure(figure, args.out / "policy_gradient_variance.png")
    summary = {
        "args": args, "versions": versions(), "probabilities": bandit.probabilities,
        "rewards": bandit.rewards, "exact_gradient": bandit.gradient, "verdicts": lines,
        "growth": growth(results), "results": results,
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
    show(console, args, *run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
