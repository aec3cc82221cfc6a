"""Weight gradients put off until `backward_dw()`: what a backward leaves behind for later.

A module that delays its weight gradients owns a one-element buffer, its queue token. Entries are kept here,
under the address of that buffer. Eager backward appends to the queue directly. Compiled backward goes
through an operator that declares the token as mutated, so that the compiler keeps it, in order; it copies
what it is given, since compiled code reuses its buffers.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch


class Entry(NamedTuple):
    """One backward that waits: dy ``[*M, N]``, x ``[*M, K]``, and whether main_grad is added to."""

    dy: torch.Tensor
    x: torch.Tensor
    accumulate: bool


_PENDING: dict[int, deque[Entry]] = {}

# The queue lives outside of a CUDA graph, so a graph cannot replay an append.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def new_token(device: torch.device) -> torch.Tensor:
    """A queue token: it counts the entries that compiled code has appended."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@torch.library.custom_op("te_ops::defer_wgrad", mutates_args=("token",), tags=_TAGS)
def defer_wgrad(dy: torch.Tensor, x: torch.Tensor, token: torch.Tensor, accumulate: bool) -> None:
    """Appends copies of `dy` and `x` to the queue of `token`."""
    token.add_(1)
    append(Entry(dy.clone(), x.clone(), accumulate), token)


def append(entry: Entry, token: torch.Tensor) -> None:
    _PENDING.setdefault(token.data_ptr(), deque()).append(entry)


def pop(token: torch.Tensor) -> Entry | None:
    """The oldest entry, or None."""
    queue = _PENDING.get(token.data_ptr())
    if not queue:
        return None
    entry = queue.popleft()
    if not queue:
        del _PENDING[token.data_ptr()]
    return entry


def move(old: int, token: torch.Tensor) -> None:
    """The token has new storage: its queue follows."""
    if old != token.data_ptr() and (queue := _PENDING.pop(old, None)):
        _PENDING[token.data_ptr()] = queue


def discard(address: int) -> None:
    _PENDING.pop(address, None)
