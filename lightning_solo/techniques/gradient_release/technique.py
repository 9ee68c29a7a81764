"""Gradient release: each parameter steps in backward, and its gradient is freed, with any optimizer."""

from __future__ import annotations

from lightning_solo.seams.released_gradients import ReleasedGradients
from lightning_solo.techniques.gradient_release.card import CARD, OPTION, Settings


class GradientRelease(ReleasedGradients, Settings):
    """Steps the optimizer in backward, gradient by gradient; with any strategy for one device.

    Under manual optimization, as of GANs, gradients are kept until the step, and the log says so.

    Raises:
        PresetError: the buffer is neither "device" nor "host".
    """

    phase = CARD.phase
    option = OPTION
