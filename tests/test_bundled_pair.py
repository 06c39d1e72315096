"""The bundled pair, end to end: a real language model through the drafter that the package ships.

In float32 greedy text is that of plain generation, token for token; where a token differs, a teacher-forced forward
must show two logits that are equal within 1e-5. Prompts are those of the benchmarks, which the drafter has never seen.
"""

from pathlib import Path

import pytest
import torch

from hf_dspark import Trace, fingerprint, load_demo
from hf_dspark.cli.models import encode
from hf_dspark.evaluation.audit import audit_greedy
from hf_dspark.evaluation.prompts import read_prompts
from hf_dspark.loading import DEMO_DRAFTER

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts"
HELD_OUT = Path(__file__).parent.parent.parent / "shared" / "data" / "eval"


@pytest.fixture(scope="module")
def pair():
    return load_demo(dtype=torch.float32)


def every_prompt(folder, limit=None):
    return [messages for file in sorted(folder.glob("*.jsonl")) for messages in read_prompts(file, limit)]


def assert_identical(pair, messages, max_new_tokens):
    target, tokenizer, drafter = pair
    inputs = encode(tokenizer, messages, drafter)
    plain = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    with Trace() as trace:
        drafted = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=drafter)
    assert trace.verified > 0
    if not torch.equal(plain, drafted):
        length = inputs["input_ids"].shape[1]
        assert audit_greedy(target, drafted, length).largest_gap <= 1e-5
        assert audit_greedy(target, plain, length).largest_gap <= 1e-5
    return trace


def test_greedy_text_is_the_targets_own_on_ten_prompts(pair):
    prompts = [*every_prompt(PROMPTS, limit=3), read_prompts(PROMPTS / "chat.jsonl", None)[3]]
    assert len(prompts) == 10
    traces = [assert_identical(pair, messages, 48) for messages in prompts]
    accepted = sum(trace.accepted for trace in traces)
    rounds = sum(len(trace.rounds) for trace in traces)
    assert accepted / rounds > 0.4  # a wrong layout or wrong layers would leave next to nothing


@pytest.mark.slow
def test_greedy_text_is_the_targets_own_on_all_prompts(pair):
    for messages in every_prompt(PROMPTS) + (every_prompt(HELD_OUT) if HELD_OUT.is_dir() else []):
        assert_identical(pair, messages, 200)


def test_sampling_drafts_and_repeats_with_its_seed(pair):
    target, tokenizer, drafter = pair
    inputs = encode(tokenizer, [{"role": "user", "content": "Name three rivers."}], drafter)
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        with Trace() as trace:
            texts.append(target.generate(**inputs, max_new_tokens=40, do_sample=True, assistant_model=drafter))
        assert trace.verified > 0
        assert trace.accepted > 0
    assert torch.equal(*texts)


def test_bfloat16_tokens_are_the_targets_within_rounding():
    pair = load_demo(dtype=torch.bfloat16)
    target, tokenizer, drafter = pair
    gaps = []
    for messages in every_prompt(PROMPTS, limit=1):
        inputs = encode(tokenizer, messages, drafter)
        with Trace() as trace:
            text = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter)
        assert trace.verified > 0
        gaps.append(audit_greedy(target, text, inputs["input_ids"].shape[1]).largest_gap)
    # Logits of this model lie near 20, where bfloat16 steps by 1/8; sums over its 30 layers add a few steps.
    assert max(gaps) <= 0.5


def test_the_shipped_files_are_complete_and_small(pair):
    target, _, drafter = pair
    assert (DEMO_DRAFTER / "model.safetensors").stat().st_size <= 40 * 2**20
    assert drafter.config.target_fingerprint == fingerprint(target)
    assert drafter.config.mask_token_id not in (target.config.pad_token_id, target.config.eos_token_id)
