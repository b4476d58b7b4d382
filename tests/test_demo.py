"""The demo: three methods from one base, as `make demo` runs them, with fewer steps."""

import json

from conftest import needs_vllm, output_of, slow
from data import InputError
from demo.__main__ import demo
from demo.tiny import COMMITTED
from demo.world import TIERS

import pytest


@slow
@needs_vllm
def test_each_method_of_the_demo_gains_and_osw_ft_keeps_more_than_sft(tmp_path):
    folder = tmp_path / "a demo"
    output = output_of("-m", "demo", "--steps", 16, "--output_dir", folder)
    report = (folder / "report.txt").read_text()
    assert report in output
    header, *lines = report.splitlines()[:5]
    assert header.split() == ["gain", "retention", "skill", "pass@8", "trained", "sampled", *TIERS]
    # the name comes first, and may hold spaces
    table = {line[:16].strip().split(",")[0]: line[16:].split() for line in lines}
    gain = {name: float(cells[0]) for name, cells in table.items()}
    retention = {name: float(cells[1]) for name, cells in table.items()}
    assert list(table) == ["base", "SFT", "OSW-FT", "GRPO"]
    assert min(gain["SFT"], gain["OSW-FT"], gain["GRPO"]) > gain["base"] + 5, table
    assert retention["SFT"] < retention["OSW-FT"] <= retention["base"], table
    assert retention["SFT"] < 90 and all(float(cells[2]) > 95 for cells in table.values()), table
    assert table["SFT"][5] == "0" and int(table["OSW-FT"][5].replace(",", "")) > 0

    # The committed base has the scores that are written next to it; rounding may flip an answer.
    stated = json.loads((COMMITTED / "scores.json").read_text())
    for tier, cell in zip(TIERS, table["base"][6:], strict=True):
        assert float(cell) == pytest.approx(100 * stated[tier]["pass@1"], abs=2), tier

    for method in ("sft", "oswft", "grpo"):
        assert (folder / method / "final").is_dir() and (folder / method / "scores.json").exists()
        assert f"--output_dir '{folder}/{method}'" in output  # each command is shown
    pictures = {path.stem for path in (folder / "plots").iterdir()}
    assert {"loss", "mean_weight", "pass_rate", "reward"} == pictures
    assert "without questions and solutions" not in (folder / "view.html").read_text()


@pytest.mark.parametrize(
    ("args", "seed", "named"),
    [("{}", 0, "no demo"), ('{"settings": {}}', 0, "no demo"), ('{"demo": {}}', -1, "--seed")],
)
def test_nothing_is_deleted_for_another_folder_or_a_wrong_argument(args, seed, named, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "args.json").write_text(args)
    with pytest.raises(InputError, match=named):
        demo(tmp_path, seed=seed)
    assert (tmp_path / "logs").exists()
