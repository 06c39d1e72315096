"""`DSparkTrainer`: training a drafter as a plain transformers job over cached target features."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from ..modeling_dspark import DSparkDrafter
from .anchors import anchor_generator, sample_anchors
from .blocks import teacher_forced
from .cache import FeatureCache
from .loss import LossTerms, LossWeights, objective
from .replay import replay_greedy


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the settings of the DSpark objective (see `hf_dspark.training.loss`).

    Args:
        anchors_per_sample (`int`): blocks drawn from one sequence.
        loss_decay (`float`): slot weights are exp(-k / loss_decay).
        ce_weight, kl_weight, tv_weight, confidence_weight (`float`): weights of the terms.
        likelihood_first (`float`): share of training in which the weight of TV grows from zero while KL, which starts
            at one, falls to `kl_weight`: TV has almost no gradient while q and p hardly overlap.
    """

    anchors_per_sample: int = field(default=32)
    loss_decay: float = field(default=4.0)
    ce_weight: float = field(default=0.1)
    kl_weight: float = field(default=0.0)
    tv_weight: float = field(default=0.9)
    confidence_weight: float = field(default=1.0)
    likelihood_first: float = field(default=0.0)

    def __post_init__(self):
        super().__post_init__()
        self.remove_unused_columns = False
        if self.anchors_per_sample < 1:
            raise ValueError(f"Expected anchors_per_sample >= 1, got {self.anchors_per_sample}.")
        if not 0 <= self.likelihood_first <= 1:
            raise ValueError(f"Expected likelihood_first within [0, 1], got {self.likelihood_first}.")


class AnchorDataset(Dataset):
    """Cached samples with anchors drawn anew in every epoch.

    Args:
        cache ([`FeatureCache`]): the samples.
        anchors_per_sample (`int`): blocks drawn from one sequence.
        seed (`int`): with the epoch and the sample's index it determines the anchors.
    """

    def __init__(self, cache: FeatureCache, anchors_per_sample: int, seed: int):
        self.cache = cache
        self.anchors_per_sample = anchors_per_sample
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate's data loader at the start of every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.cache[index]
        generator = anchor_generator(self.seed, self.epoch, index)
        sample["anchors"] = sample_anchors(sample["loss_mask"], self.anchors_per_sample, generator)
        return sample


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads samples to one batch; `keep` marks the real blocks."""
    batch = {
        key: pad_sequence([sample[key] for sample in samples], batch_first=True)
        for key in ("input_ids", "loss_mask", "features", "last_hidden", "logsumexp", "anchors")
    }
    blocks = torch.tensor([len(sample["anchors"]) for sample in samples])
    if not blocks.any():  # responses too short for any anchor: one block that only fills the batch
        batch["anchors"] = batch["anchors"].new_zeros(len(samples), 1)
    batch["keep"] = torch.arange(batch["anchors"].shape[1]) < blocks[:, None]
    return batch


class DSparkTrainer(Trainer):
    """Trains a drafter on cached features; everything else is `transformers.Trainer`.

    Args:
        drafter ([`DSparkDrafter`]): with its own embedding or bound to the target.
        args ([`DSparkTrainingArguments`]): all of it.
        cache ([`FeatureCache`]): training samples.
        eval_cache ([`FeatureCache`], *optional*): the target's greedy responses to held-out prompts; evaluation
            replays their speculative rounds (`hf_dspark.training.replay`).
        callbacks (`list[TrainerCallback]`, *optional*): as in transformers.
    """

    args: DSparkTrainingArguments
    control: TrainerControl

    def __init__(
        self,
        drafter: DSparkDrafter,
        args: DSparkTrainingArguments,
        cache: FeatureCache,
        *,
        eval_cache: FeatureCache | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **kwargs: Any,
    ):
        described = cache.manifest
        for ours, theirs, what in (
            (list(drafter.config.target_layer_ids), described["layer_ids"], "target layers"),
            (drafter.config.hidden_size, described["hidden_size"], "hidden size"),
            (drafter.config.vocab_size, described["vocab_size"], "vocabulary size"),
        ):
            if ours != theirs:
                raise ValueError(
                    f"Expected a feature cache with {what} {ours}, got {theirs} in {cache.directory}. "
                    "Build a cache for this drafter's target and target_layer_ids."
                )
        if args.bf16:
            # Autocast keeps casts of trained weights only; a frozen float32 matrix would be cast in every chunk.
            for frozen in (drafter.embed_tokens, drafter.lm_head):
                if frozen is not None:
                    frozen.to(torch.bfloat16)
        super().__init__(
            model=drafter,
            args=args,
            data_collator=collate,
            train_dataset=AnchorDataset(cache, args.anchors_per_sample, args.seed),
            eval_dataset=eval_cache,
            callbacks=callbacks,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = False
        self._seen: list[LossTerms] = []

    def loss_weights(self) -> LossWeights:
        """Weights of the loss terms at the present step."""
        args = self.args
        kl, tv = args.kl_weight, args.tv_weight
        if args.likelihood_first:
            progress = self.state.global_step / max(1, self.state.max_steps)
            grown = min(1.0, progress / args.likelihood_first)
            kl, tv = 1 + (kl - 1) * grown, tv * grown
        return LossWeights(args.ce_weight, kl, tv, args.confidence_weight, args.loss_decay)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        drafter = self.accelerator.unwrap_model(model)
        blocks = teacher_forced(drafter, **inputs)
        terms = objective(drafter, blocks, self.loss_weights())
        self._seen.append(dataclasses.replace(terms, loss=terms.loss.detach()))
        return (terms.loss, blocks) if return_outputs else terms.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._seen:
            for name in self._seen[0].sums:
                total = sum(terms.sums[name].item() for terms in self._seen)
                logs[name] = total / (sum(terms.weights[name].item() for terms in self._seen) + 1e-6)
            rates = sum(terms.acceptance for terms in self._seen) / sum(terms.slots for terms in self._seen).clamp(
                min=1
            )
            # Bonus token included; slots are treated as independent given the text, as in training.
            logs["expected_accepted_length"] = 1 + rates.cumprod(0).sum().item()
            self._seen.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Replays the speculative rounds of the evaluation set and reports their accepted length."""
        cache = eval_dataset if eval_dataset is not None else self.eval_dataset
        with self.compute_loss_context_manager():
            result = replay_greedy(self.accelerator.unwrap_model(self.model), cache)
        metrics = {f"{metric_key_prefix}_accepted_length": result.accepted_length}
        for slot, rate in enumerate(result.conditional_acceptance, start=1):
            metrics[f"{metric_key_prefix}_acceptance@{slot}"] = rate
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
