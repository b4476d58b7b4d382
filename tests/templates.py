"""Chat templates that we wrote, each in the format that its name says, and tokenizers for them."""

from dataclasses import dataclass

from data import Example
from demo.tiny import COMMITTED
from models import ASK_FREE

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (COMMITTED / "chat_template.jinja").read_text()
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}<think>\n"
    "{{ parts[0].replace('<think>', '').strip() if parts|length > 1 }}\n</think>\n\n"
    "{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN3 = TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA3 = (
    "{% set own = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ strftime_now('%d %b %Y') }}\n\n{{ own }}<|eot_id|>"
    "{% for m in messages if m.role != 'system' %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('No system role here') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('User and assistant take turns') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% set system = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' "
    "if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ system }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = Example("1", "What is 1 + 1?", "It is \\boxed{2}.", "2", "s", where="rows.jsonl:1")
THOUGHT = Example("2", "And 1 + 2?", "<think>\nTwo, 3.\n</think>\n\n\\boxed{3}", "3", "s")


@dataclass
class Case:
    template: str | dict[str, str]
    end: str  # of turn
    eos: str
    text: str = ""  # a whole row, prompt and what is learnt
    examples: tuple[Example, ...] = (PLAIN, THOUGHT)  # that it can be trained on
    bos: str | None = None
    special: tuple[str, ...] = ()  # more of them
    plain: tuple[str, ...] = ("<think>", "</think>")  # added, but not special, as Qwen has them
    pieces: bool = False  # like SentencePiece: a space before the first word; else bytes
    legacy: bool = False  # and after each special token, as in Llama 2

    def row(self, example: Example) -> str:
        query = f"{example.question}\n{ASK_FREE}"
        return self.text.format(query=query, solution=example.solution)


CHATML = {"end": "<|im_end|>", "eos": "<|endoftext|>", "special": ("<|im_start|>", "<|im_e")}
CHATML["text"] = "<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n{solution}<|im_end|>"
PIECES = {"end": "</s>", "eos": "</s>", "bos": "<s>", "pieces": True}
CASES = {
    "chatml": Case(CHAT_TEMPLATE, **CHATML),
    # its empty thinking before an answer is not learnt
    "qwen3": Case(QWEN3, **CHATML),
    "qwen3 without thinking": Case(
        "{% set enable_thinking = false %}" + QWEN3,
        **CHATML | {"text": CHATML["text"].replace("{sol", "<think>\n\n</think>\n\n{sol")},
        examples=(PLAIN,),
    ),
    "qwen3 thinking": Case(TURNS + "<think>\n{% endif %}", **CHATML, examples=(THOUGHT,)),
    # it writes no thinking of turns that are over, which is learnt all the same
    "r1 distill": Case(
        *(R1, "<|end|>", "<|end|>", "<|begin|><|User|>{query}<|Assistant|>{solution}<|end|>"),
        *((THOUGHT,), "<|begin|>", ("<|User|>", "<|Assistant|>")),
    ),
    "llama 3": Case(
        *(LLAMA3, "<|eot_id|>", "<|end_of_text|>"),
        text="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Today Date: 01 Jan 2026\n\n<|eot_id|>"  # the same on any day
        "<|start_header_id|>user<|end_header_id|>\n\n{query}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{solution}<|eot_id|>",
        bos="<|begin_of_text|>",
        special=("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": Case(
        *(GEMMA, "<end_of_turn>", "<eos>"),
        text="<bos><start_of_turn>user\n{query}<end_of_turn>\n"
        "<start_of_turn>model\n{solution}<end_of_turn>",
        bos="<bos>",
        special=("<start_of_turn>",),
        plain=("<end_of_turn>",),
    ),
    "mistral": Case(MISTRAL, **PIECES, text="<s>[INST] {query} [/INST] {solution}</s>"),
    # the space that it writes before its end of turn is not learnt
    "llama 2": Case(LLAMA2, **PIECES, text="<s>[INST] {query} [/INST] {solution}</s>", legacy=True),
}


def make_tokenizer(case: Case) -> PreTrainedTokenizerFast:
    """A token for each byte, or for each character."""
    if case.pieces:
        letters = ["<unk>", "▁", *map(chr, range(33, 127)), "\n"]
        parts = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        parts = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    unk = {"unk_token": "<unk>"} if case.pieces else {}
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(letters)}, [], **unk))
    tokenizer.pre_tokenizer, tokenizer.decoder = parts
    if case.legacy:
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([prepend, replace])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.add_tokens([*case.plain])
    if case.bos:  # what a template writes is not written twice
        id = tokenizer.add_special_tokens([case.bos]) and tokenizer.token_to_id(case.bos)
        twice = {"single": f"{case.bos} $A", "special_tokens": [(case.bos, id)]}
        tokenizer.post_processor = processors.TemplateProcessing(**twice)
    own = {"bos_token": case.bos, "eos_token": case.eos, "chat_template": case.template, **unk}
    own["extra_special_tokens"] = list({*case.special, case.end} - {case.eos, *case.plain})
    own["clean_up_tokenization_spaces"] = False
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)
