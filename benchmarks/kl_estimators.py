"""The KL estimators k1, k2 and k3: what each is worth as a number, as a gradient, and as a loss.

    python benchmarks/kl_estimators.py
    python benchmarks/kl_estimators.py --quick
    python benchmarks/kl_estimators.py --beta 0.3 --runs 10

Three questions, each with the exact answer beside the measured one:

1. As a *number*: bias and standard deviation relative to KL(q || p), for q = N(0, 1), p = N(mu, 1) and
   samples from q.
2. As a *gradient*: what the expected gradient of each is when it is differentiated as a loss, by a sum
   over all actions of a small categorical policy p with reference q. On-policy that of k1 is zero, of k2
   that of KL(p || q), of k3 that of KL(q || p). When the samples come from an older policy none of these
   holds; times the differentiated probability ratio (`agents.kl.bias_corrected`) k1 and k3 have the
   gradient of KL(p || q) wherever p is.
3. As a *loss*: where PPO on AnswerPool-v0 comes to rest, one update a rollout. With the KL in the reward
   or k2 in the loss it is the closed form `ref * exp(r / beta)`; with k3 it is `beta * ref / (lam - r)`,
   which puts far more on the best answers; with k1 there is nothing to hold the policy back.

Under --out it leaves `summary.json`, with analytic and measured values side by side, and
`kl_estimators.png`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from common.files import write_json
from common.kl_figure import draw
from common.kl_measure import (
    ARMS,
    FixedPoint,
    Gradient,
    Moments,
    divergence_gradients,
    measure_fixed_point,
    measure_gradients,
    measure_moments,
)
from common.quick import apply_quick
from common.tables import make_console, number, print_table


@dataclass(frozen=True)
class Args:
    """Bias, deviation, gradient and fixed point of the KL estimators against exact values."""

    mu: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Means of p = N(mu, 1); q = N(0, 1)."""
    samples: int = 1_000_000
    """Samples from q for each mu."""
    beta: float = 1.0
    """Weight of the KL in the training runs."""
    rounds: int = 600
    """Rollouts of a training run, with one update each."""
    answers: int = 256
    """Answers sampled in a rollout."""
    runs: int = 5
    """Independent training runs of each arm."""
    seed: int = 0
    """Of the samples, and of the first run; the following runs count up."""
    out: Path = Path("results/kl_estimators")
    """Folder for summary.json and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A tenth of the samples and two runs, in results/kl_estimators_quick."""


QUICK: dict[str, Any] = {"samples": 100_000, "runs": 2, "out": Path("results/kl_estimators_quick")}


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, least in (("samples", 2), ("rounds", 1), ("answers", 2), ("runs", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least {least}")
    # Beyond 2 the variance of k3 rests on samples that a million draws hardly ever contain.
    if not args.mu or any(not 0 < abs(mu) <= 2 for mu in args.mu):
        raise ValueError(f"--mu {args.mu} is not allowed: one or more numbers from -2 to 2, not 0")
    if not 0 < args.beta < np.inf:
        raise ValueError(f"--beta is {args.beta}, must be a finite number above 0")


def print_tables(
    console: Console, args: Args, moments: list[Moments], gradients: list[Gradient], points: list[FixedPoint]
) -> None:
    """One table for each of the three questions."""
    print_table(
        console,
        f"As a number: {args.samples:,} samples from q = N(0, 1), p = N(mu, 1)",
        ["estimator", "mu", "KL(q || p)", "bias / KL", "analytic", "std / KL", "analytic", "std. errors off"],
        [
            [m.estimator, f"{m.mu:g}", number(m.kl, 4)]
            + [number(x, 4) for x in (m.bias_measured, m.bias_analytic, m.std_measured, m.std_analytic)]
            + [number(m.errors_off, 1)]
            for m in moments
        ],
        caption="standard errors off: the larger distance of bias and deviation from the analytic value",
    )
    print_table(
        console,
        "As a gradient: expectation of an estimator of KL(p || q) that is differentiated as a loss",
        ["estimator", "samples from", "times the ratio", "is the gradient of", "off by", "from analytic"],
        [
            [
                g.estimator, "p itself" if g.samples == "on-policy" else "an older policy",
                {"none": "no", "differentiated": "yes", "fixed": "without its gradient"}[g.ratio],
                g.gradient_of, f"{100 * g.error:.0f}%", f"{np.abs(g.measured - g.analytic).max():.0e}",
            ]
            for g in gradients
        ],
        caption="off by: |g - g_KL| / |g_KL|, with g_KL the gradient of KL(p || q). From analytic: the "
        "largest difference of autograd from the closed form",
    )  # fmt: skip
    print_table(
        console,
        f"As a loss: PPO on AnswerPool-v0, beta {args.beta:g}, {args.rounds} updates of {args.answers}",
        ["penalty", "predicted end", "KL to optimum", "predicted", "KL to k3's end", "predicted", "p of best",
         "predicted"],
        [
            [
                x.arm, x.predicted, number(x.kl_opt.value, 4), number(x.kl_opt_predicted, 4),
                number(x.kl_k3.value, 4), number(x.kl_k3_predicted, 4), number(x.p_best.value, 4),
                number(x.p_best_predicted, 4),
            ]
            for x in points
        ],
        caption=f"medians over {args.runs} runs, of the last policy; KL(policy || ...) in nats",
    )  # fmt: skip


def verdicts(moments: list[Moments], gradients: list[Gradient], points: list[FixedPoint]) -> list[str]:
    """What the figures say, in a line each."""
    within = sum(m.errors_off <= 4 for m in moments)
    worst = max(float(np.abs(g.measured - g.analytic).max()) for g in gradients)
    lines = [
        f"bias and deviation within 4 standard errors of the analytic value: {within} of {len(moments)} rows",
        f"largest difference of an expected gradient from its closed form: {worst:.1e}",
    ]
    for x in points:
        lines.append(
            f"{x.arm}: ends {number(x.kl_opt.value, 4)} nats from the closed-form optimum (predicted "
            f"{x.kl_opt_predicted:.4f}), {number(x.kl_k3.value, 4)} from the fixed point of k3 (predicted "
            f"{x.kl_k3_predicted:.4f}), with {number(x.p_best.value, 3)} on the best answer (predicted "
            f"{x.p_best_predicted:.3f})"
        )
    return lines


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    torch.set_num_threads(1)  # small tensors: more threads are slower
    generator = torch.Generator().manual_seed(args.seed)
    moments = [row for mu in args.mu for row in measure_moments(mu, args.samples, generator)]
    gradients = measure_gradients()
    with console.status("training"):
        seeds = range(args.seed, args.seed + args.runs)
        points = [measure_fixed_point(arm, args.beta, args.rounds, args.answers, seeds) for arm in ARMS]
    print_tables(console, args, moments, gradients, points)
    lines = verdicts(moments, gradients, points)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    figure = draw(args.beta, moments, gradients, points, args.out / "kl_estimators.png")
    summary = {
        "args": args, "moments": moments, "gradients": gradients,
        "divergence_gradients": divergence_gradients(), "fixed_points": points,
        "verdicts": lines, "figure": figure,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for path in (figure, args.out / "summary.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
