"""Logits processors act with a drafter as they act without one.

In verification each processor sees the committed prefix of every position once and in order; the drafter works with
copies, and leaves out what cannot be copied or fails on a draft. So the text is that of plain generation also for
processors that look at positions, keep a memory, or refuse to be copied.
"""

import copy

import pytest
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dspark import Trace
from tiny import assert_greedy_identity, mixed, prompt, tiny_drafter, tiny_target

LENGTH = prompt().shape[1]
BUILT_IN = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[11], [18], [26, 35]]},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": [11, 18]},
    "sequence_bias": {"sequence_bias": [[[11], -6.0], [[7], 4.0], [[26, 18], 5.0]]},
    "suppress_tokens": {"suppress_tokens": [11, 12]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[11]]},
}


class Positional(LogitsProcessor):
    """Favours another token at each position."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (input_ids.shape[1] * 7) % scores.shape[1]] += 6.0
        return scores


class Stateful(LogitsProcessor):
    """Its bias depends on every token it has seen, and it must see them one by one."""

    def __init__(self):
        self.state, self.lengths = 0, []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        self.state = (self.state * 31 + int(input_ids[0, -1])) % 1009
        scores = scores.clone()
        scores[:, self.state % scores.shape[1]] += 5.0
        return scores


class Uncopyable(Stateful):
    def __deepcopy__(self, memo):
        raise TypeError("this state lives in one place")


class Grammar(Stateful):
    """Raises on any text but the one it knows, as a parser does on a token that it did not allow."""

    def __init__(self, known):
        super().__init__()
        self.known = known

    def __call__(self, input_ids, scores):
        if input_ids[0].tolist() != self.known[: input_ids.shape[1]]:
            raise RuntimeError("not in the language")
        return super().__call__(input_ids, scores)


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.mark.parametrize("make", [mixed, tiny_drafter])
@pytest.mark.parametrize("options", BUILT_IN.values(), ids=BUILT_IN)
def test_built_in_processors_change_the_text_as_they_do_without_a_drafter(llama, make, options):
    trace = assert_greedy_identity(llama, make(llama), prompt(), max_new_tokens=24, **options)
    assert trace.rounds
    free = llama.generate(prompt(), do_sample=False, max_new_tokens=24)
    bound = llama.generate(prompt(), do_sample=False, max_new_tokens=24, **options)
    assert free.tolist() != bound.tolist()  # the option does something to this text


@pytest.mark.parametrize("make", [mixed, tiny_drafter])
@pytest.mark.parametrize("kind", [Positional, Stateful, Uncopyable])
def test_custom_processors_change_the_text_as_they_do_without_a_drafter(llama, make, kind):
    assert_greedy_identity(
        llama, make(llama), prompt(), lambda: {"logits_processor": LogitsProcessorList([kind()])}, max_new_tokens=24
    )


def test_a_processor_that_fails_on_drafts_runs_in_verification_only(llama):
    def generate(processor, **options):
        return llama.generate(
            prompt(),
            do_sample=False,
            max_new_tokens=20,
            logits_processor=LogitsProcessorList([processor]),
            **options,
        )

    known = generate(Stateful())[0].tolist()
    with Trace() as trace:
        drafted = generate(Grammar(known), assistant_model=tiny_drafter(llama))
    assert drafted[0].tolist() == known
    assert trace.verified > trace.accepted


@pytest.mark.parametrize("kind", [Stateful, Uncopyable])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("make", [mixed, tiny_drafter])
def test_verification_calls_a_processor_once_per_committed_token(llama, make, sampling, kind):
    processor = kind()
    with Trace() as trace:
        ids = llama.generate(
            prompt(),
            max_new_tokens=21,
            assistant_model=make(llama),
            logits_processor=LogitsProcessorList([processor]),
            **sampling,
        )
    assert trace.verified > trace.accepted
    assert ids.shape[1] == LENGTH + 21
    assert processor.lengths == list(range(LENGTH, LENGTH + 21))


def test_the_drafter_drafts_with_copies_of_built_in_processors(llama):
    """If all tokens but one are suppressed, every draft is right, provided the drafter knows."""
    trace = assert_greedy_identity(
        llama, tiny_drafter(llama), prompt(), max_new_tokens=20, suppress_tokens=[t for t in range(48) if t != 9]
    )
    assert trace.accepted == trace.verified


def counting_closure():
    calls = [0]

    def force(input_ids, scores):
        calls[0] += 1
        scores = scores.clone()
        scores[:, calls[0] % 40 + 2] += 1e3
        return scores

    return {"logits_processor": LogitsProcessorList([force])}


def counting_class():
    class Counter(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            Counter.calls += 1
            scores = scores.clone()
            scores[:, Counter.calls % 40 + 2] += 1e3
            return scores

    return {"logits_processor": LogitsProcessorList([Counter()])}


def counting_prefix_function():
    calls = [0]

    def allowed(batch, ids):
        calls[0] += 1
        return [calls[0] % 40 + 2]

    return {"prefix_allowed_tokens_fn": allowed}


@pytest.mark.parametrize("make", [counting_closure, counting_class, counting_prefix_function])
def test_a_memory_outside_the_processor_sees_committed_tokens_only(llama, make):
    assert_greedy_identity(llama, tiny_drafter(llama), prompt(), make, max_new_tokens=12)  # it uses processors itself


def test_processors_given_by_the_user_are_not_left_changed_by_drafting(llama):
    processor = Stateful()
    before = copy.deepcopy(processor.__dict__)
    drafted = tiny_drafter(llama)
    with Trace() as trace:
        llama.generate(
            prompt(), max_new_tokens=1, do_sample=False, assistant_model=drafted, logits_processor=[processor]
        )
    assert not trace.rounds  # one token comes from the prefill
    assert processor.lengths == [*before["lengths"], LENGTH]
