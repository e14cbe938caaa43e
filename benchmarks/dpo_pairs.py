"""How many preferences does DPO need? Distance to the exact optimum against the number of pairs.

    python benchmarks/dpo_pairs.py
    python benchmarks/dpo_pairs.py --quick
    python benchmarks/dpo_pairs.py --beta 1.0 --pairs 1000 10000 100000

On AnswerPool-v0 a pair is two answers drawn from the reference, and the preference between them is drawn
from their proxy rewards by the Bradley-Terry model. DPO is then maximum likelihood, so its error is known
for many pairs: the mean of KL(policy || optimum) is ``tr(F I^-1) / (2 n)``, with the Fisher information I of
one pair and the curvature F of the KL at the optimum. With all pairs and their probabilities as soft labels
(the population loss) nothing is left to chance, and the policy must reach the optimum itself.

Each policy is trained to convergence, by steps on all its pairs. Few pairs leave answers that never lost
(or won), which DPO lifts (or sinks) without end: there the distance measures how long it was trained.

Measured with the defaults (some minutes): the population loss leaves a KL of 9e-12, where the reference is
4.7 nats away. The mean KL of ten data sets is 0.25 [0.16, 0.38] with 20,000 pairs (predicted 0.26), 0.034
[0.025, 0.047] with 200,000 (0.026), and 0.008 [0.005, 0.019] with 500,000 (0.010). A few data sets with an
error in one of the best answers make up much of a mean: the median at 200,000 is 0.028.

Under --out it leaves `summary.json` and `dpo_pairs.png`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.console import Console

from agents.dpo import DPO
from agents.preferences import Preferences, Responses, bradley_terry_preferences, pairs_within
from common.files import write_json
from common.plots import PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import versions
from common.stats import Estimate, estimate
from common.tables import make_console, print_table
from llmgym import AnswerPool

POPULATION_TARGET = 1e-4  # KL to the optimum that the population loss must reach


@dataclass(frozen=True)
class Args:
    """KL of DPO's policy to the exact optimum against the number of preference pairs."""

    pairs: tuple[int, ...] = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
    """Numbers of preference pairs."""
    beta: float = 0.3
    """Weight of the KL to the reference."""
    runs: int = 10
    """Independent data sets for each number of pairs."""
    epochs: int = 300
    """Gradient steps, each on all pairs."""
    learning_rate: float = 0.3
    """Adam's first step size; it falls linearly to 0."""
    seed: int = 0
    """Of the first data set; the following count up."""
    out: Path = Path("results/dpo_pairs")
    """Folder for the summary and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Up to 50,000 pairs, four data sets each, in results/dpo_pairs_quick."""


QUICK: dict[str, Any] = {
    "pairs": (5_000, 20_000, 50_000), "runs": 4, "out": Path("results/dpo_pairs_quick")
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One number of pairs: the KL of each data set's policy to the optimum, and their mean."""

    pairs: int
    predicted: float
    mean: Estimate
    kl: list[float]


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, values in (("pairs", args.pairs), ("runs", (args.runs,)), ("epochs", (args.epochs,))):
        if not values or min(values) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    for name in ("beta", "learning_rate"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be above 0")


def all_answers(pool: AnswerPool) -> Responses:
    """Every answer to every prompt, [P * A]."""
    prompt, answer = np.indices(pool.proxy.shape).reshape(2, -1)
    return Responses(torch.from_numpy(prompt), torch.from_numpy(answer))


def population(pool: AnswerPool) -> Preferences:
    """All pairs of answers to a prompt, with the probabilities of the preferences as labels."""
    answers = all_answers(pool)
    pairs = pairs_within(answers.observations.numpy())
    return bradley_terry_preferences(answers, pool.proxy.reshape(-1), pairs)


def sample(pool: AnswerPool, n: int, seed: int) -> Preferences:
    """n pairs of answers drawn from the reference, and a preference drawn for each."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(pool.n_prompts, (n,), generator=generator)
    counts = torch.bincount(prompts, minlength=pool.n_prompts).tolist()
    drawn = [
        torch.multinomial(torch.tensor(ref), 2 * count, replacement=True, generator=generator).view(-1, 2)
        + prompt * pool.n_answers
        for prompt, (ref, count) in enumerate(zip(pool.ref_probs, counts, strict=True))
        if count
    ]
    return bradley_terry_preferences(
        all_answers(pool), pool.proxy.reshape(-1), torch.cat(drawn), generator
    )


def distance(pool: AnswerPool, preferences: Preferences, args: Args) -> float:
    """KL(policy || optimum) of DPO trained on the preferences."""
    agent = DPO(
        gym.make("AnswerPool-v0", pool=pool), seed=args.seed, beta=args.beta, n_epochs=args.epochs,
        learning_rate=f"lin_{args.learning_rate}", batch_size=len(preferences), max_grad_norm=None,
    )  # fmt: skip
    agent.fit(preferences)
    policy = agent.action_probabilities(np.arange(pool.n_prompts))
    policy /= policy.sum(axis=1, keepdims=True)  # float32 sums to 1 within 1e-7, which shows at small KL
    return pool.kl(policy, pool.optimal_policy(args.beta))


def predicted_error(pool: AnswerPool, beta: float) -> float:
    """n * E KL(policy || optimum) of maximum likelihood on n pairs, as n grows.

    The log-probs of a prompt's answers have the Fisher information
    ``I = beta^2 sum_ab ref_a ref_b s_ab (1 - s_ab) (e_a - e_b)(e_a - e_b)^T`` per pair, where s_ab is the
    probability that a beats b. With errors of covariance ``I^-1 / n`` the KL is half their square in the
    metric ``F = diag(pi) - pi pi^T`` of the optimum pi.
    """
    total = 0.0
    for ref, reward, best in zip(pool.ref_probs, pool.proxy, pool.optimal_policy(beta), strict=True):
        beats = 1.0 / (1.0 + np.exp(reward[None] - reward[:, None]))
        weight = beta**2 * np.outer(ref, ref) * beats * (1.0 - beats)
        information = 2.0 * (np.diag(weight.sum(1)) - weight)
        curvature = np.diag(best) - np.outer(best, best)
        # A prompt gets 1 / P of the pairs, and the mean over prompts is 1 / P of the sum.
        total += 0.5 * float(np.trace(curvature @ np.linalg.pinv(information, hermitian=True)))
    return total


def measure(pool: AnswerPool, args: Args, console: Console) -> list[Row]:
    """The distances at each number of pairs."""
    error = predicted_error(pool, args.beta)
    rows = []
    for n in args.pairs:
        with console.status(f"{n:,} pairs"):
            kl = [distance(pool, sample(pool, n, args.seed + run), args) for run in range(args.runs)]
        rows.append(Row(n, error / n, estimate(kl), kl))
    return rows


def verdicts(population_kl: float, rows: list[Row]) -> list[str]:
    """What the numbers say, one sentence a line."""
    met = "met" if population_kl <= POPULATION_TARGET else "MISSED"
    last = rows[-1]
    return [
        f"Population loss: KL {population_kl:.1e} to the optimum, target {POPULATION_TARGET:g}: {met}.",
        f"{last.pairs:,} pairs: mean KL {last.mean.value:.4f} over {last.mean.n} data sets, maximum "
        f"likelihood predicts {last.predicted:.4f}.",
    ]


def show(console: Console, args: Args, population_kl: float, rows: list[Row]) -> None:
    """Print the table and the verdicts, draw the figure and write the files."""

    def text(x: float | None) -> str:
        return "-" if x is None else f"{x:.4f}"

    print_table(
        console,
        f"KL(policy || optimum) in nats, beta {args.beta:g}, {args.runs} data sets each",
        ("pairs", "mean", "95% interval", "median", "predicted mean"),
        [
            (f"{r.pairs:,}", text(r.mean.value), f"[{text(r.mean.low)}, {text(r.mean.high)}]",
             text(float(np.median(r.kl))), text(r.predicted))
            for r in rows
        ],
    )  # fmt: skip
    lines = verdicts(population_kl, rows)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    summary = {
        "args": args, "versions": versions(), "verdicts": lines, "population_kl": population_kl,
        "rows": rows,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for written in (draw(args, rows), args.out / "summary.json"):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def draw(args: Args, rows: list[Row]) -> Path:
    """Each data set's distance, their mean and the prediction, over the number of pairs."""
    figure, grid = new_figure(1, 1, width=6.2)
    axes = grid[0, 0]
    n = np.array([r.pairs for r in rows])
    axes.plot(n, [r.predicted for r in rows], color="black", linestyle=":", label="predicted mean")
    for index, r in enumerate(rows):
        axes.plot(
            [r.pairs] * len(r.kl), r.kl, "o", color=PALETTE[0], alpha=0.3, markersize=4,
            label=None if index else "one data set",
        )  # fmt: skip
    means = np.array([r.mean.value for r in rows], dtype=float)
    low = np.array([m if r.mean.low is None else r.mean.low for m, r in zip(means, rows, strict=True)])
    high = np.array([m if r.mean.high is None else r.mean.high for m, r in zip(means, rows, strict=True)])
    axes.errorbar(
        n, means, yerr=np.array([means - low, high - means]), fmt="s-", color=PALETTE[1], capsize=4,
        label="mean, 95% interval",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("preference pairs")
    axes.set_ylabel("KL(policy || optimum) in nats")
    axes.set_title(f"DPO on the answer pool, beta {args.beta:g}")
    axes.legend()
    return save_figure(figure, args.out / "dpo_pairs.png")


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
    pool = AnswerPool.default()
    population_kl = distance(pool, population(pool), args)
    show(console, args, population_kl, measure(pool, args, console))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
