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

/* The codes of all upper bytes; NUM_HIGHS: none. */
static void number_codes(const struct panel *panel, uint8_t codes[256]) {
    memset(codes, NUM_HIGHS, 256);
    for (int code = 0; code < NUM_HIGHS; code++) codes[panel->highs[code]] = (uint8_t)code;
}

static int is_coded(const uint16_t row[LOWS], const uint8_t codes[256]) {
    int most = 0;
    for (int i = 0; i < LOWS; i++) most |= codes[row[i] >> 8];
    return most < NUM_HIGHS;
}

/* Finds a panel's codes; returns how many of its rows need others. */
static int64_t code_panel(const struct source *s, int64_t depth, struct panel *panel) {
    int64_t counts[256] = {}, num_kept = 0;
    uint16_t row[LOWS];
    uint8_t codes[256];
    for (int64_t k = 0; k < depth; k++) {
        gather_row(s, k, row);
        for (int i = 0; i < LOWS; i++) counts[row[i] >> 8]++;
    }
    for (int code = 0; code < NUM_HIGHS; code++) {
        int most = 0;
        for (int high = 1; high < 256; high++)
            if (counts[high] > counts[most]) most = high;
        panel->highs[code] = (uint8_t)most;
        counts[most] = -1;
    }
    number_codes(panel, codes);
    for (int64_t k = 0; k < depth; k++) {
        gather_row(s, k, row);
        num_kept += !is_coded(row, codes);
    }
    return num_kept;
}

static void write_panel(const struct source *s, int64_t depth, struct packed *w, int64_t index) {
    struct rows r = rows_of(w, index, depth);
    uint8_t *packed = (uint8_t *)r.packed, codes[256];
    uint32_t *places = (uint32_t *)r.places, *kept = (uint32_t *)r.kept;
    uint16_t row[LOWS];
    number_codes((struct panel *)((char *)w + w->panels) + index, codes);
    for (int64_t k = 0; k < depth; k++, packed += PACKED_ROW) {
        gather_row(s, k, row);
        memset(packed + LOWS, 0, PANEL);
        for (int i = 0; i < LOWS; i++) {
            int place = place_of(i);
            packed[place] = (uint8_t)row[i];
            packed[LOWS + place % 64] |= (codes[row[i] >> 8] & 15) << place / 64 * 4;
        }
        if (is_coded(row, codes)) continue;
        *places++ = (uint32_t)k;
        memcpy(kept, row, sizeof row);
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
