"""Trains a small GPT on Jane Austen, eager, compiled as one graph, and in FP8; checks what te_ops promises.

    python examples/train_gpt.py [--plot FILE.png] [--steps N] [--device cpu|cuda]
                                 [--backend inductor|aot_eager|auto]

Every linear layer of the model is a `te_ops.Linear`. Each run starts from the same seed and sees the same
batches, so eager and compiled losses can be compared step by step. The table at the end is followed by the
promises, each "kept" or "BROKEN"; the exit status is 0 only if all are kept.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Few kernels are compiled here: Inductor's worker processes gain nothing, and can hold up torch 2.11's exit.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Threads that spin while they wait make small models many times slower where other programs want the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import te_ops as te
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

TEXT = Path(__file__).parent / "data" / "persuasion.txt"
PROMPT = "Anne "
PRINT_EVERY = 20
FINAL_STEPS = 20  # "loss after" is the average over so many steps
MARGIN = 0.3  # nats below the unigram entropy: the model must use what came before a character
FP8_GAP = 0.05  # nats that a loss in FP8 may end above the loss without
# te_ops gives the same bits eager and compiled, but Inductor fuses norms and activations, which rounds them
# differently; training amplifies that.
DRIFT = 0.05


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sized so that four runs, two of them in emulated FP8, take about two minutes on two CPU cores."""

    context: int = 64
    width: int = 128
    heads: int = 4
    blocks: int = 3
    batch: int = 32
    steps: int = 140
    warmup: int = 20
    lr: float = 4e-3
    seed: int = 1818


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of the table: ``backend`` None is eager; losses are compared with the run named ``against``.

    With a ``recipe``, the linear layers run in FP8, and the loss at the end is compared instead.
    """

    name: str
    backend: str | None = None
    against: str | None = None
    recipe: te.recipe.Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    run: Run
    model: GPT
    losses: list[float]
    val_before: float
    val_after: float
    steps_per_s: float
    graphs: int
    breaks: int
    recompiles: int

    @property
    def loss_after(self) -> float:
        last = self.losses[-FINAL_STEPS:]
        return sum(last) / len(last)


# ---------------------------------------------------------------------------------------- model --------


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and added to the residual stream x ``[B, T, C]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = te.Linear(width, 3 * width)
        self.proj = te.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = te.Linear(width, 4 * width)
        self.fc2 = te.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Token ids ``[B, T]`` to logits ``[B, T, vocabulary]``."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        self.context = config.context
        self.token = nn.Embedding(vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = te.Linear(config.width, vocabulary)
        self.recipe: te.recipe.Recipe | None = None
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)  # N(0, 1) would drown what the blocks add

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))  # the last layer in high precision, as is usual


# ----------------------------------------------------------------------------------------- data --------


class Corpus:
    """The text as indices into the bytes that occur in it; the last tenth is held out."""

    def __init__(self, path: Path, device: torch.device) -> None:
        text = path.read_bytes()
        self.alphabet = sorted(set(text))
        self._index = {byte: i for i, byte in enumerate(self.alphabet)}
        tokens = torch.tensor(self.encode(text), device=device)
        self.train, self.held_out = tokens.split([len(text) - len(text) // 10, len(text) // 10])
        histogram = [n / len(text) for n in Counter(text).values()]
        self.unigram_entropy = -sum(p * math.log(p) for p in histogram)

    def encode(self, text: bytes) -> list[int]:
        return [self._index[byte] for byte in text]

    def decode(self, tokens: list[int]) -> str:
        return bytes(self.alphabet[t] for t in tokens).decode(errors="replace")


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[B, T]``: the text from each start, and the same one token later."""
    cut = tokens[starts[:, None] + torch.arange(context + 1, device=tokens.device)]
    return cut[:, :-1], cut[:, 1:]


# ------------------------------------------------------------------------------------- training --------


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """fp32 on the CPU, where bf16 is often emulated; on CUDA bf16, with parameters that stay fp32."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=inputs.is_cuda):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: GPT, corpus: Corpus, batches: int = 8, batch: int = 32) -> float:
    """Average over windows spread evenly over the held-out text."""
    last = len(corpus.held_out) - model.context - 1
    starts = torch.linspace(0, last, batches * batch, device=corpus.held_out.device).long()
    losses = [loss_of(model, *windows(corpus.held_out, s, model.context)) for s in starts.split(batch)]
    return torch.stack(losses).mean().item()


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / config.warmup)
    return config.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / config.steps))


def print_progress(name: str, losses: list[float], times: list[float]) -> None:
    """One line after the first step, and one every `PRINT_EVERY`."""
    step = len(losses)
    if step == 1:
        speed = f"first step {times[1] - times[0]:.1f} s"
    elif step % PRINT_EVERY == 0:
        speed = f"{PRINT_EVERY / (times[-1] - times[-1 - PRINT_EVERY]):.1f} steps/s"
    else:
        return
    print(f"{name:>10}  step {step:4}  loss {losses[-1]:.3f}  {speed}", flush=True)


def train(run: Run, config: Config, corpus: Corpus, device: torch.device) -> Result:
    torch.manual_seed(config.seed)
    with device:
        model = GPT(config, len(corpus.alphabet))
    model.recipe = run.recipe
    last = len(corpus.train) - config.context - 1
    starts = torch.randint(last + 1, (config.steps, config.batch)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), foreach=True)
    val_before = validation_loss(model, corpus)

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(run.backend)
    forward = torch.compile(model, fullgraph=True, backend=counter) if run.backend else model
    losses: list[float] = []
    times = [time.perf_counter()]
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss = loss_of(forward, *windows(corpus.train, starts[step], config.context))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
        if step == 0:
            graphs = counter.frame_count
        print_progress(run.name, losses, times)

    return Result(
        run=run,
        model=model,
        losses=losses,
        val_before=val_before,
        # By the module itself, not by its compiled form: evaluation would be one more graph.
        val_after=validation_loss(model, corpus),
        # Without the first step, which compiles and warms up.
        steps_per_s=(config.steps - 1) / (times[-1] - times[1]) if config.steps > 1 else math.nan,
        graphs=graphs,
        breaks=sum(counters.get("graph_break", {}).values()),
        recompiles=counter.frame_count - graphs,
    )


@torch.no_grad()
def sample(model: GPT, corpus: Corpus, prompt: str, length: int = 300, temperature: float = 0.8) -> str:
    """The prompt, continued; all of the context is computed anew for each character."""
    tokens = corpus.encode(prompt.encode())
    for _ in range(length):
        context = torch.tensor([tokens[-model.context :]], device=model.head.weight.device)
        logits = model(context)[0, -1]
        tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1)))
    return corpus.decode(tokens)


# ------------------------------------------------------------------------- te_ops.Linear by itself --------


def linear_difference(
    config: Config, device: torch.device, backend: str, recipe: te.recipe.Recipe | None
) -> float:
    """Largest eager/compiled difference of one te_ops.Linear, over its output and every gradient."""
    torch.manual_seed(config.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = config.batch * config.context
    layer = te.Linear(config.width, 4 * config.width, params_dtype=dtype, device=device)
    nn.init.normal_(layer.bias)  # a bias of zeros could not show a difference
    x = torch.randn(rows, layer.in_features, dtype=dtype, device=device, requires_grad=True)
    dy = torch.randn(rows, layer.out_features, dtype=dtype, device=device)

    twin = copy.deepcopy(layer)  # under delayed scaling a call changes what the next one does

    def outputs(forward: Callable[[Tensor], Tensor], layer: te.Linear) -> tuple[Tensor, ...]:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x)
        return (y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy))

    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    pairs = zip(outputs(layer, layer), outputs(compiled, twin), strict=True)
    return torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max().item()


# ------------------------------------------------------------------------------------ the report --------


def loss_difference(result: Result, results: dict[str, Result]) -> float | None:
    """Largest difference in the loss of any step from the run that this one is compared with."""
    if result.run.against is None or result.run.recipe is not None:
        return None
    return max(abs(a - b) for a, b in zip(result.losses, results[result.run.against].losses, strict=True))


def fp8_gap(result: Result, results: dict[str, Result]) -> float | None:
    """How far the loss of an FP8 run ends above that of the run without, on the held-out text."""
    if result.run.recipe is None or result.run.against is None:
        return None
    return result.val_after - results[result.run.against].val_after


def print_table(results: dict[str, Result]) -> None:
    header = "run | backend | loss before | loss after | val loss | steps/s | graphs | breaks | recompiles"
    rows = [[*header.split(" | "), "max |diff| vs eager", "loss gap to high precision"]]
    for r in results.values():
        difference, gap = loss_difference(r, results), fp8_gap(r, results)
        counted = [str(n) if r.run.backend else "-" for n in (r.graphs, r.breaks, r.recompiles)]
        rows.append(
            [
                r.run.name,
                r.run.backend or "-",
                f"{r.losses[0]:.3f}",
                f"{r.loss_after:.3f}",
                f"{r.val_before:.3f} -> {r.val_after:.3f}",
                f"{r.steps_per_s:.1f}",
                *counted,
                "-" if difference is None else f"{difference:.2g}",
                "-" if gap is None else f"{gap:+.3f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print(" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def promises(results: dict[str, Result], corpus: Corpus, linear: dict[str, float]) -> list[tuple[str, bool]]:
    """What must hold, as (promise, kept)."""
    limit = corpus.unigram_entropy - MARGIN
    checks = []
    for name, r in results.items():
        drift = loss_difference(r, results)
        checks.append((f"{name}: loss ends below {limit:.3f} (at {r.loss_after:.3f})", r.loss_after < limit))
        if r.run.backend:
            checks.append((f"{name}: the model is 1 graph (counted {r.graphs})", r.graphs == 1))
            checks.append((f"{name}: no graph breaks (counted {r.breaks})", r.breaks == 0))
            checks.append((f"{name}: no recompiles (counted {r.recompiles})", r.recompiles == 0))
        gap = fp8_gap(r, results)
        if gap is not None:
            sentence = f"{name}: ends at most {FP8_GAP} above {r.run.against} (by {gap:+.3f})"
            checks.append((sentence, gap <= FP8_GAP))
        if drift is not None:
            sentence = f"{name}: every loss is within {DRIFT} of {r.run.against}'s (differ by {drift:.2g})"
            checks.append((sentence, drift <= DRIFT))
    for name, difference in linear.items():
        sentence = f"te_ops.Linear, {name}: eager and compiled are equal (differ by {difference:g})"
        checks.append((sentence, difference == 0))
    return checks


def plot(path: Path, results: dict[str, Result], corpus: Corpus) -> None:
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, r) in enumerate(results.items()):
        label = f"{name} ({r.run.backend})" if r.run.backend else name
        # The curves lie on each other: the later ones are thinner and dashed, so that all can be seen.
        axes.plot(range(1, len(r.losses) + 1), r.losses, "--" if i else "-", lw=1.2 if i else 3, label=label)
    axes.axhline(corpus.unigram_entropy, color="gray", ls=":", label="unigram entropy of the text")
    axes.set(xlabel="step", ylabel="training loss (nats per character)", title="A small GPT on te_ops.Linear")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}\n")


# --------------------------------------------------------------------------------------- command --------


def choose_backend(asked: str, device: torch.device) -> tuple[str, str]:
    """The backend, and why; Inductor compiles with the C++ compiler on CPU, and with triton on CUDA."""
    if asked != "auto":
        return asked, "as asked"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return "aot_eager", f"Inductor needs a C++ compiler, and there is no {compiler}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "aot_eager", "Inductor needs Python.h, which is not installed"
    if device.type == "cuda" and find_spec("triton") is None:
        return "aot_eager", "Inductor needs triton, which is not installed"
    return "inductor", f"found {compiler}" + (" and triton" if device.type == "cuda" else "")


def parse_arguments() -> argparse.Namespace:
    """Finds everything wrong with the arguments now, not after a minute of training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="save the loss curves")
    parser.add_argument("--steps", type=int, default=Config.steps, help="of each run (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if te_ops can use it")
    parser.add_argument("--backend", choices=["inductor", "aot_eager", "auto"], default="auto")
    args = parser.parse_args()
    cuda = te.info()["backends"]["cuda"]
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    if args.device == "cuda" and not cuda["usable"]:
        parser.error(f"--device cuda: {cuda['reason']}; remedy: {cuda['remedy']}")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
    args.device = torch.device(args.device or ("cuda" if cuda["usable"] else "cpu"))
    return args


def print_start(config: Config, corpus: Corpus, device: torch.device, backend: str, why: str) -> None:
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    dtype = "bf16 autocast" if device.type == "cuda" else "fp32"
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config, len(corpus.alphabet)).parameters())
    nats = corpus.unigram_entropy
    print(f"te_ops {te.__version__}, torch {torch.__version__}, device {device.type} ({on}), {dtype}")
    print(f"model: {parameters:,} parameters, {config.blocks} blocks; all linear layers are te_ops.Linear")
    print(f"text: {TEXT.name}, unigram entropy {nats:.3f} nats = {nats / math.log(2):.3f} bits per character")
    native, reason = te.is_fp8_available()
    print(f"current and delayed are FP8 recipes: {'on tensor cores' if native else reason}")
    print(f"compiled means torch.compile(fullgraph=True, backend={backend!r}): {why}\n", flush=True)


def main() -> int:
    # It warns of a CUDA toolkit without a GPU, which is no news: the device is printed.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    args = parse_arguments()
    config = Config(steps=args.steps)
    corpus = Corpus(TEXT, args.device)
    backend, why = choose_backend(args.backend, args.device)
    print_start(config, corpus, args.device, backend, why)

    runs = [
        Run(name="eager"),
        Run(name="compiled", backend=backend, against="eager"),
        Run(name="current", backend=backend, against="compiled", recipe=te.recipe.Float8CurrentScaling()),
        Run(name="delayed", backend=backend, against="compiled", recipe=te.recipe.DelayedScaling()),
    ]
    results = {run.name: train(run, config, corpus, args.device) for run in runs}
    print_table(results)

    recipes = {"no recipe": None, **{r.name: r.recipe for r in runs if r.recipe}}
    linear = {
        name: linear_difference(config, args.device, backend, recipe) for name, recipe in recipes.items()
    }
    differences = ", ".join(f"{name} {difference:g}" for name, difference in linear.items())
    print(f"te_ops.Linear eager vs compiled, largest difference of output, dx, dw, db: {differences}\n")

    last = runs[-1].name
    print(f"the {last} model writes:\n{sample(results[last].model, corpus, PROMPT)}\n")
    if args.plot:
        plot(args.plot, results, corpus)

    checks = promises(results, corpus, linear)
    for promise, kept in checks:
        print(f"{'kept' if kept else 'BROKEN':>6}  {promise}")
    broken = [promise for promise, kept in checks if not kept]
    if broken:
        print(f"train_gpt.py: broken: {'; '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
