"""Parity with the reference implementation: tensors that its unmodified modules produced from tiny checkpoints.

Every number is compared within 1e-5 of the largest value of its kind; token ids and lengths are compared exactly.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from hf_dspark import DraftContext, DSparkDrafter, Trace, use_stock_loop
from hf_dspark.heads_dspark import confidence, threshold_lengths
from hf_dspark.training.blocks import draft_logits, target_probabilities, teacher_forced
from hf_dspark.training.loss import LossWeights, objective
from hf_dspark.training.packing import PackedAttention

DATA = Path(__file__).parent / "data"
FOLDERS = {
    "vanilla": DATA / "qwen3",
    "dflash": DATA / "variants" / "qwen3_dflash",
    "gated": DATA / "variants" / "qwen3_gated",
    "rnn": DATA / "variants" / "qwen3_rnn",
}
HEADS = pytest.mark.parametrize("head", FOLDERS)
ATTENTION = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@cache
def golden(head):
    return load_file(FOLDERS[head] / "io.safetensors")


def load(head, attention="sdpa"):
    return DSparkDrafter.from_pretrained(FOLDERS[head], attn_implementation=attention).eval()


def assert_near(ours, theirs):
    assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


@ATTENTION
@HEADS
def test_backbone_and_base_logits(head, attention):
    drafter, data = load(head, attention), golden(head)
    context, start = DraftContext(), 0
    for step in range(4):
        features = data[f"step{step}.new_context_features"]
        positions = torch.arange(start, int(data[f"step{step}.start"]) + drafter.config.block_size)[None]
        output = drafter(
            noise_embeds=drafter.embed(data[f"step{step}.draft_input_ids"]),
            context_hidden_states=features,
            position_ids=positions,
            cache=context.cache,
        )
        start += features.shape[1]
        assert_near(output.last_hidden_state, data[f"step{step}.block_hidden"])
        assert_near(drafter.base_logits(output.last_hidden_state), data[f"step{step}.base_logits"])


@ATTENTION
@HEADS
def test_proposed_blocks_confidences_and_draft_cache(head, attention):
    drafter, data = load(head, attention), golden(head)
    context = DraftContext()
    for step in range(4):
        features = data[f"step{step}.new_context_features"]
        start = int(data[f"step{step}.start"])
        context.append(features, torch.arange(start - features.shape[1], start)[None])
        block = drafter.propose(context, data[f"step{step}.draft_input_ids"][:, 0])
        assert torch.equal(block.token_ids, data[f"step{step}.draft_tokens"])
        for layer, cached in enumerate(context.cache.layers):
            assert_near(cached.keys, data[f"step{step}.cache.{layer}.keys"])
            assert_near(cached.values, data[f"step{step}.cache.{layer}.values"])
        if head == "dflash":
            assert block.confidence_logits is None
            continue
        assert_near(block.confidence_logits, data[f"step{step}.confidence_logits"])
        confidences = confidence(block.confidence_logits, None)
        assert_near(confidences.cumprod(dim=-1), data[f"step{step}.survival"])
        lengths = [int(threshold_lengths(confidences, threshold)) for threshold in (0, 0.25, 0.5, 0.75, 1.0)]
        assert lengths == data[f"step{step}.threshold_lengths"].tolist()


def test_a_block_ends_at_the_first_confidence_below_the_threshold():
    confidences = torch.tensor([[0.5, 0.5, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 1.0]])
    assert threshold_lengths(confidences, 0.5).tolist() == [2, 0, 4]
    assert threshold_lengths(confidences, 1.0).tolist() == [0, 0, 4]
    assert threshold_lengths(confidences, 0.0).tolist() == [4, 4, 4]
    logits = torch.tensor([[2.0, -3.0]])
    assert_near(confidence(logits, [4.0, 0.5]), torch.tensor([[0.5, -6.0]]).sigmoid())


@HEADS
def test_corrected_logits_along_the_greedy_chain(head):
    drafter, data = load(head), golden(head)
    for step in range(4):
        hidden = data[f"step{step}.block_hidden"]
        latent = None
        if drafter.markov_head is not None:
            drafted = data[f"step{step}.draft_tokens"]
            before = torch.cat([data[f"step{step}.draft_input_ids"][:, :1], drafted[:, :-1]], dim=1)
            latent = drafter.markov_head.teacher_forced(drafter.markov_head.markov_w1(before), hidden)
        assert_near(draft_logits(drafter, hidden, latent), data[f"step{step}.draft_logits"])


def training_blocks(drafter, data):
    sequences, length = data["train.input_ids"].shape
    keep = data["train.block_keep_mask"].bool()
    starts = torch.arange(sequences)[:, None] * length
    return teacher_forced(
        drafter,
        input_ids=data["train.input_ids"].flatten(),
        loss_mask=data["train.loss_mask"].bool().flatten(),
        lengths=torch.full((sequences,), length),
        features=data["train.target_hidden_states"].flatten(0, 1),
        last_hidden=data["train.target_last_hidden_states"].flatten(0, 1),
        logsumexp=None,
        anchors=(data["train.anchor_positions"] + starts)[keep],
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("route", ["dense", "flex"])
@HEADS
def test_training_forward_and_loss_terms(head, route, monkeypatch):
    monkeypatch.setattr(PackedAttention, "dense", getattr(PackedAttention, route))
    drafter, data = load(head).requires_grad_(route == "dense"), golden(head)  # flex trains on CUDA only
    blocks = training_blocks(drafter, data)
    keep = data["train.block_keep_mask"].bool()
    supervised = blocks.supervised
    assert torch.equal(supervised, data["train.eval_mask"].bool()[keep])
    assert torch.equal(blocks.labels, data["train.target_ids"][keep][supervised])
    assert_near(draft_logits(drafter, blocks.hidden, blocks.latent), data["train.draft_logits"][keep][supervised])
    theirs = data["train.aligned_target_logits"][keep][supervised].softmax(-1)
    assert_near(target_probabilities(drafter, blocks.target_hidden, None), theirs)
    if head != "dflash":
        assert_near(blocks.confidence_logits, data["train.confidence_pred"][keep][supervised])
    if route == "flex":
        return

    terms = objective(drafter, blocks, LossWeights(), chunk_rows=5)
    for ours, theirs in (("ce", "ce"), ("tv", "l1"), ("confidence", "confidence")):
        if ours in terms.sums:
            assert_near(terms.sums[ours][None], data[f"train.loss.{theirs}_loss_num"])
            assert_near(terms.weights[ours][None], data[f"train.loss.{theirs}_loss_den"])
    assert_near(terms.loss[None], data["train.loss.total"])


@HEADS
def test_gradients_in_chunks_equal_autograd_of_the_plain_formula(head):
    drafter, data = load(head), golden(head)
    weights = LossWeights(ce=0.3, kl=0.5, tv=0.7, confidence=0.9)
    objective(drafter, training_blocks(drafter, data), weights, chunk_rows=7).loss.backward()
    chunked = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()

    blocks = training_blocks(drafter, data)
    log_q = draft_logits(drafter, blocks.hidden, blocks.latent).log_softmax(-1)
    p = target_probabilities(drafter, blocks.target_hidden, None).detach()
    slot_weight = torch.exp(-blocks.slots / weights.decay)
    tv = (log_q.exp() - p).abs().sum(-1)
    values = [
        (0.3, -log_q.gather(-1, blocks.labels[:, None])[:, 0]),
        (0.5, -(p * log_q).sum(-1)),
        (0.7, tv),
    ]
    if blocks.confidence_logits is not None:
        acceptance = (1 - tv / 2).detach()
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        values.append((0.9, bce(blocks.confidence_logits, acceptance, reduction="none")))
    loss = sum(factor * (x * slot_weight).sum() / (slot_weight.sum() + 1e-6) for factor, x in values)
    loss.backward()
    plain = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert plain.keys() == chunked.keys()
    for name, gradient in plain.items():
        assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threshold", ["0.0", "0.7", "0.75", "0.8"])
@pytest.mark.parametrize("stock", [False, True], ids=["our loop", "stock loop"])
def test_recorded_generations_round_by_round(threshold, stock):
    folder = DATA / "e2e_qwen3"
    data = load_file(folder / "io.safetensors")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    drafter = DSparkDrafter.from_pretrained(folder / "draft")
    drafter.config.confidence_threshold = float(threshold)
    drafted = 0
    for index in range(4):
        prompt, greedy = data[f"p{index}.prompt"], data[f"p{index}.target_greedy"]
        target.generation_config.eos_token_id = None
        # The reference's last round runs past its budget: eight more tokens let it be whole.
        with Trace() as trace:
            if stock:
                with use_stock_loop():
                    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=56, do_sample=False)
            else:
                output = target.generate(prompt, assistant_model=drafter, max_new_tokens=56, do_sample=False)
        assert torch.equal(output[:, : greedy.shape[1]], greedy)
        assert torch.equal(greedy, data[f"p{index}.th{threshold}.output_ids"])
        proposed = data[f"p{index}.th{threshold}.proposal_lengths"].tolist()
        accepted = data[f"p{index}.th{threshold}.accepted_draft_lengths"].tolist()
        assert [record.verified for record in trace.rounds][: len(proposed)] == proposed
        assert [record.accepted for record in trace.rounds][: len(accepted)] == accepted
        drafted += trace.drafted
    assert drafted > 0
