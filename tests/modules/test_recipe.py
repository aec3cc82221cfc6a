"""Recipes and the regions in which they are active."""

from __future__ import annotations

from typing import Any

import pytest
import te_ops as te
import torch
from te_ops._autocast import _regions, state
from te_ops.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(margin=0.5), r"DelayedScaling: margin=0.5: must be an integer"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), r"must be Format.E4M3 or Format.HYBRID"),
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
    assert "margin=0" in repr(delayed)


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
    assert available == (reason == "")
    statuses = {name: entry["status"] for name, entry in te.info()["recipes"].items()}
    assert statuses["DelayedScaling"] == ("native" if available else "emulated")
    assert statuses["MXFP8BlockScaling"] == "unavailable"
