"""nvrtc_attn in Hugging Face diffusers: tiny random models against diffusers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
from differences import note
from diffusers_models import attention_dispatch, attention_processor, flux, results, torch, unet

from nvrtc_attn import UnsupportedError
from nvrtc_attn.integrations import diffusers as integration

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.manual_seed(0)
    integration.register()


def compare(results: list[dict[str, Any]]) -> None:
    expected, found = results
    note("diffusers", found["out"], expected["out"])
    torch.testing.assert_close(found["out"], expected["out"], atol=3e-6, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        if name != "out":
            scale = max(float(expected[name].abs().max()), 1e-3)
            assert float((gradient - expected[name]).abs().max()) <= 2e-5 * scale, name


def run(model: Any, inputs: dict[str, Any], choose: Any, choice: Any, calls: int) -> dict[str, Any]:
    """Output and gradients under a choice of attention that reaches the library `calls` times."""
    choose(choice)
    seen = []
    original = integration.attention

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "attention", counted)
        found = results(model, inputs)
    assert len(seen) == calls
    return found


def test_flux() -> None:
    model, inputs = flux()
    choices = (("native", 0), ("nvrtc_attn", 2))
    compare([run(model, inputs, model.set_attention_backend, name, calls) for name, calls in choices])


def test_stable_diffusion_unet() -> None:
    """Self and cross attention, with a mask of the text's tokens."""
    for masked in (False, True):
        model, inputs = unet(masked)
        choices = ((attention_processor.AttnProcessor(), 0), (integration.AttnProcessor(), len(model.attn_processors)))
        compare([run(model, inputs, model.set_attn_processor, choice, calls) for choice, calls in choices])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0, "bias": True},
        {"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"},
        {"qk_norm": "layer_norm"},
        {"scale_qk": False},
    ],
    ids=lambda x: ",".join(x) or "plain",
)
def test_blocks(options: dict[str, Any]) -> None:
    """Every branch of the processor; images of rank 4 where the block has a group norm."""
    block = attention_processor.Attention(query_dim=16, heads=2, dim_head=8, **options)
    states = torch.randn(2, 16, 3, 5) if "norm_num_groups" in options else torch.randn(2, 7, 16)
    inputs = {"encoder_hidden_states": torch.randn(2, 4, 12)} if "cross_attention_dim" in options else {}
    outs = []
    # The oldest processor does not normalise queries and keys, the one on SDPA does not know `scale_qk`.
    for processor in (
        attention_processor.AttnProcessor2_0() if "qk_norm" in options else attention_processor.AttnProcessor(),
        integration.AttnProcessor(),
    ):
        block.set_processor(processor)
        outs.append(block(states, **inputs))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 7), (5, 7), (1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_masks(shape: tuple[int, ...], boolean: bool) -> None:
    """As the native backend reads them."""
    q, k, v = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 3, 8), torch.randn(2, 7, 3, 8)
    mask = torch.rand(shape) < 0.7 if boolean else torch.randn(shape)
    if boolean:
        mask[..., 0] = True
    with attention_dispatch.attention_backend("native"):
        expected = attention_dispatch.dispatch_attention_fn(q, k, v, mask, scale=0.4)
    with attention_dispatch.attention_backend("nvrtc_attn"):
        out = attention_dispatch.dispatch_attention_fn(q, k, v, mask, scale=0.4)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_causal_grouped_heads_and_lse() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    expected = attention_dispatch.dispatch_attention_fn(q, k, v, is_causal=True, enable_gqa=True, backend="native")
    out = attention_dispatch.dispatch_attention_fn(q, k, v, is_causal=True, enable_gqa=True, backend="nvrtc_attn")
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    out, lse = integration.backend(q, k, v, return_lse=True)
    scores = torch.einsum("bmhd,bnhd->bmhn", q, k.repeat_interleave(2, 2)) * 8**-0.5
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=2e-6, rtol=1e-5)


def test_the_name_is_a_member_like_the_others() -> None:
    integration.register()
    names = attention_dispatch.AttentionBackendName
    assert names("nvrtc_attn") is names.NVRTC_ATTN is names["NVRTC_ATTN"]
    assert list(names).count(names.NVRTC_ATTN) == 1
    assert names.NVRTC_ATTN == "nvrtc_attn"
    assert names.NVRTC_ATTN.value == "nvrtc_attn"


def test_refusals() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match="_parallel_config"):
        integration.backend(q, q, q, _parallel_config=object())
    for mask in (torch.tensor([[1, 1, 1, 0]]), torch.ones(1, 1, 4, 4, dtype=torch.uint8)):
        for backend in ("native", "nvrtc_attn"):  # the native one refuses them, too
            with pytest.raises((UnsupportedError, RuntimeError), match="dtype"):
                attention_dispatch.dispatch_attention_fn(q, q, q, mask, backend=backend)
        with pytest.raises(UnsupportedError, match=rf"attn_mask: dtype {mask.dtype}\..*attn_mask\.bool\(\)"):
            integration.backend(q, q, q, mask)
    block = attention_processor.Attention(
        query_dim=16, heads=2, dim_head=8, added_kv_proj_dim=16, processor=integration.AttnProcessor()
    )
    with pytest.raises(UnsupportedError, match="add_k_proj"):
        block(torch.randn(1, 4, 16))
