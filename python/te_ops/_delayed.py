"""A module's delayed-scaling state: one int32 tensor (layout: csrc/te_scale.h), seen as scales and histories.

int32, so that no conversion of a module's dtype touches it. It is rolled by the operators, on the device, when
they find that a new autocast region has begun since it was last rolled.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SCALES, HISTORY, TENSORS = 4, 16, 5
FORWARD, BACKWARD = slice(0, 3), slice(3, 5)  # x, w, y; dy, dx
# Forward and backward each change a state of their own, with the columns that are theirs, since compiled code saves
# backward's while forward's changes.
BUFFERS = ("_fp8_state", "_fp8_backward_state")
DEFAULT_LEN = 1024


def outside_inference_mode() -> Any:
    """A context for making what outlives a call: a tensor made in inference mode could never be trained with."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def new_state(device: torch.device, capacity: int = DEFAULT_LEN) -> Tensor:
    """Scales 1, history 0, for histories of up to `capacity` rows."""
    with outside_inference_mode():
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
    if new > capacity(state) and torch.compiler.is_compiling():
        raise RuntimeError(
            f"te_ops: amax_history_len={new} is more than the {capacity(state)} rows a layer has room for, and "
            "compiled code cannot make more: run one forward of the layer under this recipe before compiling it"
        )
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


# ---------------------------------------------------------------------------------- every module's --------

_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(module: nn.Module) -> None:
    """Counts `module` among those whose amaxes are reduced. In the order of calls, which must agree over ranks."""
    _modules[next(_numbers)] = module


def reduce_amaxes(group: Any) -> None:
    """Replaces what every module has staged by the largest over the ranks of `group` (None: all), in one all-reduce.

    Raises:
        RuntimeError: in compiled code, which cannot know what modules there are.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "te_ops.autocast: delayed scaling reduces amaxes over ranks when a region is entered: enter it outside of "
            "the compiled function, or use DelayedScaling(reduce_amax=False)"
        )
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, module in sorted(_modules.items()):
        for name in BUFFERS:
            state: Any = getattr(module, name)
            if not state.is_meta:
                by_device.setdefault(state.device, []).append(history(state, 1)[0])
    for staged in by_device.values():
        flat = torch.cat(staged)
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        for row, reduced in zip(staged, flat.split(TENSORS), strict=True):
            row.copy_(reduced)


def _parts(layer: Any) -> Any:
    """(name, buffer, columns) of forward and of backward."""
    return ("fwd", layer._fp8_state, FORWARD), ("bwd", layer._fp8_backward_state, BACKWARD)


def recipe_state(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What delayed scaling has learnt, as plain tensors: for exact resumption, beside the state dict.

    Args:
        module: a te_ops layer, or a model that has some.

    Returns:
        For each layer, by its name in `module`: ``fwd_scale [3]``, ``fwd_history [len, 3]`` (input, weight, output),
        ``bwd_scale [2]``, ``bwd_history [len, 2]`` (output gradient, input gradient), fp32 copies.
    """
    result: dict[str, dict[str, Tensor]] = {}
    for name, layer in module.named_modules():
        state: Any = getattr(layer, "_fp8_state", None)
        if state is None:
            continue
        result[name] = {}
        for key, buffer, part in _parts(layer):
            length: Any = layer._history_len
            result[name][f"{key}_scale"] = scales(buffer)[part].clone()
            result[name][f"{key}_history"] = history(buffer, length)[:, part].clone()
    return result


def load_recipe_state(module: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
    """Takes what `recipe_state` gave.

    Raises:
        ValueError: names, shapes or dtypes differ from what `module` has; then nothing is changed.
    """
    layers = {n: m for n, m in module.named_modules() if getattr(m, "_fp8_state", None) is not None}
    if layers.keys() != state.keys():
        differing = sorted(layers.keys() ^ state.keys())
        raise ValueError(f"te_ops.load_recipe_state: the names of layers differ: {', '.join(differing)}")
    for name, entry in state.items():
        if set(entry) != {"fwd_scale", "fwd_history", "bwd_scale", "bwd_history"}:
            raise ValueError(f"te_ops.load_recipe_state: {name!r} has the entries {sorted(entry)}")
        rows = entry["fwd_history"].shape[0]
        wanted = {"fwd_scale": (3,), "fwd_history": (rows, 3), "bwd_scale": (2,), "bwd_history": (rows, 2)}
        for key, shape in wanted.items():
            if tuple(entry[key].shape) != shape or entry[key].dtype != torch.float32 or rows < 1:
                raise ValueError(
                    f"te_ops.load_recipe_state: {name!r}: {key} is {entry[key].dtype} {list(entry[key].shape)}: "
                    f"must be float32 {list(shape)}"
                )
        length = layers[name]._history_len
        if rows != length:
            raise ValueError(
                f"te_ops.load_recipe_state: {name!r}: fwd_history has {rows} rows: must have {length}, the history "
                "length of the layer"
            )
    for name, entry in state.items():
        length = int(layers[name]._history_len)  # type: ignore[arg-type]
        for key, buffer, part in _parts(layers[name]):
            buffer[0] = 0  # a region in the past: what is staged rolls at the next one
            scales(buffer)[part] = entry[f"{key}_scale"].to(buffer.device)
            history(buffer, length)[:, part] = entry[f"{key}_history"].to(buffer.device)
