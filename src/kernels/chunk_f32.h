/* SPDX-License-Identifier: Apache-2.0
 * The chunk form's primitives in f32, written once for every vector width; operands are plain f32 arrays:
 *   q, k [64][K]   kt [K][64]   a, t [64][64]   resid, delta, delta_out [64][V]   state_op: unused, products read state
 * The including file defines first, for vectors of LANES floats (a divisor of GDN_BLOCK, power of two):
 *   vec, vec_load, vec_store, vec_load_bf16, vec_store_bf16, vec_load_f16, vec_store_f16, vec_set1, vec_add, vec_sub,
 *   vec_mul, vec_fmadd (a b + c), vec_fnmadd (c - a b), vec_exp, vec_sum, vec_below(x, n) (lanes below n kept, others
 *   zero), vec_transpose,
 *   solve_diagonal(l, t): t [LANES][LANES] = (I + l)^-1, all of row length GDN_CHUNK;
 *   solve_below(n, l, t_above, t): t = (I + l[][n .. n + LANES))^-1 (-l[][0 .. n) t_above), t_above [n][LANES] of a
 *   block column of T from its diagonal block on. */
#ifndef GDN_CHUNK_F32_H
#define GDN_CHUNK_F32_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "convert.h"
#include "gemm.h"
#include "kernels.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Below it exp is 0 in f32. Raising gates to it keeps sums finite where a gate is -inf. */
#define GATE_MIN (-110.0f)

static ALWAYS_INLINE vec load_elems(const struct gdn_rows *rows, int64_t row, int col) {
  const int64_t at = row * rows->stride_elems + col;
  if (rows->dtype == GDN_ROWS_BF16) return vec_load_bf16((const uint16_t *)rows->data + at);
  if (rows->dtype == GDN_ROWS_F16) return vec_load_f16((const uint16_t *)rows->data + at);
  return vec_load((const float *)rows->data + at);
}

static ALWAYS_INLINE void store_elems(const struct gdn_rows_out *rows, int64_t row, int col, vec x) {
  const int64_t at = row * rows->stride_elems + col;
  if (rows->dtype == GDN_ROWS_BF16)
    vec_store_bf16((uint16_t *)rows->data + at, x);
  else if (rows->dtype == GDN_ROWS_F16)
    vec_store_f16((uint16_t *)rows->data + at, x);
  else
    vec_store((float *)rows->data + at, x);
}

static inline float scalar_elem(const struct gdn_rows *rows, int64_t row) {
  return gdn_load_elem(rows->data, row * rows->stride_elems, rows->dtype);
}

/* dst [n16][dim] = mult * rows, each over its norm if asked; zero from n on. */
static inline void chunk_rows(const struct gdn_chunk *c, const struct gdn_rows *rows, float mult, float *dst) {
  const int dim = c->dim_k;
  for (int i = 0; i < c->n; i++) {
    float *row = dst + (int64_t)i * dim;
    float factor = mult;
    if (c->l2norm) {
      vec s0 = vec_set1(0), s1 = vec_set1(0);
      for (int j = 0; j < dim; j += 2 * LANES) {
        const vec x0 = load_elems(rows, i, j), x1 = load_elems(rows, i, j + LANES);
        s0 = vec_fmadd(x0, x0, s0);
        s1 = vec_fmadd(x1, x1, s1);
      }
      factor = mult / sqrtf(vec_sum(vec_add(s0, s1)) + c->eps);
    }
    for (int j = 0; j < dim; j += LANES) vec_store(row + j, vec_mul(vec_set1(factor), load_elems(rows, i, j)));
  }
  memset(dst + (int64_t)c->n * dim, 0, sizeof(float) * (size_t)(c->n16 - c->n) * (size_t)dim);
}

static ALWAYS_INLINE void chunk_qk_f32(const struct gdn_chunk *c) {
  float *q = c->q, *k = c->k, *kt = c->kt;
  chunk_rows(c, &c->q_rows, c->scale, q);
  chunk_rows(c, &c->k_rows, 1, k);
  for (int j = 0; j < c->dim_k; j += LANES)
    for (int i = 0; i < c->n16; i += LANES) {
      vec r[LANES];
#pragma GCC unroll 16
      for (int p = 0; p < LANES; p++) r[p] = vec_load(k + (int64_t)(i + p) * c->dim_k + j);
      vec_transpose(r);
#pragma GCC unroll 16
      for (int p = 0; p < LANES; p++) vec_store(kt + (int64_t)(j + p) * GDN_CHUNK + i, r[p]);
    }
  for (int b = 0; b < c->n16 / GDN_BLOCK; b++) {
    const int64_t row = GDN_BLOCK * b;
    gdn_gemm_run(&c->gemms->scores[b], k + row * c->dim_k, kt, c->kk + row * GDN_CHUNK);
    gdn_gemm_run(&c->gemms->scores[b], q + row * c->dim_k, kt, c->qk + row * GDN_CHUNK);
  }
}

static ALWAYS_INLINE void chunk_gates_f32(const struct gdn_chunk *c) {
  double sum = 0;
  for (int i = 0; i < GDN_CHUNK; i++) {
    if (i < c->n && c->g_rows.data) {
      const float g = scalar_elem(&c->g_rows, i);
      sum += g < GATE_MIN ? GATE_MIN : g; /* a NaN passes */
    }
    c->gate_hi[i] = (float)sum;
    c->gate_lo[i] = (float)(sum - (double)c->gate_hi[i]);
    c->beta[i] = i < c->n ? (c->beta_rows.data ? scalar_elem(&c->beta_rows, i) : 1) : 0;
  }
  const vec hi = vec_set1(c->gate_hi[c->n - 1]), lo = vec_set1(c->gate_lo[c->n - 1]);
  for (int i = 0; i < GDN_CHUNK; i += LANES) {
    const vec hi_i = vec_load(c->gate_hi + i), lo_i = vec_load(c->gate_lo + i);
    const int live = c->n <= i ? 0 : c->n - i;
    vec_store(c->decay_in + i, vec_below(vec_exp(hi_i), live));
    vec_store(c->decay_out + i, vec_below(vec_exp(vec_add(vec_sub(hi, hi_i), vec_sub(lo, lo_i))), live));
  }
  *c->decay_all = c->decay_in[c->n - 1];
}

/* exp(G_i - G_j), j .. j + LANES - 1. */
static ALWAYS_INLINE vec decay_between(const struct gdn_chunk *c, vec hi, vec lo, int j) {
  return vec_exp(vec_add(vec_sub(hi, vec_load(c->gate_hi + j)), vec_sub(lo, vec_load(c->gate_lo + j))));
}

static ALWAYS_INLINE void chunk_mask_f32(const struct gdn_chunk *c) {
  for (int i = 0; i < c->n16; i++) {
    const int64_t row = (int64_t)i * GDN_CHUNK;
    const int diagonal = i / GDN_BLOCK * GDN_BLOCK;
    const vec hi = vec_set1(c->gate_hi[i]), lo = vec_set1(c->gate_lo[i]), beta = vec_set1(c->beta[i]);
    const float *kk = c->kk + row, *qk = c->qk + row;
    float *l = c->l + row, *a = (float *)c->a + row;
    for (int j = 0; j < diagonal; j += LANES) {
      const vec d = decay_between(c, hi, lo, j);
      vec_store(l + j, vec_mul(vec_mul(beta, d), vec_load(kk + j)));
      vec_store(a + j, vec_mul(d, vec_load(qk + j)));
    }
    for (int j = diagonal; j < diagonal + GDN_BLOCK; j += LANES) {
      const vec d = decay_between(c, hi, lo, j);
      vec_store(l + j, vec_below(vec_mul(vec_mul(beta, d), vec_load(kk + j)), i - j));
      vec_store(a + j, vec_below(vec_mul(d, vec_load(qk + j)), i - j + 1));
    }
  }
}

/* In blocks of LANES rows and columns, T_rs = (I + L_rr)^-1 (I_rs - sum_(s <= p < r) L_rp T_ps), by forward
 * substitution throughout: its residual stays small when keys are nearly equal. */
static ALWAYS_INLINE void chunk_solve_f32(const struct gdn_chunk *c) {
  float *t = c->t;
  for (int r = 0; r < c->n16; r += LANES) {
    const float *l = c->l + r * GDN_CHUNK;
    for (int s = 0; s < r; s += LANES) solve_below(r - s, l + s, t + s * GDN_CHUNK + s, t + r * GDN_CHUNK + s);
    solve_diagonal(l + r, t + r * GDN_CHUNK + r);
    /* What is left of the 16 x 16 diagonal block when vectors are shorter than it. */
    for (int s = r + LANES; s % GDN_BLOCK; s += LANES)
      for (int i = r; i < r + LANES; i++) vec_store(t + i * GDN_CHUNK + s, vec_set1(0));
  }
}

/* resid = beta (v - exp(G) resid) on one panel; zero from n on. */
static inline void finish_residual(const struct gdn_chunk *c, int col, float *resid) {
  for (int i = 0; i < c->n; i++) {
    const vec decay = vec_set1(c->decay_in[i]), beta = vec_set1(c->beta[i]);
    for (int j = 0; j < GDN_PANEL; j += LANES) {
      float *x = resid + (int64_t)i * c->dim_v + j;
      vec_store(x, vec_mul(beta, vec_fnmadd(decay, vec_load(x), load_elems(&c->v_rows, i, col + j))));
    }
  }
  for (int i = c->n; i < c->n16; i++) memset(resid + (int64_t)i * c->dim_v, 0, sizeof(float) * GDN_PANEL);
}

/* dst [n][32] = factor[i] * src on rows of dim_v floats. */
static inline void scale_rows(int n, int dim_v, const float *factor, const float *src, float *dst) {
  for (int i = 0; i < n; i++) {
    const vec f = vec_set1(factor[i]);
    for (int j = 0; j < GDN_PANEL; j += LANES)
      vec_store(dst + (int64_t)i * dim_v + j, vec_mul(f, vec_load(src + (int64_t)i * dim_v + j)));
  }
}

static ALWAYS_INLINE void chunk_delta_f32(const struct gdn_chunk *c, int col, int n_cols) {
  const struct gdn_gemm *project = &c->gemms->project[c->n16 / GDN_BLOCK - 1];
  float *delta = c->delta;
  for (int j = col; j < col + n_cols; j += GDN_PANEL) {
    gdn_gemm_run(project, c->k, c->state + (int64_t)j * c->dim_k, (float *)c->resid + j);
    finish_residual(c, j, (float *)c->resid + j);
    for (int b = 0; b < c->n16 / GDN_BLOCK; b++) {
      const int row = GDN_BLOCK * b;
      const int64_t at = (int64_t)row * c->dim_v + j;
      gdn_gemm_run(&c->gemms->tri[b], (const float *)c->t + row * GDN_CHUNK, (const float *)c->resid + j, delta + at);
      scale_rows(GDN_BLOCK, c->dim_v, c->decay_out + row, delta + at, (float *)c->delta_out + at);
    }
  }
  if (!c->delta_f32 || c->delta_f32 == delta) return;
  for (int i = 0; i < c->n16; i++) {
    const int64_t at = (int64_t)i * c->dim_v + col;
    memcpy(c->delta_f32 + at, delta + at, sizeof(float) * (size_t)n_cols);
  }
}

static ALWAYS_INLINE void chunk_out_f32(const struct gdn_chunk *c, int col, int n_cols) {
  const struct gdn_gemm *project = &c->gemms->project[c->n16 / GDN_BLOCK - 1];
  for (int j = col; j < col + n_cols; j += GDN_PANEL) {
    gdn_gemm_run(project, c->q, c->state + (int64_t)j * c->dim_k, c->inter + j);
    for (int b = 0; b < c->n16 / GDN_BLOCK; b++) {
      const int row = GDN_BLOCK * b;
      float *inter = c->inter + (int64_t)row * c->dim_v + j;
      scale_rows(GDN_BLOCK, c->dim_v, c->decay_in + row, inter, inter);
      gdn_gemm_run(&c->gemms->tri_add[b], (const float *)c->a + row * GDN_CHUNK, (const float *)c->delta + j, inter);
      for (int i = row; i < c->n && i < row + GDN_BLOCK; i++)
        for (int p = 0; p < GDN_PANEL; p += LANES)
          store_elems(&c->out_rows, i, j + p, vec_load(inter + (int64_t)(i - row) * c->dim_v + p));
    }
  }
}

static ALWAYS_INLINE void chunk_state_f32(const struct gdn_chunk *c, int col, int n_cols) {
  const struct gdn_gemm *update = &c->gemms->update[c->n16 / GDN_BLOCK - 1];
  const vec decay = vec_set1(*c->decay_all);
  for (int j = col; j < col + n_cols; j += GDN_PANEL) {
    float *state = c->state + (int64_t)j * c->dim_k;
    for (int i = 0; i < c->dim_k * GDN_PANEL; i += LANES) vec_store(state + i, vec_mul(decay, vec_load(state + i)));
    gdn_gemm_run(update, c->kt, (const float *)c->delta_out + j, state);
  }
}

static ALWAYS_INLINE void chunk_state_at_f32(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  const int n16 = (n_at + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK, last = n_at - 1;
  const struct gdn_gemm *update = &c->gemms->update[n16 / GDN_BLOCK - 1];
  const vec decay = vec_set1(c->decay_in[last]), hi = vec_set1(c->gate_hi[last]), lo = vec_set1(c->gate_lo[last]);
  const int64_t panel = (int64_t)c->dim_k * GDN_PANEL;
  float factor[GDN_CHUNK];
  for (int i = 0; i < n16; i += LANES)
    vec_store(factor + i, vec_below(decay_between(c, hi, lo, i), n_at <= i ? 0 : n_at - i));
  for (int j = col; j < col + n_cols; j += GDN_PANEL) {
    const float *state = c->state + j / GDN_PANEL * panel;
    float *dst = panels + (j - col) / GDN_PANEL * panel;
    for (int64_t i = 0; i < panel; i += LANES) vec_store(dst + i, vec_mul(decay, vec_load(state + i)));
    scale_rows(n16, c->dim_v, factor, (const float *)c->delta + j, c->inter + j);
    gdn_gemm_run(update, c->kt, c->inter + j, dst);
  }
}

#endif
