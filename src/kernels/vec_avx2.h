/* SPDX-License-Identifier: Apache-2.0
 * Vectors of 8 floats for files built with AVX2 and FMA: exponential, bfloat16, tails, sums, transposes. */
#ifndef GDN_VEC_AVX2_H
#define GDN_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* exp(x) within about 1 ulp, lane by lane: +0 below the smallest normal number (and for -inf), inf above the largest
 * float, NaN for NaN. */
static inline __m256 v8_exp(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.33654f);
  const __m256 keep = _mm256_cmp_ps(x, lowest, _CMP_NLT_UQ);
  /* min and max return their second operand when one is NaN. */
  const __m256 c = _mm256_min_ps(_mm256_set1_ps(90.0f), _mm256_max_ps(lowest, x));
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(c, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), c);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
  __m256 p = _mm256_set1_ps(1.38144672e-3f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.36878084e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16683927e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.66665196e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.49999994f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r);
  p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
  /* 2^n in two factors, because n reaches 130. */
  const __m256i ni = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(ni, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 s0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(ni, half), bias), 23));
  return _mm256_and_ps(keep, _mm256_mul_ps(_mm256_mul_ps(p, s0), s1));
}

static inline __m256 v8_from_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

static inline __m256 v8_load_bf16(const uint16_t *p) {
  return v8_from_bf16(_mm_loadu_si128((const __m128i *)p));
}

/* The bfloat16 nearest to each float, ties to even, in the low halves of 32-bit lanes; NaN becomes quiet. */
static inline __m256i v8_round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 picked = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan);
  return _mm256_srli_epi32(_mm256_castps_si256(picked), 16);
}

/* The same in the high halves of 32-bit lanes, not for NaN; the low halves hold anything. */
static inline __m256i v8_round_finite_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

static inline void v8_store_finite_bf16(uint16_t *p, __m256 x) {
  const __m256i r = _mm256_srli_epi32(v8_round_finite_bf16(x), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}

/* 16 floats, a before b, as bfloat16. */
static inline __m256i v8_to_bf16x2(__m256 a, __m256 b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(v8_round_bf16(a), v8_round_bf16(b)), 0xd8);
}

static inline __m128i v8_to_bf16(__m256 x) {
  const __m256i r = v8_round_bf16(x);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

static inline void v8_store_bf16(uint16_t *p, __m256 x) {
  _mm_storeu_si128((__m128i *)p, v8_to_bf16(x));
}

static inline __m256 v8_load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline void v8_store_f16(uint16_t *p, __m256 x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* x = m 2^e, m in sqrt(1/2) .. sqrt(2), for normal x > 0. */
static inline void v8_split(__m256 x, __m256 *m, __m256 *e) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i n = _mm256_srai_epi32(_mm256_sub_epi32(u, _mm256_set1_epi32(0x3f3504f3)), 23);
  *m = _mm256_castsi256_ps(_mm256_sub_epi32(u, _mm256_slli_epi32(n, 23)));
  *e = _mm256_cvtepi32_ps(n);
}

/* Lanes below n, n in 0..8 or beyond. */
static inline __m256i v8_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first n floats, then zeros; memory past them is not touched. */
static inline __m256 v8_load_tail(const float *p, int n) {
  return _mm256_maskload_ps(p, v8_mask(n));
}

static inline void v8_store_tail(float *p, int n, __m256 x) {
  _mm256_maskstore_ps(p, v8_mask(n), x);
}

/* The first n <= 8 bfloat16, then zeros. */
static inline __m256 v8_load_bf16_tail(const uint16_t *p, int n) {
  uint16_t t[8] = {0};
  memcpy(t, p, (size_t)n * sizeof(t[0]));
  return v8_load_bf16(t);
}

/* ((0+4) + (2+6)) + ((1+5) + (3+7)). */
static inline float v8_sum(__m256 x) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* r[i] = 4 floats of a and, in the upper half, 4 floats of b. */
static inline __m256 v8_load_2x4(const float *a, const float *b) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}

/* In each half: rows of 4 x 4 floats in a..d become columns. */
#define V8_TRANSPOSE_4X4(a, b, c, d, o0, o1, o2, o3)                                                                   \
  do {                                                                                                                 \
    const __m256 t0_ = _mm256_unpacklo_ps(a, b), t1_ = _mm256_unpackhi_ps(a, b);                                       \
    const __m256 t2_ = _mm256_unpacklo_ps(c, d), t3_ = _mm256_unpackhi_ps(c, d);                                       \
    o0 = _mm256_shuffle_ps(t0_, t2_, 0x44);                                                                            \
    o1 = _mm256_shuffle_ps(t0_, t2_, 0xee);                                                                            \
    o2 = _mm256_shuffle_ps(t1_, t3_, 0x44);                                                                            \
    o3 = _mm256_shuffle_ps(t1_, t3_, 0xee);                                                                            \
  } while (0)

/* r[j] lane i = src[i * ld + j], i, j < 8. */
static inline __attribute__((always_inline)) void v8_load_transposed(const float *src, int64_t ld, __m256 r[8]) {
  for (int h = 0; h < 2; h++) {
    const float *s = src + 4 * h;
    const __m256 a = v8_load_2x4(s, s + 4 * ld), b = v8_load_2x4(s + ld, s + 5 * ld);
    const __m256 c = v8_load_2x4(s + 2 * ld, s + 6 * ld), d = v8_load_2x4(s + 3 * ld, s + 7 * ld);
    V8_TRANSPOSE_4X4(a, b, c, d, r[4 * h], r[4 * h + 1], r[4 * h + 2], r[4 * h + 3]);
  }
}

/* r is replaced by its transpose. */
static inline __attribute__((always_inline)) void v8_transpose(__m256 r[8]) {
  __m256 lo[4], hi[4];
  V8_TRANSPOSE_4X4(r[0], r[1], r[2], r[3], lo[0], lo[1], lo[2], lo[3]);
  V8_TRANSPOSE_4X4(r[4], r[5], r[6], r[7], hi[0], hi[1], hi[2], hi[3]);
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(lo[i], hi[i], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(lo[i], hi[i], 0x31);
  }
}

/* Sums of 8 rows, lane i of row i. Of a row's vector, lanes l and l + 4 are added, then l and l + 2, then the last two.
 */
struct row_sums {
  __m256 x, y;
};

/* From four partial sums of each row, rows i and i + 4 in the halves of t[i]. */
static inline __attribute__((always_inline)) __m256 v8_sum_quarters(const __m256 t[4]) {
  const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(t[0], t[1]), _mm256_unpackhi_ps(t[0], t[1]));
  const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(t[2], t[3]), _mm256_unpackhi_ps(t[2], t[3]));
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}

static inline __attribute__((always_inline)) __m256 v8_sum_rows(const __m256 r[8]) {
  __m256 t[4];
  for (int i = 0; i < 4; i++)
    t[i] = _mm256_add_ps(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  return v8_sum_quarters(t);
}

#endif
