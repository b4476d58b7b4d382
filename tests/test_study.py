"""The study: its world, what is chosen on which seeds, its statistics, and a folder that grows."""

import copy
import json

import numpy as np
import pytest

import demo.study
from conftest import ROOT
from data import InputError
from demo.report import Results, difference, fill, report
from demo.score import OFFLINE_SAMPLES, add_weights
from demo.study import (
    CHOOSING_SEEDS,
    FULL,
    METHODS,
    SEEDS,
    STEPS,
    Job,
    Study,
    all_settings,
    choose,
    in_process,
    job_of,
    short,
    tokens,
    write_results,
)
from demo.world import BASES, TIERS, TRAIN_MIX, make_examples, solve

PAGE, RESULTS = ROOT / "docs" / "study.md", ROOT / "docs" / "study" / "results.json"


# ------------------------------------------------------------------------------------------------
# The world


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
    taken = {"1+1+1-1"}
    examples = make_examples(400, TRAIN_MIX, np.random.default_rng(0), taken)
    assert len({example.question for example in examples} - {"1+1+1-1"}) == 400
    for tier, share in TRAIN_MIX.items():
        assert sum(example.source == tier for example in examples) == 400 * share


def test_neither_base_has_seen_the_retention_tiers_in_the_experts_style():
    for base in BASES.values():
        assert not {kind for kind in base.mix if kind[0] != "plain"} & {
            (style, tier) for style in ("scratch", "bare") for tier in ("keep", "long", "far")
        }


# ------------------------------------------------------------------------------------------------
# Rows that no run has made, for what is computed from rows


def row(job: Job, score: float = 0.5) -> dict:
    """What a run leaves, with one score for all tiers; a step costs 1,000 tokens and FLOPs."""
    scores = {"pass@1": score, "pass@8": score, "scratch": 0.0, "truncated": 0.0, "kl": 0.0}
    checkpoints = [
        {
            "steps": steps,
            "trained_tokens": 1000 * steps,
            "sampled_tokens": 1000 * steps,
            "flops": 1000 * steps,
            "tiers": {tier: dict(scores) for tier in TIERS},
        }
        for steps in ([0] if job.method == "base" else [s for s in STEPS if s <= job.steps])
    ]
    found = {**vars(job), "machine": demo.study.machine(), "checkpoints": checkpoints}
    if "oswft" in METHODS.get(job.method, ""):
        found["weights"] = {tier: [0.5] * job.steps for tier in TRAIN_MIX}
    return found


@pytest.fixture(scope="module")
def all_rows() -> list[dict]:
    """A full study; the scores are random."""
    rng, rows, done = np.random.default_rng(0), [], set()
    for plan in FULL:
        for job in plan(rows):
            for each in (job.base, job):
                if each.name not in done:
                    done.add(each.name)
                    rows.append(row(each, rng.random()))
    return rows


def test_settings_are_chosen_on_other_seeds_than_those_that_are_reported(all_rows):
    assert not set(SEEDS) & set(CHOOSING_SEEDS)
    before = all_settings(all_rows)
    changed = copy.deepcopy(all_rows)
    for each in changed:
        if each["seed"] in SEEDS:
            for point in each["checkpoints"]:
                for tier in point["tiers"].values():
                    tier["pass@1"] = 1.0
    assert all_settings(changed) == before
    for each in changed:
        for point in each["checkpoints"]:
            if each["method"] == "sft" and point["steps"] == 24 and each["rate"] == 5e-5:
                point["tiers"]["keep"]["pass@1"] = 9.0
    assert all_settings(changed)["style"]["sft"]["best"] == (5e-5, 24)


def test_a_limit_leaves_out_what_costs_more(all_rows):
    assert choose(all_rows, "style", "sft", "flops", 30_000)[1] == 24
    assert choose(all_rows, "style", "sft", "flops", 10_000) is None


def test_every_method_is_reported_on_the_seeds_that_are_promised(all_rows):
    results = Results(all_rows, json.loads(json.dumps(all_settings(all_rows))))
    for method in METHODS:
        promised = 8 if method in demo.study.MAIN else 4
        assert len(results.seeds("style", method)) == promised
    assert len(results.seeds("own", "grpo")) == len(results.seeds("weak", "oswft")) == 4
    rate, steps = results.setting("style", "grpo")
    assert results.setting("style", "grpo", "tenfold") == (pytest.approx(10 * rate), steps)


def test_an_unfinished_study_says_what_is_missing_and_does_each_run_once(tmp_path, monkeypatch):
    study, begun = Study(tmp_path, workers=2), []
    jobs = [Job("style", "sft", 1e-4, 24, seed) for seed in (10, 11, 12)]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(jobs[0])) + '\n{"half')
    study = Study(tmp_path, workers=2)
    assert [job.name for job in study.missing(jobs)] == [
        *(f"base-usual-{seed}" for seed in (10, 11, 12)),
        *(job.name for job in jobs[1:]),
    ]

    def run_job(job, root):
        begun.append(job.name)
        (root / job.name).mkdir()
        if job.seed == 12 and job.method != "base":
            raise ChildProcessError("killed")
        return row(job)

    monkeypatch.setattr(demo.study, "run_job", run_job)
    with pytest.raises(ChildProcessError):
        study.run(jobs, "part")
    study = Study(tmp_path, workers=1)
    assert [job.name for job in study.missing(jobs)] == [jobs[2].name]
    assert (tmp_path / "base-usual-10").exists() and not (tmp_path / jobs[1].name).exists()
    assert [job_of(each).name for each in study.rows].count(jobs[1].name) == 1
    (tmp_path / "base-usual-12").rmdir()
    assert [job.name for job in study.missing(jobs)] == ["base-usual-12", jobs[2].name]


def test_another_setting_or_another_machine_is_refused(tmp_path, monkeypatch):
    Study(tmp_path, workers=1)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(Job("style", "sft", 1e-4, 24, 10))) + "\n")
    Study(tmp_path, workers=1)
    with monkeypatch.context() as changed, pytest.raises(InputError, match="lengths"):
        changed.setitem(demo.study.SETTINGS, "lengths", "--max_length 99")
        Study(tmp_path, workers=1)
    with (
        monkeypatch.context() as changed,
        pytest.raises(InputError, match="rows of another machin"),
    ):
        changed.setattr(demo.study, "machine", lambda: "another")
        Study(tmp_path, workers=1)


def test_a_folder_with_something_else_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "args.json").write_text('{"args": {}}')
    with pytest.raises(InputError, match="holds something else"):
        Study(tmp_path, workers=1)
    assert (tmp_path / "args.json").read_text() == '{"args": {}}'


def fail(word: str) -> None:
    print(word, flush=True)
    raise SystemExit(3)


def test_a_run_that_fails_is_named_with_its_log_and_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.study, "PRELOADED", ["json"])
    with pytest.raises(ChildProcessError, match=r"logs/run\.log: status 3: why it failed"):
        (tmp_path / "logs").mkdir()
        in_process(fail, tmp_path / "logs" / "run.log", "why it failed")


def test_tokens_are_counted_up_to_each_step(tmp_path):
    rows = [{"step": n, "train_tokens": 10, "rollout_tokens": 5} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert tokens(tmp_path) == {0: (0, 0), 1: (10, 5), 2: (20, 10)}


def test_an_offline_pass_gives_each_problem_one_less_the_share_that_was_right(tmp_path):
    examples = make_examples(3, {"easy": 1}, np.random.default_rng(0), set())
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(example.columns) + "\n" for example in examples))
    assert OFFLINE_SAMPLES == 2
    add_weights(path, [True, True, True, False, False, False])
    rows = [json.loads(line) for line in path.open()]
    assert [each["weight"] for each in rows] == [0.0, 0.5, 1.0]
    assert [each["id"] for each in rows] == [example.id for example in examples]


# ------------------------------------------------------------------------------------------------
# The report


def test_an_interval_is_students_and_the_p_value_that_of_all_flips_of_signs():
    found = difference([1.0, 2.0, 3.0, 2.0])
    assert found.mean == 2 and found.half == pytest.approx(3.182 * (2 / 3) ** 0.5 / 2)
    assert found.p == 2 / 16  # only all signs alike reach the mean
    assert found.verdict(1) == "holds" and "opposite" in found.verdict(-1)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2000, 8))
    covered = np.mean([abs(d.mean) <= d.half for d in map(difference, samples)])
    assert 0.93 < covered < 0.97
    assert np.mean([difference(x).p <= 0.05 for x in samples[:400]]) < 0.08


def test_an_interval_that_holds_zero_is_written_out():
    said = difference([-1.0, 2.0, -1.0, 1.0]).verdict(1)
    assert said.startswith("between -") and " and +" in said


def test_differences_are_paired_by_seed(all_rows):
    results = Results(all_rows, json.loads(json.dumps(all_settings(all_rows))))
    ours, theirs = results.seeds("style", "oswft"), results.seeds("style", "sft")
    expected = [ours[seed]["retention"] - theirs[seed]["retention"] for seed in SEEDS]
    assert results.compare("oswft", "sft", "retention") == difference(expected)
    assert ours[10]["gain"] == pytest.approx(100 * ours[10]["tiers"]["hard"]["pass@1"])


@pytest.mark.parametrize("share", [0.2, 1])
def test_a_report_of_any_part_of_a_study_is_written(all_rows, tmp_path, share):
    rows = all_rows[: int(share * len(all_rows))]
    write_results(rows, all_settings(rows), tmp_path / "results.json")
    report(tmp_path / "results.json", tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert ("not run yet" in text) == (share < 1) and "nan" not in text
    assert (tmp_path / "front.png").exists() and (tmp_path / "mechanism.png").exists()


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(InputError, match="no place for the table 'main'"):
        fill("# A page", {"main": "| a |"})


# ------------------------------------------------------------------------------------------------
# What is committed


def test_the_page_is_what_its_results_say(tmp_path):
    (tmp_path / "study.md").write_text(PAGE.read_text())
    (tmp_path / "results.json").write_text(RESULTS.read_text())
    report(tmp_path / "results.json", tmp_path / "study.md")
    assert (tmp_path / "study.md").read_text() == PAGE.read_text()


def test_the_committed_settings_are_those_that_the_choosing_seeds_give():
    read = json.loads(RESULTS.read_text())
    assert read["settings"] == json.loads(json.dumps(all_settings(read["rows"])))
    assert {job.seed for job in short(read["settings"])} == set(SEEDS[:4])


def test_every_committed_row_says_how_it_came_about():
    for each in json.loads(RESULTS.read_text())["rows"]:
        assert each["command"].startswith(("deepspeed train_", "python -m demo.tiny make "))
        assert len(each["git_commit"]) == 40 and each["versions"]["torch"] and each["seconds"]
        assert "/" not in each["machine"] and each["command"].count(" /") == 0
