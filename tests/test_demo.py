"""The demo: three methods from one base, as `make demo` runs them, with fewer steps."""

import json
import shlex
from collections import defaultdict
from types import SimpleNamespace

import demo.__main__ as the_demo
import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import needs_vllm, output_of, slow
from data import InputError, derive_seed, load_examples, write_json, write_rows
from demo import score
from demo.tiny import COMMITTED
from demo.world import TIERS
from models import load_tokenizer, tokenize_examples
from rollout import RolloutArgs
from stand_in import grade_here

import numpy as np
import pytest
import tyro

ARGS = {f"{module.__name__}.py": module.Args for module in (train_sft, train_oswft, train_grpo)}
ARGS["demo.score"] = score.Args


def as_read(command: str):
    """What its script is told; of another script the command."""
    words = shlex.split(command)
    script = words[1 + (words[1] == "-m")]
    if script not in ARGS:
        return command
    return tyro.cli(ARGS[script], args=words[words.index(script) + 1 :], use_underscores=True)


def test_the_methods_train_alike_and_last_checkpoints_make_the_table(tmp_path, monkeypatch, capsys):
    folder, called = tmp_path / "a demo", defaultdict(list)
    base = folder / "base"
    rates = zip(TIERS, (0.1, 0.2, 0.4, 0.5, 0.6, 0.9), (0.3, 0.7, 0.9, 0.8, 1, 0.95), strict=True)
    scores = {tier: {"pass@1": one, "pass@8": any_, "skill": one / 2} for tier, one, any_ in rates}
    for tier in scores.values():  # of ten problems
        tier["right"] = [8 if n < 10 * tier["pass@1"] else 0 for n in range(10)]
    steps = [{"train_tokens": 1000, "rollout_tokens": 20}, {"train_tokens": 500}]

    def call(command, log):
        called[log.stem].append(command)
        write_rows([scores], folder / log.stem / "scores.json")
        if log.stem != "base":
            write_rows(steps, folder / log.stem / "metrics.jsonl")

    monkeypatch.setattr(the_demo, "call", call)
    write_rows(steps, folder / "base" / "metrics.jsonl")  # of an earlier demo
    write_json({"demo": {}}, folder / "args.json")
    the_demo.demo(folder, steps=4, seed=7)

    flags = {"model": f"{base}/model", "data": f"{base}/train.jsonl", "learning_rate": 3e-4}
    flags |= {"max_steps": 4, "save_every": 4, "seed": 7, "precision": "fp32"}
    flags |= {"max_length": 160, "max_completion_length": 128}
    sampled = flags | {"verifier_workers": 1}
    trained = {
        "base": f"python -m demo.tiny copy --output_dir '{base}'",
        "sft": train_sft.Args(**flags, output_dir=f"{folder}/sft"),
        "oswft": train_oswft.Args(**sampled, output_dir=f"{folder}/oswft", num_rollouts=2),
        "grpo": train_grpo.Args(**sampled, output_dir=f"{folder}/grpo", num_rollouts=8),
    }
    for name, args in trained.items():
        model = base / "model" if name == "base" else folder / name / "checkpoint-000004"
        scored = score.Args(base=base, model=model, output=folder / name / "scores.json", seed=7)
        assert [as_read(command) for command in called.pop(name)] == [args, scored]
    assert {*called} == {"plot", "view"}  # drawn side by side
    report = (folder / "report.txt").read_text()
    assert report in capsys.readouterr().out
    head, base, *lines = [" ".join(line.split()) for line in report.splitlines()[:5]]
    assert head == "gain retention skill pass@8 trained sampled easy middle hard far keep long"
    assert base == "base 30.0 75.0 37.5 80.0 0 0 10.0 20.0 40.0 50.0 60.0 90.0"
    same = "30.0 75.0 37.5 80.0 1,500 20 10.0 20.0 40.0 50.0 60.0 90.0"
    assert lines == [f"{name} {same}" for name in ("SFT", "OSW-FT, K = 2", "GRPO, G = 8")]

    assert (folder / "gain.svg").exists()
    [axes] = the_demo.draw_gain({name: folder / name for name in the_demo.TITLES}).axes
    assert [drawn.get_label() for drawn in axes.containers] == [*the_demo.TITLES.values()]
    counts = [np.repeat([8, 0], [right, 20 - right]) for right in (6, 15)]  # gain's, retention's
    bounds = [100 * np.array(evaluate.score_with_interval(c, 8, 1)[1]) for c in counts]
    for point, _, (across, up) in axes.containers:
        assert point.get_xydata()[0] == pytest.approx([30, 75])
        assert across.get_segments()[0][:, 0] == pytest.approx(bounds[0])
        assert up.get_segments()[0][:, 1] == pytest.approx(bounds[1])


def test_of_a_command_that_fails_the_last_line_is_told(tmp_path):
    with pytest.raises(ChildProcessError, match=r"a\.log: status 3: so it is$"):
        the_demo.call("python -c 'print(\"so it is\"); exit(3)'", tmp_path / "logs" / "a.log")


def test_a_score_is_sampled_as_by_the_evaluation_from_the_model(tiny, tmp_path, monkeypatch):
    calls, answer_of, tokenizer = [], {}, load_tokenizer(str(COMMITTED))

    class Rollout:
        def __init__(self, model, tokenizer, max_length, **settings):
            calls.append((model, tokenizer.name_or_path, max_length, settings))

        def generate(self, prompts, num_samples, max_tokens, seeds, **options):
            """Of three queries no, half the and all answers are right; all but one without @."""
            calls.append(([*map(list, prompts)], num_samples, max_tokens, seeds, options))
            first = {n: 1 if "logit_bias" in options else 8 - 4 * (n % 3) for n in range(48)}
            texts = [rf"\boxed{{{answer_of[tuple(prompt.tolist())]}}}" for prompt in prompts]
            return [
                SimpleNamespace(query=n, text=text if k >= first[n] else "")
                for n, text in enumerate(texts)
                for k in range(num_samples)
            ]

    monkeypatch.setattr(score, "Verifier", lambda: grade_here(1))
    monkeypatch.setattr(score, "Rollout", Rollout)
    monkeypatch.setattr(score, "init_ranks", lambda backend: None)
    options = RolloutArgs(max_length=160, precision="fp32", vllm_memory=0.1)
    expected = [(str(COMMITTED), str(COMMITTED), options, {"load_from_disk": True})]
    sampling, no_expert = evaluate.Args(model="").sampling, tokenizer.convert_tokens_to_ids("@")
    for tier in TIERS:
        examples = load_examples(str(tiny / "heldout" / f"{tier}.jsonl"))
        queries, _ = tokenize_examples(examples, tokenizer, 160, 128)
        answer_of |= {tuple(q.prompt_ids.tolist()): q.example.answer for q in queries}
        seeds = [derive_seed(3, query.id) for query in queries]
        asked = [query.prompt_ids.tolist() for query in queries], 8, 128, seeds
        expected.append((*asked, sampling))
        if tier in ("keep", "long"):
            expected.append((*asked, sampling | {"logit_bias": {no_expert: -100.0}}))
    output = tmp_path / "scores.json"
    assert score.score(score.Args(base=tiny, model=COMMITTED, output=output, seed=3)) == 0
    assert calls == expected
    rates = {"pass@1": 0.5, "pass@8": 0.6667, "right": [0, 4, 8] * 16}
    more = {tier: rates | {"skill": 0.875} for tier in ("keep", "long")}
    assert json.loads(output.read_text()) == dict.fromkeys(TIERS, rates) | more


@slow
@needs_vllm
def test_each_method_of_the_demo_gains_and_osw_ft_keeps_more_than_sft(tmp_path):
    folder = tmp_path / "a demo"
    output_of("-m", "demo", "--steps", 16, "--output_dir", folder)
    report = (folder / "report.txt").read_text()
    base, sft, oswft, grpo = (line[16:].split() for line in report.splitlines()[1:5])
    gains, kept, skills = (
        [float(cells[column]) for cells in (base, sft, oswft, grpo)] for column in range(3)
    )
    assert min(gains[1:]) > gains[0] + 5 and min(skills) > 95, report
    assert kept[1] < kept[2] <= kept[0] and kept[1] < 90, report

    # The committed base has the scores that are written next to it; rounding may flip an answer.
    stated = json.loads((COMMITTED / "scores.json").read_text())
    rates = [100 * stated[tier]["pass@1"] for tier in TIERS]
    assert [*map(float, base[6:])] == pytest.approx(rates, abs=2)
    assert (folder / "plots" / "mean_weight.png").exists() and (folder / "view.html").exists()


def test_nothing_is_deleted_in_the_folder_of_something_else(tmp_path):
    (tmp_path / "args.json").write_text('{"settings": {}}')
    with pytest.raises(InputError, match="no demo"):
        the_demo.demo(tmp_path)
    assert (tmp_path / "args.json").exists()
