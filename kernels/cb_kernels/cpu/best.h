/* The largest of a row of y, noted as its vectors are made, so that y need not be written. */
#pragma once

#include "vectors.h"

/* One member's, of one row: of each lane the first of the largest; a NaN is larger than all. */
struct best {
    vf value;
    vi column;
};

INLINE struct best no_best(void) { return (struct best){splat(-INFINITY), (vi){}}; }

/* x is rounded to bfloat16, as it would be in y; its columns begin at `first`, which only grows:
   of equals the one that is noted first stays. */
INLINE void note_best(struct best *b, vf x, int64_t first) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint16_t rounded[LANES];
    store_bf16(rounded, x);
    x = load_bf16(rounded);
    vi larger = (x > b->value) | (x != x);
    b->value = choose(larger, x, b->value);
    b->column = ((lanes + (int32_t)first) & larger) | (b->column & ~larger);
}

/* The column of a row that `num` have noted, `stride` apart; -1 if its largest is not finite. */
INLINE int64_t settle_best(const struct best *b, int64_t num, int64_t stride) {
    float value = -INFINITY;
    int64_t column = 0;
    for (int64_t i = 0; i < num; i++)
        for (int lane = 0; lane < LANES; lane++) {
            float x = b[i * stride].value[lane];
            int64_t at = b[i * stride].column[lane];
            if (x != x || x > value || (x == value && at < column)) column = at, value = x;
        }
    return isfinite(value) ? column : -1;
}
