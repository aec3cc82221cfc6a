"""Fixtures: devices, compile backends, and inputs that cannot flatter a kernel."""

from __future__ import annotations

import os

# Two cores gain nothing from Inductor's worker processes, and torch 2.11 can hang on them at exit.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import te_ops  # noqa: F401  (registers the operators that the tests look up)
import torch

torch.set_num_threads(min(4, os.cpu_count() or 1))


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(
    params=["aot_eager", pytest.param("inductor", marks=[pytest.mark.full, pytest.mark.inductor])]
)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh_start(request: pytest.FixtureRequest) -> None:
    """A new seed for each run, printed on a failure, and no compiled code of another test."""
    seed = int(os.environ.get("TE_OPS_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    print(f"TE_OPS_TEST_SEED={seed}")
    torch._dynamo.reset()
