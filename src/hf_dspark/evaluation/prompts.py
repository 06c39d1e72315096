"""Prompts: conversations out of JSONL files and `datasets`, for measuring and for making training data.

A row has `messages`, a conversation up to the question (closing answers of other models are left out), or `turns`, of
which the first is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

REPORTED = 10  # broken rows that are named one by one


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer.

    Attributes:
        messages (`list[dict[str, str]]`): `role` and `content` of each message; the last one is not the assistant's.
        index (`int`): row in the file or dataset, counted from 0.
        domain (`str`, *optional*): the row's `domain`.
    """

    messages: list[dict[str, str]]
    index: int
    domain: str | None = None


def conversation(row: Any) -> list[dict[str, str]]:
    """The messages of a row with `messages` or `turns`.

    Raises:
        ValueError: if the row is anything else or has no text.
    """
    try:
        if row.get("messages") is not None:
            messages = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
        elif isinstance(row["turns"], str):
            raise TypeError("turns is a string")
        else:
            messages = [{"role": "user", "content": row["turns"][0]}]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        texts = [message[key] for message in messages for key in ("role", "content")]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise TypeError("no text")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("Expected an object with text in `turns` or `messages`") from error
    return messages


def read_prompts(path: Path, limit: int | None) -> list[list[dict[str, str]]]:
    """Conversations of a JSONL file, all of which have to be good.

    Args:
        path (`Path`): the file.
        limit (`int`, *optional*): how many to return at most.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line is not a prompt (names the line), or no line is left.
    """
    conversations = []
    for index, line, _, messages in _file_rows(path):
        if messages is None:
            raise ValueError(
                f"Expected an object with text in `turns` or `messages`, got {line[:60]!r} in line {index + 1} "
                f"of {path}."
            )
        conversations.append(messages)
    if not conversations:
        raise ValueError(f"Expected at least one prompt, got none in {path}.")
    return conversations[:limit]


def load_prompts(
    source: str | Path, *, split: str = "train", limit: int | None = None
) -> tuple[list[Prompt], list[int]]:
    """Prompts of a JSONL file or a dataset; rows that are broken are reported and left out.

    Args:
        source (`str` or `Path`): a JSONL file, or what `datasets.load_dataset` takes: a folder or a name on the Hub.
        split (`str`): of a dataset.
        limit (`int`, *optional*): prompts to read at most.

    Returns:
        `list[Prompt]` and `list[int]`: the prompts, and the indices of broken rows before the last of them.

    Raises:
        FileNotFoundError: if a `.jsonl` or `.json` file does not exist.
        OSError: if there is no such dataset, or no connection to fetch it.
        ValueError: if the dataset has neither column, or no prompt is left.
        ImportError: if `datasets` is needed and not installed.
    """
    path, what = Path(source), "row"
    rows: Iterable[tuple[int, str, Any, list[dict[str, str]] | None]]
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        rows, what = _file_rows(path), "line"
    else:
        rows = _dataset_rows(str(source), split)
    prompts: list[Prompt] = []
    broken: list[int] = []
    for index, shown, row, messages in rows:
        if messages is None:
            broken.append(index)
            if len(broken) <= REPORTED:
                number = index + 1 if what == "line" else index
                logger.warning(
                    f"Expected an object with text in `turns` or `messages`, got {shown[:60]!r} in {what} {number} of "
                    f"{source}: left out."
                )
            continue
        domain = row.get("domain")
        prompts.append(Prompt(messages, index, domain if isinstance(domain, str) else None))
        if len(prompts) == limit:
            break
    if len(broken) > REPORTED:
        logger.warning(f"{len(broken) - REPORTED} more {what}s of {source} are broken and left out.")
    if not prompts:
        raise ValueError(
            f"Expected at least one prompt, got none in {source}. Give objects with text in `turns` or `messages`."
        )
    return prompts, broken


def _file_rows(path: Path) -> Iterator[tuple[int, str, Any, list[dict[str, str]] | None]]:
    """Index, text, content and conversation (None if broken) of each line that is not blank."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a JSONL file of prompts, got no file at {path}.")
    with path.open("rb") as lines:  # a line that is not UTF-8 spoils itself only
        for index, line in enumerate(lines):
            text = line.decode("utf-8-sig", errors="replace").strip()
            if not text:
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
                yield index, text, row, conversation(row)
            except ValueError:
                yield index, text, None, None


def _dataset_rows(source: str, split: str) -> Iterator[tuple[int, str, Any, list[dict[str, str]] | None]]:
    """The same of a dataset's rows."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"Expected a JSONL file of prompts or the package datasets, got {source} without it. Type: "
            "pip install hf-dspark[train]"
        ) from error
    try:
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"Expected a JSONL file of prompts or a dataset, got {source} with {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Check name, split and connection; a local JSONL file with `turns` or "
            "`messages` needs no connection."
        ) from error
    if not {"turns", "messages"} & set(rows.column_names):
        raise ValueError(
            f"Expected a column `turns` or `messages` in {source}, got {', '.join(rows.column_names)}. Rename one, or "
            "write a JSONL file."
        )
    for index, row in enumerate(rows):
        try:
            yield index, str(row), row, conversation(row)
        except ValueError:
            yield index, str(row), None, None
