"""The two small heads behind the backbone: the sequential (Markov) head and the confidence head.

The backbone predicts every slot of a block at once, so slot k knows nothing of the token chosen in slot k-1. The
sequential head adds a bias to the base logits, left to right, from the previous token (paper, semi-autoregressive
head): logits_k = U_k + W2 z_k. The confidence head estimates how likely the token of slot k is to be accepted, given
that all before it were; it never sees that token itself, which is what makes decisions on it lossless.
"""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """First-order Markov bias B(x_{k-1}, .) = W2 W1[x_{k-1}].

    `latent` gives z_k, of shape `(..., rank)`; `markov_w2` turns it into a bias over the draft vocabulary.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        # W1 is indexed by target ids, also with a reduced draft vocabulary: the anchor may be any token.
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def latent(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One slot.

        Args:
            previous (`torch.Tensor` of shape `(..., rank)`): Markov embedding of the previous token, `markov_w1(x)`.
            hidden (`torch.Tensor` of shape `(..., hidden_size)`): the slot's backbone output.
            state (`torch.Tensor`, *optional*): what the last call returned; `None` in slot 0.

        Returns:
            the latent `(..., rank)` and the state for the next slot.
        """
        return previous, None

    def teacher_forced(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Latents of whole blocks whose previous tokens are known.

        Args:
            previous (`torch.Tensor` of shape `(..., gamma, rank)`): Markov embeddings of the tokens before each slot.
            hidden (`torch.Tensor` of shape `(..., gamma, hidden_size)`): backbone outputs.

        Returns:
            `torch.Tensor` of shape `(..., gamma, rank)`.
        """
        return self.latent(previous, hidden, None)[0]


class GatedMarkovHead(MarkovHead):
    """Markov bias whose embedding is gated by the slot: z_k = sigmoid(G [h_k; W1[x_{k-1}]]) * W1[x_{k-1}]."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, previous, hidden, state):
        return self.gate_proj(torch.cat([hidden, previous], dim=-1)).sigmoid() * previous, None


class RNNHead(MarkovHead):
    """Recurrent bias: [s_{k-1}; W1[x_{k-1}]; h_k] gives gate g, candidate c and output o;
    s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c), z_k = tanh(o), s_0 = 0."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, previous, hidden, state):
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def teacher_forced(self, previous, hidden):
        latents, state = [], None
        for slot in range(previous.shape[-2]):
            latent, state = self.latent(previous[..., slot, :], hidden[..., slot, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


class ConfidenceHead(nn.Module):
    """Estimate of conditional acceptance: c_k = sigmoid(w . [h_k; W1[x_{k-1}]] + b)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(width, 1, bias=config.confidence_head_bias)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Raw confidence logits.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden_size)`): backbone outputs.
            previous (`torch.Tensor` of shape `(..., rank)`, *optional*): Markov embeddings of the tokens before.

        Returns:
            `torch.Tensor` of shape `(...)`.
        """
        features = torch.cat([hidden, previous], dim=-1) if self.with_markov else hidden
        return self.proj(features).squeeze(-1)


def confidence(logits: torch.Tensor, temperatures: list[float] | None) -> torch.Tensor:
    """Calibrated confidences c_k = sigmoid(logit_k / T_k) (paper, sequential temperature scaling).

    Args:
        logits (`torch.Tensor` of shape `(..., gamma)`): raw confidence logits.
        temperatures (`list[float]`, *optional*): one a slot; `None` leaves them as they are.

    Returns:
        `torch.Tensor` of shape `(..., gamma)`, float32.
    """
    logits = logits.float()
    if temperatures is not None:
        logits = logits / torch.tensor(temperatures[: logits.shape[-1]], device=logits.device)
    return logits.sigmoid()


def threshold_lengths(confidences: torch.Tensor, threshold: float) -> torch.Tensor:
    """Verification lengths under a plain threshold: the first slot whose c_k is below it ends the block.

    Args:
        confidences (`torch.Tensor` of shape `(batch, gamma)`): calibrated confidences.
        threshold (`float`): in [0, 1]; 0 keeps every slot.

    Returns:
        `torch.Tensor` of shape `(batch,)`: lengths in [0, gamma].
    """
    return (confidences >= threshold).long().cumprod(dim=-1).sum(dim=-1)
