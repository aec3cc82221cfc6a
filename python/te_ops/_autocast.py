"""Which recipe is active: `autocast` regions, and the counters by which delayed scaling tells them apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _delayed
from .recipe import DelayedScaling, Recipe


class _State:
    """What is active now. Plain attributes of one object, which compiled code guards on: a thread-local read
    gave compiled code the recipe of its first call."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.calibrating = False
        self.calibration_recipe: Recipe | None = None
        self.amax_reduction_group: Any = None
        self.depth = 0
        self.recomputing = False
        self.checkpoint: Any = None  # te_ops._checkpoint.Scales while a checkpointed function runs

    def snapshot(self) -> tuple[Any, ...]:
        """What an exit, or a recomputation, restores."""
        return self.recipe, self.calibrating, self.calibration_recipe, self.amax_reduction_group, self.depth

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        self.recipe, self.calibrating, self.calibration_recipe, self.amax_reduction_group, self.depth = (
            snapshot
        )


state = _State()
_default = DelayedScaling()
_regions: dict[torch.device, Tensor] = {}


def region(device: torch.device) -> Tensor:
    """The counter of outermost regions entered, an int32 tensor ``[1]`` on `device`.

    On the device, so that a recorded CUDA graph counts too. It is made at the first call for a device, which is a
    tensor's: with its index.
    """
    counter = _regions.get(device)
    if counter is None:
        with _delayed.outside_inference_mode():
            counter = torch.ones(1, dtype=torch.int32, device=device)
        if type(counter) is Tensor:  # not a fake one, made while something is traced
            _regions[device] = counter
    return counter


def _enter_outermost(recipe: Recipe, group: Any) -> None:
    if state.recomputing:
        return
    if isinstance(recipe, DelayedScaling) and recipe.reduce_amax and torch.distributed.is_available():
        _delayed.reduce_amaxes(group)
    for counter in _regions.values():
        counter.add_(1)


class autocast:
    """Runs te_ops' layers under a recipe: ``with te_ops.autocast(recipe=...):``.

    Regions nest; each exit restores what was active before. An instance may be entered again, and works as a
    decorator. Wrap the forward only: backward follows the recipe of its forward. In compiled functions, make the
    instance where it is entered: PyTorch 2.11 cannot compile entering one that was made outside of them.

    Args:
        enabled: whether layers quantize. False makes an inner region run in high precision.
        calibrating: collect amaxes for delayed scaling while ``enabled=False``, or under no_grad.
        recipe: a `te_ops.recipe` object; None is `DelayedScaling()`.
        amax_reduction_group: process group over which delayed scaling reduces amaxes; None is all ranks.

    Raises:
        TypeError: `recipe` is not a te_ops recipe.
        RuntimeError: on exit, if this region is not the innermost one.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            kind = type(recipe)
            raise TypeError(
                f"te_ops.autocast: recipe is a {kind.__module__}.{kind.__qualname__}: "
                "must be a recipe of te_ops.recipe"
            )
        self.enabled = bool(enabled)
        self.calibrating = bool(calibrating)
        self.recipe = _default if recipe is None else recipe
        self.amax_reduction_group = amax_reduction_group
        self._outer: list[tuple[Any, ...]] = []

    def __enter__(self) -> autocast:
        outer = state.snapshot()
        if state.depth == 0:
            _enter_outermost(self.recipe, self.amax_reduction_group)
        self._outer.append(outer)  # after what may raise: a region that was not entered must not be exited
        state.recipe = self.recipe if self.enabled else None
        state.calibrating = self.calibrating
        state.calibration_recipe = self.recipe
        state.amax_reduction_group = self.amax_reduction_group
        state.depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self._outer or state.depth != self._outer[-1][4] + 1:
            raise RuntimeError(
                "te_ops.autocast: exited out of order: "
                + ("it is not active" if not self._outer else "a region entered after it is still active")
            )
        state.restore(self._outer.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            # An object made here, since PyTorch 2.11 cannot compile entering one that was made elsewhere.
            with autocast(self.enabled, self.calibrating, self.recipe, self.amax_reduction_group):
                return function(*args, **kwargs)

        return inside


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` with the argument names of Transformer Engine's older function."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def get_recipe() -> Recipe | None:
    """The recipe that layers called now follow; None outside of regions and where ``enabled=False``."""
    return state.recipe


def is_fp8_available(return_reason: bool = True) -> tuple[bool, str]:
    """Whether FP8 GEMMs run on tensor cores here, and if not, why: then they are emulated, with the same codes.

    Args:
        return_reason: for Transformer Engine's callers. The result is a tuple in any case, so test its first value.
    """
    if not torch.cuda.is_available():
        return False, "no CUDA device: FP8 is emulated on the CPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return False, f"compute capability {major}.{minor} is below 8.9: FP8 is emulated in bf16"
    return True, ""
