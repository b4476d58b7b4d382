"""make: what it does where there is no Python that is new enough."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

UV = """#!/bin/sh
echo "$@" >> uv.log
[ -d .venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/; }
"""
OLD_PYTHON = "#!/bin/sh\nexit 1\n"  # what it says to sys.version_info >= (3, 11)


@pytest.fixture
def clone(tmp_path) -> Path:
    """What `make install` reads, and a folder bin/ for what stands in for programs."""
    folder = tmp_path / "a clone"
    (folder / "bin").mkdir(parents=True)
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, folder)
    (folder / "bin" / "old").write_text(OLD_PYTHON)
    (folder / "bin" / "old").chmod(0o755)
    return folder


def make_install(clone: Path, python: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["PATH"] = f"{clone}/bin:/usr/bin:/bin"
    command = ["make", "install", f"PYTHON={python}"]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("python", ["absent", "old"])
def test_without_a_new_python_uv_makes_the_environment(clone, python):
    (clone / "bin" / "uv").write_text(UV)
    (clone / "bin" / "uv").chmod(0o755)
    result = make_install(clone, python)
    assert result.returncode == 0, result.stderr
    made, uv, packages = (clone / "uv.log").read_text().splitlines()
    assert made.startswith("venv ") and made.endswith(" --python 3.11 .venv")
    assert " uv==" in uv and " -r requirements" in packages
    assert list(clone.glob(".venv/installed-*"))


@pytest.mark.parametrize("python", ["absent", "old"])
def test_without_a_new_python_and_uv_one_line_says_what_is_needed(clone, python):
    result = make_install(clone, python)
    error, _ = result.stderr.splitlines()
    assert error.startswith("error: Python 3.11") and not (clone / ".venv").exists()
