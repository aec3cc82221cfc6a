"""The extension: operators registered in C from csrc/te_ops.def, described and inferred for Python."""

from collections.abc import Sequence
from typing import Any, TypedDict

from torch import SymInt

class EntrySpec(TypedDict):
    """One flattened slot or output. `slot` is the row's name for it, `type` the row's text."""

    name: str
    kind: str  # "tensor", "int", "float", "bool" or "bits"
    slot: str
    type: str
    buffer: str  # "" for a plain dtype
    flags: tuple[str, ...]
    optional: bool
    mutable: bool
    union: bool  # of a slot that takes a plain tensor or a quantized one
    condition: str | None  # the flag that decides whether it is present
    default: int | float | bool | None

class OpSpec(TypedDict):
    name: str
    doc: str
    schema: str
    inputs: list[EntrySpec]
    outputs: list[EntrySpec]
    has_cpu: bool
    has_cuda: bool

Size = int | SymInt
TensorDesc = tuple[tuple[Size, ...], str, int, int]  # sizes, dtype name, device type, device index

def op_count() -> int: ...
def spec(index: int, /) -> OpSpec: ...
def infer(
    index: int, args: tuple[TensorDesc | int | float | bool | None, ...], /
) -> Sequence[tuple[tuple[Any, ...], str] | None]: ...
def activations() -> tuple[tuple[str, bool], ...]: ...  # name, whether it is gated
def build_info() -> dict[str, str]: ...

# Only in a build with CUDA code.
def cublaslt_version() -> int: ...
def set_gemm_autotune(candidates: int, /) -> None: ...
def gemm_cache() -> dict[str, int]: ...
