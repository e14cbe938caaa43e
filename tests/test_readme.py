"""The README's own code, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(arguments: list[str], cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def my_agent(tmp_path: Path) -> Path:
    (source,) = (block for block in PYTHON_BLOCKS if "class MyAgent" in block)
    (tmp_path / "my_agent.py").write_text(source, encoding="utf-8")
    return tmp_path


def test_the_ten_lines_reach_the_optimum(tmp_path: Path) -> None:
    (source,) = (block for block in PYTHON_BLOCKS if 'gym.make("AnswerPool-v0")' in block)
    (tmp_path / "ten_lines.py").write_text(source, encoding="utf-8")
    output = run(["ten_lines.py"], tmp_path)
    kl = float(re.search(r"KL to the exact optimum: (\S+)", output)[1])  # type: ignore[index]
    assert 0 <= kl < 0.03


def test_the_token_lines_train(tmp_path: Path) -> None:
    (source,) = (block for block in PYTHON_BLOCKS if "TokenGeneration-v0" in block)
    (tmp_path / "tokens.py").write_text(source + "print(agent.num_timesteps)\n", encoding="utf-8")
    assert int(run(["tokens.py"], tmp_path)) >= 2_000


def test_the_logged_lines_train(tmp_path: Path) -> None:
    for package in ("d3rlpy", "mujoco"):
        pytest.importorskip(package)
    (source,) = (block for block in PYTHON_BLOCKS if "offline.algorithms" in block)
    (tmp_path / "logged.py").write_text(source + "print(agent.num_steps, actions.shape)\n", encoding="utf-8")
    assert run(["logged.py"], tmp_path).splitlines()[-1] == "300 (2, 3)"


def test_the_custom_agent_runs_in_the_answer_pool_benchmark(my_agent: Path) -> None:
    script = str(ROOT / "benchmarks" / "answer_pool_ppo.py")
    options = ["--agent", "my_agent:MyAgent", "--quick", "--runs", "2", "--rounds", "20"]
    output = run([script, *options, "--out", "out"], my_agent)
    assert "no field beta" in output
    assert (my_agent / "out" / "frontier.png").stat().st_size > 10_000


def test_the_custom_agent_runs_in_the_clip_sweep(my_agent: Path) -> None:
    script = str(ROOT / "benchmarks" / "cartpole_clip_sweep.py")
    options = ["--agent", "my_agent:MyAgent", "--quick", "--steps", "2000"]
    run([script, *options, "--out", "out"], my_agent)
    assert (my_agent / "out" / "learning_curves.png").stat().st_size > 10_000


def test_every_command_names_a_file_or_a_target_that_exists() -> None:
    scripts = re.findall(r"(benchmarks/\w+\.py)", README)
    assert scripts
    assert [name for name in scripts if not (ROOT / name).exists()] == []
    targets = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures
    assert [name for name in pictures if not (ROOT / name).exists()] == []
