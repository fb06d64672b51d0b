"""What proposes tokens for the target to verify."""

from speculative_t5x.drafters.base import Drafter, Proposal
from speculative_t5x.drafters.model import ModelDrafter

__all__ = ['Drafter', 'ModelDrafter', 'Proposal']
