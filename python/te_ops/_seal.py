"""Double backward is an error: gradients of te_ops' layers cannot be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients on, and fails where they are differentiated again.

    A missing second derivative must not turn into a silently missing term of a gradient penalty, so the
    first gradients keep a link to everything they depend on.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(
            "te_ops: double backward is not supported: gradients of its layers cannot be differentiated again"
        )


def must_seal() -> bool:
    """Whether gradients must be tied to `seal`: under ``create_graph=True``, in eager."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def seal(grads: Sequence[Tensor | None], *depends_on: Tensor | None) -> tuple[Tensor | None, ...]:
    """`grads`, tied to what they depend on by a step that cannot be differentiated."""
    sealed: tuple[Tensor | None, ...] = _NoDoubleBackward.apply(len(grads), *grads, *depends_on)
    return sealed
