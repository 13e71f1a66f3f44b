"""Adapters to model libraries, one module each. None is imported unless asked for, and none imports another.

`flash_attn`, `xformers` and `evoformer` offer the functions of these packages under their own signatures;
`transformers` and `diffusers` have a ``register()`` that makes ``"nvrtc_attn"`` a name the library knows.
"""
