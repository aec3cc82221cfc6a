"""Measuring one thing against another in the same process: medians over alternating rounds, saved as CSV.

Clocks, other tenants and caches drift, so candidates take turns within each round and a ratio is the median
of the rounds' own ratios, not the ratio of two medians taken minutes apart.
"""

from __future__ import annotations

import csv
import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import te_ops as te
import torch

Candidate = Callable[[], object]


@dataclass
class Result:
    """One line of a table: `ours` against `baseline`, both in `unit`."""

    what: str
    shape: str
    unit: str
    ours: float
    baseline: float
    ratio: float
    baseline_name: str
    device: str = field(default_factory=lambda: device_name())
    torch: str = torch.__version__
    te_ops: str = te.__version__
    cublaslt: str = field(default_factory=lambda: str(te.info()["versions"]["cublasLt"]))
    python: str = platform.python_version()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _paired(samples: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    ours, baseline = samples
    return (
        statistics.median(ours),
        statistics.median(baseline),
        statistics.median(a / b for a, b in zip(ours, baseline, strict=True)),
    )


def host_time(
    ours: Candidate, baseline: Candidate, calls: int = 200, rounds: int = 41
) -> tuple[float, float, float]:
    """Microseconds a call costs the host when the device keeps up: (ours, baseline, ratio)."""
    samples: list[list[float]] = [[], []]
    for f in (ours, baseline):
        for _ in range(calls):
            f()
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for which in ((0, 1), (1, 0))[i % 2]:
                f = (ours, baseline)[which]
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    f()
                samples[which].append((time.perf_counter() - start) / calls * 1e6)
    finally:
        gc.enable()
        synchronize()
    return _paired(samples)


def device_time(
    ours: Candidate, baseline: Candidate, rounds: int = 41, before: Candidate | None = None
) -> tuple[float, float, float]:
    """Milliseconds on the GPU, between events; a sleep before them hides the host.

    `before` runs, untimed, ahead of each: to empty the cache, say.
    """
    samples: list[list[float]] = [[], []]
    for f in (ours, baseline):
        for _ in range(3):
            f()
    for i in range(rounds):
        for which in ((0, 1), (1, 0))[i % 2]:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if before is not None:
                before()
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000)
            start.record()
            (ours, baseline)[which]()
            stop.record()
            stop.synchronize()
            samples[which].append(start.elapsed_time(stop))
    return _paired(samples)


def peak_memory(f: Candidate) -> float:
    """MiB that one call allocates at its peak, on top of what was there."""
    f()
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graph_replay(f: Candidate) -> Candidate:
    """`f` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        f()
    return graph.replay


def report(results: Sequence[Result], path: Path | None) -> None:
    """Prints the table, and saves it."""
    print(
        f"\n{results[0].device}, torch {results[0].torch}, te_ops {results[0].te_ops}, "
        f"cuBLASLt {results[0].cublaslt}\n"
    )
    print(f"{'what':46} {'shape':22} {'te_ops':>10} {'baseline':>10} {'unit':4} {'ratio':>6}")
    for r in results:
        print(f"{r.what:46} {r.shape:22} {r.ours:10.3f} {r.baseline:10.3f} {r.unit:4} {r.ratio:6.3f}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(results[0])))
            writer.writeheader()
            writer.writerows(asdict(r) for r in results)
        print(f"\nsaved to {path}")
