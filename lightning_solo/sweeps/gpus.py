"""The GPUs of a sweep: which ones there are, how many a job takes, and on which it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.errors import CapabilityError, PresetError
from lightning_solo.machine import Gpu
from lightning_solo.sweeps.jobs import AUTO, Job, Settings, Try, is_list

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
ENTRY = re.compile(r"\d+|GPU-[\w-]+|MIG-[\w/-]+")
MOST_PER_GPU = 4
"""Jobs per GPU, on average, that run at once with ``jobs_per_gpu=auto``; host memory and cores are divided by them."""


def gpus_of(settings: Settings, variable: str | None, present: Sequence[Gpu]) -> dict[str, int | None]:
    """Return entry of CUDA_VISIBLE_DEVICES -> free bytes, of each GPU for jobs; none if ``settings.gpus`` is None.

    Args:
        settings: the launcher's settings.
        variable: CUDA_VISIBLE_DEVICES of this process; None if it isn't set.
        present: the machine's GPUs; empty if they are unknown, and then the variable is taken as it is.

    Raises:
        PresetError: the variable or the setting names a GPU twice, or one that isn't there.
        CapabilityError: there are no GPUs, or their memory is unknown and jobs are to be packed by it.
    """
    if settings.gpus is None:
        return {}
    if variable is None and not present:
        raise CapabilityError(
            f"hydra.launcher.gpus={_text(settings.gpus)}: this machine has no GPU that nvidia-smi lists; write"
            f" hydra.launcher.gpus=null, or name the GPUs by {VISIBLE}"
        )
    given = f"{VISIBLE}={variable}"
    if variable is not None and not variable.strip():
        raise PresetError(f"{VISIBLE} is empty, which hides all GPUs; unset it, or write hydra.launcher.gpus=null")
    visible = _checked(given, variable.split(","), present) if variable is not None else _all(present)
    entries = visible
    if settings.gpus != AUTO:
        given = f"hydra.launcher.gpus={_text(settings.gpus)}"
        entries = _checked(given, settings.gpus, present)
        if hidden := [entry for entry, gpu in entries.items() if gpu not in visible.values()]:
            raise PresetError(
                f"{given}: {', '.join(hidden)} isn't one of {VISIBLE}={variable}; write some of its entries, such as"
                f" hydra.launcher.gpus=[{next(iter(visible))}], or auto for all"
            )
    free = {gpu.uuid: gpu.free_bytes for gpu in present}
    if settings.jobs_per_gpu == AUTO and (unknown := [e for e, gpu in entries.items() if free.get(gpu) is None]):
        raise CapabilityError(
            f"hydra.launcher.jobs_per_gpu=auto: nvidia-smi doesn't report the memory of GPU {', '.join(unknown)}; write"
            " a number of jobs"
        )
    return {entry: free.get(gpu) for entry, gpu in entries.items()}


def _all(present: Sequence[Gpu]) -> dict[str, str]:
    """Return entry -> UUID of all GPUs; MIG instances in the place of the GPU that is divided into them."""
    divided = {gpu.uuid for gpu, after in pairwise(present) if gpu.number and not after.number}
    return {gpu.number or gpu.uuid: gpu.uuid for gpu in present if gpu.uuid not in divided}


def _checked(given: str, entries: Iterable[object], present: Sequence[Gpu]) -> dict[str, str]:
    """Return entry -> UUID of its GPU, or the entry itself if the machine's GPUs are unknown."""
    checked: dict[str, str] = {}
    for entry in (str(entry).strip() for entry in entries):
        if not ENTRY.fullmatch(entry):
            raise PresetError(f"{given}: {entry!r} is no GPU; write a number such as 0, GPU-<uuid> or MIG-<uuid>")
        uuid = entry
        if present:
            found = [gpu.uuid for gpu in present if entry == gpu.number or gpu.uuid.startswith(entry)]
            if len(found) != 1:
                there = ", ".join(f"{gpu.number or gpu.uuid} ({gpu.name})" for gpu in present)
                raise PresetError(f"{given}: {entry} is {'several' if found else 'none'} of the GPUs here: {there}")
            uuid = found[0]
        if uuid in checked.values():
            raise PresetError(f"{given}: {entry} is there twice; name each GPU once")
        checked[entry] = uuid
    return checked


def _text(gpus: Any) -> str:
    return f"[{','.join(map(str, gpus))}]" if is_list(gpus) else str(gpus)


def with_parallel(settings: Settings, gpus: Collection[str]) -> Settings:
    """Return the settings with a number of jobs at a time.

    Raises:
        PresetError: there are too few GPUs for ``parallel``.
    """
    per_gpu = MOST_PER_GPU if settings.jobs_per_gpu == AUTO else settings.jobs_per_gpu
    most = len(gpus) * per_gpu or 1
    if gpus and settings.jobs_per_gpu != AUTO and (settings.parallel or 1) > most:
        raise PresetError(
            f"hydra.launcher.parallel={settings.parallel}: {len(gpus)} GPUs with {per_gpu} each run {most} jobs at a"
            f" time; drop it, or write hydra.launcher.jobs_per_gpu={-(-(settings.parallel or 1) // len(gpus))}"
        )
    return replace(settings, parallel=settings.parallel or most, gpus=list(gpus) or None)


def devices_of(config: DictConfig, shared_out: bool) -> int:
    """Return the number of devices that a job's configuration asks for, by ``solo.devices`` or ``trainer.devices``.

    Raises:
        PresetError: it names GPUs, such as ``[1]``, and the launcher shares them out.
    """
    for key in ("solo.devices", "trainer.devices"):
        try:
            value: Any = OmegaConf.select(config, key)
        except OmegaConfBaseException:  # the job itself says what is wrong
            continue
        if value in (None, AUTO, -1, "-1"):  # all that the job sees, which is one
            continue
        names = value.split(",") if isinstance(value, str) and "," in value else value if is_list(value) else ()
        names = [str(name).strip() for name in names if str(name).strip()]
        if names and (not shared_out or names == [str(number) for number in range(len(names))]):
            return len(names)
        if str(value).isdigit() and int(value):
            return int(value)
        if shared_out:
            raise PresetError(
                f"{key}={value}: hydra.launcher.gpus chooses the GPUs of a job, which takes a number of them; write"
                f" {key}=1"
            )
    return 1


def check_devices(jobs: Iterable[Job], gpus: Collection[str]) -> None:
    """Refuse jobs that ask for more GPUs than there are."""
    for job in jobs:
        if gpus and job.devices > len(gpus):
            raise PresetError(
                f"job {job.number} asks for {job.devices} devices, and hydra.launcher.gpus has {len(gpus)}"
                f" ({', '.join(gpus)}); write at most {len(gpus)}, or name more GPUs"
            )


def place(one: Try, running: Collection[Try], gpus: Mapping[str, int | None], settings: Settings) -> Any:
    """Return the GPUs on which a job can start now, those with the fewest jobs first; None if it has to wait.

    Args:
        one: the job's next attempt.
        running: the running attempts.
        gpus: entry of CUDA_VISIBLE_DEVICES -> free bytes; a job takes none if it is empty.
        settings: the launcher's settings.
    """
    if not gpus:
        return ()
    on = {gpu: [other for other in running if gpu in other.gpus] for gpu in gpus}

    def has_room(gpu: str) -> bool:
        if not on[gpu]:
            return True
        if one.alone or any(other.alone for other in on[gpu]):
            return False
        if settings.jobs_per_gpu != AUTO:
            return len(on[gpu]) < int(settings.jobs_per_gpu)
        planned = [other.job.planned_bytes() for other in (one, *on[gpu])]
        return None not in planned and sum(filter(None, planned)) <= (gpus[gpu] or 0)

    free = sorted(filter(has_room, gpus), key=lambda gpu: len(on[gpu]))[: one.job.devices]
    return tuple(gpu for gpu in gpus if gpu in free) if len(free) == one.job.devices else None


def variables_of(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of a job on these GPUs."""
    if not gpus:
        return {}
    # numbers are those of nvidia-smi, unless the user has numbered them
    order = {} if VISIBLE in os.environ or ORDER in os.environ else {ORDER: "PCI_BUS_ID"}
    return {VISIBLE: ",".join(gpus), **order}
