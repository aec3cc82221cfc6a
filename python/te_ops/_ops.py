"""The table as Python sees it: every registered operator with its spec and its fake.

Knows no single operator. What an operator takes and returns comes from `_C.spec`, and fakes come from
`_C.infer`, the interpreter that also checks and allocates for real calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import _C


@dataclass(frozen=True)
class Operator:
    """One row of the table, registered.

    Attributes:
        name: qualified name, e.g. ``"te_ops::linear_fwd"``.
        index: its index in the extension.
        spec: the parsed row.
        overload: what to call.
    """

    name: str
    index: int
    spec: _C.OpSpec
    overload: Callable[..., Any]


OPERATORS: dict[str, Operator] = {}

_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_DEVICE_TYPES = {
    "cpu": 0,
    "cuda": 1,
    "meta": 14,
}  # PyTorch's codes; any other device gets one of its own below


def describe(tensor: torch.Tensor) -> _C.TensorDesc:
    """What inference needs to know of a tensor: never its data."""
    device = tensor.device
    device_type = _DEVICE_TYPES.setdefault(device.type, 100 + len(_DEVICE_TYPES))
    index = -1 if device.index is None else device.index
    return tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], device_type, index


def _make_fake(index: int, spec: _C.OpSpec) -> Callable[..., Any]:
    inputs = spec["inputs"]
    outputs = spec["outputs"]

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = list(args) + [kwargs.get(e["name"], e["default"]) for e in inputs[len(args) :]]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        device = tensors[0].device if tensors else None
        described = tuple(describe(v) if isinstance(v, torch.Tensor) else v for v in values)
        results: list[torch.Tensor | None] = []
        for inferred in _C.infer(index, described):
            if inferred is None:
                results.append(None)
            else:
                sizes, dtype = inferred
                results.append(torch.empty(sizes, dtype=_DTYPES[dtype], device=device))
        if not outputs:
            return None
        return results[0] if len(outputs) == 1 else tuple(results)

    return fake


def load_table(namespace: str) -> list[Operator]:
    """Gives the operators that C code has registered in `namespace` their fakes.

    Call it once after ``te_register_table(namespace, ...)``; operators already loaded are left alone.
    Returns the newly loaded ones.
    """
    loaded = []
    known = {op.index for op in OPERATORS.values()}
    for index in range(_C.op_count()):
        if index in known:
            continue
        spec = _C.spec(index)
        name = spec["name"]
        if not name.startswith(namespace + "::"):
            continue
        torch.library.register_fake(name, _make_fake(index, spec))
        overload = getattr(getattr(torch.ops, namespace), name.split("::")[1]).default
        OPERATORS[name] = Operator(name, index, spec, overload)
        loaded.append(OPERATORS[name])
    return loaded


load_table("te_ops")
