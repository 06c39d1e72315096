"""Training samples: prompts with the target's own responses, as token ids.

A row of a JSONL file is ``{"prompt_ids": [...], "response_ids": [...], ...}``: the prompt with the chat template
applied and what the target answered. The drafter learns to predict the target, so the responses must be the
target's own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TrainingSample:
    """One prompt with its response.

    Attributes:
        input_ids (`tuple[int, ...]`): prompt and response tokens.
        response_start (`int`): index of the first response token.
    """

    input_ids: tuple[int, ...]
    response_start: int


def read_samples(path: str | Path, *, vocab_size: int, max_length: int = 2048) -> list[TrainingSample]:
    """Reads a JSONL file of `prompt_ids` and `response_ids`.

    Args:
        path (`str` or `Path`): the file.
        vocab_size (`int`): the target's vocabulary; an id outside it is an error.
        max_length (`int`): tokens of a sample; longer responses are cut, prompts that leave no room are skipped.

    Returns:
        `list[TrainingSample]`: in the order of the file, without rows whose response has fewer than two tokens; what
            is left out or cut is logged in one line.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line is not such a row, names the line; or if no sample is left.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a JSONL file of prompt_ids and response_ids, got no file at {path}.")
    samples = []
    short = too_long = cut = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompt, response = row["prompt_ids"], row["response_ids"]
                ids = [*prompt, *response]
                bad = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Expected an object with lists `prompt_ids` and `response_ids`, got {line[:60]!r} in line "
                    f"{number} of {path}. Write one such object a line."
                ) from error
            if bad:
                raise ValueError(
                    f"Expected token ids in [0, {vocab_size}), got {bad[0]} in line {number} of {path}. "
                    "Tokenise with the target's own tokenizer."
                )
            if len(response) < 2:
                short += 1
            elif len(prompt) + 2 > max_length:
                too_long += 1
            else:
                cut += len(ids) > max_length
                samples.append(TrainingSample(tuple(ids[:max_length]), len(prompt)))
    if not samples:
        raise ValueError(
            f"Expected at least one prompt with a response of two tokens or more within {max_length} tokens, "
            f"got none in {path}. Raise the maximum length or give more data."
        )
    if short or too_long or cut:
        logger.warning(
            f"{path}: {len(samples)} samples. Left out {short} whose response has fewer than two tokens and "
            f"{too_long} whose prompt leaves no room within {max_length} tokens; cut {cut} responses."
        )
    return samples


def frequent_tokens(samples: Iterable[TrainingSample], size: int, *, vocab_size: int) -> list[int]:
    """The `size` most frequent response tokens, ascending: a reduced draft vocabulary.

    Args:
        samples (iterable of `TrainingSample`): where to count.
        size (`int`): tokens to keep.
        vocab_size (`int`): the target's vocabulary; ids that never occur fill up from the lowest.

    Returns:
        `list[int]`: `size` different target token ids in ascending order.
    """
    counts = Counter(token for sample in samples for token in sample.input_ids[sample.response_start :])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return sorted(ranked[:size])


def default_target_layers(depth: int) -> list[int]:
    """Layers that feed a drafter unless others are named: five, spread from the second to the last but one (paper).

    Args:
        depth (`int`): layers of the target.

    Returns:
        `list[int]`: up to five layer numbers in ascending order.
    """
    first, last, count = min(1, depth - 2), depth - 2, min(5, depth - 1)
    return sorted({round(first + index * (last - first) / max(1, count - 1)) for index in range(count)})
