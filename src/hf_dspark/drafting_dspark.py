"""Drafting during a generation: from target forwards to draft blocks.

`DSparkCandidateGenerator` is the one class that drafts, for our own loop (`speculative_generate`) and, as a
transformers `CandidateGenerator`, for the stock assisted loop. It watches the target's layers, remembers which rows
were committed, and asks the drafter for the next block.

Where a draft ends: at the verification length, at the length budget, and right *after* a token that ends the text,
never before it. Dropping x_k because of what it is would make its admission depend on itself and bias sampling
(paper, appendix A).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.utils import logging

from ._compat import CACHE
from .context_dspark import DraftBlock, DraftContext
from .features_dspark import TargetFeatures
from .heads_dspark import confidence
from .modeling_dspark import DSparkDrafter

logger = logging.get_logger(__name__)


@dataclass
class Round:
    """What happened in one round.

    Attributes:
        drafted (`list[int]`): drafts proposed, before the cut to the verification length.
        confidences (`list[float]`): calibrated confidence of each draft; empty without a confidence head.
        confidence_logits (`list[float]`): the raw values.
        verified (`int`): drafts sent to the target.
        accepted (`int`): drafts accepted and kept.
        committed (`list[int]`): tokens added to the text: the accepted drafts, then one of the target's own, unless
            the text ended on a draft.
        draft_seconds, verify_seconds, other_seconds (`float`): wall time as the host sees it.
    """

    drafted: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    confidence_logits: list[float] = field(default_factory=list)
    verified: int = 0
    accepted: int = 0
    committed: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0


#: Called with every finished [`Round`] of generations in this context; set by `hf_dspark.Trace`.
round_observer: ContextVar[Callable[[Round], None] | None] = ContextVar("dspark_round_observer", default=None)


def draft_processors(processors: LogitsProcessorList) -> list[LogitsProcessor]:
    """The processors that the drafter may use copies of; all others run in verification only.

    A processor may have a memory, which must see committed tokens only. A copy is safe if all its state lies in
    the object: that holds for transformers' own, but not for a function or class of the user, whose state may be a
    global or a closure, nor for one that asks such a function or a model. Leaving one out costs acceptance, never
    correctness.

    Args:
        processors (`LogitsProcessorList`): the target's.

    Returns:
        `list[LogitsProcessor]`: the originals to copy for each block.
    """
    return [processor for processor in processors if _keeps_its_state(processor)]


def _keeps_its_state(processor: LogitsProcessor) -> bool:
    if not type(processor).__module__.startswith("transformers."):
        return False
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return False
    if any(isinstance(value, nn.Module) for value in vars(processor).values()):
        return False
    try:
        copy.deepcopy(processor)
    except (TypeError, RuntimeError, copy.Error):  # a random generator inside, for one
        return False
    return True


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts blocks for one request.

    Args:
        target (`PreTrainedModel`): the model that verifies.
        drafter ([`DSparkDrafter`]): the model that drafts.
        generation_config (`GenerationConfig`): as `generate()` prepared it.
        logits_processor (`LogitsProcessorList`): the target's processors.
        model_kwargs (`dict`): as `generate()` prepared them, before the first forward; gives mask and cache.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[
        dict[str, Any]
    ] = {}  # layers are watched by hooks: what the user asks for stays as it is

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ):
        drafter.config.check_drafting()
        self.drafter = drafter
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        eos = generation_config._eos_token_tensor
        self.eos_token_ids = [] if eos is None else eos.flatten().tolist()
        self.processors = draft_processors(logits_processor)
        self.context = DraftContext(drafter.borrow(target))
        cache = model_kwargs.get(CACHE)
        self._past = 0 if cache is None else cache.get_seq_length()
        self._mask = model_kwargs.get("attention_mask")
        self._open: Round | None = None  # the stock loop's last round, until it says how many were accepted
        self._features = TargetFeatures(target, list(drafter.config.target_layer_ids))
        self._finalizer = weakref.finalize(self, self._features.close)

    def close(self) -> None:
        """Takes the hooks off the target. The stock loop has no place for it: there, collection does it."""
        self._finalizer()

    def commit_prompt(self) -> None:
        """Takes the features of the prefill, without rows of padding, at their true positions."""
        features = self._features.take()
        rows = features.shape[1]
        if self._mask is None:
            positions = torch.arange(self._past, self._past + rows)[None]
        else:
            mask = self._mask.to(features.device)
            positions = (mask.long().cumsum(dim=-1) - 1)[:, -rows:]
            real = mask[0, -rows:].bool()
            features, positions = features[:, real], positions[:, real]
        self.context.append(features, positions)
        if self._past:
            logger.warning_once(
                f"The cache already held {self._past} tokens, whose features the drafter has never seen. It drafts "
                f"from the {features.shape[1]} new ones: same text, lower acceptance until more are generated."
            )

    def commit(self, rows: int) -> None:
        """Takes the features of the last forward's first `rows` rows: the anchor and the accepted drafts."""
        features = self._features.take()[:, :rows]
        start = self.context.next_position
        self.context.append(features, torch.arange(start, start + rows)[None])

    def draft(self, input_ids: torch.LongTensor) -> DraftBlock | None:
        """The next block, cut to what should be verified.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): committed tokens; the last one is the anchor.

        Returns:
            [`DraftBlock`] with `lengths` set, or `None` if nothing may be drafted.
        """
        limit = self.drafter.config.num_draft_tokens
        budget = self.max_length - input_ids.shape[1] - 1  # a verification adds at least one token of the target's own
        if budget <= 0 or limit == 0:
            return None
        block = self.drafter.propose(
            self.context,
            input_ids[:, -1],
            num_draft_tokens=budget,
            do_sample=self.do_sample,
            processors=LogitsProcessorList(copy.deepcopy(self.processors)),  # in their present state
            prefix_ids=input_ids,
        )
        for slot, token in enumerate(block.token_ids[0].tolist()):
            if token in self.eos_token_ids:
                block.lengths.clamp_(max=slot + 1)
                break
        return block

    def describe(self, block: DraftBlock | None) -> Round:
        """A [`Round`] with what is known before verification."""
        if block is None:
            return Round()
        record = Round(drafted=block.token_ids[0].tolist(), verified=int(block.lengths[0]))
        if block.confidence_logits is not None:
            record.confidence_logits = block.confidence_logits[0].tolist()
            calibrated = confidence(block.confidence_logits, self.drafter.config.sts_temperatures)
            record.confidences = calibrated[0].tolist()
        return record

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """The stock loop's question: candidates behind `input_ids`, and their processed logits under sampling.

        A round is reported to the trace when the next one begins, so the last one of a generation is not.
        """
        if is_first_iteration:
            return input_ids, None
        if self.context.next_position == 0:
            self.commit_prompt()
        else:
            self.commit(int(n_last_matches) + 1)
        observe = round_observer.get()
        if self._open is not None and observe is not None:
            self._open.accepted = int(n_last_matches)
            self._open.committed = input_ids[0, -self._open.accepted - 1 :].tolist()
            observe(self._open)
        block = self.draft(input_ids)
        self._open = self.describe(block)
        length = 0 if block is None else int(block.lengths[0])
        if length == 0:
            return input_ids, None  # an empty logits tensor would be an index error in the stock loop
        ids = torch.cat([input_ids, block.token_ids[:, :length].to(input_ids)], dim=-1)
        return ids, None if block.logits is None else block.logits[:, :length]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int):
        """Nothing to adapt: the length comes from the drafter's confidences."""
