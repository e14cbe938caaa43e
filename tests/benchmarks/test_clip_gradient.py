"""The clipped objective's derivative: by hand, by finite differences, and through the script."""

import json
from pathlib import Path

import numpy as np
import pytest
import tyro

import clip_gradient
from clip_gradient import make_cases, objective, ratios, rule


def test_the_four_cases_by_hand():
    # min(1.5 * 2, 1.2 * 2), min(0.5 * 2, 0.8 * 2), min(-1.5 * 2, -1.2 * 2), min(-0.5 * 2, -0.8 * 2)
    for advantage, values, slopes in ((2.0, [2.4, 1.0], [0, 2]), (-2.0, [-3.0, -1.6], [-2, 0])):
        ratio = np.array([1.5, 0.5])
        value, slope = objective(ratio, advantage, 0.2, 0.2)
        np.testing.assert_allclose(value, values, atol=1e-12)
        np.testing.assert_allclose(slope, slopes, atol=1e-12)
        np.testing.assert_array_equal(rule(ratio, advantage, 0.2, 0.2), slopes)


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.28), (0.05, 0.5), (0.9, 2.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.3, -4.0])
def test_rule_autograd_and_finite_differences_agree(low, high, advantage):
    ratio = ratios(200, low, high)
    assert ratio.min() > 0 and ratio.max() > 1 + high
    assert np.abs(ratio[:, None] - [1 - low, 1 + high]).min() > 1e-4  # so that no step crosses a corner
    slope = objective(ratio, advantage, low, high)[1]
    step = 1e-5
    up, down = (objective(ratio + s, advantage, low, high)[0] for s in (step, -step))
    np.testing.assert_allclose((up - down) / (2 * step), slope, atol=1e-8)
    np.testing.assert_allclose(slope, rule(ratio, advantage, low, high), atol=1e-12)
    assert (slope == 0).any() and (slope != 0).any()


def test_cases_are_all_signs_and_sides():
    cases = make_cases(0.2, 0.28)
    assert [(c.advantage, c.side, c.analytic) for c in cases] == [
        (1, "below", 1), (1, "inside", 1), (1, "above", 0),
        (-1, "below", 0), (-1, "inside", -1), (-1, "above", -1),
    ]  # fmt: skip
    assert [c.measured for c in cases] == pytest.approx([c.analytic for c in cases])
    for case in cases:
        assert (case.ratio < 0.8, case.ratio > 1.28) == (case.side == "below", case.side == "above")


@pytest.mark.parametrize(
    "change, message",
    [({"clip": 0.0}, "--clip is 0.0"), ({"clip": 1.0}, "--clip is 1.0"),
     ({"clip_high": 0.0}, "--clip-high is 0.0"), ({"points": 9}, "--points is 9")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    with pytest.raises(ValueError, match=message):
        clip_gradient.check(clip_gradient.Args(**change))
    assert clip_gradient.main(clip_gradient.Args(**change)) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--clip", "0.99", "--clip-high", "3"]])
def test_the_script_end_to_end(tmp_path: Path, capsys, extra):
    args = tyro.cli(clip_gradient.Args, args=["--quick", "--out", str(tmp_path), *extra])
    assert clip_gradient.main(args) == 0
    assert "no gradient" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["cases"]) == 6 and summary["largest_difference"] < 1e-12
    curve = summary["curves"]["+1"]
    assert curve["derivative_measured"] == pytest.approx(curve["derivative_analytic"])
    assert (tmp_path / "clip_gradient.png").stat().st_size > 10_000
