"""Evaluation: what a drafter gains, and proof that the text is the target's."""
