"""The loops of the scripts, whole runs in this process: what belongs together stays together."""

import shutil
import signal
from pathlib import Path

import train_grpo
import train_oswft
import train_sft
from conftest import metrics, rollouts
from data import (
    InputError,
    Trajectory,
    batch_indices,
    derive_seed,
    load_examples,
    read_rows,
    write_rows,
)
from dense import dense_grpo_loss, dense_logprobs, dense_oswft_loss
from engine import Engine
from models import PROMPT, count_parameters, load_model, load_tokenizer, tokenize_examples
from run import Run, checkpoints, metrics_table, read_args
from stand_in import StandIn, digits
from train_grpo import grpo_advantages
from train_oswft import control_weights, oswft_weights
from verify import is_correct

import pytest
import torch

STILL = 1e-12  # a learning rate at which the model stays what it is
STEPS = 6  # two batches of 12 queries, three steps to a batch; six of the 30 rows are not read


PAPER = {"seed": 0, "batch_size": 128, "num_epochs": 1, "max_steps": None, "save_every": 50}
PAPER |= {"max_length": 5120, "max_completion_length": 4096, "precision": "bf16"}
PAPER |= {"weight_decay": 0.0, "max_grad_norm": 1.0, "learning_rate": 1e-5, "zero_stage": 2}
SAMPLED = {**PAPER, "train_batch_size": None, "temperature": 1.0}
KEPT = {"save_every": 10, "keep_models": True}  # GRPO's: which one is evaluated is chosen later
DEFAULTS = {
    train_sft: {**PAPER, "weight_column": None},
    train_oswft: {**SAMPLED, "num_rollouts": 2, "weighting": "oswft", "normalizer": "token"},
    train_grpo: {
        **{**SAMPLED, **KEPT, "learning_rate": 1e-6},
        **{"num_rollouts": 8, "clip_low": 0.8, "clip_high": 1.28},
    },
}


@pytest.mark.parametrize("script", DEFAULTS)
def test_the_defaults_are_the_paper_s_and_those_of_the_pages(script):
    args = script.Args(model="m", data="d", output_dir="o")
    assert {name: getattr(args, name) for name in DEFAULTS[script]} == DEFAULTS[script]


class Reference:
    """The tiny model, and the rows of `run_here` in the order in which a run reads them."""

    def __init__(self, tiny: Path, folder: Path, seed: int, batch_size: int):
        self.model = load_model(str(tiny / "model"), 128, "fp32")
        tokenizer = load_tokenizer(str(tiny / "model"))
        rows, _ = tokenize_examples(load_examples(str(folder / "rows.jsonl")), tokenizer, 128, 48)
        batches = [batch_indices(30, batch_size, n, seed) for n in range(24 // batch_size)]
        self.batches = [[rows[i] for i in batch] for batch in batches]

    def assert_step(self, row: dict, loss: torch.Tensor, rows: list[Trajectory], keep) -> None:
        """Whether a row of metrics.jsonl says this loss, its gradient, and what was read."""
        parameters = list(self.model.parameters())
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6), row["step"]
        assert row["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4), row["step"]
        read = sum(len(each) for each, kept in zip(rows, keep.tolist(), strict=True) if kept)
        assert row["skipped_sequences"] == len(rows) - int(keep.sum()), row
        assert row["train_tokens"] == read and row["epoch"] == row["step"] * 4 / 30, row


def sampled_part(folder: Path, step: int, num_rollouts: int) -> tuple[list[dict], torch.Tensor]:
    """The answers that a step learns from, and the rewards of its whole batch (12, K)."""
    first = (step - 1) // 3 * 3 + 1
    answers = rollouts(folder, first)
    columns = {row["id"]: row for _, row in read_rows(str(folder.parent / "rows.jsonl"))}
    pairs = [(len(answer["text"]), columns[answer["id"]]["weight"]) for answer in answers]
    assert [answer["ungraded"] for answer in answers] == [length == 7 for length, _ in pairs]
    rewards = torch.tensor([0.0 if n == 7 else (n + 2 * weight) % 3 / 2 for n, weight in pairs])
    assert [answer["reward"] for answer in answers] == rewards.tolist()
    size = 4 * num_rollouts
    own = answers[(step - first) * size :][:size]
    rewards = rewards.view(12, num_rollouts)
    for answer, p in zip(answers, rewards.mean(1).repeat_interleave(num_rollouts), strict=True):
        assert answer["pass_rate"] == pytest.approx(p.item())
    return own, rewards


def assert_sampled(row: dict, answers: list[dict]) -> None:
    """Whether a row of metrics.jsonl is about these answers."""
    lengths = [len(answer["token_ids"]) for answer in answers]
    cut_off = sum(answer["finish_reason"] == "length" for answer in answers)
    ungraded = sum(answer["ungraded"] for answer in answers)
    assert row["completion_length_mean"] == sum(lengths) / len(lengths)
    assert (row["completion_length_max"], row["rollout_tokens"]) == (max(lengths), sum(lengths))
    shares = cut_off / len(lengths), ungraded / len(lengths)
    assert (row["truncated_share"], row["ungraded_share"]) == shares
    assert row["vllm_gap_mean"] < 1e-5 and row["vllm_gap_max"] < 1e-4


@pytest.mark.parametrize(
    ("weighting", "normalizer"),
    [("oswft", "token"), ("oswft", "sequence"), ("hard", "token"), ("random", "token")],
)
def test_a_step_of_osw_ft_learns_its_own_queries_by_their_own_answers(
    weighting, normalizer, run_here, tiny, tmp_path
):
    flags = {"weighting": weighting, "normalizer": normalizer, "seed": 3, "learning_rate": STILL}
    assert run_here(train_oswft, StandIn(), **flags) == 0
    reference, dealt = Reference(tiny, tmp_path, 3, 12), []
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    seconds = [row["sync_s"] for _, row in read_rows(str(tmp_path / "run" / "metrics.jsonl"))]
    assert [each > 0 for each in seconds] == [True, False, False] * 2  # once a batch
    for step, row in enumerate(rows, start=1):
        answers, rewards = sampled_part(tmp_path / "run", step, num_rollouts=2)
        batch, part = divmod(step - 1, 3)
        own = slice(4 * part, 4 * part + 4)
        queries = reference.batches[batch][own]
        assert [answer["id"] for answer in answers[::2]] == [query.id for query in queries]
        weights = oswft_weights(rewards)
        if weighting != "oswft":
            generator = torch.Generator().manual_seed(derive_seed(3, batch, "weights"))
            weights = control_weights(rewards, weighting, generator)
            assert not torch.equal(weights, oswft_weights(rewards))
        if part == 0:
            dealt.append(weights.argsort().tolist())
        weights = weights[own]
        written = [answer["weight"] for answer in answers]
        assert written == pytest.approx(weights.repeat_interleave(2).tolist())
        tokens = sum(len(query.response_ids) for query in queries)
        plain = [Trajectory(q.id, [*q.prompt_ids], [*q.response_ids]) for q in queries]
        size = tokens if normalizer == "token" else 4
        loss = dense_oswft_loss(reference.model, plain, weights, size)
        reference.assert_step(row, loss, plain, weights > 0)
        assert row["pass_rate"] == pytest.approx(rewards[own].mean().item())
        assert row["mean_weight"] == pytest.approx(weights.mean().item())
        shares = [(weights == 0), (weights > 0) & (weights < 1), (weights == 1)]
        names = ("weight_0_share", "weight_between_share", "weight_1_share")
        assert [row[name] for name in names] == [kind.float().mean().item() for kind in shares]
        assert_sampled(row, answers)
    assert dealt[0] != dealt[1] or weighting == "hard"


def test_a_step_of_grpo_learns_its_own_answers_by_their_own_advantages(run_here, tiny, tmp_path):
    flags = {"num_rollouts": 3, "temperature": 0.7, "seed": 3, "learning_rate": STILL}
    assert run_here(train_grpo, StandIn(), **flags) == 0
    reference, args = Reference(tiny, tmp_path, 3, 12), train_grpo.Args(model="", data="", **flags)
    for step, row in enumerate(metrics(tmp_path / "run"), start=1):
        answers, rewards = sampled_part(tmp_path / "run", step, num_rollouts=3)
        batch, part = divmod(step - 1, 3)
        own = slice(4 * part, 4 * part + 4)
        queries = [query for query in reference.batches[batch][own] for _ in range(3)]
        assert [answer["id"] for answer in answers] == [query.id for query in queries]
        advantages = grpo_advantages(rewards)[own]
        assert [a["advantage"] for a in answers] == pytest.approx(advantages.flatten().tolist())
        pairs = zip(queries, answers, strict=True)
        plain = [Trajectory(q.id, [*q.prompt_ids], a["token_ids"]) for q, a in pairs]
        with torch.no_grad():
            old = [dense_logprobs(reference.model, each, 0.7) for each in plain]
        flat = advantages.flatten()
        loss, *_ = dense_grpo_loss(reference.model, plain, flat.tolist(), old, args)
        reference.assert_step(row, loss, plain, flat != 0)
        assert row["reward"] == pytest.approx(rewards[own].mean().item())
        assert row["no_signal_share"] == (advantages == 0).all(dim=1).float().mean().item()
        assert row["approx_kl"] == row["clipped_low_share"] == row["clipped_high_share"] == 0
        assert_sampled(row, answers)


def test_pi_old_is_the_model_before_the_first_update_of_its_batch(run_here, tmp_path):
    assert run_here(train_grpo, StandIn(), num_rollouts=3, learning_rate=1e-3) == 0
    kl = [row["approx_kl"] for row in metrics(tmp_path / "run")]
    assert [each > 1e-5 for each in kl] == [False, True, True] * 2, kl
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[3] == pytest.approx(0, abs=1e-9)


def rewrite(path: Path, change) -> None:
    """Replace the rows of a JSONL file by what `change` makes of (number, row)."""
    write_rows([change(n, row) for n, (_, row) in enumerate(read_rows(str(path)))], path)


def test_a_new_run_says_how_many_solutions_are_right_by_their_references(
    run_here, tmp_path, capsys
):
    def box(n, row):
        return {**row, "solution": rf"\boxed{{{row['answer']}{'1' * (n >= 12)}}}"}

    data, flags = tmp_path / "rows.jsonl", {"reward": None, "max_steps": 1}
    rewrite(data, box)
    assert run_here(train_oswft, StandIn(), **flags) == 0
    said = f"40% of 30 solutions are right by their own references (not {data}:13): do they end"
    assert said in capsys.readouterr().err
    assert run_here(train_oswft, StandIn(), **flags, resume=str(tmp_path / "run")) == 0
    assert "solutions are right" not in capsys.readouterr().err


def test_grpo_reads_no_solution(run_here, tmp_path):
    def change(n, row):
        row = {**row, "solution": "<think>" + 50 * row["solution"]}  # too long, and not closed
        return row if n % 2 else {k: v for k, v in row.items() if k != "solution"}

    (tmp_path / "reward.py").write_text(
        "def f(text, row):\n    return len(row.solution.split('<think>')) / 2"
    )
    rewrite(tmp_path / "rows.jsonl", change)
    assert run_here(train_grpo, StandIn(), reward=f"{tmp_path}/reward.py:f", max_steps=3) == 0
    seen = {row["id"]: row["reward"] for row in rollouts(tmp_path / "run", 1)}
    assert {*seen.values()} == {0.5, 1.0}


@pytest.mark.parametrize("column", [None, "weight"])
def test_a_step_of_sft_learns_its_own_queries_by_the_weights_of_the_data(
    column, run_here, tiny, tmp_path, monkeypatch
):
    computed, logprobs = [], Engine.logprobs

    def count_and_compute(engine, batch, *args):
        computed.append(int(batch.mask.any(dim=1).sum()))  # how many rows
        return logprobs(engine, batch, *args)

    monkeypatch.setattr(Engine, "logprobs", count_and_compute)
    flags = {"weight_column": column, "seed": 3, "num_epochs": 2, "learning_rate": STILL}
    assert run_here(train_sft, **flags) == 0
    reference, rows = Reference(tiny, tmp_path, 3, 4), metrics(tmp_path / "run")
    assert len(rows) == 15  # 60 rows
    for row, queries in zip(rows, reference.batches, strict=False):
        weights = torch.tensor([q.example.extra["weight"] if column else 1.0 for q in queries])
        tokens = sum(len(query.response_ids) for query in queries)
        plain = [Trajectory(q.id, [*q.prompt_ids], [*q.response_ids]) for q in queries]
        loss = dense_oswft_loss(reference.model, plain, weights, tokens)
        reference.assert_step(row, loss, plain, weights > 0)
        assert row.get("mean_weight") == (weights.mean().item() if column else None)
    assert sum(computed) == 60 - sum(row["skipped_sequences"] for row in rows)


def test_vllm_is_told_all_that_the_flags_say(run_here, tiny, tmp_path):
    flags = {"seed": 3, "num_rollouts": 3, "temperature": 0.7, "max_completion_length": 6}
    flags |= {"max_length": 50, "vllm_memory": 2**-12, "learning_rate": STILL, "reward": None}
    vllm = StandIn()
    assert run_here(train_oswft, vllm, **flags) == 0
    queries = Reference(tiny, tmp_path, 3, 12).batches
    expected = [
        (
            [*query.prompt_ids],
            {
                **{"temperature": 0.7, "n": 3, "max_tokens": 6, "seed": seed},
                **{"stop_token_ids": [2, 0], "logprobs": 0 if n < 8 else None},
                **{"flat_logprobs": True, "detokenize": False},
            },
        )
        for number, batch in enumerate(queries)
        for n, query in enumerate(batch)
        for seed in [derive_seed(3, number, n, query.id)]
    ]
    assert vllm.requests == expected
    references = {query.id: query.example.answer for query in queries[0]}
    for answer in rollouts(tmp_path / "run", 1):
        assert answer["correct"] is is_correct(answer["text"], references[answer["id"]])
    assert vllm.options == {
        **{"model": str(tiny / "model"), "dtype": "float32", "load_format": "dummy", "seed": 0},
        **{"max_model_len": 50, "max_num_seqs": 36, "skip_tokenizer_init": True},
        **{"generation_config": "vllm", "logprobs_mode": "processed_logprobs"},
        **{"distributed_executor_backend": "external_launcher", "use_tqdm_on_load": False},
        **{"enable_sleep_mode": False, "enforce_eager": True, "enable_chunked_prefill": False},
        **{"block_size": 32, "max_num_batched_tokens": 8192},
        "kv_cache_memory_bytes": 2**34 // 2**12 - 4 * count_parameters(str(tiny / "model"), 50),
    }
    assert vllm.calls == 2 * ["reload_weights", "repack", "reset_prefix_cache"]


def test_the_closing_table_has_the_means_of_both_ends_and_the_tokens_of_a_second():
    fields = {"train_tokens": 21_060, "rollout_tokens": 50, "train_s": 2.0}
    table = metrics_table([{"loss": n / 7, **fields} for n in range(1, 2001)])
    assert [line.split() for line in table.splitlines()[1:]] == [
        *(["loss", "14.36", "271.5"], ["train_tokens", "21,060", "21,060"]),
        *(["rollout_tokens", "50", "50"], ["train_s", "4,000.0"], ["tokens_per_second", "10,555"]),
    ]


def ask_to_stop(after: int, monkeypatch) -> None:
    """A signal comes when a run has taken so many steps."""
    end_step = Run.end_step

    def end_step_and_signal(run: Run, row: dict) -> None:
        end_step(run, row)
        assert len(metrics(run.folder)) == run.step  # They are there at once, should it be killed.
        if run.step == after:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Run, "end_step", end_step_and_signal)


def steps_of(folder: Path, pattern: str = "") -> list[int]:
    """The steps of a run's checkpoints; with "state" those that a run can go on from."""
    return [step for step, path in checkpoints(folder).items() if (path / pattern).exists()]


@pytest.mark.parametrize("script", [train_sft, train_oswft, train_grpo])
def test_a_stopped_run_says_so_and_goes_on_to_the_same_end(
    script, run_here, tmp_path, monkeypatch, capsys
):
    vllm = None if script is train_sft else StandIn()
    flags = {"save_every": 5, "keep_checkpoints": 2, "max_steps": 15, "learning_rate": 1e-3}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_here(script, vllm, output_dir=str(whole), **flags) == 0
    # One that is due after 5 or 10 steps is written at the end of its batch. GRPO keeps models.
    at = [10, 15] if script is train_sft else [12, 15]
    assert steps_of(whole, "state") == at
    assert steps_of(whole) == ([6, *at] if script is train_grpo else at)
    assert (whole / "final" / "model.safetensors").exists()
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said == [f"python evaluate.py --model {whole}/final", f"python -m look.view {whole}"]

    with monkeypatch.context() as patch:
        ask_to_stop(2, patch)
        assert run_here(script, vllm, **flags) == 130
    stopped = 2 if script is train_sft else 3  # A batch that has begun is finished.
    assert steps_of(run, "state") == [stopped] and not (run / "final").exists()
    *_, said = capsys.readouterr().out.splitlines()
    assert said == f"stopped after step {stopped} of 15: launch it again with --resume {run}"
    record = read_args(run)
    assert record["prompt"] == PROMPT and record.get("vllm_runner") == (vllm and "V1")
    (run / "partial-checkpoint-000004").mkdir()  # as a kill may leave it
    assert run_here(script, vllm, resume=str(run), **flags | {"save_every": 6}) == 0
    assert metrics(run) == metrics(whole) and not [*run.glob("partial-*")]
    assert record == read_args(whole) | {"run_id": record["run_id"]}
    record["earlier_args"] = [{"step": stopped, **record["args"]}]
    assert read_args(run) == record | {"args": record["args"] | {"save_every": 6}}
    for path in [*whole.glob("rollouts/*"), whole / "final" / "model.safetensors"]:
        assert path.read_bytes() == (run / path.relative_to(whole)).read_bytes(), path


@pytest.mark.parametrize("script", [train_oswft, train_grpo])
def test_a_stop_while_answers_are_sampled_leaves_the_batch_for_later(script, run_here, tmp_path):
    asked = []

    def answer(prompt, params, k):
        asked.append(params["seed"])
        if len(asked) == 15 * script.Args.num_rollouts:  # in the second batch
            signal.raise_signal(signal.SIGUSR1)
        return digits(prompt, params, k)

    vllm, run = StandIn(answer), tmp_path / "run"
    assert run_here(script, vllm, train_batch_size=None) == 130
    assert len(asked) == 15 * script.Args.num_rollouts and len(metrics(run)) == 1
    assert steps_of(run, "state") == [1]
    [first] = [path.read_bytes() for path in run.glob("rollouts/*")]
    assert run_here(script, vllm, train_batch_size=None, resume=str(run)) == 0
    assert len(metrics(run)) == 2 and len(vllm.requests) == 12 + 12 + 12
    assert (run / "rollouts" / "step_000001.jsonl").read_bytes() == first


@pytest.mark.parametrize("script", [train_oswft, train_grpo])
def test_a_vllm_that_samples_another_model_is_refused_at_each_start(
    script, run_here, tmp_path, monkeypatch
):
    vllm, run = StandIn(), tmp_path / "run"
    for off in (2e-4, -2e-4, float("nan")):  # nats; in fp32 rounding gives 3e-7
        vllm.off = off
        with pytest.raises(InputError, match="vLLM does not sample from the model"):
            run_here(script, vllm)
        shutil.rmtree(run)
    vllm.off = 0.0
    with monkeypatch.context() as patch:
        ask_to_stop(2, patch)
        assert run_here(script, vllm) == 130
    vllm.off = 0.5
    with pytest.raises(InputError, match="vLLM does not sample from the model"):
        run_here(script, vllm, resume=str(run))


def test_how_far_vllm_is_off_is_said_of_each_batch(run_here, tmp_path):
    def answer(prompt, params, k):
        odd = len(vllm.waiting) % 2  # whether the query's place is
        vllm.off = (1 + odd) / 2 if len(vllm.requests) > 12 else 0.0  # from the second batch on
        return digits(prompt, params, k)

    vllm = StandIn(answer)
    assert run_here(train_oswft, vllm) == 0
    lengths = [len(a["token_ids"]) for a in rollouts(tmp_path / "run", 4)[:16:2]]
    mean = sum(n * (1 + place % 2) / 2 for place, n in enumerate(lengths)) / sum(lengths)
    for row in metrics(tmp_path / "run"):
        told = (mean, 1.0) if row["step"] > 3 else (0.0, 0.0)
        assert (row["vllm_gap_mean"], row["vllm_gap_max"]) == pytest.approx(told, abs=1e-4)
