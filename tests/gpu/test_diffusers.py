"""diffusers' models on the GPU, values and gradients of every weight, beside diffusers' own attention."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from differences import number
from diffusers_models import attention_processor, flux, results, torch, unet
from own_attention import check_beside_float32, in_dtype
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvrtc_attn.integrations import diffusers as integration

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
            made.set_attn_processor(
                integration.AttnProcessor() if of == "ours" else attention_processor.AttnProcessor()
            )
        assert not calls, "the library's own attention is compared with itself"
        # What torch chooses for flux in bfloat16 has NaN gradients (torch 2.11, diffusers 0.42.1, H100), which bound
        # nothing.
        with contextlib.nullcontext() if of == "ours" else sdpa_kernel(SDPBackend.MATH):
            found[of] = results(made, moved)
    assert len(calls) == (2 if name == "flux" else len(model.attn_processors))
    largest = check_beside_float32(found["ours"], found["same"], found["exact"], dtype)
    number("diffusers", largest, str(dtype).removeprefix("torch."))
