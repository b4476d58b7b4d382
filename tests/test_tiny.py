"""The tiny base: what is committed, and what makes another one."""

from data import load_examples, load_tokenizer
from demo import tiny
from demo.world import TIERS

import torch
from transformers import AutoModelForCausalLM


def test_a_base_that_is_made_has_the_shape_and_the_tokenizer_of_the_committed_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tiny, "LEVELS", {})  # ends at step 20
    tiny.make(tmp_path / "made", num_train=64, seed=0)
    tiny.copy(tmp_path / "copied")
    folders = tmp_path / "made", tmp_path / "copied"
    models = [AutoModelForCausalLM.from_pretrained(folder / "model") for folder in folders]
    made, copied = (model.state_dict() for model in models)
    assert {name: x.shape for name, x in made.items()} == {n: x.shape for n, x in copied.items()}
    assert any(not torch.equal(x, copied[name]) for name, x in made.items())
    ours, theirs = (load_tokenizer(str(folder / "model")) for folder in folders)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    for tier in TIERS:  # at one seed the problems are the same
        made, copied = (load_examples(str(f / "heldout" / f"{tier}.jsonl")) for f in folders)
        assert made == copied
