"""The demo: its problems, and three methods from one base."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from conftest import ROOT
from demo.tiny import make_examples
from paper import plot


def files_of_the_repository() -> set[Path]:
    """Its files and folders, without hidden ones and bytecode."""
    found = {*ROOT.glob("[!.]*"), *ROOT.glob("[!.]*/**/*")}
    return {path for path in found if "__pycache__" not in path.parts}


def test_pass_at_1_of_the_tiny_model_rises_under_each_method_of_the_demo(tmp_path):
    before = files_of_the_repository()
    demo = [sys.executable, "-m", "demo", "--output_dir", tmp_path / "a demo", "--steps", "20"]
    result = subprocess.run(demo, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    scores = {}
    for name in ("base", "sft", "oswft", "grpo"):
        results = json.loads((tmp_path / "a demo" / name / "eval" / "results.json").read_text())
        scores[name] = sum(tier["pass@1"] for tier in results.values()) / len(results)
    for method in ("sft", "oswft", "grpo"):
        assert scores[method] > scores["base"], scores

    report = (tmp_path / "a demo" / "report.txt").read_text()
    table = {
        line.split()[0]: line.split()[1:] for line in report.splitlines() if line[:1].isalpha()
    }
    assert len(table["base"]) == 6  # two scores for each of three tiers
    assert table["sft"][6] == "0" and int(table["oswft"][6].replace(",", "")) > 0
    assert all(len(table[name]) == 6 + 2 + 4 for name in ("sft", "oswft", "grpo"))
    pictures = {path.stem for path in (tmp_path / "a demo" / "plots").iterdir()}
    assert pictures == set(plot.FIGURES)
    assert files_of_the_repository() == before  # it may be read-only


def test_tiny_problems_are_solved_by_their_own_steps():
    examples = make_examples(
        90, {"easy": 1 / 3, "middle": 1 / 3, "hard": 1 / 3}, np.random.default_rng(0), set()
    )
    assert len({example.question for example in examples}) == 90
    for example in examples:
        *steps, box = example.solution.split(";")
        value = example.question[0]
        for step in steps:
            left, right = step.split("=")
            assert left.startswith(value)
            assert eval(left.replace("^", "**")) % 10 == int(right)
            value = right
        assert box == f"\\boxed{{{value}}}" and example.answer == value
        operators = set(example.question) - set("0123456789")
        assert operators <= set({"easy": "+-", "middle": "+-*", "hard": "+-*^"}[example.source])
        assert {"middle": "*", "hard": "^"}.get(example.source, "-") in operators
