"""make: what it does where there is no Python that is new enough."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

import pytest

UV = """#!/bin/sh
echo "$@" >> uv.log
[ -d .venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/; }
"""


def python(*version: int) -> str:
    """What says that it is this version."""
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    return f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n'


def make_install(clone: Path, *flags: str, **programs: str) -> subprocess.CompletedProcess:
    """`make install` in a clone, where these programs stand in for installed ones."""
    (clone / "bin").mkdir(parents=True)
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, clone)
    for name, text in programs.items():
        (clone / "bin" / name).write_text(text)
        (clone / "bin" / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"PATH": f"{clone}/bin:/usr/bin:/bin", "PIP_FIND_LINKS": ""}
    return subprocess.run(
        ["make", "install", *flags], cwd=clone, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize(("name", "kind"), [("absent", ""), ("old", "-cpu"), ("newer", "-cpu")])
def test_without_a_python_that_fits_uv_makes_one_or_one_line_names_it(name, kind, tmp_path):
    more = " --excludes .venv/excludes.txt --torch-backend cpu" if kind else ""
    flags = f"PYTHON={name}", f"REQUIREMENTS=requirements{kind}.txt"
    pythons = {"old": python(3, 10, 99), "newer": python(3, 15, 0)}
    result = make_install(tmp_path / "none", *flags, **pythons)
    error, _ = result.stderr.splitlines()
    assert error.startswith("error: Python 3.11") and not (tmp_path / "none" / ".venv").exists()
    clone = tmp_path / "a clone"
    result = make_install(clone, *flags, **pythons, uv=UV)
    assert result.returncode == 0, result.stderr
    made, uv, packages = (clone / "uv.log").read_text().splitlines()
    assert made.startswith("venv ") and made.endswith(" --python 3.11 .venv")
    assert " uv==" in uv and packages.endswith(f" -r requirements{kind}.txt{more}")
    assert [*clone.glob(".venv/installed-*")] == [clone / f".venv/installed-requirements{kind}.txt"]
