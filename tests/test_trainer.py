"""The trainer's options and metrics: what they say is what happens, and what cannot work is refused."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import DSparkTrainer
from hf_dspark._compat import CHECKPOINTING
from hf_dspark.cli.train import _arguments
from hf_dspark.training.blocks import draft_logits, target_probabilities, teacher_forced
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import TrainingSample
from hf_dspark.training.features import OnlineFeatures
from hf_dspark.training.loss import LossWeights, objective
from hf_dspark.training.recipe import Recipe
from tiny import tiny_drafter, tiny_target
from training_setup import arguments, batch_of, losses, random_samples, terms_of

CONFIDENCE_ALONE = LossWeights(ce=0, kl=0, tv=0, confidence=1)


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    return FeatureCache.build(target, random_samples(8), tmp_path_factory.mktemp("features"), layer_ids=[0, 2])


@pytest.fixture
def trainer(target, cache, tmp_path):
    """A trainer of a fresh drafter, three steps long and without checkpoints unless it is told otherwise."""

    def create(data=cache, callbacks=None, folder="run", drafter=None, **changes):
        drafter = tiny_drafter(target).bind(target) if drafter is None else drafter
        options = {"max_steps": 3, "save_strategy": "no", **changes}
        return DSparkTrainer(drafter, arguments(tmp_path / folder, **options), data, callbacks=callbacks)

    return create


def trained(trainer):
    trainer.train()
    return losses(trainer)


# ------------------------------------------------------------------ options


def test_training_on_a_cache_equals_training_online(target, trainer):
    online = OnlineFeatures(target, random_samples(8), layer_ids=[0, 2])
    assert trained(trainer(online)) == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in trained(trainer())]


def test_checkpointing_changes_neither_losses_nor_gradients(target, cache, trainer):
    plain, recomputed = trainer(), trainer(**{CHECKPOINTING: True})
    runs = []
    original = torch.utils.checkpoint.checkpoint
    history = trained(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: runs.append(1) or original(*a, **k))
        assert trained(recomputed) == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in history]
    slopes = []
    for drafter in (plain.model, recomputed.model):
        drafter.load_state_dict(plain.model.state_dict())
        drafter.train().zero_grad()
        terms_of(drafter, batch_of(cache)).loss.backward()
        slopes.append({name: w.grad for name, w in drafter.named_parameters() if w.requires_grad})
    assert recomputed.model.layers[0].gradient_checkpointing
    for name, slope in slopes[0].items():
        assert_close(slopes[1][name], slope, rtol=0, atol=1e-6)


def test_compiling_and_checkpointing_reach_the_arguments(tmp_path):
    for wanted in (True, False):
        recipe = Recipe(torch_compile=wanted, gradient_checkpointing=wanted)
        options = _arguments(tmp_path, recipe, evaluated=False)
        assert options.torch_compile is wanted
        assert getattr(options, CHECKPOINTING) is wanted


@pytest.mark.filterwarnings("ignore")  # tracing warns of what it meets
def test_a_compiled_run_is_the_same_run(trainer, tmp_path):
    # Traced as ever, but run by torch itself: no compiler of the machine is needed.
    compiled = trainer(max_steps=2, torch_compile=True, torch_compile_backend="eager", save_strategy="steps")
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        original = torch.compile
        patch.setattr(torch, "compile", lambda *a, **k: traced.append(k["backend"]) or original(*a, **k))
        history = trained(compiled)
    assert traced == ["eager"]
    plain = trainer(max_steps=2)
    assert history == [(step, pytest.approx(loss, abs=1e-5)) for step, loss in trained(plain)]
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert saved.keys() == plain.model.state_dict().keys()


def test_a_bfloat16_run_follows_the_float32_one(target, trainer):
    half, whole = trainer(bf16=True), trainer()
    rounded, history = trained(half), trained(whole)
    assert rounded != history
    for (step, loss), (_, true) in zip(rounded, history, strict=True):
        assert loss == pytest.approx(true, rel=3e-2), step
    for weight in half.model.parameters():
        assert weight.dtype == torch.float32
        assert torch.isfinite(weight).all()
    assert target.dtype == torch.float32


def test_workers_read_a_cache(trainer):
    assert trained(trainer(dataloader_num_workers=1)) == trained(trainer())


def test_workers_cannot_run_the_target(target, trainer):
    online = OnlineFeatures(target, random_samples(2), layer_ids=[0, 2])
    with pytest.raises(ValueError, match=r"Expected dataloader_num_workers=0 with online features, got 1.*FeatureCac"):
        trainer(online, dataloader_num_workers=1)


@pytest.mark.parametrize("detached", [False, True])
def test_what_the_confidence_loss_trains(target, cache, detached):
    drafter = tiny_drafter(target).bind(target)
    terms_of(drafter, batch_of(cache), CONFIDENCE_ALONE, detach_confidence=detached).loss.backward()
    moved = {name for name, w in drafter.named_parameters() if w.grad is not None and w.grad.abs().max() > 0}
    head = {name for name, _ in drafter.named_parameters() if name.startswith("confidence_head")}
    everything = {name for name, w in drafter.named_parameters() if w.requires_grad}
    assert moved == head if detached else moved == everything - {"markov_head.markov_w2.weight"}


@pytest.mark.parametrize("detached", [False, True])
def test_the_trainer_hands_detach_confidence_on(trainer, detached):
    run = trainer(
        detach_confidence=detached, ce_weight=0, kl_weight=0, tv_weight=0, likelihood_first=0, weight_decay=0
    )
    before = {name: weight.clone() for name, weight in run.model.named_parameters()}
    run.train()
    moved = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
    assert "confidence_head.proj.weight" in moved
    assert ("fc.weight" in moved) is not detached
    assert ("markov_head.markov_w1.weight" in moved) is not detached


def test_likelihood_comes_first(trainer):
    run = trainer(likelihood_first=0.5, ce_weight=0.2, kl_weight=0.3, tv_weight=0.6, confidence_weight=0.7)
    run.state.max_steps = 100
    for step, kl, tv in ((0, 1.0, 0.0), (25, 0.65, 0.3), (50, 0.3, 0.6), (100, 0.3, 0.6)):
        run.state.global_step = step
        weights = run.loss_weights()
        assert (weights.kl, weights.tv) == pytest.approx((kl, tv))
        assert (weights.ce, weights.confidence, weights.decay) == (0.2, 0.7, 4.0)
    constant = trainer(likelihood_first=0.0, kl_weight=0.3, tv_weight=0.6).loss_weights()
    assert (constant.kl, constant.tv) == (0.3, 0.6)


# ------------------------------------------------------------------ metrics


@torch.no_grad()
def test_metrics_by_hand(target, cache, trainer):
    run = trainer()
    drafter, gamma = run.model.eval(), run.model.config.block_size
    blocks = teacher_forced(drafter, **batch_of(cache, anchors=4))
    q = draft_logits(drafter, blocks.hidden, blocks.latent).softmax(-1)
    p = target_probabilities(drafter, blocks.target_hidden, None)
    accepted, ce, weights = [[] for _ in range(gamma)], [], []
    gaps = []
    row = 0
    for supervised in blocks.supervised.tolist():
        true = guess = 1.0
        for slot in range(sum(supervised)):
            overlap = torch.minimum(p[row], q[row]).sum().item()  # what a round accepts of this slot
            accepted[slot].append(overlap)
            true, guess = true * overlap, guess * blocks.confidence_logits[row].sigmoid().item()
            gaps.append(guess - true)
            ce.append(-q[row, blocks.labels[row]].log().item())
            weights.append(math.exp(-slot / 4))
            row += 1
    assert row == len(q)
    assert len({len(slot) for slot in accepted}) > 1  # some blocks are cut

    run._seen = [objective(drafter, blocks, LossWeights())]
    metrics = run._metrics()
    rates = [sum(slot) / len(slot) for slot in accepted]
    for slot, rate in enumerate(rates, start=1):
        assert metrics[f"acceptance@{slot}"] == pytest.approx(rate, abs=1e-5)
    expected = 1 + sum(math.prod(rates[: slot + 1]) for slot in range(gamma))
    assert metrics["expected_accepted_length"] == pytest.approx(expected, abs=1e-4)
    assert metrics["confidence_bias"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert metrics["ce"] == pytest.approx(sum(map(math.prod, zip(ce, weights, strict=True))) / sum(weights), rel=1e-4)


@torch.no_grad()
def test_batches_of_a_logging_step_add_up(target, cache, trainer):
    run = trainer()
    parts = [batch_of(cache, indices=indices) for indices in ([0], [1, 2, 3], [4, 5, 6, 7])]
    sizes = [len(part["anchors"]) for part in parts]
    assert len(set(sizes)) > 1
    run._seen = [terms_of(run.model, part) for part in parts]
    apart = run._metrics()
    run._seen = [terms_of(run.model, batch_of(cache))]
    assert run._metrics() == {name: pytest.approx(value, abs=1e-5) for name, value in apart.items()}
    assert {"ce", "kl", "tv", "confidence", "confidence_bias"} <= apart.keys()


def test_a_logging_step_covers_its_steps_and_no_others(trainer):
    one, three = trainer(max_steps=6), trainer(max_steps=6, logging_steps=3)
    one.train()
    three.train()
    single, wide = ([log for log in run.state.log_history if "ce" in log] for run in (one, three))
    assert [log["step"] for log in wide] == [3, 6]
    for log, steps in zip(wide, (single[:3], single[3:]), strict=True):
        values = [step["acceptance@1"] for step in steps]  # every step has as many first slots
        assert log["acceptance@1"] == pytest.approx(sum(values) / 3, abs=1e-5)


@torch.no_grad()
def test_cross_entropy_leaves_out_what_cannot_be_drafted(target, cache):
    drafter = tiny_drafter(target, draft_vocab_size=20).bind(target)
    blocks = teacher_forced(drafter, **batch_of(cache))
    known = blocks.labels >= 0
    assert 0 < known.sum() < len(known)
    log_q = draft_logits(drafter, blocks.hidden, blocks.latent)[known].log_softmax(-1)
    weight = torch.exp(-blocks.slots[known] / 4)
    ce = -(log_q.gather(-1, blocks.labels[known][:, None])[:, 0] * weight).sum() / weight.sum()
    terms = objective(drafter, blocks, LossWeights())
    assert_close(terms.mean("ce"), ce, rtol=0, atol=1e-4)
    assert terms.slots.sum() == len(known)  # the others still count as rejected mass


# ------------------------------------------------------------------ data that is short or damaged


def test_short_samples_and_prompts_without_a_response_train(target, trainer):
    rows = random_samples(5)
    samples = [TrainingSample(row.input_ids[: 6 + n], 5) for n, row in enumerate(rows)]  # 1 to 5 tokens of 5 slots
    samples += [TrainingSample(rows[0].input_ids, len(rows[0].input_ids)), TrainingSample(rows[1].input_ids, 0)]
    run = trainer(OnlineFeatures(target, samples, layer_ids=[0, 2]), max_steps=14, per_device_train_batch_size=1)
    history = trained(run)
    assert all(math.isfinite(loss) for _, loss in history)
    assert sum(loss == 0 for _, loss in history) == 4  # two epochs with two samples that have no label to learn
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())
    assert math.isfinite(run.evaluate(run.train_dataset)["eval_accepted_length"])


class Damaged(OnlineFeatures):
    """One sample's features are no numbers as soon as `value` is set."""

    value = None

    def __getitem__(self, index):
        row = super().__getitem__(index)
        if index == 3 and self.value is not None:
            row["features"][7] = self.value
        return row


class Damage(TrainerCallback):
    """Damages the data after a number of steps."""

    def __init__(self, data, value, after):
        self.data, self.value, self.after = data, value, after

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            self.data.value = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_training_before_it_spoils_anything(target, trainer, value):
    data = Damaged(target, random_samples(8), layer_ids=[0, 2])
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "folder": f"{value}"}
    whole = trained(trainer(data, **{**options, "folder": "whole"}))

    run = trainer(data, callbacks=[Damage(data, value, after=2)], **options)
    with pytest.raises(ValueError, match=r"Expected a finite loss, got nan in step (\d) from samples \[.*\b3\b.*\]"):
        run.train()
    stopped = run.state.global_step
    assert 2 <= stopped <= 5
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())

    data.value = None
    last = get_last_checkpoint(run.args.output_dir)
    assert last.endswith(f"checkpoint-{stopped}")
    resumed = trainer(data, **options)
    resumed.train(resume_from_checkpoint=last)
    assert losses(resumed)[stopped:] == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in whole[stopped:]]
