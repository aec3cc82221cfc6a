"""For each operator of the table: the argument lists that every generated test runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from te_ops import _C
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# (leading dims, K, N): square, odd, a vector, N-D, no rows, an empty inner dimension, one of everything
LINEAR_SHAPES = [
    ((16,), 32, 8),
    ((5, 3), 17, 9),
    ((), 7, 5),
    ((2, 1, 3), 4, 6),
    ((0,), 8, 4),
    ((3,), 0, 4),
    ((1,), 1, 1),
]


def rand(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device=device, dtype=dtype)


def _linear_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            x, w = rand(*lead, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device)
            yield x, w, rand(n, dtype=dtype, device=device)
            yield x, w, None


def _linear_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            for grads in range(8):
                dy = rand(*lead, n, dtype=dtype, device=device)
                x = rand(*lead, k, dtype=dtype, device=device) if grads & 2 else None
                w = rand(n, k, dtype=dtype, device=device) if grads & 1 else None
                yield dy, x, w, grads


def _linear_wgrad(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            for grad_dtype in {dtype, torch.float32}:
                for accumulate in (True, False):
                    dy, x = (
                        rand(*lead, n, dtype=dtype, device=device),
                        rand(*lead, k, dtype=dtype, device=device),
                    )
                    yield dy, x, rand(n, k, dtype=grad_dtype, device=device), accumulate


# ------------------------------------------------------------------------------- per-tensor FP8 --------

STATE_HEADER, STATE_TENSORS = 16, 5  # csrc/te_scale.h


def bits(*flags: bool) -> int:
    return sum(bool(flag) << i for i, flag in enumerate(flags))


def codes(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return rand(*shape, dtype=torch.float32, device=device).to(dtype)


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], device=device)


def delayed_state(device: torch.device, history_len: int = 3) -> Tensor:
    """A state in the middle of a training: scales and a history, something staged in some columns."""
    state = torch.zeros(STATE_HEADER + STATE_TENSORS * history_len, dtype=torch.float32)
    state[4:9] = torch.rand(5) * 10 + 0.1
    state[STATE_HEADER:] = torch.rand(STATE_TENSORS * history_len)
    state[STATE_HEADER + 1] = 0
    return state.view(torch.int32).to(device)


def region(number: int, device: torch.device) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=device)


def delayed_slots(device: torch.device, number: int = 1) -> tuple[Any, ...]:
    return delayed_state(device), region(number, device), None, 3, 0


NORM_SHAPES = [(16, 64), (5, 17), (3, 1), (0, 8), (4, 0), (2, 3, 40), (7,)]


def _layernorm_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, dtype in enumerate(DTYPES):
        for shape in NORM_SHAPES:
            k = shape[-1]
            for case in range(4):
                gamma, beta = (rand(k, dtype=DTYPES[(i + case) % 3], device=device) for _ in range(2))
                yield rand(*shape, dtype=dtype, device=device), gamma, beta if case % 2 else None, 1e-5, case


def _layernorm_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, dtype in enumerate(DTYPES):
        for shape in NORM_SHAPES:
            dy, x = rand(*shape, dtype=dtype, device=device), rand(*shape, dtype=dtype, device=device)
            m = torch.Size(shape[:-1]).numel()
            statistics = (
                rand(m, dtype=torch.float32, device=device),
                rand(m, dtype=torch.float32, device=device),
            )
            for case in range(16):
                gamma = rand(shape[-1], dtype=DTYPES[(i + case) % 3], device=device)
                yield dy, x, gamma, *statistics, case


def _rmsnorm_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, gamma, _, eps, options in _layernorm_fwd(device):
        yield x, gamma, eps, options


def _rmsnorm_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dy, x, gamma, _, rstd, options in _layernorm_bwd(device):
        if options < 8:
            yield dy, x, gamma, rstd, options


ACTIVATION_PARAMETERS = 7.0, 1.702, 1.0
PLAIN_KINDS, GATED_KINDS = (
    [i for i, (_, is_gated) in enumerate(_C.activations()) if is_gated == wanted] for wanted in (False, True)
)


def _activation_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for shape in NORM_SHAPES:
            for kind in PLAIN_KINDS:
                yield rand(*shape, dtype=dtype, device=device), kind, *ACTIVATION_PARAMETERS


def _activation_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, (x, *rest) in enumerate(_activation_fwd(device)):
        yield torch.randn_like(x), x, *rest, i % 3 > 0


def _gated_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for *lead, f in NORM_SHAPES:
            for kind in GATED_KINDS:
                yield rand(*lead, 2 * f, dtype=dtype, device=device), kind, *ACTIVATION_PARAMETERS


def _gated_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, (x, *rest) in enumerate(_gated_fwd(device)):
        yield rand(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=device), x, *rest, i % 3 > 0


FP8_SHAPES = [((16,), 32, 8), ((5, 3), 17, 9), ((), 7, 5), ((0,), 8, 4), ((3,), 0, 4), ((1,), 1, 1)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _amax(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, _ in FP8_SHAPES:
            yield (rand(*lead, k, dtype=dtype, device=device),)


def _quantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, _ in FP8_SHAPES:
            for options in (0b000100, 0b001101, 0b111111, 0b110110, 0b000000):
                scale = scalar(2.5, device) if options & 16 else None
                yield rand(*lead, k, dtype=dtype, device=device), scale, options


def _quantize_into(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, _ in FP8_SHAPES:
            x, m = rand(*lead, k, dtype=dtype, device=device), torch.Size(lead).numel()
            row, col = codes(*lead, k, dtype=E4M3, device=device), codes(k, m, dtype=E4M3, device=device)
            yield x, None, row.clone(), col.clone(), scalar(1.0, device), True
            yield x, scalar(3.0, device), row, None, scalar(1.0, device), False
            yield x, None, None, col, scalar(1.0, device), False


def _cache_weight(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for _, k, n in FP8_SHAPES:
            x, held = rand(n, k, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int32, device=device)
            row, col = codes(n, k, dtype=E4M3, device=device), codes(k, n, dtype=E4M3, device=device)
            for scale in (None, scalar(3.0, device)):
                yield x, scale, row, scalar(1.0, device), col, scalar(1.0, device), held, 3, scale is None


def _refresh_weight(device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield from _cache_weight(device)


def _dequantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in (E4M3, E5M2):
        for i, (lead, k, _) in enumerate(FP8_SHAPES):
            yield codes(*lead, k, dtype=dtype, device=device), scalar(0.3, device), i % 3


def _transpose_codes(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in (E4M3, E5M2):
        for lead, k, _ in FP8_SHAPES:
            yield (codes(*lead, k, dtype=dtype, device=device),)


def _quantize_delayed(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for i, (lead, k, _) in enumerate(FP8_SHAPES):
            options = bits(i % 2, True, i % 3, i % 2, i % 3 == 0, i % 4)
            yield rand(*lead, k, dtype=dtype, device=device), *delayed_slots(device, i % 2), i % 5, options


def _linear_calibrate(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in FP8_SHAPES:
            x, w = rand(*lead, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device)
            yield x, w, *delayed_slots(device), 0b10


def _fp8_operand(t: Tensor, quantized: int) -> tuple[Tensor | None, ...]:
    """The three buffers of a slot that takes either: plain, quantized, quantized with its column copy."""
    if not quantized:
        return t, None, None
    row = t.float().to(E4M3)
    col = row.reshape(row.shape[:-1].numel(), row.shape[-1]).t().contiguous() if quantized == 2 else None
    return row, col, scalar(0.5, t.device)


def _linear_fp8_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for d, dtype in enumerate(DTYPES):
        for lead, k, n in FP8_SHAPES:
            for case in range(6):
                x = _fp8_operand(rand(*lead, k, dtype=dtype, device=device), case // 2)
                w = _fp8_operand(rand(n, k, dtype=dtype, device=device), case % 3)
                b = rand(n, dtype=dtype, device=device) if case % 2 else None
                yield *x, *w, b, d, bits(case > 1, case != 3, case == 4, case == 5, case % 2)


def _linear_fp8_fwd_delayed(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(_linear_fp8_fwd(device)):
        yield *args[:-1], args[-1] | bits(i % 2, i % 3, i % 4, i % 5) << 5, *delayed_slots(device, i % 2)


def _linear_fp8_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for d, dtype in enumerate(DTYPES):
        for lead, k, n in FP8_SHAPES:
            m = torch.Size(lead).numel()
            for case in range(16):
                dy = _fp8_operand(rand(*lead, n, dtype=dtype, device=device), case % 3)
                need_dx, need_dw, need_db, keep = case & 1, case & 2, case & 4, case & 8
                x, w = (
                    (codes(*shape, dtype=E4M3, device=device), scalar(0.25, device))
                    if needed
                    else (None, None)
                    for needed, shape in ((need_dw, (k, m)), (need_dx, (k, n)))
                )
                e5m2 = case % 3 == 0 and case % 2
                yield *dy, *x, *w, d, case % 3, bits(need_dx, need_dw, need_db, keep, e5m2, case % 5 == 0)


def _linear_fp8_bwd_delayed(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(_linear_fp8_bwd(device)):
        yield *args[:-1], args[-1] | (i % 4) << 8, *delayed_slots(device, i % 2)


def _linear_fp8_bwd_main_grad(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(_linear_fp8_bwd(device)):
        options = args[-1] & ~0b1000 | (i % 8) << 8
        n, k = args[0].shape[-1], args[3].shape[0] if args[3] is not None else 0
        grad = rand(n, k, dtype=DTYPES[i % 3], device=device) if options & 2 else None
        delayed = delayed_slots(device, i % 2) if i % 3 else (None, None, None, 0, 0)
        yield *args[:-1], options, *delayed, grad


def _linear_fp8_wgrad(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, (lead, k, n) in enumerate(FP8_SHAPES):
        m = torch.Size(lead).numel()
        dy = codes(n, m, dtype=(E4M3, E5M2)[i % 2], device=device)
        x = codes(k, m, dtype=E4M3, device=device)
        yield dy, scalar(0.5, device), x, scalar(2.0, device), i % 3, bool(i % 2)


def _linear_fp8_wgrad_into(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for i, (*args, _, fast) in enumerate(_linear_fp8_wgrad(device)):
        grad = rand(args[0].shape[0], args[2].shape[0], dtype=DTYPES[i % 3], device=device)
        yield *args, grad, i % 2 == 0, fast


CASES: dict[str, Callable[[torch.device], Iterator[tuple[Any, ...]]]] = {
    f"te_ops::{function.__name__.removeprefix('_')}": function
    for function in (
        _linear_fwd, _linear_bwd, _linear_wgrad, _layernorm_fwd, _layernorm_bwd, _rmsnorm_fwd, _rmsnorm_bwd,
        _activation_fwd, _activation_bwd, _gated_fwd, _gated_bwd, _amax,
        _quantize, _quantize_into, _cache_weight,
        _refresh_weight, _dequantize, _transpose_codes, _quantize_delayed, _linear_calibrate, _linear_fp8_fwd,
        _linear_fp8_fwd_delayed,
        _linear_fp8_bwd, _linear_fp8_bwd_delayed, _linear_fp8_bwd_main_grad, _linear_fp8_wgrad,
        _linear_fp8_wgrad_into,
    )
}  # fmt: skip
