"""What `import te_ops` promises: silent, no CUDA context, no global state, no private API of PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import te_ops as te
import torch

pytestmark = pytest.mark.contract
PACKAGE = Path(te.__file__).parent


def run(code: str, *flags: str) -> str:
    """Output of a fresh interpreter; anything on stderr is a failure."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_is_silent_and_changes_no_global_state() -> None:
    out = run(
        """
import copyreg, warnings, sys, os, logging
import torch
def state():
    return (dict(copyreg.dispatch_table), list(warnings.filters), torch.is_grad_enabled(),
            torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), dict(os.environ),
            list(logging.root.handlers))
before = state()
random = torch.random.get_rng_state()
import te_ops
after = state()
assert before == after
assert torch.equal(random, torch.random.get_rng_state())
assert not torch.cuda.is_initialized()
""",
        "-W",
        "error::UserWarning:te_ops",
    )
    assert out == ""


def test_fork_after_import_can_use_cuda() -> None:
    """A CUDA context made by the import would break the child."""
    run(
        """
import os, torch, te_ops
pid = os.fork()
if pid == 0:
    layer = te_ops.Linear(8, 8)
    layer(torch.randn(2, 8, device=layer.weight.device)).sum().backward()
    os._exit(0 if layer.weight.grad is not None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )


def test_needs_torch_in_words() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("te_ops._C", {te._ops._C.__file__!r})
try:
    importlib.util.module_from_spec(spec)
except ImportError as error:
    print(error)
"""],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (
        "te_ops needs torch: libtorch_cpu.so is not loaded in this process; import torch first" in done.stdout
    )


PRIVATE = re.compile(r"torch\._(?!_version__)\w+|from torch import _|from torch\._|import torch\._")


def test_no_private_pytorch_api() -> None:
    for file in sorted(PACKAGE.glob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not PRIVATE.search(line), f"{file.name}:{number}: {line.strip()}"


def test_shim_names_no_operator() -> None:
    """The table is the only place that knows operators; modules know their own."""
    names = [name.split("::")[1] for name in te._ops.OPERATORS if name.startswith("te_ops::")]
    for file in ("_ops.py", "_bundle.py"):
        text = re.sub(r'"""[\s\S]*?"""', "", (PACKAGE / file).read_text())
        text = re.sub(r"#.*", "", text)
        assert not [n for n in names if n in text], file


def test_public_names_are_documented() -> None:
    for name in te.__all__:
        value = getattr(te, name)
        assert isinstance(value, str) or (value.__doc__ and len(value.__doc__) > 20), name


def test_c_code_never_exits_or_prints() -> None:
    root = PACKAGE.parent.parent / "csrc"
    if not root.exists():
        pytest.skip("no sources next to an installed package")
    banned = re.compile(r"\b(exit|abort|_Exit|printf|puts|perror|fprintf|assert)\s*\(")
    for file in sorted([*root.rglob("*.c"), *root.rglob("*.cu"), *root.rglob("*.h")]):
        if file.name == "te_check.c":  # the build's own tool
            continue
        code = re.sub(r"/\*[\s\S]*?\*/", "", file.read_text())
        assert not banned.search(code), f"{file.name}: {banned.search(code)}"


def test_report() -> None:
    out = run("import runpy; runpy.run_module('te_ops', run_name='__main__')")
    for word in ("te_ops", "torch", torch.__version__, "cublasLt", "python", "backend cpu", "backend cuda"):
        assert word in out
    data = te.info()
    assert data["versions"]["torch"] == torch.__version__
    cuda = data["backends"]["cuda"]
    assert cuda["usable"] or (cuda["reason"] and cuda["remedy"])
    assert len(data["devices"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_reference_is_current() -> None:
    generate = PACKAGE.parent.parent / "docs" / "generate.py"
    if not generate.exists():
        pytest.skip("no docs next to an installed package")
    subprocess.run([sys.executable, str(generate), "--check"], check=True)


def test_gemm_controls() -> None:
    with pytest.raises(ValueError, match="candidates=0"):
        te.set_gemm_autotune(0)
    assert set(te.gemm_cache_info()) == {"size", "capacity", "hits", "misses"}
