"""Prompts without a data set: the target writes user turns itself, and a filter keeps the good ones.

A chat model that is shown its template up to the opening of a user turn goes on with what users ask (Magpie, arXiv
2406.08464). Sampled that way many turns are unfinished, monotonous or the same again; `filter_turn` says which.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..evaluation.prompts import Prompt
from .responses import Answered, ResumableRows, answer_prompts, batch_seed, describe, end_tokens, generate_batch

MARK = "dsparkuserturn"  # stands for the user's text in a rendered template
TEMPERATURE, TOP_P = 1.0, 0.95
NGRAM, DISTINCT = 3, 0.7  # a turn of which fewer than 70 % of the 3-grams are different repeats itself
# Turns of one model that begin alike mostly end alike ("What is the capital of ..."), and a data set of them teaches
# the drafter one sentence. So one turn is kept of those that share this many characters after their opening.
LEADING = 48
PATIENCE = 32  # batches without a new turn after which the target is taken to have no more of them


@dataclass
class OwnTurns:
    """User turns that a target wrote.

    Attributes:
        prompts (`list[Prompt]`): those that were kept.
        removed (`Counter[str]`): how many each filter removed, in the whole file.
    """

    prompts: list[Prompt] = field(default_factory=list)
    removed: Counter[str] = field(default_factory=Counter)


class TurnFilter:
    """What is wrong with a user turn, in view of those before it.

    Args:
        min_tokens (`int`): tokens that the target has to write after the opening.
        special_ids (`set[int]`): tokens that belong to the template and not into a text.
    """

    def __init__(self, *, min_tokens: int, special_ids: set[int]):
        self.min_tokens = min_tokens
        self.special_ids = special_ids
        self._seen: set[str] = set()
        self._beginnings: set[tuple[str, str]] = set()

    def reason(self, written: list[int], text: str, opening: str, *, ended: bool) -> str | None:
        """Why a turn is to be removed, `None` if it is good.

        Args:
            written (`list[int]`): the tokens after the opening, without the one that ended the turn.
            text (`str`): the whole turn.
            opening (`str`): what it begins with.
            ended (`bool`): whether the target ended the turn itself.
        """
        if not ended:
            return "unfinished"
        if len(written) < self.min_tokens or not _normal(text):
            return "too short"
        if self.special_ids.intersection(written):
            return "with special tokens"
        grams = list(zip(*(written[start:] for start in range(NGRAM)), strict=False))
        if grams and len(set(grams)) < DISTINCT * len(grams):
            return "repetitive"
        if _normal(text) in self._seen:
            return "duplicate"
        if self._beginning(text, opening) in self._beginnings:
            return "beginning like another"
        return None

    def keep(self, text: str, opening: str) -> None:
        """Remembers a turn that is used."""
        self._seen.add(_normal(text))
        self._beginnings.add(self._beginning(text, opening))

    @staticmethod
    def _beginning(text: str, opening: str) -> tuple[str, str]:
        return opening, _normal(text[len(opening) :])[:LEADING]


def _normal(text: str) -> str:
    """Text without case, punctuation and spacing."""
    return re.sub(r"\W+", " ", text).strip().casefold()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all tokens that never stand for text, the named ones and those that only a template uses."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return added | set(tokenizer.all_special_ids)


def user_turn(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> tuple[str, int]:
    """The template's text up to where a user begins to write, and the token that ends what they write.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with a chat template.
        chat_template_kwargs (`dict`, *optional*): further arguments of the template.

    Returns:
        `str` and `int`: the prefix, with the template's own system prompt if it has one, and the end-of-turn token.

    Raises:
        ValueError: if there is no chat template, or none that closes a user turn with a special token.
    """
    advice = "Give prompts to hf-dspark data regenerate instead."
    if tokenizer.chat_template is None:
        raise ValueError(f"Expected a tokenizer with a chat template, got one without. {advice}")
    messages = [{"role": "user", "content": MARK}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **(chat_template_kwargs or {}))
    if rendered.count(MARK) != 1:
        raise ValueError(
            f"Expected a chat template with the user's text in one place, got {rendered.count(MARK)}. {advice}"
        )
    prefix, rest = rendered.split(MARK)
    closing = tokenizer(rest.strip(), add_special_tokens=False)["input_ids"][:1]
    if not closing or closing[0] not in special_tokens(tokenizer):
        raise ValueError(
            f"Expected a chat template that closes a user turn with a special token, got {rest[:20]!r}. {advice}"
        )
    return prefix, closing[0]


def write_user_turns(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    count: int,
    openings: list[str] | None = None,
    min_tokens: int = 8,
    max_tokens: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> OwnTurns:
    """Lets the target write user turns until `count` are good; run again, it goes on where it stopped.

    A row of the file is `{"messages", "candidate", "removed"}`: the turn as a conversation, its number among all that
    were sampled, and what the filters removed between it and the row before.

    Args:
        target (`PreTrainedModel`): an instruction-tuned model.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        path (`str` or `Path`): the JSONL file of turns; its settings go into `<path>.json`.
        count (`int`): turns to end with.
        openings (`list[str]`, *optional*): beginnings of turns, taken in rotation, such as "Write a Python function".
        min_tokens, max_tokens (`int`): that the target writes after the opening.
        batch_size (`int`): turns a batch.
        seed (`int`): of sampling.
        chat_template_kwargs (`dict`, *optional*): further arguments of the template.

    Returns:
        [`OwnTurns`]: the turns and what was removed.

    Raises:
        ValueError: if the template does not allow it, if `path` has turns of other settings, or if the target has no
            more turns that pass.
    """
    if not 1 <= min_tokens <= max_tokens:
        raise ValueError(f"Expected 1 <= min_tokens <= max_tokens, got {min_tokens} and {max_tokens}.")
    prefix, closing = user_turn(tokenizer, chat_template_kwargs)
    starts = [opening.strip() for opening in openings or [""]]  # a space at the end makes another next token
    settings = {
        "count": count,
        "openings": starts,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    file = ResumableRows(path, {**describe(target, tokenizer, chat_template_kwargs), **settings})
    turns = OwnTurns()
    good = TurnFilter(min_tokens=min_tokens, special_ids=special_tokens(tokenizer))
    candidate, kept_last = 0, 0
    for index, row in enumerate(file):
        text = row["messages"][0]["content"]
        good.keep(text, starts[row["candidate"] % len(starts)])
        turns.prompts.append(Prompt(row["messages"], index))
        turns.removed.update(row["removed"])
        candidate = kept_last = row["candidate"] + 1

    encoded = [tokenizer(prefix + opening, add_special_tokens=False)["input_ids"] for opening in starts]
    ends = [closing, *(token for token in end_tokens(target) if token != closing)]
    options = {"max_new_tokens": max_tokens + 1, "do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P}
    removed: Counter[str] = Counter()
    with logging.tqdm(total=count, initial=len(turns.prompts), desc="user turns", unit="turn") as bar:
        while len(turns.prompts) < count:
            first = candidate - candidate % batch_size  # a batch that was begun is repeated
            if first - kept_last >= PATIENCE * batch_size:
                raise ValueError(
                    f"Expected {count} different user turns, got {len(turns.prompts)} out of {candidate} "
                    f"({_listed(turns.removed + removed)}). Lower the count, or give more openings or other limits."
                )
            batch = [encoded[number % len(starts)] for number in range(first, first + batch_size)]
            seed_of_batch = batch_seed(seed, first)
            written = generate_batch(target, batch, seed=seed_of_batch, end_ids=ends, top_k=0, **options)
            rows = []
            for number in range(candidate, first + batch_size):
                ids, opening = written[number - first], starts[number % len(starts)]
                ended = ids[-1] in ends
                ids = ids[:-1] if ended else ids
                text = (opening + _decoded(tokenizer, encoded[number % len(starts)], ids)).strip()
                reason = good.reason(ids, text, opening, ended=ended)
                candidate = number + 1
                if reason is not None:
                    removed[reason] += 1
                    continue
                good.keep(text, opening)
                messages = [{"role": "user", "content": text}]
                rows.append({"messages": messages, "candidate": number, "removed": dict(removed)})
                turns.prompts.append(Prompt(messages, len(turns.prompts)))
                turns.removed += removed
                removed, kept_last = Counter(), candidate
                if len(turns.prompts) == count:
                    break
            file.append(rows)
            bar.update(len(rows))
    return turns


def synthesize(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    *,
    count: int,
    openings: list[str] | None = None,
    min_tokens: int = 8,
    max_tokens: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[OwnTurns, Answered]:
    """User turns of the target's own, then its answers: training data without a data set.

    Args:
        output (`str` or `Path`): the JSONL file of answers; the turns go into `<output>.prompts.jsonl`.
        temperature, max_new_tokens: of the answers, see [`answer_prompts`].
        count, openings, min_tokens, max_tokens: of the turns, see [`write_user_turns`].

    Returns:
        [`OwnTurns`] and [`Answered`].
    """
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "chat_template_kwargs": chat_template_kwargs,
    }
    turns = write_user_turns(
        target,
        tokenizer,
        f"{output}.prompts.jsonl",
        count=count,
        openings=openings,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        **shared,
    )
    answered = answer_prompts(
        target, tokenizer, turns.prompts, output, temperature=temperature, max_new_tokens=max_new_tokens, **shared
    )
    return turns, answered


def _decoded(tokenizer: PreTrainedTokenizerBase, before: list[int], written: list[int]) -> str:
    """The text of `written` as it continues `before`: on its own it could lose a leading space."""
    start = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    return tokenizer.decode([*before, *written], clean_up_tokenization_spaces=False)[len(start) :]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counts.items()) or "nothing removed"
