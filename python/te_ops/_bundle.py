"""Packs argument dataclasses into operator slots.

`bind("te_ops::linear_fwd", LinearForward)` returns a function that takes a `LinearForward`, calls the
operator with its fields in the order of the slots, and returns the outputs. The function is generated
once, at import, from the table and the dataclass; a field without a slot, or a slot without a field, is an
error then and not at a call.

A field feeds the slot of its name. A ``bits`` slot is fed by one bool field for each of its flags. A slot
whose format has several buffers is fed by a field whose value has one attribute for each buffer.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeVar

from . import _C
from ._ops import OPERATORS

Args = TypeVar("Args")


def slot_fields(spec: _C.OpSpec) -> dict[str, list[str]]:
    """Slot name -> the names of the fields that feed it."""
    return {e["slot"]: list(e["flags"]) or [e["slot"]] for e in spec["inputs"]}


def _check_fields(spec: _C.OpSpec, cls: type) -> None:
    wanted = slot_fields(spec)
    fields = {f.name for f in dataclasses.fields(cls)}
    for slot, names in wanted.items():
        for name in names:
            if name not in fields:
                raise TypeError(f"{spec['name']}: slot {slot!r} needs a field {name!r}, which {cls.__name__} does not have")
    for name in sorted(fields - {n for names in wanted.values() for n in names}):
        raise TypeError(
            f"{cls.__name__}.{name}: {spec['name']} has no such slot (its fields are "
            f"{', '.join(n for names in wanted.values() for n in names)})"
        )


def _pack_expression(entry: _C.EntrySpec) -> str:
    slot = entry["slot"]
    if entry["flags"]:
        first, *others = entry["flags"]
        return " | ".join([f"(1 if a.{first} else 0)"] + [f"a.{flag} << {i}" for i, flag in enumerate(others, 1)])
    if not entry["buffer"]:
        return f"a.{slot}"
    value = f"a.{slot}.{entry['buffer']}"
    return f"None if a.{slot} is None else {value}" if entry["optional"] or entry["condition"] else value


def _unpack_expression(spec: _C.OpSpec, result_types: dict[str, Any]) -> str:
    outputs = spec["outputs"]
    mutating = any(e["mutable"] for e in spec["inputs"])
    slots: dict[str, list[str]] = {}
    for i, entry in enumerate(outputs):
        value = "r" if len(outputs) == 1 else f"r[{i}]"
        if entry["condition"] and mutating:  # the operator returned an empty tensor for what is absent
            value = f"({value} if a.{entry['condition']} else None)"
        slots.setdefault(entry["slot"], []).append(value)
    results = []
    for slot, values in slots.items():
        entries = [e for e in outputs if e["slot"] == slot]
        if not entries[0]["buffer"]:
            results.append(values[0])
            continue
        result_types[f"{slot}_type"] = namedtuple(slot, [e["buffer"] for e in entries])  # type: ignore[misc]
        results.append(f"{slot}_type({', '.join(values)})")
    return results[0] if len(results) == 1 else f"({', '.join(results)})"


def bind(name: str, cls: type[Args]) -> Callable[[Args], Any]:
    """Returns ``call(bundle: cls)`` for the operator `name`.

    Args:
        name: qualified operator name.
        cls: a dataclass; use ``slots=True, kw_only=True``.

    Returns:
        A function giving the operator's outputs: one value or a tuple, in the row's order; ``None`` for an
        output whose flag is not set; a namedtuple of buffers for a format of several.

    Raises:
        KeyError: no such operator.
        TypeError: the fields of `cls` and the slots of the operator do not match; the message names both.
    """
    operator = OPERATORS[name]
    spec = operator.spec
    _check_fields(spec, cls)
    scope: dict[str, Any] = {"op": operator.overload}
    packed = ", ".join(_pack_expression(entry) for entry in spec["inputs"])
    if spec["outputs"]:
        body = f"    r = op({packed})\n    return {_unpack_expression(spec, scope)}\n"
    else:
        body = f"    op({packed})\n"
    function = name.replace("::", "_")
    source = f"def {function}(a):\n{body}"
    exec(compile(source, f"<te_ops bundle {name}>", "exec"), scope)
    call: Callable[[Args], Any] = scope[function]
    call.__doc__ = f"{spec['doc']}\n\nTakes a {cls.__name__}; generated from the table:\n\n{source}"
    return call
