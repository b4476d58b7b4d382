"""The methods nearest to OSW-FT, each as the one formula in which it differs.

Pure functions to be copied: they return weights of solutions (B,), of their tokens (B, T), or of
the K answers sampled for a query (B, K), and no gradient flows through them. Only `asft_penalty`
is a term of the loss. neighbours.md compares the methods, and names the paper and the official
code of each. The loss stays the one of train_oswft.py:

    oswft_loss(logprobs, mask, weights, normalizer)               # weights of rows, (B,)
    oswft_loss(token_weights * logprobs, mask, ones, normalizer)  # weights of tokens, (B, T)

Everywhere `logprobs` is (B, T) log p in nats under the model, `ref_logprobs` the same under the
frozen model that training starts from, `mask` (B, T) is true on the solution's tokens, `rewards`
(B, K) is 1 for a right answer and 0 for a wrong one, and p̂ is its mean over K.
"""

import math

import torch

# ---- Tokens of the expert's solution, by the model's own probability -----------------------------


def dft_weights(logprobs: torch.Tensor) -> torch.Tensor:
    """DFT: w = p, so the gradient is that of p itself. Returns (B, T)."""
    return logprobs.detach().exp()


def profit_weights(logprobs: torch.Tensor, threshold: float = 0.1) -> torch.Tensor:
    """ProFit: w = 1 where p >= threshold, else 0. Returns (B, T). The divisor counts all tokens."""
    return (logprobs.detach().exp() >= threshold).to(logprobs.dtype)


def chord_phi(logprobs: torch.Tensor) -> torch.Tensor:
    """CHORD's φ: w = p (1 - p), largest where the model is undecided. Returns (B, T).

    The whole loss is (1 - μ) * GRPO's on sampled answers + μ * this one, with μ from `chord_mu`.
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

    The defaults are CHORD-μ's, which leaves φ out. CHORD-φ keeps μ = 0.1 throughout.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    progress = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * (1 + math.cos(math.pi * progress)) / 2


def luffy_weights(logprobs: torch.Tensor, gamma: float = 0.1) -> torch.Tensor:
    """LUFFY's policy shaping: w = γ p / (p + γ)², largest at p = γ. Returns (B, T).

    LUFFY's objective on the expert's tokens is A * f(p) with f(p) = p / (p + γ), and A from
    `luffy_advantages`. The gradient of f(p) is w times that of log p.
    """
    p = logprobs.detach().exp()
    return gamma * p / (p + gamma) ** 2


# ---- Solutions and their tokens, by a frozen reference model -------------------------------------


def iw_sft_weights(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, cap: float = 16.0
) -> torch.Tensor:
    """iw-SFT: w = (π(o*) / π_ref(o*))^(1 / tokens of o*), at most `cap`. Returns (B,).

    At the first step w = 1. Then what has become likelier counts more: the opposite of OSW-FT.
    """
    log_ratio = torch.where(mask.bool(), logprobs.detach() - ref_logprobs, 0)  # (B, T)
    return (log_ratio.sum(dim=1) / mask.sum(dim=1)).exp().clamp(max=cap)


def asft_penalty(
    logits: torch.Tensor, ref_logits: torch.Tensor, kl_weight: float = 0.05
) -> torch.Tensor:
    """ASFT: kl_weight * KL(π_ref || π) at each token, from logits (B, T, V). Returns (B, T).

    ASFT's loss is the sum over tokens of `asft_penalty - dft_weights * logprobs`. The gradient
    flows through `logits`.
    """
    log_ref = ref_logits.detach().log_softmax(dim=-1)  # (B, T, V)
    return kl_weight * (log_ref.exp() * (log_ref - logits.log_softmax(dim=-1))).sum(dim=-1)


def rasft_token_weights(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """RASFT's tokens: w = p * clip((π_ref(o) / π(o))^(1 / tokens of o), 0.4, 1.2). Returns (B, T).

    The row, an expert's or an own one, also counts with `rasft_weights`.
    """
    log_ratio = torch.where(mask.bool(), ref_logprobs - logprobs.detach(), 0)  # (B, T)
    ratio = (log_ratio.sum(dim=1) / mask.sum(dim=1)).exp().clamp(0.4, 1.2)  # (B,)
    return ratio[:, None] * logprobs.detach().exp()


# ---- Queries, by how many of their sampled answers are right -------------------------------------


def hpt_weights(rewards: torch.Tensor, gate: float = 0.0) -> torch.Tensor:
    """HPT: w = 1 where p̂ <= gate, else 0. Returns (B,) weights of the solutions.

    A query of weight 0 is learnt from its own answers, by GRPO: its loss is weighted 1 - w.
    """
    return (rewards.detach().float().mean(dim=1) <= gate).float()


def sc_sdpo_weights(rewards: torch.Tensor) -> torch.Tensor:
    """SC-SDPO: w = √(p̂ (1 - p̂)), the standard deviation of one answer's reward. Returns (B,).

    It weighs a query's self-distillation loss (SDPO, arXiv 2601.20802) on the query's own answers.
    """
    p_hat = rewards.detach().float().mean(dim=1)
    return (p_hat * (1 - p_hat)).sqrt()


def luffy_advantages(rewards: torch.Tensor, expert_rewards: torch.Tensor) -> torch.Tensor:
    """LUFFY's mixed group: A = r - mean, over K own answers and the expert's solution.

    `expert_rewards` (B,) are those of the solutions. Returns (B, K + 1), the solution's last: where
    it is right, K / (K + 1) * (1 - p̂).
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
    alone is learnt, with weight 1. Returns (B,) weights of the solutions, (B, K) of the answers.
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


# ---- The sampled answers themselves, without an expert -------------------------------------------


def rft_weights(rewards: torch.Tensor) -> torch.Tensor:
    """STaR and RFT: w = r, so right answers are learnt like solutions. Returns (B, K).

    In expectation that is the gradient of p̂, without GRPO's baseline: what fails teaches nothing.
    """
    return rewards.detach().float()


def osft_weights(rewards: torch.Tensor) -> torch.Tensor:
    """OSFT: w = 1 for every answer, right or wrong. Returns (B, K).

    It samples colder (0.6) than it trains (1): at equal temperatures the mean gradient is zero.
    """
    return torch.ones_like(rewards, dtype=torch.float32)
