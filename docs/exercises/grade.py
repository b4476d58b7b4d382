"""Grade the exercises of this folder: what is passed, what is still missing, and why.

make exercises              # all of them
make exercises ONLY=3       # one, the same as: python docs/exercises/grade.py 3

A solution ends with the hints that are shown: each stands below what it is for, a typical mistake
(what the solution has -> what is written instead) or the name of an answer.
"""

import copy
import itertools
import math
import runpy
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from numbers import Number
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import cpu  # noqa: F401 (before torch)

    import torch
    from torch.nn.utils.rnn import pad_sequence
except ModuleNotFoundError as error:
    sys.exit(f"{error}: type `. .venv/bin/activate` first, or `make exercises`")

FOLDER = Path(__file__).resolve().parent
SOLUTIONS = FOLDER / "solutions"


def execute(code: str) -> dict:
    names: dict = {}
    exec(code, names)
    return names


def solve(name: str) -> tuple[dict, list[tuple[dict, str]], dict[str, str]]:
    """The solution of an exercise, wrong ones with their hints, and the hints of its answers."""
    code, _, table = (SOLUTIONS / f"{name}.py").read_text().partition("\nHINTS = ")
    mistakes, answers, hint = [], {}, ""
    for line in reversed(table.strip('"\n').splitlines()):
        right, arrow, wrong = line.partition(" -> ")
        if line.startswith(" "):
            hint = line.strip()
        elif arrow:
            assert right in code, f"{name} has no {right}"
            mistakes.insert(0, (execute(code.replace(right, wrong)), hint))
        else:
            answers[line] = hint
    return execute(code), mistakes, answers


def shown(value) -> str:
    if isinstance(value, torch.Tensor):
        value = (value.int() if value.dtype == torch.bool else value).tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else getattr(value, "__name__", repr(value))


def same(a, b) -> bool:
    """Whether numbers, lists or tensors of any type are equal, but for rounding."""
    try:
        a, b = (torch.as_tensor(value, dtype=torch.double) for value in (a, b))
    except (TypeError, ValueError, RuntimeError):
        return a is b or (isinstance(a, Exception) and type(a) is type(b))  # or None, a function
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-3, equal_nan=True)


def attempt(function: Callable, given: tuple):
    try:
        return function(*copy.deepcopy(given))
    except Exception as error:
        return error


def fault(value, right) -> str:
    """What is wrong with a value; empty if nothing is."""
    if isinstance(right, torch.Tensor) and value is not None:
        if not isinstance(value, torch.Tensor):
            return f"gives a {type(value).__name__}, but its caller goes on with a tensor"
        if value.shape != right.shape:
            needed = f"the shape {tuple(right.shape)}" if right.shape else "one number"
            return f"must return {needed}, yours has the shape {tuple(value.shape)}"
        kinds = [torch.zeros((), dtype=each.dtype).item() for each in (value, right)]  # 0.0, False
        if type(kinds[0]) is not type(kinds[1]):
            return f"gives {value.dtype}: see its docstring for what it must return"
    if same(value, right) and not isinstance(value, bool):
        return ""
    why = " (nan: what is divided by 0?)" if "nan" in shown(value) else ""
    why = " (is a `return` missing?)" if value is None and type(right) is not int else why
    return f"gives {shown(value)}{why}, but {shown(right)} is right"


def check(exercise: SimpleNamespace, name: str, cases: Sequence[tuple], note: str = "") -> None:
    """Compare what the student's function returns with what the solution's does.

    If a value is wrong, the hint of the mistake is shown that gives the same values in all cases.
    Is there none, the first wrong value is shown, and the note if values before it were right.
    """
    solution, mistakes, _ = solve(Path(exercise.__file__).stem)
    function, failure = vars(exercise).get(name), ""
    assert callable(function), f"`{name}` is missing: the exercise began with its `def`"
    for number, given in enumerate(cases):
        kept = copy.deepcopy(given)
        right = attempt(solution[name], kept)
        value = attempt(function, given) if failure else function(*given)
        unchanged = all(a is b or same(a, b) for a, b in zip(given, kept, strict=True))
        assert unchanged, f"`{name}` changes its input, which its caller still needs: copy it"
        mistakes = [each for each in mistakes if same(value, attempt(each[0][name], kept))]
        if not failure and (failure := fault(value, right)):
            inputs = textwrap.shorten(", ".join(map(shown, kept)), 200, placeholder=" ...")
            failure += f". The input: {inputs}" + f". {note}" * (number > 0)
    assert not failure, f"`{name}` {mistakes[0][1] if mistakes else failure}"


def passes_gradient(function: Callable, given: torch.Tensor, *others: torch.Tensor) -> bool:
    with warnings.catch_warnings(action="ignore"):
        value = attempt(function, (given.clone().requires_grad_(), *others))
    return getattr(value, "requires_grad", False)  # NumPy refuses a tensor that needs a gradient


STOPPED = "stopped by Ctrl-C. Is there a loop that never ends?"
ASKED = {str: "a letter in quotes", bool: "True or False", list: "a list"}


def check_answers(exercise: SimpleNamespace) -> None:
    solution, _, hints = solve(Path(exercise.__file__).stem)
    for name in [name for name in solution if name in hints]:
        value, right, hint = getattr(exercise, name, ...), solution[name], hints[name]
        if value is ...:
            raise NotImplementedError(f"fill in {name}")
        value = value.tolist() if hasattr(value, "tolist") else value  # a tensor's, or NumPy's
        value = list(value) if isinstance(value, tuple) else value
        value = value.strip().upper() if isinstance(value, str) else value
        kind = type(right) if type(right) in ASKED else Number
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        assert fits, f"{name} is {value!r}: write {ASKED.get(kind, 'a number')}"
        if kind is Number:
            rounded = [round(right, digits) or right for digits in range(2, 17)]
            good = any(math.isclose(value, it, rel_tol=1e-6, abs_tol=1e-9) for it in rounded)
            if abs(value - right) <= 0.02 * right:
                hint += " (yours is near: is it rounded badly, or did you stop too early?)"
        else:
            good = value == right or same(value, right)
        assert good, f"{name} is not {value!r}: {hint}"


# ---- For each file a function of its name, which returns what there is to see --------------------


def ex1_weights(exercise: SimpleNamespace) -> str:
    first = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [0, 1, 0]])
    cases = [first, first[2:, :2].bool(), first[:, 1:2].long(), torch.tensor([[1] * 7 + [0]])]
    note = "Other rewards go well: is a size or a type of theirs written into the code?"
    check(exercise, "oswft_weights", [(rewards,) for rewards in cases], note)
    flows = passes_gradient(exercise.oswft_weights, first)
    assert not flows, "a gradient flows through your weights. `detach` makes constants"
    return "With K = 2 the weights are 0, 0.5 or 1. (In the paper: Algorithm 1, line 7.)"


def ex2_divisor(exercise: SimpleNamespace) -> str:
    cases, rng = [], torch.Generator().manual_seed(0)
    for b, t in ((3, 4), (2, 5), (1, 3), (4, 4)):
        logprobs = -torch.randint(8, (b, t), generator=rng).float()  # 0, too: p may be 1
        mask = (torch.rand(b, t, generator=rng) < 0.5).float().index_fill(1, torch.tensor(1), 1)
        cases.append((logprobs, mask, torch.tensor([0.5, 0, 1, 0.25])[:b]))
    mastered = (*cases[0][:2], torch.zeros(3))  # by weights it is 0 / 0
    note = "Other batches go well: is a size or a value of theirs written into the code?"
    check(exercise, "loss_by_tokens", [*cases, mastered], note)
    check(exercise, "loss_by_weights", cases, note)
    for name in ("loss_by_tokens", "loss_by_weights"):
        flows = passes_gradient(vars(exercise)[name], *cases[0])
        assert flows, f"`{name}` loses the gradient: keep to torch's operations on logprobs"
    return "A tenth of the weights: a tenth of the gradient, or all of it."


def ex3_hard(exercise: SimpleNamespace) -> str:
    cases = [(exercise.hard, 0.9, 4), (exercise.oswft, 0.6, 2), (exercise.hard, 0.7, 1)]
    cases += [(sum, 0.3, 3), (any, 0.8, 5), (max, 0.01, 6), (exercise.hard, 1.0, 2), (all, 0.0, 3)]
    note = "Other cases are right: add up over all outcomes, whatever `value`, p and k are"
    twice = [attempt(exercise.expectation, cases[0]) for _ in range(2)]
    drawn = twice[0] != twice[1] and all(isinstance(each, Number) for each in twice)
    assert not drawn, "`expectation` gives another number at each call: list the outcomes"
    check(exercise, "expectation", cases, note)
    return "OSW-FT's mean is 0.10 for every K; hard's goes 0.10 0.19 0.34 0.57 for K = 1 2 4 8."


def ex4_stale(exercise: SimpleNamespace) -> str:
    pairs = [(8, 4), (5, 4), *itertools.product(range(15, -1, -1), (1, 2, 3, 4, 5, 12))]
    old, p = torch.tensor([0.9, 0.4, 0.5]), torch.tensor([0.3, 0.8, 0.6])
    cases = [(step, s, old if step else None, p) for step, s in pairs]
    note = "Other steps are right: does the condition hold for each s, and all its multiples alone?"
    check(exercise, "weights_in_use", cases, note)
    errors = [round(error, 2) for error in exercise.train(4)]
    return f"Errors with S = 4: {errors}."


def ex5_pad(exercise: SimpleNamespace) -> str:
    tokens = torch.tensor([[7, 5, 6, 2, 2, 2, 2], [7, 8, 2, 5, 6, 8, 2], [7, 2, 5, 2, 2, 2, 2]])
    cases = [(tokens, torch.tensor([1, 3, 2]), torch.tensor([4, 7, 5]))]
    cases += [(torch.tensor([[9, 5, 0, 0]]), torch.tensor([1]), torch.tensor([2]))]
    cases += [(torch.full((4, 9), 2), torch.tensor([4, 1, 8, 2]), torch.tensor([6, 9, 9, 5]))]
    note = "Other rows are right: does it ask for ids? END may stand anywhere"
    check(exercise, "mask_by_position", cases, note)
    by_pad_id = write_after_training(lambda *given: exercise.mask_by_pad_id(*given[:2]))
    by_position = write_after_training(exercise.mask_by_position)
    return f"By pad id it answers {by_pad_id}, by position {by_position}"


def write_after_training(make_mask: Callable) -> str:
    """A tiny model learns four solutions by heart: what it then writes after the first question."""
    from demo.tiny import COMMITTED, make_tokenizer

    from transformers import AutoConfig, Qwen3ForCausalLM  # It takes seconds to import.

    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = {"1+2\n": "1+2=3", "3-1+4\n": "3-1=2;2+4=6", "2*3\n": "2*3=6", "9-2\n": "9-2=7"}
    prompts = [tokenizer(prompt).input_ids for prompt in texts]
    rows = [torch.tensor([*tokenizer(a + b).input_ids, end]) for a, b in texts.items()]
    tokens = pad_sequence(rows, batch_first=True, padding_value=end)  # (4, T)
    prompt_lengths, lengths = (torch.tensor([len(ids) for ids in each]) for each in (prompts, rows))
    learnt = make_mask(tokens, prompt_lengths, lengths)[:, 1:].bool()  # t is predicted from t - 1

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(COMMITTED, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(input_ids=tokens[:, :-1]).logits[learnt]
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learnt]).backward()
        optimizer.step()
        optimizer.zero_grad()
    written = model.generate(torch.tensor(prompts[:1]), max_new_tokens=12, eos_token_id=end)[0]
    return tokenizer.decode(written[len(prompts[0]) :])


def ex6_sync(exercise: SimpleNamespace) -> str:
    pairs = [([[-1.0, -2, -4], [-3, -4, -1]], [[-2.0, -4, -1], [-2.5, -1, -3]])]
    pairs += [([[-0.5], [-3], [-1]], [[-0.25], [-3], [-5]]), ([[-1.0] * 4], [[-1.5] * 4])]
    note = "Other gaps are right: is a size of theirs written into the code?"
    check(exercise, "gap_mean", [tuple(map(torch.tensor, pair)) for pair in pairs], note)
    runs = [[float(gap) for gap in exercise.run(forgotten)] for forgotten in (None, 5, 0)]
    steps = range(len(runs[0]))
    runs += [[runs[0][i] * (6 if i == step else 1) for i in steps] for step in steps]
    others = [[gap * scale for gap in gaps] for gaps in runs for scale in (0.001, 30)]
    others += [runs[0] * 2 + gaps for gaps in runs[1:]]  # 30 steps
    for size, step in ((3, 0), (3, 1), (3, 2), (4, 1)):  # short runs
        others += [[gap * (6 if n == step else 1) for n, gap in enumerate(runs[0][:size])]]
    note = "Other runs are right: only gaps of one run, compared with each other, tell it in all"
    check(exercise, "find_forgotten", [(gaps,) for gaps in runs + others], note)
    return f"Without the sync of step 5: {[round(gap, 4) for gap in runs[1]]}."


def ex7_weighting(exercise: SimpleNamespace) -> str:
    cases = [torch.tensor(list(itertools.product([0.0, 1.0], repeat=k))) for k in (3, 2, 4)]
    cases += [cases[0][1:4].repeat(1, 2), torch.tensor([[1.0, 0, 0, 0, 1, 0, 0, 0, 0]])]
    note = "Other rewards are right: does the factor fit every K, and is B not taken for it?"
    check(exercise, "undecided_weights", [(rewards,) for rewards in cases], note)
    return "Unbiased at K = 2, 3, 4."


def ex8_groups(exercise: SimpleNamespace) -> str:
    rewards = [[[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], [[0.0, 1], [1, 1], [0, 0]]]
    rewards += [
        [[1.0, 0, 0, 0, 1, 0, 0, 0]],
        [[1.0, 1, 1, 1]],
        [[0.0, 0, 1, 0, 0], [1, 1, 1, 0, 1]],
    ]
    note = "Other groups are right: is a size of theirs written into the code?"
    check(exercise, "grpo_advantages", [(torch.tensor(each),) for each in rewards], note)
    pairs = [(0.7, 3), (0.5, 4), (0.9, 2), (0.2, 6), (0.0, 5), (1.0, 2)]
    check(exercise, "no_signal", pairs, "Others are right: is a p or a g written into the code?")
    return "Hard questions teach OSW-FT through the expert, and GRPO only where it is lucky."


GRADERS = (ex1_weights, ex2_divisor, ex3_hard, ex4_stale)
GRADERS += (ex5_pad, ex6_sync, ex7_weighting, ex8_groups)


def explain(error: BaseException, path: Path) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, NotImplementedError) and str(error).startswith(("write `", "fill in ")):
        return f"not done yet: {error}"
    if isinstance(error, AssertionError) and not frames:  # else it is the student's own
        return f"not right yet: {error}"
    line, code = (frames[-1].lineno, frames[-1].line) if frames else ("?", "")
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        line, code, what = error.lineno, error.text or "", f"{type(error).__name__}: {error.msg}"
    if isinstance(error, KeyboardInterrupt):
        what = STOPPED
    if isinstance(error, NameError) and frames[-1].name == "<module>" and len(error.name) == 1:
        what = f'a letter is written in quotes: "{error.name.upper()}"'
    return f"line {line}, `{code.strip()}`: {what}" if code else what


def grade(grader: Callable, path: Path) -> tuple[bool, str]:
    """Whether the exercise in this file is passed, and what to say about it."""
    try:
        exercise = SimpleNamespace(**runpy.run_path(str(path)))
        with warnings.catch_warnings(action="ignore"):  # torch's, of a std of one number
            seen = grader(exercise)
        check_answers(exercise)
        return True, f"passed. {seen}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return False, explain(error, path)


def main(*numbers: str) -> int:
    """Grade the exercises of these numbers, or all; returns the exit status."""
    known = {str(number): grader for number, grader in enumerate(GRADERS, 1)}
    if unknown := set(numbers) - set(known):
        print(f"give numbers from 1 to {len(known)}, not {' '.join(sorted(unknown))}")
        return 1
    chosen = [known[number] for number in numbers or known]
    passed = 0
    for grader in chosen:
        name = grader.__name__
        right, message = grade(grader, FOLDER / f"{name}.py")
        passed += right
        print(textwrap.fill(f"{name:15}{message}", 100, subsequent_indent=" " * 15))
        if STOPPED in message:
            return 130
    print(f"{passed} of {len(chosen)} passed")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
