/* SPDX-License-Identifier: Apache-2.0
 * The chunk form with AVX-512: vectors of 16 floats for chunk_f32.h. */
#include "kernels.h"
#include "vec_avx512.h"

enum { LANES = 16 };
typedef __m512 vec;

static inline vec vec_load(const float *p) {
  return _mm512_loadu_ps(p);
}

static inline void vec_store(float *p, vec x) {
  _mm512_storeu_ps(p, x);
}

static inline vec vec_load_bf16(const uint16_t *p) {
  return v16_load_bf16(p);
}

static inline void vec_store_bf16(uint16_t *p, vec x) {
  v16_store_bf16(p, x);
}

static inline vec vec_load_f16(const uint16_t *p) {
  return v16_load_f16(p);
}

static inline void vec_store_f16(uint16_t *p, vec x) {
  v16_store_f16(p, x);
}

static inline vec vec_set1(float x) {
  return _mm512_set1_ps(x);
}

static inline vec vec_add(vec a, vec b) {
  return _mm512_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b) {
  return _mm512_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b) {
  return _mm512_mul_ps(a, b);
}

static inline vec vec_fmadd(vec a, vec b, vec c) {
  return _mm512_fmadd_ps(a, b, c);
}

static inline vec vec_fnmadd(vec a, vec b, vec c) {
  return _mm512_fnmadd_ps(a, b, c);
}

static inline vec vec_exp(vec x) {
  return v16_exp(x);
}

static inline float vec_sum(vec x) {
  return v16_sum(x);
}

static inline vec vec_below(vec x, int n) {
  return _mm512_maskz_mov_ps(v16_mask(n), x);
}

static inline __attribute__((always_inline)) void vec_transpose(vec r[LANES]) {
  v16_transpose(r);
}

enum { HALF = LANES / 2 };

/* Rows x of a block become (I + l)^-1 x, if steps before the first have been done. */
static inline __attribute__((always_inline)) void substitute(int first, const float *l, vec x[LANES]) {
#pragma GCC unroll 16
  for (int j = first; j < LANES; j++) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (i > j) x[i] = vec_fnmadd(vec_set1(l[i * GDN_CHUNK + j]), x[j], x[i]);
  }
}

/* The next two are not inlined: from two or three bare pointers every operand is a constant displacement away, and all
 * rows stay in registers. Rows of the first half of a diagonal block of T have an empty right half: half vectors there,
 * at half the cost where 512-bit operations run in two parts (0.90 against 1.05 us per chunk on Zen 4). */
static __attribute__((noinline)) void solve_diagonal(const float *l, float *t) {
  __m256 h[LANES];
  vec x[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) h[i] = _mm256_maskz_mov_ps((__mmask8)(1u << i), _mm256_set1_ps(1));
#pragma GCC unroll 8
  for (int j = 0; j < HALF; j++) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (i > j) h[i] = _mm256_fnmadd_ps(_mm256_set1_ps(l[i * GDN_CHUNK + j]), h[j], h[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) x[i] = _mm512_zextps256_ps512(h[i]);
#pragma GCC unroll 8
  for (int i = HALF; i < LANES; i++) x[i] = _mm512_mask_mov_ps(x[i], (__mmask16)(1u << i), vec_set1(1));
  substitute(HALF, l, x);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) vec_store(t + i * GDN_CHUNK, x[i]);
}

static __attribute__((noinline)) void solve_below(int n, const float *l, const float *t_above, float *t) {
  __m256 h[LANES];
  vec x[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) h[i] = _mm256_setzero_ps();
  for (int p = 0; p < HALF; p++) {
    const __m256 t_p = _mm256_loadu_ps(t_above + p * GDN_CHUNK);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) h[i] = _mm256_fnmadd_ps(_mm256_set1_ps(l[i * GDN_CHUNK + p]), t_p, h[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) x[i] = _mm512_zextps256_ps512(h[i]);
  for (int p = HALF; p < n; p++) {
    const vec t_p = vec_load(t_above + p * GDN_CHUNK);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = vec_fnmadd(vec_set1(l[i * GDN_CHUNK + p]), t_p, x[i]);
  }
  substitute(0, l + n, x);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) vec_store(t + i * GDN_CHUNK, x[i]);
}

#include "chunk_f32.h"

static void gdn_chunk_qk_avx512(const struct gdn_chunk *c) {
  chunk_qk_f32(c);
}

static void gdn_chunk_gates_avx512(const struct gdn_chunk *c) {
  chunk_gates_f32(c);
}

static void gdn_chunk_mask_avx512(const struct gdn_chunk *c) {
  chunk_mask_f32(c);
}

static void gdn_chunk_solve_avx512(const struct gdn_chunk *c) {
  chunk_solve_f32(c);
}

static void gdn_chunk_delta_avx512(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_delta_f32(c, col, n_cols);
}

static void gdn_chunk_out_avx512(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_out_f32(c, col, n_cols);
}

static void gdn_chunk_state_avx512(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_state_f32(c, col, n_cols);
}

static void gdn_chunk_state_at_avx512(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  chunk_state_at_f32(c, n_at, col, n_cols, panels);
}

void gdn_fill_chunk_avx512(struct gdn_kernels *t) {
  t->chunk_state_at = gdn_chunk_state_at_avx512;
  t->chunk_qk = gdn_chunk_qk_avx512;
  t->chunk_gates = gdn_chunk_gates_avx512;
  t->chunk_mask = gdn_chunk_mask_avx512;
  t->chunk_solve = gdn_chunk_solve_avx512;
  t->chunk_delta = gdn_chunk_delta_avx512;
  t->chunk_out = gdn_chunk_out_avx512;
  t->chunk_state = gdn_chunk_state_avx512;
}
