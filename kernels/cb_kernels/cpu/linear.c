/* y = x W^T of bfloat16 with float sums; what follows it is done while the sums are still in cache.

   The weight is packed, see packed.h. */
#include "best.h"
#include "pack.c"
#include "packed_product.h"
#include "team.h"

#include <omp.h>

#define MOST_ROWS 128       /* of a job: its float sums are 32 KiB */
#define JOBS_PER_THREAD 6   /* at least, so that the last ones end together */
#define FEW_ROWS MAX_ROWS   /* that read weights from memory as fast as they come */

/* Bytes ahead that a stream of a few rows' weights is fetched. Intel's processors, left to follow it
   by themselves, took a fifth longer at one row, half as long again at 4 to 6; AMD's follow it best
   alone, and to fetch as well took up to a tenth longer. */
#if defined(OF_INTEL)
#define FETCHED_AHEAD 8192
#else
#define FETCHED_AHEAD 0
#endif

struct output {
    const uint16_t *bias; /* [N], in the order of the panels' columns, or NULL */
    const uint16_t *onto; /* [M, N], contiguous, or NULL: y is onto + scale * product */
    float scale;
    int gated;            /* a panel is 32 of gate, then their 32 of up; y is silu(gate) * up */
    uint16_t *y;          /* [M, width] */
    int64_t width;        /* N, or N / 2 when gated */
    struct best *best;    /* [M]: each row's largest, in place of y; or NULL. Not when gated */
};

INLINE vf sum_at(const struct output *o, const float *sums, int64_t first, int column) {
    vf x = load(sums + column);
    return o->bias ? x + load_bf16(o->bias + first + column) : x;
}

/* sums [64] to y's row: `num` columns from `first` on, a whole number of vectors. */
INLINE void finish(const struct output *o, const float *sums, int64_t row, int64_t first, int num) {
    if (o->best) {
        for (int j = 0; j < num; j += LANES)
            note_best(o->best + row, sum_at(o, sums, first, j), first + j);
        return;
    }
    uint16_t *y = o->y + row * o->width;
    if (!o->gated) {
        const uint16_t *onto = o->onto ? o->onto + row * o->width + first : NULL;
        for (int j = 0; j < num; j += LANES) {
            vf x = sum_at(o, sums, first, j);
            store_bf16(y + first + j, onto ? load_bf16(onto + j) + x * o->scale : x);
        }
        return;
    }
    for (int j = 0; j < num / 2; j += LANES) {
        vf gate = sum_at(o, sums, first, j), up = sum_at(o, sums, first, j + num / 2);
        store_bf16(y + first / 2 + j, silu_of(gate) * up);
    }
}

/* Rows [start, stop) of x [M, K] times `num` of the outputs from `first` on: those of one panel, or of
   a half; see packed_product. */
static void multiply_panel(const uint16_t *x, int64_t x_stride, const struct packed *w,
                           const char *ahead, int64_t depth, int64_t start, int64_t stop,
                           int64_t first, int num, const struct output *o) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    packed_product((const uint32_t *)(x + start * x_stride), x_stride / 2,
                   rows_of(w, first / PANEL, depth), first % PANEL / HALF, num > HALF ? 2 : 1, sums,
                   (int)(stop - start), (int)depth, ahead);
    for (int64_t i = start; i < stop; i++) finish(o, sums + (i - start) * PANEL, i, first, num);
}

/* Into which jobs a product is cut: `whole` panels by `parts` of their rows, then the other panels'
   halves. */
struct cut {
    int64_t whole, parts, halves;
};

/* Enough jobs for every member, none of them tiny, and the last ones end together. */
static struct cut cut_product(int64_t num_rows, int64_t num_out, int gated, int size) {
    int64_t panels = panels_of(num_out), least = 4 * MAX_ROWS;
    if (!panels) return (struct cut){};
    if (num_rows > least && num_rows <= MOST_ROWS && panels >= 2 * size && !gated) {
        /* Rows that were cut would read a panel twice. What is left of the panels when each member
           has had as many is cut into halves: 4 to 8% at 25 to 64 rows. */
        int64_t whole = panels - panels % size, left = num_out - whole * PANEL;
        return (struct cut){whole, 1, left > 0 ? (left + HALF - 1) / HALF : 0};
    }
    int64_t wanted = (JOBS_PER_THREAD * size + panels - 1) / panels;
    int64_t rows = (num_rows + wanted - 1) / wanted;
    rows = (rows + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
    rows = rows < least ? least : rows > MOST_ROWS ? MOST_ROWS : rows;
    return (struct cut){panels, (num_rows + rows - 1) / rows, 0};
}

/* A few rows: each job's columns follow one another, so that its weights come as one stream. */
static void multiply_few_rows(struct member *m, const uint16_t *x, int64_t x_stride,
                              const struct packed *w, const struct output *o, int64_t num_rows,
                              int64_t num_in, int64_t num_out) {
    int64_t depth = num_in / 2;
    struct streams streams = cut_into_streams(num_out, num_out * depth * PACKED_ROW / PANEL, PANEL,
                                              o->gated ? PANEL : HALF, m->team->size);
    FOR_JOBS(job, m, jobs_of(&streams), 1) {
        int64_t from = column_of(&streams, job), to = column_of(&streams, job + 1);
        for (int64_t stop; from < to; from = stop) {
            int64_t panel = from / PANEL, end = (panel + 1) * PANEL;
            stop = end < to ? end : to;
            int fetches = FETCHED_AHEAD && stop - from == PANEL;
            const uint8_t *own = w->rows + panel * depth * PACKED_ROW;
            multiply_panel(x, x_stride, w, fetches ? (const char *)own + FETCHED_AHEAD : NULL, depth,
                           0, num_rows, from, (int)(stop - from), o);
        }
    }
}

/* Each job is taken by the next free member. */
static void multiply_many_rows(struct member *m, const uint16_t *x, int64_t x_stride,
                               const struct packed *w, const struct output *o, int64_t num_rows,
                               int64_t num_in, int64_t num_out) {
    int64_t depth = num_in / 2;
    struct cut cut = cut_product(num_rows, num_out, o->gated, m->team->size);
    int64_t num_wholes = cut.whole * cut.parts;
    FOR_JOBS(job, m, num_wholes + cut.halves, 1) {
        int is_whole = job < num_wholes;
        int64_t part = is_whole ? job % cut.parts : 0;
        int64_t first = is_whole ? job / cut.parts * PANEL
                                 : cut.whole * PANEL + (job - num_wholes) * HALF;
        int64_t start = num_rows * part / cut.parts, stop = num_rows * (part + 1) / cut.parts;
        int64_t left = num_out - first, most = is_whole ? PANEL : HALF;
        /* The panel that this member will want next, if the others are as fast. Many blocks fetch
           past its end, what the job after that wants: 1% faster than to stop there. */
        int64_t next = first / PANEL + m->team->size;
        int fetches = is_whole && part == 0 && next < panels_of(num_out);
        multiply_panel(x, x_stride, w,
                       fetches ? (const char *)w->rows + next * depth * PACKED_ROW : NULL, depth,
                       start, stop, first, (int)(left < most ? left : most), o);
    }
}

/* The whole product: one stage. */
static void linear_by_team(struct member *m, const uint16_t *x, int64_t x_stride,
                           const struct packed *w, const struct output *o, int64_t num_rows,
                           int64_t num_in, int64_t num_out) {
    if (num_rows > FEW_ROWS)
        multiply_many_rows(m, x, x_stride, w, o, num_rows, num_in, num_out);
    else
        multiply_few_rows(m, x, x_stride, w, o, num_rows, num_in, num_out);
}

/* x [num_rows, num_in] with x_stride between rows; num_out a multiple of 16, of
   64 when gated; num_in even. */
void cb_linear(const uint16_t *x, int64_t x_stride, const struct packed *w, const uint16_t *bias,
               const uint16_t *onto, float scale, int gated, uint16_t *y, int64_t num_rows,
               int64_t num_in, int64_t num_out) {
    struct output o = {bias, onto, scale, gated, y, gated ? num_out / 2 : num_out, NULL};
    struct stage stages[1] = {};
    struct team team = {omp_get_max_threads(), stages, 0};
#pragma omp parallel
    linear_by_team(&(struct member){&team, omp_get_thread_num(), 0}, x, x_stride, w, &o,
                   num_rows, num_in, num_out);
}

/* How pairs are multiplied: 2, by the processor; 1, widened; 0, too slowly to be used. */
int cb_way_of_pairs(void) {
#if defined(__AVX2__) && defined(__FMA__)
    return MULTIPLIES_PAIRS ? 2 : 1;
#else
    return 0;
#endif
}
