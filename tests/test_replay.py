"""Replayed rounds are the rounds of real generation: exactly in greedy decoding, in distribution in sampling."""

import pytest
import torch

from hf_dspark import DSparkTrainer, Trace
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import TrainingSample, frequent_tokens
from hf_dspark.training.features import OnlineFeatures
from hf_dspark.training.initialise import copy_head_rows
from hf_dspark.training.replay import replay_greedy, replay_sampled
from tiny import VOCAB, tiny_drafter, tiny_target
from training_setup import arguments, greedy_samples


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32, initializer_range=0.12)


@pytest.fixture(scope="module")
def samples(target):
    return greedy_samples(target, 8)


@pytest.fixture
def cache(target, samples, tmp_path):
    return FeatureCache.build(target, samples, tmp_path / "features", layer_ids=[0, 2], samples_per_shard=3)


def test_what_was_learned_is_what_generation_accepts(target, samples, cache, tmp_path):
    torch.manual_seed(0)
    drafter = tiny_drafter(target, initializer_range=0.02, own_embeddings=False).bind(target)
    options = {"max_steps": 150, "learning_rate": 1e-2, "per_device_train_batch_size": 8, "anchors_per_sample": 24}
    trainer = DSparkTrainer(
        drafter,
        arguments(tmp_path / "overfit", save_strategy="no", logging_steps=50, **options),
        cache,
        eval_data=cache,
    )
    trainer.train()
    replayed = replay_greedy(drafter, cache)
    assert trainer.evaluate()["eval_accepted_length"] == replayed.accepted_length
    assert replayed.accepted_length > 2
    drafter.eval()

    tokens = rounds = 0
    for sample in samples:
        ids = torch.tensor([sample.input_ids[: sample.response_start]])
        with Trace() as trace:
            text = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=drafter)
        assert tuple(text[0].tolist()) == sample.input_ids
        gamma, position = drafter.config.block_size, sample.response_start
        for record in trace.rounds:  # the replay counts rounds with room for a whole block
            if position + gamma < len(sample.input_ids) - 1:
                tokens += len(record.committed)
                rounds += 1
            position += len(record.committed)
    assert rounds == replayed.rounds
    assert tokens / rounds == pytest.approx(replayed.accepted_length)


def test_sampled_rounds_have_the_distribution_of_real_ones(target):
    """Acceptance of every slot, of rounds over text that plain sampling wrote and of rounds that wrote their own."""
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 7, 9, 4, 3]])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    texts = target.generate(prompt.expand(400, -1), max_new_tokens=40, **options)
    samples = [TrainingSample(tuple(text), 5) for text in texts.tolist()]
    drafter = tiny_drafter(target, initializer_range=0.05, draft_vocab_size=40).bind(target)
    copy_head_rows(drafter, target, frequent_tokens(samples, 40, vocab_size=VOCAB))
    data = OnlineFeatures(target, samples, layer_ids=[0, 2])

    with Trace() as trace:
        for _ in range(30):
            target.generate(prompt, max_new_tokens=120, assistant_model=drafter, **options)
    real = trace.conditional_acceptance()
    counts = [sum(record.accepted >= slot for record in trace.rounds) for slot in range(len(real))]
    sampled, greedy = replay_sampled(drafter, data), replay_greedy(drafter, data)

    def deviations(replay):
        """Standard errors between the acceptance of the first three slots, replayed and real."""
        rates = zip(replay.conditional_acceptance, real, counts, strict=True)
        return [abs(ours - rate) / (rate * (1 - rate) / count) ** 0.5 for ours, rate, count in rates][:3]

    assert counts[2] > 50
    assert max(deviations(sampled)) < 4
    assert max(deviations(greedy)) > 8, "equality with the stored token is not how sampling accepts"
