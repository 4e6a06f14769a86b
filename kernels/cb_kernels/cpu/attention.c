/* Causal attention of a ragged batch, reading K and V in their blocks.

   A job is one KV head and a few tokens of one row: the query heads of the KV head and the tokens
   are the rows of two small products (scores, then weighted values), a tile of keys at a time,
   with the softmax carried on from tile to tile. One decoding row is a job of one token.

   A paired cache lies as the products want it: K of a head's block is [D / 2, block_size] of pairs
   along D, V is [block_size / 2, D] of pairs of tokens. Otherwise a token's D stand together, and
   each tile is turned first. */
#include <omp.h>
#include <stdlib.h>

#include "tile.h"

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

/* What a later job is going to read of a paired cache: a decoding row's blocks are new to the caches,
   and hardware follows them no further than a page. */
struct fetch {
    int row, head, key, stop;
};

/* What is fetched of a later job while a block of this one is multiplied, as far on in its keys.
   Not just those keys' bytes, K lies across its block; but about as many. NULL: none.
 */
INLINE const char *block_ahead(const struct problem *p, const void *cache, const struct fetch *later,
                               int done) {
    int key = later->key + done;
    if (key >= later->stop) return NULL;
    return (const char *)paired_block(p, cache, later->row, later->head, key) +
           key % p->block_size * p->dim * 2;
}

/* Scores of the tile's keys; `start` and the block size are multiples of 16. */
INLINE void score_paired(struct tile *t, const struct problem *p, int row, int head, int start,
                         int num, int queries, const struct fetch *later, int done) {
    int depth = (int)p->dim / 2, block_size = (int)p->block_size;
    int all_lines = (block_size < KEYS ? block_size : KEYS) / LANES;
    int lines = lines_of_each(all_lines, (queries + MAX_ROWS - 1) / MAX_ROWS);
    for (int i = 0, part; i < num; i += part) {
        part = keys_in_block(p, start + i, num - i);
        const char *ahead = block_ahead(p, p->k, later, done + i);
        product_and_fetch(t->q, depth,
                          paired_block(p, p->k, row, head, start + i) + (start + i) % block_size,
                          block_size, t->scores + i, KEYS, queries, (part + LANES - 1) / LANES,
                          depth, 0, 1, ahead, ahead ? lines : 0);
    }
}

INLINE void add_paired_values(struct tile *t, const struct problem *p, int row, int head, int start,
                              int num, int queries, const struct fetch *later, int done) {
    int dim = (int)p->dim, all_lines = dim / LANES < MOST_LINES ? dim / LANES : MOST_LINES;
    int lines = lines_of_each(all_lines, (queries + MAX_ROWS - 1) / MAX_ROWS);
    for (int i = 0, part; i < num; i += part) {
        part = keys_in_block(p, start + i, num - i);
        const uint32_t *weights = t->weights + i / 2;
        const uint32_t *v = paired_block(p, p->v, row, head, start + i) +
                            (start + i) % p->block_size / 2 * dim;
        const char *ahead = block_ahead(p, p->v, later, done + i);
        product_and_fetch(weights, KEYS / 2, v, dim, t->sums, dim, queries, dim / LANES, part / 2,
                          1, 1, ahead, ahead ? lines : 0);
        if (part % 2) { /* the last key's partner is nobody's yet: zero times NaN would be NaN */
            for (int d = 0; d < dim; d++) t->v[d] = v[part / 2 * dim + d] & 0xffff;
            product(weights + part / 2, KEYS / 2, t->v, dim, t->sums, dim, queries, dim / LANES, 1,
                    1, 1);
        }
    }
}

/* The keys [*start, *stop) that a job's queries see. */
INLINE void seen_keys(const struct problem *p, const struct job *job, int paired, int *start,
                      int *stop) {
    int num_queries = p->starts[job->row + 1] - p->starts[job->row];
    int own = p->lens[job->row] - num_queries + job->first; /* the first query's own key */
    *stop = own + job->count;
    *start = p->window && own >= p->window ? own - (int)p->window + 1 : 0;
    if (paired) *start -= *start % LANES;
}

INLINE void attend_tile(struct tile *t, const struct problem *p, const struct job *job, int head,
                        int start, int num, int bf16, int pairs, int paired,
                        const struct fetch *later, int done) {
    int group = (int)(p->heads / p->kv_heads), dim = (int)p->dim, depth = pairs ? dim / 2 : dim;
    int queries = job->count * group, vectors = (num + LANES - 1) / LANES;
    int64_t index[KEYS];
    if (paired) {
        score_paired(t, p, job->row, head, start, num, queries, later, done);
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
        add_paired_values(t, p, job->row, head, start, num, queries, later, done);
        return;
    }
    take_values(t, p->v, index, num, dim, bf16, pairs);
    product(t->weights, pairs ? KEYS / 2 : KEYS, t->v, dim, t->sums, dim, queries, dim / LANES,
            pairs ? (num + 1) / 2 : num, 1, pairs);
}

INLINE void attend(struct tile *t, const struct problem *p, const struct job *job, int head,
                   int bf16, int pairs, int paired, const struct fetch *later) {
    int group = (int)(p->heads / p->kv_heads), dim = (int)p->dim;
    int queries = job->count * group, start, stop;
    int64_t token = p->starts[job->row] + job->first;
    for (int i = 0; i < queries; i++) {
        int64_t query_head = head * group + i % group;
        copy_row(t->q + i * (pairs ? dim / 2 : dim), p->q,
                 (token + i / group) * p->q_stride + query_head * dim, dim, bf16, pairs);
        t->best[i] = p->sinks ? p->sinks[query_head] * LOG2_E : -INFINITY;
        t->total[i] = p->sinks ? 1.0f : 0.0f;
    }
    memset(t->sums, 0, queries * dim * sizeof(float));
    seen_keys(p, job, paired, &start, &stop);
    for (int done = 0; start < stop; start += KEYS, done += KEYS)
        attend_tile(t, p, job, head, start, stop - start < KEYS ? stop - start : KEYS, bf16, pairs,
                    paired, later, done);
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

/* The keys of job `i` of all heads' if it is one token's: the products of more are slower than
   memory. */
INLINE struct fetch later_job(const struct problem *p, const struct job *jobs, int64_t num_jobs,
                              int64_t i) {
    struct fetch f = {};
    if (i >= num_jobs * p->kv_heads || jobs[i / p->kv_heads].count > 1) return f;
    f.row = jobs[i / p->kv_heads].row, f.head = (int)(i % p->kv_heads);
    seen_keys(p, &jobs[i / p->kv_heads], 1, &f.key, &f.stop);
    return f;
}

/* Job `i` of all heads'. */
INLINE void attend_job(const struct problem *p, const struct job *jobs, int64_t num_jobs, int64_t i,
                       int threads, struct tile *t, int bf16, int paired) {
    const struct job *job = &jobs[i / p->kv_heads];
    int head = (int)(i % p->kv_heads);
    if (!bf16) {
        attend(t, p, job, head, 0, 0, 0, NULL);
    } else if (paired) {
        struct fetch later = later_job(p, jobs, num_jobs, i + threads);
        attend(t, p, job, head, 1, 1, 1, &later);
    } else {
        attend(t, p, job, head, 1, 1, 0, NULL);
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
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_jobs * kv_heads; i++)
            attend_job(&p, jobs, num_jobs, i, omp_get_num_threads(), &t, bf16, paired);
    }
    free(jobs);
    return 0;
}
