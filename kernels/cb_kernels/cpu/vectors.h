/* Sixteen floats at a time, in GCC's vector extensions: one AVX-512 register, two of AVX2. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Whether the processor multiplies pairs of bfloat16 (VDPBF16PS), and as fast as floats; Intel's do at
   under a quarter of that. Elsewhere they are widened to floats in the registers. */
#if defined(__AVX512BF16__) && !defined(OF_INTEL)
#define MULTIPLIES_PAIRS 1
#else
#define MULTIPLIES_PAIRS 0
#endif

#define LANES 16
#if defined(__AVX512F__)
#define REGISTER_BYTES 64
#else
#define REGISTER_BYTES 32
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));

/* What one register holds of a vector: GCC keeps arrays of more than that in memory. */
#define PIECES (sizeof(vf) / REGISTER_BYTES)
#define PIECE ((int)(REGISTER_BYTES / 4))
typedef float vp __attribute__((vector_size(REGISTER_BYTES)));
typedef float vp_any __attribute__((vector_size(REGISTER_BYTES), aligned(4), may_alias));
typedef uint32_t up __attribute__((vector_size(REGISTER_BYTES)));

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }

INLINE vf load_bf16(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16);
}

/* Rounds to nearest, ties to even. */
INLINE void store_bf16(uint16_t *p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu is_nan = (vu)(x != x);
    *(vh_any *)p = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), vh);
#endif
}

/* Element `index` of float or bfloat16 memory. */
INLINE const void *at(const void *base, int64_t index, int bf16) {
    return (const char *)base + index * (bf16 ? 2 : 4);
}

INLINE vf load_as(const void *p, int64_t index, int bf16) {
    return bf16 ? load_bf16((const uint16_t *)p + index) : load((const float *)p + index);
}

INLINE float one_of(const void *p, int64_t index, int bf16) {
    if (!bf16) return ((const float *)p)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[index] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store_as(void *p, int64_t index, vf x, int bf16) {
    if (bf16)
        store_bf16((uint16_t *)p + index, x);
    else
        store((float *)p + index, x);
}

INLINE vf choose(vi mask, vf yes, vf no) {
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }

INLINE float sum_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total[8];
    for (int i = 0; i < 8; i++) total[i] = x[i] + x[i + 8];
    return ((total[0] + total[4]) + (total[2] + total[6])) +
           ((total[1] + total[5]) + (total[3] + total[7]));
#endif
}

INLINE float max_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

/* 2^x to 1e-7; 0 below -126 and infinity above 127, so for the infinities too; NaN stays NaN. */
INLINE vf exp2_of(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = splat(1.5252734e-5f);
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    /* The integer sits in the low bits of `shifted` and goes to the exponent of p in [0.7, 1.5]. */
    vf scaled = (vf)((vu)p + ((vu)shifted << 23));
    scaled = choose(x < -126.0f, (vf){}, choose(x > 127.0f, splat(INFINITY), scaled));
    return choose(x != x, x, scaled);
}

/* The same for x up to 0 to 3e-5, which is enough for what is rounded to bfloat16; NaN stays NaN. */
INLINE vf rough_exp2_of(vf x) {
#if defined(__AVX512F__)
    __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = choose(x == -INFINITY, (vf){}, x - (vf)n);
    vf p = splat(9.6181291e-3f);
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, n); /* minus infinity makes 0 */
#else
    return exp2_of(x);
#endif
}

INLINE vf silu_of(vf x) { return x / (1.0f + exp2_of(x * -1.44269504f)); }

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (1.0f + exp2_of(x * 2.88539008f)); }
