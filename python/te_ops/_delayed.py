"""A module's delayed-scaling state: one int32 tensor (layout: csrc/te_scale.h), seen as scales and histories.

int32, so that no conversion of a module's dtype touches it. It is rolled by the operators, on the device, when
they find that a new autocast region has begun since it was last rolled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCALES, HISTORY, TENSORS = 4, 16, 5
FORWARD, BACKWARD = slice(0, 3), slice(3, 5)  # x, w, y; dy, dx
DEFAULT_LEN = 1024


def new_state(device: torch.device, capacity: int = DEFAULT_LEN) -> Tensor:
    """Scales 1, history 0, for histories of up to `capacity` rows."""
    state = torch.empty(HISTORY + TENSORS * capacity, dtype=torch.int32, device=device)
    reset(state)
    return state


def reset(state: Tensor) -> None:
    state.zero_()
    scales(state).fill_(1.0)


def capacity(state: Tensor) -> int:
    return (state.shape[0] - HISTORY) // TENSORS


def scales(state: Tensor) -> Tensor:
    """The five scales, a view."""
    return state.view(torch.float32)[SCALES : SCALES + TENSORS]


def history(state: Tensor, length: int) -> Tensor:
    """``[length, 5]``, a view; row 0 is being staged."""
    return state.view(torch.float32)[HISTORY : HISTORY + TENSORS * length].view(length, TENSORS)


def resize(state: Tensor, old: int, new: int) -> Tensor:
    """The state for histories of `new` rows: what is staged, and the newest of the rest at the end."""
    kept = history(state, old).clone()
    target = state if new <= capacity(state) else new_state(state.device, new)
    rows = history(target, new)
    rest = kept[1:][max(0, old - new) :]
    if target is not state:
        target[:HISTORY] = state[:HISTORY]
    rows.zero_()
    rows[:1] = kept[:1]
    rows[new - rest.shape[0] :] = rest
    return target


def computed_scales(state: Tensor, recipe: Any) -> Tensor | None:
    """The scales that follow from the history where the recipe has a function of the user's, else None."""
    algo, factor = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    if not callable(algo) and factor is None:
        return None
    rows = history(state, recipe.amax_history_len)
    if callable(algo):
        amax = algo(rows)
    else:
        amax = rows[0] if algo == "most_recent" else rows.amax(0)
    fp8_format = recipe.fp8_format.value
    largest = [fp8_format.max_fwd] * 3 + [fp8_format.max_bwd] * 2
    fp8_max = torch.tensor(largest, dtype=torch.float32, device=state.device)
    old = scales(state)
    if factor is not None:
        result: Tensor = factor(amax, old, fp8_max, recipe)
        return result.to(torch.float32).contiguous()
    scale = fp8_max / amax / 2.0**recipe.margin
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, old)
    return torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
