"""Was every token the target's own choice? A teacher-forced audit of greedy text.

In exact arithmetic speculative and plain greedy decoding agree token for token. In bfloat16 a forward over several
tokens rounds otherwise than a forward over one, so two nearly equal logits may swap. The audit scores the finished
text in one forward and reports by how much each token missed the maximum: rounding gives gaps of the size of the
dtype's resolution, a bug gives large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Audit:
    """Gaps of one text.

    Attributes:
        gaps (`torch.Tensor` of shape `(tokens,)`): largest logit minus the committed token's, at each position.
    """

    gaps: torch.Tensor

    @property
    def swapped(self) -> int:
        """Tokens that are not the maximum of the teacher-forced forward."""
        return int((self.gaps > 0).sum())

    @property
    def largest_gap(self) -> float:
        """The largest gap, in logits."""
        return float(self.gaps.max()) if len(self.gaps) else 0.0


@torch.no_grad()
def audit_greedy(target: PreTrainedModel, sequence: torch.LongTensor, prompt_length: int) -> Audit:
    """Scores a greedy text teacher-forced.

    Args:
        target (`PreTrainedModel`): the model that generated it.
        sequence (`torch.LongTensor` of shape `(1, length)`): prompt and generated tokens, without padding.
        prompt_length (`int`): tokens of the prompt.

    Returns:
        [`Audit`].
    """
    logits = target(sequence[:, :-1], use_cache=False).logits[0, prompt_length - 1 :].float()
    chosen = logits.gather(-1, sequence[0, prompt_length:, None].to(logits.device))[:, 0]
    return Audit((logits.max(dim=-1).values - chosen).cpu())
