"""What all te_ops modules share: parameters keep their attributes, and arguments are judged in one place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _DeviceProbe:
    """Sees the ``device=`` that an active default device would give to a factory function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (kwargs or {}).get("device")


def default_device() -> torch.device:
    """The device set by ``with torch.device(...)`` or `torch.set_default_device`, else CUDA, else CPU."""
    chosen: Any = torch.linspace(_DeviceProbe(), 0, 1)  # type: ignore[call-overload]
    if chosen is not None:
        return torch.device(chosen)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def refuse(module: str, **arguments: tuple[Any, Any, str]) -> None:
    """Raises ValueError for the first argument that differs from the only value that works.

    Args:
        module: the class' name, for the message.
        arguments: name -> (value, what works, why).
    """
    for name, (value, works, why) in arguments.items():
        if value != works:
            raise ValueError(f"{module}: {name}={value!r}: {why}; use {name}={works!r}")


def _move_attributes(old: nn.Parameter, new: nn.Parameter) -> None:
    """Gives `new` the attributes of `old`; tensors among them follow the device, not the dtype."""
    for name, value in vars(old).items():
        if isinstance(value, torch.Tensor) and value.device != new.device:
            value = torch.zeros_like(value, device=new.device) if value.is_meta else value.to(new.device)
        setattr(new, name, value)


class Module(nn.Module):
    """An `nn.Module` whose parameters keep attributes such as ``main_grad``.

    `nn.Module` loses attributes of parameters in ``copy.deepcopy`` and when a conversion has to make new
    parameters (``to_empty`` from the meta device); this class carries them over.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Module:
        before = dict(self.named_parameters(recurse=False))
        super()._apply(fn, recurse)
        for name, param in self.named_parameters(recurse=False):
            if name in before:
                _move_attributes(before[name], param)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        extra = state_dict.pop(prefix + "_extra_state", None)
        if extra is not None and not (isinstance(extra, torch.Tensor) and extra.numel() == 0):
            warnings.warn(
                f"te_ops: {prefix}_extra_state is skipped: it may hold a pickle, which te_ops does not execute; scales "
                "of delayed scaling are carried over by te_ops.recipe_state",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, param in self.named_parameters(recurse=False):
            target = clone.get_parameter(name)
            for attribute, value in vars(param).items():
                setattr(target, attribute, copy.deepcopy(value, memo))
        return clone
