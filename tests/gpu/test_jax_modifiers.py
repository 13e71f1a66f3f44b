"""score_mod and mask_mod of JAX on the GPU, inside jit and grad, against JAX's own operations on whole matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402 - after the skip

from nvrtc_attn.jax import attention  # noqa: E402

pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed: no launch from inside jit")


def _gpu_of_jax() -> str:
    try:
        return "" if jax.devices("gpu") else "JAX sees no GPU"
    except RuntimeError as error:
        return f"JAX sees no GPU: {str(error).splitlines()[0]}"


pytestmark = pytest.mark.skipif(bool(_gpu_of_jax()), reason=_gpu_of_jax() or "has a GPU")
B, N, H, K = 2, 500, 4, 64


def dense(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
    s = jnp.einsum("bmhd,bnhd->bhmn", q, k, preferred_element_type=jnp.float32) / np.sqrt(K)
    at = jnp.meshgrid(*(jnp.arange(n) for n in s.shape), indexing="ij")
    s = jnp.where(mask_mod(*at), score_mod(s, *at), -jnp.inf)
    return jnp.einsum("bhmn,bnhd->bmhd", jax.nn.softmax(s, -1), v.astype(jnp.float32))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("functions", ["operators", "jax.numpy"])
def test_values_and_gradients(functions: str, deterministic: bool) -> None:
    """Documents, a learned table and slopes: captured tracers, with tiles of nothing."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (B, N, H, K), jnp.float16) for key in keys[:3])
    table = jax.random.normal(keys[3], (H, 2 * N))
    slopes = jnp.array([0.5, 0.25, 0.1, 0.05])
    ids = jnp.arange(N) // 90

    def loss(run: Any, q: Any, k: Any, v: Any, table: Any, slopes: Any) -> Any:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            x = s + table[h, i - j + N] + slopes[h] * (j - i)
            return 8.0 * jnp.tanh(x / 8.0) if functions == "jax.numpy" else x * 0.5

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (ids[i] == ids[j]) & (i >= j)

        return (run(q, k, v, score_mod, mask_mod).astype(jnp.float32) ** 2).sum()

    def ours(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, deterministic=deterministic)

    grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4, 5)), static_argnums=0)
    value, found = grad(ours, q, k, v, table, slopes)
    with jax.default_matmul_precision("highest"):
        exact, theirs = grad(dense, q, k, v, table, slopes)
    np.testing.assert_allclose(value, exact, rtol=5e-3)
    for name, a, b in zip(("dq", "dk", "dv", "dtable", "dslopes"), found, theirs, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 1e-2 * max(np.abs(b).max(), 1.0), name
