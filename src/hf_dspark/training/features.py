"""Target features of training samples: what they are, and computed when they are asked for.

Training reads three things of the target for every row of a sample: the concatenated outputs of the chosen layers,
its final normalised hidden state (its logits are the head applied to it, paper section on training) and the
log-sum-exp of those logits over the *full* vocabulary. With that one number target probabilities over a reduced
draft vocabulary are exact without computing the other logits.

`OnlineFeatures` runs the target whenever a sample is read and stores nothing; `FeatureCache` has the same rows on
disk.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..features_dspark import TargetFeatures
from ..loading import fingerprint
from .data import TrainingSample


def describe(target: PreTrainedModel, layer_ids: list[int], chat_template: str | None) -> dict[str, Any]:
    """What features depend on, for the manifest of a cache and for checks against a drafter."""
    text_config = target.config.get_text_config()
    return {
        "target": target.config._name_or_path,
        "target_revision": getattr(target.config, "_commit_hash", None),
        "target_fingerprint": fingerprint(target),
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        "layer_ids": list(layer_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "chat_template_sha256": hashlib.sha256((chat_template or "").encode()).hexdigest()[:16],
    }


@torch.no_grad()
def check_head(target: PreTrainedModel, sample: TrainingSample) -> None:
    """Training takes the target's logits to be its head applied to its final state; some models do more.

    Raises:
        ValueError: if the target scales or caps its logits.
    """
    ids = torch.tensor([sample.input_ids[:32]], device=target.device)
    hidden = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = target.get_output_embeddings()(hidden).float(), target(ids, use_cache=False).logits.float()
    error = (ours - theirs).abs().max().item()
    if error > 1e-2 * theirs.abs().max().item():
        raise ValueError(
            f"Expected a target whose logits are its head's output, got a difference of {error:.3g} from "
            f"{type(target).__name__}, which scales or caps them. Training for such a target is not supported."
        )


@torch.no_grad()
def target_rows(
    target: PreTrainedModel, layer_ids: list[int], samples: list[TrainingSample]
) -> list[dict[str, torch.Tensor]]:
    """One forward of the target over a batch of samples.

    Args:
        target (`PreTrainedModel`): the model to read.
        layer_ids (`list[int]`): the drafter's `target_layer_ids`.
        samples (`list[TrainingSample]`): the batch.

    Returns:
        `list[dict]`: for each sample `input_ids` `(length,)`, `features` `(length, layers * hidden)`, `last_hidden`
        `(length, hidden)` and `logsumexp` `(length,)`, on the CPU.
    """
    head = target.get_output_embeddings()
    ids = [torch.tensor(sample.input_ids) for sample in samples]
    with TargetFeatures(target, layer_ids) as captured:
        # Right padding after causal attention changes no real row, so no mask is needed.
        padded = pad_sequence(ids, batch_first=True).to(target.device)
        hidden = target.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
        features = captured.take()
    rows = []
    for index, own in enumerate(ids):
        last = hidden[index, : len(own)]
        logsumexp = torch.cat([head(part).float().logsumexp(-1) for part in last.split(256)])
        row = {"features": features[index, : len(own)], "last_hidden": last, "logsumexp": logsumexp}
        rows.append({"input_ids": own, **{key: value.cpu() for key, value in row.items()}})
    return rows


class OnlineFeatures:
    """Features of training samples, computed whenever a sample is read: no storage, a target forward a sample.

    Args:
        target (`PreTrainedModel`): the model whose features are read.
        samples (`list[TrainingSample]`): prompts with the target's own responses.
        layer_ids (`list[int]`): the drafter's `target_layer_ids`.
        chat_template (`str`, *optional*): the template of the prompts.

    Raises:
        ValueError: if the target scales or caps its logits.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        samples: list[TrainingSample],
        *,
        layer_ids: list[int],
        chat_template: str | None = None,
    ):
        self.target = target
        self.samples = samples
        self.manifest = {**describe(target, layer_ids, chat_template), "samples": len(samples)}
        check_head(target, samples[0])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample, as [`FeatureCache`] has it."""
        sample = self.samples[index]
        (row,) = target_rows(self.target, self.manifest["layer_ids"], [sample])
        row["loss_mask"] = torch.arange(len(sample.input_ids)) >= sample.response_start
        row["index"] = torch.tensor(index)
        return row
