"""Target features on disk: what training reads instead of running the target again at every step.

A cache is a folder of safetensors shards and one ``manifest.json``. A shard holds, for a run of samples laid end to
end: token ids, the concatenated outputs of the chosen target layers, the target's final normalised hidden state
(its logits are the head applied to it, paper section on training) and the log-sum-exp of those logits over the
*full* vocabulary. With that one number per row, target probabilities over a reduced draft vocabulary are exact
without computing the other logits. The manifest is written after each finished shard, so an interrupted build
resumes at the first missing one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils import logging

from ..features_dspark import TargetFeatures
from ..loading import fingerprint
from .data import TrainingSample

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"


def _digest(samples: list[TrainingSample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(torch.tensor([sample.response_start, *sample.input_ids]).numpy().tobytes())
    return digest.hexdigest()[:16]


def _batches(samples: list[TrainingSample], tokens: int) -> Iterator[list[int]]:
    """Indices of samples grouped so that a padded batch holds at most `tokens` tokens; order is kept."""
    batch: list[int] = []
    longest = 0
    for index, sample in enumerate(samples):
        longest = max(longest, len(sample.input_ids))
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch, longest = [], len(sample.input_ids)
        batch.append(index)
    if batch:
        yield batch


class FeatureCache:
    """Cached target features of training samples, read by slices without loading a shard.

    Args:
        directory (`str` or `Path`): a folder that `FeatureCache.build` filled.

    Raises:
        FileNotFoundError: if the folder has no manifest.
        ValueError: if the build was interrupted: run it again, it resumes.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).is_file():
            raise FileNotFoundError(
                f"Expected {MANIFEST} in {self.directory}, got none. Build the cache with FeatureCache.build first."
            )
        self.manifest = json.loads((self.directory / MANIFEST).read_text())
        if not self.manifest["complete"]:
            raise ValueError(
                f"Expected a complete feature cache, got {len(self.manifest['shards'])} finished shards in "
                f"{self.directory}. Run the same build again: it goes on where it stopped."
            )
        self._spans = [
            (shard["file"], start, stop, response_start)
            for shard in self.manifest["shards"]
            for start, stop, response_start in shard["spans"]
        ]
        self._files: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}  # open files do not travel to data loader workers

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample.

        Returns:
            `dict`: `input_ids` `(length,)`, `loss_mask` `(length,)` (True on response tokens), `features`
            `(length, layers * hidden)`, `last_hidden` `(length, hidden)`, `logsumexp` `(length,)`.
        """
        name, start, stop, response_start = self._spans[index]
        if name not in self._files:
            self._files[name] = safe_open(self.directory / name, framework="pt")
        file = self._files[name]
        row = {key: file.get_slice(key)[start:stop] for key in ("input_ids", "features", "last_hidden", "logsumexp")}
        row["input_ids"] = row["input_ids"].long()
        row["loss_mask"] = torch.arange(stop - start) >= response_start
        return row

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        target: PreTrainedModel,
        samples: list[TrainingSample],
        directory: str | Path,
        *,
        layer_ids: list[int],
        samples_per_shard: int = 256,
        tokens_per_batch: int = 4096,
        chat_template: str | None = None,
    ) -> FeatureCache:
        """Runs the target over `samples` once and stores what training needs, resuming what an earlier call wrote.

        Args:
            target (`PreTrainedModel`): the model whose features are stored, in the dtype it is loaded in.
            samples (`list[TrainingSample]`): prompts with the target's own responses.
            directory (`str` or `Path`): where to write.
            layer_ids (`list[int]`): the drafter's `target_layer_ids`.
            samples_per_shard (`int`): samples a shard file holds.
            tokens_per_batch (`int`): padded tokens in one target forward.
            chat_template (`str`, *optional*): the template of the prompts; its hash goes into the manifest.

        Returns:
            `FeatureCache`: the finished cache.

        Raises:
            ValueError: if the folder holds a cache of another target, other layers or other samples, or if the target
                changes its head's output (softcap, scaling).
            OSError: if the disk cannot hold the cache, before anything is computed.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        text_config = target.config.get_text_config()
        described = {
            "target": target.config._name_or_path,
            "target_fingerprint": fingerprint(target),
            "hidden_size": text_config.hidden_size,
            "vocab_size": text_config.vocab_size,
            "layer_ids": list(layer_ids),
            "dtype": str(target.dtype).removeprefix("torch."),
            "chat_template_sha256": hashlib.sha256((chat_template or "").encode()).hexdigest()[:16],
            "samples": len(samples),
            "samples_sha256": _digest(samples),
        }
        manifest = {**described, "shards": [], "complete": False}
        path = directory / MANIFEST
        if path.is_file():
            manifest = json.loads(path.read_text())
            for key, value in described.items():
                if manifest.get(key) != value:
                    raise ValueError(
                        f"Expected a cache with {key} = {value!r} in {directory}, got {manifest.get(key)!r}. "
                        "Give another folder, or delete this one."
                    )
        done = len(manifest["shards"]) * samples_per_shard
        tokens = sum(len(sample.input_ids) for sample in samples[done:])
        row_bytes = (len(layer_ids) + 1) * text_config.hidden_size * target.dtype.itemsize + 8
        needed = tokens * row_bytes
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise OSError(
                f"Expected {needed / 1e9:.1f} GB free for the features of {tokens:,} tokens in {directory}, "
                f"got {free / 1e9:.1f} GB. Use fewer samples, fewer layers or another disk."
            )
        if needed:
            logger.info(
                f"Feature cache: {needed / 1e9:.2f} GB for {tokens:,} tokens ({row_bytes / 1e3:.1f} GB a million)."
            )

        if needed:
            _check_head(target, samples[done])
        shards = range(done, len(samples), samples_per_shard)
        for start in logging.tqdm(shards, desc="target features", unit="shard", disable=not len(shards)):
            shard = samples[start : start + samples_per_shard]
            name = f"shard-{start // samples_per_shard:05d}.safetensors"
            tensors, spans = _shard(target, shard, layer_ids, tokens_per_batch)
            temporary = directory / f"{name}.tmp"
            save_file(tensors, temporary)
            temporary.replace(directory / name)
            manifest["shards"].append({"file": name, "spans": spans})
            manifest["complete"] = start + samples_per_shard >= len(samples)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(manifest))
            temporary.replace(path)
        return cls(directory)


def _check_head(target: PreTrainedModel, sample: TrainingSample) -> None:
    """Training takes the target's logits to be its head applied to its final state; some models do more."""
    ids = torch.tensor([sample.input_ids[:32]], device=target.device)
    hidden = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = target.get_output_embeddings()(hidden).float(), target(ids, use_cache=False).logits.float()
    error = (ours - theirs).abs().max().item()
    if error > 1e-2 * theirs.abs().max().item():
        raise ValueError(
            f"Expected a target whose logits are its head's output, got a difference of {error:.3g} from "
            f"{type(target).__name__}, which scales or caps them. Training for such a target is not supported."
        )


def _shard(
    target: PreTrainedModel, samples: list[TrainingSample], layer_ids: list[int], tokens_per_batch: int
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int, int]]]:
    samples = sorted(samples, key=lambda sample: len(sample.input_ids))  # like lengths together: little padding
    head = target.get_output_embeddings()
    rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "features": [], "last_hidden": [], "logsumexp": []}
    spans, position = [], 0
    with TargetFeatures(target, layer_ids) as captured:
        for batch in _batches(samples, tokens_per_batch):
            ids = [torch.tensor(samples[index].input_ids) for index in batch]
            padded = pad_sequence(ids, batch_first=True).to(target.device)
            # Right padding after causal attention changes no real row, so no mask is needed.
            hidden = target.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
            features = captured.take()
            for row, index in enumerate(batch):
                length = len(ids[row])
                last = hidden[row, :length]
                lse = torch.cat([head(part).float().logsumexp(-1) for part in last.split(256)])
                rows["input_ids"].append(ids[row].int())
                rows["features"].append(features[row, :length].cpu())
                rows["last_hidden"].append(last.cpu())
                rows["logsumexp"].append(lse.cpu())
                spans.append((position, position + length, samples[index].response_start))
                position += length
    return {key: torch.cat(value).contiguous() for key, value in rows.items()}, spans
