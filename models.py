"""A model's folder becomes a tokenizer, prompts, token ids, weights; or a line that says why not.

The only file here that loads transformers. docs/models.md says what is checked, and what is not.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from data import Example, InputError, Queries, Query, blame, check_numbers
from verify import reference_letter

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # transformers takes seconds to import.
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"


@dataclass(kw_only=True)
class ModelArgs:
    """What several files read: how long texts are, in what precision, by which seed."""

    max_length: int = 5120  # tokens of prompt and solution together; a longer row is dropped
    # tokens of a sampled answer; a row whose prompt leaves less room is dropped, in SFT too
    max_completion_length: int = 4096
    # bf16 keeps fp32 master weights; on a GPU, fp32 attention may take memory quadratic in length
    precision: Literal["bf16", "fp32"] = "bf16"
    seed: int = 0  # decides the order of the data, and what is sampled

    def check(self) -> None:
        """Raise InputError for what cannot work: here the numbers of all flags."""
        check_numbers(self, "seed", "weight_decay")


# The prompt, inside the model's chat template. Edit it here; a run's args.json records it.
SYSTEM_PROMPT = ""  # a system turn before the question; "" for none
ASK_FREE = "Please reason step by step, and put your final answer within \\boxed{}."
ASK_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."
PROMPT = {"system": SYSTEM_PROMPT, "free answer": ASK_FREE, "multiple choice": ASK_LETTER}
TODAY = datetime.date(2026, 1, 1)  # templates that ask get the same date on every day

PLACEHOLDER = "Aa 0987654321"  # stands for a turn's text, to find it in what a template makes
TOKENIZER_BATCH = 200  # examples in one call of the tokenizer


# ---- Prompts -------------------------------------------------------------------------------------


def instruction(answer: str) -> str:
    """What the prompt asks for. A letter as reference means multiple choice."""
    return ASK_LETTER if reference_letter(answer) else ASK_FREE


def messages(question: str, ask: str) -> list[dict[str, str]]:
    """The turns before the answer: the system prompt, then the question with its instruction."""
    system = [{"role": "system", "content": SYSTEM_PROMPT}] if SYSTEM_PROMPT else []
    return [*system, {"role": "user", "content": f"{question}\n{ask}" if ask else question}]


def prompt_text(tokenizer: Tokenizer, question: str, ask: str) -> str:
    """The prompt as the model reads it, up to where its answer begins."""
    return render(tokenizer, messages(question, ask), add_generation_prompt=True)


def render(tokenizer: Tokenizer, turns: list[dict], **options) -> str:
    """What the chat template makes of the turns. Raises InputError if it fails."""
    options |= {"tokenize": False, "strftime_now": TODAY.strftime}
    with blame(f"{tokenizer.name_or_path}: the chat template fails"):
        return tokenizer.apply_chat_template(turns, **options)


def load_tokenizer(path_or_hub_id: str) -> Tokenizer:
    """Load a tokenizer.json as it is. Raises InputError if it cannot be trained or sampled with."""
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer may build another one.
    from transformers.utils import has_file

    options = {"clean_up_tokenization_spaces": False}  # What is graded is what was sampled.
    with blame(f"{path_or_hub_id}: its tokenizer cannot be loaded"):
        if not has_file(path_or_hub_id, "tokenizer.json"):  # Other files may give other ids.
            raise FileNotFoundError("there is no tokenizer.json")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path_or_hub_id, **options)
    text = messages("1", ASK_FREE)[-1]["content"]
    read = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
    if read.removeprefix(" ") != text:
        raise InputError(f"{path_or_hub_id}: the tokenizer changes text to {read!r}")
    end_of_turn_id(tokenizer)  # It raises if there is none.
    thinking = r"(\s|</?think>)+$"  # Either side may hold an opened or an empty <think>.
    prompt, before = prompt_text(tokenizer, "1", ASK_FREE), around_answer(tokenizer)[0]
    if re.sub(thinking, "", prompt) != re.sub(thinking, "", before):
        reason = "does not end the prompt where it begins the assistant's turn"
        raise InputError(f"{path_or_hub_id}: the chat template {reason}")
    return tokenizer


def around_answer(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template writes before an assistant's text, and after it."""
    turns = [*messages("1", ASK_FREE), {"role": "assistant", "content": PLACEHOLDER}]
    before, _, after = render(tokenizer, turns).rpartition(PLACEHOLDER)
    return before, after


def end_of_turn_id(tokenizer: Tokenizer) -> int:
    """The token with which the chat template closes an assistant turn, e.g. `<|im_end|>`.

    For Qwen3-Base it is not the tokenizer's EOS (`<|endoftext|>`). Raises InputError if the
    template closes a turn with plain text, on which sampling could not stop.
    """
    after = around_answer(tokenizer)[1].lstrip()
    tokens = tokenizer.added_tokens_decoder.items()
    closing = {token.content: id for id, token in tokens if after.startswith(token.content)}
    if not closing:
        raise InputError("the chat template closes the assistant's turn without a special token")
    return closing[max(closing, key=len)]


def stop_token_ids(tokenizer: Tokenizer, own: int | list[int] | None = None) -> list[int]:
    """Where sampling stops: the end of turn, EOS, and the model's `own`, where vLLM stops, too."""
    stops = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    stops += own if isinstance(own, list) else [own]
    return list(dict.fromkeys(token for token in stops if token is not None))


def refuse_special_tokens(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> None:
    """Raise InputError if one of the texts, given as (what it is, text), holds a special token.

    It searches the text, not the ids: a character that the vocabulary lacks has the id of `<unk>`.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}  # Qwen's `<think>` is not
    special.update(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))
    pattern = re.compile("|".join(map(re.escape, sorted(special, reverse=True))))
    for what, text in texts:
        if token := pattern.search(text):
            raise InputError(f"{what} holds the special token '{token[0]}'")


# ---- Token ids ----------------------------------------------------------------------------------


def tokenize_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, max_completion_length: int
) -> tuple[list[Query], dict[str, int]]:
    """Turn examples into token ids; returns those that fit, and how many do not, by reason.

    Prompt and solution are tokenized together, as the template writes them. A solution by itself
    might begin with a token for a space that is not there (SentencePiece).

    Args:
        max_length: tokens of prompt and solution together, and of prompt and rollout.
        max_completion_length: tokens of a rollout, for which a prompt has to leave room, in SFT
            too; `max_length` or more turns this off.
    """
    fields = ("question", "solution")
    texts = ((f"{e.where}: field '{name}'", getattr(e, name)) for e in examples for name in fields)
    refuse_special_tokens(tokenizer, texts)
    kept, dropped = [], {"prompt_too_long": 0, "solution_too_long": 0}
    end_of_turn = end_of_turn_id(tokenizer)
    # Some templates write a space or a line's end between the prompt and the answer.
    between = around_answer(tokenizer)[0].removeprefix(prompt_text(tokenizer, "1", ASK_FREE))
    space = between if between.isspace() else ""  # An empty <think> is not learnt.

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False).input_ids

    for start in range(0, len(examples), TOKENIZER_BATCH):
        batch = examples[start : start + TOKENIZER_BATCH]
        prompts = [prompt_text(tokenizer, e.question, instruction(e.answer)) for e in batch]
        solutions = [space + solution_after(p, e) for p, e in zip(prompts, batch, strict=True)]
        prompt_ids = encode(prompts)
        whole_ids = encode([p + s for p, s in zip(prompts, solutions, strict=True)])
        for n, example in enumerate(batch):
            size = len(prompt_ids[n])
            solution_ids = whole_ids[n][size:]
            if whole_ids[n][:size] != prompt_ids[n]:  # A token spans prompt and solution.
                [solution_ids] = encode([solutions[n]])
            solution_ids = np.array([*solution_ids, end_of_turn], np.int32)
            prompt = np.array(prompt_ids[n], np.int32)
            tokenized = Query(example.id, prompt, solution_ids, example)
            if max_completion_length < max_length < size + max_completion_length:
                dropped["prompt_too_long"] += 1
            elif len(tokenized) > max_length:
                dropped["solution_too_long"] += 1
            else:
                kept.append(tokenized)
    return kept, dropped


def count_examples(kept: Queries, dropped: dict[str, int]) -> str:
    """What `tokenize_examples` returned, in words: "576 examples (2 dropped: prompt_too_long)"."""
    rest = (f" ({count:,} dropped: {reason})" for reason, count in dropped.items() if count)
    return f"{len(kept):,} examples{''.join(rest)}"


def solution_after(prompt: str, example: Example) -> str:
    """The solution after this prompt, which may have opened or closed `<think>`."""
    solution = example.solution.strip()
    prompt = prompt.rstrip()
    if prompt.endswith("<think>"):
        if solution and "</think>" not in solution:
            reason = "the chat template opens <think>, and the solution does not close it"
            raise InputError(f"{example.where}: {reason}")
        return solution.removeprefix("<think>").lstrip()
    if prompt.endswith("</think>") and solution.startswith("<think>"):
        reason = "the solution begins with <think>, which the chat template has closed before it"
        raise InputError(f"{example.where}: {reason}")
    return solution


# ---- The model -----------------------------------------------------------------------------------


def load_config(model: str, max_length: int) -> PreTrainedConfig:
    """Load a config. Raises InputError if the model cannot read such a length."""
    from transformers import AutoConfig
    from transformers.utils import has_file

    with blame(model):  # It may be out of reach, or of a type that is not known.
        if has_file(model, "adapter_config.json"):  # peft would load it on another base.
            raise ValueError("adapter_config.json names an adapter: merge it first")
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config.get_text_config() is not config:
        raise InputError(f"{model}: reads more than text ({config.model_type})")
    limit = getattr(config, "max_position_embeddings", None) or math.inf  # Some models have none.
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        # Past this length rope's factors change.
        limit = config.rope_parameters["original_max_position_embeddings"]
    if max_length > limit:
        advice = "lower --max_completion_length, and in training --max_length"
        raise InputError(f"{model}: reads {limit} tokens, not {max_length}: {advice}")
    return config


def count_parameters(model: str, max_length: int) -> int:
    """How many parameters a model has, tied ones once, from its config alone."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(load_config(model, max_length))
    return sum(parameter.numel() for parameter in network.parameters())


def load_model(path_or_hub_id: str, max_length: int, precision: str = "auto") -> PreTrainedModel:
    """Load a causal language model. Raises InputError if weights are missing or left over."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = load_config(path_or_hub_id, max_length)
    if getattr(config, "quantization_config", None):  # The cast to fp32 would lose the scales.
        raise InputError(f"{path_or_hub_id}: is quantized: take the model it was made from")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision, "auto")
    options = {"config": config, "output_loading_info": True, "trust_remote_code": False}
    with blame(path_or_hub_id):  # A file may be cut off.
        model, report = AutoModelForCausalLM.from_pretrained(path_or_hub_id, dtype=dtype, **options)
    # Missing weights would start at random, and unexpected ones be dropped.
    for kind in "missing", "unexpected":
        if names := sorted(report[f"{kind}_keys"]):
            raise InputError(f"{path_or_hub_id}: {len(names)} weights are {kind}: {names[0]} ...")
    return model


def checkpoint_tensors(model: PreTrainedModel, tensors: dict) -> dict[str, Tensor]:
    """Tensors under their names in a checkpoint: it has a mixture's experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def check_model(
    tokenizer: Tokenizer, model: str, max_length: int, rows: Iterable[tuple[str, Sequence[int]]]
) -> None:
    """Raise InputError if a model cannot read these rows, or may stop in the middle of an answer.

    `rows` are ("file:line", token ids); the model will read `max_length` tokens at most.
    """
    from transformers import GenerationConfig

    config = load_config(model, max_length)
    own_stops = config.eos_token_id
    with contextlib.suppress(OSError):  # It has no generation_config.json.
        own_stops = GenerationConfig.from_pretrained(model).eos_token_id
    # Llama's and Mistral's configs say `eos_token_id` 2 by default, whatever the vocabulary.
    for token in stop_token_ids(tokenizer, own_stops):
        if token < len(tokenizer) and token not in tokenizer.added_tokens_decoder:
            reason = f"{token}, which its tokenizer reads as {tokenizer.decode(token)!r}"
            raise InputError(f"{model}: correct eos_token_id in its config: it is {reason}")
    for where, ids in rows:
        if (largest := int(max(ids))) >= config.vocab_size:
            token = f"{tokenizer.convert_ids_to_tokens(largest)!r} (id {largest})"
            reason = f"holds {token}, but the model embeds {config.vocab_size} ids"
            raise InputError(f"{where}: {reason}")
