"""`QuantizedTensor`: per-tensor FP8 codes and their scale, in the place of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ._bundle import bind
from ._delayed import outside_inference_mode

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_NOMINAL = (torch.bfloat16, torch.float16, torch.float32)  # in the order of the operators' int `dtype`

aten = torch.ops.aten


@dataclass(slots=True, kw_only=True)
class _Quantize:
    x: Tensor
    scale: Tensor | None
    e5m2: bool
    pow2: bool
    want_row: bool
    want_col: bool
    want_amax: bool
    want_sums: bool


@dataclass(slots=True, kw_only=True)
class _QuantizeInto:
    x: Tensor
    scale: Tensor | None
    q: QuantizedTensor  # has the buffers of the format
    pow2: bool


@dataclass(slots=True, kw_only=True)
class _Dequantize:
    codes: Tensor
    scale_inv: Tensor
    dtype: int


@dataclass(slots=True, kw_only=True)
class _Transpose:
    codes: Tensor


_quantize = bind("te_ops::quantize", _Quantize)
_quantize_into = bind("te_ops::quantize_into", _QuantizeInto)
_dequantize = bind("te_ops::dequantize", _Dequantize)
_transpose = bind("te_ops::transpose_codes", _Transpose)


def _one_of(values: tuple[torch.dtype, ...]) -> str:
    return f"must be one of {', '.join(map(str, values))}"


def _check(row: Any, col: Any, scale_inv: Any, dtype: Any, shape: Any) -> torch.Size:
    """The logical shape of buffers that fit together."""
    if row is None and col is None:
        raise ValueError("te_ops.QuantizedTensor: row and col are None: one must be given")
    first = ("row", row) if row is not None else ("col", col)
    for name, codes in (("row", row), ("col", col)):
        if codes is None:
            continue
        if codes.dtype not in _CODES:
            _refuse(f"{name} has dtype {codes.dtype}: {_one_of(_CODES)}")
        if codes.dtype != first[1].dtype:
            _refuse(f"{name} has dtype {codes.dtype}: must be {first[1].dtype}, which is that of {first[0]}")
        if codes.device != scale_inv.device:
            _refuse(f"{name} is on {codes.device}: must be on {scale_inv.device}, where scale_inv is")
    if dtype not in _NOMINAL:
        _refuse(f"dtype={dtype}: {_one_of(_NOMINAL)}")
    if scale_inv.dtype != torch.float32 or scale_inv.shape != (1,):
        _refuse(f"scale_inv is {scale_inv.dtype} {list(scale_inv.shape)}: must be torch.float32 [1]")
    if col is not None and col.ndim != 2:
        _refuse(f"col has shape {list(col.shape)}: must be [K, M]")
    if row is not None and shape is not None and row.shape != torch.Size(shape):
        _refuse(f"shape={list(shape)}: must be {list(row.shape)}, which is that of row")
    if row is not None:
        shape = row.shape
    shape = torch.Size(col.shape[::-1] if shape is None else shape)
    if not shape:
        _refuse("shape=[]: must have at least one dimension")
    if col is not None and (col.shape[0] != shape[-1] or col.shape[1] != math.prod(shape[:-1])):
        _refuse(
            f"col has shape {list(col.shape)}: must be [{shape[-1]}, {math.prod(shape[:-1])}], the transpose of "
            f"{list(shape)} with its leading dims flattened"
        )
    return shape


def _refuse(what: str) -> None:
    raise ValueError(f"te_ops.QuantizedTensor: {what}")


class QuantizedTensor(torch.Tensor):
    """A tensor ``[*M, K]`` of a nominal dtype, held as FP8 codes and one scale: value = code * scale_inv.

    It goes where a tensor goes: as a parameter, into `te_ops.Linear` (whose GEMMs take the codes as they are),
    through ``copy_`` (which quantizes, or copies the codes of another QuantizedTensor), ``clone``, ``detach``,
    ``view`` of leading dims, ``to``, ``state_dict``, pickling. Any other operation works on the values in the nominal
    dtype and gives a plain tensor; one that changes a QuantizedTensor in place quantizes the result again.

    A view that is not of leading dims (``q[0]``, ``q.t()``) is a plain copy: what is written to it does not come
    back. ``q[0] = x`` does: it works on all values and quantizes them again.

    Args:
        row: codes ``[*M, K]``, float8_e4m3fn or float8_e5m2, or None.
        col: codes of the transpose ``[K, M]``, or None; one of the two must be there.
        scale_inv: fp32 ``[1]``, positive.
        dtype: the nominal dtype: bf16, fp16 or fp32.
        pow2: whether scales are powers of two when values are quantized again.
        shape: ``[*M, K]``; needed only without `row`, and with other than two dims.
        requires_grad: as of any tensor; its gradient is plain.

    Raises:
        ValueError: buffers that do not fit together; the message names the argument, its value and the rule.
    """

    row: Tensor | None
    col: Tensor | None
    scale_inv: Tensor
    pow2: bool
    high_precision_init_val: Tensor | None = None

    @staticmethod
    def __new__(
        cls: type,
        row: Tensor | None,
        col: Tensor | None,
        scale_inv: Tensor,
        *,
        dtype: torch.dtype,
        pow2: bool = False,
        shape: torch.Size | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        shape = _check(row, col, scale_inv, dtype, shape)
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=scale_inv.device, requires_grad=requires_grad
        )
        self.row, self.col, self.scale_inv, self.pow2 = row, col, scale_inv, pow2
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [n for n in ("row", "col", "scale_inv") if getattr(self, n) is not None]
        return names, (self.dtype, self.pow2)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        dtype, pow2 = context
        return cls(
            inner.get("row"), inner.get("col"), inner["scale_inv"], dtype=dtype, pow2=pow2, shape=outer_size
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        # Reads no data: it is called while tracing.
        parts = ", ".join(n for n in ("row", "col") if getattr(self, n) is not None)
        where = "" if self.device.type == "cpu" else f", device={self.device}"
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, codes={self.codes_dtype}, {parts}{where})"

    # --------------------------------------------------------------------------------- values --------

    @property
    def codes_dtype(self) -> torch.dtype:
        """float8_e4m3fn or float8_e5m2."""
        return (self.row if self.row is not None else self.col).dtype  # type: ignore[union-attr]

    def _row(self) -> Tensor:
        if self.row is not None:
            return self.row
        flat: Tensor = _transpose(_Transpose(codes=self.col))  # type: ignore[arg-type]
        return flat.view(self.shape)

    def _col(self) -> Tensor:
        return self.col if self.col is not None else _transpose(_Transpose(codes=self.row))  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values ``[*M, K]`` in `dtype` (None: the nominal one), each rounded once. Not differentiable.

        Raises:
            ValueError: `dtype` is not bf16, fp16 or fp32.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in _NOMINAL:
            _refuse(f"dequantize(dtype={dtype}): {_one_of(_NOMINAL)}")
        index = _NOMINAL.index(dtype)
        values: Tensor = _dequantize(_Dequantize(codes=self._row(), scale_inv=self.scale_inv, dtype=index))
        return values

    def te_buffers(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """(codes, transposed codes or None, scale_inv), as operators take them; codes are made if missing."""
        return self._row(), self.col, self.scale_inv

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Makes (True) or drops (False) the codes and the transposed codes; None leaves them alone.

        Raises:
            ValueError: nothing would be left.
        """
        row = self._row() if rowwise else None if rowwise is False else self.row
        col = self._col() if columnwise else None if columnwise is False else self.col
        if row is None and col is None:
            _refuse(
                f"update_usage(rowwise={rowwise}, columnwise={columnwise}) would leave neither row nor col"
            )
        self.row, self.col = row, col

    def quantize_(self, x: Tensor) -> QuantizedTensor:
        """Takes the values of `x`, a tensor of this shape: new codes and a new scale in the same memory.

        `x` is quantized from its own dtype, not rounded to the nominal one first; what is not bf16, fp16 or fp32
        is converted to fp32. Not differentiable.

        Raises:
            ValueError: `x` has another shape.
        """
        if x.shape != self.shape:
            _refuse(f"quantize_(x): x has shape {list(x.shape)}: must be {list(self.shape)}")
        x = x.detach().to(self.device, x.dtype if x.dtype in _NOMINAL else torch.float32)
        _quantize_into(_QuantizeInto(x=x, scale=None, q=self, pow2=self.pow2))
        if (
            not torch.compiler.is_compiling()
        ):  # operators do not count versions, but a saved tensor must notice
            changed = [t for t in (self, self.row, self.col, self.scale_inv) if t is not None]
            torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial values that `quantized_model_init` kept on the CPU, or None."""
        return self.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees them."""
        self.high_precision_init_val = None

    def _like(self, change: Callable[[Tensor], Tensor], **options: Any) -> QuantizedTensor:
        row, col = (None if t is None else change(t) for t in (self.row, self.col))
        options = {"dtype": self.dtype, "pow2": self.pow2, "shape": self.shape, **options}
        return QuantizedTensor(row, col, change(self.scale_inv), **options)

    # ----------------------------------------------------------------------------- operations --------

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self * 1  # plain, and autograd knows where from
        values[index] = value
        self.copy_(values)

    def _set_data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            kept = {"row": self.row is not None, "col": self.col is not None}
            value = quantize(value, dtype=self.codes_dtype, pow2=self.pow2, **kept)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.row, self.col, self.scale_inv, self.pow2 = value.row, value.col, value.scale_inv, value.pow2

    # PyTorch's own setter changes the shape and leaves the buffers. A plain tensor is quantized.
    data = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[assignment,attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        result = NotImplemented if special is None else special(func, *args, **kwargs)
        if result is NotImplemented and torch.is_inference_mode_enabled():
            result = func.decompose(*args, **kwargs)  # there, to() and reshape() arrive undivided
        return _on_values(func, args, kwargs) if result is NotImplemented else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = ("row", "col", "scale_inv", "pow2", "_is_param")
        attributes = {name: value for name, value in vars(self).items() if name not in own}
        is_parameter = isinstance(self, torch.nn.Parameter)
        options = (self.dtype, self.pow2, tuple(self.shape), self.requires_grad, is_parameter, attributes)
        return _rebuild, (self.row, self.col, self.scale_inv, *options)


def _rebuild(
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    dtype: torch.dtype,
    pow2: bool,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
) -> Any:
    t: Any = QuantizedTensor(row, col, scale_inv, dtype=dtype, pow2=pow2, shape=torch.Size(shape))
    t = torch.nn.Parameter(t, requires_grad) if is_parameter else t.requires_grad_(requires_grad)
    for name, value in attributes.items():
        setattr(t, name, value)
    return t


# torch.load(weights_only=True) calls nothing that is not on its list, so there is no way without this global.
torch.serialization.add_safe_globals([_rebuild])


def quantize(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    pow2: bool = False,
    scale: Tensor | None = None,
    row: bool = True,
    col: bool = False,
) -> QuantizedTensor:
    """x ``[*M, K]`` (bf16, fp16 or fp32) as a `QuantizedTensor`, by current scaling or by a given scale.

    Args:
        x: the values; not differentiated.
        dtype: of the codes, float8_e4m3fn or float8_e5m2.
        pow2: round the scale down to a power of two.
        scale: fp32 ``[1]``: value * scale is what is rounded; None computes it from the largest value.
        row, col: which copies to make.

    Raises:
        ValueError: another `dtype`, or neither `row` nor `col`.
        RuntimeError: a wrong dtype, device or size; the message names slot, value and rule.
    """
    if dtype not in _CODES:
        raise ValueError(f"te_ops.quantize: dtype={dtype}: {_one_of(_CODES)}")
    if not (row or col):
        raise ValueError("te_ops.quantize: row=False and col=False: one must be True")
    with torch.no_grad():
        q, _, _ = _quantize(
            _Quantize(
                x=x.detach(), scale=scale, e5m2=dtype == torch.float8_e5m2, pow2=pow2, want_row=row, want_col=col,
                want_amax=False, want_sums=False,
            )
        )  # fmt: skip
    return QuantizedTensor(q.row, q.col, q.scale_inv, dtype=x.dtype, pow2=pow2, shape=x.shape)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs `func` on dequantized values; what it changed in place is quantized again."""
    values: dict[int, Tensor] = {}  # by id, so that an argument given twice is one tensor here, too
    written: dict[int, QuantizedTensor] = {}

    def convert(slot: Any, value: Any) -> Any:
        def one(t: QuantizedTensor) -> Tensor:
            if slot.alias_info is not None and slot.alias_info.is_write:
                written[id(t)] = t
            if id(t) not in values:
                values[id(t)] = t.dequantize()
            return values[id(t)]

        return tree_map_only(QuantizedTensor, one, value)

    slots = func._schema.arguments
    by_name = {slot.name: slot for slot in slots}
    plain = [convert(slot, value) for slot, value in zip(slots, args, strict=False)]
    result = func(*plain, **{name: convert(by_name[name], value) for name, value in kwargs.items()})
    for key, target in written.items():
        target.quantize_(values[key])
    back = {id(values[key]): target for key, target in written.items()}
    return tree_map_only(Tensor, lambda t: back.get(id(t), t), result) if written else result


# -------------------------------------------------------------------------------- what stays quantized --------


def _aliasing(t: QuantizedTensor) -> Any:
    """A context for views: that of a normal tensor must be normal in inference mode, too."""
    return nullcontext() if t.is_inference() else outside_inference_mode()


def _detach(func: Any, t: QuantizedTensor) -> Any:
    with _aliasing(t):
        return return_and_correct_aliasing(func, (t,), {}, t._like(lambda buffer: buffer.detach()))


def _view(func: Any, t: QuantizedTensor, size: Any) -> Any:
    with _aliasing(t):
        row = func(torch.empty(t.shape, device="meta") if t.row is None else t.row, size)
        shape, m = row.shape, math.prod(t.shape[:-1])
        if not shape or shape[-1] != t.shape[-1] or math.prod(shape[:-1]) != m:
            return NotImplemented
        parts = None if t.row is None else row, t.col, t.scale_inv
        view = QuantizedTensor(*parts, dtype=t.dtype, pow2=t.pow2, shape=shape)
        return return_and_correct_aliasing(func, (t, size), {}, view)


def _clone(func: Any, t: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return t._like(lambda buffer: buffer.clone())


def _to_copy(func: Any, t: QuantizedTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    dtype = t.dtype if dtype is None else dtype
    if dtype not in _NOMINAL:
        return NotImplemented
    options = {"device": device, "non_blocking": bool(kwargs.get("non_blocking")), "copy": True}
    return t._like(lambda buffer: buffer.to(buffer.dtype, **options), dtype=dtype)


def _copy_(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(to, QuantizedTensor):
        return to.copy_(source.dequantize(), non_blocking)
    if source.shape != to.shape:
        source = source.expand(to.shape)
    if not isinstance(source, QuantizedTensor) or source.codes_dtype != to.codes_dtype:
        return to.quantize_(source.dequantize() if isinstance(source, QuantizedTensor) else source)
    if to.row is not None:
        to.row.copy_(source._row(), non_blocking)
    if to.col is not None:
        to.col.copy_(source._col(), non_blocking)
    to.scale_inv.copy_(source.scale_inv, non_blocking)
    return to


def _foreach_copy_(func: Any, to: Any, sources: Any, non_blocking: bool = False) -> None:
    for one, source in zip(to, sources, strict=True):  # each from its own dtype, codes as codes
        one.copy_(source, non_blocking)


def _plain_like(func: Any, t: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """A new plain tensor, from a stand-in that has no data to speak of."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    if func is aten.empty_like.default and "device" in given and "dtype" not in given:
        return t._like(lambda buffer: torch.empty_like(buffer, device=given["device"]))  # nn.Module.to_empty
    stand_in = t.scale_inv
    if func._schema.name.endswith("_like"):
        stand_in, given["memory_format"] = stand_in.expand(t.shape), torch.contiguous_format
    return func(stand_in, *args, **{"dtype": t.dtype, **given})


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    **{
        getattr(aten, name).default: _plain_like
        for name in (
            "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
            "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
        )
    },
}  # fmt: skip
