"""Controls of the CUDA GEMM plan cache."""

from __future__ import annotations

from . import _C


def set_gemm_autotune(candidates: int) -> None:
    """Times this many of cuBLASLt's candidates once for each new GEMM problem, and keeps the fastest.

    1, the default, takes the first candidate untimed. Timing synchronises with the GPU, so it happens
    only outside of CUDA graph capture; a problem first met during a capture stays untimed there. Call it
    before the first step: problems that already have a plan keep it. The choice may differ between runs,
    and with it the last bits of results. Without CUDA code it has no effect.

    Args:
        candidates: 1 to 16.

    Raises:
        ValueError: out of range.
    """
    if not 1 <= candidates <= 16:
        raise ValueError(f"te_ops.set_gemm_autotune: candidates={candidates!r}: must be from 1 to 16")
    if hasattr(_C, "set_gemm_autotune"):
        _C.set_gemm_autotune(candidates)


def gemm_cache_info() -> dict[str, int]:
    """``size``, ``capacity``, ``hits`` and ``misses`` of the plan cache; zeros without CUDA code."""
    if hasattr(_C, "gemm_cache"):
        return _C.gemm_cache()
    return {"size": 0, "capacity": 0, "hits": 0, "misses": 0}
