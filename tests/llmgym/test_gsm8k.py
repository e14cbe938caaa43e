"""GSM8K: its format, splits, sources and errors, on a few lines; and on the data where they are."""

import json
import os
import sys
import types

import pytest

from llmgym.tasks.gsm8k import PATH_VARIABLE, gsm8k
from llmgym.tasks.problems import SPLITS, MathTask, Problem

DATA = os.environ.get(PATH_VARIABLE)


def line(number: int) -> dict[str, str]:
    answer = (
        f"It is {number} + {number} = <<{number}+{number}={2 * number}>>{2 * number}.\n#### {2 * number:,}"
    )
    return {"question": f"What is twice {number}?", "answer": answer}


def write(path, numbers) -> None:
    path.write_text("".join(json.dumps(line(number)) + "\n" for number in numbers), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.jsonl", range(1000, 1100))
    write(tmp_path / "test.jsonl", range(1090, 1110))
    return tmp_path


def questions(problems) -> set[str]:
    return {problem.prompt for problem in problems}


def test_a_folder(folder):
    task = gsm8k(folder)
    assert questions(task.held_out) == {f"What is twice {n}?\n" for n in range(1090, 1110)}
    # What is in the test problems is not trained on; a tenth of the rest is validation.
    assert questions([*task.train, *task.validation]) == {f"What is twice {n}?\n" for n in range(1000, 1090)}
    assert 0 < len(task.validation) < 25
    first = task.held_out[0]
    assert first == Problem("What is twice 1090?\n", "2,180", "It is 1090 + 1090 = 2180.\n#### 2,180")
    texts = ["#### 2180", "The answer is 2,180.", "#### 2181", "2180 or 2181", first.solution]
    assert task.score([first] * 5, texts).total.tolist() == [1, 1, 0, 0, 1]
    assert task.score([first] * 5, texts, "lenient").total.tolist() == [1, 1, 0, 1, 1]


def test_one_file_and_the_environment_variable(folder, monkeypatch):
    task = gsm8k(folder / "train.jsonl")
    assert len(questions(task.all_problems())) == 100 and len(task.held_out) > len(task.validation)
    monkeypatch.setenv(PATH_VARIABLE, str(folder))
    assert questions(gsm8k().held_out) == questions(gsm8k(folder).held_out)


def test_repeated_questions_are_there_once(tmp_path):
    rows = [line(n) for n in range(50)] + [{**line(7), "question": "WHAT is  twice 7? "}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert len(gsm8k(path).all_problems()) == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "data.jsonl, line 2: no JSON"),
        ("3", "data.jsonl, line 2: got 3; allowed: an object with a question"),
        (
            '{"question": "a", "answer": "5"}',
            "line 2: got .*an answer that ends with '####' and the true one",
        ),
        ('{"question": "", "answer": "#### 5"}', "line 2: got "),
        ('{"question": "a", "answer": "#### "}', "line 2: got "),
        ('{"question": "a"}', "line 2: got "),
    ],
)
def test_bad_lines(tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + text + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        gsm8k(path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: no file .*nowhere; allowed: a JSON-lines file"):
        gsm8k(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="path: no file .*train.jsonl"):
        gsm8k(tmp_path)


def test_the_hub(monkeypatch):
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    hub = types.ModuleType("datasets")
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {"train": [line(n) for n in range(60)], "test": [line(n) for n in range(60, 70)]}

    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = gsm8k()
    assert asked == [("openai/gsm8k", "main")] and len(task.held_out) == 10

    def offline(*names):
        raise ConnectionError("no route")

    hub.load_dataset = offline
    with pytest.raises(OSError, match=r"give path=, set LLMGYM_GSM8K, or go online: .*no route"):
        gsm8k()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"or install datasets: pip install llmgym\[llm\]"):
        gsm8k()


@pytest.mark.skipif(DATA is None, reason=f"set {PATH_VARIABLE} to the folder of train.jsonl and test.jsonl")
def test_the_data_themselves():
    task = gsm8k()
    assert isinstance(task, MathTask)
    assert [len(task.split(name)) for name in SPLITS] == [6723, 750, 1319]
    problems = task.all_problems()
    scores = task.score(problems, [problem.solution for problem in problems])
    assert scores.total.tolist() == scores.components["lenient"].tolist() == [1] * 8792
    wrong = task.score(problems, [problem.solution + "1" for problem in problems])
    assert not any(wrong.total)
    assert not any(task.score(problems, [problem.prompt for problem in problems][::-1]).total[:20])
