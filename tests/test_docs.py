"""The documents: links lead somewhere, commands are ones that their scripts take, names exist."""

import ast
import functools
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import launch
from conftest import ROOT
from data import load_examples
from run import RunArgs
from train_oswft import oswft_loss, oswft_weights
from verify import is_correct

import pytest
import torch
import tyro
from deepspeed.launcher.runner import parse_args as parse_launcher
from torch.distributed.run import get_args_parser

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "BENCHMARKS.md"]
PAGES += sorted((ROOT / "recipes").glob("*.md"))
OURS = ("torchrun", "python", "deepspeed", "make", "bash")  # how our commands begin
OTHERS = ("bash", "hf", "pip", "uv", "git", "jupyter", "python3")
OTHERS += ("grep", "head", "mkdir", "cp", "for", "done", ".")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # imported before
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for language, code in found if language in languages]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_and_every_picture_leads_somewhere(page):
    for link in re.findall(r"\[[^\]]*\]\((?!https?://)([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


class Parsed(BaseException):
    """A command line was read; what it would have started is not started."""


@pytest.fixture
def read_only(monkeypatch):
    """What `python ...` reads from its command line. Exits if a word is not understood."""

    def harmless(target):  # a dataclass, a function, or functions by their subcommands
        if isinstance(target, dict):
            return {name: harmless(function) for name, function in target.items()}
        nothing = functools.wraps(target)(lambda *args, **kwargs: None)
        return nothing if inspect.isfunction(target) else target

    def only(read):
        def cli(target, **options):
            raise Parsed(read(harmless(target), **options))

        return cli

    def saved_args(args_class):
        return {"default": args_class(model="m", data="d")} if "--resume" in sys.argv else {}

    monkeypatch.setenv("LOCAL_SIZE", "8")
    monkeypatch.setattr(launch, "saved_args", saved_args)
    for module, name in ((tyro, "cli"), (tyro.extras, "subcommand_cli_from_dict")):
        monkeypatch.setattr(module, name, only(getattr(module, name)))

    def parse(words: list[str]):
        module = words[0] == "-m"
        name, *arguments = words[module:]
        if name in ("recipes.trl_sft", "demo.from_scratch"):
            return None  # they have no tyro
        with pytest.raises(Parsed) as parsed, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [name, *arguments])
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        return parsed.value.args[0]

    return parse


def test_the_readmes_row_can_be_read_and_is_right(tmp_path):
    (tmp_path / "row.jsonl").write_text(blocks(README, "json")[0])
    [example] = load_examples(str(tmp_path / "row.jsonl"))
    assert is_correct(example.solution, example.answer)


def test_what_the_page_converts_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "\\boxed{2}"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}))
    [code] = blocks(ROOT / "docs" / "training-set.md", "python")
    exec(code, {})
    [example] = load_examples("mine.jsonl")
    assert (example.question, example.answer) == ("1+1=", "2")


@each_page
def test_every_command_is_one_that_its_script_takes(page, read_only):
    lines = re.sub(r"\\\n\s*", "", "".join(blocks(page, "bash"))).splitlines()
    for first, *words in filter(None, (shlex.split(line, comments=True) for line in lines)):
        print(first, *words)  # pytest shows the last one, should it fail
        if first == "deepspeed":
            launched = parse_launcher(words)
            args = read_only([launched.user_script, *launched.user_args])
            if isinstance(args, RunArgs):
                args.check()
        elif first == "torchrun":
            launched = get_args_parser().parse_args(words)
            script = [*["-m"] * launched.module, launched.training_script]
            read_only([*script, *launched.training_script_args])
        elif first == "python":
            read_only(words)
        elif first == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words and set(words) <= set(targets)
        else:
            assert first in OTHERS, "not checked"
    for code in blocks(page, "", "text"):
        assert not re.search(rf"^ *({'|'.join(OURS)}) ", code, re.MULTILINE), "mark it as bash"


def definitions(path: Path) -> set[str]:
    """The names of a file's functions, methods and classes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@each_page
def test_every_file_module_flag_function_and_test_that_is_named_exists(page):
    sources = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]
    arguments = {n for path in sources for n in re.findall(r"^ *(\w+): ", path.read_text(), re.M)}
    arguments |= {"hostfile", "help"}
    arguments |= {"no_ssh", "node_rank", "master_addr", "master_port", "num_gpus", "venv_script"}
    arguments |= {"quiet", "module", "shutdown_timeout", "compile", "kl"}  # launchers', patches'
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        for flag in re.findall(r"(?:^| )--(\w+)", code):
            assert flag in arguments, f"`{code}`: no script has this argument"
        if match := re.match(r"python -m ([\w.]+)", code):
            assert importlib.util.find_spec(match[1]), f"`{code}`: there is no such module"
        of_others = page.stem == "codebases"
        if re.fullmatch(r"[\w/]+\.(py|sh|md)", code) and not of_others:
            assert (ROOT / code).exists(), f"`{code}`: there is no such file"
    for module, text, path in re.findall(r"\[(\w+): ([^\]]+)\]\((\S+\.py)\)", prose(page)):
        names = re.findall(r"`(.+?)`", text) or [f"test_{text.replace(' ', '_')}"]
        missing = {part for name in names for part in name.split(".")}
        missing -= definitions(page.parent / path)
        assert not missing and Path(path).stem == module, f"{path}: {module}: {missing}"


def test_the_readmes_loss_runs_when_pasted_and_is_that_of_the_script():
    pasted = {"torch": torch}
    exec(blocks(README, "python")[0], pasted)
    rewards, mask = torch.rand(4, 3) > 0.5, torch.rand(4, 7) > 0.3
    weights = pasted["oswft_weights"](rewards)
    assert torch.equal(weights, oswft_weights(rewards))
    batch = torch.randn(4, 7).where(mask, -torch.inf), mask, weights, 9
    assert torch.equal(pasted["oswft_loss"](*batch), oswft_loss(*batch))


def test_the_readmes_file_tree_is_that_of_the_repository_with_fourteen_files_at_most_on_top():
    command = "git ls-files '[!.]*'"  # there may be no git
    listed = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    if not listed:
        pytest.skip("needs git, which knows what is the repository's and what the user's own")
    tops = {path.partition("/")[:2] for path in listed.splitlines()}
    parts = {name + slash for name, slash in tops if slash or name.endswith(".py")}
    assert sorted(line.split()[0] for line in blocks(README, "text")[2].splitlines()) == sorted(
        parts
    )
    assert sum(part.endswith(".py") for part in parts) <= 14


def test_no_file_at_the_top_imports_in_a_circle_or_from_a_folder():
    files = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    imports = {}  # those for a type, too
    for name, tree in files.items():
        nodes = list(ast.walk(tree))
        found = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        imports[name] = found & files.keys()
        assert not {module.partition(".")[0] for module in found} & folders
    assert tuple(TopologicalSorter(imports).static_order())  # raises CycleError
