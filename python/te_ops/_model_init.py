"""`quantized_model_init`: layers made inside hold their weights as FP8 codes."""

from __future__ import annotations

from typing import Any

from ._autocast import _default
from .recipe import Recipe


class _Init:
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.preserve = False


state = _Init()


class quantized_model_init:
    """Layers made in this context have `QuantizedTensor` weights: no high-precision copy is kept.

    Torch's optimizers step on them (each step dequantizes, updates, quantizes again); for training, keep fp32 master
    weights elsewhere and write ``param.copy_(master)``.

    Args:
        enabled: False makes an inner context create plain weights.
        recipe: how weights are quantized; None is `DelayedScaling()`. Weights always scale by their own amax.
        preserve_high_precision_init_val: keep the initial values, in the nominal dtype on the CPU, for
            ``weight.get_high_precision_init_val()``, until ``weight.clear_high_precision_init_val()``.

    Raises:
        TypeError: `recipe` is not a te_ops recipe.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"te_ops.quantized_model_init: recipe is a {type(recipe).__module__}.{type(recipe).__qualname__}: "
                "must be a recipe of te_ops.recipe"
            )
        self.recipe = (_default if recipe is None else recipe) if enabled else None
        self.preserve = preserve_high_precision_init_val
        self._outer: list[tuple[Any, bool]] = []

    def __enter__(self) -> quantized_model_init:
        self._outer.append((state.recipe, state.preserve))
        state.recipe, state.preserve = self.recipe, self.preserve
        return self

    def __exit__(self, *exception: Any) -> None:
        state.recipe, state.preserve = self._outer.pop()


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """`quantized_model_init` under Transformer Engine's older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
