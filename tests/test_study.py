"""The study: its world, its loop of runs, its statistics, and what is committed of it."""

import json
import math
import re
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Qwen3ForCausalLM

import demo.study
from conftest import ROOT
from data import (
    InputError,
    TokenizedExample,
    read_rows,
    tokenize_examples,
    write_json,
    write_rows,
)
from demo.report import (
    BATCH,
    BEST,
    FIRST_SEEDS,
    HYPOTHESES,
    KEPT,
    NUM_TRAIN,
    PROMPT_TOKENS,
    T_95,
    Difference,
    Runs,
    at_level,
    compare,
    count_flops,
    difference,
    fill,
    holm,
    measure,
    middle,
    planned,
    read_points,
    report,
    unreached_table,
    verdict,
    wrong_table,
)
from demo.score import kl_from_base, summarize
from demo.study import (
    CHOOSING_SEEDS,
    FULL,
    METHODS,
    RATES,
    SEEDS,
    THIRD_SEEDS,
    WORLDS,
    Job,
    call,
    forget_other_bases,
    jobs_of,
    needs_base_answers,
    restore,
    result,
    run_all,
    run_job,
    spoiled_share,
    study,
    third_jobs,
)
from demo.tiny import make_config, make_tokenizer, write_problems
from demo.variants import write_training_sets
from demo.world import PRETRAIN_MIX, TIERS, TRAIN_MIX, make_examples, solve
from rollout import Completion

DOCS = ROOT / "docs"
FIRST, SECOND, THIRD = (DOCS / "study" / f"{name}.jsonl" for name in ("first", "second", "third"))


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


# ---- The runs ------------------------------------------------------------------------------------


def pretend(command: str, log: Path) -> None:
    """In place of a command: the files that it would leave, with scores that depend on it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        print(command, file=out)
    if "demo.score" in command:
        rng = np.random.default_rng(len(command))
        steps = [int(step) for step in re.findall(r" (\d+) \S*/(?:model|checkpoint-\d+)", command)]
        names = ("pass@1", "pass@8", "scratch", "truncated", "kl")
        tiers = {
            step: {tier: dict.fromkeys(names, rng.random()) for tier in TIERS} for step in steps
        }
        output = Path(re.search(r"--output (\S+)", command)[1])
        write_json({"parameters": 10, "models": tiers, "static_tokens": 70}, output)
    else:
        folder = Path(re.search(r"--output_dir (\S+)", command)[1])
        folder.mkdir(parents=True)
        rows = [{"step": n, "train_tokens": 10, "rollout_tokens": 5} for n in range(1, 49)]
        write_rows(rows, folder / "metrics.jsonl")


def test_a_study_that_was_stopped_goes_on_and_does_each_run_once(tmp_path, monkeypatch, capsys):
    plan = (("style", ("sft", "static"), {1e-4: 48}, (10, 11)),)
    monkeypatch.setattr(demo.study, "SHORT", plan)
    begun = []

    def stop(command: str, log: Path) -> None:
        begun.append(command)
        if "train_sft" in command and "weight_column" in command and "--seed 11" in command:
            raise ChildProcessError("killed")
        pretend(command, log)

    monkeypatch.setattr(demo.study, "call", stop)
    with pytest.raises(ChildProcessError):
        study(tmp_path, workers=1)
    done = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    first, done = len(begun), {(row["method"], row["seed"]) for row in done}
    assert done >= {("base", 10), ("base", 11), ("sft", 10)} and ("static", 11) not in done

    monkeypatch.setattr(demo.study, "call", lambda *args: (begun.append(args[0]), pretend(*args)))
    study(tmp_path, workers=2)
    assert not any("demo.tiny" in command for command in begun[first:])  # the bases are there
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["seed"] for row in rows if row["method"] == "static"} == {10, 11} and len(rows) == 6
    for row in rows:
        last = row["checkpoints"][-1]
        if row["method"] == "sft":
            assert (last["trained_tokens"], last["sampled_tokens"]) == (480, 240)
        elif row["method"] == "static":
            assert last["sampled_tokens"] == 70 + 240
    assert not (tmp_path / "style-sft-0.0001-48-10").exists()  # gigabytes, of all runs
    assert "not run" in (tmp_path / "study.md").read_text()
    assert (tmp_path / "study" / "kept.png").exists()

    before = len(begun)
    study(tmp_path)
    assert len(begun) == before


def test_a_run_that_fails_is_named_with_its_log_and_its_last_line_and_no_other_begins(tmp_path):
    log, begun = tmp_path / "logs" / "run.log", []
    why = "import sys; print('why it failed'); sys.exit(3)"

    def run(job: Job) -> None:
        begun.append(job)
        call(f'python -c "{why}"', log)

    jobs = [Job("style", "sft", 1e-4, 24, seed) for seed in range(4)]
    with pytest.raises(ChildProcessError, match=r"logs/run\.log: status 3: why it failed"):
        run_all(run, jobs, 1, "runs")
    assert len(begun) < 4 and sys.executable


@pytest.mark.parametrize("world", demo.study.WORLDS)
def test_every_command_is_one_that_the_scripts_take(world, tmp_path):
    import train_grpo
    import train_oswft
    import train_sft

    for method in METHODS:
        job = Job(world, method, 1e-4, 48, 10)
        script, *args = job.train_command(tmp_path, (7, 9)).split()[1:]
        scripts = {module.__name__: module for module in (train_sft, train_oswft, train_grpo)}
        found = vars(scripts[script.removesuffix(".py")].Args(model="", data=""))
        assert {arg.removeprefix("--") for arg in args if arg.startswith("--")} <= found.keys()


def test_every_hypothesis_is_tested_on_all_seeds_and_nothing_was_chosen_on_them():
    assert len(SEEDS) == 8 and not set(SEEDS) & {*CHOOSING_SEEDS, *FIRST_SEEDS}
    jobs = jobs_of(FULL)
    assert len(set(jobs)) == len(jobs)
    for _, a, b, *_ in HYPOTHESES.values():
        for runs in (a, b):
            found = Job(runs.world, runs.method, runs.rate, runs.steps, 0)
            assert {replace(found, seed=seed) for seed in SEEDS} <= set(jobs)


def test_all_worlds_have_one_base_which_has_sampled_nothing():
    bases = {Job(world, "sft", 1e-4, 144, 18).base for world in demo.study.WORLDS}
    assert len(bases) == 1 and not needs_base_answers(bases.pop().world, "")


def test_the_share_of_wrong_rows_is_that_of_the_weights_at_each_step(tmp_path):
    ids, spoiled = ("easy-1", "easy-2", "hard-1", "hard-2"), (True, False, False, False)
    job = Job("both-wrong", "oswft", 1e-4, 48, 18)
    rows = [{"id": i, "spoiled": s, "weight": 1 - s / 2} for i, s in zip(ids, spoiled, strict=True)]
    (tmp_path / job.base.name).mkdir()
    write_rows(rows, tmp_path / job.base.name / "train-both-wrong.jsonl")
    assert spoiled_share(replace(job, method="sft"), tmp_path) == [0.25]
    assert spoiled_share(replace(job, method="static"), tmp_path) == [round(0.5 / 3.5, 4)]
    (tmp_path / job.name / "rollouts").mkdir(parents=True)
    for step, weights in ((1, (1, 1, 1, 1)), (2, (1, 0, 0, 1))):
        path = tmp_path / job.name / "rollouts" / f"step_{step:06d}.jsonl"
        write_rows([{"id": i, "weight": w} for i, w in zip(ids, weights, strict=True)], path)
    assert spoiled_share(job, tmp_path) == [0.25, 0.5]


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


@pytest.fixture(scope="module")
def training_sets(tmp_path_factory) -> dict[str, pd.DataFrame]:
    """The sets of 200 problems of which the base answers both, one or none rightly, in turn."""
    folder = tmp_path_factory.mktemp("sets")
    write_problems(folder, num_train=200)
    keys = [row["answer"] for _, row in read_rows(str(folder / "train.jsonl"))]
    texts = [f"{key}=" if n % 3 < right else "?" for n, key in enumerate(keys) for right in (2, 1)]

    def verify(texts: list[str], keys: list[str]) -> list[bool]:
        return [text == f"{key}=" for text, key in zip(texts, keys, strict=True)]

    write_training_sets(folder, texts, verify, seed=0)
    return {
        path.stem: pd.DataFrame(row for _, row in read_rows(str(path)))
        for path in folder.glob("train*.jsonl")
    }


def test_static_weights_are_one_less_the_share_of_right_answers(training_sets):
    train = training_sets["train"]
    assert train.weight.tolist() == ([0, 0.5, 1] * 67)[:200]
    assert train.weight.equals(training_sets["train-plain"].weight)
    assert train.solvable.tolist() == ([0, 0.5, 0] * 67)[:200]
    assert train.unsolved.tolist() == ([0, 0, 1] * 67)[:200]


def test_permuted_weights_are_the_same_weights_on_other_rows(training_sets):
    train = training_sets["train"]
    for column in ("permuted", "permuted_in_tiers"):
        assert (train[column] != train.weight).mean() > 0.3
    assert sorted(train.permuted) == sorted(train.weight)
    for _, rows in train.groupby("source"):
        assert sorted(rows.permuted_in_tiers) == sorted(rows.weight)
        assert rows.tier_mean.tolist() == pytest.approx([rows.weight.mean()] * len(rows))


def test_own_answers_stand_where_the_base_has_a_right_one(training_sets):
    expert, own = training_sets["train"], training_sets["train-self"]
    solved = expert.weight < 1
    assert (own.solution[solved] == expert.answer[solved] + "=").all()
    assert own.solution[~solved].equals(expert.solution[~solved])


def test_a_tenth_of_the_references_is_wrong_in_the_same_rows_of_three_sets(training_sets):
    clean, both = training_sets["train"], training_sets["train-both-wrong"]
    key, solution = training_sets["train-key-wrong"], training_sets["train-solution-wrong"]
    spoiled = both.spoiled
    assert spoiled.sum() == 20 and key.spoiled.equals(spoiled) and solution.spoiled.equals(spoiled)
    for rows in (both, key, solution):
        untouched = ["question", "solution", "answer"]
        assert rows.loc[~spoiled, untouched].equals(clean.loc[~spoiled, untouched])
    assert key.answer.equals(both.answer) and (both.answer != clean.answer).equals(spoiled)
    assert key.solution.equals(clean.solution) and solution.answer.equals(clean.answer)
    assert solution.solution.equals(both.solution)
    for row in both[spoiled].itertuples():  # one slip, and what follows from it
        assert row.solution.endswith(f"boxed{{{row.answer}}}")
        steps = row.solution.removeprefix("@").split(";")[:-1]
        slips = 0
        for step in steps:
            (left, work), result = step.split("=")[0].split(":"), step[-1]
            slips += solve(left, "scratch")[1] != result
            assert work[1] == result
        assert slips == 1
    assert (key.weight[spoiled] == 1).all() and (both.weight == key.weight).all()
    assert solution.weight.equals(clean.weight)


# ---- Scores and statistics -----------------------------------------------------------------------


def test_an_interval_and_its_p_value_are_students():
    found = difference([1.0, 2.0, 3.0, 2.0])
    assert found.mean == 2 and found.half_width == pytest.approx(3.182 * (2 / 3) ** 0.5 / 2)
    assert found.p == pytest.approx(0.0163, abs=1e-4)  # t = 4.899, three degrees of freedom
    for n, t_95 in T_95.items():  # at the end of an interval p is 0.05
        x = np.arange(n + 1.0)
        edge = x - x.mean() + t_95 * x.std(ddof=1) / (n + 1) ** 0.5
        assert difference(edge).p == pytest.approx(0.05, abs=1e-4)


def test_a_ratio_is_a_geometric_mean():
    text = difference([math.log(0.5), math.log(0.25), math.log(0.125)], ratio=True).text
    assert text.startswith("0.25 [0.0")


def test_holm_multiplies_each_p_value_by_how_many_are_not_smaller_and_keeps_their_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_verdict_needs_its_adjusted_p_value():
    found = Difference(-1.0, 0.5, 0.01, 8)
    assert verdict(found, 0.02, -1) == "holds" and "opposite" in verdict(found, 0.02, 1)
    assert verdict(found, 0.06, -1) == "open after Holm"
    assert verdict(Difference(-1.0, 2.0, 0.2, 8), 1.0, -1) == "open"


def make_points(gains: dict[str, list[float]], kept: list[float]) -> pd.DataFrame:
    """Runs of seeds 18 and 19 with a base and two checkpoints, at 1e-4."""
    rows = []
    for seed in (18, 19):
        for method, own in {"base": [50.0], **gains}.items():
            for n, gain in enumerate(own):
                step, end = (0, 0) if method == "base" else (72 * (n + 1), 144)
                scores = {"gain": gain, "retention": kept[n] if end else 100.0, "TFLOPs": step}
                rate = 1e-4 if end else 0.0
                rows.append(
                    {"method": method, "world": "style", "rate": rate, "seed": seed, "end": end}
                    | {"steps": step, **scores}
                )
    return pd.DataFrame(rows)


def test_equal_gain_is_on_the_line_between_checkpoints_or_the_last_one():
    points = make_points({"sft": [70.0, 90.0], "oswft": [60.0, 76.0]}, [98.0, 90.0])
    sft = measure(points, Runs("sft"), "retention at equal gain", SEEDS)
    assert sft.tolist() == [95.0, 95.0]  # 96 at gain 75, 94 at 80
    oswft = measure(points, Runs("oswft"), "retention at equal gain", SEEDS)
    assert oswft.tolist() == pytest.approx([90.25, 90.25])  # 90.5 at 75, and 90 for 80
    assert measure(points, Runs("oswft"), "forgetting", SEEDS).tolist() == [10.0, 10.0]
    assert measure(points, Runs("sft"), "TFLOPs", SEEDS).tolist() == [144, 144]
    assert "| OSW-FT, K = 2 at 0.0001 | 0 | 2 | 2 |" in unreached_table(points, SEEDS)


def test_the_table_of_wrong_references_has_sfts_clean_run_where_only_keys_are_wrong():
    points = make_points({"sft": [70.0, 90.0]}, [98.0, 90.0])
    spoiled = make_points({"oswft": [60.0, 66.0], "sft": [60.0, 70.0]}, [98.0, 92.0])
    spoiled = spoiled[spoiled.method != "base"]
    keys = spoiled[spoiled.method == "oswft"].assign(world="key-wrong")
    shares = [[0.1] * 12 + [0.5] * 120 + [0.4] * 12] * len(keys)
    table = wrong_table(pd.concat([points, keys.assign(spoiled_share=shares)]))
    assert "| key-wrong | 90.0 / 90.0 | 66.0 / 92.0 |  |  | -24.0 ± 0.0 | 10% → 40% |" in table
    assert "| none | 90.0 / 90.0 |  |  |  |  |  |" in table


def test_a_curve_that_falls_below_a_level_and_rises_again_counts_where_it_first_rises():
    curve = pd.DataFrame({"gain": [50.0, 80, 70, 90], "retention": [100.0, 90, 80, 70]})
    assert at_level(curve, 75, "retention") == pytest.approx(100 - 10 * 25 / 30)
    assert at_level(curve, 91, "retention") is None


# ---- What is committed ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    return read_points(SECOND)


def test_differences_are_paired_by_seed(points):
    a, b = middle("oswft"), middle("sft")
    ours, theirs = (measure(points, runs, "gain", SEEDS) for runs in (a, b))
    expected = [ours[seed] - theirs[seed] for seed in SEEDS if seed in ours and seed in theirs]
    assert compare(points, a, b, "gain") == difference(expected)
    last = points[(points.method == "sft") & (points.rate == 5e-5) & (points.seed == SEEDS[0])]
    tiers = last.iloc[-1].tiers
    gain = 50 * (tiers["middle"]["pass@1"] + tiers["hard"]["pass@1"])
    assert theirs[SEEDS[0]] == pytest.approx(gain)


def test_flops_are_6_for_a_trained_token_and_2_for_one_that_is_sampled_or_read_to_sample():
    point, cost = {"steps": 3, "trained_tokens": 100, "sampled_tokens": 10}, {}
    for method in METHODS:
        command = Job("style", method, 1e-4, 48, 18).train_command(Path("runs"))
        cost[method] = count_flops({"command": command, "world": "style", "parameters": 1}, point)
    prompts = 3 * BATCH * PROMPT_TOKENS
    assert cost["sft"] == 620
    assert cost["oswft"] == cost["grpo-g2"] == 620 + 2 * 2 * prompts
    assert cost["grpo"] == 620 + 16 * prompts
    assert cost["static"] == cost["permuted"] == 620 + 2 * 2 * NUM_TRAIN * PROMPT_TOKENS


def test_prompts_of_the_training_set_have_as_many_tokens_as_are_counted():
    examples = make_examples(40, TRAIN_MIX, np.random.default_rng(0), set())
    queries, _ = tokenize_examples(examples, make_tokenizer(), 160, 128)
    assert {len(query.prompt_ids) for query in queries} == {PROMPT_TOKENS}


def test_the_best_rates_are_those_of_the_choosing_seeds(points):
    for method, best in BEST.items():
        kept = {r: measure(points, planned(method, r), KEPT, CHOOSING_SEEDS).mean() for r in RATES}
        assert planned(method, max(kept, key=kept.get)) == best


def test_the_third_study_goes_on_from_committed_rows_of_the_same_base(tmp_path, monkeypatch):
    jobs = third_jobs((26, 27))
    assert len({job.name for job in jobs}) == len(jobs) == 40
    assert [job.rate for job in jobs[-6:]] == [1.25e-5] * 6  # the longest last
    made = [{**asdict(job), "base": f"base {job.seed}"} for job in (jobs[0], jobs[20])]
    write_rows(made, tmp_path / "third.jsonl")
    (tmp_path / "results").mkdir()
    restore(tmp_path / "third.jsonl", tmp_path)
    assert all(result(job, tmp_path).exists() for job in (jobs[0], jobs[20]))
    monkeypatch.setattr(demo.study, "base_hash", lambda job, root: "base 26")
    forget_other_bases([jobs[0].base, jobs[20].base], tmp_path)
    assert [result(job, tmp_path).exists() for job in (jobs[0], jobs[20])] == [True, False]
    with pytest.raises(InputError, match="26 to 33"):
        study(tmp_path, third=True, seeds=(18,))


@pytest.mark.parametrize(("gain", "ends"), [(0.9, [6]), (0.8, [6, 9, 12])])
def test_a_slow_run_of_the_third_study_ends_once_it_has_gained_enough(
    gain, ends, tmp_path, monkeypatch
):
    job, called = Job("clean", "sft", 2.5e-5, 576, 26), []

    def fake(command: str, log: Path) -> None:
        called.append(command)
        if " demo.score " in command:
            steps = re.findall(r"(\d+) \S+/checkpoint-\d+", command)
            models = {step: {tier: {"pass@1": gain} for tier in TIERS} for step in steps}
            write_json({"parameters": 1, "models": models}, tmp_path / job.name / "scores.json")
        else:
            rows = [{"step": step, "train_tokens": 1} for step in range(1, job.steps + 1)]
            (tmp_path / job.name).mkdir(exist_ok=True)
            write_rows(rows, tmp_path / job.name / "metrics.jsonl")

    monkeypatch.setattr(demo.study, "call", fake)
    monkeypatch.setattr(demo.study, "base_hash", lambda job, root: "")
    (tmp_path / "results").mkdir()
    run_job(job, tmp_path)
    trained, scored = called[::2], called[1::2]
    parts = {6: range(1, 7), 9: range(7, 10), 12: range(10, 13)}
    for command, end in zip(scored, ends, strict=True):
        assert re.findall(r"checkpoint-0+(\d+)", command) == [f"{48 * n}" for n in parts[end]]
    assert [int(re.search(r"max_steps (\d+)", c)[1]) for c in trained] == [48 * n for n in ends]
    assert ["--resume" in command for command in trained] == [n > 6 for n in ends]
    row = json.loads(result(job, tmp_path).read_text())
    assert [c["steps"] for c in row["checkpoints"]] == list(range(48, 48 * ends[-1] + 1, 48))
    assert "--max_steps 576" in row["command"] and "--resume" not in row["command"]


def test_every_training_set_of_the_third_study_is_made_by_one_of_its_commands():
    commands = " ".join(third_jobs((26,))[0].base.weigh_commands(Path("runs")))
    outputs = re.findall(r"--output \S*/([\w-]+)\.jsonl", commands)
    assert {WORLDS[job.world] for job in third_jobs((26,))} == {*outputs}


def test_the_exact_test_flips_every_sign():
    found = difference([1.0, 2.0, 3.0])
    assert found.p_flip == 2 / 8  # all positive: itself and its mirror
    assert difference([1.0, -1.0, 2.0, -2.0]).p_flip == 1.0


def test_a_table_without_a_place_on_any_page_is_refused():
    pages = {Path("a.md"): "<!-- table one -->\nold\n<!-- end -->\n", Path("b.md"): "text\n"}
    filled = fill(pages, {"one": "| new |"})
    assert "| new |\n<!-- end -->" in filled[Path("a.md")] and filled[Path("b.md")] == "text\n"
    with pytest.raises(InputError, match="two"):
        fill(pages, {"one": "", "two": ""})


def test_the_pages_are_what_their_results_say(tmp_path):
    (tmp_path / "study").mkdir()
    pages = ("study.md", "study/details.md")
    for page in pages:
        (tmp_path / page).write_text((DOCS / page).read_text())
    report(FIRST, SECOND, output_dir=tmp_path)
    for page in pages:
        assert (tmp_path / page).read_text() == (DOCS / page).read_text()
    text = "".join((DOCS / page).read_text() for page in pages)
    assert text.count("<!-- table ") == 8


def read_scores(path: Path, name: str, score: str) -> dict[int, float]:
    """Of the runs of a name, by seed: the gain, or the retention at equal gain. In plain Python."""
    rows, scores = [json.loads(line) for line in path.read_text().splitlines()], {}
    named: dict[str, dict[int, list]] = {}
    for row in rows:
        own = "base" if row["method"] == "base" else "{method}-{rate:g}-{steps}".format(**row)
        run = named.setdefault(row["world"] + "-" + own, {})
        run[row["seed"]] = [point["tiers"] for point in row["checkpoints"]]
    for seed, checkpoints in named.get(name, {}).items():
        curve = [
            [50 * sum(tiers[tier]["pass@1"] for tier in pair) for tiers in ends]
            for pair in (("middle", "hard"), ("keep", "long"))
            for ends in [named["style-base"][seed] + checkpoints]
        ]
        gains, kept = curve
        scores[seed] = gains[-1]
        if score == "retention":
            found = []
            for level in (75, 80):
                after = next(
                    (n for n in range(1, len(gains)) if gains[n - 1] <= level <= gains[n]), None
                )
                if after is None:
                    found.append(kept[-1])
                else:
                    share = (level - gains[after - 1]) / (gains[after] - gains[after - 1])
                    found.append(kept[after - 1] + share * (kept[after] - kept[after - 1]))
            scores[seed] = statistics.mean(found)
    return scores


OSWFT_RUN, SFT_RUN = "style-oswft-0.0001-144", "style-sft-0.0001-144"


@pytest.mark.parametrize(
    ("path", "line", "a", "b", "score"),
    [
        (FIRST, "OSW-FT or SFT, same settings?", OSWFT_RUN, SFT_RUN, "gain"),
        (FIRST, "... same gain, same rate?", OSWFT_RUN, SFT_RUN, "retention"),
        (FIRST, "Static weights or SFT?", "style-static-0.0001-144", SFT_RUN, "gain"),
        (SECOND, "H1", "style-oswft-5e-05-288", "style-sft-5e-05-288", "retention"),
        (SECOND, "H5", "both-wrong-oswft-0.0001-144", "both-wrong-sft-0.0001-144", "gain"),
        (SECOND, "H7", "self-sft-0.0001-144", OSWFT_RUN, "retention"),
        (THIRD, "A1", "wrong-audited-static-0.0001-144", "wrong-static-0.0001-144", "gain"),
        (THIRD, "A4", "clean-audited-static-0.0001-144", "clean-static-0.0001-144", "gain"),
        (THIRD, "C1", "clean-grpo-0.0003-48", "clean-oswft-0.0001-144", "retention"),
    ],
)
def test_three_cells_of_each_study_come_out_by_another_way(path, line, a, b, score):
    seeds = {FIRST: FIRST_SEEDS, SECOND: SEEDS, THIRD: THIRD_SEEDS}[path]
    ours, theirs = (read_scores(path, name, score) for name in (a, b))
    differences = [ours[seed] - theirs[seed] for seed in seeds if seed in ours and seed in theirs]
    text = "".join((DOCS / page).read_text() for page in ("study.md", "study/details.md"))
    cells = next(row for row in text.splitlines() if row.startswith(f"| {line} |"))
    n, said = len(differences), "gain" if score == "gain" else "retention at equal gain"
    if path == FIRST:  # a cell has several scores, the first study's comes before the second's
        cells = re.search(rf"{said} \S+ ± [\d.]+", cells)[0]
    found = re.search(r"(\S+) ± ([\d.]+)", cells)
    half_width = T_95[n - 1] * statistics.stdev(differences) / n**0.5
    expected = [statistics.mean(differences), half_width]
    assert [*map(float, found.groups())] == pytest.approx(expected, abs=0.051)


def test_every_committed_row_says_how_it_came_about():
    for path in (FIRST, SECOND, THIRD):
        for _, row in read_rows(str(path)):
            assert path != THIRD or not row["git_commit"].endswith("dirty")
            ours = ("python train_", "deepspeed train_", "python -m demo.tiny make ")
            assert row["command"].startswith(ours)
            assert re.fullmatch("[0-9a-f]{40}(-dirty)?", row["git_commit"]), row["git_commit"]
            assert row["versions"]["torch"] and row["seconds"]
            assert "/" not in row["machine"] and row["command"].count(" /") == 0
