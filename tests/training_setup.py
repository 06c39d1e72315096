"""What tests of training share: samples of tiny targets, batches, arguments and histories."""

from __future__ import annotations

import torch

from hf_dspark import DSparkTrainingArguments
from hf_dspark.training.anchors import draw_anchors
from hf_dspark.training.blocks import teacher_forced
from hf_dspark.training.data import TrainingSample
from hf_dspark.training.loss import LossWeights, objective
from hf_dspark.training.trainer import collate
from tiny import VOCAB, prompt


def greedy_samples(target, count, length=24):
    samples = []
    for seed in range(count):
        ids = prompt(5, seed=seed)
        text = target.generate(ids, max_new_tokens=length, do_sample=False)
        samples.append(TrainingSample(tuple(text[0].tolist()), 5))
    return samples


def random_samples(count, *, shortest=14, response_start=5):
    """Random tokens; lengths go up and down, so that sorting and padding have something to do."""
    generator = torch.Generator().manual_seed(0)
    lengths = [shortest + 5 * n % 17 for n in range(count)]
    return [
        TrainingSample(tuple(torch.randint(2, VOCAB - 1, (length,), generator=generator).tolist()), response_start)
        for length in lengths
    ]


def batch_of(data, anchors=6, indices=None):
    batch = collate([data[index] for index in indices or range(len(data))])
    index = batch.pop("index")
    return batch | {"anchors": draw_anchors(batch["loss_mask"], batch["lengths"], index, anchors, seed=0, step=0)}


def arguments(path, **changes):
    options = {
        "output_dir": str(path), "max_steps": 20, "learning_rate": 5e-3, "per_device_train_batch_size": 4,
        "anchors_per_sample": 8, "logging_steps": 1, "save_steps": 10, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "kl_weight": 0.5, "likelihood_first": 0.5,
    }  # fmt: skip
    return DSparkTrainingArguments(**{**options, **changes})


def losses(trainer):
    return [(log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log]


def terms_of(drafter, batch, weights=None, **options):
    """The objective of a batch, all four terms at work unless `weights` are given."""
    blocks = teacher_forced(drafter, **batch, **options)
    return objective(drafter, blocks, weights or LossWeights(kl=0.5))
