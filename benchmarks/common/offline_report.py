"""Tables, verdicts and figures of the D4RL benchmark.

Two kinds of interval, both of 95% and over training seeds. Those of the tables and bands are the bootstrap
intervals of all benchmarks, which show the spread of the runs. Verdicts are about differences of few runs,
for which a bootstrap is too sure of itself: with three normal values in each group its interval holds the
true difference in 80 of 100 cases, Welch's t interval in 95 (2,000 simulated pairs of groups).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import ttest_1samp, ttest_ind

from common.plots import draw_curves, new_figure, save_figure
from common.stats import Estimate, estimate
from common.tables import interval, number

LAST = 10  # evaluations in the mean that is compared
TITLES = {"bc": "BC", "cql": "CQL", "cql-10": "CQL, alpha 10", "cql-1": "CQL, alpha 1", "iql": "IQL",
          "td3bc": "TD3+BC", "rebrac": "ReBRAC", "sac": "SAC, no conservatism"}  # fmt: skip
# Normalised scores on D4RL's v2 data as Kostrikov, Nair and Levine (2021), table 1, give them: after 1M
# steps, means of the last ten evaluations.
PUBLISHED = {
    "halfcheetah-medium": {"bc": 42.6, "cql": 44.0, "iql": 47.4},
    "hopper-medium": {"bc": 52.9, "cql": 58.5, "iql": 66.3},
    "walker2d-medium": {"bc": 75.3, "cql": 72.5, "iql": 78.3},
}
SCORE_COLUMNS = ("", "last checkpoint", f"mean of last {LAST}",
                 "best (chosen on the same episodes)", "deviation", "published")  # fmt: skip
VALUE_COLUMNS = ("", "Q at starts", "return measured", "over-estimation", "Q on data rows")

Results = Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]  # of each dataset and algorithm, one a seed
Data = Mapping[str, dict[str, Any]]  # what `offline_jobs.data_job` says of each dataset


@dataclass(frozen=True)
class Row:
    """An algorithm on a dataset, over its seeds.

    ===============  ==============================================================================
    last             normalised score of the last checkpoint
    recent           mean score of the last ten evaluations
    best             score of the best evaluation: chosen on the episodes that it is measured on
    deviation        standard deviation of the score over the last ten evaluations, of a run
    predicted        Q(s, pi(s)) of the last checkpoint at the starts of the evaluation episodes
    measured         discounted return of those episodes
    over_estimation  predicted less measured
    predicted_rows   Q(s, a) of rows of the data
    published        score on D4RL's own data; None where there is none
    runs             `recent` of each seed
    ===============  ==============================================================================

    The four of the critic are empty estimates for an algorithm without one.
    """

    dataset: str
    algo: str
    last: Estimate
    recent: Estimate
    best: Estimate
    deviation: Estimate
    predicted: Estimate
    measured: Estimate
    over_estimation: Estimate
    predicted_rows: Estimate
    published: float | None
    runs: list[float]


def published(dataset: str, algo: str) -> float | None:
    """The published D4RL v2 score of an algorithm; alpha 10 is the setting of CQL's row."""
    return PUBLISHED.get(dataset, {}).get("cql" if algo == "cql-10" else algo)


def make_row(dataset: str, algo: str, results: Sequence[dict[str, Any]]) -> Row:
    """The row of an algorithm from the results of its seeds."""
    scores = [[e["score"] for e in result["evaluations"]] for result in results]
    ends = [result["evaluations"][-1] for result in results]
    recent = [float(np.mean(run[-LAST:])) for run in scores]
    return Row(
        dataset=dataset,
        algo=algo,
        last=estimate([run[-1] for run in scores]),
        recent=estimate(recent),
        best=estimate([max(run) for run in scores]),
        deviation=estimate([float(np.std(run[-LAST:], ddof=1)) if len(run) > 1 else None for run in scores]),
        predicted=estimate([end["predicted"] for end in ends]),
        measured=estimate([None if end["predicted"] is None else end["discounted"] for end in ends]),
        over_estimation=estimate([over_estimation(end) for end in ends]),
        predicted_rows=estimate([end["predicted_rows"] for end in ends]),
        published=published(dataset, algo),
        runs=recent,
    )


def over_estimation(evaluation: dict[str, Any]) -> float | None:
    """What the critic promises at the starts, less the discounted return that followed; None without one."""
    if evaluation["predicted"] is None:
        return None
    return float(evaluation["predicted"] - evaluation["discounted"])


def make_rows(results: Results) -> list[Row]:
    """Rows by dataset and algorithm, in the order of `results`."""
    return [make_row(name, algo, runs) for name, algos in results.items() for algo, runs in algos.items()]


def score_table(rows: Sequence[Row], data: Data) -> list[list[str]]:
    """Cells under `SCORE_COLUMNS`: for each dataset the data's own score, then the algorithms'."""
    table = []
    for dataset, of_dataset in itertools.groupby(rows, key=lambda row: row.dataset):
        own = number(data[dataset]["score"])
        table.append([f"{dataset}: the data itself", own, own, "-", "-", "-"])
        table += [
            [f"  its {policy} episodes", number(score), number(score), "-", "-", "-"]
            for policy, score in data[dataset]["parts"].items()
        ]
        table += [
            [f"  {TITLES[row.algo]}", interval(row.last), interval(row.recent), interval(row.best),
             number(row.deviation.value), number(row.published)]
            for row in of_dataset
        ]  # fmt: skip
    return table


def value_table(rows: Sequence[Row], data: Data) -> list[list[str]]:
    """Cells under `VALUE_COLUMNS`, of the algorithms with a critic; empty if there are none."""
    table = []
    critics = [row for row in rows if row.predicted.value is not None]
    for dataset, of_dataset in itertools.groupby(critics, key=lambda row: row.dataset):
        table.append([f"{dataset}: the data itself", "-", "-", "-", number(data[dataset]["discounted_rows"])])
        table += [
            [f"  {TITLES[row.algo]}", interval(row.predicted), interval(row.measured),
             interval(row.over_estimation), interval(row.predicted_rows)]
            for row in of_dataset
        ]  # fmt: skip
    return table


def difference(a: Sequence[float], b: Sequence[float] | float) -> Estimate:
    """Mean of a less mean of b, or less a known number, with Welch's (Student's) t interval.

    The interval is missing with fewer than two runs in a group, and has no width if no group spreads.
    """
    groups = [np.asarray(a, float)] if isinstance(b, int | float) else [np.asarray(x, float) for x in (a, b)]
    value = float(np.mean(a) - np.mean(b))
    n = min(map(len, groups))
    if n < 2:
        return Estimate(value, None, None, n)
    if all(np.ptp(group) == 0 for group in groups):
        return Estimate(value, value, value, n)
    test = ttest_1samp(groups[0] - b, 0) if len(groups) == 1 else ttest_ind(*groups, equal_var=False)
    limits = test.confidence_interval(0.95)
    return Estimate(value, float(limits.low), float(limits.high), n)


def verdict(found: Estimate) -> str:
    """ "higher", "lower" or "open", by the interval."""
    if found.low is None or found.high is None:
        return "open (one run tells nothing of the spread)"
    return "higher" if found.low > 0 else "lower" if found.high < 0 else "open"


def verdicts(rows: Sequence[Row], data: Data) -> list[str]:
    """What the numbers say: the scores of every pair of algorithms, and of each and those who acted."""
    lines = [f"Differences of the means of the last {LAST} evaluations, with 95% t intervals over seeds:"]
    for dataset, group in itertools.groupby(rows, key=lambda row: row.dataset):
        of_dataset = list(group)
        for a, b in itertools.combinations(of_dataset, 2):
            found = difference(a.runs, b.runs)
            lines.append(_line(dataset, TITLES[a.algo], TITLES[b.algo], found))
        for row, (acted, score) in itertools.product(of_dataset, reference_scores(data[dataset]).items()):
            lines.append(_line(dataset, TITLES[row.algo], acted, difference(row.runs, score)))
        lines += [_sac_line(row) for row in of_dataset if row.algo == "sac"]
    return lines


def reference_scores(data: dict[str, Any]) -> dict[str, float]:
    """Scores of the data's episodes, and of those of its best policy where several acted."""
    found = {"the data itself": data["score"]}
    if data["parts"]:
        best = max(data["parts"], key=data["parts"].__getitem__)
        found[f"its {best} episodes"] = data["parts"][best]
    return found


def _line(dataset: str, a: str, b: str, found: Estimate) -> str:
    return f"{dataset}, {a} vs {b}: {interval(found)}: {verdict(found)}"


def _sac_line(row: Row) -> str:
    low, high = row.over_estimation.low, row.over_estimation.high
    said = "no interval with one run" if low is None or high is None else (
        "over-estimates" if low > 0 else "under-estimates" if high < 0 else "open")  # fmt: skip
    return (
        f"{row.dataset}, SAC's critic predicts {number(row.predicted.value)} at the starts, the return that "
        f"follows is {number(row.measured.value)}: {interval(row.over_estimation)}: {said}"
    )


def evaluation_rows(results: Results) -> list[dict[str, Any]]:
    """One record for each evaluation of each run, for the CSV."""
    return [
        {
            "dataset": dataset, "algo": algo, "seed": run["seed"], "step": e["step"],
            "return_mean": e["return_mean"], "score": e["score"], "discounted": e["discounted"],
            "predicted": e["predicted"], "predicted_rows": e["predicted_rows"],
        }
        for dataset, algos in results.items()
        for algo, runs in algos.items()
        for run in runs
        for e in run["evaluations"]
    ]  # fmt: skip


def draw(
    dataset: str, runs: Mapping[str, Sequence[dict[str, Any]]], data: dict[str, Any], path: Path
) -> Path:
    """Learning curves of a dataset: score, and over-estimation where any algorithm has a critic."""
    critics = [algo for algo in runs if any(len(_curve(run, None)[0]) for run in runs[algo])]
    figure, axes = new_figure(1, 2 if critics else 1, width=5.8, height=4.2)
    for index, algo in enumerate(runs):  # one colour for an algorithm in both panels
        _draw_runs(axes[0, 0], runs[algo], "score", algo, index)
        if algo in critics:
            _draw_runs(axes[0, 1], runs[algo], None, algo, index)
    for (label, value), style in zip(reference_scores(data).items(), ("--", ":"), strict=False):
        axes[0, 0].axhline(value, color="black", linestyle=style, linewidth=1.2, label=label)
    _finish(axes[0, 0], "Evaluation episodes", "normalised score")
    if critics:
        axes[0, 1].axhline(0, color="black", linewidth=1.2)
        axes[0, 1].set_yscale("symlog", linthresh=10)
        _finish(axes[0, 1], "Over-estimation of the critic", "Q at starts less discounted return")
    seeds = max(map(len, runs.values()))
    figure.suptitle(f"{dataset}: " + (f"mean of {seeds} seeds, bootstrap bands" if seeds > 1 else "one seed"))
    return save_figure(figure, path)


def _draw_runs(
    axes: Axes, runs: Sequence[dict[str, Any]], key: str | None, algo: str, index: int
) -> None:
    curves = [_curve(run, key) for run in runs]
    # All runs are evaluated at the same steps: a mean at each of them, not of the steps in between.
    draw_curves(axes, curves, TITLES[algo], index, n_points=len(curves[0][0]))


def _curve(run: dict[str, Any], key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Steps and a measure of each evaluation; None: over-estimation."""
    values = [over_estimation(e) if key is None else e[key] for e in run["evaluations"]]
    known = [(e["step"], v) for e, v in zip(run["evaluations"], values, strict=True) if v is not None]
    x, y = np.array(known, float).reshape(-1, 2).T
    return x, y


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="gradient steps (thousands)", ylabel=ylabel)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)
