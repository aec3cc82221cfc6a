"""Linear with DDP, in threads, and on streams and devices that are not current."""

from __future__ import annotations

import copy
import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits, linear, step
from torch import nn


def ddp_worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(linear(8, 16, torch.device("cpu")), nn.ReLU(), linear(16, 4, torch.device("cpu")))
    model[0].weight.tag = "kept"
    single = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    x, dy = torch.randn(6, 8), torch.randn(6, 4)
    half = slice(0, 3) if rank == 0 else slice(3, 6)
    wrapped(x[half]).backward(dy[half])
    single(x).backward(dy)
    for p, q in zip(wrapped.parameters(), single.parameters(), strict=True):
        assert torch.allclose(p.grad * 2, q.grad, atol=1e-6)
    assert wrapped.module[0].weight.tag == "kept"
    with open(f"{folder}/{rank}", "w") as f:
        f.write("ok")
    dist.destroy_process_group()


def test_ddp(tmp_path: Any) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(ddp_worker, (port, str(tmp_path)), nprocs=2)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_eight_threads(device: torch.device) -> None:
    """Each with sizes, data and (on CUDA) a stream of its own."""
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            layer = linear(16 + i, 8 + i, device)
            x, dy = (
                torch.randn(12, 16 + i, device=device, requires_grad=True),
                torch.randn(12, 8 + i, device=device),
            )
            params = list(layer.parameters())
            want = step(layer, x, dy, params)
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            if stream is not None:
                torch.cuda.synchronize()
            start.wait()
            for _ in range(40):
                with torch.cuda.stream(stream):
                    assert_same_bits(step(layer, x, dy, params), want)
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_side_stream(cuda: torch.device) -> None:
    """Work is enqueued on the current stream: it waits for a slow producer on that stream."""
    layer = linear(256, 256, cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        x = torch.zeros(128, 256, device=cuda)
        torch.cuda._sleep(50_000_000)
        x.fill_(1.0)
        y = layer(x)
    stream.synchronize()
    assert torch.equal(y, layer(torch.ones(128, 256, device=cuda)).detach())


def test_device_that_is_not_current(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda:1")
    layer = linear(32, 16, other)
    x, dy = torch.randn(8, 32, device=other, requires_grad=True), torch.randn(8, 16, device=other)
    with torch.cuda.device(0):
        got = step(layer, x, dy, list(layer.parameters()))
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        want = step(layer, x, dy, list(layer.parameters()))
    assert all(t.device == other for t in got)
    assert_same_bits(got, want)
    with pytest.raises(RuntimeError, match=r"w is on cuda:1: must be on the device of x, cuda:0"):
        layer(torch.randn(8, 32, device="cuda:0"))
