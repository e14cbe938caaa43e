"""The mean beside its analytic value, by hand."""

import numpy as np
import pytest

from common.compare import compare


def test_difference_in_standard_errors_by_hand():
    # Mean 3, sample variance 8/3.
    found = compare(0.5, np.array([1.0, 3.0, 3.0, 5.0]))
    error = np.sqrt(8 / 3) / 2
    assert (found.analytic, found.measured) == (0.5, 3.0)
    assert found.standard_error == pytest.approx(error) and found.z == pytest.approx(2.5 / error)
    assert found.agrees and not compare(-4.0, np.array([1.0, 3.0, 3.0, 5.0])).agrees


def test_without_spread_equal_means_equal_up_to_rounding():
    constant = np.full(5, 0.1 + 0.2)
    assert compare(0.3, constant).z == 0.0
    assert compare(0.0, np.array([1e-28, 3e-28])).z == 0.0
    assert compare(0.4, constant).z == -np.inf and not compare(0.4, constant).agrees


@pytest.mark.parametrize("samples", [[1.0], np.ones((2, 2))])
def test_samples_are_one_axis_of_two_or_more(samples):
    with pytest.raises(ValueError, match="shape"):
        compare(0.0, np.array(samples))
