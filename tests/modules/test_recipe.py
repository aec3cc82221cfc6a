"""Recipes and the regions in which they are active."""

from __future__ import annotations

from typing import Any

import pytest
import te_ops as te
import torch
from helpers import compiled
from te_ops._autocast import _regions, state
from te_ops.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams
from torch import Tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(margin=0.5), r"DelayedScaling: margin=0.5: must be an integer"),
        (lambda: DelayedScaling(margin=True), r"margin=True: must be an integer"),
        (lambda: DelayedScaling(amax_history_len=True), r"amax_history_len=True: must be an integer"),
        (
            lambda: DelayedScaling(fp8_format=Format.E5M2),
            r"fp8_format=Format.E5M2: must be Format.E4M3 or Format.HYBRID",
        ),
        (lambda: Float8CurrentScaling(fp8_format=Format.E5M2), r"Float8CurrentScaling: .*Format.HYBRID"),
        (lambda: DelayedScaling(amax_history_len=0), r"amax_history_len=0: must be an integer >= 1"),
        (
            lambda: DelayedScaling(amax_compute_algo="median"),
            r"'median': must be 'max', 'most_recent' or a function",
        ),
        (lambda: DelayedScaling(scaling_factor_compute_algo=3), r"scaling_factor_compute_algo=3"),
        (lambda: DelayedScaling(reduce_amax=1), r"reduce_amax=1: must be True or False"),
        (lambda: DelayedScaling(fp8_dpa=True), r"fp8_dpa=True: must be False"),
        (lambda: Float8CurrentScaling(fp8_format="HYBRID"), r"Float8CurrentScaling: fp8_format='HYBRID'"),
        (lambda: Float8CurrentScaling(use_power_2_scales=None), r"use_power_2_scales=None"),
        (
            lambda: Float8CurrentScaling(fp8_gemm_dgrad=True),
            r"fp8_gemm_dgrad=True: must be a te_ops.recipe.MMParams",
        ),
        (lambda: Float8CurrentScaling(fp8_quant_fwd_inp=True), r"must be a te_ops.recipe.QParams"),
        (lambda: QParams(amax_epsilon=0.1), r"QParams: amax_epsilon=0.1: must be 0.0"),
        (lambda: MMParams(use_split_accumulator=1), r"MMParams: use_split_accumulator=1"),
    ],
)
def test_wrong_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="amax_len"):
        DelayedScaling(amax_len=3)  # type: ignore[call-arg]


def test_defaults_and_questions() -> None:
    delayed, current = DelayedScaling(), Float8CurrentScaling()
    assert (delayed.margin, delayed.fp8_format, delayed.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (delayed.amax_compute_algo, delayed.reduce_amax) == ("max", True)
    assert not current.fp8_gemm_fprop.use_split_accumulator
    assert current.fp8_gemm_dgrad.use_split_accumulator
    assert current.fp8_gemm_wgrad.use_split_accumulator
    assert delayed.delayed()
    assert not delayed.float8_current_scaling()
    assert current.float8_current_scaling()
    assert current.float8_per_tensor_scaling()
    others = (current.mxfp8, current.nvfp4, current.float8_block_scaling, current.custom, current.delayed)
    assert not any(question() for question in others)
    assert "margin=0, fp8_format=Format.HYBRID, amax_history_len=1024" in repr(delayed)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448.0, 57344.0)


def test_changed_options_are_validated_too() -> None:
    current = Float8CurrentScaling()
    current.fp8_quant_bwd_grad.amax_epsilon = 1.0
    with pytest.raises(ValueError, match=r"QParams: amax_epsilon=1.0: must be 0.0"):
        current.validate()
    current = Float8CurrentScaling()
    current.fp8_gemm_wgrad.use_split_accumulator = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"MMParams: use_split_accumulator=None"):
        current.validate()
    delayed = DelayedScaling()
    delayed.margin = 65
    with pytest.raises(ValueError, match=r"margin=65"):
        delayed.validate()


def test_recipes_share_no_options() -> None:
    first, second = Float8CurrentScaling(), Float8CurrentScaling()
    assert first == second
    first.fp8_quant_fwd_inp.power_2_scale = True
    first.fp8_gemm_dgrad.use_split_accumulator = False
    assert second == Float8CurrentScaling()
    assert first.power_2_scales() == (True, False, False)
    first.use_power_2_scales = True
    assert first.power_2_scales() == (True, True, True)


# ------------------------------------------------------------------------------------------- compiled ----


def test_made_and_read_in_compiled_code(backend: str) -> None:
    def run(x: Tensor, margin: int) -> Tensor:
        delayed = DelayedScaling(margin=margin, fp8_format=Format.E4M3, amax_compute_algo="most_recent")
        current = Float8CurrentScaling(
            fp8_quant_fwd_weight=QParams(power_2_scale=True), fp8_gemm_fprop=MMParams(True)
        )
        x = x * 2**delayed.margin + delayed.fp8_format.value.max_bwd
        x = x * 3 if delayed.amax_compute_algo == "most_recent" else x
        x = x * 5 if current.fp8_gemm_fprop.use_split_accumulator else x
        return x * 7 if current.power_2_scales() == (False, True, False) else x

    fn, count = compiled(run, backend)
    x = torch.ones(3)
    assert torch.equal(fn(x, 2), run(x, 2))
    assert torch.equal(fn(x, 2), torch.full((3,), (4 + 448.0) * 3 * 5 * 7))
    assert count.frame_count == 1


def test_wrong_option_in_compiled_code() -> None:
    fn, _ = compiled(lambda x: x * DelayedScaling(margin=99).margin, "aot_eager")
    with pytest.raises(Exception, match=r"DelayedScaling: margin=99: must be an integer from -64 to 64"):
        fn(torch.ones(1))


def test_changed_options_reach_compiled_code() -> None:
    """Each change of an option compiles once; a change back, or an equal recipe, compiles nothing."""
    recipe: Any = None

    def run(x: Tensor) -> Tensor:
        if recipe.delayed():
            x = x * (3 + recipe.margin) * (10 if recipe.fp8_format is Format.E4M3 else 1)
            algo = recipe.amax_compute_algo
            return algo(x) if callable(algo) else x
        x = x * 50 if recipe.power_2_scales()[2] else x * 40
        return x if recipe.fp8_gemm_wgrad.use_split_accumulator else -x

    fn, count = compiled(run, "aot_eager")

    def check(want: float, graphs: int) -> None:
        for _ in range(2):
            assert fn(torch.ones(1)).item() == run(torch.ones(1)).item() == want
        assert count.frame_count == graphs

    recipe = DelayedScaling()
    check(3, 1)
    recipe.margin = 1
    check(4, 2)
    recipe.fp8_format = Format.E4M3
    check(40, 3)
    recipe.amax_compute_algo = torch.neg
    check(-40, 4)
    recipe = DelayedScaling()
    check(3, 4)

    recipe = Float8CurrentScaling()
    check(40, 5)
    recipe.fp8_quant_bwd_grad.power_2_scale = True
    check(50, 6)
    recipe.fp8_gemm_wgrad = MMParams(use_split_accumulator=False)
    check(-50, 7)
    recipe.fp8_gemm_wgrad.use_split_accumulator = True
    recipe.fp8_quant_bwd_grad = QParams()
    check(40, 7)
    recipe = Float8CurrentScaling()
    check(40, 7)
    recipe.use_power_2_scales = True
    check(50, 8)


# -------------------------------------------------------------------------------------------- regions ----


def test_regions_nest_and_restore() -> None:
    outer, inner = DelayedScaling(), Float8CurrentScaling()
    assert state.recipe is None
    with te.autocast(recipe=outer):
        assert state.recipe is outer
        with te.fp8_autocast(True, fp8_recipe=inner):
            assert state.recipe is inner
        with te.autocast(enabled=False):
            assert state.recipe is None
        assert state.recipe is outer
    with pytest.raises(KeyError), te.autocast(recipe=inner):
        raise KeyError
    assert (state.recipe, state.depth) == (None, 0)


def test_one_object_many_times() -> None:
    region = te.autocast(recipe=Float8CurrentScaling())

    @region
    def depth() -> int:
        return state.depth

    with region, region:
        assert depth() == 3
    assert depth() == 1
    assert state.depth == 0


def test_exits_out_of_order() -> None:
    first, second = te.autocast(), te.autocast(recipe=Float8CurrentScaling())
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="a region entered after it is still active"):
        first.__exit__(None, None, None)
    assert (state.recipe, state.depth) == (second.recipe, 2)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="it is not active"):
        first.__exit__(None, None, None)
    assert (state.recipe, state.depth) == (None, 0)


def test_only_outermost_regions_count(device: torch.device) -> None:
    te.Linear(4, 4, device=device)
    counter = _regions[torch.zeros(1, device=device).device]
    before = int(counter)
    for _ in range(2):
        with te.autocast(), te.autocast(), te.autocast(enabled=False):
            pass
    assert int(counter) == before + 2


def test_what_is_available() -> None:
    available, reason = te.is_fp8_available()
    assert te.is_fp8_available(return_reason=False) == (available, reason)
    assert available == (reason == "")
    statuses = {name: entry["status"] for name, entry in te.info()["recipes"].items()}
    assert statuses["DelayedScaling"] == ("native" if available else "emulated")
    assert statuses["MXFP8BlockScaling"] == "unavailable"
