/* SPDX-License-Identifier: Apache-2.0
 * Vectors of 16 floats for files built with AVX-512 F, BW, DQ, VL: exponential, bfloat16, tails, sums, transposes. */
#ifndef GDN_VEC_AVX512_H
#define GDN_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>

/* exp(x) within about 1 ulp, lane by lane: +0 below the smallest normal number (and for -inf), inf above the largest
 * float, NaN for NaN. The same bits as v8_exp. */
static inline __m512 v16_exp(__m512 x) {
  const __m512 lowest = _mm512_set1_ps(-87.33654f);
  const __mmask16 keep = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);
  /* min and max return their second operand when one is NaN. */
  const __m512 c = _mm512_min_ps(_mm512_set1_ps(90.0f), _mm512_max_ps(lowest, x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), c);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  __m512 p = _mm512_set1_ps(1.38144672e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.36878084e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16683927e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66665196e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.49999994f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r);
  p = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(keep, p, n);
}

static inline __m512 v16_from_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline __m512 v16_load_bf16(const uint16_t *p) {
  return v16_from_bf16(_mm256_loadu_si256((const __m256i *)p));
}

/* The bfloat16 nearest to each float, ties to even, in the high halves of 32-bit lanes, whose low halves hold anything;
 * NaN becomes quiet. finite: there is none. */
static inline __attribute__((always_inline)) __m512i v16_round_bf16(__m512 x, int finite) {
  const __m512i u = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  const __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
  if (finite) return rounded;
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, u, _mm512_set1_epi32(0x400000));
}

static inline __m256i v16_to_bf16(__m512 x) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v16_round_bf16(x, 0), 16));
}

/* Not for NaN. */
static inline void v16_store_finite_bf16(uint16_t *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(v16_round_bf16(x, 1), 16)));
}

static inline void v16_store_bf16(uint16_t *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, v16_to_bf16(x));
}

static inline __m512 v16_load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline __m256i v16_to_f16(__m512 x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void v16_store_f16(uint16_t *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, v16_to_f16(x));
}

/* x = m 2^e, m in sqrt(1/2) .. sqrt(2), for normal x > 0. */
static inline void v16_split(__m512 x, __m512 *m, __m512 *e) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i n = _mm512_srai_epi32(_mm512_sub_epi32(u, _mm512_set1_epi32(0x3f3504f3)), 23);
  *m = _mm512_castsi512_ps(_mm512_sub_epi32(u, _mm512_slli_epi32(n, 23)));
  *e = _mm512_cvtepi32_ps(n);
}

/* Lanes below n, n in 0..16 or beyond. */
static inline __mmask16 v16_mask(int n) {
  return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1);
}

/* The first n floats, then zeros; memory past them is not touched. */
static inline __m512 v16_load_tail(const float *p, int n) {
  return _mm512_maskz_loadu_ps(v16_mask(n), p);
}

static inline void v16_store_tail(float *p, int n, __m512 x) {
  _mm512_mask_storeu_ps(p, v16_mask(n), x);
}

static inline __m512 v16_load_bf16_tail(const uint16_t *p, int n) {
  return v16_from_bf16(_mm256_maskz_loadu_epi16(v16_mask(n), p));
}

/* Halves added three times over, then neighbours: lane i meets i + 8, then i + 4, i + 2, i + 1. */
static inline float v16_sum(__m512 x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* 4 floats from each of four rows that lie step floats apart, one row per 128-bit lane. */
static inline __m512 v16_load_4x4(const float *p, int64_t step) {
  __m512 r = _mm512_castps128_ps512(_mm_loadu_ps(p));
  r = _mm512_mask_broadcast_f32x4(r, 0x00f0, _mm_loadu_ps(p + step));
  r = _mm512_mask_broadcast_f32x4(r, 0x0f00, _mm_loadu_ps(p + 2 * step));
  return _mm512_mask_broadcast_f32x4(r, 0xf000, _mm_loadu_ps(p + 3 * step));
}

/* In each 128-bit lane: rows of 4 x 4 floats in a..d become columns. */
#define V16_TRANSPOSE_4X4(a, b, c, d, o0, o1, o2, o3)                                                                  \
  do {                                                                                                                 \
    const __m512 t0_ = _mm512_unpacklo_ps(a, b), t1_ = _mm512_unpackhi_ps(a, b);                                       \
    const __m512 t2_ = _mm512_unpacklo_ps(c, d), t3_ = _mm512_unpackhi_ps(c, d);                                       \
    o0 = _mm512_shuffle_ps(t0_, t2_, 0x44);                                                                            \
    o1 = _mm512_shuffle_ps(t0_, t2_, 0xee);                                                                            \
    o2 = _mm512_shuffle_ps(t1_, t3_, 0x44);                                                                            \
    o3 = _mm512_shuffle_ps(t1_, t3_, 0xee);                                                                            \
  } while (0)

/* r[j] lane i = src[i * ld + j], i < 16, j < 4. */
static inline __attribute__((always_inline)) void v16_load_transposed_16x4(const float *src, int64_t ld, __m512 r[4]) {
  const __m512 a = v16_load_4x4(src, 4 * ld), b = v16_load_4x4(src + ld, 4 * ld);
  const __m512 c = v16_load_4x4(src + 2 * ld, 4 * ld), d = v16_load_4x4(src + 3 * ld, 4 * ld);
  V16_TRANSPOSE_4X4(a, b, c, d, r[0], r[1], r[2], r[3]);
}

/* r is replaced by its transpose. */
static inline __attribute__((always_inline)) void v16_transpose(__m512 r[16]) {
  __m512 t[16];
  for (int i = 0; i < 4; i++)
    V16_TRANSPOSE_4X4(r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3], t[i], t[4 + i], t[8 + i], t[12 + i]);
  /* t[4 j + i], 128-bit lane l: column 4 l + j of rows 4 i .. 4 i + 3. */
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_shuffle_f32x4(t[4 * j], t[4 * j + 1], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(t[4 * j + 2], t[4 * j + 3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(t[4 * j], t[4 * j + 1], 0xee);
    const __m512 d = _mm512_shuffle_f32x4(t[4 * j + 2], t[4 * j + 3], 0xee);
    r[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[8 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[12 + j] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

/* Of a row's vector, lanes l and l + 8 are added, then l and l + 4, then l and l + 2. Two of each are left: in 128-bit
 * lanes rows 0 and 2, 4 and 6, 1 and 3, 5 and 7, alternating. */
static inline __attribute__((always_inline)) __m512 v16_halve_rows(const __m512 r[8]) {
  __m512 h[4], g[2];
  for (int i = 0; i < 4; i++)
    h[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[i], r[i + 4], 0x44), _mm512_shuffle_f32x4(r[i], r[i + 4], 0xee));
  for (int i = 0; i < 2; i++)
    g[i] = _mm512_add_ps(_mm512_shuffle_f32x4(h[2 * i], h[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(h[2 * i], h[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_unpacklo_ps(g[0], g[1]), _mm512_unpackhi_ps(g[0], g[1]));
}

/* Lane i: the sum of x[i], lane 8 + i: of y[i], added as by v8_sum_rows after l and l + 8. */
static inline __attribute__((always_inline)) __m512 v16_sum_rows(const __m512 x[8], const __m512 y[8]) {
  const __m512 a = v16_halve_rows(x), b = v16_halve_rows(y);
  const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 7, 14, 6, 11, 3, 10, 2, 13, 5, 12, 4, 9, 1, 8, 0), s);
}

#endif
