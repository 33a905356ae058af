/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step, written once for every vector width and element type.
 * The including file defines first, for vectors of LANES floats (8 or 16), in recur_<isa>.c:
 *   vec, vec_load, vec_store, vec_stream (past the caches, aligned), vec_store_tail(p, n, x), vec_set1, vec_add,
 *   vec_sub, vec_mul, vec_div, vec_fmadd (a b + c), vec_fnmadd (c - a b), vec_min and vec_max (the second operand when
 *   one is NaN), vec_abs, vec_exp, vec_split (x = m 2^e, m in sqrt(1/2) .. sqrt(2), for normal x > 0), vec_sum,
 *   vec_below(a, b, x, y) (x where a < b, else y), load_as, store_as (one vec of elements of a constant dtype, store_as
 *   also of STORE_FINITE_BF16: bfloat16 from numbers that are not NaN),
 *   load_transposed(data, at, ld, dtype, r): r[j] lane i = element at + i ld + j;
 *   struct v32: the 32 columns of a panel, by value so that they stay in registers, with v32_zero, v32_load, v32_store,
 *   v32_mul (by a vec), v32_fma (vec v32 + v32), v32_fnma, v32_add. */
#ifndef GDN_RECUR_F32_H
#define GDN_RECUR_F32_H

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/vec_avx2.h"

#define INLINE static inline __attribute__((always_inline))

/* Runs call with DTYPE as a constant, so that each element type gets its own loop. */
#define BY_DTYPE(dtype, call)                                                                                          \
  do {                                                                                                                 \
    if ((dtype) == GDN_ROWS_BF16) {                                                                                    \
      enum { DTYPE = GDN_ROWS_BF16 };                                                                                  \
      call;                                                                                                            \
    } else if ((dtype) == GDN_ROWS_F16) {                                                                              \
      enum { DTYPE = GDN_ROWS_F16 };                                                                                   \
      call;                                                                                                            \
    } else {                                                                                                           \
      enum { DTYPE = GDN_ROWS_F32 };                                                                                   \
      call;                                                                                                            \
    }                                                                                                                  \
  } while (0)

/* ---- rows ---- */

INLINE void load_rows(int n, int dim, struct gdn_rows src, int dtype, float *restrict dst, int64_t ld) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += LANES)
      vec_store(dst + i * ld + j, load_as(src.data, i * src.stride_elems + j, dtype));
}

static void recur_load_rows(int n, int dim, struct gdn_rows src, float *dst, int64_t ld) {
  BY_DTYPE(src.dtype, load_rows(n, dim, src, DTYPE, dst, ld));
}

#define N_SUMS (32 / LANES)

/* Sums are added in pairs of neighbours. */
INLINE float add_sums(const vec s[N_SUMS]) {
#if LANES == 8
  return vec_sum(vec_add(vec_add(s[0], s[1]), vec_add(s[2], s[3])));
#else
  return vec_sum(vec_add(s[0], s[1]));
#endif
}

INLINE void norm_rows(int n, int dim, struct gdn_rows src, int dtype, float eps, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++) {
    float *row = dst + (ptrdiff_t)i * dim;
    vec s[N_SUMS];
    for (int c = 0; c < N_SUMS; c++) s[c] = vec_set1(0);
    for (int j = 0; j < dim; j += 32)
      for (int c = 0; c < N_SUMS; c++) {
        const vec x = load_as(src.data, i * src.stride_elems + j + LANES * c, dtype);
        vec_store(row + j + LANES * c, x);
        s[c] = vec_fmadd(x, x, s[c]);
      }
    const vec factor = vec_set1(mult / sqrtf(add_sums(s) + eps));
    for (int j = 0; j < dim; j += LANES) vec_store(row + j, vec_mul(factor, vec_load(row + j)));
  }
}

INLINE void scale_rows(int n, int dim, struct gdn_rows src, int dtype, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += LANES)
      vec_store(dst + (ptrdiff_t)i * dim + j,
                vec_mul(vec_set1(mult), load_as(src.data, i * src.stride_elems + j, dtype)));
}

static void recur_norm_rows(int n, int dim, struct gdn_rows src, int l2norm, float eps, float mult, float *dst) {
  if (l2norm)
    BY_DTYPE(src.dtype, norm_rows(n, dim, src, DTYPE, eps, mult, dst));
  else
    BY_DTYPE(src.dtype, scale_rows(n, dim, src, DTYPE, mult, dst));
}

static void recur_dot_rows(int n, int dim, const float *a, const float *b, float *restrict dot) {
  for (int i = 0; i < n; i++, a += dim, b += dim) {
    vec s[N_SUMS];
    for (int c = 0; c < N_SUMS; c++) s[c] = vec_set1(0);
    for (int j = 0; j < dim; j += 32)
      for (int c = 0; c < N_SUMS; c++) s[c] = vec_fmadd(vec_load(a + j + LANES * c), vec_load(b + j + LANES * c), s[c]);
    dot[i] = add_sums(s);
  }
}

INLINE void store_rows(int n, int dim, const float *src, int64_t ld, struct gdn_rows_out dst, int dtype) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += LANES)
      store_as(dst.data, i * dst.stride_elems + j, dtype, vec_load(src + i * ld + j));
}

static void recur_store_rows(int n, int dim, const float *src, int64_t ld, struct gdn_rows_out dst) {
  BY_DTYPE(dst.dtype, store_rows(n, dim, src, ld, dst, DTYPE));
}

/* ---- gates ---- */

/* m <= LANES elements from element i on, then zeros. */
static vec load_strided(const struct gdn_rows *r, int i, int m) {
  float x[LANES] = {0};
  for (int l = 0; l < m; l++) x[l] = gdn_load_elem(r->data, (i + l) * r->stride_elems, r->dtype);
  return vec_load(x);
}

/* 2 artanh(s) for |s| <= 1/3, to within rounding relative to it. */
static vec twice_artanh(vec s) {
  const vec z = vec_mul(s, s), two_s = vec_add(s, s);
  vec p = vec_set1(1.0f / 17);
  for (int i = 15; i >= 3; i -= 2) p = vec_fmadd(p, z, vec_set1(1.0f / (float)i));
  return vec_fmadd(vec_mul(two_s, z), p, two_s);
}

/* Natural logarithm: -inf for 0 and for subnormal numbers, NaN below and for NaN. */
static vec vec_log(vec x) {
  const vec one = vec_set1(1.0f);
  vec m, e;
  vec_split(x, &m, &e);
  vec r = twice_artanh(vec_div(vec_sub(m, one), vec_add(m, one)));
  r = vec_fmadd(e, vec_set1(1.42860677e-6f), r);
  r = vec_fmadd(e, vec_set1(0.693145752f), r);
  r = vec_below(x, vec_set1(FLT_MIN), vec_set1(-INFINITY), r);
  r = vec_below(x, vec_set1(0.0f), vec_set1(NAN), r);
  return vec_below(x, vec_set1(INFINITY), r, x); /* infinity and NaN */
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), and x above the threshold. */
static vec softplus(vec x, float threshold) {
  const vec y = vec_exp(vec_sub(vec_set1(0.0f), vec_abs(x)));
  const vec log1p = twice_artanh(vec_div(y, vec_add(vec_set1(2.0f), y)));
  return vec_below(vec_set1(threshold), x, x, vec_add(vec_max(vec_set1(0.0f), x), log1p));
}

/* Infinities become the largest numbers; NaN stays. */
static vec to_finite(vec x) {
  return vec_min(vec_set1(FLT_MAX), vec_max(vec_set1(-FLT_MAX), x));
}

static vec raw_gate(const struct gdn_gates *a, vec x, int i, int m) {
  const vec rate = to_finite(vec_exp(load_strided(&a->a_log, i, m)));
  const vec bias = a->dt_bias.data ? to_finite(load_strided(&a->dt_bias, i, m)) : vec_set1(0.0f);
  const vec t = to_finite(vec_add(to_finite(x), bias));
  return vec_sub(vec_set1(0.0f), vec_mul(rate, softplus(t, a->threshold)));
}

static vec gate(const struct gdn_gates *a, int i, int m) {
  if (!a->g.data) return vec_set1(a->as_log ? 0.0f : 1.0f);
  vec g = load_strided(&a->g, i, m);
  if (a->g_mode == GDN_GATE_ALPHA)
    return a->as_log ? vec_log(g) : vec_below(vec_abs(g), vec_set1(FLT_MIN), vec_set1(0.0f), g);
  if (a->g_mode == GDN_GATE_RAW) g = raw_gate(a, g, i, m);
  return a->as_log ? g : vec_exp(g);
}

static void recur_gates(const struct gdn_gates *a) {
  const vec one = vec_set1(1.0f);
  for (int i = 0; i < a->n; i += LANES) {
    const int m = a->n - i < LANES ? a->n - i : LANES;
    vec beta = a->beta.data ? load_strided(&a->beta, i, m) : one;
    if (a->beta.data && a->beta_sigmoid) beta = vec_div(one, vec_add(one, vec_exp(vec_sub(vec_set1(0.0f), beta))));
    vec_store_tail(a->g_out + i, m, gate(a, i, m));
    vec_store_tail(a->beta_out + i, m, beta);
  }
}

/* ---- states ---- */

INLINE void state_load(int n_cols, int dim_k, struct gdn_state_ref s, int dtype, float *restrict panels) {
  for (int col = 0; col < n_cols; col += LANES) {
    float *dst = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    for (int j = 0; j < dim_k; j += LANES) {
      vec r[LANES];
      load_transposed(s.data, col * s.stride_elems + j, s.stride_elems, dtype, r);
      for (int i = 0; i < LANES; i++) vec_store(dst + (j + i) * GDN_PANEL, r[i]);
    }
  }
}

INLINE void state_store(int n_cols, int dim_k, const float *restrict panels, struct gdn_state_ref s, int dtype,
                        int stream) {
  for (int col = 0; col < n_cols; col += LANES) {
    const float *src = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    for (int j = 0; j < dim_k; j += LANES) {
      vec r[LANES];
      load_transposed(src, j * GDN_PANEL, GDN_PANEL, GDN_ROWS_F32, r);
      if (stream)
        for (int i = 0; i < LANES; i++) vec_stream((float *)s.data + (col + i) * s.stride_elems + j, r[i]);
      else
        for (int i = 0; i < LANES; i++) store_as(s.data, (col + i) * s.stride_elems + j, dtype, r[i]);
    }
  }
}

INLINE void state_load_k_major(int n_cols, int dim_k, struct gdn_state_ref s, int dtype, float *restrict panels) {
  for (int col = 0; col < n_cols; col += GDN_PANEL, panels += (ptrdiff_t)dim_k * GDN_PANEL)
    for (int j = 0; j < dim_k; j++)
      v32_store(panels, j * GDN_PANEL, GDN_ROWS_F32, v32_load(s.data, j * s.stride_elems + col, dtype));
}

INLINE void state_store_k_major(int n_cols, int dim_k, const float *restrict panels, struct gdn_state_ref s,
                                int dtype) {
  for (int col = 0; col < n_cols; col += GDN_PANEL, panels += (ptrdiff_t)dim_k * GDN_PANEL)
    for (int j = 0; j < dim_k; j++)
      v32_store(s.data, j * s.stride_elems + col, dtype, v32_load(panels, j * GDN_PANEL, GDN_ROWS_F32));
}

static void recur_state_load(int n_cols, int dim_k, struct gdn_state_ref s, float *panels) {
  if (s.k_major)
    BY_DTYPE(s.dtype, state_load_k_major(n_cols, dim_k, s, DTYPE, panels));
  else
    BY_DTYPE(s.dtype, state_load(n_cols, dim_k, s, DTYPE, panels));
}

/* A vector of one row is a cache line, and all are aligned. */
INLINE int whole_lines(struct gdn_state_ref s) {
  return LANES == 16 && ((uintptr_t)s.data | (uintptr_t)(4 * s.stride_elems)) % 64 == 0;
}

static void recur_state_store(int n_cols, int dim_k, const float *panels, struct gdn_state_ref s) {
  if (s.k_major)
    BY_DTYPE(s.dtype, state_store_k_major(n_cols, dim_k, panels, s, DTYPE));
  else if (s.stream && s.dtype == GDN_ROWS_F32 && whole_lines(s))
    state_store(n_cols, dim_k, panels, s, GDN_ROWS_F32, 1);
  else
    BY_DTYPE(s.dtype, state_store(n_cols, dim_k, panels, s, DTYPE, 0));
  if (s.stream) _mm_sfence();
}

/* ---- recurrent form: along V ---- */

struct dots {
  struct v32 x, y;
};

/* What is done to a panel in one pass. update: s = decay s + d k^T. dots: x = s k_next and y = s q_next of the result.
 * ahead: a line of memory that is fetched per row; null = none. Constant where it matters, so that each use has its own
 * loop. */
struct sweep {
  int dim_k, update, dots;
  float *state;
  vec decay;
  struct v32 d;
  const float *k, *k_next, *q_next;
  const char *ahead;
};

/* Chain l: the rows j = l, l + 8, l + 16, ... */
INLINE struct dots sweep_chain(struct sweep a, int fetch, int l) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int block = l; block < a.dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      struct v32 r = v32_load(a.state, j * GDN_PANEL, GDN_ROWS_F32);
      if (fetch) _mm_prefetch(a.ahead + (ptrdiff_t)j * 64, _MM_HINT_T1);
      if (a.update) {
        r = v32_fma(vec_set1(a.k[j]), a.d, v32_mul(a.decay, r));
        v32_store(a.state, j * GDN_PANEL, GDN_ROWS_F32, r);
      }
      if (a.dots) {
        sum.x = v32_fma(vec_set1(a.k_next[j]), r, sum.x);
        sum.y = v32_fma(vec_set1(a.q_next[j]), r, sum.y);
      }
    }
  return sum;
}

/* Bound by 4 multiply slots per vector of the state.
 * The order of a sum is the one that suits a [V, K] decode step, whose vectors lie along K: 8 chains, chain l over
 * j = l, l + 8, l + 16, ..; then (0 + 4) + (1 + 5) + (2 + 6) + (3 + 7). */
INLINE struct dots sweep(struct sweep s, int fetch) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int l = 0; l < 4; l++) {
    struct dots a = sweep_chain(s, fetch, l);
    const struct dots b = sweep_chain(s, fetch, l + 4);
    a.x = v32_add(a.x, b.x);
    a.y = v32_add(a.y, b.y);
    sum.x = l ? v32_add(sum.x, a.x) : a.x;
    sum.y = l ? v32_add(sum.y, a.y) : a.y;
  }
  return sum;
}

/* From x and y to d and out, which may be v. */
INLINE struct v32 finish_token(vec decay, float beta, float kq, struct dots sum, const float *v, float *out) {
  const struct v32 d = v32_mul(vec_set1(beta), v32_fnma(decay, sum.x, v32_load(v, 0, GDN_ROWS_F32)));
  v32_store(out, 0, GDN_ROWS_F32, v32_fma(vec_set1(kq), d, v32_mul(decay, sum.y)));
  return d;
}

INLINE void recur_panel(const struct gdn_recur *a, int col, int fetch) {
  const int dim_k = a->dim_k;
  struct sweep s = {.dim_k = dim_k,
                    .state = a->state + (ptrdiff_t)col * dim_k,
                    .k = a->k,
                    .k_next = a->k,
                    .q_next = a->q,
                    .dots = 1,
                    .decay = vec_set1(0),
                    .d = v32_zero(),
                    .ahead = a->next};
  struct dots sum = sweep(s, fetch);
  s.update = 1;
  for (int t = 0;; t++) {
    s.decay = vec_set1(a->decay[t]);
    s.d = finish_token(s.decay, a->beta[t], a->kq[t], sum, a->v + t * a->ld + col, a->out + t * a->ld + col);
    for (int i = 0; t < a->ahead.n_rows && i < a->ahead.n; i++)
      __builtin_prefetch(a->ahead.line[i] + t * a->ahead.stride_bytes[i]);
    if (t + 1 == a->n) break;
    s.k_next += dim_k;
    s.q_next += dim_k;
    if (fetch) s.ahead += (ptrdiff_t)dim_k * 64;
    sum = fetch && (t + 1) * (int64_t)dim_k * 64 < a->next_bytes ? sweep(s, 1) : sweep(s, 0);
    s.k += dim_k;
  }
  if (a->no_state) return;
  s.dots = 0;
  sweep(s, 0);
}

static void recur_tokens(const struct gdn_recur *a) {
  assert(a->n >= 1 && a->dim_k % GDN_PANEL == 0 && a->n_cols % GDN_PANEL == 0);
  if (a->next)
    for (int col = 0; col < a->n_cols; col += GDN_PANEL) recur_panel(a, col, 1);
  else
    for (int col = 0; col < a->n_cols; col += GDN_PANEL) recur_panel(a, col, 0);
}

/* ---- decode step on [V, K]: along K ---- */

#define DECODE_ROWS 8 /* rows of a block, whose chains are added together */
/* How far ahead the state is fetched to the second-level cache. Two rows at a time are not a pattern that hardware
 * prefetchers follow: without this, 0.35 of the bandwidth at dim_k 128 on Zen 4, with it 0.9; 8 to 32 KB are alike,
 * and fetching to the first level is no help. May reach past the rows, which a prefetch is free to do. */
#define DECODE_AHEAD_BYTES 16384

/* Two rows of a block and two of an earlier one. */
struct decode_rows {
  int dim_k, dtype, dots, update;
  const float *k, *q;
  __m256 decay, d0, d1;
  const void *in;
  void *out;
  int64_t at, old_at, ld; /* of in */
  int64_t out_at, out_ld;
};

INLINE __m256 load8(const void *data, int64_t i, int dtype) {
  return dtype == GDN_ROWS_F16 ? v8_load_f16((const uint16_t *)data + i) : _mm256_loadu_ps((const float *)data + i);
}

INLINE void store8(void *data, int64_t i, int dtype, __m256 x) {
  if (dtype == GDN_ROWS_F16)
    v8_store_f16((uint16_t *)data + i, x);
  else
    _mm256_storeu_ps((float *)data + i, x);
}

/* dots: x = in . k, y = in . q, as 8 chains each. update: out = decay in + d k^T for the earlier rows. Both at once, so
 * that reading overlaps with arithmetic and writing. */
INLINE void decode_pair(struct decode_rows r, __m256 x[2], __m256 y[2]) {
  const int bytes = r.dtype == GDN_ROWS_F32 ? 4 : 2;
  __m256 x0 = _mm256_setzero_ps(), x1 = x0, y0 = x0, y1 = x0;
  for (int block = 0; block < r.dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      const __m256 k = _mm256_loadu_ps(r.k + j);
      if (r.dots) {
        const __m256 q = _mm256_loadu_ps(r.q + j);
        const __m256 s0 = load8(r.in, r.at + j, r.dtype), s1 = load8(r.in, r.at + r.ld + j, r.dtype);
        if (bytes == 4 || j % 16 == 0)
          _mm_prefetch((const char *)r.in + r.at * bytes + DECODE_AHEAD_BYTES + 2 * bytes * j, _MM_HINT_T1);
        x0 = _mm256_fmadd_ps(k, s0, x0);
        y0 = _mm256_fmadd_ps(q, s0, y0);
        x1 = _mm256_fmadd_ps(k, s1, x1);
        y1 = _mm256_fmadd_ps(q, s1, y1);
      }
      if (r.update) {
        const __m256 s0 = _mm256_mul_ps(r.decay, load8(r.in, r.old_at + j, r.dtype));
        const __m256 s1 = _mm256_mul_ps(r.decay, load8(r.in, r.old_at + r.ld + j, r.dtype));
        store8(r.out, r.out_at + j, r.dtype, _mm256_fmadd_ps(r.d0, k, s0));
        store8(r.out, r.out_at + r.out_ld + j, r.dtype, _mm256_fmadd_ps(r.d1, k, s1));
      }
    }
  x[0] = x0, x[1] = x1;
  y[0] = y0, y[1] = y1;
}

/* The sums of 8 rows from their chains, in the order of sweep: lane i belongs to row i. */
INLINE __m256 sum_chains(const __m256 r[DECODE_ROWS]) {
  __m256 t[4], c[4];
  for (int i = 0; i < 4; i++)
    t[i] = _mm256_add_ps(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  V8_TRANSPOSE_4X4(t[0], t[1], t[2], t[3], c[0], c[1], c[2], c[3]);
  return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(c[0], c[1]), c[2]), c[3]);
}

/* From the chains of 8 rows to d and out; the same operations as in finish_token. Tells whether d is finite. */
INLINE int decode_finish(const struct gdn_decode_step *a, int col, const __m256 *x, const __m256 *y, float *d) {
  const __m256 decay = _mm256_set1_ps(a->decay);
  const __m256 t = _mm256_fnmadd_ps(decay, sum_chains(x), _mm256_loadu_ps(a->v + col));
  const __m256 delta = _mm256_mul_ps(_mm256_set1_ps(a->beta), t);
  _mm256_storeu_ps(d, delta);
  _mm256_storeu_ps(a->out + col, _mm256_fmadd_ps(_mm256_set1_ps(a->kq), delta, _mm256_mul_ps(decay, sum_chains(y))));
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), delta);
  return _mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_LT_OQ)) == 0xff;
}

static const float decode_zeros[GDN_DIM_MAX];

/* dots: the block of rows from col on. update: the block before, by then in the first-level cache. */
INLINE void decode_block(const struct gdn_decode_step *a, int col, int dtype, int dots, int update, float *d) {
  __m256 x[DECODE_ROWS], y[DECODE_ROWS];
  for (int i = 0; i < DECODE_ROWS / 2; i++) {
    const int row = col + 2 * i;
    struct decode_rows r = {.dim_k = a->dim_k,
                            .dtype = dtype,
                            .dots = dots,
                            .update = update,
                            .k = a->k,
                            .q = a->q,
                            .decay = _mm256_set1_ps(a->decay),
                            .d0 = _mm256_set1_ps(d[2 * i]),
                            .d1 = _mm256_set1_ps(d[2 * i + 1]),
                            .in = decode_zeros,
                            .out = a->state_out.data};
    if (a->state_in.data) {
      r.in = a->state_in.data;
      r.ld = a->state_in.stride_elems;
      r.at = row * r.ld;
      r.old_at = r.at - DECODE_ROWS * r.ld;
    }
    r.out_ld = a->state_out.stride_elems;
    r.out_at = (row - DECODE_ROWS) * r.out_ld;
    decode_pair(r, x + 2 * i, y + 2 * i);
  }
  if (dots) decode_finish(a, col, x, y, d);
}

INLINE void decode_v_major(const struct gdn_decode_step *a, int dtype) {
  float d[DECODE_ROWS] = {0};
  decode_block(a, 0, dtype, 1, 0, d);
  for (int col = DECODE_ROWS; col < a->n_cols; col += DECODE_ROWS)
    if (a->state_out.data)
      decode_block(a, col, dtype, 1, 1, d);
    else
      decode_block(a, col, dtype, 1, 0, d);
  if (a->state_out.data) decode_block(a, a->n_cols, dtype, 0, 1, d);
}

/* ---- the same on bfloat16 ----
 * Conversion would cost more than the arithmetic if it kept elements in order. Two rows of 8 elements make 8 pairs of
 * neighbours, and a shift and a mask make floats of these: even ones, odd ones, the first row in the lower half. Two
 * masks and a blend make pairs again. 256-bit vectors for AVX-512 too, of which Intel runs three at a time. */

struct bf16_rows {
  __m256 even, odd;
};

INLINE struct bf16_rows bf16_load(const uint16_t *a, const uint16_t *b) {
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a));
  const __m256i x = _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)b), 1);
  return (struct bf16_rows){_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)))};
}

INLINE void bf16_store(uint16_t *a, uint16_t *b, struct bf16_rows x, int finite) {
  const __m256i even = finite ? v8_round_finite_bf16(x.even) : v8_round_bf16(x.even);
  const __m256i odd = finite ? v8_round_finite_bf16(x.odd) : _mm256_slli_epi32(v8_round_bf16(x.odd), 16);
  const __m256i r = _mm256_blend_epi16(finite ? _mm256_srli_epi32(even, 16) : even, odd, 0xaa);
  _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(r));
  _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(r, 1));
}

/* k or q for bf16_rows: per 8 elements the even ones twice, then the odd ones twice. */
INLINE void bf16_split(int dim_k, const float *restrict x, float *restrict split) {
  for (int j = 0; j < dim_k; j += 8) {
    const __m256 v = _mm256_loadu_ps(x + j);
    _mm256_storeu_ps(split + 2 * j, _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
    _mm256_storeu_ps(split + 2 * j + 8, _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7)));
  }
}

struct bf16_step {
  int dim_k;
  int64_t ld; /* 0 for the zero state */
  const uint16_t *in;
  uint16_t *out;
  float k[2 * GDN_DIM_MAX], q[2 * GDN_DIM_MAX];
};

/* As decode_pair: in and out begin at the first of two rows, old_in and old_out at the first of two earlier ones. */
INLINE void bf16_pair(const struct bf16_step *s, const uint16_t *in, int dots, struct bf16_rows *x, struct bf16_rows *y,
                      const uint16_t *old_in, uint16_t *old_out, int update, int finite, __m256 decay, __m256 d) {
  struct bf16_rows sum_x = {_mm256_setzero_ps(), _mm256_setzero_ps()}, sum_y = sum_x;
  for (int block = 0; block < s->dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      const __m256 k_even = _mm256_loadu_ps(s->k + 2 * j), k_odd = _mm256_loadu_ps(s->k + 2 * j + 8);
      if (dots) {
        const struct bf16_rows r = bf16_load(in + j, in + s->ld + j);
        if (j % 16 == 0) _mm_prefetch((const char *)in + DECODE_AHEAD_BYTES + 4 * j, _MM_HINT_T1);
        sum_x.even = _mm256_fmadd_ps(k_even, r.even, sum_x.even);
        sum_x.odd = _mm256_fmadd_ps(k_odd, r.odd, sum_x.odd);
        sum_y.even = _mm256_fmadd_ps(_mm256_loadu_ps(s->q + 2 * j), r.even, sum_y.even);
        sum_y.odd = _mm256_fmadd_ps(_mm256_loadu_ps(s->q + 2 * j + 8), r.odd, sum_y.odd);
      }
      if (update) {
        struct bf16_rows r = bf16_load(old_in + j, old_in + s->ld + j);
        r.even = _mm256_fmadd_ps(d, k_even, _mm256_mul_ps(decay, r.even));
        r.odd = _mm256_fmadd_ps(d, k_odd, _mm256_mul_ps(decay, r.odd));
        bf16_store(old_out + j, old_out + s->dim_k + j, r, finite);
      }
    }
  *x = sum_x;
  *y = sum_y;
}

/* The chains of two rows, each in order. */
INLINE void bf16_chains(struct bf16_rows s, __m256 r[2]) {
  const __m256 low = _mm256_unpacklo_ps(s.even, s.odd), high = _mm256_unpackhi_ps(s.even, s.odd);
  r[0] = _mm256_permute2f128_ps(low, high, 0x20);
  r[1] = _mm256_permute2f128_ps(low, high, 0x31);
}

/* finite: d is. Tells whether the new one is. */
INLINE int bf16_block(const struct gdn_decode_step *a, const struct bf16_step *s, int col, int dots, int update,
                      int finite, float *d) {
  const __m256 decay = _mm256_set1_ps(a->decay);
  __m256 x[DECODE_ROWS], y[DECODE_ROWS];
  for (int i = 0; i < DECODE_ROWS; i += 2) {
    const uint16_t *in = s->in + (col + i) * s->ld;
    uint16_t *out = update ? s->out + (ptrdiff_t)(col + i - DECODE_ROWS) * s->dim_k : NULL;
    const __m256 d_rows = _mm256_insertf128_ps(_mm256_set1_ps(d[i]), _mm_set1_ps(d[i + 1]), 1);
    struct bf16_rows sum_x, sum_y;
    bf16_pair(s, in, dots, &sum_x, &sum_y, in - (update ? DECODE_ROWS * s->ld : 0), out, update, finite, decay, d_rows);
    bf16_chains(sum_x, x + i);
    bf16_chains(sum_y, y + i);
  }
  return dots ? decode_finish(a, col, x, y, d) : 0;
}

static void decode_bf16(const struct gdn_decode_step *a) {
  float d[DECODE_ROWS] = {0};
  struct bf16_step s = {.dim_k = a->dim_k, .ld = a->dim_k, .in = a->state_in.data, .out = a->state_out.data};
  if (!s.in) {
    s.in = (const uint16_t *)decode_zeros;
    s.ld = 0;
  }
  bf16_split(a->dim_k, a->k, s.k);
  bf16_split(a->dim_k, a->q, s.q);
  int finite = bf16_block(a, &s, 0, 1, 0, 0, d);
  for (int col = DECODE_ROWS; col < a->n_cols; col += DECODE_ROWS)
    if (!s.out)
      bf16_block(a, &s, col, 1, 0, 0, d);
    else if (finite)
      finite = bf16_block(a, &s, col, 1, 1, 1, d);
    else
      finite = bf16_block(a, &s, col, 1, 1, 0, d);
  if (s.out) bf16_block(a, &s, a->n_cols, 0, 1, 0, d);
}

/* ---- decode step on [K, V]: along V ----
 * Whole rows, blocks of 32 of them: panels of 32 columns lie a power of two apart, and share a few sets of the
 * first-level cache. The chains of all columns are kept in memory, each touched once per block. */

/* One chain of a block: rows j, j + 8, j + 16, j + 24 into x and y, [n_cols] each. */
INLINE void k_major_chain(const struct gdn_decode_step *a, const void *in, int64_t ld, int dtype, int j, int first,
                          float *restrict x, float *restrict y) {
  const int bytes = dtype == GDN_ROWS_F32 ? 4 : 2;
  const vec k0 = vec_set1(a->k[j]), k1 = vec_set1(a->k[j + 8]), k2 = vec_set1(a->k[j + 16]),
            k3 = vec_set1(a->k[j + 24]);
  const vec q0 = vec_set1(a->q[j]), q1 = vec_set1(a->q[j + 8]), q2 = vec_set1(a->q[j + 16]),
            q3 = vec_set1(a->q[j + 24]);
  for (int c = 0; c < a->n_cols; c += LANES) {
    const int64_t at = j * ld + c, step = 8 * ld;
    const vec s0 = load_as(in, at, dtype), s1 = load_as(in, at + step, dtype);
    const vec s2 = load_as(in, at + 2 * step, dtype), s3 = load_as(in, at + 3 * step, dtype);
    for (int i = 0; i < 4 && c * bytes % 64 == 0; i++)
      _mm_prefetch((const char *)in + (at + (4 + i) * step) * bytes, _MM_HINT_T1);
    const vec x0 = first ? vec_set1(0) : vec_load(x + c), y0 = first ? vec_set1(0) : vec_load(y + c);
    vec_store(x + c, vec_fmadd(k3, s3, vec_fmadd(k2, s2, vec_fmadd(k1, s1, vec_fmadd(k0, s0, x0)))));
    vec_store(y + c, vec_fmadd(q3, s3, vec_fmadd(q2, s2, vec_fmadd(q1, s1, vec_fmadd(q0, s0, y0)))));
  }
}

/* The sum of a column's 8 chains in the order of sweep; chains lie n apart. */
INLINE vec add_chains(const float *x, int n) {
  vec sum = vec_add(vec_load(x), vec_load(x + 4 * n));
  for (int l = 1; l < 4; l++) sum = vec_add(sum, vec_add(vec_load(x + l * n), vec_load(x + (l + 4) * n)));
  return sum;
}

INLINE void k_major_update(const struct gdn_decode_step *a, const void *in, int64_t ld, int dtype, int out_dtype,
                           const float *restrict d) {
  const vec decay = vec_set1(a->decay);
  const int64_t out_ld = a->state_out.stride_elems;
  for (int j = 0; j < a->dim_k; j++) {
    const vec k = vec_set1(a->k[j]);
    for (int c = 0; c < a->n_cols; c += LANES)
      store_as(a->state_out.data, j * out_ld + c, out_dtype,
               vec_fmadd(k, vec_load(d + c), vec_mul(decay, load_as(in, j * ld + c, dtype))));
  }
}

static int all_finite(const float *d, int n) {
  int finite = 1;
  for (int i = 0; i < n; i++) finite &= fabsf(d[i]) <= FLT_MAX;
  return finite;
}

INLINE void decode_k_major(const struct gdn_decode_step *a, int dtype) {
  const void *in = a->state_in.data ? a->state_in.data : (const void *)decode_zeros;
  const int64_t ld = a->state_in.data ? a->state_in.stride_elems : 0;
  const int n = a->n_cols;
  float x[8 * GDN_DIM_MAX], y[8 * GDN_DIM_MAX], d[GDN_DIM_MAX];
  for (int j = 0; j < a->dim_k; j += 32)
    for (int l = 0; l < 8; l++)
      if (j == 0)
        k_major_chain(a, in, ld, dtype, l, 1, x + l * n, y + l * n);
      else
        k_major_chain(a, in, ld, dtype, j + l, 0, x + l * n, y + l * n);
  const vec decay = vec_set1(a->decay), beta = vec_set1(a->beta), kq = vec_set1(a->kq);
  for (int c = 0; c < n; c += LANES) {
    const vec delta = vec_mul(beta, vec_fnmadd(decay, add_chains(x + c, n), vec_load(a->v + c)));
    vec_store(d + c, delta);
    vec_store(a->out + c, vec_fmadd(kq, delta, vec_mul(decay, add_chains(y + c, n))));
  }
  if (!a->state_out.data) return;
  if (dtype == GDN_ROWS_BF16 && all_finite(d, n))
    k_major_update(a, in, ld, dtype, STORE_FINITE_BF16, d);
  else
    k_major_update(a, in, ld, dtype, dtype, d);
}

static void recur_decode_step(const struct gdn_decode_step *a) {
  const struct gdn_state_ref *s = a->state_in.data ? &a->state_in : &a->state_out;
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX && a->n_cols % GDN_PANEL == 0);
  if (s->data && s->k_major)
    BY_DTYPE(s->dtype, decode_k_major(a, DTYPE));
  else if (s->data && s->dtype == GDN_ROWS_BF16)
    decode_bf16(a);
  else if (s->data && s->dtype == GDN_ROWS_F16)
    decode_v_major(a, GDN_ROWS_F16);
  else
    decode_v_major(a, GDN_ROWS_F32);
}

#endif
