"""`autocast` as Dynamo sees it: which recipe compiled code follows, and what its regions count.

The functions here stand for layers: their result tells which recipe they ran under. Eager regions: test_recipe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import compiled
from te_ops import _autocast
from te_ops._autocast import get_recipe, region, state
from te_ops.recipe import DelayedScaling, Float8CurrentScaling, Format
from torch import Tensor

IDLE = (None, False, None, 0, False)


def active() -> tuple[Any, ...]:
    return state.recipe, state.calibrating, state.amax_reduction_group, state.depth, state.recomputing


@pytest.fixture(autouse=True)
def nothing_stays_active() -> Iterator[None]:
    yield
    left = active()
    state.recipe, state.calibrating, state.amax_reduction_group, state.depth, state.recomputing = IDLE  # type: ignore[assignment]
    assert left == IDLE


def layer(x: Tensor) -> Tensor:
    """x times a number that depends on the active recipe: 1 without one."""
    recipe = state.recipe
    if recipe is None:
        return x
    if isinstance(recipe, DelayedScaling):
        return x * (2 + recipe.margin) * (10 if recipe.fp8_format is Format.E4M3 else 1)
    return x * (50 if recipe.power_2_scales()[0] else 40)  # type: ignore[attr-defined]


def counter(device: torch.device) -> Tensor:
    return region(torch.zeros(1, device=device).device)


def test_three_nested_recipes_are_one_graph(backend: str) -> None:
    delayed, wide, current = DelayedScaling(), DelayedScaling(margin=3), Float8CurrentScaling()

    def run(x: Tensor) -> tuple[Tensor, ...]:
        results = [layer(x)]
        with te.autocast(recipe=delayed):
            results.append(layer(x))
            with te.autocast(recipe=wide):
                results.append(layer(x))
                with te.fp8_autocast(enabled=True, fp8_recipe=current):
                    results.append(layer(x))
                    with te.autocast(enabled=False):
                        results.append(layer(x))
                    results.append(layer(x))
                results.append(layer(x))
            results.append(layer(x))
        return (*results, layer(x))

    fn, count = compiled(run, backend)
    for _ in range(3):
        assert [y.item() for y in fn(torch.ones(1))] == [1, 2, 5, 40, 1, 40, 5, 2, 1]
    assert count.frame_count == 1
    wide.margin, current.use_power_2_scales = 4, True
    for _ in range(2):
        assert [y.item() for y in fn(torch.ones(1))] == [1, 2, 6, 50, 1, 50, 6, 2, 1]
    assert count.frame_count == 2


def test_regions_around_compiled_code(backend: str) -> None:
    """One graph for each thing that a recipe says; none for another depth, region, or equal recipe."""
    fn, count = compiled(layer, backend)
    x = torch.ones(1)
    for _ in range(2):
        assert fn(x).item() == 1
        with te.autocast(recipe=DelayedScaling()):
            assert fn(x).item() == 2
            with te.autocast(recipe=DelayedScaling(margin=3)):
                assert fn(x).item() == 5
                with te.autocast(enabled=False):
                    assert fn(x).item() == 1
            with te.autocast(recipe=Float8CurrentScaling()):
                assert fn(x).item() == 40
            assert fn(x).item() == 2
    assert count.frame_count == 4


def test_recipes_made_in_compiled_code(backend: str) -> None:
    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling(margin=1)):
            x = layer(x)
            with te.autocast(recipe=Float8CurrentScaling()):
                return layer(x)

    fn, count = compiled(run, backend)
    for _ in range(3):
        assert fn(torch.ones(1)).item() == run(torch.ones(1)).item() == 3 * 40
        assert active() == IDLE
    assert count.frame_count == 1


def test_a_region_inside_one_outside() -> None:
    outer, inner = DelayedScaling(), Float8CurrentScaling()

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=inner):
            y = layer(x)
        return layer(y)

    fn, count = compiled(run, "aot_eager")
    for _ in range(2):
        assert fn(torch.ones(1)).item() == 40
        with te.autocast(recipe=outer):
            assert fn(torch.ones(1)).item() == 80
            assert state.recipe is outer
    assert count.frame_count == 2


def test_all_of_the_state_is_restored() -> None:
    group = object()
    outer, inner = DelayedScaling(), DelayedScaling(reduce_amax=False)

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=inner, calibrating=False, amax_reduction_group=None):
            return layer(x)

    fn, _ = compiled(run, "aot_eager")
    for call in (run, fn):
        with te.autocast(enabled=False, calibrating=True, recipe=outer, amax_reduction_group=group):
            inside = (*active(), state.calibration_recipe)
            call(torch.ones(1))
            assert (*active(), state.calibration_recipe) == inside == (None, True, group, 1, False, outer)
        assert state.calibration_recipe is None


def test_the_recipe_asked_for() -> None:
    recipe = Float8CurrentScaling()
    assert get_recipe() is None
    with te.autocast(recipe=recipe):
        assert get_recipe() is recipe
        with te.autocast(enabled=False, recipe=recipe):
            assert get_recipe() is None
    with te.autocast():
        first = get_recipe()
    with te.fp8_autocast(True, False, None, None, False):
        assert first is get_recipe()
    assert first == DelayedScaling()


@pytest.mark.parametrize("what", [3, DelayedScaling, type("DelayedScaling", (), {})()])
def test_what_is_no_recipe(what: Any) -> None:
    match = r"te_ops\.autocast: recipe is a \S+\.\w+: must be a recipe of te_ops\.recipe"
    with pytest.raises(TypeError, match=match):
        te.autocast(recipe=what)
    with pytest.raises(TypeError, match=match):
        te.fp8_autocast(fp8_recipe=what)


def test_no_recipe_in_compiled_code() -> None:
    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=3):  # type: ignore[arg-type]
            return x + 1

    fn, _ = compiled(run, "aot_eager")
    with pytest.raises(Exception, match=r"recipe is a builtins\.int: must be a recipe of te_ops\.recipe"):
        fn(torch.ones(1))


def test_decorated_functions() -> None:
    decorated = te.autocast(recipe=DelayedScaling(margin=1))(layer)
    assert decorated.__name__ == "layer"
    x = torch.ones(1)
    assert decorated(x).item() == 3
    inner, outer = compiled(decorated, "aot_eager"), compiled(lambda x: decorated(x) + layer(x), "aot_eager")
    for _ in range(3):
        assert inner[0](x).item() == 3
        assert outer[0](x).item() == 3 + 1
    assert (inner[1].frame_count, outer[1].frame_count) == (1, 1)


def test_a_decorated_function_that_calls_itself() -> None:
    @te.autocast(recipe=Float8CurrentScaling())
    def depths(n: int) -> list[int]:
        return [state.depth, *(depths(n - 1) if n else [])]

    assert depths(2) == [1, 2, 3]
    assert depths(0) == [1]


def test_an_object_made_outside_of_compiled_code() -> None:
    """Works on torch 2.15; 2.11 refuses to compile it, and then nothing may be left active."""
    again = te.autocast(recipe=DelayedScaling(margin=1))

    def run(x: Tensor) -> Tensor:
        with again:
            x = layer(x)
            with again:
                x = layer(x)
        with again:
            return layer(x)

    fn, _ = compiled(run, "aot_eager")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="does not know how to enter"):
            fn(torch.ones(1))
    else:
        assert [fn(torch.ones(1)).item() for _ in range(3)] == [27.0] * 3
    assert run(torch.ones(1)).item() == 27  # and the object is as good as new


# --------------------------------------------------------------------------------------- exceptions ------


def test_exceptions_caught_in_compiled_code(backend: str) -> None:
    recipe = DelayedScaling()

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=Float8CurrentScaling()):
            try:
                with te.autocast(recipe=recipe):
                    x = layer(x)
                    raise KeyError
            except KeyError:
                x = layer(x)
        return layer(x) + 1

    fn, count = compiled(run, backend)
    for _ in range(3):
        assert fn(torch.ones(1)).item() == run(torch.ones(1)).item() == 2 * 40 + 1
        assert active() == IDLE
    assert count.frame_count == 1


@pytest.mark.parametrize("fullgraph", [True, False])
def test_exceptions_that_leave_compiled_code(fullgraph: bool) -> None:
    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling()):
            layer(x)
            raise KeyError("mine")

    fn = torch.compile(run, fullgraph=fullgraph, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported if fullgraph else KeyError, match="mine"):
            fn(torch.ones(1))
        assert active() == IDLE


def test_exits_out_of_order_in_compiled_code() -> None:
    def run(x: Tensor) -> Tensor:
        first, second = te.autocast(recipe=DelayedScaling()), te.autocast(recipe=Float8CurrentScaling())
        first.__enter__()
        second.__enter__()
        try:
            first.__exit__(None, None, None)
        except RuntimeError:
            x = layer(x)  # second's
        second.__exit__(None, None, None)
        x = layer(x)  # first's
        first.__exit__(None, None, None)
        return x

    fn, _ = compiled(run, "aot_eager")
    assert fn(torch.ones(1)).item() == run(torch.ones(1)).item() == 40 * 2

    def never_entered(x: Tensor) -> Tensor:
        te.autocast().__exit__(None, None, None)
        return x

    fn, _ = compiled(never_entered, "aot_eager")
    with pytest.raises(Exception, match="exited out of order: it is not active"):
        fn(torch.ones(1))


def test_a_region_whose_entry_failed_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the all-reduce at its entry fails."""

    def fail(*args: Any) -> None:
        raise RuntimeError("a rank is gone")

    failed, other = te.autocast(), te.autocast(recipe=Float8CurrentScaling())
    with monkeypatch.context() as patch:
        patch.setattr(_autocast, "_enter_outermost", fail)
        with pytest.raises(RuntimeError, match="a rank is gone"):
            failed.__enter__()
    assert active() == IDLE
    with other:
        with pytest.raises(RuntimeError, match="it is not active"):
            failed.__exit__(None, None, None)
        assert (state.recipe, state.depth) == (other.recipe, 1)
    with failed:
        assert state.recipe == DelayedScaling()


# ------------------------------------------------------------------------------------------ counters -----


def once(x: Tensor) -> Tensor:
    with te.autocast(recipe=DelayedScaling()):
        with te.autocast(recipe=Float8CurrentScaling()):
            x = layer(x)
        return layer(x)


def twice(x: Tensor) -> Tensor:
    return once(once(x))


@pytest.mark.parametrize(("function", "entries"), [(once, 1), (twice, 2)])
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_entries_count_at_each_call(
    function: Callable[[Tensor], Tensor], entries: int, grad: bool, device: torch.device, backend: str
) -> None:
    count = counter(device)
    assert (count.dtype, count.shape) == (torch.int32, (1,))
    fn, graphs = compiled(function, backend)
    x = torch.ones(1, device=device, requires_grad=grad)
    for call in (function, fn):
        before = int(count)
        for _ in range(3):
            y = call(x)
            if grad:
                y.backward()  # counts nothing
        assert int(count) == before + 3 * entries
    assert graphs.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_entries_count_whatever_the_mode(mode: Any, device: torch.device) -> None:
    count = counter(device)
    fn, _ = compiled(once, "aot_eager")
    for call in (once, fn):
        before = int(count)
        with mode():
            for _ in range(2):
                call(torch.ones(1, device=device))
        assert int(count) == before + 2


def test_only_outermost_entries_count_in_compiled_code(device: torch.device) -> None:
    count = counter(device)
    fn, graphs = compiled(once, "aot_eager")
    x = torch.ones(1, device=device)
    fn(x)
    for _ in range(2):
        before = int(count)
        with te.autocast():
            for _ in range(3):
                fn(x)
        assert int(count) == before + 1
    assert graphs.frame_count == 2


def test_compiled_code_reads_the_count_of_its_region(device: torch.device, backend: str) -> None:
    count = counter(device)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with te.autocast(recipe=DelayedScaling()):
            first = x * region(x.device)
        with te.autocast(recipe=DelayedScaling()):
            return first, x * region(x.device)

    fn, graphs = compiled(run, backend)
    x = torch.ones(1, device=device)
    for _ in range(3):
        before = int(count)
        assert [int(y) for y in fn(x)] == [before + 1, before + 2]
    assert graphs.frame_count == 1


def test_recomputations_count_nothing(device: torch.device) -> None:
    count = counter(device)
    fn, _ = compiled(once, "aot_eager")
    x = torch.ones(1, device=device)
    for call in (once, fn):
        before = int(count)
        call(x)
        state.recomputing = True
        assert call(x).item() == 2 * 40
        state.recomputing = False
        call(x)
        assert int(count) == before + 2


def test_a_counter_made_after_compiling(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more graph, which counts; never a region that goes uncounted."""
    monkeypatch.setattr(_autocast, "_regions", {})
    fn, graphs = compiled(once, "aot_eager")
    x = torch.ones(1, device=device)
    fn(x)
    count = counter(device)
    assert int(count) == 1
    for _ in range(3):
        fn(x)
    assert int(count) == 1 + 3
    assert graphs.frame_count == 2


def test_a_counter_first_asked_for_in_compiled_code(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autocast, "_regions", {})

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling()):
            return x * region(x.device)

    fn, graphs = compiled(run, "aot_eager")
    x = torch.ones(1, device=device)
    assert [int(fn(x)) for _ in range(4)] == [1, 2, 3, 4]
    assert int(counter(device)) == 4
    assert graphs.frame_count == 2


def test_every_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autocast, "_regions", {torch.device("cpu", i): torch.ones(1) for i in range(2)})
    with te.autocast():
        pass
    assert [int(count) for count in _autocast._regions.values()] == [2, 2]
    assert region(torch.device("cpu")) is _autocast._regions[torch.device("cpu")]
