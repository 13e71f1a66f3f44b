"""A sequence that several devices share, in jax.shard_map, with dropout: beside the same call of whole sequences.

    python examples/jax_parallel.py                           # all GPUs of this host
    JAX_PLATFORMS=cpu python examples/jax_parallel.py         # the CPU as four devices

The mesh shares the batch over "data" and the tokens over "tokens". Out, its gradients and the dropout mask are those of
one device: the largest difference is printed, which is that of sums in another order.
"""

from __future__ import annotations

import os
import sys
from typing import Any

flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:  # read when JAX starts; GPUs are as many as there are
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4".strip()
try:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from nvrtc_attn.jax import attention, context_parallel_attention
    from nvrtc_attn.jax.parallel import zigzag
except ImportError as error:
    print(f'skipped: JAX is not installed ({error}). pip install "nvrtc-attn[jax]"')
    sys.exit(0)

BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 4, 2, 32
TOKENS_OF_A_DEVICE = 64
OPTIONS: dict[str, Any] = {"causal": True, "dropout_p": 0.2, "rng": (1, 2)}


def compare(strategy: str) -> float:
    """The largest difference of out, dq, dk and dv from the whole's, of their largest value."""
    count = len(jax.devices())
    data = 2 if count % 4 == 0 else 1
    mesh = Mesh(np.array(jax.devices()).reshape(data, -1), ("data", "tokens"))
    devices = mesh.shape["tokens"]
    tokens = TOKENS_OF_A_DEVICE * devices
    random = np.random.default_rng(0)
    heads_of = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV, "dout": HEADS}
    q, k, v, dout = (random.standard_normal((BATCH, tokens, n, HEAD_DIM), np.float32) for n in heads_of.values())

    def local(q: Any, k: Any, v: Any) -> Any:
        """Of this device's batch entries and tokens; called by each in one program."""
        return context_parallel_attention(
            q, k, v, axis_name="tokens", batch_axis="data", heads_axis=(), strategy=strategy, **OPTIONS
        )

    spec = PartitionSpec("data", "tokens")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def results(function: Any, *arrays: Any) -> Any:
        """Out, and the gradients of its sum with dout."""
        out, gradients = jax.vjp(function, *arrays[:3])
        return (out, *gradients(arrays[3]))

    # In the order of the zigzag a device has an early and a late piece of the tokens: equal work under a causal mask.
    place = NamedSharding(mesh, spec)
    mine = [jax.device_put(zigzag(x, devices), place) for x in (q, k, v, dout)]
    found = jax.jit(lambda *x: results(sharded, *x))(*mine)
    expected = jax.jit(lambda *x: results(lambda *y: attention(*y, **OPTIONS), *x))(q, k, v, dout)
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        whole, of_one = np.asarray(zigzag(a, devices, back=True)), np.asarray(b)
        worst = max(worst, float(np.abs(whole - of_one).max() / np.abs(of_one).max()))
    print(f"{strategy} over {devices} devices, batch over {data}: largest difference {worst:.1e} of the largest value")
    return worst


if __name__ == "__main__":
    print(f"{len(jax.devices())} devices: {jax.devices()[0].device_kind}")
    assert max(map(compare, ("all_gather", "ring", "auto"))) < 1e-4
