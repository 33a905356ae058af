/* SPDX-License-Identifier: Apache-2.0
 * The chunk form's primitives in f32, each against its definition or against ref; see also kernel_chunk_state.c. */
#include <math.h>
#include <string.h>

#include "kernel_chunk.h"

/* Elements of the 16-blocks on and below the diagonal of [64][64], packed. */
static int64_t lower_blocks(const float *m, int n16, float *packed) {
  int64_t at = 0;
  for (int i = 0; i < n16; i++) {
    for (int j = 0; j < (i / GDN_BLOCK + 1) * GDN_BLOCK; j++) packed[at++] = m[i * GDN_CHUNK + j];
  }
  return at;
}

/* Elements of size at most magnitude, sums that may cancel: their errors go with the magnitude. */
static void check_lower(const char *what, const float *got, const float *want, int n16, double magnitude,
                        double limit) {
  float x[GDN_CHUNK * GDN_CHUNK], y[GDN_CHUNK * GDN_CHUNK];
  int64_t n = lower_blocks(got, n16, x);
  lower_blocks(want, n16, y);
  for (int64_t i = 0; i < n; i++) check_limit(what, fabs((double)x[i] - (double)y[i]) / magnitude, limit);
}

/* Two chunks twice, by ref and by the tier; in slices of 32 and of all columns the tier's bits must be the same. */
struct pair {
  struct gdn_chunk *ref, *tier;
};

static struct pair run_pair(struct kcase *c, enum stage last, int32_t out_dtype) {
  struct chunk_data d = random_chunks(c);
  struct pair p = {run_chunks(c, c->ref, &d, c->V, last, out_dtype), run_chunks(c, c->tier, &d, c->V, last, out_dtype)};
  if (last < DELTA) return p;
  struct gdn_chunk *slices = run_chunks(c, c->tier, &d, 32, last, out_dtype);
  size_t row_bytes = (size_t)c->V * 4;
  check_same_bits("delta in slices", p.tier->delta_f32, slices->delta_f32, (size_t)c->n * row_bytes, 4);
  if (last >= OUT) check_same_out("out in slices", p.tier, slices);
  if (last >= STATE) check_same_bits("state in slices", p.tier->state, slices->state, (size_t)c->K * row_bytes, 4);
  return p;
}

void check_chunk_qk(struct kcase *c) {
  struct pair p = run_pair(c, QK, GDN_ROWS_F32);
  check_lower("kk", p.tier->kk, p.ref->kk, p.tier->n16, 1, chunk_limit(c));
  check_lower("qk", p.tier->qk, p.ref->qk, p.tier->n16, p.tier->scale, chunk_limit(c));
  const struct gdn_chunk *x = p.tier;
  for (int i = 0; i < x->n; i++) {
    for (int j = 0; j <= i; j++) {
      double kk = 0, ni = 0, nj = 0;
      for (int m = 0; m < c->K; m++) {
        double a = row_get(&x->k_rows, i, m), b = row_get(&x->k_rows, j, m);
        kk += a * b;
        ni += a * a;
        nj += b * b;
      }
      kk /= sqrt((ni + 1e-6) * (nj + 1e-6));
      check_limit("k . k of normalised keys", fabs((double)x->kk[i * GDN_CHUNK + j] - kk), chunk_limit(c));
    }
  }
  BENCH(c, c->ref->chunk_qk(p.ref), c->tier->chunk_qk(p.tier));
}

/* G_i from the gates in float64, each raised to -110 as the contract says. */
static void gate_sums(const struct gdn_chunk *x, double sum[GDN_CHUNK]) {
  double s = 0;
  for (int i = 0; i < x->n; i++) {
    double g = row_get(&x->g_rows, i, 0);
    s += g < -110 ? -110 : g;
    sum[i] = s;
  }
}

void check_chunk_gates(struct kcase *c) {
  const struct gdn_chunk *x = run_pair(c, GATES, GDN_ROWS_F32).tier;
  double sum[GDN_CHUNK];
  gate_sums(x, sum);
  for (int i = 0; i < GDN_CHUNK; i++) {
    if (i >= x->n) {
      if (x->decay_out[i] != 0 || x->beta[i] != 0) check_fail("decay_out or beta at %d is not 0", i);
      continue;
    }
    /* Two floats hold 48 bits; an addition that keeps its rounding error loses next to nothing. */
    double gate = (double)x->gate_hi[i] + (double)x->gate_lo[i];
    check_limit("sum of gates", fabs(gate - sum[i]) / (1 + fabs(sum[i])), 0x1p-40);
    check_exp("decay_in", x->decay_in[i], sum[i]);
    /* exp takes it as f32: off by up to 2^-24 of itself, which is the relative error of the result. */
    double after = sum[x->n - 1] - sum[i];
    check_exp_near("decay_out", x->decay_out[i], after, (4 + fabs(after)) * 0x1p-24);
    if (x->beta[i] != row_get(&x->beta_rows, i, 0)) check_fail("beta[%d] = %g", i, (double)x->beta[i]);
  }
  check_exp("decay_all", x->decay_all[0], sum[x->n - 1]);

  struct gdn_chunk absent = *x;
  absent.g_rows.data = absent.beta_rows.data = NULL;
  c->tier->chunk_gates(&absent);
  for (int i = 0; i < x->n; i++) {
    if (x->decay_in[i] != 1 || x->decay_out[i] != 1 || x->beta[i] != 1) check_fail("absent gates at %d", i);
  }
  BENCH(c, c->ref->chunk_gates(x), c->tier->chunk_gates(x));
}

void check_chunk_mask(struct kcase *c) {
  struct pair p = run_pair(c, MASK, GDN_ROWS_F32);
  const struct gdn_chunk *x = p.tier;
  check_lower("l", x->l, p.ref->l, x->n16, 1, chunk_limit(c));
  for (int i = 0; i < x->n16; i++) {
    double sum = 0;
    for (int j = (i / GDN_BLOCK + 1) * GDN_BLOCK - 1; j >= 0; j--) {
      double want = 0;
      if (i < x->n && j < i) {
        double g = row_get(&x->g_rows, j + 1, 0);
        sum += g < -110 ? -110 : g;
        want = (double)x->beta[i] * exp(sum) * (double)x->kk[i * GDN_CHUNK + j];
      }
      check_limit("l element", fabs((double)x->l[i * GDN_CHUNK + j] - want), 8 * 0x1p-24);
    }
  }
  BENCH(c, c->ref->chunk_mask(p.ref), c->tier->chunk_mask(p.tier));
}

/* With the zero state and unit rows of v, delta is T diag(beta): (I + L) delta must be diag(beta), delta triangular. */
void check_chunk_solve(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  memset(x->state, 0, (size_t)c->K * (size_t)c->V * 4);
  for (int i = 0; i < c->n; i++) {
    for (int j = 0; j < c->V; j++) row_put(&d.v, FIRST_LEN + i, j, i == j);
  }
  set_chunk(x, &d, FIRST_LEN, c->n);
  run_stages(c->tier, x, c->V, 1, DELTA);
  int n_cols = c->V < c->n ? c->V : c->n;
  for (int i = 0; i < c->n; i++) {
    for (int j = 0; j < n_cols; j++) {
      double sum = x->delta_f32[i * c->V + j], size = fabs(sum);
      if (j > i && sum != 0) check_fail("T is not lower triangular at %d, %d", i, j);
      for (int m = 0; m < i; m++) {
        double term = (double)x->l[i * GDN_CHUNK + m] * (double)x->delta_f32[m * c->V + j];
        sum += term;
        size += fabs(term);
      }
      /* A backward stable solve leaves a residual of a few 2^-24 of the terms that it sums. */
      check_limit("(I + L) T = I", fabs(sum - (i == j ? (double)x->beta[i] : 0)), 16 * 0x1p-24 * (size + 0.01));
    }
  }
  BENCH(c, c->ref->chunk_solve(x), c->tier->chunk_solve(x));
}

/* What begin makes shows in q S, which is all that out is where beta is 0. */
void check_chunk_begin(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  set_chunk(x, &d, FIRST_LEN, c->n);
  for (int i = 0; i < c->n; i++) row_put(&x->beta_rows, i, 0, 0);
  x->g_rows.data = NULL;
  run_stages(c->tier, x, c->V, 1, OUT);
  double *want = check_alloc((size_t)c->n * (size_t)c->V * sizeof(double));
  for (int i = 0; i < c->n; i++) {
    double norm = 1e-6;
    for (int m = 0; m < c->K; m++) norm += (double)row_get(&x->q_rows, i, m) * (double)row_get(&x->q_rows, i, m);
    for (int j = 0; j < c->V; j++) {
      double sum = 0;
      for (int m = 0; m < c->K; m++) sum += (double)row_get(&x->q_rows, i, m) * (double)d.state[panel_at(c->K, j, m)];
      want[i * c->V + j] = sum / sqrt(norm * c->K);
    }
  }
  check_close("q S", out_numbers(x), want, (int64_t)c->n * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_begin(x, 0, c->V), c->tier->chunk_begin(x, 0, c->V));
}

void check_chunk_delta(struct kcase *c) {
  struct pair p = run_pair(c, DELTA, GDN_ROWS_F32);
  check_close_f32("delta", p.tier->delta_f32, p.ref->delta_f32, (int64_t)p.tier->n16 * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_delta(p.ref, 0, c->V), c->tier->chunk_delta(p.tier, 0, c->V));
}

void check_chunk_out(struct kcase *c) {
  for (int32_t dtype = GDN_ROWS_F32; dtype <= GDN_ROWS_BF16; dtype++) {
    struct pair p = run_pair(c, OUT, dtype);
    /* As bf16, the few elements that round the other way are off by 2^-8: 1e-3 is one in fifteen of them. */
    check_close_f32("out", out_numbers(p.tier), out_numbers(p.ref), (int64_t)c->n * c->V,
                    dtype == GDN_ROWS_F32 ? chunk_limit(c) : 1e-3);
    BENCH(c, c->ref->chunk_out(p.ref, 0, c->V), c->tier->chunk_out(p.tier, 0, c->V));
  }
}

void check_chunk_state(struct kcase *c) {
  struct pair p = run_pair(c, END, GDN_ROWS_F32);
  check_close_f32("state", p.tier->state, p.ref->state, (int64_t)c->K * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_state(p.ref, 0, c->V), c->tier->chunk_state(p.tier, 0, c->V));
}
