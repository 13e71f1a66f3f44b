"""The one generator of attention problems for tests, precompilation and benchmarks, and the math they are held to.

A `Case` says everything about a problem except its numbers; `make_arrays` draws those. Nothing here imports a
framework: callers cast the float32 arrays and place them where they want (`placement` describes awkward strides).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nvrtc_attn.front import philox

Array = npt.NDArray[Any]

LAYOUTS = ("contiguous", "bhmk", "packed", "padded_rows", "last_strided", "unaligned", "expanded", "random")
"""``bhmk``: heads outside tokens. ``packed``: q, k, v of one ``[B, M, 3, H, K]`` buffer. ``padded_rows``: rows are 2
elements longer than the head dim. ``last_strided``: every second element. ``unaligned``: the base address lies one
element past a 16-byte boundary. ``expanded``: k and v have batch stride 0. ``random``: permuted dims, random padding
and offset."""


MASK_KINDS = ("random", "padding", "left_padding", "blocks", "bands", "full", "empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention problem. Build it with `make_case`, which fills the dependent fields."""

    name: str
    dtype: str
    batch: int
    """Number of sequences; the leading dim of the tensors is 1 when ``seqlens`` is given."""
    seqlen_q: int
    """Mq, or max_seqlen_q."""
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool | str = False
    window_size: tuple[int | None, int | None] = (None, None)
    bias: str | None = None
    """Shape: one letter per full dim of "bhqk", "1" where it broadcasts, for example "1h1k"."""
    bias_dtype: str = "same"
    """"same" (as q) or "float32"."""
    mask: str | None = None
    """Shape as for ``bias``. Every fifth row along q (or all of them, if q broadcasts and ``mask_empty``) drops
    everything when ``mask_empty``."""
    mask_empty: bool = False
    mask_kind: str = "random"
    """One of `MASK_KINDS`."""
    mask_dtype: str = "bool"
    """"bool", or "uint8" with any non-zero byte for True."""
    sink: str | None = None
    """Element type, "same" (as q) or "float32"."""
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 1234
    offset: int = 0
    seqlens: tuple[tuple[int, int], ...] = ()
    """Varlen: (query, key) length of each sequence; the second is the length of the slot."""
    tail: tuple[int, int] = (0, 0)
    """Varlen: (query, key) tokens behind the last sequence."""
    lead: tuple[int, int] = (0, 0)
    """Varlen: (query, key) tokens ahead of the first sequence."""
    seqused_k: tuple[int, ...] = ()
    softmax_scale: float | None = None
    layout: str = "contiguous"
    dlse: bool = False
    """A gradient also arrives through lse."""
    deterministic: bool = False

    @property
    def varlen(self) -> bool:
        return bool(self.seqlens)

    @property
    def bias_grad(self) -> bool:
        return self.bias is not None

    @property
    def flops(self) -> int:
        """Multiply-adds of the forward products, times two, masks not subtracted. The backward is 2.5 times that."""
        pairs = sum(m * n for m, n in self.seqlens) if self.varlen else self.batch * self.seqlen_q * self.seqlen_k
        return 2 * self.num_heads * pairs * (self.head_dim + self.head_dim_v)


def make_case(name: str, **fields: Any) -> Case:
    """A `Case` whose unnamed fields are small, square and float16; heads, value width and lengths follow each other."""
    fields.setdefault("dtype", "float16")
    if seqlens := fields.get("seqlens"):
        fields["batch"] = len(seqlens)
        fields["seqlen_q"] = max(m for m, _ in seqlens)
        fields["seqlen_k"] = max(n for _, n in seqlens)
    for field, default in (("batch", 2), ("seqlen_q", 113), ("seqlen_k", 203), ("num_heads", 2), ("head_dim", 64)):
        fields.setdefault(field, default)
    fields.setdefault("num_heads_kv", fields["num_heads"])
    fields.setdefault("head_dim_v", fields["head_dim"])
    return Case(name=name, **fields)


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of every float operand and result; "bias", "mask", "sink" and their gradients if the case has them."""
    batch, seqlen_q, seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
    if case.varlen:
        batch = 1
        seqlen_q = case.lead[0] + sum(m for m, _ in case.seqlens) + case.tail[0]
        seqlen_k = case.lead[1] + sum(n for _, n in case.seqlens) + case.tail[1]
    q = (batch, seqlen_q, case.num_heads, case.head_dim)
    k = (batch, seqlen_k, case.num_heads_kv, case.head_dim)
    v = (batch, seqlen_k, case.num_heads_kv, case.head_dim_v)
    out, lse = (batch, seqlen_q, case.num_heads, case.head_dim_v), (batch, case.num_heads, seqlen_q)
    found = {"q": q, "k": k, "v": v, "out": out, "dout": out, "lse": lse, "dlse": lse, "dq": q, "dk": k, "dv": v}
    full = dict(zip("bhqk", (batch, case.num_heads, seqlen_q, seqlen_k), strict=True))
    for name, spec in (("bias", case.bias), ("dbias", case.bias), ("mask", case.mask)):
        if spec is not None:
            found[name] = tuple(1 if letter == "1" else full[letter] for letter in spec)
    if case.sink is not None:
        found |= dict.fromkeys(("sink", "dsink"), (case.num_heads,))
    return found


def make_arrays(case: Case, rng: np.random.Generator | None = None) -> dict[str, Array]:
    """Random inputs: float32 normal q, k, v, dout and, where the case has them, dlse, bias, bool mask, int32 lengths.

    A sink takes about as much of a row as its keys. Without ``rng`` the numbers depend on the case's name only.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode())) if rng is None else rng
    shape = shapes(case)
    names = ["q", "k", "v", "dout"] + ["dlse"] * case.dlse + ["bias"] * (case.bias is not None)
    arrays: dict[str, Array] = {name: rng.standard_normal(shape[name], np.float32) for name in names}
    if case.sink is not None:
        arrays["sink"] = sink_values(case, rng.standard_normal(shape["sink"], np.float32))
    if case.layout == "expanded":
        for name in ("k", "v"):
            arrays[name] = np.ascontiguousarray(np.broadcast_to(arrays[name][:1], shape[name]))
    if case.mask is not None:
        mask = make_mask(case.mask_kind, rng.random(shape["mask"], np.float32))
        if case.mask_empty:
            mask[:, :, ::5] = False
        mask = np.ascontiguousarray(mask)
        arrays["mask"] = mask if case.mask_dtype == "bool" else mask * rng.integers(1, 256, mask.shape, np.uint8)
    if case.varlen:
        for name, part in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            arrays[name] = np.cumsum([case.lead[part], *(pair[part] for pair in case.seqlens)]).astype(np.int32)
    if case.seqused_k:
        arrays["seqused_k"] = np.array(case.seqused_k, np.int32)
    return arrays


def sink_values(case: Case, normal: Array) -> Array:
    """Sinks from normal numbers, arrays of NumPy or tensors of torch alike: a large share of every row, or no sink."""
    values = normal * 1.5 + float(np.log1p(case.seqlen_k))
    values[normal < -1.5] = -np.inf
    return values


def make_mask(kind: str, u: Array) -> Array:
    """A bool mask of ``u``'s shape from uniform numbers ``u`` in [0, 1), array of NumPy or tensor of torch alike."""
    m, n = u.shape[2:]
    if kind == "random":
        return u < 0.75
    if kind in ("padding", "left_padding"):  # as many keys as the first number of the row's batch entry and head says
        flags = (u * 0 + 1).cumsum(3) - 1 < u[:, :, :1, :1] * (n + 1)
        return flags if kind == "padding" else flags[..., ::-1] if isinstance(flags, np.ndarray) else flags.flip(3)
    if kind == "blocks":  # blocks of 32 rows and 64 keys, half of them hidden
        part = u[:, :, ::32, ::64] < 0.5
        repeat = np.repeat if isinstance(u, np.ndarray) else type(u).repeat_interleave
        return repeat(repeat(part, 32, 2), 64, 3)[:, :, :m, :n]
    if kind == "bands":  # rows of one length and distance each, as sparse attention has them
        return ((u * 0 + 1).cumsum(3) + 3 * (u * 0 + 1).cumsum(2)) % 7 < 4
    if kind == "full":
        return u >= 0
    if kind == "empty":
        return u < 0
    raise ValueError(f"mask_kind: got {kind!r}; accepted are {MASK_KINDS}")


def call_options(case: Case) -> dict[str, Any]:
    """The scalar keyword arguments of ``nvrtc_attn.attention`` for this case, apart from ``rng``."""
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_size": case.window_size,
        "softmax_scale": case.softmax_scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
    }
    if case.varlen:
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return options


def reference_options(case: Case, arrays: dict[str, Array]) -> dict[str, Any]:
    """All keyword arguments of ``nvrtc_attn.cpu.reference.attention_forward`` for this case."""
    names = ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sink")
    operands = {name: arrays[name] for name in names if name in arrays}
    return {**call_options(case), **operands, "seed": case.seed, "offset": case.offset}


# ---------------------------------------------------------------------------------------------------------------------
# Strides


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies in a flat buffer: ``size`` of the buffer, ``offset``, ``strides``, all in elements."""

    size: int
    offset: int
    strides: tuple[int, ...]


def placement(name: str, shape: tuple[int, ...], layout: str, rng: np.random.Generator | None = None) -> Placement:
    """Strides of operand ``name`` under ``layout``, for ``torch.as_strided`` and its like."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; accepted are {LAYOUTS}")
    rank = len(shape)
    order, pads, offset, step = list(range(rank)), [0] * rank, 0, 1
    is_token_tensor = rank == 4 and name not in ("bias", "mask", "dbias")
    if layout == "bhmk" and is_token_tensor:
        order = [0, 2, 1, 3]
    elif layout == "packed" and name in ("q", "k", "v", "dq", "dk", "dv") and is_token_tensor:
        pads[1] = 2 * shape[2] * shape[3]
        offset = "qkv".index(name[-1]) * shape[2] * shape[3]
    elif layout == "padded_rows" and rank > 1:
        pads[rank - 2] = 2
    elif layout == "last_strided":
        step = 2
    elif layout == "unaligned":
        offset = 1
    elif layout == "random":
        rng = np.random.default_rng(0) if rng is None else rng
        order[: rank - 1] = rng.permutation(rank - 1).tolist()
        if rng.random() < 0.25:
            order = rng.permutation(rank).tolist()
        pads = [int(rng.integers(0, 4)) if rng.random() < 0.5 else 0 for _ in range(rank)]
        offset = int(rng.integers(0, 9))
        step = int(rng.integers(1, 3)) if rng.random() < 0.2 else 1
    strides = [0] * rank
    pitch = step
    for axis in reversed(order):
        strides[axis] = pitch + (pads[axis] if axis != order[-1] else 0)
        pitch = strides[axis] * max(1, shape[axis])
    if layout == "expanded" and name in ("k", "v"):
        strides[0] = 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    return Placement(offset + extent, offset, tuple(strides))


def place(x: Array, where: Placement) -> Array:
    """Copy ``x`` into a fresh buffer laid out as ``where``; floats around it are NaN."""
    storage = np.full(where.size, np.nan if x.dtype.kind == "f" else 1, x.dtype)
    strides = tuple(stride * x.itemsize for stride in where.strides)
    view: Array = np.lib.stride_tricks.as_strided(storage[where.offset :], x.shape, strides)
    view[...] = x
    return view


# ---------------------------------------------------------------------------------------------------------------------
# The plain math


def round_to(x: Array, dtype: str) -> Array:
    """``x`` rounded to nearest even in ``dtype``; bfloat16 values are returned in a float32 array."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    single = np.ascontiguousarray(x, np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


def cast_inputs(case: Case, arrays: dict[str, Array], to: npt.DTypeLike = np.float64) -> dict[str, Array]:
    """The inputs as a kernel of ``case.dtype`` sees them (rounded to it), widened to ``to``."""
    cast = dict(arrays)
    for name in ("q", "k", "v", "dout", "bias"):
        if name in cast:
            dtype = "float32" if name == "bias" and case.bias_dtype == "float32" else case.dtype
            cast[name] = round_to(cast[name], dtype).astype(to)
    if "sink" in cast:
        cast["sink"] = round_to(cast["sink"], "float32" if case.sink == "float32" else case.dtype).astype(to)
    if "dlse" in cast:
        cast["dlse"] = cast["dlse"].astype(to)
    return cast


class Modified(Protocol):
    """What a modifier makes of the scores of a sequence, for `attention_dense`."""

    def __call__(self, sequence: int, s: Array) -> tuple[Array, Array, Array | None]:
        """Scores ``[H, Mq, Mk]`` in the dtype of ``s``, their derivative, and which pairs a mask keeps (None = all)."""

    def add_gradients(self, ds: Array, p: Array, lse: Array, squares: Array) -> None:
        """Add what scores of the last call, with gradients ``ds``, give to those of captured arrays.

        ``squares`` ``[H, Mq, 1]``: sums of (dout * out)**2, from which `summed_delta_error` has what rounding does.
        """


def attention_dense(
    case: Case,
    arrays: dict[str, Array],
    precision: str = "float64",
    dither: np.random.Generator | None = None,
    modified: Modified | None = None,
) -> dict[str, Array]:
    """out, lse, dq, dk, dv, dbias and dsink by the textbook, with whole [Mq, Mk] matrices: small problems only.

    With a ``precision`` below float64 every intermediate result is rounded to it (products and softmax accumulate in
    float32), which is the same math as a framework does it in that precision. With ``dither`` numbers are rounded on
    grids that are shifted at random, one for each number, and products are summed in another order, and P is computed
    again from lse: another sample of the rounding errors of the same math.
    """
    exact = precision == "float64"
    work = np.float64 if exact else np.float32

    def rnd(x: Array) -> Array:
        if dither is not None:
            grid = dither.uniform(1, 2, x.shape)
            return (round_to(x * grid, precision).astype(np.float64) / grid).astype(work)
        return x if exact else round_to(x, precision).astype(work)

    def product(x: Array, y: Array) -> Array:
        if dither is None:
            return x @ y
        first = dither.random(x.shape[-1]) < 0.5
        return (x * first) @ y + (x * ~first) @ y

    shape = shapes(case)
    results: dict[str, Array] = {
        name: np.zeros(shape[name], work) for name in ("out", "dq", "dk", "dv", "dbias", "dsink") if name in shape
    }
    results["lse"] = np.full(shape["lse"], -np.inf, work)
    for sequence, batch, rows, keys in _sequences(case):
        q, dout = (arrays[name][batch, rows].astype(work).swapaxes(0, 1) for name in ("q", "dout"))
        group = case.num_heads // max(1, case.num_heads_kv)
        k, v = (np.repeat(arrays[name][batch, keys].astype(work).swapaxes(0, 1), group, 0) for name in ("k", "v"))
        num_rows, num_keys = q.shape[1], k.shape[1]
        scale = work(case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale)

        s = rnd(rnd(product(q, k.swapaxes(1, 2))) * scale)
        slope: Array | float = 1.0
        if case.softcap:
            t = np.tanh(s / work(case.softcap))
            s, slope = rnd(work(case.softcap) * t), 1 - t * t
        kept = None
        if modified is not None:
            s, of_modifier, kept = modified(sequence, s)
            s, slope = rnd(s), slope * of_modifier
        if "bias" in arrays:
            s = rnd(s + _of_batch(arrays["bias"].astype(work), batch, num_keys))
        visible = np.broadcast_to(_visible(case, num_rows, num_keys), s.shape)
        if kept is not None:
            visible = visible & kept
        if "mask" in arrays:
            visible = visible & (_of_batch(arrays["mask"], batch, num_keys) != 0)
        s = np.where(visible, s, -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        sink = np.full((case.num_heads, 1, 1), -np.inf, work)
        if "sink" in arrays:
            sink = arrays["sink"].astype(work)[:, None, None]
            top = np.maximum(top, sink)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        e_sink = np.exp(sink - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True) + e_sink
        seen = total > 0
        p = rnd(np.divide(e, total, out=np.zeros_like(e), where=seen))
        z = _dropout_weights(case, sequence, num_rows, num_keys).astype(work)
        p_dropped = rnd(p * z)
        results["out"][batch, rows] = rnd(product(p_dropped, v)).swapaxes(0, 1)
        lse = np.log(total, out=np.full_like(total, -np.inf), where=seen) + np.where(seen, top, 0)
        results["lse"][batch, :, rows] = lse[..., 0]

        if dither is not None:  # backward passes have P by way of the stored lse, whose rounding grows with its size
            p = rnd(np.where(seen, np.exp(s - np.where(seen, lse, 0)), 0))
            p_dropped = rnd(p * z)
        dp = rnd(rnd(product(dout, v.swapaxes(1, 2))) * z)
        # rowsum(P * dP) by way of the stored output, as every fused kernel has it: exact in float64, rounded below.
        inner = (dout * results["out"][batch, rows].swapaxes(0, 1)).sum(-1, keepdims=True)
        if "dlse" in arrays:
            inner = inner - arrays["dlse"][batch, :, rows, None].astype(work)
        ds = rnd(p * (dp - inner))
        if "dsink" in results:
            share = np.divide(e_sink, total, out=np.zeros_like(total), where=seen)
            results["dsink"] -= rnd(rnd(share) * inner).sum((1, 2))
        if "dbias" in results:
            part = _of_batch(results["dbias"], batch, num_keys)
            part += ds.sum(tuple(axis for axis, size in enumerate(part.shape) if size == 1), keepdims=True)
        if modified is not None:
            squares = ((dout * results["out"][batch, rows].swapaxes(0, 1)) ** 2).sum(-1, keepdims=True)
            modified.add_gradients(ds, p, lse, squares)
            slope = np.where(p == 0, 0, slope)  # that of a score which is hidden may be NaN
        ds = rnd(ds * slope)
        results["dq"][batch, rows] = rnd(rnd(product(ds, k)) * scale).swapaxes(0, 1)
        for name, weights, x in (("dk", ds, q * scale), ("dv", p_dropped, dout)):
            per_head = rnd(product(weights.swapaxes(1, 2), x))
            summed = per_head.reshape(case.num_heads_kv, group, *per_head.shape[1:]).sum(1)
            results[name][batch, keys] = rnd(summed).swapaxes(0, 1)
    if "dsink" in results:
        results["dsink"] = results["dsink"] if case.sink == "float32" else rnd(results["dsink"])
    if "dbias" in results:
        results["dbias"] = results["dbias"] if case.bias_dtype == "float32" else rnd(results["dbias"])
    return results


def attention_low_precision(case: Case, arrays: dict[str, Array]) -> dict[str, Array]:
    """`attention_dense` in the case's own precision: the yardstick of the error rule."""
    return attention_dense(case, arrays, case.dtype)


def error_bound(exact: Array, low_precision: Array, dtype: str, factor: float = 2.0) -> float:
    """Largest error allowed: ``factor`` times that of the same math in the input precision, plus rounding.

    Adds 1e-5, and for 16-bit types at least the error of rounding the exact result itself once: both keep the rule
    meaningful where the low-precision result happens to be exact, as a gradient that is zero by algebra.
    """
    finite = np.isfinite(exact) & np.isfinite(low_precision)
    if not finite.any():
        return 0.0
    truth = exact[finite].astype(np.float64)
    error = float(np.abs(low_precision[finite].astype(np.float64) - truth).max())
    rounding = 0.0 if dtype == "float32" else float(np.abs(round_to(truth, dtype).astype(np.float64) - truth).max())
    return factor * error + max(rounding, 1e-5)


UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}
"""Unit roundoff of the numbers that delta comes from."""


def summed_delta_error(case: Case, arrays: dict[str, Array], exact: dict[str, Array]) -> float:
    """Four standard deviations of what rounding ``out`` does to a dbias that is summed over all keys.

    Such a sum is 0 by algebra (rows of P * (dP - delta) cancel), up to the error of delta = rowsum(dO * O) with O in
    the input precision. One or a few numbers of the yardstick can be small by chance: this is their expected size.

    float32: O and dP are sums of products whose operands are pairs of TF32 numbers, 11 + 11 bits; it is their unit
    roundoff that counts, not that of the 24 bits O is stored in.
    """
    if case.bias is None or case.bias[3] != "1" or 0 in shapes(case)["out"]:
        return 0.0
    unit = UNITS[case.dtype]
    variance = (arrays["dout"].astype(np.float64) * exact["out"]) ** 2 * unit**2 / 3
    rows = variance.sum(-1).size / max(1, exact["dbias"].size)
    return float(4 * np.sqrt(variance.sum(-1).mean() * rows))


def summed_rows_error(case: Case, arrays: dict[str, Array], exact: dict[str, Array]) -> float:
    """Four standard deviations of what rounding ``out`` does to a dsink: to delta, which dsink sums over the rows.

    A dsink is few numbers, for which the yardstick can be small by chance. float32: as above, the unit roundoff of
    the sums of products that ``out`` comes from.
    """
    if case.sink is None or 0 in shapes(case)["out"]:
        return 0.0
    unit = UNITS[case.dtype]
    variance = ((arrays["dout"].astype(np.float64) * exact["out"]) ** 2).sum(-1).swapaxes(1, 2) * (unit**2 / 3)
    lse = np.where(np.isfinite(exact["lse"]), exact["lse"], np.inf)
    share = np.exp(arrays["sink"].astype(np.float64)[:, None] - lse)
    return float(4 * np.sqrt((share**2 * np.nan_to_num(variance)).sum((0, 2)).max()))


def breaches(
    case: Case,
    values: dict[str, Array],
    exact: dict[str, Array],
    low: dict[str, Array],
    arrays: dict[str, Array],
    allowed: Mapping[str, float] | None = None,
    in_float32: Sequence[str] = (),
) -> list[str]:
    """What breaks the error rule (docs/guide/semantics.md, Precision): one line an array.

    ``allowed``: what `summed_delta_error` is for dbias, for further results. ``in_float32``: results beside lse and
    those of captured arrays whose own rounding is that of float32, in whatever dtype the inputs are.
    """
    lines = []
    for name, value in values.items():
        truth = exact[name].astype(np.float64)
        if not value.size:
            continue
        finite = np.isfinite(truth)
        if not np.array_equal(value[~finite], truth[~finite]):
            lines.append(f"{name}: infinities differ from the oracle's")
            continue
        error = np.abs(value[finite] - truth[finite])
        if not np.isfinite(error).all():
            lines.append(f"{name}: {int((~np.isfinite(error)).sum())} elements of {value.size} are NaN or infinite")
            continue
        is_float32 = name == "lse" or name.startswith("daux") or name in in_float32
        bound = error_bound(truth, low[name], "float32" if is_float32 else case.dtype)
        bound += (allowed or {}).get(name, 0.0)
        if name == "dbias":
            bound += summed_delta_error(case, arrays, exact)
        if name == "dsink":
            bound += summed_rows_error(case, arrays, exact)
        if name == "lse":  # its inputs are rounded scores in the yardstick; ours is float32 throughout
            bound = max(bound, 1e-5)
        worst = float(error.max(initial=0.0))
        if worst > bound:
            lines.append(f"{name}: max error {worst:.3e}, allowed {bound:.3e}")
    return lines


def _sequences(case: Case) -> Iterator[tuple[int, int, slice, slice]]:
    """(b, index of the leading dim, query tokens, key tokens) of each sequence."""
    if not case.num_heads:
        return
    if not case.varlen:
        for b in range(case.batch):
            yield b, b, slice(0, case.seqlen_q), slice(0, case.seqused_k[b] if case.seqused_k else case.seqlen_k)
        return
    start_q, start_k = case.lead
    for b, (m, n) in enumerate(case.seqlens):
        yield b, 0, slice(start_q, start_q + m), slice(start_k, start_k + (case.seqused_k[b] if case.seqused_k else n))
        start_q, start_k = start_q + m, start_k + n


def _of_batch(x: Array, batch: int, num_keys: int) -> Array:
    """A view of the rows and keys of a batch entry in a broadcast operand."""
    part: Array = x[batch if x.shape[0] > 1 else 0]
    return part[..., :num_keys] if part.shape[-1] > 1 else part


def _visible(case: Case, num_rows: int, num_keys: int) -> Array:
    i, j = np.arange(num_rows)[:, None], np.arange(num_keys)[None, :]
    off = 0 if case.causal == "top_left" else num_keys - num_rows
    left, right = (None if bound == -1 else bound for bound in case.window_size)
    keep: Array = np.ones((num_rows, num_keys), np.bool_)
    if case.causal:
        keep &= j <= i + off
    if left is not None:
        keep &= j >= i + off - left
    if right is not None:
        keep &= j <= i + off + right
    return keep


def _dropout_weights(case: Case, sequence: int, num_rows: int, num_keys: int) -> Array:
    keep = philox.keep_mask(
        (1, case.num_heads, num_rows, num_keys), case.dropout_p, case.seed, case.offset, origin=(sequence, 0, 0, 0),
        num_heads=case.num_heads, max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k,
    )  # fmt: skip
    weights: Array = keep[0] * np.float32(philox.multiplier(case.dropout_p))
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# The lists

HEAD_DIMS = (8, 16, 24, 32, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256, 257, 320, 512)
LENGTHS = (
    (113, 203), (127, 512), (127, 513), (108, 256), (1023, 1024), (1, 239), (3, 799), (64, 64), (128, 128), (1, 1),
    (200, 1), (129, 127), (257, 65),
)  # fmt: skip
BIAS_SHAPES = tuple("".join(c if n >> i & 1 else "1" for i, c in enumerate("bhqk")) for n in range(16))
_DTYPES = ("float16", "bfloat16", "float32")


def named_cases() -> list[Case]:
    """The curated list: each feature alone, the pairs that have gone wrong elsewhere, and everything at once."""
    cases = [make_case(f"basic-{dtype}", dtype=dtype, causal=causal, dlse=True) for dtype, causal in _basic()]
    for n, d in enumerate(HEAD_DIMS):
        cases.append(make_case(f"head_dim-{d}", batch=1, head_dim=d, dtype=_DTYPES[n % 3], causal=n % 2 == 1))
    for d, dv in ((192, 128), (64, 256), (128, 64), (40, 72), (16, 512), (111, 59), (512, 64)):
        cases.append(make_case(f"head_dim-{d}-{dv}", batch=1, head_dim=d, head_dim_v=dv, dtype="bfloat16"))
    for m, n in LENGTHS:
        for causal in (False, True, "top_left"):
            name = f"length-{m}-{n}-{causal}"
            cases.append(make_case(name, batch=1, seqlen_q=m, seqlen_k=n, causal=causal, dtype="bfloat16"))
    # One key tile a head: the loop over queries is split among thread blocks, and their parts are added up.
    cases.append(make_case("split-queries", batch=1, num_heads=2, seqlen_q=2000, seqlen_k=77, dtype="bfloat16"))
    # One key tile of 80 columns, whose bias threads read.
    text: dict[str, Any] = {"seqlen_q": 300, "seqlen_k": 77, "num_heads": 4, "dtype": "bfloat16"}
    cases += [make_case(f"text-bias-d{d}", **text, head_dim=d, bias="b11k") for d in (160, 192)]
    cases.append(make_case("text-bias-softcap-d192", **text, head_dim=192, bias="1hqk", softcap=8.0))
    # Two on a Hopper GPU of 132 multiprocessors, where 66 key tiles fill half of them.
    cases.append(make_case("parts", batch=1, num_heads=33, seqlen_q=2700, seqlen_k=250, head_dim=72, dtype="bfloat16"))
    cases.append(make_case("decode", batch=1, num_heads=4, num_heads_kv=1, seqlen_q=1, seqlen_k=8192, head_dim=128))
    for heads, heads_kv in ((8, 2), (6, 1), (9, 3)):
        for causal in (False, True):
            name = f"gqa-{heads}-{heads_kv}-{causal}"
            cases.append(make_case(name, num_heads=heads, num_heads_kv=heads_kv, causal=causal, head_dim=32, dlse=True))
    cases += _mask_cases()
    cases += _bias_cases()
    for n, p in enumerate((1e-6, 0.1, 0.5, 0.999, 1.0)):
        cases.append(make_case(f"dropout-{p}", dropout_p=p, dtype=_DTYPES[n % 3], offset=n, dlse=n % 2 == 1))
    cases += [
        make_case("dropout-gqa", dropout_p=0.2, num_heads=8, num_heads_kv=2, head_dim=32, causal=True),
        make_case("dropout-wide-state", dropout_p=0.3, seed=2**63 + 5, offset=2**33 + 1, seqlen_k=205),
        make_case("dropout-wrap", dropout_p=0.3, seed=2**64 - 1, offset=2**64 - 1001),
        make_case("softcap", softcap=5.0, dtype="bfloat16", dlse=True),
        make_case("softcap-causal-float32", softcap=1.5, dtype="float32", causal=True),
        make_case("scale-zero", softmax_scale=0.0),
        make_case("scale-negative", softmax_scale=-0.2),
        make_case("scale-large", softmax_scale=4.0, dtype="bfloat16"),
        make_case("deterministic", deterministic=True, causal=True, num_heads=4, num_heads_kv=2),
        make_case("empty-batch", batch=0),
        make_case("empty-queries", seqlen_q=0, bias="bh1k"),
        make_case("empty-keys", seqlen_k=0, dlse=True, bias="bhq1"),
        make_case("empty-heads", num_heads=0),
    ]
    cases += _varlen_cases() + _used_cases() + _several_tile_cases()
    cases += _few_query_cases() + _bias_tile_cases() + _wide_head_cases() + _sink_cases()
    cases += _narrow_head_cases() + _between_cases() + _few_row_cases()
    for layout in LAYOUTS[1:]:
        for dtype in ("float16", "float32"):
            case = make_case(
                f"layout-{layout}-{dtype}", layout=layout, dtype=dtype, seqlen_q=203, bias="bhqk", mask="b1qk"
            )
            cases.append(case)
    cases.append(
        make_case(
            "everything", num_heads=6, num_heads_kv=2, head_dim=72, head_dim_v=40, causal=True, window_size=(90, 3),
            bias="1hqk", mask="b11k", softcap=8.0, dropout_p=0.15, offset=77, dlse=True, softmax_scale=0.2,
        )
    )  # fmt: skip
    return cases


def _several_tile_cases() -> list[Case]:
    """Bias, mask and dropout over several tiles of 128 rows and keys, the last rows less than half a tile."""
    boundary = 2**34 - 20000  # the upper half of the dropout counter changes in the middle
    fields: list[dict[str, Any]] = [
        {"head_dim": 64, "bias": "bhqk", "causal": True},
        {"head_dim": 64, "bias": "bh1k", "bias_dtype": "float32", "mask": "11qk"},
        {"head_dim": 64, "dropout_p": 0.2, "offset": boundary},
        {"head_dim": 64, "dropout_p": 0.2, "seqlen_k": 301, "offset": boundary + 1, "causal": True},
        {"head_dim": 128, "bias": "1hqk", "mask": "b1qk", "dropout_p": 0.1},
        {"head_dim": 128, "bias": "bhqk", "bias_dtype": "float32", "causal": True},
        {"head_dim": 128, "dropout_p": 0.1, "seqlen_k": 302, "offset": 3, "causal": True},
        {"head_dim": 192, "dropout_p": 0.1, "seqlen_k": 303},
        {"head_dim": 192, "bias": "bhqk", "mask": "bhqk", "causal": True},
        {"head_dim": 256, "bias": "bhqk", "causal": True},
        {"head_dim": 256, "dropout_p": 0.1, "offset": boundary},
    ]
    return [
        make_case(
            f"tiles-{n}-d{case['head_dim']}",
            **{"seqlen_k": 400, **case},
            batch=1,
            num_heads=2,
            seqlen_q=300,
            dtype=_DTYPES[n % 2],
        )
        for n, case in enumerate(fields)
    ]


def _few_query_cases() -> list[Case]:
    """Up to 63 queries of heads that share a key head: the rows of one tile are (query, head)."""
    grouped: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2}
    one: dict[str, Any] = {**grouped, "seqlen_q": 1}
    few: dict[str, Any] = {**grouped, "seqlen_q": 5}
    long: dict[str, Any] = {"batch": 1, "seqlen_k": 5003, "head_dim": 128, "dtype": "bfloat16"}
    lengths = ((1, 203), (1, 0), (0, 64), (1, 1), (1, 700))
    short = ((7, 203), (1, 64), (0, 50), (5, 3), (3, 0))
    fields: list[dict[str, Any]] = [
        {**one, **long, "dlse": True},
        {**few, **long, "causal": True, "dtype": "float16"},
        {**few, **long, "window_size": (1000, 0), "num_heads": 6, "dtype": "float32"},
        {**one, **long, "num_heads": 5, "num_heads_kv": 1, "bias": "bhqk", "mask": "bhqk", "mask_empty": True},
        {**one, **long, "seqlens": ((1, 5003),) * 3, "seqused_k": (5003, 0, 77), "head_dim": 40},
        {**one, "num_heads": 32, "num_heads_kv": 1, "head_dim": 64},
        {**one, "causal": "top_left", "dtype": "bfloat16"},
        {**one, "window_size": (17, None), "bias": "1h1k"},
        {**one, "head_dim": 256, "mask": "b11k", "dtype": "bfloat16"},
        {**one, "head_dim": 64, "head_dim_v": 320},
        {**one, "dropout_p": 0.3, "dtype": "float32", "offset": 5},
        {**few, "causal": True, "dropout_p": 0.3, "seqlen_k": 205, "offset": 3},
        {**few, "causal": "top_left", "bias": "bhqk", "bias_dtype": "float32", "softcap": 4.0},
        {**few, "window_size": (20, 3), "mask": "bhqk", "head_dim": 59},
        {**few, "seqlen_k": 3, "causal": True, "dlse": True},
        {**few, "num_heads": 7, "num_heads_kv": 1, "seqlen_q": 9, "causal": True, "softmax_scale": -0.2},
        {**few, "num_heads": 9, "num_heads_kv": 3, "seqlen_q": 40, "causal": True, "head_dim": 96},
        {**grouped, "seqlen_q": 63, "causal": True, "window_size": (30, 0), "head_dim": 128},
        {**grouped, "seqlen_q": 17, "batch": 1, "seqlen_k": 4099, "causal": True, "head_dim": 256, "bias": "1hqk"},
        {**grouped, "seqlens": lengths, "seqused_k": (100, 0, 3, 1, 699), "tail": (3, 0), "dlse": True},
        {**grouped, "seqlens": short, "causal": True, "dropout_p": 0.2, "tail": (2, 5), "dtype": "bfloat16"},
        {**grouped, "seqlens": ((4, 6000), (2, 300)), "causal": True, "head_dim": 128, "tail": (1, 0)},
    ]  # fmt: skip
    cases = [make_case(f"few-queries-{n}", **case) for n, case in enumerate(fields)]
    for n, layout in enumerate(LAYOUTS[1:]):
        case = few if n % 2 else one
        cases.append(make_case(f"few-queries-{layout}", layout=layout, dtype=_DTYPES[n % 3], bias="bhqk", **case))
    return cases


def _bias_tile_cases() -> list[Case]:
    """A bias whose rows are multiples of 16 bytes, over several tiles of 128 rows and keys that it does not fill."""
    fields: list[dict[str, Any]] = [
        {"bias": "bhqk"},
        {"bias": "bhqk", "causal": True, "num_heads": 4, "num_heads_kv": 2, "dlse": True},
        {"bias": "bhqk", "window_size": (70, 30)},
        {"bias": "bhqk", "causal": "top_left"},
        {"bias": "bhqk", "seqlen_q": 400, "seqlen_k": 304, "causal": True},
        {"bias": "bhqk", "head_dim": 32},
        {"bias": "bhqk", "head_dim": 40, "head_dim_v": 56, "causal": True},
        {"bias": "bhqk", "head_dim": 96, "head_dim_v": 80},
        {"bias": "bhqk", "head_dim": 128, "window_size": (150, 0), "num_heads": 4, "num_heads_kv": 2},
        {"bias": "bhqk", "softmax_scale": -0.2},
        {"bias": "bhqk", "softcap": 5.0},
        {"bias": "bhqk", "mask": "b1qk"},
        {"bias": "bhqk", "dropout_p": 0.2},
        {"bias": "1hqk"},
        {"bias": "1hqk", "head_dim": 128, "causal": True, "num_heads": 4, "num_heads_kv": 2},
        {"bias": "1hqk", "head_dim": 32, "batch": 9},
        {"bias": "11qk", "window_size": (70, 30)},
        {"bias": "b1qk", "causal": "top_left", "num_heads": 4, "num_heads_kv": 2},
        {"bias": "1hqk", "mask": "b11k", "softcap": 5.0},
        {"bias": "bh1k"},
        {"bias": "b11k", "head_dim": 128, "causal": True},
    ]
    return [
        make_case(
            f"bias-tiles-{n}-{case['bias']}", **{"seqlen_q": 300, "seqlen_k": 400, "dtype": _DTYPES[n % 2], **case}
        )
        for n, case in enumerate(fields)
    ]


_LENGTHS_OVER_TILES = ((113, 203), (1, 239), (64, 64), (0, 50), (50, 0), (300, 301))
"""Queries and keys of packed sequences: none, one, a whole tile, and some tiles and a part."""


def _over_tiles(
    names: Sequence[str], fields: Sequence[dict[str, Any]], dtypes: Sequence[str] = _DTYPES[:2]
) -> list[Case]:
    """Cases of 300 queries and 400 keys where ``fields`` say nothing else, with ``dtypes`` in turn."""
    dense = {"batch": 1, "seqlen_q": 300, "seqlen_k": 400}
    return [
        make_case(name, **{"dtype": dtypes[n % len(dtypes)], **({} if "seqlens" in case else dense), **case})
        for n, (name, case) in enumerate(zip(names, fields, strict=True))
    ]


def _wide_head_cases() -> list[Case]:
    """Head dims beyond 128, and one width alone beyond 64, over several tiles of 64 queries and 128 keys."""
    used = (200, 7, 64, 0, 0, 270)
    fields: list[dict[str, Any]] = [
        {"head_dim": 256, "batch": 3, "num_heads": 8, "num_heads_kv": 2, "seqlen_k": 1100},
        {"head_dim": 256, "batch": 3, "num_heads": 8, "num_heads_kv": 4, "seqlen_q": 640, "causal": True},
        {"head_dim": 192, "head_dim_v": 128, "causal": True, "dlse": True},
        {"head_dim": 136, "dtype": "float16"},
        {"head_dim": 160, "causal": "top_left", "num_heads": 4, "num_heads_kv": 1},
        {"head_dim": 224, "head_dim_v": 72},
        {"head_dim": 256, "head_dim_v": 64, "causal": True},
        {"head_dim": 64, "head_dim_v": 200},
        {"head_dim": 128, "head_dim_v": 64, "causal": True},
        {"head_dim": 40, "head_dim_v": 72},
        {"head_dim": 256, "seqlens": _LENGTHS_OVER_TILES, "causal": True, "dlse": True, "tail": (5, 9)},
        {
            "head_dim": 192,
            "head_dim_v": 128,
            "seqlens": _LENGTHS_OVER_TILES,
            "seqused_k": used,
            "num_heads": 4,
            "num_heads_kv": 2,
        },
        {"head_dim": 256, "softcap": 5.0, "causal": True},
        {"head_dim": 256, "window_size": (70, 20)},
        {"head_dim": 256, "softmax_scale": -0.1},
        {"head_dim": 256, "seqlen_q": 500, "seqlen_k": 113, "causal": True, "bias": "bhqk"},
        {"head_dim": 256, "layout": "expanded", "batch": 2},
        {"head_dim": 256, "bias": "bhqk", "bias_dtype": "float32"},
        {"head_dim": 192, "head_dim_v": 128, "bias": "bhqk", "causal": True, "seqlen_k": 401, "num_heads_kv": 1},
        {"head_dim": 256, "bias": "bhqk", "window_size": (70, 20)},
        {"head_dim": 256, "mask": "bhqk", "mask_empty": True},
        {"head_dim": 256, "dropout_p": 0.5, "seqlen_k": 303, "offset": 3, "dtype": "float16", "num_heads_kv": 1},
        {"head_dim": 256, "seqlens": _LENGTHS_OVER_TILES, "dropout_p": 0.25, "causal": True},
        {"head_dim": 256, "softcap": 5.0, "dropout_p": 0.1},
        {"head_dim": 256, "softcap": 5.0, "mask": "11qk", "causal": True},
        {"head_dim": 256, "bias": "bhqk", "mask": "b1qk", "causal": True},
        # P a query tile ahead: masks, drops and maps are those of the next tile, also of the next head of a group.
        {"head_dim": 192, "head_dim_v": 128, "softcap": 5.0, "dropout_p": 0.25, "num_heads_kv": 1},
        {"head_dim": 192, "window_size": (70, 20), "num_heads_kv": 1},
        {"head_dim": 160, "seqlens": _LENGTHS_OVER_TILES, "dropout_p": 0.25, "causal": True},
        # Several of bias, mask and dropout; a bias and a mask that are read by elements.
        {"head_dim": 192, "bias": "bhqk", "bias_dtype": "float32", "mask": "b1qk", "causal": True, "num_heads_kv": 1},
        {"head_dim": 192, "head_dim_v": 128, "bias": "bhqk", "mask": "bhqk", "dropout_p": 0.25, "causal": True},
        {"head_dim": 96, "head_dim_v": 160, "bias": "bhqk", "bias_dtype": "float32", "mask": "11qk", "dropout_p": 0.1},
        {"head_dim": 240, "bias": "b1qk", "bias_dtype": "float32", "dropout_p": 0.1, "seqlen_k": 303},
        {
            "head_dim": 256,
            "seqlens": _LENGTHS_OVER_TILES,
            "seqused_k": used,
            "dropout_p": 0.25,
            "num_heads": 4,
            "num_heads_kv": 2,
        },
        {"head_dim": 192, "head_dim_v": 224, "dropout_p": 0.25, "window_size": (70, 20)},
    ]
    names = [f"wide-{n}-d{x['head_dim']}-{x.get('head_dim_v', x['head_dim'])}" for n, x in enumerate(fields)]
    return _over_tiles(names, fields, ("bfloat16",))


def _narrow_head_cases() -> list[Case]:
    """Head dims of 16 to 32, which leave most of a slab of 64 columns empty, over several tiles."""
    grouped: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2}
    fields: list[dict[str, Any]] = [
        {"head_dim": 16, "dlse": True},
        {"head_dim": 24, "causal": True},
        {"head_dim": 32, "causal": True, "seqlen_q": 1100, "seqlen_k": 1100, "num_heads": 4},
        {"head_dim": 16, "head_dim_v": 32, "window_size": (70, 20)},
        {"head_dim": 32, "head_dim_v": 96, "causal": "top_left"},
        {"head_dim": 24, "softcap": 5.0, "causal": True, **grouped},
        {"head_dim": 32, "dropout_p": 0.25, "seqlen_k": 303, "offset": 3},
        {"head_dim": 16, "dropout_p": 0.25, "causal": True, **grouped},
        {"head_dim": 16, "deterministic": True, "causal": True},
        {"head_dim": 32, "deterministic": True, "seqlens": _LENGTHS_OVER_TILES},
        {
            "head_dim": 24,
            "seqlens": _LENGTHS_OVER_TILES,
            "seqused_k": (200, 7, 64, 0, 0, 270),
            "causal": True,
            **grouped,
        },
        {"head_dim": 16, "seqlens": _LENGTHS_OVER_TILES, "dropout_p": 0.25, "tail": (5, 9)},
        {"head_dim": 16, "bias": "bhqk", "causal": True},
        {"head_dim": 24, "bias": "1hqk", "batch": 3},
        {"head_dim": 32, "bias": "bhqk", "bias_dtype": "float32", "seqlen_k": 401},
        {"head_dim": 24, "bias": "b11k", "mask": "bhqk", "mask_empty": True, "softcap": 5.0, "dropout_p": 0.1},
        {"head_dim": 32, "mask": "b11k", "batch": 3},
        {"head_dim": 16, "mask": "bhqk", "causal": True, "mask_empty": True},
        {"head_dim": 32, "softmax_scale": -0.2, "seqlen_k": 77},
    ]
    return _over_tiles([f"narrow-{n}-d{x['head_dim']}" for n, x in enumerate(fields)], fields)


def _between_cases() -> list[Case]:
    """Head dims of 72 to 120: K and V in registers backward, three consumers and narrow key tiles forward."""
    grouped: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2}
    many: dict[str, Any] = {"num_heads": 40, "seqlen_q": 400, "seqlen_k": 500}
    fields: list[dict[str, Any]] = [
        {"head_dim": 72, **many},
        {"head_dim": 80, "causal": True, **many},
        {"head_dim": 96, **many},
        {"head_dim": 96, "head_dim_v": 72, "causal": True, "num_heads": 8, "seqlen_q": 1100, "seqlen_k": 1200},
        {"head_dim": 72, "head_dim_v": 96, "window_size": (150, 30), **grouped},
        {"head_dim": 80, "seqlens": _LENGTHS_OVER_TILES, "causal": True, "dlse": True, "tail": (5, 9)},
        {"head_dim": 96, "seqlens": _LENGTHS_OVER_TILES, **grouped},
        {"head_dim": 96, "softmax_scale": -0.1},
        {"head_dim": 104, **many},
        {"head_dim": 112, "causal": True, **many},
        {"head_dim": 120, "num_heads": 24, "seqlen_q": 700, "seqlen_k": 1100, "dlse": True},
        {"head_dim": 112, "head_dim_v": 128, "num_heads": 24, "seqlen_q": 700, "seqlen_k": 300},
        {"head_dim": 104, "causal": True, "num_heads": 24, "seqlen_q": 700, "seqlen_k": 1100},
        {"head_dim": 120, "softcap": 5.0, "causal": True, "num_heads": 24, "seqlen_q": 700, "seqlen_k": 700},
        {"head_dim": 112, "seqlens": _LENGTHS_OVER_TILES, "causal": True, "num_heads": 40},
        {"head_dim": 120, "seqlens": _LENGTHS_OVER_TILES, "softcap": 5.0, "window_size": (70, 20), "num_heads": 40},
        {"head_dim": 128, "num_heads": 32, "seqlen_q": 600, "seqlen_k": 600},
        {"head_dim": 128, "num_heads": 24, "seqlen_q": 1024, "seqlen_k": 300, "num_heads_kv": 8},
    ]
    return _over_tiles([f"between-{n}-d{x['head_dim']}" for n, x in enumerate(fields)], fields)


def _few_row_cases() -> list[Case]:
    """Fewer queries than the smallest tile of the Hopper backward kernel, whose other rows are none."""
    fields: list[dict[str, Any]] = [
        {"head_dim": 128, "seqlen_q": 56, "seqlen_k": 56, "causal": True},
        {"head_dim": 96, "seqlen_q": 33, "seqlen_k": 300},
        {"head_dim": 256, "seqlen_q": 40, "seqlen_k": 40, "causal": True, "dlse": True},
        {"head_dim": 192, "head_dim_v": 128, "seqlen_q": 63, "seqlen_k": 400, "num_heads": 8, "num_heads_kv": 2},
        {"head_dim": 128, "seqlen_q": 50, "seqlen_k": 304, "bias": "bhqk"},
        {"head_dim": 64, "seqlen_q": 48, "seqlen_k": 272, "bias": "1hqk", "causal": True},
        {"head_dim": 80, "seqlen_q": 45, "seqlen_k": 200, "dropout_p": 0.25, "mask": "b11k"},
        {"head_dim": 128, "seqlen_q": 60, "seqlen_k": 900, "deterministic": True, "num_heads": 8, "num_heads_kv": 2},
        {"head_dim": 64, "seqlens": ((40, 300), (3, 77), (0, 5), (56, 56)), "causal": True},
    ]
    return [
        make_case(f"few-rows-{n}-d{case['head_dim']}", **{"dtype": _DTYPES[n % 2], **case})
        for n, case in enumerate(fields)
    ]


def _sink_cases() -> list[Case]:
    """A sink beside everything else, at head dims of every kernel, and where rows have no key."""
    lengths = ((113, 203), (1, 239), (64, 64), (0, 50), (50, 0), (127, 31))
    used = (200, 7, 64, 0, 0, 30)
    grouped: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2}
    fields: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16", "causal": True, "dlse": True},
        {"dtype": "float32", "causal": "top_left", "dlse": True},
        {"sink": "same"},
        {"sink": "same", "dtype": "bfloat16", "head_dim": 128, "causal": True, **grouped},
        {"seqlen_q": 500, "seqlen_k": 600, "window_size": (127, 0), "causal": True, "dtype": "bfloat16", **grouped},
        {"head_dim": 128, "seqlen_q": 300, "seqlen_k": 400, "dropout_p": 0.2, "dlse": True},
        {"head_dim": 192, "head_dim_v": 128, "causal": True, "dtype": "bfloat16"},
        {"head_dim": 256, "seqlen_q": 300, "seqlen_k": 400, "dlse": True, "causal": True, "dtype": "bfloat16"},
        {"head_dim": 320},
        {"head_dim": 59, "head_dim_v": 40, "layout": "random", "sink": "same"},
        {"softcap": 5.0, "dtype": "bfloat16"},
        {"bias": "bhqk", "seqlen_k": 208},
        {"bias": "1h1k", "mask": "bhqk", "mask_empty": True, "dlse": True},
        {"mask": "b11k", "mask_kind": "padding"},
        {"mask": "bhqk", "mask_kind": "empty", "dlse": True},
        {"softmax_scale": -0.2},
        {"softmax_scale": 0.0},
        {"deterministic": True, "causal": True, "dtype": "bfloat16", "dlse": True},
        {"seqlen_q": 203, "seqlen_k": 17, "window_size": (4, 0), "dlse": True},
        {"seqlen_k": 0, "dlse": True},
        {"seqlen_q": 0},
        {"batch": 0},
        {"num_heads": 0},
        {"seqlens": lengths, "causal": True, "dlse": True, "tail": (5, 9), "lead": (2, 0), "dtype": "bfloat16"},
        {"seqlens": lengths, "seqused_k": used, "dropout_p": 0.25, "head_dim": 128, **grouped},
        {"seqlens": lengths, "seqused_k": used, "head_dim": 256, "dtype": "bfloat16", "deterministic": True},
        # Few queries: rows of one tile are of several heads, and keys are split.
        {**grouped, "seqlen_q": 1, "batch": 1, "seqlen_k": 5003, "head_dim": 128, "dtype": "bfloat16"},
        {**grouped, "seqlen_q": 5, "batch": 1, "seqlen_k": 5003, "causal": True, "bias": "1h1k", "sink": "same"},
        {**grouped, "seqlen_q": 7, "causal": True, "dlse": True},
        {**grouped, "seqlen_q": 40, "head_dim": 96, "dropout_p": 0.3},
        {**grouped, "seqlens": ((1, 5003),) * 3, "seqused_k": (5003, 0, 77), "seqlen_q": 1, "tail": (3, 0)},
        {"seqlen_q": 2000, "seqlen_k": 77, "dtype": "bfloat16", "batch": 1},
        {"num_heads": 6, "num_heads_kv": 2, "head_dim": 72, "head_dim_v": 40, "causal": True, "window_size": (90, 3),
         "bias": "1hqk", "mask": "b11k", "softcap": 8.0, "dropout_p": 0.15, "offset": 77, "dlse": True},
    ]  # fmt: skip
    return [
        make_case(f"sink-{n}-d{case.get('head_dim', 64)}", **{"sink": "float32", **case})
        for n, case in enumerate(fields)
    ]


def _basic() -> Iterator[tuple[str, bool | str]]:
    yield from zip(_DTYPES, (False, True, "top_left"), strict=True)


def _mask_cases() -> list[Case]:
    cases = []
    for m, n in ((113, 203), (203, 113)):
        for causal in (False, True, "top_left"):
            for window in ((17, 5), (0, 0), (64, None), (None, 30), (200, 200)):
                name = f"window-{m}-{n}-{causal}-{window[0]}-{window[1]}"
                cases.append(make_case(name, batch=1, seqlen_q=m, seqlen_k=n, causal=causal, window_size=window))
    for causal in (True, "top_left"):
        cases.append(make_case(f"causal-tall-{causal}", seqlen_q=203, seqlen_k=113, causal=causal, dlse=True))
    cases += [
        # Bottom right puts rows 0..185 before key 0; top left leaves rows 20.. behind the last key.
        make_case("window-no-key-above", seqlen_q=203, seqlen_k=17, window_size=(4, 0), dlse=True),
        make_case("window-no-key-below", seqlen_q=203, seqlen_k=17, causal="top_left", window_size=(3, 0), dlse=True),
    ]
    for n, spec in enumerate(("bhqk", "b11k", "11qk", "1h1k", "bhq1", "1111")):
        cases.append(make_case(f"mask-{spec}", mask=spec, dtype=_DTYPES[n % 3]))
    cases += [
        make_case("mask-empty-rows", mask="bhqk", mask_empty=True, dlse=True, bias="11qk"),
        make_case("mask-empty-batch", mask="b11k", mask_empty=True, dlse=True),
        make_case("mask-causal", mask="b11k", causal=True, num_heads=4, num_heads_kv=2),
        # Long enough for a plan of the tiles that the mask leaves anything of.
        make_case(
            "mask-tiles", mask="b11k", mask_kind="left_padding", head_dim=64, seqlen_q=1024, seqlen_k=1024, num_heads=8,
            dtype="bfloat16",
        ),
    ]  # fmt: skip
    return cases


def _bias_cases() -> list[Case]:
    cases = [
        make_case(f"bias-{spec}", bias=spec, dtype=_DTYPES[n % 3], dlse=n % 4 == 0)
        for n, spec in enumerate(BIAS_SHAPES)
    ]
    for spec in ("bhqk", "1h1k"):
        cases.append(make_case(f"bias-float32-{spec}", bias=spec, bias_dtype="float32", dtype="bfloat16", seqlen_k=204))
    cases += [
        make_case("bias-causal-tall", bias="bhqk", causal=True, seqlen_q=203, seqlen_k=113),
        make_case("bias-window", bias="1hqk", window_size=(20, 20), num_heads=4, num_heads_kv=2),
        make_case("bias-dropout", bias="1hqk", dropout_p=0.1, softcap=10.0),
        make_case("bias-aligned", bias="bhqk", seqlen_q=128, seqlen_k=256, head_dim=128, dtype="bfloat16"),
    ]
    return cases


def _used_cases() -> list[Case]:
    """Keys of a dense batch that end early: none, one, a tile's edge, all."""
    batch: dict[str, Any] = {"batch": 5, "seqlen_q": 150, "seqlen_k": 333, "seqused_k": (333, 0, 1, 128, 200)}
    short: dict[str, Any] = {**batch, "seqlen_k": 100, "seqused_k": (100, 0, 1, 64, 77)}
    cases = []
    for d in (64, 128, 192, 256):
        cases += [
            make_case(f"used-{d}", **batch, head_dim=d, dlse=True),
            make_case(f"used-causal-{d}", **batch, head_dim=d, causal=True, dtype="bfloat16"),
            make_case(f"used-bias-{d}", **batch, head_dim=d, bias="1hqk", causal="top_left"),
            make_case(f"used-short-{d}", **short, head_dim=d, causal=True, num_heads=4, num_heads_kv=2),
        ]
    return [
        *cases,
        make_case("used-window", **batch, window_size=(40, 10), num_heads=4, num_heads_kv=2),
        make_case("used-everything", **batch, dropout_p=0.25, softcap=6.0, causal=True, dlse=True, window_size=(70, 0),
                  num_heads=4, num_heads_kv=2, head_dim=32, head_dim_v=80),
        make_case("used-mask", **batch, mask="b11k", head_dim=40),
        make_case("used-bias-mask-dropout", **batch, bias="bhqk", mask="1hqk", dropout_p=0.1),
        make_case("used-bias-broadcast", **short, bias="1h1k", bias_dtype="float32"),
        make_case("used-float32", **batch, dtype="float32", causal=True, deterministic=True),
        make_case("used-deterministic", **batch, causal=True, deterministic=True, head_dim=128),
        make_case("used-decode", batch=3, seqlen_q=1, seqlen_k=5003, seqused_k=(5003, 0, 77), causal=True, num_heads=8,
                  num_heads_kv=2, head_dim=128),
        make_case("used-long", batch=2, seqlen_q=1100, seqlen_k=1300, seqused_k=(1200, 65), causal=True, head_dim=128,
                  dtype="bfloat16"),
    ]  # fmt: skip


def _varlen_cases() -> list[Case]:
    lengths = ((113, 203), (1, 239), (64, 64), (0, 50), (50, 0), (127, 31))
    used = (200, 7, 64, 0, 0, 30)
    cases = []
    for causal in (False, True, "top_left"):
        cases += [
            make_case(f"varlen-{causal}", seqlens=lengths, causal=causal, dlse=True, tail=(5, 9)),
            make_case(
                f"varlen-seqused-{causal}", seqlens=lengths, seqused_k=used, causal=causal, dtype="bfloat16", dlse=True
            ),
        ]
    cases += [
        make_case("varlen-window", seqlens=lengths, window_size=(40, 10), seqused_k=used, num_heads=4, num_heads_kv=2),
        make_case("varlen-dropout", seqlens=lengths, dropout_p=0.25, offset=3, head_dim=40, num_heads=3),
        make_case("varlen-everything", seqlens=lengths, seqused_k=used, dropout_p=0.25, softcap=6.0, causal=True,
                  dlse=True, window_size=(70, 0), num_heads=4, num_heads_kv=2, head_dim=32, head_dim_v=80, tail=(3, 0)),
        make_case("varlen-float32", seqlens=lengths, dtype="float32", causal=True, deterministic=True),
        make_case("varlen-many", seqlens=tuple((1 + n % 7, 1 + n % 11) for n in range(64)), head_dim=16, causal=True),
        # What is outside of every sequence must be zero where no sequence has a query, or a key, either.
        # Few key tiles: the loop over queries is split, with tokens of no sequence and unused keys.
        make_case("varlen-split", seqlens=((1800, 77), (900, 5), (40, 0)), seqused_k=(70, 5, 0), num_heads=4,
                  num_heads_kv=2, tail=(5, 9), lead=(3, 40), dtype="bfloat16"),
        make_case("varlen-split-one-key", seqlens=((2048, 1),), num_heads=4, num_heads_kv=1, head_dim=224,
                  dtype="float32"),
        make_case("varlen-no-keys", seqlens=((47, 0), (3, 0)), tail=(3, 11), lead=(5, 27), dlse=True),
        make_case("varlen-no-queries", seqlens=((0, 40), (0, 3)), tail=(9, 5), lead=(4, 66), causal=True),
        make_case("varlen-nothing", seqlens=((0, 0),), tail=(9, 5), lead=(4, 66), deterministic=True),
        # Queries and keys beyond a sequence are NaN, and so is the softcap's derivative there.
        *(
            make_case(f"varlen-softcap-{d}", seqlens=lengths, seqused_k=used, causal=True, softcap=5.0, head_dim=d,
                      dtype="bfloat16", tail=(7, 95))
            for d in (64, 128, 192)
        ),
        make_case("varlen-softcap-deterministic", seqlens=lengths, softcap=5.0, deterministic=True, head_dim=40,
                  tail=(4, 9)),
    ]  # fmt: skip
    return cases


def random_case(seed: int, index: int, max_flops: float = 20e6) -> Case:
    """Case number ``index`` of the sweep ``seed``, drawn from the product of all features; replays exactly."""
    rng = np.random.default_rng([seed, index])

    def choose(*options: Any, weights: tuple[float, ...] | None = None) -> Any:
        p = None if weights is None else np.array(weights) / sum(weights)
        return options[int(rng.choice(len(options), p=p))]

    def length() -> int:
        edge = int(choose(16, 32, 64, 128, 256)) + int(rng.integers(-1, 2))
        return edge if rng.random() < 0.4 else int(rng.integers(1, 300))

    fields: dict[str, Any] = {"dtype": choose(*_DTYPES)}
    fields["head_dim"] = choose(*HEAD_DIMS, int(rng.integers(1, 160)))
    if rng.random() < 0.3:
        fields["head_dim_v"] = choose(*HEAD_DIMS, int(rng.integers(1, 160)))
    heads_kv, group = int(rng.integers(1, 4)), int(choose(1, 1, 2, 3, 4))
    fields |= {"num_heads": heads_kv * group, "num_heads_kv": heads_kv}
    fields["causal"] = choose(False, True, "top_left")
    if rng.random() < 0.3:
        fields["window_size"] = tuple(choose(None, 0, int(rng.integers(0, 200))) for _ in range(2))
    if rng.random() < 0.25:
        fields["seqlens"] = tuple(
            (length() if rng.random() < 0.9 else 0, length() if rng.random() < 0.9 else 0)
            for _ in range(int(rng.integers(1, 5)))
        )
        fields["tail"] = choose((0, 0), (3, 0), (2, 7))
        if rng.random() < 0.5:
            fields["seqused_k"] = tuple(int(rng.integers(0, n + 1)) for _, n in fields["seqlens"])
    else:
        fields |= {"batch": int(rng.integers(1, 4)), "seqlen_q": length(), "seqlen_k": length()}
        if rng.random() < 0.4:
            fields["bias"] = choose(*BIAS_SHAPES)
            fields["bias_dtype"] = choose("same", "float32")
        if rng.random() < 0.3:
            fields["mask"] = choose(*BIAS_SHAPES)
            fields["mask_empty"] = bool(rng.random() < 0.3)
    if rng.random() < 0.25:
        fields["softcap"] = float(choose(1.0, 5.0, 30.0))
    if rng.random() < 0.3:
        fields |= {"dropout_p": float(choose(0.1, 0.5, 0.9)), "seed": int(rng.integers(0, 2**63))}
        fields["offset"] = int(rng.integers(0, 2**40))
    if rng.random() < 0.2:
        fields["softmax_scale"] = float(choose(0.05, 0.3, -0.1, 1.0))
    fields["layout"] = choose("contiguous", "random", *LAYOUTS[1:-1], weights=(4, 3, 1, 1, 1, 1, 1, 1))
    fields |= {"dlse": bool(rng.random() < 0.3), "deterministic": bool(rng.random() < 0.3)}
    if rng.random() < 0.2:
        fields["sink"] = choose("float32", "same")

    case = make_case(f"random-{seed}-{index}", **fields)
    while case.flops > max_flops and (case.num_heads > case.num_heads_kv or case.num_heads_kv > 1 or case.batch > 1):
        if case.num_heads_kv > 1:
            group = case.num_heads // case.num_heads_kv
            case = dataclasses.replace(case, num_heads_kv=1, num_heads=group)
        elif case.batch > 1 and not case.varlen:
            case = dataclasses.replace(case, batch=1)
        elif case.batch > 1:
            keep: dict[str, Any] = {
                "seqlens": case.seqlens[:-1],
                "seqused_k": case.seqused_k[:-1],
                "batch": case.batch - 1,
            }
            keep |= {f"seqlen_{name}": max(pair[n] for pair in case.seqlens[:-1]) for n, name in enumerate("qk")}
            case = dataclasses.replace(case, **keep)
        else:
            case = dataclasses.replace(case, num_heads=case.num_heads_kv)
    return case


def random_cases(seed: int, count: int, max_flops: float = 20e6) -> list[Case]:
    """The first ``count`` cases of the sweep ``seed``; ``max_flops`` bounds all but the largest single-head ones."""
    return [random_case(seed, index, max_flops) for index in range(count)]
