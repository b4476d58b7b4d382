"""recipes/neighbours.py: each method against its formula, and the page's numbers."""

import math

from conftest import ROOT
from recipes.neighbours import (
    asft_penalty,
    chord_mu,
    chord_phi,
    dft_weights,
    hpt_weights,
    iw_sft_weights,
    luffy_advantages,
    luffy_weights,
    osft_weights,
    profit_weights,
    rasft_token_weights,
    rasft_weights,
    rft_weights,
    sc_sdpo_weights,
)
from train_oswft import oswft_weights

import pytest
import torch

PAGE = (ROOT / "recipes" / "neighbours.md").read_text()
TOKEN_WEIGHTS = (dft_weights, profit_weights, chord_phi, luffy_weights)
REWARDS = torch.tensor([[1.0] * right + [0.0] * (4 - right) for right in range(5)])  # (5, 4)
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]]).bool()


def log(probabilities) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_logprobs() -> tuple[torch.Tensor, ...]:
    """Logits and a reference's (3, 5, 7), and the log-probabilities of some tokens under both."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=generator)
    tokens = torch.randint(7, (2, 3, 5, 1), generator=generator)[:1].expand(2, -1, -1, -1)
    logprobs = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
    return *logits, *logprobs


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (dft_weights, lambda p: p),
        (profit_weights, lambda p: 1.0 if p >= 0.1 else 0.0),
        (chord_phi, lambda p: p * (1 - p)),
        (luffy_weights, lambda p: 0.1 * p / (p + 0.1) ** 2),
    ],
)
def test_a_tokens_weight_is_its_formula(function, formula):
    probabilities = [[1e-6, 0.01, 0.05, 0.2], [0.5, 0.8, 0.99, 1.0]]
    expected = torch.tensor([[formula(p) for p in row] for row in probabilities]).double()
    torch.testing.assert_close(function(log(probabilities)), expected)


def test_chords_mu_warms_up_and_then_falls_along_half_a_cosine():
    steps = dict(warmup_steps=200, decay_steps=400, peak=0.5, valley=0.02)
    mu = {0: 0.0, 50: 0.125, 200: 0.5, 300: 0.26 + 0.24 * math.sqrt(0.5), 400: 0.26, 9999: 0.02}
    assert {step: chord_mu(step, **steps) for step in mu} == pytest.approx(mu)
    assert (chord_mu(0), chord_mu(200)) == (0.9, 0.05)
    assert {chord_mu(step, 0, 0, 0.1, 0.1) for step in range(5)} == {0.1}  # CHORD-φ


def test_iw_sft_weighs_a_solution_by_the_geometric_mean_of_its_ratio_up_to_a_cap():
    *_, logprobs, ref_logprobs = random_logprobs()
    log_ratios = logprobs - ref_logprobs
    ratios = [row[used].mean().exp().item() for row, used in zip(log_ratios, MASK, strict=True)]
    ref_logprobs[~MASK] = -torch.inf  # prompt and padding have no say
    cap = sorted(ratios)[1]
    weights = iw_sft_weights(logprobs, ref_logprobs, MASK, cap=cap)
    assert weights.tolist() == pytest.approx([min(ratio, cap) for ratio in ratios])
    assert iw_sft_weights(logprobs, logprobs - 3, MASK).tolist() == [16.0] * 3  # e³ > 16
    assert iw_sft_weights(logprobs, logprobs, MASK).tolist() == [1.0] * 3  # SFT at the start


def test_rasft_weighs_a_token_by_its_probability_and_the_clipped_drift_of_its_row():
    *_, logprobs, _ = random_logprobs()
    drift = torch.tensor([[0.1], [-5.0], [5.0]])  # of each row; the last two are clipped
    ref_logprobs = torch.where(MASK, logprobs + drift, -torch.inf)
    weights = rasft_token_weights(logprobs, ref_logprobs, MASK)
    ratios = torch.tensor([[math.exp(0.1)], [0.4], [1.2]]).double()
    torch.testing.assert_close(weights, ratios * logprobs.exp(), rtol=1e-6, atol=0)


def test_asfts_penalty_is_the_kl_from_the_reference_and_pulls_back_to_it():
    logits, ref_logits, *_ = random_logprobs()
    logits.requires_grad_()
    penalty = asft_penalty(logits, ref_logits, kl_weight=0.3)
    p, q = logits.softmax(-1).detach(), ref_logits.softmax(-1)
    torch.testing.assert_close(penalty, 0.3 * (q * (q / p).log()).sum(-1))
    (gradient,) = torch.autograd.grad(penalty.sum(), logits)
    torch.testing.assert_close(gradient, 0.3 * (p - q))


def test_hpt_switches_to_the_expert_at_its_gate():
    rewards = torch.tensor([[1.0] * right + [0.0] * (8 - right) for right in range(9)])
    assert hpt_weights(rewards).tolist() == [1.0] + [0.0] * 8
    assert hpt_weights(rewards, gate=2 / 8).tolist() == [1.0] * 3 + [0.0] * 6


def test_luffy_compares_own_answers_and_the_solution_with_their_common_mean():
    expert = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])  # one solution that the verifier refuses
    for row, group in zip(
        luffy_advantages(REWARDS, expert), torch.cat([REWARDS, expert[:, None]], 1), strict=True
    ):
        assert row.tolist() == pytest.approx([(r - sum(group) / 5).item() for r in group])


def rasft_by_hand(answers: list[float]) -> tuple[float, list[float]]:
    right = sum(answers)
    if right == 0 or right == len(answers):
        return 1.0, [0.0] * len(answers)
    group = [1 + (1 - right / len(answers)) * 2, *answers]
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / len(group))
    advantages = [math.tanh(0.4 * (r - mean) / std) / (1 + right) for r in group]
    pairs = zip(advantages[1:], answers, strict=True)
    return advantages[0], [0.25 * min(max(a, 0.02), 0.15) * (r > 0) for a, r in pairs]


@pytest.mark.parametrize("k", [1, 3, 4])
def test_rasft_is_its_formula_and_learns_the_solution_alone_where_nothing_differs(k):
    rewards = torch.tensor([[1.0] * right + [0.0] * (k - right) for right in range(k + 1)])
    for solution, answers, own in zip(*rasft_weights(rewards), rewards.tolist(), strict=True):
        expected, others = rasft_by_hand(own)
        assert [solution, *answers] == pytest.approx([expected, *others], abs=1e-5)


def test_no_gradient_flows_through_any_weight():
    *_, logprobs, ref_logprobs = random_logprobs()
    rewards = REWARDS.clone().requires_grad_()
    logprobs.requires_grad_()
    weights = [function(logprobs) for function in TOKEN_WEIGHTS]
    weights += [f(logprobs, ref_logprobs, MASK) for f in (iw_sft_weights, rasft_token_weights)]
    weights += [f(rewards) for f in (hpt_weights, sc_sdpo_weights, rft_weights, osft_weights)]
    weights += [luffy_advantages(rewards, torch.ones(5)), *rasft_weights(rewards)]
    assert not any(weight.requires_grad for weight in weights)


def table(header: str) -> dict[str, list[float]]:
    """The rows of the page's table that begins so, by their names."""
    text = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in f"{header} | {text}".splitlines()]
    return {name: [float(cell) for cell in cells] for name, *cells in (rows[0], *rows[2:])}


def test_the_pages_tables_are_what_the_functions_give():
    computed = {
        "right of 4": REWARDS.sum(dim=1),
        "OSW-FT": oswft_weights(REWARDS),
        "LUFFY": luffy_advantages(REWARDS, torch.ones(5))[:, -1],
        "HPT": hpt_weights(REWARDS),
        "RASFT": rasft_weights(REWARDS)[0],
        "SC-SDPO": sc_sdpo_weights(REWARDS),
    }
    rounded = {name: pytest.approx(w.tolist(), abs=0.005) for name, w in computed.items()}
    assert table("right of 4") == rounded

    rows = table("p")
    weights = [function(log([rows["p"]]))[0].tolist() for function in TOKEN_WEIGHTS]
    assert [*rows.values()][2:] == [pytest.approx(row, abs=0.005) for row in weights]
