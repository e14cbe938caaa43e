"""The verdict on the folklore about clip ranges, from runs made up to be clear either way."""

import pytest

from common.expectation import RunMeasures, judge


def runs(episodes, stds, means):
    return [RunMeasures(*values) for values in zip(episodes, stds, means, strict=True)]


FAST = runs([200, 205, 210, 215, 220], [10.0, 11, 12, 13, 14], [495.0, 496, 497, 498, 499])
SLOW = runs([400, None, 410, 420, 430], [1.0, None, 2, 3, 4], [380.0, 390, 400, 410, 420])
SHAKY = runs([200, 205, 210, 215, 220], [80.0, 90, 100, 95, 85], [300.0, 350, 400, 450, 460])


def verdicts(expectation):
    return [claim.verdict for claim in expectation.claims]


def test_held():
    found = judge({0.1: SLOW, 0.2: FAST, 0.3: SHAKY})
    assert found.verdict == "held" and verdicts(found) == ["held"] * 4
    assert found.line.startswith(
        'Expectation "0.2 is the best balance, 0.1 slow, 0.3 unstable": held.'
    )
    assert "0.1 slower than 0.2: held (P = 1.00 [1.00, 1.00])" in found.line
    assert "\n" not in found.line


def test_did_not_hold():
    # 0.1 is as fast as 0.2 and 0.3 the steadiest: one contradicted claim decides.
    found = judge({0.1: FAST, 0.2: SHAKY, 0.3: SLOW})
    assert found.verdict == "did not hold"
    assert verdicts(found) == [
        "not distinguishable",
        "contradicted",
        "contradicted",
        "not distinguishable",  # ends 300 to 460 against 380 to 420
    ]
    assert "P = 0.00 [0.00, 0.00]" in found.line


def test_equal_groups_are_not_distinguishable():
    found = judge({0.1: FAST, 0.2: FAST, 0.3: FAST})
    assert found.verdict == "not confirmed" and verdicts(found) == ["not distinguishable"] * 4


def test_one_open_claim_leaves_it_unconfirmed():
    found = judge({0.1: SLOW, 0.2: FAST, 0.3: FAST})
    assert found.verdict == "not confirmed"
    assert verdicts(found) == ["held", "not distinguishable", "held", "not distinguishable"]


def test_never_reaching_is_the_slowest():
    never = runs([None] * 5, [None] * 5, [100.0] * 5)
    found = judge({0.1: never, 0.2: FAST, 0.3: never})
    assert verdicts(found) == ["held", "too few runs to say", "held", "held"]
    assert found.verdict == "not confirmed"
    assert "0.3 less stable than 0.2: too few runs to say;" in found.line  # no number to show
    assert verdicts(judge({0.1: never, 0.2: never, 0.3: never}))[0] == "not distinguishable"


@pytest.mark.parametrize("n", [1, 3])
def test_few_runs_say_nothing(n):
    found = judge({0.1: SLOW[:n], 0.2: FAST[:n], 0.3: SHAKY[:n]})
    assert verdicts(found) == ["too few runs to say"] * 4 and found.verdict == "not confirmed"


def test_all_three_groups_are_needed():
    with pytest.raises(KeyError):
        judge({0.1: SLOW, 0.2: FAST})
