"""Training data: features from disk and from the running target are the same; a broken cache resumes or says so."""

import errno
import json
import logging
import os
import pickle
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.testing import assert_close

from hf_dspark.training import cache as cache_module
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import TrainingSample, read_samples
from hf_dspark.training.features import OnlineFeatures
from tiny import SHAPE, VOCAB, tiny_drafter, tiny_target
from training_setup import batch_of, random_samples, terms_of

LAYERS = [0, 2]
WIDTH, PARTS = SHAPE["hidden_size"], len(LAYERS) + 1
BITS = pytest.mark.parametrize("bits", [16, 8])


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def half_target():
    return tiny_target(dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def samples():
    return random_samples(8)


@pytest.fixture
def build(target, samples, tmp_path):
    """Builds a cache in shards of three samples, batches of two or three."""

    def run(folder="features", **changes):
        options = {"layer_ids": LAYERS, "samples_per_shard": 3, "tokens_per_batch": 60}
        arguments = {"target": target, "samples": samples, "directory": tmp_path / folder}
        return FeatureCache.build(**{**arguments, **options, **changes})

    return run


def assert_same_files(one, other):
    names = {path.name for path in one.directory.iterdir()}
    assert names == {path.name for path in other.directory.iterdir()}
    assert len(names) > 2
    for name in names:
        assert (one.directory / name).read_bytes() == (other.directory / name).read_bytes()


# ------------------------------------------------------------------ cached and online


def test_online_rows_are_the_cached_ones_sample_by_sample(target, samples, build):
    online = OnlineFeatures(target, samples, layer_ids=LAYERS)
    alone, together = build("alone", tokens_per_batch=1), build("together")
    for index, sample in enumerate(samples):
        row = online[index]
        assert tuple(row["input_ids"].tolist()) == sample.input_ids
        for cache, tolerance in ((alone, 0), (together, 5e-5)):
            stored = cache[index]
            assert stored.keys() == row.keys()
            for key, value in row.items():
                assert_close(stored[key], value, rtol=0, atol=tolerance)


def test_cached_and_online_features_give_the_same_objective(target, samples, build):
    drafter = tiny_drafter(target).bind(target)
    found = []
    for data in (OnlineFeatures(target, samples, layer_ids=LAYERS), build()):
        drafter.zero_grad()
        terms = terms_of(drafter, batch_of(data))
        terms.loss.backward()
        found.append((terms, drafter.fc.weight.grad))
    (online, slope), (cached, same_slope) = found
    assert online.slots.sum() > 100
    assert_close(cached.loss, online.loss, rtol=0, atol=1e-4)
    for name in online.sums:
        assert_close(cached.mean(name), online.mean(name), rtol=0, atol=1e-4)
    assert_close(same_slope, slope, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_bfloat16_target_differs_by_its_rounding_alone(half_target, samples, build):
    drafter = tiny_drafter(half_target).float().bind(half_target)
    online = terms_of(drafter, batch_of(OnlineFeatures(half_target, samples, layer_ids=LAYERS))).loss
    alone = terms_of(drafter, batch_of(build("alone", target=half_target, tokens_per_batch=1))).loss
    together = terms_of(drafter, batch_of(build("together", target=half_target))).loss
    assert torch.equal(alone, online)
    # A padded batch sums in another order.
    assert_close(together, online, rtol=1e-2, atol=0)


def test_a_cache_travels_to_another_process(build):
    cache = build()
    copy = pickle.loads(pickle.dumps(cache))
    assert len(copy) == len(cache)
    assert torch.equal(copy[5]["features"], cache[5]["features"])


# ------------------------------------------------------------------ eight bits


@BITS
def test_bytes_a_token(half_target, samples, build, bits):
    cache = build(target=half_target, bits=bits, samples_per_shard=8)
    (shard,) = cache.directory.glob("*.safetensors")
    tokens = sum(len(sample.input_ids) for sample in samples)
    rows = sum(tensor.numel() * tensor.element_size() for tensor in load_file(shard).values())
    # Features and final state, an id and a logsumexp of four bytes each; with 8 bits a scale of four bytes a part.
    assert rows / tokens == {16: 2 * WIDTH * PARTS, 8: (WIDTH + 4) * PARTS}[bits] + 8
    assert shard.stat().st_size - rows < 1000
    assert cache.manifest["bits"] == bits


def test_eight_bits_are_off_by_half_a_scale_at_most(build):
    whole, rounded = build("whole"), build("rounded", bits=8)
    largest = 0.0
    for index in range(len(whole)):
        for key, parts in (("features", PARTS - 1), ("last_hidden", 1)):
            true, stored = (row[key].unflatten(-1, (parts, -1)) for row in (whole[index], rounded[index]))
            scale = true.abs().amax(-1, keepdim=True) / 127
            error = ((stored - true).abs() / scale).max().item()
            assert error < 0.5 + 1e-3
            largest = max(largest, error)
        assert torch.equal(whole[index]["logsumexp"], rounded[index]["logsumexp"])
    assert largest > 0.4  # rounding did happen


@torch.no_grad()
def test_eight_bits_hardly_change_the_objective(target, build):
    drafter = tiny_drafter(target).bind(target)
    whole = terms_of(drafter, batch_of(build("whole"))).loss
    rounded = terms_of(drafter, batch_of(build("rounded", bits=8))).loss
    assert 0 < abs(rounded - whole) / whole < 2e-3  # 5.5e-4 here


# ------------------------------------------------------------------ interrupted


@BITS
def test_a_build_killed_inside_a_forward_resumes_to_the_same_cache(target, build, bits):
    forwards = []

    def dies(*_):
        forwards.append(1)
        if len(forwards) == 5:  # one forward checks the head, two make a shard
            raise KeyboardInterrupt

    with target.model.layers[1].register_forward_pre_hook(dies), pytest.raises(KeyboardInterrupt):
        build("killed", bits=bits)
    assert not target.model.layers[0]._forward_hooks  # the capture is gone
    whole = build("whole", bits=bits)
    assert_same_files(build("killed", bits=bits), whole)


def test_a_build_resumes_with_other_shard_sizes(samples, build, monkeypatch):
    real, shards = cache_module.save_file, []

    def second_fails(tensors, path):
        shards.append(path)
        if len(shards) == 2:
            raise KeyboardInterrupt
        real(tensors, path)

    monkeypatch.setattr(cache_module, "save_file", second_fails)
    with pytest.raises(KeyboardInterrupt):
        build()
    resumed = build(samples_per_shard=2)
    assert [tuple(resumed[index]["input_ids"].tolist()) for index in range(len(resumed))] == [
        sample.input_ids for sample in samples
    ]


def test_a_disk_too_small_is_found_before_anything_is_computed(target, build, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    monkeypatch.setattr(target.model, "forward", None)
    with pytest.raises(OSError, match=r"Expected .* GB free for the features of \d+ tokens .* bits=8 or another disk"):
        build()
    assert list((tmp_path / "features").iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("No space left on device")]
)
def test_a_disk_that_fills_up_loses_one_shard_only(build, tmp_path, monkeypatch, error):
    real = cache_module.save_file

    def fills_up(tensors, path):
        path.write_bytes(b"half a shard")
        if "00001" in path.name:
            raise error
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "save_file", fills_up)
        with pytest.raises(OSError, match=r"Expected room for shard-00001.*No space left on device.*goes on where"):
            build()
    assert {path.name for path in (tmp_path / "features").iterdir()} == {"manifest.json", "shard-00000.safetensors"}
    assert_same_files(build(), build("whole"))


# ------------------------------------------------------------------ damaged or foreign


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


DAMAGES = {
    "truncated shard": (lambda d: cut(d / "shard-00001.safetensors"), "the shard shard-00001.*damaged or missing"),
    "empty shard": (lambda d: (d / "shard-00000.safetensors").write_bytes(b""), "shard-00000.*damaged or missing"),
    "missing shard": (lambda d: (d / "shard-00002.safetensors").unlink(), "shard-00002.*damaged or missing"),
    "truncated manifest": (lambda d: cut(d / "manifest.json"), "Expected the manifest of a feature cache"),
    "binary manifest": (lambda d: (d / "manifest.json").write_bytes(b"\xff\x00"), "Expected the manifest"),
    "other json": (lambda d: (d / "manifest.json").write_text("[]"), "Expected the manifest of a feature cache"),
    "half a manifest": (lambda d: (d / "manifest.json").write_text('{"shards": []}'), "Expected the manifest"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_cache_is_one_clear_error(target, build, monkeypatch, case):
    damage, message = DAMAGES[case]
    directory = build().directory
    damage(directory)
    with pytest.raises(ValueError, match=message):
        FeatureCache(directory)
    monkeypatch.setattr(target.model, "forward", None)  # a build says so before it computes anything
    with pytest.raises(ValueError, match=message):
        build()


def test_damage_is_found_before_an_interrupted_build_goes_on(target, build, monkeypatch):
    directory = build().directory
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest |= {"shards": manifest["shards"][:2], "complete": False}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    cut(directory / "shard-00000.safetensors")
    monkeypatch.setattr(target.model, "forward", None)
    with pytest.raises(ValueError, match=r"shard-00000.*damaged or missing"):
        build()


OTHERS = {
    "target": (lambda: {"target": tiny_target(dtype=torch.float32, seed=1)}, "target_fingerprint"),
    "dtype": (lambda: {"target": tiny_target(dtype=torch.bfloat16)}, "dtype = 'bfloat16'|target_fingerprint"),
    "layers": (lambda: {"layer_ids": [0, 1]}, r"layer_ids = \[0, 1\]"),
    "samples": (lambda: {"samples": random_samples(8, response_start=6)}, "samples_sha256"),
    "bits": (lambda: {"bits": 8}, "bits = 8"),
    "template": (lambda: {"chat_template": "{{ messages }}"}, "chat_template_sha256"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_folder_of_another_cache_is_refused(build, case):
    changes, field = OTHERS[case]
    before = build().manifest
    with pytest.raises(ValueError, match=f"Expected a cache with ({field}).*Give another folder, or delete this one"):
        build(**changes())
    assert build().manifest == before


def test_bits_are_8_or_16(build):
    with pytest.raises(ValueError, match="Expected bits to be 8 or 16, got 4"):
        build(bits=4)


# ------------------------------------------------------------------ samples


def written(path, rows):
    path.write_text("".join(json.dumps({"prompt_ids": p, "response_ids": r}) + "\n\n" for p, r in rows))
    return path


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path, caplog):
    rows = [([1, 2], []), ([1, 2], [3]), ([1, 2], [3, 4]), ([1] * 9, [3, 4]), ([], [3, 4]), ([5], list(range(20)))]
    with caplog.at_level(logging.WARNING):
        samples = read_samples(written(tmp_path / "rows.jsonl", rows), vocab_size=VOCAB, max_length=10)
    assert samples == [
        TrainingSample((1, 2, 3, 4), 2),
        TrainingSample((3, 4), 0),
        TrainingSample((5, *range(9)), 1),
    ]
    (line,) = caplog.messages
    assert "3 samples. Left out 2 whose response has fewer than two tokens and 1 whose prompt leaves no room" in line
    assert "cut 1 responses" in line


def test_whole_files_are_not_talked_about(tmp_path, caplog):
    assert len(read_samples(written(tmp_path / "rows.jsonl", [([1], [3, 4])] * 3), vocab_size=VOCAB)) == 3
    assert caplog.messages == []


@pytest.mark.parametrize("token", [VOCAB, -1, 3.0, True, "3", None])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, token):
    path = written(tmp_path / "rows.jsonl", [([1], [3, 4]), ([1], [3, token])])
    with pytest.raises(ValueError, match=rf"Expected token ids in \[0, 48\), got {token} in line 3"):
        read_samples(path, vocab_size=VOCAB)
