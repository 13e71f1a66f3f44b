"""Train a small character-level GPT on the text of this repository, with attention from nvrtc_attn or from torch.

    python examples/train_gpt.py                      # train with nvrtc_attn
    python examples/train_gpt.py --attention sdpa     # the same run on torch's scaled_dot_product_attention
    python examples/train_gpt.py --compare            # both, and SDPA again on another backend; checks, plots, saves
    python examples/train_gpt.py --compare --processes 2 --compile --autocast   # DDP on 2 GPUs, torch.compile, bfloat16

The model is float32; q, k and v are cast to bfloat16 for attention on a GPU, under ``--autocast`` by torch. Dropout is
off and the seed is fixed, so runs differ by the rounding inside attention alone. Training amplifies that, so curves are
compared to what two backends of SDPA differ by: smoothed over 5 % of the run, nvrtc_attn may be off by twice their
largest difference plus 0.01 nats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.parallel import DistributedDataParallel

    import nvrtc_attn.torch
except ImportError as error:
    print(f'skipped: torch is not installed ({error}). pip install "nvrtc-attn[torch]"')
    sys.exit(0)

Attention = Callable[[torch.Tensor], torch.Tensor]
"""Of queries, keys and values in one tensor, ``[batch, seqlen, 3, heads, head_dim]``."""
SUFFIXES = {".md", ".py", ".cuh", ".toml", ".txt", ""}
FLOOR = 0.01  # nats; a mini-batch's loss varies by 0.02 to 0.05 from one step to the next


def nvrtc(qkv: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = nvrtc_attn.torch.attention_qkvpacked(qkv, causal=True)  # one gradient, not three put together
    return out


def sdpa(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.attention, self.dtype = heads, attention, dtype
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x))
        qkv = qkv if torch.is_autocast_enabled(x.device.type) else qkv.to(self.dtype)
        qkv = qkv.view(batch, length, 3, self.heads, width // self.heads)
        out = self.attention(qkv)
        x = x + self.project(out.reshape(batch, length, width).to(x.dtype))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, options: argparse.Namespace, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        width = options.width
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(options.context, width)
        self.blocks = nn.Sequential(*(Block(width, options.heads, attention, dtype) for _ in range(options.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def corpus(limit: int = 2_000_000) -> str:
    """The repository's own text: documents first, then sources."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(
        (path for path in root.rglob("*") if path.is_file() and path.suffix in SUFFIXES),
        key=lambda path: (path.suffix not in (".md", ""), path),
    )
    kept = [p for p in files if not any(part.startswith((".", "_include", "__")) for part in p.relative_to(root).parts)]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in kept)[:limit]


def run(name: str, options: argparse.Namespace, text: str) -> dict[str, Any]:
    """`train` in this process, or in as many as the options say, each with a share of every batch."""
    if options.processes == 1:
        return train(name, options, text)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_process, (name, options, text, Path(directory)), options.processes)
        result: dict[str, Any] = json.loads((Path(directory) / "result").read_text())
    return result


def _process(rank: int, name: str, options: argparse.Namespace, text: str, directory: Path) -> None:
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", f"file://{directory}/store", rank=rank, world_size=options.processes
    )
    result = train(name, options, text, rank)
    if rank == 0:
        (directory / "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def train(name: str, options: argparse.Namespace, text: str, rank: int = 0) -> dict[str, Any]:
    """One run: its losses, its validation loss and its speed."""
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    share = slice(rank, None, options.processes)  # of every batch, the same batches for any number of processes
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")  # TF32 outside attention, the same in every run
    characters = sorted(set(text))
    index = {c: i for i, c in enumerate(characters)}
    data = torch.tensor([index[c] for c in text], device=device)
    split = len(data) * 9 // 10
    order = torch.Generator().manual_seed(options.seed)

    def starts(part: torch.Tensor, count: int) -> torch.Tensor:
        """Where the sequences of so many batches begin: drawn at once, a copy in a step would wait for the GPU."""
        high = len(part) - options.context - 1
        return torch.randint(high, (count, options.batch, 1), generator=order)[:, share].to(device)

    def batch(part: torch.Tensor, begin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = part[begin + reach]
        return window[:, :-1], window[:, 1:]

    reach = torch.arange(options.context + 1, device=device)
    trained, validated = data[:split], data[split:]
    of_steps, of_validation = starts(trained, options.steps), starts(validated, 10)

    attention = nvrtc if name == "nvrtc_attn" else sdpa
    others = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if on_gpu else [SDPBackend.MATH]
    backends = {"sdpa": [SDPBackend.FLASH_ATTENTION], "sdpa, other backend": others}
    backend = sdpa_kernel(backends[name], set_priority=True) if name in backends else contextlib.nullcontext()
    model = GPT(len(characters), options, attention, torch.bfloat16 if on_gpu else torch.float32).to(device)
    if options.processes > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    if options.compile:
        torch.compiler.reset()  # else the second run on SDPA would be given the first one's program, and its backend
        model = torch.compile(model, backend=options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(options.steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 1.0) * (1 - 0.9 * i / options.steps)
    )

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast):
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    losses, start = [], time.perf_counter()
    with backend:
        for step in range(options.steps):
            if step == min(10, options.steps // 2):  # kernels are compiled and loaded by now
                _synchronise(device)
                start, counted = time.perf_counter(), options.steps - step
            value = loss(*batch(trained, of_steps[step]))
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
        _synchronise(device)
        seconds = (time.perf_counter() - start) / counted
        with torch.no_grad():
            losses += [loss(*batch(validated, begin)) for begin in of_validation]
    found = torch.stack(losses)
    if options.processes > 1:
        dist.all_reduce(found)
        found /= options.processes
    curve, validation = found[:-10].cpu().tolist(), found[-10:].mean().item()
    speed = options.batch * options.context / seconds
    if rank == 0:
        print(
            f"{name:20s} loss {curve[0]:.3f} -> {sum(curve[-10:]) / len(curve[-10:]):.3f}, validation "
            f"{validation:.3f}, {1e3 * seconds:.1f} ms per step, {speed:,.0f} characters/s",
            flush=True,
        )
    return {"losses": curve, "validation": validation, "ms_per_step": 1e3 * seconds, "tokens_per_second": speed}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def smooth(curve: list[float], window: int) -> torch.Tensor:
    return torch.tensor(curve, dtype=torch.float64).unfold(0, window, 1).mean(1)


def compare(options: argparse.Namespace, text: str) -> int:
    runs = {name: run(name, options, text) for name in ("sdpa", "nvrtc_attn", "sdpa, other backend")}
    window = max(options.steps // 20, 1)
    curves = {name: smooth(run["losses"], window) for name, run in runs.items()}
    noise = float((curves["sdpa"] - curves["sdpa, other backend"]).abs().max())
    difference = float((curves["sdpa"] - curves["nvrtc_attn"]).abs().max())
    tolerance = 2 * noise + FLOOR
    passed = difference <= tolerance  # False for NaN as well
    print(
        f"largest difference of the curves (mean of {window} steps): nvrtc_attn {difference:.2g}, "
        f"the two SDPA backends {noise:.2g}; tolerance {tolerance:.2g}: {'passed' if passed else 'FAILED'}"
    )
    directory = Path(options.out)
    directory.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    summary = {"device": where, "torch": torch.__version__, "options": vars(options), "window": window}
    result = {"difference": difference, "noise": noise, "tolerance": tolerance, "passed": passed}
    (directory / "train_gpt.json").write_text(json.dumps({**summary, **result, "runs": runs}, indent=1) + "\n")
    where = f"{options.processes} x {where}" if options.processes > 1 else where
    title = f"character GPT on {where}, {options.context} characters, {options.steps} steps"
    plot(directory / "train_gpt.png", runs, curves, title, window)
    return 0 if passed else 1


def plot(path: Path, runs: dict[str, Any], curves: dict[str, torch.Tensor], title: str, window: int) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    for name, curve in curves.items():
        steps = range(window - 1, window - 1 + len(curve))
        top.plot(steps, curve, label=f"{name} ({runs[name]['tokens_per_second']:,.0f} tokens/s)")
        if name != "sdpa":
            bottom.plot(steps, curve - curves["sdpa"], label=name)
    top.set(ylabel=f"loss (nats), mean of {window} steps", title=title)
    bottom.set(xlabel="step", ylabel="minus sdpa")
    top.legend()
    bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"saved {path} and {path.with_suffix('.json')}")


def options_of_a_run(description: str | None, sizes: dict[str, tuple[int, int]]) -> argparse.ArgumentParser:
    """The options that every run has: those of the model and of a step have a default for GPUs and one for the CPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--lr", type=float, default=1e-3)
    for name, (on_gpu, on_cpu) in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {on_gpu}, on the CPU {on_cpu}")
        parser.set_defaults(**{name: (on_gpu, on_cpu)})
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the defaults of its device."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        if isinstance(value, tuple):
            setattr(options, name, value[options.device == "cpu"])
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    for name in SIZES:
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, at least 1 is needed")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


SIZES = {
    "steps": (1500, 30), "layers": (6, 2), "width": (384, 64), "heads": (6, 4), "context": (256, 64), "batch": (64, 8),
}  # fmt: skip


def main() -> int:
    parser = options_of_a_run(__doc__, SIZES)
    parser.add_argument("--attention", choices=("nvrtc", "sdpa"), default="nvrtc")
    parser.add_argument("--out", default="train_gpt_results", help="directory of the plot and the numbers")
    parser.add_argument("--processes", type=int, default=1, help="of DistributedDataParallel, one a GPU")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    parser.add_argument("--autocast", action="store_true", help="the model's forward pass under bfloat16 autocast")
    options = parse(parser)
    if options.batch % options.processes:
        parser.error(f"--batch {options.batch} is not a multiple of --processes {options.processes}")
    text = corpus()
    print(f"{len(text):,} characters, {len(set(text))} different; {vars(options)}")
    if options.compare:
        return compare(options, text)
    run("nvrtc_attn" if options.attention == "nvrtc" else "sdpa", options, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
