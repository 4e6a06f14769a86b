/* C [M, N] (+)= A [M, K] B [K, N], small enough to stay in cache: the inner loop of everything.

   A and B are of floats, or (`pairs`) of dwords that hold two bfloat16 neighbours along K; K then
   counts pairs. B has N in whole vectors. C is float. */
#pragma once

#include "vectors.h"

#define LINE 64 /* bytes of the cache */
#define MOST_LINES 4 /* that are fetched with each of `depth` */

#if defined(__AVX512F__)
#define MAX_ROWS 6 /* 6 x 4 accumulators, 4 vectors of B: 28 of 32 registers */
#define MAX_VECTORS 4
#else
#define MAX_ROWS 4 /* 4 x 1 accumulators, 1 vector of B, in halves: 10 of 16 registers */
#define MAX_VECTORS 1
#endif

INLINE vf multiply_add(vf sum, uint32_t a, const uint32_t *b, int pairs) {
#if HAS_PAIRS
    if (pairs)
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a),
                                    (__m512bh)_mm512_loadu_si512(b));
#endif
    (void)pairs;
    float x;
    memcpy(&x, &a, 4);
    return sum + x * load((const float *)b);
}

INLINE void block_product(int rows, int vectors, const uint32_t *a, int64_t lda, const uint32_t *b,
                          int64_t ldb, float *c, int64_t ldc, int depth, int adds, int pairs,
                          const char *ahead, int lines) {
    vf sums[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sums[i][j] = adds ? load(c + i * ldc + j * LANES) : (vf){};
    for (int k = 0; k < depth; k++, b += ldb) {
        if (lines) { /* written out: a loop would keep the sums from their registers */
            __builtin_prefetch(ahead, 0, 2);
            if (lines > 1) __builtin_prefetch(ahead + LINE, 0, 2);
            if (lines > 2) __builtin_prefetch(ahead + 2 * LINE, 0, 2);
            if (lines > 3) __builtin_prefetch(ahead + 3 * LINE, 0, 2);
            ahead += lines * LINE;
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sums[i][j] = multiply_add(sums[i][j], a[i * lda + k], b + j * LANES, pairs);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(c + i * ldc + j * LANES, sums[i][j]);
}

#define BLOCK(R, V)                                                                        \
    case R * 8 + V:                                                                        \
        if (R <= MAX_ROWS && V <= MAX_VECTORS)                                             \
            block_product(R, V, a, lda, b, ldb, c, ldc, depth, adds, pairs, ahead, lines); \
        break;
#define BLOCKS(R) BLOCK(R, 1) BLOCK(R, 2) BLOCK(R, 3) BLOCK(R, 4)

/* The block sizes become constants here, so that the sums stay in registers. */
INLINE void any_block_product(int rows, int vectors, const uint32_t *a, int64_t lda,
                              const uint32_t *b, int64_t ldb, float *c, int64_t ldc, int depth,
                              int adds, int pairs, const char *ahead, int lines) {
    switch (rows * 8 + vectors) {
        BLOCKS(1) BLOCKS(2) BLOCKS(3) BLOCKS(4) BLOCKS(5) BLOCKS(6)
    }
}

/* Rows in blocks of like size, since a block of one row wastes the most. */
INLINE void blocked_product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb,
                            float *c, int64_t ldc, int num_rows, int num_vectors, int depth,
                            int adds, int pairs, const char *ahead, int lines) {
    int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int v = 0; v < num_vectors; v += MAX_VECTORS) {
        int vectors = num_vectors - v < MAX_VECTORS ? num_vectors - v : MAX_VECTORS;
        for (int block = 0; block < blocks; block++) {
            int start = num_rows * block / blocks, stop = num_rows * (block + 1) / blocks;
            any_block_product(stop - start, vectors, a + start * lda, lda, b + v * LANES, ldb,
                              c + start * ldc + v * LANES, ldc, depth, adds, pairs, ahead, lines);
            if (ahead) ahead += (int64_t)depth * LINE * lines;
        }
    }
}

/* Not inlined: each is a hundred loops, and compiling them takes most of the compiler's time. */
#define DEFINE_PRODUCT(name, pairs)                                                            \
    static __attribute__((noinline, unused)) void name(                                        \
        const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc, \
        int num_rows, int num_vectors, int depth, int adds, const char *ahead, int lines) {    \
        blocked_product(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, pairs,     \
                        ahead, lines);                                                         \
    }
DEFINE_PRODUCT(product_of_floats, 0)
#if HAS_PAIRS
DEFINE_PRODUCT(product_of_pairs, 1)
#endif

/* How many lines each of `blocks` fetches of `total`; 0 where they would fetch much more. */
INLINE int lines_of_each(int total, int blocks) {
    return blocks > total ? 0 : (total + blocks - 1) / blocks;
}

/* What `ahead` points at is fetched into L2 meanwhile, line after line: `lines`, up to MOST_LINES, for
   each of `depth` and block of rows and vectors. */
INLINE void product_and_fetch(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb,
                              float *c, int64_t ldc, int num_rows, int num_vectors, int depth,
                              int adds, int pairs, const char *ahead, int lines) {
#if HAS_PAIRS
    if (pairs) {
        product_of_pairs(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, ahead,
                         lines);
        return;
    }
#endif
    (void)pairs;
    product_of_floats(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, ahead, lines);
}

INLINE void product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c,
                    int64_t ldc, int num_rows, int num_vectors, int depth, int adds, int pairs) {
    product_and_fetch(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, pairs, NULL,
                      0);
}
