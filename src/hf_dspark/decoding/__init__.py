"""Decoding: what happened in each round."""
