"""Every flag of the scripts is read: one that nothing reads would run without a word."""

import ast
from dataclasses import fields

import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import ROOT

import pytest


@pytest.mark.parametrize("script", [train_oswft, train_sft, train_grpo, evaluate])
def test_every_flag_is_read_somewhere(script):
    others = {"train_oswft", "train_sft", "train_grpo", "evaluate"} - {script.__name__}
    paths = [path for path in ROOT.glob("*.py") if path.stem not in others]
    nodes = ast.walk(ast.parse("\n".join(path.read_text() for path in paths)))
    loaded = [vars(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    read = {node.get("attr") or node.get("id") for node in loaded}
    assert {field.name for field in fields(script.Args)} <= read
