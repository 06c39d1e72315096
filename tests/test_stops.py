"""The first stop ends the text, wherever in a block it falls, and everything that is returned ends with it.

An end-of-text token, a stop string, a custom criterion and the length cap may complete on any draft of a block. Ids,
scores, logits, hidden states, attentions, cache and what a streamer receives must then be those of plain generation,
and a criterion with a memory must see each committed token once and never a rejected one.
"""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_dspark import Trace
from hf_dspark._compat import CACHE, SLIDING_CACHE_ROLLS_BACK
from tiny import LETTERS, VOCAB, letter_tokenizer, mixed, perfect, prompt, tiny_drafter, tiny_target

LENGTH = prompt().shape[1]


class Recorder(BaseStreamer):
    """Keeps what a streamer gets, in the order in which it gets it."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


class Memory(StoppingCriteria):
    """Remembers each token it is shown and stops when `stop(tokens)` says so."""

    def __init__(self, stop):
        self.stop, self.lengths, self.tokens = stop, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        self.tokens.append(int(input_ids[0, -1]))
        return torch.full((1,), bool(self.stop(self.tokens)))


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def text(llama):
    return llama.generate(prompt(), do_sample=False, max_new_tokens=24)[0, LENGTH:].tolist()


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


def both(target, drafter, fresh=dict, **options):
    """Plain and drafted output of the same greedy request, and what each of them streamed."""
    plain_stream, drafted_stream = Recorder(), Recorder()
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    plain = target.generate(prompt(), streamer=plain_stream, **options, **fresh())
    with Trace() as trace:
        drafted = target.generate(prompt(), streamer=drafted_stream, assistant_model=drafter, **options, **fresh())
    assert drafted_stream.puts == plain_stream.puts
    assert drafted_stream.ends == plain_stream.ends == 1
    return plain, drafted, trace


def assert_same_outputs(plain, drafted):
    """Every field of two `return_dict_in_generate` outputs is equal, shape for shape."""
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted[CACHE].get_seq_length() == plain[CACHE].get_seq_length()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = getattr(drafted, name), getattr(plain, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert len(ours) == len(theirs) == plain.sequences.shape[1] - LENGTH, name
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("make", [mixed, perfect])
def test_every_token_of_a_text_ends_it_as_eos(llama, text, make):
    drafter, verified = make(llama), 0
    other = next(token for token in range(2, VOCAB) if token not in text)
    for token in sorted(set(text)):
        for eos in (token, [token, other], [text[-1], token]):
            plain, drafted, trace = both(llama, drafter, eos_token_id=eos)
            assert drafted.tolist() == plain.tolist()
            verified += trace.verified
    assert verified > 0


def test_eos_is_met_at_every_offset_of_a_block(llama, text):
    """Perfect drafts of 5 put the end at each slot, as a draft and as the target's own token."""
    slots = set()
    for token in sorted(set(text)):
        plain, drafted, trace = both(llama, perfect(llama), eos_token_id=token)
        assert drafted.tolist() == plain.tolist()
        if trace.rounds:
            last = trace.rounds[-1]
            assert last.committed[-1] == token
            slots.add(len(last.committed) - 1)
            # A round that ends on an accepted draft has no token of the target's own.
            assert last.accepted == len(last.committed) or last.accepted == last.verified
    assert slots >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("cap", [24, None])
def test_a_criterion_stops_at_every_offset(llama, text, cap):
    """Alone, and on the very token that also reaches the length cap."""
    for count in range(1, 16):
        made = []

        def fresh(count=count, made=made):
            made.append(Memory(lambda tokens: len(tokens) >= count))
            return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

        plain, drafted, trace = both(llama, perfect(llama), fresh, max_new_tokens=cap or count)
        assert drafted.tolist() == plain.tolist()
        assert drafted[0, LENGTH:].tolist() == text[:count]
        assert made[1].tokens == made[0].tokens == text[:count]
        assert made[1].lengths == list(range(LENGTH + 1, LENGTH + count + 1))
        assert (trace.verified > 0) == (count > 1 if cap else count > 2)


@pytest.mark.parametrize("make", [mixed, tiny_drafter])
def test_criteria_never_see_a_rejected_token(llama, text, make):
    seen = Memory(lambda tokens: len(tokens) >= 20)
    with Trace() as trace:
        drafted = llama.generate(
            prompt(),
            do_sample=False,
            max_new_tokens=24,
            assistant_model=make(llama),
            stopping_criteria=StoppingCriteriaList([seen]),
        )
    assert trace.verified > trace.accepted  # some were rejected
    assert seen.tokens == drafted[0, LENGTH:].tolist() == text[:20]
    assert seen.lengths == list(range(LENGTH + 1, LENGTH + 21))


def test_a_stop_string_ends_the_text_at_every_offset(llama, text, tokenizer):
    verified = 0
    for start in range(20):
        stop = "".join(LETTERS[token] for token in text[start : start + 2])
        plain, drafted, trace = both(llama, perfect(llama), stop_strings=stop, tokenizer=tokenizer)
        assert drafted.tolist() == plain.tolist()
        assert stop in tokenizer.decode(drafted[0])
        verified += trace.verified
    assert verified > 0


def test_a_stop_string_and_the_length_cap_end_the_text_together(llama, text, tokenizer):
    for length in range(4, 14):
        stop = "".join(LETTERS[token] for token in text[length - 2 : length])
        for cap in (length - 1, length, length + 1):
            plain, drafted, trace = both(
                llama, mixed(llama), stop_strings=[stop, "zzzz"], tokenizer=tokenizer, max_new_tokens=cap
            )
            assert drafted.tolist() == plain.tolist()
            assert trace.verified > 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("make", [perfect, mixed])
def test_scores_states_and_attentions_are_those_of_plain_generation(family, make):
    target = tiny_target(family)
    target.set_attn_implementation("eager")
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "repetition_penalty": 1.3,  # scores and logits differ
    }
    if family == "gemma2" and not SLIDING_CACHE_ROLLS_BACK:
        del options["output_attentions"]  # such a cache holds all keys there, so attention maps are wider
    for count in (*range(1, 10), 20):  # the last: past the sliding window
        plain, drafted, trace = both(target, make(target), max_new_tokens=count, **options)
        assert_same_outputs(plain, drafted)
        assert (trace.verified > 0) == (count > 2)


def test_outputs_end_with_a_stop_inside_a_block(llama, text):
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    for count in range(2, 14):
        plain, drafted, trace = both(
            llama,
            perfect(llama),
            lambda count=count: {"stopping_criteria": [Memory(lambda tokens: len(tokens) >= count)]},
            **options,
        )
        assert_same_outputs(plain, drafted)
        assert trace.verified > 0
        plain, drafted, trace = both(llama, mixed(llama), eos_token_id=text[count], **options)
        assert_same_outputs(plain, drafted)


def test_only_what_was_asked_for_is_returned(llama):
    plain, drafted, trace = both(llama, mixed(llama), return_dict_in_generate=True)
    assert_same_outputs(plain, drafted)
    assert set(drafted.keys()) == set(plain.keys())
    assert trace.verified > 0
