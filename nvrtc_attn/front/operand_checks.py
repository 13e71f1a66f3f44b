"""The rules about the tensors of a call: how they fit the table of operands, one another, and the lengths they hold.

Rules about axes need tensors of the right rank; the others are all tried, whatever was found before.
"""

from __future__ import annotations

from typing import Final

from ..base.dtypes import ATTENTION_DTYPES
from ..base.errors import shown
from .operands import OPERANDS, OPTIONAL_INPUTS, dtypes_of, shape_of
from .tensorview import Device, TensorView, as_numpy
from .validation import MAX_SIZE, Violations, check_integer, check_lengths

MAX_HEAD_DIM: Final = 512
"""Largest head dim of the GPU kernels: their widest tile. The CPU path has no limit."""


def check_dtypes(found: Violations, tensors: dict[str, TensorView]) -> None:
    """q, k, v alike and computable; the others as the kernels read them."""
    q, k, v = (tensors[name].dtype for name in "qkv")
    if q not in ATTENTION_DTYPES:
        found.unsupported(f"q: dtype {q}. Accepted: {', '.join(ATTENTION_DTYPES)}. Convert q, k and v first.")
    if not q == k == v:
        common = next((x for x in (q, k, v) if x in ATTENTION_DTYPES), None)
        advice = "" if common is None else f" Convert all to {common}." if common != q else f" Convert k and v to {q}."
        found.value(f"q, k, v: dtypes {q}, {k}, {v} differ. They must be the same.{advice}")
    for name in OPTIONAL_INPUTS:
        dtypes = dtypes_of(name, {"q": q})
        if name in tensors and tensors[name].dtype not in dtypes:
            given = tensors[name]
            advice = f"Convert it to {dtypes[0]}."
            # Converting would change the meaning: True is 1, and a score of 0 is False.
            if name == "mask" and given.dtype in ATTENTION_DTYPES:
                advice = "What is added to the scores is passed as bias=. Of ones and zeros: convert it to bool."
            elif name == "bias" and given.dtype == "bool":
                advice = "What says which keys to keep is passed as mask=."
            found.value(
                f"{name}: dtype {given.dtype} of shape {given.shape}. Accepted: {' or '.join(dtypes)}. {advice}"
            )


def check_devices(found: Violations, tensors: dict[str, TensorView]) -> None:
    """One device for everything."""
    devices: dict[Device, list[str]] = {}
    for name, tensor in tensors.items():
        devices.setdefault(tensor.device, []).append(name)
    if len(devices) > 1:
        places = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
        found.value(
            f"{', '.join(tensors)}: on {len(devices)} devices ({places}). All tensors of a call are on one device. "
            f"Move them to {tensors['q'].device}."
        )


def check_ranks(found: Violations, tensors: dict[str, TensorView]) -> bool:
    """Whether q, k and v can be indexed by axis; reports every tensor of the wrong rank or of an impossible size."""
    fit = True
    for name, tensor in tensors.items():
        row = OPERANDS[name]
        expected = f"[{', '.join(f'{axis} or 1' if row.broadcast else axis for axis in row.axes)}]"
        rank = len(row.axes)
        if len(tensor.shape) != rank:
            advice = "Reshape it (batch 1 for packed sequences)." if name in ("q", "k", "v") else "Reshape it."
            if row.broadcast:
                advice = (
                    "Add dims of size 1: [seqlen_q, seqlen_k] is x[None, None], [batch, seqlen_k] x[:, None, None]."
                )
            found.value(
                f"{name}: shape {tensor.shape} has rank {len(tensor.shape)}. Expected rank {rank}, {expected}. {advice}"
            )
            fit = fit and name not in ("q", "k", "v")
        elif max(tensor.shape) > MAX_SIZE:
            found.unsupported(f"{name}: shape {tensor.shape} has a dim above {MAX_SIZE}, the kernels' 32-bit sizes.")
    return fit


def check_shapes(found: Violations, q: TensorView, k: TensorView, v: TensorView, varlen: bool) -> None:
    """How the axes of q, k and v fit together."""
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        found.value(
            f"q, k, v: batch sizes {q.shape[0]}, {k.shape[0]}, {v.shape[0]} differ (dim 0). They must be equal. "
            f"Expand k and v, a stride of 0 is accepted."
        )
    elif varlen and q.shape[0] != 1:
        found.value(
            f"q, k, v: batch size {q.shape[0]} with cu_seqlens. Packed sequences have batch 1 and all tokens on dim 1. "
            f"Reshape q, k and v to [1, tokens, heads, head_dim]."
        )
    if k.shape[1] != v.shape[1]:
        found.value(f"k, v: lengths {k.shape[1]} and {v.shape[1]} differ (dim 1). Every key has one value.")
    num_heads, num_heads_kv = q.shape[2], k.shape[2]
    if num_heads_kv != v.shape[2]:
        found.value(f"k, v: head counts {num_heads_kv} and {v.shape[2]} differ (dim 2). They must be equal.")
    if num_heads % num_heads_kv if num_heads_kv else num_heads:
        nearest = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= max(num_heads_kv, 1)][-1]
        found.value(
            f"k, v: {num_heads_kv} heads do not divide the {num_heads} heads of q (dim 2). Each key head serves "
            f"num_heads / num_heads_kv query heads. The nearest smaller count that does is {nearest}."
            f"{_other_layout(q, k, v)}"
        )
    if q.shape[3] != k.shape[3]:
        found.value(
            f"q, k: head dims {q.shape[3]} and {k.shape[3]} differ (dim 3). Scores are their dot products. "
            f"Only v may have another head dim."
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        head_dim = tensor.shape[3]
        if head_dim == 0:
            found.value(f"{name}: head dim 0 (dim 3 of shape {tensor.shape}). It is at least 1.")
        elif head_dim > MAX_HEAD_DIM and tensor.device.type == "cuda":
            found.unsupported(
                f"{name}: head dim {head_dim} (dim 3). The GPU kernels go up to {MAX_HEAD_DIM}, their widest tile. "
                f"Split the heads, or compute on the CPU."
            )


def _other_layout(q: TensorView, k: TensorView, v: TensorView) -> str:
    """What to do, where the shapes fit together with heads and rows exchanged: the layout of torch's function."""
    heads, heads_kv = q.shape[1], k.shape[1]
    if k.shape[:3] != v.shape[:3] or not 0 < heads_kv <= heads or heads % heads_kv:
        return ""
    if heads_kv >= k.shape[2]:  # keys of one length always divide as heads; there are more keys than heads, mostly
        return ""
    return (
        " These fit together as [batch, heads, seqlen, head_dim]: exchange dims 1 and 2, x.transpose(1, 2) in torch, "
        "x.swapaxes(1, 2) elsewhere, or call nvrtc_attn.torch.scaled_dot_product_attention, which has that layout."
    )


def check_optional(found: Violations, tensors: dict[str, TensorView], varlen: bool) -> None:
    """Shapes of the optional operands against those of q, k and v; lengths of packed sequences are `check_varlen`'s."""
    required = {name: tensors[name].shape for name in "qkv"}
    for name, tensor in tensors.items():
        row = OPERANDS[name]
        if name in required or row.is_lengths:
            continue
        if row.broadcast and varlen:
            found.unsupported(
                f"{name}: shape {tensor.shape} with cu_seqlens. No kernel reads a {name} for packed sequences. "
                f"Pad to a dense batch, or use causal= and window_size=."
            )
        elif len(tensor.shape) == len(row.axes):
            full = shape_of(name, required)
            if row.broadcast:
                if any(size not in (1, limit) for size, limit in zip(tensor.shape, full, strict=True)):
                    found.value(
                        f"{name}: shape {tensor.shape} does not broadcast to [{', '.join(row.axes)}] = {list(full)}. "
                        f"Each dim is full or 1. Slice or unsqueeze it, no need to expand it."
                        f"{_exchanged(tensor, required)}"
                    )
            elif tensor.shape != full:
                found.value(f"{name}: shape {tensor.shape}. Needed is [{', '.join(row.axes)}] = {list(full)}.")
            elif row.dense:
                _check_dense_vector(found, name, tensor)


def _exchanged(tensor: TensorView, required: dict[str, tuple[int, ...]]) -> str:
    """What to do, where a mask or bias fits to q and k with heads and rows exchanged."""
    (batch, heads, rows, _), keys = required["q"], required["k"][2]
    if any(size not in (1, limit) for size, limit in zip(tensor.shape, (batch, heads, rows, keys), strict=True)):
        return ""
    return (
        f" It fits if q, k and v are [batch, heads, seqlen, head_dim]. Here they are read as [batch, seqlen, heads, "
        f"head_dim], so their heads are {rows}: exchange their dims 1 and 2."
    )


def check_varlen(
    found: Violations,
    tensors: dict[str, TensorView],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    varlen: bool,
    ranks_fit: bool,
) -> tuple[int, int, int]:
    """Number of sequences and the longest query and key sequence of a packed problem."""
    given: dict[str, object] = {"q": max_seqlen_q, "k": max_seqlen_k}
    longest = {side: check_integer(found, f"max_seqlen_{side}", value) for side, value in given.items()}
    if not varlen:
        _check_padded(found, tensors, longest, ranks_fit)
        return 0, 0, 0

    totals = {side: tensors[side].shape[1] if ranks_fit else None for side in "qk"}
    counts = _check_starts(found, tensors, given, longest)
    if len(set(counts.values())) > 1:
        q_len, k_len = (tensors[name].shape[0] for name in counts)
        found.value(
            f"cu_seqlens_q, cu_seqlens_k: lengths {q_len} and {k_len} differ. Both have one element more than there "
            f"are sequences."
        )
    batch = next(iter(counts.values()), 0)
    seqused_k = tensors.get("seqused_k")
    if seqused_k is not None and len(seqused_k.shape) == 1 and counts:
        if seqused_k.shape[0] != batch:
            found.value(f"seqused_k: shape {seqused_k.shape}. There are {batch} sequences, one element for each.")
        else:
            _check_dense_vector(found, "seqused_k", seqused_k)
    # Host values only: reading device memory would wait for the GPU.
    host = {
        name: as_numpy(x)
        for name, x in tensors.items()
        if OPERANDS[name].is_lengths and (x.device.type, x.dtype, len(x.shape)) == ("cpu", "int32", 1)
    }
    for fault in check_lengths(
        host.get("cu_seqlens_q"),
        host.get("cu_seqlens_k"),
        host.get("seqused_k"),
        total_q=totals["q"],
        total_k=totals["k"],
        max_seqlen_q=longest["q"],
        max_seqlen_k=longest["k"],
    ):
        found.value(fault)
    return batch, longest["q"] or 0, longest["k"] or 0


def _check_padded(
    found: Violations, tensors: dict[str, TensorView], longest: dict[str, int | None], ranks_fit: bool
) -> None:
    """The lengths of a call whose sequences are not packed: ``seqused_k`` alone."""
    for side, length in longest.items():
        if length is not None:
            found.value(
                f"max_seqlen_{side}: got {shown(length)} without cu_seqlens. Dense lengths come from the shapes. "
                f"Remove it."
            )
    if "seqused_k" in tensors and ranks_fit:
        used, (batch, columns) = tensors["seqused_k"], tensors["k"].shape[:2]
        if len(used.shape) != 1:
            return  # said by `check_ranks`
        if used.shape[0] != batch:
            found.value(f"seqused_k: shape {used.shape}. The batch is {batch}, one element for each entry.")
        else:
            _check_dense_vector(found, "seqused_k", used)
            values = as_numpy(used) if (used.device.type, used.dtype) == ("cpu", "int32") else None
            for fault in check_lengths(
                None, None, values, total_q=None, total_k=columns, max_seqlen_q=None, max_seqlen_k=None
            ):
                found.value(fault)


def _check_starts(
    found: Violations, tensors: dict[str, TensorView], given: dict[str, object], longest: dict[str, int | None]
) -> dict[str, int]:
    """Check ``cu_seqlens`` and the longest sequences; the number of sequences by the name of the array that says it."""
    counts: dict[str, int] = {}
    for side in "qk":
        name = f"cu_seqlens_{side}"
        if name not in tensors:
            found.value(f"{name}: got None with cu_seqlens_{'k' if side == 'q' else 'q'}. Both are needed, or none.")
            continue
        cu_seqlens = tensors[name]
        length = longest[side]
        if length is None:
            if given[side] is None:  # otherwise its kind was refused above
                found.value(
                    f"max_seqlen_{side}: got None with {name}. It sizes the launch, and reading it from the device "
                    f"would wait for the GPU. Pass the longest sequence, or a bound of it."
                )
        elif not 0 <= length < 2**31:
            # A loose bound (the model's longest sequence) is what callers have: no limit but the kernels' int32.
            found.value(
                f"max_seqlen_{side}: got {shown(length)}. It is the longest sequence, or a bound of it, and less than "
                f"2**31."
            )
        if len(cu_seqlens.shape) == 1:
            counts[name] = cu_seqlens.shape[0] - 1
            if counts[name] < 0:
                found.value(f"{name}: shape (0,). It has one element more than there are sequences, at least one.")
            _check_dense_vector(found, name, cu_seqlens)
    return counts


def _check_dense_vector(found: Violations, name: str, tensor: TensorView) -> None:
    if tensor.shape[0] > 1 and tensor.strides[0] != 1:
        found.value(
            f"{name}: stride {tensor.strides[0]} of shape {tensor.shape}. The kernels read it as a dense vector. "
            f"Copy it, for example with .contiguous()."
        )
