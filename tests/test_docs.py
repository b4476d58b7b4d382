"""The documents: links lead somewhere, commands are ones that their scripts take, code is ours."""

import argparse
import ast
import functools
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tyro
import yaml
from deepspeed.launcher.runner import parse_args as parse_launcher
from torch.distributed.run import get_args_parser
from transformers import HfArgumentParser

import run
from conftest import ROOT, SHARED, needs_shared
from data import ASK_FREE, Example, collate, read_rows, tokenize_examples, write_rows
from demo.tiny import make_tokenizer
from demo.world import solve

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "BENCHMARKS.md"]
PAGES += sorted((ROOT / "recipes").glob("*.md"))
OURS = ("torchrun", "python", "deepspeed", "make", "./paper/reproduce.sh")  # how our commands begin
OTHERS = ("hf", "pip", "uv", "git", "jupyter", "head", "mkdir", "cp", "for", "done", "python3", ".")
SVG = "{http://www.w3.org/2000/svg}"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def block(page: Path, language: str) -> str:
    """The first code block of a page in this language."""
    return next(code for name, code in blocks(page) if name == language)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """The words of every line in a page's bash blocks; a line may go on after a backslash."""
    bash = "".join(code for language, code in blocks(page) if language == "bash")
    lines = re.sub(r"\\\n\s*", "", bash).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_and_every_picture_leads_somewhere(page):
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match("https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside the repository"
        assert not anchor or anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


class Parsed(BaseException):
    """A command line was read; what it would have started is not started."""


def read_plain(parser: argparse.ArgumentParser) -> None:
    args, unknown = parser.parse_known_args()
    assert not unknown
    raise Parsed(args)


@pytest.fixture
def read_only(monkeypatch):
    """Scripts and modules read their command line, raise Parsed with the arguments, and end."""
    read, read_subcommand = tyro.cli, tyro.extras.subcommand_cli_from_dict

    def harmless(target):
        if not inspect.isfunction(target):
            return target  # a dataclass
        return functools.wraps(target)(lambda *args, **kwargs: None)

    def cli(target, **options):
        raise Parsed(read(harmless(target), **options))

    def subcommand_cli(functions, **options):
        functions = {name: harmless(function) for name, function in functions.items()}
        raise Parsed(read_subcommand(functions, **options))

    def saved_args(args_class):
        return {"default": args_class(model="m", data="d")} if "--resume" in sys.argv else {}

    monkeypatch.setenv("LOCAL_SIZE", "8")
    monkeypatch.setattr(run, "saved_args", saved_args)
    monkeypatch.setattr(tyro, "cli", cli)
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", subcommand_cli)
    return functools.partial(parse, monkeypatch)


def parse(monkeypatch, words: list[str]):
    """What `python ...` reads from its command line. Exits if a word is not understood."""
    module = words[0] == "-m"
    name, *arguments = words[module:]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed) as parsed, monkeypatch.context() as patch:
        if name == "demo.from_scratch":  # it has no tyro
            patch.setattr(argparse.ArgumentParser, "parse_args", read_plain)
        if name == "recipes.trl_sft":
            pytest.importorskip("trl", reason="needs requirements-dev.txt")
            patch.setattr(HfArgumentParser, "parse_args_into_dataclasses", read_plain)
        if module:
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                runpy.run_module(name, run_name="__main__", alter_sys=True)  # imported before
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")
    return parsed.value.args[0]


def read_deepspeed(words: list[str]) -> list[str]:
    launched = parse_launcher(words)
    return [launched.user_script, *launched.user_args]


def read_torchrun(words: list[str]) -> list[str]:
    launched = get_args_parser().parse_args(words)
    script = [*["-m"] * launched.module, launched.training_script]
    return [*script, *launched.training_script_args]


LAUNCHERS = {"deepspeed": read_deepspeed, "torchrun": read_torchrun}


@each_page
def test_every_command_is_one_that_its_script_takes(page, read_only):
    for first, *words in commands(page):
        print(first, *words)  # pytest shows the last one, should it fail
        if first in LAUNCHERS:
            args = read_only(LAUNCHERS[first](words))
            if isinstance(args, run.TrainArgs):
                args.check()
        elif first == "python":
            read_only(words)
        elif first == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words and set(words) <= set(targets)
        elif first == "./paper/reproduce.sh":
            command = [first, "--dry_run", *words]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert result.returncode == 0 and result.stdout, result.stderr
        else:
            assert first in OTHERS, "not checked"
    for language, code in blocks(page):
        hidden = re.search(rf"^ *({'|'.join(OURS)}) ", code, re.MULTILINE)
        assert language == "bash" or not hidden, f"{hidden}: in a block that is not marked as bash"


def test_a_wrong_command_is_noticed(read_only):
    for words in (
        ["evaluate.py", "--modle", "m"],
        ["-m", "paper.tables", "tabel", "runs/eval"],
        ["-m", "bench.plan", "--gpus", "eight", "--model", "m"],
    ):
        with pytest.raises(SystemExit):
            read_only(words)


@each_page
def test_every_file_module_and_flag_that_is_named_exists(page):
    sources = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]
    arguments = {
        name for path in sources for name in re.findall(r"^ *(\w+): ", path.read_text(), re.M)
    }
    arguments |= {"dry_run", "tiny", "hostfile", "help"}
    arguments |= {"no_ssh", "node_rank", "master_addr", "venv_script"}  # of the launchers
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        for flag in re.findall(r"(?:^| )--(\w+)", code):
            assert flag in arguments, f"`{code}`: no script has this argument"
        if match := re.match(r"python -m ([\w.]+)", code):
            assert importlib.util.find_spec(match[1]), f"`{code}`: there is no such module"
        if re.fullmatch(r"[\w/]+\.(py|sh|md)", code):
            assert (ROOT / code).exists(), f"`{code}`: there is no such file"
    for module, text, path in re.findall(r"\[(\w+): ([^\]]+)\]\((\S+\.py)\)", prose(page)):
        names = re.findall(r"`(.+?)`", text) or [f"test_{text.replace(' ', '_')}"]
        missing = {part for name in names for part in name.split(".")}
        missing -= definitions(page.parent / path)
        assert not missing and Path(path).stem == module, f"{path}: {module}: {missing}"


def definitions(path: Path) -> set[str]:
    """The names of a file's functions, methods and classes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_the_page_on_the_paper_has_its_equations_and_the_lines_of_its_algorithm():
    page = (ROOT / "docs" / "paper.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \|.*\]\(\.\./tests/", page, re.MULTILINE)

    def numbers(what: str) -> set[int]:
        lists = re.findall(rf"\b{what}s? (\d+(?:, \d+)*)", "\n".join(rows))
        return {int(number) for found in lists for number in found.split(", ")}

    assert numbers("Equation") == {*range(1, 19)}  # those that follow are steps of two proofs
    assert numbers("line") == {*range(1, 9), 10, 11}  # 9 and 12 end the loops
    assert numbers("Theorem") == numbers("Assumption") == {1, 2}
    assert numbers("Definition") == numbers("Corollary") == {1}
    assert numbers("Remark") == {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["phases", "tokens"])
def test_a_picture_stands_alone_and_has_each_color_for_light_and_for_dark(name):
    text = (ROOT / "docs" / f"{name}.svg").read_text()
    style = ElementTree.fromstring(text).find(f"{SVG}style").text
    light, dark = [
        {
            selector
            for selectors, rules in re.findall(r"([^{}]+) {([^{}]*)}", part)
            for selector in selectors.strip().split(", ")
            if "#" in rules
        }
        for part in style.split("@media (prefers-color-scheme: dark)")
    ]
    assert light == dark and len(light) > 5
    assert not re.search(r"<script|<image|@import|href=|url\([^#]", text)


def test_the_functions_in_the_picture_of_the_phases_are_those_of_the_loop():
    picture = ElementTree.parse(ROOT / "docs" / "phases.svg")
    shown = "".join(text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "c")
    names = re.findall(r"([\w.]+)\(\)", shown)
    loop = (ROOT / "train_oswft.py").read_text()
    at = [re.search(rf"(?<!def ){re.escape(name)}\(", loop) for name in names]
    assert len(names) == 12 and all(at)


def test_the_picture_of_the_tokens_is_what_collate_makes():
    tokenizer = make_tokenizer()
    examples = [Example(q, q, *solve(q, "plain"), "demo") for q in ("7+5*3", "2-1")]
    batch = collate(tokenize_examples(examples, tokenizer, 128, 48)[0], range(2))
    short = {"\n": r"\n", ASK_FREE: "Please …", "<|endoftext|>": "0"}
    picture = ElementTree.parse(ROOT / "docs" / "tokens.svg")

    def shown(what: str, row: int) -> list[str]:
        return [text.text for text in picture.find(f".//*[@id='{what}-{row}']").iter(f"{SVG}text")]

    for row in range(2):
        for what in ("input_ids", "targets"):
            tokens = tokenizer.convert_ids_to_tokens(getattr(batch, what)[row].tolist())
            assert shown(what, row) == [short.get(token, token) for token in tokens]
        assert shown("mask", row) == ["".join(str(int(bit)) for bit in batch.mask[row])]
        of_row = batch.positions[batch.positions // batch.mask.shape[1] == row]
        assert shown("positions", row) == [str(position) for position in of_row.tolist()]


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 10_000


def test_the_readmes_loss_is_the_code():
    code = [line.strip() for line in (ROOT / "train_oswft.py").read_text().splitlines()]
    shown = block(README, "python")
    for line in shown.split("\n"):
        assert line.strip() in code
    assert "oswft_loss" in shown and "return -" in shown and "weights = 1 - " in shown


def test_the_readmes_file_tree_is_the_tree():
    named = [line.split()[0] for line in block(README, "text").splitlines()]
    ignored = (ROOT / ".gitignore").read_text().split()
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    files = [path.name for path in paths if path.suffix == ".py"]
    folders = [f"{path.name}/" for path in paths if path.is_dir()]
    assert sorted(named) == sorted({*files, *folders} - {*ignored})


@needs_shared
def test_the_papers_tables_are_copied_without_a_slip():
    tex = (SHARED / "paper" / "oswft.tex").read_text()
    tables = re.findall(r"\\begin{tabular}.*?\\end{tabular}", tex, re.DOTALL)
    paper = [float(number) for number in re.findall(r"\d+\.\d\d\b", "".join(tables))]
    page = (ROOT / "docs" / "reproduce.md").read_text()
    rows = re.findall(r"^\|[^|]*\| paper \|(.*)$", page, re.MULTILINE)
    assert [float(number) for number in re.findall(r"\d+\.\d\d\b", "".join(rows))] == paper
    here = re.findall(r"^\|[^|]*\| here \|", page, re.MULTILINE)
    assert len(here) == len(rows) == 12 + 4 + 3  # Tables 1, 2, 3: each row has a place for ours


def test_the_citation_and_the_workflow_are_what_github_reads():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    assert citation["preferred-citation"]["authors"] == citation["authors"]
    last_names = [author["family-names"] for author in citation["authors"]]
    assert last_names == ["Wen", "He", "Peng", "Cheng"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert steps[-2:] == ["make lint", "make test"]


def test_the_training_sets_page_turns_an_evaluation_into_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verdicts = (("a", 0, True), ("a", 1, False), ("b", 0, False), ("b", 1, False))
    fields = ("id", "sample", "correct")
    samples = [{"benchmark": "train", **dict(zip(fields, row, strict=True))} for row in verdicts]
    rows = [{"id": "b", "question": "1"}, {"id": "a", "question": "2"}]
    write_rows(samples, "runs/pass/samples.rank0.jsonl")
    write_rows(rows, "data/train.jsonl")
    exec(block(ROOT / "docs" / "training-set.md", "python"), {})
    weighted = [row for _, row in read_rows("data/weighted.jsonl")]
    assert weighted == [
        {**row, "weight": weight} for row, weight in zip(rows, (1.0, 0.5), strict=True)
    ]
