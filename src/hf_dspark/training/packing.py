"""Anchor-bounded packing: blocks of several sequences in one dense batch, without padding.

The context rows of all sequences lie end to end, and so do the slots of all blocks; every other part of the backbone
works row by row. Attention alone has to know what belongs together: a block sees the rows of its own sequence before
its anchor, and itself. Cost follows anchors x block size, and the context once; no row exists that is not real.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .anchors import block_mask


@functools.cache
def _compiled_flex_attention() -> Callable:
    return torch.compile(flex_attention, dynamic=True)


@dataclass
class PackedAttention:
    """Attention of packed blocks, called by the layers like one of transformers' attention functions.

    On CUDA one flex attention over all rows, whose mask is computed from token-level indices; elsewhere one dense-mask
    SDPA a sequence.

    Args:
        lengths (`list[int]`): rows of each sequence.
        anchors (`torch.Tensor` of shape `(blocks,)`): anchor rows, ascending.
        owners (`torch.Tensor` of shape `(blocks,)`): the sequence of each anchor.
        gamma (`int`): slots of a block.
    """

    lengths: list[int]
    anchors: torch.Tensor
    owners: torch.Tensor
    gamma: int

    def __post_init__(self):
        self._masks: dict[tuple, list[torch.Tensor] | BlockMask] = {}
        self.starts = torch.tensor([0, *self.lengths], device=self.anchors.device).cumsum(0)[:-1]
        self.blocks = torch.bincount(self.owners, minlength=len(self.lengths)).tolist()

    def __call__(
        self,
        module: nn.Module,  # the layer's attention; its `window` is that of its layer type
        query: torch.Tensor,  # [1, heads, blocks * gamma, head_dim]
        key: torch.Tensor,  # [1, key heads, rows + blocks * gamma, head_dim]
        value: torch.Tensor,
        attention_mask: None,
        *,
        dropout: float,
        scaling: float,
        is_causal: bool,
    ) -> tuple[torch.Tensor, None]:
        attend = self.flex if query.is_cuda else self.dense
        return attend(module, query, key, value, dropout, scaling), None

    def dense(self, module, query, key, value, dropout: float, scaling: float) -> torch.Tensor:
        """One SDPA with a dense mask for each sequence; `(1, blocks * gamma, heads, head_dim)`."""
        rows, outputs, row, slot = sum(self.lengths), [], 0, 0
        for length, blocks, mask in zip(self.lengths, self.blocks, self._dense_masks(module.window), strict=True):
            context, own = slice(row, row + length), slice(rows + slot, rows + slot + blocks * self.gamma)
            if blocks:
                outputs.append(
                    F.scaled_dot_product_attention(
                        query[:, :, slot : slot + blocks * self.gamma],
                        torch.cat([key[:, :, context], key[:, :, own]], dim=2),
                        torch.cat([value[:, :, context], value[:, :, own]], dim=2),
                        attn_mask=mask,
                        dropout_p=dropout,
                        scale=scaling,
                        enable_gqa=True,
                    )
                )
            row, slot = row + length, slot + blocks * self.gamma
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def flex(self, module, query, key, value, dropout: float, scaling: float) -> torch.Tensor:
        """One flex attention over everything; `(1, blocks * gamma, heads, head_dim)`."""
        attend = _compiled_flex_attention() if query.is_cuda else flex_attention
        mask = self._flex_mask(module.window)
        return attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2)

    def _dense_masks(self, window: int | None) -> list[torch.Tensor]:
        if ("dense", window) not in self._masks:
            inside = (self.anchors - self.starts[self.owners]).split(self.blocks)
            self._masks["dense", window] = [
                block_mask(anchors, length, self.gamma, window)
                for anchors, length in zip(inside, self.lengths, strict=True)
            ]
        return self._masks["dense", window]

    def _flex_mask(self, window: int | None) -> BlockMask:
        if ("flex", window) not in self._masks:
            gamma, rows, anchors = self.gamma, sum(self.lengths), self.anchors
            first = self.starts[self.owners]
            if window is not None:
                first = torch.maximum(first, anchors - window)

            def looks(batch, head, slot, row):
                block = slot // gamma
                context = (row >= first[block]) & (row < anchors[block])
                return context | ((row >= rows) & ((row - rows) // gamma == block))

            slots, device = len(anchors) * gamma, anchors.device.type
            self._masks["flex", window] = create_block_mask(looks, None, None, slots, rows + slots, device=device)
        return self._masks["flex", window]
