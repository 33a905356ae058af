/* SPDX-License-Identifier: Apache-2.0
 * The gated delta rule in float64; see oracle.h. */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double oracle_number(const void *data, int64_t at, int32_t dtype) {
  if (dtype == GDN_F32) return ((const float *)data)[at];
  uint32_t h = ((const uint16_t *)data)[at];
  if (dtype == GDN_F16) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
               : exponent == 0 ? ldexp(mantissa, -24)
                               : ldexp(1024 + mantissa, exponent - 25);
    return (h & 0x8000) != 0 ? -x : x;
  }
  uint32_t bits = h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

int oracle_heads(int n_heads_q, int n_heads_v) {
  return n_heads_q > n_heads_v ? n_heads_q : n_heads_v;
}

double oracle_element(const gdn_tensor *x, int32_t default_dtype, int64_t n_heads, int64_t dim, int64_t t, int64_t h,
                      int64_t i) {
  int64_t head_stride = x->head_stride_elems != 0 ? x->head_stride_elems : dim;
  int64_t token_stride = x->token_stride_elems != 0 ? x->token_stride_elems : n_heads * dim;
  int64_t at = t * token_stride + h * head_stride + i;
  return oracle_number(x->data, at, x->dtype != GDN_DTYPE_DEFAULT ? x->dtype : default_dtype);
}

static int n_heads_of_q(const gdn_prefill_args *a) {
  return a->n_heads_q != 0 ? a->n_heads_q : a->n_heads_k;
}

void oracle_row_of(const gdn_prefill_args *a, enum oracle_array which, int64_t t, int64_t h, double *row) {
  const gdn_tensor *x = which == ORACLE_Q ? &a->q : which == ORACLE_K ? &a->k : &a->v;
  int n_own = which == ORACLE_Q ? n_heads_of_q(a) : which == ORACLE_K ? a->n_heads_k : a->n_heads_v;
  int dim = which == ORACLE_V ? a->dim_v : a->dim_k;
  int64_t own = h / (oracle_heads(n_heads_of_q(a), a->n_heads_v) / n_own);
  for (int i = 0; i < dim; i++) row[i] = oracle_element(x, GDN_BF16, n_own, dim, t, own, i);
}

/* One row of q or k, normalised if the flags say so. */
static void load_row(const gdn_prefill_args *a, enum oracle_array which, int64_t t, int64_t h, double *row) {
  double sum = 0;
  oracle_row_of(a, which, t, h, row);
  for (int i = 0; i < a->dim_k; i++) sum += row[i] * row[i];
  if ((a->flags & GDN_L2NORM_QK) == 0) return;
  double norm = sqrt(sum + (a->eps != 0 ? (double)a->eps : 1e-6));
  for (int i = 0; i < a->dim_k; i++) row[i] /= norm;
}

struct work {
  double *q, *k, *v, *d;
  double *state; /* [dim_k][dim_v], the transpose of the stored one, so that inner loops run along dim_v */
};

static double per_head(const void *data, int32_t dtype, int64_t h) {
  return oracle_number(data, h, dtype != GDN_DTYPE_DEFAULT ? dtype : GDN_F32);
}

double oracle_log_decay(const gdn_raw_gates *r, int64_t n_heads, int64_t t, int64_t h) {
  double threshold = r->softplus_threshold > 0 ? (double)r->softplus_threshold : 20;
  double x = oracle_element(&r->a, GDN_F32, n_heads, 1, t, h, 0);
  if (r->dt_bias != NULL) x += per_head(r->dt_bias, r->dt_bias_dtype, h);
  return -exp(per_head(r->a_log, r->a_log_dtype, h)) * (x > threshold ? x : log1p(exp(x)));
}

double oracle_beta(const gdn_raw_gates *r, int64_t n_heads, int64_t t, int64_t h) {
  return 1 / (1 + exp(-oracle_element(&r->b, GDN_F32, n_heads, 1, t, h, 0)));
}

static double decay_of(const gdn_prefill_args *a, int64_t n_heads, int64_t t, int64_t h) {
  if (a->raw_gates.a.data != NULL) return exp(oracle_log_decay(&a->raw_gates, n_heads, t, h));
  if (a->g.data == NULL) return 1;
  double g = oracle_element(&a->g, GDN_F32, n_heads, 1, t, h, 0);
  return (a->flags & GDN_LINEAR_G) != 0 ? g : exp(g);
}

static double beta_of(const gdn_prefill_args *a, int64_t n_heads, int64_t t, int64_t h) {
  if (a->raw_gates.b.data != NULL) return oracle_beta(&a->raw_gates, n_heads, t, h);
  return a->beta.data != NULL ? oracle_element(&a->beta, GDN_F32, n_heads, 1, t, h, 0) : 1;
}

void oracle_gates(const gdn_prefill_args *a, int64_t t, int64_t h, double *decay, double *beta) {
  int64_t n_heads = oracle_heads(n_heads_of_q(a), a->n_heads_v);
  *decay = decay_of(a, n_heads, t, h);
  *beta = beta_of(a, n_heads, t, h);
}

/* S = exp(g) S; d = beta (v - S k); S = S + d k^T; o = scale S q */
static void token(const gdn_prefill_args *a, const struct work *w, int64_t t, int64_t h, double *out) {
  int K = a->dim_k, V = a->dim_v;
  double beta, decay, scale = a->scale != 0 ? (double)a->scale : 1 / sqrt(K);
  oracle_gates(a, t, h, &decay, &beta);
  load_row(a, ORACLE_Q, t, h, w->q);
  load_row(a, ORACLE_K, t, h, w->k);
  oracle_row_of(a, ORACLE_V, t, h, w->v);
  for (int j = 0; j < V; j++) w->d[j] = 0;
  for (int i = 0; i < K; i++) {
    double *s = w->state + (int64_t)i * V;
    for (int j = 0; j < V; j++) {
      s[j] *= decay;
      w->d[j] += s[j] * w->k[i];
    }
  }
  for (int j = 0; j < V; j++) {
    w->d[j] = beta * (w->v[j] - w->d[j]);
    out[j] = 0;
  }
  for (int i = 0; i < K; i++) {
    double *s = w->state + (int64_t)i * V;
    for (int j = 0; j < V; j++) {
      s[j] += w->d[j] * w->k[i];
      out[j] += scale * w->q[i] * s[j];
    }
  }
}

int64_t oracle_row(const gdn_states *s, int64_t i) {
  if (s->data == NULL) return -1;
  if (s->rows == NULL) return i;
  return s->rows_dtype == GDN_I64 ? ((const int64_t *)s->rows)[i] : ((const int32_t *)s->rows)[i];
}

int64_t oracle_state_at(const gdn_states *s, int64_t n_heads, int dim_k, int dim_v, int64_t row, int64_t h, int j,
                        int i) {
  int64_t block = (int64_t)dim_v * dim_k;
  int64_t stride = s->row_stride_elems != 0 ? s->row_stride_elems : n_heads * block;
  int64_t inner = s->layout == GDN_LAYOUT_KV ? (int64_t)i * dim_v + j : (int64_t)j * dim_k + i;
  return row * stride + h * block + inner;
}

void oracle_load_state(const gdn_prefill_args *a, int64_t seq, int64_t h, double *state) {
  const gdn_states *initial = &a->initial_state;
  int K = a->dim_k, V = a->dim_v, n_heads = oracle_heads(a->n_heads_q, a->n_heads_v);
  int32_t dtype = initial->dtype != GDN_DTYPE_DEFAULT ? initial->dtype : GDN_F32;
  int64_t row = oracle_row(initial, seq);
  for (int i = 0; i < K; i++) {
    for (int j = 0; j < V; j++) {
      state[(int64_t)i * V + j] =
          row < 0 ? 0 : oracle_number(initial->data, oracle_state_at(initial, n_heads, K, V, row, h, j, i), dtype);
    }
  }
}

void oracle_prefill(const gdn_prefill_args *a, double *out, double *states) {
  int K = a->dim_k, V = a->dim_v, n_heads = oracle_heads(a->n_heads_q, a->n_heads_v);
  double *memory = malloc(sizeof(double) * (size_t)(2 * K + 2 * V + (int64_t)K * V));
  if (memory == NULL) abort();
  struct work w = {memory, memory + K, memory + 2 * K, memory + 2 * K + V, memory + 2 * K + 2 * V};
  for (int64_t seq = 0; seq < a->n_seqs; seq++) {
    int64_t first, end;
    if (a->cu_seqlens_dtype == GDN_I64) {
      first = ((const int64_t *)a->cu_seqlens)[seq];
      end = ((const int64_t *)a->cu_seqlens)[seq + 1];
    } else {
      first = ((const int32_t *)a->cu_seqlens)[seq];
      end = ((const int32_t *)a->cu_seqlens)[seq + 1];
    }
    for (int64_t h = 0; h < n_heads; h++) {
      double *final = states + (seq * n_heads + h) * V * K;
      oracle_load_state(a, seq, h, w.state);
      for (int64_t t = first; t < end; t++) token(a, &w, t, h, out + (t * n_heads + h) * V);
      for (int j = 0; j < V; j++) {
        for (int i = 0; i < K; i++) final[(int64_t)j * K + i] = w.state[(int64_t)i * V + j];
      }
    }
  }
  free(memory);
}

void oracle_continue(const gdn_prefill_args *a, double *out, double *states) {
  int K = a->dim_k, V = a->dim_v, n_heads = oracle_heads(a->n_heads_q, a->n_heads_v);
  double *memory = malloc(sizeof(double) * (size_t)(2 * K + 2 * V + (int64_t)K * V));
  if (memory == NULL) abort();
  struct work w = {memory, memory + K, memory + 2 * K, memory + 2 * K + V, memory + 2 * K + 2 * V};
  for (int64_t h = 0; h < n_heads; h++) {
    double *own = states + h * V * K;
    for (int64_t e = 0; e < (int64_t)K * V; e++) w.state[e % K * V + e / K] = own[e];
    for (int64_t t = 0; t < a->n_tokens; t++) token(a, &w, t, h, out + (t * n_heads + h) * V);
    for (int64_t e = 0; e < (int64_t)K * V; e++) own[e] = w.state[e % K * V + e / K];
  }
  free(memory);
}

void oracle_decode(const gdn_decode_args *d, double *out, double *states) {
  int32_t *cu = malloc(sizeof(int32_t) * (size_t)(d->n_seqs + 1));
  if (cu == NULL) abort();
  int32_t per_seq = d->n_tokens != 0 ? d->n_tokens : 1;
  for (int64_t i = 0; i <= d->n_seqs; i++) cu[i] = (int32_t)i * per_seq;
  gdn_prefill_args a = {.struct_size = sizeof a,
                        .flags = d->flags,
                        .n_seqs = d->n_seqs,
                        .n_tokens = d->n_seqs * per_seq,
                        .n_heads_k = d->n_heads_k,
                        .n_heads_v = d->n_heads_v,
                        .dim_k = d->dim_k,
                        .dim_v = d->dim_v,
                        .scale = d->scale,
                        .eps = d->eps,
                        .cu_seqlens = cu,
                        .q = d->q,
                        .k = d->k,
                        .v = d->v,
                        .g = d->g,
                        .beta = d->beta,
                        .n_heads_q = d->n_heads_q,
                        .raw_gates = d->raw_gates,
                        .initial_state = d->initial_state};
  oracle_prefill(&a, out, states);
  free(cu);
}
