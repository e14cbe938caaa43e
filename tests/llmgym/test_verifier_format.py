"""Rewards for form, by hand."""

import numpy as np
import pytest

from llmgym.verifiers.format import (
    answer_form,
    overlong,
    required_tags,
    score_format,
    states_an_answer,
)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>a</think><answer>5</answer>", 1),
        ("  <think>a\nb</think>\n\n<answer> 5 </answer>\n", 1),
        ("<think></think><answer>5</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<answer>5</answer><think>a</think>", 0),
        ("<think>a</think>so <answer>5</answer>", 0),
        ("Well, <think>a</think><answer>5</answer>", 0),
        ("<think>a</think><answer>5</answer> indeed", 0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0),
        ("<think>a<answer>5</think></answer>", 0),
        ("<think>a</think><answer>5", 0),
        ("</think>a<think></answer>5<answer>", 0),
        ("", 0),
    ],
)
def test_required_tags(response, right):
    assert required_tags("think", "answer")(response) == right


@pytest.mark.parametrize(
    ("form", "response", "right"),
    [
        ("boxed", "so \\boxed{\\frac{1}{2}}.", 1),
        ("boxed", "\\boxed{}", 0),
        ("boxed", "\\boxed{1} \\boxed{2}", 0),
        ("boxed", "\\boxed{1", 0),
        ("boxed", "5", 0),
        ("hash", "1+1=2\n#### 2\n", 1),
        ("hash", "#### 2", 1),
        ("hash", "#### 2\nand so on", 0),
        ("hash", "####", 0),
        ("hash", "#### 1\n#### 2", 0),
        ("hash", "so #### 2", 0),
        ("tag", "<answer>5</answer>", 1),
        ("tag", "<answer></answer>", 0),
        ("tag", "</answer>5<answer>", 0),
        ("tag", "<answer>5", 0),
    ],
)
def test_answer_form(form, response, right):
    assert answer_form(form)(response) == right


def test_a_form_that_only_the_prompt_has_earns_nothing():
    response = "I am not sure."
    parts = {form: answer_form(form) for form in ("boxed", "hash", "tag")}
    scores = score_format([response], parts | {"any": states_an_answer})
    assert scores.total.tolist() == [0]


def test_overlong_is_linear_in_the_buffer():
    score = overlong(max_length=10, buffer=4)
    assert [score("x" * n) for n in (0, 6, 7, 8, 10, 11, 99)] == [0, 0, -0.25, -0.5, -1, -1, -1]
    words = overlong(max_length=2, buffer=1, length=lambda text: len(text.split()))
    assert [words("a"), words("a b"), words("a b c")] == [0, -1, -1]


def test_components_add_up_with_their_weights_and_are_reported():
    parts = {"box": answer_form("boxed"), "length": overlong(10, 5)}
    scores = score_format(["\\boxed{5}", "x" * 10, "5"], parts, {"box": 0.5})
    np.testing.assert_array_equal(scores.components["box"], [1, 0, 0])
    np.testing.assert_array_equal(scores.components["length"], [-0.8, -1, 0])
    np.testing.assert_allclose(scores.total, [0.5 - 0.8, -1, 0])
    assert score_format([], parts).total.shape == (0,)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="names"):
        required_tags()
    with pytest.raises(ValueError, match="names"):
        required_tags("think", "think")
    with pytest.raises(ValueError, match="form.*boxd.*boxed"):
        answer_form("boxd")
    with pytest.raises(ValueError, match="buffer: got 11"):
        overlong(10, 11)
    with pytest.raises(ValueError, match="components: got none"):
        score_format(["a"], {})
    with pytest.raises(ValueError, match="weights.*boks"):
        score_format(["a"], {"box": answer_form("boxed")}, {"boks": 1.0})
    with pytest.raises(ValueError, match="row 0"):
        score_format(["a"], {"bad": lambda text: float("nan")})
