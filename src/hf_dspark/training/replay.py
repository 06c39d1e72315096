"""Speculative rounds replayed from the target's own greedy responses, without running the target.

Greedy decoding is deterministic: from an anchor, the drafts that a round accepts are the leading ones that equal the
stored continuation. While the prefix is accepted, the tokens the drafter conditions on *are* the stored ones, so one
teacher-forced pass over all positions gives the accepted prefix at each of them, and walking anchor by anchor gives
exactly the rounds of a real greedy run with these features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..modeling_dspark import DSparkDrafter
from .blocks import draft_logits, teacher_forced
from .cache import FeatureCache
from .features import OnlineFeatures


@dataclass(frozen=True)
class Replay:
    """Rounds of an evaluation set.

    Attributes:
        accepted_length (`float`): tokens a round, bonus token included.
        conditional_acceptance (`list[float]`): P(slot k accepted | slots before it accepted), k = 1 .. gamma.
        rounds (`int`): how many.
    """

    accepted_length: float
    conditional_acceptance: list[float]
    rounds: int


@torch.no_grad()
def replay_greedy(drafter: DSparkDrafter, data: FeatureCache | OnlineFeatures, *, blocks_at_once: int = 128) -> Replay:
    """Replays every sample of `data`.

    Args:
        drafter ([`DSparkDrafter`]): bound to its target, or with its own embedding.
        data ([`FeatureCache`] or [`OnlineFeatures`]): greedy responses of the target.
        blocks_at_once (`int`): anchors in one pass.

    Returns:
        [`Replay`].
    """
    training = drafter.training
    drafter.eval()
    gamma = drafter.config.block_size
    reached = torch.zeros(gamma)
    accepted = torch.zeros(gamma)
    tokens = rounds = 0
    for index in range(len(data)):
        sample = {key: value.to(drafter.device) for key, value in data[index].items()}
        del sample["index"]
        sample["lengths"] = torch.tensor([len(sample["input_ids"])], device=drafter.device)
        response = sample["loss_mask"].nonzero()[:, 0]
        if len(response) < 2:
            continue
        lengths: dict[int, int] = {}
        for anchors in response[:-1].split(blocks_at_once):
            blocks = teacher_forced(drafter, **sample, anchors=anchors)
            logits = draft_logits(drafter, blocks.hidden, blocks.latent)
            match = torch.zeros_like(blocks.supervised)
            match[blocks.supervised] = logits.argmax(dim=-1) == blocks.labels
            prefix = match.long().cumprod(dim=-1).sum(dim=-1)
            lengths.update(zip(anchors.tolist(), prefix.tolist(), strict=True))
        anchor, last = int(response[0]), int(response[-1])
        while anchor + gamma < last:  # whole blocks only: a round cut by the end of the text says nothing
            length = lengths[anchor]
            reached[: length + 1] += 1
            accepted[:length] += 1
            tokens += length + 1
            rounds += 1
            anchor += length + 1
    drafter.train(training)
    return Replay(
        accepted_length=tokens / max(1, rounds),
        conditional_acceptance=(accepted / reached.clamp(min=1)).tolist(),
        rounds=rounds,
    )
