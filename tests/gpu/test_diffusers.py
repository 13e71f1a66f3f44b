"""diffusers' models on the GPU, values and gradients of every weight, beside diffusers' own attention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from differences import number

torch = pytest.importorskip("torch", reason="torch is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no attention backends")
    from diffusers.models.attention_processor import AttnProcessor as EagerProcessor
    from diffusers_models import flux, results, unet

    from nvrtc_attn.integrations import diffusers as integration

from own_attention import check_beside_float32, in_dtype  # noqa: E402 - after the skips

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["flux", "unet", "unet with a mask"])
def test_values_and_gradients(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # float32 is to be float32 in convolutions, too
    torch.manual_seed(0)
    integration.register()
    if name == "flux":
        model, given = flux(head_dim=64, image=144, text=20)
    else:
        model, given = unet(name == "unet with a mask", channels=(32, 64), size=24)
    calls = []
    original = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    found = {}
    for of in ("exact", "same", "ours"):
        made, moved = in_dtype(model, given, torch.float32 if of == "exact" else dtype)
        if name == "flux":
            made.set_attention_backend("nvrtc_attn" if of == "ours" else "native")
        else:
            made.set_attn_processor(integration.AttnProcessor() if of == "ours" else EagerProcessor())
        assert not calls, "the library's own attention is compared with itself"
        found[of] = results(made, moved)
    assert len(calls) == (2 if name == "flux" else len(model.attn_processors))
    largest = check_beside_float32(found["ours"], found["same"], found["exact"], dtype)
    number("diffusers", largest, str(dtype).removeprefix("torch."))
