"""The accept rule alone: whatever q the draft came from, the committed token has the distribution p.

Checked exactly (the share of uniform numbers that accept, plus the distribution of what is drawn after a rejection),
by large samples, and by fuzzing over vanishing, equal and disjoint p and q; planted faults are caught too.
"""

import pytest
import scipy.stats
import torch

from enumeration import accepted_share, uniform_is
from hf_dspark.generation_dspark import accept_or_resample

P_LIMIT = 1e-4


def rule_distribution(p, q, rule=accept_or_resample):
    """Exact distribution of the token committed for one draft from q (or, for None, for each draft in turn)."""

    def committed(draft):
        result = torch.zeros_like(p)
        share = accepted_share(lambda u: accepts(u, draft))
        result[draft] += share
        if share < 1:
            seen = []

            def residual(weights, count):
                seen.append(weights / weights.sum())
                return torch.zeros(1, dtype=torch.long)

            with uniform_is((1 + share) / 2), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "multinomial", residual)
                rule(p, q, draft)
            result += (1 - share) * seen[-1]
        return result

    def accepts(u, draft):
        with uniform_is(u):
            return rule(p, q, draft)[0]

    if q is None:
        return [committed(draft) for draft in range(len(p))]
    return [sum(float(q[draft]) * committed(draft) for draft in range(len(p)) if q[draft] > 0)]


def pairs():
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 8):
        for sharpness in (0.3, 3.0, 30.0):
            p, q = (torch.randn(2, size, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)
            yield p, q
            yield p, p.clone()
            yield p, torch.eye(size, dtype=torch.float64)[0]
            yield torch.eye(size, dtype=torch.float64)[1], q
            holes = torch.where(torch.arange(size) % 2 == 0, p, 0.0)
            yield holes / holes.sum(), q
            other = torch.where(torch.arange(size) % 2 == 1, q, 0.0)
            yield p, other / other.sum()
            yield holes / holes.sum(), other / other.sum()  # disjoint


def test_the_rule_commits_tokens_of_p_whatever_q_is():
    for p, q in pairs():
        for result in rule_distribution(p, q):
            torch.testing.assert_close(result, p, rtol=0, atol=1e-8)


def test_the_rule_commits_tokens_of_p_for_drafts_that_were_not_drawn():
    for p, _ in pairs():
        for result in rule_distribution(p, None):
            torch.testing.assert_close(result, p, rtol=0, atol=1e-8)


def test_a_rule_that_always_accepts_or_redraws_from_p_is_caught():
    def accept(p, q, draft):
        return True, draft

    def redraw_from_p(p, q, draft):
        kept, _ = accept_or_resample(p, q, draft)
        return kept, draft if kept else int(torch.multinomial(p, 1))

    p, q = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()
    for wrong in (accept, redraw_from_p):
        assert (rule_distribution(p, q, wrong)[0] - p).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_samples_of_the_rule_follow_p(dtype):
    p = torch.tensor([0.42, 0.0, 0.3, 0.08, 0.2], dtype=dtype)
    q = torch.tensor([0.1, 0.5, 0.3, 0.1, 0.0], dtype=dtype)
    counts = torch.zeros(5)
    for draft in torch.multinomial(q, 6000, replacement=True).tolist():
        counts[accept_or_resample(p, q, draft)[1]] += 1
    assert counts[1] == 0
    assert scipy.stats.chisquare(counts[p > 0], p[p > 0].double() * 6000).pvalue > P_LIMIT


def test_ten_thousand_fuzzed_rounds_give_no_nan_and_no_impossible_token():
    generator = torch.Generator().manual_seed(1)
    for step in range(10_000):
        size = 2 + step % 7
        p, q = torch.rand(2, size, generator=generator).pow(1 + step % 40)
        p[torch.rand(size, generator=generator) < 0.3] = 0
        q[torch.rand(size, generator=generator) < 0.3] = 0
        p[step % size] += 1e-3  # never all zero
        q[(step // 7) % size] += 1e-30 if step % 2 else 1.0
        p, q = p / p.sum(), q / q.sum()
        if step % 5 == 0:
            q = p + torch.rand(size, generator=generator) * 1e-8 * (p > 0)  # equal up to rounding
        draft = step % size
        kept, token = accept_or_resample(p, None if step % 3 == 0 else q, draft)
        assert p[token] > 0
        assert kept == (token == draft) or not kept
        assert not (kept and step % 3 and q[draft] == 0)  # a token that q cannot draw is no free pass
