"""What the sub-commands share: loading a pair and turning a prompt into input ids."""

from __future__ import annotations

import logging

import torch
from rich.console import Console
from rich.logging import RichHandler
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_dspark import DSparkConfig
from ..loading import DEMO_DRAFTER, check_exists, load
from ..modeling_dspark import DSparkDrafter

DTYPES = ("auto", "bfloat16", "float16", "float32")


def show_log() -> None:
    """This package's own log on stderr: sizes of what is written, counts of what is left out."""
    log = logging.getLogger("hf_dspark")
    log.setLevel(logging.INFO)
    if not log.handlers:
        console = Console(stderr=True, soft_wrap=True)
        log.addHandler(RichHandler(console=console, show_time=False, show_level=False, show_path=False))


def load_pair(
    drafter: str | None, target: str | None, dtype: str, **settings: float | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]:
    """Target, tokenizer and drafter of the options; the bundled pair by default.

    Args:
        drafter, target (`str`, *optional*): folders or Hub ids.
        dtype (`str`): one of `DTYPES`.
        settings: fields of the drafter's config to change; `None` leaves one as it is.

    Raises:
        ValueError: if `dtype` or a setting is out of range (before weights are read), or the models do not fit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Expected --dtype out of {', '.join(DTYPES)}, got {dtype!r}.")
    precision = dtype if dtype == "auto" else getattr(torch, dtype)
    name = drafter or str(DEMO_DRAFTER)
    changes = {key: value for key, value in settings.items() if value is not None}
    if changes:
        check_exists(name, "drafter")
        config = DSparkConfig.from_pretrained(name)
        config.update(changes)
        config.check_drafting()
    model, tokenizer, loaded = load(name, target=target, dtype=precision)
    loaded.config.update(changes)
    return model, tokenizer, loaded


def check_messages(messages: list[dict[str, str]]) -> None:
    """Raises ValueError if the last message is empty."""
    if not messages or not messages[-1]["content"].strip():
        raise ValueError("Expected a prompt with some text, got an empty one. Say what the model should answer.")


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], drafter: DSparkDrafter
) -> BatchEncoding:
    """Input ids of a conversation, with the chat template as in training; plain text without a template.

    Raises:
        ValueError: if the last message is empty.
    """
    check_messages(messages)
    if tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **(drafter.config.chat_template_kwargs or {}),
    )
