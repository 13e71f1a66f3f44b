"""The table of operands, and that what is derived from it follows it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_environment import python_path

import nvrtc_attn
from nvrtc_attn.front.operands import (
    BACKWARD,
    DIFFERENTIABLE,
    FORWARD,
    GRADIENTS,
    INPUTS,
    OPERANDS,
    OPTIONAL_INPUTS,
    unread_by,
)
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.jit.config import Features, ForwardConfig
from nvrtc_attn.jit.params import (
    BackwardParams,
    ForwardParams,
    HopperBackwardParams,
    HopperForwardParams,
    params_behind,
    with_max_logit,
)


def test_a_pass_has_the_order_in_which_the_adapters_put_addresses() -> None:
    assert ("q", "k", "v", "out", "lse", "max_logit", *OPTIONAL_INPUTS) == FORWARD
    assert ("q", "k", "v", "out", "dout", "lse", "dlse", *OPTIONAL_INPUTS, *GRADIENTS) == BACKWARD
    assert ("q", "k", "v", *OPTIONAL_INPUTS) == INPUTS
    assert set(DIFFERENTIABLE) <= set(INPUTS)
    for name in INPUTS:
        assert OPERANDS[name].backward == OPERANDS[name].forward, f"the backward pass would ignore {name}"


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("ForwardParams", ForwardParams), ("BackwardParams", BackwardParams),
        ("WithSink", params_behind(ForwardParams, further=True)),
        ("WithSink", params_behind(HopperForwardParams, further=True)),
        ("FurtherBackwardParams", params_behind(BackwardParams, further=True)),
        ("WithTileWords", params_behind(ForwardParams, tile_words=True)),
        ("WithTileWords", params_behind(HopperBackwardParams, tile_words=True)),
        ("PartOf", params_behind(HopperForwardParams, part=True)),
        ("PartOf", params_behind(BackwardParams, tile_words=True, part=True)),
        ("WithMaxLogit", with_max_logit(ForwardParams)),
    ],
)  # fmt: skip
def test_device_code_has_the_pointers_and_strides_of_the_table(struct: str, mirror: Any, repository: Path) -> None:
    """Before any compiler sees the static asserts."""
    text = (repository / "cuda_src/nvrtc_attn/params.cuh").read_text()
    begin = re.search(rf"struct {struct} (: \w+ )?{{", text)
    assert begin is not None
    body = re.sub(r"//.*", "", text[begin.start() :].split("{", 1)[1].split("};")[0])
    fields = [name.split()[-1].strip("*") for line in body.split(";") if line.strip() for name in line.split(",")]
    assert fields == [name for name, _ in mirror._fields_ if not name.startswith("_")]


def test_what_lies_behind_has_the_name_of_the_struct_and_moves_nothing(repository: Path) -> None:
    text = (repository / "cuda_src/nvrtc_attn/params.cuh").read_text()
    bases = (ForwardParams, BackwardParams, HopperForwardParams, HopperBackwardParams)
    found, refused = 0, []
    for base, words, further, part in itertools.product(bases, *[(False, True)] * 3):
        try:
            struct = params_behind(base, tile_words=words, further=further, part=part)
        except ValueError:
            refused.append(further)
            continue
        found += 1
        assert struct is params_behind(base, tile_words=words, further=further, part=part)
        assert re.search(rf"(using {struct.__name__} = |struct {struct.__name__} )", text), struct.__name__
        for name, _ in base._fields_:
            assert getattr(struct, name).offset == getattr(base, name).offset
        assert (hasattr(struct, "tile_words_offset"), hasattr(struct, "dropout_heads")) == (words, part)
        assert hasattr(struct, "sink") == further
    assert found == 4 * 2 * 2 + 5
    assert all(refused)


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (HopperBackwardParams, {"further": True}), (BackwardParams, {"further": True, "tile_words": True}),
        (ForwardParams, {"further": True, "part": True}),
    ],
)  # fmt: skip
def test_structs_that_no_kernel_has_are_refused(base: Any, options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=f"{base.__name__}.*lie"):
        params_behind(base, **options)


def test_an_operand_that_is_none_has_no_switch() -> None:
    config = ForwardConfig(
        kernel="k", arch="sm_80", dtype="float16", head_dim=64, head_dim_v=64, block_m=64, block_n=64, num_warps=4,
        features=Features(optional="nothing"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="nothing is no optional operand"):
        entry_source(config)


def test_every_family_reads_the_operands_of_today() -> None:
    for family in ("forward_portable", "backward_portable", "forward_hopper", "backward_hopper"):
        assert unread_by(family, OPTIONAL_INPUTS) == []


def test_torch_puts_each_address_at_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter
    from nvrtc_attn.torch import passes

    OUT = ((1, 4, 2, 8), (64, 16, 8, 1), torch.float32)
    LSE, BIAS = ((1, 2, 4), (8, 4, 1), torch.float32), ((1, 2, 4, 4), (32, 16, 4, 1), torch.float32)
    SINK = (2,), (1,), torch.float32
    seen: list[dict[str, int]] = []

    class Plan:
        workspace_bytes = 64
        kernel_keys = ()

        def __init__(self, names: tuple[str, ...]) -> None:
            self.names = names

        def run(self, _stream: int, addresses: tuple[int, ...], workspace: int, rng: Any) -> None:
            assert workspace
            assert rng[:2] == (3, 4)
            seen.append(dict(zip(self.names, addresses, strict=True)))

    class Always(dict[Any, Any]):
        def __init__(self, entry: Any) -> None:
            super().__init__()
            self.entry = entry

        def get(self, _key: Any, _default: Any = None) -> Any:
            return self.entry

    monkeypatch.setattr(passes, "_forward_plans", Always((Plan(FORWARD), OUT, LSE)))
    monkeypatch.setattr(passes, "_backward_plans", Always((Plan(BACKWARD), [OUT, OUT, OUT, BIAS, SINK])))
    monkeypatch.setattr(passes, "raw_stream", lambda _device: 0)
    given = {name: torch.ones(1, 4, 2, 8, requires_grad=True) for name in "qkv"}
    given |= {"bias": torch.ones(1, 2, 4, 4, requires_grad=True), "mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    given["sink"] = torch.ones(2, requires_grad=True)
    given |= {name: torch.zeros(2, dtype=torch.int32) for name in INPUTS if name not in given}
    numbers = {"max_seqlen_q": 4, "max_seqlen_k": 4, "dropout_p": 0.5, "rng": (3, 4), "return_lse": True}
    out, lse, max_logit = adapter.attention(**given, **numbers, return_max_logit=True)
    forward = seen.pop()
    results = {"out": out, "lse": lse, "max_logit": max_logit}
    assert forward == {name: x.data_ptr() for name, x in {**given, **results}.items()}
    assert (max_logit.shape, max_logit.requires_grad) == ((1, 2), False)
    forward.pop("max_logit")
    dout, dlse = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 4)
    gradients = torch.autograd.grad((out, lse), [given[name] for name in DIFFERENTIABLE], (dout, dlse))
    backward = seen.pop()
    named = dict(zip(GRADIENTS, gradients, strict=True))
    assert {name: x.shape for name, x in named.items()} == {
        name: given[OPERANDS[name].gradient_of].shape for name in GRADIENTS
    }
    assert {name: address for name, address in backward.items() if name in forward} == forward
    assert backward["dout"] == dout.data_ptr()
    assert backward["dlse"] == dlse.data_ptr()
    assert {name: backward[name] for name in GRADIENTS} == {name: x.data_ptr() for name, x in named.items()}

    given["bias"].requires_grad_(False)
    given["sink"].requires_grad_(False)
    monkeypatch.setattr(passes, "_backward_plans", Always((Plan(BACKWARD), [OUT, OUT, OUT, None, None])))
    out = adapter.attention(**given, **{**numbers, "return_lse": False})
    torch.autograd.grad(out, given["q"], dout)
    assert (seen[-1]["dbias"], seen[-1]["dsink"], seen[-1]["dlse"]) == (0, 0, 0)


ROW = (
    '        row("head_scale", ("num_heads",), "float32", "in?", "in?", dense=True, families=("forward_portable",)),\n'
)
LATER_ROW = '        row("dq", '
PROGRAM = """
import inspect
import numpy as np
import pytest
import nvrtc_attn
from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.call import CallOptions, describe, describe_shapes
from nvrtc_attn.front.operands import FORWARD
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.jit.params import BackwardParams, ForwardParams

for params in (ForwardParams, BackwardParams):
    assert params.POINTERS[params.POINTERS.index("seqused_k") + 1] == "head_scale"
assert not [name for name, _ in ForwardParams._fields_ if name.startswith("head_scale_")], "dense: no strides"

functions = [nvrtc_attn.attention, nvrtc_attn.attention_forward, nvrtc_attn.attention_backward]
try:
    import nvrtc_attn.torch as adapter
    functions.append(adapter.attention)
except ImportError:
    adapter = None
for function in functions:
    assert list(inspect.signature(function).parameters)[-1] == "head_scale", function
    assert inspect.signature(function).parameters["head_scale"].default is None

q = np.zeros((1, 8, 4, 16), np.float32)
def call(scale):
    return describe(q, q, q, head_scale=scale, options=CallOptions(), stream=None)
assert call(np.ones(4, np.float32)).problem.further_inputs == ("head_scale",)
assert call(None).problem.further_inputs == ()
assert call(np.ones(4, np.float32)).problem != call(None).problem
for wrong, message in (
    (np.ones(3, np.float32), r"head_scale: shape \\(3,\\). Needed is \\[num_heads\\] = \\[4\\]"),
    (np.ones(4, np.float64), "head_scale: dtype float64"), (np.ones((1, 4), np.float32), "head_scale: .*rank 2"),
    (np.ones(8, np.float32)[::2], "head_scale: stride 2"),
):
    with pytest.raises(ValueError, match=message):
        call(wrong)

shapes = dict.fromkeys("qkv", ((4, 2048, 16, 64), "bfloat16")) | {"head_scale": ((16,), "float32")}
problem = describe_shapes(shapes, CallOptions(return_lse=True), Device("cuda", 0)).with_dense()
target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
spec = heuristics.choose_forward(problem, **target)
assert spec.launches[0].config.kernel == "forward_portable", "the Hopper kernel does not read it"
assert "static constexpr bool kHasHeadScale = true;" in entry_source(spec.launches[0].config)
with pytest.raises(UnsupportedError, match="head_scale is given, which no backward_portable kernel reads"):
    heuristics.choose_backward(problem, **target)
without = {name: x for name, x in shapes.items() if name != "head_scale"}
plain = describe_shapes(without, CallOptions(return_lse=True), Device("cuda", 0)).with_dense()
assert heuristics.choose_forward(plain, **target).launches[0].config.kernel == "forward_hopper"

if adapter is not None:
    import torch
    seen = []
    class Plan:
        workspace_bytes = 0
        def run(self, _stream, addresses, *_):
            seen.append(dict(zip(FORWARD, addresses, strict=True)))
    class Always(dict):
        def get(self, *_):
            return Plan(), ((1, 4, 2, 8), (64, 16, 8, 1), x.dtype), ((1, 2, 4), (8, 4, 1), x.dtype)
    from nvrtc_attn.torch import passes
    passes._forward_plans, passes.raw_stream = Always(), lambda _device: 0
    x, scale = torch.ones(1, 4, 2, 8), torch.ones(2)
    adapter.attention(x, x, x, head_scale=scale)
    assert seen[-1]["head_scale"] == scale.data_ptr()
    with pytest.raises(TypeError, match="attention.. got an unexpected keyword argument 'head_bias'"):
        adapter.attention(x, x, x, head_bias=scale)
print("followed")
"""


@pytest.mark.turns(3)
def test_everything_but_the_kernel_follows_a_new_row(repository: Path, tmp_path: Path) -> None:
    """A copy of the package with one row more, and nothing else."""
    copied = tmp_path / "nvrtc_attn"
    package = Path(nvrtc_attn.__file__).parent  # of a wheel, where that is what is tested
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("_include", "__pycache__"))
    (tmp_path / "cuda_src").symlink_to(repository / "cuda_src")
    table = copied / "front" / "operands.py"
    text = table.read_text()
    assert text.count(LATER_ROW) == 1
    table.write_text(text.replace(LATER_ROW, ROW.lstrip(chr(10)) + LATER_ROW))
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "followed", done.stderr
