"""make: what it does where there is no Python that is new enough."""

import os
import shutil
import subprocess
from pathlib import Path

from conftest import ROOT

import pytest

UV = """#!/bin/sh
echo "$@" >> uv.log
[ -d .venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/; }
"""
OLD_PYTHON = "#!/bin/sh\nexit 1\n"  # what it says to sys.version_info >= (3, 11)


def make_install(clone: Path, python: str, **programs: str) -> subprocess.CompletedProcess:
    """`make install` in a clone, where these programs stand in for installed ones."""
    (clone / "bin").mkdir(parents=True)
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, clone)
    for name, text in programs.items():
        (clone / "bin" / name).write_text(text)
        (clone / "bin" / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["PATH"] = f"{clone}/bin:/usr/bin:/bin"
    command = ["make", "install", f"PYTHON={python}"]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("python", ["absent", "old"])
def test_without_a_new_python_uv_makes_the_environment_or_one_line_names_it(python, tmp_path):
    result = make_install(tmp_path / "none", python, old=OLD_PYTHON)
    error, _ = result.stderr.splitlines()
    assert error.startswith("error: Python 3.11") and not (tmp_path / "none" / ".venv").exists()
    clone = tmp_path / "a clone"
    result = make_install(clone, python, old=OLD_PYTHON, uv=UV)
    assert result.returncode == 0, result.stderr
    made, uv, packages = (clone / "uv.log").read_text().splitlines()
    assert made.startswith("venv ") and made.endswith(" --python 3.11 .venv")
    assert " uv==" in uv and " -r requirements" in packages
    assert list(clone.glob(".venv/installed-*"))


def test_an_environment_for_another_kind_of_machine_is_not_mixed_with_this_ones(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed-requirements-tpu.txt").touch()
    result = make_install(tmp_path, "absent", uv=UV)
    assert "error: .venv has requirements-tpu.txt" in result.stderr
    assert not (tmp_path / "uv.log").exists()
