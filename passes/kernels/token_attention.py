"""The step in which image tokens attend to a prompt's few tokens, with what surrounds it.

y = layer_norm(x + out_proj(attention(q_proj(x + p), k, v))),      x the image tokens, p their positions

Of a prompt, both projections fold into the keys and values that lie between them, once for all image tokens. With W the
rows of q_proj and b its bias, U the columns of out_proj, of the dimensions of head h, and for each token t,

    logits[h, t] = (x + p) . a[h, t] + c[h, t],      a[h, t] = scale W_h^T k[h, t],   c[h, t] = scale b_h . k[h, t]
    y = layer_norm(x + sum_h,t softmax_t(logits[h, t]) u[h, t]),             u[h, t] = U_h v[h, t]

and the bias of out_proj in u of the first head, whose weights sum to 1. What is left are two products of every image
token, with C x (heads * T) numbers each. `token_attention_terms` computes a, c and u, `token_attention` the rest. The
scale has log2(e) in it, for exp2. Positions are multiplied on their own: tokens and positions go to the matrix units as
they lie in memory, and their sum is not rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_attention_terms(
    k,  # [N, tokens, heads * D]
    v,  # likewise
    q_weight,  # [heads * D, C]
    q_bias,  # [heads * D]
    out_weight,  # [C, heads * D]
    out_bias,  # [C]
    queries,  # [N, heads, T, C]: where a goes, zeros past the last token
    offsets,  # float32 [N, heads, T]: where c goes, minus infinity past the last token
    answers,  # [N, heads, T, C]: where u goes
    tokens,
    scale,
    heads: tl.constexpr,
    D: tl.constexpr,  # dimension of a head
    T: tl.constexpr,  # tokens, padded
    C: tl.constexpr,
):
    prompt, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    t, c = tl.arange(0, T), tl.arange(0, C)
    row = (prompt * tokens + t) * (heads * D)
    query, answer = tl.zeros([T, C], tl.float32), tl.zeros([T, C], tl.float32)
    offset = tl.zeros([T], tl.float32)
    for i in range(head * D, (head + 1) * D):
        key = tl.load(k + row + i, mask=t < tokens, other=0.0).to(tl.float32)
        value = tl.load(v + row + i, mask=t < tokens, other=0.0).to(tl.float32)
        query += key[:, None] * tl.load(q_weight + i * C + c).to(tl.float32)[None, :]
        answer += value[:, None] * tl.load(out_weight + c * (heads * D) + i).to(tl.float32)[None, :]
        offset += key * tl.load(q_bias + i).to(tl.float32)
    answer += tl.where(head == 0, tl.load(out_bias + c).to(tl.float32), 0.0)[None, :]
    to = (prompt * heads + head) * T + t
    tl.store(offsets + to, tl.where(t < tokens, offset * scale, float("-inf")))
    tl.store(queries + to[:, None] * C + c[None, :], (query * scale).to(queries.dtype.element_ty))
    tl.store(answers + to[:, None] * C + c[None, :], answer.to(answers.dtype.element_ty))


@triton.jit
def token_attention(
    keys,  # [N, M, C], or [1, M, C]
    key_pe,  # likewise
    queries,  # [N, heads * T, C], or of one prompt for all
    offsets,  # float32 [N, heads * T], likewise
    answers,  # [N, heads * T, C], likewise
    norm_weight,  # [C]
    norm_bias,  # [C]
    out,  # [N, M, C]
    keys_stride,  # from one image to the next, 0 where it is one for all; so with the others
    pe_stride,
    prompt_stride,  # of rows of C
    M,
    eps,
    COLUMNS: tl.constexpr,  # heads * T
    T: tl.constexpr,  # tokens, padded
    C: tl.constexpr,
    GROUP: tl.constexpr,  # columns at a time, of whole heads
    BLOCK_M: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of image tokens, one after the other: they share what is the prompt's
    STAGES: tl.constexpr,
):
    parts = tl.cdiv(M, BLOCK_M * STEPS)
    n = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * (BLOCK_M * STEPS)
    c, column = tl.arange(0, C), tl.arange(0, GROUP)
    row = n * prompt_stride + column
    place = row[:, None] * C + c[None, :]
    KEPT: tl.constexpr = GROUP == COLUMNS and STEPS > 1  # otherwise memory is better free for a second program
    if KEPT:
        query, offset, answer = tl.load(queries + place), tl.load(offsets + row), tl.load(answers + place)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        m = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        at = m[:, None] * C + c[None, :]
        inside = (m < M)[:, None]
        x = tl.load(keys + n * keys_stride + at, mask=inside, other=0.0)
        position = tl.load(key_pe + n * pe_stride + at, mask=inside, other=0.0)
        total = x.to(tl.float32)
        for group in range(0, COLUMNS, GROUP):
            if not KEPT:
                query, offset = tl.load(queries + place + group * C), tl.load(offsets + row + group)
            logits = tl.dot(position, query.T, tl.dot(x, query.T)) + offset[None, :]
            logits = tl.reshape(logits, [BLOCK_M, GROUP // T, T])
            weights = tl.exp2(logits - tl.max(logits, axis=2)[:, :, None])
            weights *= (1.0 / tl.sum(weights, axis=2))[:, :, None]
            weights = tl.reshape(weights, [BLOCK_M, GROUP]).to(x.dtype)
            if not KEPT:
                answer = tl.load(answers + place + group * C)
            total = tl.dot(weights, answer, total)
        centred = total - (tl.sum(total, axis=1) / C)[:, None]
        share = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)
        y = centred * share[:, None] * tl.load(norm_weight + c).to(tl.float32)[None, :]
        y += tl.load(norm_bias + c).to(tl.float32)[None, :]
        tl.store(out + n * M * C + at, y.to(out.dtype.element_ty), mask=inside)
