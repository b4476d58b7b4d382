"""SFT of a 30M model beside a plain torch loop and the matrix rate: python -m bench.mfu"""

import tempfile
from collections.abc import Callable
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import train_sft
from bench.gpu import training_flops
from bench.measure import Worker, goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import random_rows
from data import TokenizedExample
from demo.tiny import make_config, make_tokenizer
from engine import init_distributed, load_engine, share_cores

SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
SIZES |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
LENGTH, ROWS, MICRO_BATCH = 512, 8, 4  # tokens of a row; rows of a step, and of a pass


def make_rows(config: Qwen3Config) -> list[TokenizedExample]:
    return random_rows([(1, LENGTH - 1)] * ROWS, range(config.vocab_size))


def matrix_weights(model: Qwen3ForCausalLM) -> int:
    """Parameters that stand in matrix products; tied embeddings do so once."""
    return sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def prepare_ours(model: str) -> Callable[[], float]:
    """Measures seconds of train_sft.py's step."""
    init_distributed()
    args = train_sft.Args(model=model, data="", precision="fp32", max_length=LENGTH)
    args.max_tokens_per_micro_batch = LENGTH * MICRO_BATCH
    engine = load_engine(args)
    rows = make_rows(engine.model.config)
    return lambda: timed(lambda: train_sft.update(engine, rows, args))


def prepare_plain(model: str) -> Callable[[], float]:
    """Measures seconds of a step of the loop that everybody writes, on the same rows."""
    share_cores()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    rows = make_rows(network.config)
    ids = torch.tensor([row.prompt_ids + row.completion_ids for row in rows])  # (B, T)

    def step() -> torch.Tensor:
        num_tokens = ids[:, 1:].numel()
        for batch in ids.split(MICRO_BATCH):
            network(input_ids=batch, labels=batch, num_items_in_batch=num_tokens).loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return grad_norm

    return lambda: timed(step)


def prepare_products(model: str) -> Callable[[], float]:
    """Measures seconds of a step's matrix products alone: three for each matrix and pass."""
    share_cores()
    network = AutoModelForCausalLM.from_pretrained(model)
    linear = [m.weight.detach() for m in network.modules() if isinstance(m, torch.nn.Linear)]
    tokens = LENGTH * MICRO_BATCH
    widths = {width for weight in linear for width in weight.shape}
    sides = {width: torch.randn(tokens, width) for width in widths}

    def products() -> None:
        for weight in linear * (ROWS // MICRO_BATCH):  # (out, in)
            grad, x = (sides[width] for width in weight.shape)
            x @ weight.T, grad @ weight, grad.T @ x

    return lambda: timed(products)


def main(repetitions: int = 7) -> list[str]:
    """Measure; returns Markdown."""
    config = make_config(make_tokenizer(), **SIZES)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(folder)
        cases = {
            "`train_sft.py`, one rank": Worker(prepare_ours, folder),
            "a plain loop, transformers' loss, fused AdamW": Worker(prepare_plain, folder),
            "the matrix products alone": Worker(prepare_products, folder),
        }
        measured = take_turns(cases, repetitions)
    weights = matrix_weights(model)
    tokens = ROWS * LENGTH
    whole, products = training_flops(config, weights, LENGTH) * tokens, 6 * weights * tokens
    ours, plain, alone = measured.values()
    rows = []
    for (name, seconds), flops in zip(measured.items(), (whole, whole, products), strict=True):
        share = ratio(alone, seconds) * flops / products
        rate = flops / median(seconds) / 1e9
        rows.append([name, f"{tokens / median(seconds):,.0f}", f"{rate:.0f}", f"{share:.0%}"])
    return [
        f"A random Qwen3 of {model.num_parameters() / 1e6:.0f}M parameters (hidden size "
        f"{config.hidden_size}, {config.num_hidden_layers} layers, intermediate "
        f"{config.intermediate_size}, vocabulary {config.vocab_size:,}, tied), fp32, all cores, "
        f"{ROWS} rows of {LENGTH} tokens to a step, {MICRO_BATCH} to a pass. FLOPs of a token: 6 "
        "for each parameter of a matrix, and 6 × layers × width × length for causal attention. The "
        "rate is that of the matrices' own products (forward, and two in backward).",
        markdown_table(["", "tokens/s", "GFLOP/s", "of the products' rate"], rows),
        goal("share of the matrix rate", ratio(alone, ours) * whole / products, "≥ 0.6")
        + "\n"
        + goal("tokens/s ÷ the plain loop's", ratio(plain, ours), "≥ 1"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
