"""A training loop of flax on the GPU, with this library's attention and with flax's own."""

from __future__ import annotations

import pytest
from differences import number

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed: no launch from inside jit")
pytest.importorskip("flax", reason="flax is not installed")

import flax_training  # noqa: E402 - after the skips
from flax import linen  # noqa: E402

from nvrtc_attn.integrations.flax import attention_fn  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_loop_has_the_losses_of_flaxs_own_attention(dtype: str) -> None:
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {str(error).splitlines()[0]}")
    with jax.default_device(gpu):
        functions = linen.dot_product_attention, attention_fn
        own, ours = (flax_training.losses(function, 200, 256, 20, dtype) for function in functions)
    number("Flax", max(abs(a - b) / b for a, b in zip(ours, own, strict=True)), dtype)
    assert own[-1] < 0.8 * own[0]
    assert ours == pytest.approx(own, rel=2e-4 if dtype == "float32" else 2e-2)
