"""How a question becomes a prompt: the chat template, what stands beside the question, token ids.

A chat template is checked before anything long begins: the model has to read in training, in
sampling and in evaluation what the template writes, and to stop where a turn ends.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data import Example, InputError, TokenizedExample, TokenizedExamples, first_line

ASK_FREE = "Please reason step by step, and put your final answer within \\boxed{}."
ASK_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."
TOGETHER = 200  # examples in one call of the tokenizer, whose own objects take much memory
MARK = "Aa 0987654321"  # stands for a turn's text, to find it in what a chat template writes


@dataclass(frozen=True)
class Prompt:
    """What a prompt holds beside the question. The chat template puts it into its form."""

    system_prompt: str | None = None  # a system turn before the question
    prompt_suffix: str | None = None  # follows the question, instead of the instruction
    date: str | None = None  # for a template that asks for today's, as 2026-01-31; default: today

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.date or "2026-01-31")
        except ValueError as error:
            raise InputError(f"--date is written as 2026-01-31, got {self.date}") from error

    def messages(self, question: str, ask: str) -> list[dict[str, str]]:
        """The turns before the answer; `ask` is the instruction, unless there is a suffix."""
        suffix = ask if self.prompt_suffix is None else self.prompt_suffix
        user = {"role": "user", "content": f"{question}\n{suffix}" if suffix else question}
        if not self.system_prompt:
            return [user]
        return [{"role": "system", "content": self.system_prompt}, user]

    def text(self, tokenizer: PreTrainedTokenizerBase, question: str, ask: str) -> str:
        """The prompt as the model reads it, up to where its answer begins."""
        messages = self.messages(question, ask)
        return render(tokenizer, messages, self.date, add_generation_prompt=True)


PAPER_PROMPT = Prompt()  # the question and the instruction, nothing else


def instruction(answer: str) -> str:
    """What the prompt asks for. A letter as reference means multiple choice."""
    return ASK_LETTER if re.fullmatch(r"\(?[A-J][).]?", answer) else ASK_FREE


# ------------------------------------------------------------------------------------------------
# The chat template


def load_tokenizer(path_or_hub_id: str, prompt: Prompt = PAPER_PROMPT) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises InputError if there is none, or its chat template is of no use.

    `prompt` is one that the template has to take.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id)
    except Exception as error:  # transformers raises many types
        raise InputError(f"{path_or_hub_id}: no tokenizer there: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise InputError(f"{path_or_hub_id}: the tokenizer has no chat template")
    try:
        check_template(tokenizer, prompt)
    except InputError as error:
        raise InputError(f"{path_or_hub_id}: {error}") from error
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Raise InputError if the chat template is of no use in training, or with this prompt."""
    end_of_turn_id(tokenizer)
    asked = Prompt(prompt_suffix="").text(tokenizer, "1", "")
    thinking = r"(\s|</?think>)+$"  # may be opened, or left empty, in one of the two alone
    if re.sub(thinking, "", asked) != re.sub(thinking, "", around_answer(tokenizer)[0]):
        raise InputError(
            "the chat template does not end the prompt where it begins the assistant's turn"
        )
    if MARK not in prompt.text(tokenizer, MARK, ""):
        raise InputError("the chat template drops the question")
    marked = replace(prompt, system_prompt=MARK)
    if prompt.system_prompt and MARK not in marked.text(tokenizer, "1", ""):
        raise InputError("the chat template drops the system prompt")
    own = (prompt.system_prompt or "", prompt.prompt_suffix or "")
    refuse_special_tokens(tokenizer, [("the prompt's own text", text) for text in own])


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], date: str | None = None, **options
) -> str:
    """What the chat template makes of the turns, on that day. Raises InputError if it fails."""
    day = datetime.date.fromisoformat(date) if date else datetime.date.today()
    options |= {"tokenize": False, "strftime_now": day.strftime}  # instead of the clock's
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program: it may raise anything
        raise InputError(f"the chat template fails: {first_line(error)}") from error


def around_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before an assistant's text, and after it."""
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": MARK}]
    before, found, after = render(tokenizer, messages).rpartition(MARK)
    if not found:
        raise InputError("the chat template drops the assistant's turn")
    return before, after


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template closes an assistant turn, e.g. `<|im_end|>`.

    For Qwen3-Base it is not the tokenizer's EOS (`<|endoftext|>`). Raises InputError if the
    template closes a turn with plain text, on which sampling could not stop.
    """
    after = around_answer(tokenizer)[1].lstrip()
    tokens = tokenizer.added_tokens_decoder.items()
    closing = [(token.content, id) for id, token in tokens if after.startswith(token.content)]
    if not closing:
        raise InputError(
            "the chat template does not close the assistant's turn with a special token"
        )
    return max(closing)[1]  # the longest


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where sampling stops: the end of turn first, then EOS if it is another token."""
    stops = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    return list(dict.fromkeys(token for token in stops if token is not None))


# ------------------------------------------------------------------------------------------------
# Token ids


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_completion_length: int,
    prompt: Prompt = PAPER_PROMPT,
) -> tuple[TokenizedExamples, dict[str, int]]:
    """Turn examples into token ids, and drop those that do not fit; nothing is ever truncated.

    Args:
        max_length: tokens of prompt plus expert solution (and of prompt plus rollout).
        max_completion_length: tokens of one rollout; the prompt has to leave room for it.

    Returns:
        the examples that fit, and how many were dropped for which reason.

    Raises InputError for a row that holds special tokens, or whose `<think>` the prompt rules out.
    """
    kept, dropped = TokenizedExamples(), {"prompt_too_long": 0, "solution_too_long": 0}
    end_of_turn = end_of_turn_id(tokenizer)
    for example, asked, solution in token_ids(examples, tokenizer, prompt):
        tokenized = TokenizedExample(example.id, asked, [*solution, end_of_turn], example)
        if len(asked) > max_length - max_completion_length:
            dropped["prompt_too_long"] += 1
        elif len(tokenized) > max_length:
            dropped["solution_too_long"] += 1
        else:
            kept.append(tokenized)
    return kept, dropped


def token_ids(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> Iterator[tuple[Example, list[int], list[int]]]:
    """Yield each example with the token ids of its prompt and of its solution.

    The two are tokenized apart, because sampling continues from the prompt's ids.
    """
    fields, only_ids = ("question", "solution"), {"add_special_tokens": False}
    for start in range(0, len(examples), TOGETHER):
        part = examples[start : start + TOGETHER]
        texts = ((f"{e.where}: field '{name}'", getattr(e, name)) for e in part for name in fields)
        refuse_special_tokens(tokenizer, texts)
        prompts = [prompt.text(tokenizer, e.question, instruction(e.answer)) for e in part]
        solutions = [solution_after(*pair) for pair in zip(prompts, part, strict=True)]
        ids = [tokenizer(texts, **only_ids).input_ids for texts in (prompts, solutions)]
        yield from zip(part, *ids, strict=True)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """Finds a special token, or one on which sampling stops, that is written out in a text.

    By text and not by ids: a character that the vocabulary lacks has the id of `<unk>`.
    """
    added = tokenizer.added_tokens_decoder.values()
    found = {token.content for token in added if token.special}  # of Qwen's, not `<think>`
    found.update(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))
    return re.compile("|".join(map(re.escape, sorted(found, reverse=True))))


def refuse_special_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, str]]
) -> None:
    """Raise InputError if one of the texts, given as (what it is, text), holds a special token."""
    special = special_tokens(tokenizer)
    for what, text in texts:
        if found := special.search(text):
            raise InputError(f"{what} holds the special token '{found[0]}'")


def solution_after(prompt: str, example: Example) -> str:
    """The solution as it follows this prompt, which may have opened or closed `<think>`.

    Raises InputError if the two do not fit.
    """
    solution, asked = example.solution.strip(), prompt.rstrip()
    if asked.endswith("<think>"):
        if "</think>" not in solution:
            reason = "the chat template opens <think>, and the solution does not close it"
            raise InputError(f"{example.where}: {reason}")
        return solution.removeprefix("<think>").lstrip()
    if asked.endswith("</think>") and solution.startswith("<think>"):
        reason = "the solution begins with <think>, which the chat template has closed before it"
        raise InputError(f"{example.where}: {reason}")
    return solution
