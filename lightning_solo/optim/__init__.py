"""What an optimizer keeps, and when it steps: on plain torch, without Lightning."""

from lightning_solo.optim.compact_adamw import CompactAdamW as CompactAdamW
from lightning_solo.optim.gradient_release import GradientRelease as GradientRelease
from lightning_solo.optim.master_weights import MasterWeights as MasterWeights
