"""What most kernels must be: compiled without a warning, a spill or a stack."""

from __future__ import annotations

import re

from nvrtc_attn.jit.compile import CompiledKernel, compile_kernel
from nvrtc_attn.jit.config import KernelConfig


def check_clean(config: KernelConfig) -> CompiledKernel:
    """C75xx is what ptxas says of products that it serialises."""
    kernel = compile_kernel(config)
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    return kernel
