"""Models: each family is trained right or refused, as docs/models.md says (families.py)."""

import re

from conftest import ROOT, needs_vllm, run_alone

from families import FAMILIES

# Each branch of our code, and each outcome. After another version of a package: all of them.
SOME = "qwen3 qwen3_moe gemma2 phi granite seed_oss gpt_neox llama4_text"
# nats a token: the largest gap of the columns in fp32, the mean of the one in bf16
BOUNDS = {1: (1, 1e-3), 2: (0, 0.1), 3: (1, 1e-3), 4: (1, 1e-3)}


def table(text: str) -> dict[str, list[str]]:
    """The cells of each family's row."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row for row in rows if row[0] in FAMILIES}


def test_the_table_of_the_docs_holds_every_family():
    assert list(table((ROOT / "docs" / "models.md").read_text())) == list(FAMILIES)


@needs_vllm
def test_a_family_is_trained_right_or_refused_as_the_docs_say():
    result = run_alone("tests/families.py", *SOME.split(), timeout=900)
    measured = table(result.stdout)
    assert len(measured) == len(SOME.split()), result.stderr[-3000:]
    documented = table((ROOT / "docs" / "models.md").read_text())
    for name, cells in measured.items():
        for column in range(1, 5):
            said, seen = documented[name][column], cells[column]
            if re.match("refused|vLLM fails|–", said):
                assert seen[:7] == said[:7], (name, said, seen)
            else:
                which, bound = BOUNDS[column]
                numbers = [float(number) for number in re.findall(r"[\d.]+e[-+]\d+", seen)]
                assert numbers and numbers[which] < bound, (name, said, seen)
