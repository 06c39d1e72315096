"""`hf-dspark train`: from the target's responses to a drafter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from .._compat import CHECKPOINTING
from ..configuration_dspark import DSparkConfig
from ..loading import DEMO_TARGET, fingerprint, load_demo_target
from ..modeling_dspark import DSparkDrafter, complete_files
from ..training.cache import FeatureCache
from ..training.data import TrainingSample, default_target_layers, frequent_tokens, read_samples
from ..training.features import OnlineFeatures
from ..training.initialise import copy_head_rows, copy_target_layers, fit_bigrams
from ..training.recipe import Recipe, read_recipe, record
from ..training.smoke import make_target, write_responses
from ..training.trainer import DSparkTrainer, DSparkTrainingArguments
from .models import show_log

DEMO_MASK_TOKEN = 16  # <empty_output>, a token of the code corpus that chat text never contains


def run(
    output: Path,
    *,
    responses: list[Path],
    eval_responses: Path | None,
    preset: str | None,
    config_file: Path | None,
    target_layers: str | None,
    copy_layers: str | None,
    **options: Any,
) -> None:
    """Trains; see `hf-dspark train --help`."""
    logging.set_verbosity_info()
    show_log()
    state = PartialState()  # of `accelerate launch`; one process otherwise
    options |= {
        "target_layers": _numbers(target_layers, "--target-layers"),
        "copy_layers": _numbers(copy_layers, "--copy-layers"),
    }
    if preset == "smoke":
        output.mkdir(parents=True, exist_ok=True)
        responses, eval_responses = [output / "responses.jsonl"], output / "held-out.jsonl"
        with state.main_process_first():
            options |= {"target": str(output / "target"), "mask_token_id": make_target(output / "target")}
            write_responses(output / "target", responses[0], eval_responses)
    recipe = read_recipe(preset, config_file, options)
    if not responses:
        raise ValueError(
            "Expected --responses with the target's own answers, got none. Make them with hf-dspark data regenerate "
            "or hf-dspark data synthesize."
        )
    files = [*responses, *([eval_responses] if eval_responses is not None else [])]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"Expected a JSONL file of prompt_ids and response_ids, got no file at {path}.")

    model, tokenizer = _load_target(recipe)
    model.to(state.device)
    vocab_size = model.config.get_text_config().vocab_size
    samples = [
        sample
        for path in responses
        for sample in read_samples(path, vocab_size=vocab_size, max_length=recipe.max_length)
    ]
    held_out = None
    if eval_responses is not None:
        held_out = read_samples(eval_responses, vocab_size=vocab_size, max_length=recipe.max_length)

    set_seed(recipe.seed)
    if recipe.start_from is not None:
        drafter = DSparkDrafter.from_pretrained(recipe.start_from, dtype=torch.float32)
        recipe = dataclasses.replace(recipe, **shape_of(drafter.config))
    else:
        drafter = DSparkDrafter(drafter_config(model, recipe))
        initialise(drafter, model, samples, recipe.copy_layers)
    drafter.bind(model)
    # Settings that no drafter can have were refused by now, and bind nothing.
    with state.main_process_first():
        record(output, recipe, files)

    def features(rows: list[TrainingSample], folder: str) -> FeatureCache | OnlineFeatures:
        shared = {"layer_ids": list(drafter.config.target_layer_ids), "chat_template": tokenizer.chat_template}
        if recipe.online:
            return OnlineFeatures(model, rows, **shared)
        with state.main_process_first():  # the others find it finished
            return FeatureCache.build(model, rows, output / folder, bits=recipe.bits, **shared)

    trainer = DSparkTrainer(
        drafter,
        _arguments(output, recipe, evaluated=held_out is not None),
        features(samples, "features"),
        eval_data=None if held_out is None else features(held_out, "eval-features"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)))
    drafter.to(torch.bfloat16)
    if trainer.args.should_save:
        drafter.save_pretrained(output / "drafter")
        print(f"saved {output / 'drafter'}: use it with {_use(output, recipe)}")


def _use(output: Path, recipe: Recipe) -> str:
    target = "" if recipe.target is None else f" --target {recipe.target}"
    return f'hf-dspark generate "..." --drafter {output / "drafter"}{target}'


def _load_target(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if recipe.target is None:
        return load_demo_target(dtype=torch.bfloat16)
    with complete_files(recipe.target):
        model = AutoModelForCausalLM.from_pretrained(recipe.target, dtype="auto")
    return model, AutoTokenizer.from_pretrained(recipe.target)


def _arguments(output: Path, recipe: Recipe, *, evaluated: bool) -> DSparkTrainingArguments:
    steps = recipe.max_steps
    return DSparkTrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": max(1, round(steps * recipe.decay_share))},
        warmup_steps=min(200, steps // 10),
        per_device_train_batch_size=recipe.batch_size,
        anchors_per_sample=recipe.anchors,
        ce_weight=recipe.ce_weight,
        kl_weight=recipe.kl_weight,
        tv_weight=recipe.tv_weight,
        confidence_weight=recipe.confidence_weight,
        loss_decay=recipe.loss_decay,
        likelihood_first=recipe.likelihood_first,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        torch_compile=recipe.torch_compile,
        **{CHECKPOINTING: recipe.gradient_checkpointing},
        logging_steps=min(50, recipe.eval_steps),
        eval_strategy="steps" if evaluated else "no",
        eval_steps=recipe.eval_steps,
        save_steps=recipe.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=evaluated,
        metric_for_best_model="eval_accepted_length",
        greater_is_better=True,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        dataloader_pin_memory=False,
        report_to="none",
        seed=recipe.seed,
    )


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"Expected layer numbers such as 1,8,15 in {option}, got {text!r}.") from error


def drafter_config(target: PreTrainedModel, recipe: Recipe) -> DSparkConfig:
    """A drafter shaped like its target: width, heads, MLP, rotary base and special tokens are the target's."""
    text = target.config.get_text_config()
    heads, demo = recipe.markov_rank > 0, recipe.target is None
    return DSparkConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None),
        hidden_act=text.hidden_act,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=dict(text.rope_parameters),
        block_size=recipe.block_size,
        mask_token_id=DEMO_MASK_TOKEN if demo and recipe.mask_token_id is None else recipe.mask_token_id,
        target_layer_ids=recipe.target_layers or default_target_layers(text.num_hidden_layers),
        num_target_layers=text.num_hidden_layers,
        markov_rank=recipe.markov_rank,
        markov_head_type=recipe.markov_head_type,
        enable_confidence_head=heads,
        confidence_head_with_markov=heads,
        draft_vocab_size=recipe.draft_vocab_size,
        target_name_or_path=recipe.target or DEMO_TARGET,
        target_revision=getattr(target.config, "_commit_hash", None),
        target_fingerprint=fingerprint(target),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def shape_of(config: DSparkConfig) -> dict[str, Any]:
    """The fields of a [`Recipe`] that a drafter to start from decides."""
    return {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "draft_vocab_size": config.draft_vocab_size,
        "target_layers": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "copy_layers": None,
    }


def initialise(
    drafter: DSparkDrafter, target: PreTrainedModel, samples: list[TrainingSample], copy_layers: list[int] | None
) -> None:
    """Head rows of a reduced vocabulary, target layers if asked, and bigrams for the sequential head."""
    config = drafter.config
    if config.draft_vocab_size is not None:
        copy_head_rows(
            drafter, target, frequent_tokens(samples, config.draft_vocab_size, vocab_size=config.vocab_size)
        )
    if copy_layers is not None:
        copy_target_layers(drafter, target, copy_layers, samples)
    if config.markov_rank:
        fit_bigrams(drafter, samples)
