"""Amaxes of delayed scaling, reduced over the ranks of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import te_ops as te
import torch
from te_ops.recipe import DelayedScaling
from torch import distributed as dist
from torch import multiprocessing, nn


def _steps(rank: int, world: int, file: str, backend: str, results: Any) -> None:
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(te.Linear(16, 16, device=device), nn.Tanh(), te.Linear(16, 8, device=device))
    recipes = {
        "reduced": DelayedScaling(amax_history_len=4),
        "own": DelayedScaling(amax_history_len=4, reduce_amax=False),
    }
    outcome = {}
    for name, recipe in recipes.items():
        for layer in (model[0], model[2]):
            for buffer in te._delayed.BUFFERS:
                te._delayed.reset(getattr(layer, buffer))
        for step in range(4):
            x = torch.full((4, 16), 1.0 + step, device=device) * (rank + 1)
            with te.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y = model(x)
            y.backward(torch.full_like(y, 0.5 / (rank + 1)))
        with te.autocast(recipe=recipe):  # rolls what the last step staged
            model(x).sum().backward()
        outcome[name] = {
            k: {n: t.cpu().tolist() for n, t in v.items()} for k, v in te.recipe_state(model).items()
        }
    results.put((rank, outcome))
    dist.destroy_process_group()


def _run(world: int, backend: str, tmp_path: Path) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    file = str(tmp_path / "rendezvous")
    processes = [
        context.Process(target=_steps, args=(rank, world, file, backend, results)) for rank in range(world)
    ]
    for p in processes:
        p.start()
    outcome = dict(results.get(timeout=120) for _ in processes)
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    return outcome


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_reduced_over_ranks(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    outcome = _run(2, backend, tmp_path)
    for layer, state in outcome[0]["reduced"].items():
        for key, values in state.items():  # but for row 0, which the last step has staged
            skip = 1 if key.endswith("history") else 0
            assert outcome[1]["reduced"][layer][key][skip:] == values[skip:]
    history = torch.tensor(outcome[0]["reduced"]["0"]["fwd_history"])
    assert torch.equal(history[1:, 0], torch.tensor([4.0, 6.0, 8.0]))  # the larger rank's inputs
    for rank in (0, 1):
        own = torch.tensor(outcome[rank]["own"]["0"]["fwd_history"])
        assert torch.equal(own[1:, 0], torch.tensor([2.0, 3.0, 4.0]) * (rank + 1))
    gradients = torch.tensor(outcome[0]["reduced"]["2"]["bwd_history"])
    assert torch.equal(gradients[1:, 0], torch.full((3,), 0.5))  # the smaller rank's
