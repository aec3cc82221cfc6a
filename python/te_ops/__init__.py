"""te_ops: transformer layers as torch.library operators in C and CUDA that compile as whole graphs."""

import torch as _torch  # noqa: F401  (loads the libraries in which the extension looks up its functions)

from . import recipe
from ._autocast import autocast, fp8_autocast, get_recipe, is_fp8_available
from ._checkpoint import checkpoint
from ._delayed import load_recipe_state, recipe_state
from ._gemm import gemm_cache_info, set_gemm_autotune
from ._info import __version__, info
from ._model_init import fp8_model_init, quantized_model_init
from ._ops import load_table
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .quantized_tensor import QuantizedTensor, quantize

__all__ = [
    "LayerNorm",
    "Linear",
    "QuantizedTensor",
    "RMSNorm",
    "__version__",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "gemm_cache_info",
    "get_recipe",
    "info",
    "is_fp8_available",
    "load_recipe_state",
    "load_table",
    "quantize",
    "quantized_model_init",
    "recipe",
    "recipe_state",
    "set_gemm_autotune",
]
