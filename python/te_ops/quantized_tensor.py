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
from ._fp8_ops import DTYPES, Quantize
from ._fp8_ops import quantize as _quantize
from ._ops import OPERATORS
from ._weight_cache import QuantizeInto, quantize_into

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_CODES = "torch.float8_e4m3fn or torch.float8_e5m2"
_NOMINAL = "torch.bfloat16, torch.float16 or torch.float32"


@dataclass(slots=True, kw_only=True)
class _Dequantize:
    codes: Tensor
    scale_inv: Tensor
    dtype: int


_dequantize: Callable[..., Tensor] = bind("te_ops::dequantize", _Dequantize)
_transpose: Callable[..., Tensor] = OPERATORS["te_ops::transpose_codes"].overload
aten = torch.ops.aten


def _must(ok: bool, what: str, value: Any, rule: Any) -> None:
    if not ok:
        raise ValueError(f"te_ops.QuantizedTensor: {what} is {value}: must be {rule}")


def _check(row: Any, col: Any, scale_inv: Any, dtype: Any, shape: Any) -> Any:
    """The logical shape of buffers that fit together."""
    _must(row is not None or col is not None, "each of row and col", None, "given, at least one")
    _must(scale_inv.dtype == torch.float32, "scale_inv.dtype", scale_inv.dtype, torch.float32)
    _must(scale_inv.shape == (1,), "scale_inv.shape", scale_inv.shape, "[1]")
    _must(dtype in DTYPES, "dtype", dtype, _NOMINAL)
    if row is not None:
        _must(row.dtype in _CODES, "row.dtype", row.dtype, _OF_CODES)
        _must(row.device == scale_inv.device, "row.device", row.device, scale_inv.device)
        _must(shape is None or row.shape == torch.Size(shape), "shape", shape, row.shape)
        shape = row.shape
    if col is not None:
        _must(
            col.dtype in (_CODES if row is None else (row.dtype,)),
            "col.dtype",
            col.dtype,
            _OF_CODES + ", as row's",
        )
        _must(col.device == scale_inv.device, "col.device", col.device, scale_inv.device)
        shape = col.shape[::-1] if shape is None else shape
    _must(len(shape) > 0, "shape", "[]", "[*M, K]")
    if col is not None:
        want = (shape[-1], math.prod(shape[:-1]))
        _must(col.shape == want, "col.shape", col.shape, want)
    return shape


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
        cls: type, row: Tensor | None, col: Tensor | None, scale_inv: Tensor, *, dtype: torch.dtype,
        pow2: bool = False, shape: torch.Size | None = None, requires_grad: bool = False,
    ) -> QuantizedTensor:  # fmt: skip
        shape = _check(row, col, scale_inv, dtype, shape)
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=scale_inv.device, requires_grad=requires_grad
        )
        self.row, self.col, self.scale_inv, self.pow2 = row, col, scale_inv, pow2
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [n for n in ("row", "col", "scale_inv") if getattr(self, n) is not None]
        return names, (self.dtype, self.pow2)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        parts = inner.get("row"), inner.get("col"), inner["scale_inv"]
        return cls(*parts, dtype=context[0], pow2=context[1], shape=outer_size)

    def _stable_hash_for_caching(self) -> str:  # what PyTorch's cache of compiled code asks for, from 2.15
        inner = [getattr(self, name) for name in self.__tensor_flatten__()[0]]
        layout = [(t.shape, t.stride(), t.storage_offset()) for t in inner]
        return f"{self!r} {self.pow2} {self.requires_grad} {layout}"

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        # Reads no data: it is called while tracing.
        parts = ", ".join(n for n in ("row", "col") if getattr(self, n) is not None)
        parts += "" if self.device.type == "cpu" else f", device={self.device}"
        shape, codes = tuple(self.shape), self.codes_dtype
        return f"QuantizedTensor(shape={shape}, dtype={self.dtype}, codes={codes}, {parts})"

    @property
    def codes_dtype(self) -> torch.dtype:
        """float8_e4m3fn or float8_e5m2."""
        return (self.row if self.row is not None else self.col).dtype  # type: ignore[union-attr]

    def _row(self) -> Tensor:
        return self.row if self.row is not None else _transpose(self.col).view(self.shape)

    def _col(self) -> Tensor:
        return self.col if self.col is not None else _transpose(self.row)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values ``[*M, K]`` in `dtype` (None: the nominal one), each rounded once. Not differentiable.

        Raises:
            ValueError: `dtype` is not bf16, fp16 or fp32.
        """
        dtype = self.dtype if dtype is None else dtype
        _must(dtype in DTYPES, "dequantize(): dtype", dtype, _NOMINAL)
        args = _Dequantize(codes=self._row(), scale_inv=self.scale_inv, dtype=DTYPES.index(dtype))
        return _dequantize(args)

    def te_buffers(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """(codes, transposed codes or None, scale_inv), as operators take them; codes are made if missing."""
        return self._row(), self.col, self.scale_inv

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Makes (True) or drops (False) the codes and the transposed codes; None leaves them alone.

        Raises:
            ValueError: nothing would be left; or a change in compiled code, where it would be lost (torch 2.11
                does not let that be seen, and loses it).
        """
        row = self._row() if rowwise else None if rowwise is False else self.row
        col = self._col() if columnwise else None if columnwise is False else self.col
        _must(
            row is not None or col is not None,
            "update_usage(): each of row and col",
            None,
            "left, at least one",
        )
        same = row is self.row and col is self.col
        _must(
            same or not torch.compiler.is_compiling(), "update_usage()", "in compiled code", "called outside"
        )
        self.row, self.col = row, col

    def quantize_(self, x: Tensor) -> QuantizedTensor:
        """Takes the values of `x`, a tensor of this shape: new codes and a new scale in the same memory.

        `x` is quantized from its own dtype, not rounded to the nominal one first; what is not bf16, fp16 or fp32
        is converted to fp32. Not differentiable.

        Raises:
            ValueError: `x` has another shape.
        """
        _must(x.shape == self.shape, "quantize_(): x.shape", x.shape, self.shape)
        x = x.detach().to(self.device, x.dtype if x.dtype in DTYPES else torch.float32)
        quantize_into(QuantizeInto(x=x, scale=None, q=self, pow2=self.pow2))
        if not torch.compiler.is_compiling():  # what was saved for a backward must be known to have changed
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

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self * 1  # plain, and autograd knows where from
        values[index] = value
        self.copy_(values)

    def _set_data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            row, col = self.row is not None, self.col is not None
            value = quantize(value, dtype=self.codes_dtype, pow2=self.pow2, row=row, col=col)
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
        options = {"dtype": self.dtype, "pow2": self.pow2, "shape": tuple(self.shape)}
        codes = [
            None if t is None else t.view(torch.uint8) for t in (self.row, self.col)
        ]  # pickle knows no FP8
        flags = self.codes_dtype, self.requires_grad, isinstance(self, torch.nn.Parameter)
        return _rebuild, (codes, self.scale_inv, options, *flags, attributes)


def _rebuild(
    codes: Any, scale_inv: Any, options: Any, dtype: Any, grad: bool, is_parameter: bool, attributes: Any
) -> Any:
    row, col = (None if t is None else t.view(dtype) for t in codes)
    t: Any = QuantizedTensor(row, col, scale_inv, **options)
    t = torch.nn.Parameter(t, grad) if is_parameter else t.requires_grad_(grad)
    for name, value in attributes.items():
        setattr(t, name, value)
    return t


# torch.load(weights_only=True) calls nothing that is not on its list, so there is no way without this global.
torch.serialization.add_safe_globals([_rebuild])


def quantize(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, pow2: bool = False, scale: Tensor | None = None,
    row: bool = True, col: bool = False,
) -> QuantizedTensor:  # fmt: skip
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
    _must(dtype in _CODES, "quantize(): dtype", dtype, _OF_CODES)
    _must(row or col, "quantize(): each of row and col", False, "True, at least one")
    q, _, _ = _quantize(
        Quantize(
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


def _as_strided(func: Any, t: QuantizedTensor, size: Any, stride: Any, offset: Any = None) -> Any:
    """How compiled code makes an output that is a view of an input."""
    if offset or math.prod(size) != t.numel() or tuple(stride) != torch.empty(size, device="meta").stride():
        return NotImplemented
    return _view(aten.view.default, t, size)


def _clone(func: Any, t: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return t._like(lambda buffer: buffer.clone())


def _to_copy(func: Any, t: QuantizedTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    dtype = t.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        return NotImplemented
    to = t.device if device is None else device, bool(kwargs.get("non_blocking"))
    return t._like(lambda buffer: buffer.to(to[0], buffer.dtype, to[1], copy=True), dtype=dtype)


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
    aten.as_strided.default: _as_strided,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default), _plain_like),
    **dict.fromkeys((aten.full_like.default, aten.rand_like.default, aten.randn_like.default), _plain_like),
    **dict.fromkeys((aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default), _plain_like),
    **dict.fromkeys((aten.new_full.default, aten.new_empty_strided.default), _plain_like),
}
