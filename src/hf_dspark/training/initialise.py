"""A start for training that already knows something: the target's layers, its norms, and bigrams of the text.

A drafter with random weights spends most of a short training on what the target knows anyway. Layers of the target
fit the drafter's shape when both have the same width; the drafter's query and key norms are set to the size that the
target's own queries and keys have. The Markov head starts as the truncated pointwise mutual information of adjacent
response tokens, which is the best bias a first-order head could add to a unigram model.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..features_dspark import decoder_layers
from ..modeling_dspark import DSparkDrafter
from .data import TrainingSample


@torch.no_grad()
def copy_head_rows(drafter: DSparkDrafter, target: PreTrainedModel, token_ids: list[int]) -> None:
    """Fills a reduced draft vocabulary: the frozen head rows of `token_ids` and the map to target ids.

    Args:
        drafter ([`DSparkDrafter`]): with `draft_vocab_size == len(token_ids)`.
        target (`PreTrainedModel`): the target; its head is called, not indexed.
        token_ids (`list[int]`): target ids in ascending order.
    """
    head = target.get_output_embeddings()
    unit = torch.eye(drafter.config.hidden_size, dtype=target.dtype, device=target.device)
    columns = torch.tensor(token_ids)
    rows = torch.cat([head(part)[:, columns.to(target.device)] for part in unit.split(64)]).T
    drafter.lm_head.weight.copy_(rows)
    drafter.draft_token_ids.copy_(columns)


@torch.no_grad()
def copy_target_layers(
    drafter: DSparkDrafter, target: PreTrainedModel, layer_ids: list[int], samples: list[TrainingSample]
) -> None:
    """Copies projections, MLPs and norms of target layers into the drafter's layers.

    Args:
        drafter ([`DSparkDrafter`]): to fill.
        target (`PreTrainedModel`): a Llama- or Qwen-style target with the drafter's layer shapes.
        layer_ids (`list[int]`): the target layer of each drafter layer.
        samples (`list[TrainingSample]`): text to measure the size of queries and keys on.

    Raises:
        ValueError: if a weight of the target is missing or has another shape.
    """
    layers = decoder_layers(target)
    if not all(0 <= source < len(layers) for source in layer_ids):
        raise ValueError(f"Expected layers of the target within [0, {len(layers) - 1}] to copy, got {layer_ids}.")
    sizes = _query_key_sizes(target, layer_ids, samples)
    for layer, source in zip(drafter.layers, layer_ids, strict=True):
        theirs = layers[source].state_dict()
        for name, weight in layer.named_parameters():
            if name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                weight.copy_(theirs[name] if name in theirs else sizes[source, name.split(".")[1][0]])
            elif name in theirs and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])
            else:
                raise ValueError(
                    f"Expected {name} of shape {tuple(weight.shape)} in layer {source} of {type(target).__name__}, "
                    f"got {tuple(theirs[name].shape) if name in theirs else 'none'}. Train from random layers instead."
                )
    drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    # The context of the first layer is what that layer read in the target: the deepest captured output, normalised.
    width = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -width:] += torch.eye(width)
    drafter.hidden_norm.weight.copy_(layers[layer_ids[0]].input_layernorm.weight)


def _query_key_sizes(
    target: PreTrainedModel, layer_ids: list[int], samples: list[TrainingSample]
) -> dict[tuple[int, str], float]:
    """Root mean square of queries ("q") and keys ("k") of target layers on some text."""
    layers = decoder_layers(target)
    sizes: dict[tuple[int, str], float] = {}
    handles = []

    def measure(key: tuple[int, str]):
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            sizes[key] = output.float().pow(2).mean().sqrt().item()

        return hook

    for index in set(layer_ids):
        attention = layers[index].self_attn
        handles.append(attention.q_proj.register_forward_hook(measure((index, "q"))))
        handles.append(attention.k_proj.register_forward_hook(measure((index, "k"))))
    try:
        target(torch.tensor([samples[0].input_ids], device=target.device))
    finally:
        for handle in handles:
            handle.remove()
    return sizes


@torch.no_grad()
def fit_bigrams(drafter: DSparkDrafter, samples: list[TrainingSample]) -> None:
    """Starts the Markov head from adjacent response tokens.

    W1 W2 becomes the rank-r truncation of log P(next | previous) / P(next), over pairs that occur; all others are
    zero, that is, independent.

    Args:
        drafter ([`DSparkDrafter`]): with a sequential head.
        samples (`list[TrainingSample]`): responses to count in.
    """
    config = drafter.config
    size = config.draft_vocab_size or config.vocab_size
    to_draft = torch.full((config.vocab_size,), -1)
    to_draft[drafter.draft_token_ids if config.draft_vocab_size else torch.arange(size)] = torch.arange(size)
    previous, following = [], []
    for sample in samples:
        ids = torch.tensor(sample.input_ids[sample.response_start - 1 :])
        previous.append(ids[:-1])
        following.append(to_draft[ids[1:]])
    before, after = torch.cat(previous), torch.cat(following)
    before, after = before[after >= 0], after[after >= 0]
    pairs = torch.sparse_coo_tensor(
        torch.stack([before, after]), torch.ones(len(before)), (config.vocab_size, size), check_invariants=True
    )
    pairs = pairs.coalesce()
    rows, columns = pairs.indices()
    row_sum = torch.zeros(config.vocab_size).index_add_(0, rows, pairs.values())
    column_sum = torch.zeros(size).index_add_(0, columns, pairs.values())
    # One pseudo-count drawn from the unigram distribution keeps rare pairs from counting as certain.
    unigram = column_sum[columns] / len(before)
    information = ((pairs.values() + unigram) / (row_sum[rows] + 1) / unigram).log()
    matrix = torch.sparse_coo_tensor(pairs.indices(), information, pairs.shape, check_invariants=True).coalesce()
    if config.markov_rank > min(matrix.shape):
        raise ValueError(
            f"Expected markov_rank <= {min(matrix.shape)}, the draft vocabulary, got {config.markov_rank}."
        )
    left, scale, right = torch.svd_lowrank(matrix, q=config.markov_rank, niter=4)
    drafter.markov_head.markov_w1.weight.copy_(left * scale.sqrt())
    drafter.markov_head.markov_w2.weight.copy_(right * scale.sqrt())
