/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step with AVX2, FMA and F16C: vectors of 8 floats for recur_f32.h and
 * decode_f32.h. */
#include "kernels/kernels.h"
#include "kernels/vec_avx2.h"

#define LANES 8
#define TIER_INLINE static inline __attribute__((always_inline))
typedef __m256 vec;

TIER_INLINE vec vec_load(const float *p) {
  return _mm256_loadu_ps(p);
}

TIER_INLINE void vec_store(float *p, vec x) {
  _mm256_storeu_ps(p, x);
}

TIER_INLINE void vec_store_tail(float *p, int n, vec x) {
  v8_store_tail(p, n, x);
}

TIER_INLINE void vec_stream(float *p, vec x) {
  _mm256_stream_ps(p, x);
}

TIER_INLINE vec vec_set1(float x) {
  return _mm256_set1_ps(x);
}

TIER_INLINE vec vec_add(vec a, vec b) {
  return _mm256_add_ps(a, b);
}

TIER_INLINE vec vec_sub(vec a, vec b) {
  return _mm256_sub_ps(a, b);
}

TIER_INLINE vec vec_mul(vec a, vec b) {
  return _mm256_mul_ps(a, b);
}

TIER_INLINE vec vec_div(vec a, vec b) {
  return _mm256_div_ps(a, b);
}

TIER_INLINE vec vec_fmadd(vec a, vec b, vec c) {
  return _mm256_fmadd_ps(a, b, c);
}

TIER_INLINE vec vec_fnmadd(vec a, vec b, vec c) {
  return _mm256_fnmadd_ps(a, b, c);
}

TIER_INLINE vec vec_min(vec a, vec b) {
  return _mm256_min_ps(a, b);
}

TIER_INLINE vec vec_max(vec a, vec b) {
  return _mm256_max_ps(a, b);
}

TIER_INLINE vec vec_abs(vec x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

TIER_INLINE vec vec_exp(vec x) {
  return v8_exp(x);
}

TIER_INLINE void vec_split(vec x, vec *m, vec *e) {
  v8_split(x, m, e);
}

TIER_INLINE float vec_sum(vec x) {
  return v8_sum(x);
}

TIER_INLINE vec vec_below(vec a, vec b, vec x, vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

/* In a dtype's place: bfloat16 that is stored without a look for NaN. A row of decay s + d k^T has none if d is finite:
 * anything else in s, k or decay has made x, and with it d, infinite or NaN. */
#define STORE_FINITE_BF16 (-GDN_ROWS_BF16)

TIER_INLINE vec load_as(const void *data, int64_t i, int dtype) {
  if (dtype == GDN_ROWS_BF16) return v8_load_bf16((const uint16_t *)data + i);
  if (dtype == GDN_ROWS_F16) return v8_load_f16((const uint16_t *)data + i);
  return _mm256_loadu_ps((const float *)data + i);
}

TIER_INLINE void store_as(void *data, int64_t i, int dtype, vec x) {
  if (dtype == STORE_FINITE_BF16)
    v8_store_finite_bf16((uint16_t *)data + i, x);
  else if (dtype == GDN_ROWS_BF16)
    v8_store_bf16((uint16_t *)data + i, x);
  else if (dtype == GDN_ROWS_F16)
    v8_store_f16((uint16_t *)data + i, x);
  else
    _mm256_storeu_ps((float *)data + i, x);
}

TIER_INLINE void load_transposed(const void *data, int64_t at, int64_t ld, int dtype, vec r[8]) {
  if (dtype == GDN_ROWS_F32) {
    v8_load_transposed((const float *)data + at, ld, r);
    return;
  }
  for (int i = 0; i < 8; i++) r[i] = load_as(data, at + i * ld, dtype);
  v8_transpose(r);
}

struct v32 {
  vec a, b, c, d;
};

TIER_INLINE struct v32 v32_zero(void) {
  return (struct v32){_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
}

TIER_INLINE struct v32 v32_load(const void *data, int64_t i, int dtype) {
  return (struct v32){load_as(data, i, dtype), load_as(data, i + 8, dtype), load_as(data, i + 16, dtype),
                      load_as(data, i + 24, dtype)};
}

TIER_INLINE void v32_store(void *data, int64_t i, int dtype, struct v32 x) {
  if (dtype == GDN_ROWS_BF16) {
    _mm256_storeu_si256((__m256i *)((uint16_t *)data + i), v8_to_bf16x2(x.a, x.b));
    _mm256_storeu_si256((__m256i *)((uint16_t *)data + i + 16), v8_to_bf16x2(x.c, x.d));
    return;
  }
  store_as(data, i, dtype, x.a);
  store_as(data, i + 8, dtype, x.b);
  store_as(data, i + 16, dtype, x.c);
  store_as(data, i + 24, dtype, x.d);
}

TIER_INLINE struct v32 v32_mul(vec f, struct v32 x) {
  return (struct v32){_mm256_mul_ps(f, x.a), _mm256_mul_ps(f, x.b), _mm256_mul_ps(f, x.c), _mm256_mul_ps(f, x.d)};
}

TIER_INLINE struct v32 v32_fma(vec f, struct v32 x, struct v32 y) {
  return (struct v32){_mm256_fmadd_ps(f, x.a, y.a), _mm256_fmadd_ps(f, x.b, y.b), _mm256_fmadd_ps(f, x.c, y.c),
                      _mm256_fmadd_ps(f, x.d, y.d)};
}

TIER_INLINE struct v32 v32_fnma(vec f, struct v32 x, struct v32 y) {
  return (struct v32){_mm256_fnmadd_ps(f, x.a, y.a), _mm256_fnmadd_ps(f, x.b, y.b), _mm256_fnmadd_ps(f, x.c, y.c),
                      _mm256_fnmadd_ps(f, x.d, y.d)};
}

TIER_INLINE struct v32 v32_add(struct v32 x, struct v32 y) {
  return (struct v32){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b), _mm256_add_ps(x.c, y.c),
                      _mm256_add_ps(x.d, y.d)};
}

TIER_INLINE vec halves(float low, float high) {
  return _mm256_insertf128_ps(_mm256_set1_ps(low), _mm_set1_ps(high), 1);
}

TIER_INLINE struct row_sums sums_of_rows(const vec x[8], const vec y[8]) {
  return (struct row_sums){v8_sum_rows(x), v8_sum_rows(y)};
}

TIER_INLINE __m256 sums_of_pair(vec even, vec odd) {
  return _mm256_add_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
}

TIER_INLINE vec even_twice(vec x) {
  return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
}

TIER_INLINE vec odd_twice(vec x) {
  return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7));
}

TIER_INLINE void load_pair(const uint16_t *a, const uint16_t *b, vec *even, vec *odd) {
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a));
  const __m256i x = _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)b), 1);
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}

TIER_INLINE void store_pair(uint16_t *a, uint16_t *b, vec even, vec odd, int finite) {
  const __m256i e = finite ? _mm256_srli_epi32(v8_round_finite_bf16(even), 16) : v8_round_bf16(even);
  const __m256i o = finite ? v8_round_finite_bf16(odd) : _mm256_slli_epi32(v8_round_bf16(odd), 16);
  const __m256i r = _mm256_blend_epi16(e, o, 0xaa);
  _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(r));
  _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(r, 1));
}

#include "kernels/decode_f32.h"

void gdn_fill_recur_avx2(struct gdn_kernels *t) {
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
