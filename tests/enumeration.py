"""Exact output distributions: every random choice of a program is followed, with its probability.

`exact_distribution(run)` calls `run` once for each path through its draws. `torch.multinomial` branches over the
support of its argument; the accept rule branches over accepting and rejecting, with the share of uniform numbers for
which the *real* rule accepts (found by bisection, as acceptance falls with the uniform number). Nothing is known about
the drafter or the loop, so plain generation, drafted generation and planted faults go through the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from unittest import mock

import torch

from hf_dspark import generation_dspark

TINY = 1e-12


class _Path:
    """One run with its first choices fixed; collects the alternatives of the later ones."""

    def __init__(self, fixed: list[int]):
        self.fixed, self.taken, self.probability = fixed, [], 1.0
        self.alternatives: list[list[int]] = []

    def choose(self, probabilities: list[float]) -> int:
        depth = len(self.taken)
        options = [index for index, value in enumerate(probabilities) if value > TINY]
        if depth < len(self.fixed):
            choice = self.fixed[depth]
        else:
            choice = options[0]
            self.alternatives += [[*self.taken, other] for other in options[1:]]
        self.taken.append(choice)
        self.probability *= probabilities[choice]
        return choice

    def multinomial(self, weights: torch.Tensor, num_samples: int, **kwargs) -> torch.Tensor:
        assert num_samples == 1
        rows = weights.reshape(-1, weights.shape[-1]).double()
        chosen = [self.choose((row / row.sum()).tolist()) for row in rows]
        return torch.tensor(chosen).reshape(*weights.shape[:-1], 1)

    def accept(self, rule: Callable, p: torch.Tensor, q: torch.Tensor | None, draft: int) -> tuple[bool, int]:
        uniform = torch.zeros((), dtype=torch.float64)

        def accepts(value: float) -> bool:
            uniform.fill_(value)
            return rule(p, q, draft)[0]

        with mock.patch("torch.rand", return_value=uniform), mock.patch("torch.multinomial", _first):
            share = accepted_share(accepts)
        accepted = self.choose([1 - share, share]) == 1
        with uniform_is(share / 2 if accepted else (1 + share) / 2):
            kept, token = rule(p, q, draft)
        assert kept == accepted
        return kept, token


def _first(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
    return torch.zeros(num_samples, dtype=torch.long)


def uniform_is(value: float):
    return mock.patch("torch.rand", return_value=torch.tensor(value, dtype=torch.float64))


def accepted_share(accepts: Callable[[float], bool]) -> float:
    """The share of uniform numbers in [0, 1) for which a rule accepts, if it accepts the small ones."""
    if accepts(1 - 2**-30):  # nearer to 1 the product with q rounds to q
        return 1.0
    if not accepts(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(28):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return (low + high) / 2


def exact_distribution(run: Callable[[], Hashable], rule: Callable | None = None) -> dict[Hashable, float]:
    """The probability of every result of `run`; `rule` replaces the accept rule."""
    rule = rule or generation_dspark.accept_or_resample
    result: dict[Hashable, float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        path = _Path(pending.pop())
        with (
            mock.patch("torch.multinomial", path.multinomial),
            mock.patch.object(
                generation_dspark, "accept_or_resample", lambda p, q, draft, path=path: path.accept(rule, p, q, draft)
            ),
        ):
            outcome = run()
        result[outcome] += path.probability
        pending += path.alternatives
    return dict(result)


def distance(ours: dict[Hashable, float], theirs: dict[Hashable, float]) -> float:
    """Total variation distance."""
    return sum(abs(ours.get(key, 0.0) - theirs.get(key, 0.0)) for key in {*ours, *theirs}) / 2
