/* SPDX-License-Identifier: Apache-2.0
 * The running error bound of a verify; see verify_bound.h. */
#include "verify_bound.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* More than all underflows of one output add up to. */
#define UNDERFLOW 1e-30

/* [t][s], s <= t: decays after s up to t times k_s . x_t, and times the sum of its absolute values. */
struct weights {
  double exact[VERIFY_TOKENS_MAX][VERIFY_TOKENS_MAX], absolute[VERIFY_TOKENS_MAX][VERIFY_TOKENS_MAX];
};

static void weigh(const struct verify_head *h, const double *x, struct weights *w) {
  for (int s = 0; s < h->n; s++) {
    double decay = 1;
    for (int t = s; t < h->n; t++) {
      double exact = 0, absolute = 0;
      if (t > s) decay *= h->decay[t];
      for (int i = 0; i < h->dim_k; i++) {
        double term = h->k[s * h->dim_k + i] * x[t * h->dim_k + i];
        exact += term;
        absolute += fabs(term);
      }
      w->exact[t][s] = decay * exact;
      w->absolute[t][s] = decay * absolute;
    }
  }
}

/* sum [dim_v] = state^T x, and of absolute values. */
static void sums(const struct verify_head *h, const double *state, const double *x, double *sum, double *absolute) {
  memset(sum, 0, sizeof *sum * (size_t)h->dim_v);
  memset(absolute, 0, sizeof *absolute * (size_t)h->dim_v);
  for (int i = 0; i < h->dim_k; i++)
    for (int j = 0; j < h->dim_v; j++) {
      double term = state[(long)i * h->dim_v + j] * x[i];
      sum[j] += term;
      absolute[j] += fabs(term);
    }
}

/* One token by the rule: state moves on; d and out [dim_v]. */
static void step(const struct verify_head *h, int t, double *state, double *d, double *out, double *scratch) {
  const double *k = h->k + (long)t * h->dim_k;
  for (long i = 0; i < (long)h->dim_k * h->dim_v; i++) state[i] *= h->decay[t];
  sums(h, state, k, d, scratch);
  for (int j = 0; j < h->dim_v; j++) d[j] = h->beta[t] * (h->v[(long)t * h->dim_v + j] - d[j]);
  for (int i = 0; i < h->dim_k; i++)
    for (int j = 0; j < h->dim_v; j++) state[(long)i * h->dim_v + j] += d[j] * k[i];
  sums(h, state, h->q + (long)t * h->dim_k, out, scratch);
}

struct work {
  double *state, *d, *d_error; /* [K][V], [n][V] */
  double *x, *y, *scratch;     /* [V] */
  struct weights kk, kq;
};

/* The limit of token t, column j, once d of tokens up to t and errors of those before are there. r: relative. */
static double column_limit(const struct verify_head *h, struct work *w, int t, int j, double left, double r) {
  const long V = h->dim_v;
  double terms = fabs(h->v[t * V + j]) + left * w->x[j], handed_on = 0;
  for (int s = 0; s < t; s++) {
    terms += w->kk.absolute[t][s] * fabs(w->d[s * V + j]);
    handed_on += (fabs(w->kk.exact[t][s]) + r * w->kk.absolute[t][s]) * w->d_error[s * V + j];
  }
  w->d_error[t * V + j] = (1 + r) * fabs(h->beta[t]) * (r * terms + handed_on) + UNDERFLOW;
  terms = left * w->y[j];
  handed_on = 0;
  for (int s = 0; s <= t; s++) {
    terms += w->kq.absolute[t][s] * fabs(w->d[s * V + j]);
    handed_on += (fabs(w->kq.exact[t][s]) + r * w->kq.absolute[t][s]) * w->d_error[s * V + j];
  }
  return (1 + r) * (r * terms + handed_on) + UNDERFLOW;
}

void verify_bound(const struct verify_head *h, double *out, double *limit) {
  const long K = h->dim_k, V = h->dim_v;
  struct work *w = malloc(sizeof *w);
  double *memory = malloc(sizeof *memory * (size_t)(K * V + 2 * h->n * V + 3 * V)), left = 1;
  if (!w || !memory) abort();
  w->state = memory;
  w->d = w->state + K * V;
  w->d_error = w->d + h->n * V;
  w->x = w->d_error + h->n * V;
  w->y = w->x + V;
  w->scratch = w->y + V;
  memcpy(w->state, h->state, sizeof *w->state * (size_t)(K * V));
  weigh(h, h->k, &w->kk);
  weigh(h, h->q, &w->kq);
  for (int t = 0; t < h->n; t++) {
    const double r = 0x1p-24 * (h->dim_k + 2 * h->n + 4) + (h->input_error ? h->input_error[t] : 0);
    left *= h->decay[t];
    step(h, t, w->state, w->d + t * V, out + t * V, w->scratch);
    sums(h, h->state, h->k + t * K, w->scratch, w->x);
    sums(h, h->state, h->q + t * K, w->scratch, w->y);
    for (int j = 0; j < V; j++) limit[t * V + j] = column_limit(h, w, t, j, left, r);
  }
  free(memory);
  free(w);
}
