/* The largest of each row of a vocabulary: maxima by vectors, and one look back for the index. */
#include "vectors.h"

#define BLOCK 512 /* numbers between two looks at the maximum */

INLINE int is_larger(float x, float than) { return x > than || x != x; }

/* The first of the largest `width` numbers of x from element `row` on; a NaN is larger than all. */
INLINE void argmax_row(const void *x, int64_t row, int64_t width, int64_t *index, float *value,
                       int bf16) {
    float best = -INFINITY;
    int64_t at_block = 0;
    for (int64_t start = 0; start < width && best == best; start += BLOCK) {
        int64_t stop = width - start < BLOCK ? width : start + BLOCK, i = start;
        vf most = splat(-INFINITY);
        for (; i + LANES <= stop; i += LANES) {
            vf numbers = load_as(x, row + i, bf16);
            most = choose((numbers > most) | (numbers != numbers), numbers, most); /* NaN stays */
        }
        float found = best;
        for (int lane = 0; lane < LANES; lane++)
            if (is_larger(most[lane], found)) found = most[lane];
        for (; i < stop; i++) {
            float number = one_of(x, row + i, bf16);
            if (is_larger(number, found)) found = number;
        }
        if (is_larger(found, best)) best = found, at_block = start;
    }
    int64_t i = at_block;
    for (;; i++) {
        float number = one_of(x, row + i, bf16);
        if (number == best || number != number) break;
    }
    *index = i, *value = best;
}

/* index and value [rows] of x [rows, width], contiguous. */
void cb_argmax(const void *x, int64_t *index, float *value, int64_t rows, int64_t width, int bf16) {
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        if (bf16)
            argmax_row(x, row * width, width, index + row, value + row, 1);
        else
            argmax_row(x, row * width, width, index + row, value + row, 0);
    }
}
