/* y = x W^T with 8 bits for weights and for x; sums of whole numbers are exact.

   A weight has one scale for each output; x is rounded here, with one scale for each GROUP inputs of
   a row, so that a few large inputs take precision only from their neighbours. The processor
   multiplies unsigned by signed bytes: a weight w lies as w + 128, and what that adds to a sum, 128
   times the group's x, is where the sum starts from.

   The weight is packed in panels of 64 outputs: [N / 64, K / 4, 64] of four bytes along K, K padded
   to whole groups. */
#include "best.h"
#include "product.h"
#include "team.h"

/* Whether the processor multiplies bytes (VPDPBUSD). */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_INT8 1
#else
#define HAS_INT8 0
#endif

#if HAS_INT8

#include <omp.h>

#define GROUP 64           /* mirrored in int8.py */
#define GROUP_DWORDS 16    /* of four bytes */
#define COLUMNS 64         /* of a panel */
#define INT8_ROWS 3        /* 3 x 4 sums, whole and float, 4 vectors of the panel: 29 registers */
#define GROUPS_AT_A_TIME 4 /* of a panel: 16 KiB, within L1 */
#define MOST_INT8_ROWS 96  /* of a job: its float sums are 24 KiB */
#define LEAST_INT8_ROWS 24
#define INT8_JOBS 6        /* for each thread at least, so that the last ones end together */
#define INT8_FETCHED_AHEAD 2048    /* bytes */
#define SMALLEST 1e-30f    /* a group of no larger x is one of zeros */

/* x as bytes: for each row its groups' bytes, then their scales, then where their sums start; in all
   GROUP + 8 bytes a group. */
struct rounded {
    char *rows;
    int64_t groups;
};

struct int8_weight {
    const uint32_t *panels;
    const float *scales; /* [N], as all of N in the order of the panels' columns */
};

struct int8_output {
    const void *bias, *onto; /* as in `struct output` of linear.c */
    float scale;
    int gated, bf16; /* bias, onto and y are bfloat16, or float */
    void *y;
    int64_t width;
    struct best *best;
};

INLINE int8_t *values_of(const struct rounded *r, int64_t row) {
    return (int8_t *)(r->rows + row * r->groups * (GROUP + 8));
}
INLINE float *scales_of(const struct rounded *r, int64_t row) {
    return (float *)(values_of(r, row) + r->groups * GROUP);
}
INLINE int32_t *starts_of(const struct rounded *r, int64_t row) {
    return (int32_t *)(scales_of(r, row) + r->groups);
}

/* Up to 16 numbers, zeros behind them. */
INLINE __m512 load_some(const void *x, int64_t index, int64_t num, int bf16) {
    __mmask16 mask = num >= LANES ? 0xffff : (__mmask16)((1u << num) - 1);
    if (!bf16) return _mm512_maskz_loadu_ps(mask, (const float *)x + index);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* A group with an infinity or a NaN gets NaN for its scale, so that all of its row's y is NaN. */
INLINE void round_group(const void *x, int64_t index, int64_t num, int bf16, int8_t *values,
                        float *scale, int32_t *start) {
    __m512 x_of[GROUP / LANES], largest = _mm512_setzero_ps(), damage = _mm512_setzero_ps();
    for (int i = 0; i < GROUP / LANES; i++) {
        int64_t left = num - i * LANES;
        x_of[i] = load_some(x, index + i * LANES, left < 0 ? 0 : left, bf16);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x_of[i]));
        damage = _mm512_add_ps(damage, _mm512_mul_ps(x_of[i], _mm512_setzero_ps()));
    }
    float most = _mm512_reduce_max_ps(largest);
    __m512 inverse = _mm512_set1_ps(most > SMALLEST ? 127.0f / most : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < GROUP / LANES; i++) {
        __m512 steps = _mm512_mul_ps(x_of[i], inverse);
        /* NaN counts as 0: it would convert to the smallest integer, and two of these overflow. */
        __m512i q = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q), steps);
        total = _mm512_add_epi32(total, q);
        _mm_storeu_si128((__m128i *)(values + i * LANES), _mm512_cvtsepi32_epi8(q));
    }
    *scale = most / 127.0f + _mm512_reduce_add_ps(damage);
    *start = (int32_t)(0u - ((uint32_t)_mm512_reduce_add_epi32(total) << 7));
}

INLINE void round_row(const void *x, int64_t row, int64_t stride, int64_t num_in, int bf16,
                      const struct rounded *r) {
    int8_t *values = values_of(r, row);
    for (int64_t g = 0, k = 0; g < r->groups; g++, k += GROUP)
        round_group(x, row * stride + k, num_in - k, bf16, values + k, scales_of(r, row) + g,
                    starts_of(r, row) + g);
}

/* Some groups of some rows times a panel, added to their sums unless they are the first. */
INLINE void int8_block(int rows, int vectors, const uint32_t *a, int64_t lda, const float *scales,
                       const int32_t *starts, int64_t num_groups, const uint32_t *panel,
                       float *sums, int adds, const char *ahead, int lines) {
    vf total[INT8_ROWS][MAX_VECTORS];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            total[i][j] = adds ? load(sums + i * COLUMNS + j * LANES) : (vf){};
    for (int64_t g = 0; g < num_groups; g++, a += GROUP_DWORDS) {
        vi whole[INT8_ROWS][MAX_VECTORS]; /* not __m512i: GCC 12 would keep them in memory */
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) whole[i][j] = starts[i * lda + g] - (vi){};
#pragma GCC unroll 1
        for (int k = 0; k < GROUP_DWORDS; k++, panel += COLUMNS) {
            for (int i = 0; i < lines; i++, ahead += LINE) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++)
                    whole[i][j] = (vi)_mm512_dpbusd_epi32((__m512i)whole[i][j],
                                                          _mm512_loadu_si512(panel + j * LANES),
                                                          _mm512_set1_epi32((int)a[i * lda + k]));
        }
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                total[i][j] += __builtin_convertvector(whole[i][j], vf) * scales[i * lda + g];
    }
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(sums + i * COLUMNS + j * LANES, total[i][j]);
}

#define INT8_BLOCK(R, V)                                                                       \
    case R * 8 + V:                                                                            \
        int8_block(R, V, a, lda, scales, starts, num_groups, panel, sums, adds, ahead, lines); \
        break;
#define INT8_BLOCKS(R) INT8_BLOCK(R, 1) INT8_BLOCK(R, 2) INT8_BLOCK(R, 3) INT8_BLOCK(R, 4)

/* The block sizes become constants here, so that the sums stay in registers. `lines` of `ahead` are
   fetched into L2 for each four inputs. */
static __attribute__((noinline)) void any_int8_block(int rows, int vectors,
                                                     const struct rounded *r, int64_t row,
                                                     int64_t group, int64_t num_groups,
                                                     const uint32_t *panel, float *sums,
                                                     const char *ahead, int lines) {
    int64_t lda = r->groups * (GROUP + 8) / 4;
    const uint32_t *a = (const uint32_t *)values_of(r, row) + group * GROUP_DWORDS;
    const float *scales = scales_of(r, row) + group;
    const int32_t *starts = starts_of(r, row) + group;
    int adds = group > 0;
    switch (rows * 8 + vectors) {
        INT8_BLOCKS(1) INT8_BLOCKS(2) INT8_BLOCKS(3)
    }
}

INLINE vf int8_sum_at(const struct int8_output *o, const struct int8_weight *w, const float *sums,
                      int64_t first, int column) {
    vf x = load(sums + column) * load(w->scales + first + column);
    return o->bias ? x + load_as(o->bias, first + column, o->bf16) : x;
}

/* As `finish` in linear.c, for float as well. */
INLINE void finish_int8(const struct int8_output *o, const struct int8_weight *w,
                        const float *sums, int64_t row, int64_t first, int num) {
    if (o->best) {
        for (int j = 0; j < num; j += LANES)
            note_best(o->best + row, int8_sum_at(o, w, sums, first, j), first + j);
        return;
    }
    int64_t y = row * o->width + (o->gated ? first / 2 : first);
    int width = o->gated ? num / 2 : num;
    for (int j = 0; j < width; j += LANES) {
        vf x = int8_sum_at(o, w, sums, first, j);
        if (o->gated)
            x = silu_of(x) * int8_sum_at(o, w, sums, first, j + width);
        else if (o->onto)
            x = load_as(o->onto, y + j, o->bf16) + x * o->scale;
        store_as(o->y, y + j, x, o->bf16);
    }
}

/* Rows [start, stop) times `num` columns of a panel, which are y's from `first` on; meanwhile `ahead`
   is fetched, so many `lines` for each four inputs and block of rows. */
static void multiply_int8_panel(const struct rounded *r, const struct int8_weight *w,
                                const uint32_t *panel, const char *ahead, int lines,
                                int64_t start, int64_t stop, int64_t first, int num,
                                const struct int8_output *o) {
    float sums[MOST_INT8_ROWS * COLUMNS] __attribute__((aligned(64)));
    int rows = (int)(stop - start), blocks = (rows + INT8_ROWS - 1) / INT8_ROWS;
    for (int64_t g = 0; g < r->groups; g += GROUPS_AT_A_TIME) {
        int64_t num_groups = r->groups - g < GROUPS_AT_A_TIME ? r->groups - g : GROUPS_AT_A_TIME;
        int64_t at = g * GROUP_DWORDS * COLUMNS;
        for (int block = 0; block < blocks; block++) {
            int from = rows * block / blocks, to = rows * (block + 1) / blocks;
            int64_t fetched = at * 4 + block * num_groups * GROUP_DWORDS * LINE * lines;
            any_int8_block(to - from, num / LANES, r, start + from, g, num_groups, panel + at,
                           sums + from * COLUMNS, ahead + fetched, block * lines < MOST_LINES ? lines : 0);
        }
    }
    for (int i = 0; i < rows; i++) finish_int8(o, w, sums + i * COLUMNS, start + i, first, num);
}

/* Into how many jobs the rows of a panel are cut. */
static int64_t int8_parts(int64_t num_rows, int64_t num_panels, int threads) {
    int64_t parts = (INT8_JOBS * threads + num_panels - 1) / num_panels;
    int64_t most = num_rows / LEAST_INT8_ROWS, least = (num_rows - 1) / MOST_INT8_ROWS + 1;
    parts = parts > most ? most : parts;
    return parts < least ? least : parts;
}

/* As in linear.c. */
static void multiply_few_int8_rows(struct member *m, const struct rounded *r,
                                   const struct int8_weight *w, const struct int8_output *o,
                                   int64_t num_rows, int64_t num_out) {
    struct streams streams = cut_into_streams(num_out, num_out * r->groups * GROUP, COLUMNS, o->gated ? COLUMNS : LANES,
                                              m->team->size);
    FOR_JOBS(job, m, jobs_of(&streams), 1) {
        int64_t from = column_of(&streams, job), to = column_of(&streams, job + 1);
        for (int64_t stop; from < to; from = stop) {
            int64_t panel = from / COLUMNS, end = (panel + 1) * COLUMNS;
            const uint32_t *own = w->panels + panel * r->groups * GROUP_DWORDS * COLUMNS;
            own += from % COLUMNS;
            stop = end < to ? end : to;
            int lines = stop - from == COLUMNS ? MOST_LINES : 0;
            multiply_int8_panel(r, w, own, (const char *)own + INT8_FETCHED_AHEAD, lines, 0,
                                num_rows, from, (int)(stop - from), o);
        }
    }
}

static void multiply_many_int8_rows(struct member *m, const struct rounded *r,
                                    const struct int8_weight *w, const struct int8_output *o,
                                    int64_t num_rows, int64_t num_out) {
    int64_t num_panels = (num_out + COLUMNS - 1) / COLUMNS;
    int64_t parts = int8_parts(num_rows, num_panels, m->team->size);
    int64_t size = r->groups * GROUP_DWORDS * COLUMNS;
    FOR_JOBS(job, m, num_panels * parts, 1) {
        int64_t panel = job / parts, part = job % parts, first = panel * COLUMNS;
        int64_t start = num_rows * part / parts, stop = num_rows * (part + 1) / parts;
        int num = num_out - first < COLUMNS ? (int)(num_out - first) : COLUMNS;
        /* The panel that this member will want next, if the others are as fast. */
        int64_t next = panel + m->team->size;
        int fetches = part == 0 && next < num_panels;
        int blocks = (int)(stop - start + INT8_ROWS - 1) / INT8_ROWS;
        multiply_int8_panel(r, w, w->panels + panel * size,
                            (const char *)(w->panels + (fetches ? next : panel) * size),
                            fetches ? (MOST_LINES + blocks - 1) / blocks : 0, start, stop, first,
                            num, o);
    }
}

/* The whole product: two stages; in `room` x is rounded. */
static void int8_linear_by_team(struct member *m, const void *x, int64_t x_stride,
                                const struct int8_weight *w, const struct int8_output *o,
                                int64_t num_rows, int64_t num_in, int64_t num_out, char *room) {
    struct rounded r = {room, (num_in + GROUP - 1) / GROUP};
    FOR_JOBS(row, m, num_rows, 1) round_row(x, row, x_stride, num_in, o->bf16, &r);
    if (num_rows > INT8_ROWS)
        multiply_many_int8_rows(m, &r, w, o, num_rows, num_out);
    else
        multiply_few_int8_rows(m, &r, w, o, num_rows, num_out);
}

/* x [num_rows, num_in] with x_stride between rows, panels as above; num_out a multiple of 16, of
   64 when gated; `room` of GROUP + 8 bytes for each row and group. */
void cb_linear_int8(const void *x, int64_t x_stride, const uint32_t *panels, const float *scales,
                    const void *bias, const void *onto, float scale, int gated, int bf16, void *y,
                    int64_t num_rows, int64_t num_in, int64_t num_out, char *room) {
    struct int8_weight w = {panels, scales};
    struct int8_output o = {bias, onto, scale, gated, bf16, y, gated ? num_out / 2 : num_out,
                            NULL};
    struct stage stages[2] = {};
    struct team team = {omp_get_max_threads(), stages, 0};
#pragma omp parallel
    int8_linear_by_team(&(struct member){&team, omp_get_thread_num(), 0}, x, x_stride, &w, &o,
                        num_rows, num_in, num_out, room);
}

#endif

/* Whether linears of bytes can be had from this build. */
int cb_has_int8(void) { return HAS_INT8; }
