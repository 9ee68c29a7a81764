"""Convert a checkpoint with compact states to one that a plain Trainer resumes with torch's AdamW, and back.

To plain: weights are joined with their corrections to fp32, moments are unpacked to fp32; nothing is rounded.

To compact: moments are rounded to 8 bits, as by a run of ``compact`` that resumes the plain file; weights stay in fp32,
and that run splits them. For a file that was compact with 24 and 8 bits, both directions give the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_solo.checkpoint.manifest import list_file
from lightning_solo.errors import CheckpointError, NothingToDoError
from lightning_solo.export.sources import checkpoint_of, new_file, read, refuse_existing
from lightning_solo.export.weights import unnamed
from lightning_solo.optim.adamw_state_dict import WEIGHTS_ALONE, is_compact, marked, require_supported, unmarked
from lightning_solo.optim.adamw_states import compress, is_plain, new_state, plain, state_layout
from lightning_solo.optim.checkpoint_masters import RECORD, with_masters
from lightning_solo.optim.split_weights import joined
from lightning_solo.units import format_bytes

Checkpoint = dict[str, Any]


def convert_checkpoint(source: Path, to: str, output: Path | None = None, *, overwrite: bool = False) -> list[str]:
    """Write a checkpoint with states of another form, everything else as it was; return lines about it.

    Args:
        source: a checkpoint, or the folder of a run, of which the last one is taken.
        to: one of `formats.FORMS`.
        output: the file to write; by default ``NAME-plain.ckpt`` beside the source.
        overwrite: whether an existing file is replaced.

    Raises:
        NothingToDoError: the states have this form already.
        CheckpointError: the file is damaged, has no optimizer states or some that can't be converted, or objects that
            are no plain data; the output exists or can't be written.
    """
    source = checkpoint_of(source)
    if source.is_dir():
        raise CheckpointError(
            f"{source} is a folder of DeepSpeed's engine, of which only the weights can be written: write"
            f" lightning-solo export {source}"
        )
    output = output or source.with_name(f"{source.stem}-{to}.ckpt")
    refuse_existing(output, overwrite=overwrite)
    checkpoint = read(source)
    if not isinstance(checkpoint.get("state_dict"), Mapping) or "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{source} has no optimizer states; there are {', '.join(map(str, checkpoint))}; for its weights alone"
            f" write lightning-solo export {source}"
        )
    converted, notes = {"plain": to_plain, "compact": to_compact}[to](checkpoint, source)
    with new_file(output) as new, new.open("wb") as file:
        torch.save(converted, file)
    list_file(output)
    return [f"{to}: {output}, {format_bytes(output.stat().st_size)}, of {source}", *notes]


# --- to plain ---


def to_plain(checkpoint: Checkpoint, source: Path) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint with fp32 weights and states of torch's AdamW, and lines about it."""
    before = checkpoint["optimizer_states"]
    states = [state for each in before for state in each["state"].values()]
    if any(isinstance(state.get("exp_avg"), dict) or "state1" in state for state in states):
        raise CheckpointError(
            f"{source} has states of another library's optimizer, which can't be converted: {WEIGHTS_ALONE}"
        )
    if not any(map(is_compact, states)):
        raise NothingToDoError(f"{source} has no compact states: a plain Trainer resumes it as it is")
    if RECORD not in checkpoint:
        raise CheckpointError(unnamed(source))
    record, weights = checkpoint[RECORD], checkpoint["state_dict"]
    masters: dict[str, Callable[[], Tensor]] = {}
    for saved, parameters in zip(before, record, strict=True):
        for number, state in saved["state"].items():
            name = parameters[number]["name"]
            if "correction" in state and name in weights:
                masters[name] = partial(joined, weights[name], state["correction"])
    kept = {key: value for key, value in checkpoint.items() if key != RECORD}
    kept["state_dict"] = with_masters(weights, masters)
    kept["optimizer_states"] = [_plain_optimizer(*pair) for pair in zip(before, record, strict=True)]
    bits = sorted({each["bits"] for parameters in record for each in parameters if each["trained"]})
    notes = [f"weights with {' and '.join(map(str, bits))} bits; states of torch's AdamW in fp32"]
    if any(each.get("window") for each in before):
        notes.append("left out: the gradients of an unfinished accumulation window, whose batches add nothing now")
    return kept, notes


def _plain_optimizer(saved: Mapping[str, Any], parameters: list[Mapping[str, Any]]) -> dict[str, Any]:
    if not any(map(is_compact, saved["state"].values())):
        return dict(saved)
    states = {}
    for number, state in unmarked(saved)["state"].items():
        if "step" in state:  # else it was never stepped
            shape, stride = parameters[number]["shape"], parameters[number]["stride"]
            states[number] = plain(torch.empty_strided(shape, stride), state)
    return {"state": states, "param_groups": saved["param_groups"]}


# --- to compact ---


def to_compact(checkpoint: Checkpoint, source: Path) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose AdamW states are compact, and lines about it."""
    before = checkpoint["optimizer_states"]
    if any(is_compact(state) for each in before for state in each["state"].values()):
        raise NothingToDoError(f"{source} has compact states already")
    pairs = [_compact_optimizer(each) for each in before]
    if not any(record for _, record in pairs):
        raise NothingToDoError(f"{source} has no states of AdamW or Adam; the preset compact resumes it as it is")
    converted = {**checkpoint, "optimizer_states": [states for states, _ in pairs]}
    return {**converted, RECORD: [record for _, record in pairs]}, ["moments in 8 bits; weights as they were"]


def _compact_optimizer(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a state dict with compact states and the record of its parameters; unchanged if it isn't of AdamW."""
    every = saved["state"].values()
    if not every or not all("exp_avg_sq" in state for state in every):
        return dict(saved), []
    require_supported(saved)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states, shapes = {}, {}
    for number, state in saved["state"].items():
        whole = state["exp_avg"].to(torch.float32)
        if not is_plain(state, whole):
            raise CheckpointError(
                f"the states of parameter {number} are not those of torch's AdamW: {', '.join(state)}"
            )
        states[number] = new_state(state_layout(whole, 32, 8), whole.device, {})
        compress(states[number], whole, state)
        shapes[number] = {"shape": list(whole.shape), "stride": list(whole.stride())}
    unknown: dict[str, Any] = {"shape": [], "stride": []}  # without a state, none is needed
    record = [{"name": None, "bits": 32, "trained": True, **shapes.get(n, unknown)} for n in numbers]
    return marked({**saved, "state": states}), record
