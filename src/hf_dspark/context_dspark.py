"""What passes between target and drafter: borrowed modules, a generation's memory, and a block of drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache


@dataclass
class DraftBlock:
    """The drafts of one round for R requests.

    Attributes:
        token_ids (`torch.Tensor` of shape `(R, n)`): target token ids, n <= gamma.
        logits (`torch.Tensor` of shape `(R, n, vocab_size)`, *optional*): processed logits; their softmax *is* the
            distribution the tokens were drawn from. `None` for greedy drafts, whose distribution is one-hot.
        confidence_logits (`torch.Tensor` of shape `(R, n)`, *optional*): raw; `None` without a confidence head.
        lengths (`torch.Tensor` of shape `(R,)`): how many drafts are worth verifying, 0..n.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor | None
    confidence_logits: torch.Tensor | None
    lengths: torch.Tensor


@dataclass(frozen=True)
class TargetModules:
    """The target's embedding and language modelling head, borrowed.

    Attributes:
        embed (`nn.Module`): called with token ids.
        head (`nn.Module`): called with hidden states.
    """

    embed: nn.Module
    head: nn.Module

    def __deepcopy__(self, memo: dict) -> TargetModules:
        return self  # a copied drafter borrows the same target


class DraftContext:
    """What one generation remembers for the drafter: cached context rows and the features still to be added.

    Args:
        modules ([`TargetModules`], *optional*): what the drafter borrows; `None` if it has its own embeddings.
    """

    def __init__(self, modules: TargetModules | None = None):
        self.modules = modules
        self.cache = DynamicCache()
        self.next_position = 0
        self._features: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def append(self, features: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Adds target features of committed tokens.

        Args:
            features (`torch.Tensor` of shape `(R, n, layers * hidden_size)`): n >= 1 rows.
            position_ids (`torch.Tensor` of shape `(R, n)`): their true positions, increasing.
        """
        self._features.append(features)
        self._positions.append(position_ids)
        self.next_position = int(position_ids[0, -1]) + 1

    def take(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and positions added since the last call, on the drafter's device and in its dtype."""
        features = torch.cat([rows.to(device, dtype) for rows in self._features], dim=1)
        positions = torch.cat([rows.to(device) for rows in self._positions], dim=1)
        self._features.clear()
        self._positions.clear()
        return features, positions
