/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step in plain C: the yardstick, and the fallback on any processor. */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/convert.h"
#include "kernels/kernels.h"

static float element(const struct gdn_rows *r, int64_t i) {
  return gdn_load_elem(r->data, i, r->dtype);
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

/* Infinities become the largest numbers; NaN stays. */
static float to_finite(float x) {
  return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

static float softplus(float x, float threshold) {
  return x > threshold ? x : (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
}

static float raw_gate(const struct gdn_gates *a, float x, int i) {
  const float rate = expf(element(&a->a_log, i * a->a_log.stride_elems));
  const float bias = a->dt_bias.data ? element(&a->dt_bias, i * a->dt_bias.stride_elems) : 0.0f;
  return 0.0f - to_finite(rate) * softplus(to_finite(to_finite(x) + to_finite(bias)), a->threshold);
}

/* As the vector tiers: subnormal factors are 0. */
static float flush(float x) {
  return fabsf(x) < FLT_MIN ? 0.0f : x;
}

static float gate(const struct gdn_gates *a, int i) {
  if (!a->g.data) return a->as_log ? 0.0f : 1.0f;
  const float x = element(&a->g, i * a->g.stride_elems);
  if (a->g_mode == GDN_GATE_ALPHA) return a->as_log ? logf(flush(x)) : flush(x);
  const float g = a->g_mode == GDN_GATE_RAW ? raw_gate(a, x, i) : x;
  return a->as_log ? g : flush(expf(g));
}

static void gdn_gates_ref(const struct gdn_gates *a) {
  for (int i = 0; i < a->n; i++) {
    const float b = a->beta.data ? element(&a->beta, i * a->beta.stride_elems) : 1.0f;
    a->g_out[i] = gate(a, i);
    a->beta_out[i] = a->beta.data && a->beta_sigmoid ? 1.0f / (1.0f + expf(-b)) : b;
  }
}

static void gdn_store_rows_ref(int n, int dim, const float *restrict src, int64_t ld, struct gdn_rows_out dst) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j++) gdn_store_elem(dst.data, i * dst.stride_elems + j, dst.dtype, src[i * ld + j]);
}

static int64_t state_at(const struct gdn_state_ref *s, int col, int j) {
  return s->k_major ? j * s->stride_elems + col : col * s->stride_elems + j;
}

static void gdn_state_load_ref(int n_cols, int dim_k, struct gdn_state_ref s, float *panels) {
  for (int c = 0; c < n_cols; c++) {
    float *panel = panels + (ptrdiff_t)(c / GDN_PANEL) * dim_k * GDN_PANEL + c % GDN_PANEL;
    for (int j = 0; j < dim_k; j++) panel[j * GDN_PANEL] = gdn_load_elem(s.data, state_at(&s, c, j), s.dtype);
  }
}

static void gdn_state_store_ref(int n_cols, int dim_k, const float *panels, struct gdn_state_ref s) {
  for (int c = 0; c < n_cols; c++) {
    const float *panel = panels + (ptrdiff_t)(c / GDN_PANEL) * dim_k * GDN_PANEL + c % GDN_PANEL;
    for (int j = 0; j < dim_k; j++) gdn_store_elem(s.data, state_at(&s, c, j), s.dtype, panel[j * GDN_PANEL]);
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
  const struct gdn_state_ref *in = &a->state_in, *to = &a->state_out;
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX);
  for (int c = 0; c < a->n_cols; c++) {
    float s[GDN_DIM_MAX] = {0}, x = 0.0f, y = 0.0f;
    for (int j = 0; j < a->dim_k; j++) {
      if (in->data) s[j] = gdn_load_elem(in->data, state_at(in, c, j), in->dtype);
      x += s[j] * a->k[j];
      y += s[j] * a->q[j];
    }
    const float d = a->beta * (a->v[c] - a->decay * x);
    a->out[c] = a->decay * y + a->kq * d;
    for (int j = 0; to->data && j < a->dim_k; j++)
      gdn_store_elem(to->data, state_at(to, c, j), to->dtype, a->decay * s[j] + d * a->k[j]);
  }
}

static void store_column(const struct gdn_state_ref *to, int c, int dim_k, const float *s) {
  for (int j = 0; to->data && j < dim_k; j++) gdn_store_elem(to->data, state_at(to, c, j), to->dtype, s[j]);
}

static void update_tokens(const struct gdn_decode_tokens *a) {
  const struct gdn_state_ref *in = &a->state_in;
  for (int c = 0; c < a->n_cols; c++) {
    float s[GDN_DIM_MAX] = {0};
    for (int j = 0; in->data && j < a->dim_k; j++) s[j] = gdn_load_elem(in->data, state_at(in, c, j), in->dtype);
    for (int t = 0; t < a->n; t++) {
      const float *q = a->q + (ptrdiff_t)t * a->dim_k, *k = a->k + (ptrdiff_t)t * a->dim_k;
      const ptrdiff_t at = (ptrdiff_t)t * a->n_cols + c;
      float x = 0.0f, y = 0.0f;
      for (int j = 0; j < a->dim_k; j++) {
        x += s[j] * k[j];
        y += s[j] * q[j];
      }
      const float d = a->beta[t] * (a->v[at] - a->decay[t] * x);
      a->out[at] = a->decay[t] * y + a->kq[t] * d;
      for (int j = 0; j < a->dim_k; j++) s[j] = a->decay[t] * s[j] + d * k[j];
      if (a->token_states) store_column(&a->token_states[t], c, a->dim_k, s);
    }
    store_column(&a->state_out, c, a->dim_k, s);
  }
}

/* w[t] of the tokens s before t: their k . x[t], times the decays after s up to t. */
static void weigh_earlier(const struct gdn_decode_tokens *a, const float *x, float w[][GDN_TOKENS_MAX]) {
  for (int s = 0; s < a->n; s++) {
    float decay = 1.0f;
    for (int t = s + 1; t < a->n; t++) {
      decay *= a->decay[t];
      gdn_dot_rows_ref(1, a->dim_k, a->k + (ptrdiff_t)s * a->dim_k, x + (ptrdiff_t)t * a->dim_k, &w[t][s]);
      w[t][s] *= decay;
    }
  }
}

/* No state is stored: all sums on the first one. */
static void verify_tokens(const struct gdn_decode_tokens *a) {
  const struct gdn_state_ref *in = &a->state_in;
  float kk[GDN_TOKENS_MAX][GDN_TOKENS_MAX], kq[GDN_TOKENS_MAX][GDN_TOKENS_MAX];
  weigh_earlier(a, a->k, kk);
  weigh_earlier(a, a->q, kq);
  for (int c = 0; c < a->n_cols; c++) {
    float d[GDN_TOKENS_MAX], decay = 1.0f;
    for (int t = 0; t < a->n; t++) {
      const ptrdiff_t at = (ptrdiff_t)t * a->n_cols + c;
      float x = 0.0f, y = 0.0f;
      for (int j = 0; in->data && j < a->dim_k; j++) {
        const float s = gdn_load_elem(in->data, state_at(in, c, j), in->dtype);
        x += s * a->k[(ptrdiff_t)t * a->dim_k + j];
        y += s * a->q[(ptrdiff_t)t * a->dim_k + j];
      }
      decay *= a->decay[t];
      float rest = a->v[at] - decay * x, out = decay * y;
      for (int s = 0; s < t; s++) {
        rest -= kk[t][s] * d[s];
        out += kq[t][s] * d[s];
      }
      d[t] = a->beta[t] * rest;
      a->out[at] = out + a->kq[t] * d[t];
    }
  }
}

static void gdn_decode_tokens_ref(const struct gdn_decode_tokens *a) {
  assert(a->n >= 1 && a->n <= GDN_TOKENS_MAX && a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX);
  int stored = a->state_out.data != NULL;
  for (int t = 0; a->token_states && t < a->n; t++) stored |= a->token_states[t].data != NULL;
  if (stored)
    update_tokens(a);
  else
    verify_tokens(a);
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
  t->decode_tokens = gdn_decode_tokens_ref;
}
