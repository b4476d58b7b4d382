"""Real problems, the real vocabulary."""

from conftest import PRECISION, SHARED, launch, metrics, needs_shared, slow
from dense import make_model
from models import load_tokenizer
from prepare.convert import convert


@slow
@needs_shared
def test_real_problems_with_the_real_vocabulary(tmp_path):
    rows = tmp_path / "train.jsonl"
    convert("aqua", str(SHARED / "data" / "aqua_dev.jsonl"), str(rows))
    tokens = load_tokenizer(str(SHARED / "qwen3_tokenizer"))
    sizes = {"vocab_size": 151_936, "hidden_size": 64, "intermediate_size": 192, "head_dim": 32}
    model = make_model(**sizes, initializer_range=0.02, eos_token_id=tokens.eos_token_id)
    for part in (model, tokens):
        part.save_pretrained(tmp_path / "model")
    launch(
        "train_oswft.py",
        *("--model", tmp_path / "model", "--data", rows, "--output_dir", tmp_path / "run"),
        *("--max_steps", 2, "--rollout_batch_size", 8, "--max_tokens_per_micro_batch", 2048),
        *("--max_length", 1536, "--max_completion_length", 32, *PRECISION),
    )
    first, second = metrics(tmp_path / "run")
    assert 11 < first["loss"] < 13  # ln(151,936) = 11.9: nothing is known yet
    assert first["mean_weight"] == 1 and first["train_tokens"] > 1000
    assert first["completion_length_max"] == 32 and second["grad_norm"] > 0
