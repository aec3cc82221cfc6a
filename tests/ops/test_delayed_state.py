"""Delayed scaling's state as the operators roll it, against its definition (numerics: delayed scaling)."""

from __future__ import annotations

import pytest
import torch
from cases import STATE_HEADER, STATE_TENSORS, bits, delayed_state, region

X, DY = 0, 3  # columns of a history
LARGEST = [448.0, 448.0, 448.0, 57344.0, 57344.0]  # HYBRID: gradients are E5M2


@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 31, 1023, 1024, 1025, 2049, 3000])
def test_roll(length: int, most_recent: bool, device: torch.device) -> None:
    state = delayed_state(device, length)
    before = state.cpu().clone().view(torch.float32)
    history, scales = before[STATE_HEADER:].reshape(length, STATE_TENSORS), before[4:9]
    x = torch.randn(5, 40, device=device)
    options = bits(False, True, False, most_recent, True, True)
    torch.ops.te_ops.quantize_delayed(x, state, region(7, device), None, length, 1, X, options)
    after = state.cpu().view(torch.float32)
    for t in range(STATE_TENSORS):
        staged, want, scale = history[0, t].clone(), history[:, t].clone(), scales[t]
        if staged != 0:  # column 1 staged nothing: it stays as it is
            want = torch.cat([history[1:, t], staged[None]])
            amax = staged if most_recent else want.max()
            scale = torch.tensor(LARGEST[t]) / amax * 0.5
            want[0] = 0
        if t == X:
            want[0] = x.abs().max()
        assert torch.equal(after[STATE_HEADER:].reshape(length, STATE_TENSORS)[:, t], want), t
        assert after[4 + t] == scale, t
    assert state[0] == 7


def test_a_state_rolls_once_a_region(device: torch.device) -> None:
    state, x = delayed_state(device), torch.randn(4, 8, device=device)
    options = bits(False, True, False, False, True, True)
    for _ in range(2):
        torch.ops.te_ops.quantize_delayed(x, state, region(7, device), None, 3, 0, DY, options)
        first = state.clone()
        torch.ops.te_ops.quantize_delayed(x, state, region(7, device), None, 3, 0, DY, options)
        assert torch.equal(state, first)
        state[0] = 3
