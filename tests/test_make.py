"""make: what it does where there is no Python that is new enough."""

import os
import shutil
import subprocess
import sys

from conftest import ROOT

import pytest

UV = """#!/bin/sh
echo "$@" >> uv.log
[ -d .venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/; }
"""


@pytest.mark.parametrize(("version", "kind"), [((3, 10, 99), ""), ((3, 15, 0), "-cpu")])
def test_without_a_python_that_fits_uv_makes_one_or_one_line_names_it(version, kind, tmp_path):
    clone = tmp_path / "a clone"
    (clone / "bin").mkdir(parents=True)
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, clone)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"PATH": f"{clone}/bin:/usr/bin:/bin", "PIP_FIND_LINKS": ""}
    command = ["make", "install", "PYTHON=other", f"REQUIREMENTS=requirements{kind}.txt"]

    def install_with(name: str, text: str) -> subprocess.CompletedProcess:
        (clone / "bin" / name).write_text(text)
        (clone / "bin" / name).chmod(0o755)
        return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)

    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    result = install_with("other", f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    error, _ = result.stderr.splitlines()
    assert error.startswith("error: Python 3.11") and not (clone / ".venv").exists()
    result = install_with("uv", UV)
    assert result.returncode == 0, result.stderr
    made, uv, packages = (clone / "uv.log").read_text().splitlines()
    assert made.startswith("venv ") and made.endswith(" --python 3.11 .venv")
    more = " --excludes .venv/excludes.txt --torch-backend cpu" if kind else ""
    assert " uv==" in uv and packages.endswith(f" -r requirements{kind}.txt{more}")
    assert [*clone.glob(".venv/installed-*")] == [clone / f".venv/installed-requirements{kind}.txt"]
