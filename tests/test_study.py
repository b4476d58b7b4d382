"""The study: its world, its loop of runs, its statistics, and what is committed of it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Qwen3ForCausalLM

import demo.study
from conftest import ROOT
from data import InputError, TokenizedExample, read_rows, tokenize_examples, write_json, write_rows
from demo.report import (
    BATCH,
    LONG,
    NUM_TRAIN,
    PROMPT_TOKENS,
    SETTINGS,
    along,
    at,
    compare,
    count_flops,
    difference,
    fill,
    read_points,
    report,
)
from demo.score import kl_from_base, summarize
from demo.study import (
    CHOOSING_SEEDS,
    FIRST,
    METHODS,
    SEEDS,
    Job,
    call,
    jobs_of,
    run_all,
    study,
    weights_by_tier,
)
from demo.tiny import make_config, make_tokenizer, write_problems
from demo.variants import write_training_sets
from demo.world import BASES, TIERS, TRAIN_MIX, make_examples, solve
from rollout import Completion

PAGE, RESULTS = ROOT / "docs" / "study.md", ROOT / "docs" / "study" / "results.jsonl"


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
# The runs


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
    assert "not run, or not reached" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "front.png").exists()

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
        script, *args = job.train_command(tmp_path).split()[1:]
        scripts = {module.__name__: module for module in (train_sft, train_oswft, train_grpo)}
        found = vars(scripts[script.removesuffix(".py")].Args(model="", data=""))
        assert {arg.removeprefix("--") for arg in args if arg.startswith("--")} <= found.keys()


def test_every_method_is_reported_on_seeds_on_which_nothing_was_chosen():
    assert not set(SEEDS) & set(CHOOSING_SEEDS)
    jobs = jobs_of(FIRST)
    assert len(set(jobs)) == len(jobs)
    for method in (*demo.study.MAIN, *demo.study.OTHERS):
        for rate, steps in SETTINGS["style"][method].values():
            own = {
                job.seed
                for job in jobs
                if (job.world, job.method, job.rate) == ("style", method, rate)
                and job.steps >= steps
            }
            assert own >= set(SEEDS[: 8 if method in demo.study.MAIN else 4])


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


# ------------------------------------------------------------------------------------------------
# Scores and statistics


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


# ------------------------------------------------------------------------------------------------
# What is committed


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    return read_points(RESULTS)


def test_differences_are_paired_by_seed(points):
    ours, theirs = at(points, "oswft"), at(points, "sft")
    expected = [ours.retention[seed] - theirs.retention[seed] for seed in SEEDS]
    assert compare(points, "oswft", "sft", "retention") == difference(expected)
    tiers = ours.tiers[10]
    gain = 50 * (tiers["middle"]["pass@1"] + tiers["hard"]["pass@1"])
    assert ours.gain[10] == pytest.approx(gain)


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
    examples = make_examples(40, TRAIN_MIX, np.random.default_rng(0), set())
    queries, _ = tokenize_examples(examples, make_tokenizer(), 160, 128)
    assert {len(query.prompt_ids) for query in queries} == {PROMPT_TOKENS}


def test_between_checkpoints_a_curve_is_a_line():
    curve = pd.DataFrame({"steps": [0.0, 24, 48], "gain": [50.0, 70, 80], "cost": [0.0, 10, 10]})
    assert along(curve, "gain", 60)["steps"] == 12 and along(curve, "steps", 36)["gain"] == 75
    assert along(curve, "cost", 10)["steps"] == 24 and along(curve, "gain", 81) is None


def test_the_best_settings_are_those_of_the_choosing_seeds(points):
    tried = points[points.seed.isin(CHOOSING_SEEDS) & (points.rate > 0)]
    tried = tried[(tried.rate != LONG[0]) | (tried.steps != LONG[1])]
    for world, methods in SETTINGS.items():
        for method, settings in methods.items():
            own = tried[(tried.world == world) & (tried.method == method)]
            balance = own.groupby(["rate", "steps"]).balance.mean()
            if method != "base":
                assert balance.idxmax() == settings["best"], (world, method)
            if "epoch" in settings:
                short = balance[balance.index.get_level_values("steps") <= 32]
                assert short.idxmax() == settings["epoch"]


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(InputError):
        fill("# A page", {"main": "| a |"})


def test_the_page_is_what_its_results_say(tmp_path):
    (tmp_path / "study.md").write_text(PAGE.read_text())
    (tmp_path / "results.jsonl").write_text(RESULTS.read_text())
    report(tmp_path / "results.jsonl", tmp_path / "study.md")
    assert (tmp_path / "study.md").read_text() == PAGE.read_text()


def test_every_committed_row_says_how_it_came_about():
    for _, row in read_rows(str(RESULTS)):
        assert row["command"].startswith(("deepspeed train_", "python -m demo.tiny make "))
        assert len(row["git_commit"]) == 40 and row["versions"]["torch"] and row["seconds"]
        assert "/" not in row["machine"] and row["command"].count(" /") == 0
