"""Passes recorded as lists of kernel calls, against the passes themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layers.kernels import cpu
from layers.kernels.cpu.tape import Tape, Workspace

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
WIDTH = 64


class Pass:
    """Rows of a table, normed, added up over some layers, gated. Its indices may be overwritten."""

    def __init__(self, rows: int, layers: int = 3) -> None:
        random = torch.Generator().manual_seed(0)
        self.indices = torch.randint(50, (rows,), generator=random)
        self._table = torch.randn(50, WIDTH, generator=random)
        self._weights = torch.randn(layers, WIDTH, generator=random)

    def __call__(self) -> torch.Tensor:
        residual = self._table.index_select(0, self.indices)
        x = cpu.rms_norm(residual, self._weights[0], 1e-5)
        for weight in self._weights:
            x, residual = cpu.fused_add_rms_norm(x.unflatten(1, (2, -1)).flatten(1), residual, weight, 1e-5)
        return cpu.silu_and_mul(torch.cat((x, residual), dim=1))[:, 1:]


def test_a_tape_gives_what_the_pass_gives_for_what_its_tensors_hold_then() -> None:
    work, tape = Pass(5), Tape(Workspace())
    expected = work()
    assert torch.equal(tape.record(work), expected)
    assert tape.obstacle is None
    assert torch.equal(tape.run(), expected)
    for seed in range(3):
        work.indices.copy_(torch.randint(50, (5,), generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(tape.run(), work())


def test_tapes_of_one_workspace_by_turns() -> None:
    workspace = Workspace()
    works = [Pass(rows) for rows in (7, 1, 30)]
    tapes = [Tape(workspace) for _ in works]
    for work, tape in zip(works, tapes, strict=True):
        assert torch.equal(tape.record(work), work())
    for _ in range(2):
        for work, tape in zip(works, tapes, strict=True):
            assert torch.equal(tape.run(), work())


def test_memory_is_used_again_within_a_pass_and_by_the_next() -> None:
    workspace = Workspace()
    Tape(workspace).record(Pass(30, layers=40))
    taken = workspace.num_bytes
    assert taken <= 4 * 2 * (30 * WIDTH * 4)  # a few results live at a time; blocks are powers of two
    for rows in (30, 29, 2):
        Tape(workspace).record(Pass(rows, layers=40))
    assert workspace.num_bytes == taken


def test_memory_is_kept_for_a_view() -> None:
    workspace = Workspace()
    view = workspace.empty((4, 8), torch.float32)[1:, 2:].fill_(3.0)
    other = workspace.empty((4, 8), torch.float32).fill_(5.0)
    assert view.eq(3.0).all()
    address = view.untyped_storage().data_ptr()
    del view
    again = workspace.empty((8, 4), torch.float32)
    assert again.untyped_storage().data_ptr() == address
    assert other.eq(5.0).all()


def test_operations_that_write_in_place_are_repeated() -> None:
    x = torch.zeros(3)
    tape = Tape(Workspace())
    tape.record(lambda: x.add_(1.0))
    assert tape.obstacle is None
    assert tape.run().tolist() == [2.0, 2.0, 2.0]
    assert x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("work", "obstacle"),
    [
        (lambda x: x + x.sum().item(), "aten::item"),
        (lambda x: x + 1 if x[0] > 0 else x, "aten::is_nonzero"),
        (lambda x: x + len(x.tolist()), "aten::resolve_neg"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "aten::lift_fresh"),
        (lambda x: x + torch.rand(3), "aten::rand"),
        (lambda x: x.sort().values, "aten::sort"),
        (lambda x: sum([x] * 6), "more than 4 operations are torch's, like aten::add"),
    ],
    ids=["a number", "a choice", "a list", "a shape", "numbers of Python's", "chance", "two results", "too many"],
)
@torch.inference_mode()
def test_what_cannot_be_recorded_is_computed_all_the_same(
    work: Callable[[torch.Tensor], torch.Tensor], obstacle: str
) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    torch.manual_seed(0)
    expected = work(x)
    torch.manual_seed(0)
    tape = Tape(Workspace())
    assert torch.equal(tape.record(lambda: work(x)), expected)
    assert tape.obstacle is not None
    assert obstacle in tape.obstacle


def test_a_failed_pass_leaves_nothing_recording() -> None:
    tape = Tape(Workspace())
    with pytest.raises(ZeroDivisionError):
        tape.record(lambda: torch.zeros(1) / (1 // 0))
    before = Pass(4)()
    assert torch.equal(Pass(4)(), before)
    assert tape.record(Pass(4)).shape == before.shape
