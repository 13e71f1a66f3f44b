"""The commands of ``python -m nvrtc_attn``: doctor, warmup, cache. On click and rich."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import collect_env
from .base.dtypes import ATTENTION_DTYPES
from .base.errors import CudaError, TraceError, UnsupportedError, shown
from .base.log import LOGGER
from .base.version import __version__
from .doctor import accept_any_text, show
from .jit.cache import KernelCache, kernel_cache
from .jit.config import KernelConfig
from .jit.config_text import config_from_json
from .modifiers.modifier import Modifier
from .modifiers.trace import trace
from .plans import precompile


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nvrtc_attn")
def main() -> None:
    """Attention kernels compiled at run time: diagnose the installation, compile ahead, look after the cache."""
    accept_any_text()


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show driver, GPUs, NVRTC, headers, cache and frameworks. Exit code 0: attention runs on a GPU here."""
    sys.exit(show(as_json))


@main.command()
@click.option("--arch", multiple=True, help="Compile target, for example sm_90a. Repeatable.")
@click.option("--head-dim", multiple=True, type=click.IntRange(1, 512), help="Repeatable. [default: 64 128]")
@click.option("--head-dim-v", type=click.IntRange(1, 512), help="Head dim of v.  [default: that of q and k]")
@click.option(
    "--dtype",
    multiple=True,
    type=click.Choice(ATTENTION_DTYPES),
    help="Repeatable. [default: float16 bfloat16; sm_75 has float16 alone]",
)
@click.option("--causal/--no-causal", default=None, help="[default: both]")
@click.option("--bias", is_flag=True, help="An additive bias.")
@click.option("--dbias", is_flag=True, help="And its gradient.")
@click.option("--sink", is_flag=True, help="Attention sinks.")
@click.option("--max-logit", is_flag=True, help="The largest score of each head.")
@click.option("--mask", is_flag=True, help="A boolean mask.")
@click.option(
    "--modifier",
    metavar="MODULE:NAME",
    help="A score_mod (5 parameters), a mask_mod (4), or a function without parameters that returns both.",
)
@click.option("--softcap", is_flag=True, help="A softcap of the scores.")
@click.option("--dropout", is_flag=True, help="Dropout.")
@click.option("--varlen", is_flag=True, help="Packed sequences.")
@click.option("--seqused-k", is_flag=True, help="A length per sequence.")
@click.option("--deterministic", is_flag=True, help="The deterministic backward pass.")
@click.option("--forward-only", is_flag=True, help="No backward pass.")
@click.option("--batch", default=4, type=click.IntRange(1), show_default=True)
@click.option("--heads", default=16, type=click.IntRange(1), show_default=True)
@click.option("--heads-kv", type=click.IntRange(1), help="[default: --heads]")
@click.option(
    "--seqlen",
    multiple=True,
    metavar="M[xN]",
    help="Query (and key) length; repeat. Up to 16 queries: of all shorter caches of keys, too. "
    "[default: 4096 1024 8192 1x4096]",
)
@click.option(
    "--sms",
    type=click.IntRange(1),
    help="Multiprocessors of the GPU.  [default: those of the target's most common one]",
)
@click.option(
    "--config", "config_json", multiple=True, help="Exactly this kernel, as an error message quotes it. Repeatable."
)
@click.option(
    "--from-cache",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The kernels of this directory of compiled ones, of whatever version. Repeatable.",
)
@click.option("--tune", is_flag=True, help="Then measure on this machine's GPUs which kernels are fastest.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Processes.  [default: by cores and memory]")
def warmup(
    arch: tuple[str, ...],
    head_dim: tuple[int, ...],
    dtype: tuple[str, ...],
    causal: bool | None,
    forward_only: bool,
    heads: int,
    heads_kv: int | None,
    seqlen: tuple[str, ...],
    sms: int | None,
    config_json: tuple[str, ...],
    from_cache: tuple[Path, ...],
    tune: bool,
    jobs: int | None,
    modifier: str | None,
    **features: Any,
) -> None:
    """Compile forward and backward kernels into the cache, in parallel. Needs no GPU.

    Exit code 0: all of them are in the cache now.

    Options that describe a call which the library refuses are refused with its message.

    --from-cache compiles again what another cache has: that of a program that ran elsewhere, or after an upgrade that
    of the version before. Together with it, or with --config, the other options count only where --arch is given.

    With --tune the kernels of every candidate plan are compiled, and for the lengths given (with the batch and the
    heads) the fastest plan is measured and remembered in the cache. That needs the GPU. It reads the arrays that a
    --modifier captured, on the host or the GPU: they must be as large as those of such calls and hold what is typical.

    --modifier names a function of a module in the current directory or installed: score_mod, mask_mod, or one without
    parameters that returns (score_mod, mask_mod), or what nvrtc_attn.trace made. The arrays that it captured must be
    there, but only their types and ranks matter to a compile: other contents and captured numbers need no other kernel.
    Lengths fall into a few classes of a kernel each: repeat --seqlen, from the shortest to the longest.
    """
    requests: list[precompile.Request] = []
    try:
        kernels = [*map(config_from_json, config_json), *_kernels_of(from_cache)]
        if modifier is not None:
            features["modifier"] = _modifier_named(modifier)
        if arch or not (config_json or from_cache):
            if tune:
                _check_local(arch)
            requests = [
                precompile.Request(
                    arch=one_arch,
                    head_dim=one_head_dim,
                    dtype=one_dtype,
                    causal=one_causal,
                    num_heads=heads,
                    num_heads_kv=heads_kv,
                    seqlens=tuple(map(_seqlens, seqlen)) or precompile.DEFAULT_SEQLENS,
                    backward=not forward_only,
                    num_sms=sms,
                    **features,
                )
                for one_arch in arch or _local_archs()
                for one_head_dim in head_dim or (64, 128)
                for one_dtype in dtype or _default_dtypes(one_arch)
                for one_causal in ((False, True) if causal is None else (causal,))
            ]
            for request in requests:
                try:
                    precompile.problems(request)
                except ValueError as error:
                    raise ValueError(
                        f"nvrtc_attn.attention refuses the call that these options describe. {error}"
                    ) from error
            kernels += precompile.configs(requests, candidates=tune)
        reports = _compile_with_progress(list(dict.fromkeys(kernels)), jobs)
    except (UnsupportedError, ValueError, TraceError) as error:
        raise click.ClickException(str(error)) from error
    # rich would squeeze a table into 80 columns where the output is no terminal; a long row may wrap instead.
    Console(width=max(Console().width, 140)).print(_kernel_table(reports))
    failed = [report for report in reports if report.error]
    reasons: dict[str, dict[str, None]] = {}  # one for all kernels, mostly: of what is not installed, or is full
    for report in failed:
        reasons.setdefault(report.error or "", {})[f"{report.config.kernel} for {report.config.arch}"] = None
    for reason, names in reasons.items():
        click.echo(f"failed: {', '.join(names)}: {reason}", err=True)
    cache = _kernel_cache()
    lost = sum(cache.get(report.key) is None for report in reports if not report.error)
    if lost:
        where = cache.path or "there is no directory"
        click.echo(
            f"{lost} of {len(reports)} kernels were compiled and are not in the cache ({where}): a CacheWarning above "
            f"says why, or NVRTC_ATTN_CACHE_SIZE={cache.max_bytes} holds no more",
            err=True,
        )
    if tune:
        _tune(requests)
    sys.exit(1 if failed or lost else 0)


def _kernels_of(directories: tuple[Path, ...]) -> list[KernelConfig]:
    """What these directories have. How many kernels are left out, because this version has none like them, is printed.

    Raises
    ------
    ValueError
        One of them has no kernel that this version can compile.
    """
    kernels: list[KernelConfig] = []
    for directory in directories:
        found, others = precompile.kernels_of(directory)
        unknown = f"{others} of {len(found) + others} kernels are of no kind that this version has" if others else ""
        if not found:
            raise ValueError(f"--from-cache {directory}: {unknown or 'there is no compiled kernel in it'}")
        if unknown:
            click.echo(f"{directory}: {unknown}", err=True)
        kernels += found
    return kernels


def _tune(requests: list[precompile.Request]) -> None:
    handler = logging.StreamHandler(sys.stdout)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        passes = precompile.tune(requests)
    except CudaError as error:
        raise click.ClickException(str(error)) from error
    finally:
        LOGGER.removeHandler(handler)
    click.echo(f"{passes} passes; {sum(entry.tuned for entry in _kernel_cache().entries())} choices in the cache")


def _check_local(archs: tuple[str, ...]) -> None:
    local = _local_archs()
    absent = [arch for arch in archs if arch.rstrip("af") not in local]
    if absent:
        raise ValueError(f"--tune measures on the GPUs of this machine, {', '.join(local)}; not on {', '.join(absent)}")


def _modifier_named(text: str) -> Modifier:
    """The modifier of ``module:name``.

    Raises
    ------
    ValueError
        There is no such function, it has neither 5, 4 nor no parameters, or what it is asked for fails.
    TraceError
        It does what cannot be traced.
    """
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--modifier {text}: {error}. Write it as module:function.") from error
    except Exception as error:
        raise ValueError(f"--modifier {text}: its module ends with {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if isinstance(found, Modifier):
        return found
    try:
        count = len(inspect.signature(found).parameters) if callable(found) else -1
    except ValueError:  # a builtin's is not known
        count = -1
    if count not in (0, 4, 5):
        raise ValueError(f"--modifier {text}: it is no function of (score, b, h, q, k), (b, h, q, k) or nothing.")
    if count:
        return trace(found) if count == 5 else trace(None, found)
    try:
        made = found()
    except TraceError:
        raise
    except Exception as error:
        raise ValueError(f"--modifier {text}: it ends with {type(error).__name__}: {error}") from error
    if isinstance(made, Modifier):
        return made
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ValueError(
            f"--modifier {text}: it returns {shown(made)}, not (score_mod, mask_mod) or what nvrtc_attn.trace makes."
        )
    return trace(*made)


def _seqlens(text: str) -> tuple[int, int]:
    query, pair, key = text.partition("x")
    try:
        lengths = int(query), int(key if pair else query)
    except ValueError:
        lengths = (0, 0)
    if min(lengths) < 1:
        raise ValueError(f"--seqlen {text!r} is not a positive length M or a pair MxN")
    return lengths


def _default_dtypes(arch: str) -> tuple[str, ...]:
    return ("float16",) if arch == "sm_75" else ("float16", "bfloat16")


def _local_archs() -> tuple[str, ...]:
    gpus = collect_env.collect().get("gpus") or ()
    archs = dict.fromkeys("sm_" + gpu["compute_capability"].replace(".", "") for gpu in gpus)
    if not archs:
        raise ValueError("there is no GPU here: name the target, for example --arch sm_90a, and leave out --tune")
    return tuple(archs)


def _compile_with_progress(kernels: list[KernelConfig], jobs: int | None) -> list[precompile.KernelReport]:
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kernels))
        for report in precompile.compile_configs(kernels, jobs):
            reports.append(report)
            progress.advance(task)
    order = {config: index for index, config in enumerate(kernels)}
    return sorted(reports, key=lambda report: order[report.config])


def _kernel_table(reports: Iterable[precompile.KernelReport]) -> Table:
    # No borders, and the long column last: most rows fit into 80 columns.
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("kernel", "arch", "dtype", "tile m x n x d"):
        table.add_column(name, no_wrap=True)
    for name in ("regs", "spill B", "stack B", "KB", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("features")
    for report in reports:
        config = report.config
        switches = {name: getattr(config.features, name) for name in config.features.__slots__}
        head_dims = dict.fromkeys((config.head_dim, config.head_dim_v))
        table.add_row(
            config.kernel,
            config.arch,
            config.dtype,
            f"{config.block_m}x{config.block_n}x{','.join(map(str, head_dims))}",
            *("?" if n is None else str(n) for n in (report.num_regs, report.spill_bytes, report.stack_bytes)),
            f"{report.code_bytes / 1024:.0f}",
            "failed" if report.error else f"{report.compile_ms:.0f}",
            " ".join(
                ["cached"] * report.cached
                # Of a modifier the name: its text has lines.
                + [n if on is True or n == "modifier" else f"{n}:{on}" for n, on in switches.items() if on]
            ),
        )
    return table


@main.group()
def cache() -> None:
    """Look after the directory of compiled kernels."""


@cache.command("path")
def cache_path() -> None:
    """Print the directory."""
    click.echo(_kernel_cache().path or "none: kernels stay in memory")


@cache.command("list")
def cache_list() -> None:
    """Print every entry, most recently used first."""
    entries = _kernel_cache().entries()
    for entry in entries:
        kernel = f"{entry.metadata.get('kernel') or '?'} {entry.metadata.get('arch') or '?'}"
        if entry.tuned:
            kernel += f": {entry.metadata.get('problem')}: {entry.metadata.get('choice')}"
        click.echo(
            f"{entry.key[:16]}  {entry.size_bytes:>9}  {kernel}{'  damaged: ' + entry.problem if entry.problem else ''}"
        )
    tuned = sum(entry.tuned for entry in entries)
    click.echo(
        f"{len(entries)} entries, {sum(entry.size_bytes for entry in entries)} bytes"
        + (f"; {tuned} are choices of autotune" if tuned else "")
    )


@cache.command("clear")
def cache_clear() -> None:
    """Delete every entry, kernels and choices of autotune."""
    click.echo(f"{_kernel_cache().clear()} entries deleted")


@cache.command("verify")
def cache_verify() -> None:
    """Check every entry, remove the damaged ones (the next call compiles them again). Exit code 1: there were some."""
    damaged = _kernel_cache().verify()
    for entry in damaged:
        click.echo(f"{'removed' if entry.removed else 'could not remove'} {entry.path}: {entry.problem}")
    kept = sum(not entry.removed for entry in damaged)
    click.echo(f"{len(damaged)} damaged entries" + (f", {kept} of them still there" if kept else ""))
    sys.exit(1 if damaged else 0)


def _kernel_cache() -> KernelCache:
    try:
        return kernel_cache()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
