"""Speculative decoding for T5X."""
