"""Triton kernels of the token statistics. Import only where Triton is installed.

Forward: one program a token walks over the shard's columns once, with the running maximum and
sums of `shard`, rescaled whenever the maximum grows. Finish: merges the ranks' parts in float64.
Backward: one program a token and block of columns reads its logits and writes their gradient, in
place if the two pointers are equal.

Exponentials are base 2 (the hardware's own), with the change of base in the temperature factor.
``tl.max`` and ``tl.maximum`` drop NaN unless told otherwise: everywhere here they are told.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
# As in shard: e^floor is 0, and 0 * floor is 0 where 0 * -inf is NaN.
D_FLOOR = tl.constexpr(-1.0e4)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def partials_kernel(
    z_ptr,
    y_ptr,
    inv_ptr,
    out_ptr,
    tokens,
    width,
    valid,
    start,
    BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr,
):
    """Partial statistics of one token: rows m, s0, s1, z_y (, s2, s3) of out [6, tokens]."""
    row = tl.program_id(0).to(tl.int64)
    base2 = (tl.load(inv_ptr + row) * LOG2_E).to(tl.float32)
    column_y = tl.load(y_ptr + row) - start
    z_row = z_ptr + row * width
    m = -float("inf")
    zy = -float("inf")
    s0 = 0.0
    s1 = 0.0
    s2 = 0.0
    s3 = 0.0
    block = tl.arange(0, BLOCK)
    for first in range(0, valid, BLOCK):
        columns = first + block
        # Masked by the width, which is divisible by 16 where it matters, and then by the true
        # vocabulary, which seldom is: one mask by the latter would break the load into scalars.
        z = tl.load(z_row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        z = tl.where(columns < valid, z, -float("inf"))
        zy = _nan_max(zy, tl.reduce(tl.where(columns == column_y, z, -float("inf")), 0, _nan_max))
        m_new = _nan_max(m, tl.reduce(z, 0, _nan_max))
        # A finite stand-in while everything seen is -inf, so that -inf - m is -inf and not NaN.
        around = _nan_max(m_new, LOWEST)
        delta = _nan_max((m - around) * base2, D_FLOOR)
        r = tl.exp2(delta)
        d = _nan_max((z - around) * base2, D_FLOOR)
        e = tl.exp2(d)
        ed = e * d
        s1 = r * (s1 + delta * s0) + tl.sum(ed, 0)
        s0 = r * s0 + tl.sum(e, 0)
        if NEED_Q:
            s3 = r * r * (s3 + delta * s2) + tl.sum(e * ed, 0)
            s2 = r * r * s2 + tl.sum(e * e, 0)
        m = m_new
    out = out_ptr + row
    tl.store(out, m)
    tl.store(out + tokens, s0)
    tl.store(out + 2 * tokens, s1 * LN_2)
    tl.store(out + 3 * tokens, zy)
    if NEED_Q:
        tl.store(out + 4 * tokens, s2)
        tl.store(out + 5 * tokens, s3 * LN_2)


@triton.jit
def finish_kernel(
    parts_ptr,
    y_ptr,
    inv_ptr,
    stats_ptr,
    state_ptr,
    tokens,
    ranks,
    BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr,
):
    """Merge parts [ranks, 6, tokens] into stats [5, tokens] and state [3, tokens], in float64."""
    ROWS: tl.constexpr = 6 if NEED_Q else 4  # pyright: ignore[reportAssignmentType]
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = token < tokens
    inv = tl.load(inv_ptr + token, mask=held, other=1.0)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    for rank in range(ranks):
        part = parts_ptr + rank * ROWS * tokens + token
        m = _nan_max(m, tl.load(part, mask=held, other=0.0))
    s0 = tl.zeros([BLOCK], tl.float64)
    s1 = tl.zeros([BLOCK], tl.float64)
    s2 = tl.zeros([BLOCK], tl.float64)
    s3 = tl.zeros([BLOCK], tl.float64)
    zy = tl.full([BLOCK], -float("inf"), tl.float32)
    for rank in range(ranks):
        part = parts_ptr + rank * ROWS * tokens + token
        part_m = tl.load(part, mask=held, other=0.0)
        delta = _nan_max((part_m.to(tl.float64) - m.to(tl.float64)) * inv, D_FLOOR)
        r = tl.exp(delta)
        part_s0 = tl.load(part + tokens, mask=held, other=1.0).to(tl.float64)
        part_s1 = tl.load(part + 2 * tokens, mask=held, other=0.0).to(tl.float64)
        zy = _nan_max(zy, tl.load(part + 3 * tokens, mask=held, other=0.0))
        s0 += r * part_s0
        s1 += r * (part_s1 + delta * part_s0)
        if NEED_Q:
            part_s2 = tl.load(part + 4 * tokens, mask=held, other=0.0).to(tl.float64)
            part_s3 = tl.load(part + 5 * tokens, mask=held, other=0.0).to(tl.float64)
            s2 += r * r * part_s2
            s3 += r * r * (part_s3 + delta * part_s2)
    log_s0 = tl.log(s0)
    mu = s1 / s0
    d_y = (zy.to(tl.float64) - m.to(tl.float64)) * inv
    counts = tl.load(y_ptr + token, mask=held, other=-1) >= 0
    out = stats_ptr + token
    tl.store(out, tl.where(counts, d_y - log_s0, 0.0).to(tl.float32), mask=held)
    tl.store(out + tokens, (log_s0 - mu).to(tl.float32), mask=held)
    tl.store(out + 2 * tokens, tl.where(counts, d_y - mu, 0.0).to(tl.float32), mask=held)
    if NEED_Q:
        tl.store(out + 3 * tokens, (s2 / (s0 * s0)).to(tl.float32), mask=held)
        tl.store(out + 4 * tokens, ((s3 - mu * s2) / (s0 * s0)).to(tl.float32), mask=held)
    state = state_ptr + token
    tl.store(state, m, mask=held)
    tl.store(state + tokens, log_s0.to(tl.float32), mask=held)
    tl.store(state + 2 * tokens, mu.to(tl.float32), mask=held)


@triton.jit
def gradient_kernel(
    z_ptr,
    grad_ptr,
    y_ptr,
    inv_ptr,
    m_ptr,
    log_s0_ptr,
    mu_ptr,
    g_ptr,
    k_ptr,
    width,
    valid,
    start,
    BLOCK: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_K: tl.constexpr,
):
    """Gradient inv [g 1{y} - pi (g + k (d - mu))] of a token and block of columns; 0 in padding."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < valid
    y = tl.load(y_ptr + row)
    inv = tl.load(inv_ptr + row)
    g = 0.0
    if HAS_G:
        g = (tl.load(g_ptr + row) * inv).to(tl.float32)
    z = tl.load(z_ptr + row * width + columns, mask=columns < width, other=-float("inf"))
    z = tl.where(real, z.to(tl.float32), -float("inf"))
    d = (z - tl.load(m_ptr + row)) * (inv * LOG2_E).to(tl.float32)
    d = _nan_max(d, D_FLOOR)
    pi = tl.exp2(d - tl.load(log_s0_ptr + row) * LOG2_E)
    weight = g
    if HAS_K:
        k = (tl.load(k_ptr + row) * inv).to(tl.float32)
        weight = g + k * (d * LN_2 - tl.load(mu_ptr + row))
    grad = tl.where(columns == y - start, g, 0.0) - pi * weight
    # A select, not a product: an ignored row is exactly 0 even where its logits are NaN.
    grad = tl.where(real & (y >= 0), grad, 0.0)
    tl.store(
        grad_ptr + row * width + columns,
        grad.to(grad_ptr.dtype.element_ty),
        mask=columns < width,
    )
