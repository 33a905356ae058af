/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step in plain C: the yardstick, and the fallback on any processor. */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/kernels.h"

static float from_bf16(uint16_t h) {
  const uint32_t u = (uint32_t)h << 16;
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

/* Nearest, ties to even; NaN becomes quiet. */
static uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  if (isnan(x)) return (uint16_t)((u | 0x400000u) >> 16);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static float element(const struct gdn_rows *r, int64_t i) {
  if (r->dtype == GDN_ROWS_BF16) return from_bf16(((const uint16_t *)r->data)[i]);
  return ((const float *)r->data)[i];
}

static void gdn_load_rows_ref(int n, int dim, struct gdn_rows src, float *restrict dst, int64_t ld) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j++) dst[i * ld + j] = element(&src, i * src.stride_elems + j);
}

static void gdn_norm_rows_ref(int n, int dim, struct gdn_rows src, int l2norm, float eps, float mult,
                              float *restrict dst) {
  for (int i = 0; i < n; i++) {
    float *row = dst + (int64_t)i * dim;
    float sum = 0.0f;
    for (int j = 0; j < dim; j++) {
      row[j] = element(&src, i * src.stride_elems + j);
      sum += row[j] * row[j];
    }
    const float factor = l2norm ? mult / sqrtf(sum + eps) : mult;
    for (int j = 0; j < dim; j++) row[j] *= factor;
  }
}

static void gdn_dot_rows_ref(int n, int dim, const float *restrict a, const float *restrict b, float *restrict dot) {
  for (int i = 0; i < n; i++) {
    float sum = 0.0f;
    for (int j = 0; j < dim; j++) sum += a[(int64_t)i * dim + j] * b[(int64_t)i * dim + j];
    dot[i] = sum;
  }
}

static void gdn_gates_ref(int n, struct gdn_rows g, struct gdn_rows beta, float *restrict decay,
                          float *restrict beta_f32) {
  for (int i = 0; i < n; i++) {
    const float e = g.data ? expf(element(&g, i * g.stride_elems)) : 1.0f;
    /* As the vector tiers: no subnormal factor, which would slow every product with it. */
    decay[i] = e < FLT_MIN ? 0.0f : e;
    beta_f32[i] = beta.data ? element(&beta, i * beta.stride_elems) : 1.0f;
  }
}

static void gdn_store_rows_ref(int n, int dim, const float *restrict src, int64_t ld, struct gdn_rows_out dst) {
  for (int i = 0; i < n; i++) {
    const float *row = src + i * ld;
    if (dst.dtype == GDN_ROWS_BF16) {
      uint16_t *out = (uint16_t *)dst.data + i * dst.stride_elems;
      for (int j = 0; j < dim; j++) out[j] = to_bf16(row[j]);
    } else {
      memcpy((float *)dst.data + i * dst.stride_elems, row, (size_t)dim * sizeof(*row));
    }
  }
}

static void gdn_state_load_ref(int n_cols, int dim_k, const float *restrict rows, float *restrict panels) {
  for (int c = 0; c < n_cols; c++) {
    float *panel = panels + (ptrdiff_t)(c / GDN_PANEL) * dim_k * GDN_PANEL + c % GDN_PANEL;
    for (int j = 0; j < dim_k; j++) panel[j * GDN_PANEL] = rows[(ptrdiff_t)c * dim_k + j];
  }
}

static void gdn_state_store_ref(int n_cols, int dim_k, const float *restrict panels, float *restrict rows) {
  for (int c = 0; c < n_cols; c++) {
    const float *panel = panels + (ptrdiff_t)(c / GDN_PANEL) * dim_k * GDN_PANEL + c % GDN_PANEL;
    for (int j = 0; j < dim_k; j++) rows[(ptrdiff_t)c * dim_k + j] = panel[j * GDN_PANEL];
  }
}

/* One token on one panel; v and out may be the same. */
static void recur_token(const struct gdn_recur *a, int t, float *restrict panel, const float *v, float *out) {
  const float *q = a->q + (ptrdiff_t)t * a->dim_k, *k = a->k + (ptrdiff_t)t * a->dim_k;
  const float decay = a->decay[t];
  float x[GDN_PANEL] = {0}, y[GDN_PANEL] = {0}, d[GDN_PANEL];
  for (int j = 0; j < a->dim_k; j++)
    for (int c = 0; c < GDN_PANEL; c++) {
      x[c] += panel[j * GDN_PANEL + c] * k[j];
      y[c] += panel[j * GDN_PANEL + c] * q[j];
    }
  for (int c = 0; c < GDN_PANEL; c++) {
    d[c] = a->beta[t] * (v[c] - decay * x[c]);
    out[c] = decay * y[c] + a->kq[t] * d[c];
  }
  for (int j = 0; j < a->dim_k; j++)
    for (int c = 0; c < GDN_PANEL; c++) panel[j * GDN_PANEL + c] = decay * panel[j * GDN_PANEL + c] + d[c] * k[j];
}

static void gdn_recur_ref(const struct gdn_recur *a) {
  assert(a->n >= 1 && a->dim_k % GDN_PANEL == 0 && a->n_cols % GDN_PANEL == 0);
  for (int col = 0; col < a->n_cols; col += GDN_PANEL)
    for (int t = 0; t < a->n; t++)
      recur_token(a, t, a->state + (ptrdiff_t)col * a->dim_k, a->v + t * a->ld + col, a->out + t * a->ld + col);
}

static void gdn_decode_step_ref(const struct gdn_decode_step *a) {
  static const float zeros[GDN_DIM_MAX];
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX);
  for (int c = 0; c < a->n_cols; c++) {
    const float *s = a->state_in ? a->state_in + (ptrdiff_t)c * a->dim_k : zeros;
    float x = 0.0f, y = 0.0f;
    for (int j = 0; j < a->dim_k; j++) {
      x += s[j] * a->k[j];
      y += s[j] * a->q[j];
    }
    const float d = a->beta * (a->v[c] - a->decay * x);
    a->out[c] = a->decay * y + a->kq * d;
    if (!a->state_out) continue;
    float *out = a->state_out + (ptrdiff_t)c * a->dim_k;
    for (int j = 0; j < a->dim_k; j++) out[j] = a->decay * s[j] + d * a->k[j];
  }
}

void gdn_fill_recur_ref(struct gdn_kernels *t) {
  t->recur_cols = GDN_PANEL;
  t->load_rows = gdn_load_rows_ref;
  t->norm_rows = gdn_norm_rows_ref;
  t->dot_rows = gdn_dot_rows_ref;
  t->gates = gdn_gates_ref;
  t->store_rows = gdn_store_rows_ref;
  t->state_load = gdn_state_load_ref;
  t->state_store = gdn_state_store_ref;
  t->recur = gdn_recur_ref;
  t->decode_step = gdn_decode_step_ref;
}
