"""The importers, the letters that curation reads, and what show prints."""

import json

from data import InputError, load_examples, write_rows
from look.training_set import show
from models import ASK_LETTER
from prepare.convert import convert
from prepare.curate import end_in_box, final_letter, option_labels
from templates import CASES, make_tokenizer
from verify import is_correct

import pytest

AQUA = {"question": "2+2? ", "options": ["A)3", "B)4"], "rationale": "sum\n", "correct": "B"}
GSM8K = {"question": "q", "answer": "#### Sum\n2*3=<<2*3=6>>6.\n#### $1,234,567.8"}


def test_aqua_becomes_multiple_choice_and_gsm8k_loses_its_calculator(write, tmp_path):
    for name, row in (("aqua", AQUA), ("gsm8k", GSM8K)):
        convert(name, write(row), str(tmp_path / "new" / name))
    (aqua,), (gsm8k,) = (load_examples(str(tmp_path / "new" / name)) for name in ("aqua", "gsm8k"))
    assert (aqua.question, aqua.answer, aqua.source) == ("2+2?\nA)3\nB)4", "B", "aqua")
    assert aqua.solution == "sum\n\nThe answer is \\boxed{B}."
    assert gsm8k.solution == "#### Sum\n2*3=6.\n\nThe answer is \\boxed{$1234567.8}."
    assert (gsm8k.question, gsm8k.answer, gsm8k.source) == ("q", "$1234567.8", "gsm8k")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("aqua", {**AQUA, "correct": "C"}),  # not among the options
        ("aqua", {**AQUA, "options": "A)1 B)2"}),
        ("gsm8k", {**GSM8K, "answer": "6"}),
        *(("gsm8k", {**GSM8K, "answer": f"#### {n}"}) for n in ("1,2345", ",123")),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(write, tmp_path, name, row):
    with pytest.raises(InputError, match=r"rows\.jsonl:2: "):
        convert(name, write({"aqua": AQUA, "gsm8k": GSM8K}[name], row), str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.glob("out*"))


SVAMP = {"Body": "He had 9.", "Question": "Left?", "Equation": "( 9.0 - ( 3.0 + 2.0 ) )"}


# AQuA's release names JSONL .json, too. Windows begins a file with a byte-order mark.
@pytest.mark.parametrize("form", ["\ufeff\n[{},{}]", "\ufeff{}\n{}"])
def test_svamp_s_solution_is_its_equation_and_a_wrong_one_is_left_out(tmp_path, form, capsys):
    rows = [json.dumps({**SVAMP, "Answer": answer}) for answer in (4.0, 5.0)]
    (tmp_path / "in.json").write_text(form.format(*rows))
    convert("svamp", str(tmp_path / "in.json"), str(tmp_path / "out.jsonl"))
    assert "1 examples (1 left out: wrong equations) -> " in capsys.readouterr().out
    [row] = load_examples(str(tmp_path / "out.jsonl"))
    assert (row.id, row.question, row.answer) == ("svamp-0", "He had 9. Left?", "4")
    assert row.solution == "9 - ( 3 + 2 ) = 4\n\nThe answer is \\boxed{4}."


@pytest.mark.parametrize(
    ("question", "labels"),
    [
        ("Pick.\nA)1\nB)2", "AB"),
        (r"Pick. $\textbf{(A)}\ 1 \qquad \textbf{(B)}\ 2\qquad\textbf{(C)}\ 3$", "ABC"),
        ("选择（A）1（B）2（C）3", "ABC"),
        ("Statements (A) and (C). Pick. (A) 1 (B) 2 (C) 3 (D) 4", "ABCD"),
        ("".join(f"({letter}) x " for letter in "ABCDEFGHIJ"), "ABCDEFGHIJ"),
        # no options
        ("Find f(A) + f(B) + P(C).", ""),
        ("In the U.S.A. it is 5 A.M. or B.C.", ""),
        ("Pick. (B) 1 (C) 2", ""),
    ],
)
def test_the_labels_of_options_are_read_in_order(question, labels):
    assert option_labels(question) == labels


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"So \boxed{\textbf{(C)}\ 12}.", "C"),
        (r"\boxed{12}, which is \boxed{C}", "C"),
        ("The answer is B. A is wrong.", "B"),
        ("\\boxed{" * 20_000 + "C" + "}" * 20_000, "C"),  # in time that grows with the text alone
        # none, or several
        (r"\boxed{C}, no: \boxed{12}", None),
        ("The answer is (A) or (C).", None),
    ],
)
def test_a_final_letter_is_one_letter_or_none(text, letter):
    assert final_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (r"So $\boxed{\text{(C)}}$.", r"So \boxed{C}"),
        # what is not enclosed alone stays, and so does what follows
        (r"So $x = \boxed{C}$", "So $x = \\boxed{C}$\n\n\\boxed{C}"),
        (r"So \boxed{C}, as (B) fails", "So \\boxed{C}, as (B) fails\n\n\\boxed{C}"),
    ],
)
def test_a_text_gets_a_plain_box_as_its_end(text, ended):
    assert end_in_box(text, "C") == ended and is_correct(ended, "C")


def test_show_prints_what_is_read_and_what_is_learnt(tmp_path, capsys):
    make_tokenizer(CASES["chatml"]).save_pretrained(tmp_path / "tokenizer")
    report = {"arguments": {"tokenizer": str(tmp_path / "tokenizer")}}
    (tmp_path / "train.report.json").write_text(json.dumps(report))
    fields = {"question": "1+1\n(A) 1 (B) 2", "answer": "B", "source": "s"}
    write_rows([{"id": "0", **fields, "solution": "222\\boxed{B}"}], tmp_path / "train.jsonl")
    show(str(tmp_path / "train.jsonl"), 0)
    out = capsys.readouterr().out
    read, _, learnt = out.partition("==== learnt, with loss")
    assert fields["question"] in read and ASK_LETTER in read and "222" not in read
    assert "222\\boxed{B}<|im_end|>" in learnt
    for index, tokenizer in ((1, None), (0, str(tmp_path))):  # there is neither
        with pytest.raises(InputError):
            show(str(tmp_path / "train.jsonl"), index, tokenizer)
