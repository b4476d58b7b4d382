r"""A tiny Qwen3 and a synthetic reasoning set, so that everything runs on a laptop.

The problems are those of demo/world.py. The model (0.4M parameters, a character-level vocabulary,
ChatML) is pre-trained until it knows enough for fine-tuning to build on: to a stated level, which
is measured on the base alone. The one of seed 0 is committed in demo/base.

    python -m demo.tiny copy --output_dir runs/tiny         # the committed model, and its problems
    python -m demo.tiny make --output_dir runs/tiny1 --seed 1  # another one: two minutes
    python -m demo.tiny spoil --folder runs/tiny            # a tenth of its references made wrong
    python -m demo.tiny init --tokenizer Qwen/Qwen3-0.6B-Base --output_dir runs/small  # not trained
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arguments import one_line_errors
from data import (
    ASK_FREE,
    InputError,
    Trajectory,
    collate,
    derive_seed,
    load_examples,
    load_tokenizer,
    prompt_text,
    split_rows,
    stop_token_ids,
    write_rows,
)
from demo.world import (
    LEVELS,
    NUM_HELDOUT,
    PRETRAIN_MIX,
    TIERS,
    TRAIN_MIX,
    make_examples,
    make_question,
    solve,
    spoil,
)

import numpy as np
import torch
import transformers  # whose classes are loaded when they are used: `copy` needs none
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

COMMITTED = Path(__file__).parent / "base"
PRETRAIN_BATCH = 32  # small: what is learnt comes in jumps, after a number of *steps*
PRETRAIN_STEPS = 3000  # at most: it ends when enough is known
AVERAGE_DECAY = 0.98  # of the moving average of the weights, for each step
NUM_PROBES = 96  # problems of a kind that measure what is known
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A character-level tokenizer; `\\boxed{`, the roles and the instruction are one token each."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = ["\\boxed{", "user", "assistant", ASK_FREE]
    tokens = [*special, *words, *"0123456789+-*^<>@:,=;} \n"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    escaped = "|".join("".join(f"\\{c}" if not c.isalnum() else c for c in w) for w in words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{escaped}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_config(
    tokenizer: transformers.PreTrainedTokenizerFast, **changes
) -> transformers.Qwen3Config:
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
    return transformers.Qwen3Config(**{**fields, **changes})


def tokenize_row(question: str, style: str, tokenizer, template: tuple[str, str]) -> Trajectory:
    """A row of pre-training; "bare" is a document, the other styles answer in the chat template."""
    solution, _ = solve(question, "plain" if style == "plain" else "scratch")
    before, after = ("<|endoftext|>", "\n") if style == "bare" else template
    end = "<|endoftext|>" if style == "bare" else "<|im_end|>"
    prompt_ids = tokenizer(before + question + after).input_ids
    return Trajectory(question, prompt_ids, tokenizer(solution + end).input_ids)


@torch.no_grad()
def known_share(model: torch.nn.Module, rows: Sequence[Trajectory]) -> float:
    """The chance that sampling writes these solutions, once the style is chosen: their mean."""
    batch = collate(rows, range(len(rows)))
    logprobs = model(input_ids=batch.input_ids).logits.log_softmax(dim=2)
    logprobs = logprobs.gather(2, batch.targets[:, :, None])[:, :, 0]  # (B, T)
    first = [len(row.prompt_ids) - 1 for row in rows]  # the style's mark, or the question's digit
    batch.mask[range(len(rows)), first] = False
    return torch.where(batch.mask, logprobs, 0).sum(dim=1).exp().mean().item()


def pretrain(
    model: transformers.Qwen3ForCausalLM, tokenizer, seed: int, taken: set[str]
) -> tuple[transformers.Qwen3ForCausalLM, dict[str, float]]:
    """Plain supervised training on PRETRAIN_MIX, without the questions that are `taken`.

    It goes on until the model knows enough, as the moving average of its weights says: that comes
    at another step for every seed. Returns the averaged model, and the share known of each kind of
    solution. Raises InputError if that never comes.
    """
    rng, mix = np.random.default_rng([seed, 1]), PRETRAIN_MIX
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE_DECAY))
    template = tuple(prompt_text(tokenizer, "QUESTION", ASK_FREE).split("QUESTION"))

    def draw(style: str, tier: str) -> Trajectory:
        return tokenize_row(make_question(tier, rng, taken), style, tokenizer, template)

    probes = {kind: [draw(*kind) for _ in range(NUM_PROBES)] for kind in LEVELS}
    kinds, shares = list(mix), np.array(list(mix.values())) / sum(mix.values())
    progress = tqdm(range(1, PRETRAIN_STEPS + 1), desc="pre-training", mininterval=1, unit="step")
    for step in progress:
        rows = [draw(*kinds[n]) for n in rng.choice(len(kinds), size=PRETRAIN_BATCH, p=shares)]
        tokens = sum(len(row.completion_ids) for row in rows)
        for [share] in split_rows([len(row) for row in rows], 1, 8192):  # less padding
            batch = collate(rows, share)
            logits = model(input_ids=batch.input_ids).logits[batch.mask]
            loss = torch.nn.functional.cross_entropy(
                logits, batch.targets[batch.mask], reduction="sum"
            )
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 20)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 20 == 0:
            known = {kind: known_share(average, probe) for kind, probe in probes.items()}
            progress.set_postfix({" ".join(kind): f"{share:.2f}" for kind, share in known.items()})
            if all(known[kind] >= level for kind, level in LEVELS.items()):
                return average.module, {" ".join(kind): share for kind, share in known.items()}
    raise InputError(f"after {PRETRAIN_STEPS} steps the model knows too little: try another --seed")


def save_model(model: transformers.Qwen3ForCausalLM, tokenizer, folder: Path) -> None:
    model.generation_config.eos_token_id = stop_token_ids(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_problems(output_dir: Path, num_train: int = 4096, seed: int = 0) -> set[str]:
    """Write train.jsonl, train-plain.jsonl and heldout/<tier>.jsonl; returns their questions."""
    rng, taken = np.random.default_rng(seed), set()
    files = {f"heldout/{t}": make_examples(NUM_HELDOUT, {t: 1}, rng, taken) for t in TIERS}
    files["train"] = make_examples(num_train, TRAIN_MIX, rng, taken)
    files["train-plain"] = [
        replace(row, solution=solve(row.question, "plain")[0]) for row in files["train"]
    ]
    for name, rows in files.items():
        write_rows([row.columns for row in rows], output_dir / f"{name}.jsonl")
    return taken


def copy(output_dir: Path = Path("runs/tiny")) -> None:
    """Write the base that is committed, and its problems: `make` at seed 0, without the training.

    Args:
        output_dir: where model/, heldout/<tier>.jsonl, train.jsonl and train-plain.jsonl go.
    """
    write_problems(output_dir)
    beside = shutil.ignore_patterns("README.md", "scores.json")
    shutil.copytree(COMMITTED, output_dir / "model", ignore=beside, dirs_exist_ok=True)


def spoil_file(folder: Path = Path("runs/tiny"), seed: int = 0) -> None:
    """Write train-wrong.jsonl: train.jsonl with a tenth of its answers and solutions wrong.

    Args:
        folder: of `copy` or `make`.
        seed: of the rows that are spoiled.
    """
    rows = [example.columns for example in load_examples(str(folder / "train.jsonl"))]
    write_rows(spoil(rows, np.random.default_rng([seed, 2])), folder / "train-wrong.jsonl")


def make(output_dir: Path = Path("runs/tiny"), num_train: int = 4096, seed: int = 0) -> None:
    """Pre-train a tiny model, and write it with its problems.

    Args:
        output_dir: where model/, heldout/<tier>.jsonl, train.jsonl (the expert's solutions, in
            scratch) and train-plain.jsonl (the same problems, solved in the model's own style) go.
        num_train: training problems.
        seed: of the data and of the weights.
    """
    taken = write_problems(output_dir, num_train, seed)
    tokenizer = make_tokenizer()
    torch.manual_seed(derive_seed("tiny", seed))
    model = transformers.Qwen3ForCausalLM(make_config(tokenizer))
    model, known = pretrain(model, tokenizer, seed, taken)
    save_model(model, tokenizer, output_dir / "model")
    print(f"{model.num_parameters():,} parameters, {num_train:,} problems -> {output_dir}")
    print("known: " + ", ".join(f"{kind} {share:.2f}" for kind, share in known.items()))


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
    model = transformers.Qwen3ForCausalLM(
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
    import tyro  # only a command line needs it

    with one_line_errors():
        commands = {"copy": copy, "make": make, "spoil": spoil_file, "init": init}
        tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, use_underscores=True)
