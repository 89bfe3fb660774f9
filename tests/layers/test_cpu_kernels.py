"""The native CPU kernels against their torch counterparts, their build, and the layers without them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from layers import activation, norm, rotary
from layers.embedding import LMHead, VocabEmbedding
from layers.kernels import cpu
from layers.kernels.cpu import build
from layers.linear import GateUpLinear, Linear, RowLinear, pack_weights
from layers.parallel import ParallelGroup

DTYPES = [torch.float32, torch.bfloat16]
# A result in bfloat16 may fall on the other side of a rounding.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}

needs_kernels = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
LEVELS = [cpu.GEMM_AVX512, cpu.GEMM_AMX]


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)


@pytest.fixture(params=LEVELS, ids=["avx512", "amx"])
def gemm_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """The matrix kernel at one instruction level; skipped where the machine lacks it."""
    library = cpu.library()
    if library is None or library.lockstep_gemm_init(request.param) != request.param:
        pytest.skip("this machine lacks the instructions")
    yield
    library.lockstep_gemm_init(cpu.GEMM_AMX)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
class TestElementwise:
    @pytest.mark.parametrize("rows", [0, 1, 3, 65])
    @pytest.mark.parametrize("width", [1, 15, 33, 576])
    def test_rms_norm(self, rows: int, width: int, dtype: torch.dtype, random: torch.Generator) -> None:
        x = torch.randn(rows, width, generator=random).to(dtype)
        weight = torch.randn(width, generator=random).to(dtype)
        assert_close(cpu.rms_norm(x, weight, 1e-5), F.rms_norm(x, weight.shape, weight, 1e-5))

    def test_rms_norm_takes_strided_rows_and_more_dimensions(self, dtype: torch.dtype, random: torch.Generator) -> None:
        x = torch.randn(7, 100, generator=random).to(dtype)
        weight = torch.randn(40, generator=random).to(dtype)
        views = [x[:, 30:70], x[:, :80].view(7, 2, 40), x[:40, :7].T.contiguous().T[:, :7], x[::2, 60:]]
        # Heads of a merged projection, one head, heads side by side in another order, none, and four dimensions.
        views += [x.view(7, 5, 20)[:, 1:4], x.view(7, 5, 20)[::2, 4:], x.view(7, 5, 20).transpose(0, 1)]
        views += [x.view(7, 5, 20)[:, :0], x.view(7, 1, 5, 20)[:, :, 2:]]
        for view in views:
            w = weight[: view.shape[-1]]
            assert_close(cpu.rms_norm(view, w, 1e-6), F.rms_norm(view, w.shape, w, 1e-6))

    def test_rms_norm_of_large_values_stays_finite(self, dtype: torch.dtype) -> None:
        x = torch.full((2, 64), 1e15).to(dtype)
        weight = torch.ones(64).to(dtype)
        assert_close(cpu.rms_norm(x, weight, 1e-5), torch.ones(2, 64).to(dtype))

    @pytest.mark.parametrize("rows", [0, 1, 200])
    def test_fused_add_rms_norm(self, rows: int, dtype: torch.dtype, random: torch.Generator) -> None:
        x, residual = (torch.randn(rows, 130, generator=random).to(dtype) for _ in range(2))
        weight = torch.randn(130, generator=random).to(dtype)
        total = x + residual
        normed, new_residual = cpu.fused_add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(new_residual, total)
        assert_close(normed, F.rms_norm(total, weight.shape, weight, 1e-5))

    @pytest.mark.parametrize("shape", [(0, 64), (1, 2), (5, 66), (40, 3072), (2, 3, 64)])
    def test_silu_and_mul(self, shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> None:
        x = (torch.randn(*shape, generator=random) * 5).to(dtype)
        gate, up = x.chunk(2, dim=-1)
        assert_close(cpu.silu_and_mul(x), F.silu(gate) * up)

    def test_silu_of_extreme_gates(self, dtype: torch.dtype) -> None:
        gate = torch.tensor([[-1e30, -200.0, -88.5, -60.0, -0.0, 0.0, 60.0, 200.0, 1e30, float("inf")]]).to(dtype)
        actual = cpu.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
        assert_close(actual, F.silu(gate))
        assert cpu.silu_and_mul(torch.tensor([[float("nan"), 1.0]]).to(dtype)).isnan().all()

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(("rows", "heads", "kv_heads", "width"), [(0, 2, 1, 8), (1, 9, 3, 64), (70, 5, 1, 6)])
    def test_rotary_of_a_merged_projection(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        width: int,
        interleaved: bool,
        dtype: torch.dtype,
        random: torch.Generator,
    ) -> None:
        packed = torch.randn(rows, (heads + 2 * kv_heads) * width, generator=random).to(dtype)
        q = packed[:, : heads * width].view(rows, heads, width)
        k = packed[:, heads * width : (heads + kv_heads) * width].view(rows, kv_heads, width)
        before = packed.clone()
        angles = torch.randn(rows, width // 2, generator=random) * 100
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        rotated = cpu.apply_rotary(q, k, cos_sin, interleaved)
        assert torch.equal(packed, before)
        for actual, x in zip(rotated, (q, k), strict=True):
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
            parts = (a * cos - b * sin, b * cos + a * sin)
            expected = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
            assert_close(actual, expected.to(dtype))

    def test_rotary_of_part_of_a_head(self, dtype: torch.dtype, random: torch.Generator) -> None:
        q = torch.randn(3, 4, 24, generator=random).to(dtype)[..., 16:]
        k = torch.randn(3, 40, generator=random).to(dtype)[:, None, 32:]
        cos_sin = torch.cat((torch.zeros(3, 4), torch.ones(3, 4)), dim=-1)  # a quarter turn
        for actual, x in zip(cpu.apply_rotary(q, k, cos_sin), (q, k), strict=True):
            assert torch.equal(actual, torch.cat((-x[..., 4:], x[..., :4]), dim=-1))


@needs_kernels
@pytest.mark.usefixtures("gemm_level")
class TestPackedWeight:
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (33, 64), (96, 96), (577, 160)])
    def test_linear(self, outputs: int, inputs: int, random: torch.Generator) -> None:
        weight = torch.randn(outputs, inputs, generator=random).bfloat16()
        bias = torch.randn(outputs, generator=random).bfloat16()
        packed = cpu.PackedWeight(weight)
        for rows in (0, 1, 2, 7, 9, 16, 17, 31, 33, 100, 300):
            x = torch.randn(rows, inputs + 8, generator=random).bfloat16()[:, :inputs]
            expected = x.float() @ weight.float().T
            exact = packed.linear(x, dtype=torch.float32)
            torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(packed.linear(x), exact.bfloat16())
            torch.testing.assert_close(
                packed.linear(x, bias, torch.float32), expected + bias.float(), rtol=1e-4, atol=1e-4
            )

    def test_a_row_does_not_depend_on_the_batch(self, random: torch.Generator) -> None:
        packed = cpu.PackedWeight(torch.randn(100, 576, generator=random).bfloat16())
        x = torch.randn(300, 576, generator=random).bfloat16()
        together = packed.linear(x, dtype=torch.float32)
        for first, last in ((0, 1), (5, 13), (17, 34), (40, 300), (299, 300)):
            assert torch.equal(packed.linear(x[first:last], dtype=torch.float32), together[first:last])

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(("width", "inputs"), [(32, 32), (96, 160), (48, 64)])
    def test_silu_and_mul_of_the_product(self, width: int, inputs: int, bias: bool, random: torch.Generator) -> None:
        packed = cpu.PackedWeight(torch.randn(2 * width, inputs, generator=random).bfloat16())
        offsets = torch.randn(2 * width, generator=random).bfloat16() if bias else None
        for rows in (0, 1, 9, 17, 32, 33, 300):
            x = torch.randn(rows, inputs + 8, generator=random).bfloat16()[:, :inputs]
            expected = cpu.silu_and_mul(packed.linear(x, offsets))
            assert torch.equal(packed.linear_silu_and_mul(x, offsets), expected)

    def test_nan_stays_in_its_row(self, random: torch.Generator) -> None:
        packed = cpu.PackedWeight(torch.randn(40, 64, generator=random).bfloat16())
        x = torch.randn(20, 64, generator=random).bfloat16()
        x[3, 5] = float("nan")
        assert packed.linear(x).isnan().any(dim=1).nonzero().flatten().tolist() == [3]


@needs_kernels
class TestArgmax:
    @pytest.mark.parametrize("width", [1, 5, 15, 16, 17, 31, 1000, 49152])
    def test_against_torch(self, width: int, random: torch.Generator) -> None:
        x = torch.randn(40, width + 3, generator=random)[:, :width]
        index, finite = cpu.argmax(x)
        assert torch.equal(index, x.argmax(-1))
        assert finite.dtype == torch.bool
        assert finite.all()

    def test_first_of_equals(self, random: torch.Generator) -> None:
        x = torch.randint(0, 3, (50, 70), generator=random).float()
        expected = [row.index(max(row)) for row in x.tolist()]
        assert cpu.argmax(x)[0].tolist() == expected

    def test_nan_counts_as_largest(self) -> None:
        x = torch.full((6, 40), -float("inf"))
        x[1, 7] = float("inf")
        x[2, 3], x[2, 35], x[2, 36] = float("inf"), float("nan"), float("nan")
        x[3, 39] = float("nan")
        x[4, 20] = -1e30
        x[5, 18], x[5, 1] = float("nan"), float("nan")
        index, finite = cpu.argmax(x)
        assert index.tolist() == [0, 7, 35, 39, 20, 1]
        assert finite.tolist() == [False, False, False, False, True, False]

    def test_no_rows(self) -> None:
        index, finite = cpu.argmax(torch.empty(0, 7))
        assert index.shape == finite.shape == (0,)


def _filled(module: torch.nn.Module, random: torch.Generator) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random).bfloat16()
    return module


class TestPackedLayers:
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear_layers_give_the_same_packed(self, bias: bool, random: torch.Generator) -> None:
        x = torch.randn(5, 64, generator=random).bfloat16()
        for layer in (Linear(64, 48, bias), RowLinear(64, 48, ParallelGroup(), bias)):
            _filled(layer, random)
            expected = layer(x)
            pack_weights(layer)
            assert_close(layer(x), expected)

    @pytest.mark.parametrize("bias", [False, True])
    def test_gated_projection_gives_the_same_packed(self, bias: bool, random: torch.Generator) -> None:
        x = torch.randn(5, 64, generator=random).bfloat16()
        layer = _filled(GateUpLinear(64, 96, ("gate", "up"), ParallelGroup(), bias), random)
        gate, up = F.linear(x, layer.weight, layer.bias).chunk(2, dim=-1)
        assert_close(layer.silu_and_mul(x), F.silu(gate) * up)
        pack_weights(layer)
        assert_close(layer.silu_and_mul(x), F.silu(gate) * up)

    def test_packed_weight_is_held_once(self) -> None:
        layer = _filled(Linear(64, 48), torch.Generator().manual_seed(0))
        accepted = cpu.PackedWeight.accepts(layer.weight)
        pack_weights(layer)
        assert layer.weight.numel() == (0 if accepted else 64 * 48)

    def test_float32_and_narrow_weights_stay(self, random: torch.Generator) -> None:
        for layer in (Linear(64, 8).float(), _filled(Linear(40, 8), random)):
            size = layer.weight.numel()
            pack_weights(layer)
            assert layer.weight.numel() == size

    @pytest.mark.parametrize("tied", [False, True])
    def test_lm_head(self, tied: bool, random: torch.Generator) -> None:
        embedding = _filled(VocabEmbedding(70, 32, ParallelGroup()), random)
        head = LMHead(70, 32, ParallelGroup(), embedding if tied else None)
        if not tied:
            _filled(head, random)
        weight = head.weight.data.clone()
        pack_weights(torch.nn.ModuleList([embedding, head]))
        hidden = torch.randn(3, 32, generator=random).bfloat16()
        logits = head(hidden)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, hidden.float() @ weight.float().T, rtol=1e-2, atol=0.1)
        if tied:
            assert torch.equal(embedding(torch.tensor([69, 0])), weight[[69, 0]])


class TestWithoutKernels:
    @pytest.mark.usefixtures("without_kernels")
    def test_layers_take_the_torch_path(self, random: torch.Generator) -> None:
        x, residual = torch.randn(3, 8, generator=random), torch.randn(3, 8, generator=random)
        weight = torch.randn(8, generator=random)
        assert_close(norm.rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
        normed, total = norm.fused_add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert_close(total, x + residual)
        assert_close(normed, F.rms_norm(x + residual, (8,), weight, 1e-5))
        assert_close(activation.silu_and_mul(x), F.silu(x[:, :4]) * x[:, 4:])
        q = torch.randn(3, 2, 4, generator=random)
        turned, _ = rotary.apply_rotary(q, q, torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(3, 4))
        assert torch.equal(turned, torch.cat((-q[..., 2:], q[..., :2]), dim=-1))
        assert not cpu.PackedWeight.accepts(torch.zeros(32, 32, dtype=torch.bfloat16))

    def test_no_compiler_is_one_log_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(cpu, "load", lambda: build.load(tmp_path, search_path=str(tmp_path)))
        assert cpu.library.__wrapped__() is None
        assert len(caplog.records) == 1
        assert "torch is used instead (slower): no C compiler (gcc or cc) on the PATH" in caplog.text


class TestBuild:
    def test_a_failing_compiler_names_its_error(self, tmp_path: Path) -> None:
        compiler = tmp_path / "gcc"
        compiler.write_text("#!/bin/sh\necho 'x.c:1: error: no room' >&2\nexit 1\n")
        compiler.chmod(0o755)
        with pytest.raises(build.BuildError, match=r"gcc failed: x\.c:1: error: no room"):
            build.load(tmp_path / "cache", search_path=str(tmp_path))
        assert list((tmp_path / "cache").iterdir()) == []

    def test_an_unusable_library_is_a_build_error(self, tmp_path: Path) -> None:
        compiler = tmp_path / "gcc"
        compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done\necho nonsense > "$2"\n')
        compiler.chmod(0o755)
        with pytest.raises(build.BuildError):
            build.load(tmp_path / "cache", search_path=str(tmp_path))

    def test_a_cache_folder_that_cannot_be_made_is_a_build_error(self, tmp_path: Path) -> None:
        (tmp_path / "gcc").write_text("#!/bin/sh\n")
        (tmp_path / "gcc").chmod(0o755)
        (tmp_path / "file").touch()
        with pytest.raises(build.BuildError, match="file"):
            build.load(tmp_path / "file", search_path=str(tmp_path))

    @needs_kernels
    def test_two_at_once_leave_one_library(self, tmp_path: Path, quick_compiler: Path) -> None:
        loaded: list[ctypes.CDLL] = []

        def load() -> None:
            loaded.append(build.load(tmp_path, search_path=str(quick_compiler)))

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert len(loaded) == 2
        files = list(tmp_path.iterdir())
        assert [file.suffix for file in files] == [".so"]
        stamp = files[0].stat().st_mtime_ns
        load()
        assert files[0].stat().st_mtime_ns == stamp

    @needs_kernels
    def test_the_process_has_one_openmp_runtime(self) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
        assert len([name for name in names if Path(name).name.startswith(("libgomp", "libiomp", "libomp"))]) == 1
