"""The small world: its problems, their solutions, and what is made wrong."""

import hashlib
import shutil

from demo.tiny import spoil_file
from demo.world import TIERS


def test_the_problems_and_the_wrong_ones_are_those_of_the_tables_in_the_docs(tiny, tmp_path):
    shutil.copy(tiny / "train.jsonl", tmp_path)
    spoil_file(tmp_path, seed=1)
    names = [*(f"heldout/{tier}" for tier in TIERS), "train", "train-plain"]
    paths = [*(tiny / f"{name}.jsonl" for name in names), tmp_path / "train-wrong.jsonl"]
    written = b"".join(path.read_bytes() for path in paths)
    assert hashlib.sha256(written).hexdigest()[:16] == "f1cf2d57f7e17181"
