/* SPDX-License-Identifier: Apache-2.0
 * The chunk form in plain C, products as loops: the yardstick of the other tiers. Operands as in chunk_f32.h. */
#include <math.h>
#include <string.h>

#include "convert.h"
#include "kernels.h"

/* Below it exp is 0 in f32. Raising gates to it keeps sums finite where a gate is -inf. */
#define GATE_MIN (-110.0f)

static float load_elem(const struct gdn_rows *rows, int64_t row, int col) {
  const int64_t at = row * rows->stride_elems + col;
  return gdn_load_elem(rows->data, at, rows->dtype);
}

static void store_elem(const struct gdn_rows_out *rows, int64_t row, int col, float x) {
  const int64_t at = row * rows->stride_elems + col;
  gdn_store_elem(rows->data, at, rows->dtype, x);
}

/* dst [n16][K] = mult * rows, each over its norm if asked; zero from n on. */
static void operand_rows(const struct gdn_chunk *c, const struct gdn_rows *rows, float mult, float *dst) {
  for (int i = 0; i < c->n16; i++) {
    float sum = 0;
    for (int j = 0; c->l2norm && i < c->n && j < c->dim_k; j++) {
      const float x = load_elem(rows, i, j);
      sum += x * x;
    }
    const float factor = c->l2norm ? mult / sqrtf(sum + c->eps) : mult;
    for (int j = 0; j < c->dim_k; j++) dst[i * c->dim_k + j] = i < c->n ? factor * load_elem(rows, i, j) : 0;
  }
}

/* Blocks of x k^T on and below the diagonal. */
static void scores(const struct gdn_chunk *c, const float *x, const float *k, float *dst) {
  for (int i = 0; i < c->n16; i++)
    for (int j = 0; j < (i / GDN_BLOCK + 1) * GDN_BLOCK; j++) {
      float sum = 0;
      for (int p = 0; p < c->dim_k; p++) sum += x[i * c->dim_k + p] * k[j * c->dim_k + p];
      dst[i * GDN_CHUNK + j] = sum;
    }
}

static void gdn_chunk_qk_ref(const struct gdn_chunk *c) {
  float *q = c->q, *k = c->k, *kt = c->kt;
  operand_rows(c, &c->q_rows, c->scale, q);
  operand_rows(c, &c->k_rows, 1, k);
  for (int i = 0; i < c->n16; i++)
    for (int j = 0; j < c->dim_k; j++) kt[j * GDN_CHUNK + i] = k[i * c->dim_k + j];
  scores(c, k, k, c->kk);
  scores(c, q, k, c->qk);
}

/* exp(G_i - G_j). */
static float decay_between(const struct gdn_chunk *c, int i, int j) {
  return expf((c->gate_hi[i] - c->gate_hi[j]) + (c->gate_lo[i] - c->gate_lo[j]));
}

static void gdn_chunk_gates_ref(const struct gdn_chunk *c) {
  double sum = 0;
  for (int i = 0; i < GDN_CHUNK; i++) {
    if (i < c->n && c->g_rows.data) {
      const float g = load_elem(&c->g_rows, i, 0);
      sum += g < GATE_MIN ? GATE_MIN : g; /* a NaN passes */
    }
    c->gate_hi[i] = (float)sum;
    c->gate_lo[i] = (float)(sum - (double)c->gate_hi[i]);
    c->decay_in[i] = i < c->n ? expf(c->gate_hi[i]) : 0;
    c->beta[i] = i >= c->n ? 0 : c->beta_rows.data ? load_elem(&c->beta_rows, i, 0) : 1;
  }
  const int last = c->n - 1;
  for (int i = 0; i < GDN_CHUNK; i++) c->decay_out[i] = i < c->n ? decay_between(c, last, i) : 0;
  *c->decay_all = c->decay_in[last];
}

static void gdn_chunk_mask_ref(const struct gdn_chunk *c) {
  float *a = c->a;
  for (int i = 0; i < c->n16; i++)
    for (int j = 0; j < (i / GDN_BLOCK + 1) * GDN_BLOCK; j++) {
      const int at = i * GDN_CHUNK + j;
      c->l[at] = a[at] = 0;
      if (j > i) continue;
      const float d = decay_between(c, i, j);
      a[at] = d * c->qk[at];
      if (j < i) c->l[at] = c->beta[i] * d * c->kk[at];
    }
}

static void gdn_chunk_solve_ref(const struct gdn_chunk *c) {
  float *t = c->t;
  for (int i = 0; i < c->n16; i++)
    for (int j = 0; j < (i / GDN_BLOCK + 1) * GDN_BLOCK; j++) {
      float x = i == j;
      for (int p = j; p < i; p++) x -= c->l[i * GDN_CHUNK + p] * t[p * GDN_CHUNK + j];
      t[i * GDN_CHUNK + j] = x;
    }
}

/* Products read the state itself. */
static void gdn_chunk_begin_ref(const struct gdn_chunk *c, int col, int n_cols) {
  (void)c, (void)col, (void)n_cols;
}

static void gdn_chunk_end_ref(const struct gdn_chunk *c, int col, int n_cols) {
  (void)c, (void)col, (void)n_cols;
}

/* dst [n16][V], columns [col, col + n_cols) = x [n16][K] times the state. */
static void project(const struct gdn_chunk *c, int col, int n_cols, const float *x, float *dst) {
  for (int i = 0; i < c->n16; i++)
    for (int j = col; j < col + n_cols; j++) {
      const float *panel = c->state + (int64_t)(j / GDN_PANEL) * GDN_PANEL * c->dim_k + j % GDN_PANEL;
      float sum = 0;
      for (int p = 0; p < c->dim_k; p++) sum += x[i * c->dim_k + p] * panel[p * GDN_PANEL];
      dst[i * c->dim_v + j] = sum;
    }
}

static void make_residual(const struct gdn_chunk *c, int col, int n_cols) {
  float *resid = c->resid;
  project(c, col, n_cols, c->k, resid);
  for (int i = 0; i < c->n16; i++)
    for (int j = col; j < col + n_cols; j++) {
      float *x = &resid[i * c->dim_v + j];
      *x = i < c->n ? c->beta[i] * (load_elem(&c->v_rows, i, j) - c->decay_in[i] * *x) : 0;
    }
}

static void gdn_chunk_delta_ref(const struct gdn_chunk *c, int col, int n_cols) {
  const float *t = c->t, *resid = c->resid;
  float *delta = c->delta, *delta_out = c->delta_out;
  make_residual(c, col, n_cols);
  for (int i = 0; i < c->n16; i++)
    for (int j = col; j < col + n_cols; j++) {
      float sum = 0;
      for (int p = 0; p <= i; p++) sum += t[i * GDN_CHUNK + p] * resid[p * c->dim_v + j];
      const int at = i * c->dim_v + j;
      delta[at] = sum;
      delta_out[at] = c->decay_out[i] * sum;
      if (c->delta_f32) c->delta_f32[at] = sum;
    }
}

static void gdn_chunk_out_ref(const struct gdn_chunk *c, int col, int n_cols) {
  const float *a = c->a, *delta = c->delta;
  project(c, col, n_cols, c->q, c->inter);
  for (int i = 0; i < c->n; i++)
    for (int j = col; j < col + n_cols; j++) {
      float sum = c->decay_in[i] * c->inter[i * c->dim_v + j];
      for (int p = 0; p <= i; p++) sum += a[i * GDN_CHUNK + p] * delta[p * c->dim_v + j];
      store_elem(&c->out_rows, i, j, sum);
    }
}

static void gdn_chunk_state_ref(const struct gdn_chunk *c, int col, int n_cols) {
  const float *kt = c->kt, *delta_out = c->delta_out;
  for (int j = col; j < col + n_cols; j++)
    for (int p = 0; p < c->dim_k; p++) {
      float *s = &c->state[(int64_t)(j / GDN_PANEL) * GDN_PANEL * c->dim_k + p * GDN_PANEL + j % GDN_PANEL];
      float sum = *c->decay_all * *s;
      for (int i = 0; i < c->n; i++) sum += kt[p * GDN_CHUNK + i] * delta_out[i * c->dim_v + j];
      *s = sum;
    }
}

static void gdn_chunk_state_at_ref(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  const float *kt = c->kt, *delta = c->delta;
  const int last = n_at - 1;
  for (int j = col; j < col + n_cols; j++)
    for (int p = 0; p < c->dim_k; p++) {
      const int64_t at = (int64_t)p * GDN_PANEL + j % GDN_PANEL;
      const int64_t panel = (int64_t)GDN_PANEL * c->dim_k;
      float sum = c->decay_in[last] * c->state[j / GDN_PANEL * panel + at];
      for (int i = 0; i < n_at; i++) sum += kt[p * GDN_CHUNK + i] * decay_between(c, last, i) * delta[i * c->dim_v + j];
      panels[(j - col) / GDN_PANEL * panel + at] = sum;
    }
}

static uint32_t gdn_thread_begin_ref(void) {
  return 0;
}

static void gdn_thread_end_ref(uint32_t saved) {
  (void)saved;
}

void gdn_fill_chunk_ref(struct gdn_kernels *t) {
  t->chunk_min = 1;
  t->knows_zero = 0;
  t->scan_cols = GDN_DIM_MAX;
  t->chunk_state_at = gdn_chunk_state_at_ref;
  t->thread_begin = gdn_thread_begin_ref;
  t->thread_end = gdn_thread_end_ref;
  t->chunk_qk = gdn_chunk_qk_ref;
  t->chunk_gates = gdn_chunk_gates_ref;
  t->chunk_mask = gdn_chunk_mask_ref;
  t->chunk_solve = gdn_chunk_solve_ref;
  t->chunk_begin = gdn_chunk_begin_ref;
  t->chunk_end = gdn_chunk_end_ref;
  t->chunk_delta = gdn_chunk_delta_ref;
  t->chunk_out = gdn_chunk_out_ref;
  t->chunk_state = gdn_chunk_state_ref;
}
