/* SPDX-License-Identifier: Apache-2.0
 * The recurrent form and the decode step: against ref, and against themselves where bits must agree. */
#include <math.h>
#include <string.h>

#include "kernel_case.h"
#include "verify_bound.h"

/* n tokens of one value head: what recur and decode_step take. */
struct tokens {
  float *q, *k, *kq, *decay, *beta, *v; /* v [n][V] */
  float *state;                         /* [V][K], in caller memory */
};

static struct tokens random_tokens(struct kcase *c) {
  int n = c->n, K = c->K;
  double unit = sqrt(3.0 / K); /* rows of norm about 1 */
  struct tokens t;
  t.q = uniform_f32(&c->rng, (int64_t)n * K, -unit, unit);
  t.k = uniform_f32(&c->rng, (int64_t)n * K, -unit, unit);
  t.kq = alloc_f32(n);
  t.decay = uniform_f32(&c->rng, n, 0.5, 1);
  t.beta = uniform_f32(&c->rng, n, 0, 1);
  t.v = uniform_f32(&c->rng, (int64_t)n * c->V, -1, 1);
  t.state = caller_state(c->V, K, n % 2);
  for (int64_t i = 0; i < (int64_t)c->V * K; i++) t.state[i] = (float)(0.3 * check_normal(&c->rng));
  for (int i = 0; i < n; i++) {
    double sum = 0;
    for (int j = 0; j < K; j++) sum += (double)t.k[i * K + j] * (double)t.q[i * K + j];
    t.kq[i] = (float)sum;
  }
  if (n > 20) t.decay[20] = 0;
  if (n > 3) t.beta[3] = 0;
  return t;
}

/* Runs tokens [from, to) over all of V in slices of width columns. */
static void recur_slices(const struct gdn_kernels *k, const struct kcase *c, const struct tokens *t, int width,
                         int from, int to, float *out, float *panels) {
  for (int col = 0; col < c->V; col += width) {
    struct gdn_recur a = {.n = to - from,
                          .dim_k = c->K,
                          .n_cols = c->V - col < width ? c->V - col : width,
                          .q = t->q + (int64_t)from * c->K,
                          .k = t->k + (int64_t)from * c->K,
                          .kq = t->kq + from,
                          .decay = t->decay + from,
                          .beta = t->beta + from,
                          .v = t->v + (int64_t)from * c->V + col,
                          .out = out + (int64_t)from * c->V + col,
                          .ld = c->V,
                          .state = panels + (int64_t)col * c->K};
    k->recur(&a);
  }
}

/* Two f32 evaluations of the same sums over K, with and without FMA: each is off by a few 2^-24 of sums that do not
 * cancel much, and the rule with |k| near 1 and beta <= 1 does not amplify what tokens hand on. */
static double recur_limit(const struct kcase *c) {
  return 0x1p-24 * (8 + c->K / 8);
}

void check_recur(struct kcase *c) {
  struct tokens t = random_tokens(c);
  int64_t n_state = (int64_t)c->V * c->K, n_out = (int64_t)c->n * c->V;
  size_t state_bytes = (size_t)n_state * 4, out_bytes = (size_t)n_out * 4;
  float *start = alloc_f32(n_state), *want = alloc_f32(n_state), *want_out = alloc_f32(n_out);
  float *state = alloc_f32(n_state), *out = alloc_f32(n_out);
  float *state_2 = alloc_f32(n_state), *out_2 = alloc_f32(n_out);
  c->ref->state_load(c->V, c->K, f32_rows(c, t.state), start);
  memcpy(want, start, state_bytes);
  recur_slices(c->ref, c, &t, 32, 0, c->n, want_out, want);
  memcpy(state, start, state_bytes);
  recur_slices(c->tier, c, &t, 32, 0, c->n, out, state);
  check_close_f32("out", out, want_out, n_out, recur_limit(c));
  check_close_f32("state", state, want, n_state, recur_limit(c));

  memcpy(state_2, start, state_bytes);
  recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, out_2, state_2);
  check_same_bits("out in slices of recur_cols", out, out_2, out_bytes, 4);
  check_same_bits("state in slices of recur_cols", state, state_2, state_bytes, 4);

  for (int split = 1; split < c->n; split = split * 2 + 1) {
    memcpy(state_2, start, state_bytes);
    recur_slices(c->tier, c, &t, 32, 0, split, out_2, state_2);
    recur_slices(c->tier, c, &t, 32, split, c->n, out_2, state_2);
    check_same_bits("out of a split run", out, out_2, out_bytes, 4);
    check_same_bits("state of a split run", state, state_2, state_bytes, 4);
  }

  memcpy(state_2, start, state_bytes);
  memcpy(out_2, t.v, out_bytes);
  struct tokens in_place = t;
  in_place.v = out_2;
  recur_slices(c->tier, c, &in_place, c->tier->recur_cols, 0, c->n, out_2, state_2);
  check_same_bits("out over v", out, out_2, out_bytes, 4);
  BENCH(c, recur_slices(c->ref, c, &t, c->ref->recur_cols, 0, c->n, want_out, want),
        recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, out, state));
}

static void step(const struct gdn_kernels *k, const struct kcase *c, const struct tokens *t, int i, int col, int n_cols,
                 const float *state_in, float *state_out, float *out) {
  int64_t offset = (int64_t)col * c->K;
  struct gdn_decode_step a = {.dim_k = c->K,
                              .n_cols = n_cols,
                              .q = t->q + (int64_t)i * c->K,
                              .k = t->k + (int64_t)i * c->K,
                              .kq = t->kq[i],
                              .decay = t->decay[i],
                              .beta = t->beta[i],
                              .v = t->v + (int64_t)i * c->V + col,
                              .out = out + col,
                              .state_in = f32_rows(c, state_in != NULL ? state_in + offset : NULL),
                              .state_out = f32_rows(c, state_out != NULL ? state_out + offset : NULL)};
  k->decode_step(&a);
}

void check_decode_step(struct kcase *c) {
  struct tokens t = random_tokens(c);
  int64_t n_state = (int64_t)c->V * c->K;
  size_t state_bytes = (size_t)n_state * 4, out_bytes = (size_t)c->V * 4;
  float *want = caller_state(c->V, c->K, 0), *want_out = alloc_f32(c->V);
  float *state = caller_state(c->V, c->K, c->n % 2), *out = alloc_f32(c->V), *out_2 = alloc_f32(c->V);
  step(c->ref, c, &t, 0, 0, c->V, t.state, want, want_out);
  step(c->tier, c, &t, 0, 0, c->V, t.state, state, out);
  check_close_f32("out", out, want_out, c->V, recur_limit(c));
  check_close_f32("state", state, want, n_state, recur_limit(c));

  step(c->tier, c, &t, 0, 0, c->V, t.state, NULL, out_2);
  check_same_bits("out without a stored state", out, out_2, out_bytes, 4);
  float *pieces = caller_state(c->V, c->K, 0);
  memcpy(pieces, t.state, state_bytes);
  for (int col = 0; col < c->V; col += 32) step(c->tier, c, &t, 0, col, 32, pieces, pieces, out_2);
  check_same_bits("out in place and in slices", out, out_2, out_bytes, 4);
  check_same_bits("state in place and in slices", state, pieces, state_bytes, 4);

  memset(pieces, 0, state_bytes);
  step(c->tier, c, &t, 0, 0, c->V, pieces, pieces, out);
  step(c->tier, c, &t, 0, 0, c->V, NULL, state, out_2);
  check_same_bits("out of the zero state", out, out_2, out_bytes, 4);
  check_same_bits("zero state", pieces, state, state_bytes, 4);

  float *panels = alloc_f32(n_state), *all_out = alloc_f32((int64_t)c->n * c->V);
  c->tier->state_load(c->V, c->K, f32_rows(c, t.state), panels);
  recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, all_out, panels);
  memcpy(pieces, t.state, state_bytes);
  for (int i = 0; i < c->n; i++) {
    step(c->tier, c, &t, i, 0, c->V, pieces, pieces, out);
    check_same_bits("out against recur", all_out + (int64_t)i * c->V, out, out_bytes, 4);
  }
  c->tier->state_store(c->V, c->K, panels, f32_rows(c, state));
  check_same_bits("state against recur", pieces, state, state_bytes, 4);
  BENCH(c, step(c->ref, c, &t, 0, 0, c->V, pieces, pieces, out), step(c->tier, c, &t, 0, 0, c->V, pieces, pieces, out));
}

static struct gdn_decode_tokens all_tokens(const struct kcase *c, const struct tokens *t, float *out) {
  return (struct gdn_decode_tokens){.n = c->n,
                                    .dim_k = c->K,
                                    .n_cols = c->V,
                                    .q = t->q,
                                    .k = t->k,
                                    .kq = t->kq,
                                    .decay = t->decay,
                                    .beta = t->beta,
                                    .v = t->v,
                                    .out = out,
                                    .state_in = f32_rows(c, t->state)};
}

/* With states stored, any of them, several tokens give the bits of as many steps. want [n][V]: their outputs. */
static void check_stored_tokens(struct kcase *c, const struct tokens *t, const float *want) {
  const size_t state_bytes = (size_t)c->V * (size_t)c->K * 4, out_bytes = (size_t)c->n * (size_t)c->V * 4;
  float *out = alloc_f32((int64_t)c->n * c->V), *unused = alloc_f32(c->V);
  float *now = caller_state(c->V, c->K, 0), *last = caller_state(c->V, c->K, c->n % 2), *after[GDN_TOKENS_MAX];
  struct gdn_state_ref refs[GDN_TOKENS_MAX];
  for (int i = 0; i < c->n; i++) {
    after[i] = i % 5 == 1 ? caller_state(c->V, c->K, i % 2) : NULL;
    refs[i] = f32_rows(c, after[i]);
  }
  struct gdn_decode_tokens a = all_tokens(c, t, out);
  a.token_states = refs;
  a.state_out = f32_rows(c, last);
  c->tier->decode_tokens(&a);
  memcpy(now, t->state, state_bytes);
  for (int i = 0; i < c->n; i++) {
    step(c->tier, c, t, i, 0, c->V, now, now, unused);
    if (after[i] != NULL) check_same_bits("state after a token", now, after[i], state_bytes, 4);
  }
  check_same_bits("out", want, out, out_bytes, 4);
  check_same_bits("state", now, last, state_bytes, 4);

  memcpy(out, t->v, out_bytes);
  a.v = out;
  a.token_states = NULL;
  c->tier->decode_tokens(&a);
  check_same_bits("out over v, with the last state stored", want, out, out_bytes, 4);
  if (c->n < 2) return;
  a.v = t->v;
  a.token_states = refs;
  a.state_out = f32_rows(c, NULL);
  c->tier->decode_tokens(&a);
  check_same_bits("out with some states stored", want, out, out_bytes, 4);
}

static double *doubles(const float *x, int64_t n) {
  double *d = check_alloc((size_t)n * sizeof *d);
  for (int64_t i = 0; i < n; i++) d[i] = (double)x[i];
  return d;
}

/* With none stored, within the bound of kernels.h. */
static void check_verify_bound(const struct kcase *c, const struct tokens *t, const float *out) {
  const int64_t n = c->n, K = c->K, V = c->V;
  double *state = check_alloc((size_t)(K * V) * sizeof *state);
  double *want = check_alloc((size_t)(n * V) * sizeof *want), *limit = check_alloc((size_t)(n * V) * sizeof *limit);
  for (int64_t i = 0; i < K * V; i++) state[i] = (double)t->state[i % V * K + i / V];
  struct verify_head h = {.n = c->n,
                          .dim_k = c->K,
                          .dim_v = c->V,
                          .q = doubles(t->q, n * K),
                          .k = doubles(t->k, n * K),
                          .decay = doubles(t->decay, n),
                          .beta = doubles(t->beta, n),
                          .v = doubles(t->v, n * V),
                          .state = state};
  verify_bound(&h, want, limit);
  for (int64_t i = 0; i < n * V; i++)
    check_limit("out of a verify, as a share of its bound", fabs((double)out[i] - want[i]) / limit[i], 1);
}

/* Any columns and any first tokens alone give out's bits. */
static void check_verify_parts(const struct kcase *c, const struct tokens *t, const float *out) {
  float *part = alloc_f32((int64_t)c->n * c->V), *v = alloc_f32((int64_t)c->n * GDN_PANEL);
  struct gdn_decode_tokens a = all_tokens(c, t, part);
  for (a.n = 1; a.n < c->n; a.n = a.n < 6 ? a.n + 1 : 2 * a.n) {
    c->tier->decode_tokens(&a);
    check_same_bits("out of the first tokens", out, part, (size_t)a.n * (size_t)c->V * 4, 4);
  }
  a = all_tokens(c, t, part);
  a.v = v;
  a.n_cols = GDN_PANEL;
  for (int col = 0; col < c->V; col += GDN_PANEL) {
    for (int i = 0; i < c->n; i++)
      memcpy(v + (ptrdiff_t)i * GDN_PANEL, t->v + (ptrdiff_t)i * c->V + col, GDN_PANEL * sizeof *v);
    a.state_in = f32_rows(c, t->state + (ptrdiff_t)col * c->K);
    c->tier->decode_tokens(&a);
    for (int i = 0; i < c->n; i++)
      check_same_bits("out in slices", out + (ptrdiff_t)i * c->V + col, part + (ptrdiff_t)i * GDN_PANEL,
                      GDN_PANEL * sizeof *out, 4);
  }
}

/* States of 16 bits give the bits of the same numbers in float32, and no state those of zeros. */
static void check_verify_states(const struct kcase *c, const struct tokens *t) {
  const int64_t n_state = (int64_t)c->V * c->K;
  const size_t out_bytes = (size_t)c->n * (size_t)c->V * 4;
  float *want = alloc_f32((int64_t)c->n * c->V), *out = alloc_f32((int64_t)c->n * c->V), *wide = alloc_f32(n_state);
  uint16_t *narrow = check_alloc_tight((size_t)n_state * sizeof *narrow);
  struct gdn_decode_tokens a = all_tokens(c, t, want), b = all_tokens(c, t, out);
  static const int32_t dtypes[] = {GDN_ROWS_BF16, GDN_ROWS_F16};
  a.state_in = f32_rows(c, wide);
  for (int d = 0; d < 2; d++) {
    b.state_in = (struct gdn_state_ref){.data = narrow, .stride_elems = c->K, .dtype = dtypes[d]};
    c->ref->store_rows(c->V, c->K, t->state, c->K, (struct gdn_rows_out){narrow, c->K, dtypes[d]});
    c->ref->load_rows(c->V, c->K, (struct gdn_rows){narrow, c->K, dtypes[d]}, wide, c->K);
    c->tier->decode_tokens(&a);
    c->tier->decode_tokens(&b);
    check_same_bits("out from a state of 16 bits", want, out, out_bytes, 4);
  }
  memset(wide, 0, (size_t)n_state * sizeof *wide);
  b.state_in.data = NULL;
  c->tier->decode_tokens(&a);
  c->tier->decode_tokens(&b);
  check_same_bits("out from the zero state", want, out, out_bytes, 4);
}

/* Several tokens: bits of as many steps where a state is stored, else the first token's, and a bound. */
void check_decode_tokens(struct kcase *c) {
  c->n = c->n < GDN_TOKENS_MAX ? c->n : GDN_TOKENS_MAX;
  struct tokens t = random_tokens(c);
  const size_t out_bytes = (size_t)c->n * (size_t)c->V * 4;
  float *want = alloc_f32((int64_t)c->n * c->V), *out = alloc_f32((int64_t)c->n * c->V);
  float *now = caller_state(c->V, c->K, 0);
  struct gdn_state_ref none[GDN_TOKENS_MAX] = {{.data = NULL}};
  if (c->n == 16) t.decay[2] = 0;
  if (c->n == 15) t.decay[4] = t.decay[5] = 1e-30f; /* whose product is none of float32's */
  memcpy(now, t.state, (size_t)c->V * (size_t)c->K * 4);
  for (int i = 0; i < c->n; i++) step(c->tier, c, &t, i, 0, c->V, now, now, want + (ptrdiff_t)i * c->V);
  check_stored_tokens(c, &t, want);

  struct gdn_decode_tokens a = all_tokens(c, &t, out);
  memcpy(out, t.v, out_bytes);
  a.v = out;
  c->tier->decode_tokens(&a);
  check_same_bits("first token of a verify", want, out, (size_t)c->V * 4, 4);
  check_verify_bound(c, &t, out);
  a.v = t.v;
  a.out = want;
  a.token_states = none;
  c->tier->decode_tokens(&a);
  check_same_bits("out with rows that are all skipped", want, out, out_bytes, 4);
  check_verify_parts(c, &t, out);
  check_verify_states(c, &t);
  BENCH(c, c->ref->decode_tokens(&a), c->tier->decode_tokens(&a));
}
