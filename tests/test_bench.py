"""Measurements: that they count what they say."""

import itertools
import re
from functools import partial
from importlib.util import find_spec

from bench import measure
from conftest import SHARED, needs_shared, needs_vllm, output_of, slow

import pytest

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


@slow
@needs_vllm
@needs_shared
@needs_trl
def test_a_section_measures_what_it_names(tiny, tmp_path):
    with (SHARED / "data/gsm8k_model_solutions.jsonl").open() as solutions:
        (tmp_path / "some").write_text("".join(itertools.islice(solutions, 50)))
    parts = ("--tokens", 1024, "--vocabulary", 4096, "--solutions", tmp_path / "some")
    flags = ("--repetitions", 1, "--model", tiny / "model", "--data", tiny / "train.jsonl")
    for section, own, rows in (("parts", parts, 10), ("step", (), 8)):
        output = output_of("-m", f"bench.{section}", *flags, *own)
        cells = re.findall(r"^\| .* \| ([\d.]+) \(\S+\) \| [\d.]+ \|", output, re.M)
        assert len(cells) >= rows and min(map(float, cells)) > 0, output
