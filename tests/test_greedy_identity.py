"""Greedy text with a drafter is plain greedy text, token for token, whatever the drafter proposes.

In float64 there are no near-ties, so identity is exact. Every test also proves by the trace that drafts were verified:
a generation that silently drafts nothing would pass all comparisons.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dspark import Trace
from hf_dspark._compat import CACHE, SLIDING_CACHE_ROLLS_BACK
from tiny import (
    FAMILIES,
    VOCAB,
    ScriptedDrafter,
    adversarial,
    assert_greedy_identity,
    broken,
    greedy_pair,
    mixed,
    perfect,
    prompt,
    tiny_drafter,
    tiny_target,
)

DRAFTERS = {
    "random": tiny_drafter,
    "perfect": perfect,
    "mixed": mixed,
    "adversarial": adversarial,
    "broken": broken,
}


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.mark.parametrize(
    ("family", "attention"),
    # gemma2 caps its attention scores, which sdpa cannot
    [(family, kind) for family in FAMILIES for kind in ("eager", "sdpa") if (family, kind) != ("gemma2", "sdpa")],
)
def test_every_family_says_the_same_with_every_drafter(family, attention):
    target = tiny_target(family)
    target.set_attn_implementation(attention)
    accepted = {}
    for name, make in DRAFTERS.items():
        trace = assert_greedy_identity(target, make(target), prompt(), max_new_tokens=60)
        accepted[name] = trace.accepted
    assert accepted["perfect"] >= 45
    assert accepted["adversarial"] == 0
    assert 10 < accepted["mixed"] < accepted["perfect"]


@pytest.mark.parametrize("make", [mixed, perfect, tiny_drafter])
@pytest.mark.parametrize("length", range(1, 21))
def test_text_ends_at_the_length_limit(llama, make, length):
    plain, drafted, trace = greedy_pair(llama, make(llama), prompt(), max_new_tokens=length)
    assert drafted.tolist() == plain.tolist()
    assert drafted.shape[1] == prompt().shape[1] + length
    # The prefill gives one token and each round one of the target's own: there is room for drafts from 3 on.
    assert (trace.verified > 0) == (length > 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 8}], ids=["one forward", "chunks"])
def test_a_prompt_of_any_length_works(family, options):
    """One token; exactly the sliding window; far more than it, also read in chunks."""
    target = tiny_target(family)
    for length in (1, 12, 90):
        assert_greedy_identity(target, mixed(target), prompt(length), max_new_tokens=12, **options)
        assert_greedy_identity(target, tiny_drafter(target), prompt(length), max_new_tokens=12, **options)


@pytest.mark.parametrize("tokens", range(6))
def test_any_number_of_verified_drafts_is_lossless(llama, tokens):
    plain, drafted, trace = greedy_pair(
        llama, tiny_drafter(llama, num_draft_tokens=tokens), prompt(), max_new_tokens=24
    )
    assert drafted.tolist() == plain.tolist()
    assert max(record.verified for record in trace.rounds) == tokens


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_any_confidence_threshold_is_lossless(family, threshold):
    target = tiny_target(family)
    drafter = tiny_drafter(target, confidence_threshold=threshold, sts_temperatures=[0.5, 1.0, 1.5, 2.0, 3.0])
    trace = assert_greedy_identity(target, drafter, prompt(), max_new_tokens=40)
    assert trace.verified < trace.drafted
    for record in trace.rounds:
        kept = [value >= threshold for value in record.confidences]
        assert record.verified == [*kept, False].index(False)


@given(data=st.data(), length=st.integers(1, 14), family=st.sampled_from(["llama", "mistral"]))
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_script_of_drafts_is_lossless(targets, data, length, family):
    """Draft lists of any length: the target's own tokens up to some slot, then anything."""
    target, plain = targets[family]
    drafter = tiny_drafter(target, cls=ScriptedDrafter)
    offered = []

    def script(prefix, keep):
        right = data.draw(st.integers(0, keep))
        other = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=keep - right))
        offered.append((plain[prefix.shape[1] :][:right] + other)[:keep])
        return offered[-1]

    drafter.script = script
    with Trace() as trace:
        drafted = target.generate(prompt(), assistant_model=drafter, do_sample=False, max_new_tokens=length)
    assert drafted[0].tolist() == plain[: prompt().shape[1] + length]
    assert trace.verified == sum(map(len, offered))


@pytest.fixture(scope="module")
def targets():
    models = {family: tiny_target(family) for family in ("llama", "mistral")}
    return {
        name: (model, model.generate(prompt(), do_sample=False, max_new_tokens=20)[0].tolist())
        for name, model in models.items()
    }


@pytest.mark.parametrize("make", [mixed, perfect])
def test_left_padding_changes_nothing(llama, make):
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt()], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 5).long()[None]
    assert_greedy_identity(llama, make(llama), ids, attention_mask=mask, max_new_tokens=20)


def test_drafts_behind_left_padding_are_those_without_it(llama):
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt()], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 5).long()[None]
    padded = assert_greedy_identity(llama, tiny_drafter(llama), ids, attention_mask=mask, max_new_tokens=20)
    bare = assert_greedy_identity(llama, tiny_drafter(llama), prompt(), max_new_tokens=20)
    assert [record.drafted for record in padded.rounds] == [record.drafted for record in bare.rounds]


# -------------------------------------------------------------------- a second turn


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first_turn_drafts", [True, False])
def test_a_second_turn_on_the_returned_cache_equals_one_from_scratch(family, first_turn_drafts):
    target = tiny_target(family)
    drafter = mixed(target)
    options = {"do_sample": False, "max_new_tokens": 17}
    with Trace() as trace:
        first = target.generate(
            prompt(), return_dict_in_generate=True, assistant_model=drafter if first_turn_drafts else None, **options
        )
    assert (trace.accepted > 0) == first_turn_drafts
    ids = torch.cat([first.sequences, prompt(6, seed=9)], dim=1)
    scratch = target.generate(ids, **options)
    sliding = family in ("mistral", "gemma2")
    if sliding and not SLIDING_CACHE_ROLLS_BACK and not first_turn_drafts:
        with pytest.raises(ValueError, match=r"Expected a cache .* that can drop rejected drafts, got .*Sliding"):
            target.generate(ids, assistant_model=drafter, **{CACHE: first[CACHE]}, **options)
        return
    with Trace() as trace:
        second = target.generate(ids, assistant_model=drafter, **{CACHE: first[CACHE]}, **options)
    assert second.tolist() == scratch.tolist()
    assert trace.verified > 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_plain_generation_goes_on_from_a_drafted_cache(family):
    target = tiny_target(family)
    with Trace() as trace:
        first = target.generate(
            prompt(), assistant_model=mixed(target), do_sample=False, max_new_tokens=19, return_dict_in_generate=True
        )
    assert trace.accepted > 0
    assert first[CACHE].get_seq_length() == first.sequences.shape[1] - 1
    ids = torch.cat([first.sequences, prompt(4, seed=8)], dim=1)
    scratch = target.generate(ids, do_sample=False, max_new_tokens=9)
    again = target.generate(ids, do_sample=False, max_new_tokens=9, **{CACHE: first[CACHE]})
    assert again.tolist() == scratch.tolist()
