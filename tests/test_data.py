"""What the model reads: rows, prompts, token ids, batches."""

import hashlib
import itertools
import json
import re
import tracemalloc

import numpy as np
import pytest
import torch

import data
import prompts
from conftest import SHARED, needs_shared
from data import Example, InputError, Trajectory
from demo.tiny import make_tokenizer
from prepare.convert import import_aqua

QWEN = SHARED / "qwen3_tokenizer"
ROW = {"id": "1", "question": "1+1", "solution": "\\boxed{2}", "answer": "2", "source": "s"}


@pytest.fixture(params=["tiny", pytest.param("qwen", marks=needs_shared)])
def tokenizer(request):
    return make_tokenizer() if request.param == "tiny" else prompts.load_tokenizer(str(QWEN))


# ---- rows


def test_examples_are_read_in_order(write):
    examples = data.load_examples(write(ROW, {**ROW, "id": "2"}))
    assert [example.id for example in examples] == ["1", "2"]
    assert examples[0] == Example("1", "1+1", "\\boxed{2}", "2", "s")


def test_a_number_is_read_as_text_and_other_columns_are_kept(write):
    rows = [{**ROW, "answer": 5}, {**ROW, "id": 2, "answer": 27.0, "tests": ["a"], "where": "b"}]
    five, more = data.load_examples(write(*rows))
    assert (five.answer, more.answer, more.id) == ("5", "27", "2")
    assert five.columns == {**ROW, "answer": "5"} and list(five.columns) == list(ROW)
    assert more.columns == {**rows[1], "id": "2", "answer": "27"}
    assert more.where.endswith("rows.jsonl:2")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{half a row\n", "rows.jsonl:2: not JSON"),
        ("\udcff\n".encode("utf-8", "surrogateescape").decode("latin1"), "rows.jsonl:2: not JSON"),
        ("[1, 2]\n", "rows.jsonl:2: expected a JSON object, got list"),
        ({**ROW, "id": "\ud800"}, "rows.jsonl:2: has half a surrogate pair"),
        ('{"id": "\\uD800"}\n', "rows.jsonl:2: has half a surrogate pair"),
        (
            {k: v for k, v in ROW.items() if k != "answer"},
            "rows.jsonl:2: field 'answer' is missing",
        ),
        (
            {**ROW, "id": "2", "answer": ["7"]},
            "rows.jsonl:2: field 'answer' must be a non-empty text or a number",
        ),
        ({**ROW, "id": "2", "solution": " "}, "rows.jsonl:2: field 'solution' must be"),
        ({**ROW, "id": "2", "answer": float("nan")}, "rows.jsonl:2: field 'answer' must be"),
        ({**ROW, "id": "2", "answer": True}, "rows.jsonl:2: field 'answer' must be"),
        ('{"id": ' + "9" * 5000 + "}\n", "rows.jsonl:2: not JSON"),
        ("[" * 100_000 + "\n", "rows.jsonl:2: not JSON"),
        (ROW, "rows.jsonl:2: id '1' was used before, at .*rows.jsonl:1"),
    ],
)
def test_a_bad_row_is_named_with_its_line(write, bad, message):
    with pytest.raises(InputError, match=message):
        data.load_examples(write(ROW, bad))


def test_a_missing_file_and_an_empty_one_are_said_so(write, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        data.load_examples(str(tmp_path / "absent.jsonl"))
    with pytest.raises(InputError, match="no such file"):
        data.load_examples("data/absent.jsonl")
    with pytest.raises(InputError, match="empty"):
        data.load_examples(write())


def test_a_hub_id_works_wherever_a_path_does(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [ROW]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data.load_examples("owner/name")[0].question == "1+1"
    assert data.load_examples("owner/name:config")[0].question == "1+1"
    assert asked == [("owner/name", None, "train"), ("owner/name", "config", "train")]


def test_a_hub_that_fails_gives_one_line(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError) as error:
        data.load_examples("owner/name")
    assert "no route" in str(error.value) and "\n" not in str(error.value)


# ---- prompts and token ids


def conversation(tokenizer, example: Example) -> list[int]:
    """The whole conversation, tokenized in one piece."""
    ask = prompts.instruction(example.answer)
    prompt = prompts.PAPER_PROMPT.text(tokenizer, example.question, ask)
    end = tokenizer.decode([prompts.end_of_turn_id(tokenizer)])
    return tokenizer(prompt + example.solution + end, add_special_tokens=False).input_ids


def test_prompt_and_completion_are_the_tokens_of_the_whole_conversation(tokenizer):
    examples = [
        Example("1", "7+5*3", "7+5=2;2*3=6;\\boxed{6}", "6", "s"),
        Example("2", "Pick one.\nA) 1\nB) 2", "<think>\nOne.\n</think>\n\n\\boxed{A}", "A", "s"),
        Example("3", "Was ist 2 × 3?", "Sechs: 6 🙂\n\n\\boxed{6}", "6", "s"),
    ]
    rows, _ = prompts.tokenize_examples(examples, tokenizer, 1000, 100)
    for row in rows:
        assert row.prompt_ids + row.completion_ids == conversation(tokenizer, row.example)


@needs_shared
def test_the_same_holds_for_real_problems_and_solutions(tmp_path):
    tokenizer = prompts.load_tokenizer(str(QWEN))
    import_aqua(str(SHARED / "data" / "aqua_dev.jsonl"), str(tmp_path / "aqua.jsonl"))
    examples = data.load_examples(str(tmp_path / "aqua.jsonl"))
    rows, dropped = prompts.tokenize_examples(examples, tokenizer, 5120, 4096)
    assert len(rows) == len(examples) and not any(dropped.values())
    for row in rows:
        assert row.prompt_ids + row.completion_ids == conversation(tokenizer, row.example)


def test_the_prompt_is_the_template_with_the_instruction(tokenizer):
    text = prompts.PAPER_PROMPT.text(tokenizer, "1+1", prompts.instruction("2"))
    assert text == f"<|im_start|>user\n1+1\n{prompts.ASK_FREE}<|im_end|>\n<|im_start|>assistant\n"
    assert (
        prompts.instruction("B")
        == prompts.ASK_LETTER
        != prompts.instruction("e")
        == prompts.ASK_FREE
    )


def test_the_end_of_turn_is_not_eos_and_sampling_stops_on_both(tokenizer):
    end, eos = prompts.stop_token_ids(tokenizer)
    assert tokenizer.decode([end]) == "<|im_end|>" and eos == tokenizer.eos_token_id != end


@pytest.mark.parametrize("field", ["question", "solution"])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>"])
def test_a_row_that_writes_out_a_special_token_is_refused_with_its_line(
    tokenizer, write, field, token
):
    examples = data.load_examples(write(ROW, {**ROW, "id": "2", field: f"1{token}2"}))
    prompts.tokenize_examples(examples[:1], tokenizer, 1000, 100)
    message = f"rows.jsonl:2: field '{field}' holds the special token '{token}'"
    with pytest.raises(InputError, match=re.escape(message)):
        prompts.tokenize_examples(examples, tokenizer, 1000, 100)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no tokenizer"):
        prompts.load_tokenizer(str(tmp_path))


def test_what_does_not_fit_is_dropped_and_counted_never_truncated():
    tokenizer = make_tokenizer()
    examples = [
        Example("fits", "1+1", "\\boxed{2}", "2", "s"),
        Example("long prompt", "1+1" * 20, "\\boxed{2}", "2", "s"),
        Example("long solution", "1+1", "1+1=2;" * 20 + "\\boxed{2}", "2", "s"),
    ]
    lengths = {e.id: len(conversation(tokenizer, e)) for e in examples}
    rows, dropped = prompts.tokenize_examples(examples, tokenizer, 60, 30)
    assert [row.example.id for row in rows] == ["fits"]
    assert len(rows[0]) == lengths["fits"]
    assert dropped == {"prompt_too_long": 1, "solution_too_long": 1}
    exact = lengths["long solution"]
    assert len(prompts.tokenize_examples(examples[2:], tokenizer, exact, 30)[0]) == 1
    assert len(prompts.tokenize_examples(examples[2:], tokenizer, exact - 1, 30)[0]) == 0


# ---- many examples in little memory


def many_rows(count: int, solution: str) -> list[dict]:
    return [{**ROW, "id": str(n), "solution": f"{n};{solution}", "more": n} for n in range(count)]


def tokenize(path) -> data.TokenizedExamples:
    return prompts.tokenize_examples(data.load_examples(path), make_tokenizer(), 6000, 30)[0]


def test_rows_come_back_as_they_were_whatever_was_dropped_between(write):
    rows = many_rows(450, "1+1=2;")  # more than are tokenized together
    rows[3]["question"] = rows[5]["solution"] = "1+" * 3000
    kept, encode = tokenize(write(*rows)), make_tokenizer().encode
    assert [row.id for row in kept] == [row["id"] for row in rows if row["id"] not in ("3", "5")]
    assert all(
        row.completion_ids[:-1] == encode(row.example.solution, add_special_tokens=False)
        for row in kept
    )
    assert kept[-2:] == [kept[446], kept[447]] and kept[-1].example.extra == {"more": 449}


def test_a_token_takes_four_bytes(write):
    path = write(*many_rows(300, "1+1=2;" * 500))
    examples, tokenizer = data.load_examples(path), make_tokenizer()
    prompts.tokenize_examples(examples, tokenizer, 6000, 30)  # what is loaded once
    tracemalloc.start()
    kept, _ = prompts.tokenize_examples(examples, tokenizer, 6000, 30)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = sum(map(len, kept))
    assert tokens > 900_000 and held < 1.2 * 4 * tokens


def test_the_hash_is_of_token_ids_and_columns(write):
    kept, digest = tokenize(write(*many_rows(5, "1+1=2;"))), hashlib.sha256()
    for row in kept:
        digest.update(np.array([*row.prompt_ids, -1, *row.completion_ids]).tobytes())
        digest.update(json.dumps(row.example.columns, default=str).encode())
    assert kept.hash.hexdigest() == digest.hexdigest()


# ---- batches


def test_the_loss_covers_the_completion_with_its_end_of_turn_and_no_padding():
    prompt, answer, end = [5, 6, 7], [8, 9], 0  # the end of turn is 0, and so is the padding
    pairs = [(prompt, [*answer, end]), ([5], [end]), ([1, 2, 3, 4], [9, 9, 9, end])]
    batch = data.collate([Trajectory("id", *pair) for pair in pairs], range(3))
    assert batch.input_ids.shape == batch.targets.shape == batch.mask.shape == (3, 7)
    learnt = [
        targets[mask].tolist() for targets, mask in zip(batch.targets, batch.mask, strict=True)
    ]
    assert learnt == [[8, 9, 0], [0], [9, 9, 9, 0]]
    assert batch.mask[0].tolist() == [False, False, True, True, True, False, False]
    assert batch.input_ids[0, :5].tolist() == [5, 6, 7, 8, 9]


def test_every_epoch_sees_every_example_once_in_another_order():
    stream = [i for batch in range(9) for i in data.batch_indices(12, 4, batch, seed=1)]
    epochs = [stream[:12], stream[12:24], stream[24:]]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.batch_indices(12, 4, 0, seed=1) != data.batch_indices(12, 4, 0, seed=2)


def test_an_epoch_is_one_seeded_permutation():
    order = np.random.default_rng([1, 2]).permutation(12).tolist()
    assert [i for batch in (6, 7, 8) for i in data.batch_indices(12, 4, batch, seed=1)] == order


def test_a_batch_may_cross_epochs_and_be_larger_than_one():
    assert sorted(data.batch_indices(4, 6, 0, seed=0) + data.batch_indices(4, 6, 1, seed=0)) == [
        0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3,
    ]  # fmt: skip


def test_seeds_are_the_same_on_every_machine():
    assert data.derive_seed(0, 3, "aqua-7") == 1466045397
    assert len({data.derive_seed(0, step, "q") for step in range(1000)}) == 1000


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [1, 100, 4096, 10**9])
def test_micro_batches_hold_every_sequence_once_within_the_budget(world_size, max_tokens):
    generator = torch.Generator().manual_seed(world_size)
    lengths = torch.randint(1, 300, (41,), generator=generator).tolist()
    passes = data.split_micro_batches(lengths, world_size, max_tokens)
    assert sorted(i for shares in passes for rows in shares for i in rows) == list(range(41))
    for shares in passes:
        assert len(shares) == world_size  # every rank takes part in every pass
        sizes = [len(rows) for rows in shares]
        assert max(sizes) - min(sizes) <= 1  # spread evenly
        for rows in shares:
            padded = len(rows) * max((lengths[i] for i in rows), default=0)
            assert padded <= max_tokens or len(rows) == 1
    assert data.split_micro_batches([], world_size, max_tokens) == []


def test_no_other_split_of_sorted_rows_costs_less(monkeypatch):
    monkeypatch.setattr(data, "PASS_TOKENS", 7)
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 30, rng.integers(1, 16)).tolist()
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        pairs = [order[i : i + 2] for i in range(0, len(order), 2)]  # two ranks

        def tokens(part, lengths=lengths):  # of the fullest rank
            return len(part) * lengths[part[0][0]]

        splits = [
            split_at(pairs, cuts)
            for cuts in itertools.product([False, True], repeat=len(pairs) - 1)
        ]
        least = min(
            sum(tokens(part) + 7 for part in parts)
            for parts in splits
            if all(len(part) == 1 or tokens(part) <= 60 for part in parts)
        )
        ours = data.split_micro_batches(lengths, 2, 60)
        cost = sum(len(mine) * lengths[mine[0]] + 7 for mine, _ in ours)
        assert cost == least


def split_at(items: list, cuts: tuple[bool, ...]) -> list[list]:
    """The items in consecutive parts; a new one begins after every cut."""
    parts = [[items[0]]]
    for item, cut in zip(items[1:], cuts, strict=True):
        if cut:
            parts.append([])
        parts[-1].append(item)
    return parts


def test_micro_batches_do_not_depend_on_the_order_of_equal_work():
    lengths = [3, 9, 4, 4, 7]
    passes = data.split_micro_batches(lengths, 2, 10)
    assert passes == [[[1], [4]], [[2, 0], [3]]]


def test_a_trajectory_is_as_long_as_its_tokens():
    assert len(Trajectory("id", [1, 2], [3, 4, 5])) == 5


def test_a_micro_batch_knows_its_rows_and_where_its_targets_are():
    rows = [Trajectory("id", [5] * n, [n] * 2) for n in (1, 2, 3)]
    batch = data.collate(rows, [2, 0])
    assert batch.rows.tolist() == [2, 0]
    assert batch.targets.flatten()[batch.positions].tolist() == [3, 3, 1, 1]
    idle = data.collate(rows, [1], learn=False)
    assert idle.input_ids.shape == (1, 3) and not idle.mask.any() and len(idle.positions) == 0


def test_values_of_completion_tokens_lie_where_collate_has_their_targets():
    rows = [Trajectory("id", [5] * n, [6] * m) for n, m in ((1, 3), (4, 2), (2, 2))]
    values = [[0.1, 0.2, 0.3], [0.4, 0.5], [0.6, 0.7]]  # in order as the mask is read
    padded, batch = data.pad_completions(values, rows), data.collate(rows, range(3))
    assert padded.shape == batch.mask.shape and not padded[~batch.mask].any()
    assert padded[batch.mask].tolist() == pytest.approx([n / 10 for n in range(1, 8)])
