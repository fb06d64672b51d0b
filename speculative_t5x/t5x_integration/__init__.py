"""Speculative decoding inside T5X: models, checkpoints and tasks that its commands take from gin.

Everything here imports T5X; nothing else in the package does.
"""

from speculative_t5x.t5x_integration.versions import check_versions

check_versions()
