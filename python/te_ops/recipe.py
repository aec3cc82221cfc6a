"""Recipes: how layers quantize. Names, fields and defaults are Transformer Engine's.

Rules of arithmetic that all recipes share are in docs/recipes.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import torch

__all__ = ["DelayedScaling", "Float8CurrentScaling", "Format", "MMParams", "QParams", "Recipe"]


class _Largest(NamedTuple):
    """The largest values of the forward and the backward format."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 element formats: E4M3 for everything, or HYBRID, which has E5M2 for gradients.

    E5M2 for everything exists as a name only: every recipe refuses it.
    """

    E4M3 = _Largest(448.0, 448.0)
    E5M2 = _Largest(57344.0, 57344.0)
    HYBRID = _Largest(448.0, 57344.0)

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def _bad(recipe: Any, option: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"te_ops.recipe.{type(recipe).__name__}: {option}={value!r}: must be {rule}")


def _require_bool(owner: Any, *options: str) -> None:
    for option in options:
        value = getattr(owner, option)
        if not isinstance(value, bool):
            raise _bad(owner, option, value, "True or False")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class MMParams:
    """Options of one GEMM.

    Attributes:
        use_split_accumulator: accumulate in full fp32, not in the tensor cores' fast mode, which keeps fewer
            bits between steps and is a few percent faster.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        _require_bool(self, "use_split_accumulator")


@dataclass
class QParams:
    """Options of one quantization.

    Attributes:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: must be 0.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        _require_bool(self, "power_2_scale")
        if self.amax_epsilon != 0.0:
            raise _bad(self, "amax_epsilon", self.amax_epsilon, "0.0: other values are not supported")


# Functions, since compiled code cannot call a class through a dataclass' default_factory.
def _q_params() -> QParams:
    return QParams()


def _fast() -> MMParams:
    return MMParams(use_split_accumulator=False)


def _split() -> MMParams:
    return MMParams(use_split_accumulator=True)


class Recipe:
    """What all recipes are: plain dataclasses, whose options may be changed and are read at each use."""

    def validate(self) -> None:
        """Raises ValueError for an option that cannot work; runs at construction, and whenever it is called."""

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def float8_block_scaling(self) -> bool:
        return False

    def mxfp8(self) -> bool:
        return False

    def nvfp4(self) -> bool:
        return False

    def custom(self) -> bool:
        return False

    def _check_common(self) -> None:
        value = getattr(self, "fp8_format", None)
        if value not in (Format.E4M3, Format.HYBRID):
            raise _bad(self, "fp8_format", value, "Format.E4M3 or Format.HYBRID")
        for option in ("fp8_dpa", "fp8_mha"):
            if getattr(self, option) is not False:
                raise _bad(self, option, getattr(self, option), "False: te_ops has no attention")

    def __repr__(self) -> str:
        options = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
        )
        return f"{type(self).__name__}({options})"


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """Per-tensor FP8 whose scales come from the amaxes of earlier steps, so that one pass casts and records.

    scale = (fp8_max / amax) / 2^margin, where amax is taken from a history of one entry a step.

    Attributes:
        margin: the scale is divided by 2^margin.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: entries of the history, the one being staged included.
        amax_compute_algo: "max" of the history, "most_recent", or a function of the history (``[len, tensors]``)
            that returns one amax a tensor.
        scaling_factor_compute_algo: None for the formula above, or a function ``(amax, scale, fp8_max, recipe)``
            that returns the new scales.
        reduce_amax: reduce amaxes (MAX) over ``amax_reduction_group`` of `te_ops.autocast`.
        fp8_dpa, fp8_mha: must be False.

    Raises:
        ValueError: an option has a value that is not allowed; the message lists those that are.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        self._check_common()
        _require_bool(self, "reduce_amax")
        if not _is_int(self.margin) or not -64 <= self.margin <= 64:
            raise _bad(self, "margin", self.margin, "an integer from -64 to 64")
        if not _is_int(self.amax_history_len) or self.amax_history_len < 1:
            raise _bad(self, "amax_history_len", self.amax_history_len, "an integer >= 1")
        algo = self.amax_compute_algo
        if not callable(algo) and algo not in ("max", "most_recent"):
            raise _bad(self, "amax_compute_algo", algo, "'max', 'most_recent' or a function")
        factor = self.scaling_factor_compute_algo
        if factor is not None and not callable(factor):
            raise _bad(self, "scaling_factor_compute_algo", factor, "None or a function")


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 whose scales come from the tensor itself: scale = fp8_max / amax.

    Attributes:
        use_power_2_scales: round all scales down to powers of two.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: the same, for one kind of tensor.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: how each GEMM accumulates.
        fp8_dpa, fp8_mha: must be False.

    Raises:
        ValueError: an option has a value that is not allowed; the message lists those that are.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(default_factory=_q_params)
    fp8_quant_fwd_weight: QParams = field(default_factory=_q_params)
    fp8_quant_bwd_grad: QParams = field(default_factory=_q_params)
    fp8_gemm_fprop: MMParams = field(default_factory=_fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=_split)
    fp8_gemm_wgrad: MMParams = field(default_factory=_split)
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def power_2_scales(self) -> tuple[bool, bool, bool]:
        """Whether scales are powers of two, for inputs, weights and gradients."""
        if self.use_power_2_scales:
            return True, True, True
        return (
            self.fp8_quant_fwd_inp.power_2_scale,
            self.fp8_quant_fwd_weight.power_2_scale,
            self.fp8_quant_bwd_grad.power_2_scale,
        )

    def validate(self) -> None:
        self._check_common()
        _require_bool(self, "use_power_2_scales")
        for option in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            quant = getattr(self, option)
            if not isinstance(quant, QParams):
                raise _bad(self, option, quant, "a te_ops.recipe.QParams")
            quant.validate()  # it may have been changed since it was made
        for option in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            gemm = getattr(self, option)
            if not isinstance(gemm, MMParams):
                raise _bad(self, option, gemm, "a te_ops.recipe.MMParams")
            gemm.validate()
