"""One table of the laboratory: gradients and final policies of every arm, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.compare import Comparison
from common.lab_arms import ARMS, Arm, resting_point
from common.lab_gradient import Result, make_pool
from common.lab_training import measure
from common.runner import Outcome
from common.stats import Estimate, estimate
from common.tables import interval, number

TABLE_SIZE = 8  # group size of the gradients where the arm has none of its own


@dataclass(frozen=True)
class Row:
    """Gradient at the reference (None for arms with the KL in the loss) and final policies of the runs.

    kl_expected is the distance of the exact resting point from the optimum, kl_optimum that of the final
    policies, kl_rest their distance from the resting point (None where that is pass rate 1). reward and
    reward_expected are E[r] of the final policies and of the resting point; runs the measures of each run.
    """

    name: str
    kl_in: str
    binary: Result | None
    real: Result | None
    kl_expected: float
    kl_optimum: Estimate
    kl_rest: Estimate
    reward_expected: float
    reward: Estimate
    runs: list[dict[str, Any]]


def make_rows(results: Sequence[Result], outcomes: Sequence[Outcome], beta: float) -> list[Row]:
    """All arms, in order, with means over the runs that succeeded."""
    pool = make_pool("binary")
    rows = []
    for arm in ARMS:
        runs = [o.result for o in outcomes if o.result is not None and o.job.config["arm"] == arm.name]
        rest = measure(arm, pool, resting_point(arm, pool, beta), beta)
        rows.append(
            Row(
                name=arm.name,
                kl_in=arm.kl_in,
                binary=_find(results, arm, "binary"),
                real=_find(results, arm, "real"),
                kl_expected=rest["kl_optimum"],
                kl_optimum=estimate([r["kl_optimum"] for r in runs]),
                kl_rest=estimate([r["kl_rest"] for r in runs]),
                reward_expected=rest["reward"],
                reward=estimate([r["reward"] for r in runs]),
                runs=runs,
            )
        )
    return rows


def _find(results: Sequence[Result], arm: Arm, pool: str) -> Result | None:
    key = (pool, arm.group_size or TABLE_SIZE, arm.estimator)
    return next((r for r in results if (r.pool, r.group_size, r.estimator) == key), None)


def read_result(record: dict[str, Any]) -> Result:
    """A `Result` from its JSON."""
    fields: dict[str, Any] = {k: Comparison(**v) if isinstance(v, dict) else v for k, v in record.items()}
    return Result(**fields)


def cells(row: Row) -> list[str]:
    """A row as text: measured values."""

    def shown(result: Result | None, name: str, digits: int) -> str:
        return "" if result is None else f"{getattr(result, name).measured:.{digits}f}"

    objective = row.binary.objective if row.binary else ""
    return [
        row.name, objective, shown(row.binary, "length", 3), shown(row.binary, "cosine", 3),
        shown(row.real, "cosine", 3), shown(row.binary, "noise", 1), shown(row.real, "noise", 1),
        f"{row.kl_expected:.4f}", interval(row.kl_optimum, 4), number(row.kl_rest.value, 4),
        number(row.reward.value, 3),
    ]  # fmt: skip


COLUMNS = (
    "", "objective", "step", "cos", "cos real", "noise", "noise real", "expected", "KL to the optimum",
    "to rest", "E[r]",
)  # fmt: skip


def flat(row: Row) -> dict[str, Any]:
    """A row for CSV: every value with its analytic one."""
    record: dict[str, Any] = {"name": row.name, "kl_in": row.kl_in}
    for pool in ("binary", "real"):
        result = getattr(row, pool)
        for name in ("length", "cosine", "noise"):
            compared = None if result is None else getattr(result, name)
            record[f"{name}_{pool}_analytic"] = None if compared is None else compared.analytic
            record[f"{name}_{pool}"] = None if compared is None else compared.measured
    return record | {
        "kl_optimum_analytic": row.kl_expected, "kl_optimum": row.kl_optimum, "kl_rest": row.kl_rest,
        "reward_analytic": row.reward_expected, "reward": row.reward,
    }  # fmt: skip
