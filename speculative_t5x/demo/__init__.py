"""The demo: an embedded pair, its tasks and held-out sentences."""
