"""AdamW whose model states take 5 bytes per parameter instead of 12: split master weights, moments in 8 or 4 bits.

```
master_bits      moment_bits   weight + correction + exp_avg + exp_avg_sq + scales   bytes per parameter
32               32            2 + 2 + 4 + 4                                         12        fp32 AdamW, bit for bit
24 (default)     8 (default)   2 + 1 + 1 + 1 + 0.0625                                 5.0625
16-stochastic    8             2 + 0 + 1 + 1 + 0.0625                                 4.0625
16-stochastic    4             2 + 0 + 0.5 + 0.5 + 0.0625                             3.0625
```

Gradients come on top, 2 bytes in bf16, unless `GradientRelease` frees each as it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, GradientError, PresetError
from lightning_solo.machine import cxx_compiler, is_installed
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.adamw_update import (
    Hyperparameters,
    Update,
    in_memory_order,
    is_dense,
    step_parameter,
    update_blocks,
)
from lightning_solo.optim.names import name_in, names_of
from lightning_solo.optim.split_weights import CORRECTIONS, bits_of, join, join_into, split, split_into
from lightning_solo.units import format_bytes

STOCHASTIC = "16-stochastic"
MASTER_BITS = (32, 24, STOCHASTIC)
FUSED_FROM = 2**24
"""Elements in all from which compiling, which takes seconds, pays."""

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Rules of torch's AdamW and Adam that have no compact form."""
_OWN = ("master_bits", "moment_bits", "fused", "_index", "_sizes", "_numbers", "_given", "_splits", "_numel")


class CompactAdamW(Optimizer):
    """AdamW, or Adam, with compact model states; ``param_groups``, schedulers and checkpoints as with torch's own.

    bf16 parameters are rounded from a master weight: what rounding took off is kept apart, or, with
    ``master_bits="16-stochastic"``, rounding is such that the mean is right. fp32 parameters stay what they are with
    ``master_bits=32``; otherwise they become bf16 here, in place, which is what was asked for. To split fp32
    parameters into 2 + 2 bytes instead, call `split_parameters` first.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for any optimizer of torch.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        master_bits: 32, 24 or "16-stochastic".
        moment_bits: 32, 8 or 4, which needs torchao. Of parameters below 4,096 elements they stay in fp32: see
            `uncompressed`.
        decoupled_weight_decay: False for Adam, whose weight decay is a part of the gradient.
        corrections: of bf16 parameters that were split, as `split_parameters` returns them; where it is given, fp32
            parameters stay what they are.
        fused: compile the step; None: where it can be, from 16 million elements on.

    Raises:
        PresetError: a value that is none of those allowed; parameters that are not fp32 or bf16, or have gaps in
            memory; a correction of other bits.

    >>> layer = torch.nn.Linear(512, 512)
    >>> optimizer = CompactAdamW(layer.parameters(), lr=1e-3)
    >>> layer.weight.dtype, round(optimizer.bytes_per_parameter, 2)  # the bias, of 512, keeps its moments in fp32
    (torch.bfloat16, 5.07)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_bits: int | str = 24,
        moment_bits: int = 8,
        decoupled_weight_decay: bool = True,
        corrections: Mapping[Tensor, Tensor] | None = None,
        fused: bool | None = None,
    ) -> None:
        _check(lr, betas, eps, weight_decay, master_bits, moment_bits)
        self.master_bits, self.moment_bits, self.fused = master_bits, moment_bits, fused
        self._index: dict[Tensor, int] = {}  # number of each parameter
        self._sizes: list[int] = []  # of the groups when `_numbers` was made
        self._numbers: dict[Tensor, int] = {}  # of each parameter's group
        self._given = dict(corrections or {})  # of parameters that are yet to be added
        self._splits = corrections is None
        self._numel = 0
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)
        if moment_bits == 4:
            moments.codebooks(torch.device("cpu"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters are made bf16 where ``master_bits`` says so."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, p in zip(names_of(group, len(self._index)), group["params"], strict=True):
            if p.dtype not in (torch.float32, torch.bfloat16) or p.is_sparse:
                kind = "sparse" if p.is_sparse else str(p.dtype).removeprefix("torch.")
                raise PresetError(f"CompactAdamW: {name} is {kind}; parameters are float32 or bfloat16")
            if not is_dense(p):
                raise PresetError(f"CompactAdamW: {name} has gaps in memory, or overlaps itself; write {name}.clone()")
            self._index[p] = len(self._index)
            self._numel += p.numel()
            if p.dtype == torch.float32 and self.master_bits != 32 and self._splits:
                self._given |= split_parameters([p], self.master_bits)
            if p in self._given:
                self.state[p]["correction"] = self._checked(name, p, self._given.pop(p))

    def _checked(self, name: str, p: Tensor, correction: Tensor) -> Tensor:
        sizes = state_sizes(p, self.master_bits, self.moment_bits)
        if correction.numel() != p.numel() or correction.nbytes != sizes.get("correction"):
            raise PresetError(
                f"CompactAdamW: the correction of {name} is of {correction.numel()} numbers of {correction.itemsize}"
                f" bytes; write corrections=split_parameters(parameters, {self.master_bits!r})"
            )
        return correction

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out what it doesn't know
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in _OWN}}

    # --- stepping ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            GradientError: a gradient is sparse, infinite or NaN; no parameter has been touched.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.require_finite(pairs)
        for p, grad in pairs:
            self.step_one(p, grad)
        return loss

    @torch.no_grad()
    def step_one(self, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
        """Step one parameter with a gradient of its shape, of any floating type, times a factor."""
        if parameter.numel() == 0:
            return
        group = self._group_of(parameter)
        by = Hyperparameters(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )
        state = self._state_of(parameter)
        update = self._update() if parameter.numel() >= moments.LEAST else None  # each kind is compiled for itself
        # detached, not .data: a weight that somebody else's backward still needs is then known to have changed
        step_parameter(
            parameter.detach(), gradient, state, by, scale=scale, index=self._index[parameter], update=update
        )

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._sizes:  # groups come and go, as under BaseFinetuning
            self._sizes = sizes
            self._numbers = {p: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        return self.param_groups[self._numbers[parameter]]

    def require_finite(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Check gradients, at the price of one wait for the device.

        Raises:
            GradientError: one is sparse, infinite or NaN; names the first.
        """
        pairs = list(gradients)
        for p, grad in pairs:
            if grad.is_sparse:
                raise GradientError(
                    f"the gradient of {name_in(self, p)} is sparse; write nn.Embedding(..., sparse=False), or leave"
                    " this parameter to torch.optim.SparseAdam"
                )
        full = [g for _, g in pairs if g.numel()]
        greatest = torch._foreach_norm(full, float("inf")) if full else []
        if not greatest or not bool(torch.stack([g.float() for g in greatest]).isfinite().logical_not().any()):
            return
        first = next(p for p, g in pairs if not bool(g.isfinite().all()))
        raise GradientError(f"the gradient of {name_in(self, first)} is not finite; no weight has been touched")

    def _update(self) -> Update | None:
        wanted = self.fused
        if wanted is None:
            wanted = self._numel >= FUSED_FROM and can_compile(next(iter(self._index)).device)
        return _compiled() if wanted else None

    # --- states ---

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if "step" not in state:
            state.update(new_state(p, self.master_bits, self.moment_bits, state.get("correction")))
        return cast("dict[str, Tensor]", state)

    @property
    def bytes_per_parameter(self) -> float:
        """Weights and optimizer states over the number of parameters, without gradients."""
        total = sum(p.nbytes + sum(state_sizes(p, self.master_bits, self.moment_bits).values()) for p in self._index)
        return total / max(1, sum(p.numel() for p in self._index))

    @property
    def uncompressed(self) -> dict[str, int]:
        """Names of the parameters whose moments stay in fp32, for they are small, with the bytes of those."""
        if self.moment_bits == 32:
            return {}
        return {name_in(self, p): 8 * p.numel() for p in self._index if p.numel() < moments.LEAST}

    def summary(self) -> str:
        """Return what the states take, and what was left uncompressed, in a line."""
        left = self.uncompressed
        words = f"{self.bytes_per_parameter:.2f} bytes per parameter in weights and optimizer states"
        if not left:
            return words
        named = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
        return f"{words}; moments of {len(left)} small parameters in fp32, {format_bytes(sum(left.values()))}: {named}"

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weight, fp32, of its shape."""
        correction = self.state[parameter].get("correction") if parameter in self.state else None
        if correction is None:
            return parameter.detach().to(torch.float32)
        made = torch.empty_like(parameter, dtype=torch.float32)
        in_memory_order(made).copy_(join(in_memory_order(parameter.detach()), correction))
        return made

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, master: Tensor) -> None:
        """Set a bf16 parameter and its correction from an fp32 master weight; nothing where it isn't split."""
        state = self.state.get(parameter, {})
        if "correction" in state:
            flat = in_memory_order(master.to(parameter.device), parameter.detach())
            upper, lower = split(flat, bits_of(state["correction"]))
            in_memory_order(parameter.detach()).copy_(upper)
            state["correction"].copy_(lower)

    # --- checkpoints ---

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer, bit for bit, or of torch's AdamW and Adam, which are compressed.

        What the file has no state of starts anew. A correction that it lacks, since it has fp32 weights, stays.

        Raises:
            CheckpointError: other groups, names, sizes or bits, tensors that are missing, or a rule of AdamW's that
                this one hasn't; nothing has been touched.
        """
        _require_known(state_dict)
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        ours = list(chain.from_iterable(group["params"] for group in self.param_groups))
        _same_names(state_dict["param_groups"], self.param_groups)
        if len(saved) != len(ours):
            raise CheckpointError(f"states of {len(saved)} parameters; this optimizer has {len(ours)}")
        states = state_dict["state"]
        loaded = {p: self._loaded(p, states.get(key, {})) for key, p in zip(saved, ours, strict=True)}
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError as error:
            raise CheckpointError(f"states of other parameter groups: {error}") from error
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
        self.state.clear()
        self.state.update({p: state for p, state in loaded.items() if state})

    def _loaded(self, p: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        own = new_state(p, self.master_bits, self.moment_bits)
        kept = {}
        if "correction" in own and "correction" not in saved:  # the file has fp32 weights, which have been split
            kept = {"correction": own.pop("correction")} | _correction(self.state.get(p, {}))
        if not set(saved) - {"correction"}:  # before its first step
            own = _correction(own)
            kept = _correction(self.state.get(p, {})) if not own else {}
        if _alike(saved, own):
            return {**kept, **{name: value.copy_(saved[name]) for name, value in own.items()}}
        if _is_plain(saved, p):
            return {**kept, **_compressed(own, p, saved)}
        raise CheckpointError(
            f"the states of {name_in(self, p)}: {_described(saved)} in the file, {_described(own)} here; build the"
            " optimizer with the master_bits and moment_bits of the file"
        )

    @torch.no_grad()
    def adamw_state_dict(self) -> dict[str, Any]:
        """Return the states as torch's AdamW keeps them, in fp32; load them beside `master_weight`."""
        made = self.state_dict()
        every = list(chain.from_iterable(group["params"] for group in self.param_groups))
        stepped = {key: state for key, state in made["state"].items() if "step" in state}
        made["state"] = {key: _plain(every[key], state) for key, state in stepped.items()}
        return made


def split_parameters(parameters: Iterable[Tensor], master_bits: int | str) -> dict[Tensor, Tensor]:
    """Make fp32 parameters bf16 in place, one by one, and return the correction of each, for `CompactAdamW`.

    At no moment is there more than one parameter twice. With "16-stochastic" there is none to return.

    Args:
        parameters: those of another type are left as they are.
        master_bits: 32, 24 or "16-stochastic".
    """
    corrections = {}
    for p in parameters:
        if p.dtype != torch.float32:
            continue
        weight = torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False)
        if isinstance(master_bits, str):
            weight.copy_(p.detach())
        else:
            corrections[p] = split_into(in_memory_order(weight), in_memory_order(p.detach(), weight), master_bits)
        p.data = weight
    return corrections


def join_parameters(parameters: Iterable[Tensor], corrections: Mapping[Tensor, Tensor]) -> None:
    """Make bf16 parameters fp32 again, in place, with what `split_parameters` returned for them."""
    for p in parameters:
        master = p.detach().to(torch.float32)
        if p in corrections:
            join_into(in_memory_order(master), in_memory_order(p.detach()), corrections[p].to(p.device))
        p.data = master


def state_sizes(p: Tensor, master_bits: int | str, moment_bits: int) -> dict[str, int]:
    """Return the bytes of each tensor that is kept for a parameter; its count of steps, on the host, aside."""
    n = p.numel()
    sizes = {}
    if p.dtype == torch.bfloat16 and not isinstance(master_bits, str):
        sizes["correction"] = n * CORRECTIONS[master_bits].itemsize
    if moment_bits == 32 or n < moments.LEAST:
        return {**sizes, "exp_avg": 4 * n, "exp_avg_sq": 4 * n}
    codes, scales = -(-n * moment_bits // 8), 4 * moments.blocks(n)
    return {**sizes, "exp_avg": codes, "exp_avg_scale": scales, "exp_avg_sq": codes, "exp_avg_sq_scale": scales}


def new_state(
    p: Tensor, master_bits: int | str, moment_bits: int, correction: Tensor | None = None
) -> dict[str, Tensor]:
    """Return a parameter's state before its first step: flat tensors, in the order of its memory."""
    types = {"correction": torch.int16 if master_bits == 32 else torch.int8}
    if "exp_avg_scale" in (sizes := state_sizes(p, master_bits, moment_bits)):
        types |= {"exp_avg": torch.int8 if moment_bits == 8 else torch.uint8, "exp_avg_sq": torch.uint8}
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for name, size in sizes.items():
        kind = types.get(name, torch.float32)
        state[name] = torch.zeros(size // kind.itemsize, dtype=kind, device=p.device)
    if correction is not None:
        state["correction"] = correction
    return state


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Tell whether torch.compile makes kernels for a device here: by Triton on a GPU, by a C++ compiler on a CPU."""
    return is_installed("triton") if device.type == "cuda" else cxx_compiler() is not None


@functools.cache
def _compiled() -> Update:
    compiled = torch.compile(update_blocks, dynamic=True, fullgraph=True)

    def update(**arguments: Any) -> None:
        # one for each kind of weight, gradient and state that this process has; torch allows 8, then fails
        with torch._dynamo.config.patch(recompile_limit=64):
            compiled(**arguments)

    return update


# --- conversion from and to torch's AdamW ---


def _correction(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"correction": state["correction"]} if "correction" in state else {}


def _alike(saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> bool:
    """Tell whether two states have tensors of the same names, shapes and types."""
    return set(saved) == set(own) and all(
        isinstance(saved[name], Tensor) and (saved[name].shape, saved[name].dtype) == (value.shape, value.dtype)
        for name, value in own.items()
    )


def _is_plain(saved: Mapping[str, Any], p: Tensor) -> bool:
    """Tell whether a state is one of torch's AdamW or Adam."""
    return set(saved) == {"step", "exp_avg", "exp_avg_sq"} and all(
        saved[name].shape == p.shape and saved[name].is_floating_point() for name in ("exp_avg", "exp_avg_sq")
    )


def _compressed(state: dict[str, Tensor], p: Tensor, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state["step"].fill_(float(saved["step"]))
    for name, quantize, which in (("exp_avg", moments.quantize_first, 0), ("exp_avg_sq", moments.quantize_second, 1)):
        flat = in_memory_order(saved[name].to(p.device, torch.float32), p)
        if f"{name}_scale" not in state:
            state[name].copy_(flat)
            continue
        book = moments.codebooks(p.device)[which] if state["exp_avg"].dtype == torch.uint8 else None
        short = -flat.numel() % moments.BLOCK
        codes, scales = quantize(torch.nn.functional.pad(flat, (0, short)).view(-1, moments.BLOCK), book)
        state[name].copy_(codes.view(-1)[: state[name].numel()])
        state[f"{name}_scale"].copy_(scales)
    return state


def _plain(p: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {"step": state["step"].clone()}
    bits = moments.BITS[state["exp_avg"].dtype]
    for name, dequantize, which in (
        ("exp_avg", moments.dequantize_first, 0),
        ("exp_avg_sq", moments.dequantize_second, 1),
    ):
        flat = state[name]
        if bits != 32:
            width = moments.BLOCK * bits // 8
            rows = torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
            book = moments.codebooks(p.device)[which] if bits == 4 else None
            flat = dequantize(rows, state[f"{name}_scale"], book).view(-1)[: p.numel()]
        made[name] = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        in_memory_order(made[name]).copy_(flat)
    return made


# --- checks ---


def _check(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, master_bits: int | str, moment_bits: int
) -> None:
    given = {"lr": float(lr), "eps": eps, "weight_decay": weight_decay}
    for name, value in given.items():
        if not value >= 0:
            raise PresetError(f"CompactAdamW: {name}={value}: write a number of at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PresetError(f"CompactAdamW: betas={betas}: write two numbers from 0 up to, not including, 1")
    if master_bits not in MASTER_BITS:
        raise PresetError(f"CompactAdamW: master_bits={master_bits!r}: write 32, 24 or {STOCHASTIC!r}")
    if moment_bits not in moments.MOMENT_BITS:
        raise PresetError(f"CompactAdamW: moment_bits={moment_bits!r}: write 32, 8 or 4")


def _require_known(state_dict: Mapping[str, Any]) -> None:
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise CheckpointError(f"states of an optimizer without {name}: there are {', '.join(state_dict) or 'none'}")
    for number, group in enumerate(state_dict["param_groups"]):
        for name in ("params", "lr", "betas", "eps", "weight_decay"):
            if name not in group:
                raise CheckpointError(f"group {number} in the file has no {name}: it is not of AdamW or Adam")
        for name in UNSUPPORTED:
            if group.get(name):
                raise CheckpointError(f"group {number} in the file has {name}=True, which CompactAdamW has not")


def _same_names(saved: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> None:
    for theirs, own in zip(saved, ours, strict=False):
        named, here = theirs.get("param_names"), own.get("param_names")
        if named and here and list(named) != list(here):
            other = next(((a, b) for a, b in zip(named, here, strict=False) if a != b), ("more or fewer", "parameters"))
            raise CheckpointError(f"states of {other[0]} in the file where this optimizer has {other[1]}")


def _described(state: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else name
        for name, value in sorted(state.items())
    )
