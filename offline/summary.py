"""What is in logged data: numbers, and histograms of returns, lengths, rewards and actions.

    python -m offline.summary hopper-medium-v2.hdf5
    python -m offline.summary minari:mujoco/hopper/medium-v0 --figure hopper.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from offline.d4rl import normalized_score
from offline.datasets import Dataset, episode_lengths, episode_returns
from offline.files import MINARI_PREFIX, read

QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}
NEAR_BOUND = 1e-3  # of the range between the bounds: an action as near as that lies at the bound
MAX_BINS = 60
BLUE, GREY = "#0072B2", "#555555"


def summary(dataset: Dataset) -> dict[str, Any]:
    """The data in numbers that JSON can hold.

    ==================  =============================================================================
    rows, episodes      their number
    trainable           number of rows that a value can be learned from (see `Dataset`)
    terminal_episodes   share of the episodes that end in a terminal; the others were cut
    observations        "float32[11]"
    returns, lengths    of the episodes: mean, std, and the quantiles of `QUANTILES`
    rewards             of the rows, likewise
    actions             continuous: "low" and "high", smallest and largest value of each component, and
                        "at_bounds", the share of all components within 0.1% of their bounds (None
                        without bounds); discrete: "counts" of each action from 0 on
    normalized_score    of the mean return, where ``metadata["env"]`` is one of D4RL's three locomotion
                        environments; else None
    ==================  =============================================================================
    """
    returns = episode_returns(dataset)
    return {
        "rows": len(dataset),
        "episodes": dataset.n_episodes,
        "trainable": int(dataset.trainable.sum()),
        "terminal_episodes": float(dataset.terminals.sum() / dataset.n_episodes),
        "observations": f"{dataset.observations.dtype}{list(dataset.observations.shape[1:])}",
        "returns": _statistics(returns),
        "lengths": _statistics(episode_lengths(dataset)),
        "rewards": _statistics(dataset.rewards),
        "actions": _actions(dataset),
        "normalized_score": _score(dataset, float(returns.mean())),
    }


def _statistics(values: np.ndarray) -> dict[str, float]:
    quantiles = np.quantile(values, list(QUANTILES.values()))
    moments = {"mean": float(values.mean(dtype=np.float64)), "std": float(values.std(dtype=np.float64))}
    return moments | dict(zip(QUANTILES, map(float, quantiles), strict=True))


def _actions(dataset: Dataset) -> dict[str, Any]:
    actions = dataset.actions
    if dataset.discrete:
        numbers, counts = np.unique(actions, return_counts=True)
        return {"counts": dict(zip(map(str, numbers.tolist()), counts.tolist(), strict=True))}
    found = {"low": actions.min(axis=0).tolist(), "high": actions.max(axis=0).tolist(), "at_bounds": None}
    bounds = [dataset.metadata.get(name) for name in ("action_low", "action_high")]
    if None not in bounds:
        low, high = np.asarray(bounds, actions.dtype)
        margin = NEAR_BOUND * (high - low)
        found["at_bounds"] = float(((actions <= low + margin) | (actions >= high - margin)).mean())
    return found


def _score(dataset: Dataset, mean_return: float) -> float | None:
    try:
        return float(normalized_score(dataset.metadata.get("env", ""), mean_return))
    except ValueError:
        return None


def print_summary(dataset: Dataset, console: Console) -> None:
    """Print `summary` as tables."""
    found = summary(dataset)
    table = Table(show_header=False)
    left_out = found["rows"] - found["trainable"]
    about = {
        "environment": dataset.metadata.get("env", "not stated"),
        "rows": f"{found['rows']:,}" + (f", {left_out:,} without a known successor" if left_out else ""),
        "episodes": f"{found['episodes']:,}, of which {found['terminal_episodes']:.1%} ended in a terminal",
        "observations": found["observations"],
        "actions": _action_text(found["actions"]),
    }
    if found["normalized_score"] is not None:
        about["normalised score"] = f"{found['normalized_score']:.1f}"
    for name, value in about.items():
        table.add_row(name, str(value))
    console.print(table, markup=False)
    numbers = Table("", *(Column(name, justify="right") for name in ("return", "length", "reward")))
    for name in found["returns"]:
        numbers.add_row(name, *(_number(found[of][name]) for of in ("returns", "lengths", "rewards")))
    console.print(numbers)


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _action_text(actions: dict[str, Any]) -> str:
    if "counts" in actions:
        return f"{len(actions['counts'])} of them were chosen"
    share = "" if actions["at_bounds"] is None else f", {actions['at_bounds']:.1%} at their bounds"
    return f"{len(actions['low'])} components, {min(actions['low']):.3g} to {max(actions['high']):.3g}{share}"


def plot_summary(dataset: Dataset, path: str | Path) -> None:
    """Write histograms of returns, lengths, rewards and actions as a PNG; its folder is made."""
    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    axes = figure.subplots(2, 2)
    title = dataset.metadata.get("env", "Logged data")
    figure.suptitle(f"{title}: {len(dataset):,} rows in {dataset.n_episodes:,} episodes")
    returns, lengths = episode_returns(dataset), episode_lengths(dataset)
    _histogram(axes[0, 0], returns, "Return of an episode", "Episodes")
    _histogram(axes[0, 1], lengths, "Steps of an episode", "Episodes")
    _histogram(axes[1, 0], dataset.rewards, "Reward of a step", "Rows")
    if dataset.discrete:
        _histogram(axes[1, 1], dataset.actions, "Action", "Rows", mean=False)
    else:
        _histogram(axes[1, 1], dataset.actions.ravel(), "Action, all components", "Values", mean=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _histogram(axes: Axes, values: np.ndarray, label: str, what: str, mean: bool = True) -> None:
    axes.hist(values, bins=_bins(values), color=BLUE)
    if mean:
        average = values.mean(dtype=np.float64)
        axes.axvline(average, color=GREY, linestyle="--", linewidth=1.2)
        axes.set_title(f"mean {_number(average)}", fontsize=10, color=GREY)
    axes.set(xlabel=label, ylabel=what)
    axes.spines[["top", "right"]].set_visible(False)


def _bins(values: np.ndarray) -> Any:
    if values.dtype.kind == "f":
        return int(np.clip(2 * np.sqrt(len(values)), 10, MAX_BINS))
    # Whole numbers: every bin holds as many of them, or the bars would have a comb's teeth.
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // MAX_BINS)
    return np.arange(low, high + width + 1, width) - 0.5


@dataclass(frozen=True)
class Args:
    """Show what is in a D4RL file or a Minari data set."""

    data: Annotated[str, tyro.conf.Positional]
    """A file .hdf5 or .h5, a folder, or "minari:" and an id."""
    figure: Path | None = None
    """Where to write the histograms; by default beside the data, or here for an id."""


def main(args: Args) -> int:
    """Print the numbers and write the figure; the exit status."""
    console = Console()
    try:
        dataset = read(args.data)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    figure = args.figure or _figure_path(args.data)
    print_summary(dataset, console)
    plot_summary(dataset, figure)
    console.print(f"wrote {figure}", markup=False, highlight=False)
    return 0


def _figure_path(data: str) -> Path:
    if data.startswith(MINARI_PREFIX):  # beside it would be among Minari's own files
        return Path(data.removeprefix(MINARI_PREFIX).replace("/", "-") + ".png")
    path = Path(data)
    return path.with_name(f"{path.name if path.is_dir() else path.stem}.png")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
