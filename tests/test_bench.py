"""Measurements: that they count what they say."""

import itertools
import re
from functools import partial
from importlib.util import find_spec

from bench import measure
from conftest import SHARED, needs_shared, needs_vllm, output_of, slow

import pytest
import torch

needs_trl = pytest.mark.skipif(not find_spec("trl"), reason="needs requirements-dev.txt")


def test_what_is_compared_takes_turns_and_a_goal_needs_both_ratios():
    seconds, calls = {"ours": [9, 1, 10, 5], "theirs": [9, 3, 30, 10]}, []

    def case(name: str, turn: int) -> float:
        calls.append(name[0])
        return seconds[name][turn]

    cases = {name: partial(case, name) for name in seconds}
    found = measure.compare("time", cases, 3, {"theirs": 2}).split("\n")
    assert "".join(calls) == "ottootto"
    assert found[2] == "| ours | 5 (1–10) | 1.00 (1.00–1.00) | 1.00 |  |"  # not the first turn
    assert found[3] == "| theirs | 10 (3–30) | 3.00 (2.00–3.00) | 2.00 | ≥ 2: reached |"
    assert "| 2.00 | ≥ 2.5: NOT reached" in measure.compare("time", cases, 3, {"theirs": 2.5})
    assert "9 (9–9)" in measure.compare("time", cases, 1, {})  # a single turn counts


def test_extra_memory_is_the_peak_beyond_what_was_there_and_what_is_returned():
    mib = 2**20
    before = torch.ones(16 * mib)

    def call() -> list[torch.Tensor]:
        kept = before[: 8 * mib] * 2
        before.repeat(2)  # 128 MiB
        return [kept]

    extra = measure.extra_memory(call)
    assert 120 * mib <= extra <= 150 * mib


@slow
@needs_vllm
@pytest.mark.parametrize(
    ("section", "rows", "goals"),
    [pytest.param("parts", 10, 5, marks=needs_shared), pytest.param("step", 8, 4, marks=needs_trl)],
)
def test_a_section_measures_what_it_names(section, rows, goals, tiny, tmp_path):
    flags = ["--repetitions", 1, "--model", tiny / "model", "--data", tiny / "train.jsonl"]
    if section == "parts":
        with (SHARED / "data/gsm8k_model_solutions.jsonl").open() as solutions:
            (tmp_path / "some").write_text("".join(itertools.islice(solutions, 50)))
        flags += ["--tokens", 1024, "--vocabulary", 4096, "--solutions", tmp_path / "some"]
    output = output_of("-m", f"bench.{section}", *flags)
    cells = re.findall(r"^\| .* \| ([\d.]+) \(\S+\) \| [\d.]+ \|", output, re.M)
    assert len(cells) >= rows and min(map(float, cells)) > 0, output
    assert output.startswith(f"## {section}\n") and output.count("reached |") >= goals
