"""A turn of `hopper_window_attention`: what a group of four warps makes of TOKENS queries and all keys of their window.

    s[q, k] = q.k + terms[q] . one_hot[k],      the sum of 2^(c s - m), and of 2^(c s - m) v

Queries, terms, keys and values lie in shared memory, in the order that `sizes` = (STEPS, SHORT, D1, D2) tells: STEPS
steps with TOKENS keys, and one with LAST if SHORT; head dimensions D1 and, unless it is 0, D2. The products of the next
step's keys run while this step's weights are made.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from samopt.passes.kernels import hopper_launch

WARPS = gl.constexpr(4)  # of a group
COLUMNS = gl.constexpr(hopper_launch.COLUMNS)  # of a box of tokens, more than a window has
ROWS = gl.constexpr(hopper_launch.ROWS)  # of a turn's queries, and of a step's keys
TOKENS = gl.constexpr(hopper_launch.ROWS * hopper_launch.COLUMNS)
LAST = gl.constexpr(hopper_launch.LAST_ROWS * hopper_launch.COLUMNS)  # keys of the last step, where it is a short one


@gluon.constexpr_function
def _accumulator(columns):
    """The registers of a product [TOKENS, columns]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _left(columns):
    """The registers of what is multiplied, for a product [TOKENS, columns]."""
    return gl.DotOperandLayout(operand_index=0, parent=_accumulator(columns), k_width=2)


@gluon.jit
def attend(q, k, v, v_barrier, parity, place, c, sizes: gl.constexpr):
    """Over all keys, with the first ones' maximum: the sum of weights [M], and weighted values [M, D1], [M, D2]."""
    STEPS: gl.constexpr = sizes[0]
    ALL: gl.constexpr = sizes[0] + sizes[1]
    D1: gl.constexpr = sizes[2]
    D2: gl.constexpr = sizes[3]
    N2: gl.constexpr = D2 if D2 > 0 else 16
    by_query: gl.constexpr = gl.SliceLayout(1, _accumulator(TOKENS))
    acc1 = gl.zeros([TOKENS, D1], gl.float32, _accumulator(D1))
    acc2 = gl.zeros([TOKENS, N2], gl.float32, _accumulator(N2))
    total = gl.zeros([TOKENS], gl.float32, by_query)
    maximum = gl.zeros([TOKENS], gl.float32, by_query)
    s = _logits_of(q, k, place, 0, sizes)
    if ALL > 1:
        ahead = _logits_of(q, k, place, 1, sizes)
        s = warpgroup_mma_wait(2 + (D2 > 0), deps=[s])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    for i in gl.static_range(ALL):
        if i == 0:
            maximum = gl.convert_layout(gl.max(s, axis=1), by_query) * c
        p = gl.exp2(s * c - gl.convert_layout(maximum, gl.SliceLayout(1, s.type.layout))[:, None])
        total += gl.convert_layout(gl.sum(p, axis=1), by_query)
        weights = p.to(v[0].dtype)
        if i == 0:
            mbarrier.wait(v_barrier, parity)
            if ALL > 1:
                s = warpgroup_mma_wait(0, deps=[ahead])
        elif i + 1 < ALL:
            if D2 > 0:
                s, acc1, acc2 = warpgroup_mma_wait(0, deps=[ahead, acc1, acc2])
            else:
                s, acc1 = warpgroup_mma_wait(0, deps=[ahead, acc1])
        if i + 2 < ALL:
            ahead = _logits_of(q, k, place, i + 2, sizes)
        values1 = v[0].index(place * STEPS + i) if i < STEPS else v[2].index(place)
        acc1 = warpgroup_mma(gl.convert_layout(weights, _left(D1)), values1, acc1, is_async=True)
        if D2 > 0:
            values2 = v[1].index(place * STEPS + i) if i < STEPS else v[3].index(place)
            acc2 = warpgroup_mma(gl.convert_layout(weights, _left(D2)), values2, acc2, is_async=True)
    if D2 > 0:
        acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
    else:
        acc1 = warpgroup_mma_wait(0, deps=[acc1])
    return total, acc1, acc2


@gluon.jit
def attend_running(q, k, v, v_barrier, parity, place, steps, c, sizes: gl.constexpr):
    """As `attend`, with the running maximum."""
    STEPS: gl.constexpr = sizes[0]
    D1: gl.constexpr = sizes[2]
    N2: gl.constexpr = sizes[3] if sizes[3] > 0 else 16
    by_query: gl.constexpr = gl.SliceLayout(1, _accumulator(TOKENS))
    acc1 = gl.zeros([TOKENS, D1], gl.float32, _accumulator(D1))
    acc2 = gl.zeros([TOKENS, N2], gl.float32, _accumulator(N2))
    total = gl.zeros([TOKENS], gl.float32, by_query)
    maximum = gl.full([TOKENS], float("-inf"), gl.float32, by_query)
    mbarrier.wait(v_barrier, parity)
    for i in range(steps):
        at = place * STEPS + i
        s = _logits(q, k[0].index(at), k[1].index(at), k[4].index(i), sizes)
        total, maximum, acc1, acc2 = _running_step(
            s, v[0].index(at), v[1].index(at), total, maximum, acc1, acc2, c, sizes
        )
    if sizes[1]:
        s_last = _logits(q, k[2].index(place), k[3].index(place), k[5], sizes)
        total, maximum, acc1, acc2 = _running_step(
            s_last, v[2].index(place), v[3].index(place), total, maximum, acc1, acc2, c, sizes
        )
    return total, acc1, acc2


@gluon.jit
def _running_step(s, values1, values2, total, maximum, acc1, acc2, c, sizes: gl.constexpr):
    by_query: gl.constexpr = total.type.layout
    s = warpgroup_mma_wait(0, deps=[s])
    new = gl.maximum(maximum, gl.convert_layout(gl.max(s, axis=1), by_query) * c)
    rescale = gl.exp2(maximum - new)
    p = gl.exp2(s * c - gl.convert_layout(new, gl.SliceLayout(1, s.type.layout))[:, None])
    total = total * rescale + gl.convert_layout(gl.sum(p, axis=1), by_query)
    weights = p.to(values1.dtype)
    acc1 = acc1 * gl.convert_layout(rescale, gl.SliceLayout(1, acc1.type.layout))[:, None]
    acc1 = warpgroup_mma(gl.convert_layout(weights, _left(sizes[2])), values1, acc1)
    if sizes[3] > 0:
        acc2 = acc2 * gl.convert_layout(rescale, gl.SliceLayout(1, acc2.type.layout))[:, None]
        acc2 = warpgroup_mma(gl.convert_layout(weights, _left(sizes[3])), values2, acc2)
    return total, new, acc1, acc2


@gluon.jit
def _logits_of(q, k, place, i: gl.constexpr, sizes: gl.constexpr):
    """`_logits` of step i."""
    STEPS: gl.constexpr = sizes[0]
    if i < STEPS:
        return _logits(q, k[0].index(place * STEPS + i), k[1].index(place * STEPS + i), k[4].index(i), sizes)
    else:
        return _logits(q, k[2].index(place), k[3].index(place), k[5], sizes)


@gluon.jit
def _logits(q, k1, k2, hot, sizes: gl.constexpr):
    """The products of a turn's queries and terms with a step's keys, under way: two of them, or three with a D2."""
    N: gl.constexpr = hot.shape[0]
    s = gl.zeros([TOKENS, N], gl.float32, _accumulator(N))
    s = warpgroup_mma(q[0], k1.permute((1, 0)), s, use_acc=False, is_async=True)
    if sizes[3] > 0:
        s = warpgroup_mma(q[1], k2.permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q[2], hot.permute((1, 0)), s, is_async=True)
