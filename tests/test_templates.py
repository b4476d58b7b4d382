"""Chat templates: what is trained is what the template writes, or one line says why not."""

import contextlib
import json
import re
import shutil
from dataclasses import replace

import models
from conftest import edit_json
from data import Example, InputError
from models import load_config
from templates import CASES, CHAT_TEMPLATE, CHATML, PLAIN, THOUGHT, Case, make_tokenizer

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture
def load(tmp_path):
    """Saves a tokenizer as a model's folder, and loads it as a run does."""

    def load(case: Case) -> PreTrainedTokenizerFast:
        make_tokenizer(case).save_pretrained(tmp_path)
        return models.load_tokenizer(str(tmp_path))

    return load


def tokenize(tokenizer, *examples: Example) -> list:
    return models.tokenize_examples(examples, tokenizer, 1000, 100)[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prompt_solution_and_end_of_turn_are_what_the_template_writes(case, load):
    tokenizer = load(case)
    for example in case.examples:
        [row] = tokenize(tokenizer, example)
        ids = tokenizer(case.row(example), add_special_tokens=False).input_ids
        assert [*row.prompt_ids, *row.response_ids] == ids, tokenizer.convert_ids_to_tokens(ids)
        solution = tokenizer.decode(row.response_ids[:-1]).strip()
        opened = "<think>\n" if tokenizer.decode(row.prompt_ids).endswith("<think>\n") else ""
        assert opened + solution == example.solution
        stops = models.stop_token_ids(tokenizer)
        assert tokenizer.convert_ids_to_tokens(stops) == list(dict.fromkeys([case.end, case.eos]))
        assert [id in stops for id in row.response_ids].index(True) == len(row.response_ids) - 1
        with pytest.raises(InputError, match=re.escape(f"'{case.end}'")):
            tokenize(tokenizer, replace(example, solution=f"1{case.end}2"))


@pytest.mark.parametrize("label", ["LlamaTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("name", ["chatml", "llama 3", "mistral", "llama 2"])
def test_base_and_final_are_read_as_tokenizer_json_says_under_any_class(name, label, tmp_path):
    folders = tmp_path / "base", tmp_path / "final"
    make_tokenizer(CASES[name]).save_pretrained(folders[0])
    edit_json(folders[0] / "tokenizer_config.json", tokenizer_class=label, legacy=True)
    (folders[0] / "config.json").write_text('{"model_type": "llama"}')
    models.load_tokenizer(str(folders[0])).save_pretrained(folders[1])
    shutil.copy(folders[0] / "config.json", folders[1])
    example = Example("1", "We add 10.", "  It is\n\n\\boxed{2}.", "2", "s", where="rows.jsonl:1")
    base, final = (models.load_tokenizer(str(folder)) for folder in folders)
    [row], [again] = tokenize(base, example), tokenize(final, example)
    ids = [*row.prompt_ids, *row.response_ids]
    assert ids == [*again.prompt_ids, *again.response_ids]
    turns = models.messages(example.question, models.ASK_FREE)
    turns.append({"role": "assistant", "content": example.solution.strip()})
    whole = models.render(base, turns).rstrip().removesuffix(CASES[name].end).rstrip()
    for tokenizer in (
        Tokenizer.from_file(str(folders[0] / "tokenizer.json")).encode,
        AutoTokenizer.from_pretrained(folders[1]),  # as `vllm serve` reads it
    ):
        encoded = tokenizer(whole, add_special_tokens=False)
        assert (getattr(encoded, "ids", None) or encoded["input_ids"]) == ids[:-1]


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(InputError, match=r"there is no tokenizer\.json$"):
        models.load_tokenizer(str(tmp_path))


def test_what_is_graded_is_what_was_sampled_where_the_config_asks_to_clean_up_spaces(tmp_path):
    make_tokenizer(CASES["mistral"]).save_pretrained(tmp_path)
    asked = {"clean_up_tokenization_spaces": True}
    asked["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    edit_json(tmp_path / "tokenizer_config.json", **asked)
    tokenizer = models.load_tokenizer(str(tmp_path))
    ids = tokenizer("f (x) , 5 .", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "f (x) , 5 ."


def test_a_token_over_the_end_of_the_prompt_is_not_learnt(load, tmp_path):
    load(CASES["chatml"])
    path = tmp_path / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["model"]["vocab"]["ĊI"] = 999  # a line break and I
    saved["model"]["merges"] = [["Ċ", "I"]]
    saved["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(saved))
    tokenizer = models.load_tokenizer(str(tmp_path))
    assert 999 in tokenizer("\nIt").input_ids
    [row] = tokenize(tokenizer, PLAIN)
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n")
    assert tokenizer.decode(row.response_ids) == f"{PLAIN.solution}<|im_end|>"


@pytest.mark.parametrize("name", CASES)
def test_a_system_prompt_is_in_the_prompt_once_or_refused(name, load, monkeypatch):
    monkeypatch.setattr(models, "SYSTEM_PROMPT", "Be brief.")
    said = {"gemma": "No system role", "mistral": "take turns"}.get(name)
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        assert models.prompt_text(load(CASES[name]), "1+1", "").count("Be brief.") == 1


@pytest.mark.parametrize(
    ("name", "example", "said"),
    [
        ("qwen3 thinking", PLAIN, r"^rows\.jsonl:1: "),  # the prompt opens what this lacks
        ("r1 distill", PLAIN, r"^rows\.jsonl:1: "),
        ("qwen3 without thinking", THOUGHT, "the solution begins with <think>"),
    ],
)
def test_a_solution_that_does_not_go_on_as_the_prompt_begins_is_refused(name, example, said, load):
    with pytest.raises(InputError, match=said):
        tokenize(load(CASES[name]), example)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|im_end|>",  # drops the assistant's turn
        CHAT_TEMPLATE.replace("['content']", "['content'].upper()"),
        CHAT_TEMPLATE.replace("<|im_end|>", "END<|im_end|>"),  # a model would not stop at END
        CHAT_TEMPLATE.partition("{% if add_gen")[0],  # does not begin the assistant's turn
        CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>' }}"),
        "{{ raise_exception('A system turn\nis missing') }}" + CHAT_TEMPLATE,
    ],
)
def test_a_template_that_cannot_be_trained_is_refused_in_one_line(template, load):
    with pytest.raises(InputError, match="the chat template") as error:
        load(Case(template, **CHATML))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_loses_a_space_is_refused(tmp_path):
    tokenizer = make_tokenizer(CASES["chatml"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("by step", "bystep")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="changes text"):
        models.load_tokenizer(str(tmp_path))


def test_code_in_a_models_folder_is_never_run(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import Qwen2Config as C\n"
    (tmp_path / "own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        models.load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="trust_remote_code"):
        load_config(str(tmp_path), 128)
    assert not (tmp_path / "ran").exists()
