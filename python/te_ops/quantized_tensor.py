"""`QuantizedTensor`: per-tensor FP8 codes and their scale, in the place of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ._bundle import bind

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
class _Dequantize:
    codes: Tensor
    scale_inv: Tensor
    dtype: int


@dataclass(slots=True, kw_only=True)
class _Transpose:
    codes: Tensor


_quantize = bind("te_ops::quantize", _Quantize)
_dequantize = bind("te_ops::dequantize", _Dequantize)
_transpose = bind("te_ops::transpose_codes", _Transpose)


def _refuse(what: str) -> None:
    raise ValueError(f"te_ops.QuantizedTensor: {what}")


class QuantizedTensor(torch.Tensor):
    """A tensor ``[*M, K]`` of a nominal dtype, held as FP8 codes and one scale: value = code * scale_inv.

    It goes where a tensor goes: as a parameter, into `te_ops.Linear` (whose GEMMs take the codes as they are),
    through ``copy_`` (which quantizes), ``clone``, ``detach``, ``view`` of leading dims, ``to``, ``state_dict``,
    pickling. Any other operation works on the dequantized values and gives a plain tensor; one that changes
    a QuantizedTensor in place quantizes the result again. (A view of dequantized values is a copy: writes to
    it do not come back.)

    Args:
        row: codes ``[*M, K]``, float8_e4m3fn or float8_e5m2, or None.
        col: codes of the transpose ``[K, M]``, or None; one of the two must be there.
        scale_inv: fp32 ``[1]``, positive.
        dtype: the nominal dtype: bf16, fp16 or fp32.
        pow2: whether scales are powers of two when values are quantized again.
        shape: ``[*M, K]``; needed only without `row`.

    Raises:
        ValueError: buffers that do not fit together; the message names the argument, its value and the rule.
    """

    row: Tensor | None
    col: Tensor | None
    scale_inv: Tensor
    pow2: bool
    high_precision_init_val: Tensor | None

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
        codes = row if row is not None else col
        if codes is None:
            raise ValueError("te_ops.QuantizedTensor: row and col are None: one must be given")
        if codes.dtype not in _CODES:
            _refuse(f"codes have dtype {codes.dtype}: must be one of {', '.join(map(str, _CODES))}")
        if dtype not in _NOMINAL:
            _refuse(f"dtype={dtype}: must be one of {', '.join(map(str, _NOMINAL))}")
        if scale_inv.dtype != torch.float32 or scale_inv.shape != (1,):
            _refuse(f"scale_inv is {scale_inv.dtype} {list(scale_inv.shape)}: must be float32 [1]")
        if scale_inv.device != codes.device:
            _refuse(f"scale_inv is on {scale_inv.device}: must be on {codes.device}, as the codes are")
        if row is not None:
            shape = row.shape
        elif shape is None:
            shape = torch.Size(codes.shape[::-1])
        if not shape:
            _refuse("codes have no dimension: must have at least one")
        if col is not None and (col.ndim != 2 or col.shape[0] != shape[-1] or col.dtype != codes.dtype):
            _refuse(
                f"col is {col.dtype} {list(col.shape)}: must be {codes.dtype} [{shape[-1]}, M], "
                "the transpose of the codes with leading dims flattened"
            )
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        self.row, self.col, self.scale_inv, self.pow2 = row, col, scale_inv, pow2
        self.high_precision_init_val = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # ------------------------------------------------------------------------------- tracing --------

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
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, codes={self.codes_dtype}, "
            f"{parts}, device={self.device})"
        )

    # --------------------------------------------------------------------------------- values --------

    @property
    def codes_dtype(self) -> torch.dtype:
        """float8_e4m3fn or float8_e5m2."""
        return (self.row if self.row is not None else self.col).dtype  # type: ignore[union-attr]

    def _row(self) -> Tensor:
        if self.row is not None:
            return self.row
        assert self.col is not None
        flat: Tensor = _transpose(_Transpose(codes=self.col))
        return flat.view(self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values ``[*M, K]`` in `dtype` (None: the nominal one), each rounded once. Not differentiable."""
        index = _NOMINAL.index(self.dtype if dtype is None else dtype)
        values: Tensor = _dequantize(_Dequantize(codes=self._row(), scale_inv=self.scale_inv, dtype=index))
        return values

    def te_buffers(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """(codes, transposed codes or None, scale_inv), as operators take them."""
        return self._row(), self.col, self.scale_inv

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Makes (True) or drops (False) the codes and the transposed codes; None leaves them alone.

        Raises:
            ValueError: nothing would be left.
        """
        row = self._row() if rowwise else None if rowwise is False else self.row
        col = self.col
        if columnwise and col is None:
            col = _transpose(_Transpose(codes=self._row()))
        elif columnwise is False:
            col = None
        if row is None and col is None:
            _refuse("update_usage() would leave neither row nor col")
        self.row, self.col = row, col

    def quantize_(self, x: Tensor) -> QuantizedTensor:
        """Takes the values of `x`, a plain tensor of this shape: new codes and a new scale in the same memory."""
        q = quantize(
            x.to(self.device),
            dtype=self.codes_dtype,
            pow2=self.pow2,
            row=self.row is not None,
            col=self.col is not None,
        )
        for mine, new in ((self.row, q.row), (self.col, q.col), (self.scale_inv, q.scale_inv)):
            if mine is not None:
                mine.copy_(new)  # type: ignore[arg-type]
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial values that `quantized_model_init` kept on the CPU, or None."""
        return self.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees them."""
        self.high_precision_init_val = None

    def _like(self, change: Callable[[Tensor], Tensor], **kwargs: Any) -> QuantizedTensor:
        row, col = (None if t is None else change(t) for t in (self.row, self.col))
        options = {"dtype": self.dtype, "pow2": self.pow2, "shape": self.shape, **kwargs}
        return QuantizedTensor(row, col, change(self.scale_inv), **options)

    # ----------------------------------------------------------------------------- operations --------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        shape = tuple(self.shape)
        options = (self.dtype, self.pow2, shape, self.requires_grad, is_parameter)
        return _rebuild, (self.row, self.col, self.scale_inv, *options)


def _rebuild(
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    dtype: torch.dtype,
    pow2: bool,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool = False,
) -> Any:
    t = QuantizedTensor(row, col, scale_inv, dtype=dtype, pow2=pow2, shape=torch.Size(shape))
    return torch.nn.Parameter(t, requires_grad) if is_parameter else t.requires_grad_(requires_grad)


# torch.load(weights_only=True) rebuilds nothing that is not on its list.
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
        RuntimeError: a wrong dtype, device or size; the message names slot, value and rule.
    """
    if dtype not in _CODES:
        raise ValueError(f"te_ops.quantize: dtype={dtype}: must be one of {', '.join(map(str, _CODES))}")
    with torch.no_grad():
        q, _, _ = _quantize(
            _Quantize(
                x=x.detach(), scale=scale, e5m2=dtype == torch.float8_e5m2, pow2=pow2, want_row=row, want_col=col,
                want_amax=False, want_sums=False,
            )
        )  # fmt: skip
    return QuantizedTensor(q.row, q.col, q.scale_inv, dtype=x.dtype, pow2=pow2, shape=x.shape)


def _values(t: QuantizedTensor) -> Tensor:
    return t.dequantize()


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs `func` on dequantized values; what it changed in place is quantized again."""
    written: list[tuple[QuantizedTensor, Tensor]] = []

    def note(slot: Any, value: Any) -> Any:
        if not (slot.alias_info is not None and slot.alias_info.is_write):
            return tree_map_only(QuantizedTensor, _values, value)

        def track(t: QuantizedTensor) -> Tensor:
            written.append((t, t.dequantize()))
            return written[-1][1]

        return tree_map_only(QuantizedTensor, track, value)

    slots = func._schema.arguments
    by_name = {slot.name: slot for slot in slots}
    args = [note(slot, value) for slot, value in zip(slots, args, strict=False)]
    kwargs = {name: note(by_name[name], value) for name, value in kwargs.items()}
    result = func(*args, **kwargs)
    for target, values in written:
        target.quantize_(values)
    if written:
        back = {id(values): target for target, values in written}
        result = tree_map_only(Tensor, lambda t: back.get(id(t), t), result)
    return result


# -------------------------------------------------------------------------------- what stays quantized --------


def _detach(func: Any, t: QuantizedTensor) -> Any:
    return t._like(lambda buffer: buffer.detach())


def _clone(func: Any, t: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return t._like(lambda buffer: buffer.clone())


def _copy_(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(to, QuantizedTensor):
        return to.copy_(source.dequantize(), non_blocking)
    if source.shape != to.shape:
        source = source.expand(to.shape)
    if isinstance(source, QuantizedTensor) and source.codes_dtype == to.codes_dtype:
        row, col, scale_inv = source.te_buffers()
        if to.row is not None:
            to.row.copy_(row)
        if to.col is not None:
            to.col.copy_(col if col is not None else _transpose(_Transpose(codes=row)))
        to.scale_inv.copy_(scale_inv)
        return to
    return to.quantize_(source.dequantize() if isinstance(source, QuantizedTensor) else source)


def _to_copy(func: Any, t: QuantizedTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype not in _NOMINAL:
        return NotImplemented
    move = {} if device is None else {"device": device}
    non_blocking = bool(kwargs.get("non_blocking"))
    return t._like(
        lambda buffer: buffer.to(**move, non_blocking=non_blocking, copy=True), dtype=dtype or t.dtype
    )


def _view(func: Any, t: QuantizedTensor, size: Any, *args: Any) -> Any:
    if not size or t.row is None or size[-1] not in (-1, t.shape[-1]):
        return NotImplemented
    row = func(t.row, size, *args)
    if row.shape[-1] != t.shape[-1]:
        return NotImplemented
    return QuantizedTensor(row, t.col, t.scale_inv, dtype=t.dtype, pow2=t.pow2)


def _plain_like(func: Any, t: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    kwargs = {"dtype": t.dtype, "device": t.device, **{k: v for k, v in kwargs.items() if v is not None}}
    kwargs.pop("memory_format", None)
    stand_in = torch.empty(t.shape, dtype=kwargs["dtype"], device=kwargs["device"])
    return func(stand_in, *args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.empty_like.default: _plain_like,
    aten.zeros_like.default: _plain_like,
    aten.ones_like.default: _plain_like,
    aten.full_like.default: _plain_like,
    aten.rand_like.default: _plain_like,
    aten.randn_like.default: _plain_like,
}
