"""The teacher-forced forward of many blocks at once: the training twin of `DSparkDrafter.propose`.

One pass of the backbone covers all blocks of a batch of sequences: the sequences' target features are the context,
the blocks' slots are the queries, and `PackedAttention` keeps every block to its own past. Slot k of the sequential
head is fed the true token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..modeling_dspark import DSparkDrafter
from .anchors import supervised_slots
from .packing import PackedAttention


@dataclass
class TeacherForced:
    """Outputs of [`teacher_forced`] for the N supervised slots of K blocks.

    Attributes:
        supervised (`torch.Tensor` of shape `(K, gamma)`, bool): which slots these are, N of them in this order.
        slots (`torch.Tensor` of shape `(N,)`): index of each slot in its block.
        hidden (`torch.Tensor` of shape `(N, hidden_size)`): backbone outputs.
        latent (`torch.Tensor` of shape `(N, rank)`, *optional*): of the sequential head.
        confidence_logits (`torch.Tensor` of shape `(N,)`, *optional*): raw.
        labels (`torch.Tensor` of shape `(N,)`): draft ids of the true tokens; -1 outside the draft vocabulary.
        target_hidden (`torch.Tensor` of shape `(N, hidden_size)`): the target's final state that predicts the label.
        logsumexp (`torch.Tensor` of shape `(N,)`, *optional*): of the target's logits over its whole vocabulary.
    """

    supervised: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    latent: torch.Tensor | None
    confidence_logits: torch.Tensor | None
    labels: torch.Tensor
    target_hidden: torch.Tensor
    logsumexp: torch.Tensor | None


def teacher_forced(
    drafter: DSparkDrafter,
    *,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    features: torch.Tensor,
    last_hidden: torch.Tensor,
    logsumexp: torch.Tensor | None,
    anchors: torch.Tensor,
    detach_confidence: bool = False,
) -> TeacherForced:
    """Runs the drafter on the blocks of S sequences that lie end to end, T rows in all.

    Args:
        drafter ([`DSparkDrafter`]): bound to its target, or with its own embedding.
        input_ids (`torch.Tensor` of shape `(T,)`): token ids.
        loss_mask (`torch.Tensor` of shape `(T,)`): True on response tokens.
        lengths (`torch.Tensor` of shape `(S,)`): rows of each sequence.
        features (`torch.Tensor` of shape `(T, layers * hidden_size)`): target features.
        last_hidden (`torch.Tensor` of shape `(T, hidden_size)`): the target's final normalised states.
        logsumexp (`torch.Tensor` of shape `(T,)`, *optional*): log-sum-exp of the target's logits over its
            vocabulary; needed with a reduced draft vocabulary.
        anchors (`torch.Tensor` of shape `(K,)`): anchor rows, ascending.
        detach_confidence (`bool`): keep the confidence loss from training the backbone and the Markov embedding.

    Returns:
        [`TeacherForced`].
    """
    config, device = drafter.config, anchors.device
    gamma, rows = config.block_size, len(input_ids)
    ends = lengths.cumsum(0)
    owners = torch.searchsorted(ends, anchors, right=True)
    slots = anchors[:, None] + torch.arange(gamma, device=device)  # [K, gamma]: rows of the slots
    before = input_ids[slots.clamp(max=rows - 1)]  # the token before each label: the anchor, then the labels before
    labels = input_ids[(slots + 1).clamp(max=rows - 1)]

    noise = torch.full_like(before, config.mask_token_id)
    noise[:, 0] = before[:, 0]
    starts = ends - lengths
    row_positions = torch.arange(rows, device=device) - starts.repeat_interleave(lengths)
    slot_positions = (slots - starts[owners, None]).flatten()
    hidden = drafter.backbone(
        noise_embeds=drafter.embed(noise.flatten()[None]),
        context_hidden_states=features[None].to(drafter.dtype),
        position_ids=torch.cat([row_positions, slot_positions])[None],
        attend=PackedAttention(lengths.tolist(), anchors, owners, gamma),
    ).last_hidden_state.view(len(anchors), gamma, -1)

    latent = embedding = None
    if drafter.markov_head is not None:
        embedding = drafter.markov_head.markov_w1(before)
        latent = drafter.markov_head.teacher_forced(embedding, hidden)

    # The vocabulary is by far the widest axis: heads and losses see supervised slots only.
    supervised = supervised_slots(loss_mask, anchors, ends[owners], gamma)
    hidden = hidden[supervised]
    confidence_logits = None
    if drafter.confidence_head is not None:
        seen = [hidden, None if embedding is None else embedding[supervised]]
        if detach_confidence:
            seen = [x if x is None else x.detach() for x in seen]
        confidence_logits = drafter.confidence_head(*seen)
    labels = labels[supervised]
    if config.draft_vocab_size is not None:
        draft_ids = labels.new_full((config.vocab_size,), -1)
        draft_ids[drafter.draft_token_ids] = torch.arange(config.draft_vocab_size, device=device)
        labels = draft_ids[labels]
    sources = slots[supervised]  # the target predicts a label from the row before it
    return TeacherForced(
        supervised=supervised,
        slots=supervised.nonzero()[:, -1],
        hidden=hidden,
        latent=None if latent is None else latent[supervised],
        confidence_logits=confidence_logits,
        labels=labels,
        target_hidden=last_hidden[sources].to(drafter.dtype),
        logsumexp=None if logsumexp is None else logsumexp[sources],
    )


def draft_logits(drafter: DSparkDrafter, hidden: torch.Tensor, latent: torch.Tensor | None) -> torch.Tensor:
    """Corrected draft logits U + W2 z of slots, `(N, draft_vocab)`, in float32.

    Args:
        drafter ([`DSparkDrafter`]): owns or borrows the head.
        hidden (`torch.Tensor` of shape `(N, hidden_size)`): backbone outputs.
        latent (`torch.Tensor` of shape `(N, rank)`, *optional*): of the sequential head.
    """
    logits = drafter.base_logits(hidden)
    return logits if latent is None else logits + drafter.markov_head.markov_w2(latent).float()


def target_probabilities(
    drafter: DSparkDrafter, target_hidden: torch.Tensor, logsumexp: torch.Tensor | None
) -> torch.Tensor:
    """The target's distribution on the draft vocabulary, `(N, draft_vocab)`, in float32; sums to at most one.

    Args:
        drafter ([`DSparkDrafter`]): its head is the target's, or rows of it.
        target_hidden (`torch.Tensor` of shape `(N, hidden_size)`): the target's final normalised states.
        logsumexp (`torch.Tensor` of shape `(N,)`, *optional*): of the target's logits over its whole vocabulary;
            needed unless the draft vocabulary is the whole one.
    """
    logits = drafter.base_logits(target_hidden)
    normaliser = logits.logsumexp(-1) if logsumexp is None else logsumexp
    return (logits - normaliser[:, None]).exp()
