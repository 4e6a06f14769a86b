/* Weights into packed.h's layout, and out of it. */
#include "packed.h"

#include <stdlib.h>

/* What a panel is made of. */
struct source {
    const uint16_t *rows[PANEL]; /* of the weight, [K] each; NULL: zeros */
};

/* Of a gated weight a panel is 32 of gate, then their 32 of up. */
static struct source source_of(const uint16_t *weight, int64_t num_in, int64_t num_out, int gated,
                               int64_t panel) {
    struct source s;
    for (int column = 0; column < PANEL; column++) {
        int64_t row = panel * PANEL + column;
        if (gated) row = (column / HALF * num_out + panel * PANEL) / 2 + column % HALF;
        s.rows[column] = row < num_out ? weight + row * num_in : NULL;
    }
    return s;
}

/* Row k of a panel, as pairs. */
static void gather_row(const struct source *s, int64_t k, uint16_t row[LOWS]) {
    static const uint16_t zeros[2];
    for (int column = 0; column < PANEL; column++)
        memcpy(row + 2 * column, s->rows[column] ? s->rows[column] + 2 * k : zeros, 4);
}

/* A row's lower and upper bytes, by their places. */
static void split_row(const struct source *s, int64_t k, uint8_t lows[LOWS], uint8_t highs[LOWS]) {
    uint16_t row[LOWS];
    gather_row(s, k, row);
    for (int start = 0; start < LOWS; start += 8) /* these lie side by side */
        for (int i = 0, place = place_of(start); i < 8; i++) {
            lows[place + i] = (uint8_t)row[start + i];
            highs[place + i] = (uint8_t)(row[start + i] >> 8);
        }
}

/* Whether all upper bytes have codes. */
static int code_row(const struct panel *panel, const uint8_t highs[LOWS], uint8_t codes[LOWS]) {
    uint8_t found[LOWS] = {}, all = 0xff;
    memset(codes, 0, LOWS);
    for (int code = 0; code < NUM_HIGHS; code++)
        for (int i = 0; i < LOWS; i++) {
            uint8_t is_it = highs[i] == panel->highs[code] ? 0xff : 0;
            codes[i] |= is_it & code, found[i] |= is_it;
        }
    for (int i = 0; i < LOWS; i++) all &= found[i];
    return all;
}

/* Finds a panel's codes; returns how many of its rows need others. */
static int64_t code_panel(const struct source *s, int64_t depth, struct panel *panel) {
    int64_t counts[4][256] = {}, num_kept = 0; /* four: the same one is not counted twice in a row */
    uint8_t lows[LOWS], highs[LOWS], codes[LOWS];
    for (int64_t k = 0; k < depth; k++) {
        split_row(s, k, lows, highs);
        for (int i = 0; i < LOWS; i++) counts[i % 4][highs[i]]++;
    }
    for (int i = 1; i < 4; i++)
        for (int high = 0; high < 256; high++) counts[0][high] += counts[i][high];
    for (int code = 0; code < NUM_HIGHS; code++) {
        int most = 0;
        for (int high = 1; high < 256; high++)
            if (counts[0][high] > counts[0][most]) most = high;
        panel->highs[code] = (uint8_t)most;
        counts[0][most] = -1;
    }
    for (int64_t k = 0; k < depth; k++) {
        split_row(s, k, lows, highs);
        num_kept += !code_row(panel, highs, codes);
    }
    return num_kept;
}

static void write_panel(const struct source *s, int64_t depth, struct packed *w, int64_t index) {
    const struct panel *panel = (struct panel *)((char *)w + w->panels) + index;
    struct rows r = rows_of(w, index, depth);
    uint8_t *packed = (uint8_t *)r.packed, highs[LOWS], codes[LOWS];
    uint32_t *places = (uint32_t *)r.places, *kept = (uint32_t *)r.kept;
    for (int64_t k = 0; k < depth; k++, packed += PACKED_ROW) {
        split_row(s, k, packed, highs);
        int is_coded = code_row(panel, highs, codes);
        for (int i = 0; i < PANEL; i++)
            packed[LOWS + i] = (uint8_t)(codes[i] | codes[PANEL + i] << 4);
        if (is_coded) continue;
        *places++ = (uint32_t)k;
        gather_row(s, k, (uint16_t *)kept);
        kept += PANEL;
    }
    *places = NOWHERE;
}

/* Finds the panels' codes, to `panels` [N / 64 + 1], whose last only says how many rows are kept.
   Returns the bytes of the packed weight. */
int64_t cb_code_weight(const uint16_t *weight, int64_t num_in, int64_t num_out, int gated,
                       struct panel *panels) {
    int64_t num = panels_of(num_out), num_kept = 0;
#pragma omp parallel for
    for (int64_t i = 0; i < num; i++) {
        struct source s = source_of(weight, num_in, num_out, gated, i);
        panels[i].first_kept = code_panel(&s, num_in / 2, panels + i);
    }
    for (int64_t i = 0; i < num; i++) {
        int64_t own = panels[i].first_kept;
        panels[i].first_kept = num_kept;
        num_kept += own;
    }
    panels[num] = (struct panel){.first_kept = num_kept};
    return packed_layout(num, num_in / 2, num_kept).size;
}

/* Fills the packed weight. */
void cb_pack_weight(const uint16_t *weight, int64_t num_in, int64_t num_out, int gated,
                    const struct panel *panels, struct packed *w) {
    int64_t num = panels_of(num_out);
    *w = packed_layout(num, num_in / 2, panels[num].first_kept);
    memcpy((char *)w + w->panels, panels, num * sizeof *panels);
#pragma omp parallel for
    for (int64_t i = 0; i < num; i++) {
        struct source s = source_of(weight, num_in, num_out, gated, i);
        write_panel(&s, num_in / 2, w, i);
    }
}

/* One output's weights [K], as they were. */
INLINE void unpack_output(const struct packed *w, int64_t output, int64_t num_in, uint16_t *to) {
    int64_t depth = num_in / 2, column = output % PANEL;
    struct rows r = rows_of(w, output / PANEL, depth);
    const uint8_t *row = r.packed;
    for (int64_t k = 0; k < depth; k++, row += PACKED_ROW)
        for (int odd = 0; odd < 2; odd++)
            to[2 * k + odd] = number_of(row, r.highs, (int)(2 * column + odd));
    for (; *r.places != NOWHERE; r.places++, r.kept += PANEL)
        memcpy(to + 2 * *r.places, r.kept + column, 4);
}

/* The weights [num, num_in] of some outputs. */
void cb_unpack_outputs(const struct packed *w, const int64_t *outputs, int64_t num, int64_t num_in,
                       uint16_t *to) {
#pragma omp parallel for
    for (int64_t i = 0; i < num; i++) unpack_output(w, outputs[i], num_in, to + i * num_in);
}
