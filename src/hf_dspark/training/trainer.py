"""`DSparkTrainer`: training a drafter as a plain transformers job, over cached or online target features."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from ..hooks_dspark import without_wrapper
from ..modeling_dspark import DSparkDrafter
from .anchors import draw_anchors
from .blocks import TeacherForced, teacher_forced
from .cache import FeatureCache
from .features import OnlineFeatures
from .loss import LossTerms, LossWeights, objective
from .replay import Replay, replay_greedy


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the settings of the DSpark objective (see `hf_dspark.training.loss`).

    Args:
        anchors_per_sample (`int`): blocks drawn from one sequence.
        loss_decay (`float`): slot weights are exp(-k / loss_decay).
        ce_weight, kl_weight, tv_weight, confidence_weight (`float`): weights of the terms.
        likelihood_first (`float`): share of training in which the weight of TV grows from zero while KL, which starts
            at one, falls to `kl_weight`: TV has almost no gradient while q and p hardly overlap.
        detach_confidence (`bool`): the confidence loss trains the confidence head alone.
    """

    anchors_per_sample: int = field(default=32)
    loss_decay: float = field(default=4.0)
    ce_weight: float = field(default=0.1)
    kl_weight: float = field(default=0.0)
    tv_weight: float = field(default=0.9)
    confidence_weight: float = field(default=1.0)
    likelihood_first: float = field(default=0.0)
    detach_confidence: bool = field(default=False)

    def __post_init__(self):
        super().__post_init__()
        self.remove_unused_columns = False
        if self.anchors_per_sample < 1:
            raise ValueError(f"Expected anchors_per_sample >= 1, got {self.anchors_per_sample}.")
        if not 0 <= self.likelihood_first <= 1:
            raise ValueError(f"Expected likelihood_first within [0, 1], got {self.likelihood_first}.")
        if self.n_gpu > 1:
            raise ValueError(
                f"Expected one process for each GPU, got one process for {self.n_gpu}. Start with `accelerate launch`."
            )


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Lays samples end to end; nothing is padded."""
    batch = {
        key: torch.cat([sample[key] for sample in samples])
        for key in ("input_ids", "loss_mask", "features", "last_hidden", "logsumexp")
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {**batch, "lengths": lengths, "index": torch.stack([sample["index"] for sample in samples])}


class DSparkTrainer(Trainer):
    """Trains a drafter on target features; everything else is `transformers.Trainer`.

    Args:
        drafter ([`DSparkDrafter`] or `PeftModel`): with its own embedding or bound to the target. Of a `PeftModel` the
            adapters are trained and saved, not the drafter.
        args ([`DSparkTrainingArguments`]): all of it.
        data ([`FeatureCache`] or [`OnlineFeatures`]): training samples.
        eval_data ([`FeatureCache`] or [`OnlineFeatures`], *optional*): the target's greedy responses to held-out
            prompts; evaluation replays their speculative rounds (`hf_dspark.training.replay`).
        callbacks (`list[TrainerCallback]`, *optional*): as in transformers.

    Raises:
        ValueError: if the features are not those that the drafter reads, or if the adapters act on its input.
    """

    args: DSparkTrainingArguments
    control: TrainerControl

    def __init__(
        self,
        drafter: DSparkDrafter,
        args: DSparkTrainingArguments,
        data: FeatureCache | OnlineFeatures,
        *,
        eval_data: FeatureCache | OnlineFeatures | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **kwargs: Any,
    ):
        base: DSparkDrafter = without_wrapper(drafter)
        for features in (data, eval_data):
            if features is not None:
                _check_features(base, features)
        if isinstance(data, OnlineFeatures) and args.dataloader_num_workers:
            raise ValueError(
                f"Expected dataloader_num_workers=0 with online features, got {args.dataloader_num_workers}: the "
                "target runs in this process. Leave it at 0, or build a FeatureCache."
            )
        if args.bf16:
            # Autocast keeps casts of trained weights only; a frozen float32 matrix would be cast in every chunk.
            for frozen in (base.embed_tokens, base.lm_head):
                if frozen is not None:
                    frozen.to(torch.bfloat16)
        super().__init__(
            model=drafter,
            args=args,
            data_collator=collate,
            train_dataset=data,
            eval_dataset=eval_data,
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
        args, index = self.args, inputs.pop("index")
        inputs["anchors"] = draw_anchors(
            inputs["loss_mask"],
            inputs["lengths"],
            index,
            args.anchors_per_sample,
            seed=args.seed,
            step=self.state.global_step,
        )

        def step(drafter: DSparkDrafter) -> tuple[LossTerms, TeacherForced]:
            blocks = teacher_forced(drafter, **inputs, detach_confidence=args.detach_confidence)
            return objective(drafter, blocks, self.loss_weights(), total=self._total), blocks

        terms, blocks = model(step=step)
        if not torch.isfinite(terms.loss):
            raise ValueError(
                f"Expected a finite loss, got {terms.loss.item()} in step {self.state.global_step + 1} from samples "
                f"{index.tolist()}. The last checkpoint in {args.output_dir} is good: look at these samples, or "
                "resume from it with a lower learning rate."
            )
        self._seen.append(dataclasses.replace(terms, loss=terms.loss.detach()))
        # Ranks average their gradients, and their losses have to add up.
        loss = terms.loss * self.accelerator.num_processes
        return (loss, blocks) if return_outputs else loss

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._seen:
            logs |= self._metrics()
            self._seen.clear()
        super().log(logs, *args, **kwargs)

    def _metrics(self) -> dict[str, float]:
        """Means over all blocks of all ranks since the last call: sums and counts are added before being divided."""
        names = list(self._seen[0].sums)
        gamma = len(self._seen[0].slots)
        rows = [
            torch.cat(
                [
                    torch.stack([terms.sums[name] for name in names]),
                    torch.stack([terms.weights[name] for name in names]),
                    terms.acceptance,
                    terms.bias,
                    terms.slots,
                ]
            )
            for terms in self._seen
        ]
        total = self._total(torch.stack(rows).sum(dim=0)).cpu()
        sums, weights, acceptance, bias, slots = total.split([len(names), len(names), gamma, gamma, gamma])
        rates = acceptance / slots.clamp(min=1)
        metrics = dict(zip(names, (sums / (weights + 1e-6)).tolist(), strict=True))
        metrics |= {f"acceptance@{slot}": rate for slot, rate in enumerate(rates.tolist(), start=1)}
        # Bonus token included; slots are treated as independent given the text, as in training.
        metrics["expected_accepted_length"] = 1 + rates.cumprod(0).sum().item()
        if "confidence" in names:
            metrics["confidence_bias"] = (bias.sum() / slots.sum().clamp(min=1)).item()
        return metrics

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Replays the speculative rounds of the evaluation set and reports their accepted length."""
        data = eval_dataset if eval_dataset is not None else self.eval_dataset

        def step(drafter: DSparkDrafter) -> Replay:
            return replay_greedy(drafter, data)

        with self.compute_loss_context_manager(), torch.no_grad():
            result = self.model_wrapped(step=step)
        metrics = {f"{metric_key_prefix}_accepted_length": result.accepted_length}
        for slot, rate in enumerate(result.conditional_acceptance, start=1):
            metrics[f"{metric_key_prefix}_acceptance@{slot}"] = rate
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _check_features(drafter: DSparkDrafter, data: FeatureCache | OnlineFeatures) -> None:
    """Features of other layers or another target would train without any error, to no use."""
    config, described = drafter.config, data.manifest
    for ours, theirs, what in (
        (list(config.target_layer_ids), described["layer_ids"], "target layers"),
        (config.hidden_size, described["hidden_size"], "hidden size"),
        (config.vocab_size, described["vocab_size"], "vocabulary size"),
        (config.target_fingerprint or described["target_fingerprint"], described["target_fingerprint"], "fingerprint"),
    ):
        if ours != theirs:
            raise ValueError(
                f"Expected target features with {what} {ours}, got {theirs}"
                f"{f' in {data.directory}' if isinstance(data, FeatureCache) else ''}. "
                "Take features of this drafter's target and target_layer_ids."
            )
