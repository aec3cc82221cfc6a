"""Building: a wheel for every Python from 3.10 on, without nvcc; a table with a mistake fails the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs in a source tree"),
]


def copy_sources(to: Path) -> Path:
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("csrc", "python"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, to / name)
    return to


def build(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    done = build(
        sources, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "dist", ".", TE_OPS_CUDA="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (sources / "dist").glob("*.whl")
    return wheel


def test_one_wheel_for_all_pythons(wheel: Path) -> None:
    assert wheel.name.startswith("te_ops-")
    assert "-cp310-abi3-linux_" in wheel.name
    assert wheel.stat().st_size < 5 << 20
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("te_ops/_C.abi3.so", "te_ops/py.typed", "te_ops/_C.pyi", "te_ops/include/te_ops.h"):
        assert name in names


def test_cpu_only_build_works_and_says_so(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import torch, te_ops
layer = te_ops.Linear(8, 4, device="cpu")
layer(torch.randn(2, 8)).sum().backward()
cuda = te_ops.info()["backends"]["cuda"]
assert not cuda["compiled"] and "nvcc" in cuda["reason"] and "reinstall" in cuda["remedy"]
if torch.cuda.is_available():
    try:
        layer.cuda()(torch.randn(2, 8, device="cuda"))
    except RuntimeError as error:
        assert "x is on cuda:0, but this te_ops was built without CUDA code" in str(error)
    else:
        raise AssertionError("ran without CUDA code")
"""
    done = build(tmp_path, "-c", code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_malformed_row_fails_the_build(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path)
    table = sources / "csrc" / "te_ops.def"
    table.write_text(table.read_text().replace('TE_OUT(y, "like x [*M, N]")', 'TE_OUT(y, "like x [*M, Q]")'))
    done = build(sources, "setup.py", "-q", "build_ext", "--inplace", TE_OPS_CUDA="0")
    assert done.returncode != 0
    assert (
        "csrc/te_ops.def: row linear_fwd.y, column 1: no input that is present with it binds 'Q'"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TE_OPS_CUDA", "yes", "must be 0 or 1"),
        ("TE_OPS_CUDA_ARCHS", "ninety", "'ninety' is not like 8.0 or 9.0a"),
    ],
)
def test_wrong_switches_are_named(variable: str, value: str, words: str, tmp_path: Path) -> None:
    if variable == "TE_OPS_CUDA_ARCHS" and not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    done = build(copy_sources(tmp_path), "setup.py", "-q", "build_ext", "--inplace", **{variable: value})
    assert done.returncode != 0
    assert words in done.stderr
