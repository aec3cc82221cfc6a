"""What this installation is and what it can use here: `info()`, and `python -m te_ops`."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from . import _C
from ._autocast import is_fp8_available


def _version() -> str:
    try:
        return metadata.version("te-ops")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0.1.0+source"


__version__ = _version()


def _cublaslt() -> tuple[str | None, str]:
    if not hasattr(_C, "cublaslt_version"):
        return None, "this te_ops has no CUDA code"
    if not torch.cuda.is_available():
        return None, "not loaded: there is no usable GPU"
    try:
        version = _C.cublaslt_version()
    except RuntimeError as error:
        return None, str(error)
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}", ""


def _has_code_for(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether one of the compiled architectures, or the PTX of the last generic one, runs on this GPU."""
    generic = [tuple(map(int, a.split("."))) for a in archs if a[-1].isdigit()]
    exact = {tuple(map(int, a.rstrip("af").split("."))) for a in archs}
    same_major = any(g[0] == capability[0] and g[1] <= capability[1] for g in generic)
    return capability in exact or same_major or bool(generic and generic[-1] <= capability)


def _cuda_backend(archs: list[str], devices: list[dict[str, Any]]) -> dict[str, Any]:
    reason = remedy = ""
    if not _C.build_info()["cuda"]:
        reason = "no nvcc >= 12.8 was found when te_ops was built"
        remedy = (
            "install a CUDA toolkit (or: pip install nvidia-cuda-nvcc), set CUDA_HOME, and reinstall te-ops"
        )
    elif torch.version.cuda is None:
        reason, remedy = "this torch has no CUDA support", "install a CUDA build of torch"
    elif not devices:
        reason, remedy = "torch finds no usable GPU", "check nvidia-smi and the driver's version"
    elif not any(d["supported"] for d in devices):
        reason = f"no GPU here runs the compiled architectures ({' '.join(archs)})"
        remedy = "rebuild with TE_OPS_CUDA_ARCHS set to this GPU's compute capability"
    return {
        "compiled": bool(_C.build_info()["cuda"]),
        "usable": not reason,
        "reason": reason,
        "remedy": remedy,
    }


def info() -> dict[str, Any]:
    """Versions, devices and backends, as plain data.

    Returns:
        ``versions``: name -> version or None. ``devices``: one dict a GPU with ``name``, ``capability`` and
        whether it is ``supported`` by the compiled code. ``backends``: "cpu" and "cuda" -> ``compiled``,
        ``usable``, and if not usable the ``reason`` and the ``remedy``. ``cuda_archs``: what CUDA code was
        compiled for. ``recipes``: name -> ``status`` on the current device ("native", "emulated", "unavailable") and
        the ``reason``.

    Asking does not create a CUDA context unless there is a GPU.
    """
    build = _C.build_info()
    archs = build["cuda_archs"].split()
    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(i)
            devices.append(
                {
                    "name": torch.cuda.get_device_name(i),
                    "capability": f"{capability[0]}.{capability[1]}",
                    "supported": _has_code_for(capability, archs),
                }
            )
    cublaslt, why = _cublaslt()
    cuda = _cuda_backend(archs, devices)
    if cuda["usable"] and cublaslt is None:
        cuda |= {
            "usable": False,
            "reason": why,
            "remedy": "pip install nvidia-cublas, in the version that torch asks for",
        }
    return {
        "versions": {
            "te_ops": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda (torch)": torch.version.cuda,
            "cuda (te_ops build)": build["cuda"] or None,
            "cublasLt": cublaslt,
            "compiler": build["compiler"],
        },
        "devices": devices,
        "backends": {"cpu": {"compiled": True, "usable": True, "reason": "", "remedy": ""}, "cuda": cuda},
        "cuda_archs": archs,
        "recipes": _recipes(),
    }


def _recipes() -> dict[str, dict[str, str]]:
    """For each recipe, on the current device: "native", "emulated" or "unavailable", and why."""
    native, reason = is_fp8_available()
    per_tensor = {"status": "native" if native else "emulated", "reason": reason}
    later = {"status": "unavailable", "reason": "not in this version"}
    return {
        "DelayedScaling": per_tensor,
        "Float8CurrentScaling": dict(per_tensor),
        "Float8BlockScaling": later,
        "MXFP8BlockScaling": dict(later),
        "NVFP4BlockScaling": dict(later),
    }


def report() -> str:
    """`info()` as text."""
    data = info()
    lines = [f"{name:20} {version or '-'}" for name, version in data["versions"].items()]
    lines.append(f"{'cuda architectures':20} {' '.join(data['cuda_archs']) or '-'}")
    for i, device in enumerate(data["devices"]):
        fit = "" if device["supported"] else "  (no code for it in this build)"
        lines.append(
            f"{'cuda:' + str(i):20} {device['name']}, compute capability {device['capability']}{fit}"
        )
    for name, backend in data["backends"].items():
        if backend["usable"]:
            lines.append(f"{'backend ' + name:20} usable")
        else:
            lines.append(f"{'backend ' + name:20} not usable: {backend['reason']}")
            lines.append(f"{'':20} remedy: {backend['remedy']}")
    for name, recipe in data["recipes"].items():
        why = f": {recipe['reason']}" if recipe["reason"] else ""
        lines.append(f"{'recipe ' + name:27} {recipe['status']}{why}")
    return "\n".join(lines)
