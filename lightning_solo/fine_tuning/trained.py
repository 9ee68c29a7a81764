"""A fine-tuned language model from a checkpoint, as it was at the end of training."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError
from lightning_solo.export.adapter_files import load_adapters
from lightning_solo.export.pruned_structure import load_sizes
from lightning_solo.export.sources import read
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.nn.adapter_weights import RECORD


def load_trained(checkpoint: Path, device: torch.device, base: Path | None = None) -> tuple[HFCausalLM, Any]:
    """Return (module, tokenizer) of a checkpoint, in evaluation mode.

    Weights that were in 4 or 8 bits are rounded again, since the adapters were trained on the rounded ones. After a
    training on plain text the tokenizer has no chat template.

    Args:
        checkpoint: of a fit of `HFCausalLM`, with the adapters alone or with all weights.
        device: where the module is to be.
        base: folder of the base; by default where it was in training.

    Raises:
        CheckpointError: the file is damaged or of another module, or the folder of its base isn't there.
    """
    content = read(checkpoint, inert=True)
    arguments = content.get("hyper_parameters", {})
    names = inspect.signature(HFCausalLM).parameters
    if "path" not in arguments or not {*arguments} <= {*names}:
        raise CheckpointError(
            f"{checkpoint}: it isn't of model=hf_causal_lm; write a run with that model, such as one of experiment=sft"
        )
    path = base or Path(arguments["path"])
    if not path.is_dir():
        raise CheckpointError(f"{checkpoint}: its base isn't in {path}; write --base-folder FOLDER, where it is now")
    module = HFCausalLM(**{**arguments, "path": str(path), "samples": 0, "early_stopping": None})
    module.configure_model()
    if RECORD in content:
        load_adapters(module, checkpoint)
    else:
        load_sizes(module, content)
        module.load_state_dict(content["state_dict"])
    data = content.get("datamodule_hyper_parameters", {})
    own, template = data.get("tokenizer", arguments["path"]), data.get("chat_template")
    # it may be relative, and the base elsewhere now
    folder = module.path if f"/{arguments['path']}".endswith(f"/{own}") else own
    return module.to(device).eval(), tokenizer_of(folder, template, data.get("new_tokens", ()))
