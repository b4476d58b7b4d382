"""What the model reads: rows, prompts, token ids, batches."""

import errno
import re

import data
import models
from data import Example, InputError, Trajectory
from demo.tiny import make_tokenizer
from engine import IDLE

import numpy as np
import pytest
import torch

ROW = {"id": "1", "question": "1+1", "solution": "\\boxed{2}", "answer": "2", "source": "s"}


def test_examples_are_read_in_order(write):
    one, two = data.load_examples(write(ROW, "\n", {**ROW, "id": "2"}, "\n"))
    assert one == Example("1", "1+1", "\\boxed{2}", "2", "s")
    assert (one.where[-2:], two.where[-2:]) == (":1", ":3")


def test_a_number_is_read_as_text_and_other_columns_are_kept(write):
    rows = [{**ROW, "answer": 5}, {**ROW, "id": 2, "answer": 27.0, "tests": ["a"], "where": "b"}]
    rows += [{**ROW, "id": 3, "answer": 0.00005}]
    five, more, small = data.load_examples(write(*rows))
    assert (five.answer, more.answer, more.id) == ("5", "27", "2")
    assert five.columns == {**ROW, "answer": "5"} and list(five.columns) == list(ROW)
    assert more.columns == {**rows[1], "id": "2", "answer": "27"}
    assert more.where.endswith("rows.jsonl:2")
    assert small.answer == "0.00005"  # to algebra 5e-05 is 5 * e - 5


@pytest.mark.parametrize(
    "bad",
    [
        "{half a row\n",
        {"id": "2"},
        {**ROW, "id": "2", "solution": " "},
        {**ROW, "id": "2", "answer": float("nan")},
        {**ROW, "id": "2", "question": "\ud83d"},  # half of an emoji
        ROW,  # its id is used twice
    ],
)
def test_a_bad_row_is_refused_with_its_line(write, bad):
    with pytest.raises(InputError, match=r"rows\.jsonl:2: "):
        data.load_examples(write(ROW, bad))


def test_a_hub_id_works_wherever_a_path_does_and_its_failure_is_one_line(monkeypatch):
    asked = []

    def load_dataset(*name, split):
        if asked:
            raise ConnectionError("no route\nto host")
        asked.append((*name, split))
        return [ROW]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert data.load_examples("owner/name:config")[0].question == "1+1"
    assert asked == [("owner/name", "config", "train")]
    with pytest.raises(InputError, match=r"^[^\n]*no route[^\n]*$"):
        data.load_examples("owner/name")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt("^C")])
def test_a_full_disk_or_ctrl_c_leaves_the_former_file_and_no_half_one(error, tmp_path):
    def rows():
        yield ROW
        raise error

    path = tmp_path / "rows.jsonl"
    data.write_rows([ROW], path)
    before = path.read_bytes()
    with pytest.raises(type(error), match=re.escape(error.args[-1])):
        data.write_rows(rows(), path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def conversation(tokenizer, example: Example) -> list[int]:
    """The whole conversation, tokenized in one piece."""
    ask = models.instruction(example.answer)
    prompt = models.prompt_text(tokenizer, example.question, ask)
    end = tokenizer.decode([models.end_of_turn_id(tokenizer)])
    return tokenizer(prompt + example.solution + end, add_special_tokens=False).input_ids


def test_the_prompt_is_the_template_with_the_instruction():
    for answer, ask in (("2", models.ASK_FREE), ("e", models.ASK_FREE), ("C", models.ASK_LETTER)):
        text = models.prompt_text(make_tokenizer(), "1+1", models.instruction(answer))
        assert text == f"<|im_start|>user\n1+1\n{ask}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("field", ["question", "solution"])
def test_a_row_that_writes_out_a_special_token_is_refused_with_its_line(write, field):
    tokenizer = make_tokenizer()
    for token in ("<|im_end|>", "<|endoftext|>"):
        examples = data.load_examples(write(ROW, {**ROW, "id": "2", field: f"1{token}2"}))
        models.tokenize_examples(examples[:1], tokenizer, 1000, 100)
        with pytest.raises(InputError, match=rf"rows\.jsonl:2: .*'{field}'.*{re.escape(token)}"):
            models.tokenize_examples(examples, tokenizer, 1000, 100)


def many_rows(count: int, solution: str) -> list[dict]:
    return [{**ROW, "id": str(n), "solution": f"{n};{solution}", "more": n} for n in range(count)]


def test_what_does_not_fit_is_dropped_and_counted_never_truncated(write):
    rows, tokenizer = many_rows(450, "1+1=2;"), make_tokenizer()  # tokenized 200 at a time
    rows[3]["question"] = rows[5]["solution"] = "1+" * 3000
    examples = data.load_examples(write(*rows))
    kept, dropped = models.tokenize_examples(examples, tokenizer, 6000, 30)
    assert [row.example for row in kept] == [*examples[:3], examples[4], *examples[6:]]
    assert dropped == {"prompt_too_long": 1, "solution_too_long": 1}
    for row in kept:
        assert row.id == row.example.id
        ids = [*row.prompt_ids, *row.response_ids]
        assert ids == conversation(tokenizer, row.example)
        assert row.prompt_ids.dtype == row.response_ids.dtype == np.int32  # 4 bytes a token
    exact = len(conversation(tokenizer, examples[5]))
    prompt = len(kept[0].prompt_ids)  # it leaves room for an answer
    for n, *limits, left in (
        *((5, exact, 30, 1), (5, exact - 1, 30, 0), (5, exact, exact, 1)),  # no rollouts
        *((0, prompt + 30, 30, 1), (0, prompt + 29, 30, 0)),
    ):
        assert len(models.tokenize_examples([examples[n]], tokenizer, *limits)[0]) == left


def test_the_hash_is_of_all_token_ids_and_columns(write):
    def hash_of(rows: list[dict]) -> str:
        examples = data.load_examples(write(*rows))
        return data.hash_examples(models.tokenize_examples(examples, make_tokenizer(), 6000, 30)[0])

    rows = many_rows(5, "1+1=2;")
    changed = [{**rows[0], name: "3"} for name in ("question", "solution", "answer", "more")]
    sets = [rows, rows[:4], rows[::-1], *([row, *rows[1:]] for row in changed)]
    assert len(set(map(hash_of, sets))) == len(sets) and hash_of(rows) == hash_of(rows)


def test_the_loss_covers_the_completion_with_its_end_of_turn_and_no_padding():
    prompt, answer, end = [5, 6, 7], [8, 9], 0  # the end of turn is 0, and so is the padding
    pairs = [(prompt, [*answer, end]), ([5], [end]), ([1, 2, 3, 4], [9, 9, 9, end])]
    rows = [Trajectory("id", *pair) for pair in pairs]
    batch = data.collate(rows, [2, 0, 1])
    assert batch.input_ids.shape == batch.targets.shape == batch.mask.shape == (3, 7)
    assert batch.indices.tolist() == [2, 0, 1]
    assert batch.targets[batch.mask].tolist() == [9, 9, 9, 0, 8, 9, 0, 0]
    assert batch.mask[1].tolist() == [False, False, True, True, True, False, False]
    assert batch.input_ids[1, :5].tolist() == [5, 6, 7, 8, 9]
    idle = data.collate([IDLE], [0])
    assert not idle.mask.any()


def test_every_epoch_sees_every_example_once_in_another_order():
    stream = [i for batch in range(9) for i in data.batch_indices(12, 4, batch, seed=1)]
    epochs = [stream[:12], stream[12:24], stream[24:]]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[2] == np.random.default_rng([1, 2]).permutation(12).tolist()
    assert data.batch_indices(12, 4, 0, seed=1) != data.batch_indices(12, 4, 0, seed=2)
    across = data.batch_indices(4, 6, 0, seed=0) + data.batch_indices(4, 6, 1, seed=0)
    assert sorted(across) == sorted([*range(4)] * 3)  # a batch may cross epochs


def test_seeds_are_the_same_on_every_machine():
    assert data.derive_seed(0, 3, "aqua-7") == 1466045397
    assert len({data.derive_seed(0, step, "q") for step in range(1000)}) == 1000


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 4096, 10**9])
def test_micro_batches_hold_every_sequence_once_within_the_budget(world_size, max_tokens):
    generator = torch.Generator().manual_seed(world_size)
    lengths = torch.randint(1, 300, (41,), generator=generator).tolist()
    passes = data.split_rows(lengths, world_size, max_tokens)
    assert sorted(i for shares in passes for rows in shares for i in rows) == list(range(41))
    for shares in passes:
        assert len(shares) == world_size  # every rank takes part in every pass
        sizes = [len(rows) for rows in shares]
        assert max(sizes) - min(sizes) <= 1  # spread evenly
        for rows in shares:
            padded = len(rows) * max((lengths[i] for i in rows), default=0)
            assert padded <= max_tokens or len(rows) == 1
    assert data.split_rows([], world_size, max_tokens) == []
    assert data.split_rows([9, 4, 1, 5, 5], 1, 10) == [[[0]], [[3, 4]], [[1, 2]]]  # full ones
