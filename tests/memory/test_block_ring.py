"""A BlockRing loads blocks of host memory into a few buffers, ahead of their use, and never one that is in use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.errors import BudgetError, ConflictError
from lightning_solo.memory import host_slabs
from lightning_solo.memory.block_ring import BlockRing
from tests.messages import mentions

pytestmark = pytest.mark.any_device
SIZE = 64


def tensors_of(block: int) -> list[Tensor]:
    """Return a matrix, a transposed one in bf16, and integers, each with numbers of its own."""
    generator = torch.Generator().manual_seed(block)
    matrix = nn.Parameter(torch.randn(SIZE, SIZE, generator=generator), requires_grad=False)
    turned = torch.randn(5, 3, generator=generator).bfloat16().t()
    return [matrix, turned, torch.arange(7, dtype=torch.uint8) + block]


def ring_of(count: int, device: torch.device, window: int = 2) -> tuple[BlockRing, list[list[Tensor]]]:
    """Return a ring, and copies of its blocks' tensors."""
    blocks = [tensors_of(block) for block in range(count)]
    copies = [[tensor.detach().clone() for tensor in tensors] for tensors in blocks]
    return BlockRing(blocks, device, window), copies


def use(ring: BlockRing, copies: list[list[Tensor]], order: list[int]) -> list[int]:
    """Use blocks in an order, check their numbers, and return the copies that each use made."""
    counts = []
    for number in order:
        before = ring.copies
        with ring.using(number) as tensors:
            for tensor, copy in zip(tensors, copies[number], strict=True):
                assert tensor.device.type == ring.device.type
                assert torch.equal(tensor.cpu(), copy)
                assert tensor.stride() == copy.stride()
        counts.append(ring.copies - before)
    return counts


@pytest.mark.every_change
@pytest.mark.parametrize("window", [2, 3, 8])
def test_blocks_are_copied_ahead_and_stay_where_the_order_turns(device: torch.device, window: int) -> None:
    ring, copies = ring_of(6, device, window)
    order = [*range(6), *reversed(range(6))]
    first, second = use(ring, copies, order), use(ring, copies, order)
    kept = min(window, 6)
    assert first[0] == kept  # the block and those ahead
    assert sum(first) == 6 + 6 - kept
    assert sum(second) == 2 * (6 - kept)
    assert max(second) <= 1  # each is copied while another is used, none at its own use
    # matrix 4 x 64 x 64; 2 x 15 and 7 bytes, each rounded up to 128
    size = 4 * SIZE**2 + 2 * 128
    assert (ring.device_bytes, ring.host_bytes) == (kept * size, 6 * size)
    assert ring.copied_bytes == ring.copies * size


def test_an_order_is_learned(device: torch.device) -> None:
    ring, copies = ring_of(4, device)
    order = [3, 0, 1, 2]
    use(ring, copies, order)
    use(ring, copies, order)
    ahead = use(ring, copies, order)
    assert ahead == [1, 1, 1, 1]
    assert ring._slot(0).holds == 0 or ring._slot(3).holds == 3
    assert all(use(ring, copies, [2, 2, 2])[1:] == [0, 0] for _ in range(2))


def test_blocks_called_in_any_order_have_their_numbers(device: torch.device) -> None:
    ring, copies = ring_of(5, device)
    use(ring, copies, torch.randint(5, (60,), generator=torch.Generator().manual_seed(1)).tolist())


def test_a_block_in_use_keeps_its_buffer(device: torch.device) -> None:
    ring, copies = ring_of(4, device)
    with ring.using(1) as tensors:
        with ring.using(2):
            assert torch.equal(tensors[0].cpu(), copies[1][0])
        with pytest.raises(ConflictError, match=mentions("block 3", "block 1", "window=3")), ring.using(3):
            pass
        assert torch.equal(tensors[0].cpu(), copies[1][0])
    use(ring, copies, [3, 0, 1])


def test_a_host_without_room_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([10**6, 10**6, 100])
    monkeypatch.setattr(host_slabs, "host_room", lambda: next(rooms))
    blocks = [tensors_of(block) for block in range(4)]
    with pytest.raises(BudgetError, match=mentions("fewer bits")):
        BlockRing(blocks, device)
    assert all(torch.equal(tensor, plain) for tensor, plain in zip(blocks[0], tensors_of(0), strict=True))


def test_numbers_that_change_on_the_host_are_copied_again(device: torch.device) -> None:
    blocks = [tensors_of(block) for block in range(3)]
    ring = BlockRing(blocks, device)
    with ring.using(0):
        pass
    if device.type == "cuda":
        torch.cuda.synchronize()
    blocks[0][0].fill_(7)
    with ring.using(0) as tensors:
        assert bool((tensors[0] == 7).all())


def test_autograd_refuses_a_tensor_that_is_gone_and_takes_one_that_is_back(device: torch.device) -> None:
    ring, copies = ring_of(4, device)
    x = torch.ones(2, SIZE, device=device, requires_grad=True)
    with ring.using(0) as tensors:
        y = F.linear(x, tensors[0])
    ring.load(2)  # its buffer is that of 0
    with pytest.raises(RuntimeError, match=mentions("version 1", "expected version 0")):
        y.sum().backward(retain_graph=True)
    ring.load(0)
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.cpu(), copies[0][0].sum(0).expand(2, SIZE), atol=1e-5)


def test_tensors_stay_on_the_host_each_in_a_storage_of_its_own(device: torch.device) -> None:
    blocks = [tensors_of(block) for block in range(3)]
    ring = BlockRing(blocks, device)
    ring.close()
    assert ring.device_bytes == 0
    for number, tensors in enumerate(blocks):
        for tensor, plain in zip(tensors, tensors_of(number), strict=True):
            assert torch.equal(tensor, plain)
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() == (device.type == "cuda")
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    with pytest.raises(RuntimeError, match="freed"):
        ring.load(0)
