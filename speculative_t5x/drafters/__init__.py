"""What proposes tokens for the target to verify."""

from speculative_t5x.drafters.base import DRAFTERS, Drafter, Proposal, check_drafter
from speculative_t5x.drafters.copying import CopyingDrafter
from speculative_t5x.drafters.model import ModelDrafter

__all__ = [
    'DRAFTERS', 'CopyingDrafter', 'Drafter', 'ModelDrafter', 'Proposal', 'check_drafter'
]
