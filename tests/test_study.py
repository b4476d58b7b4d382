"""The study: its world, what is chosen on which seeds, its statistics, and a folder that grows."""

import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

import demo.study
from conftest import ROOT
from data import InputError, TokenizedExample, tokenize_examples, write_rows
from demo.report import TABLES, Results, difference, fill, report
from demo.score import OFFLINE_SAMPLES, add_weights, kl_from_base, summarize
from demo.study import (
    BATCH,
    CHOOSING_SEEDS,
    METHODS,
    NUM_TRAIN,
    PARTS,
    PROMPT_TOKENS,
    SEEDS,
    STEPS,
    Job,
    Study,
    all_settings,
    along,
    count_flops,
    in_process,
    points,
    short_jobs,
    tokens,
    weights_by_tier,
    write_results,
)
from demo.tiny import make_config, make_tokenizer
from demo.world import BASES, TIERS, TRAIN_MIX, make_examples, solve
from rollout import Completion

ORIGIN = {**demo.study.provenance(), "machine": demo.study.machine()}
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
    examples, taken = [], set()
    for _ in range(2):  # the same draws, were the first ones not taken
        examples += make_examples(2000, TRAIN_MIX, np.random.default_rng(0), taken)
    assert len({example.question for example in examples}) == 4000
    for tier, share in TRAIN_MIX.items():
        assert sum(example.source == tier for example in examples) == 4000 * share


def test_neither_base_has_seen_the_retention_tiers_in_the_experts_style():
    for base in BASES.values():
        assert not {kind for kind in base.mix if kind[0] != "plain"} & {
            (style, tier) for style in ("scratch", "bare") for tier in ("keep", "long", "far")
        }


# ------------------------------------------------------------------------------------------------
# Rows that no run has made, for what is computed from rows


def row(job: Job, score: float = 0.5) -> dict:
    """What a run leaves, with one score for all tiers; a step trains on 1,000 tokens."""
    scores = {"pass@1": score, "pass@8": score, "scratch": 0.0, "truncated": 0.0, "kl": 0.0}
    checkpoints = [
        {
            "steps": steps,
            "trained_tokens": 1000 * steps,
            "sampled_tokens": 500 * steps,
            "tiers": {tier: dict(scores) for tier in TIERS},
        }
        for steps in ([0] if job.method == "base" else [s for s in STEPS if s <= job.steps])
    ]
    found = {**vars(job), "parameters": 10, "seconds": 60, "checkpoints": checkpoints}
    found |= ORIGIN
    if "oswft" in METHODS.get(job.method, ""):
        found["weights"] = {tier: [0.5] * job.steps for tier in TRAIN_MIX}
    return found


@pytest.fixture(scope="module")
def all_rows() -> list[dict]:
    """A full study; the scores are random."""
    rng, rows, done = np.random.default_rng(0), [], set()
    for plan in PARTS:
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


def test_flops_are_6_for_a_trained_token_and_2_for_one_that_is_sampled_or_read_to_sample():
    point = {"steps": 3, "trained_tokens": 100, "sampled_tokens": 10}
    cost = {m: count_flops({"method": m, "parameters": 1}, point) for m in ("base", *METHODS)}
    prompts = 3 * BATCH * PROMPT_TOKENS
    assert cost["base"] == cost["sft"] == cost["dft"] == 620
    assert cost["oswft"] == 620 + 2 * 2 * prompts
    assert cost["oswft-k4"] == cost["hard"] == cost["random"] == 620 + 2 * 4 * prompts
    assert cost["oswft-k1"] == 620 + 2 * prompts and cost["grpo"] == 620 + 16 * prompts
    assert cost["static"] == 620 + 2 * 2 * NUM_TRAIN * PROMPT_TOKENS


def test_prompts_of_the_training_set_have_as_many_tokens_as_are_counted():
    tokenizer = make_tokenizer()
    examples = make_examples(40, TRAIN_MIX, np.random.default_rng(0), set())
    queries, _ = tokenize_examples(examples, tokenizer, 160, 128)
    assert {len(query.prompt_ids) for query in queries} == {PROMPT_TOKENS}


def test_between_checkpoints_a_curve_is_a_line():
    curve = points([row(Job("style", "sft", 1e-4, 48, 10), 0.5)])
    curve[1]["gain"] = 70.0
    middle = along(curve, "trained_tokens", 30_000)
    assert middle["steps"] == 30 and middle["gain"] == 55 and middle["retention"] == 50
    assert along(curve, "gain", 60.0)["steps"] == 36
    assert along(curve, "trained_tokens", 50_000) is None


def test_two_runs_at_one_learning_rate_are_one_curve(tmp_path):
    short, long = (Job("style", "sft", 1e-4, steps, 10) for steps in (48, 72))
    steps = [point["steps"] for point in points([row(short), row(long)])]
    assert sorted(steps) == [24, 48, 72]
    study = Study(tmp_path, workers=1)
    study.append(row(short.base))
    (tmp_path / short.base.name).mkdir()
    (tmp_path / long.name).mkdir()
    study.append(row(long))
    assert study.missing([short]) == [] and len(study.missing([replace(long, steps=144)])) == 1


def test_every_method_is_reported_on_the_seeds_that_are_promised(all_rows):
    results = Results(all_rows, json.loads(json.dumps(all_settings(all_rows))))
    for method in METHODS:
        promised = 8 if method in demo.study.MAIN else 4
        assert len(results.by_seed("style", method)) == promised
    assert len(results.by_seed("own", "sft")) == len(results.by_seed("weak", "oswft")) == 4
    assert results.by_seed("own", "grpo").keys() == results.by_seed("style", "grpo").keys()
    rate, steps = results.setting("style", "grpo")
    assert results.setting("style", "grpo", "tenfold") == (pytest.approx(10 * rate), steps)


def test_an_unfinished_study_says_what_is_missing_and_does_each_run_once(tmp_path, monkeypatch):
    begun = []
    Study(tmp_path, workers=2).lock.close()
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
    study.lock.close()
    study = Study(tmp_path, workers=1)
    assert [job.name for job in study.missing(jobs)] == [jobs[2].name]
    assert (tmp_path / "base-usual-10").exists() and not (tmp_path / jobs[1].name).exists()
    assert jobs[1].name in study.rows and jobs[2].name not in study.rows
    (tmp_path / "base-usual-12").rmdir()
    assert [job.name for job in study.missing(jobs)] == ["base-usual-12", jobs[2].name]


def test_another_setting_machine_or_version_is_refused(tmp_path, monkeypatch):
    study = Study(tmp_path, workers=1)
    with pytest.raises(InputError, match="another study is running"):
        Study(tmp_path, workers=1)
    study.lock.close()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(Job("style", "sft", 1e-4, 24, 10))) + "\n")
    Study(tmp_path, workers=1).lock.close()
    with monkeypatch.context() as changed, pytest.raises(InputError, match="samples"):
        changed.setitem(demo.study.SETTINGS, "samples", [1])
        Study(tmp_path, workers=1)
    for name, value in (("machine", "x"), ("provenance", {"versions": {"torch": "1"}})):
        with monkeypatch.context() as changed, pytest.raises(InputError, match="rows of other "):
            changed.setattr(demo.study, name, lambda value=value: value)
            Study(tmp_path, workers=1)


def test_a_base_that_comes_out_otherwise_than_before_is_refused(tmp_path):
    study, base = Study(tmp_path, workers=1), Job("style", "base", 0.0, 0, 10)
    study.append(row(base))
    study.append(row(base))
    with pytest.raises(InputError, match="is not what it was"):
        study.append(row(base, score=0.4))


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


KILLED = """
import os, sys, time
from pathlib import Path
from demo import study

def linger(path):
    path.write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    study.PRELOADED = ["json"]
    study.in_process(linger, Path(sys.argv[1], "log"), Path(sys.argv[1], "pid"))
"""


def test_a_run_ends_with_the_study_that_was_killed(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    study = subprocess.Popen(
        [sys.executable, tmp_path / "killed.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    run = psutil.Process(int((tmp_path / "pid").read_text()))
    study.kill()
    study.wait()
    wait_until(lambda: not run.is_running() or run.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tokens_are_counted_up_to_each_step(tmp_path):
    rows = [{"step": n, "train_tokens": 10, "rollout_tokens": 5} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert tokens(tmp_path) == {0: (0, 0), 1: (10, 5), 2: (20, 10)}


def test_weights_are_averaged_by_tier_and_step(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step, hard in ((1, 1.0), (2, 0.5)):
        ids = ("easy-1", "easy-2", "middle-1", "hard-1")
        rows = [{"id": i, "weight": w} for i, w in zip(ids, (0.0, 1.0, 0.5, hard), strict=True)]
        write_rows(rows, tmp_path / "rollouts" / f"step_{step:06d}.jsonl")
    expected = {"easy": [0.5, 0.5], "middle": [0.5, 0.5], "hard": [1.0, 0.5]}
    assert weights_by_tier(tmp_path) == expected


def completion(query: int, token_ids: list[int], text: str = "") -> Completion:
    return Completion(query, token_ids, text, "stop", [])


def test_the_kl_is_that_of_the_two_models_along_the_answers_tokens():
    torch.manual_seed(0)
    model, base = (Qwen3ForCausalLM(make_config(make_tokenizer())).eval() for _ in range(2))
    queries = [TokenizedExample(str(n), [5, 6, 7 + n], [8], None) for n in range(2)]
    answers = [completion(0, [9, 10]), completion(1, [11])]
    assert kl_from_base(model, model, queries, answers) == [0, 0]
    found = kl_from_base(model, base, queries, answers)
    for n, answer in enumerate(answers):
        ids = torch.tensor([queries[n].prompt_ids + answer.token_ids])
        with torch.no_grad():
            ours, theirs = (m(ids).logits[0].log_softmax(1) for m in (model, base))
        positions = range(2, 2 + len(answer.token_ids))  # those that predict the answer's tokens
        expected = sum((ours[t].exp() @ (ours[t] - theirs[t])).item() for t in positions)
        assert found[n] == pytest.approx(expected, rel=1e-4) and expected > 0.01


def test_a_tiers_scores_are_shares_of_its_answers():
    texts = ["@1"] * 4 + ["1"] * 12
    answers = [completion(n // 8, [1], text) for n, text in enumerate(texts)]
    found = summarize(answers, [True] + [False] * 15, [1.0, 3.0])
    expected = {"pass@1": 0.0625, "pass@8": 0.5, "scratch": 0.25, "truncated": 0.0, "kl": 2.0}
    assert found == expected


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
    assert found.mean == 2 and found.half_width == pytest.approx(3.182 * (2 / 3) ** 0.5 / 2)
    assert found.p == 2 / 16  # only all signs alike reach the mean
    assert found.verdict(1) == "holds" and "opposite" in found.verdict(-1)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2000, 8))
    covered = np.mean([abs(d.mean) <= d.half_width for d in map(difference, samples)])
    assert 0.93 < covered < 0.97
    assert np.mean([difference(x).p <= 0.05 for x in samples[:400]]) < 0.08


def test_an_interval_that_holds_zero_is_written_out():
    said = difference([-1.0, 2.0, -1.0, 1.0]).verdict(1)
    assert said.startswith("between -") and " and +" in said


def test_differences_are_paired_by_seed(all_rows):
    results = Results(all_rows, json.loads(json.dumps(all_settings(all_rows))))
    ours, theirs = results.by_seed("style", "oswft"), results.by_seed("style", "sft")
    expected = [ours[seed]["retention"] - theirs[seed]["retention"] for seed in SEEDS]
    assert results.compare("oswft", "sft", "retention") == difference(expected)
    assert ours[10]["gain"] == pytest.approx(100 * ours[10]["tiers"]["hard"]["pass@1"])


def test_any_part_of_a_study_has_settings_and_tables(all_rows):
    for part in range(len(all_rows)):
        rows = all_rows[:part]
        results = Results(rows, all_settings(rows))
        if part % 20 == 0:
            assert all(table(results) for table in TABLES.values())


@pytest.mark.parametrize("share", [0.2, 1])
def test_a_report_of_any_part_of_a_study_is_written(all_rows, tmp_path, share):
    rows = all_rows[: int(share * len(all_rows))]
    write_results(rows, all_settings(rows), tmp_path / "results.json")
    report(tmp_path / "results.json", tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "nan" not in text and (share == 1 or "not run, or not reached" in text)
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
    assert {job.seed for job in short_jobs(read["settings"])} == set(SEEDS[:4])


def test_every_committed_row_says_how_it_came_about():
    for each in json.loads(RESULTS.read_text())["rows"]:
        assert each["command"].startswith(("deepspeed train_", "python -m demo.tiny make "))
        assert len(each["git_commit"]) == 40 and each["versions"]["torch"] and each["seconds"]
        assert "/" not in each["machine"] and each["command"].count(" /") == 0
