"""The PyTorch adapter without a GPU: what may reach its tables of plans, and the refusal of everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wrong_values import (
    NOT_CAUSAL,
    NOT_FLAGS,
    NOT_INTEGERS,
    NOT_NUMBERS,
    NOT_RNG,
    NOT_TENSORS,
    NOT_WINDOWS,
    check,
    label,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as adapter  # noqa: E402 - after the skip
from nvrtc_attn import aten  # noqa: E402
from nvrtc_attn.front.signature import is_plain_window  # noqa: E402
from nvrtc_attn.torch import passes, random  # noqa: E402


class Plan:
    """A plan that computes nothing and counts its runs."""

    workspace_bytes = 0

    def __init__(self) -> None:
        self.runs = 0

    def run(self, *_: Any) -> None:
        self.runs += 1


class Table(dict[Any, Any]):
    """A table of plans that holds one for every key it is asked for: each would be a call that skips validation."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self.plan = Plan()

    def get(self, key: Any, default: Any = None) -> Any:
        hash(key)
        self.asked.append(key)
        out, lse = ((1, 4, 2, 8), (64, 16, 8, 1), torch.float32), ((1, 2, 4), (8, 4, 1), torch.float32)
        return self.plan, out, lse


def tensors() -> dict[str, Any]:
    return {"q": torch.ones(1, 4, 2, 8), "k": torch.ones(1, 6, 2, 8), "v": torch.ones(1, 6, 2, 8)}


def packed() -> dict[str, Any]:
    starts = {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)}
    starts["cu_seqlens_k"] = torch.tensor([0, 6], dtype=torch.int32)
    return {**tensors(), **starts, "max_seqlen_q": 4, "max_seqlen_k": 6}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(passes, "_forward_plans", made)
    monkeypatch.setattr(passes, "raw_stream", lambda device: 0)
    monkeypatch.setattr(passes, "current_device", lambda: -2)  # a torch with CUDA would look for its driver
    return made


WRONG: dict[str, list[Any]] = {
    "causal": [x for x in NOT_CAUSAL if type(x) is not str], "softmax_scale": NOT_NUMBERS, "softcap": NOT_NUMBERS,
    "window_size": [x for x in NOT_WINDOWS if not is_plain_window(x)], "return_lse": NOT_FLAGS,
    "dropout_p": [*NOT_NUMBERS, None, 1.1, -0.1], "deterministic": [x for x in NOT_FLAGS if x is not None],
    "max_seqlen_q": [*NOT_INTEGERS, torch.tensor(4.0), torch.tensor([4, 4]), torch.tensor(True)],
    "max_seqlen_k": NOT_INTEGERS,
}  # fmt: skip
# Those of the right kind ask the table; validation, on the way to a plan, refuses them by their value.
VALUES = (float, int)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_no_plan_is_looked_up_for_options_of_the_wrong_kind(name: str, grad: bool, table: Table) -> None:
    """F16: a table that was filled by ``causal=True`` found its plan for ``causal=1``."""
    given = packed() if name.startswith("max_") else tensors()
    given["q"].requires_grad_(grad)
    faults = []
    for value in WRONG[name]:
        if type(value) in VALUES and name not in ("causal", "return_lse", "deterministic"):
            continue
        before = len(table.asked)
        fault = check(adapter.attention, given, name, value)
        if fault or len(table.asked) > before:
            faults.append(f"{name}={label(value)}: {fault or 'asked the table'}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "name", [*WRONG, "q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sink", "rng"]
)
def test_wrong_kinds_are_refused_by_name(name: str) -> None:
    given = packed() if name.startswith(("max_", "cu_", "seqused")) else tensors()
    if name == "rng":
        given["dropout_p"] = 0.5
    values = NOT_RNG if name == "rng" else WRONG.get(name, [*NOT_TENSORS, np.ones((1, 4, 2, 8), np.float32)])
    adapter.attention(**given)
    faults = [f"{label(x)}: {fault}" for x in values if (fault := check(adapter.attention, given, name, x)) is not None]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("max_seqlen_q", torch.tensor(4), 4), ("max_seqlen_k", np.array(6), 6), ("max_seqlen_q", np.int64(4), 4),
        ("window_size", [torch.tensor(2), None], (2, None)), ("window_size", (np.int32(2), 0), (2, 0)),
        ("softcap", np.float32(2.0), 2.0), ("softcap", 2, 2.0), ("causal", np.bool_(True), True),
        ("softmax_scale", np.float64(0.5), 0.5),
    ],
)  # fmt: skip
def test_numbers_of_other_libraries_find_the_plan_of_the_number(name: str, value: Any, same: Any, table: Table) -> None:
    """F16: a tensor is hashed by its identity, so every step made an entry and kept a tensor alive."""
    given = packed() if name.startswith("max_") else tensors()
    for x in (same, value, value.clone() if isinstance(value, torch.Tensor) else value):
        adapter.attention(**{**given, name: x})
    assert len(set(table.asked)) == 1
    assert table.plan.runs == 3


def test_window_of_none_is_no_window(table: Table) -> None:
    for window in (None, (None, None), [None, None], (-1, -1)):
        adapter.attention(**tensors(), window_size=window)
    assert table.plan.runs == 4


def test_dropout_on_the_cpu_draws_there_whatever_the_default_device_is() -> None:
    torch.manual_seed(5)
    expected = adapter.attention(**tensors(), dropout_p=0.5)
    torch.manual_seed(5)
    given = tensors()
    with torch.device("meta"):  # a number of which cannot be read
        out = adapter.attention(**given, dropout_p=0.5)
    assert torch.equal(out, expected)


def test_a_refused_call_draws_no_numbers() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for p in (1.5, -0.5, float("nan"), "0.5", np.float32(1.5)):
        with pytest.raises((TypeError, ValueError), match="dropout_p"):
            adapter.attention(**tensors(), dropout_p=p)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("custom_mask_type", [3, -1, "1", True, None, 1.0, [], 10**400]),
        ("window_size", ["4", True, 4.0, [], -1, -(10**5000)]),
        ("compute_log_sumexp", [1, None, "yes", []]),
        *((name, [3, "x", [[1.0]], np.ones((1, 4, 2, 8))]) for name in ("query", "key", "value", "bias", "seqlen_k")),
    ],
)
def test_the_seeds_entry_point_names_what_it_refuses(name: str, values: list[Any]) -> None:
    """Before it asks where the tensors are, so without a GPU."""
    q, k, v = tensors().values()
    given: dict[str, Any] = {
        "query": q, "key": k, "value": v, "bias": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "max_seqlen_q": None, "max_seqlen_k": None, "dropout_p": 0.0, "custom_mask_type": 1,
    }  # fmt: skip
    call: Any = aten.efficient_attention_forward
    assert check(call, given, "query", q) is None  # on the CPU
    faults = [f"{label(x)}: {fault}" for x in values if (fault := check(call, given, name, x)) is not None]
    assert not faults, "\n".join(faults)


def test_the_state_without_dropout_is_where_the_seed_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: on the device while a graph is captured, on the CPU otherwise."""
    device = torch.device("meta")  # stands for a GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = [random.as_tensor(x) for x in random.no_state(device)]
    assert [(x.device, x.dtype, x.shape) for x in captured] == [(device, torch.int64, ())] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    elsewhere = [random.as_tensor(x) for x in random.no_state(device)]
    assert [(x.device.type, x.dtype, x.shape, int(x)) for x in elsewhere] == [("cpu", torch.int64, (), 0)] * 2


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    """A group of one process."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    ["attention", "attention with a bias", "scaled_dot_product_attention", "flex_attention", "a score_mod", "parallel"],
)
def test_a_penalty_on_gradients_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    """What came in, ones, asks for no gradient: the penalty lost its derivative through attention without a word."""
    x = torch.randn(1, 8, 2, 16, requires_grad=True)

    def run(x: Any) -> Any:
        if name == "attention":
            return adapter.attention(x, x, x)
        if name == "attention with a bias":
            return adapter.attention(x, x, x, bias=torch.zeros(1, 1, 8, 8))
        if name == "scaled_dot_product_attention":
            return adapter.scaled_dot_product_attention(x, x, x)
        if name == "flex_attention":
            return adapter.flex_attention(x, x, x)
        if name == "a score_mod":
            return adapter.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * 2)
        from nvrtc_attn.torch.parallel import ContextParallel

        return ContextParallel(request.getfixturevalue("one_rank"), seqlen=8).attention(x, x, x)

    for _ in range(2):  # a first call and a repeated one
        (gradient,) = torch.autograd.grad(run(x).sum() + (x**3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(gradient.square().sum(), x)
        (plain,) = torch.autograd.grad(run(x).sum() + (x**3).sum(), x)
        torch.testing.assert_close(plain, gradient.detach())


X = torch.ones(2, 8, 64, 16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adapter.attention(X.numpy(), X, X), ["q: got", "nvrtc_attn.attention takes those of any framework"]),
        (lambda: adapter.attention(X.to_sparse(), X, X), ["layout torch.sparse_coo", "storage. Pass a plain"]),
        (lambda: adapter.attention(X, X, X, part=(1, 2)), ["part: got (1, 2) of type tuple", "nvrtc_attn.Part"]),
        (lambda: adapter.flex_attention(X.numpy(), X, X), ["query: got", "of type ndarray. A torch tensor is needed"]),
        (lambda: adapter.flex_attention(X, X, X[:, :, 1:]), ["key, value: lengths 64 and 63 differ (dim -2"]),
        (
            lambda: adapter.flex_attention(X, X[:, :3], X[:, :3], enable_gqa=True),
            ["key, value: 3 heads do not divide the 8 heads of query (dim -3"],
        ),
        (lambda: adapter.attention(X, X, X, softmax_scale=torch.tensor(0.5)), ["softmax_scale", "multiply q by it"]),
        (
            lambda: adapter.attention(
                *[torch.nested.nested_tensor([torch.ones(5, 8, 16), torch.ones(7, 8, 16)], layout=torch.jagged)] * 3
            ),
            ["nested tensors", "x.values()[None]", "cu_seqlens_q", "enable_sdpa()"],
        ),
        (
            lambda: adapter.scaled_dot_product_attention(X, X, X, attn_mask=torch.ones(2, 64, dtype=torch.bool)),
            ["attn_mask: shape (2, 64)", "[2, 8, 64, 64]", "attn_mask[:, None, None]"],
        ),
        (
            lambda: adapter.scaled_dot_product_attention(X, X, X, attn_mask=torch.ones(2, 64, 64)),
            ["attn_mask: shape (2, 64, 64)", "attn_mask[:, None]."],
        ),
        (
            lambda: adapter.scaled_dot_product_attention(X, X, X, attn_mask=torch.ones(64, 64, dtype=torch.int64)),
            ["attn_mask: dtype torch.int64", "attn_mask.bool()"],
        ),
        (
            lambda: adapter.flex_attention(X, X, X, block_mask=lambda b, h, i, j: i >= j),
            ["block_mask: got", "create_block_mask(mask_mod, None, None, 64, 64)"],
        ),
    ],
)
def test_a_mistake_is_told_with_what_to_do(call: Any, words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
