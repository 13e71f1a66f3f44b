"""Parts whose start is an array: what the CPU path reads, what is refused, and that no plan depends on the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.call import Call, CallOptions, describe_shapes
from nvrtc_attn.front.part import MAX_PLACED, ArrayStart
from nvrtc_attn.front.tensors import Device, TensorView

ROWS, KEYS, WHOLE = 30, 40, 64
PLACES = [(0, 0), (5, 24), (34, 0), (0, 20)]


def at(value: int, kind: Any = np.int32) -> Any:
    return np.array([value], kind)


def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * abs(q - k)


def blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 8 == k // 8) | (k == 5)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True}, {"window_size": (9, 3)}, {"causal": "top_left", "dropout_p": 0.3, "rng": (3, 5)},
        {"score_mod": bias, "mask_mod": blocks},
    ],
    ids=lambda x: "-".join(map(str, x)),
)  # fmt: skip
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_on_the_cpu_are_read_at_each_call(framework: str, options: dict[str, Any]) -> None:
    """One part; its arrays change in place, and it is as parts of integers are."""
    numbers = np.random.default_rng(0)
    arrays = [numbers.standard_normal((2, n, 2, 8), np.float32) for n in (ROWS, KEYS, KEYS, ROWS)]
    starts: list[Any] = [at(0), np.zeros((), np.int64)]
    given: list[Any] = arrays
    if framework == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in arrays]
        part = nvrtc_attn.Part(rows=(torch.from_numpy(starts[0]), WHOLE), keys=(torch.from_numpy(starts[1]), WHOLE))
    else:
        part = nvrtc_attn.Part(rows=(starts[0], WHOLE), keys=(starts[1], WHOLE))
    found = []
    for row, key in PLACES:
        starts[0][...], starts[1][...] = row, key
        host = nvrtc_attn.Part(rows=(row, WHOLE), keys=(key, WHOLE))
        for of_call, (q, k, v, dout) in ((part, given), (host, arrays)):
            out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, part=of_call, **options)
            gradients = [np.full(x.shape, np.nan, np.float32) for x in arrays[:3]]
            nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, part=of_call, **options)
            found.append([np.asarray(x) for x in (out, lse, *gradients)])
        for ours, theirs in zip(found[-2], found[-1], strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{row}, {key}")
    assert not np.array_equal(found[0][0], found[2][0])  # or the places would show nothing


def test_gradients_of_torch_are_those_of_integers() -> None:
    torch = pytest.importorskip("torch")
    import nvrtc_attn.torch as na

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (ROWS, KEYS, KEYS))
    start = torch.zeros(1, dtype=torch.int32)
    for row in (3, 20):
        start.fill_(row)
        found = []
        for x in (start, row):
            part = nvrtc_attn.Part(rows=(x, WHOLE), keys=(0, WHOLE))
            out = na.attention(q, k, v, causal=True, dropout_p=0.2, rng=(1, 2), part=part)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def call(part: nvrtc_attn.Part | None, modifier: Any = None, **options: Any) -> Call:
    """On a GPU, of shapes."""
    shapes = {x: ((1, n, 2, 64), "float16") for x, n in zip("qkv", (128, 256, 256), strict=True)}
    if options.pop("sink", False):
        shapes["sink"] = ((2,), "float32")
    if options.pop("seqused_k", False):
        shapes["seqused_k"] = ((1,), "int32")
    where = Device("cuda", 0)
    return describe_shapes(shapes, CallOptions(part=part, **options), where, modifier=modifier)


def placed(row: Any = None, key: Any = None, **more: Any) -> nvrtc_attn.Part:
    return nvrtc_attn.Part(
        rows=(ArrayStart() if row is None else row, 1024), keys=(ArrayStart() if key is None else key, 4096), **more
    )


def test_no_plan_knows_the_value() -> None:
    """Parts of other arrays are one part to every table, and their problem has the whole's diagonal from its corner."""
    first, second = (placed(at(x), at(2 * x)) for x in (1, 7))
    assert (first, hash(first)) == (second, hash(second))
    assert call(first, causal=True, dropout_p=0.1).problem == call(second, causal=True, dropout_p=0.1).problem
    assert first != placed(1, 2)
    assert placed(at(1), 3) != placed(at(1), 4)
    problem = call(first, causal=True, dropout_p=0.1).problem
    assert problem.device_starts
    assert (problem.window_left, problem.window_right, problem.bottom_right) == (None, 4096 - 1024, False)
    assert problem.dropout_pitches == (2, 1024, 4096)
    # What one integer says is in the window and in the random numbers, as it is without arrays.
    problem = call(placed(at(1), 100), window_size=(50, None), causal=True).problem
    assert (problem.window_left, problem.window_right) == (50 - (4096 - 1024) + 100, 4096 - 1024 - 100)
    assert call(placed(30, at(1)), dropout_p=0.5).dropout_base == 30 * 4096


def test_calls_that_need_no_place_have_the_kernels_of_whole_calls() -> None:
    """No mask, no dropout; a window that hides nothing of the whole; a modifier has the place as arrays of its own."""
    for options in ({}, {"window_size": (4095, 4095)}, {"softcap": 3.0}):
        assert call(placed(), **options).problem == call(placed(0, 0), **options).problem
    traced = nvrtc_attn.trace(bias, None)
    found = call(placed(), modifier=traced)
    assert not found.problem.device_starts
    assert found.modifier is not None
    assert len(found.modifier.captures) == len(found.captures) == 2
    assert len(traced.captures) == 0
    # One of the two indices is not asked for.
    assert len(call(placed(), modifier=nvrtc_attn.trace(None, lambda b, h, q, k: k % 3 == 0)).captures) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_read_the_place_where_they_mask_or_drop(arch: str) -> None:
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 166912 if arch == "sm_80" else 232448}
    problem = call(placed(), causal=True, return_lse=True).with_dense()
    for choose in (heuristics.choose_forward, heuristics.choose_backward):
        configs = [x.config for x in choose(problem, **target).launches]
        assert any(x.features.band for x in configs)
        for config in configs:
            assert config.features.device_starts == config.features.part == config.features.band, config.kernel


def refused(kind: type[Exception], words: str, run: Any) -> None:
    with pytest.raises(kind, match=words):
        run()


def test_what_is_refused() -> None:
    x = np.ones((1, 8, 1, 8), np.float32)
    part = nvrtc_attn.Part
    refused(TypeError, "part, batch: the start is an array", lambda: part(batch=(at(1), 4)))
    refused(TypeError, "part, heads: the start is an array", lambda: part(heads=(at(1), 4)))
    refused(TypeError, "part, rows: got the size None", lambda: part(rows=(at(1), None)))  # type: ignore[arg-type]
    refused(ValueError, "part, keys: got the size -1", lambda: part(keys=(at(1), -1)))

    def run(of_call: nvrtc_attn.Part, **options: Any) -> Any:
        return nvrtc_attn.attention(x, x, x, part=of_call, **options)

    refused(ValueError, r"part, rows: got int32 of shape \(2,\)", lambda: run(part(rows=(np.zeros(2, np.int32), 9))))
    refused(ValueError, "part, keys: got float32", lambda: run(part(keys=(at(1, np.float32), 9))))
    refused(ValueError, "part, keys: got bool", lambda: run(part(keys=(at(1, np.bool_), 9))))
    refused(ValueError, "ends at 10", lambda: run(part(keys=(at(2), 9))))
    refused(ValueError, r"part, keys: got \(-1, 9\)", lambda: run(part(keys=(at(-1), 9))))


def test_what_is_refused_on_the_gpu() -> None:
    refused(UnsupportedError, "part, plan_as", lambda: call(placed(plan_as=True), causal=True))
    refused(UnsupportedError, "part, seqused_k", lambda: call(placed(), causal="top_left", seqused_k=True))
    large = nvrtc_attn.Part(rows=(ArrayStart(), MAX_PLACED + 1))
    refused(UnsupportedError, f"at most {MAX_PLACED}", lambda: call(large))
    refused(ValueError, "the whole has 100, but the call has seqlen_q 128", lambda: call(
        nvrtc_attn.Part(rows=(ArrayStart(), 100))
    ))  # fmt: skip
    problem = call(placed(), causal=True, sink=True, return_lse=True).with_dense()
    refused(
        UnsupportedError, "sink is given, which no kernel reads beside starts on the device",
        lambda: heuristics.choose_forward(problem, arch="sm_90", num_sms=132, smem_limit=232448),
    )  # fmt: skip


def test_arrays_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU of q: one int32 there, or any integer on the CPU, which is read."""
    gpu, other = Device("cuda", 0), Device("cuda", 1)
    views = {
        "here": TensorView(256, (1,), (1,), "int32", gpu), "there": TensorView(256, (1,), (1,), "int32", other),
        "long": TensorView(256, (1,), (1,), "int64", gpu),
    }  # fmt: skip
    view = nvrtc_attn.front.part.view
    monkeypatch.setattr(
        nvrtc_attn.front.part, "view", lambda x, name, **more: views[x] if isinstance(x, str) else view(x, name, **more)
    )
    part, starts = placed(ArrayStart("here"), at(9)).located(gpu, None)
    assert (part.rows, part.keys) == ((ArrayStart(), 1024), (9, 4096))
    assert starts[0] is not None
    assert (starts[0].ptr, starts[0].shape, starts[1]) == (256, (), None)
    refused(ValueError, "part, rows: got int64", lambda: placed(ArrayStart("long")).located(gpu, None))
    for name, where in (("there", gpu), ("here", Device("cpu", 0))):
        refused(ValueError, "part, rows: on cuda:", lambda n=name, d=where: placed(ArrayStart(n)).located(d, None))
