"""The figure of benchmarks/kl_estimators.py: as a number, as a gradient, as a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from common import kl_theory
from common.kl_measure import FixedPoint, Gradient, Moments, divergence_gradients
from common.plots import MARKERS, PALETTE, new_figure, save_figure
from llmgym import AnswerPool

NAMES = ("k1", "k2", "k3")
COLOURS = dict(zip(NAMES, PALETTE, strict=False))
# The three panels of gradients: their title, and the rows of measure_gradients that they show.
GRADIENT_PANELS = (
    ("samples from the policy itself", "on-policy", "none"),
    ("samples from an older policy", "moved", "none"),
    ("an older policy's, times the ratio", "moved", "differentiated"),
)


def draw(
    beta: float,
    moments: Sequence[Moments],
    gradients: Sequence[Gradient],
    points: Sequence[FixedPoint],
    path: Path,
) -> Path:
    """Two rows of three panels, from the records of the script; the path of the PNG."""
    figure, axes = new_figure(2, 3, width=5.0, height=4.0)
    draw_moments(axes[0, 0], moments, "bias", kl_theory.relative_bias)
    draw_moments(axes[0, 1], moments, "std", kl_theory.relative_std)
    axes[0, 0].set_title("as a number: bias")
    axes[0, 0].set_ylabel("bias / true KL")
    axes[0, 1].set_title("as a number: spread of one sample")
    axes[0, 1].set_ylabel("standard deviation / true KL")
    axes[0, 1].set_yscale("log")
    axes[0, 1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0, 1].yaxis.set_major_formatter("{x:g}")
    axes[0, 1].yaxis.set_minor_formatter(NullFormatter())
    draw_fixed_points(axes[0, 2], beta, points)
    for panel, (title, samples, ratio) in zip(axes[1], GRADIENT_PANELS, strict=True):
        rows = [g for g in gradients if (g.samples, g.ratio) == (samples, ratio)]
        draw_gradients(panel, rows)
        panel.set_title(f"as a gradient: {title}")
    low, high = (f(panel.get_ylim()[i] for panel in axes[1]) for f, i in ((min, 0), (max, 1)))
    for panel in axes[1]:
        panel.set_ylim(low, high)
    axes[1, 0].set_ylabel("expected gradient in the logit")
    axes[1, 0].legend(fontsize=8, ncols=2, loc="lower right", title="bars: what the loss gives",
                      title_fontsize=8, alignment="left")
    return save_figure(figure, path)


def draw_moments(
    panel: Axes, moments: Sequence[Moments], kind: str, analytic: Callable[[str, float], float]
) -> None:
    """Analytic curves over mu, and the measured values with four standard errors."""
    mus = np.linspace(0.08, max(1.1, *(1.1 * abs(m.mu) for m in moments)), 200)
    for name, marker in zip(NAMES, MARKERS, strict=False):
        style: dict[str, Any] = {"linestyle": "--"} if name == "k3" else {}
        panel.plot(mus, [analytic(name, mu) for mu in mus], color=COLOURS[name], zorder=1, **style)
        rows = [m for m in moments if m.estimator == name]
        panel.errorbar(
            [abs(m.mu) for m in rows],
            [getattr(m, f"{kind}_measured") for m in rows],
            yerr=[4 * getattr(m, f"{kind}_error") for m in rows],
            fmt=marker, markersize=6, markeredgecolor="black", markeredgewidth=0.6, capsize=3,
            color=COLOURS[name], label=name,
        )  # fmt: skip
    panel.set_xlabel("mu, of q = N(0, 1) and p = N(mu, 1)")
    panel.legend(
        title="lines: analytic; points: measured,\nwith 4 standard errors", title_fontsize=8, fontsize=8,
        alignment="left",
    )


def draw_gradients(panel: Axes, rows: Sequence[Gradient]) -> None:
    """Bars of each estimator's expected gradient, and marks for those of the two divergences."""
    actions = np.arange(len(rows[0].measured))
    for index, row in enumerate(rows):
        offset = 0.26 * (index - 1)
        colour = COLOURS[row.estimator]
        panel.bar(actions + offset, row.measured, width=0.24, color=colour, label=row.estimator)
    for (name, values), style in zip(divergence_gradients().items(), ("-", ":"), strict=True):
        panel.hlines(
            values, actions - 0.42, actions + 0.42, color="black", linestyle=style, linewidth=1.6,
            label=f"gradient of {name}",
        )  # fmt: skip
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_xticks(actions)
    panel.set_xlabel("action")
    panel.grid(axis="x", visible=False)


def draw_fixed_points(panel: Axes, beta: float, points: Sequence[FixedPoint]) -> None:
    """How far each answer is lifted above the reference, against its reward: predicted and trained."""
    pool = AnswerPool.default()
    reward, ref = pool.proxy[0], pool.ref_probs[0]
    order = np.argsort(reward)
    predicted = {
        "k2": (pool.optimal_policy(beta)[0], "-", "optimum: ref exp(r / beta) / Z"),
        "k3": (kl_theory.k3_fixed_point(pool, beta)[0], "--", "k3's fixed point: beta ref / (lam - r)"),
    }
    for policy, line, label in predicted.values():
        panel.plot(reward[order], (policy / ref)[order], color="black", linestyle=line, zorder=1, label=label)
    for point in points:
        lift = np.median(point.policies, axis=0) / ref
        # k1 in the reward and k2 in the loss end at the same point: rings round dots.
        style: dict[str, Any] = {"color": COLOURS[point.arm[:2]], "s": 10, "linewidths": 0}
        if "reward" in point.arm:
            style = {"facecolors": "none", "edgecolors": PALETTE[5], "s": 34, "linewidths": 1.2}
        panel.scatter(reward, lift, label=point.arm, **style)
    panel.set_yscale("log")
    panel.set_ylim(bottom=1e-3)  # k1 in the loss goes on down to nothing
    panel.set_xlabel("reward of the answer")
    panel.set_ylabel("probability / reference")
    panel.set_title(f"as a loss: where PPO comes to rest (beta {beta:g})")
    panel.legend(fontsize=7, loc="upper left")
