r"""A tiny Qwen3 and a synthetic reasoning set, so that everything runs on a laptop.

The problems are chains of arithmetic modulo 10, read from left to right, worked out step by step:

    question  7+5*3        solution  7+5=2;2*3=6;\boxed{6}        answer  6

There are three tiers, by the operators that a problem may hold: easy has `+ -`, middle adds `*`,
hard adds `^`. The model (0.4M parameters, a character-level vocabulary, ChatML) is pre-trained on
many easy, few middle and very few hard problems, so that it knows the first mostly, the second
sometimes and the third rarely. That gap is what fine-tuning is then asked to close.

    python -m demo.tiny make --output_dir runs/tiny         # model/, train.jsonl, heldout/
    python -m demo.tiny init --tokenizer Qwen/Qwen3-0.6B-Base --output_dir runs/small  # not trained
"""

import sys
from pathlib import Path

import numpy as np
import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data import Example, InputError, collate, derive_seed, write_rows
from prompts import ASK_FREE, load_tokenizer, stop_token_ids, tokenize_examples

TIERS = {"easy": "+-", "middle": "+-*", "hard": "+-*^"}  # operators, the newest last
NUM_OPERATORS = {"easy": 3, "middle": 3, "hard": 5}
TRAIN_MIX = {"easy": 0.5, "middle": 0.25, "hard": 0.25}
PRETRAIN_MIX = {"easy": 0.965, "middle": 0.03, "hard": 0.005}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_problem(tier: str, rng: np.random.Generator) -> tuple[str, str, str]:
    """Draw (question, solution, answer). The tier's newest operator occurs at least once."""
    operators = rng.choice(list(TIERS[tier]), size=NUM_OPERATORS[tier])
    operators[rng.integers(len(operators))] = TIERS[tier][-1]
    value = int(rng.integers(10))
    question, steps = str(value), []
    for operator in operators:
        operand = int(rng.integers(10))
        result = {
            "+": value + operand,
            "-": value - operand,
            "*": value * operand,
            "^": value**operand,
        }[operator] % 10
        question += f"{operator}{operand}"
        steps.append(f"{value}{operator}{operand}={result};")
        value = result
    return question, "".join(steps) + f"\\boxed{{{value}}}", str(value)


def make_examples(
    num_examples: int, mix: dict[str, float], rng: np.random.Generator, taken: set[str]
) -> list[Example]:
    """Draw problems, the tiers in the shares of `mix`; no question twice, none that is taken."""
    examples = []
    tiers = [tier for tier, share in mix.items() for _ in range(round(share * num_examples))]
    for tier in rng.permutation(tiers):
        question = None
        while question is None or question in taken:
            question, solution, answer = make_problem(tier, rng)
        taken.add(question)
        examples.append(Example(f"{tier}-{question}", question, solution, answer, str(tier)))
    return examples


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer; `\\boxed{`, the roles and the instruction are one token each."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = ["\\boxed{", "user", "assistant", ASK_FREE]
    vocabulary = {token: i for i, token in enumerate([*special, *words, *"0123456789+-*^=;} \n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    escaped = "|".join("".join(f"\\{c}" if not c.isalnum() else c for c in w) for w in words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{escaped}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer: PreTrainedTokenizerFast, **changes) -> Qwen3Config:
    """The tiny model's config; `changes` replace or add fields."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen3Config(**{**fields, **changes})


def pretrain(
    model: Qwen3ForCausalLM, tokenizer, max_steps: int, seed: int, taken: set[str]
) -> None:
    """Plain supervised training on PRETRAIN_MIX, without the questions that are `taken`.

    It goes on until the loss says that the model has learnt to add: the jump from guessing comes
    at another step for every seed. Then the learning rate falls to zero.
    """
    batch_size = 32  # small: the jump comes after so many *steps*
    final_steps = 140  # of falling learning rate
    rng = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
    rows, mean_loss, end = [], 1.0, max_steps
    progress = tqdm(range(max_steps), desc="pre-training", mininterval=1, unit="step")
    for step in progress:
        if step == end:
            break
        if not rows:
            examples = make_examples(100 * batch_size, PRETRAIN_MIX, rng, taken)
            rows, _ = tokenize_examples(examples, tokenizer, 128, 64)
        chosen, rows = rows[:batch_size], rows[batch_size:]
        batch = collate(chosen, range(batch_size))
        logits = model(input_ids=batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (end - step) / final_steps)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = 0.9 * mean_loss + 0.1 * loss.item()
        if mean_loss < 0.05 and end == max_steps:
            end = min(max_steps, step + 1 + final_steps)
        if step % 20 == 0:
            progress.set_postfix(loss=f"{mean_loss:.3f}")
    if mean_loss > 0.05:
        print(f"warning: the model has not learnt to add in {max_steps} steps; try another --seed")


def save_model(model: Qwen3ForCausalLM, tokenizer, folder: Path) -> None:
    model.generation_config.eos_token_id = stop_token_ids(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(
    output_dir: Path = Path("runs/tiny"),
    num_train: int = 4096,
    num_heldout: int = 192,
    pretrain_steps: int = 1500,
    seed: int = 0,
) -> None:
    """Make the tiny model and its data.

    Args:
        output_dir: where model/, train.jsonl and heldout/<tier>.jsonl go.
        num_train: training problems.
        num_heldout: held-out problems, as many of each tier.
        pretrain_steps: optimizer steps of pre-training, at most; it ends when adding is learnt.
        seed: of the data and of the weights.
    """
    rng = np.random.default_rng(seed)
    taken: set[str] = set()
    heldout = make_examples(num_heldout, dict.fromkeys(TIERS, 1 / len(TIERS)), rng, taken)
    train = make_examples(num_train, TRAIN_MIX, rng, taken)
    tokenizer = make_tokenizer()
    torch.manual_seed(derive_seed("tiny", seed))
    model = Qwen3ForCausalLM(make_config(tokenizer))
    pretrain(model, tokenizer, pretrain_steps, seed, taken)
    save_model(model, tokenizer, output_dir / "model")
    write_rows([example.columns for example in train], output_dir / "train.jsonl")
    for tier in TIERS:
        rows = [example.columns for example in heldout if example.source == tier]
        write_rows(rows, output_dir / "heldout" / f"{tier}.jsonl")
    print(f"{model.num_parameters():,} parameters, {len(train):,} problems -> {output_dir}")


def init(
    tokenizer: str,
    output_dir: Path,
    hidden_size: int = 64,
    num_layers: int = 2,
    tie_embeddings: bool = True,
    vocab_size: int = 151_936,
    max_length: int = 8192,
    seed: int = 0,
) -> None:
    """Write a randomly initialised Qwen3 for the vocabulary of a real tokenizer.

    Args:
        tokenizer: hub id or folder.
        output_dir: the model folder to write.
        hidden_size: width of the model; a multiple of 32.
        num_layers: depth of the model.
        tie_embeddings: one matrix for reading and writing tokens.
        vocab_size: rows of that matrix; the default is Qwen3's, padded beyond its 151,669 tokens.
        max_length: tokens that the model can read.
        seed: of the weights.
    """
    tokens = load_tokenizer(tokenizer)
    if vocab_size < len(tokens):
        raise InputError(f"--vocab_size {vocab_size} is below the tokenizer's {len(tokens)} tokens")
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        make_config(
            tokens,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=max(1, hidden_size // 64),
            max_position_embeddings=max_length,
            tie_word_embeddings=tie_embeddings,
            initializer_range=0.02,  # Qwen3's
        )
    )
    save_model(model, tokens, output_dir)
    print(f"{model.num_parameters():,} parameters, not trained -> {output_dir}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"make": make, "init": init}, description=__doc__, use_underscores=True
        )
    except InputError as error:
        sys.exit(f"error: {error}")
