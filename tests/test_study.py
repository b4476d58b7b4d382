"""The small world, and the committed rows of its studies: the page's numbers, by another way."""

import json
import re
import statistics

from conftest import ROOT
from data import load_examples
from demo.__main__ import call, run_all
from demo.rows import main, read_scores, table
from demo.tiny import spoil_file, write_problems
from demo.world import PRETRAIN_MIX, TIERS, TRAIN_MIX, make_examples, solve

import numpy as np
import pytest
from scipy import stats

FOLDER = ROOT / "docs" / "study"
DETAILS = (FOLDER / "details.md").read_text()
ROWS = {
    name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    for name in ("first", "second", "third")
}
T_95 = {3: 3.182, 7: 2.365, 11: 2.201, 15: 2.131, 19: 2.093}  # Student's, by degrees of freedom


# ---- The world -----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["plain", "scratch"])
@pytest.mark.parametrize("tier", TIERS)
def test_problems_are_solved_by_their_own_steps_in_both_styles(tier, style):
    examples = make_examples(30, {tier: 1}, np.random.default_rng(0), set())
    assert len({example.question for example in examples}) == 30
    for example in examples:
        solution, answer = solve(example.question, style)
        assert answer == example.answer and solution.startswith("@") == (style == "scratch")
        *steps, box = solution.removeprefix("@").split(";")
        value, shown = example.question[0], example.question[0]
        for step in steps:
            left, result = step.split("=")
            left, _, work = left.partition(":")
            assert left[0] == value
            a, operator, b = int(left[0]), left[1], int(left[2])
            exact = {"<": min(a, b), ">": max(a, b)}.get(operator)
            exact = eval(f"{a}{operator.replace('^', '**')}{b}") if exact is None else exact
            assert int(result) == exact % 10 and (work[-1:] or result) == result
            assert len(work) == (2 if style == "scratch" else 0)
            value, shown = result, shown + left[1:]
        assert shown == example.question and box == f"\\boxed{{{value}}}" and value == answer
        operators, count = TIERS[tier]
        assert len(steps) == count and operators[-1] in shown and set(shown[1::2]) <= {*operators}


def test_no_question_is_drawn_twice_and_the_mix_is_kept():
    examples, taken = [], set()
    for _ in range(2):  # the same draws, were the first ones not taken
        examples += make_examples(2000, TRAIN_MIX, np.random.default_rng(0), taken)
    assert len({example.question for example in examples}) == 4000
    for tier, share in TRAIN_MIX.items():
        assert sum(example.source == tier for example in examples) == 4000 * share


def test_the_base_has_not_seen_the_retention_tiers_in_the_experts_style():
    assert {tier for style, tier in PRETRAIN_MIX if style != "plain"} == {*TRAIN_MIX}


def test_a_tenth_of_the_references_is_made_wrong_by_one_slip_that_the_rest_follows(tmp_path):
    write_problems(tmp_path, num_train=200)
    spoil_file(tmp_path)
    rows = {
        name: [example.columns for example in load_examples(str(tmp_path / f"{name}.jsonl"))]
        for name in ("train", "train-wrong")
    }
    spoiled = [pair for pair in zip(*rows.values(), strict=True) if pair[1].pop("spoiled")]
    assert len(spoiled) == 20
    assert sum(clean != row for clean, row in zip(*rows.values(), strict=True)) == 20
    for clean, row in spoiled:
        assert row["question"] == clean["question"] and row["answer"] != clean["answer"]
        assert row["solution"].endswith(f"boxed{{{row['answer']}}}")
        slips = 0
        for step in row["solution"].removeprefix("@").split(";")[:-1]:
            (left, work), result = step.split("=")[0].split(":"), step[-1]
            slips += solve(left, "scratch")[1] != result
            assert work[1] == result
        assert slips == 1


# ---- What is committed ---------------------------------------------------------------------------


def scores_by_seed(score: str, run: str) -> dict[int, float]:
    """Of a run as the tables name it, "set/method rate": a score of each seed. In plain Python."""
    world, _, name = run.rpartition("/")
    method, rate = name.split()
    found = {}
    worlds = (world, f"clean-{world}") if world else ("style", "clean")
    for rows in ROWS.values():
        bases = {row["seed"]: row for row in rows if (row["world"], row["steps"]) == ("style", 0)}
        for row in rows:
            steps = round(0.0144 / row["rate"]) if row["rate"] else 0
            if (row["method"], row["rate"], row["steps"]) != (method, float(rate), steps):
                continue
            if row["world"] in worlds and row["seed"] >= 10:
                found[row["seed"]] = score_of(score, [bases[row["seed"]], row])
    return found


def score_of(score: str, runs: list[dict]) -> float:
    tiers = [point["tiers"] for run in runs for point in run["checkpoints"]]
    gains, kept = (
        [50 * (each[a]["pass@1"] + each[b]["pass@1"]) for each in tiers]
        for a, b in (("middle", "hard"), ("keep", "long"))
    )
    if score != "kept":
        return gains[-1] if score == "gain" else kept[-1]
    found = []
    for level in (75, 80):
        value = kept[-1]
        for n in range(len(gains) - 1, 0, -1):
            if gains[n - 1] <= level <= gains[n]:
                share = (level - gains[n - 1]) / (gains[n] - gains[n - 1])
                value = kept[n - 1] + share * (kept[n] - kept[n - 1])
        found.append(value)
    return statistics.mean(found)


def assert_said(said: str, values: list[float]) -> None:
    """The mean of the values, with its 95 % interval, is what "+1.2 ± 0.3" says."""
    width = T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    found = [*map(float, said.replace("−", "-").split(" ± "))]
    assert found == pytest.approx([statistics.mean(values), width], abs=0.051)


def differences() -> list[tuple]:
    """Of the page's tables: score, two runs, the seeds, and what stands there."""
    number, found = r"([+−][\d.]+ ± [\d.]+)", []
    for family, score, a, b, said in re.findall(
        rf"\| ([HABC])\d[^|]*\| (kept|gain) \| (\S+ \S+) − (\S+ \S+) \| {number}", DETAILS
    ):
        found.append((score, a, b, (18, 26) if family == "H" else (26, 34), said))
    part = DETAILS.partition("| gain at 1e-4 |")[2]
    for a, b, said in re.findall(rf"\| (\S+ 1e-4) − (\S+ 1e-4) \| {number}", part):
        found.append(("gain", a, b, (10, 34), said))
    return found


@pytest.mark.parametrize(("score", "a", "b", "seeds", "said"), differences())
def test_a_difference_comes_out_by_another_way(score, a, b, seeds, said):
    ours, theirs = (scores_by_seed(score, run) for run in (a, b))
    both = [ours[n] - theirs[n] for n in range(*seeds) if n in ours and n in theirs]
    assert_said(said, both)


def test_the_table_is_that_of_the_rows_and_the_page_has_no_other_differences(tmp_path, monkeypatch):
    assert table(read_scores()) in DETAILS
    monkeypatch.setattr("demo.rows.FOLDER", tmp_path)
    for path in FOLDER.glob("*.jsonl"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "details.md").write_text(DETAILS)
    main()
    assert (tmp_path / "details.md").read_text() == DETAILS
    assert (tmp_path / "differences.png").stat().st_size > 10_000
    toy = (ROOT / "docs" / "study.md").read_text().split("## On a toy")[1]
    said = re.findall(r"[\d.]+ ± [\d.]+", toy)
    assert len(said) > 20 and [each for each in said if each not in DETAILS] == []


def test_retention_falls_with_the_share_of_answers_in_the_experts_style():
    page, found = (ROOT / "docs" / "study.md").read_text(), []
    everything = [row for rows in ROWS.values() for row in rows]
    for rows in (ROWS["second"], everything):
        points = [point["tiers"] for row in rows for point in row["checkpoints"]]
        style, kept = (
            np.array([tiers["keep"][name] + tiers["long"][name] for tiers in points])
            for name in ("scratch", "pass@1")
        )
        found.append(f"{np.corrcoef(style, kept)[0, 1] ** 2:.2f} over {len(points):,}")
    assert f"r² = {found[0]} checkpoints of the second study, {found[1]} of all three" in page
    bases = [row for row in everything if (row["world"], row["method"]) == ("style", "base")]
    kept = statistics.mean(score_of("retention", [row]) for row in bases)
    assert f"The bases have {kept:.1f} %" in page


def planned(family: str) -> list[tuple]:
    """Of the table of tests: name, score, two runs."""
    cells = rf"\| ([{family}]\d)[^|]*\| (kept|gain|TFLOPs) \| (\S+ \S+) − (\S+ \S+) \|"
    return re.findall(cells, DETAILS)


def test_what_holds_with_one_seed_left_out_is_said():
    scores, held = read_scores(), dict.fromkeys(range(9), "")  # by how often, of eight
    for family, first in (("H", 18), ("ABC", 26)):
        times = {name: 0 for name, *_ in planned(family)}
        for left_out in range(first, first + 8):
            seeds = [seed for seed in range(first, first + 8) if seed != left_out]
            p = {
                name: stats.ttest_1samp(scores[what][a][seeds] - scores[what][b][seeds], 0).pvalue
                for name, what, a, b in planned(family)
            }
            for rank, name in enumerate(sorted(p, key=p.get)):
                if (len(p) - rank) * p[name] >= 0.05:  # Holm: no larger p counts, either
                    break
                times[name] += 1
        for name, count in times.items():
            held[count] += name
    assert (held[8], held[3], held[2]) == ("H5H6A1A2A3B2", "H1H3", "H2H7B1")
    assert "left out, H5, H6, A1 to A3 and B2 hold whichever it is" in DETAILS
    assert "H1 and H3 hold in three, and\nfail in five; H2, H7 and B1 hold in two" in DETAILS


def test_checkpoints_and_mixed_commits_are_counted():
    counts = [{len(r["checkpoints"]) for r in rows if r["steps"]} for rows in ROWS.values()]
    assert counts == [{1, 2, 3, 4, 5}, {12}, {6, 9, 12}]
    assert "checkpoints in the second study, at most five in the first, six to twelve" in DETAILS
    commits = {}
    for row in ROWS["third"]:
        world = re.sub("style|clean-?", "", row["world"])
        run = f"{world and world + '/'}{row['method']}", row["rate"], row["seed"]
        commits[run] = row["git_commit"]
    mixed = []
    for _, _, *runs in planned("ABC"):
        (a, r), (b, s) = (run.split() for run in runs)
        mixed += [commits[a, float(r), n] != commits[b, float(s), n] for n in range(26, 34)]
    assert f"{sum(mixed)} of the third study's {len(mixed)} pairs mix two commits" in DETAILS


def test_in_the_models_own_style_sft_gains_and_keeps():
    base, own = (
        {r["seed"]: r for r in ROWS["first"] if (r["world"], r["method"], r["steps"]) == which}
        for which in (("style", "base", 0), ("own", "sft", 72))
    )
    for score, said in (("gain", "+36.1 ± 10.8"), ("retention", "−0.7 ± 0.4")):
        change = [score_of(score, [own[n]]) - score_of(score, [base[n]]) for n in own if n >= 10]
        assert_said(said, change)
        assert f"| {score} | {said} |" in DETAILS


def test_every_committed_row_says_how_it_came_about():
    for name, rows in ROWS.items():
        for row in rows:
            assert name != "third" or not row["git_commit"].endswith("dirty")
            ours = ("python train_", "deepspeed train_", "python -m demo.tiny make ")
            assert row["command"].startswith(ours)
            assert re.fullmatch("[0-9a-f]{40}(-dirty)?", row["git_commit"]), row["git_commit"]
            assert row["versions"]["torch"] and row["seconds"]
            assert "/" not in row["machine"] and row["command"].count(" /") == 0


# ---- The demo's commands -------------------------------------------------------------------------


def test_a_command_that_fails_is_named_with_its_log_and_its_last_line_and_no_other_begins(tmp_path):
    log, begun = tmp_path / "logs" / "run.log", []
    why = "import sys; print('why it failed'); sys.exit(3)"

    def run(name: str) -> None:
        begun.append(name)
        call(f'python -c "{why}"', log)

    with pytest.raises(ChildProcessError, match=r"logs/run\.log: status 3: why it failed"):
        run_all(run, "abcdef", "runs")
    assert len(begun) < 6
