"""What only a process of its own shows: no network, no reliance on asserts, no warnings, a silent exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from child_environment import python_path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ((), ("-O",), ("-OO",), ("-W", "error"), ("-b", "-X", "dev", "-W", "error"))


def python(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """Variables that put the hook of no_network.py into every Python process below, workers included."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nsys.path.append({str(ROOT / 'tests')!r})\nimport no_network\nno_network.forbid()\n"
        "with open(os.environ['NVRTC_ATTN_TEST_PROCESSES'], 'a') as file:\n    file.write(f'{os.getpid()}\\n')\n"
    )
    return {
        "PYTHONPATH": python_path(tmp_path, ROOT),
        "NVRTC_ATTN_TEST_PROCESSES": str(tmp_path / "processes"),
        "NVRTC_ATTN_TEST_NETWORK_LOG": str(tmp_path / "attempts"),
        "NVRTC_ATTN_CACHE_DIR": str(tmp_path / "kernels"),
        "NVRTC_ATTN_ASSERT_CACHED": "",
    }


NETWORK = """
    import numpy as np
    import nvrtc_attn
    from nvrtc_attn import collect_env
    from nvrtc_attn.plans import precompile
    from nvrtc_attn.jit.cache import kernel_cache
    from nvrtc_attn.jit.compile import compile_kernel

    if __name__ == "__main__":
        q = np.ones((1, 5, 2, 8), np.float32)
        out, lse = nvrtc_attn.attention(q, q, q, dropout_p=0.1, return_lse=True)
        grads = [np.empty_like(q) for _ in range(3)]
        nvrtc_attn.attention_backward(q, q, q, q, out, lse, *grads)
        try:
            import torch, nvrtc_attn.torch
        except ImportError:
            pass
        else:
            x = torch.ones(1, 5, 2, 8, requires_grad=True)
            nvrtc_attn.torch.attention(x, x, x).sum().backward()
        report = collect_env.collect()
        requests = [precompile.Request(arch=a, head_dim=64, dtype="float16", causal=c, seqlens=((512, 512),))
                    for a in ("sm_80", "sm_90") for c in (False, True)]
        configs = [c for c in precompile.configs(requests) if c.kernel in ("delta", "dq_convert")]  # small ones
        assert len(configs) > 1
        if report["nvrtc"] and report["nvrtc"]["compiles"]:
            compile_kernel(configs[0])
            reports = list(precompile.compile_configs(configs, 2))
            assert [r.error for r in reports if r.error] == [], reports
            assert kernel_cache().verify() == [] and len(kernel_cache().entries()) == len(configs) == len(reports)
        print("done")
"""


@pytest.mark.reliability(99)
def test_everything_works_without_a_network(watched: dict[str, str], tmp_path: Path) -> None:
    """Import, computing, torch, compiling in this process and in workers, the cache, the doctor."""
    script = tmp_path / "run.py"  # worker processes may import the main module
    script.write_text(textwrap.dedent(NETWORK))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, env={**os.environ, **watched}, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert Path(watched["NVRTC_ATTN_TEST_PROCESSES"]).read_text().split(), "the hook was there"
    assert not Path(watched["NVRTC_ATTN_TEST_NETWORK_LOG"]).exists(), "and nobody met it"


@pytest.mark.reliability(99)
def test_the_hook_sees_what_asks_for_the_network(watched: dict[str, str]) -> None:
    code = """
        import socket, urllib.request
        unix = socket.socketpair()  # local, and not a matter of the hook
        for ask in (
            lambda: socket.create_connection(("192.0.2.1", 9), timeout=1),
            lambda: socket.getaddrinfo("example.invalid", 80),
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("192.0.2.1", 9)),
            lambda: urllib.request.urlopen("http://192.0.2.1/"),
        ):
            try:
                ask()
            except RuntimeError as error:
                assert "needs" in str(error) or "network" in str(error)
            else:
                print("not seen")
    """
    done = python(code, "-W", "ignore", **watched)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert len(Path(watched["NVRTC_ATTN_TEST_NETWORK_LOG"]).read_text().splitlines()) == 4


# -- options of the interpreter --------------------------------------------------------------------------------------


REFUSALS = """
    import os, sys, warnings
    import numpy as np
    import nvrtc_attn
    from nvrtc_attn.base import env
    from nvrtc_attn.jit import config_text
    from nvrtc_attn.jit.cache import KernelCache
    from nvrtc_attn.jit.cache_entry import decode_entry
    from nvrtc_attn.runtime.kernel import launch
    from nvrtc_attn.front.philox import keep_mask
    from pathlib import Path

    q = np.linspace(0, 1, 2 * 6 * 4 * 8, dtype=np.float32).reshape(2, 6, 4, 8)
    k = q[:, :, :2] + 1
    attention = nvrtc_attn.attention
    # The good path: every feature, both directions, and no word on stderr.
    options = dict(bias=q[:, :, :, :6].transpose(0, 2, 1, 3), mask=np.ones((2, 1, 1, 6), bool), causal=True,
                   window_size=(3, 1), softcap=5.0, dropout_p=0.25, rng=(3, 4))
    out, lse = attention(q, k, k, return_lse=True, **options)
    grads = [np.empty_like(x) for x in (q, k, k)]
    dbias = np.empty_like(options["bias"])
    nvrtc_attn.attention_backward(q, q, k, k, out, lse, *grads, dbias=dbias, deterministic=True, **options)
    lengths = np.array([0, 2, 6], np.int32)
    packed = attention(q[:1], k[:1], k[:1], cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=4, max_seqlen_k=4)
    print(*(float(np.abs(x).sum()) for x in (out, lse, *grads, dbias, packed)))
    readonly = np.empty_like(q); readonly.flags.writeable = False
    calls = {
        "a string": lambda: attention("q", k, k), "no tensor": lambda: attention(q, k, None),
        "rank": lambda: attention(q[0], k, k), "dtype": lambda: attention(q.astype(np.float64), k, k),
        "two dtypes": lambda: attention(q, k.astype(np.float16), k), "heads": lambda: attention(q[:, :, :3], k, k),
        "head dim": lambda: attention(q, k[..., :7], k), "batch": lambda: attention(q, k[:1], k),
        "p": lambda: attention(q, k, k, dropout_p=1.5), "scale": lambda: attention(q, k, k, softmax_scale=np.nan),
        "softcap": lambda: attention(q, k, k, softcap=-1.0), "rng": lambda: attention(q, k, k, dropout_p=0.5, rng=-1),
        "window": lambda: attention(q, k, k, window_size=(-5, 0)), "causal": lambda: attention(q, k, k, causal="up"),
        "mask": lambda: attention(q, k, k, mask=np.ones((2, 4, 5, 6), bool)),
        "bias": lambda: attention(q, k, k, bias=np.ones((3, 1, 1, 6), np.float32)),
        "lengths": lambda: attention(q[:1], k[:1], k[:1], cu_seqlens_q=lengths[::-1].copy(), cu_seqlens_k=lengths,
                                     max_seqlen_q=4, max_seqlen_k=4),
        "out": lambda: attention(q, k, k, out=q), "read-only": lambda: attention(q, k, k, out=readonly),
        "stream": lambda: attention(q, k, k, stream=7), "keyword": lambda: attention(q, k, k, is_causal=True),
        "lse": lambda: nvrtc_attn.attention_backward(q, q, k, k, out, lse[:1], *grads),
        "grid": lambda: launch(None, 0, 128, 0, None, 0), "entry": lambda: decode_entry(b"", "0" * 64),
        "key": lambda: KernelCache(Path("/nonexistent"), 1).get("../x"),
        "config": lambda: config_text.config_from_json("{}"),
    }
    os.environ["NVRTC_ATTN_BACKEND"] = "cudnn"
    calls["variable"] = env.backend
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            print(name, type(error).__name__, str(error).replace("\\n", " "))
        else:
            print(name, "accepted")
"""


@pytest.mark.reliability(104)
def test_no_option_of_the_interpreter_changes_a_result_or_a_refusal() -> None:
    """Asserts that -O removes guard nothing, and nothing that -W error would raise happens on the good path."""
    found = {}
    for options in OPTIONS:
        done = python(REFUSALS, *options)
        assert (done.returncode, done.stderr) == (0, ""), (options, done.stderr)
        found[options] = done.stdout.splitlines()
    plain = found[()]
    assert len(plain) == 28
    assert not [line for line in plain if line.endswith("accepted") or " AssertionError " in line]
    for options, lines in found.items():
        assert lines == plain, options


TORCH = """
    import sys, warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own import
        import torch
    import nvrtc_attn.torch as na
    x = torch.linspace(0, 1, 2 * 6 * 4 * 8).reshape(2, 6, 4, 8).requires_grad_()
    out, lse = na.attention(x, x, x, causal=True, dropout_p=0.25, rng=(1, 2), return_lse=True)
    (out.sum() + lse.sum()).backward()
    print(float(x.grad.abs().sum()) > 0)
    for options in ({"dropout_p": 2.0}, {"softcap": -1.0}, {"softmax_scale": float("inf")}, {"causal": "sideways"}):
        try:
            na.attention(x, x, x, **options)
        except (TypeError, ValueError) as error:
            print(type(error).__name__, *str(error).splitlines())
    try:
        na.attention(x, x[:, :, :3], x)
    except ValueError as error:
        print(*str(error).splitlines())
"""


@pytest.mark.reliability(104)
def test_no_option_of_the_interpreter_changes_the_torch_adapter() -> None:
    pytest.importorskip("torch")
    found = []
    for options in ((), ("-O", "-W", "error")):
        done = python(TORCH, *options)
        assert (done.returncode, done.stderr) == (0, ""), (options, done.stderr)
        found.append(done.stdout.splitlines())
    assert found[0] == found[1]
    assert found[0][0] == "True"
    assert len(found[0]) == 6


# -- forks -------------------------------------------------------------------------------------------------------------


FORK = """
    import importlib, os, pkgutil, signal, sys, threading
    import numpy as np
    import nvrtc_attn

    for found in pkgutil.walk_packages(nvrtc_attn.__path__, "nvrtc_attn."):
        if not found.name.startswith(("nvrtc_attn.integrations.", "nvrtc_attn.__main__")):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError:  # of a framework that is not installed
                pass
    kinds = type(threading.Lock()), type(threading.RLock())
    locks = {
        (module, name): lock
        for module in [x for name, x in sys.modules.items() if name.startswith("nvrtc_attn")]
        for name, lock in vars(module).items()
        if isinstance(lock, kinds) and name != "descriptors"  # which every fork waits for
    }
    print(len(locks) > 10)
    held, done = threading.Event(), threading.Event()

    def hold():
        for lock in locks.values():
            lock.acquire()
        held.set()
        done.wait()
        for lock in locks.values():
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # against hanging
        for module, name in locks:
            lock = getattr(module, name)
            if not lock.acquire(blocking=False):
                print(f"{module.__name__}.{name} is held for good", flush=True)
                os._exit(1)
            lock.release()
        x = np.ones((1, 4, 2, 8), np.float32)
        out = nvrtc_attn.attention(x, x, x, score_mod=lambda score, b, h, q, k: score - 2 * (q - k))
        print(out.shape, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    done.set()
    thread.join()
"""


@pytest.mark.reliability(74)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_waits_for_no_lock_that_a_thread_of_its_parent_held() -> None:
    done = python(FORK, "-W", "ignore")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True", "(1, 4, 2, 8)"]), done.stdout + done.stderr
