"""When does PPO's clipping switch the gradient off? Autograd through our loss against the rule.

    python benchmarks/clip_gradient.py
    python benchmarks/clip_gradient.py --clip-high 0.28

The objective of a sample with advantage A is `min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`. Its
derivative in the ratio is A where the unclipped term is the smaller one, else 0:

                        ratio < 1 - low              between    ratio > 1 + high
    A > 0               A: the action became rarer   A          0: it was raised enough
    A < 0               0: it was lowered enough     A          A: the action became likelier

Autograd through `agents.losses.clipped_loss` gives just that, to 4e-16, over a range of ratios that keeps off
the two corners, where no derivative exists (it returns A there). So clipping is no bound on the ratio: it
stops the push outwards, and a sample that moved the wrong way keeps its whole gradient.

Under --out it leaves `summary.json` and `clip_gradient.png`.
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

from agents.losses import clipped_loss
from common.files import write_json
from common.plots import PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import versions
from common.tables import make_console, print_table

MEANING = {
    (1, "below"): "good action became rarer: pulled back up",
    (1, "inside"): "good action: raised",
    (1, "above"): "good action was raised enough: no gradient",
    (-1, "below"): "bad action was lowered enough: no gradient",
    (-1, "inside"): "bad action: lowered",
    (-1, "above"): "bad action became likelier: pulled back down",
}


@dataclass(frozen=True)
class Args:
    """The derivative of PPO's clipped objective in the ratio, by autograd and by the rule."""

    clip: float = 0.2
    """Clip range below 1, and above 1 unless --clip-high is given."""
    clip_high: float | None = None
    """Clip range above 1, where it is another one ("clip higher")."""
    points: int = 400
    """Ratios at which the derivative is taken, for each sign of the advantage."""
    out: Path = Path("results/clip_gradient")
    """Folder for the summary and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """40 points, in results/clip_gradient_quick."""


QUICK: dict[str, Any] = {"points": 40, "out": Path("results/clip_gradient_quick")}


@dataclass(frozen=True)
class Case:
    """One sign of the advantage and one side of the ratio, at a ratio in its middle."""

    advantage: float
    side: str
    ratio: float
    analytic: float
    measured: float
    meaning: str


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    if not 0 < args.clip < 1:
        raise ValueError(f"--clip is {args.clip}, must lie in (0, 1)")
    if args.clip_high is not None and not args.clip_high > 0:
        raise ValueError(f"--clip-high is {args.clip_high}, must be above 0")
    if args.points < 10:
        raise ValueError(f"--points is {args.points}, must be at least 10")


def objective(ratio: np.ndarray, advantage: float, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The clipped objective of one sample at each ratio, and its derivative there by autograd.

    Both come from `agents.losses.clipped_loss`, which is the objective negated; ``[n]`` to two ``[n]``.
    """
    leaf = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    logp = torch.log(leaf)
    value = -clipped_loss(logp, torch.zeros_like(logp), torch.full_like(logp, advantage), low, high).loss
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach().numpy(), slope.numpy()


def rule(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    """The derivative as one says it: A, but 0 beyond the end that the advantage pushes towards."""
    ratio = np.asarray(ratio, dtype=float)
    switched_off = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return np.where(switched_off, 0.0, advantage)


def ratios(points: int, low: float, high: float) -> np.ndarray:
    """Ratios from near 0 to twice the upper bound's distance, none of them at a corner or at 0: ``[n]``."""
    edges = np.linspace(0.0, max(2.0, 1 + 2 * high), points + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    at_corner = np.isclose(middles, 1 - low) | np.isclose(middles, 1 + high)
    return middles[~at_corner]


def make_cases(low: float, high: float) -> list[Case]:
    """Both signs of the advantage on each side of the clip range and inside it."""
    middles = {"below": (1 - low) / 2, "inside": 1.0, "above": 1 + 2 * high}
    cases = []
    for sign in (1, -1):
        for side, ratio in middles.items():
            slope = objective(np.array([ratio]), float(sign), low, high)[1][0]
            expected = rule(np.array([ratio]), float(sign), low, high)[0]
            cases.append(Case(float(sign), side, ratio, float(expected), float(slope), MEANING[sign, side]))
    return cases


def draw(axes: np.ndarray, ratio: np.ndarray, low: float, high: float) -> None:
    """The objective above and its derivative below, one column for each sign; axes ``[2, 2]``."""
    marked = slice(None, None, max(1, len(ratio) // 40))
    for column, sign in enumerate((1.0, -1.0)):
        top, bottom = axes[:, column]
        value, slope = objective(ratio, sign, low, high)
        top.plot(ratio, ratio * sign, color="black", linestyle=":", label="ratio x A, unclipped")
        top.plot(ratio, value, color=PALETTE[0], label="clipped objective")
        for name, side in (("1 - low", 1 - low), ("1 + high", 1 + high)):
            at = float(objective(np.array([side]), sign, low, high)[0][0])
            top.plot(side, at, "o", color=PALETTE[0], markersize=5)
            # Below the line on the side where it does not run.
            top.annotate(
                f"{name} = {side:g}", (side, at), xytext=(7 * sign, -14), textcoords="offset points",
                ha="left" if sign > 0 else "right", fontsize=9,
            )  # fmt: skip
        # In two pieces: a jump is no line.
        corner = 1 + high if sign > 0 else 1 - low
        for index, ends in enumerate(((0.0, corner), (corner, ratio[-1]))):
            level = rule(np.array([sum(ends) / 2]), sign, low, high)[0]
            bottom.plot(ends, (level, level), color=PALETTE[1], linewidth=5, alpha=0.45,
                        label=None if index else "the rule", solid_capstyle="butt")  # fmt: skip
        bottom.plot(
            ratio[marked], slope[marked], "o", color=PALETTE[0], markersize=3.5, label="autograd", zorder=3
        )
        bottom.set_xlabel("ratio of the new to the old probability")
        top.set_title(f"advantage {sign:+g}: the action was {'good' if sign > 0 else 'bad'}")
        explain(bottom, sign, low, high, float(ratio[-1]))
        for panel in (top, bottom):
            off = (corner, ratio[-1]) if sign > 0 else (0.0, corner)
            panel.axvspan(*off, color="black", alpha=0.07, linewidth=0)
            panel.set_xlim(0, ratio[-1])
        top.legend(loc="upper left" if sign > 0 else "upper right", fontsize=8)
    axes[0, 0].set_ylabel("objective")
    axes[1, 0].set_ylabel("its derivative in the ratio")


def explain(axes: Axes, sign: float, low: float, high: float, right: float) -> None:
    """Write into the picture what each of the four outer cases means."""
    axes.set_ylim(*((-0.45, 1.75) if sign > 0 else (-1.75, 0.45)))
    axes.set_yticks([0.0, sign], ["0", "A"])
    texts = {
        (1.0, "below"): "became rarer:\npulled back",
        (1.0, "above"): "raised enough:\nno gradient",
        (-1.0, "below"): "lowered enough:\nno gradient",
        (-1.0, "above"): "became likelier:\npulled back",
    }
    for side, middle in (("below", (1 - low) / 2), ("above", (1 + high + right) / 2)):
        at = float(rule(np.array([middle]), sign, low, high)[0])
        offset = 0.12 * sign
        axes.text(middle, at + offset, texts[sign, side], ha="center", va="bottom" if sign > 0 else "top",
                  fontsize=9)  # fmt: skip
    axes.legend(loc="upper right" if sign > 0 else "lower left", fontsize=8)


def show(console: Console, args: Args) -> None:
    """Compare, print the table, draw the figure and write the files."""
    low = args.clip
    high = args.clip if args.clip_high is None else args.clip_high
    ratio = ratios(args.points, low, high)
    cases = make_cases(low, high)
    curves, largest = {}, 0.0
    for sign in (1.0, -1.0):
        value, slope = objective(ratio, sign, low, high)
        expected = rule(ratio, sign, low, high)
        largest = max(largest, float(np.abs(slope - expected).max()))
        curves[f"{sign:+g}"] = {
            "ratio": ratio, "objective": value, "derivative_analytic": expected, "derivative_measured": slope,
        }  # fmt: skip
    corners = [
        {"advantage": sign, "ratio": corner, "derivative_measured":
         float(objective(np.array([corner]), sign, low, high)[1][0])}
        for sign in (1.0, -1.0) for corner in (1 - low, 1 + high)
    ]  # fmt: skip
    print_table(
        console,
        f"Derivative of the clipped objective in the ratio, clip range [{1 - low:g}, {1 + high:g}]",
        ("advantage", "ratio", "", "the rule", "autograd", "meaning"),
        [
            (f"{c.advantage:+g}", f"{c.ratio:g}", c.side, f"{c.analytic:+g}", f"{c.measured:+g}", c.meaning)
            for c in cases
        ],
        f"Largest difference over {len(ratio)} ratios and both signs: {largest:.1e}",
    )
    figure, axes = new_figure(2, 2, width=5.4, height=3.1, sharex=True)
    draw(axes, ratio, low, high)
    path = save_figure(figure, args.out / "clip_gradient.png")
    summary = {
        "args": args, "versions": versions(), "largest_difference": largest, "cases": cases,
        "corners": corners, "curves": curves,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for written in (path, args.out / "summary.json"):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Compare, report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    show(console, args)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
