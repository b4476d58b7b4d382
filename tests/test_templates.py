"""Chat templates: what is trained is what the template writes, or one line says why not.

The templates are ours; each writes the format that its name says.
"""

import json
import re
import shutil
from dataclasses import dataclass

import data
from conftest import SHARED, needs_shared
from data import Example, InputError
from demo.tiny import COMMITTED
from engine import load_config

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
    template: str | dict[str, str]
    end: str  # of turn
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()  # more of them
    pieces: bool = False  # like SentencePiece: a space before the first word; else bytes
    legacy: bool = False  # and after each special token, as in Llama 2


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
    "gemma": Case(GEMMA, "<end_of_turn>", "<eos>", "<bos>", ("<start_of_turn>",)),
    "mistral": Case(MISTRAL, "</s>", "</s>", "<s>", pieces=True),
    "zephyr": Case(ZEPHYR, "</s>", "</s>", "<s>", pieces=True),
    "llama 2": Case(LLAMA2, "</s>", "</s>", "<s>", pieces=True, legacy=True),
}
OPENS_THINKING, CLOSES_THINKING = ("qwen3 thinking", "r1 distill"), "qwen3 without thinking"
PLAIN = Example("1", "What is 1 + 1?", "It is \\boxed{2}.", "2", "s", where="rows.jsonl:1")
THOUGHT = Example("2", "And 1 + 2?", "<think>\nTwo, 3.\n</think>\n\n\\boxed{3}", "3", "s")


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
        make_tokenizer(case).save_pretrained(tmp_path)
        return data.load_tokenizer(str(tmp_path))

    return load


def tokenize(tokenizer, *examples: Example) -> list:
    return data.tokenize_examples(examples, tokenizer, 1000, 100)[0]


@pytest.mark.parametrize("name", CASES)
def test_prompt_solution_and_end_of_turn_are_what_the_template_writes(name, load):
    case, tokenizer = CASES[name], load(CASES[name])
    for example in [PLAIN] * (name not in OPENS_THINKING) + [THOUGHT] * (name != CLOSES_THINKING):
        [row] = tokenize(tokenizer, example)
        user = {"role": "user", "content": f"{example.question}\n{data.ASK_FREE}"}
        turns = [user, {"role": "assistant", "content": example.solution}]
        whole = data.render(tokenizer, turns)
        if name == "r1 distill":  # it writes no thinking of turns that are over
            thought = THOUGHT.solution.partition("\n\n")[0]
            whole = whole.replace("<|Assistant|>", f"<|Assistant|>{thought}")
        if name == "qwen3" and example is PLAIN:  # its empty thinking is learnt by nobody
            whole = whole.replace("<think>\n\n</think>\n\n", "")
        if name == "llama 2":  # nor is the space before its end of turn
            whole = whole.replace(f" {case.end}", case.end)
        whole = whole[: whole.rindex(case.end)] + case.end  # less what follows it
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        assert [*row.prompt_ids, *row.response_ids] == ids, tokenizer.convert_ids_to_tokens(ids)
        # ---- sampling begins with one BOS, and stops where the turn ends
        assert [*row.prompt_ids].count(tokenizer.bos_token_id) == ("bos_token" in case.template)
        stops = data.stop_token_ids(tokenizer)
        assert tokenizer.convert_ids_to_tokens(stops) == list(dict.fromkeys([case.end, case.eos]))
        assert [id in stops for id in row.response_ids].index(True) == len(row.response_ids) - 1


@pytest.mark.parametrize("label", ["LlamaTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("name", ["chatml", "llama 3", "zephyr", "llama 2"])
def test_base_and_final_are_read_as_tokenizer_json_says_whatever_class_the_config_names(
    name, label, tmp_path
):
    folders = tmp_path / "base", tmp_path / "final"
    make_tokenizer(CASES[name]).save_pretrained(folders[0])
    path = folders[0] / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": label, "legacy": True}
    path.write_text(json.dumps(config))
    (folders[0] / "config.json").write_text('{"model_type": "llama"}')
    data.load_tokenizer(str(folders[0])).save_pretrained(folders[1])
    shutil.copy(folders[0] / "config.json", folders[1])
    example = Example("1", "We add 10.", "  It is\n\n\\boxed{2}.", "2", "s", where="rows.jsonl:1")
    base, final = (data.load_tokenizer(str(folder)) for folder in folders)
    [row], [again] = tokenize(base, example), tokenize(final, example)
    ids = [*row.prompt_ids, *row.response_ids]
    assert ids == [*again.prompt_ids, *again.response_ids]
    turns = data.messages(example.question, data.ASK_FREE)
    turns.append({"role": "assistant", "content": example.solution.strip()})
    whole = data.render(base, turns).rstrip().removesuffix(CASES[name].end).rstrip()
    for tokenizer in (
        Tokenizer.from_file(str(folders[0] / "tokenizer.json")).encode,
        AutoTokenizer.from_pretrained(folders[1]),  # as `vllm serve` reads it
    ):
        options = {"add_special_tokens": False}
        encoded = tokenizer(whole, **options)
        assert (getattr(encoded, "ids", None) or encoded["input_ids"]) == ids[:-1]


def test_a_folder_without_tokenizer_json_is_refused_and_a_model_in_it_is_named(tmp_path):
    (tmp_path / "final").mkdir()
    for file, said in (("tekken.json", "json$"), ("tokenizer.json", r"final\?$")):
        (tmp_path / "final" / file).write_text("{}")
        with pytest.raises(InputError, match=said):
            data.load_tokenizer(str(tmp_path))


def test_what_is_graded_is_what_was_sampled_where_the_config_asks_to_clean_up_spaces(tmp_path):
    make_tokenizer(CASES["zephyr"]).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "clean_up_tokenization_spaces": True}
    config["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    path.write_text(json.dumps(config))
    tokenizer = data.load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer("f (x) , 5 .").input_ids) == "f (x) , 5 ."


def test_a_token_over_the_end_of_the_prompt_is_not_learnt(load, tmp_path):
    load(CASES["chatml"])
    path = tmp_path / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["model"]["vocab"]["ĊI"] = 999  # a line break and I
    saved["model"]["merges"] = [["Ċ", "I"]]
    saved["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(saved))
    tokenizer = data.load_tokenizer(str(tmp_path))
    assert 999 in tokenizer("\nIt").input_ids
    [row] = tokenize(tokenizer, PLAIN)
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n")
    assert tokenizer.decode(row.response_ids) == f"{PLAIN.solution}<|im_end|>"


DROPS = "{% set messages = messages if messages[0].role == 'user' else messages[1:] %}"


@pytest.mark.parametrize("name", [*CASES, "drops it"])
def test_a_system_prompt_is_in_the_prompt_once_or_refused(name, load, monkeypatch):
    monkeypatch.setattr(data, "SYSTEM_PROMPT", "Be brief.")
    case = CASES.get(name) or Case(DROPS + CHAT_TEMPLATE, **CHATML_TOKENS)
    if name in ("gemma", "mistral", "drops it"):
        with pytest.raises(InputError, match=r"No system role|take turns|template drops"):
            load(case)
    else:
        assert data.prompt_text(load(case), "1+1", "").count("Be brief.") == 1


def test_a_template_that_asks_for_todays_date_gives_the_same_prompt_on_any_day(load):
    assert "Today Date: 01 Jan 2026\n" in data.prompt_text(load(CASES["llama 3"]), "1+1", "")


@pytest.mark.parametrize("name", OPENS_THINKING)
def test_thinking_that_the_prompt_opens_is_not_opened_again(name, load):
    tokenizer = load(CASES[name])
    [row] = tokenize(tokenizer, THOUGHT)
    assert tokenizer.decode(row.prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(row.response_ids[:-1]) == THOUGHT.solution.removeprefix("<think>\n")
    with pytest.raises(InputError, match=r"^rows\.jsonl:1: "):
        tokenize(tokenizer, PLAIN)


def test_thinking_that_the_prompt_has_closed_is_refused(load):
    tokenizer = load(CASES[CLOSES_THINKING])
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
        ids = [*row.prompt_ids, *row.response_ids]
        assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 1
        assert ids.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    assert tokenizer.decode(data.stop_token_ids(tokenizer)) == "<|im_end|><|endoftext|>"
    data.refuse_special_tokens(tokenizer, [("", "<think>\n</think> <tool_call> |im_end|>")])
    for token in ("<|im_start|>", "<|endoftext|>", "<|vision_pad|>"):
        with pytest.raises(InputError, match=re.escape(token)):
            data.refuse_special_tokens(tokenizer, [("a text", f"a{token}b")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|im_end|>",  # drops the assistant's turn
        CHAT_TEMPLATE.replace("['content']", "['content'].upper()"),
        CHAT_TEMPLATE.replace("<|im_end|>", "END"),  # is no special token
        CHAT_TEMPLATE.partition("{% if add_gen")[0],  # does not begin the assistant's turn
        CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>' }}"),
        "{{ raise_exception('A system turn\nis missing') }}" + CHAT_TEMPLATE,
    ],
)
def test_a_template_that_cannot_be_trained_is_refused_in_one_line(template, load):
    with pytest.raises(InputError, match="the chat template") as error:
        load(Case(template, **CHATML_TOKENS))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("named", ["changes text", "special tokens as text", "is random"])
def test_a_tokenizer_that_loses_a_space_splits_special_tokens_or_draws_is_refused(named, tmp_path):
    tokenizer = make_tokenizer(CASES["chatml"])
    if named == "changes text":
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("by step", "bystep")
    if named == "is random":
        tokenizer.backend_tokenizer.model.dropout = 0.1
    tokenizer.save_pretrained(tmp_path)
    if named == "special tokens as text":
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    with pytest.raises(InputError, match=named):
        data.load_tokenizer(str(tmp_path))


def test_code_in_a_models_folder_is_never_run(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import Qwen2Config as C\n"
    (tmp_path / "own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        data.load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="trust_remote_code"):
        load_config(str(tmp_path), 128)
    assert not (tmp_path / "ran").exists()
