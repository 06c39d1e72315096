"""What the sub-commands share: loading a pair and turning a prompt into input ids."""

from __future__ import annotations

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..loading import DEMO_DRAFTER, load
from ..modeling_dspark import DSparkDrafter

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_pair(
    drafter: str | None, target: str | None, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]:
    """Target, tokenizer and drafter of the options; the bundled pair by default.

    Raises:
        ValueError: if `dtype` is unknown or the models do not fit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Expected --dtype out of {', '.join(DTYPES)}, got {dtype!r}.")
    precision = dtype if dtype == "auto" else getattr(torch, dtype)
    return load(drafter or str(DEMO_DRAFTER), target=target, dtype=precision)


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], drafter: DSparkDrafter
) -> BatchEncoding:
    """Input ids of a conversation, with the chat template as in training; plain text without a template.

    Raises:
        ValueError: if the last message is empty.
    """
    if not messages or not messages[-1]["content"].strip():
        raise ValueError("Expected a prompt with some text, got an empty one.")
    if tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **(drafter.config.chat_template_kwargs or {}),
    )
