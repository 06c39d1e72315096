"""The target answers prompts: the training data of a drafter, in a file that grows by whole batches.

Batches are a function of the prompts and of nothing else: prompts of like length are put together inside windows, and
the random state of a batch is derived from the seed and its first prompt. A run that was killed therefore goes on at
its last finished batch, and its file ends up as that of an unbroken run. Beside a file `x.jsonl` lies `x.jsonl.json`
with everything its rows depend on; a run with other settings is refused instead of mixed in.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..evaluation.prompts import Prompt
from ..loading import fingerprint

logger = logging.get_logger(__name__)

WINDOW = 16  # batches over which prompts are sorted by length


@dataclass
class Answered:
    """What a file of responses holds, and what it took.

    Attributes:
        prompts (`int`): answers in the file.
        tokens (`int`): their tokens.
        refused (`int`): prompts that the chat template refuses.
        too_long (`int`): prompts whose answer may not fit into the target's context.
        empty (`int`): answers of fewer than two tokens, which are not written.
        new_tokens, seconds: of this call alone.
    """

    prompts: int = 0
    tokens: int = 0
    refused: int = 0
    too_long: int = 0
    empty: int = 0
    new_tokens: int = 0
    seconds: float = 0.0


class ResumableRows:
    """A JSONL file that grows by whole rows, and `<file>.json` with the settings they were made with.

    Opening it drops a last line that was being written when an earlier run died.

    Args:
        path (`str` or `Path`): the file of rows.
        settings (`dict`): everything that the rows depend on, as JSON values.

    Raises:
        ValueError: if the file holds rows of other settings, or of unknown ones.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sidecar = settings_file(self.path)
        versions = {"transformers": transformers.__version__, "torch": str(torch.__version__)}
        if sidecar.is_file():
            recorded = json.loads(sidecar.read_text())
            for key, value in settings.items():
                if recorded.get(key) != value:
                    raise ValueError(
                        f"Expected rows with {key} = {value!r} in {self.path}, got {recorded.get(key)!r}. Give "
                        "another file, or delete this one and its settings, or use the same settings to go on."
                    )
            if recorded["versions"] != versions:
                logger.warning(f"{self.path} was begun with {recorded['versions']} and goes on with {versions}.")
        elif self.path.is_file():
            raise ValueError(
                f"Expected the settings of {self.path} in {sidecar}, got no such file. Give another file to write to."
            )
        else:
            temporary = sidecar.with_name(f"{sidecar.name}.tmp")
            temporary.write_text(json.dumps({**settings, "versions": versions}, indent=2) + "\n")
            temporary.replace(sidecar)
        self.path.touch()
        with self.path.open("r+b") as file:
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
            file.truncate(whole)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"Expected rows of an earlier run in {self.path}, got {line[:60]!r} in line {number}. Delete "
                        "that line and those below it to go on from there."
                    ) from error

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Writes `rows` and flushes."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def settings_file(path: str | Path) -> Path:
    """Where the settings of a file of rows are recorded."""
    return Path(f"{path}.json")


def describe(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """What every text of a target depends on, for [`ResumableRows`]."""
    generation = json.loads(target.generation_config.to_json_string())
    generation = {key: value for key, value in generation.items() if key[0] != "_" and key != "transformers_version"}
    return {
        "target": target.config._name_or_path,
        "target_fingerprint": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "generation_config": generation,
        "chat_template_sha256": hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()[:16],
        "chat_template_kwargs": chat_template_kwargs or {},
    }


def check_responses(path: str | Path, target: PreTrainedModel) -> None:
    """Compares a file of responses with a target, as far as the file's settings are recorded.

    Raises:
        ValueError: if another target wrote them.
    """
    sidecar = settings_file(path)
    if not sidecar.is_file():
        return
    recorded, found = json.loads(sidecar.read_text()), fingerprint(target)
    if recorded.get("target_fingerprint", found) != found:
        raise ValueError(
            f"Expected the target that wrote {path}, {recorded['target']} (fingerprint "
            f"{recorded['target_fingerprint']}), got {target.config._name_or_path} ({found}). Give that target, or "
            "responses of this one."
        )


def generate_batch(
    target: PreTrainedModel, prompts: list[list[int]], *, seed: int, end_ids: list[int], **options: Any
) -> list[list[int]]:
    """Plain `target.generate` over a left-padded batch, with a random state of its own.

    Args:
        target (`PreTrainedModel`): the model.
        prompts (`list[list[int]]`): token ids.
        seed (`int`): of sampling; the global random state is left as it was.
        end_ids (`list[int]`): tokens that end an answer; may be empty.
        options: of `generate`.

    Returns:
        `list[list[int]]`: the new tokens of each prompt, up to and with the first of `end_ids`.
    """
    longest = max(map(len, prompts))
    pad = target.generation_config.pad_token_id
    pad = (end_ids or [0])[0] if pad is None else pad
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        torch.manual_seed(seed)
        output = target.generate(ids, attention_mask=mask, pad_token_id=pad, eos_token_id=end_ids or None, **options)
    answers = []
    for row in output[:, longest:].tolist():
        ends = [position for position, token in enumerate(row) if token in end_ids]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


def end_tokens(target: PreTrainedModel) -> list[int]:
    """The tokens that end an answer of `target`, from its generation config."""
    eos = target.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def batch_seed(seed: int, index: int) -> int:
    """The random state of the batch that begins with prompt `index`."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:7], "big")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], chat_template_kwargs: dict[str, Any] | None
) -> list[int]:
    """Token ids of a conversation up to the answer; the last message as it is if there is no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"])["input_ids"]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **(chat_template_kwargs or {})
    )
    return encoded["input_ids"]


def answer_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    output: str | Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    batch_size: int = 8,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Answered:
    """Lets the target answer prompts and writes rows for `read_samples`; run again, it goes on where it stopped.

    A row is `{"index", "prompt_ids", "response_ids", "temperature", "domain"}`: the prompt's index, its tokens with
    the chat template, the answer with the token that ended it, and the prompt's domain if it has one.

    Args:
        target (`PreTrainedModel`): the model that a drafter is to be trained for.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        prompts (`list[Prompt]`): what to answer, see `hf_dspark.evaluation.prompts.load_prompts`.
        output (`str` or `Path`): the JSONL file; its settings go into `<output>.json`.
        temperature (`float`): 0 is greedy; above, the target's whole distribution is sampled (no top-k, no top-p).
        max_new_tokens (`int`): length limit of an answer.
        batch_size (`int`): prompts a batch.
        seed (`int`): of sampling.
        chat_template_kwargs (`dict`, *optional*): further arguments of the chat template, such as
            `{"enable_thinking": False}`. A drafter is to be used with those it was trained with.

    Returns:
        [`Answered`]: counts over the whole file.

    Raises:
        ValueError: if `output` has rows of other settings, if two prompts have the same index, or if none fits into
            the target's context.
    """
    if len({prompt.index for prompt in prompts}) < len(prompts):
        raise ValueError("Expected prompts with different indices, got two with the same. Number them anew.")
    described = json.dumps([(prompt.index, prompt.domain, prompt.messages) for prompt in prompts])
    file = ResumableRows(
        output,
        {
            **describe(target, tokenizer, chat_template_kwargs),
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "seed": seed,
            "prompts": len(prompts),
            "prompts_sha256": hashlib.sha256(described.encode()).hexdigest()[:16],
        },
    )
    answered = Answered()
    context = target.config.get_text_config().max_position_embeddings
    encoded = _encode(tokenizer, prompts, chat_template_kwargs, context - max_new_tokens, answered)
    if not encoded:
        raise ValueError(
            f"Expected prompts that leave room for {max_new_tokens} tokens in the target's context of {context}, got "
            f"none ({answered.too_long} too long, {answered.refused} refused). Lower the answers' length limit."
        )
    batches = _batches(encoded, batch_size)
    done = {row["index"]: len(row["response_ids"]) for row in file}
    finished = _finished(batches, done)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    began = time.perf_counter()
    with logging.tqdm(total=len(encoded), desc="answers", unit="prompt") as bar:
        for number, batch in enumerate(batches):
            if number >= finished:
                rows = _answer(target, batch, options, batch_seed(seed, batch[0][0].index), temperature)
                new = [row for row in rows if row["index"] not in done]
                file.append(new)
                done |= {row["index"]: len(row["response_ids"]) for row in new}
                answered.new_tokens += sum(len(row["response_ids"]) for row in new)
            bar.update(len(batch))
    answered.seconds = time.perf_counter() - began
    answered.prompts, answered.tokens = len(done), sum(done.values())
    answered.empty = len(encoded) - len(done)
    return answered


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    chat_template_kwargs: dict[str, Any] | None,
    longest: int,
    answered: Answered,
) -> list[tuple[Prompt, list[int]]]:
    """Prompts with their token ids; those that cannot be asked are counted in `answered`."""
    encoded = []
    for prompt in prompts:
        try:
            ids = encode_prompt(tokenizer, prompt.messages, chat_template_kwargs)
        except TemplateError as error:
            if not answered.refused:
                logger.warning(f"The chat template refuses prompt {prompt.index} (and perhaps others): {error}")
            answered.refused += 1
            continue
        if len(ids) > longest:
            answered.too_long += 1
        else:
            encoded.append((prompt, ids))
    return encoded


def _batches(encoded: list[tuple[Prompt, list[int]]], batch_size: int) -> list[list[tuple[Prompt, list[int]]]]:
    """Prompts of like length together, inside windows: little padding, and the file still follows the prompts."""
    batches = []
    for start in range(0, len(encoded), WINDOW * batch_size):
        window = sorted(encoded[start : start + WINDOW * batch_size], key=lambda item: len(item[1]))
        batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
    return batches


def _finished(batches: list[list[tuple[Prompt, list[int]]]], done: dict[int, int]) -> int:
    """How many batches an earlier run finished; what those before the last one lack were empty answers."""
    started = [number for number, batch in enumerate(batches) if any(prompt.index in done for prompt, _ in batch)]
    if not started:
        return 0
    return started[-1] + all(prompt.index in done for prompt, _ in batches[started[-1]])


def _answer(
    target: PreTrainedModel,
    batch: list[tuple[Prompt, list[int]]],
    options: dict[str, Any],
    seed: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """Rows of a batch, without empty answers."""
    answers = generate_batch(target, [ids for _, ids in batch], seed=seed, end_ids=end_tokens(target), **options)
    rows = []
    for (prompt, ids), response in zip(batch, answers, strict=True):
        if len(response) >= 2:
            row = {"index": prompt.index, "prompt_ids": ids, "response_ids": response, "temperature": temperature}
            rows.append(row if prompt.domain is None else {**row, "domain": prompt.domain})
    return rows
