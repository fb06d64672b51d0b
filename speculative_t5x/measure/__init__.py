"""What a pair gains on given inputs, and why: `python -m speculative_t5x.measure`."""
