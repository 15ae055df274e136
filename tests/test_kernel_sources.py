"""Sources of the CUDA kernels: what their wrappers promise them, and the cache of compiled code; no GPU is needed."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops import attention_cuda, gated_norm_cuda, lamb_cuda, nvrtc, residual_cuda

# Sizes and offsets: a host compiler lays structures out as NVRTC does.

_TYPES = """
#include <cstddef>
struct int2 { int x, y; }; struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; }; struct uint4 { unsigned x, y, z, w; }; struct float2 { float x, y; };
"""
_DEFINED = {
    attention_cuda: {"HEAD_DIM": 64, "DROPOUT": 1, "FORWARD_STAGES": 2, "BACKWARD_STAGES": 2},
    gated_norm_cuda: {"WIDTH": 768, "WARPS": 3, "ACTIVATION": 0, "NORM": 1},
    residual_cuda: {"WIDTH": 768, "SUBLAYERS": 24, "GROUP": 3, "THREADS": 64},
    lamb_cuda: {},
}


def plain_part(module) -> str:
    """The kernels' source up to its Params, which is plain C++."""
    text = module._SOURCE.read_text(encoding="utf-8")
    return text[: text.index("\n};", text.index("struct Params {")) + len("\n};")]


def complaints(source: str, defined: dict[str, int], facts: list[str]) -> str:
    """What a C++ compiler says against facts about a source."""
    asserted = [f'static_assert({fact}, "{fact}");' for fact in facts]
    flags = [f"-D{name}={value}" for name, value in defined.items()]
    command = ["g++", "-std=c++17", "-fsyntax-only", *flags, "-x", "c++", "-"]
    program = "\n".join([_TYPES, source, *asserted])
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False).stderr


def params_mismatch(source: str, defined: dict[str, int], params: type[ctypes.Structure]) -> str:
    """What speaks against a Params laid out as `params`: its size, offsets, a field more in the padding at the end."""
    names = [field[0] for field in params._fields_]
    more = ", ".join(["{}"] * (len(names) + 1))  # initialisers for one field more than there are do not compile
    source += f"""
    template <class T> constexpr auto has_more(int) -> decltype(T{{{more}}}, true) {{ return true; }}
    template <class T> constexpr bool has_more(...) {{ return false; }}
    """
    facts = [f"offsetof(Params, {name}) == {getattr(params, name).offset}" for name in names]
    return complaints(source, defined, [f"sizeof(Params) == {ctypes.sizeof(params)}", "!has_more<Params>(0)", *facts])


@pytest.mark.parametrize("module", _DEFINED, ids=lambda module: module.__name__)
def test_params_structures_match_the_sources(module):
    assert not params_mismatch(plain_part(module), _DEFINED[module], module._Params)


def test_params_check_finds_a_field_that_one_side_lacks():
    """Also one that hides in the padding at the end."""
    source, fields = plain_part(lamb_cuda), lamb_cuda._Params._fields_
    more, fewer = (
        type("Params", (ctypes.Structure,), {"_fields_": changed})
        for changed in ([*fields, ("added", ctypes.c_int32)], fields[1:])
    )
    assert ctypes.sizeof(more) == ctypes.sizeof(lamb_cuda._Params)
    assert "added" in params_mismatch(source, {}, more)
    assert "sizeof" in params_mismatch(source, {}, fewer)
    assert "has_more" in params_mismatch(source.removesuffix("};") + "  int added;\n};", {}, lamb_cuda._Params)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_shared_memory_size_matches_the_source(head_dim: int, stages: int):
    defined = {"HEAD_DIM": head_dim, "DROPOUT": 1, "FORWARD_STAGES": stages, "BACKWARD_STAGES": stages}
    facts = [
        f"Shared<{str(backward).lower()}>::bytes == {attention_cuda._shared_bytes(head_dim, backward, stages)}"
        for backward in (False, True)
    ]
    facts += [f"TILE == {attention_cuda.TILE} && THREADS == {attention_cuda._THREADS}"]
    # What the backward pass stages where the columns were, after its last tile.
    facts += ["64 * 128 <= Shared<true>::own_table - Shared<true>::columns"]
    assert not complaints(plain_part(attention_cuda), defined, facts)


def test_constants_match_the_sources():
    table = f"sizeof(Tensor) == {5 * 8} && THREADS == {lamb_cuda._THREADS} && CHUNK == {lamb_cuda._CHUNK}"
    assert not complaints(plain_part(lamb_cuda), {}, [table])
    states = f"MAX_STATES == {residual_cuda._MAX_STATES} && MAX_GROUP == {residual_cuda._MAX_GROUP}"
    assert not complaints(plain_part(residual_cuda), _DEFINED[residual_cuda], [states])


# The cache of compiled code


class Compiler:
    """Stands in for NVRTC, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def nvrtcVersion(self, *_: object) -> int:
        return 0

    def compile(self, *_: object) -> bytes:
        self.calls += 1
        return b"machine code " * 100


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    compiler = Compiler()
    monkeypatch.setenv("HYBRID_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)
    monkeypatch.setattr(nvrtc, "_compile", compiler.compile)
    return compiler


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_kernel_cache_replaces_a_damaged_file(compiler: Compiler, tmp_path: Path, damage: str):
    code = nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", [])
    assert nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", []) == code
    assert compiler.calls == 1, "the second time it comes from the cache"
    (file,) = cached_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[:-7], "changed": whole[:-1] + b"?"}[damage])
    assert nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", []) == code
    assert nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", []) == code
    assert compiler.calls == 2, "made anew once, and kept"
    assert file.read_bytes() == whole


def test_kernel_cache_keeps_no_partial_file_on_a_full_disk(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", []) == compiler.compile()
    assert nvrtc.compiled(lamb_cuda._SOURCE, "sm_90a", ["-DX"]) == compiler.compile()
    assert not cached_files(tmp_path)


# Tensors that the kernels could not read as they are


def misaligned(*shape: int) -> Tensor:
    """bfloat16, contiguous, from an odd address on."""
    size = torch.Size(shape).numel()
    return torch.arange(size + 1, dtype=torch.bfloat16)[1:].view(shape)


def test_unaligned_tensors_are_copied():
    x = misaligned(2, 3, 2, 4, 64)
    assert x.data_ptr() % 16
    copies = (attention_cuda._with_dense_heads(x), gated_norm_cuda._rows(x).view(x.shape), nvrtc.aligned(x))
    for copy in (*copies, gated_norm_cuda._dense(x).view(x.shape)):
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, x)
    whole = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    assert nvrtc.aligned(whole) is whole
    assert gated_norm_cuda._rows(whole).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),  # [5, 1, 256]: the stride of the one in the middle says nothing
        lambda x: x[:, :, None].expand(1, 5, 1, 256),
        lambda x: x[:, ::2],
        lambda x: x[0, 3],
        lambda x: x.expand(3, 5, 256),
        lambda x: x[..., 8:136],
        lambda x: x[..., 1:129],
        lambda x: x[:, :0],
    ],
)
def test_gated_norm_rows_are_where_the_kernel_reads_them(view):
    x = view(torch.arange(5 * 256.0).bfloat16().view(1, 5, 256))
    rows = gated_norm_cuda._rows(x)
    assert rows.data_ptr() % 16 == 0
    assert rows.stride(1) == 1
    read = torch.as_strided(rows, (x[..., 0].numel(), x.size(-1)), (rows.stride(0), 1))
    assert torch.equal(read, x.reshape(-1, x.size(-1)))


def test_gated_norm_refuses_two_shapes():
    value, gate = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(3, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gate .*\[3, 256\] for value \[4, 256\]"):
        gated_norm_cuda._launch("gated_norm_forward", False, 1e-5, value=value, gate=gate)
