"""The activation operators against torch's functions in float64, and what Python makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DTYPES, TOLERANCE, assert_same_bits, compiled, poisoned, relative_error
from te_ops import _activation
from te_ops._activation import ACTIVATIONS, Activation, check
from torch import Tensor
from torch.nn import functional as F

ops = torch.ops.te_ops
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
LIMIT, ALPHA, OFFSET = 1.5, 1.702, 1.0
PARAMETERS = LIMIT, ALPHA, OFFSET


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def clamped(x: Tensor) -> Tensor:
    x = x.clamp(max=LIMIT)
    return x * torch.sigmoid(ALPHA * x)


def clamped_gate(x: Tensor) -> Tensor:
    return x.clamp(-LIMIT, LIMIT) + OFFSET


# In the order of TE_ACTIVATIONS: what f is, and what becomes of the gate (None: there is none).
Function = Callable[[Tensor], Tensor]
KINDS: list[tuple[str, Function, Function | None]] = [
    ("gelu", gelu, None),
    ("geglu", gelu, lambda g: g),
    ("glu", torch.sigmoid, lambda g: g),
    ("qgelu", qgelu, None),
    ("qgeglu", qgelu, lambda g: g),
    ("relu", F.relu, None),
    ("reglu", F.relu, lambda g: g),
    ("srelu", srelu, None),
    ("sreglu", srelu, lambda g: g),
    ("silu", F.silu, None),
    ("swiglu", F.silu, lambda g: g),
    ("clamped_swiglu", clamped, clamped_gate),
]
KIND = pytest.mark.parametrize("kind", range(len(KINDS)), ids=[k[0] for k in KINDS])


def reference(kind: int, x: Tensor) -> Tensor:
    _, f, gate = KINDS[kind]
    if gate is None:
        return f(x)
    a, g = x.chunk(2, dim=-1)
    return f(a) * gate(g)


def forward(kind: int, x: Tensor) -> Tensor:
    op = ops.activation_fwd if KINDS[kind][2] is None else ops.gated_fwd
    y: Tensor = op(x, kind, *PARAMETERS)
    return y


def backward(kind: int, dy: Tensor, x: Tensor) -> Tensor:
    dx, db = backward_with_db(kind, dy, x, False)
    assert db is None
    return dx


def backward_with_db(kind: int, dy: Tensor, x: Tensor, need_db: bool = True) -> Any:
    op = ops.activation_bwd if KINDS[kind][2] is None else ops.gated_bwd
    return op(dy, x, kind, *PARAMETERS, need_db)


def is_gated(kind: int) -> bool:
    return KINDS[kind][2] is not None


def test_order() -> None:
    assert tuple(name for name, *_ in KINDS) == ACTIVATIONS


# ---------------------------------------------------------------------------------------- values ------


@KIND
@DTYPE
@pytest.mark.parametrize("width", [1, 3, 8, 64, 100, 2056])
def test_against_float64(kind: int, dtype: torch.dtype, width: int, device: torch.device) -> None:
    x = (2 * torch.randn(5, 7, width * (1 + is_gated(kind)), device=device)).to(dtype)
    x[x.abs() == LIMIT] = 0.25  # torch versions differ in the derivative there; see test_clamps
    dy = torch.randn(5, 7, width, device=device).to(dtype)
    x64 = x.double().requires_grad_()
    want = reference(kind, x64)
    want.backward(dy.double())
    limit = TOLERANCE[dtype] * (2 if dtype == torch.float32 else 1)
    with poisoned(device, x.numel(), dy.numel()):
        assert relative_error(forward(kind, x), want) < limit
    with poisoned(device, x.numel(), dy.numel()):
        dx, db = backward_with_db(kind, dy, x)
    assert relative_error(dx, x64.grad) < limit
    assert torch.equal(dx, backward(kind, dy, x))
    rows = dx.double().reshape(35, -1)
    assert relative_error(db, rows.sum(0), rows.norm(dim=0)) < limit


def accurate(kind: int, x: Tensor) -> Tensor:
    """`reference` in terms whose derivatives are accurate where they are tiny, too."""

    def swish(a: Tensor, t: Tensor) -> Tensor:
        return a * F.logsigmoid(t).exp()

    name, f, gate = KINDS[kind]
    a, *gates = x.chunk(2, dim=-1) if gate else (x,)
    if name in ("gelu", "geglu"):
        y = swish(a, 2 * (2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3))
    elif name in ("silu", "swiglu"):
        y = swish(a, a)
    elif name in ("qgelu", "qgeglu"):
        y = swish(a, 1.702 * a)
    elif name == "glu":
        y = swish(torch.ones_like(a), a)
    else:
        y = swish(a.clamp(max=LIMIT), ALPHA * a.clamp(max=LIMIT)) if "clamped" in name else f(a)
    return y * gate(gates[0]) if gate else y


@KIND
def test_every_value_is_accurate(kind: int, device: torch.device) -> None:
    """Each by itself, far out too, where the functions and what is left of their derivatives are tiny."""
    values = torch.linspace(-40, 40, 4001, device=device)
    values = values[values.abs() != LIMIT]
    x = torch.stack([values, torch.full_like(values, 0.75)], dim=1) if is_gated(kind) else values[:, None]
    x64 = x.double().requires_grad_()
    want = accurate(kind, x64)
    want.sum().backward()
    assert x64.grad is not None
    y, slope = forward(kind, x)[:, 0].double(), x64.grad[:, 0]
    got = backward(kind, torch.ones_like(x[:, :1]), x)[:, 0].double()
    error, slope_error = (y - want.detach()[:, 0]).abs(), (got - slope).abs()
    # An exponent is rounded, too; what it amounts to is at most 68 here, of gelu 88.
    limit = torch.where(values.abs() < 4, 1e-6, 1e-5).double()
    size = slope.abs() + (values.abs() < 4) * 0.5  # where it crosses zero, it is a difference of such terms
    assert (error <= limit * want.detach()[:, 0].abs() + 1e-36).all()
    assert (slope_error <= limit * size + 1e-36).all()


@KIND
@DTYPE
def test_far_out(kind: int, dtype: torch.dtype, device: torch.device) -> None:
    """Where the functions are flat or straight, and where they are not finite."""
    values = [
        -float("inf"),
        -1e30,
        -60000.0,
        -200.0,
        -95.0,
        -60.0,
        -0.0,
        0.0,
        60.0,
        200.0,
        1e30,
        float("inf"),
    ]
    a = torch.tensor(values, device=device).to(dtype)
    x = torch.stack([a, torch.ones_like(a)], dim=1) if is_gated(kind) else a[:, None]
    y = forward(kind, x)[:, 0]
    slope = backward(kind, torch.ones_like(a)[:, None], x)[:, 0]
    assert (y[:5].float().abs() < 1e-20).all()
    assert (slope[:5].float().abs() < 1e-20).all()
    name, infinity = KINDS[kind][0], float("inf")
    if name == "clamped_swiglu":
        end, last_slope = float(reference(kind, torch.tensor([[9.0, 1.0]]))), 0.0
    else:
        end = 1.0 if name == "glu" else infinity
        last_slope = {"glu": 0.0, "srelu": infinity, "sreglu": infinity}.get(name, 1.0)
    assert float(y[-1]) == pytest.approx(end, rel=1e-2)
    assert float(slope[-1]) == last_slope
    assert not torch.isnan(y).any()
    assert not torch.isnan(slope).any()


@KIND
@DTYPE
def test_nan_stays(kind: int, dtype: torch.dtype, device: torch.device) -> None:
    """From either half to y. Not into gradients that do not depend on it: relu's is a comparison."""
    nan, one = float("nan"), 1.0
    cases = [[nan, one], [one, nan], [nan, nan]] if is_gated(kind) else [[nan]]
    x = torch.tensor(cases, device=device).to(dtype)
    assert torch.isnan(forward(kind, x)).all()
    dx = backward(kind, torch.ones(len(cases), 1, device=device, dtype=dtype), x)
    assert torch.isnan(backward(kind, torch.full_like(dx[:, :1], nan), torch.ones_like(x))).all()
    if is_gated(kind):
        assert torch.isnan(dx[0, 1])
        assert torch.isnan(dx[1, 0])
    if KINDS[kind][0] not in ("relu", "reglu"):
        assert torch.isnan(dx[0, 0])


def test_clamps(device: torch.device) -> None:
    """As in Transformer Engine: the activated half is clamped from above, the gate on both sides and offset
    afterwards; the gradient is 0 beyond a limit, and at the limit itself what it is before it."""
    a = torch.tensor([LIMIT - 0.5, LIMIT, LIMIT + 0.5, -LIMIT - 0.5, 0.5, 0.5, 0.5], device=device)
    g = torch.tensor([0.5, 0.5, 0.5, 0.5, LIMIT + 1, -LIMIT - 1, -LIMIT], device=device)
    x, dy = torch.stack([a, g], dim=1), torch.ones(7, 1, device=device)
    clamped_a, clamped_g = a.double().clamp(max=LIMIT), g.double().clamp(-LIMIT, LIMIT)
    s = torch.sigmoid(ALPHA * clamped_a)
    assert relative_error(forward(11, x)[:, 0], clamped_a * s * (clamped_g + OFFSET)) < 1e-6
    dx = backward(11, dy, x)
    slope = s + ALPHA * clamped_a * s * (1 - s)
    assert relative_error(dx[:, 0], slope * (clamped_g + OFFSET) * (a <= LIMIT)) < 1e-6
    assert relative_error(dx[:, 1], clamped_a * s * (g.abs() <= LIMIT)) < 1e-6
    assert (dx[:, 0] == 0).tolist() == [False, False, True, False, False, False, False]
    assert (dx[:, 1] == 0).tolist() == [False, False, False, False, True, True, False]
    at_the_limit = forward(11, torch.tensor([[LIMIT, LIMIT]], device=device))
    assert torch.equal(at_the_limit, forward(11, torch.tensor([[100.0, 100.0]], device=device)))


def test_parameters(device: torch.device) -> None:
    """Each of the three by itself; they change nothing else than clamped_swiglu."""
    x = 5 * torch.randn(64, 32, device=device)
    for limit, alpha, offset in ((7.0, 1.702, 1.0), (2.0, 1.702, 1.0), (7.0, 1.0, 1.0), (7.0, 1.702, 0.0)):
        a, g = x.double().chunk(2, dim=-1)
        a, g = a.clamp(max=limit), g.clamp(-limit, limit)
        want = a * torch.sigmoid(alpha * a) * (g + offset)
        assert relative_error(ops.gated_fwd(x, 11, limit, alpha, offset), want) < 2e-6
        assert torch.equal(ops.gated_fwd(x, 10, limit, alpha, offset), forward(10, x))


# --------------------------------------------------------------------------------- layouts, sums ------


@DTYPE
def test_unaligned_and_strided(dtype: torch.dtype, device: torch.device) -> None:
    base = torch.randn(20, 131, device=device).to(dtype)
    views = (base[:, 3:], base[:, :128], base.t()[:128].t(), base.view(-1)[1 : 1 + 19 * 128].view(19, 128))
    wide = torch.randn(20, 256, device=device).to(dtype)
    for x in (*views, wide[:, 128:], wide[::2, :128], wide[:1, :128].expand(20, 128)):
        for kind in (9, 10, 11):
            plain = x.contiguous().clone()
            dys = torch.randn(x.shape[0], 256, device=device).to(dtype)
            for dy in (dys[:, 128 : 128 + (64 if is_gated(kind) else 128)], dys.t()[: x.shape[1]].t()):
                dy = dy[:, : plain.shape[1] // (1 + is_gated(kind))]
                assert torch.equal(forward(kind, x), forward(kind, plain))
                got = backward_with_db(kind, dy, x)
                want = backward_with_db(kind, dy.contiguous(), plain)
                assert torch.equal(got[0], want[0])
                assert relative_error(got[1], want[1], want[0].norm(dim=0)) < TOLERANCE[dtype]


SHAPES = [(300, 8), (64, 2056), (70, 33), (1000, 1), (129, 136), (3, 4104), (65, 264), (513, 512)]


@DTYPE
@pytest.mark.parametrize("kind", [5, 9, 10], ids=["relu", "silu", "swiglu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gradient(kind: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    """The sums of what was stored, the same bits each time."""
    m, f = shape
    x = torch.randn(m, f * (1 + is_gated(kind)), device=device).to(dtype)
    dy = torch.randn(m, f, device=device).to(dtype)
    with poisoned(device, x.numel(), x.shape[1]):
        dx, db = backward_with_db(kind, dy, x)
    assert torch.equal(dx, backward(kind, dy, x))
    want = dx.double().sum(0)
    assert relative_error(db, want, dx.double().norm(dim=0)) < TOLERANCE[dtype]
    for _ in range(3):
        assert_same_bits(backward_with_db(kind, dy, x), [dx, db])


@KIND
@DTYPE
def test_empty(kind: int, dtype: torch.dtype, device: torch.device) -> None:
    for lead, f in (((0,), 8), ((4,), 0), ((2, 0, 3), 5)):
        x = torch.empty(*lead, f * (1 + is_gated(kind)), device=device, dtype=dtype)
        dy = torch.empty(*lead, f, device=device, dtype=dtype)
        with poisoned(device, x.shape[-1]):
            dx, db = backward_with_db(kind, dy, x)
        assert forward(kind, x).shape == dy.shape
        assert dx.shape == x.shape
        assert torch.equal(db, torch.zeros(x.shape[-1], device=device, dtype=dtype))


@KIND
@DTYPE
def test_cuda_agrees_with_cpu(kind: int, dtype: torch.dtype, cuda: torch.device) -> None:
    x = 4 * torch.randn(300, 520, device=cuda).to(dtype)
    dy = torch.randn(300, 520 // (1 + is_gated(kind)), device=cuda).to(dtype)
    limit = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype] / 4  # some roundings go the other way
    assert relative_error(forward(kind, x), forward(kind, x.cpu())) < limit
    for got, want in zip(
        backward_with_db(kind, dy, x), backward_with_db(kind, dy.cpu(), x.cpu()), strict=True
    ):
        assert relative_error(got, want) < limit * (1 if got.dim() > 1 else 4)


@pytest.mark.full
def test_more_elements_than_an_int32_counts(cuda: torch.device) -> None:
    f, m = 4096, (1 << 31) // 8192 + 3
    x = torch.randn(64, 2 * f, device=cuda).bfloat16().repeat(m // 64 + 1, 1)[:m]
    y = forward(10, x)
    assert torch.equal(y[-3:], forward(10, x[-3:].clone()))
    assert torch.equal(backward(10, y, x)[-3:], backward(10, y[-3:].clone(), x[-3:].clone()))


# -------------------------------------------------------------------------------------- messages ------


def test_messages(device: torch.device) -> None:
    x = torch.randn(2, 6, device=device)
    with pytest.raises(
        RuntimeError, match=r"activation_fwd: kind = 10: must be one of 0 \(gelu\), 3 \(qgelu\)"
    ):
        ops.activation_fwd(x, 10, *PARAMETERS)
    with pytest.raises(RuntimeError, match=r"gated_fwd: kind = 99: must be one of 1 \(geglu\)"):
        ops.gated_fwd(x, 99, *PARAMETERS)
    with pytest.raises(RuntimeError, match=r"gated_bwd: kind = -1: must be one of 1 \(geglu\)"):
        ops.gated_bwd(x[:, :3], x, -1, *PARAMETERS)
    with pytest.raises(RuntimeError, match="x has rows of 5: they must have two halves"):
        ops.gated_fwd(x[:, :5], 10, *PARAMETERS)
    with pytest.raises(RuntimeError, match=r"gated_bwd: x\[1\] = 5: must be 6"):
        ops.gated_bwd(x[:, :3], x[:, :5], 10, *PARAMETERS)
    assert ops.gated_fwd(x, 10, *PARAMETERS).shape == (2, 3)


def test_check() -> None:
    for i, name in enumerate(ACTIVATIONS):
        assert check(name) == (i, is_gated(i), 7.0, 1.702, 1.0)
        assert check(name, {}) == check(name)
    got = check("clamped_swiglu", {"limit": 3, "glu_linear_offset": -0.5})
    assert got[2:] == (3.0, 1.702, -0.5)
    for bad in ("swish", "GELU", None, 3, ["gelu"]):
        with pytest.raises(
            ValueError, match=r"activation=.*: must be one of gelu, geglu, .*, clamped_swiglu$"
        ):
            check(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"activation_params has 'limit': swiglu takes no parameters"):
        check("swiglu", {"limit": 7.0})
    with pytest.raises(ValueError, match=r"has 'beta': clamped_swiglu takes limit, alpha, glu_linear_offset"):
        check("clamped_swiglu", {"beta": 1.0})
    for key, value in (("limit", 0.0), ("limit", -1), ("alpha", -2.0)):
        with pytest.raises(ValueError, match=rf"activation_params\['{key}'\]=.*: must be positive"):
            check("clamped_swiglu", {key: value})
    for value in ("7", None, True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"activation_params\['alpha'\]=.*: must be a finite number"):
            check("clamped_swiglu", {"alpha": value})


# -------------------------------------------------------------------------------------- autograd ------


@KIND
def test_function(kind: int, device: torch.device) -> None:
    name = ACTIVATIONS[kind]
    which = check(name, {"limit": LIMIT} if name == "clamped_swiglu" else None)
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
    y = Activation.apply(x, which)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    want_dx, want_db = _activation.backward(dy, x.detach(), which, True)
    assert torch.equal(y, _activation.forward(x.detach(), which))
    assert torch.equal(dx, want_dx)
    assert want_db is not None
    x64 = x.detach().double().requires_grad_()
    want = reference(kind, x64)
    want.backward(dy.double())
    assert relative_error(y, want) < 2e-6
    assert relative_error(dx, x64.grad) < 2e-6


@KIND
def test_compiled(kind: int, backend: str, device: torch.device) -> None:
    which = check(ACTIVATIONS[kind])

    def run(x: Tensor) -> Tensor:
        result: Tensor = Activation.apply(x, which)
        return result

    fn, counter = compiled(run, backend)
    for m in (4, 7, 33):
        x = torch.randn(m, 24, device=device).bfloat16().requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        want, got = run(x), fn(x)
        dy = torch.randn_like(want)
        assert_same_bits([got, *torch.autograd.grad(got, x, dy)], [want, *torch.autograd.grad(want, x, dy)])
        with torch.no_grad():
            assert torch.equal(run(x), want)
    assert counter.frame_count == 1


def test_double_backward_is_refused(device: torch.device) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(Activation.apply(x, check("silu")).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()
