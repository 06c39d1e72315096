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

from collections.abc import Callable
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
        bias (`torch.Tensor` of shape `(gamma,)`): sum of c_1 ... c_k - c*_1 ... c*_k by slot; zero without a head.
        slots (`torch.Tensor` of shape `(gamma,)`): supervised slots.
    """

    loss: torch.Tensor
    acceptance: torch.Tensor
    bias: torch.Tensor
    slots: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def mean(self, term: str) -> torch.Tensor:
        """sum / (weight + 1e-6) of one term."""
        return self.sums[term] / (self.weights[term] + 1e-6)


class _VocabularyTerms(torch.autograd.Function):
    """w_ce CE + w_kl KL + w_tv TV of all rows, chunk by chunk; `scale` holds each row's three factors.

    `weights` are the trained weights between `latent` and the logits: those of W2, or of adapters on it.
    """

    @staticmethod
    def forward(ctx, drafter, blocks, scale, chunk_rows, hidden, latent, *weights):
        rows = torch.empty(len(hidden), 3, device=hidden.device)
        inputs = [x for x in (hidden, latent) if x is not None]
        row_slopes, weight_slopes = [torch.zeros_like(x) for x in inputs], [torch.zeros_like(w) for w in weights]
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            leaves = [x[part].detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                logits = draft_logits(drafter, leaves[0], leaves[1] if latent is not None else None)
            logsumexp = None if blocks.logsumexp is None else blocks.logsumexp[part]
            p = target_probabilities(drafter, blocks.target_hidden[part], logsumexp)
            rows[part], slope = _rows_and_slopes(logits.detach(), p, blocks.labels[part], scale[part])
            found = torch.autograd.grad(logits, [*leaves, *weights], slope)
            for whole, one in zip(row_slopes, found, strict=False):
                whole[part] = one
            for total, one in zip(weight_slopes, found[len(leaves) :], strict=True):
                total += one
        ctx.save_for_backward(*row_slopes, *weight_slopes)
        ctx.has_latent = latent is not None
        ctx.mark_non_differentiable(rows)
        return (rows * scale).sum(), rows

    @staticmethod
    def backward(ctx, upstream, _):
        slopes = [slope * upstream for slope in ctx.saved_tensors]
        if not ctx.has_latent:
            slopes.insert(1, None)
        return None, None, None, None, *slopes


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
    drafter: DSparkDrafter,
    blocks: TeacherForced,
    weights: LossWeights,
    *,
    chunk_rows: int = 64,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> LossTerms:
    """The training objective of a batch of blocks.

    Args:
        drafter ([`DSparkDrafter`]): the drafter that produced `blocks`.
        blocks ([`TeacherForced`]): its outputs on N supervised slots.
        weights ([`LossWeights`]): of the terms and slots.
        chunk_rows (`int`): slots whose logits exist at the same time.
        total (`Callable`, *optional*): sums a tensor over ranks, for the denominators; the losses of all ranks then
            add up to that of the whole batch.

    Returns:
        [`LossTerms`]: without any slot, sums, weights and loss are zero, never NaN.
    """
    gamma = blocks.supervised.shape[-1]
    weight = torch.exp(-blocks.slots / weights.decay)
    known = weight * (blocks.labels >= 0)
    normalisers = torch.stack([weight.sum(), known.sum()])
    normaliser, known_normaliser = (normalisers if total is None else total(normalisers)) + 1e-6
    scale = torch.stack(
        [
            weights.ce * known / known_normaliser,
            weights.kl * weight / normaliser,
            weights.tv * weight / normaliser,
        ],
        dim=-1,
    )
    trained = [] if drafter.markov_head is None else drafter.markov_head.markov_w2.parameters()
    trained = [parameter for parameter in trained if parameter.requires_grad]
    loss, rows = _VocabularyTerms.apply(drafter, blocks, scale, chunk_rows, blocks.hidden, blocks.latent, *trained)
    acceptance = (1 - rows[:, 2] / 2).clamp(0, 1)
    values = {"ce": (rows[:, 0], known), "kl": (rows[:, 1], weight), "tv": (rows[:, 2], weight)}
    by_slot = torch.zeros(gamma, device=rows.device)
    bias = by_slot
    if blocks.confidence_logits is not None:
        logits = blocks.confidence_logits.float()
        bce = F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        loss = loss + weights.confidence * (bce * weight).sum() / normaliser
        values["confidence"] = (bce.detach(), weight)
        gap = _survival(logits.detach().sigmoid(), blocks) - _survival(acceptance, blocks)
        bias = by_slot.index_add(0, blocks.slots, gap[blocks.supervised])
    return LossTerms(
        loss=loss,
        sums={name: (x * w).sum() for name, (x, w) in values.items()},
        weights={name: w.sum() for name, (_, w) in values.items()},
        acceptance=by_slot.index_add(0, blocks.slots, acceptance),
        bias=bias,
        slots=by_slot.index_add(0, blocks.slots, torch.ones_like(acceptance)),
    )


def _survival(rates: torch.Tensor, blocks: TeacherForced) -> torch.Tensor:
    """Products of the rates of supervised slots along their blocks, `(K, gamma)`."""
    table = rates.new_ones(blocks.supervised.shape)
    table[blocks.supervised] = rates
    return table.cumprod(dim=-1)
