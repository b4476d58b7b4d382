r"""The embedded default: a tiny Qwen3 and a synthetic reasoning set, so that all runs on a laptop.

The problems are chains of arithmetic modulo 10, read from left to right, worked out step by step:

    question  7+5*3        solution  7+5=2;2*3=6;\boxed{6}        answer  6

There are three tiers, by the operators that a problem may hold: easy has `+ -`, middle adds `*`,
hard adds `^`. The model (0.4M parameters, a character-level vocabulary, ChatML) is pre-trained on
many easy, few middle and very few hard problems, so that it knows the first mostly, the second
sometimes and the third rarely. That gap is what fine-tuning is then asked to close.

    python tiny.py make --output_dir runs/tiny        # model/, train.jsonl, heldout.jsonl; 1 minute
    python tiny.py init --tokenizer Qwen/Qwen3-0.6B-Base --output_dir runs/small   # random weights
    python tiny.py report --run runs/oswft --before runs/eval-base --after runs/eval-oswft
"""

import sys
from pathlib import Path

import numpy as np
import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data import (
    ASK_FREE,
    Example,
    InputError,
    collate,
    derive_seed,
    stop_token_ids,
    tokenize_examples,
    write_rows,
)

TIERS = {"easy": "+-", "middle": "+-*", "hard": "+-*^"}
TRAIN_MIX = {"easy": 0.5, "middle": 0.25, "hard": 0.25}
PRETRAIN_MIX = {"easy": 0.98, "middle": 0.018, "hard": 0.002}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_problem(tier: str, rng: np.random.Generator) -> tuple[str, str, str]:
    """Draw (question, solution, answer): 3 operators, the tier's own at least once."""
    operators = list(rng.choice(list(TIERS[tier]), size=3))
    operators[rng.integers(3)] = TIERS[tier][-1] if tier != "easy" else rng.choice(list("+-"))
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
    """Draw distinct problems with the tiers in the shares of `mix`; none whose question is taken."""
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


def pretrain(model: Qwen3ForCausalLM, tokenizer, steps: int, seed: int, taken: set[str]) -> None:
    """Plain supervised training on PRETRAIN_MIX; questions in `taken` (the other sets) are left out."""
    batch_size = 32  # small batches: the jump from guessing to adding comes after so many *steps*
    rng = np.random.default_rng([seed, 1])
    examples = make_examples(batch_size * steps, PRETRAIN_MIX, rng, taken)
    rows, _ = tokenize_examples(examples, tokenizer, max_length=128, max_completion_length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1, (steps - step) / (0.2 * steps))
    )
    progress = tqdm(range(steps), desc="pre-training", mininterval=1, unit="step")
    for step in progress:
        chosen = rows[step * batch_size : (step + 1) * batch_size]
        batch = collate([(row.prompt_ids, row.completion_ids) for row in chosen])
        logits = model(input_ids=batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def save_model(model: Qwen3ForCausalLM, tokenizer, folder: Path) -> None:
    model.generation_config.eos_token_id = stop_token_ids(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(
    output_dir: Path = Path("runs/tiny"),
    num_train: int = 4096,
    num_heldout: int = 192,
    pretrain_steps: int = 700,
    seed: int = 0,
) -> None:
    """Make the tiny model and its data.

    Args:
        output_dir: where model/, train.jsonl and heldout.jsonl go.
        num_train: training problems.
        num_heldout: held-out problems, as many of each tier.
        pretrain_steps: optimizer steps of pre-training; 0 leaves the weights random.
        seed: of the data and of the weights.
    """
    rng = np.random.default_rng(seed)
    taken: set[str] = set()
    heldout = make_examples(num_heldout, dict.fromkeys(TIERS, 1 / len(TIERS)), rng, taken)
    train = make_examples(num_train, TRAIN_MIX, rng, taken)
    tokenizer = make_tokenizer()
    torch.manual_seed(derive_seed("tiny", seed))
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.05,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    pretrain(model, tokenizer, pretrain_steps, seed, taken)
    save_model(model, tokenizer, output_dir / "model")
    write_rows([vars(example) for example in train], output_dir / "train.jsonl")
    write_rows([vars(example) for example in heldout], output_dir / "heldout.jsonl")
    print(f"{model.num_parameters():,} parameters, {len(train):,} problems -> {output_dir}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"make": make},
            description=__doc__,
            config=(tyro.conf.AvoidSubcommands,),
        )
    except InputError as error:
        sys.exit(f"error: {error}")
