"""Attention inside windows as in `window_attention`, for Hopper's asynchronous units: warps with roles, in Gluon.

The same sums, with the same terms and one-hot rows; what differs is who does what, and when. A program stays on its
multiprocessor and takes every so-manyth pair of window and head. One warp of it only loads: keys and values of a pair,
whole, and queries with their terms four rows of tokens at a time, as buffers become free. CONSUMERS groups of four
warps compute, each those four rows at a turn: the products of the next keys run while this step's weights are made.

Groups and loads wait for each other by barriers in shared memory, each of which is used again and again; a wait names
the parity of the use. No group may therefore be two uses behind or ahead: all wait for, and give back, every pair, also
one in which they have no turn, and a buffer for queries is always the same group's.

Tokens outside the grid arrive as zeros. The group with a border window's first turn writes the padding's key and value
over them, before any group reads them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from samopt.passes.kernels import arithmetic, hopper_launch
from samopt.passes.kernels.hopper_turn import COLUMNS, LAST, ROWS, TOKENS, WARPS, attend, attend_running

LOG2E = gl.constexpr(arithmetic.LOG2E)
OVERFLOW = gl.constexpr(arithmetic.OVERFLOW)
LOADER_REGISTERS = gl.constexpr(hopper_launch.LOADER_REGISTERS)
# LLVM does not know that a count of turns stays below. It takes out of a loop, and keeps in registers for all its
# length, the address of whatever lies at the same place every time; divided by this and added, turns prevent that.
BEYOND = gl.constexpr(1 << 30)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.6 has the second only


@gluon.jit
def hopper_window_attention(
    keys1,  # descriptors of qkv as [B, H, W, 3 * heads * D]: blocks [1, ROWS, COLUMNS, D1]
    keys2,  # ... and [1, ROWS, COLUMNS, D2]
    last1,  # ... and both with two rows
    last2,
    terms,  # descriptor of [B, H, W, heads * SLOTS]: blocks [1, ROWS, COLUMNS, SLOTS]
    padding,  # [3, heads, D]: what a token outside the grid has
    one_hot,  # [rows of keys * COLUMNS, SLOTS]: of a window that no border cuts
    out,  # [B, H, W, heads, D]
    out_scale,  # a number in memory that the result is divided by, or None
    H,
    W,
    heads,
    windows_x,
    windows,  # of one image
    pairs,  # of a window and a head
    steps,  # with ROWS rows of keys
    scale,
    rows: gl.constexpr,  # of a window
    columns: gl.constexpr,
    D1: gl.constexpr,  # D = D1 + D2, both powers of two, D2 may be 0
    D2: gl.constexpr,
    SLOTS: gl.constexpr,
    LAZY: gl.constexpr,
    CONSUMERS: gl.constexpr,  # 1 to 3
    PAIRS: gl.constexpr,  # whose keys and values are in shared memory at a time
    QUERIES: gl.constexpr,  # buffers for a turn's
    REGISTERS: gl.constexpr,  # of a thread that computes
):
    gl.static_assert(QUERIES % CONSUMERS == 0)
    dtype: gl.constexpr = keys1.dtype
    STEPS: gl.constexpr = (rows + 1) // ROWS
    SHORT: gl.constexpr = (rows % ROWS == 1) | (rows % ROWS == 2)  # whether a step with two rows follows
    sizes: gl.constexpr = (STEPS, SHORT, D1, D2)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, D1], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, D2 if D2 > 0 else D1], dtype)
    slots: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, SLOTS], dtype)
    q1 = gl.allocate_shared_memory(dtype, [QUERIES, TOKENS, D1], wide)
    q2 = gl.allocate_shared_memory(dtype, [QUERIES, TOKENS, D2], narrow) if D2 > 0 else q1
    term = gl.allocate_shared_memory(dtype, [QUERIES, TOKENS, SLOTS], slots)
    hot = gl.allocate_shared_memory(dtype, [STEPS, TOKENS, SLOTS], slots)
    hot_last = gl.allocate_shared_memory(dtype, [LAST, SLOTS], slots) if SHORT else hot
    k1 = gl.allocate_shared_memory(dtype, [PAIRS * STEPS, TOKENS, D1], wide)
    v1 = gl.allocate_shared_memory(dtype, [PAIRS * STEPS, TOKENS, D1], wide)
    k2 = gl.allocate_shared_memory(dtype, [PAIRS * STEPS, TOKENS, D2], narrow) if D2 > 0 else k1
    v2 = gl.allocate_shared_memory(dtype, [PAIRS * STEPS, TOKENS, D2], narrow) if D2 > 0 else v1
    k1_last = gl.allocate_shared_memory(dtype, [PAIRS, LAST, D1], wide) if SHORT else k1
    v1_last = gl.allocate_shared_memory(dtype, [PAIRS, LAST, D1], wide) if SHORT else v1
    k2_last = gl.allocate_shared_memory(dtype, [PAIRS, LAST, D2], narrow) if SHORT & (D2 > 0) else k1
    v2_last = gl.allocate_shared_memory(dtype, [PAIRS, LAST, D2], narrow) if SHORT & (D2 > 0) else v1
    q = (q1, q2, term)
    k = (k1, k2, k1_last, k2_last, hot, hot_last)
    v = (v1, v2, v1_last, v2_last)

    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    padded = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(PAIRS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(padded.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=CONSUMERS)

    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (SLOTS // 8), SLOTS // 8], [WARPS, 1], [1, 0])
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, by_row))
    key = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, by_row))
    for i in range(steps):
        hot.index(i).store(gl.load(one_hot + (i * TOKENS + key)[:, None] * SLOTS + slot[None, :]))
    if SHORT:
        key_last = gl.arange(0, LAST, layout=gl.SliceLayout(1, by_row))
        hot_last.store(gl.load(one_hot + (STEPS * TOKENS + key_last)[:, None] * SLOTS + slot[None, :]))
    fence_async_shared()
    barrier()

    memory = (q, k, v, q_full, q_free, k_full, v_full, padded, kv_free)
    grid = (H, W, heads, windows_x, windows, pairs, steps)
    window: gl.constexpr = (rows, columns)
    plan: gl.constexpr = (CONSUMERS, PAIRS, QUERIES)
    G0: gl.constexpr = 0
    G1: gl.constexpr = 1
    G2: gl.constexpr = 2
    # Their arguments in full, as constants do not stay constants in a tuple with a name.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_compute, (G0, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_load, (keys1, keys2, last1, last2, terms, memory, grid, window, sizes, SLOTS, plan)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_compute, (G0, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_compute, (G1, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_load, (keys1, keys2, last1, last2, terms, memory, grid, window, sizes, SLOTS, plan)),
            ],
            [WARPS, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (G0, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_compute, (G1, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_compute, (G2, memory, grid, padding, out, out_scale, scale, window, sizes, LAZY, plan)),
                (_load, (keys1, keys2, last1, last2, terms, memory, grid, window, sizes, SLOTS, plan)),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _place(pair, grid, window: gl.constexpr):
    """Image and head of a pair, top and left of its window, and how many turns it takes."""
    H, _, heads, windows_x, windows, _, _ = grid
    number = pair // heads
    top = number % windows // windows_x * window[0]
    turns = (gl.minimum(window[0], H - top) + ROWS - 1) // ROWS
    return number // windows, pair % heads, top, number % windows_x * window[1], turns


@gluon.jit
def _load(
    keys1, keys2, last1, last2, terms, memory, grid, window: gl.constexpr, sizes: gl.constexpr, SLOTS: gl.constexpr,
    plan: gl.constexpr,
):  # fmt: skip
    """What the loading warp does, from the first pair to the last."""
    _, _, heads, _, _, pairs, steps = grid
    q, k, v, q_full, q_free, k_full, v_full, _, kv_free = memory
    D1: gl.constexpr = sizes[2]
    D2: gl.constexpr = sizes[3]
    D: gl.constexpr = D1 + D2
    PAIRS: gl.constexpr = plan[1]
    QUERIES: gl.constexpr = plan[2]
    BYTES: gl.constexpr = TOKENS * (D + SLOTS) * 2
    before = 0  # turns
    use = 0  # of the memory for pairs
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        image, head, top, left, turns = _place(pair, grid, window)
        at = use % PAIRS
        for turn in range(turns):
            buffer = (before + turn) % QUERIES
            full = q_full.index(buffer)
            mbarrier.wait(q_free.index(buffer), (before + turn) // QUERIES % 2 ^ 1)
            mbarrier.expect(full, BYTES)
            _box(keys1, q[0].index(buffer), full, image, top + turn * ROWS, left, head * D)
            if D2 > 0:
                _box(keys2, q[1].index(buffer), full, image, top + turn * ROWS, left, head * D + D1)
            _box(terms, q[2].index(buffer), full, image, top + turn * ROWS, left, head * SLOTS)
            if turn == 0:
                mbarrier.wait(kv_free.index(at), use // PAIRS % 2 ^ 1)
                column = (heads + head) * D
                _boxes(keys1, keys2, last1, last2, k, at, k_full.index(at), image, top, left, column, steps, sizes)
                column += heads * D
                _boxes(keys1, keys2, last1, last2, v, at, v_full.index(at), image, top, left, column, steps, sizes)
        before += turns
        use += 1  # noqa: SIM113 - Triton has no enumerate


@gluon.jit
def _boxes(keys1, keys2, last1, last2, parts, at, full, image, top, left, column, steps, sizes: gl.constexpr):
    STEPS: gl.constexpr = sizes[0]
    SHORT: gl.constexpr = sizes[1]
    D1: gl.constexpr = sizes[2]
    D2: gl.constexpr = sizes[3]
    BYTES: gl.constexpr = (STEPS * TOKENS + (LAST if SHORT else 0)) * (D1 + D2) * 2
    mbarrier.expect(full, BYTES)
    for i in range(steps):  # a number that is not known when this is compiled: unrolled, it takes longer
        _box(keys1, parts[0].index(at * STEPS + i), full, image, top + i * ROWS, left, column)
        if D2 > 0:
            _box(keys2, parts[1].index(at * STEPS + i), full, image, top + i * ROWS, left, column + D1)
    if SHORT:
        _box(last1, parts[2].index(at), full, image, top + STEPS * ROWS, left, column)
        if D2 > 0:
            _box(last2, parts[3].index(at), full, image, top + STEPS * ROWS, left, column + D1)


@gluon.jit
def _box(tokens, to, full, image, top, left, column):
    box = to._reinterpret(tokens.dtype, tokens.block_shape, tokens.layout)
    tma.async_copy_global_to_shared(tokens, [image, top, left, column], full, box)


@gluon.jit
def _compute(
    GROUP: gl.constexpr, memory, grid, padding, out, out_scale, scale, window: gl.constexpr, sizes: gl.constexpr,
    LAZY: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """What a group that computes does: every CONSUMERS-th turn."""
    H, W, heads, _, _, pairs, steps = grid
    q, k, v, q_full, q_free, k_full, v_full, padded, kv_free = memory
    rows: gl.constexpr = window[0]
    columns: gl.constexpr = window[1]
    D1: gl.constexpr = sizes[2]
    D2: gl.constexpr = sizes[3]
    D: gl.constexpr = D1 + D2
    CONSUMERS: gl.constexpr = plan[0]
    PAIRS: gl.constexpr = plan[1]
    QUERIES: gl.constexpr = plan[2]
    c = scale * LOG2E
    unit = 1.0
    if out_scale is not None:
        unit = 1.0 / gl.load(out_scale)
    before = 0
    use = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        image, head, top, left, turns = _place(pair, grid, window)
        at = use % PAIRS
        parity = use // PAIRS % 2
        end = gl.minimum(rows, H - top)  # of the rows and columns of this window inside the grid
        edge = gl.minimum(columns, W - left)
        border = (end < rows) | (edge < columns)
        # 64-bit offsets for the image, 32-bit ones, which are cheaper, within it.
        first = out + (image.to(gl.int64) * H * W * heads + head) * D
        mbarrier.wait(k_full.index(at), parity)
        if border:
            mbarrier.wait(v_full.index(at), parity)
        for turn in range((GROUP + CONSUMERS - before % CONSUMERS) % CONSUMERS, turns, CONSUMERS):
            count = before + turn
            buffer = count % QUERIES
            if turn == 0:
                if border:
                    pad = padding + (heads + head) * D
                    _pad(k, at, pad, end, edge, steps, sizes)
                    _pad(v, at, pad + heads * D, end, edge, steps, sizes)
                    fence_async_shared()
                    barrier()
                mbarrier.arrive(padded.index(at), count=1)
            if border:
                mbarrier.wait(padded.index(at), parity)
            mbarrier.wait(q_full.index(buffer), count // QUERIES % 2)
            queries = (q[0].index(buffer), q[1].index(buffer), q[2].index(buffer))
            place = at + count // BEYOND
            v_barrier = v_full.index(at)
            if LAZY:
                total, acc1, acc2 = attend(queries, k, v, v_barrier, parity, place, c, sizes)
                # NaN compares false: whoever feeds NaN gets NaN, from either.
                if gl.max(total, axis=0) > OVERFLOW:
                    total, acc1, acc2 = attend_running(queries, k, v, v_barrier, parity, place, steps, c, sizes)
            else:
                total, acc1, acc2 = attend_running(queries, k, v, v_barrier, parity, place, steps, c, sizes)
            barrier()
            mbarrier.arrive(q_free.index(buffer), count=1)
            share = unit / total
            _write(first, acc1, share, turn, top, left, grid, window, D)
            if D2 > 0:
                _write(first + D1, acc2, share, turn, top, left, grid, window, D)
        barrier()  # one thread speaks for the group
        mbarrier.arrive(kv_free.index(at), count=1)
        before += turns
        use += 1  # noqa: SIM113 - Triton has no enumerate


@gluon.jit
def _pad(parts, at, pad, end, edge, steps, sizes: gl.constexpr):
    """Writes the padding over tokens outside the grid."""
    STEPS: gl.constexpr = sizes[0]
    D1: gl.constexpr = sizes[2]
    for i in range(steps):
        _pad_tile(parts[0].index(at * STEPS + i), pad, i * ROWS, end, edge)
        if sizes[3] > 0:
            _pad_tile(parts[1].index(at * STEPS + i), pad + D1, i * ROWS, end, edge)
    if sizes[1]:
        _pad_tile(parts[2].index(at), pad, STEPS * ROWS, end, edge)
        if sizes[3] > 0:
            _pad_tile(parts[3].index(at), pad + D1, STEPS * ROWS, end, edge)


@gluon.jit
def _pad_tile(tile, pad, row, end, edge):
    N: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [WARPS, 1], [1, 0])
    key = gl.arange(0, N, layout=gl.SliceLayout(1, by_row))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    outside = (row + key // COLUMNS >= end) | (key % COLUMNS >= edge)
    tile.store(gl.where(outside[:, None], gl.load(pad + d)[None, :], tile.load(by_row)))


@gluon.jit
def _write(to, acc, share, turn, top, left, grid, window: gl.constexpr, D: gl.constexpr):
    """Stores a turn's results [TOKENS, D1 or D2], those of tokens of this window inside the grid."""
    H, W, heads, _, _, _, _ = grid
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    h = turn * ROWS + m // COLUMNS
    w = m % COLUMNS
    inside = (h < window[0]) & (w < window[1]) & (top + h < H) & (left + w < W)
    token = ((top + h) * W + left + w) * heads * D
    result = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    gl.store(to + token[:, None] + d[None, :], result.to(to.dtype.element_ty), mask=inside[:, None])
