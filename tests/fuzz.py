"""The fuzz campaign: random problems over all features, on the GPU against float64 on the GPU, in many processes.

``python tests/fuzz.py --problems 100000 --workers 12`` draws problems (`fuzz_problems`), compiles the kernels that they
need side by side, runs each problem forward and backward and judges it (`fuzz_torch`). Problems that would need a
kernel outside of the ``--kernels`` most used ones are passed over. A failure prints one line, which begins with the
command that runs that problem again; the exit code is 0 when every problem was run and none was wrong. A problem that
memory runs out for, twice, is run alone at the end, and counted.

``--compile-only`` needs no GPU. ``--cpu`` runs the same problems on the CPU path with NumPy (`fuzz_numpy`), and
``--simulated 9.0`` small ones on a simulated GPU of that compute capability (`fuzz_simulated`).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import fuzz_problems  # noqa: E402 - after the paths
from fuzz_problems import FEATURES, Problem  # noqa: E402

from nvrtc_attn.base.log import quiet  # noqa: E402
from nvrtc_attn.jit import config_text  # noqa: E402
from nvrtc_attn.jit.config import KernelConfig  # noqa: E402
from nvrtc_attn.plans import precompile  # noqa: E402

Target = dict[str, Any]
H200: Target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 227 << 10}
CHUNK = 8
"""Problems that a worker takes, and waits for, at once."""
STALLED_SECONDS = 180
"""Without a word of any worker for so long, the campaign ends: a kernel hangs."""
MEMORY_SHARE = 0.85
"""Of the GPU's memory that torch may take in all workers together; their contexts and kernels take the rest."""
MAX_FAULTS = 20
"""Workers that are replaced, after faults of their GPU context, before the campaign gives up."""


# ---------------------------------------------------------------------------------------------------------------------
# Which problems, which kernels


@dataclass
class Plan:
    """The problems of a campaign by index, and their kernels."""

    indices: list[int]
    kernels: list[KernelConfig]
    drawn: int


_OTHER_STRUCTURE = (-1,)


def _kernels_of(
    seed: int, first: int, count: int, target: Target, structures: frozenset[int]
) -> tuple[list[KernelConfig], list[tuple[int, ...]]]:
    """The kernels of ``count`` problems: each once, and for each problem the numbers of its own."""
    numbers: dict[KernelConfig, int] = {}
    rows = []
    for index in range(first, first + count):
        p = fuzz_problems.problem(seed, index)
        if structures and p.structure not in structures:
            rows.append(_OTHER_STRUCTURE)
            continue
        with quiet():  # about why a problem does not get a Hopper kernel
            configs = fuzz_problems.kernel_configs(p, **target)
        rows.append(tuple(numbers.setdefault(config, len(numbers)) for config in configs))
    return list(numbers), rows


def make_plan(
    seed: int,
    problems: int,
    max_kernels: int,
    target: Target,
    workers: int,
    first: int = 0,
    structures: frozenset[int] = frozenset(),
) -> Plan:
    """``problems`` indices from ``first`` on whose kernels are among the ``max_kernels`` that most problems use.

    ``structures``: of these only, where some are named.
    """
    numbers: dict[KernelConfig, int] = {}
    rows: list[tuple[int, ...]] = []
    pool: set[int] = set()
    indices: list[int] = []
    share = 1.0
    chunk = 200 if problems > 2000 else 50
    sample = max(10 * chunk, min(problems, 10000))
    with _Pool(workers) as processes:
        while len(indices) < problems:
            wanted = sample if not rows else max(sample // 5, int(1.1 * (problems - len(indices)) / max(0.05, share)))
            starts = range(first + len(rows), first + len(rows) + wanted, chunk)
            for configs, part in processes.map(_kernels_of, starts, seed, chunk, target, structures):
                renumbered = [*(numbers.setdefault(config, len(numbers)) for config in configs), -1]
                rows += [tuple(renumbered[n] for n in row) for row in part]
            if not pool:
                count = collections.Counter(itertools.chain.from_iterable(rows))
                del count[-1]
                pool = {n for n, _ in count.most_common(max_kernels)}
            indices = [first + at for at, row in enumerate(rows) if pool.issuperset(row)]
            share = len(indices) / len(rows)
            if len(indices) < problems and len(rows) > 40 * problems + 100_000:
                raise SystemExit(f"{max_kernels} kernels serve {len(indices)} of {len(rows)} problems: allow more")
    indices = indices[:problems]
    used = set(itertools.chain.from_iterable(rows[index - first] for index in indices))
    return Plan(indices, [config for config, n in numbers.items() if n in used], len(rows))


class _Pool:
    """Spawned processes, or none where one is enough."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(workers, mp_context=context) if workers > 1 else None

    def map(self, function: Any, starts: Iterable[int], seed: int, *rest: Any) -> Iterable[Any]:
        if self._executor is None:
            return (function(seed, start, *rest) for start in starts)
        futures = [self._executor.submit(function, seed, start, *rest) for start in starts]
        return (future.result() for future in futures)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


def compile_all(kernels: Sequence[KernelConfig], workers: int) -> list[str]:
    """Compile what the cache lacks; the failures."""
    start, failed, fresh = time.perf_counter(), [], 0
    order = sorted(kernels, key=lambda c: (c.kernel not in precompile._SMALL, c.head_dim + c.head_dim_v), reverse=True)
    for done, report in enumerate(precompile.compile_configs(order, workers), 1):
        fresh += not report.cached
        if report.error is not None:
            failed.append(f"{config_text.warmup_command(report.config)}: {report.error}")
            say(f"COMPILE {failed[-1]}")
        if done % 100 == 0 or done == len(order):
            say(f"compiled {done} of {len(order)} kernels, {fresh} fresh, {time.perf_counter() - start:.0f} s")
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# The workers


def _out_of_memory(error: BaseException) -> bool:
    """Also what libraries and the driver say when torch holds all memory."""
    text = f"{type(error).__name__} {error}".lower()
    return any(name in text for name in ("outofmemory", "out of memory", "out_of_memory", "alloc_failed"))


def _with_memory(function: Callable[[], Any]) -> tuple[Any, str]:
    """What ``function`` returns, called twice if memory runs out; None and the error if it does then too."""
    import torch

    text = ""
    for _ in range(2):
        try:
            return function(), ""
        except Exception as error:
            if not _out_of_memory(error):
                raise
            text = f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()  # outside of the handler, which keeps the tensors of the first try alive
    return None, text


def _work(
    slot: int,
    device: str,
    seed: int,
    indices: Sequence[int],
    memory: float,
    counter: Any,
    stop: Any,
    at_work: Any,
    results: Any,
) -> None:
    """Take problems until there are none, telling ``results`` what became of them.

    Messages are ("done", number), ("wrong" or "appeal", index, lines), ("alone", index, error) of a problem that memory
    ran out for, twice, ("fault", indices, error), and at the end ("end", kernels, count of each feature, structures).
    ``memory``: torch's share of that of the GPU.
    """
    import torch
    from fuzz_torch import judge

    import nvrtc_attn.plans.plan

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    if device != "cpu":
        torch.cuda.set_per_process_memory_fraction(memory, torch.device(device).index or 0)
    waiting: list[Any] = []
    features: collections.Counter[str] = collections.Counter()
    structures: set[int] = set()
    with torch.inference_mode(), quiet():
        while True:
            with counter.get_lock():
                at = counter.value
                counter.value = at + CHUNK
            chunk = [] if stop.is_set() else indices[at : at + CHUNK]
            issued: list[Any] = []
            current = -1
            at_work[slot] = at
            try:
                for current in chunk:
                    p = fuzz_problems.problem(seed, current)
                    features.update(fuzz_problems.features_of(p))
                    structures.add(p.structure)
                    try:
                        verdict, error_text = _with_memory(functools.partial(judge, p, device))
                        if error_text:
                            results.put(("alone", current, error_text))
                        else:
                            issued.append(verdict)
                    except Exception as error:
                        if device != "cpu":
                            torch.cuda.synchronize()  # raises again where the context is lost
                            torch.cuda.empty_cache()
                        results.put(("wrong", current, [f"{type(error).__name__}: {error}"]))
                        results.put(("done", 1))
                # The chunk before this one is judged while the GPU works on this one.
                judged = 0
                for verdict in waiting:
                    current = verdict.problem.index
                    lines = verdict.lines(device, appeal=False)
                    if lines:
                        final, error_text = _with_memory(functools.partial(verdict.lines, device))
                        if error_text:
                            results.put(("alone", current, error_text))
                            continue
                        kind = "wrong" if final else "appeal"
                        results.put((kind, current, final or lines))
                    judged += 1
                results.put(("done", judged))
            except Exception as error:
                suspects = [v.problem.index for v in (*waiting, *issued)]
                results.put(("fault", [*suspects, current], f"{type(error).__name__}: {error}"))
                results.close()
                results.join_thread()
                os._exit(3)
            waiting = issued
            if not chunk and not waiting:
                break
    launched = {config_text.config_to_json(config) for config, _ in nvrtc_attn.plans.plan._kernels}
    results.put(("end", launched, features, structures))


@dataclass
class Outcome:
    """What a campaign found."""

    done: int = 0
    wrong: dict[int, list[str]] = field(default_factory=dict)
    appeals: dict[int, list[str]] = field(default_factory=dict)
    alone: dict[int, str] = field(default_factory=dict)
    """What ran out of memory beside other workers, and the error; each was run again with the GPU to itself."""
    kernels: set[str] = field(default_factory=set)
    features: collections.Counter[str] = field(default_factory=collections.Counter)
    structures: set[int] = field(default_factory=set)
    seconds: float = 0.0


def run_campaign(
    seed: int, indices: Sequence[int], device: str = "cuda", workers: int = 1, seconds: float = 1e9
) -> Outcome:
    """Run problems ``indices`` on ``device`` in ``workers`` processes, for at most ``seconds``."""
    context = multiprocessing.get_context("spawn")
    results, stop = context.Queue(), context.Event()
    counter = context.Value("q", 0)
    at_work = context.Array("q", workers + MAX_FAULTS)
    arguments = (device, seed, list(indices), MEMORY_SHARE / workers, counter, stop, at_work, results)
    outcome, start, faults, suspects = Outcome(), time.perf_counter(), 0, list[int]()

    def spawn(slot: int) -> Any:
        process = context.Process(target=_work, args=(slot, *arguments), daemon=True)
        process.start()
        return process

    processes = [spawn(slot) for slot in range(workers)]
    finished, told, heard = 0, start, start
    while finished < len(processes):
        try:
            kind, *facts = results.get(timeout=1)
            heard = time.perf_counter()
        except queue.Empty:
            kind, facts = "", []
            dead = [p for p in processes if p.exitcode not in (None, 0, 3)]
            if dead and not any(p.is_alive() for p in processes):
                outcome.wrong[-1] = [f"{len(dead)} worker processes died, exit codes {[p.exitcode for p in dead]}"]
                break
            if time.perf_counter() - heard > STALLED_SECONDS:
                chunks = [list(indices[at : at + CHUNK]) for at in at_work[: len(processes)]]
                outcome.wrong[-1] = [f"no worker has said anything for {STALLED_SECONDS} s; last they took {chunks}"]
                for process in processes:
                    process.kill()
                break
        if kind == "done":
            outcome.done += facts[0]
        elif kind in ("wrong", "appeal"):
            index, lines = facts
            (outcome.wrong if kind == "wrong" else outcome.appeals)[index] = lines
            if kind == "wrong":
                say(failure(seed, index, lines))
        elif kind == "alone":
            outcome.alone[facts[0]] = facts[1]
        elif kind == "end":
            for total, part in zip((outcome.kernels, outcome.features, outcome.structures), facts, strict=True):
                total.update(part)
            finished += 1
        elif kind == "fault":
            finished, faults = finished + 1, faults + 1
            suspects += facts[0]
            say(f"FAULT of a worker at one of problems {facts[0]}: {facts[1]}")
            if faults <= MAX_FAULTS:
                processes.append(spawn(len(processes)))
        now = time.perf_counter()
        if now - start > seconds and not stop.is_set():
            stop.set()
        if now - told > 15:
            told = now
            rate = outcome.done / (now - start)
            say(f"{outcome.done} of {len(indices)} problems, {rate:.0f} a second, {len(outcome.wrong)} wrong")
    for process in processes:
        process.join()
    outcome.seconds = time.perf_counter() - start
    if faults:
        outcome.wrong.setdefault(-1, []).append(f"{faults} workers lost their GPU context")
        _replay_suspects(seed, suspects, device, outcome)
    if outcome.alone and workers > 1:
        _run_alone(seed, device, outcome)
    elif outcome.alone:  # it had the GPU to itself
        outcome.done += len(outcome.alone)
        for index, text in outcome.alone.items():
            outcome.wrong[index] = [text]
            say(failure(seed, index, outcome.wrong[index]))
    return outcome


def _run_alone(seed: int, device: str, outcome: Outcome) -> None:
    """Run what memory ran out for one by one, in one worker that has the GPU to itself."""
    say(f"{len(outcome.alone)} problems ran out of memory beside others and are run alone: {sorted(outcome.alone)}")
    again = run_campaign(seed, sorted(outcome.alone), device, workers=1)
    lost = again.wrong.pop(-1, [])
    outcome.done += again.done
    outcome.wrong |= again.wrong
    outcome.appeals |= again.appeals
    outcome.kernels |= again.kernels
    outcome.seconds += again.seconds
    if lost:
        outcome.wrong.setdefault(-1, []).extend(lost)


def _replay_suspects(seed: int, suspects: Sequence[int], device: str, outcome: Outcome) -> None:
    """Which of the problems that a lost context had in flight break one again, each in a process of its own."""
    for index in sorted(set(suspects))[:32]:
        command = [sys.executable, str(HERE / "fuzz.py"), "--replay", f"{seed}:{index}", "--device", device]
        try:
            code = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            outcome.wrong[index] = ["breaks the GPU context, or is wrong, when it is run alone"]
            say(failure(seed, index, outcome.wrong[index]))


def failure(seed: int, index: int, lines: Sequence[str]) -> str:
    """The one line of a failure."""
    if index < 0:
        return f"WRONG: {'; '.join(lines)}"
    p = fuzz_problems.problem(seed, index)
    lines = [line.replace("\n", " ")[:300] for line in lines]
    return f"WRONG {p.replay} | {'; '.join(lines)} | {p.backend} {_non_default(p.case)}"


def _non_default(case: Any) -> str:
    """The fields of a case that differ from their defaults."""
    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    defaults = {f.name: f.default for f in dataclasses.fields(case)}
    return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults[name])


def summary(seed: int, outcome: Outcome) -> str:
    """Counts of features, then the result."""
    names = [f"{name} {outcome.features[name]}" for name in FEATURES]
    names = [", ".join(names[at : at + 6]) for at in range(0, len(names), 6)]
    kinds = collections.Counter(config_text.config_from_json(text).kernel for text in outcome.kernels)
    result = (
        f"seed {seed}: {outcome.done} problems of {len(outcome.structures)} structures, "
        f"{len(outcome.kernels)} distinct kernels, "
        f"{len(outcome.wrong)} wrong, {outcome.seconds:.0f} s"
    )
    lines = [
        "features:",
        *names,
        "kernels: " + ", ".join(f"{kernel} {n}" for kernel, n in kinds.most_common()),
        f"judged by more than one sample of the yardstick: {len(outcome.appeals)}",
        f"run alone, as memory ran out beside other workers: {len(outcome.alone)}",
        *(failure(seed, index, lines) for index, lines in sorted(outcome.wrong.items())[:40]),
        result,
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def say(text: str) -> None:
    print(text, flush=True)


def cpu_campaign(
    seed: int, first: int, problems: int, max_scores: int, seconds: float = 1e9
) -> tuple[Outcome, list[int]]:
    """`fuzz_numpy` on the first ``problems`` problems of at most ``max_scores`` scores."""
    from fuzz_numpy import check

    outcome, start, indices = Outcome(), time.perf_counter(), []
    for index in itertools.count(first):
        if len(indices) == problems or time.perf_counter() - start > seconds:
            break
        p = fuzz_problems.problem(seed, index)
        if p.scores > max_scores:
            continue
        indices.append(index)
        outcome.features.update(fuzz_problems.features_of(p))
        outcome.structures.add(p.structure)
        try:
            lines = check(p)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        outcome.done += 1
        if lines:
            outcome.wrong[index] = lines
            say(failure(seed, index, lines).replace("--replay", "--cpu --replay"))
    outcome.seconds = time.perf_counter() - start
    return outcome, indices


def replay(p: Problem, device: str, on_cpu: bool) -> list[str]:
    """Run one problem again, here and now."""
    if on_cpu:
        from fuzz_numpy import check

        return check(p)
    import torch
    from fuzz_torch import judge

    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        return judge(p, device).lines(device)


def gpu_target() -> Target:
    """What the heuristics know about the first GPU."""
    from nvrtc_attn.runtime import device

    found = device.properties(0)
    return {"arch": found.arch, "num_sms": found.num_sms, "smem_limit": found.smem_per_block_optin}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin at this index")
    parser.add_argument("--kernels", type=int, default=800, help="bound of the number of distinct kernels")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=min(12, cores), help="processes that share the GPU")
    parser.add_argument("--compilers", type=int, default=cores, help="processes that plan and compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many, compiling included")
    parser.add_argument("--device", default="cuda", help='"cpu": the same code on torch tensors in host memory')
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="the CPU path on NumPy arrays; needs neither GPU nor torch")
    parser.add_argument("--max-scores", type=int, default=100_000, help="with --cpu: pass over larger problems")
    parser.add_argument("--modifiers", action="store_true", help="random score_mod and mask_mod: fuzz_modifiers.py")
    parser.add_argument("--shapes", type=int, default=2, help="with --modifiers: of each modifier on the GPU")
    parser.add_argument("--simulated", metavar="CAPABILITY", help="on a simulated GPU: fuzz_simulated.py")
    parser.add_argument("--replay", metavar="SEED:INDEX", help="run one problem")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options, start = parse(argv), time.perf_counter()
    # The built-in table chooses, as the plan does; a measured choice would be looked up for each problem.
    os.environ["NVRTC_ATTN_AUTOTUNE"] = "0"
    if options.simulated:
        import fuzz_simulated

        seed, first, problems = options.seed, options.first, options.problems
        if options.replay:
            (seed, first), problems = map(int, options.replay.split(":")), 1
        wrong = fuzz_simulated.run(
            options.simulated, problems, seed, first, options.seconds, options.modifiers, bool(options.replay)
        )
        return 1 if wrong else 0
    if options.modifiers:
        import fuzz_modifiers

        if options.compile_only:
            return compile_modifiers(options)
        on_cpu = options.cpu or options.device == "cpu"
        wrong = fuzz_modifiers.run(
            options.problems, options.seed, options.first, options.seconds, on_cpu, options.workers, options.shapes
        )
        return 1 if wrong else 0
    if options.replay:
        seed, index = map(int, options.replay.split(":"))
        p = fuzz_problems.problem(seed, index)
        say(f"{p}")
        lines = replay(p, options.device, options.cpu)
        say(failure(seed, index, lines) if lines else "right")
        return 1 if lines else 0
    if options.cpu:
        outcome, _ = cpu_campaign(options.seed, options.first, options.problems, options.max_scores, options.seconds)
        say(summary(options.seed, outcome))
        return exit_code(outcome, options.problems)
    on_gpu = options.device != "cpu" and not options.compile_only
    target = gpu_target() if on_gpu else H200
    plan = make_plan(options.seed, options.problems, options.kernels, target, options.compilers, options.first)
    say(
        f"{len(plan.indices)} problems of {plan.drawn} drawn need {len(plan.kernels)} kernels, "
        f"{time.perf_counter() - start:.0f} s"
    )
    if on_gpu or options.compile_only:
        failed = compile_all(plan.kernels, options.compilers)
        if failed or options.compile_only:
            return 1 if failed else 0
    left = options.seconds - (time.perf_counter() - start)
    outcome = run_campaign(options.seed, plan.indices, options.device, options.workers, left)
    say(summary(options.seed, outcome))
    following = plan.indices[min(outcome.done, len(plan.indices)) - 1] + 1
    say(f"{time.perf_counter() - start:.0f} s in all; --first {following} goes on from here")
    return exit_code(outcome, options.problems)


def compile_modifiers(options: argparse.Namespace) -> int:
    """Of a campaign for an H200, into the cache: no GPU is needed."""
    import fuzz_modifiers
    import numpy as np

    start, end = options.seed * 1_000_000 + options.first, time.monotonic() + options.seconds
    shapes = dataclasses.replace(fuzz_modifiers.CAMPAIGN, number=options.shapes)
    for begin in range(start, start + options.problems, 10 * options.compilers):
        numbers = range(begin, min(begin + 10 * options.compilers, start + options.problems))
        if time.monotonic() > end:
            say(f"time is over before modifier {begin}")
            return 2
        with np.errstate(all="ignore"):
            kernels = {config: None for number in numbers for config in fuzz_modifiers.kernels_on(number, H200, shapes)}
        if compile_all(list(kernels), options.compilers):
            return 1
    return 0


def exit_code(outcome: Outcome, problems: int) -> int:
    """0: all run, none wrong; 1: some are wrong; 2: time ran out before all were run."""
    return 1 if outcome.wrong else 2 if outcome.done < problems else 0


if __name__ == "__main__":
    sys.exit(main())
