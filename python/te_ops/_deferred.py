"""Weight gradients put off until `backward_dw()`: what a backward leaves behind for later.

A module that delays its weight gradients has a queue here, found by the number in its token, a small CPU
tensor. Eager backward appends to the queue directly. Compiled backward goes through an operator that
declares the token as mutated, so that the compiler keeps it, once, in order; it copies what it is given,
since compiled code reuses its buffers. The number travels as data and not as a constant of the graph, so
that identical layers share a graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """One backward that waits.

    Without scales, dy ``[*M, N]`` and x ``[*M, K]`` are plain; with them, both are the column copies of
    quantized tensors, ``[N, M]`` and ``[K, M]``.
    """

    dy: torch.Tensor
    dy_scale_inv: torch.Tensor | None
    x: torch.Tensor
    x_scale_inv: torch.Tensor | None
    accumulate: bool  # whether main_grad is added to
    fast: bool  # accumulation, of a quantized product


_QUEUES: dict[int, deque[tuple[Entry, int]]] = {}
_numbers = itertools.count()

# The queue lives outside of a CUDA graph, so a graph cannot replay an append.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def new_token(owner: Any) -> torch.Tensor:
    """[number, appends from compiled code] of a new queue, which lives as long as `owner`."""
    number = next(_numbers)
    _QUEUES[number] = deque()
    weakref.finalize(owner, _QUEUES.pop, number, None)
    return torch.tensor([number, 0], device="cpu")


@torch.library.custom_op("te_ops::defer_wgrad", mutates_args=("token",), tags=_TAGS)
def defer_wgrad(
    dy: torch.Tensor,
    dy_scale_inv: torch.Tensor | None,
    x: torch.Tensor,
    x_scale_inv: torch.Tensor | None,
    token: torch.Tensor,
    accumulate: bool,
    fast: bool,
) -> None:
    """Appends copies of the tensors to the queue of `token`."""
    token[1] += 1
    copies = [None if t is None else t.clone() for t in (dy, dy_scale_inv, x, x_scale_inv)]
    _append(Entry(*copies, accumulate, fast), token)  # type: ignore[arg-type, call-arg]


def _append(entry: Entry, token: torch.Tensor) -> None:
    version = 0 if entry.x.is_inference() else entry.x._version
    _QUEUES[int(token[0])].append((entry, version))


def put(entry: Entry, token: torch.Tensor) -> None:
    """Appends `entry` to the queue of `token`."""
    if torch.compiler.is_compiling():
        dy, dy_scale_inv, x, x_scale_inv, accumulate, fast = entry
        defer_wgrad(dy, dy_scale_inv, x, x_scale_inv, token, accumulate, fast)
    else:
        _append(entry, token)


def pop(token: torch.Tensor) -> Entry | None:
    """The oldest entry, or None.

    Raises:
        RuntimeError: its x was changed in place since its backward.
    """
    queue = _QUEUES[int(token[0])]
    if not queue:
        return None
    entry, version = queue.popleft()
    if not entry.x.is_inference() and entry.x._version != version:
        raise RuntimeError(
            "te_ops.Linear: backward_dw(): the layer's input was modified in place after its backward, which "
            "the weight gradient still needs"
        )
    return entry
