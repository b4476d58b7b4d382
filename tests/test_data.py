"""What the model reads: rows, prompts, token ids, batches."""

import itertools
import json
import re

import numpy as np
import pytest
import torch

import data
from conftest import SHARED, needs_shared
from data import Example, InputError, TokenizedExample
from tiny import make_examples, make_tokenizer

QWEN = SHARED / "qwen3_tokenizer"
ROW = {"id": "1", "question": "1+1", "solution": "\\boxed{2}", "answer": "2", "source": "s"}


@pytest.fixture(params=["tiny", pytest.param("qwen", marks=needs_shared)])
def tokenizer(request):
    return make_tokenizer() if request.param == "tiny" else data.load_tokenizer(str(QWEN))


@pytest.fixture
def write(tmp_path):
    def write(*lines) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return str(path)

    return write


# ---- rows


def test_examples_are_read_in_order(write):
    examples = data.load_examples(write(ROW, {**ROW, "id": "2", "more": 1}))
    assert [example.id for example in examples] == ["1", "2"]
    assert examples[0] == Example("1", "1+1", "\\boxed{2}", "2", "s")


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
            {**ROW, "id": "2", "answer": 7},
            "rows.jsonl:2: field 'answer' must be a non-empty string",
        ),
        ({**ROW, "id": "2", "solution": " "}, "rows.jsonl:2: field 'solution' must be"),
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


# ---- importers


def test_aqua_becomes_multiple_choice(write, tmp_path):
    row = {"question": "2+2? ", "options": ["A)3", "B)4"], "rationale": "sum\n", "correct": "B"}
    data.import_aqua(write(row), str(tmp_path / "new" / "out.jsonl"))
    (example,) = data.load_examples(str(tmp_path / "new" / "out.jsonl"))
    assert example.question == "2+2?\nA)3\nB)4"
    assert example.solution == "sum\n\nThe answer is \\boxed{B}."
    assert (example.answer, example.source) == ("B", "aqua")


def test_gsm8k_loses_its_calculator_and_gains_a_box(write, tmp_path):
    row = {"question": "q", "answer": "He has 2*3=<<2*3=6>>6.\n#### 1,006"}
    data.import_gsm8k(write(row), str(tmp_path / "out.jsonl"))
    (example,) = data.load_examples(str(tmp_path / "out.jsonl"))
    assert example.solution == "He has 2*3=6.\n\nThe answer is \\boxed{1006}."
    assert example.answer == "1006"


@pytest.mark.parametrize(
    ("importer", "row", "message"),
    [
        (data.import_aqua, {"question": "q"}, "rows.jsonl:1: field 'options' is missing"),
        (
            data.import_aqua,
            {"question": "q", "options": ["A)1"], "rationale": "r", "correct": "C"},
            "rows.jsonl:1: the correct letter 'C' is not among the options",
        ),
        (data.import_gsm8k, {"question": "q", "answer": "6"}, "rows.jsonl:1: the answer has no"),
    ],
)
def test_an_importer_names_the_bad_row_and_writes_nothing(write, tmp_path, importer, row, message):
    with pytest.raises(InputError, match=message):
        importer(write(row), str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.glob("out*"))


@needs_shared
def test_the_real_aqua_and_gsm8k_import_whole(tmp_path):
    data.import_aqua(str(SHARED / "data" / "aqua_dev.jsonl"), str(tmp_path / "aqua.jsonl"))
    data.import_gsm8k(str(SHARED / "data" / "gsm8k_train.jsonl"), str(tmp_path / "gsm8k.jsonl"))
    assert len(data.load_examples(str(tmp_path / "aqua.jsonl"))) == 254
    assert len(data.load_examples(str(tmp_path / "gsm8k.jsonl"))) == 7473


# ---- prompts and token ids


def conversation(tokenizer, example: Example) -> list[int]:
    """The whole conversation, tokenized in one piece."""
    prompt = data.prompt_text(tokenizer, example.question, data.instruction(example.answer))
    end = tokenizer.decode([data.end_of_turn_id(tokenizer)])
    return tokenizer(prompt + example.solution + end, add_special_tokens=False).input_ids


def test_prompt_and_completion_are_the_tokens_of_the_whole_conversation(tokenizer):
    examples = [
        Example("1", "7+5*3", "7+5=2;2*3=6;\\boxed{6}", "6", "s"),
        Example("2", "Pick one.\nA) 1\nB) 2", "<think>\nOne.\n</think>\n\n\\boxed{A}", "A", "s"),
        Example("3", "Was ist 2 × 3?", "Sechs: 6 🙂\n\n\\boxed{6}", "6", "s"),
    ]
    rows, _ = data.tokenize_examples(examples, tokenizer, 1000, 100)
    for row in rows:
        assert row.prompt_ids + row.completion_ids == conversation(tokenizer, row.example)


@needs_shared
def test_the_same_holds_for_real_problems_and_solutions(tmp_path):
    tokenizer = data.load_tokenizer(str(QWEN))
    data.import_aqua(str(SHARED / "data" / "aqua_dev.jsonl"), str(tmp_path / "aqua.jsonl"))
    examples = data.load_examples(str(tmp_path / "aqua.jsonl"))
    rows, dropped = data.tokenize_examples(examples, tokenizer, 5120, 4096)
    assert len(rows) == len(examples) and not any(dropped.values())
    for row in rows:
        assert row.prompt_ids + row.completion_ids == conversation(tokenizer, row.example)


def test_the_prompt_is_the_template_with_the_instruction(tokenizer):
    text = data.prompt_text(tokenizer, "1+1", data.instruction("2"))
    assert text == f"<|im_start|>user\n1+1\n{data.ASK_FREE}<|im_end|>\n<|im_start|>assistant\n"
    assert data.instruction("B") == data.ASK_LETTER != data.instruction("e") == data.ASK_FREE


def test_the_end_of_turn_is_not_eos_and_sampling_stops_on_both(tokenizer):
    end, eos = data.stop_token_ids(tokenizer)
    assert tokenizer.decode([end]) == "<|im_end|>" and eos == tokenizer.eos_token_id != end


def test_a_template_without_a_closing_token_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(InputError, match="special token"):
        data.end_of_turn_id(tokenizer)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no tokenizer"):
        data.load_tokenizer(str(tmp_path))


def test_what_does_not_fit_is_dropped_and_counted_never_truncated():
    tokenizer = make_tokenizer()
    examples = [
        Example("fits", "1+1", "\\boxed{2}", "2", "s"),
        Example("long prompt", "1+1" * 20, "\\boxed{2}", "2", "s"),
        Example("long solution", "1+1", "1+1=2;" * 20 + "\\boxed{2}", "2", "s"),
    ]
    lengths = {e.id: len(conversation(tokenizer, e)) for e in examples}
    rows, dropped = data.tokenize_examples(examples, tokenizer, 60, 30)
    assert [row.example.id for row in rows] == ["fits"]
    assert len(rows[0]) == lengths["fits"]
    assert dropped == {"prompt_too_long": 1, "solution_too_long": 1}
    exact = lengths["long solution"]
    assert len(data.tokenize_examples(examples[2:], tokenizer, exact, 30)[0]) == 1
    assert len(data.tokenize_examples(examples[2:], tokenizer, exact - 1, 30)[0]) == 0


# ---- batches


def test_the_loss_covers_the_completion_with_its_end_of_turn_and_no_padding():
    prompt, answer, end = [5, 6, 7], [8, 9], 0  # the end of turn is 0, and so is the padding
    batch = data.collate([(prompt, [*answer, end]), ([5], [end]), ([1, 2, 3, 4], [9, 9, 9, end])])
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


def test_a_tokenized_example_is_as_long_as_its_tokens():
    assert len(TokenizedExample(Example(*"abcde"), [1, 2], [3, 4, 5])) == 5


# ---- the synthetic set


def test_tiny_problems_are_solved_by_their_own_steps():
    import numpy as np

    examples = make_examples(
        90, {"easy": 1 / 3, "middle": 1 / 3, "hard": 1 / 3}, np.random.default_rng(0), set()
    )
    assert len({example.question for example in examples}) == 90
    for example in examples:
        *steps, box = example.solution.split(";")
        value = example.question[0]
        for step in steps:
            left, right = step.split("=")
            assert left.startswith(value)
            assert eval(left.replace("^", "**")) % 10 == int(right)
            value = right
        assert box == f"\\boxed{{{value}}}" and example.answer == value
        operators = set(example.question) - set("0123456789")
        assert operators <= set({"easy": "+-", "middle": "+-*", "hard": "+-*^"}[example.source])
        assert {"middle": "*", "hard": "^"}.get(example.source, "-") in operators


# ---- benchmarks: three self-written rows each, in the columns of the source

AMC_ROWS = [
    {"problem": "1+1?", "answer": 2.0, "year": 2022, "url": "u", "solution": "s"},
    {"problem": "2+2?", "answer": "4", "year": "2023", "url": "u", "solution": "s"},
    {"problem": "3+3?", "answer": 6, "year": 2023, "url": "u", "solution": "s"},
]
AIME_ROWS = [
    {"id": 60 + n, "problem": f"{n}+{n}?", "solution": "s", "answer": f"{2 * n:03}", "url": "u"}
    for n in range(3)
]
GPQA_ROWS = [
    {
        **{"Question": f" Which one, {n}?\n", "Correct Answer": "right\n", "Record ID": "r"},
        **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)},
    }
    for n in range(3)
]
SOURCES = {
    "aime24": AIME_ROWS,
    "aime25": [{"problem": f"{n}?", "answer": "336^\\circ", "id": str(n)} for n in range(3)],
    "amc22": AMC_ROWS,
    "amc23": AMC_ROWS,
    "amc24": [{**row, "year": 2024} for row in AMC_ROWS],
    "math500": [
        {"problem": f"{n}?", "solution": "s", "answer": "E", "subject": "a", "level": 1}
        for n in range(3)
    ],
    "gpqa_diamond": GPQA_ROWS,
}
READ = {  # benchmark -> what is read: (id, question, answer)
    "aime24": [(f"aime24-{n}", f"{n}+{n}?", f"{2 * n:03}") for n in range(3)],
    "aime25": [(f"aime25-{n}", f"{n}?", "336^\\circ") for n in range(3)],
    "amc22": [("amc22-0", "1+1?", "2")],
    "amc23": [("amc23-0", "2+2?", "4"), ("amc23-1", "3+3?", "6")],
    "amc24": [("amc24-0", "1+1?", "2"), ("amc24-1", "2+2?", "4"), ("amc24-2", "3+3?", "6")],
    "math500": [(f"math500-{n}", f"{n}?", "E") for n in range(3)],
}


def with_place(rows: list[dict]) -> list[tuple[str, dict]]:
    return [(f"file:{n}", row) for n, row in enumerate(rows, start=1)]


@pytest.mark.parametrize("name", data.BENCHMARKS)
def test_a_benchmark_is_read_from_the_columns_of_its_source(name):
    problems = data.read_benchmark(name, with_place(SOURCES[name]))
    asked = data.ASK_LETTER if name == "gpqa_diamond" else data.ASK_FREE  # also for the answer E
    assert {problem.instruction for problem in problems} == {asked}
    if name != "gpqa_diamond":
        assert [(p.id, p.question, p.answer) for p in problems] == READ[name]
    for problem in problems if name == "gpqa_diamond" else []:
        first, *options = problem.question.splitlines()
        assert first.startswith("Which one") and options.pop(0) == ""
        assert [option[:4] for option in options] == ["(A) ", "(B) ", "(C) ", "(D) "]
        assert {option[4:] for option in options} == {"right", "wrong 1", "wrong 2", "wrong 3"}
        assert f"({problem.answer}) right" in options


@pytest.mark.parametrize("name", data.BENCHMARKS)
def test_a_benchmark_comes_from_its_split_on_the_hub_or_says_why_not(name, monkeypatch):
    calls = []

    def load_dataset(*place, split):
        calls.append((*place, split))
        return SOURCES[name]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(InputError, match=f"but {name} has {data.BENCHMARKS[name].num_problems};"):
        data.load_benchmark(name)
    (place,) = calls
    gpqa = ("Idavidrein/gpqa", "gpqa_diamond", "train")
    assert place == (gpqa if name == "gpqa_diamond" else (place[0], None, place[2]))
    assert place[2] == ("train" if name in ("aime24", "gpqa_diamond") else "test")


def test_options_are_shuffled_the_same_for_ever_and_evenly():
    assert data.with_options("Q?", "r", ["a", "b", "c"]) == (
        "Q?\n\n(A) c\n(B) r\n(C) b\n(D) a",
        "B",
    )
    letters = [data.with_options(f"Q{n}?", "r", ["a", "b", "c"])[1] for n in range(2000)]
    assert all(letters.count(letter) == pytest.approx(500, abs=75) for letter in "ABCD")
    texts = [data.with_options(f"Q{n}?", "r", ["a", "b", "c"])[0] for n in range(2000)]
    assert len({text.partition("\n\n")[2] for text in texts}) == 24  # all orders occur
    shuffled_input = data.with_options("Q?", "r", ["c", "b", "a"])
    assert shuffled_input == data.with_options("Q?", "r", ["a", "b", "c"])


def test_a_benchmark_with_another_number_of_problems_is_refused(tmp_path):
    path = tmp_path / "math500.jsonl"
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(500)]
    data.write_rows(rows, path)
    assert len(data.load_benchmark("math500", tmp_path)) == 500
    data.write_rows(rows[1:], path)
    with pytest.raises(InputError, match="has 499 problems, but math500 has 500"):
        data.load_benchmark("math500", tmp_path)


def test_problems_of_ones_own_need_question_and_answer(tmp_path):
    path = tmp_path / "own.jsonl"
    data.write_rows([{"question": "1+1?", "answer": 2}, {"question": "x?", "answer": "B"}], path)
    first, second = data.load_problems(str(path))
    assert (first.id, first.answer, first.instruction) == ("row-0", "2", data.ASK_FREE)
    assert (second.id, second.answer, second.instruction) == ("row-1", "B", data.ASK_LETTER)
    for rows, message in [
        ([{"question": "1+1?"}], "own.jsonl:1: field 'answer' is missing"),
        ([{"question": "", "answer": "1"}], "own.jsonl:1: field 'question' must be a non-empty"),
        ([{"question": "1?", "answer": [1]}], "field 'answer' must be a non-empty text or a num"),
        ([{"question": "1?", "answer": "1", "id": 3}] * 2, "own.jsonl:2: id '3' was used before"),
        ([], "the data set is empty"),
    ]:
        data.write_rows(rows, path)
        with pytest.raises(InputError, match=re.escape(message)):
            data.load_problems(str(path))


@needs_shared
def test_the_copies_of_real_benchmarks_are_read_and_their_references_are_readable():
    for name, answers in {
        "aime24": {"204"},
        "aime25": {"336^\\circ"},
        "math500": {"p - q"},
    }.items():
        problems = data.load_benchmark(name, SHARED / "data")
        assert answers <= {problem.answer for problem in problems}
    with pytest.raises(InputError, match="has 40 problems, but amc23 has 46"):
        data.load_benchmark("amc23", SHARED / "data")
    assert len(data.load_problems(str(SHARED / "data" / "amc23.jsonl"))) == 40
