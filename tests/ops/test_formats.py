"""A table that is not te_ops' own, with a format of two buffers: everything follows from its rows."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import te_ops as te
import torch
from te_ops import _C
from te_ops._bundle import bind
from te_ops._ops import OPERATORS, load_table
from torch._subclasses.fake_tensor import FakeTensorMode

INCLUDE = Path(te.__file__).parent / "include"
NAMESPACE = "te_ops_test"


class Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("lib") / "two_buffers.so"
    cc = shlex.split(os.environ.get("CC", "cc"))
    source = Path(__file__).with_name("two_buffers.c")
    subprocess.run([*cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}",
                    str(source), "-o", str(target), "-lm"], check=True)  # fmt: skip
    return ctypes.CDLL(str(target))


def register(namespace: str, library: ctypes.CDLL, formats: str, ops: str) -> str:
    """The C entry point that te_ops' own table goes through; returns the error's text, or ""."""
    status = Status()
    function = ctypes.PyDLL(_C.__file__).te_register_table
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Status)]
    rows = [ctypes.addressof(ctypes.c_char.in_dll(library, name)) for name in (formats, ops)]
    assert function(namespace.encode(), *rows, ctypes.byref(status)) == status.code
    return status.message.decode()


@pytest.fixture(scope="module")
def ops(library: ctypes.CDLL) -> Any:
    assert register(NAMESPACE, library, "test_formats", "test_ops") == ""
    assert [op.name for op in load_table(NAMESPACE)] == [f"{NAMESPACE}::encode", f"{NAMESPACE}::decode"]
    return getattr(torch.ops, NAMESPACE)


def test_schema_flattens_to_buffers(ops: Any) -> None:
    assert OPERATORS[f"{NAMESPACE}::encode"].spec["schema"] == "encode(Tensor x) -> (Tensor, Tensor)"
    schema = OPERATORS[f"{NAMESPACE}::decode"].spec["schema"]
    assert schema == (
        "decode(Tensor q_codes, Tensor q_scale, Tensor? extra_codes, Tensor? extra_scale, "
        "int sign=1) -> Tensor"
    )


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (9,), (0, 4)])
def test_real_fake_and_opcheck(ops: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    codes, scale = ops.encode(x)
    assert (codes.shape, codes.dtype, scale.dtype) == (x.shape, torch.int8, torch.float32)
    assert scale.shape == (torch.Size(shape[:-1]).numel(),)
    y = ops.decode(codes, scale, None, None)
    assert torch.allclose(y, x, atol=float(x.abs().max() / 100) if x.numel() else 0)
    assert torch.equal(ops.decode(codes, scale, codes, scale), 2 * y)
    mode = FakeTensorMode()
    with mode:
        fake_codes, fake_scale = ops.encode(mode.from_tensor(x))
        assert (fake_codes.shape, fake_scale.shape) == (codes.shape, scale.shape)
        assert ops.decode(fake_codes, fake_scale, None, None, 1).shape == x.shape
    torch.library.opcheck(ops.encode.default, (x,))
    torch.library.opcheck(ops.decode.default, (codes, scale, codes, scale))


def test_compiles_with_symbolic_sizes(ops: Any) -> None:
    fn = torch.compile(
        lambda x: ops.decode(*ops.encode(x), None, None), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (4, 6, 9):
        x = torch.randn(rows, 5)
        assert torch.equal(fn(x), ops.decode(*ops.encode(x), None, None))


def test_checks_name_the_buffer(ops: Any) -> None:
    codes, scale = ops.encode(torch.randn(2, 3, 4))
    with pytest.raises(
        RuntimeError, match=r"decode: q_scale\[0\] = 5: must be 6, which is M, the leading dims of q_codes"
    ):
        ops.decode(codes, torch.ones(5), None, None)
    with pytest.raises(RuntimeError, match=r"q_scale has dtype float64: must be float32"):
        ops.decode(codes, scale.double(), None, None)
    with pytest.raises(RuntimeError, match=r"sign = -1: must not be negative"):
        ops.decode(codes, scale, None, None, -1)
    assert ops.decode(codes, scale, None, None).shape == (2, 3, 4)


def test_bundles_take_one_object_for_a_slot(ops: Any) -> None:
    @dataclass(slots=True, kw_only=True)
    class Encode:
        x: torch.Tensor

    @dataclass(slots=True, kw_only=True)
    class Decode:
        q: Any
        extra: Any
        sign: int = 1

    x = torch.randn(3, 8)
    quantized = bind(f"{NAMESPACE}::encode", Encode)(Encode(x=x))
    assert quantized._fields == ("codes", "scale")
    decode = bind(f"{NAMESPACE}::decode", Decode)
    y = decode(Decode(q=quantized, extra=None))
    assert torch.equal(y, ops.decode(*quantized, None, None))
    assert torch.equal(decode(Decode(q=quantized, extra=quantized)), 2 * y)


def test_malformed_row_registers_nothing(library: ctypes.CDLL, ops: Any) -> None:
    count = _C.op_count()
    error = register("te_ops_bad", library, "test_formats", "bad_ops")
    assert error == "row bad.x, column 11: expected ']'"
    assert _C.op_count() == count


def test_names_taken_twice_are_refused(
    library: ctypes.CDLL, ops: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    count = _C.op_count()
    assert "encode" in register(NAMESPACE, library, "test_formats", "test_ops")
    assert _C.op_count() == count
    assert ops.encode(torch.randn(2, 2))[0].shape == (2, 2)  # the first registration still works
