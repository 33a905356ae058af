/* SPDX-License-Identifier: Apache-2.0
 * The chunk form with rounded operands; see model.h. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "oracle.h"

enum { CHUNK = MODEL_TOKENS, BLOCK = 32 };

const struct model model_bf16 = {
    .qk = 0, .state = 1, .n = 1, .resid = 1, .init = 0, .l = 1, .delta = 1, .a = 1, .delta_out = 1};

double model_error(const double *model, const double *want, int64_t n) {
  double error2 = 0, norm2 = 0;
  for (int64_t i = 0; i < n; i++) {
    error2 += (model[i] - want[i]) * (model[i] - want[i]);
    norm2 += want[i] * want[i];
  }
  return error2 == 0 ? 0 : sqrt(error2 / norm2);
}

/* The tiers round the same numbers as the model, up to f32, so that the errors nearly agree. Where a number falls on
 * the other side of a tie, its error is as large there, but of the other sign; with repeated keys such a change goes on
 * from token to token. Errors of n rows that have nothing but their size in common differ by 1 / sqrt(n). */
double model_limit(double error, int64_t n_rows, double f32_limit) {
  return n_rows == 0 ? f32_limit : (1.2 + 1 / sqrt((double)n_rows)) * error + f32_limit;
}

static double rounded(double x, int terms) {
  double sum = 0;
  if (terms == 0) return x;
  for (int i = 0; i < terms; i++) sum += (double)check_from_bf16(check_to_bf16((float)(x - sum)));
  return sum;
}

/* x times what rounding it is relative to. */
static double rounded_at(double x, double factor, int terms) {
  return rounded(x * factor, terms) / factor;
}

/* ---- one chunk ---- */

struct scratch {
  double l[CHUNK][CHUNK], a[CHUNK][CHUNK], n[CHUNK][BLOCK]; /* n: row i of its own block */
  double through[CHUNK][CHUNK];                             /* exp(G_i - G_j) */
  double *q, *k;                                            /* [n][dim_k] as multiplied */
  double *state, *resid, *delta, *delta_op;                 /* operands but for delta, which is V' itself */
  double q_owed[CHUNK], k_owed[CHUNK];
  int steep;
  double kept[CHUNK]; /* rows of R and V' are kept times this */
};

static void load_operands(const struct model *m, const struct model_chunk *c, struct scratch *s) {
  for (int i = 0; i < c->n; i++) {
    double q_mult = m->qk ? c->q_mult[i] : 1, k_mult = m->qk ? c->k_mult[i] : 1;
    for (int x = 0; x < c->dim_k; x++) {
      s->q[i * c->dim_k + x] = rounded(c->q[i * c->dim_k + x] * q_mult, m->qk);
      s->k[i * c->dim_k + x] = rounded(c->k[i * c->dim_k + x] * k_mult, m->qk);
    }
    s->q_owed[i] = m->qk ? 1 : c->q_mult[i];
    s->k_owed[i] = m->qk ? 1 : c->k_mult[i];
  }
}

static double dot(const double *x, const double *y, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * y[i];
  return sum;
}

static void choose_rows(const struct model_chunk *c, struct scratch *s) {
  double decay_in[CHUNK], last = 1;
  s->steep = 0; /* in double: a chunk at the very border may be steep here and not in a tier */
  for (int i = 0; i < c->n; i++) {
    decay_in[i] = last *= c->decay[i];
    s->steep |= !(last > 0x1p-60 && last < 0x1p60);
  }
  for (int i = 0; i < c->n; i++) s->kept[i] = s->k_owed[i] / (s->steep ? 1 : decay_in[i]);
}

/* A as a product of rows, and of decays in a steep chunk, over what is owed. */
static double rounded_a(const struct model *m, const struct scratch *s, int i, int j) {
  const double d = s->steep ? 1 : s->through[i][j];
  return s->a[i][j] == 0 ? 0 : rounded_at(s->a[i][j], 1 / (s->q_owed[i] * s->k_owed[j] * d), m->a);
}

static void make_triangles(const struct model_chunk *c, struct scratch *s) {
  for (int i = 0; i < c->n; i++) {
    for (int j = 0; j <= i; j++) {
      const double *k = s->k + j * c->dim_k;
      double d = s->through[i][j] = j == i ? 1 : s->through[i - 1][j] * c->decay[i];
      double kk = dot(s->k + i * c->dim_k, k, c->dim_k) * s->k_owed[i] * s->k_owed[j];
      double qk = dot(s->q + i * c->dim_k, k, c->dim_k) * s->q_owed[i] * s->k_owed[j];
      s->l[i][j] = j < i ? c->beta[i] * d * kk : 0;
      s->a[i][j] = d * qk;
    }
  }
}

/* N = (I + L)^-1 - I of each diagonal block. */
static void solve(const struct model_chunk *c, struct scratch *s) {
  for (int i = 0; i < c->n; i++) {
    int first = i / BLOCK * BLOCK;
    for (int j = first; j < i; j++) {
      double sum = -s->l[i][j];
      for (int p = j + 1; p < i; p++) sum -= s->l[i][p] * s->n[p][j - first];
      s->n[i][j - first] = sum;
    }
  }
}

/* x [dim_v] += weight y */
static void add_row(double *x, double weight, const double *y, int dim_v) {
  for (int v = 0; v < dim_v; v++) x[v] += weight * y[v];
}

/* R and V' of all tokens, block by block; out = exp(G) Q S^T. */
static void make_delta(const struct model *m, const struct model_chunk *c, struct scratch *s, double *out) {
  int V = c->dim_v;
  double decay_in = 1;
  for (int i = 0; i < c->n; i++) {
    int first = i / BLOCK * BLOCK;
    double *resid = s->resid + i * V, *delta = s->delta + i * V;
    decay_in *= c->decay[i];
    for (int v = 0; v < V; v++) resid[v] = out[i * V + v] = 0;
    for (int x = 0; x < c->dim_k; x++) {
      add_row(resid, s->k[i * c->dim_k + x], s->state + x * V, V);
      add_row(out + i * V, s->q[i * c->dim_k + x], s->state + x * V, V);
    }
    for (int v = 0; v < V; v++) {
      resid[v] = c->beta[i] * (c->v[i * V + v] - decay_in * s->k_owed[i] * resid[v]);
      out[i * V + v] *= decay_in * s->q_owed[i];
    }
    const double *kept = s->kept;
    for (int j = 0; j < first; j++)
      add_row(resid, -rounded_at(s->l[i][j], kept[i] / kept[j], m->l), s->delta_op + j * V, V);
    for (int v = 0; v < V; v++) delta[v] = rounded_at(resid[v], kept[i], m->init);
    for (int j = first; j < i; j++)
      add_row(delta, rounded_at(s->n[i][j - first], kept[i] / kept[j], m->n), s->resid + j * V, V);
    for (int v = 0; v < V; v++) {
      resid[v] = rounded_at(resid[v], kept[i], m->resid);
      s->delta_op[i * V + v] = rounded_at(delta[v], kept[i], m->delta);
    }
  }
}

void model_run_chunk(const struct model *m, const struct model_chunk *c, double *state, double *out) {
  int K = c->dim_k, V = c->dim_v;
  size_t elems = (size_t)(2 * c->n * K + 3 * c->n * V + K * V);
  struct scratch *s = malloc(sizeof *s + elems * sizeof(double));
  if (s == NULL) abort();
  s->q = (double *)(s + 1);
  s->k = s->q + c->n * K;
  s->state = s->k + c->n * K;
  s->resid = s->state + K * V;
  s->delta = s->resid + c->n * V;
  s->delta_op = s->delta + c->n * V;
  load_operands(m, c, s);
  make_triangles(c, s);
  choose_rows(c, s);
  solve(c, s);
  for (int i = 0; i < K * V; i++) s->state[i] = rounded(state[i], m->state);
  make_delta(m, c, s, out);
  double decay_all = 1;
  for (int i = 0; i < c->n; i++) {
    decay_all *= c->decay[i];
    for (int j = 0; j <= i; j++) add_row(out + i * V, rounded_a(m, s, i, j), s->delta_op + j * V, V);
  }
  for (int x = 0; x < K * V; x++) state[x] *= decay_all;
  for (int j = 0; j < c->n; j++) {
    const int again = s->steep || m->inside;
    const double through = s->through[c->n - 1][j], *delta = (again ? s->delta_op : s->delta) + j * V;
    double *row = s->resid;
    for (int v = 0; v < V; v++)
      row[v] = again ? rounded_at(delta[v] * through, s->kept[j], m->delta_out)
                     : through * rounded_at(delta[v], s->kept[j], m->delta_out);
    for (int x = 0; x < K; x++) add_row(state + x * V, s->k[j * K + x] * s->k_owed[j], row, V);
  }
  free(s);
}

/* ---- a call ---- */

/* Rows as bf16, and what they owe. */
static double load_row(const gdn_prefill_args *a, int is_q, int64_t t, int64_t h, double *row) {
  double sum = 0, scale = a->scale != 0 ? (double)a->scale : 1 / sqrt(a->dim_k), mult = is_q ? scale : 1;
  oracle_row_of(a, is_q ? ORACLE_Q : ORACLE_K, t, h, row);
  for (int i = 0; i < a->dim_k; i++) {
    row[i] = rounded(row[i], 1);
    sum += row[i] * row[i];
  }
  return (a->flags & GDN_L2NORM_QK) != 0 ? mult / sqrt(sum + (a->eps != 0 ? (double)a->eps : 1e-6)) : mult;
}

static int64_t int_at(const void *data, int32_t dtype, int64_t i) {
  return dtype == GDN_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

/* c = tokens [t, t + n) of head h. */
static void load_tokens(const gdn_prefill_args *a, int64_t t, int n, int64_t h, struct model_chunk *c) {
  c->n = n;
  c->dim_k = a->dim_k;
  c->dim_v = a->dim_v;
  for (int i = 0; i < n; i++) {
    c->q_mult[i] = load_row(a, 1, t + i, h, c->q + i * a->dim_k);
    c->k_mult[i] = load_row(a, 0, t + i, h, c->k + i * a->dim_k);
    oracle_row_of(a, ORACLE_V, t + i, h, c->v + i * a->dim_v);
    oracle_gates(a, t + i, h, &c->decay[i], &c->beta[i]);
  }
}

void model_prefill(const struct model *m, const gdn_prefill_args *a, double *out, double *states) {
  int64_t n_heads = oracle_heads(a->n_heads_q, a->n_heads_v), block = (int64_t)a->dim_k * a->dim_v;
  struct model_chunk *c = malloc(sizeof *c);
  double *state = malloc(sizeof(double) * (size_t)(block + CHUNK * a->dim_v)), *chunk_out = state + block;
  if (c == NULL || state == NULL) abort();
  for (int64_t seq = 0; seq < a->n_seqs; seq++) {
    int64_t first = int_at(a->cu_seqlens, a->cu_seqlens_dtype, seq);
    int64_t end = int_at(a->cu_seqlens, a->cu_seqlens_dtype, seq + 1);
    int64_t prefix = a->prefix_lens != NULL ? int_at(a->prefix_lens, a->prefix_lens_dtype, seq) : 0;
    for (int64_t h = 0; h < n_heads; h++) {
      double *final = states + (seq * n_heads + h) * block;
      oracle_load_state(a, seq, h, state);
      for (int64_t t = first; t < end;) {
        int64_t n = CHUNK - (prefix + t - first) % CHUNK;
        if (n > end - t) n = end - t;
        struct model own = *m;
        if ((prefix + t - first + n) % CHUNK == 0) own.inside = 0;
        load_tokens(a, t, (int)n, h, c);
        model_run_chunk(&own, c, state, chunk_out);
        for (int64_t e = 0; e < n * a->dim_v; e++)
          out[((t + e / a->dim_v) * n_heads + h) * a->dim_v + e % a->dim_v] = chunk_out[e];
        t += n;
      }
      for (int64_t e = 0; e < block; e++) final[e] = state[e % a->dim_k * a->dim_v + e / a->dim_k];
    }
  }
  free(c);
  free(state);
}
