"""Target features on disk: what training reads instead of running the target again at every step.

A cache is a folder of safetensors shards and one ``manifest.json``. A shard holds, for a run of samples laid end to
end, the rows of `hf_dspark.training.features`. The manifest is written after each finished shard, so an interrupted
build resumes at the first missing one.

With ``bits=8`` the features of each layer and the final states are stored as whole numbers -127 ... 127 times one
float32 scale a row, its largest magnitude / 127: half the disk, at a rounding error of up to half a scale.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from .data import TrainingSample
from .features import check_head, describe, target_rows

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
        ValueError: if the build was interrupted (run it again, it resumes), or a file is damaged or gone.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).is_file():
            raise FileNotFoundError(
                f"Expected {MANIFEST} in {self.directory}, got none. Build the cache with FeatureCache.build first."
            )
        self.manifest = _read_manifest(self.directory / MANIFEST)
        if not self.manifest["complete"]:
            raise ValueError(
                f"Expected a complete feature cache, got {len(self.manifest['shards'])} finished shards in "
                f"{self.directory}. Run the same build again: it goes on where it stopped."
            )
        self._files: dict[str, Any] = {}
        self._spans = []
        for shard in self.manifest["shards"]:
            self._open(shard["file"])  # a damaged shard is found now, not after hours of training
            self._spans += [(shard["file"], *span) for span in shard["spans"]]
        self._dtype = getattr(torch, self.manifest["dtype"])

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = _open_shard(self.directory, name)
        return self._files[name]

    def __len__(self) -> int:
        return len(self._spans)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}  # open files do not travel to data loader workers

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample.

        Returns:
            `dict`: `input_ids` `(length,)`, `loss_mask` `(length,)` (True on response tokens), `features`
            `(length, layers * hidden)`, `last_hidden` `(length, hidden)`, `logsumexp` `(length,)`, `index` `()`.
        """
        name, start, stop, response_start = self._spans[index]
        file = self._open(name)

        def read(key: str) -> torch.Tensor:
            return file.get_slice(key)[start:stop]

        row = {"input_ids": read("input_ids").long(), "logsumexp": read("logsumexp")}
        for key in ("features", "last_hidden"):
            stored = read(key)
            if self.manifest["bits"] == 8:
                stored = _dequantise(stored, read(f"{key}_scale"), self._dtype)
            row[key] = stored
        row["loss_mask"] = torch.arange(stop - start) >= response_start
        row["index"] = torch.tensor(index)
        return row

    @classmethod
    def build(
        cls,
        target: PreTrainedModel,
        samples: list[TrainingSample],
        directory: str | Path,
        *,
        layer_ids: list[int],
        bits: int = 16,
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
            bits (`int`): 16 stores the target's dtype as it is, 8 whole numbers with a scale for each row and layer.
            samples_per_shard (`int`): samples a shard file holds.
            tokens_per_batch (`int`): padded tokens in one target forward.
            chat_template (`str`, *optional*): the template of the prompts; its hash goes into the manifest.

        Returns:
            `FeatureCache`: the finished cache.

        Raises:
            ValueError: if the folder holds a cache of another target, other layers or other samples, or if the target
                changes its head's output (softcap, scaling).
            OSError: if the disk cannot hold the cache, before anything is computed; or if it fills up on the way.
        """
        if bits not in (8, 16):
            raise ValueError(f"Expected bits to be 8 or 16, got {bits}. 16 keeps the target's dtype.")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        described = {
            **describe(target, layer_ids, chat_template),
            "bits": bits,
            "samples": len(samples),
            "samples_sha256": _digest(samples),
        }
        manifest = {**described, "shards": [], "complete": False}
        path = directory / MANIFEST
        if path.is_file():
            manifest = _read_manifest(path)
            for key, value in described.items():
                if manifest.get(key) != value:
                    raise ValueError(
                        f"Expected a cache with {key} = {value!r} in {directory}, got {manifest.get(key)!r}. "
                        "Give another folder, or delete this one."
                    )
            for shard in manifest["shards"]:
                _open_shard(directory, shard["file"])
        done = sum(len(shard["spans"]) for shard in manifest["shards"])
        tokens = sum(len(sample.input_ids) for sample in samples[done:])
        parts, width = len(layer_ids) + 1, described["hidden_size"]
        row_bytes = parts * (width + 4 if bits == 8 else width * target.dtype.itemsize) + 8
        needed = tokens * row_bytes
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise OSError(
                f"Expected {needed / 1e9:.1f} GB free for the features of {tokens:,} tokens in {directory}, "
                f"got {free / 1e9:.1f} GB. Use fewer samples, fewer layers, bits=8 or another disk."
            )
        if needed:
            logger.info(
                f"Feature cache: {needed / 1e9:.2f} GB for {tokens:,} tokens ({row_bytes / 1e3:.1f} GB a million)."
            )
            check_head(target, samples[done])
        shards = range(done, len(samples), samples_per_shard)
        for start in logging.tqdm(shards, desc="target features", unit="shard", disable=not len(shards)):
            shard = samples[start : start + samples_per_shard]
            name = f"shard-{len(manifest['shards']):05d}.safetensors"
            tensors, spans = _shard(target, shard, layer_ids, bits, tokens_per_batch)
            temporary = directory / f"{name}.tmp"
            try:
                save_file(tensors, temporary)
            except (SafetensorError, OSError) as error:
                temporary.unlink(missing_ok=True)
                raise OSError(
                    f"Expected room for {name} in {directory}, got: {error}. Free some and run the same build again: "
                    "it goes on where it stopped."
                ) from error
            temporary.replace(directory / name)
            manifest["shards"].append({"file": name, "spans": spans})
            manifest["complete"] = start + samples_per_shard >= len(samples)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(manifest))
            temporary.replace(path)
        return cls(directory)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
        manifest["shards"], manifest["complete"], manifest["bits"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Expected the manifest of a feature cache in {path}, got {error!r}. Delete the folder and build it again."
        ) from error
    return manifest


def _open_shard(directory: Path, name: str) -> Any:
    try:
        return safe_open(directory / name, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"Expected the shard {name} in {directory}, got a damaged or missing file ({error}). "
            "Delete the folder and build the cache again."
        ) from error


def _shard(
    target: PreTrainedModel, samples: list[TrainingSample], layer_ids: list[int], bits: int, tokens_per_batch: int
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int, int]]]:
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))  # little padding
    ordered = [samples[index] for index in order]
    stored: dict[str, list[torch.Tensor]] = {}
    spans, position = {}, 0
    for batch in _batches(ordered, tokens_per_batch):
        for index, row in zip(batch, target_rows(target, layer_ids, [ordered[i] for i in batch]), strict=True):
            row["input_ids"] = row["input_ids"].int()
            if bits == 8:
                for key, parts in (("features", len(layer_ids)), ("last_hidden", 1)):
                    row[key], row[f"{key}_scale"] = _quantise(row[key], parts)
            for key, value in row.items():
                stored.setdefault(key, []).append(value)
            spans[order[index]] = (position, position + len(row["input_ids"]), ordered[index].response_start)
            position += len(row["input_ids"])
    tensors = {key: torch.cat(value).contiguous() for key, value in stored.items()}
    return tensors, [spans[index] for index in range(len(samples))]


def _quantise(rows: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `(n, parts * width)` as int8, and their scales `(n, parts)` in float32."""
    split = rows.float().unflatten(-1, (parts, -1))
    scale = split.abs().amax(dim=-1) / 127
    return (split / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8).flatten(-2), scale


def _dequantise(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    split = stored.float().unflatten(-1, (scale.shape[-1], -1))
    return (split * scale[..., None]).flatten(-2).to(dtype)
