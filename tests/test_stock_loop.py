"""The second route: the same drafts through transformers' own assisted loop, within that loop's limits.

Greedy text without stops is that of plain generation on every version. Where the stock loop is known to fall short,
our loop is shown to be right on the same request; the stock loop's answer is not asserted, as it differs by version.
"""

import pytest
import torch
from transformers import StoppingCriteria

from hf_dspark import DSparkCandidateGenerator, Trace, use_stock_loop
from hf_dspark._compat import CACHE
from tiny import FAMILIES, assert_greedy_identity, mixed, perfect, prompt, tiny_drafter, tiny_target


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] == self.length)


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [perfect, mixed, tiny_drafter])
def test_greedy_text_without_stops_is_plain_text(family, make):
    target = tiny_target(family)
    with use_stock_loop():
        trace = assert_greedy_identity(target, make(target), prompt(), max_new_tokens=40)
    assert trace.drafted > 0


def test_sampling_runs_and_drafts(llama):
    with Trace() as trace, use_stock_loop():
        text = llama.generate(
            prompt(), do_sample=True, top_p=0.9, max_new_tokens=20, assistant_model=tiny_drafter(llama)
        )
    assert text.shape[1] == prompt().shape[1] + 20
    assert trace.verified > 0


def test_our_loop_stops_inside_a_block_where_this_one_may_not(llama):
    """A criterion that is true of one length only: the stock loop sees whole blocks and may step over it."""
    start = prompt().shape[1]
    for count in range(2, 9):
        trace = assert_greedy_identity(
            llama,
            perfect(llama),
            prompt(),
            lambda count=count: {"stopping_criteria": [StopAt(start + count)]},
            max_new_tokens=20,
        )
        assert trace.accepted > 0
        plain = llama.generate(prompt(), do_sample=False, max_new_tokens=start + 20)
        with use_stock_loop():
            stock = llama.generate(
                prompt(),
                do_sample=False,
                max_new_tokens=20,
                assistant_model=perfect(llama),
                stopping_criteria=[StopAt(start + count)],
            )
        # Its tokens are right; only where it ends is its own affair.
        assert stock.shape[1] >= start + count
        assert stock.tolist()[0] == plain.tolist()[0][: stock.shape[1]]


def test_a_filled_cache_is_refused(llama):
    drafter = mixed(llama)
    first = llama.generate(prompt(), do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
    again = {"do_sample": False, "max_new_tokens": 5, "assistant_model": drafter, CACHE: first[CACHE]}
    with (
        use_stock_loop(),
        pytest.raises(ValueError, match="Expected an empty cache for the stock loop, got one of 11"),
    ):
        llama.generate(first.sequences, **again)
    with Trace() as trace:
        llama.generate(first.sequences, **again)  # ours takes it
    assert trace.verified > 0


def test_both_loops_draft_through_the_same_class(llama, monkeypatch):
    made, draft = [], DSparkCandidateGenerator.draft
    monkeypatch.setattr(DSparkCandidateGenerator, "draft", lambda self, ids: made.append(self) or draft(self, ids))
    rounds = []
    for stock in (False, True):
        made.clear()
        with Trace() as trace:
            if stock:
                with use_stock_loop():
                    llama.generate(prompt(), do_sample=False, max_new_tokens=20, assistant_model=tiny_drafter(llama))
            else:
                llama.generate(prompt(), do_sample=False, max_new_tokens=20, assistant_model=tiny_drafter(llama))
        assert made
        assert trace.verified > 0
        rounds.append([record.drafted for record in trace.rounds])
    ours, stock = rounds
    assert stock == ours[: len(stock)]
    assert len(stock) >= len(ours) - 1  # its last round is not reported


def test_leaving_the_context_goes_back_to_our_loop(llama):
    with use_stock_loop():
        pass
    with Trace() as trace:
        llama.generate(prompt(), do_sample=False, max_new_tokens=9, assistant_model=perfect(llama))
    assert sum(len(record.committed) for record in trace.rounds) == 8  # every token but the prefill's is reported
