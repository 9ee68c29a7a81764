"""The trained weights of a checkpoint in a plain module: in fp32, with adapters merged."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lightning_solo.errors import CheckpointError, listed
from lightning_solo.export.adapter_files import load_adapters, merge_adapters
from lightning_solo.export.sources import read
from lightning_solo.export.weights import source_of, widest_weights
from lightning_solo.nn.adapter_weights import RECORD


def load_trained_weights(module: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint of any preset into a module; its weights are fp32 then, and adapters are added to them.

    Weights that were in 4 or 8 bits while an adapter was trained are rounded as they were then.

    Args:
        module: as it was built, with the weights of the base if the checkpoint has adapters alone.
        checkpoint: the file.

    Raises:
        CheckpointError: the file is of another module.
        ConflictError: an adapter can't be added to its weights, for example because they are in 4 or 8 bits.
    """
    if checkpoint.is_file() and RECORD in read(checkpoint, inert=True):
        load_adapters(module, checkpoint)
        merge_adapters(module)
        module.float()
        return
    module.float()
    weights = widest_weights(source_of(checkpoint))
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise CheckpointError(
            f"{checkpoint} is of another module than {type(module).__name__} as the run's configuration builds it"
            f" ({listed(lines, 2)}); write --format weights"
        ) from error
