/* C [M, N] (+)= A [M, K] B [K, N], small enough to stay in cache: the inner loop of everything.

   A and B are of floats, or (`pairs`) of dwords that hold two bfloat16 neighbours along K; K then
   counts pairs. B has N in whole vectors. C is float. */
#pragma once

#include "vectors.h"

#define LINE 64 /* bytes of the cache */
#define MOST_LINES 4 /* that are fetched with each of `depth` */
#define MOST_DEPTH 128 /* of pairs that are widened: a block of rows stays within L1 */

#if defined(__AVX512F__)
#define MAX_VECTORS 4 /* 6 x 4 sums, 4 vectors of B: 28 of 32 registers */
#else
#define MAX_VECTORS 1 /* 6 x 1 sums, 1 vector of B, in halves: 14 of 16 registers */
#endif
#define MAX_ROWS 6
#define MAX_PIECES (MAX_VECTORS * PIECES)

INLINE vp load_piece(const void *p) { return *(const vp_any *)p; }

INLINE vp multiply_add(vp sum, uint32_t a, vp b, int pairs) {
#if MULTIPLIES_PAIRS
    if (pairs)
        return (vp)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#endif
    (void)pairs;
    float x;
    memcpy(&x, &a, 4);
    return sum + x * b;
}

/* One of each pair, as floats. */
INLINE vp half_of(vp pairs, int odd) {
    return (vp)(odd ? (up)pairs & 0xffff0000u : (up)pairs << 16);
}

/* Into L2, the next `lines`. Written out: a loop would keep the sums from their registers. */
INLINE const char *fetch_lines(const char *ahead, int lines) {
    if (lines > 0) __builtin_prefetch(ahead, 0, 2);
    if (lines > 1) __builtin_prefetch(ahead + LINE, 0, 2);
    if (lines > 2) __builtin_prefetch(ahead + 2 * LINE, 0, 2);
    if (lines > 3) __builtin_prefetch(ahead + 3 * LINE, 0, 2);
    return ahead + lines * LINE;
}

/* Where pairs are widened, A's are already: see `widen_rows`. */
INLINE void block_product(int rows, int vectors, const uint32_t *a, int64_t lda, const uint32_t *b,
                          int64_t ldb, float *c, int64_t ldc, int depth, int adds, int pairs,
                          const char *ahead, int lines) {
    vp sums[MAX_ROWS][MAX_PIECES];
    const float *wide = (const float *)a;
    int pieces = vectors * (int)PIECES;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < pieces; j++)
            sums[i][j] = adds ? load_piece(c + i * ldc + j * PIECE) : (vp){};
    for (int k = 0; k < depth; k++, b += ldb) {
        ahead = fetch_lines(ahead, lines);
        if (pairs && !MULTIPLIES_PAIRS) {
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                vp half[MAX_PIECES];
#pragma GCC unroll 4
                for (int j = 0; j < pieces; j++) half[j] = half_of(load_piece(b + j * PIECE), odd);
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < pieces; j++)
                        sums[i][j] += wide[i * lda + 2 * k + odd] * half[j];
            }
            continue;
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < pieces; j++)
                sums[i][j] = multiply_add(sums[i][j], a[i * lda + k], load_piece(b + j * PIECE),
                                          pairs);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < pieces; j++) *(vp_any *)(c + i * ldc + j * PIECE) = sums[i][j];
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

/* A block's rows of pairs as floats. */
INLINE void widen_rows(int rows, const uint32_t *a, int64_t lda, int depth, float *wide) {
    for (int i = 0; i < rows; i++, a += lda, wide += 2 * depth) {
        int k = 0;
        for (; k + LANES <= 2 * depth; k += LANES) store(wide + k, load_bf16((const uint16_t *)a + k));
        for (; k < 2 * depth; k++) wide[k] = one_of(a, k, 1);
    }
}

/* Rows in blocks of like size, since a block of one row wastes the most. */
INLINE void blocked_product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb,
                            float *c, int64_t ldc, int num_rows, int num_vectors, int depth,
                            int adds, int pairs, const char *ahead, int lines) {
    int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    float wide[pairs && !MULTIPLIES_PAIRS ? MAX_ROWS * 2 * MOST_DEPTH : 1];
    for (int block = 0; block < blocks; block++) {
        int start = num_rows * block / blocks, stop = num_rows * (block + 1) / blocks;
        const uint32_t *own = a + start * lda;
        int64_t stride = lda;
        if (pairs && !MULTIPLIES_PAIRS) {
            widen_rows(stop - start, own, lda, depth, wide);
            own = (const uint32_t *)wide, stride = 2 * depth;
        }
        for (int v = 0; v < num_vectors; v += MAX_VECTORS) {
            int vectors = num_vectors - v < MAX_VECTORS ? num_vectors - v : MAX_VECTORS;
            any_block_product(stop - start, vectors, own, stride, b + v * LANES, ldb,
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
DEFINE_PRODUCT(product_of_pairs, 1)

/* How many lines each of `blocks` fetches of `total`; 0 where they would fetch much more. */
INLINE int lines_of_each(int total, int blocks) {
    return blocks > total ? 0 : (total + blocks - 1) / blocks;
}

/* What `ahead` points at is fetched into L2 meanwhile, line after line: `lines`, up to MOST_LINES, for
   each of `depth` and block of rows and vectors. */
INLINE void product_and_fetch(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb,
                              float *c, int64_t ldc, int num_rows, int num_vectors, int depth,
                              int adds, int pairs, const char *ahead, int lines) {
    if (pairs)
        product_of_pairs(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, ahead, lines);
    else
        product_of_floats(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, ahead, lines);
}

INLINE void product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c,
                    int64_t ldc, int num_rows, int num_vectors, int depth, int adds, int pairs) {
    product_and_fetch(a, lda, b, ldb, c, ldc, num_rows, num_vectors, depth, adds, pairs, NULL,
                      0);
}
