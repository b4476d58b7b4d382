"""pass@k, and what the tiny model knows before it is fine-tuned."""

import itertools
import json
import subprocess
import sys

import pytest

from conftest import ROOT, TINY_LENGTHS
from evaluate import pass_at_k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_equals_the_mean_over_all_subsets(n, c):
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 5])
def test_more_answers_than_samples_are_refused(k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(4, 1, k)


def test_the_tiny_model_knows_the_easy_tier_the_middle_partly_and_the_hard_hardly(tiny, tmp_path):
    command = [sys.executable, "evaluate.py", "--model", tiny / "model", "--output_dir", tmp_path]
    command += ["--data", tiny / "heldout.jsonl", *TINY_LENGTHS, "--num_samples", "4"]
    command += ["--k", "1", "4", "--temperature", "1", "--top_p", "1", "--top_k", "0"]
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["problems"] for result in results.values()] == [64, 64, 64]
    easy, middle, hard = (results[tier]["pass@1"] for tier in ("easy", "middle", "hard"))
    assert easy > 0.85 > middle > 0.2 > hard
    assert all(result["pass@4"] >= result["pass@1"] for result in results.values())
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert len(samples) == 192 * 4
    by_hand = sum(row["correct"] for row in samples if row["id"].startswith("hard")) / (64 * 4)
    assert hard == pytest.approx(by_hand)


def test_too_few_samples_for_k_are_refused_in_one_line():
    command = [sys.executable, "evaluate.py", "--model", "m", "--data", "d", "--num_samples", "4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("error: 4 samples allow pass@k up to k=4")
