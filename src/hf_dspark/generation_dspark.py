"""The accept rule and the loop for one request.

Speculative decoding (Leviathan et al. 2023, algorithm 1): the target scores anchor and drafts in one forward; draft
x_k is accepted with probability min(1, p(x_k) / q(x_k)); at the first rejection a token is drawn from the normalised
positive part of p - q; if all are accepted one more is drawn from p. Greedy decoding is the special case of one-hot p
and q. The output has exactly the target's distribution.

The loop commits token by token, as plain generation does: logits processors see each committed prefix once and in
order, stopping criteria see each committed token, and the first stop ends the text, wherever in a block it falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from ._compat import CACHE, SLIDING_CACHE_ROLLS_BACK
from .drafting_dspark import DSparkCandidateGenerator, round_observer
from .modeling_dspark import DSparkDrafter

logger = logging.get_logger(__name__)


def accept_or_resample(p: torch.Tensor, q: torch.Tensor | None, draft: int) -> tuple[bool, int]:
    """The lossless accept rule for one draft token.

    Args:
        p (`torch.Tensor` of shape `(vocab_size,)`): the target's distribution.
        q (`torch.Tensor` of shape `(vocab_size,)`, *optional*): the distribution the draft was drawn from; `None` if
            it was chosen without drawing, which is a one-hot distribution.
        draft (`int`): the draft token.

    Returns:
        whether the draft is accepted, and the token to commit: the draft, or a draw from the positive part of p - q.
    """
    q_draft = 1.0 if q is None else float(q[draft])
    # Strictly smaller, so a token of p = 0 is never accepted; q = 0 cannot have been drawn and is no free pass.
    if q_draft > 0 and float(torch.rand(())) * q_draft < float(p[draft]):
        return True, draft
    residual = p.clone()
    if q is None:
        residual[draft] = 0
    else:
        residual = (p - q).clamp(min=0)
    if not float(residual.sum()) > 0:  # p = q up to rounding: a rejection then has probability zero
        residual = p
    return False, int(torch.multinomial(residual, 1))


class _Outputs:
    """Scores, logits, attentions and hidden states in the form that plain generation returns them."""

    def __init__(self, generation_config: Any):
        wanted = generation_config if generation_config.return_dict_in_generate else None
        self.scores: tuple | None = () if wanted and wanted.output_scores else None
        self.logits: tuple | None = () if wanted and wanted.output_logits else None
        self.attentions: tuple | None = () if wanted and wanted.output_attentions else None
        self.hidden_states: tuple | None = () if wanted and wanted.output_hidden_states else None

    def add(self, outputs: Any, row: int | None, row_logits: torch.Tensor, scores: torch.Tensor, length: int) -> None:
        """Records one committed token: row `row` of a forward, or its whole prompt (`None`), over `length` keys."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (row_logits,)
        if self.attentions is not None:
            layers = outputs.attentions
            if row is not None and layers:  # sdpa returns none
                windows = [getattr(layer, "sliding_window", None) for layer in outputs[CACHE].layers]
                layers = tuple(
                    None if x is None else _attention_row(x, row, length, window)
                    for x, window in zip(layers, windows, strict=True)
                )
            self.attentions += (layers,)
        if self.hidden_states is not None:
            layers = outputs.hidden_states
            self.hidden_states += (layers if row is None else tuple(x[:, row : row + 1] for x in layers),)


def _attention_row(attention: torch.Tensor, row: int, length: int, window: int | None) -> torch.Tensor:
    """One row of a forward's attention, over the keys that a forward of this row alone would have had."""
    later = attention.shape[-2] - row - 1  # rows after it, which it does not see
    end = min(length, attention.shape[-1] - later)
    return attention[..., row : row + 1, max(0, end - window) if window else 0 : end]


def speculative_generate(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    input_ids: torch.LongTensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """Generates for one request: prefill, then rounds of draft, verify, commit.

    Args:
        target (`PreTrainedModel`): verifies; runs with its own cache and attention.
        drafter ([`DSparkDrafter`]): drafts.
        input_ids (`torch.LongTensor` of shape `(1, length)`): the prompt.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate()` prepared them.

    Returns:
        what plain `generate()` returns for the same options.
    """
    with _drafting(target, drafter, generation_config, logits_processor, model_kwargs) as generator:
        do_sample = generation_config.do_sample
        recorded = _Outputs(generation_config)
        observe = round_observer.get()
        finished = False
        rounds = drafted = gained = 0

        def commit(
            outputs: Any, row: int | None, choose: Callable[[torch.Tensor], tuple[bool, int]]
        ) -> tuple[bool, int]:
            """Scores one position, lets `choose` pick its token, and commits it as plain generation would."""
            nonlocal input_ids, finished
            position = -1 if row is None else row
            row_logits = outputs.logits[:, position].to(copy=True, dtype=torch.float32, device=input_ids.device)
            scores = logits_processor(input_ids, row_logits)
            kept, token = choose(scores[0])
            recorded.add(outputs, row, row_logits, scores, input_ids.shape[1])
            committed = torch.tensor([token], device=input_ids.device)
            input_ids = torch.cat([input_ids, committed[None]], dim=-1)
            finished = bool(stopping_criteria(input_ids, recorded.scores).all())
            if streamer is not None:
                streamer.put(committed.cpu())
            return kept, token

        def from_target(scores: torch.Tensor) -> tuple[bool, int]:
            return False, int(torch.multinomial(scores.softmax(-1), 1) if do_sample else scores.argmax())

        def from_draft(draft: int, q: torch.Tensor | None) -> Callable[[torch.Tensor], tuple[bool, int]]:
            def choose(scores: torch.Tensor) -> tuple[bool, int]:
                if do_sample:
                    return accept_or_resample(scores.softmax(-1), q, draft)
                best = int(scores.argmax())
                return best == draft, best

            return choose

        outputs = target._prefill(input_ids, generation_config, model_kwargs)
        _check_rolls_back(outputs[CACHE], target)
        outputs[CACHE].activate_past_recording()  # only now: rows of the prompt are never taken back
        generator.commit_prompt()
        commit(outputs, None, from_target)
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs)

        with target._optimize_model_for_decode():
            while not finished:
                started = time.perf_counter()
                block = generator.draft(input_ids)
                length = 0 if block is None else int(block.lengths[0])
                drafts = [] if block is None else block.token_ids[0].tolist()
                q = None if block is None or block.logits is None else block.logits[0].softmax(-1).to(input_ids.device)
                drafted_at = time.perf_counter()

                candidates = torch.cat([input_ids, input_ids.new_tensor([drafts[:length]])], dim=-1)
                kwargs = dict(model_kwargs)
                if length:
                    kwargs = target._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=length)
                model_inputs = target.prepare_inputs_for_generation(
                    candidates, next_sequence_length=length + 1, is_first_iteration=False, **kwargs
                )
                if "logits_to_keep" in model_inputs:
                    model_inputs["logits_to_keep"] = length + 1
                outputs = target(**model_inputs, return_dict=True)
                verified_at = time.perf_counter()

                before, accepted = input_ids.shape[1], 0
                try:
                    for row in range(length + 1):
                        choose = (
                            from_target if row == length else from_draft(drafts[row], None if q is None else q[row])
                        )
                        kept, _ = commit(outputs, row, choose)
                        accepted += kept
                        if finished or not kept:
                            break
                finally:
                    # What plain generation would have left, also when a streamer or criterion raises: rows of all
                    # committed tokens but the last.
                    added = input_ids.shape[1] - before
                    outputs[CACHE].crop(-(length + 1 - added))
                generator.commit(added)
                model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=added)
                rounds, drafted, gained = rounds + 1, drafted + length, gained + added
                if observe is not None:
                    record = generator.describe(block)
                    record.accepted, record.committed = accepted, input_ids[0, before:].tolist()
                    record.draft_seconds, record.verify_seconds = drafted_at - started, verified_at - drafted_at
                    record.other_seconds = time.perf_counter() - verified_at
                    observe(record)

        if streamer is not None:
            streamer.end()
        if rounds:
            message = f"DSpark: {gained} tokens in {rounds} rounds, accepted length {gained / rounds:.2f} with bonus."
            if drafted:
                logger.info(message)
            else:
                logger.warning(
                    f"{message} Nothing was drafted: see confidence_threshold, num_draft_tokens and processors."
                )
        if not generation_config.return_dict_in_generate:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=recorded.scores,
            logits=recorded.logits,
            attentions=recorded.attentions,
            hidden_states=recorded.hidden_states,
            **{CACHE: outputs[CACHE]},
        )


@contextmanager
def _drafting(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    generation_config: Any,
    processors: LogitsProcessorList,
    kwargs: dict,
) -> Iterator[DSparkCandidateGenerator]:
    """A candidate generator that leaves nothing behind, also after an exception: no hook, no recording cache."""
    generator = DSparkCandidateGenerator(target, drafter, generation_config, processors, kwargs)
    cache = kwargs[CACHE]
    try:
        yield generator
    finally:
        generator.close()
        for layer in cache.layers:
            layer.record_past = False  # the cache may go on in plain generation, which never crops


def _check_rolls_back(cache: Any, target: PreTrainedModel) -> None:
    stuck = [type(layer).__name__ for layer in cache.layers if not getattr(layer, "is_croppable", True)]
    if not SLIDING_CACHE_ROLLS_BACK:
        stuck += [
            type(layer).__name__ for layer in cache.layers if type(layer).__name__ == "DynamicSlidingWindowLayer"
        ]
    if stuck:
        raise ValueError(
            f"Expected a cache of {type(target).__name__} that can drop rejected drafts, got layers of type "
            f"{', '.join(sorted(set(stuck)))}. Generate without assistant_model, or without passing a cache."
        )
