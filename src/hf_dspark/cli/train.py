"""`hf-dspark train`: from the target's responses to a drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration_dspark import DSparkConfig
from ..loading import DEMO_TARGET, fingerprint, load_demo_target
from ..modeling_dspark import DSparkDrafter, complete_files
from ..training.cache import FeatureCache
from ..training.data import TrainingSample, frequent_tokens, read_samples
from ..training.initialise import copy_head_rows, copy_target_layers, fit_bigrams
from ..training.trainer import DSparkTrainer, DSparkTrainingArguments

DEMO_MASK_TOKEN = 16  # <empty_output>, a token of the code corpus that chat text never contains


def run(
    responses: Path,
    output: Path,
    *,
    target: str | None,
    eval_responses: Path | None,
    layers: int,
    block_size: int,
    target_layers: str | None,
    mask_token_id: int | None,
    markov_rank: int,
    draft_vocab_size: int | None,
    copy_layers: str | None,
    max_steps: int,
    learning_rate: float,
    batch_size: int,
    anchors: int,
    eval_steps: int,
    seed: int,
) -> None:
    """Trains; see `hf-dspark train --help`."""
    logging.set_verbosity_info()
    if target is None:
        model, tokenizer = load_demo_target(dtype=torch.bfloat16)
        mask_token_id = DEMO_MASK_TOKEN if mask_token_id is None else mask_token_id
    else:
        with complete_files(target):
            model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(target)
    config = drafter_config(
        model,
        name=target or DEMO_TARGET,
        layers=layers,
        block_size=block_size,
        target_layers=_numbers(target_layers, "--target-layers"),
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        draft_vocab_size=draft_vocab_size,
    )
    sources = _numbers(copy_layers, "--copy-layers")
    if sources is not None and len(sources) != layers:
        raise ValueError(f"Expected {layers} layers in --copy-layers, one a drafter layer, got {copy_layers}.")
    vocab_size = model.config.get_text_config().vocab_size
    samples = read_samples(responses, vocab_size=vocab_size)
    held_out = None if eval_responses is None else read_samples(eval_responses, vocab_size=vocab_size)

    checkpoint = get_last_checkpoint(str(output)) if output.is_dir() else None
    if checkpoint is not None:
        _check_same(config, DSparkConfig.from_pretrained(checkpoint), output)

    set_seed(seed)
    drafter = DSparkDrafter(config)
    initialise(drafter, model, samples, sources)
    template, ids = tokenizer.chat_template, list(config.target_layer_ids)
    cache = FeatureCache.build(model, samples, output / "features", layer_ids=ids, chat_template=template)
    eval_cache = None
    if held_out is not None:
        where = output / "eval-features"
        eval_cache = FeatureCache.build(model, held_out, where, layer_ids=ids, chat_template=template)
    drafter.bind(model)
    evaluating = "no" if eval_cache is None else "steps"
    arguments = DSparkTrainingArguments(
        output_dir=str(output),
        max_steps=max_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": max(1, max_steps // 4)},
        warmup_steps=min(200, max_steps // 10),
        per_device_train_batch_size=batch_size,
        anchors_per_sample=anchors,
        ce_weight=0.0,
        kl_weight=0.1,
        likelihood_first=0.6,
        confidence_weight=0.3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=50,
        eval_strategy=evaluating,
        eval_steps=eval_steps,
        save_steps=eval_steps,
        save_total_limit=2,
        load_best_model_at_end=eval_cache is not None,
        metric_for_best_model="eval_accepted_length",
        greater_is_better=True,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        report_to="none",
        seed=seed,
    )
    trainer = DSparkTrainer(drafter, arguments, cache, eval_cache=eval_cache)
    trainer.train(resume_from_checkpoint=checkpoint)
    drafter.to(torch.bfloat16).save_pretrained(output / "drafter")
    print(f"saved {output / 'drafter'}: use it with hf-dspark generate --drafter {output / 'drafter'}")


def _check_same(config: DSparkConfig, saved: DSparkConfig, output: Path) -> None:
    """A run resumes only with the drafter it began with."""
    ours, theirs = config.to_dict(), saved.to_dict()
    ignored = {"architectures", "dtype", "transformers_version"}
    changed = sorted(key for key in ours if key not in ignored and ours[key] != theirs.get(key))
    if changed:
        described = ", ".join(f"{key} {theirs.get(key)!r} (now {ours[key]!r})" for key in changed)
        raise ValueError(
            f"Expected the settings of the run in {output}, which has {described}. Give another folder, or the same "
            "options to resume."
        )


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"Expected layer numbers such as 1,8,15 in {option}, got {text!r}.") from error


def drafter_config(
    target: PreTrainedModel,
    *,
    name: str,
    layers: int,
    block_size: int,
    target_layers: list[int] | None,
    mask_token_id: int | None,
    markov_rank: int,
    draft_vocab_size: int | None,
) -> DSparkConfig:
    """A drafter shaped like its target: width, heads, MLP, rotary base and special tokens are the target's.

    Without `target_layers`, five layers are spread from the second to the last but one (paper's recipe).
    """
    text = target.config.get_text_config()
    depth = text.num_hidden_layers
    if target_layers is None:
        last, count = depth - 2, min(5, depth - 1)
        target_layers = sorted({round(1 + index * (last - 1) / max(1, count - 1)) for index in range(count)})
    heads = markov_rank > 0
    return DSparkConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None),
        hidden_act=text.hidden_act,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=dict(text.rope_parameters),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layers,
        num_target_layers=depth,
        markov_rank=markov_rank,
        enable_confidence_head=heads,
        confidence_head_with_markov=heads,
        draft_vocab_size=draft_vocab_size,
        target_name_or_path=name,
        target_fingerprint=fingerprint(target),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


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
