"""Generated over the table: every operator has bodies and cases, and its fake agrees with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import CASES
from te_ops import _C
from te_ops._ops import OPERATORS
from torch._subclasses.fake_tensor import FakeTensorMode

OWN = {name: op for name, op in OPERATORS.items() if name.startswith("te_ops::")}
EVERY_OP = pytest.mark.parametrize("name", sorted(OWN))


def flat(result: Any) -> list[torch.Tensor | None]:
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


def cases(name: str, device: torch.device) -> list[tuple[Any, ...]]:
    return list(CASES[name](device))


@EVERY_OP
def test_row_is_complete(name: str) -> None:
    spec = OWN[name].spec
    assert spec["has_cpu"], "no CPU body"
    assert spec["has_cuda"] or not _C.build_info()["cuda"], "no CUDA body"
    assert name in CASES, "no case in tests/cases.py"
    assert len(spec["doc"]) > 10, "no description"


def test_cases_name_only_operators() -> None:
    assert set(CASES) == set(OWN)


@EVERY_OP
def test_fake_equals_real(name: str, device: torch.device) -> None:
    op = OWN[name].overload
    for args in cases(name, device):
        real = flat(op(*copy.deepcopy(args)))
        mode = FakeTensorMode()
        with mode:
            fake = flat(op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)))
        assert len(real) == len(fake)
        for r, f in zip(real, fake, strict=True):
            assert (r is None) == (f is None)
            if r is not None and f is not None:
                assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


@EVERY_OP
def test_fake_equals_real_for_symbolic_sizes(name: str, device: torch.device) -> None:
    """Sizes are symbols while this is traced; the results have the operator's own bits and strides."""
    op = OWN[name].overload
    fn = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager", dynamic=True)
    every = cases(name, device)
    for args in every[:: max(1, len(every) // 20)]:
        torch._dynamo.reset()  # flags and ranks differ from case to case
        args1, args2 = copy.deepcopy(args), copy.deepcopy(args)
        want, got = flat(op(*args1)), flat(fn(*args2))
        for r, g in zip([*want, *args1], [*got, *args2], strict=True):
            if isinstance(r, torch.Tensor):
                assert torch.equal(r, g)
                assert r.stride() == g.stride()
            else:
                assert r == g


@EVERY_OP
def test_outputs_are_fresh_and_contiguous(name: str, device: torch.device) -> None:
    for args in cases(name, device):
        with torch.no_grad():
            outputs = [t for t in flat(OWN[name].overload(*args)) if t is not None]
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor) and t.numel()}
        for out in outputs:
            assert out.is_contiguous()
            assert out.untyped_storage().data_ptr() not in inputs or out.numel() == 0
            assert out.storage_offset() == 0


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def opcheck(name: str, args: tuple[Any, ...]) -> None:
    """PyTorch's check of the schema multiplies what it is given, which fails for FP8; see the test below."""
    op = OWN[name].overload
    tensors = [*args, *flat(op(*copy.deepcopy(args)))]
    has_fp8 = any(t.dtype in FP8 for t in tensors if isinstance(t, torch.Tensor))
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=tests if has_fp8 else (*tests, "test_schema"))


@EVERY_OP
def test_opcheck(name: str, device: torch.device) -> None:
    every = cases(name, device)
    for args in every[:: max(1, len(every) // 8)]:
        opcheck(name, args)


# Written, though not declared to be: see the row's text.
UNDECLARED = {"te_ops::refresh_weight": {"col", "col_scale_inv"}}


@EVERY_OP
def test_only_declared_inputs_change(name: str, device: torch.device) -> None:
    entries = OWN[name].spec["inputs"]
    changed = set()
    for args in cases(name, device):
        before = copy.deepcopy(args)
        OWN[name].overload(*args)
        for entry, old, new in zip(entries, before, args, strict=True):
            if not isinstance(old, torch.Tensor) or torch.equal(old.view(torch.uint8), new.view(torch.uint8)):
                continue
            changed.add(entry["name"])
    declared = {e["name"] for e in entries if e["mutable"]}
    assert changed == declared | UNDECLARED.get(name, set())


@pytest.mark.full
@EVERY_OP
def test_opcheck_every_case(name: str, device: torch.device) -> None:
    for args in cases(name, device):
        opcheck(name, args)


@EVERY_OP
def test_fake_raises_what_the_operator_raises(name: str) -> None:
    """The same judge, hence the same words: here for a wrong dtype of the first tensor."""
    args = list(next(c for c in cases(name, torch.device("cpu")) if isinstance(c[0], torch.Tensor)))
    args[0] = torch.zeros(args[0].shape, dtype=torch.complex64)
    op = OWN[name].overload
    with pytest.raises(RuntimeError) as real:
        op(*args)
    mode = FakeTensorMode()
    with mode, pytest.raises(RuntimeError) as fake:
        op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert str(real.value).splitlines()[0] == str(fake.value).splitlines()[0]


def test_tracing_allocates_nothing() -> None:
    """2^46 elements fit in no memory, and describing them needs none."""
    with FakeTensorMode():
        x, w = torch.empty(1 << 26, 1 << 20), torch.empty(1 << 20, 1 << 20)
        y = torch.ops.te_ops.linear_fwd(x, w, None)
        assert y.shape == (1 << 26, 1 << 20)


def test_tracing_leaves_device_memory_alone(cuda: torch.device) -> None:
    def trace(name: str) -> None:
        for args in cases(name, torch.device("cpu")):
            mode = FakeTensorMode()
            with mode:
                OWN[name].overload(
                    *(
                        torch.empty_like(mode.from_tensor(a), device="cuda")
                        if isinstance(a, torch.Tensor)
                        else a
                        for a in args
                    )
                )

    for name in OWN:  # FakeTensorMode itself allocates a little, once
        trace(name)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name in OWN:
        trace(name)
    assert torch.cuda.max_memory_allocated() - before <= 512, (
        "more than the block in which a fake mode starts CUDA"
    )


@EVERY_OP
def test_meta_tensors(name: str) -> None:
    for args in cases(name, torch.device("cpu"))[:6]:
        real = flat(OWN[name].overload(*copy.deepcopy(args)))
        meta = flat(OWN[name].overload(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)))
        for r, m in zip(real, meta, strict=True):
            assert (r is None) == (m is None)
            assert r is None or (m is not None and r.shape == m.shape and m.is_meta)
