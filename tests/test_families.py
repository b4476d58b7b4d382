"""Models: each family is trained right or refused, as docs/models.md says (families.py)."""

import re

from conftest import ROOT, needs_vllm, on_ranks, slow
from families import FAMILIES, measure_all

# A mixture, caps, a bias, two that are refused. After another version of a package: all of them.
SOME = ("Qwen3-MoE", "Gemma 2", "Phi 1, 2", "Llama 4, text", "Gemma 3, text and pictures")
# nats a token: the largest gap of the columns in fp32, the mean of the one in bf16
BOUNDS = ((1, 1e-3), (0, 0.1), (1, 1e-3), (1, 1e-3))


def documented() -> dict[str, list[str]]:
    """Four cells for each family: docs/models.md lists those that are right, and has a table."""
    page = (ROOT / "docs" / "models.md").read_text()
    [right] = re.findall(r"\*\*Right everywhere\*\* \(.+?\): (.+?)\.\n", page, re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    table = {name: cells for name, *cells in rows if name in FAMILIES}
    return {name: ["right"] * 4 for name in " ".join(right.split()).split("; ")} | table


def test_the_page_names_every_family():
    assert documented().keys() == FAMILIES.keys()


@slow
@needs_vllm
def test_a_family_is_trained_right_or_refused_as_the_docs_say():
    for name, cells in on_ranks(1, measure_all, SOME).items():
        for said, seen, (which, bound) in zip(documented()[name], cells, BOUNDS, strict=True):
            if re.match("refused|vLLM fails|–", said):
                assert seen[:7] == said[:7], (name, said, seen)
            else:
                numbers = [float(number) for number in re.findall(r"[\d.]+e[-+]\d+", seen)]
                assert numbers and numbers[which] < bound, (name, said, seen)
