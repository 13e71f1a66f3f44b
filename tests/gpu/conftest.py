"""What GPU tests share: the GPU or a reason to skip, and poisoned runs of one case checked against float64."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries and other tests need memory, too
if "NVRTC_ATTN_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:  # before any library asks for GPUs
    worker, gpus = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), int(os.environ["NVRTC_ATTN_TEST_GPUS"])
    visible = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x] or [str(x) for x in range(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[worker % min(gpus, len(visible))]

SIMULATED = os.environ.get("NVRTC_ATTN_TEST_SIMULATED", "")
"""A compute capability, such as 9.0: these tests run on the GPU of tests/simulator then, as far as it goes."""


def _why_not() -> str:
    if SIMULATED and importlib.util.find_spec("torch") is not None:
        from simulator import torch_device

        major, minor = map(int, SIMULATED.split("."))
        torch_device.install((major, minor))
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: GPU tests make their tensors with it"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU: torch.cuda.is_available() is False"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (7, 5):
        return f"compute capability {major}.{minor} is below 7.5"
    return ""


_REASON = _why_not()


OF_THE_FIRST_PRODUCT = "ignore:Attempting to run cuBLAS, but there was no current CUDA context"
"""torch says so in a thread of autograd whose first product it is: any test may be the first of its process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here where it cannot run, saying why."""
    for item in items:
        if "tests/gpu/" in item.nodeid.replace("\\", "/"):
            item.add_marker(pytest.mark.filterwarnings(OF_THE_FIRST_PRODUCT))
            if _REASON:
                item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Workers share a GPU: the caches of 18 allocators fill the 80 GB of an H100, and other tests find no memory."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and not (_REASON or SIMULATED):
        import torch

        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()


WITH_LARGE_TILES = (
    "test_cases",
    "test_inputs",
    "test_max_logit",
    "test_packed",
    "test_scores",
    "test_sinks",
    "test_sweep",
)


@pytest.fixture(autouse=True)
def _large_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other test of these modules has the tiles of long sequences: small problems are served by others."""
    if _REASON or request.module.__name__.split(".")[-1] not in WITH_LARGE_TILES:
        return
    if zlib.crc32(request.node.nodeid.encode()) % 2:
        from harness import forget_plans

        from nvrtc_attn.heuristics import hopper_forward_tile

        forget_plans(monkeypatch)
        monkeypatch.setattr(hopper_forward_tile, "small_tile", lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The simulated GPU, if one is asked for."""
    if not SIMULATED:
        yield
        return
    from fake_driver import FakeGpu
    from simulator import gpu

    major, minor = map(int, SIMULATED.split("."))
    with gpu.simulated(gpu.build_machine(tmp_path_factory), gpu=FakeGpu((major, minor))):
        yield


@pytest.fixture(autouse=True)
def _on_the_first_gpu() -> None:
    """JAX leaves the thread that sets it up on the last GPU, and programs compiled ahead load on the first alone."""
    if not _REASON:
        import torch

        torch.cuda.set_device(0)


@pytest.fixture(params=["combine", "cluster"])
def split_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans of one device that has clusters of thread blocks and of one that has none; some of them split the keys."""
    from harness import forget_plans

    from nvrtc_attn.plans import autotune
    from nvrtc_attn.runtime import device

    original = autotune.table_forward
    made: list[Any] = []

    def chosen(*arguments: Any, **target: Any) -> Any:
        made.append(original(*arguments, **target))
        return made[-1]

    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    forget_plans(monkeypatch)
    monkeypatch.setattr(device, "has_clusters", lambda _: request.param == "cluster")
    monkeypatch.setattr(autotune, "table_forward", chosen)
    yield
    clusters = [getattr(spec.main.config, "cluster", 1) for spec in made]  # the Hopper kernel has none
    assert any(spec.num_splits > 1 for spec in made) or max(clusters) > 1, "the keys are to be split"
    assert request.param == "cluster" or set(clusters) == {1}
