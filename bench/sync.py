"""All weights of a 100M-parameter model into vLLM, beside a copy: python -m bench.sync"""

import re
import tempfile
from functools import partial
from statistics import median

import torch
from transformers import Qwen3ForCausalLM

import train_oswft
from bench.measure import goal, markdown_table, print_section, ratio, take_turns, timed
from demo.tiny import make_config, make_tokenizer
from engine import Engine, init_distributed
from rollout import Rollout


def main(repetitions: int = 7) -> list[str]:
    """Measure; returns Markdown."""
    init_distributed()
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2304, "head_dim": 64}
    sizes |= {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
    config = make_config(tokenizer, **sizes, tie_word_embeddings=False, initializer_range=0.02)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        args = train_oswft.Args(model=folder, data="")
        engine, rollout = Engine(model, args), Rollout(args, tokenizer, 256)
    named = dict(engine.named_weights())
    room = {name: torch.empty_like(weight) for name, weight in named.items()}

    def copy() -> None:
        for name, weight in named.items():
            room[name].copy_(weight)

    def one_by_one() -> None:
        """A call for each of vLLM's tensors. On CPU it has to hold all parts of the tensor."""
        parts: dict[str, list] = {}
        for name, weight in named.items():
            fused = re.sub("[qkv]_proj", "qkv", re.sub("(gate|up)_proj", "gate_up", name))
            parts.setdefault(fused, []).append((name, weight))
        for part in parts.values():
            rollout.load_weights(iter(part))

    def sample() -> list[list[int]]:
        completions = rollout.generate([[9, 10, 11]], 1, 8, seeds=[0], temperature=1e-4)
        return [completion.token_ids for completion in completions]

    rollout.load_weights(engine.named_weights())
    expected = sample()
    one_by_one()
    assert sample() == expected, "a call for each tensor leaves another model"
    calls = {
        "`rollout.load_weights`": lambda: rollout.load_weights(engine.named_weights()),
        "a copy of the same bytes": copy,
        "a call for each tensor": one_by_one,
    }
    measured = take_turns({name: partial(timed, call) for name, call in calls.items()}, repetitions)
    ours, _, each = measured.values()
    rows = [[n, f"{median(s):.3f}", f"{ratio(s, ours):.2f}"] for n, s in measured.items()]
    size = sum(weight.nbytes for weight in named.values()) / 2**20
    count = sum(weight.numel() for weight in named.values()) / 1e6
    return [
        f"{count:.0f}M parameters in {len(named)} tensors, bf16, {size:.0f} MiB, one rank. On "
        "CPU vLLM packs every matrix anew.",
        markdown_table(["", "s", "÷ ours"], rows),
        goal("a call for each tensor ÷ ours", ratio(each, ours), "≥ 1.5"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
