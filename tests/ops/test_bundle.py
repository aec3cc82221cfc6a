"""Argument dataclasses and slots: a mismatch is an error when they are bound, naming both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from te_ops._bundle import bind, slot_fields
from te_ops._linear_plain import LinearBackward, LinearForward, LinearWgrad
from te_ops._ops import OPERATORS


def make(*names: str) -> Any:
    return dataclasses.make_dataclass("Args", [(n, Any) for n in names], slots=True, kw_only=True)


def test_fields_follow_the_table() -> None:
    for name, cls in (
        ("linear_fwd", LinearForward),
        ("linear_bwd", LinearBackward),
        ("linear_wgrad", LinearWgrad),
    ):
        wanted = [f for fields in slot_fields(OPERATORS[f"te_ops::{name}"].spec).values() for f in fields]
        assert sorted(f.name for f in dataclasses.fields(cls)) == sorted(wanted)


def test_slot_without_field() -> None:
    with pytest.raises(
        TypeError, match=r"te_ops::linear_fwd: slot 'b' needs a field 'b', which Args does not have"
    ):
        bind("te_ops::linear_fwd", make("x", "w"))


def test_field_without_slot() -> None:
    with pytest.raises(
        TypeError, match=r"Args.gamma: te_ops::linear_fwd has no such slot \(its fields are x, w, b\)"
    ):
        bind("te_ops::linear_fwd", make("x", "w", "b", "gamma"))


def test_flag_without_field() -> None:
    with pytest.raises(TypeError, match=r"slot 'grads' needs a field 'need_db'"):
        bind("te_ops::linear_bwd", make("dy", "x", "w", "need_dx", "need_dw"))


def test_unknown_operator() -> None:
    with pytest.raises(KeyError, match="te_ops::nothing"):
        bind("te_ops::nothing", make("x"))


def test_flags_are_packed_in_the_order_of_the_row() -> None:
    dy, x, w = torch.randn(3, 2), torch.randn(3, 4), torch.randn(2, 4)
    call = bind("te_ops::linear_bwd", LinearBackward)
    for dx, dw, db in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        got = call(
            LinearBackward(
                dy=dy, x=x if dw else None, w=w if dx else None, need_dx=dx, need_dw=dw, need_db=db
            )
        )
        assert [g is not None for g in got] == [dx, dw, db]


def test_bundles_trace() -> None:
    call = bind("te_ops::linear_fwd", LinearForward)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return call(LinearForward(x=x, w=w, b=None))

    x, w = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(fn(x, w), torch.ops.te_ops.linear_fwd(x, w, None))


def test_direct_call_is_the_same_call() -> None:
    binding = bind("te_ops::linear_fwd", LinearForward)
    x, w = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(binding.direct(x=x, w=w, b=None), binding(LinearForward(x=x, w=w, b=None)))
    assert "r = op(x, w, b)" in binding.source
