/* Causal attention of a ragged batch, reading K and V in their blocks.

   A job is one KV head and a few tokens of one row: the query heads of the KV head and the tokens
   are the rows of two small products (scores, then weighted values), a tile of keys at a time,
   with the softmax carried on from tile to tile. One decoding row is a job of one token.

   A paired cache lies as the products want it: K of a head's block is [D / 2, block_size] of pairs
   along D, V is [block_size / 2, D] of pairs of tokens. Otherwise a token's D stand together, and
   each tile is turned first. */
#include <stdlib.h>

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

/* The keys [first, first + num) of a row: where each starts, in elements. */
INLINE void locate(const struct problem *p, int row, int head, int first, int num, int64_t *index) {
    const int32_t *blocks = p->table + row * p->table_stride;
    int64_t block = first / p->block_size, offset = first % p->block_size;
    for (int i = 0; i < num; i++, offset++) {
        if (offset == p->block_size) block++, offset = 0;
        index[i] = blocks[block] * p->block_stride + offset * p->slot_stride +
                   head * p->head_stride;
    }
}

/* Where the dwords of a head's block in a paired cache begin. */
INLINE const uint32_t *paired_block(const struct problem *p, const void *cache, int row, int head,
                                    int key) {
    int64_t block = p->table[row * p->table_stride + key / p->block_size];
    return at(cache, block * p->block_stride + head * p->head_stride, 1);
}

/* Keys from `key` on that lie in one block, at most `most`. */
INLINE int keys_in_block(const struct problem *p, int key, int most) {
    int left = (int)(p->block_size - key % p->block_size);
    return left < most ? left : most;
}

/* Scores of the tile's keys; `start` and the block size are multiples of 16. */
INLINE void score_paired(struct tile *t, const struct problem *p, int row, int head, int start,
                         int num, int queries) {
    int depth = (int)p->dim / 2, block_size = (int)p->block_size;
    for (int i = 0, part; i < num; i += part) {
        part = keys_in_block(p, start + i, num - i);
        product(t->q, depth, paired_block(p, p->k, row, head, start + i) + (start + i) % block_size,
                block_size, t->scores + i, KEYS, queries, (part + LANES - 1) / LANES, depth, 0, 1);
    }
}

INLINE void add_paired_values(struct tile *t, const struct problem *p, int row, int head, int start,
                              int num, int queries) {
    int dim = (int)p->dim;
    for (int i = 0, part; i < num; i += part) {
        part = keys_in_block(p, start + i, num - i);
        const uint32_t *weights = t->weights + i / 2;
        const uint32_t *v = paired_block(p, p->v, row, head, start + i) +
                            (start + i) % p->block_size / 2 * dim;
        product(weights, KEYS / 2, v, dim, t->sums, dim, queries, dim / LANES, part / 2, 1, 1);
        if (part % 2) { /* the last key's partner is nobody's yet: zero times NaN would be NaN */
            for (int d = 0; d < dim; d++) t->v[d] = v[part / 2 * dim + d] & 0xffff;
            product(weights + part / 2, KEYS / 2, t->v, dim, t->sums, dim, queries, dim / LANES, 1,
                    1, 1);
        }
    }
}

INLINE void attend_tile(struct tile *t, const struct problem *p, const struct job *job, int head,
                        int start, int num, int bf16, int pairs, int paired) {
    int group = (int)(p->heads / p->kv_heads), dim = (int)p->dim, depth = pairs ? dim / 2 : dim;
    int queries = job->count * group, vectors = (num + LANES - 1) / LANES;
    int64_t index[KEYS];
    if (paired) {
        score_paired(t, p, job->row, head, start, num, queries);
    } else {
        locate(p, job->row, head, start, num, index);
        turn_keys(t, p->k, index, num, dim, bf16, pairs);
        product(t->q, depth, t->k, KEYS, t->scores, KEYS, queries, vectors, depth, 0, pairs);
    }
    int first_query = p->lens[job->row] - (p->starts[job->row + 1] - p->starts[job->row]);
    for (int i = 0; i < queries; i++) {
        int last = first_query + job->first + i / group - start; /* the query's own key */
        int from = p->window ? last - (int)p->window + 1 : 0;
        weigh(t, p, i, vectors, from > 0 ? from : 0, last < num ? last + 1 : num, pairs);
    }
    if (paired) {
        add_paired_values(t, p, job->row, head, start, num, queries);
        return;
    }
    take_values(t, p->v, index, num, dim, bf16, pairs);
    product(t->weights, pairs ? KEYS / 2 : KEYS, t->v, dim, t->sums, dim, queries, dim / LANES,
            pairs ? (num + 1) / 2 : num, 1, pairs);
}

INLINE void attend(struct tile *t, const struct problem *p, const struct job *job, int head,
                   int bf16, int pairs, int paired) {
    int group = (int)(p->heads / p->kv_heads), dim = (int)p->dim;
    int queries = job->count * group;
    int64_t token = p->starts[job->row] + job->first;
    for (int i = 0; i < queries; i++) {
        int64_t query_head = head * group + i % group;
        copy_row(t->q + i * (pairs ? dim / 2 : dim), p->q,
                 (token + i / group) * p->q_stride + query_head * dim, dim, bf16, pairs);
        t->best[i] = p->sinks ? p->sinks[query_head] * LOG2_E : -INFINITY;
        t->total[i] = p->sinks ? 1.0f : 0.0f;
    }
    memset(t->sums, 0, queries * dim * sizeof(float));
    int num_queries = p->starts[job->row + 1] - p->starts[job->row];
    int first_last = p->lens[job->row] - num_queries + job->first; /* first query's own key */
    int stop = first_last + job->count;
    int start = p->window && first_last >= p->window ? first_last - (int)p->window + 1 : 0;
    if (paired) start -= start % LANES;
    for (; start < stop; start += KEYS)
        attend_tile(t, p, job, head, start, stop - start < KEYS ? stop - start : KEYS, bf16, pairs,
                    paired);
    for (int i = 0; i < queries; i++) {
        int64_t to = ((token + i / group) * p->heads + head * group + i % group) * dim;
        for (int d = 0; d < dim; d += LANES)
            store_as(p->out, to + d, load(t->sums + i * dim + d) / t->total[i], bf16);
    }
}

/* Chunks first: their jobs are the longest, and the short ones fill up the end. */
static int64_t make_jobs(const struct problem *p, int64_t rows, struct job *jobs) {
    int most = (int)(MOST_QUERIES / (p->heads / p->kv_heads)), num_jobs = 0;
    if (most < 1) most = 1;
    for (int pass = 0; pass < 2; pass++)
        for (int row = 0; row < rows; row++) {
            int queries = p->starts[row + 1] - p->starts[row];
            if ((queries == 1) != pass) continue;
            for (int first = 0; first < queries; first += most) {
                int count = queries - first < most ? queries - first : most;
                jobs[num_jobs++] = (struct job){row, first, count};
            }
        }
    return num_jobs;
}

/* Whether every block that is going to be read is one of the cache's. */
static int tables_fit(const struct problem *p, int64_t rows, int64_t num_blocks) {
    for (int64_t row = 0; row < rows; row++) {
        /* Before the first query's window stands what the row has given up. */
        int64_t first = p->lens[row] - (p->starts[row + 1] - p->starts[row]) - p->window + 1;
        int64_t i = p->window && first > 0 ? first / p->block_size : 0;
        for (; i * p->block_size < p->lens[row]; i++) {
            int32_t block = p->table[row * p->table_stride + i];
            if (block < 0 || block >= num_blocks) return 0;
        }
    }
    return 1;
}

/* All jobs for all KV heads, by the threads that call this together; a tile each. */
INLINE void attend_by_team(const struct problem *p, const struct job *jobs, int64_t num_jobs,
                           struct tile *t, int bf16, int paired) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_jobs * p->kv_heads; i++) {
        const struct job *job = &jobs[i / p->kv_heads];
        int head = (int)(i % p->kv_heads);
        if (!bf16)
            attend(t, p, job, head, 0, 0, 0);
        else if (HAS_PAIRS && paired)
            attend(t, p, job, head, 1, 1, 1);
        else
            attend(t, p, job, head, 1, HAS_PAIRS, 0);
    }
}

/* 0; 1 when memory ran out; 2 for a block that is not there. Strides in elements; rows of `tokens`
   queries in all; dim a multiple of 16 up to 256; at most 64 query heads to a KV head. Paired: of
   bfloat16, with blocks of a multiple of 16 tokens; slot_stride is not used. */
int cb_attention(const void *q, const void *k, const void *v, void *out, const int32_t *table,
                 const int32_t *starts, const int32_t *lens, const float *sinks, int64_t q_stride,
                 int64_t table_stride, int64_t block_stride, int64_t slot_stride,
                 int64_t head_stride, int64_t heads, int64_t kv_heads, int64_t dim,
                 int64_t num_blocks, int64_t block_size, int64_t window, float scale,
                 float soft_cap, int64_t rows, int64_t tokens, int bf16, int paired) {
    const struct problem p = {q,           k,          v,           out,         table,
                              starts,      lens,       sinks,       q_stride,    table_stride,
                              block_stride, slot_stride, head_stride, heads,     kv_heads,
                              dim,         block_size, window,      scale,       soft_cap};
    if (!tables_fit(&p, rows, num_blocks)) return 2;
    struct job *jobs = malloc((tokens + 1) * sizeof *jobs);
    if (!jobs) return 1;
    int64_t num_jobs = make_jobs(&p, rows, jobs);
#pragma omp parallel
    {
        struct tile t; /* under 0.5 MiB of the thread's stack */
        attend_by_team(&p, jobs, num_jobs, &t, bf16, paired);
    }
    free(jobs);
    return 0;
}
