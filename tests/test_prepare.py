"""The importers, the letters that curation reads, and what show and stats print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_curate import many, save_benchmarks, save_tokenizer, to_line

from conftest import ROOT, SHARED, needs_shared
from data import ASK_LETTER, InputError, load_examples, write_rows
from prepare.convert import import_aqua, import_gsm8k
from prepare.curate import Args, curate
from prepare.letters import end_in_box, final_letter, option_labels
from prepare.look import show, stats
from verify import is_correct


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def curated(tmp_path_factory, tokenizer) -> Path:
    """A training file of 300 examples, with its report."""
    folder = tmp_path_factory.mktemp("curated")
    (folder / "math.jsonl").write_bytes(b"".join(map(to_line, many())))
    args = Args(
        input=(folder / "math.jsonl",),
        tokenizer=str(tokenizer),
        output=folder / "train.jsonl",
        max_solution_tokens=400,
        benchmarks_dir=save_benchmarks(folder),
        allow_fewer=True,
        num_workers=2,
    )
    curate(args)
    return args.output


# ---- importers


def test_aqua_becomes_multiple_choice(write, tmp_path):
    row = {"question": "2+2? ", "options": ["A)3", "B)4"], "rationale": "sum\n", "correct": "B"}
    import_aqua(write(row), str(tmp_path / "new" / "out.jsonl"))
    (example,) = load_examples(str(tmp_path / "new" / "out.jsonl"))
    assert example.question == "2+2?\nA)3\nB)4"
    assert example.solution == "sum\n\nThe answer is \\boxed{B}."
    assert (example.answer, example.source) == ("B", "aqua")


def test_gsm8k_loses_its_calculator_and_gains_a_box(write, tmp_path):
    row = {"question": "q", "answer": "He has 2*3=<<2*3=6>>6.\n#### 1,006"}
    import_gsm8k(write(row), str(tmp_path / "out.jsonl"))
    (example,) = load_examples(str(tmp_path / "out.jsonl"))
    assert example.solution == "He has 2*3=6.\n\nThe answer is \\boxed{1006}."
    assert example.answer == "1006"


@pytest.mark.parametrize(
    ("importer", "row", "message"),
    [
        (import_aqua, {"question": "q"}, "rows.jsonl:1: field 'correct' is missing"),
        (
            import_aqua,
            {"question": "q", "options": ["A)1"], "rationale": "r", "correct": "C"},
            "rows.jsonl:1: the correct letter 'C' is not among the options",
        ),
        (
            import_aqua,
            {"question": "q", "options": "A)1 B)2", "rationale": "r", "correct": "B"},
            "rows.jsonl:1: 'options' must be a list of texts",
        ),
        (
            import_aqua,
            {"question": "q", "options": ["A)1", 2], "rationale": "r", "correct": "A"},
            "rows.jsonl:1: 'options' must be a list of texts",
        ),
        (
            import_aqua,
            {"question": "q", "options": ["A)1", "B)2"], "rationale": 3, "correct": "B"},
            "rows.jsonl:1: .* 'rationale' a text",
        ),
        (import_gsm8k, {"question": "q", "answer": "6"}, "rows.jsonl:1: the answer has no"),
        (import_gsm8k, {"question": "q", "answer": 6}, "rows.jsonl:1: the answer has no"),
    ],
)
def test_an_importer_names_the_bad_row_and_writes_nothing(write, tmp_path, importer, row, message):
    with pytest.raises(InputError, match=message):
        importer(write(row), str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("result", ["1,234", "$1,234,567", "-1,234.5"])
def test_commas_between_thousands_are_dropped(write, tmp_path, result):
    import_gsm8k(write({"question": "q", "answer": f"#### {result}"}), str(tmp_path / "out.jsonl"))
    (example,) = load_examples(str(tmp_path / "out.jsonl"))
    assert example.answer == result.replace(",", "")


@pytest.mark.parametrize("result", ["1,5", "1234,567", "1,2345", "1,234,5", "3, 4", ",123"])
def test_other_commas_are_refused(write, tmp_path, result):
    row = {"question": "q", "answer": f"#### {result}"}
    with pytest.raises(InputError, match=f"rows.jsonl:1: the commas of the result '{result}'"):
        import_gsm8k(write(row), str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.glob("out*"))


@needs_shared
def test_the_real_aqua_and_gsm8k_import_whole(tmp_path):
    import_aqua(str(SHARED / "data" / "aqua_dev.jsonl"), str(tmp_path / "aqua.jsonl"))
    import_gsm8k(str(SHARED / "data" / "gsm8k_train.jsonl"), str(tmp_path / "gsm8k.jsonl"))
    assert len(load_examples(str(tmp_path / "aqua.jsonl"))) == 254
    assert len(load_examples(str(tmp_path / "gsm8k.jsonl"))) == 7473


# ---- letters


@pytest.mark.parametrize(
    ("question", "labels"),
    [
        ("Pick. (A) 1 (B) 2 (C) 3", "ABC"),
        ("Pick.\nA. 1\nB. 2\nC. 3\nD. 4", "ABCD"),
        ("Pick.\nA)1\nB)2", "AB"),
        ("Pick: A: 1; B: 2; C: 3", "ABC"),
        (r"Pick. $\textbf{(A)}\ 1 \qquad \textbf{(B)}\ 2\qquad\textbf{(C)}\ 3$", "ABC"),
        (r"Pick. $\mathrm{(A) \ } 1 \qquad \mathrm{(B) \ } 2$", "AB"),
        (r"Pick. \text{A. } 1 \quad \text{B. } 2", "AB"),
        (r"Pick. \textbf{A}. 1 \textbf{B}. 2", "AB"),
        ("选择（A）1（B）2（C）3", "ABC"),
        ("Pick.\nA、1\nB、2", "AB"),
        ("**A.** 1\n**B.** 2", "AB"),
        (r"$\text{A.}\ 1\qquad\text{B.}\ 2\qquad\text{C.}\ 3$", "ABC"),
        (r"$\textbf{A)}\ 1\qquad\textbf{B)}\ 2$", "AB"),
        (r"\textbf{(A)}\hspace{.05in}1 \hspace{.1in}\textbf{(B)}\hspace{.05in}2", "AB"),
        (r"\left(\text{A}\right) 1 \left(\text{B}\right) 2", "AB"),
        ("(A) I (B) II (C) both (A) and (B) (D) none", "ABCD"),
        ("Is it ( )A. 3 B. 4", "AB"),
        ("A.1B.2C.3", "ABC"),
        ("Statements (A) and (C). Pick. (A) 1 (B) 2 (C) 3 (D) 4", "ABCD"),
        ("Pick. (A) 1 (B) 2 (C) 3. Explain why (B) is wrong, as in (A).", "ABC"),
        ("".join(f"({letter}) x " for letter in "ABCDEFGHIJ"), "ABCDEFGHIJ"),
        # no options
        ("Find f(A) + f(B) + P(C).", ""),
        ("Let A. be a point and C. another.", ""),
        ("In the U.S.A. it is 5 A.M. or B.C.", ""),
        ("Pick. (B) 1 (C) 2", ""),
        ("Show (a) this, (b) that.", ""),
        ("Triangle ABC has (A) one right angle.", ""),
        ("", ""),
    ],
)
def test_the_labels_of_options_are_read_in_order(question, labels):
    assert option_labels(question) == labels


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"So \boxed{C}.", "C"),
        (r"So \boxed{\textbf{(C)}\ 12}.", "C"),
        (r"\boxed{12}, which is \boxed{C}", "C"),
        (r"\boxed{C}, again \boxed{(C)}", "C"),
        ("The answer is (C).", "C"),
        ("**Answer: C**", "C"),
        ("The answer is B. A is wrong.", "B"),
        # none, or several
        (r"\boxed{C}, no: \boxed{12}", None),
        (r"\boxed{A} and \boxed{C}", None),
        (r"\boxed{A, C}", None),
        ("The answer is (A) or (C).", None),
        ("Answer: A and B", None),
        ("The answer is A, C", None),
        ("The answer is **C** or **D**.", None),
        ("The answer is C (or D)", None),
        ("The answer is B, and also C", None),
        ("So it is twelve.", None),
        ("", None),
    ],
)
def test_a_final_letter_is_one_letter_or_none(text, letter):
    assert final_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (r"So \boxed{C}", r"So \boxed{C}"),
        (r"So \boxed{C}.", r"So \boxed{C}"),
        (r"So $\boxed{\text{(C)}}$.", r"So \boxed{C}"),
        (r"So **$\boxed{C}$**", r"So \boxed{C}"),
        ("So\n\n$$\n\\boxed{C}\n$$\n", "So\n\n\\boxed{C}"),
        (r"So \[ \fbox {C) 12} \].", r"So \boxed{C}"),
        (r"So \alpha, \boxed {\text{C}}", r"So \alpha, \boxed{C}"),
        (r"So \(\boxed{C}\)", r"So \boxed{C}"),
        # what is not enclosed alone stays, and so does what follows
        (r"So $x = \boxed{C}$", "So $x = \\boxed{C}$\n\n\\boxed{C}"),
        (r"So \boxed{C}, as (B) fails", "So \\boxed{C}, as (B) fails\n\n\\boxed{C}"),
        ("The answer is (C).", "The answer is (C).\n\n\\boxed{C}"),
    ],
)
def test_a_text_gets_a_plain_box_as_its_end(text, ended):
    assert end_in_box(text, "C") == ended and is_correct(ended, "C")


def test_a_final_letter_is_found_in_time_that_grows_with_the_text_alone():
    assert final_letter("\\boxed{" * 20_000 + "C" + "}" * 20_000) == "C"


# ---- show and stats


def test_show_prints_what_is_read_and_what_is_learnt(curated, capsys):
    example = load_examples(str(curated))[3]
    show(str(curated), index=3)
    out = capsys.readouterr().out
    read, _, learnt = out.partition("==== learnt, with loss")
    assert example.question in read and ASK_LETTER in read
    assert f"{example.solution}<|im_end|>" in learnt and example.solution not in read
    num_read, num_learnt, total = (
        int(re.search(pattern, out)[1])
        for pattern in (r"read, .*?: (\d+)", r"learnt, .*?: (\d+)", r"==== (\d+) tokens in all")
    )
    assert num_read + num_learnt == total
    assert re.search(rf"\n +{num_read - 1}  +\d+ '\\n'\n +{num_read} loss +\d+ '<'", out)
    assert re.search(rf"\n +{total - 1} loss +\d+ '<\|im_end\|>'\n$", out)
    with pytest.raises(InputError, match=r"--index 300: .* has rows 0 to 299"):
        show(str(curated), index=300)


def test_show_prints_a_short_solution_once(tmp_path, tokenizer, capsys):
    fields = {"id": "1", "question": "1+1", "answer": "2", "source": "s"}
    for solution in ("2", "22", "2222222", "2" * 20):
        write_rows([{**fields, "solution": solution}], tmp_path / "one.jsonl")
        show(str(tmp_path / "one.jsonl"), tokenizer=str(tokenizer))
        positions = re.findall(r"^ +(\d+) (?:loss|    ) ", capsys.readouterr().out, flags=re.M)
        assert len(positions) == len(set(positions)) == 4 + min(len(solution) + 1, 8)


def test_stats_summarise_any_training_file(curated, tmp_path, capsys):
    stats(str(curated))
    out = capsys.readouterr().out
    assert "300 examples" in out and "solution, tokens: min" in out
    assert re.search(r"answers\n +C +300 +100.0 %", out) and "numina-1" in out
    other = tmp_path / "other.jsonl"
    fields = {"question": "1+1", "solution": "\\boxed{2}", "answer": "2", "source": "s"}
    write_rows([{"id": str(i), **fields} for i in range(3)], other)
    stats(str(other))
    out = capsys.readouterr().out
    assert "solution, characters: min 9" in out and re.search(r"not a letter +3 +100.0 %", out)
    for report in (None, "{half", "{}", "[]"):
        if report:
            other.with_suffix(".report.json").write_text(report)
        with pytest.raises(InputError, match="give --tokenizer"):
            show(str(other))


# ---- the commands


@pytest.mark.parametrize("command", [["stats"], ["--help"]])
def test_an_output_that_takes_only_ascii_gets_question_marks(command, curated):
    call = [sys.executable, "-m", "prepare.look", *command, *[str(curated)] * ("stats" in command)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "?" in done.stdout, done.stderr


def test_the_commands_end_with_one_line(write, tmp_path):
    def run(*command) -> tuple[int, str]:
        command = [sys.executable, "-m", *map(str, command)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    rows = write({"question": "2*3", "answer": "2*3=6\n#### 6"})
    output = tmp_path / "out.jsonl"
    converted = run("prepare.convert", "gsm8k", rows, output)
    assert converted == (0, f"1 examples -> {output}\n")
    shown = run("prepare.look", "show", output, "--index", 0)
    message = f"{output}: no report next to it names a tokenizer: give --tokenizer"
    assert shown == (1, f"error: {message}\n")
