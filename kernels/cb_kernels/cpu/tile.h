/* One tile of keys with the queries of a job: its memory, filling it from a plain cache, and the
   softmax that is carried on from tile to tile. */
#pragma once

#include "product.h"

#define KEYS 64      /* of a tile */
#define MOST_DIM 256
#define MOST_QUERIES 48 /* rows of a job, unless one token alone has more query heads */
#define MOST_GROUP 64
#define LOG2_E 1.44269504f

struct problem {
    const void *q;  /* [T, H_q, D]: q_stride between tokens */
    const void *k, *v;
    void *out;      /* [T, H_q, D], contiguous */
    const int32_t *table, *starts, *lens;
    const float *sinks;
    int64_t q_stride, table_stride, block_stride, slot_stride, head_stride;
    int64_t heads, kv_heads, dim, block_size, window;
    float scale, soft_cap; /* 0: none */
};

struct job {
    int32_t row, first, count; /* tokens of the row, counted from its first query */
};

/* Dwords of one operand row: float, or pairs of bfloat16. */
struct tile {
    uint32_t q[MOST_GROUP * MOST_DIM];
    uint32_t k[KEYS * MOST_DIM]; /* [D, KEYS]: keys along the vectors */
    uint32_t v[KEYS * MOST_DIM]; /* [KEYS, D] */
    float scores[MOST_GROUP * KEYS];
    uint32_t weights[MOST_GROUP * KEYS];
    float sums[MOST_GROUP * MOST_DIM];
    float best[MOST_GROUP], total[MOST_GROUP];
};

INLINE void copy_row(uint32_t *to, const void *from, int64_t index, int dim, int bf16, int pairs) {
    if (pairs)
        memcpy(to, (const uint16_t *)from + index, dim * 2);
    else
        for (int i = 0; i < dim; i += LANES) store((float *)to + i, load_as(from, index + i, bf16));
}

#if defined(__AVX512F__)
/* The 16 x 16 dwords of 16 rows, at column `first`, turned: row d of `to` holds column d. */
INLINE void turn_block(const uint32_t *const rows[LANES], int first, int count, uint32_t *to) {
    __m512i a[16], b[16];
    __mmask16 kept = (__mmask16)((1u << count) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(kept, rows[i] + first);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + j + 2]);
            a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + j + 2]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) { /* a[4 i + j]: columns j, j + 4, ... of rows 4 i to 4 i + 3 */
        __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        __m512i high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        b[j] = _mm512_shuffle_i32x4(low, high, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
        low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[4 + j] = _mm512_shuffle_i32x4(low, high, 0x88);
        b[12 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < count) _mm512_storeu_si512(to + i * KEYS, b[i]);
}
#else
INLINE void turn_block(const uint32_t *const rows[LANES], int first, int count, uint32_t *to) {
    for (int i = 0; i < count; i++)
        for (int key = 0; key < LANES; key++) to[i * KEYS + key] = rows[key][first + i];
}
#endif

/* K of `num` keys at `index` elements into tile->k; keys past them are zero. */
INLINE void turn_keys(struct tile *t, const void *cache, const int64_t *index, int num, int dim,
                      int bf16, int pairs) {
    static const uint32_t zeros[MOST_DIM];
    int dwords = pairs ? dim / 2 : dim;
    for (int start = 0; start < num; start += LANES) {
        const uint32_t *rows[LANES];
        uint32_t wide[bf16 && !pairs ? LANES * MOST_DIM : 1];
        for (int i = 0; i < LANES; i++) {
            rows[i] = start + i < num ? at(cache, index[start + i], bf16) : zeros;
            if (bf16 && !pairs && start + i < num) {
                copy_row(wide + i * dim, cache, index[start + i], dim, 1, 0);
                rows[i] = wide + i * dim;
            }
        }
        for (int d = 0; d < dwords; d += LANES) {
            int count = dwords - d < LANES ? dwords - d : LANES;
            turn_block(rows, d, count, t->k + d * KEYS + start);
        }
    }
}

/* V of `num` keys into tile->v [num, D], or [num / 2, D] of pairs of keys; an odd key's partner
   is zero. */
INLINE void take_values(struct tile *t, const void *cache, const int64_t *index, int num, int dim,
                        int bf16, int pairs) {
    if (!pairs) {
        for (int i = 0; i < num; i++) copy_row(t->v + i * dim, cache, index[i], dim, bf16, 0);
        return;
    }
    const uint16_t *values = cache;
    for (int i = 0; i < num; i += 2)
        for (int d = 0; d < dim; d += LANES) {
            vu low = __builtin_convertvector(*(const vh_any *)(values + index[i] + d), vu);
            vu high = {};
            if (i + 1 < num)
                high = __builtin_convertvector(*(const vh_any *)(values + index[i + 1] + d), vu);
            store((float *)t->v + i / 2 * dim + d, (vf)(low | high << 16));
        }
}

/* Scores of one query [KEYS] to weights, of which the keys [from, to) are visible. */
INLINE void weigh(struct tile *t, const struct problem *p, int query, int vectors, int from, int to,
                  int pairs) {
    float *scores = t->scores + query * KEYS;
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf best = splat(-INFINITY), total = {};
    int masks = from > 0 || to < vectors * LANES;
    for (int j = 0; j < vectors; j++) {
        vf x = load(scores + j * LANES) * (p->soft_cap > 0 ? p->scale : p->scale * LOG2_E);
        if (p->soft_cap > 0) x = p->soft_cap * LOG2_E * tanh_of(x / p->soft_cap);
        vi key = lanes + j * LANES;
        if (masks) x = choose((key >= from) & (key < to), x, splat(-INFINITY));
        store(scores + j * LANES, x);
        best = maximum(best, x);
    }
    float known = t->best[query], now = max_of(best);
    now = now > known ? now : known;
    for (int j = 0; j < vectors; j++) {
        vf x = load(scores + j * LANES) - now;
        x = from < to ? (pairs ? rough_exp2_of(x) : exp2_of(x)) : (vf){};
        total += x;
        store_as(t->weights + query * (pairs ? KEYS / 2 : KEYS), j * LANES, x, pairs);
    }
    if (now > known) { /* what is there was weighed against a smaller score */
        float factor = exp2_of(splat(known - now))[0];
        float *sums = t->sums + query * p->dim;
        for (int d = 0; d < p->dim; d += LANES) store(sums + d, load(sums + d) * factor);
        t->total[query] *= factor;
        t->best[query] = now;
    }
    t->total[query] += sum_of(total);
}
