"""Linear, eager: constructor, state dicts, gradients for every subset, AMP, inputs of any rank."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import DTYPES, assert_same_bits, linear, relative_error, step, tolerance
from torch import nn


def reference(layer: te.Linear) -> nn.Linear:
    n = nn.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.use_bias,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    n.load_state_dict(layer.state_dict(), strict=True)
    return n


# ------------------------------------------------------------------------------- constructor --------


def test_arguments_follow_transformer_engine() -> None:
    names = list(inspect.signature(te.Linear).parameters)
    assert names == [
        "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size",
        "get_rng_state_tracker", "rng_tracker_name", "init_method", "bias", "return_bias", "params_dtype",
        "parallel_mode", "parameters_split", "device", "ub_overlap_ag", "ub_overlap_rs",
        "ub_overlap_rs_dgrad",
        "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name", "delay_wgrad_compute", "symmetric_ar_type",
        "save_original_input", "name",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sequence_parallel", True), ("tp_size", 2), ("ub_overlap_ag", True), ("ub_overlap_rs", True),
        ("ub_overlap_rs_dgrad", True), ("ub_bulk_dgrad", True), ("ub_bulk_wgrad", True), ("ub_name", "qkv"),
        ("symmetric_ar_type", "multimem"), ("parallel_mode", "rows"), ("params_dtype", torch.float64),
        ("parameters_split", ("a", "b", "c")), ("parameters_split", {"a": 3, "b": 4}),
        ("parameters_split", ("a", "a_")),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"te_ops.Linear: {argument}"):
        te.Linear(4, 8, device="cpu", **{argument: value})


@pytest.mark.parametrize(("sizes", "argument"), [((-1, 4), "in_features"), ((4, 2.5), "out_features")])
def test_sizes_are_checked(sizes: tuple[Any, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=rf"te_ops.Linear: {argument}="):
        te.Linear(*sizes, device="cpu")


def test_initialization() -> None:
    layer = te.Linear(512, 512, device="cpu")
    assert abs(float(layer.weight.detach().std()) - 0.023) < 0.001
    assert abs(float(layer.weight.detach().mean())) < 0.001
    assert not layer.bias.any()
    assert torch.equal(te.Linear(8, 8, device="cpu", init_method=nn.init.ones_).weight, torch.ones(8, 8))


def test_rng_tracker_forks_around_the_initialization() -> None:
    log: list[Any] = []

    class Tracker:
        @contextmanager
        def fork(self, name: str = "default") -> Any:
            log.append(name)
            yield

    te.Linear(4, 4, device="cpu", get_rng_state_tracker=Tracker)
    te.Linear(4, 4, device="cpu", get_rng_state_tracker=Tracker, rng_tracker_name="model")
    assert log == ["default", "model"]


def test_default_device() -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert te.Linear(2, 2).weight.device.type == best
    with torch.device("cpu"):
        assert te.Linear(2, 2).weight.device.type == "cpu"
    with torch.device("meta"):
        assert te.Linear(2, 2).weight.is_meta
    torch.set_default_device("cpu")
    try:
        assert te.Linear(2, 2).weight.device.type == "cpu"
    finally:
        torch.set_default_device(None)


# ---------------------------------------------------------------------------------- numerics --------


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 4), (0,), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_nn_linear(
    lead: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    layer = linear(24, 10, device, dtype, bias=bias)
    ref = reference(layer).double()
    x = torch.randn(*lead, 24, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(*lead, 10, device=device, dtype=dtype)
    got = step(layer, x, dy, list(layer.parameters()))
    want = step(ref, x.double().detach().requires_grad_(), dy.double(), list(ref.parameters()))
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, dtype)
        assert relative_error(g, w) < 2 * tolerance(dtype, 24)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
def test_gradients_for_every_subset(needs: tuple[bool, bool, bool], device: torch.device) -> None:
    layer = linear(5, 4, device)
    ref = reference(layer)
    x = torch.randn(6, 5, device=device, requires_grad=needs[0])
    for module in (layer, ref):
        module.weight.requires_grad_(needs[1])
        module.bias.requires_grad_(needs[2])
    dy = torch.randn(6, 4, device=device)
    got, want = step(layer, x, dy, [layer.weight, layer.bias]), step(ref, x, dy, [ref.weight, ref.bias])
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert relative_error(g, w) < 1e-6


class CountGemms(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the flags of each backward call."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[int] = []
        self.operands: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.te_ops.linear_bwd.default:
            self.flags.append(args[3])
            self.operands.append([a is not None for a in args[1:3]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "flags", "operands"), [("weight", 1 | 4, [False, True]), ("input", 2 | 4, [True, False])]
)
def test_frozen_parts_cost_no_gemm(frozen: str, flags: int, operands: list[bool]) -> None:
    layer = linear(5, 4, torch.device("cpu"))
    layer.weight.requires_grad_(frozen != "weight")
    x = torch.randn(6, 5, requires_grad=frozen != "input")
    y = layer(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert len(saved) == 1, "what only a frozen part needs is not kept"
    with CountGemms() as count:
        y.sum().backward()
    assert count.flags == [flags]
    assert count.operands == [operands]


def test_non_contiguous_input_and_gradient(device: torch.device) -> None:
    layer = linear(6, 4, device)
    params = list(layer.parameters())
    x, dy = torch.randn(6, 8, device=device).t(), torch.randn(4, 8, device=device).t()
    got = step(layer, x.requires_grad_(), dy, params)
    want = step(layer, x.detach().contiguous().requires_grad_(), dy.contiguous(), params)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 1e-6
    y = layer(x.requires_grad_())
    y.sum().backward()  # a gradient of stride 0
    assert torch.equal(layer.bias.grad, want[3] * 0 + layer.bias.grad)


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_return_bias(lead: tuple[int, ...], device: torch.device) -> None:
    layer = linear(5, 4, device, return_bias=True)
    x = torch.randn(*lead, 5, device=device)
    y, bias = layer(x)
    assert bias is layer.bias
    assert relative_error(y, x.double() @ layer.weight.double().t()) < 1e-6
    assert linear(5, 4, device, return_bias=True, bias=False)(x)[1] is None


@pytest.mark.parametrize("split", [("query_", "key_", "value"), {"query": 2, "key_value": 10}])
def test_parameters_split(split: Any, device: torch.device) -> None:
    layer = linear(5, 12, device, parameters_split=split)
    names = [n.rstrip("_") for n in split]
    assert sorted(layer.state_dict()) == sorted([f"{n}_weight" for n in names] + [f"{n}_bias" for n in names])
    whole = nn.Linear(5, 12, device=device)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([getattr(layer, f"{n}_weight") for n in names]))
        whole.bias.copy_(torch.cat([getattr(layer, f"{n}_bias") for n in names]))
    x, dy = torch.randn(6, 5, device=device, requires_grad=True), torch.randn(6, 12, device=device)
    got = step(layer, x, dy, [getattr(layer, f"{n}_{kind}") for kind in ("weight", "bias") for n in names])
    want = step(whole, x, dy, [whole.weight, whole.bias])
    assert relative_error(got[0], want[0]) < 1e-6
    assert relative_error(got[1], want[1]) < 1e-6
    assert relative_error(torch.cat(got[2 : 2 + len(names)]), want[2]) < 1e-6
    assert relative_error(torch.cat(got[2 + len(names) :]), want[3]) < 1e-6


def test_split_weights_are_initialized_as_one() -> None:
    shapes: list[torch.Size] = []
    layer = te.Linear(
        4,
        6,
        device="cpu",
        parameters_split=("a", "b"),
        init_method=lambda w: shapes.append(w.shape) or w.fill_(2),
    )
    assert shapes == [(6, 4)]
    assert (layer.a_weight == 2).all()


# ------------------------------------------------------------------------------------- dtypes --------


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_autocast(amp_dtype: torch.dtype, x_dtype: torch.dtype, device: torch.device) -> None:
    layer = linear(8, 6, device)
    ref = reference(layer)
    x, dy = (
        torch.randn(5, 8, device=device, dtype=x_dtype, requires_grad=True),
        torch.randn(5, 6, device=device),
    )
    results = []
    for module in (layer, ref):
        x.grad = None
        module.zero_grad()
        with torch.autocast(device.type, amp_dtype):
            y = module(x)
        assert y.dtype == amp_dtype
        y.backward(dy.to(amp_dtype))
        results.append([y, x.grad, module.weight.grad, module.bias.grad])
        assert [t.dtype for t in results[-1]] == [amp_dtype, x_dtype, torch.float32, torch.float32]
    for g, w in zip(*results, strict=True):
        assert relative_error(g, w) < 1e-2


def test_dtypes_must_agree_outside_of_autocast(device: torch.device) -> None:
    layer = linear(8, 6, device)
    with pytest.raises(
        RuntimeError, match=r"te_ops::linear_fwd: w has dtype float32: must be the dtype of x, bfloat16"
    ):
        layer(torch.randn(5, 8, device=device, dtype=torch.bfloat16))


# ----------------------------------------------------------------------------- what it refuses --------


def test_inputs_that_are_no_dense_tensors() -> None:
    layer = linear(4, 4, torch.device("cpu"))
    with pytest.raises(TypeError, match=r"te_ops.Linear: inp must be a torch.Tensor, not list"):
        layer([[1.0, 2.0, 3.0, 4.0]])
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"te_ops.Linear: inp is a nested tensor"):
        layer(jagged)


@pytest.mark.parametrize("flag", ["fp8_output", "fp8_grad"])
def test_fp8_flags_need_a_recipe(flag: str) -> None:
    with pytest.raises(ValueError, match=f"te_ops.Linear: {flag}=True"):
        linear(4, 4, torch.device("cpu"))(torch.randn(2, 4), **{flag: True})


def test_double_backward_is_an_error(device: torch.device) -> None:
    layer = linear(4, 3, device)
    x = torch.randn(5, 4, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    ref = reference(layer)
    (want,) = torch.autograd.grad(ref(x).sum(), x, create_graph=True)
    assert relative_error(dx.detach(), want.detach()) < 1e-6
    with pytest.raises(RuntimeError, match=r"te_ops: double backward is not supported"):
        dx.square().sum().backward()  # a gradient penalty, whose dy needs no gradient
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"te_ops: double backward is not supported"):
        torch.autograd.grad(dx.sum(), x)


# --------------------------------------------------------------- state dicts, copies, conversions --------


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_is_nn_linears(bias: bool, tmp_path: Path) -> None:
    layer, ref = te.Linear(5, 4, device="cpu", bias=bias), nn.Linear(5, 4, bias=bias)
    assert list(layer.state_dict()) == list(ref.state_dict())
    ref.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(nn.Linear(5, 4, bias=bias).state_dict(), strict=True)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    ref.load_state_dict(loaded, strict=True)
    assert_same_bits([ref.weight], [layer.weight])


def with_attributes(layer: te.Linear) -> te.Linear:
    layer.weight.main_grad = torch.arange(layer.weight.numel(), dtype=torch.float32).view_as(layer.weight)
    layer.weight.sharded = ("rows", 2)
    return layer


def test_deepcopy_and_pickle_keep_attributes() -> None:
    layer = with_attributes(linear(5, 4, torch.device("cpu"), delay_wgrad_compute=True))
    for clone in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(nn.Sequential(layer))[0],
    ):
        assert_same_bits(list(clone.parameters()), list(layer.parameters()))
        assert torch.equal(clone.weight.main_grad, layer.weight.main_grad)
        assert clone.weight.main_grad is not layer.weight.main_grad
        assert clone.weight.sharded == ("rows", 2)
        assert_same_bits([clone(torch.ones(2, 5))], [layer(torch.ones(2, 5))])


def test_deepcopy_keeps_tied_weights_tied() -> None:
    a, b = linear(5, 5, torch.device("cpu")), linear(5, 5, torch.device("cpu"))
    b.weight = a.weight
    clone = copy.deepcopy(nn.Sequential(a, b))
    assert clone[0].weight is clone[1].weight
    assert clone[0].weight is not a.weight


def test_conversions_keep_attributes(device: torch.device) -> None:
    layer = with_attributes(linear(5, 4, torch.device("cpu")))
    main_grad = layer.weight.main_grad
    layer.half().to(device)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float16, device.type)
    assert layer.weight.main_grad.dtype == torch.float32
    assert layer.weight.main_grad.device == layer.weight.device
    assert torch.equal(layer.weight.main_grad.cpu(), main_grad)
    assert layer.weight.sharded == ("rows", 2)
    assert layer(torch.ones(2, 5, device=device, dtype=torch.float16)).dtype == torch.float16


def test_meta_device_initialization(device: torch.device) -> None:
    with torch.device("meta"):
        layer = te.Linear(64, 32, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(32, 64)
    assert layer(torch.empty(3, 64, device="meta")).shape == (3, 32)
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert abs(float(layer.weight.detach().float().std()) - 0.023) < 0.003
    assert not layer.bias.any()
    assert layer.weight.main_grad.device == layer.weight.device
    layer(torch.randn(3, 64, device=device)).sum().backward()
    assert layer.weight.main_grad.any()


def test_repr() -> None:
    assert (
        repr(te.Linear(3, 4, device="cpu", bias=False)) == "Linear(in_features=3, out_features=4, bias=False)"
    )
