"""Chat templates: what is trained is what the template writes, or one line says why not.

The templates are ours; each writes the format that its name says.
"""

import json
import re
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

import data
from conftest import SHARED, needs_shared
from data import Example, InputError
from demo.tiny import CHAT_TEMPLATE, make_config
from engine import load_config

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
    "{% set date_string = date_string if date_string is defined else strftime_now('%d %b %Y') %}"
    "{% set own = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ date_string }}\n\n{{ own }}<|eot_id|>"
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
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% set system = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' "
    "if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ system }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass
class Case:
    template: str
    end: str  # of turn
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()  # more of them
    pieces: bool = False  # like SentencePiece: a space before the first word; else bytes
    system: bool = True  # the template takes a system prompt


CHATML_TOKENS = {"end": "<|im_end|>", "eos": "<|endoftext|>", "special": ("<|im_start|>",)}
CASES = {
    "chatml": Case(CHAT_TEMPLATE, **CHATML_TOKENS),
    "qwen3": Case(QWEN3, **CHATML_TOKENS),
    "qwen3 without thinking": Case("{% set enable_thinking = false %}" + QWEN3, **CHATML_TOKENS),
    "qwen3 thinking": Case(TURNS + "<think>\n{% endif %}", **CHATML_TOKENS),
    "r1 distill": Case(R1, "<|end|>", "<|end|>", "<|begin|>", ("<|User|>", "<|Assistant|>")),
    "llama 3": Case(
        *(LLAMA3, "<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>"),
        special=("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": Case(
        *(GEMMA, "<end_of_turn>", "<eos>", "<bos>"), special=("<start_of_turn>",), system=False
    ),
    "mistral": Case(MISTRAL, "</s>", "</s>", "<s>", pieces=True, system=False),
    "zephyr": Case(ZEPHYR, "</s>", "</s>", "<s>", pieces=True),
    "llama 2": Case(LLAMA2, "</s>", "</s>", "<s>", pieces=True),
}
OPENS_THINKING = ("qwen3 thinking", "r1 distill")
PLAIN = Example("1", "What is 1 + 1?", "It is \\boxed{2}.", "2", "s", where="rows.jsonl:1")
THOUGHT = Example("2", "And 1 + 2?", "<think>\nTwo, 3.\n</think>\n\n\\boxed{3}", "3", "s")


def make_tokenizer(case: Case) -> PreTrainedTokenizerFast:
    """A token for each byte, or for each character."""
    if case.pieces:
        letters = ["<unk>", "▁", *map(chr, range(33, 127)), "\n"]
        pieces = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    unk = {"unk_token": "<unk>"} if case.pieces else {}
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **unk))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces
    tokenizer.add_tokens(["<think>", "</think>"])  # as Qwen has them: added, but not special
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=case.bos,
        eos_token=case.eos,
        extra_special_tokens=list({*case.special, case.end} - {case.eos}),
        chat_template=case.template,
        clean_up_tokenization_spaces=False,
        **unk,
    )


@pytest.fixture
def load(tmp_path):
    """Saves a tokenizer as a model's folder, and loads it as a run does."""

    def load(case: Case) -> PreTrainedTokenizerFast:
        tokenizer = make_tokenizer(case)
        tokenizer.save_pretrained(tmp_path / "model")
        make_config(tokenizer, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
        return data.load_tokenizer(str(tmp_path / "model"))

    return load


def tokenize(tokenizer, *examples: Example) -> list:
    return data.tokenize_examples(examples, tokenizer, 1000, 100)[0]


def squeeze(text: str) -> str:
    return re.sub(r"\s", "", text)


# ---- what is trained


@pytest.mark.parametrize(
    ("name", "example"),
    [
        *((name, PLAIN) for name in CASES if name not in OPENS_THINKING),
        *((name, THOUGHT) for name in CASES if name != "qwen3 without thinking"),
    ],
)
def test_prompt_solution_and_end_of_turn_are_what_the_template_writes(name, example, load):
    tokenizer = load(CASES[name])
    [row] = tokenize(tokenizer, example)
    user = {"role": "user", "content": f"{example.question}\n{data.ASK_FREE}"}
    turns = [user, {"role": "assistant", "content": example.solution}]
    whole = data.render(tokenizer, turns)
    ours = tokenizer.decode([*row.prompt_ids, *row.completion_ids])
    if name == "r1 distill":  # it writes no thinking of turns that are over
        ours = re.sub("<think>.*</think>", "", ours, flags=re.DOTALL)
    if name == "qwen3" and example is PLAIN:  # its empty thinking is learnt by nobody
        whole = whole.replace("<think>\n\n</think>\n\n", "")
    assert squeeze(ours) == squeeze(whole)


@pytest.mark.parametrize("name", CASES)
def test_sampling_begins_with_one_bos_and_stops_where_the_turn_ends(name, load):
    case, tokenizer = CASES[name], load(CASES[name])
    [row] = tokenize(tokenizer, THOUGHT if name in OPENS_THINKING else PLAIN)
    has_bos = case.bos and "bos_token" in case.template
    assert [*row.prompt_ids].count(tokenizer.bos_token_id) == (1 if has_bos else 0)
    stops = data.stop_token_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(stops) == list(dict.fromkeys([case.end, case.eos]))
    assert [id in stops for id in row.completion_ids].index(True) == len(row.completion_ids) - 1


@pytest.mark.parametrize("name", CASES)
def test_a_system_prompt_is_in_the_prompt_once_or_refused(name, load, monkeypatch):
    monkeypatch.setattr(data, "SYSTEM_PROMPT", "Be brief.")
    if not CASES[name].system:
        with pytest.raises(Exception, match=r"No system role here|take turns"):
            load(CASES[name])
        return
    text = data.prompt_text(load(CASES[name]), "1+1", data.ASK_FREE)
    assert text.count("Be brief.") == 1 and f"1+1\n{data.ASK_FREE}" in text


# ---- thinking


@pytest.mark.parametrize("name", OPENS_THINKING)
def test_thinking_that_the_prompt_opens_is_not_opened_again(name, load):
    tokenizer = load(CASES[name])
    [row] = tokenize(tokenizer, THOUGHT)
    assert tokenizer.decode(row.prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(row.completion_ids[:-1]) == THOUGHT.solution.removeprefix("<think>\n")
    with pytest.raises(InputError, match=r"^rows\.jsonl:1: "):
        tokenize(tokenizer, PLAIN)


def test_thinking_that_the_prompt_has_closed_is_refused(load):
    tokenizer = load(CASES["qwen3 without thinking"])
    [row] = tokenize(tokenizer, PLAIN)
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(InputError, match="the solution begins with <think>"):
        tokenize(tokenizer, PLAIN, THOUGHT)


@needs_shared
def test_the_real_qwen_vocabulary_takes_thinking_in_a_row_and_no_special_token():
    tokenizer = data.load_tokenizer(str(SHARED / "qwen3_tokenizer"))
    for name in ("qwen3", "qwen3 thinking"):
        tokenizer.chat_template = CASES[name].template
        [row] = tokenize(tokenizer, THOUGHT)
        ids = [*row.prompt_ids, *row.completion_ids]
        assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 1
        assert ids.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    data.refuse_special_tokens(tokenizer, [("", "<think>\n</think> <tool_call> |im_end|>")])
    for token in ("<|im_start|>", "<|endoftext|>", "<|vision_pad|>"):
        with pytest.raises(InputError, match=re.escape(token)):
            data.refuse_special_tokens(tokenizer, [("a text", f"a{token}b")])


# ---- the date


def test_a_template_that_asks_for_todays_date_gives_the_same_prompt_on_any_day(load):
    text = data.prompt_text(load(CASES["llama 3"]), "1+1", "")
    assert "Today Date: 01 Jan 2026\n" in text


# ---- what is refused


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|im_end|>",  # drops the assistant's turn
        CHAT_TEMPLATE.replace("['content']", "['content'].upper()"),
        CHAT_TEMPLATE.replace(  # cuts the question
            "['content']", "['content'][:9 if message['role'] == 'user' else None]"
        ),
        CHAT_TEMPLATE.replace("<|im_end|>", "END"),  # is no special token
        CHAT_TEMPLATE.partition("{% if add_gen")[0],
        CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>' }}"),
    ],
)
def test_a_template_that_cannot_be_trained_is_refused_in_one_line(template, load):
    with pytest.raises(InputError, match="the chat template") as error:
        load(Case(template, **CHATML_TOKENS))
    assert "\n" not in str(error.value)


def test_a_template_that_drops_the_system_prompt_is_refused(load, monkeypatch):
    template = (
        "{% set messages = messages[-2:] if messages[-1].role == 'assistant' else messages[-1:] %}"
    )
    case = Case(template + CHAT_TEMPLATE, **CHATML_TOKENS)
    load(case)
    monkeypatch.setattr(data, "SYSTEM_PROMPT", "Be brief.")
    with pytest.raises(InputError, match="the chat template drops"):
        load(case)


def test_a_tokenizer_that_is_loaded_as_another_class_and_loses_text_is_refused(tmp_path):
    letters = sorted({*data.ASK_FREE, *"\nuserasistant"})
    tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate(letters)}, letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CASES["qwen3"].template,
    )
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]  # then the config's model decides
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(data.InputError, match="loses text"):
        data.load_tokenizer(str(tmp_path))


def test_code_in_a_models_folder_is_never_run(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import Qwen2Config as C\n"
    (tmp_path / "own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(data.InputError, match="no model that can be loaded"):
        data.load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_config(str(tmp_path), 128)
    assert not (tmp_path / "ran").exists()
