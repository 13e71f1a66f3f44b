"""transformers' models on the GPU, values and gradients of every weight, beside transformers' own eager attention.

The models and their inputs are those of tests/unit/test_transformers.py, large enough for several tiles. What eager
attention gives in float32 is the truth; what it gives in the type itself is how far rounding may go.
"""

from __future__ import annotations

from typing import Any

import pytest
from differences import note, number
from own_attention import CANCELLING, check_beside_float32, in_dtype
from transformers_models import (
    LARGE,
    MODELS,
    check_generate,
    continued,
    inputs,
    results,
    tokens,
    torch,
    trainer_losses,
)

from nvrtc_attn.integrations import transformers as integration

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
    check_generate(name, cache, 70, LARGE, "cuda")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_continuing_from_a_cache(name: str) -> None:
    """Several new queries behind cached keys see what the whole sequence at once sees."""
    model = MODELS[name](LARGE).eval().cuda()
    ids, keep = (x.cuda() for x in tokens(LARGE.tokens))
    expected, out = (continued(model, implementation, ids, keep, 100) for implementation in ("eager", "nvrtc_attn"))
    torch.testing.assert_close(out, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


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
