"""nvrtc_attn's ComfyUI function against torch's attention. ComfyUI is no package: its registry is a stand-in here."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
from differences import note

from nvrtc_attn import UnsupportedError
from nvrtc_attn.base import log

torch = pytest.importorskip("torch", reason="torch is not installed")
integration = pytest.importorskip("nvrtc_attn.integrations.comfyui")


def expected(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> Any:
    """Of [B, H, M, D]."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, None if mask is None else mask[(None,) * (3 - mask.dim())][:, None] if mask.dim() < 4 else mask,
        scale=scale, enable_gqa=k.shape[1] != q.shape[1],
    )  # fmt: skip


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("shape", [None, (5, 7), (2, 5, 7), (1, 1, 7), (2, 4, 5, 7), (2, 1, 1, 7)], ids=str)
def test_layouts_and_masks(skip_reshape: bool, skip_output_reshape: bool, heads_kv: int, shape: Any) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads_kv, 7, 8), torch.randn(2, heads_kv, 7, 8)
    for mask in (None,) if shape is None else (torch.randn(shape), torch.rand(shape) < 0.7):
        if mask is not None and mask.dtype == torch.bool:
            mask[..., 0] = True
        given = (q, k, v) if skip_reshape else tuple(x.transpose(1, 2).flatten(2) for x in (q, k, v))
        out = integration.attention_nvrtc(
            *given, 4, mask, torch.float32, skip_reshape, skip_output_reshape, scale=0.3, transformer_options={},
            enable_gqa=True, low_precision_attention=False,
        )  # fmt: skip
        wanted = expected(q, k, v, mask, 0.3)
        note("ComfyUI", out, wanted if skip_output_reshape else wanted.transpose(1, 2).flatten(2))
        torch.testing.assert_close(
            out, wanted if skip_output_reshape else wanted.transpose(1, 2).flatten(2), atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_a_mask_of_integers_is_not_added(dtype: Any) -> None:
    """Ones and zeros would hide nothing. The override leaves them to ComfyUI, as they come."""
    q, mask = torch.randn(1, 5, 16), torch.ones(5, 5, dtype=dtype).tril()
    with pytest.raises(UnsupportedError, match=rf"mask: dtype {dtype}\..*mask\.bool\(\)"):
        integration.attention_nvrtc(q, q, q, 2, mask)
    assert integration.override(lambda *args, mask: mask, q, q, q, 2, mask=mask) is mask


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any = types.ModuleType("comfy.ldm.modules.attention")
    registry.REGISTERED_ATTENTION_FUNCTIONS = {}
    registry.register_attention_function = registry.REGISTERED_ATTENTION_FUNCTIONS.__setitem__
    modules: Any = types.ModuleType("comfy.ldm.modules")
    modules.attention = registry
    for name, module in (
        ("comfy", types.ModuleType("comfy")), ("comfy.ldm", types.ModuleType("comfy.ldm")),
        ("comfy.ldm.modules", modules), ("comfy.ldm.modules.attention", registry),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    integration.register()
    integration.register()
    assert {"nvrtc_attn": integration.attention_nvrtc} == registry.REGISTERED_ATTENTION_FUNCTIONS


def test_override_serves_or_hands_back(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served calls never reach ComfyUI's function; others do, unchanged, and say so once."""

    class Model:
        def __init__(self) -> None:
            self.model_options: dict[str, Any] = {}

        def clone(self) -> Model:
            return Model()

    model = Model()
    clone = integration.patch(model)
    replace = clone.model_options["transformer_options"]["optimized_attention_override"]
    assert model.model_options == {}
    monkeypatch.setattr(log, "_said", set())
    q = torch.randn(1, 5, 16)
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return q

    assert replace(theirs, q, q, q, 2, transformer_options={}).shape == q.shape
    assert calls == []
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        for _ in range(2):
            assert replace(theirs, q, q, q, 2, something_new=3) is q
    assert calls == [((q, q, q, 2), {"something_new": 3})] * 2
    assert len([record for record in caplog.records if "something_new" in record.message]) == 1
    with pytest.raises(UnsupportedError, match="something_new"):
        integration.attention_nvrtc(q, q, q, 2, something_new=3)
