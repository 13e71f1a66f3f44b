"""The float64 reference of the fuzz campaign in torch, on the GPU or the CPU, and the verdict on one problem.

`attention_dense` is the twin of `cases.attention_dense`, over all sequences and heads at once: packed sequences are
padded to the longest. It needs about 12 tensors of ``batch * heads * max_seqlen_q * max_seqlen_k`` float64 numbers, and
as many of the padded operands; the generator bounds both. Nothing here waits for the GPU but `Verdict.lines`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cases
import fuzz_problems
import numpy as np
import torch
from cases import Case
from fuzz_problems import Problem

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.front import philox
from nvrtc_attn.front.call import CallOptions, describe
from nvrtc_attn.front.tensors import view

Tensor = torch.Tensor
GUARD = 64
"""Elements behind each result that must stay NaN."""


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def philox_words(seed: int, start: int, count: int, device: Any) -> Tensor:
    """Outputs number ``start`` to ``start + count - 1`` of the stream ``seed``: `philox.words` as int64."""
    low = 0xFFFFFFFF
    # Two's complement arithmetic wraps as the unsigned one does; a shift to the right needs its upper bits masked.
    first = (start >> 2) & 0x3FFFFFFFFFFFFFFF
    blocks = (count + (start & 3) + 3) >> 2
    counter = (torch.arange(blocks, dtype=torch.int64, device=device) + first) & 0x3FFFFFFFFFFFFFFF
    c0, c1 = counter & low, counter >> 32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & low) ^ c1 ^ k0, product1 & low
        c2, c3 = ((product0 >> 32) & low) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), 1).reshape(-1)
    return words[start & 3 :][:count]


def keep_mask(case: Case, device: Any) -> Tensor:
    """`philox.keep_mask` of the padded problem, ``[batch, heads, seqlen_q, seqlen_k]``."""
    shape = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    words = philox_words(case.seed, case.offset, int(np.prod(shape)), device)
    return (words > philox.threshold(case.dropout_p)).reshape(shape)


# ---------------------------------------------------------------------------------------------------------------------
# The math


def _upload(x: Any, device: Any) -> Tensor:
    """A NumPy array on ``device``, without waiting for it: pageable memory is read before this returns."""
    return torch.from_numpy(x).to(device, non_blocking=True)


class Geometry:
    """Which tokens belong to which sequence, as index tensors; dense problems have none."""

    def __init__(self, case: Case, device: Any) -> None:
        self.case = case
        self.device = device
        self.rows = self.keys = None
        lengths_q = np.full(case.batch, case.seqlen_q)
        lengths_k = np.full(case.batch, case.seqlen_k)
        if case.varlen:
            pairs = np.array(case.seqlens, np.int64)
            starts = np.array(case.lead) + np.concatenate([np.zeros((1, 2), np.int64), pairs.cumsum(0)])[:-1]
            lengths_q = pairs[:, 0]
            lengths_k = np.array(case.seqused_k) if case.seqused_k else pairs[:, 1]
            shape = cases.shapes(case)
            # Behind the last token there is a row of zeros, which padding reads and whose result is thrown away.
            self.rows = self._index(starts[:, 0], lengths_q, case.seqlen_q, shape["q"][1])
            self.keys = self._index(starts[:, 1], lengths_k, case.seqlen_k, shape["k"][1])
        elif case.seqused_k:
            lengths_k = np.array(case.seqused_k)
        self.lengths_q, self.lengths_k = lengths_q, lengths_k

    def _index(self, starts: Any, lengths: Any, longest: int, spare: int) -> Tensor:
        steps = np.arange(longest)
        index = np.where(steps < lengths[:, None], starts[:, None] + steps, spare)
        return _upload(index.reshape(-1), self.device)

    def pad(self, x: Tensor, index: Tensor | None, longest: int) -> Tensor:
        """``[1, tokens, ...]`` as ``[batch, longest, ...]``; a dense tensor is that."""
        if index is None:
            return x
        spare = torch.zeros((1, *x.shape[2:]), dtype=x.dtype, device=x.device)
        return torch.cat((x[0], spare)).index_select(0, index).reshape(self.case.batch, longest, *x.shape[2:])

    def unpad(self, x: Tensor, index: Tensor | None, tokens: int, fill: float = 0.0) -> Tensor:
        if index is None:
            return x
        out = torch.full((tokens + 1, *x.shape[2:]), fill, dtype=x.dtype, device=x.device)
        out.index_copy_(0, index, x.reshape(-1, *x.shape[2:]))
        return out[:tokens].unsqueeze(0)

    def visible(self) -> Tensor | None:
        """``[batch or 1, 1, seqlen_q, seqlen_k]``: what lengths, causal and window keep; None for everything."""
        case, device = self.case, self.device
        left, right = (None if w == -1 else w for w in case.window_size)
        if case.causal:
            right = 0 if right is None else min(right, 0)
        ragged = case.varlen or case.seqused_k
        if left is None and right is None and not ragged:
            return None
        i = torch.arange(case.seqlen_q, device=device)[:, None]
        j = torch.arange(case.seqlen_k, device=device)
        m, n, off = case.seqlen_q, case.seqlen_k, case.seqlen_k - case.seqlen_q
        keep = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        if ragged:
            sizes = _upload(np.stack((self.lengths_q, self.lengths_k)), device)[:, :, None, None, None]
            m, n = sizes[0], sizes[1]
            off = n - m
            keep = (i < m) & (j < n)
        if case.causal == "top_left":
            off = 0
        if left is not None:
            keep = keep & (j >= i + off - left)
        if right is not None:
            keep = keep & (j <= i + off + right)
        return keep


def attention_dense(
    case: Case,
    x: dict[str, Tensor],
    geometry: Geometry,
    precision: str = "float64",
    keep: Tensor | None = None,
    dither: torch.Generator | None = None,
    tile: int | None = None,
) -> dict[str, Tensor]:
    """out, lse and all gradients of the inputs ``x``; ``precision`` means what it does in `cases.attention_dense`.

    So does ``dither``: another sample of the rounding errors that the same math in this precision has. With ``tile``
    the gradients of q, k and v are sums over tiles of so many keys, or rows of one head after another of a group,
    each added in float32 to what the tiles before it gave.
    """
    exact = precision == "float64"
    work = torch.float64 if exact else torch.float32
    device = x["q"].device
    dtype = getattr(torch, precision)

    def rnd(y: Tensor) -> Tensor:
        if dither is not None:
            shift = torch.empty(y.shape, dtype=torch.float64, device=device).uniform_(1, 2, generator=dither)
            return ((y.to(torch.float64) * shift).to(dtype).to(torch.float64) / shift).to(work)
        return y if dtype == work else y.to(dtype).to(work)

    def product(y: Tensor, z: Tensor) -> Tensor:
        if dither is None:
            return y @ z
        first = torch.rand(y.shape[-1], generator=dither, device=device) < 0.5
        return (y * first) @ z + (y * ~first) @ z

    shape = cases.shapes(case)
    batch, heads, heads_kv = case.batch, case.num_heads, case.num_heads_kv
    m, n, d, dv = case.seqlen_q, case.seqlen_k, case.head_dim, case.head_dim_v
    names = [name for name in ("out", "dq", "dk", "dv", "dbias", "dsink") if name in shape]
    sink = x["sink"].to(work) if "sink" in x else torch.full((heads,), -torch.inf, dtype=work, device=device)
    if 0 in (batch, heads, m, n):
        empty = {name: torch.zeros(shape[name], dtype=work, device=device) for name in names}
        empty["lse"] = torch.full(shape["lse"], -torch.inf, dtype=work, device=device)
        if "sink" in x and 0 not in (batch, heads, m):  # no keys: the sink alone
            rows_first = geometry.unpad(sink.expand(batch, m, heads), geometry.rows, shape["lse"][2], -torch.inf)
            empty["lse"] = rows_first.transpose(1, 2)
            if "dlse" in x:
                of_rows = geometry.pad(x["dlse"].transpose(1, 2), geometry.rows, m).to(work)
                empty["dsink"] = torch.where(sink == -torch.inf, 0.0, of_rows.sum((0, 1)))
        return empty
    group = heads // heads_kv

    def by_head(name: str, index: Tensor | None, longest: int) -> Tensor:
        return geometry.pad(x[name].to(work), index, longest).transpose(1, 2).contiguous()

    q, dout = (by_head(name, geometry.rows, m) for name in ("q", "dout"))
    k, v = (by_head(name, geometry.keys, n) for name in ("k", "v"))
    grouped, scores = (batch, heads_kv, group * m), (batch, heads, m, n)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale

    def times(weights: Tensor, operand: Tensor) -> Tensor:
        """Rows of all query heads of a group at once."""
        return product(weights.reshape(*grouped, -1), operand).reshape(batch, heads, m, -1)

    s = rnd(rnd(times(q, k.transpose(2, 3))) * scale)
    slope = None
    if case.softcap:
        t = torch.tanh(s / case.softcap)
        s, slope = rnd(t * case.softcap), 1 - t * t
    if "bias" in x:
        s = rnd(s + x["bias"].to(work))
    visible = geometry.visible()
    if "mask" in x:
        flags = x["mask"] != 0
        visible = flags if visible is None else visible & flags
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    sink = sink[:, None, None]
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    e = torch.exp(s - top)
    e_sink = torch.exp(sink - top)
    total = e.sum(-1, keepdim=True) + e_sink
    seen = total > 0
    p = rnd(e / torch.where(seen, total, 1.0))
    del s, e
    p_dropped, z = p, None
    if keep is not None:
        z = keep.to(work) * philox.multiplier(case.dropout_p)
        p_dropped = rnd(p * z)
    out = rnd(times(p_dropped, v))
    lse = torch.where(seen, torch.log(total) + top, -torch.inf)[..., 0]

    dp = rnd(times(dout, v.transpose(2, 3)))
    if z is not None:
        dp = rnd(dp * z)
    inner = (dout * out).sum(-1, keepdim=True)
    if "dlse" in x:
        dlse = geometry.pad(x["dlse"].transpose(1, 2), geometry.rows, m).transpose(1, 2)
        inner = inner - dlse.to(work)[..., None]
    ds = rnd(p * (dp - inner))
    del dp, p
    results = {}
    if "dsink" in shape:
        share = rnd(e_sink / torch.where(seen, total, 1.0))
        results["dsink"] = -rnd(share * inner).sum((0, 2, 3))
        results["dsink"] = results["dsink"] if case.sink == "float32" else rnd(results["dsink"])
    if "dbias" in shape:
        axes = [axis for axis, size in enumerate(shape["dbias"]) if size == 1 and scores[axis] > 1]
        summed = ds.sum(axes, keepdim=True) if axes else ds
        results["dbias"] = summed if case.bias_dtype == "float32" else rnd(summed)
    if slope is not None:
        ds = rnd(ds * slope)

    def of_keys(weights: Tensor, operand: Tensor) -> Tensor:
        if tile is not None:
            tiles = [(head, slice(at, at + tile)) for head in range(group) for at in range(0, m, tile)]
            x, y = (z.reshape(batch, heads_kv, group, m, -1) for z in (weights, operand))
            return _in_order(x[:, :, head, rows].transpose(2, 3) @ y[:, :, head, rows] for head, rows in tiles)
        if exact:
            return weights.reshape(*grouped, n).transpose(2, 3) @ operand.reshape(*grouped, -1)
        per_head = rnd(product(weights.transpose(2, 3), operand))
        return rnd(per_head.reshape(batch, heads_kv, group, n, -1).sum(2)) if group > 1 else per_head

    def of_rows(weights: Tensor, operand: Tensor) -> Tensor:
        if tile is None:
            return times(weights, operand)
        tiles = [slice(at, at + tile) for at in range(0, n, tile)]
        return _in_order(times(weights[..., keys], operand[:, :, keys]) for keys in tiles)

    results |= {"out": out, "dq": rnd(rnd(of_rows(ds, k)) * scale)}
    results |= {"dk": of_keys(ds, q * scale), "dv": of_keys(p_dropped, dout)}
    for name, index in (("out", geometry.rows), ("dq", geometry.rows), ("dk", geometry.keys), ("dv", geometry.keys)):
        results[name] = geometry.unpad(results[name].transpose(1, 2), index, shape[name][1])
    rows_first = geometry.unpad(lse.transpose(1, 2), geometry.rows, shape["lse"][2], -torch.inf)
    results["lse"] = rows_first.transpose(1, 2)
    assert all(results[name].shape == shape[name] for name in results), (d, dv)
    return results


def _in_order(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts).clone()
    for part in parts:
        total += part
    return total


# ---------------------------------------------------------------------------------------------------------------------
# One problem


def draw_arrays(p: Problem, device: Any) -> dict[str, Tensor]:
    """`cases.make_arrays` of the problem on ``device``, from its generator; float32, bool or uint8, int32."""
    case, shape = p.case, cases.shapes(p.case)
    generator = torch.Generator(device)
    generator.manual_seed(int(np.random.default_rng([p.seed, 4, p.index]).integers(2**62)))
    names = ["q", "k", "v", "dout"] + ["dlse"] * case.dlse + ["bias"] * (case.bias is not None)
    sizes = [int(np.prod(shape[name])) for name in names]
    flat = torch.randn(sum(sizes), generator=generator, device=device)
    arrays = {name: part.reshape(shape[name]) for name, part in zip(names, flat.split(sizes), strict=True)}
    if case.sink is not None:
        arrays["sink"] = cases.sink_values(case, torch.randn(shape["sink"], generator=generator, device=device))
    if p.bias_hidden:
        hidden = torch.rand(shape["bias"], generator=generator, device=device) < 0.2
        arrays["bias"] = arrays["bias"].masked_fill(hidden, -torch.inf)
    if case.mask is not None:
        mask = cases.make_mask(case.mask_kind, torch.rand(shape["mask"], generator=generator, device=device))
        if case.mask_empty:
            mask[:, :, ::5] = False
        if case.mask_dtype == "uint8":
            words = torch.randint(1, 256, shape["mask"], dtype=torch.uint8, generator=generator, device=device)
            mask = mask * words
        arrays["mask"] = mask
    if p.outside_nan and case.varlen:
        for tokens, touched in zip(fuzz_problems.outside_tokens(case), (("q", "dout"), ("k", "v")), strict=True):
            index = _upload(np.array(tokens, np.int64), device)
            for name in touched:
                arrays[name].index_fill_(1, index, torch.nan)
            if "dlse" in arrays and touched[0] == "q":
                arrays["dlse"].index_fill_(2, index, torch.nan)
    for name, part in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
        if case.varlen:
            starts = np.cumsum([case.lead[part], *(pair[part] for pair in case.seqlens)]).astype(np.int32)
            arrays[name] = _upload(starts, device)
    if case.seqused_k:
        arrays["seqused_k"] = _upload(np.array(case.seqused_k, np.int32), device)
    return arrays


class Blanks:
    """Result tensors in the problem's layouts, NaN everywhere, also around them."""

    def __init__(self, p: Problem, device: Any) -> None:
        self.problem, self.device = p, device
        self.storages: dict[str, tuple[Tensor, int]] = {}

    def __call__(self, name: str) -> Tensor:
        shape = cases.shapes(self.problem.case)[name]
        spot = fuzz_problems.where(self.problem, name, shape)
        dtype = getattr(torch, fuzz_problems.operand_dtype(self.problem, name))
        storage = torch.full((spot.size + GUARD,), torch.nan, dtype=dtype, device=self.device)
        self.storages[name] = (storage, storage.numel() - int(np.prod(shape)))
        return torch.as_strided(storage, shape, spot.strides, spot.offset)

    def touched(self) -> Tensor:
        """How many elements around the results are no longer NaN; results that are NaN count as less than none."""
        return torch.stack([around - torch.isnan(storage).sum() for storage, around in self.storages.values()]).amax()


def place(p: Problem, name: str, x: Tensor) -> Tensor:
    """``x`` rounded to the operand's type, in its layout; floats around it are NaN."""
    spot = fuzz_problems.where(p, name, tuple(x.shape))
    dtype = getattr(torch, fuzz_problems.operand_dtype(p, name))
    fill = torch.nan if dtype.is_floating_point else 1
    storage = torch.full((spot.size + GUARD,), fill, dtype=dtype, device=x.device)
    tensor = torch.as_strided(storage, x.shape, spot.strides, spot.offset)
    if x.shape[0] > 1 and spot.strides[0] == 0:
        tensor[:1].copy_(x[:1])
    else:
        tensor.copy_(x)
    return tensor


_workspaces: dict[Any, Tensor] = {}


def _workspace(size: int, device: Any) -> Tensor | None:
    """``size`` bytes that are NaN as float32: one buffer for all problems, so that none is allocated for each."""
    if not size:
        return None
    buffer = _workspaces.get(device)
    if buffer is None or buffer.numel() < size:
        buffer = _workspaces[device] = torch.empty(max(size, 1 << 24), dtype=torch.uint8, device=device)
    return buffer[:size].fill_(255)


class Run:
    """One problem on one device: ``forward`` and ``backward`` write NaN-poisoned results."""

    def __init__(self, p: Problem, device: Any) -> None:
        self.problem, self.device = p, torch.device(device)
        arrays = draw_arrays(p, self.device)
        self.lengths = {n: arrays.pop(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k") if n in arrays}
        self.inputs = {name: place(p, name, x) for name, x in arrays.items()}

    @property
    def _operands(self) -> dict[str, Tensor]:
        return {name: self.inputs[name] for name in ("bias", "mask", "sink") if name in self.inputs} | self.lengths

    def _call(self, **gradients: bool) -> Any:
        options = CallOptions(**cases.call_options(self.problem.case), return_lse=True, **gradients)
        q, k, v = (self.inputs[name] for name in "qkv")
        return describe(q, k, v, **self._operands, options=options, stream=None)

    def forward(self, blank: Blanks) -> dict[str, Tensor]:
        case, i = self.problem.case, self.inputs
        out, lse = blank("out"), blank("lse")
        workspace = None
        if self.device.type == "cuda":
            # The public query is for dense results: strided ones may take other kernels and other sizes.
            call = self._call()
            views = {n: view(x, n, stream=call.producer_stream) for n, x in (("out", out), ("lse", lse))}
            workspace = _workspace(api.plan_forward(call, views).workspace_bytes, self.device)
        nvrtc_attn.attention_forward(
            i["q"], i["k"], i["v"], out, lse=lse, workspace=workspace, rng=(case.seed, case.offset),
            **cases.call_options(case), **self._operands,
        )  # fmt: skip
        return {"out": out, "lse": lse}

    def backward(self, forward: dict[str, Tensor], blank: Blanks) -> dict[str, Tensor]:
        p, i = self.problem, self.inputs
        dsink = p.case.sink is not None
        names = ("dq", "dk", "dv", *(("dbias",) if p.want_dbias else ()), *(("dsink",) if dsink else ()))
        grads = {name: blank(name) for name in names}
        workspace = None
        if self.device.type == "cuda":
            call = self._call(dbias=p.want_dbias, dsink=dsink, deterministic=p.case.deterministic)
            tensors = {**forward, **grads, **{name: i[name] for name in ("dout", "dlse") if name in i}}
            views = {name: view(x, name, stream=call.producer_stream) for name, x in tensors.items()}
            workspace = _workspace(api.plan_backward(call, views).workspace_bytes, self.device)
        nvrtc_attn.attention_backward(
            i["dout"], i["q"], i["k"], i["v"], forward["out"], forward["lse"],
            grads["dq"], grads["dk"], grads["dv"], dbias=grads.get("dbias"), dsink=grads.get("dsink"),
            dlse=i.get("dlse"), workspace=workspace, deterministic=p.case.deterministic,
            rng=(p.case.seed, p.case.offset), **cases.call_options(p.case), **self._operands,
        )  # fmt: skip
        return grads


@dataclass
class Verdict:
    """What one problem gave, as numbers on the device that `lines` judges.

    The rule is `cases.error_bound`'s: at most twice the error of the same math in the input precision, and a rounding.
    That yardstick is one sample of rounding errors, and among 100,000 problems some have a result of few elements
    where it is small by chance. So a problem that breaks the rule is judged again, by the largest of
    `fuzz_problems.APPEALS` further samples of the same errors, and one of `judge`'s; what is wrong stays wrong.
    """

    problem: Problem
    names: list[str]
    numbers: Tensor
    """Error, yardstick and rounding for each name; then the allowances for dbias and for dsink, elements touched
    outside, and differences between two runs."""

    def lines(self, device: Any, *, appeal: bool = True) -> list[str]:
        """What is wrong; empty where nothing is."""
        found = self._judge()
        if found and appeal:
            found = judge(self.problem, device, appeal=True)._judge()
        return found

    def _judge(self) -> list[str]:
        values = self.numbers.tolist()
        *allowances, touched, differing = values[-4:]
        allowed = dict(zip(("dbias", "dsink"), allowances, strict=True))
        lines = []
        for at, name in enumerate(self.names):
            error, low, rounding = values[at], values[len(self.names) + at], values[2 * len(self.names) + at]
            bound = 2 * low + max(rounding, 1e-5) + allowed.get(name, 0.0)
            if not error <= bound:
                lines.append(f"{name}: max error {error:.3e}, allowed {bound:.3e}")
        if touched > 0:
            lines.append(f"{int(touched)} elements around the results were written")
        if differing > 0:
            lines.append("two runs differ")
        return lines


def judge(p: Problem, device: Any, *, appeal: bool = False) -> Verdict:
    """Run ``p`` and compare it with the reference.

    With ``appeal`` float32 gradients also have the sample that adds tile after tile in order, as a fused kernel must,
    torch's own too; a float32 matmul may add a few partial sums of long rows instead. dv of one key, a plain sum of
    dout over 1200 to 8200 rows, was at 1.0 to 2.3 times what the matmul allows and, by an estimate on other numbers,
    at 0.7 times (the median of 24) what the order allows. The factor of 2 stays.
    """
    os.environ["NVRTC_ATTN_BACKEND"] = p.backend
    case = p.case
    run = Run(p, device)
    blank = Blanks(p, run.device)
    found = run.forward(blank)
    found |= run.backward(found, blank)
    touched = blank.touched()
    differing = _repeat(run, found) if p.repeat else torch.zeros_like(touched)
    exact, samples = references(run, appeal=appeal)
    names = list(found)
    truth = _flat(exact, names)
    error = _difference(_flat(found, names), truth)
    low = torch.zeros_like(truth)
    for sample in samples:  # one at a time, for their memory
        low = torch.maximum(low, _difference(_flat(sample, names), truth).nan_to_num(0.0, posinf=0.0))
        del sample
    # Ours computes lse in float32 throughout: its rounding is that of nothing.
    rounding = torch.zeros_like(truth)
    if case.dtype != "float32":
        rounding = _difference(truth.to(getattr(torch, case.dtype)).double(), truth).nan_to_num(0.0, posinf=0.0)
    sizes = [found[name].numel() for name in names]
    rows = [error, low, rounding]
    numbers = [_amax(part) for row in rows for part in row.split(sizes)]
    numbers[2 * len(names) + names.index("lse")] = torch.zeros((), dtype=torch.float64, device=run.device)
    numbers += [_summed_delta_error(case, exact, run), _summed_rows_error(case, exact, run)]
    numbers += [touched.double(), differing.double()]
    return Verdict(p, names, torch.stack(numbers))


def references(run: Run, *, appeal: bool = False) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
    """The exact results, and those of the same math in the input precision: one set, or with ``appeal`` several."""
    case = run.problem.case
    geometry = Geometry(case, run.device)
    keep = keep_mask(case, run.device) if case.dropout_p > 0 else None
    exact = attention_dense(case, run.inputs, geometry, "float64", keep)

    def samples() -> Iterator[dict[str, Tensor]]:
        yield attention_dense(case, run.inputs, geometry, case.dtype, keep)
        if not appeal:
            return
        dither = torch.Generator(run.device)
        dither.manual_seed(run.problem.index)
        for _ in range(fuzz_problems.APPEALS):
            yield attention_dense(case, run.inputs, geometry, case.dtype, keep, dither)
        if case.dtype == "float32":
            yield attention_dense(case, run.inputs, geometry, case.dtype, keep, tile=fuzz_problems.TILE)

    return exact, samples()


def _repeat(run: Run, first: dict[str, Tensor]) -> Tensor:
    """Whether a second run gives other bits: of the forward pass, and of a backward pass that is deterministic."""
    blank = Blanks(run.problem, run.device)
    again = run.forward(blank)
    if run.problem.case.deterministic:
        again |= run.backward(first, blank)
    return torch.stack([(again[name] != first[name]).sum() for name in again]).sum()


def _flat(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1).double() for name in names])


def _difference(x: Tensor, truth: Tensor) -> Tensor:
    """|x - truth|, 0 for equal infinities, infinite or NaN where only one is."""
    return torch.where(x == truth, 0.0, (x - truth).abs())


def _amax(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)


def _summed_delta_error(case: Case, exact: dict[str, Tensor], run: Run) -> Tensor:
    """`cases.summed_delta_error` in torch."""
    if case.bias is None or case.bias[3] != "1" or 0 in cases.shapes(case)["out"]:
        return torch.zeros((), dtype=torch.float64, device=run.device)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}[case.dtype]
    variance = ((run.inputs["dout"].double() * exact["out"]) ** 2).sum(-1) * (unit**2 / 3)
    return 4 * torch.sqrt(variance.mean() * (variance.numel() / max(1, exact["dbias"].numel())))


def _summed_rows_error(case: Case, exact: dict[str, Tensor], run: Run) -> Tensor:
    """`cases.summed_rows_error` in torch."""
    if case.sink is None or 0 in cases.shapes(case)["out"]:
        return torch.zeros((), dtype=torch.float64, device=run.device)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}[case.dtype]
    variance = ((run.inputs["dout"].double() * exact["out"]) ** 2).sum(-1).transpose(1, 2) * (unit**2 / 3)
    lse = torch.where(torch.isfinite(exact["lse"]), exact["lse"], torch.inf)
    share = torch.exp(run.inputs["sink"].double()[:, None] - lse)
    return 4 * torch.sqrt((share**2 * variance.nan_to_num(0.0)).sum((0, 2)).amax())
