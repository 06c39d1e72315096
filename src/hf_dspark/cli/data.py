"""`hf-dspark data`: the target's own answers, prompts of its own, and its features on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.prompts import load_prompts
from ..loading import check_exists, load_demo_target
from ..modeling_dspark import complete_files
from ..training.cache import FeatureCache
from ..training.data import default_target_layers, read_samples
from ..training.responses import Answered, answer_prompts, check_responses
from ..training.synthesis import synthesize
from .models import DTYPES, show_log


def run_regenerate(
    prompts: str,
    output: Path,
    *,
    split: str,
    limit: int | None,
    target: str | None,
    dtype: str,
    chat_template_kwargs: str | None,
    **options: Any,
) -> None:
    """Answers prompts; see `hf-dspark data regenerate --help`."""
    template = _template_arguments(chat_template_kwargs)
    read, broken = load_prompts(prompts, split=split, limit=limit)
    model, tokenizer = _load_target(target, dtype)
    answered = answer_prompts(model, tokenizer, read, output, chat_template_kwargs=template, **options)
    print(f"{_summary(answered, broken=len(broken))}: {output}")


def run_synthesize(
    output: Path, *, target: str | None, dtype: str, chat_template_kwargs: str | None, **options: Any
) -> None:
    """Makes prompts and answers them; see `hf-dspark data synthesize --help`."""
    template = _template_arguments(chat_template_kwargs)
    model, tokenizer = _load_target(target, dtype)
    turns, answered = synthesize(model, tokenizer, output, chat_template_kwargs=template, **options)
    removed = ", ".join(f"{number} {reason}" for reason, number in sorted(turns.removed.items())) or "none"
    print(f"wrote {len(turns.prompts)} user turns, removed {removed}: {output}.prompts.jsonl")
    print(f"{_summary(answered)}: {output}")


def run_cache(
    responses: Path, output: Path, *, target_layers: str | None, target: str | None, dtype: str, bits: int
) -> None:
    """Stores target features; see `hf-dspark data cache --help`."""
    from .train import _numbers  # brings the trainer, which the other commands can do without

    show_log()
    layer_ids = _numbers(target_layers, "--target-layers")
    if not responses.is_file():  # told before the target is loaded
        raise FileNotFoundError(f"Expected a JSONL file of prompt_ids and response_ids, got no file at {responses}.")
    model, tokenizer = _load_target(target, dtype)
    text_config = model.config.get_text_config()
    check_responses(responses, model)
    samples = read_samples(responses, vocab_size=text_config.vocab_size)
    cache = FeatureCache.build(
        model,
        samples,
        output,
        layer_ids=layer_ids or default_target_layers(text_config.num_hidden_layers),
        chat_template=tokenizer.chat_template,
        bits=bits,
    )
    size = sum(file.stat().st_size for file in output.iterdir())
    tokens = sum(len(sample.input_ids) for sample in samples)
    print(f"stored features of {len(cache)} samples, {tokens:,} tokens, {size / 1e9:.2f} GB: {output}")


def _load_target(target: str | None, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target on the GPU if there is one; the bundled one in bfloat16, as for `hf-dspark train`, unless asked."""
    if dtype not in DTYPES:
        raise ValueError(f"Expected --dtype out of {', '.join(DTYPES)}, got {dtype!r}.")
    if target is None:
        model, tokenizer = load_demo_target(dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    else:
        check_exists(target, "target")
        with complete_files(target):
            model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(target)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _template_arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"Expected a JSON object such as '{{\"enable_thinking\": false}}' in --chat-template-kwargs, got {text!r}."
        )
    return arguments


def _summary(answered: Answered, broken: int = 0) -> str:
    skipped = {
        "broken": broken,
        "refused by the chat template": answered.refused,
        "too long": answered.too_long,
        "with an empty answer": answered.empty,
    }
    reasons = ", ".join(f"{number} {reason}" for reason, number in skipped.items() if number)
    speed = (
        f"{answered.new_tokens / answered.seconds:.1f} tokens/s" if answered.new_tokens else "nothing was left to do"
    )
    return (
        f"answered {answered.prompts} prompts, skipped {sum(skipped.values())}{f' ({reasons})' if reasons else ''}, "
        f"{answered.tokens:,} tokens, {speed}"
    )
