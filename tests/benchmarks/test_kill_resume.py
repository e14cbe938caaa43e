"""The kill benchmark: that it works, and that it would see what it looks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import kill_resume
from agents.checkpoint import checkpoints, read_state
from agents.cli import main as llmgym
from kill_resume import Kind, differences, inspect

ARGS = "--env AnswerPool-v0 --n-envs 2 --steps 40 --checkpoint-every 4 --config n_steps=2"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert llmgym(["train", *ARGS.split(), "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def resumed(unbroken: Path, tmp_path: Path) -> Path:
    shutil.copytree(unbroken, tmp_path / "resumed")
    return tmp_path / "resumed"


def change_state(folder: Path, part: str) -> None:
    path = checkpoints(folder)[0]
    state = read_state(path)
    if part == "policy":
        state["policy"]["logits"][0, 0] += 1e-7 + state["policy"]["logits"][0, 0].abs() * 1e-6
    elif part == "optimizer":
        state["optimizer"]["state"][0]["exp_avg"][0] += 1.0
    else:
        state["generator"] = torch.Generator().manual_seed(1).get_state()
    torch.save(state, path)


def test_equal_runs_have_no_differences(unbroken, resumed):
    assert differences(unbroken, resumed) == []


@pytest.mark.parametrize(
    "part, name", [("policy", "the policy"), ("optimizer", "the optimiser"), ("generator", "the generator")]
)
def test_a_changed_state_is_seen(unbroken, resumed, part, name):
    change_state(resumed, part)
    assert differences(unbroken, resumed) == [name]


@pytest.mark.parametrize("file", ["metrics.jsonl", "result.json"])
def test_a_changed_file_is_seen(unbroken, resumed, file):
    text = (resumed / file).read_text()
    (resumed / file).write_text(text.replace("0.", "0.0", 1))
    assert differences(unbroken, resumed) == [file]


def test_inspection_sees_what_is_unreadable_or_lost(unbroken, resumed, tmp_path):
    def failures(folder: Path) -> list[str]:
        kind = Kind(4, [], unbroken)
        inspect(kind, folder)
        return kind.failures

    assert failures(resumed) == [] and failures(tmp_path / "not there yet") == []
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 48')  # cut off by the kill: is dropped on resume
    assert failures(resumed) == []
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write("}\n" + json.dumps({"step": 49}) + "\n")
    assert len(failures(resumed)) == 1 and "steps lost" in failures(resumed)[0]
    (resumed / "config.json").write_text("{")
    assert "unreadable" in failures(resumed)[0]


def test_killed_runs_equal_the_unbroken_one(tmp_path, monkeypatch):
    run = "--env AnswerPool-v0 --n-envs 16 --steps 8000 --checkpoint-every 256 --config n_steps=16"
    monkeypatch.setattr(kill_resume, "RUNS", {"short": (256, run)})
    assert kill_resume.main(["--kills", "2", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kills"] == 2 and sum(summary["kinds"][0]["moments"].values()) == 2
    assert summary["kinds"][0]["failures"] == []
