/* C [M, 64] = A [M, K] times a panel as packed.h has it, or C [M, 32] a half of one; C has 64 floats
   between its rows. A as in product.h.

   Pairs that the processor multiplies are unpacked in its registers by each block of rows anew:
   shuffles run beside products. Where they have to be widened, which does not, the first of many blocks
   leaves what it has widened to the others. */
#pragma once

#include "packed.h"

#define LINES_OF_ROW (PACKED_ROW / LINE)
/* Rows of a panel for all rows of A, before the next ones: they, or the floats of them, are within L2,
   and within L1 where all floats come from memory. */
#define AT_ONCE (MULTIPLIES_PAIRS ? 1024 : IN_REGISTERS ? 256 : 32)
#define IN_REGISTERS (REGISTER_BYTES == 64) /* there is room for sums and what is unpacked */
#define BLOCKS_THAT_UNPACK 2                /* each anew, rather than that one leaves floats */

/* A row of the panel, or halves of it, from `half` on. */
INLINE void take_row(struct rows *b, bp table, int half, int halves, vp *pairs) {
    if (b->first++ == *b->places) {
#pragma GCC unroll 8
        for (int j = 0; j < halves * 2 * (int)PIECES; j++)
            pairs[j] = load_piece(b->kept + half * HALF + j * PIECE);
        b->places++, b->kept += PANEL;
    } else {
        unpack_half(b->packed, table, half, pairs);
        if (halves > 1) unpack_half(b->packed, table, 1, pairs + 2 * PIECES);
    }
    b->packed += PACKED_ROW;
}

/* A's rows are widened already, if they have to be; `left`: [2 * depth, 64] for the panel widened, or
   NULL. For each row of the panel so many of the `lines` ahead are fetched. */
INLINE void unpacking_block(int rows, int halves, const uint32_t *a, int64_t lda, struct rows b,
                            int half, float *c, int depth, int adds, float *left, const char *ahead,
                            int lines) {
    vp sums[MAX_ROWS][4], pairs[4], own[4];
    bp table = table_of(b.highs);
    int vectors = 2 * halves, parts = MULTIPLIES_PAIRS ? 1 : 2;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sums[i][j] = adds ? load_piece(c + i * PANEL + j * PIECE) : (vp){};
    for (int k = 0; k < depth; k++) {
        ahead = fetch_lines(ahead, lines);
        take_row(&b, table, half, halves, pairs);
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                own[j] = MULTIPLIES_PAIRS ? pairs[j] : half_of(pairs[j], part);
            if (left)
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++)
                    *(vp_any *)(left + (2 * k + part) * PANEL + j * PIECE) = own[j];
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++)
                    sums[i][j] = multiply_add(sums[i][j], a[i * lda + parts * k + part], own[j], 1);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) *(vp_any *)(c + i * PANEL + j * PIECE) = sums[i][j];
}

#define UNPACKING_BLOCK(R)                                                                   \
    case R:                                                                                  \
        if (halves > 1)                                                                      \
            unpacking_block(R, 2, a, lda, *b, 0, c, depth, adds, left, ahead, lines);        \
        else                                                                                 \
            unpacking_block(R, 1, a, lda, *b, half, c, depth, adds, left, ahead, lines);     \
        break;

INLINE void unpack_and_multiply(int num_rows, int halves, const uint32_t *a, int64_t lda,
                                const struct rows *b, int half, float *c, int depth, int adds,
                                float *left, const char *ahead, int lines) {
    switch (num_rows) {
        UNPACKING_BLOCK(1) UNPACKING_BLOCK(2) UNPACKING_BLOCK(3)
        UNPACKING_BLOCK(4) UNPACKING_BLOCK(5) UNPACKING_BLOCK(6)
    }
}

/* The next rows of the panel, AT_ONCE or what there is. */
#if MULTIPLIES_PAIRS
static void packed_part(const uint32_t *a, int64_t lda, const struct rows *b, int half, int halves,
                        float *c, int num_rows, int depth, int adds, const char *ahead) {
    int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    int lines = ahead ? (LINES_OF_ROW + blocks - 1) / blocks : 0;
    for (int block = 0; block < blocks; block++) {
        int start = num_rows * block / blocks, stop = num_rows * (block + 1) / blocks;
        unpack_and_multiply(stop - start, halves, a + start * lda, lda, b, half, c + start * PANEL,
                            depth, adds, NULL, ahead, lines);
        ahead += (int64_t)depth * lines * LINE;
    }
}
#else
/* Widened, and nothing else. */
INLINE void leave_panel(struct rows b, int depth, float *left, const char *ahead, int lines) {
    bp table = table_of(b.highs);
    for (int k = 0; k < depth; k++, left += 2 * PANEL) {
        vp pairs[4 * PIECES];
        ahead = fetch_lines(ahead, lines);
        take_row(&b, table, 0, 2, pairs);
#pragma GCC unroll 8
        for (int j = 0; j < 4 * (int)PIECES; j++) {
            *(vp_any *)(left + j * PIECE) = half_of(pairs[j], 0);
            *(vp_any *)(left + PANEL + j * PIECE) = half_of(pairs[j], 1);
        }
    }
}

static void packed_part(const uint32_t *a, int64_t lda, const struct rows *b, int half, int halves,
                        float *c, int num_rows, int depth, int adds, const char *ahead) {
    float left[2 * AT_ONCE * PANEL] __attribute__((aligned(64)));
    float own[MAX_ROWS * 2 * AT_ONCE];
    int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS, lines = ahead ? LINES_OF_ROW : 0;
    int leaves = blocks > BLOCKS_THAT_UNPACK;
    if (!IN_REGISTERS) leave_panel(*b, depth, left, ahead, lines);
    for (int block = 0; block < blocks; block++) {
        int start = num_rows * block / blocks, stop = num_rows * (block + 1) / blocks;
        widen_rows(stop - start, a + start * lda, lda, depth, own);
        if (IN_REGISTERS && (block == 0 || !leaves))
            unpack_and_multiply(stop - start, halves, (const uint32_t *)own, 2 * depth, b, half,
                                c + start * PANEL, depth, adds, leaves ? left : NULL, ahead,
                                block == 0 ? lines : 0);
        else
            product_of_floats((const uint32_t *)own, 2 * depth,
                              (const uint32_t *)left + (IN_REGISTERS ? 0 : half * HALF), PANEL,
                              c + start * PANEL, PANEL, stop - start, 2 * halves, 2 * depth, adds,
                              NULL, 0);
    }
}
#endif

/* `half`: which, if `halves` is 1. Meanwhile the lines from `ahead` on are fetched into L2, if it is
   not NULL: as many as the panel has, or more. */
static void packed_product(const uint32_t *a, int64_t lda, struct rows b, int half, int halves,
                           float *c, int num_rows, int depth, const char *ahead) {
    for (int k = 0, part; k < depth; k += part) {
        part = depth - k < AT_ONCE ? depth - k : AT_ONCE;
        packed_part(a + k, lda, &b, half, halves, c, num_rows, part, k > 0,
                    ahead ? ahead + (int64_t)k * PACKED_ROW : NULL);
        skip_rows(&b, part);
    }
}
