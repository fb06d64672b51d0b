"""What proposes tokens for the target to verify."""

from speculative_t5x.drafters.base import DRAFTERS, Drafter, Proposal, check_drafter
from speculative_t5x.drafters.copying import CopyingDrafter
from speculative_t5x.drafters.model import ModelDrafter
from speculative_t5x.drafters.ngram import NgramDrafter

__all__ = [
    'DRAFTERS', 'CopyingDrafter', 'Drafter', 'ModelDrafter', 'NgramDrafter', 'Proposal',
    'check_drafter',
]
