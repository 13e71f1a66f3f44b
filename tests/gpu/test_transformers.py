"""transformers' models on the GPU, values and gradients of every weight, beside transformers' own eager attention.

The models and their inputs are those of tests/unit/test_transformers.py, large enough for several tiles. What eager
attention gives in float32 is the truth; what it gives in the type itself is how far rounding may go.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from differences import note, number

torch = pytest.importorskip("torch", reason="torch is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("transformers.masking_utils", reason="this transformers has no mask interface")
    from transformers.generation.logits_process import LogitsProcessorList  # noqa: F401  loads generation now
    from transformers_models import LARGE, MODELS, inputs, results, sound, tokens, trainer_losses

    from nvrtc_attn.integrations import transformers as integration

from own_attention import CANCELLING, check_beside_float32, in_dtype  # noqa: E402 - after the skips

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # float32 is to be float32 in convolutions, too
    torch.manual_seed(0)
    integration.register()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str, dtype: Any) -> None:
    """Softcap, windows, sinks, relative biases, cross attention, images; padding on the left where there is text."""
    model = MODELS[name](LARGE)
    given, keep = inputs(name, LARGE)
    found = {}
    for implementation, of in (("eager", "exact"), ("eager", "same"), ("nvrtc_attn", "ours")):
        made, moved = in_dtype(model, given, torch.float32 if of == "exact" else dtype)
        found[of] = results(made, implementation, None if keep is None else keep.cuda(), moved)
    floor = CANCELLING if name == "whisper" and dtype == torch.bfloat16 else None
    largest = check_beside_float32(found["ours"], found["same"], found["exact"], dtype, floor)
    number("transformers", largest, str(dtype).removeprefix("torch."))
    for what in ("sinks", "relative_attention_bias"):
        gradients = [x for key, x in found["ours"].items() if what in key]
        assert len(gradients) == 2 * ((what, name) in (("sinks", "gpt_oss"), ("relative_attention_bias", "t5")))
        assert all(float(x.abs().max()) > 0 for x in gradients)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5", "whisper"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str) -> None:
    """In float32 the tokens of eager attention, greedily and by beams, across the window of sliding layers."""
    if name == "whisper" and cache == "static":
        pytest.skip("Whisper's generate makes its own caches")
    model = MODELS[name](LARGE).eval().cuda()
    ids, keep = (x.cuda() for x in tokens(70))
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": keep}
    if name == "whisper":
        given = {"input_features": sound(LARGE).cuda(), "language": None}
    for beams in (1, 2):
        outputs = []
        for implementation in ("eager", "nvrtc_attn"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                outputs.append(
                    model.generate(
                        **given, max_new_tokens=8, min_new_tokens=8, do_sample=False, num_beams=beams,
                        cache_implementation=None if cache == "dynamic" else cache, disable_compile=True,
                    )
                )  # fmt: skip
        torch.testing.assert_close(outputs[1], outputs[0], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_continuing_from_a_cache(name: str) -> None:
    """Several new queries behind cached keys see what the whole sequence at once sees."""
    model = MODELS[name](LARGE).eval().cuda()
    ids, keep = (x.cuda() for x in tokens(LARGE.tokens))
    outs = []
    for implementation in ("eager", "nvrtc_attn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(input_ids=ids[:, :100], attention_mask=keep[:, :100], use_cache=True)
            more = model(input_ids=ids[:, 100:], attention_mask=keep, past_key_values=first.past_key_values)
        outs.append(more.logits)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5 * float(outs[0].abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trainer(dtype: Any, tmp_path: Any) -> None:
    """Eight steps of Hugging Face's Trainer, with padding, in float32 and under its autocast."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    eager, ours = (
        trainer_losses(name, tmp_path, LARGE, 8, bf16=dtype == torch.bfloat16) for name in ("eager", "nvrtc_attn")
    )
    note("transformers, Trainer", ours, eager, relative=True)
    assert len(eager) == 8
    assert eager[-1] < eager[0]
    # Losses fall from 5 to 0.1. Under autocast gradients that differ by rounding lead apart, by 0.031 on an H100.
    assert ours == pytest.approx(eager, abs=1e-3 if dtype == torch.float32 else 0.1, rel=1e-3)
    assert ours[:2] == pytest.approx(eager[:2], rel=1e-3 if dtype == torch.float32 else 1e-2)
