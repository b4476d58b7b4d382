"""Measurements: that they count what they say."""

from functools import partial

from bench import measure


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
