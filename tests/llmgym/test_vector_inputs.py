"""Bad input to the vector and the scalar shell: what the error says, and that nothing changed."""

import copy

import numpy as np
import pytest
from countdown import N, assert_same, scalar, vector
from gymnasium.error import ResetNeeded


def test_step_needs_reset():
    with pytest.raises(ResetNeeded, match="before reset"):
        scalar().step(1)
    with pytest.raises(ResetNeeded, match="before reset"):
        vector().step(np.ones(N, dtype=int))
    with pytest.raises(ResetNeeded, match="first reset must be of all rows"):
        vector().reset(options={"reset_mask": np.ones(N, dtype=bool)})


def test_scalar_never_resets_inside_step():
    env = scalar()
    env.reset(seed=0, options={"task_id": 0})
    assert env.step(1)[2]
    state = copy.deepcopy(env.np_random.bit_generator.state)
    for _ in range(2):
        with pytest.raises(ResetNeeded, match="after the end"):
            env.step(1)
    assert env.np_random.bit_generator.state == state
    env.reset()
    env.step(1)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([1, 1, 1], ValueError, r"action: got shape \(3,\); allowed: \(5,\)"),
        (1, ValueError, r"action: got shape \(\)"),
        ([[1]] * 5, ValueError, r"action: got shape \(5, 1\)"),
        ([1, 1, 0, 5, 1], ValueError, "action: row 2 has 0, row 3 has 5; allowed: integers 1 to 4"),
        ([1, 1, -1, 1, 1], ValueError, "row 2 has -1"),
        ([1.0] * 5, TypeError, "action: got float64 values; allowed: integers 1 to 4"),
        ([True] * 5, TypeError, "action: got bool values"),
    ],
)
def test_bad_vector_actions(wrong, error, message):
    env, twin = vector(), vector()
    env.reset(seed=0)
    twin.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(np.array(wrong))
    good = np.ones(N, dtype=int)
    assert_same(env.step(good)[0], twin.step(good)[0])  # the refused call changed nothing


def test_bad_actions_of_many_rows_are_counted():
    env = vector(n=20)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="row 4 has 9 and 15 more rows; allowed: integers 1 to 4"):
        env.step(np.full(20, 9))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (0, ValueError, "action: row 0 has 0; allowed: integers 1 to 4"),
        (5, ValueError, "action: row 0 has 5"),
        (1.0, TypeError, "action: got float64"),
        (np.array([1]), ValueError, r"action: got shape \(1,\); allowed: one integer"),
    ],
)
def test_bad_scalar_actions(wrong, error, message):
    env = scalar()
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(wrong)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"task_id": [0, 1]}, ValueError, r"task_id: got shape \(2,\); allowed: .*\(5,\)"),
        ({"task_id": 4}, ValueError, "task_id: row 0 has 4, .*allowed: integers 0 to 3"),
        ({"task_id": [0, 1, -1, 3, 4]}, ValueError, "task_id: row 2 has -1, row 4 has 4; allowed"),
        ({"task_id": [0.0] * 5}, TypeError, "task_id: got float64 values"),
        ({"task": 1}, ValueError, "options: got 'task'.*'task_id', 'reset_mask'"),
        ({"reset_mask": [True] * 5}, TypeError, r"reset_mask: got list; .* shape \(5,\)"),
        ({"reset_mask": np.ones(5)}, TypeError, "reset_mask: got float64 array"),
        ({"reset_mask": np.ones(4, bool)}, ValueError, r"reset_mask: got shape \(4,\)"),
        ({"reset_mask": np.zeros(5, bool)}, ValueError, "reset_mask: all False"),
    ],
)
def test_bad_vector_options(options, error, message):
    env, twin = vector(), vector()
    env.reset(seed=0)
    twin.reset(seed=0)
    with pytest.raises(error, match=message):
        env.reset(seed=9, options=options)
    good = np.ones(N, dtype=int)
    assert_same(env.step(good)[0], twin.step(good)[0])  # the refused call changed nothing


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"task_id": 4}, ValueError, "task_id: row 0 has 4; allowed: integers 0 to 3"),
        ({"task_id": [1]}, ValueError, r"task_id: got \[1\]; allowed: one integer"),
        ({"task_id": "1"}, TypeError, "task_id: got .* allowed: integers 0 to 3"),
        ({"reset_mask": np.ones(1, bool)}, ValueError, "got 'reset_mask'; allowed: 'task_id'"),
    ],
)
def test_bad_scalar_options(options, error, message):
    with pytest.raises(error, match=message):
        scalar().reset(options=options)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2], ValueError, "seed: got 2 seeds, need one per row .5."),
        ([1, 2, 3, -4, 5], ValueError, "seed: row 3 has -4; allowed: integers >= 0 or None"),
        (-1, ValueError, "seed: row 0 has -1"),
        ([1, 2, 3, 4, "5"], TypeError, "seed: row 4 has '5'"),
    ],
)
def test_bad_seeds(seed, error, message):
    with pytest.raises(error, match=message):
        vector().reset(seed=seed)
