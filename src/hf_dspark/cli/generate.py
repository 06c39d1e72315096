"""`hf-dspark generate`: one answer, streamed in two colours, with what drafting gained."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..decoding.trace import Trace
from ..drafting_dspark import Round
from ..evaluation.audit import audit_greedy
from ..modeling_dspark import DSparkDrafter
from .models import check_messages, encode, load_pair

REPEATS = 3
DRAFTED, OWN = "bold cyan", "yellow"


class ColouredStream:
    """Prints tokens as they are committed: accepted drafts in one colour, the target's own in another."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase):
        self.console = console
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def put(self, token: int, style: str) -> None:
        """Adds one token; characters that need further tokens wait for them."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        self.console.print(Text(text[len(self._shown) :], style=style), end="", soft_wrap=True)
        self._shown = text

    def round(self, record: Round) -> None:
        """Adds the tokens of a round: its accepted drafts come first."""
        for index, token in enumerate(record.committed):
            self.put(token, DRAFTED if index < record.accepted else OWN)


class _FirstToken:
    """A streamer that hands on the token of the prefill, which belongs to no round."""

    def __init__(self, show: ColouredStream):
        self.show = show
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call carries the prompt
            self.show.put(int(value), OWN)

    def end(self) -> None:
        """Nothing is held back."""


def run(
    prompt: str,
    *,
    drafter: str | None,
    target: str | None,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    confidence_threshold: float | None,
    num_draft_tokens: int | None,
    dtype: str,
    compare: bool,
    as_json: bool,
) -> None:
    """Generates and prints; see `hf-dspark generate --help`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(highlight=False)
    messages = [{"role": "user", "content": prompt}]
    check_messages(messages)
    settings = {"confidence_threshold": confidence_threshold, "num_draft_tokens": num_draft_tokens}
    model, tokenizer, draft = load_pair(drafter, target, dtype, **settings)
    inputs = encode(tokenizer, messages, draft).to(model.device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    stream = ColouredStream(console, tokenizer)
    streamer = None if as_json else _FirstToken(stream)
    set_seed(seed)
    started = time.perf_counter()
    with Trace(on_round=None if as_json else stream.round) as trace:
        output = model.generate(**inputs, **options, assistant_model=draft, streamer=streamer)
    seconds = time.perf_counter() - started
    new = output[0, inputs["input_ids"].shape[1] :]
    report: dict[str, Any] = {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "tokens_per_second": len(new) / seconds,
        "accepted_length": trace.accepted_length,
        "rounds": len(trace.rounds),
        "drafted": trace.drafted,
        "verified": trace.verified,
        "accepted": trace.accepted,
        "dtype": str(model.dtype).removeprefix("torch."),
        "speedup": None,
        "identical": None,
    }
    if compare:
        report |= _compare(model, draft, inputs, options, seed)
    if as_json:
        print(json.dumps(report))
        return
    console.print()
    console.print()
    console.print(Text.assemble(("accepted draft", DRAFTED), "  ", ("target's own", OWN)))
    console.print(_status(report), soft_wrap=True)


def _compare(
    model: PreTrainedModel, draft: DSparkDrafter, inputs: dict[str, torch.Tensor], options: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Plain generation and DSpark in turn, warm, in this process: medians of three, and whether the texts agree."""
    seconds: dict[str, list[float]] = {"plain": [], "dspark": []}
    texts: dict[str, torch.Tensor] = {}
    for _ in range(REPEATS):
        for name, assistant in (("plain", None), ("dspark", draft)):
            set_seed(seed)
            started = time.perf_counter()
            texts[name] = model.generate(**inputs, **options, assistant_model=assistant)
            elapsed = time.perf_counter() - started
            # Sampled texts differ in length, so the time of a token is what compares.
            seconds[name].append(elapsed / (texts[name].shape[1] - inputs["input_ids"].shape[1]))
    result: dict[str, Any] = {
        "speedup": statistics.median(seconds["plain"]) / statistics.median(seconds["dspark"]),
        "plain_tokens_per_second": 1 / statistics.median(seconds["plain"]),
        "tokens_per_second": 1 / statistics.median(seconds["dspark"]),
    }
    if not options["do_sample"]:
        result["identical"] = torch.equal(texts["plain"], texts["dspark"])
        if not result["identical"]:
            result["largest_gap"] = audit_greedy(model, texts["dspark"], inputs["input_ids"].shape[1]).largest_gap
    return result


def _status(report: dict[str, Any]) -> str:
    parts = [
        f"{report['tokens']} tokens",
        f"{report['tokens_per_second']:.1f} tok/s",
        f"accepted length {report['accepted_length']:.2f}",
        f"{report['rounds']} rounds",
    ]
    if report["speedup"] is not None:
        parts.append(
            f"speed-up {report['speedup']:.2f}x against plain ({report['plain_tokens_per_second']:.1f} tok/s)"
        )
    if report["identical"]:
        parts.append("output identical")
    elif report["identical"] is False:
        parts.append(
            f"output not identical: {report['dtype']} rounding swapped near-equal logits, every token within "
            f"{report['largest_gap']:.3f} of the target's maximum (--dtype float32 is exact)"
        )
    if report["speedup"] is not None and report["speedup"] < 1:
        parts.append("drafting is slower than plain decoding on this machine")
    if not report["verified"]:
        parts.append("nothing was drafted")
    return " · ".join(parts)
