/* SPDX-License-Identifier: Apache-2.0
 * The gated delta rule in float64; see oracle.h. */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double oracle_element(const gdn_tensor *x, int32_t default_dtype, int64_t n_heads, int64_t dim, int64_t t, int64_t h,
                      int64_t i) {
  int64_t head_stride = x->head_stride_elems != 0 ? x->head_stride_elems : dim;
  int64_t token_stride = x->token_stride_elems != 0 ? x->token_stride_elems : n_heads * dim;
  int64_t at = t * token_stride + h * head_stride + i;
  int32_t dtype = x->dtype != GDN_DTYPE_DEFAULT ? x->dtype : default_dtype;
  if (dtype == GDN_F32) return ((const float *)x->data)[at];
  uint32_t bits = (uint32_t)((const uint16_t *)x->data)[at] << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* One row of q or k, normalised if the flags say so. */
static void load_row(const gdn_prefill_args *a, const gdn_tensor *x, int64_t t, int64_t h, double *row) {
  double sum = 0;
  for (int i = 0; i < a->dim_k; i++) {
    row[i] = oracle_element(x, GDN_BF16, a->n_heads_k, a->dim_k, t, h, i);
    sum += row[i] * row[i];
  }
  if ((a->flags & GDN_L2NORM_QK) == 0) return;
  double norm = sqrt(sum + (a->eps != 0 ? (double)a->eps : 1e-6));
  for (int i = 0; i < a->dim_k; i++) row[i] /= norm;
}

struct work {
  double *q, *k, *d;
  double *state; /* [dim_k][dim_v], the transpose of the stored one, so that inner loops run along dim_v */
};

/* S = exp(g) S; d = beta (v - S k); S = S + d k^T; o = scale S q */
static void token(const gdn_prefill_args *a, const struct work *w, int64_t t, int64_t h, double *out) {
  int K = a->dim_k, V = a->dim_v;
  double g = a->g.data != NULL ? oracle_element(&a->g, GDN_F32, a->n_heads_v, 1, t, h, 0) : 0;
  double beta = a->beta.data != NULL ? oracle_element(&a->beta, GDN_F32, a->n_heads_v, 1, t, h, 0) : 1;
  double scale = a->scale != 0 ? (double)a->scale : 1 / sqrt(K);
  double decay = exp(g);
  int64_t h_k = h / (a->n_heads_v / a->n_heads_k);
  load_row(a, &a->q, t, h_k, w->q);
  load_row(a, &a->k, t, h_k, w->k);
  for (int j = 0; j < V; j++) w->d[j] = 0;
  for (int i = 0; i < K; i++) {
    double *s = w->state + (int64_t)i * V;
    for (int j = 0; j < V; j++) {
      s[j] *= decay;
      w->d[j] += s[j] * w->k[i];
    }
  }
  for (int j = 0; j < V; j++) {
    w->d[j] = beta * (oracle_element(&a->v, GDN_BF16, a->n_heads_v, V, t, h, j) - w->d[j]);
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

/* The stored [dim_v][dim_k] block of a sequence and head, or null for the zero state. */
static const float *initial_block(const gdn_prefill_args *a, int64_t seq, int64_t h) {
  const gdn_states *s = &a->initial_state;
  if (s->data == NULL) return NULL;
  int64_t row = s->rows != NULL ? ((const int32_t *)s->rows)[seq] : seq;
  if (row < 0) return NULL;
  int64_t block = (int64_t)a->dim_v * a->dim_k;
  int64_t stride = s->row_stride_elems != 0 ? s->row_stride_elems : a->n_heads_v * block;
  return (const float *)s->data + row * stride + h * block;
}

void oracle_prefill(const gdn_prefill_args *a, double *out, double *states) {
  int K = a->dim_k, V = a->dim_v;
  const int32_t *cu = a->cu_seqlens;
  double *memory = malloc(sizeof(double) * (size_t)(2 * K + V + (int64_t)K * V));
  if (memory == NULL) abort();
  struct work w = {memory, memory + K, memory + 2 * K, memory + 2 * K + V};
  for (int64_t seq = 0; seq < a->n_seqs; seq++) {
    for (int64_t h = 0; h < a->n_heads_v; h++) {
      const float *initial = initial_block(a, seq, h);
      double *final = states + (seq * a->n_heads_v + h) * V * K;
      for (int i = 0; i < K; i++) {
        for (int j = 0; j < V; j++) w.state[(int64_t)i * V + j] = initial != NULL ? initial[(int64_t)j * K + i] : 0;
      }
      for (int64_t t = cu[seq]; t < cu[seq + 1]; t++) token(a, &w, t, h, out + (t * a->n_heads_v + h) * V);
      for (int j = 0; j < V; j++) {
        for (int i = 0; i < K; i++) final[(int64_t)j * K + i] = w.state[(int64_t)i * V + j];
      }
    }
  }
  free(memory);
}

void oracle_decode(const gdn_decode_args *d, double *out, double *states) {
  int32_t *cu = malloc(sizeof(int32_t) * (size_t)(d->n_seqs + 1));
  if (cu == NULL) abort();
  for (int64_t i = 0; i <= d->n_seqs; i++) cu[i] = (int32_t)i;
  gdn_prefill_args a = {.struct_size = sizeof a,
                        .flags = d->flags,
                        .n_seqs = d->n_seqs,
                        .n_tokens = d->n_seqs,
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
                        .initial_state = d->initial_state};
  oracle_prefill(&a, out, states);
  free(cu);
}
