"""The training objective.

With p the target's distribution over its whole vocabulary, q the drafter's (teacher-forced, sequential head included),
y the label and c the confidence of a slot (paper, training):

    CE    = -log q(y)                     cross entropy with the token that follows in the text
    KL    = -sum_x p(x) log q(x)          the same with every token the target considered (less noise, same minimum)
    TV    = sum_x |q(x) - p(x)|           plain L1 norm; the acceptance rate of a slot is c* = 1 - TV / 2
    BCE   = BCE(c, c*)                    the confidence learns that acceptance rate
    L     = w_ce CE + w_kl KL + w_tv TV + w_conf BCE

Each term is sum(w_k x) / (sum(w_k) + 1e-6) over supervised slots with w_k = exp(-k / decay), k = 0, 1, ...
With a reduced draft vocabulary p is not renormalised: its mass on tokens the drafter cannot propose counts as rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass
class LossTerms:
    """Sums and weights of every term, so that batches and ranks add up exactly.

    Attributes:
        sums (`dict[str, torch.Tensor]`): weighted sums of "ce", "kl", "tv" and "confidence".
        weights (`dict[str, torch.Tensor]`): the sums of their weights.
        acceptance (`torch.Tensor` of shape `(gamma,)`): sum of acceptance rates c* by slot, unweighted.
        slots (`torch.Tensor` of shape `(gamma,)`): supervised slots.
    """

    sums: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    acceptance: torch.Tensor
    slots: torch.Tensor

    def mean(self, term: str) -> torch.Tensor:
        """sum / (weight + 1e-6) of one term."""
        return self.sums[term] / (self.weights[term] + 1e-6)


def loss_terms(
    logits: torch.Tensor,
    target_probabilities: torch.Tensor,
    labels: torch.Tensor,
    slots: torch.Tensor,
    confidence_logits: torch.Tensor | None = None,
    *,
    gamma: int,
    decay: float = 4.0,
) -> LossTerms:
    """All terms of the objective over N supervised slots.

    Args:
        logits (`torch.Tensor` of shape `(N, draft_vocab)`): corrected draft logits.
        target_probabilities (`torch.Tensor` of the same shape): p on the draft vocabulary; sums to at most one.
        labels (`torch.Tensor` of shape `(N,)`): draft ids of the labels, -1 where the draft vocabulary lacks it.
        slots (`torch.Tensor` of shape `(N,)`): index of each slot in its block.
        confidence_logits (`torch.Tensor` of shape `(N,)`, *optional*): raw confidences.
        gamma (`int`): slots of a block.
        decay (`float`): of the slot weights exp(-k / decay); 4.0 at gamma 7.

    Returns:
        [`LossTerms`]: no slot at all gives sums and weights of zero, never NaN.
    """
    log_q = logits.float().log_softmax(dim=-1)
    p = target_probabilities.float()
    weight = torch.exp(-slots / decay)
    known = weight * (labels >= 0)
    outside = (1 - p.sum(dim=-1)).clamp(min=0)  # mass of tokens the drafter cannot propose
    tv = (log_q.exp() - p).abs().sum(dim=-1) + outside
    values = {
        "ce": (-log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0], known),
        "kl": (-(p * log_q).sum(dim=-1), weight),
        "tv": (tv, weight),
    }
    acceptance = (1 - tv / 2).clamp(0, 1).detach()
    if confidence_logits is not None:
        bce = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        values["confidence"] = (bce, weight)
    empty = torch.zeros(gamma, device=logits.device)
    return LossTerms(
        sums={name: (x * w).sum() for name, (x, w) in values.items()},
        weights={name: w.sum() for name, (_, w) in values.items()},
        acceptance=empty.index_add(0, slots, acceptance),
        slots=empty.index_add(0, slots, torch.ones_like(acceptance)),
    )
