"""What proposes tokens for the target to verify."""

from speculative_t5x.drafters.base import Drafter
from speculative_t5x.drafters.cascade import CascadeDrafter
from speculative_t5x.drafters.config import DRAFTERS, DrafterConfig
from speculative_t5x.drafters.copying import CopyingDrafter
from speculative_t5x.drafters.mixed import MixedDrafter
from speculative_t5x.drafters.model import ModelDrafter
from speculative_t5x.drafters.ngram import NgramDrafter

__all__ = [
    'DRAFTERS', 'CascadeDrafter', 'CopyingDrafter', 'Drafter', 'DrafterConfig', 'MixedDrafter',
    'ModelDrafter', 'NgramDrafter',
]
