"""Activation checkpointing that keeps delayed scaling's promise: a recomputation uses the scales of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._autocast import state


class Scales:
    """The scales that each layer of a checkpointed function used, in the order of use."""

    def __init__(self) -> None:
        self.used: list[tuple[Tensor, Tensor]] = []
        self.replay: Iterator[tuple[Tensor, Tensor]] | None = None

    def state(self, own: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
        """Forward's state and region: a layer's own, or in a recomputation copies as its forward found them.

        With both, the operator repeats what it did: it rolls the copy exactly if it rolled the original.
        """
        if self.replay is not None:
            copies = next(self.replay)
            return copies[0].clone(), copies[1]
        with torch.no_grad():
            self.used.append((own.clone(), region.clone()))
        return own, region


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` without keeping its activations; backward computes them again.

    Like `torch.utils.checkpoint.checkpoint`, and in addition a recomputation runs under the recipe that was active
    here, with the scales that the forward used, and stages no amax a second time, also when autocast regions are
    entered inside `function` or later steps have begun in between.

    Args:
        function: what to run; deterministic, as for `torch.utils.checkpoint`.
        args, kwargs: its arguments.
        use_reentrant: passed on to `torch.utils.checkpoint`.

    Raises:
        ValueError: ``use_reentrant=True`` with keyword arguments, which PyTorch does not support.
    """
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    if use_reentrant and kwargs:
        raise ValueError("te_ops.checkpoint: use_reentrant=True takes no keyword arguments")
    scales = Scales()
    outer = state.snapshot()
    runs = 0

    def run(*inner: Any, **named: Any) -> Any:
        nonlocal runs
        runs += 1
        with _replaying(scales, outer) if runs > 1 else _recording(scales):
            return function(*inner, **named)

    return torch_checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


@contextmanager
def _recording(scales: Scales) -> Iterator[None]:
    before, state.checkpoint = state.checkpoint, scales
    try:
        yield
    finally:
        state.checkpoint = before


@contextmanager
def _replaying(scales: Scales, outer: tuple[Any, ...]) -> Iterator[None]:
    """The recipe of the forward and its scales; entering a region inside does not count as a new one."""
    before = state.snapshot(), state.recomputing, state.checkpoint
    scales.replay = iter(scales.used)
    state.restore(outer)
    state.recomputing, state.checkpoint = True, scales
    try:
        yield
    finally:
        state.restore(before[0])
        state.recomputing, state.checkpoint = before[1:]
