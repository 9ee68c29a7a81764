"""What is answered where there is no data has the shapes, types and bytes of a run in which the assumption holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_solo.planner.data_dependent_ops import DATA_DEPENDENT
from lightning_solo.planner.fake_modules import fake_mode
from lightning_solo.planner.tracer import Tracer

TRUE, FALSE = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
WHOLE = torch.tensor([2, 0, 1])
NUMBERS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
OFFSETS = torch.tensor([2, 4, 6], dtype=torch.int32)
NUMBER, MASK = "a number read from a tensor", "a mask or nonzero takes every element"


def assigned(x: Tensor, mask: Tensor) -> Tensor:
    copied = x.clone()
    copied[mask] = 0.0
    return copied


def put(x: Tensor, mask: Tensor) -> Tensor:
    return x.clone().index_put_((mask,), torch.zeros(2))


def ctc(scores: Tensor, targets: Tensor) -> Tensor:
    return F.ctc_loss(scores.log_softmax(2), targets, (7, 7), (3, 2), reduction="sum")


def ctc_of_tensors(scores: Tensor, targets: Tensor, moments: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(scores.log_softmax(2), targets, moments, lengths)


SCORES = torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, 3], [2, 1, 4]])
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "item": (lambda x: x.item(), (torch.tensor(1.0),), NUMBER),
    "item of whole numbers": (lambda x: x.item(), (torch.tensor(1),), NUMBER),
    "item of a truth": (lambda x: bool(x.any()), (FALSE,), NUMBER),
    "nonzero": (torch.nonzero, (NUMBERS,), MASK),
    "masked select": (torch.masked_select, (NUMBERS, NUMBERS > 0), MASK),
    "masked select of more": (torch.masked_select, (NUMBERS[:, :1], NUMBERS > 0), MASK),
    "index by a mask": (lambda x, mask: x[mask], (NUMBERS, TRUE), MASK),
    "index by a mask of all": (lambda x, mask: x[mask], (NUMBERS, NUMBERS > 0), MASK),
    "index by two": (lambda x, mask, y: x[mask, y], (NUMBERS, TRUE, torch.tensor([0, 1, 1])), MASK),
    "index by numbers": (lambda x, rows: x[rows], (NUMBERS, WHOLE), ""),
    "assign at a mask": (assigned, (NUMBERS, TRUE), MASK),
    "put at a mask": (put, (NUMBERS, TRUE), MASK),
    "bincount": (lambda x: torch.bincount(x, minlength=5), (WHOLE,), ""),
    "bincount as many": (torch.bincount, (WHOLE,), "bincount has as many bins"),
    "bincount of weights": (lambda x, w: torch.bincount(x, w.detach()), (WHOLE, NUMBERS[:, 0]), "bincount has"),
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), (NUMBERS,), "unique finds"),
    "unique alone": (torch.unique, (WHOLE,), "unique finds"),
    "unique rows": (lambda x: torch.unique(x, dim=0, return_counts=True), (NUMBERS,), "unique finds"),
    "unique in turn": (lambda x: torch.unique_consecutive(x, return_counts=True), (WHOLE,), "unique finds"),
    "equal": (torch.equal, (NUMBERS, NUMBERS.clone()), "two tensors that are compared"),
    "repeat": (lambda x: torch.repeat_interleave(x), (torch.tensor([1, 1, 1]),), "repeat_interleave repeats"),
    "repeat to a size": (
        lambda x, n: torch.repeat_interleave(x, n, dim=0, output_size=6),
        (NUMBERS, torch.tensor([1, 2, 3])),
        "",
    ),
    "grouped product": (
        lambda x, w, offs: torch._grouped_mm(x, w, offs=offs),
        (torch.ones(6, 16), torch.ones(3, 16, 8), OFFSETS),
        "",
    ),
    "grouped product of gradients": (
        lambda x, w, offs: torch._grouped_mm(x.t(), w, offs=offs),
        (torch.ones(6, 16), torch.ones(6, 8), OFFSETS),
        "",
    ),
    "ctc loss": (ctc, (SCORES, TARGETS), ""),
    "ctc loss of lengths": (
        ctc_of_tensors,
        (SCORES, TARGETS, torch.tensor([7, 7]), torch.tensor([3, 3])),
        "targets of a CTC loss",
    ),
}


def described(result: Any) -> Any:
    return tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, result)


def run(case: str, *, fake: bool) -> tuple[Any, Tracer]:
    """Return the result of a case with its backward, and the tracer that saw them."""
    function, arguments, _ = CASES[case]
    tracer = Tracer(nn.Identity(), fake=fake, cuda=False)
    with fake_mode() if fake else torch.enable_grad():
        given = [torch.empty(t.shape, dtype=t.dtype) if fake else t.clone() for t in arguments]
        for tensor in given:
            tensor.requires_grad_(tensor.is_floating_point())
        with tracer:
            result = function(*given)
            if isinstance(result, Tensor) and result.requires_grad:
                (result * result).sum().backward()
    return result, tracer


@pytest.mark.parametrize("case", CASES)
def test_result_has_the_shapes_types_and_bytes_of_a_real_one(case: str) -> None:
    (fake, planned), (real, ran) = run(case, fake=True), run(case, fake=False)
    assert (described(fake), planned.peak_bytes) == (described(real), ran.peak_bytes)
    assert not ran.assumptions
    said = " ".join(planned.assumptions)
    assert said.startswith(CASES[case][2])
    assert bool(said) == bool(CASES[case][2])


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[Any] = set()
    for key, answer in list(DATA_DEPENDENT.items()):
        monkeypatch.setitem(DATA_DEPENDENT, key, partial(met, tried, key, answer))
    for case in CASES:
        run(case, fake=True)
    assert tried == set(DATA_DEPENDENT)


def met(tried: set[Any], key: Any, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tried.add(key)
    return answer(*args, **kwargs)
