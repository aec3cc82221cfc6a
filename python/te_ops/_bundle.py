"""Packs argument dataclasses into operator slots.

`bind("te_ops::linear_fwd", LinearForward)` gives what takes a `LinearForward`, calls the operator with its
fields in the order of the slots, and returns the outputs. The code is generated once, at import, from the
table and the dataclass; a field without a slot, or a slot without a field, is an error then and not at a
call.

A field feeds the slot of its name. A ``bits`` slot is fed by one bool field for each of its flags. A slot
whose format has several buffers is fed by a field whose value has one attribute for each buffer. A slot that
takes a plain tensor or a quantized one is fed by a tensor, or by a tuple of all buffers of the format.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import _C
from ._ops import OPERATORS, Operator

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
                lacking = f"slot {slot!r} needs a field {name!r}, which {cls.__name__} does not have"
                raise TypeError(f"{spec['name']}: {lacking}")
    for name in sorted(fields - {n for names in wanted.values() for n in names}):
        raise TypeError(
            f"{cls.__name__}.{name}: {spec['name']} has no such slot (its fields are "
            f"{', '.join(n for names in wanted.values() for n in names)})"
        )


def _pack_expression(entry: _C.EntrySpec, index: int) -> str:
    """What goes into an entry, the `index`-th of its slot."""
    slot = entry["slot"]
    if entry["flags"]:
        first, *others = entry["flags"]
        return " | ".join([f"(1 if {first} else 0)"] + [f"{flag} << {i}" for i, flag in enumerate(others, 1)])
    if entry["union"]:
        return f"{slot}_parts[{index}]"
    if not entry["buffer"]:
        return slot
    value = f"{slot}.{entry['buffer']}"
    return f"None if {slot} is None else {value}" if entry["optional"] or entry["condition"] else value


def _unpack_expression(spec: _C.OpSpec, result_types: dict[str, Any]) -> str:
    outputs = spec["outputs"]
    mutating = any(e["mutable"] for e in spec["inputs"])
    slots: dict[str, list[str]] = {}
    for i, entry in enumerate(outputs):
        value = "r" if len(outputs) == 1 else f"r[{i}]"
        if entry["condition"] and mutating:  # the operator returned an empty tensor for what is absent
            value = f"({value} if {entry['condition']} else None)"
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


class Binding(Generic[Args]):
    """An operator that takes its arguments as one `Args` bundle: ``binding(Args(...))``.

    Attributes:
        direct: the same call with the fields as keyword or positional arguments, in the order of the
            dataclass. It skips making the bundle, half a microsecond that a hot path feels.
        source: the generated code.
    """

    def __init__(self, operator: Operator, cls: type[Args]) -> None:
        spec = operator.spec
        fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        scope: dict[str, Any] = {"op": operator.overload}
        name = operator.name.replace("::", "_")
        slots = [e["slot"] for e in spec["inputs"]]
        packed = ", ".join(
            _pack_expression(e, i - slots.index(e["slot"])) for i, e in enumerate(spec["inputs"])
        )
        body = ""
        for slot in dict.fromkeys(e["slot"] for e in spec["inputs"] if e["union"]):
            nones = "None, " * (slots.count(slot) - 1)
            body += f"    {slot}_parts = {slot} if isinstance({slot}, tuple) else ({slot}, {nones})\n"
        if spec["outputs"]:
            body += f"    r = op({packed})\n    return {_unpack_expression(spec, scope)}\n"
        else:
            body += f"    op({packed})\n"
        unpacked = ", ".join(f"a.{field}" for field in fields)
        self.source = (
            f"def {name}({', '.join(fields)}):\n{body}\n\n"
            f"def {name}_bundle(a):\n    return {name}({unpacked})\n"
        )
        exec(compile(self.source, f"<te_ops bundle {operator.name}>", "exec"), scope)
        self.direct: Callable[..., Any] = scope[name]
        self._bundle: Callable[[Args], Any] = scope[f"{name}_bundle"]

    def __call__(self, args: Args) -> Any:
        return self._bundle(args)


def bind(name: str, cls: type[Args]) -> Binding[Args]:
    """Ties the operator `name` to the argument dataclass `cls`.

    Args:
        name: qualified operator name.
        cls: a dataclass; use ``slots=True, kw_only=True``.

    Returns:
        A `Binding`. Calling it gives the operator's outputs: one value or a tuple, in the row's order;
        ``None`` for an output whose flag is not set; a namedtuple of buffers for a format of several.

    Raises:
        KeyError: no such operator.
        TypeError: the fields of `cls` and the slots of the operator do not match; the message names both.
    """
    operator = OPERATORS[name]
    _check_fields(operator.spec, cls)
    return Binding(operator, cls)
