"""Anchors: where training blocks start, what they are supervised with, and what they may see.

Position a may be an anchor if its own token and the next one belong to the response (paper, training). Its block has
gamma slots at positions a .. a+gamma-1 and labels a+1 .. a+gamma; slots count as one prefix, up to the first label
outside the response. A block sees context rows before its anchor and itself, nothing of other blocks.
"""

from __future__ import annotations

import torch


def anchor_generator(seed: int, step: int, sample: int) -> torch.Generator:
    """A generator that depends on (seed, step, sample) alone, so runs on any number of devices draw alike."""
    generator = torch.Generator()
    generator.manual_seed(hash((seed, step, sample)) & 0x7FFF_FFFF_FFFF_FFFF)
    return generator


def sample_anchors(loss_mask: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws anchors of one sample without replacement.

    Args:
        loss_mask (`torch.Tensor` of shape `(length,)`): True on response tokens.
        count (`int`): how many to draw; fewer if the response is shorter.
        generator (`torch.Generator`): source of randomness.

    Returns:
        `torch.Tensor` of shape `(n,)`: positions in ascending order, n <= count.
    """
    candidates = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen].sort().values


def draw_anchors(
    loss_mask: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor, count: int, *, seed: int, step: int
) -> torch.Tensor:
    """Draws anchors of S samples that lie end to end.

    Args:
        loss_mask (`torch.Tensor` of shape `(rows,)`): True on response tokens.
        lengths (`torch.Tensor` of shape `(S,)`): rows of each sample.
        indices (`torch.Tensor` of shape `(S,)`): the samples' numbers in their data.
        count (`int`): how many to draw from each.
        seed, step (`int`): of the run, and the optimiser step: with a sample's number they determine its anchors.

    Returns:
        `torch.Tensor` of shape `(n,)`: anchor rows in ascending order; the last row alone if no sample has any, since
        a block there has no label to learn.
    """
    masks = loss_mask.cpu().split(lengths.tolist())
    starts = (lengths.cumsum(0) - lengths).tolist()
    anchors = torch.cat(
        [
            start + sample_anchors(mask, count, anchor_generator(seed, step, index))
            for mask, start, index in zip(masks, starts, indices.tolist(), strict=True)
        ]
    )
    if not len(anchors):
        anchors = torch.tensor([len(loss_mask) - 1])
    return anchors.to(loss_mask.device)


def supervised_slots(loss_mask: torch.Tensor, anchors: torch.Tensor, ends: torch.Tensor, gamma: int) -> torch.Tensor:
    """Which slots of which blocks count: those before the first label outside the response.

    Args:
        loss_mask (`torch.Tensor` of shape `(rows,)`): True on response tokens, of sequences laid end to end.
        anchors (`torch.Tensor` of shape `(blocks,)`): anchor rows.
        ends (`torch.Tensor` of shape `(blocks,)`): the row after the last one of each anchor's sequence.
        gamma (`int`): slots of a block.

    Returns:
        `torch.Tensor` of shape `(blocks, gamma)`, bool.
    """
    labels = anchors[:, None] + torch.arange(1, gamma + 1, device=anchors.device)
    valid = (labels < ends[:, None]) & loss_mask[labels.clamp(max=len(loss_mask) - 1)]
    return valid.cumprod(dim=-1).bool()


def block_mask(anchors: torch.Tensor, length: int, gamma: int, window: int | None = None) -> torch.Tensor:
    """Attention mask of the blocks of one sequence against its context and against each other.

    Args:
        anchors (`torch.Tensor` of shape `(blocks,)`): anchor positions in the sequence.
        length (`int`): context rows.
        gamma (`int`): slots of a block.
        window (`int`, *optional*): sliding window in tokens; every slot then sees the `window` rows before its anchor.

    Returns:
        `torch.Tensor` of shape `(blocks * gamma, length + blocks * gamma)`, bool, True where a query looks.
    """
    starts = anchors.repeat_interleave(gamma)[:, None]  # [queries, 1]
    rows = torch.arange(length, device=anchors.device)
    context = rows < starts
    if window is not None:
        context = context & (rows >= starts - window)
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(gamma)
    return torch.cat([context, owner[:, None] == owner], dim=-1)
