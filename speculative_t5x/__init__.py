"""Speculative decoding for T5X."""

__version__ = '0.1.0.dev0'
