"""The training objective.

With p the target's distribution over its whole vocabulary, q the drafter's (teacher-forced, sequential head included),
y the label and c the confidence of a slot (paper, training):

    CE    = -log q(y)                     cross entropy with the token that follows in the text
    KL    = -sum_x p(x) log q(x)          the same with every token the target considered (less noise, same minimum)
    TV    = sum_x |q(x) - p(x)|           plain L1 norm; the acceptance rate of a slot is c* = 1 - TV / 2
    BCE   = BCE(c, c*)                    the confidence learns that acceptance rate
    L     = w_ce CE + w_kl KL + w_tv TV + w_conf BCE

Each term is sum(w_k x) / (sum(w_k) + 1e-6) over supervised slots with w_k = exp(-k / decay), k = 0, 1, ...
With a reduced draft vocabulary p is not renormalised: its mass on tokens the drafter cannot propose is rejected.

The vocabulary is processed in chunks of rows, gradients included: at no time do logits of more than one chunk exist,
so memory does not grow with anchors x vocabulary, and a chunk stays in the processor's cache. Per row, with
s = sign(q - p) and P = sum_x p(x), the gradients with respect to the logits are

    dCE = q - 1[y],   dKL = P q - p,   dTV = q (s - sum_x s(x) q(x)).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ..modeling_dspark import DSparkDrafter
from .blocks import TeacherForced, draft_logits, target_probabilities


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; the defaults are the paper's.

    Args:
        ce, kl, tv, confidence (`float`): see the module's equations.
        decay (`float`): slot k counts exp(-k / decay); 4.0 at gamma 7.
    """

    ce: float = 0.1
    kl: float = 0.0
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass
class LossTerms:
    """Sums and weights of every term, so that batches and ranks add up exactly.

    Attributes:
        loss (`torch.Tensor`): the weighted objective, differentiable.
        sums (`dict[str, torch.Tensor]`): weighted sums of "ce", "kl", "tv" and "confidence", detached.
        weights (`dict[str, torch.Tensor]`): the sums of their weights.
        acceptance (`torch.Tensor` of shape `(gamma,)`): sum of acceptance rates c* by slot, unweighted.
        slots (`torch.Tensor` of shape `(gamma,)`): supervised slots.
    """

    loss: torch.Tensor
    acceptance: torch.Tensor
    slots: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def mean(self, term: str) -> torch.Tensor:
        """sum / (weight + 1e-6) of one term."""
        return self.sums[term] / (self.weights[term] + 1e-6)


class _VocabularyTerms(torch.autograd.Function):
    """w_ce CE + w_kl KL + w_tv TV of all rows, chunk by chunk; `scale` holds each row's three factors."""

    @staticmethod
    def forward(ctx, hidden, latent, markov_w2, drafter, blocks, scale, chunk_rows):
        rows = torch.empty(len(hidden), 3, device=hidden.device)
        gradients = [None if x is None else torch.zeros_like(x) for x in (hidden, latent, markov_w2)]
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            leaves = [x if x is None else x[part].detach().requires_grad_() for x in (hidden, latent)]
            with torch.enable_grad():
                logits = draft_logits(drafter, *leaves)
            logsumexp = None if blocks.logsumexp is None else blocks.logsumexp[part]
            p = target_probabilities(drafter, blocks.target_hidden[part], logsumexp)
            values, slope = _rows_and_slopes(logits.detach(), p, blocks.labels[part], scale[part])
            rows[part] = values
            inputs = [x for x in (*leaves, markov_w2) if x is not None]
            found = iter(torch.autograd.grad(logits, inputs, slope))
            for index, leaf in enumerate((*leaves, markov_w2)):
                if leaf is not None and index < 2:
                    gradients[index][part] = next(found)
                elif leaf is not None:
                    gradients[index] += next(found)
        ctx.save_for_backward(*[g for g in gradients if g is not None])
        ctx.present = [g is not None for g in gradients]
        ctx.mark_non_differentiable(rows)
        return (rows * scale).sum(), rows

    @staticmethod
    def backward(ctx, upstream, _):
        saved = iter(ctx.saved_tensors)
        return *(next(saved) * upstream if there else None for there in ctx.present), None, None, None, None


def _rows_and_slopes(
    logits: torch.Tensor, p: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE, KL and TV of each row, `(N, 3)`, and the gradient of their scaled sum with respect to the logits."""
    ce, kl, tv = scale[:, :, None].unbind(1)  # [N, 1] each
    log_q = logits.log_softmax(dim=-1)
    q = log_q.exp()
    mass = p.sum(dim=-1, keepdim=True)
    label = labels.clamp(min=0)[:, None]
    gap = q - p
    distance = gap.abs().sum(dim=-1)
    outside = (1 - mass[:, 0]).clamp(min=0)  # mass of tokens the drafter cannot propose
    values = torch.stack(
        [-log_q.gather(-1, label)[:, 0], -torch.einsum("nv,nv->n", p, log_q), distance + outside], dim=-1
    )
    sign = gap.sign_()
    sign_q = torch.einsum("nv,nv->n", sign, q)[:, None]
    slope = sign.sub_(sign_q).mul_(tv).add_(ce + kl * mass).mul_(q).sub_(kl * p)
    slope.scatter_add_(-1, label, -ce)
    return values, slope


def objective(
    drafter: DSparkDrafter, blocks: TeacherForced, weights: LossWeights, *, chunk_rows: int = 64
) -> LossTerms:
    """The training objective of a batch of blocks.

    Args:
        drafter ([`DSparkDrafter`]): the drafter that produced `blocks`.
        blocks ([`TeacherForced`]): its outputs on N supervised slots.
        weights ([`LossWeights`]): of the terms and slots.
        chunk_rows (`int`): slots whose logits exist at the same time.

    Returns:
        [`LossTerms`]: without any slot, sums, weights and loss are zero, never NaN.
    """
    gamma = blocks.supervised.shape[-1]
    weight = torch.exp(-blocks.slots / weights.decay)
    known = weight * (blocks.labels >= 0)
    normaliser, known_normaliser = weight.sum() + 1e-6, known.sum() + 1e-6
    scale = torch.stack(
        [
            weights.ce * known / known_normaliser,
            weights.kl * weight / normaliser,
            weights.tv * weight / normaliser,
        ],
        dim=-1,
    )
    markov_w2 = None if drafter.markov_head is None else drafter.markov_head.markov_w2.weight
    loss, rows = _VocabularyTerms.apply(blocks.hidden, blocks.latent, markov_w2, drafter, blocks, scale, chunk_rows)
    acceptance = (1 - rows[:, 2] / 2).clamp(0, 1)
    values = {"ce": (rows[:, 0], known), "kl": (rows[:, 1], weight), "tv": (rows[:, 2], weight)}
    if blocks.confidence_logits is not None:
        logits = blocks.confidence_logits.float()
        bce = F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        loss = loss + weights.confidence * (bce * weight).sum() / normaliser
        values["confidence"] = (bce.detach(), weight)
    empty = torch.zeros(gamma, device=rows.device)
    return LossTerms(
        loss=loss,
        sums={name: (x * w).sum() for name, (x, w) in values.items()},
        weights={name: w.sum() for name, (_, w) in values.items()},
        acceptance=empty.index_add(0, blocks.slots, acceptance),
        slots=empty.index_add(0, blocks.slots, torch.ones_like(acceptance)),
    )
