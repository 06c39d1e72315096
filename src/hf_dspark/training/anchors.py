"""Anchors: where training blocks start, what they are supervised with, and what they may see.

Position a may be an anchor if its own token and the next one belong to the response (paper, training). Its block has
gamma slots at positions a .. a+gamma-1 and labels a+1 .. a+gamma; slots count as one prefix, up to the first label
outside the response. A block sees context rows before its anchor and itself, nothing of other blocks.
"""

from __future__ import annotations

import torch


def anchor_generator(seed: int, epoch: int, sample: int) -> torch.Generator:
    """A generator that depends on (seed, epoch, sample) alone, so runs on any number of devices draw alike."""
    generator = torch.Generator()
    generator.manual_seed(hash((seed, epoch, sample)) & 0x7FFF_FFFF_FFFF_FFFF)
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


def supervised_slots(loss_mask: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor, gamma: int) -> torch.Tensor:
    """Which slots of which blocks count: those before the first label outside the response.

    Args:
        loss_mask (`torch.Tensor` of shape `(batch, length)`): True on response tokens, False on padding.
        anchors (`torch.Tensor` of shape `(batch, blocks)`): anchor positions.
        keep (`torch.Tensor` of shape `(batch, blocks)`): False for blocks that only fill the batch.
        gamma (`int`): slots of a block.

    Returns:
        `torch.Tensor` of shape `(batch, blocks, gamma)`, bool.
    """
    length = loss_mask.shape[1]
    labels = anchors[..., None] + torch.arange(1, gamma + 1, device=anchors.device)
    inside = labels < length
    rows = torch.arange(len(loss_mask), device=anchors.device)[:, None, None]
    valid = inside & loss_mask[rows, labels.clamp(max=length - 1)] & keep[..., None]
    return valid.cumprod(dim=-1).bool()


def block_mask(anchors: torch.Tensor, length: int, gamma: int, window: int | None = None) -> torch.Tensor:
    """Attention mask of all blocks of a batch against the context and against each other.

    Args:
        anchors (`torch.Tensor` of shape `(batch, blocks)`): anchor positions.
        length (`int`): context rows.
        gamma (`int`): slots of a block.
        window (`int`, *optional*): sliding window in tokens; every slot then sees the `window` rows before its anchor.

    Returns:
        `torch.Tensor` of shape `(batch, 1, blocks * gamma, length + blocks * gamma)`, bool, True where a query looks.
    """
    batch, blocks = anchors.shape
    starts = anchors.repeat_interleave(gamma, dim=1)[..., None]  # [batch, queries, 1]
    rows = torch.arange(length, device=anchors.device)
    context = rows < starts
    if window is not None:
        context = context & (rows >= starts - window)
    owner = torch.arange(blocks, device=anchors.device).repeat_interleave(gamma)
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]
