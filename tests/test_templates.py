"""Chat templates: what is trained is what the template writes, or one line says why not.

The templates are ours; each writes the format that its name says.
"""

import json
import re
from dataclasses import dataclass
from datetime import date

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import evaluate
import prompts
from conftest import SHARED, needs_shared
from data import Example, InputError
from demo.tiny import CHAT_TEMPLATE, make_config
from prompts import Prompt
from run import claim_output_dir, load_training_data
from train_sft import Args

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

    def load(case: Case, prompt: Prompt = prompts.PAPER_PROMPT) -> PreTrainedTokenizerFast:
        tokenizer = make_tokenizer(case)
        tokenizer.save_pretrained(tmp_path / "model")
        make_config(tokenizer, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
        return prompts.load_tokenizer(str(tmp_path / "model"), prompt)

    return load


def tokenize(tokenizer, *examples: Example, prompt: Prompt = prompts.PAPER_PROMPT) -> list:
    return prompts.tokenize_examples(examples, tokenizer, 1000, 100, prompt)[0]


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
    user = {"role": "user", "content": f"{example.question}\n{prompts.ASK_FREE}"}
    turns = [user, {"role": "assistant", "content": example.solution}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    ours = tokenizer.decode(row.prompt_ids + row.completion_ids)
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
    assert row.prompt_ids.count(tokenizer.bos_token_id) == (1 if has_bos else 0)
    stops = prompts.stop_token_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(stops) == list(dict.fromkeys([case.end, case.eos]))
    assert [id in stops for id in row.completion_ids].index(True) == len(row.completion_ids) - 1


@pytest.mark.parametrize("name", CASES)
def test_a_system_prompt_and_a_suffix_are_in_the_prompt_once_or_refused(name, load):
    prompt = Prompt(system_prompt="Be brief.", prompt_suffix="Answer:")
    if not CASES[name].system:
        with pytest.raises(InputError, match="model: the chat template fails: "):
            load(CASES[name], prompt)
        return
    tokenizer = load(CASES[name], prompt)
    texts = [
        prompts.Prompt(prompt_suffix=suffix).text(tokenizer, "1+1", "ask") for suffix in ("", None)
    ]
    assert "1+1" in texts[0] and texts[0].replace("1+1", "1+1\nask") == texts[1]
    text = prompt.text(tokenizer, "1+1", "ask")
    assert text.count("Be brief.") == 1 and "1+1\nAnswer:" in text and "ask" not in text


# ---- thinking


@pytest.mark.parametrize("name", OPENS_THINKING)
def test_thinking_that_the_prompt_opens_is_not_opened_again(name, load):
    tokenizer = load(CASES[name])
    [row] = tokenize(tokenizer, THOUGHT)
    assert tokenizer.decode(row.prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(row.completion_ids[:-1]) == THOUGHT.solution.removeprefix("<think>\n")
    with pytest.raises(InputError, match=r"^rows\.jsonl:1: .* and the solution does not close it$"):
        tokenize(tokenizer, PLAIN)


def test_thinking_that_the_prompt_has_closed_is_refused(load):
    tokenizer = load(CASES["qwen3 without thinking"])
    [row] = tokenize(tokenizer, PLAIN)
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(InputError, match="the solution begins with <think>, which the chat templ"):
        tokenize(tokenizer, PLAIN, THOUGHT)


@needs_shared
def test_the_real_qwen_vocabulary_takes_thinking_in_a_row_and_no_special_token():
    tokenizer = prompts.load_tokenizer(str(SHARED / "qwen3_tokenizer"))
    for name in ("qwen3", "qwen3 thinking"):
        tokenizer.chat_template = CASES[name].template
        [row] = tokenize(tokenizer, THOUGHT)
        ids = row.prompt_ids + row.completion_ids
        assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 1
        assert ids.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    special = prompts.special_tokens(tokenizer)
    assert not special.search("<think>\n</think> <tool_call> |im_end|>")
    for token in ("<|im_start|>", "<|endoftext|>", "<|vision_pad|>"):
        assert special.search(f"a{token}b")[0] == token


# ---- the date


def test_a_run_that_is_resumed_on_another_day_reads_the_prompts_of_its_first(
    one_rank, load, write, tmp_path
):
    load(CASES["llama 3"])
    rows = [{**PLAIN.columns, "id": str(n)} for n in range(4)]
    values = {"model": str(tmp_path / "model"), "data": write(*rows), "max_steps": 1}
    args = Args(**values, output_dir=str(tmp_path / "run"))

    def read(args: Args) -> str:
        tokenizer, examples = load_training_data(args, batch_size=2)
        return tokenizer.decode(examples[0].prompt_ids)

    assert claim_output_dir(args) is None and args.date == date.today().isoformat()
    assert f"Today Date: {date.today():%d %b %Y}\n" in read(args)

    checkpoint = tmp_path / "run" / "checkpoint-000001"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state" / "00000.safetensors").touch()
    begun = {**vars(args), "date": "2024-02-29", "world_size": 1}
    (tmp_path / "run" / "args.json").write_text(json.dumps({"args": begun}))
    resumed = Args(**values, output_dir=str(tmp_path / "run"), resume=True)
    assert claim_output_dir(resumed) == checkpoint and resumed.date == "2024-02-29"
    assert "Today Date: 29 Feb 2024\n" in read(resumed)
    other = Args(**values, output_dir=str(tmp_path / "run"), resume=True, date="2024-03-01")
    with pytest.raises(InputError, match="arguments: date '2024-02-29' -> '2024-03-01'"):
        claim_output_dir(other)


def test_a_date_that_is_none_is_refused():
    with pytest.raises(InputError, match="--date is written as 2026-01-31, got tomorrow"):
        Prompt(date="tomorrow")


# ---- evaluation of a run


def asked(tmp_path, **values) -> tuple[str, dict]:
    """The first prompt of an evaluation, and its protocol."""
    problems = tmp_path / "own.jsonl"
    problems.write_text('{"question": "2 + 2?", "answer": 4}\n')
    values = {"model": str(tmp_path / "run" / "final"), "max_completion_length": 9} | values
    args = evaluate.Args(**values, benchmark_file=(problems,))
    folder = args.output_dir or evaluate.default_folder(args.model)
    _, [request, *_] = evaluate.find_missing(args, folder)
    protocol = json.loads((folder / "args.json").read_text())["protocol"]
    return prompts.load_tokenizer(args.model).decode(request.prompt_ids), protocol


def test_a_runs_model_is_evaluated_with_the_prompt_of_the_run(load, tmp_path):
    load(CASES["llama 3"])
    (tmp_path / "run").mkdir()
    (tmp_path / "model").rename(tmp_path / "run" / "final")
    begun = {"date": "2024-02-29", "system_prompt": "Be brief.", "prompt_suffix": "Answer:"}
    (tmp_path / "run" / "args.json").write_text(json.dumps({"args": begun}))
    prompt, protocol = asked(tmp_path)
    assert "29 Feb 2024\n\nBe brief.<" in prompt and "2 + 2?\nAnswer:<" in prompt
    assert begun.items() <= protocol.items()
    prompt, protocol = asked(
        tmp_path, output_dir=tmp_path / "other", prompt_suffix="", date="2024-03-01"
    )
    assert "01 Mar 2024\n\nBe brief.<" in prompt and "2 + 2?<" in prompt


def test_an_evaluation_keeps_its_date_and_its_prompt(load, tmp_path):
    load(CASES["llama 3"])
    values = {"model": str(tmp_path / "model"), "output_dir": tmp_path / "eval"}
    prompt, protocol = asked(tmp_path, **values)
    assert prompts.ASK_FREE in prompt and protocol["date"] == date.today().isoformat()
    record = {"protocol": {**protocol, "date": "2024-02-29"}}  # it was begun on another day
    (tmp_path / "eval" / "args.json").write_text(json.dumps(record))
    (tmp_path / "eval" / "samples" / "own.jsonl.rank0").write_text("{half")
    prompt, protocol = asked(tmp_path, **values)
    assert "29 Feb 2024" in prompt and protocol["date"] == "2024-02-29"
    (tmp_path / "eval" / "samples" / "own.jsonl.rank0").write_text("{half")
    with pytest.raises(InputError, match=r"evaluation \(system_prompt None -> 'Be brief.'"):
        asked(tmp_path, **values, system_prompt="Be brief.")


def test_a_template_without_a_date_makes_evaluations_of_all_days_alike(load, tmp_path):
    load(CASES["chatml"])
    _, protocol = asked(tmp_path, model=str(tmp_path / "model"), output_dir=tmp_path / "eval")
    assert protocol["date"] is None


def test_a_problem_with_a_special_token_is_refused(load, tmp_path):
    load(CASES["chatml"])
    problems = tmp_path / "own.jsonl"
    problems.write_text('{"question": "<|im_end|>", "answer": 4}\n')
    args = evaluate.Args(model=str(tmp_path / "model"), benchmark_file=(problems,))
    with pytest.raises(InputError, match=r"own: 'row-0' holds the special token '<\|im_end\|>'"):
        evaluate.find_missing(args, tmp_path / "eval")


# ---- what is refused


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Not today\nor tomorrow') }}", "fails: Not today"),
        ("{{ messages[0].content + 1 }}", "fails: can only concatenate str"),
        ("{% for m in messages %}", "fails: Unexpected end of template"),
        ("{{ messages[0].content }}<|im_end|>", "drops the assistant's turn"),
        (CHAT_TEMPLATE.replace("['content']", "['content'].upper()"), "drops the assistant's turn"),
        (
            CHAT_TEMPLATE.replace(
                "['content']", "['content'][:9 if message['role'] == 'user' else None]"
            ),
            "drops the question",
        ),
        (CHAT_TEMPLATE.replace("<|im_end|>", "END"), "does not close the assistant's turn with a"),
        (CHAT_TEMPLATE.partition("{% if add_gen")[0], "does not end the prompt where it begins"),
        (
            CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>' }}"),
            "does not end the prompt where it begins the assistant's turn",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_is_refused_in_one_line(template, message, load):
    with pytest.raises(
        InputError, match=f"/model: the chat template {re.escape(message)}"
    ) as error:
        load(Case(template, **CHATML_TOKENS))
    assert "\n" not in str(error.value)


def test_a_template_that_drops_the_system_prompt_is_refused(load):
    template = (
        "{% set messages = messages[-2:] if messages[-1].role == 'assistant' else messages[-1:] %}"
    )
    case = Case(template + CHAT_TEMPLATE, **CHATML_TOKENS)
    load(case)
    with pytest.raises(InputError, match=r"/model: the chat template drops the system prompt$"):
        load(case, Prompt(system_prompt="Be brief."))


def test_a_special_token_in_the_prompts_own_text_is_refused(load):
    for own in (Prompt(system_prompt="a<|im_end|>b"), Prompt(prompt_suffix="<|im_start|>")):
        with pytest.raises(InputError, match=r"own text holds the special token '<.im_"):
            load(Case(CHAT_TEMPLATE, **CHATML_TOKENS), own)
