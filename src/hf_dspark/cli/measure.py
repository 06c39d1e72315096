"""`hf-dspark measure`: accepted length, and speed against plain decoding, over files of prompts."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..decoding.trace import Trace
from ..evaluation.prompts import read_prompts
from ..modeling_dspark import DSparkDrafter
from .models import encode, load_pair


@dataclass
class Measured:
    """Results of one file.

    Attributes:
        trace ([`Trace`]): all its rounds.
        prompts (`int`): how many were answered.
        speedups (`list[float]`): one a prompt, seconds per token of plain decoding over DSpark's; empty if not timed.
        identical (`int`): greedy answers equal to plain decoding's, of those timed.
    """

    trace: Trace = field(default_factory=Trace)
    prompts: int = 0
    speedups: list[float] = field(default_factory=list)
    identical: int = 0


def run(
    prompts: list[Path],
    *,
    drafter: str | None,
    target: str | None,
    temperature: float,
    max_new_tokens: int,
    limit: int | None,
    dtype: str,
    seed: int,
    speed: bool,
) -> None:
    """Measures and prints a table; see `hf-dspark measure --help`."""
    logging.set_verbosity_error()
    stems = [path.stem for path in prompts]
    sets = {path.stem if stems.count(path.stem) == 1 else str(path): read_prompts(path, limit) for path in prompts}
    model, tokenizer, draft = load_pair(drafter, target, dtype)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    results = {}
    for name, conversations in sets.items():
        results[name] = Measured()
        for messages in logging.tqdm(conversations, desc=name, unit="prompt"):
            _answer(model, tokenizer, draft, messages, options, results[name], seed, speed)
    console = Console()
    console.width = max(console.width, 110)  # a table in a file or a narrow window is not squeezed
    console.print(_table(results, speed, temperature, str(model.dtype).removeprefix("torch.")))


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDrafter,
    messages: list[dict[str, str]],
    options: dict,
    into: Measured,
    seed: int,
    speed: bool,
) -> None:
    inputs = encode(tokenizer, messages, draft).to(model.device)
    length = inputs["input_ids"].shape[1]
    seconds, texts = {}, {}
    for name, assistant in (("plain", None), ("dspark", draft)) if speed else (("dspark", draft),):
        set_seed(seed + into.prompts)
        started = time.perf_counter()
        if assistant is None:
            texts[name] = model.generate(**inputs, **options)
        else:
            with into.trace:
                texts[name] = model.generate(**inputs, **options, assistant_model=assistant)
        seconds[name] = (time.perf_counter() - started) / (texts[name].shape[1] - length)
    into.prompts += 1
    if speed:
        into.speedups.append(seconds["plain"] / seconds["dspark"])
        into.identical += torch.equal(texts["plain"], texts["dspark"])


def _table(results: dict[str, Measured], speed: bool, temperature: float, dtype: str) -> Table:
    table = Table(title=f"temperature {temperature:g}, {dtype}; accepted length with bonus token")
    for column in ("prompts", "answered", "rounds", "accepted length", "acceptance @1 @2 @3"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    if speed:
        table.add_column("speed-up, median (quartiles)", justify="right")
    if speed and temperature == 0:
        table.add_column("identical", justify="right")
    everything = Measured()
    for measured in results.values():
        everything.trace.rounds += measured.trace.rounds
        everything.prompts += measured.prompts
        everything.speedups += measured.speedups
        everything.identical += measured.identical
    for name, measured in (*results.items(), ("all", everything)):
        rates = "  ".join(f"{rate:.2f}" for rate in measured.trace.conditional_acceptance()[:3])
        row = [
            name,
            str(measured.prompts),
            str(len(measured.trace.rounds)),
            f"{measured.trace.accepted_length:.2f}",
            rates,
        ]
        if speed:
            middle = statistics.median(measured.speedups)
            low, _, high = (
                statistics.quantiles(measured.speedups, n=4)
                if len(measured.speedups) > 1
                else [middle, middle, middle]
            )
            row.append(f"{middle:.2f}x ({low:.2f}-{high:.2f})")
        if speed and temperature == 0:
            row.append(f"{measured.identical} of {measured.prompts}")
        table.add_row(*row)
    return table
