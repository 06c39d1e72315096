"""Speculative rounds replayed from the target's own responses, without running the target.

While the prefix of a block is accepted, the tokens the drafter conditions on *are* the stored ones, so one
teacher-forced pass over all positions gives the accepted prefix at each of them, and walking anchor by anchor gives
the rounds of a real run.

Greedy decoding accepts the leading drafts that equal the stored continuation. For sampling, let x be the stored
token, drawn from the target's p. Accepting it with probability min(1, q(x) / p(x)) gives token x by acceptance with
probability min(p, q)(x), and by rejection with max(p - q, 0)(x): exactly what the accept-or-resample rule does with a
draft from q. So rounds over text that was sampled from p are distributed as those that would have written it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..modeling_dspark import DSparkDrafter
from .blocks import TeacherForced, draft_logits, target_probabilities, teacher_forced
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


Rule = Callable[[DSparkDrafter, TeacherForced], torch.Tensor]


def replay_greedy(drafter: DSparkDrafter, data: FeatureCache | OnlineFeatures, *, blocks_at_once: int = 128) -> Replay:
    """Replays the rounds of greedy decoding.

    Args:
        drafter ([`DSparkDrafter`]): bound to its target, or with its own embedding.
        data ([`FeatureCache`] or [`OnlineFeatures`]): greedy responses of the target.
        blocks_at_once (`int`): anchors in one pass.

    Returns:
        [`Replay`].
    """

    def equal(drafter: DSparkDrafter, blocks: TeacherForced) -> torch.Tensor:
        return draft_logits(drafter, blocks.hidden, blocks.latent).argmax(dim=-1) == blocks.labels

    return _replay(drafter, data, equal, blocks_at_once)


def replay_sampled(
    drafter: DSparkDrafter, data: FeatureCache | OnlineFeatures, *, seed: int = 0, blocks_at_once: int = 128
) -> Replay:
    """Replays rounds of sampling at temperature 1, without top-k or top-p.

    Args:
        drafter ([`DSparkDrafter`]): bound to its target, or with its own embedding.
        data ([`FeatureCache`] or [`OnlineFeatures`]): responses of the target, sampled so.
        seed (`int`): of the coins that accept.
        blocks_at_once (`int`): anchors in one pass.

    Returns:
        [`Replay`].
    """
    generator = torch.Generator().manual_seed(seed)

    def coins(drafter: DSparkDrafter, blocks: TeacherForced) -> torch.Tensor:
        label = blocks.labels.clamp(min=0)[:, None]
        q = draft_logits(drafter, blocks.hidden, blocks.latent).softmax(dim=-1).gather(-1, label)
        p = target_probabilities(drafter, blocks.target_hidden, blocks.logsumexp).gather(-1, label)
        coin = torch.rand(label.shape, generator=generator).to(p.device)
        return ((coin * p < q) & (blocks.labels[:, None] >= 0))[:, 0]

    return _replay(drafter, data, coins, blocks_at_once)


@torch.no_grad()
def _replay(drafter: DSparkDrafter, data: FeatureCache | OnlineFeatures, accepts: Rule, blocks_at_once: int) -> Replay:
    """Rounds in which `accepts` says, for each supervised slot, whether its stored token is accepted as a draft."""
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
            accepted_slots = torch.zeros_like(blocks.supervised)
            accepted_slots[blocks.supervised] = accepts(drafter, blocks)
            prefix = accepted_slots.long().cumprod(dim=-1).sum(dim=-1)
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
