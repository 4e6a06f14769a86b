/* How a weight of bfloat16 lies in memory: 12 bits each, without loss.

   Of a trained weight the upper bytes, a sign and most of an exponent, are few: that exponents carry
   little is what DFloat11 lives by (Zhang et al., 2025), whose codes are shorter, but of any length. A
   panel of 64 outputs names its 16 most frequent upper bytes by 4 bits each. Its rows, of 64 pairs
   along K, are 192 bytes: the lower bytes, then the codes; a row that has an upper byte without a
   code is kept whole beside them. A packed weight is one piece of memory, a `struct packed` first. */
#pragma once

#include "product.h"

#define PANEL 64 /* outputs */
#define HALF 32  /* of a panel: what one load of lower bytes has */
#define NUM_HIGHS 16
#define LOWS (2 * PANEL)
#define PACKED_ROW (LOWS + PANEL) /* bytes */

#define NOWHERE UINT32_MAX

struct panel {
    uint8_t highs[NUM_HIGHS]; /* upper bytes, by their codes */
    int64_t first_kept;       /* of all kept rows */
};

struct packed {
    /* In bytes from here, all of it, and where these begin:
       struct panel panels[N / 64]
       uint32_t places[]: along K / 2, each panel's kept rows, ascending; NOWHERE behind its last
       uint32_t kept[][64]: these rows, as pairs */
    _Alignas(64) int64_t size, panels, places, kept;
    _Alignas(64) uint8_t rows[]; /* [N / 64, K / 2, 192] */
};

INLINE int64_t panels_of(int64_t num_out) { return (num_out + PANEL - 1) / PANEL; }

INLINE struct packed packed_layout(int64_t num_panels, int64_t depth, int64_t num_kept) {
    struct packed w = {.panels = sizeof w + num_panels * depth * PACKED_ROW};
    w.places = w.panels + num_panels * sizeof(struct panel);
    w.kept = (w.places + (num_kept + num_panels) * 4 + LINE - 1) / LINE * LINE;
    w.size = w.kept + num_kept * PANEL * 4;
    return w;
}

/* A panel from row `first` on. */
struct rows {
    const uint8_t *packed; /* [.., 192] */
    const uint8_t *highs;
    const uint32_t *places, *kept; /* of those that are not before `first` */
    int64_t first;
};

INLINE struct rows rows_of(const struct packed *w, int64_t panel, int64_t depth) {
    const char *base = (const char *)w;
    const struct panel *p = (const struct panel *)(base + w->panels) + panel;
    return (struct rows){
        w->rows + panel * depth * PACKED_ROW,
        p->highs,
        (const uint32_t *)(base + w->places) + p->first_kept + panel, /* each before had a NOWHERE */
        (const uint32_t *)(base + w->kept) + p->first_kept * PANEL,
        0,
    };
}

INLINE void skip_rows(struct rows *r, int64_t num) {
    r->first += num, r->packed += num * PACKED_ROW;
    for (; *r->places < r->first; r->places++) r->kept += PANEL;
}

/* Where a row has the lower byte of one of its 128 numbers: each half's vectors of 16 pairs are woven
   out of the lower and the upper halves of 16 bytes. Its code is at LOWS + place % 64, in the lower
   bits of those of the first half. */
INLINE int place_of(int number) {
    int vector = number / 32, i = number % 32;
    return vector / 2 * 64 + i / 8 * 16 + vector % 2 * 8 + i % 8;
}

INLINE uint16_t number_of(const uint8_t *row, const uint8_t *highs, int number) {
    int place = place_of(number), code = row[LOWS + place % 64] >> place / 64 * 4 & 15;
    return (uint16_t)(row[place] | highs[code] << 8);
}

typedef uint8_t bp __attribute__((vector_size(REGISTER_BYTES)));
typedef uint8_t bp_any __attribute__((vector_size(REGISTER_BYTES), aligned(1), may_alias));
typedef uint16_t hp __attribute__((vector_size(REGISTER_BYTES)));

/* 16 bytes again and again; each 16 codes looked up there; each 16 bytes woven with another's, the
   first 8 or the last 8. */
#if defined(__AVX512BW__)
INLINE bp table_of(const uint8_t *highs) {
    return (bp)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)highs));
}
INLINE bp look_up(bp table, bp codes) {
    return (bp)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
}
INLINE bp weave(bp low, bp high, int last) {
    return (bp)(last ? _mm512_unpackhi_epi8((__m512i)low, (__m512i)high)
                     : _mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
INLINE bp table_of(const uint8_t *highs) {
    return (bp)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)highs));
}
INLINE bp look_up(bp table, bp codes) {
    return (bp)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
}
INLINE bp weave(bp low, bp high, int last) {
    return (bp)(last ? _mm256_unpackhi_epi8((__m256i)low, (__m256i)high)
                     : _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
}
#else
INLINE bp table_of(const uint8_t *highs) {
    bp table;
    for (int i = 0; i < REGISTER_BYTES; i++) table[i] = highs[i % 16];
    return table;
}
INLINE bp look_up(bp table, bp codes) {
    bp found;
    for (int i = 0; i < REGISTER_BYTES; i++) found[i] = table[codes[i]];
    return found;
}
INLINE bp weave(bp low, bp high, int last) {
    bp woven;
    for (int i = 0; i < REGISTER_BYTES; i++) {
        int from = i / 16 * 16 + last * 8 + i % 16 / 2;
        woven[i] = i % 2 ? high[from] : low[from];
    }
    return woven;
}
#endif

/* A half's pairs, [HALF], but for those of a kept row. */
INLINE void unpack_half(const uint8_t *row, bp table, int half, vp *pairs) {
    for (int i = 0; i < (int)PIECES; i++) {
        bp lows = *(const bp_any *)(row + half * PANEL + i * REGISTER_BYTES);
        bp codes = *(const bp_any *)(row + LOWS + i * REGISTER_BYTES);
        bp highs = look_up(table, (bp)((hp)codes >> half * 4) & 15);
        pairs[i] = (vp)weave(lows, highs, 0);
        pairs[PIECES + i] = (vp)weave(lows, highs, 1);
    }
}
