"""--logger wandb, with the real package, offline."""

from run import start_wandb

import pytest


@pytest.mark.parametrize(("asked", "project"), [({}, "osw-ft"), ({"WANDB_PROJECT": "p"}, "p")])
def test_wandb_takes_a_run_offline(asked, project, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in {"WANDB_MODE": "offline", **asked}.items():
        monkeypatch.setenv(name, value)
    logger = start_wandb(tmp_path, "0a1b2c3d", {"seed": 7})
    assert logger.config["seed"] == 7 and logger.run.project == project
    logger.log({"grad_norm": 1.0}, step=1)
    logger.finish()
    assert [*tmp_path.glob("wandb/offline-run-*-0a1b2c3d")]
