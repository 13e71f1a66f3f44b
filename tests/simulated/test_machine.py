"""The machine that executes PTX: instructions against NumPy, and what a kernel must not do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from simulator import ptx
from simulator.gpu import Kernel, SimulationError

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
{module}
.visible .entry attention_entry(
    .param .align 64 .b8 attention_entry_param_0[64]
)
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<80>;
    .reg .f32 %f<80>;
    .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [attention_entry_param_0];
    ld.param.u64 %rd2, [attention_entry_param_0+8];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r2, [%rd4];
    mov.u32 %r70, -1;
{body}
    ret;
}}
"""
"""%r1: thread; %rd1, %rd2: input, output; %rd4, %rd5: words of the thread; %r2: its input; %r70: all lanes."""
SHARED = ".shared .align 128 .b8 memory[4096];\n"


def run(
    machine: Any, body: str, given: Any, threads: int = 32, module: str = "", seed: int = 1, words: int | None = None
) -> Any:
    """The words that a block writes; ``given`` is what it reads."""
    text = HEAD.format(body=body, module=module)
    kernel = Kernel(machine, text)
    source = np.ascontiguousarray(given)
    out = np.full(words or threads, 0xDEAD, np.uint32)
    params = (ctypes.c_uint64 * 8)(source.ctypes.data, out.ctypes.data)
    kernel.launch(1, threads, 0, 4, ctypes.addressof(params), seed)
    return out


RNG = np.random.default_rng(0)
LANES = np.arange(32, dtype=np.uint32)
WORDS = RNG.integers(0, 2**32, 32, np.uint32)
FLOATS = RNG.standard_normal(32).astype(np.float32)
STORE = "\n	st.global.u32 [%rd5], %r3;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r3, %r2, 7;", WORDS + np.uint32(7)),
        ("mul.lo.s32 %r3, %r2, %r2;", WORDS * WORDS),
        ("mul.hi.u32 %r3, %r2, 1000000;", ((WORDS.astype(np.uint64) * 1000000) >> 32).astype(np.uint32)),
        ("shr.s32 %r3, %r2, 5;", (WORDS.view(np.int32) >> 5).view(np.uint32)),
        ("shl.b32 %r3, %r2, 33;", np.zeros(32, np.uint32)),
        ("mad.lo.s32 %r3, %r2, 3, %r1;", WORDS * np.uint32(3) + LANES),
        ("div.s32 %r3, %r2, 12345;", (np.trunc(WORDS.view(np.int32) / 12345)).astype(np.int32).view(np.uint32)),
        ("popc.b32 %r3, %r2;", np.array([bin(int(x)).count("1") for x in WORDS], np.uint32)),
        ("bfe.u32 %r3, %r2, 5, 9;", WORDS >> np.uint32(5) & np.uint32(511)),
        ("bfi.b32 %r3, %r1, %r2, 8, 5;", (WORDS & ~np.uint32(31 << 8)) | LANES << np.uint32(8)),
        ("prmt.b32 %r3, %r2, 0, 0x0123;", WORDS.byteswap()),
        ("lop3.b32 %r3, %r2, %r1, -1, 0x6a;", ~(WORDS & np.arange(32, dtype=np.uint32))),
        ("setp.lt.s32 %p1, %r2, 0; selp.b32 %r3, 1, 2, %p1;", np.where(WORDS >> np.uint32(31), 1, 2)),
        (
            "setp.lt.s32 %p1, %r2, 0; xor.pred %p2, %p1, -1; and.pred %p2, %p2, -1; selp.b32 %r3, 1, 2, %p2;",
            np.where(WORDS >> np.uint32(31), 2, 1),
        ),
        ("shfl.sync.bfly.b32 %r3, %r2, 5, 31, %r70;", WORDS[np.arange(32) ^ 5]),
        ("shfl.sync.up.b32 %r3, %r2, 3, 0, %r70;", np.concatenate([WORDS[:3], WORDS[:-3]])),
        ("redux.sync.max.u32 %r3, %r2, %r70;", np.full(32, WORDS.max())),
        ("cvt.u64.u32 %rd6, %r2; shl.b64 %rd6, %rd6, 8; cvt.u32.u64 %r3, %rd6;", WORDS << np.uint32(8)),
        (
            "cvt.u64.u32 %rd6, %r2; cvt.s64.s32 %rd6, %rd6; shr.u64 %rd6, %rd6, 8; cvt.u32.u64 %r3, %rd6;",
            (WORDS.view(np.int32).astype(np.int64) >> 8).astype(np.uint32),
        ),
        (
            "cvt.u64.u32 %rd6, %r2; bfi.b64 %rd6, %rd6, %rd6, 40, 9; shr.u64 %rd6, %rd6, 40; cvt.u32.u64 %r3, %rd6;",
            WORDS & np.uint32(511),
        ),
        ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};", WORDS << np.uint32(16) | WORDS >> np.uint32(16)),
    ],
)  # fmt: skip
def test_integers(body: str, expected: Any, machine: Any) -> None:
    np.testing.assert_array_equal(run(machine, body + STORE, WORDS), expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("fma.rn.f32 %f2, %f1, %f1, %f1;", (FLOATS.astype(np.float64) ** 2 + FLOATS).astype(np.float32)),
        ("ex2.approx.ftz.f32 %f2, %f1;", np.exp2(FLOATS)),
        ("max.f32 %f2, %f1, 0f00000000;", np.maximum(FLOATS, 0)),
        ("cvt.rzi.s32.f32 %r5, %f1; cvt.rn.f32.s32 %f2, %r5;", np.trunc(FLOATS)),
        ("cvt.rn.bf16.f32 %rs1, %f1; cvt.f32.bf16 %f2, %rs1;", None),
        ("cvt.rn.f16.f32 %rs1, %f1; cvt.f32.f16 %f2, %rs1;", FLOATS.astype(np.float16).astype(np.float32)),
    ],
)
def test_floats(body: str, expected: Any, machine: Any) -> None:
    if expected is None:
        bits = FLOATS.view(np.uint32)
        expected = ((bits + 0x7FFF + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    found = run(machine, f"mov.b32 %f1, %r2; {body} mov.b32 %r3, %f2;" + STORE, FLOATS).view(np.float32)
    np.testing.assert_allclose(found, expected, rtol=2e-7)


def test_matrices(machine: Any) -> None:
    """ldmatrix, its transposed form and a product of bfloat16 against NumPy."""
    body = """
    mov.u64 %rd7, memory;
    cvt.u32.u64 %r10, %rd7;
    mul.lo.s32 %r11, %r1, 16;
    add.s32 %r12, %r10, %r11;
    mul.wide.u32 %rd8, %r1, 16;
    add.s64 %rd9, %rd1, %rd8;
    ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%rd9];
    st.shared.v4.u32 [%r12], {%r20, %r21, %r22, %r23};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r12];
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r34, %r35}, [%r12];
    mov.f32 %f10, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r30, %r31, %r32, %r33},
      {%r34, %r35}, {%f10, %f10, %f10, %f10};
    mul.wide.u32 %rd10, %r1, 16;
    add.s64 %rd11, %rd2, %rd10;
    st.global.v4.f32 [%rd11], {%f1, %f2, %f3, %f4};
"""
    rows = RNG.integers(-8, 8, (32, 8)).astype(np.float32)
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    found = run(machine, body, bits, module=SHARED, words=128).view(np.float32).reshape(32, 4)
    tiles = rows.reshape(4, 8, 8)
    a = np.block([[tiles[0], tiles[2]], [tiles[1], tiles[3]]])
    b = np.concatenate([tiles[0], tiles[1]])
    exact, lane = a @ b, np.arange(32)
    for n in range(4):
        np.testing.assert_array_equal(found[:, n], exact[lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2])


def test_lanes_part_and_meet_again(machine: Any) -> None:
    """Each lane goes round a loop as often as its number says, and all vote behind it."""
    body = """
    mov.u32 %r3, 0;
$L_loop:
    setp.ge.u32 %p1, %r3, %r1;
    @%p1 bra $L_end;
    add.s32 %r3, %r3, 1;
    bra.uni $L_loop;
$L_end:
    redux.sync.add.s32 %r4, %r3, %r70;
    add.s32 %r3, %r3, %r4;
"""
    np.testing.assert_array_equal(run(machine, body + STORE, WORDS), np.arange(32) + 496)


def test_lanes_shuffle_from_two_places(machine: Any) -> None:
    """The compiler makes two shuffles of one before a branch; PTX asks for the same members, not for the same place."""
    body = """
    mov.u32 %r8, 4;
    mov.u32 %r9, 31;
    and.b32 %r4, %r1, 3;
    setp.eq.s32 %p1, %r4, 0;
    @%p1 bra $L_first;
    mov.u32 %r5, %r2;
    shfl.sync.bfly.b32 %r6|%p2, %r5, %r8, %r9, %r70;
    add.s32 %r3, %r6, 1;
    bra.uni $L_end;
$L_first:
    shfl.sync.bfly.b32 %r7|%p3, %r2, %r8, %r9, %r70;
    mov.u32 %r3, %r7;
$L_end:
"""
    exchanged = WORDS[np.arange(32) ^ 4]
    expected = np.where(np.arange(32) % 4 == 0, exchanged, exchanged + np.uint32(1))
    np.testing.assert_array_equal(run(machine, body + STORE, WORDS), expected)
    with pytest.raises(SimulationError, match="never come"):
        run(machine, body.replace("bfly.b32 %r7", "up.b32 %r7") + STORE, WORDS)


EXCHANGE = """
    mov.u64 %rd7, memory;
    cvt.u32.u64 %r10, %rd7;
    shl.b32 %r11, %r1, 2;
    add.s32 %r12, %r10, %r11;
    st.shared.u32 [%r12], %r2;
    {barrier}
    xor.b32 %r13, %r11, 128;
    add.s32 %r14, %r10, %r13;
    ld.shared.u32 %r3, [%r14];
"""


def test_a_missing_barrier_shows(machine: Any) -> None:
    """Threads read what those of another warp write: right in every order with a barrier, wrong in some without."""
    given = RNG.integers(0, 2**32, 64, np.uint32)
    right = given[np.arange(64) ^ 32]

    def outcomes(barrier: str) -> set[bool]:
        body = EXCHANGE.format(barrier=barrier) + STORE
        return {bool((run(machine, body, given, 64, SHARED, seed) == right).all()) for seed in range(20)}

    assert outcomes("bar.sync 0;") == {True}
    assert False in outcomes("")


COPY = """
    mov.u64 %rd7, memory;
    cvt.u32.u64 %r10, %rd7;
    shl.b32 %r11, %r1, 2;
    add.s32 %r12, %r10, %r11;
    st.shared.u32 [%r12], 0;
    cp.async.ca.shared.global [%r12], [%rd4], 4;
    cp.async.commit_group;
    {wait}
    ld.shared.u32 %r3, [%r12];
"""


def test_a_missing_wait_shows(machine: Any) -> None:
    def outcomes(wait: str) -> set[bool]:
        body = COPY.format(wait=wait) + STORE
        return {bool((run(machine, body, WORDS, 32, SHARED, seed) == WORDS).all()) for seed in range(10)}

    assert outcomes("cp.async.wait_group 0;") == {True}
    assert outcomes("") == {False}


WAIT = """
    mov.u64 %rd7, memory;
    cvt.u32.u64 %r10, %rd7;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_ready;
    mbarrier.init.shared::cta.b64 [%r10], {arrivals};
$L_ready:
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 _, [%r10];
    {{
.reg .pred done;
RETRY:
mbarrier.try_wait.parity.shared::cta.b64 done, [%r10], 0;
@done bra DONE;
bra RETRY;
DONE:
}}
    mov.u32 %r3, 1;
"""


def test_mbarriers(machine: Any) -> None:
    """All arrive and go on; one arrival that never comes is a deadlock."""
    assert run(machine, WAIT.format(arrivals=64) + STORE, WORDS.repeat(2), 64, SHARED).tolist() == [1] * 64
    with pytest.raises(SimulationError, match="deadlock"):
        run(machine, WAIT.format(arrivals=65) + STORE, WORDS.repeat(2), 64, SHARED)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.u64 %rd7, memory; ld.shared.u32 %r3, [%rd7+4096];", "shared memory 4096 of 4096 bytes"),
        ("mov.u64 %rd7, memory; ld.shared.v2.u32 {%r3, %r4}, [%rd7+4];", "no multiple of its size"),
        ("mov.u64 %rd7, 0; ld.global.u32 %r3, [%rd7];", "global memory at 0"),
        ("setp.lt.s32 %p1, %r1, 9; @%p1 bra $L_a; shfl.sync.idx.b32 %r3, %r2, 31, 31, %r70; ret;\n$L_a: ret;", ""),
        ("mov.u32 %r3, 0; bar.sync 1, 64;", "deadlock"),
        ("bar.sync 1, 16;", "more threads at a barrier"),
        ("trap;", "trap: block 0, warp 0"),
        ("$L_a:\n bra.uni $L_a;", "no end after"),
    ],
)
def test_what_a_kernel_must_not_do(body: str, said: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.gpu.MOST_INSTRUCTIONS", 100_000)
    if not said:  # lanes that have ended are not waited for
        run(machine, body, WORDS, module=SHARED)
        return
    with pytest.raises(SimulationError, match=said):
        run(machine, body + STORE, WORDS, module=SHARED)


def test_every_block_waits_for_the_launch_ahead_or_none(machine: Any) -> None:
    """The second of two blocks does not."""
    wait = "griddepcontrol.wait;\n"
    apart = f"mov.u32 %r3, %ctaid.x;\n setp.ne.u32 %p1, %r3, 0;\n @%p1 bra $L_end;\n {wait}$L_end:\n"
    params = (ctypes.c_uint64 * 8)(WORDS.ctypes.data, np.zeros(32, np.uint32).ctypes.data)
    for body in (wait, "griddepcontrol.launch_dependents;\n"):
        Kernel(machine, HEAD.format(body=body, module="")).launch(2, 32, 0, 4, ctypes.addressof(params), 1)
    with pytest.raises(SimulationError, match="1 blocks ended without a wait for the launch ahead"):
        Kernel(machine, HEAD.format(body=apart, module="")).launch(2, 32, 0, 4, ctypes.addressof(params), 1)


def test_what_is_not_known_is_said_before_anything_runs(machine: Any) -> None:
    with pytest.raises(ptx.UnknownInstructionError, match=r"line \d+: wmma"):
        run(machine, "wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r3}, [%rd1];", WORDS)
