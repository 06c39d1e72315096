"""`Trace`: the record of every round. It is how anyone, a test included, knows that drafting happened."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from types import TracebackType

from ..drafting_dspark import Round, round_observer


class Trace:
    """Records the rounds of all generations inside its context.

    The context belongs to a thread: open it in the thread that calls `generate()`.

    Args:
        on_round (callable, *optional*): called with each [`Round`] as soon as its tokens are committed.

    Example:
        >>> with Trace() as trace:
        ...     target.generate(**inputs, assistant_model=drafter)
        >>> print(trace.accepted_length, trace.summary())
    """

    def __init__(self, on_round: Callable[[Round], None] | None = None):
        self.rounds: list[Round] = []
        self._on_round = on_round
        self._tokens: list[Token] = []  # a stack: the same trace may be entered again

    def __enter__(self) -> Trace:
        self._tokens.append(round_observer.set(self._observe))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        round_observer.reset(self._tokens.pop())

    def _observe(self, record: Round) -> None:
        self.rounds.append(record)
        if self._on_round is not None:
            self._on_round(record)

    @property
    def drafted(self) -> int:
        """Drafts proposed, verified or not."""
        return sum(len(record.drafted) for record in self.rounds)

    @property
    def verified(self) -> int:
        """Drafts that the target scored."""
        return sum(record.verified for record in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that became text."""
        return sum(record.accepted for record in self.rounds)

    @property
    def tokens(self) -> int:
        """Tokens committed in rounds; the first token of a text comes from the prefill and is not among them."""
        return sum(len(record.committed) for record in self.rounds)

    @property
    def accepted_length(self) -> float:
        """Tokens a round, bonus token included (the paper's tau); 0 without rounds."""
        return self.tokens / len(self.rounds) if self.rounds else 0.0

    def conditional_acceptance(self) -> list[float]:
        """P(draft k accepted | drafts before it accepted) for k = 1, 2, ...; counts only rounds that verified k."""
        longest = max((record.verified for record in self.rounds), default=0)
        rates = []
        for slot in range(longest):
            reached = [record for record in self.rounds if record.verified > slot and record.accepted >= slot]
            rates.append(sum(record.accepted > slot for record in reached) / len(reached) if reached else 0.0)
        return rates

    def summary(self) -> str:
        """One line: rounds, drafted, verified, accepted, accepted length and where the time went."""
        if not self.rounds:
            return "no rounds: nothing was drafted in this context"
        draft, verify, other = (
            sum(getattr(record, name) for record in self.rounds)
            for name in ("draft_seconds", "verify_seconds", "other_seconds")
        )
        total = draft + verify + other or 1.0
        return (
            f"{len(self.rounds)} rounds, {self.drafted} drafted, {self.verified} verified, {self.accepted} accepted, "
            f"accepted length {self.accepted_length:.2f}; time: draft {draft / total:.0%}, "
            f"verify {verify / total:.0%}, other {other / total:.0%}"
        )
