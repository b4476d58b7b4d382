"""The methods nearest to OSW-FT, each as the one formula in which it differs.

OSW-FT learns an expert's solution with weight 1 - p̂. Its neighbours weigh other things, or by
something else: solutions (B,), their tokens (B, T), or the answers sampled for a query (B, K). Each
function returns such weights, and no gradient flows through them. The loss stays the one of
train_oswft.py (only `asft_penalty` is a term of its own):

    oswft_loss(logprobs, mask, weights, normalizer)               # weights of rows, (B,)
    oswft_loss(token_weights * logprobs, mask, ones, normalizer)  # weights of tokens, (B, T)

To be read beside train_oswft.py, and copied; no script imports it. recipes/neighbours.md compares
the methods. Each docstring names the file of the official code that the formula was read from, and
its commit. The papers were not at hand, only their abstracts and what others quote from them.

B queries, K sampled answers to each, T tokens of a row. p is the model's probability of a token, p̂
the share of a query's answers that are right. Everywhere `logprobs` is (B, T) log p in nats, `mask`
(B, T) is true on the solution's tokens, and `rewards` (B, K) is 1 for a right answer, 0 for a wrong
one.
"""

import math

import torch

# ------------------------------------------------------------------------------------------------
# Tokens of the expert's solution, by the model's own probability: free, off-policy


def dft_weights(logprobs: torch.Tensor) -> torch.Tensor:
    """DFT: w = p, so the gradient is that of p itself. Returns (B, T).

    `train_sft.py --objective dft` trains with it.

    Source: Wu et al. 2025, arXiv 2508.05629; verl/verl/trainer/fsdp_dft_trainer.py of
    yongliang-wu/DFT at e153181.
    """
    return logprobs.detach().exp()


def profit_weights(logprobs: torch.Tensor, threshold: float = 0.1) -> torch.Tensor:
    """ProFit: w = 1 for a token with p >= threshold, else 0. Returns (B, T).

    The tokens that are left out still count in the divisor of the official run.

    Source: Liu et al. 2026, arXiv 2601.09195; src/llamafactory/train/trainer_utils.py of
    Utaotao/ProFit at 92529ff, run.sh for the threshold. The paper is quoted with p > threshold.
    """
    return (logprobs.detach().exp() >= threshold).to(logprobs.dtype)


def chord_phi(logprobs: torch.Tensor) -> torch.Tensor:
    """CHORD's φ: w = p (1 - p), largest where the model is undecided. Returns (B, T).

    The whole loss is (1 - μ) * GRPO's on sampled answers + μ * this one, with μ from `chord_mu`.

    Source: Zhang et al. 2025, arXiv 2508.11408; chord_policy_loss.py in
    trinity/algorithm/policy_loss_fn of modelscope/Trinity-RFT at 0414330.
    """
    p = logprobs.detach().exp()
    return p * (1 - p)


def chord_mu(
    step: int,
    warmup_steps: int = 0,
    decay_steps: int = 200,
    peak: float = 0.9,
    valley: float = 0.05,
) -> float:
    """CHORD's μ, the share of the expert's loss: a linear warm-up, then half a cosine down.

    The defaults are CHORD-μ's, which leaves φ out; CHORD-φ keeps μ = 0.1 throughout.

    Source: as `chord_phi`; the values are in examples/mix_chord/mix_chord.yaml.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    progress = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * (1 + math.cos(math.pi * progress)) / 2


def luffy_weights(logprobs: torch.Tensor, gamma: float = 0.1) -> torch.Tensor:
    """LUFFY's policy shaping: w = γ p / (p + γ)², largest at p = γ. Returns (B, T).

    LUFFY's objective on the expert's tokens is A * f(p) with f(p) = p / (p + γ), and A the
    solution's advantage from `luffy_advantages`. The gradient of f(p) is w times that of log p.
    Without shaping, f(p) = p, and w is DFT's.

    Source: Yan et al. 2025, arXiv 2504.14945; luffy/verl/verl/mix_src/mix_core_alg.py of
    ElliottYan/LUFFY at 01f4ae0, exp_scripts/train.sh for γ.
    """
    p = logprobs.detach().exp()
    return gamma * p / (p + gamma) ** 2


# ------------------------------------------------------------------------------------------------
# Solutions and their tokens, by a frozen reference model: one more forward pass, off-policy


def iw_sft_weights(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, cap: float = 16.0
) -> torch.Tensor:
    """iw-SFT: w = (π(o*) / π_ref(o*))^(1 / tokens of o*), at most `cap`. Returns (B,).

    π_ref is the model that training starts from: at the first step w = 1, which is SFT. Then a
    solution that has become likelier counts more, so w moves against OSW-FT's weight.

    Source: Qin & Springenberg 2025, arXiv 2507.12856; bounding_trainers.py of emmyqin/iw_sft at
    9a3e4e4. The paper is quoted with the ratio of the whole solution, without the root.
    """
    log_ratio = torch.where(mask.bool(), logprobs.detach() - ref_logprobs, 0)  # (B, T)
    return (log_ratio.sum(dim=1) / mask.sum(dim=1)).exp().clamp(max=cap)


def asft_penalty(
    logits: torch.Tensor, ref_logits: torch.Tensor, kl_weight: float = 0.05
) -> torch.Tensor:
    """ASFT: DFT's loss, plus kl_weight * KL(π_ref || π) at each token. Returns (B, T).

    The penalty is no weight: the loss is the sum over tokens of `asft_penalty - dft_weights *
    logprobs`, and the gradient flows through `logits`. It needs both models' logits (B, T, V).

    Source: Zhu et al. 2025, arXiv 2509.23753; train_v2.py of zhuchichi56/ASFT at 6f6f51c, its
    README for the weight. The paper has the other direction, KL(π || π_ref), says issue 3 there.
    """
    log_ref = ref_logits.detach().log_softmax(dim=-1)  # (B, T, V)
    return kl_weight * (log_ref.exp() * (log_ref - logits.log_softmax(dim=-1))).sum(dim=-1)


def rasft_token_weights(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """RASFT, its part for tokens: w = p * clip((π_ref(o) / π(o))^(1 / tokens), 0.4, 1.2).

    DFT's weight, and iw-SFT's ratio turned over: what has drifted up counts less. The row, an
    expert's or an own one, counts with `rasft_weights` besides. Returns (B, T).

    Source: as `rasft_weights`.
    """
    log_ratio = torch.where(mask.bool(), ref_logprobs - logprobs.detach(), 0)  # (B, T)
    ratio = (log_ratio.sum(dim=1) / mask.sum(dim=1)).exp().clamp(0.4, 1.2)  # (B,)
    return ratio[:, None] * logprobs.detach().exp()


# ------------------------------------------------------------------------------------------------
# Queries, by how many of their sampled answers are right: K rollouts


def hpt_weights(rewards: torch.Tensor, gate: float = 0.0) -> torch.Tensor:
    """HPT: w = 1 where p̂ <= gate, else 0. Returns (B,) weights of the solutions.

    A query of weight 0 is learnt from its own answers, by GRPO: its loss is weighted 1 - w.

    Source: Lv et al. 2025, arXiv 2509.04419; hpt/verl/verl/mix_src/mix_trainer.py of
    TsinghuaC3I/Unify-Post-Training at ae332f5. There the gate counts right answers of K = 8: 0 for
    Qwen, 2 for Llama (exp_scripts).
    """
    return (rewards.detach().float().mean(dim=1) <= gate).float()


def sc_sdpo_weights(rewards: torch.Tensor) -> torch.Tensor:
    """SC-SDPO: w = √(p̂ (1 - p̂)), the standard deviation of one answer's reward. Returns (B,).

    It weighs a query's self-distillation loss (SDPO, arXiv 2601.20802), which is taken on its own
    answers. The paper then normalises the weights over the batch; how was not found: left out.

    Source: Liu et al. 2026, arXiv 2605.27765, abstract; no official code was found.
    """
    p_hat = rewards.detach().float().mean(dim=1)
    return (p_hat * (1 - p_hat)).sqrt()


def luffy_advantages(rewards: torch.Tensor, expert_rewards: torch.Tensor) -> torch.Tensor:
    """LUFFY's mixed group: A = r - mean, over K own answers and the expert's solution.

    Where the solution is right, its advantage is K / (K + 1) * (1 - p̂): OSW-FT's weight.

    Args:
        rewards: (B, K); K = 7 in the official run.
        expert_rewards: (B,) of the solutions.

    Returns:
        (B, K + 1) advantages, the solution's last.

    Source: as `luffy_weights`. The paper's equation also divides by the group's standard deviation,
    as GRPO's does; the official run sets `algorithm.grpo_use_std=False`.
    """
    group = torch.cat([rewards, expert_rewards[:, None]], dim=1).detach().float()  # (B, K + 1)
    return group - group.mean(dim=1, keepdim=True)


def rasft_weights(
    rewards: torch.Tensor,
    expert_min: float = 1.0,
    expert_max: float = 3.0,
    alpha: float = 0.4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RASFT: the solution joins the group of its query's answers, with a reward of its own.

        r* = expert_min + (1 - p̂) (expert_max - expert_min)
        A = tanh(α (r - mean) / std) / (1 + right answers)

    The solution's weight is its A, a right answer's 0.25 * clip(A, 0.02, 0.15), a wrong one's 0.
    Where no answer is right, or no reward differs (all right, with expert_min = 1), the solution
    alone is learnt, with weight 1, as that of a query which got no answers. So what is mastered
    counts as much as what fails.

    Returns:
        (B,) weights of the solutions, (B, K) of the answers; see `rasft_token_weights`.

    Source: Miao et al. 2026, arXiv 2606.07006; train_RASFT.py of zjd1sq/RASFT at 004b02e, its
    README for the values. Its filters of near-equal, short and garbled answers are left out.
    """
    rewards = rewards.detach().float()
    expert = expert_max - rewards.mean(dim=1, keepdim=True) * (expert_max - expert_min)  # (B, 1)
    group = torch.cat([expert, rewards], dim=1)  # (B, 1 + K)
    std = group.std(dim=1, keepdim=True, correction=0)
    right = rewards.sum(dim=1, keepdim=True)
    scaled = (group - group.mean(dim=1, keepdim=True)) / (std + 1e-6)
    advantages = torch.tanh(alpha * scaled) / (1 + right)
    alone = (right == 0) | (std < 1e-8)  # (B, 1)
    answers = torch.where(alone, 0, 0.25 * advantages[:, 1:].clamp(0.02, 0.15) * rewards)
    return torch.where(alone[:, 0], 1, advantages[:, 0]), answers


# ------------------------------------------------------------------------------------------------
# The sampled answers themselves, without an expert: on-policy


def rft_weights(rewards: torch.Tensor) -> torch.Tensor:
    """STaR and RFT: w = r, so right answers are learnt like solutions. Returns (B, K).

    In expectation that is the gradient of p̂, without GRPO's baseline: what fails teaches nothing.
    STaR samples anew each round, and asks again with the answer as a hint where it failed; RFT
    samples once, keeps one answer per list of equations, and adds the expert's solutions.

    Source: Zelikman et al. 2022, arXiv 2203.14465, device_inference.py of ezelikman/STaR at
    6ffd3c4; Yuan et al. 2023, arXiv 2308.01825, collect_rejection_sampling.py of
    OFA-Sys/gsm8k-ScRel at 25d2c40.
    """
    return rewards.detach().float()


def osft_weights(rewards: torch.Tensor) -> torch.Tensor:
    """OSFT: w = 1 for every answer, right or wrong. Returns (B, K).

    Sampled at temperature 1 that would average to no gradient at all. So OSFT samples colder than
    it trains, at 0.6 against 1, and sharpens what the model already prefers.

    Source: Li et al. 2025, arXiv 2510.18814; osft/recipe/osft/dp_actor.py of ElementQi/OnlineSFT at
    85e880b, osft/examples/osft_1e7_dsr_tau0s6.sh for the temperatures and K = 1.
    """
    return torch.ones_like(rewards, dtype=torch.float32)
