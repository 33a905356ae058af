/* SPDX-License-Identifier: Apache-2.0
 * The chunk form with AVX2 and FMA: vectors of 8 floats for chunk_f32.h. */
#include "kernels.h"
#include "vec_avx2.h"

enum { LANES = 8 };
typedef __m256 vec;

static inline vec vec_load(const float *p) {
  return _mm256_loadu_ps(p);
}

static inline void vec_store(float *p, vec x) {
  _mm256_storeu_ps(p, x);
}

static inline vec vec_load_bf16(const uint16_t *p) {
  return v8_load_bf16(p);
}

static inline void vec_store_bf16(uint16_t *p, vec x) {
  v8_store_bf16(p, x);
}

static inline vec vec_load_f16(const uint16_t *p) {
  return v8_load_f16(p);
}

static inline void vec_store_f16(uint16_t *p, vec x) {
  v8_store_f16(p, x);
}

static inline vec vec_set1(float x) {
  return _mm256_set1_ps(x);
}

static inline vec vec_add(vec a, vec b) {
  return _mm256_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b) {
  return _mm256_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b) {
  return _mm256_mul_ps(a, b);
}

static inline vec vec_fmadd(vec a, vec b, vec c) {
  return _mm256_fmadd_ps(a, b, c);
}

static inline vec vec_fnmadd(vec a, vec b, vec c) {
  return _mm256_fnmadd_ps(a, b, c);
}

static inline vec vec_exp(vec x) {
  return v8_exp(x);
}

static inline float vec_sum(vec x) {
  return v8_sum(x);
}

static inline vec vec_below(vec x, int n) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(v8_mask(n)));
}

static inline __attribute__((always_inline)) void vec_transpose(vec r[LANES]) {
  v8_transpose(r);
}

/* Rows x of a block become (I + l)^-1 x. */
static inline __attribute__((always_inline)) void substitute(const float *l, vec x[LANES]) {
#pragma GCC unroll 8
  for (int j = 0; j < LANES; j++) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
      if (i > j) x[i] = vec_fnmadd(vec_set1(l[i * GDN_CHUNK + j]), x[j], x[i]);
  }
}

/* The next two are not inlined: from two or three bare pointers every operand is a constant displacement away, and all
 * rows stay in registers. */
static __attribute__((noinline)) void solve_diagonal(const float *l, float *t) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  vec x[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) {
    const __m256i here = _mm256_cmpeq_epi32(lane, _mm256_set1_epi32(i));
    x[i] = _mm256_and_ps(vec_set1(1), _mm256_castsi256_ps(here));
  }
  substitute(l, x);
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) vec_store(t + i * GDN_CHUNK, x[i]);
}

static __attribute__((noinline)) void solve_below(int n, const float *l, const float *t_above, float *t) {
  vec x[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) x[i] = vec_set1(0);
  for (int p = 0; p < n; p++) {
    const vec t_p = vec_load(t_above + p * GDN_CHUNK);
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) x[i] = vec_fnmadd(vec_set1(l[i * GDN_CHUNK + p]), t_p, x[i]);
  }
  substitute(l + n, x);
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) vec_store(t + i * GDN_CHUNK, x[i]);
}

#include "chunk_f32.h"

static void gdn_chunk_qk_avx2(const struct gdn_chunk *c) {
  chunk_qk_f32(c);
}

static void gdn_chunk_gates_avx2(const struct gdn_chunk *c) {
  chunk_gates_f32(c);
}

static void gdn_chunk_mask_avx2(const struct gdn_chunk *c) {
  chunk_mask_f32(c);
}

static void gdn_chunk_solve_avx2(const struct gdn_chunk *c) {
  chunk_solve_f32(c);
}

static void gdn_chunk_delta_avx2(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_delta_f32(c, col, n_cols);
}

static void gdn_chunk_out_avx2(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_out_f32(c, col, n_cols);
}

static void gdn_chunk_state_avx2(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_state_f32(c, col, n_cols);
}

static void gdn_chunk_state_at_avx2(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  chunk_state_at_f32(c, n_at, col, n_cols, panels);
}

void gdn_fill_chunk_avx2(struct gdn_kernels *t) {
  t->chunk_state_at = gdn_chunk_state_at_avx2;
  t->chunk_qk = gdn_chunk_qk_avx2;
  t->chunk_gates = gdn_chunk_gates_avx2;
  t->chunk_mask = gdn_chunk_mask_avx2;
  t->chunk_solve = gdn_chunk_solve_avx2;
  t->chunk_delta = gdn_chunk_delta_avx2;
  t->chunk_out = gdn_chunk_out_avx2;
  t->chunk_state = gdn_chunk_state_avx2;
}
