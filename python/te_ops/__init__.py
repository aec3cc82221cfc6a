"""te_ops: transformer layers as torch.library operators in C and CUDA that compile as whole graphs."""

import torch as _torch  # noqa: F401  (loads the libraries in which the extension looks up its functions)

from ._gemm import gemm_cache_info, set_gemm_autotune
from ._info import __version__, info
from ._ops import load_table
from .linear import Linear

__all__ = ["Linear", "__version__", "gemm_cache_info", "info", "load_table", "set_gemm_autotune"]
