"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators: without a formula it counts 0.

As torch counts its own attention: two operations a multiply and add of every query with every key, whatever masks
hide; 2 products forward and 5 backward. Of packed sequences each with its own keys.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

from ..front.operands import INPUTS
from .modified import modified_backward, modified_forward
from .ops import attention_backward, attention_forward
from .packed_ops import attention_packed_backward, attention_packed_forward, views

_CU_SEQLENS: Final = INPUTS.index("cu_seqlens_q"), INPUTS.index("cu_seqlens_k")
_BEFORE_Q: Final = 4  # of the backward operators: dout, dlse, out, lse


def _pairs(arguments: tuple[Any, ...]) -> Any:
    """How many pairs of a query and a key there are, of one head."""
    q, k = arguments[:2]
    starts_q, starts_k = (arguments[place] for place in _CU_SEQLENS)
    if starts_q is None or starts_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if starts_q.__class__ is not torch.Tensor or starts_q.is_meta:  # no values: at most all queries with all keys
        return q.shape[1] * k.shape[1]
    return int((starts_q.diff().long() * starts_k.diff().long()).sum())


def _forward(*arguments: Any, out_val: Any = None) -> Any:
    """Scores, and their products with v."""
    q, _, v = arguments[:3]
    return 2 * _pairs(arguments) * q.shape[2] * (q.shape[3] + v.shape[3])


def _backward(*arguments: Any, out_val: Any = None) -> Any:
    """Scores again, dq and dk of q's head dim; dv, and the gradient of the probabilities, of v's."""
    arguments = arguments[_BEFORE_Q:]
    q, _, v = arguments[:3]
    return 2 * _pairs(arguments) * q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


def _packed_forward(q: Any, packed: Any, *rest: Any, out_val: Any = None) -> Any:
    return _forward(*views(q, packed), *rest)


def _packed_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, packed: Any, *rest: Any, out_val: Any = None
) -> Any:
    return _backward(dout, dlse, out, lse, *views(q, packed), *rest)


register_flop_formula([x.overloadpacket for x in (attention_forward, modified_forward)], get_raw=True)(_forward)
register_flop_formula([x.overloadpacket for x in (attention_backward, modified_backward)], get_raw=True)(_backward)
register_flop_formula(attention_packed_forward.overloadpacket, get_raw=True)(_packed_forward)
register_flop_formula(attention_packed_backward.overloadpacket, get_raw=True)(_packed_backward)
