/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step with AVX-512 F, BW, DQ and VL: vectors of 16 floats for recur_f32.h and
 * decode_f32.h. */
#include "kernels/kernels.h"
#include "kernels/vec_avx2.h"
#include "kernels/vec_avx512.h"

#define LANES 16
#define TIER_INLINE static inline __attribute__((always_inline))
typedef __m512 vec;

TIER_INLINE vec vec_load(const float *p) {
  return _mm512_loadu_ps(p);
}

TIER_INLINE void vec_store(float *p, vec x) {
  _mm512_storeu_ps(p, x);
}

TIER_INLINE void vec_store_tail(float *p, int n, vec x) {
  v16_store_tail(p, n, x);
}

TIER_INLINE void vec_stream(float *p, vec x) {
  _mm512_stream_ps(p, x);
}

TIER_INLINE vec vec_set1(float x) {
  return _mm512_set1_ps(x);
}

TIER_INLINE vec vec_add(vec a, vec b) {
  return _mm512_add_ps(a, b);
}

TIER_INLINE vec vec_sub(vec a, vec b) {
  return _mm512_sub_ps(a, b);
}

TIER_INLINE vec vec_mul(vec a, vec b) {
  return _mm512_mul_ps(a, b);
}

TIER_INLINE vec vec_div(vec a, vec b) {
  return _mm512_div_ps(a, b);
}

TIER_INLINE vec vec_fmadd(vec a, vec b, vec c) {
  return _mm512_fmadd_ps(a, b, c);
}

TIER_INLINE vec vec_fnmadd(vec a, vec b, vec c) {
  return _mm512_fnmadd_ps(a, b, c);
}

TIER_INLINE vec vec_min(vec a, vec b) {
  return _mm512_min_ps(a, b);
}

TIER_INLINE vec vec_max(vec a, vec b) {
  return _mm512_max_ps(a, b);
}

TIER_INLINE vec vec_abs(vec x) {
  return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x);
}

TIER_INLINE vec vec_exp(vec x) {
  return v16_exp(x);
}

TIER_INLINE void vec_split(vec x, vec *m, vec *e) {
  v16_split(x, m, e);
}

TIER_INLINE float vec_sum(vec x) {
  return v16_sum(x);
}

TIER_INLINE vec vec_below(vec a, vec b, vec x, vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

/* In a dtype's place: bfloat16 that is stored without a look for NaN. A row of decay s + d k^T has none if d is finite:
 * anything else in s, k or decay has made x, and with it d, infinite or NaN. */
#define STORE_FINITE_BF16 (-GDN_ROWS_BF16)

TIER_INLINE vec load_as(const void *data, int64_t i, int dtype) {
  if (dtype == GDN_ROWS_BF16) return v16_load_bf16((const uint16_t *)data + i);
  if (dtype == GDN_ROWS_F16) return v16_load_f16((const uint16_t *)data + i);
  return _mm512_loadu_ps((const float *)data + i);
}

TIER_INLINE void store_as(void *data, int64_t i, int dtype, vec x) {
  if (dtype == STORE_FINITE_BF16)
    v16_store_finite_bf16((uint16_t *)data + i, x);
  else if (dtype == GDN_ROWS_BF16)
    v16_store_bf16((uint16_t *)data + i, x);
  else if (dtype == GDN_ROWS_F16)
    v16_store_f16((uint16_t *)data + i, x);
  else
    _mm512_storeu_ps((float *)data + i, x);
}

TIER_INLINE void load_transposed(const void *data, int64_t at, int64_t ld, int dtype, vec r[16]) {
  if (dtype == GDN_ROWS_F32) {
    for (int j = 0; j < 16; j += 4) v16_load_transposed_16x4((const float *)data + at + j, ld, r + j);
    return;
  }
  for (int i = 0; i < 16; i++) r[i] = load_as(data, at + i * ld, dtype);
  v16_transpose(r);
}

struct v32 {
  vec a, b;
};

TIER_INLINE struct v32 v32_zero(void) {
  return (struct v32){_mm512_setzero_ps(), _mm512_setzero_ps()};
}

TIER_INLINE struct v32 v32_load(const void *data, int64_t i, int dtype) {
  return (struct v32){load_as(data, i, dtype), load_as(data, i + 16, dtype)};
}

TIER_INLINE void v32_store(void *data, int64_t i, int dtype, struct v32 x) {
  store_as(data, i, dtype, x.a);
  store_as(data, i + 16, dtype, x.b);
}

TIER_INLINE struct v32 v32_mul(vec f, struct v32 x) {
  return (struct v32){_mm512_mul_ps(f, x.a), _mm512_mul_ps(f, x.b)};
}

TIER_INLINE struct v32 v32_fma(vec f, struct v32 x, struct v32 y) {
  return (struct v32){_mm512_fmadd_ps(f, x.a, y.a), _mm512_fmadd_ps(f, x.b, y.b)};
}

TIER_INLINE struct v32 v32_fnma(vec f, struct v32 x, struct v32 y) {
  return (struct v32){_mm512_fnmadd_ps(f, x.a, y.a), _mm512_fnmadd_ps(f, x.b, y.b)};
}

TIER_INLINE struct v32 v32_add(struct v32 x, struct v32 y) {
  return (struct v32){_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)};
}

TIER_INLINE vec halves(float low, float high) {
  return _mm512_insertf32x8(_mm512_set1_ps(low), _mm256_set1_ps(high), 1);
}

TIER_INLINE struct row_sums sums_of_rows(const vec x[8], const vec y[8]) {
  const vec sums = v16_sum_rows(x, y);
  return (struct row_sums){_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1)};
}

TIER_INLINE __m256 sums_of_pair(vec even, vec odd) {
  /* 128-bit lanes: a's chains 0 .. 3, a's 8 .. 11, the same of b; and 4 .. 7, 12 .. 15. */
  const vec low = _mm512_unpacklo_ps(even, odd), high = _mm512_unpackhi_ps(even, odd);
  const vec s = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  return _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
}

TIER_INLINE vec even_twice(vec x) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(14, 12, 10, 8, 6, 4, 2, 0, 14, 12, 10, 8, 6, 4, 2, 0), x);
}

TIER_INLINE vec odd_twice(vec x) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 15, 13, 11, 9, 7, 5, 3, 1), x);
}

TIER_INLINE void load_pair(const uint16_t *a, const uint16_t *b, vec *even, vec *odd) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
  const __m512i x = _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)b), 1);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}

TIER_INLINE void store_pair(uint16_t *a, uint16_t *b, vec even, vec odd, int finite) {
  __m512i e = v16_round_bf16(even, finite), o = v16_round_bf16(odd, finite);
  const __m512i r = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(e, 16), o);
  _mm256_storeu_si256((__m256i *)a, _mm512_castsi512_si256(r));
  _mm256_storeu_si256((__m256i *)b, _mm512_extracti64x4_epi64(r, 1));
}

#include "kernels/decode_f32.h"

void gdn_fill_recur_avx512(struct gdn_kernels *t) {
  t->recur_cols = GDN_PANEL;
  t->load_rows = recur_load_rows;
  t->norm_rows = recur_norm_rows;
  t->dot_rows = recur_dot_rows;
  t->gates = recur_gates;
  t->store_rows = recur_store_rows;
  t->state_load = recur_state_load;
  t->state_store = recur_state_store;
  t->recur = recur_tokens;
  t->decode_step = recur_decode_step;
  t->decode_tokens = recur_decode_tokens;
}
