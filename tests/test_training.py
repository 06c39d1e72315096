"""Training: exactly the right slots are supervised, nothing leaks, and what is learned is what generation does."""

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from hf_dspark import DSparkTrainer
from hf_dspark.features_dspark import TargetFeatures
from hf_dspark.training import cache as cache_module
from hf_dspark.training.anchors import anchor_generator, block_mask, sample_anchors, supervised_slots
from hf_dspark.training.blocks import draft_logits, target_probabilities, teacher_forced
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import TrainingSample, frequent_tokens
from hf_dspark.training.initialise import copy_head_rows, copy_target_layers, fit_bigrams
from hf_dspark.training.loss import LossWeights, objective
from hf_dspark.training.packing import PackedAttention
from hf_dspark.training.replay import replay_greedy
from tiny import VOCAB, tiny_drafter, tiny_target
from training_setup import arguments, batch_of, greedy_samples, losses


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(target):
    return greedy_samples(target, 8)


@pytest.fixture
def cache(target, samples, tmp_path):
    return FeatureCache.build(target, samples, tmp_path / "features", layer_ids=[0, 2], samples_per_shard=3)


# ------------------------------------------------------------------ anchors


def test_the_exact_slots_that_are_supervised():
    loss_mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0, 0], dtype=torch.bool)
    slots = supervised_slots(loss_mask, torch.tensor([2, 3, 6]), torch.full((3,), 10), gamma=3)
    # Labels of anchor 2: 3, 4, 5 (5 is outside the response); of 3: 4, 5; of 6: 7, 8.
    assert slots.tolist() == [[True, True, False], [True, False, False], [True, False, False]]


def test_a_block_at_the_end_of_its_text_is_cut():
    # Two texts of six and four rows: the labels of row 4 must not come from the second one.
    slots = supervised_slots(torch.ones(10, dtype=torch.bool), torch.tensor([4, 8]), torch.tensor([6, 10]), 4)
    assert slots.tolist() == [[True, False, False, False]] * 2


def test_anchors_need_their_own_and_the_next_token_in_the_response():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert sample_anchors(mask, 99, anchor_generator(0, 0, 0)).tolist() == [1, 6, 7]


def test_anchors_depend_on_seed_step_and_sample_alone():
    mask = torch.ones(200, dtype=torch.bool)

    def draw(*key):
        return sample_anchors(mask, 5, anchor_generator(*key)).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({tuple(draw(*key)) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]}) == 4


def test_the_exact_attention_mask():
    mask = block_mask(torch.tensor([2, 4]), length=5, gamma=2).int().tolist()
    first, second = [1, 1, 0, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert mask == [first, first, second, second]
    sliding = block_mask(torch.tensor([4]), length=5, gamma=2, window=3).int().tolist()
    assert sliding == [[0, 1, 1, 1, 0, 1, 1]] * 2


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
ROUTES = pytest.mark.parametrize("route", ["dense", "flex"])
UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LAYERS = pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])


@UNCOMPILED
@ROUTES
@LAYERS
@torch.no_grad()
def test_a_block_sees_neither_the_future_nor_other_blocks(target, cache, monkeypatch, route, changes):
    monkeypatch.setattr(PackedAttention, "dense", getattr(PackedAttention, route))
    drafter = tiny_drafter(target, **changes).bind(target)
    batch = batch_of(cache)
    second = int(batch["lengths"][0])  # the first row of the second text
    chosen = int((batch["anchors"] < second).sum())  # its first block
    anchor = int(batch["anchors"][chosen])

    def logits_of_block():
        blocks = teacher_forced(drafter, **batch)
        rows = blocks.supervised.nonzero()[:, 0] == chosen
        return draft_logits(drafter, blocks.hidden, blocks.latent)[rows]

    logits = logits_of_block()
    assert len(logits) == drafter.config.block_size
    clean = batch["features"].clone()
    batch["features"][anchor:] += 5.0  # its own future and the texts behind
    batch["features"][:second] += 5.0  # the text before
    others = torch.arange(len(batch["anchors"])) != chosen
    batch["anchors"] = torch.where(others & (batch["anchors"] > anchor), batch["anchors"].max(), batch["anchors"])
    assert_close(logits_of_block(), logits, rtol=0, atol=1e-5)
    batch["features"] = clean
    batch["features"][anchor - 1] += 5.0  # the last row it does see
    assert (logits_of_block() - logits).abs().max() > 1e-3


@UNCOMPILED
@LAYERS
@torch.no_grad()
def test_flex_attention_equals_a_dense_mask(target, samples, tmp_path, monkeypatch, changes):
    drafter = tiny_drafter(target, **changes).bind(target)
    ragged = [TrainingSample(sample.input_ids[: 9 + 3 * n], 5) for n, sample in enumerate(samples)]
    batch = batch_of(FeatureCache.build(target, ragged, tmp_path, layer_ids=[0, 2]))
    dense = teacher_forced(drafter, **batch)
    monkeypatch.setattr(PackedAttention, "dense", PackedAttention.flex)
    flex = teacher_forced(drafter, **batch)
    assert torch.equal(flex.labels, dense.labels)
    assert_close(flex.hidden, dense.hidden, rtol=0, atol=1e-4)


def test_a_batch_without_supervised_slots_costs_nothing(target, cache):
    drafter = tiny_drafter(target).bind(target)
    batch = batch_of(cache)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    terms = objective(drafter, teacher_forced(drafter, **batch), LossWeights())
    assert terms.loss.item() == 0
    terms.loss.backward()
    assert all(torch.isfinite(w.grad).all() for w in drafter.parameters() if w.grad is not None)


def test_responses_too_short_for_an_anchor_cost_nothing(target, samples, tmp_path):
    drafter = tiny_drafter(target).bind(target)
    short = [TrainingSample(sample.input_ids[:6], 5) for sample in samples]
    cache = FeatureCache.build(target, short, tmp_path / "short", layer_ids=[0, 2])
    terms = objective(drafter, teacher_forced(drafter, **batch_of(cache)), LossWeights())
    assert terms.loss.item() == 0
    terms.loss.backward()
    assert all(torch.isfinite(w.grad).all() for w in drafter.parameters() if w.grad is not None)
    assert replay_greedy(drafter, cache).rounds == 0

    cache = FeatureCache.build(target, [samples[0], *short], tmp_path / "mixed", layer_ids=[0, 2])
    batch = batch_of(cache)
    assert len(batch["anchors"]) == 6
    assert teacher_forced(drafter, **batch).supervised.any(1).all()


def test_a_sample_is_the_same_alone_and_packed(target, samples, tmp_path):
    drafter = tiny_drafter(target).bind(target)
    ragged = [samples[0], TrainingSample(samples[1].input_ids[:14], 5), TrainingSample(samples[2].input_ids[:9], 5)]
    data = FeatureCache.build(target, ragged, tmp_path, layer_ids=[0, 2])
    whole = teacher_forced(drafter, **batch_of(data, 4))
    alone = [teacher_forced(drafter, **batch_of(data, 4, [index])) for index in range(3)]
    assert torch.equal(whole.labels, torch.cat([blocks.labels for blocks in alone]))
    assert_close(whole.hidden, torch.cat([blocks.hidden for blocks in alone]), rtol=0, atol=1e-5)


# ------------------------------------------------------------------ features


def test_cached_rows_are_the_targets_own(target, samples, cache):
    stored = [cache[index] for index in range(len(cache))]
    assert sum(len(row["input_ids"]) for row in stored) == sum(len(sample.input_ids) for sample in samples)
    for row in stored:
        with TargetFeatures(target, [0, 2]) as features, torch.no_grad():
            output = target(row["input_ids"][None])
            assert_close(row["features"], features.take()[0], rtol=0, atol=1e-5)
        assert_close(row["logsumexp"], output.logits[0].logsumexp(-1), rtol=0, atol=1e-5)
        assert row["loss_mask"].sum() == 24


def test_an_interrupted_cache_resumes_where_it_stopped(target, samples, tmp_path, monkeypatch):
    real, calls = cache_module._shard, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(cache_module, "_shard", dies)
    options = {"layer_ids": [0, 2], "samples_per_shard": 2}
    with pytest.raises(KeyboardInterrupt):
        FeatureCache.build(target, samples, tmp_path, **options)
    with pytest.raises(ValueError, match="got 2 finished shards"):
        FeatureCache(tmp_path)
    resumed = FeatureCache.build(target, samples, tmp_path, **options)
    assert len(calls) == 5
    assert len(resumed) == 8
    for changes in ({"layer_ids": [0, 1]}, {"samples": samples[:-1]}):
        with pytest.raises(ValueError, match="Expected a cache with"):
            FeatureCache.build(target, **{"samples": samples, "directory": tmp_path, **options, **changes})


def test_a_softcapped_target_keeps_its_probabilities(tmp_path):
    capped = tiny_target("gemma2", dtype=torch.float32)
    with pytest.raises(ValueError, match="Expected a target whose logits are its head's output"):
        FeatureCache.build(capped, greedy_samples(capped, 2), tmp_path, layer_ids=[0, 2])


def test_a_reduced_vocabulary_does_not_renormalise_the_target(target, samples, cache):
    drafter = tiny_drafter(target, draft_vocab_size=20).bind(target)
    kept = frequent_tokens(samples, 20, vocab_size=VOCAB)
    copy_head_rows(drafter, target, kept)
    assert torch.equal(drafter.lm_head.weight, target.get_output_embeddings().weight[kept])
    batch = batch_of(cache)
    blocks = teacher_forced(drafter, **batch)
    p = target_probabilities(drafter, blocks.target_hidden, blocks.logsumexp)
    full = target.get_output_embeddings()(blocks.target_hidden).softmax(-1)
    assert_close(p, full[:, kept], rtol=0, atol=1e-5)
    assert (p.sum(-1) < 0.999).any()
    label = int(batch["input_ids"][batch["anchors"][0] + 1])
    assert blocks.labels[0] == (kept.index(label) if label in kept else -1)
    terms = objective(drafter, blocks, LossWeights())
    q = draft_logits(drafter, blocks.hidden, blocks.latent).softmax(-1)
    tv = (q - p).abs().sum(-1) + 1 - p.sum(-1)
    assert_close(terms.acceptance.sum(), (1 - tv / 2).sum().detach(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ starts


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_of_the_target_are_copied(family, samples):
    model = tiny_target(family, dtype=torch.float32)
    drafter = tiny_drafter(model)
    copy_target_layers(drafter, model, [2, 3], samples)
    for ours, theirs in zip(drafter.layers, model.model.layers[2:], strict=True):
        assert torch.equal(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)
    with pytest.raises(ValueError, match=r"Expected .* of shape .* Train from random layers"):
        copy_target_layers(tiny_drafter(model, intermediate_size=40), model, [2, 3], samples)


def test_starts_that_do_not_fit_are_refused(target, samples):
    for sources in ([2, 4], [2, -1]):
        with pytest.raises(ValueError, match=r"Expected layers of the target within \[0, 3\] to copy"):
            copy_target_layers(tiny_drafter(target), target, sources, samples)
    with pytest.raises(ValueError, match="Expected markov_rank <= 20, the draft vocabulary, got 24"):
        fit_bigrams(tiny_drafter(target, markov_rank=24, draft_vocab_size=20), samples)


def test_bigrams_raise_what_follows(target, samples):
    drafter = tiny_drafter(target, markov_rank=16)
    fit_bigrams(drafter, samples)
    head = drafter.markov_head
    bias = head.markov_w2(head.markov_w1.weight)
    pairs = [(a, b) for s in samples for a, b in zip(s.input_ids[4:-1], s.input_ids[5:], strict=True)]
    seen = torch.tensor(pairs)
    assert bias[seen[:, 0], seen[:, 1]].mean() > bias.mean() + 0.5


# ------------------------------------------------------------------ the trainer


def test_training_lowers_the_loss_and_resumes_exactly(target, cache, tmp_path):
    def trainer(where, **changes):
        drafter = tiny_drafter(target).bind(target)
        return DSparkTrainer(drafter, arguments(tmp_path / where, **changes), cache)

    whole = trainer("whole")
    whole.train()
    history = losses(whole)
    assert len(history) == 20
    assert sum(loss for _, loss in history[-5:]) < sum(loss for _, loss in history[5:10])
    assert {"ce", "kl", "tv", "confidence", "expected_accepted_length"} <= whole.state.log_history[0].keys()

    resumed = trainer("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    for (step, loss), (again, same) in zip(history[10:], losses(resumed)[10:], strict=True):
        assert step == again
        assert loss == pytest.approx(same, abs=1e-6)


def test_every_step_draws_its_own_anchors(target, cache, tmp_path):
    class Watched(DSparkTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            index, lengths, mask = (inputs[key] for key in ("index", "lengths", "loss_mask"))
            loss = super().compute_loss(model, inputs, **kwargs)
            step = len(drawn)
            drawn.append(inputs["anchors"])
            assert sorted(index.tolist()) == list(range(8))
            starts = lengths.cumsum(0) - lengths
            own = [
                sample_anchors(part, 8, anchor_generator(7, step, int(number))) + start
                for part, start, number in zip(mask.split(lengths.tolist()), starts, index, strict=True)
            ]
            assert torch.equal(inputs["anchors"], torch.cat(own))
            return loss

    drawn, options = [], {"max_steps": 3, "per_device_train_batch_size": 8, "save_strategy": "no", "seed": 7}
    drafter = tiny_drafter(target).bind(target)
    Watched(drafter, arguments(tmp_path, **options), cache).train()
    assert len(drawn) == 3


def test_frozen_parts_are_neither_trained_nor_saved(target, samples, cache, tmp_path):
    drafter = tiny_drafter(target, draft_vocab_size=20).bind(target)
    copy_head_rows(drafter, target, frequent_tokens(samples, 20, vocab_size=VOCAB))
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    rows, trained = drafter.lm_head.weight.clone(), drafter.fc.weight.clone()
    trainer = DSparkTrainer(drafter, arguments(tmp_path, max_steps=10), cache)
    trainer.train()

    optimised = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert {name for name, weight in drafter.named_parameters() if id(weight) not in optimised} == {"lm_head.weight"}
    assert not optimised & {id(weight) for weight in target.parameters()}
    assert torch.equal(drafter.lm_head.weight, rows)
    assert not torch.equal(drafter.fc.weight, trained)
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())
    saved = load_file(tmp_path / "checkpoint-10" / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    assert "embed_tokens.weight" not in saved


CACHES = {
    "target layers": ({"target_layer_ids": [0, 1]}, r"target layers \[0, 1\], got \[0, 2\]"),
    "hidden size": ({"hidden_size": 16}, "hidden size 16, got 32"),
    "vocabulary": ({"vocab_size": 64}, "vocabulary size 64, got 48"),
}


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_of_another_drafter_is_refused(cache, tmp_path, case):
    changes, message = CACHES[case]
    with pytest.raises(ValueError, match=f"Expected target features with {message}"):
        DSparkTrainer(tiny_drafter(**changes), arguments(tmp_path), cache)


@pytest.mark.parametrize("changes", [{"anchors_per_sample": 0}, {"likelihood_first": 1.5}])
def test_settings_of_training_are_checked(tmp_path, changes):
    with pytest.raises(ValueError, match=f"Expected {next(iter(changes))}"):
        arguments(tmp_path, **changes)
