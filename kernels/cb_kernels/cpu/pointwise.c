/* The passes over a step's tokens between the products. */
#include "vectors.h"

/* Up to this many elements one thread needs less than some 20 us, and waits for nobody. */
#define SMALL 131072

/* `width` numbers of x and of y, both from element `first` on. */
INLINE void norm_row(const void *x, const void *weight, void *y, int64_t first, int64_t width,
                     float eps, int bf16) {
    vf squares[2] = {};
    for (int64_t i = 0; i < width; i += LANES) {
        vf a = load_as(x, first + i, bf16);
        squares[(i / LANES) & 1] += a * a;
    }
    float scale = 1.0f / sqrtf(sum_of(squares[0] + squares[1]) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        vf a = load_as(x, first + i, bf16) * scale;
        store_as(y, first + i, a * load_as(weight, i, bf16), bf16);
    }
}

INLINE void norm_rows(const void *x, const void *weight, void *y, int64_t rows, int64_t width,
                      float eps, int bf16) {
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
    for (int64_t row = 0; row < rows; row++)
        norm_row(x, weight, y, row * width, width, eps, bf16);
}

/* y = x / rms(x) * weight; x and y [rows, width], width a multiple of 16. */
void cb_rms_norm(const void *x, const void *weight, void *y, int64_t rows, int64_t width, float eps,
                 int bf16) {
    if (bf16)
        norm_rows(x, weight, y, rows, width, eps, 1);
    else
        norm_rows(x, weight, y, rows, width, eps, 0);
}

/* The head at element `first` of x by the cos and sin at element `turn`. */
INLINE void turn_head(void *x, int64_t first, const void *cos, const void *sin, int64_t turn,
                      int64_t half, int bf16) {
    for (int64_t i = 0; i < half; i += LANES, turn += LANES) {
        int64_t at_a = first + i, at_b = at_a + half;
        vf a = load_as(x, at_a, bf16), b = load_as(x, at_b, bf16);
        vf new_a = a * load_as(cos, turn, bf16) + b * load_as(sin, turn, bf16);
        vf new_b = b * load_as(cos, turn + half, bf16) + a * load_as(sin, turn + half, bf16);
        store_as(x, at_a, new_a, bf16);
        store_as(x, at_b, new_b, bf16);
    }
}

INLINE void turn_rows(void *x, int64_t stride, const void *cos, const void *sin, int64_t tokens,
                      int64_t heads, int64_t dim, int64_t half, int bf16) {
#pragma omp parallel for schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            turn_head(x, t * stride + h * dim, cos, sin, t * dim, half, bf16);
}

/* Rotary embedding in place: x [tokens, heads, dim] with `stride` between tokens, cos and sin
   [tokens, dim], sin with the sign of its half; dimensions past 2 * half stay. half: of 16s. */
void cb_rope(void *x, int64_t stride, const void *cos, const void *sin, int64_t tokens,
             int64_t heads, int64_t dim, int64_t half, int bf16) {
    if (bf16)
        turn_rows(x, stride, cos, sin, tokens, heads, dim, half, 1);
    else
        turn_rows(x, stride, cos, sin, tokens, heads, dim, half, 0);
}

/* Rows [tokens, heads, dim] of k and v into the caches at slots; a slot below 0 writes nothing.
   Strides in elements; `size` in bytes. 0, or 2 when a slot is not in the cache. */
int cb_store_kv(const char *k, int64_t k_stride, const char *v, int64_t v_stride, char *k_cache,
                 char *v_cache, int64_t block_stride, int64_t slot_stride, int64_t head_stride,
                 const int64_t *slots, int64_t tokens, int64_t heads, int64_t dim,
                 int64_t num_blocks, int64_t block_size, int64_t size) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return 2;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        int64_t target = block * block_stride + offset * slot_stride;
        for (int64_t h = 0; h < heads; h++, target += head_stride) {
            memcpy(k_cache + target * size, k + (t * k_stride + h * dim) * size, dim * size);
            memcpy(v_cache + target * size, v + (t * v_stride + h * dim) * size, dim * size);
        }
    }
    return 0;
}

/* One head's K and V [dim] to a slot of its block in paired caches (see attention.c). */
INLINE void store_pairs(const uint16_t *key, const uint16_t *value, uint16_t *k_block,
                        uint16_t *v_block, int64_t offset, int64_t dim, int64_t block_size) {
    uint16_t *keys = k_block + offset * 2;
    for (int64_t d = 0; d < dim; d += 2) memcpy(keys + d * block_size, key + d, 4);
#if defined(__AVX512BW__)
    /* Only the token's own halves are written: another thread may write its partner's. */
    __mmask32 halves = offset % 2 ? 0xaaaaaaaa : 0x55555555;
    for (int64_t d = 0; d < dim; d += LANES) {
        vu both = __builtin_convertvector(*(const vh_any *)(value + d), vu) * 0x10001u;
        _mm512_mask_storeu_epi16(v_block + (offset / 2 * dim + d) * 2, halves, (__m512i)both);
    }
#else
    uint16_t *values = v_block + offset / 2 * dim * 2 + offset % 2;
    for (int64_t d = 0; d < dim; d++) values[2 * d] = value[d];
#endif
}

/* cb_store_kv into paired caches: bfloat16, an even block size. */
int cb_store_kv_paired(const uint16_t *k, int64_t k_stride, const uint16_t *v, int64_t v_stride,
                       uint16_t *k_cache, uint16_t *v_cache, int64_t block_stride,
                       int64_t head_stride, const int64_t *slots, int64_t tokens, int64_t heads,
                       int64_t dim, int64_t num_blocks, int64_t block_size) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return 2;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        for (int64_t h = 0; h < heads; h++) {
            int64_t base = block * block_stride + h * head_stride;
            store_pairs(k + t * k_stride + h * dim, v + t * v_stride + h * dim, k_cache + base,
                        v_cache + base, offset, dim, block_size);
        }
    }
    return 0;
}
