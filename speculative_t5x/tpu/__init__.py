"""What a pair needs of a TPU slice, as its compiler sees it: `python -m speculative_t5x.tpu`."""
