"""Sampled text with a drafter has exactly the distribution of plain sampling.

Over tiny vocabularies the exact distributions of plain and drafted generation are enumerated (see enumeration.py) and
compared, for every kind of drafter and option; a chi-square test with real random numbers stands beside it. Each kind
of check is also shown to catch a planted fault.
"""

import pytest
import scipy.stats
import torch

from enumeration import distance, exact_distribution
from hf_dspark import DraftBlock, Trace, generation_dspark
from hf_dspark.generation_dspark import accept_or_resample
from tiny import ScriptedDrafter, tiny_drafter, tiny_target

EXACT = 2e-6  # scores are float32
P_LIMIT = 1e-4
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


# -------------------------------------------------------------------- generate(), exactly


def small_target(vocab=4, **changes):
    changes = {**SMALL, "num_hidden_layers": 2, "vocab_size": vocab, "initializer_range": 0.5, **changes}
    return tiny_target("llama", pad_token_id=None, bos_token_id=None, **changes)


def small_drafter(target, **changes):
    shape = {**SMALL, "target_layer_ids": [0], "num_hidden_layers": 1, "block_size": 2, "markov_rank": 4}
    shape |= {"mask_token_id": target.config.vocab_size - 1, "pad_token_id": None, "bos_token_id": None}
    return tiny_drafter(target, **{**shape, "initializer_range": 0.5, **changes})


def distributions(target, drafter, rule=None, **options):
    """Exact distributions of plain and drafted text, and the traces of the latter put together."""
    ids = torch.tensor([[1, 0, 2, 1]])
    options = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, **options}

    def run(**more):
        return tuple(target.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)[0, 4:].tolist())

    plain = exact_distribution(run)
    with Trace() as trace:
        drafted = exact_distribution(lambda: run(assistant_model=drafter), rule)
    assert sum(plain.values()) == pytest.approx(1, abs=EXACT)
    assert trace.verified > 0
    return plain, drafted, trace


HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "threshold": {"confidence_threshold": 0.05},
    "three of four tokens": {"draft_vocab_size": 3},
    "one draft": {"num_draft_tokens": 1},
}
OPTIONS = {
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[0], [1, 2]]},
    "several": {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_every_drafter_leaves_the_distribution_as_it_is(changes):
    """Three tokens of vocabulary, four of text: blocks of two, then of one, then none."""
    target = small_target(3)
    changes = {**changes, "draft_vocab_size": 2} if "draft_vocab_size" in changes else changes
    drafter = small_drafter(target, **changes)
    if "draft_vocab_size" in changes:
        drafter.draft_token_ids.copy_(torch.tensor([0, 2]))
    plain, drafted, trace = distributions(target, drafter, max_new_tokens=4)
    assert distance(drafted, plain) < EXACT
    assert 0 < trace.accepted < trace.verified
    if "draft_vocab_size" in changes:
        assert {token for record in trace.rounds for token in record.drafted} == {0, 2}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_leaves_the_distribution_as_it_is(options):
    target = small_target(4)
    plain, drafted, trace = distributions(target, small_drafter(target), **options)
    assert distance(drafted, plain) < EXACT
    assert trace.accepted > 0


@pytest.mark.parametrize("tokens", [[0, 1], [2], [], [3, 3]])
def test_drafts_that_were_not_drawn_leave_the_distribution_as_it_is(tokens):
    """One-hot q: a drafter that always proposes the same."""
    target = small_target(4)
    drafter = small_drafter(target, cls=ScriptedDrafter)
    drafter.script = lambda prefix, keep: tokens or [prefix.shape[1] % 4]
    plain, drafted, _ = distributions(target, drafter)
    assert distance(drafted, plain) < EXACT


@pytest.mark.parametrize("eos", [0, 1, [2, 3]])
@pytest.mark.parametrize("changes", [{}, {"confidence_threshold": 0.06}], ids=["whole blocks", "threshold"])
def test_an_end_of_text_token_leaves_the_distribution_as_it_is(eos, changes):
    """The draft may end after a drafted end of text, never before it."""
    target = small_target(4 if isinstance(eos, list) else 3)
    drafter = small_drafter(target, **changes)
    length = 3 if isinstance(eos, list) else 4
    plain, drafted, trace = distributions(target, drafter, eos_token_id=eos, max_new_tokens=length)
    assert len({len(text) for text in plain}) > 1
    assert distance(drafted, plain) < EXACT
    ends = eos if isinstance(eos, list) else [eos]
    for record in trace.rounds:
        assert not set(record.drafted[: max(0, record.verified - 1)]) & set(ends)


def test_cutting_a_draft_before_the_end_of_text_is_caught(monkeypatch):
    target = small_target(3)
    drafter = small_drafter(target)
    propose = drafter.propose

    def cut_before(*args, **kwargs):
        block = propose(*args, **kwargs)
        ids = block.token_ids[0].tolist()
        block.lengths.fill_(ids.index(0) if 0 in ids else len(ids))
        return block

    monkeypatch.setattr(drafter, "propose", cut_before)
    plain, drafted, _ = distributions(target, drafter, eos_token_id=0, max_new_tokens=4)
    assert distance(drafted, plain) > 1e-3


def test_a_wrong_q_and_a_rule_that_always_accepts_are_caught(monkeypatch):
    target = small_target(4)
    drafter = small_drafter(target)
    plain, drafted, _ = distributions(target, drafter, rule=lambda p, q, draft: (True, draft))
    assert distance(drafted, plain) > 1e-2
    propose = drafter.propose

    def other_logits(*args, **kwargs):
        block = propose(*args, **kwargs)
        block.logits = None if block.logits is None else block.logits / 2
        return block

    monkeypatch.setattr(drafter, "propose", other_logits)
    plain, drafted, _ = distributions(target, drafter)
    assert distance(drafted, plain) > 1e-3


# -------------------------------------------------------------------- the paper's counter-example (appendix A)


class Example(ScriptedDrafter):
    """p = (.7, .3) and q = (.5, .5); the confidence of the second slot tells whether the first token is A."""

    retrospective = False

    @torch.no_grad()
    def propose(
        self, context, anchor_ids, *, num_draft_tokens=None, do_sample=False, processors=None, prefix_ids=None
    ):
        context.take(self.device, self.dtype)
        logits = torch.zeros(1, min(2, num_draft_tokens), 2)
        ids = torch.multinomial(logits[0].softmax(-1), 1).T
        survival = [0.8, 0.8 * (0.9 if ids[0, 0] == 0 else 0.0)]
        speed, tau, best, length = [1.0, 0.5, 0.45], 1.0, 1.0, 0
        for slot in range(ids.shape[1]):
            tau += survival[slot]
            if tau * speed[slot + 1] > best:
                best, length = tau * speed[slot + 1], slot + 1
            elif not self.retrospective:
                break  # before x_{k+1} can have a say in the admission of x_k
        return DraftBlock(ids, logits, None, torch.tensor([length]))


def counter_example(retrospective):
    target = small_target(2, vocab_size=2)
    drafter = small_drafter(target, cls=Example, mask_token_id=1)
    drafter.retrospective = retrospective
    fixed = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
    target.lm_head.register_forward_hook(lambda module, args, output: fixed.expand_as(output))
    ids = torch.tensor([[1, 0]])

    def second_token():
        text = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=4,
            top_k=0,
            assistant_model=drafter,
        )
        return int(text[0, 3])  # the first one of a round

    with Trace() as trace:
        found = exact_distribution(second_token)
    return found, trace


def test_early_stop_is_exact_on_the_papers_counter_example():
    found, trace = counter_example(retrospective=False)
    assert found == pytest.approx({0: 0.7, 1: 0.3}, abs=EXACT)
    assert trace.drafted > 0


def test_a_retrospective_decision_gives_the_papers_biased_result():
    found, trace = counter_example(retrospective=True)
    assert trace.accepted > 0
    assert found == pytest.approx({0: 0.85, 1: 0.15}, abs=EXACT)


def test_admission_of_a_draft_does_not_change_with_that_draft():
    """Other draws, same prefix of draws: the same decisions up to and including the first different slot."""
    target = small_target(4)
    drafter = small_drafter(target, confidence_threshold=0.1, block_size=4)
    ids = torch.tensor([[1, 0, 2, 1]])
    admitted = {}
    for seed in range(60):
        torch.manual_seed(seed)
        with Trace() as trace:
            target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=6, assistant_model=drafter
            )
        first = trace.rounds[0]
        start = round(first.confidence_logits[0], 6)  # names the anchor
        for slot in range(len(first.drafted)):
            before = (start, tuple(first.drafted[:slot]))
            assert admitted.setdefault(before, first.verified > slot) == (first.verified > slot)
    assert len(set(admitted.values())) == 2


# -------------------------------------------------------------------- real random numbers


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"markov_head_type": "rnn", "confidence_threshold": 0.4}, {"temperature": 1.3, "top_p": 0.9}),
        ({"draft_vocab_size": 4}, {"top_k": 4, "repetition_penalty": 1.2}),
    ],
    ids=["plain", "rnn, threshold, top_p", "reduced vocabulary, top_k"],
)
def test_sampled_texts_pass_a_chi_square_test(changes, options):
    target = small_target(6)
    drafter = small_drafter(target, **changes)
    ids, count = torch.tensor([[1, 0, 2, 1]]), 800
    options = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, **options}

    def run(**more):
        return tuple(target.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)[0, 4:].tolist())

    exact = exact_distribution(run)
    with Trace() as trace:
        texts = [run(assistant_model=drafter) for _ in range(count)]
    assert 0 < trace.accepted < trace.verified
    assert set(texts) <= set(exact)
    assert chi_square(texts, exact) > P_LIMIT
    # The same test, with its true text distribution replaced by that of a slightly colder target, fails.
    colder = {text: value**1.5 for text, value in exact.items()}
    total = sum(colder.values())
    assert chi_square(texts, {text: value / total for text, value in colder.items()}) < P_LIMIT


def chi_square(texts, exact):
    """p-value of the texts under exact probabilities; rare ones (fewer than 5 expected) are counted together."""
    count = len(texts)
    common = [text for text, value in exact.items() if value * count >= 5]
    seen = [texts.count(text) for text in common]
    expected = [exact[text] * count for text in common]
    if count - sum(expected) > 1:
        seen, expected = [*seen, count - sum(seen)], [*expected, count - sum(expected)]
    scale = sum(seen) / sum(expected)
    return scipy.stats.chisquare(seen, [value * scale for value in expected]).pvalue


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        with Trace() as trace:
            texts.append(
                target.generate(
                    torch.arange(2, 9)[None], do_sample=True, max_new_tokens=24, assistant_model=drafter
                ).tolist()
            )
        assert trace.verified > 0
    assert texts[0] == texts[1] != texts[2]


def test_generation_with_broken_weights_still_samples_from_the_target():
    target = small_target(4)
    drafter = small_drafter(target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(torch.nan)
    ids = torch.tensor([[1, 0, 2, 1]])

    def run(**more):
        return tuple(target.generate(ids, do_sample=True, max_new_tokens=3, top_k=0, **more)[0, 4:].tolist())

    with Trace() as trace:
        drafted = exact_distribution(lambda: run(assistant_model=drafter))
    assert distance(drafted, exact_distribution(run)) < EXACT
    assert trace.rounds
    assert trace.verified == 0  # nothing can be drawn from no numbers, and the trace says so


def test_the_loop_uses_the_rule_that_is_tested_here():
    assert generation_dspark.accept_or_resample is accept_or_resample
