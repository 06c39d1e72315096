"""Training and generation are two paths to the same numbers: a block's logits agree at every depth of context.

This is the classic silent fault of drafters: high accuracy in training, next to no acceptance in use.
"""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_dspark import DraftContext, DSparkDrafter
from hf_dspark.backbone_dspark import RotaryEmbedding
from hf_dspark.training.blocks import draft_logits, teacher_forced
from tiny import MASK, VOCAB, drafter_config, tiny_drafter, tiny_target

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def both_paths(drafter, depth):
    """Logits of the block behind `depth` context rows: proposed step by step, and teacher-forced at once."""
    gamma = drafter.config.block_size
    generator = torch.Generator().manual_seed(depth)
    features = torch.randn(1, depth + gamma + 1, 2 * drafter.config.hidden_size, generator=generator)
    anchor = torch.tensor([5])

    context = DraftContext()
    for start in range(0, depth, 700):  # rows arrive in several rounds
        rows = features[:, start : min(start + 700, depth)]
        context.append(rows, torch.arange(start, start + rows.shape[1])[None])
        if start + 700 < depth:
            drafter.propose(context, anchor)
    block = drafter.propose(context, anchor, do_sample=True)

    ids = torch.full((1, depth + gamma + 1), 3)
    ids[0, depth] = anchor
    ids[0, depth + 1 :] = block.token_ids
    forced = teacher_forced(
        drafter,
        input_ids=ids[0],
        loss_mask=torch.arange(ids.shape[1]) >= depth,
        lengths=torch.tensor([ids.shape[1]]),
        features=features[0],
        last_hidden=torch.zeros(ids.shape[1], drafter.config.hidden_size),
        logsumexp=None,
        anchors=torch.tensor([depth]),
    )
    return block, draft_logits(drafter, forced.hidden, forced.latent), forced.confidence_logits


def assert_paths_agree(drafter, depth):
    block, logits, confidences = both_paths(drafter, depth)
    scale = logits.abs().max().item()
    assert_close(block.logits[0], logits, rtol=0, atol=1e-5 * scale)
    if confidences is not None:
        assert_close(block.confidence_logits[0], confidences, rtol=0, atol=1e-5 * confidences.abs().max().item())


@pytest.mark.parametrize("depth", [1, 100, 4000])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_one_block_on_both_paths(depth, head, layers):
    changes = {"own_embeddings": True, "max_position_embeddings": 8192}
    if head is None:
        changes |= {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    else:
        changes |= {"markov_head_type": head}
    if layers == "sliding":
        changes |= {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    assert_paths_agree(tiny_drafter(**changes), depth)


@pytest.mark.parametrize("rope", ROPE)
def test_rotary_variants_on_both_paths(rope):
    assert_paths_agree(tiny_drafter(own_embeddings=True, max_position_embeddings=512, rope_parameters=ROPE[rope]), 300)


@pytest.mark.parametrize("rope", ROPE)
def test_angles_are_those_of_transformers(rope):
    config = drafter_config(max_position_embeddings=512, rope_parameters=ROPE[rope])
    positions = torch.tensor([[0, 1, 77, 300, 511]])
    ours = RotaryEmbedding(config)(positions, torch.float32)
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one[:, 0], other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_variants_that_change_with_length_are_refused(rope_type):
    with pytest.raises(ValueError, match=f"Expected rope_type in .* got '{rope_type}'"):
        drafter_config(rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0})


def test_a_shifted_position_is_noticed():
    drafter = tiny_drafter(own_embeddings=True)
    features = torch.randn(1, 20, 64)
    logits = []
    for shift in (0, 1):
        context = DraftContext()
        context.append(features, torch.arange(20)[None])
        context.next_position += shift
        logits.append(drafter.propose(context, torch.tensor([5]), do_sample=True).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_angles_stay_exact_in_bfloat16_at_position_30000():
    drafter = tiny_drafter(own_embeddings=True, max_position_embeddings=40000)
    position = torch.tensor([[30000]])
    exact = drafter.rotary(position, torch.float32)
    drafter.to(torch.bfloat16)
    drafter.rotary(position, torch.bfloat16)
    after = drafter.rotary(position, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(exact, after, strict=True))
    steps = torch.arange(0, 8, 2, dtype=torch.float64)
    angles = (30000 * 10000.0 ** (-steps / 8)).repeat(2)
    assert_close(exact[0][0, 0, 0].double(), angles.cos(), rtol=0, atol=5e-3)


def test_drafts_of_a_reduced_vocabulary_are_target_ids():
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target, draft_vocab_size=6).bind(target)
    kept = torch.tensor([3, 8, 13, 21, 34, 40])
    drafter.draft_token_ids.copy_(kept)
    context = DraftContext()
    context.append(torch.randn(1, 9, 64), torch.arange(9)[None])
    block = drafter.propose(context, torch.tensor([5]), do_sample=True)
    assert set(block.token_ids.flatten().tolist()) <= set(kept.tolist())
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[kept] = False
    assert torch.isinf(block.logits[..., outside]).all()
    assert torch.isfinite(block.logits[..., kept]).all()
    assert MASK not in kept
    assert isinstance(drafter, DSparkDrafter)
