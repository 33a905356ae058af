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

/* Chain l: the rows j = l, l + LANES, l + 2 LANES, ... */
INLINE struct dots sweep_chain(struct sweep a, int fetch, int l) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int block = l; block < a.dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += LANES) {
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

INLINE struct dots dots_add(struct dots a, struct dots b) {
  return (struct dots){v32_add(a.x, b.x), v32_add(a.y, b.y)};
}

/* Chains l and l + 8, where there are 16, else chain l. */
INLINE struct dots sweep_eighth(struct sweep s, int fetch, int l) {
  const struct dots a = sweep_chain(s, fetch, l);
  return LANES == 16 ? dots_add(a, sweep_chain(s, fetch, l + 8)) : a;
}

INLINE struct dots sweep_quarter(struct sweep s, int fetch, int l) {
  const struct dots a = sweep_eighth(s, fetch, l);
  return dots_add(a, sweep_eighth(s, fetch, l + 4));
}

/* Bound by 4 multiply slots per vector of the state.
 * The order of a sum is the one that suits a [V, K] decode step, whose vectors lie along K: LANES chains, chain l over
 * j = l, l + LANES, l + 2 LANES, ..; then, halving each time, l and l + 8 (of 16), l and l + 4, l and l + 2, the last
 * two. */
INLINE struct dots sweep(struct sweep s, int fetch) {
  struct dots half[2];
  for (int l = 0; l < 2; l++) {
    const struct dots a = sweep_quarter(s, fetch, l);
    half[l] = dots_add(a, sweep_quarter(s, fetch, l + 2));
  }
  return dots_add(half[0], half[1]);
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

#endif
