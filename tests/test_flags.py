"""Every flag of the scripts does something."""

import ast
from dataclasses import fields

import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import ROOT

import pytest

SCRIPTS = {"oswft": train_oswft, "sft": train_sft, "grpo": train_grpo, "evaluate": evaluate}


def names_read(*paths) -> set[str]:
    """What the code reads: attributes, variables, and names given to `getattr`."""
    names = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Name(id=name, ctx=ast.Load()):
                names.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                names.add(name)
    return names


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_flag_is_read_somewhere(script):
    """A flag that nothing reads would run without a word."""
    modules = [p for p in ROOT.glob("*.py") if not p.stem.startswith(("train", "evaluate"))]
    unread = {field.name for field in fields(script.Args)}
    unread -= names_read(*modules, ROOT / f"{script.__name__}.py")
    assert not unread
