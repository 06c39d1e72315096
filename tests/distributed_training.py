"""A short training run, started by test_distributed.py on one process or two; arguments: output folder, batch."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_dspark import DSparkTrainer, DSparkTrainingArguments
from hf_dspark.training.data import TrainingSample
from hf_dspark.training.features import OnlineFeatures
from tiny import VOCAB, tiny_drafter, tiny_target


def main() -> None:
    output, batch = Path(sys.argv[1]), int(sys.argv[2])
    target = tiny_target(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    samples = [
        TrainingSample(tuple(torch.randint(4, VOCAB, (20 + 2 * n,), generator=generator).tolist()), 3)
        for n in range(12)
    ]
    data = OnlineFeatures(target, samples, layer_ids=[0, 2])
    arguments = DSparkTrainingArguments(
        output_dir=str(output), max_steps=5, learning_rate=5e-3, per_device_train_batch_size=batch,
        anchors_per_sample=5, logging_steps=1, save_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
        kl_weight=0.5, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = DSparkTrainer(tiny_drafter(target).bind(target), arguments, data, eval_data=data)
    trainer.train()
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    accepted = trainer.evaluate()
    if trainer.args.should_save:
        history = [log for log in trainer.state.log_history if "loss" in log]
        (output / "history.json").write_text(json.dumps({"history": history, "eval": accepted}))
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        save_file({name: weight.contiguous() for name, weight in weights.items()}, output / "weights.safetensors")


if __name__ == "__main__":
    main()
