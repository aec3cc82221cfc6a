"""A CUDA error of earlier work is reported by the next call, not swallowed."""

from __future__ import annotations

import subprocess
import sys

import torch

CODE = """
import torch, te_ops
layer = te_ops.Linear(256, 256, params_dtype=torch.bfloat16)
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
small = te_ops.Linear(8, 8, params_dtype=torch.bfloat16)
layer(x), small(x[:8, :8])
torch.cuda.synchronize()
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # asserts on the device
try:
    torch.cuda.synchronize()
except Exception:
    pass
for module, inp in ((layer, x), (small, x[:8, :8])):
    try:
        module(inp)
        torch.ops.te_ops.linear_fwd(inp, module.weight.detach(), None)
    except Exception as error:
        print("REPORTED", str(error).splitlines()[0])
    else:
        print("SWALLOWED")
"""


def test_sticky_error_is_reported(cuda: torch.device) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("REPORTED", "SWALLOWED"))]
    assert len(lines) == 2, done.stdout + done.stderr
    assert all(line.startswith("REPORTED") for line in lines), lines
    assert any("assert" in line.lower() or "cuda" in line.lower() for line in lines), lines
