"""Measures the seconds of plans of an 8B Llama on an RTX 4090, from few of its blocks and from all.

Each row is one preset, planned in a process that has imported everything and planned nothing. The last row is one plan
of all of these presets, in which they share traces and the processor's cores. The first seconds are those of the
processor, of all processes of a plan: other work on the machine adds less to them than to the passed seconds, in
parentheses. With `--check` the two plans must also be equal.

    python examples/measure_plan_time.py                                    # all presets, half an hour
    python examples/measure_plan_time.py --presets bf16 stream --check      # minutes
    python examples/measure_plan_time.py --few --together                   # minutes
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import warnings
from functools import partial

import torch
from plan_fine_tuning import LanguageModel
from this_machine import machine, versions

from lightning_solo.planner import few_blocks
from lightning_solo.planner.device import device
from lightning_solo.planner.worker import PlanRequest, plans
from lightning_solo.presets.compose import compose, compose_all

DEVICE = "rtx-4090"


def planned(model: str, tokens: int, presets: list[str], all_blocks: bool) -> tuple[str, list[str]]:
    """Return the seconds of plans of one sequence, and each plan or the error in its place."""
    gc.freeze()  # as the process that plans does after its imports
    gc.disable()
    if all_blocks:
        few_blocks.LEAST = 2**30
    target, batch = device(DEVICE), torch.zeros(1, tokens, dtype=torch.int64)
    make = partial(LanguageModel, model, torch.bfloat16)
    begun = os.times()
    configs = {preset: compose(preset) for preset in presets}
    request = PlanRequest(make, batch, {}, target, target.memory_bytes, None, configs)
    answers = [repr(answer) for _, answer in plans(request)]
    ended = os.times()
    return f"{sum(ended[:4]) - sum(begun[:4]):.1f} s ({ended.elapsed - begun.elapsed:.1f} s)", answers


def main() -> None:
    """Plan each preset both ways, and print a row of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B")
    parser.add_argument("--tokens", type=int, default=2048)
    every = [preset for preset in compose_all() if preset != "auto"]
    parser.add_argument("--presets", nargs="+", default=every, choices=every)
    parser.add_argument("--few", action="store_true", help="plan from few blocks only")
    parser.add_argument("--together", action="store_true", help="print only the row of all presets in one plan")
    parser.add_argument("--check", action="store_true", help="end with an error at the first plan that differs")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{given.model}, {DEVICE}, {given.tokens} tokens; {machine()}; {versions()}")
    rows = [] if given.together else [[preset] for preset in given.presets]
    rows += [given.presets] if given.together or len(given.presets) > 1 else []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row in rows:
            name = row[0] if len(row) == 1 else f"all {len(row)}"
            seconds, few = pool.apply(planned, (given.model, given.tokens, row, False))
            line = f"{name}: {seconds} from few blocks"
            if not given.few:
                seconds, whole = pool.apply(planned, (given.model, given.tokens, row, True))
                line += f", {seconds} from all"
                if given.check and few != whole:
                    raise SystemExit(f"{line}\nthe plans differ:\n{few}\n{whole}")
            print(line, flush=True)


if __name__ == "__main__":
    main()
