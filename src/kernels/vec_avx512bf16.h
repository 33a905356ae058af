/* SPDX-License-Identifier: Apache-2.0
 * bfloat16 operands of matrix products, for files built with AVX-512 and AVX512-BF16.
 *
 * A product contracts pairs of bf16 in the two halves of a 32-bit lane. Along tokens the pair is (j, j + 16) of a
 * block of 32 in every operand, so that two rows of floats are packed lane by lane. */
#ifndef GDN_VEC_AVX512BF16_H
#define GDN_VEC_AVX512BF16_H

#include "vec_avx512.h"

/* Lane i: lo[i] in the low half, hi[i] in the high half, rounded to nearest, ties away from zero: four cheap operations
 * where vcvtne2ps2bf16 and a permutation take four cycles of one port (Emerald Rapids). */
static inline __m512i v16_pack_pair(__m512 lo, __m512 hi) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(_mm512_castps_si512(lo), half),
                b = _mm512_add_epi32(_mm512_castps_si512(hi), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
}

/* 32 numbers in order. */
static inline __m512i v32_to_bf16(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* The first and the last 16 of 32 numbers. */
static inline __m512 v32_first(__m512i x) {
  const __m512i order = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                         3, 0, 2, 0, 1, 0, 0, 0);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, x));
}

static inline __m512 v32_second(__m512i x) {
  const __m512i order = _mm512_set_epi16(31, 0, 30, 0, 29, 0, 28, 0, 27, 0, 26, 0, 25, 0, 24, 0, 23, 0, 22, 0, 21, 0,
                                         20, 0, 19, 0, 18, 0, 17, 0, 16, 0);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, x));
}

/* Lane i = the sum of r[i]. Destroys r. */
static inline __attribute__((always_inline)) __m512 v16_sum_each(__m512 r[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) /* lane 4 l + {0, 1, 2, 3}: two partial sums of r[i] and r[i + 8], alternating */
    r[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[i], r[i + 8]), _mm512_unpackhi_ps(r[i], r[i + 8]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) /* lane 4 l + {0, 1, 2, 3}: r[i], r[i + 4], r[i + 8], r[i + 12] within lane l */
    r[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[i], r[i + 4]), _mm512_unpackhi_ps(r[i], r[i + 4]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[i], r[i + 2], 0x88), _mm512_shuffle_f32x4(r[i], r[i + 2], 0xdd));
  /* r[0]: rows 0 and 2, r[1]: rows 1 and 3, two lanes each. */
  const __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(r[0], r[1], 0x88), _mm512_shuffle_f32x4(r[0], r[1], 0xdd));
  /* 128-bit lanes: rows 0, 2, 1, 3 (each with + 0, + 4, + 8, + 12 inside). */
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 7, 11, 3, 14, 6, 10, 2, 13, 5, 9, 1, 12, 4, 8, 0), s);
}

#endif
