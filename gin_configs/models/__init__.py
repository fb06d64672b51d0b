"""Pairs of target and draft."""
