"""The hooks that put the loop behind `generate(assistant_model=drafter)`, and what they refuse before it starts.

Three methods of transformers' `GenerationMixin` are wrapped once, at import. A wrap acts only if the assistant speaks
our protocol, that is, has a method `get_candidate_generator`, or is such a model with peft's adapters; every other
call goes through unchanged. `unpatch()` takes them off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from ._compat import CACHE
from .generation_dspark import speculative_generate
from .modeling_dspark import DSparkDrafter


def check_request(
    target: PreTrainedModel, drafter: DSparkDrafter, mode: GenerationMode, generation_config: Any
) -> None:
    """Everything that is known to be impossible before inputs are prepared.

    Raises:
        ValueError: for beams, several return sequences, encoder-decoder and stateful targets, or a drafter that does
            not fit the target.
    """
    name = type(target).__name__
    if generation_config.num_beams > 1 or mode is not GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"Expected greedy decoding or sampling with a DSpark drafter, got {mode.value} with "
            f"num_beams={generation_config.num_beams}. Set num_beams=1, or leave out assistant_model."
        )
    if generation_config.num_return_sequences > 1:
        raise ValueError(
            f"Expected num_return_sequences=1 with a DSpark drafter, got {generation_config.num_return_sequences}. "
            "Call generate() once for each sequence."
        )
    if target.config.is_encoder_decoder:
        raise ValueError(f"Expected a decoder-only target, got {name}. DSpark drafts for decoder-only models.")
    layer_types = getattr(target.config.get_text_config(), "layer_types", None) or []
    stateful = sorted({kind for kind in layer_types if "attention" not in kind or "linear" in kind})
    if target._is_stateful or stateful:
        raise ValueError(
            f"Expected a target whose cache can drop rejected drafts, got {name}"
            f"{' with layers of type ' + ', '.join(stateful) if stateful else ', which keeps a running state'}. "
            "Recurrent state cannot be rewound: generate without assistant_model."
        )
    if not generation_config.use_cache:
        raise ValueError("Expected use_cache=True with a DSpark drafter, got False. Leave use_cache at its default.")
    drafter.config.check_drafting()
    drafter.borrow(target)


def _check_inputs(
    target: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], synced: bool
) -> None:
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"Expected one prompt with a DSpark drafter, got a batch of {input_ids.shape[0]}. "
            "Call generate() once for each prompt."
        )
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("Expected at least one prompt token, got an empty prompt. Pass input_ids with a bos token.")
    if synced:
        raise ValueError("Expected synced_gpus=False with a DSpark drafter, got True. Generate on one process.")
    if model_kwargs.get(CACHE) is None:
        raise ValueError(
            f"Expected a target with transformers' cache classes, got {type(target).__name__} without one. "
            "Generate without assistant_model."
        )


_ORIGINAL = "_dspark_original"
_stock_loop: ContextVar[bool] = ContextVar("dspark_stock_loop", default=False)


@contextmanager
def use_stock_loop() -> Iterator[None]:
    """Within this context, `generate()` drafts through transformers' own assisted loop instead of ours.

    The second route, for comparison and for code that builds on that loop. Its limits are transformers': stop strings
    and custom stopping criteria that complete inside a block are missed on every version, an end-of-text token inside
    a block too before 5.24; its sampling rule divides 0 by 0 where p = q; logits processors also see drafts that are
    rejected; and a cache that an earlier call filled is refused.
    """
    token = _stock_loop.set(True)
    try:
        yield
    finally:
        _stock_loop.reset(token)


def _speaks_dspark(assistant: Any) -> bool:
    return callable(getattr(assistant, "get_candidate_generator", None))


def without_wrapper(assistant: Any) -> Any:
    """The drafter inside a `PeftModel`, adapters included: they act in its layers. Anything else is returned as it is.

    Args:
        assistant (`Any`): what `generate()` or a trainer was given.

    Raises:
        ValueError: if the adapter is a learned prompt or prefix, which acts on calls of the wrapper alone: drafting
            makes none, and would leave it out without any error.
    """
    unwrap = getattr(assistant, "get_base_model", None)
    drafter = unwrap() if callable(unwrap) else None
    if not _speaks_dspark(drafter):
        return assistant
    config = getattr(assistant, "active_peft_config", None)  # a PeftMixedModel has none, and no learned prompts
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"Expected an adapter inside the layers of a DSpark drafter, got {type(config).__name__}, which acts on "
            "its input. Use LoraConfig or another adapter that can be merged."
        )
    return drafter


def _refuse_lost_drafter(assistant: Any) -> None:
    """A DSpark checkpoint that a plain Auto class loaded is a model with random layers: say so, instead of failing on
    a missing attribute."""
    config = getattr(assistant, "config", None)
    if getattr(config, "target_layer_ids", None) and getattr(config, "mask_token_id", None) is not None:
        raise ValueError(
            f"Expected a DSparkDrafter, got {type(assistant).__name__} built from a DSpark checkpoint: plain Auto "
            "classes leave most of its weights out. Load it with hf_dspark.DSparkDrafter.from_pretrained."
        )


def _get_candidate_generator(original, self, *args, assistant_model=None, **kwargs):
    assistant_model = without_wrapper(assistant_model)
    if not _speaks_dspark(assistant_model):
        return original(self, *args, assistant_model=assistant_model, **kwargs)
    return assistant_model.get_candidate_generator(self, *args, **kwargs)


def _validate_generation_mode(original, self, generation_mode, generation_config, generation_mode_kwargs):
    assistant = without_wrapper(generation_mode_kwargs.get("assistant_model"))
    if not _speaks_dspark(assistant):
        _refuse_lost_drafter(assistant)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)
    return check_request(self, assistant, generation_mode, generation_config)


def _assisted_decoding(
    original,
    self,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    inputs_tensor=None,
    assistant_model=None,
    assistant_tokenizer=None,
    tokenizer=None,
    **model_kwargs,
):
    drafter = without_wrapper(assistant_model)
    if _speaks_dspark(drafter):
        _check_inputs(self, input_ids, model_kwargs, synced_gpus)
        cache = model_kwargs[CACHE]
        if _stock_loop.get() and cache.get_seq_length():
            raise ValueError(
                f"Expected an empty cache for the stock loop, got one of {cache.get_seq_length()} tokens, which that "
                "loop reads wrongly. Leave the cache out, or leave use_stock_loop()."
            )
        if not _stock_loop.get():
            return speculative_generate(
                self,
                drafter,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                model_kwargs=model_kwargs,
            )
    return original(
        self,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        inputs_tensor=inputs_tensor,
        assistant_model=assistant_model,
        assistant_tokenizer=assistant_tokenizer,
        tokenizer=tokenizer,
        **model_kwargs,
    )


_HOOKS: dict[str, Callable] = {
    "_get_candidate_generator": _get_candidate_generator,
    "_validate_generation_mode": _validate_generation_mode,
    "_assisted_decoding": _assisted_decoding,
}


def _wrap(original: Callable, hook: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        return hook(original, self, *args, **kwargs)

    setattr(wrapper, _ORIGINAL, original)
    return wrapper


def patch() -> None:
    """Teaches `generate()` to use DSpark drafters. Importing the package does this; a second call does nothing.

    Only calls whose `assistant_model` speaks our protocol are changed. The environment variable
    ``HF_DSPARK_NO_PATCH=1`` leaves transformers alone at import.
    """
    for name, hook in _HOOKS.items():
        original = getattr(GenerationMixin, name)
        if not hasattr(original, _ORIGINAL):
            setattr(GenerationMixin, name, _wrap(original, hook))


def unpatch() -> None:
    """Takes all hooks off again."""
    for name in _HOOKS:
        original = getattr(getattr(GenerationMixin, name), _ORIGINAL, None)
        if original is not None:
            setattr(GenerationMixin, name, original)
