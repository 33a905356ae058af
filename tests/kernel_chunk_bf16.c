/* SPDX-License-Identifier: Apache-2.0
 * The chunk form of tiers whose products have bf16 operands. */
#include <math.h>
#include <string.h>

#include "kernel_chunk.h"
#include "model.h"

/* Of the second chunk: steep from 6 tokens on; or step by step down to 2^-110, with v so large that v over that is not
 * finite; or up to 2^55, and up to 2^83, which is steep. */
enum gates_kind { NO_GATES, GENTLE, STEEP, SINKING, GROWING, CROSSING };

/* Their operands and what passes between their primitives are their own affair, so every primitive is checked through
 * out and state of a chunk, by float64 from the state before it, with inputs that bring it out. */
struct bf16_inputs {
  const char *row;
  int l2norm;
  enum gates_kind gates;
  int with_state, unit_v, with_v;
  int whole_lines; /* out in whole cache lines, next rows known: what a full chunk takes a shorter way for */
  int32_t out_dtype;
};

static const struct bf16_inputs bf16_inputs[] = {
    {"chunk_qk", 0, STEEP, 1, 0, 1, 0, GDN_ROWS_F32},        {"chunk_qk", 0, GENTLE, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_gates", 1, NO_GATES, 1, 0, 1, 0, GDN_ROWS_F32},  {"chunk_gates", 1, GENTLE, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_gates", 1, SINKING, 1, 0, 1, 0, GDN_ROWS_F32},   {"chunk_gates", 1, GROWING, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_gates", 1, CROSSING, 1, 0, 1, 0, GDN_ROWS_F32},  {"chunk_delta", 1, GENTLE, 1, 0, 1, 1, GDN_ROWS_BF16},
    {"chunk_delta", 1, NO_GATES, 1, 0, 1, 1, GDN_ROWS_BF16}, {"chunk_out", 1, GENTLE, 1, 0, 1, 1, GDN_ROWS_BF16},
    {"chunk_out", 1, STEEP, 1, 0, 1, 1, GDN_ROWS_BF16},      {"chunk_mask", 1, STEEP, 0, 1, 1, 0, GDN_ROWS_F32},
    {"chunk_mask", 1, GENTLE, 0, 1, 1, 0, GDN_ROWS_F32},     {"chunk_solve", 1, NO_GATES, 0, 1, 1, 0, GDN_ROWS_F32},
    {"chunk_solve", 1, STEEP, 0, 1, 1, 0, GDN_ROWS_F32},     {"chunk_begin", 1, STEEP, 1, 0, 0, 0, GDN_ROWS_F32},
    {"chunk_begin", 1, GENTLE, 1, 0, 0, 0, GDN_ROWS_F32},    {"chunk_delta", 1, STEEP, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_delta", 1, GENTLE, 1, 0, 1, 0, GDN_ROWS_F32},    {"chunk_delta", 1, NO_GATES, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_out", 1, STEEP, 1, 0, 1, 0, GDN_ROWS_BF16},      {"chunk_out", 1, GENTLE, 1, 0, 1, 0, GDN_ROWS_BF16},
    {"chunk_state", 1, STEEP, 1, 0, 1, 1, GDN_ROWS_BF16},    {"chunk_state", 1, GENTLE, 1, 0, 1, 1, GDN_ROWS_BF16},
    {"chunk_state", 1, STEEP, 0, 0, 1, 1, GDN_ROWS_BF16},    {"chunk_state", 1, GENTLE, 0, 0, 1, 1, GDN_ROWS_BF16},
};

/* ---- float64: the rule token by token, and the chunk form with rounded operands ---- */

static double norm_of(const double *x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sqrt(sum);
}

static double owed(const struct gdn_chunk *x, const double *row, double mult) {
  double norm = norm_of(row, x->dim_k);
  return x->l2norm ? mult / sqrt(norm * norm + (double)x->eps) : mult;
}

/* The chunk that x is set to; gates that are absent are 1. */
static struct model_chunk *numbers_of(const struct gdn_chunk *x) {
  struct model_chunk *m = check_alloc(sizeof *m);
  const int K = m->dim_k = x->dim_k, V = m->dim_v = x->dim_v;
  m->n = x->n;
  for (int i = 0; i < x->n; i++) {
    for (int j = 0; j < K; j++) {
      m->q[i * K + j] = row_get(&x->q_rows, i, j);
      m->k[i * K + j] = row_get(&x->k_rows, i, j);
    }
    for (int j = 0; j < V; j++) m->v[i * V + j] = row_get(&x->v_rows, i, j);
    m->q_mult[i] = owed(x, m->q + i * K, (double)x->scale);
    m->k_mult[i] = owed(x, m->k + i * K, 1);
    m->decay[i] = x->g_rows.data != NULL ? exp((double)row_get(&x->g_rows, i, 0)) : 1;
    m->beta[i] = x->beta_rows.data != NULL ? row_get(&x->beta_rows, i, 0) : 1;
  }
  return m;
}

/* state [K][V] */
static void numbers_model(const struct gdn_chunk *x, int inside, double *state, double *out) {
  struct model model = model_bf16;
  model.inside = inside;
  model_run_chunk(&model, numbers_of(x), state, out);
}

static void numbers_rule(const struct gdn_chunk *x, double *state, double *out) {
  const struct model_chunk *m = numbers_of(x);
  const int K = x->dim_k, V = x->dim_v;
  for (int i = 0; i < x->n; i++) {
    for (int v = 0; v < V; v++) {
      double kept = 0, seen = 0;
      for (int j = 0; j < K; j++) kept += (state[j * V + v] *= m->decay[i]) * m->k[i * K + j];
      double delta = m->beta[i] * (m->v[i * V + v] - m->k_mult[i] * kept);
      for (int j = 0; j < K; j++)
        seen += (state[j * V + v] += delta * m->k_mult[i] * m->k[i * K + j]) * m->q[i * K + j];
      out[i * V + v] = m->q_mult[i] * seen;
    }
  }
}

static double *state_numbers(const struct gdn_chunk *x, const float *panels) {
  double *state = check_alloc((size_t)(x->dim_k * x->dim_v) * sizeof *state);
  for (int j = 0; j < x->dim_k; j++) {
    for (int v = 0; v < x->dim_v; v++) state[j * x->dim_v + v] = panels[panel_at(x->dim_k, v, j)];
  }
  return state;
}

/* Decays as products of up to 64, sums over K in a vector's lanes. */
static double f32_share(const struct kcase *c) {
  return 0x1p-24 * (GDN_CHUNK + c->K / 8);
}

static struct chunk_data bf16_data(struct kcase *c, const struct bf16_inputs *in) {
  struct chunk_data d = random_chunks(c);
  int n = FIRST_LEN + c->n;
  if (in->whole_lines) d.v = random_rows(&c->rng, n, c->V, 32, GDN_ROWS_BF16, -1, 1);
  for (int i = 0; i < n && !in->l2norm; i++) {
    for (int j = 0; j < c->K; j++) { /* norms about 1 */
      row_put(&d.q, i, j, row_get(&d.q, i, j) * sqrtf(3.0f / (float)c->K));
      row_put(&d.k, i, j, row_get(&d.k, i, j) * sqrtf(3.0f / (float)c->K));
    }
  }
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < c->V; j++) {
      if (in->unit_v) row_put(&d.v, i, j, i % GDN_CHUNK == j);
      if (!in->with_v) row_put(&d.v, i, j, 0);
    }
  }
  if (in->gates == GENTLE) make_gentle(c, &d);
  for (int i = FIRST_LEN; i < n && in->gates == SINKING; i++) {
    row_put(&d.g, i, 0, -1.2f);
    for (int j = 0; j < c->V; j++) row_put(&d.v, i, j, row_get(&d.v, i, j) * 0x1p20f);
  }
  for (int i = FIRST_LEN; i < n && in->gates >= GROWING; i++) row_put(&d.g, i, 0, in->gates == GROWING ? 0.6f : 0.9f);
  if (in->gates == NO_GATES) d.g.data = d.beta.data = NULL;
  return d;
}

static struct gdn_rows maybe_rows(struct gdn_rows rows, int i) {
  return rows.data != NULL ? rows_from(rows, i) : rows;
}

/* Two chunks, the first always of full length; width columns at a time. start gets the state between them. */
static struct gdn_chunk *bf16_run(struct kcase *c, const struct bf16_inputs *in, const struct chunk_data *d, int width,
                                  float *start) {
  struct gdn_chunk *x = make_chunk(c, d, 1, in->out_dtype);
  struct chunk_data ungated = *d;
  ungated.g = ungated.beta = d->q; /* set_chunk needs rows */
  x->l2norm = in->l2norm;
  if (in->whole_lines) x->out_rows = poison_rows(FIRST_LEN + c->n, c->V, 32, in->out_dtype);
  struct gdn_rows_out all = x->out_rows;
  for (int chunk = 0; chunk < 2; chunk++) {
    int from = chunk * FIRST_LEN;
    set_chunk(x, in->gates != NO_GATES ? d : &ungated, from, chunk ? c->n : FIRST_LEN);
    x->g_rows = maybe_rows(d->g, from);
    x->beta_rows = maybe_rows(d->beta, from);
    x->next_n = chunk ? 0 : c->n;
    x->next_q = rows_from(d->q, FIRST_LEN);
    x->next_k = rows_from(d->k, FIRST_LEN);
    x->next_v = rows_from(d->v, FIRST_LEN);
    x->out_rows.data = (char *)all.data + from * all.stride_elems * elem_bytes(all.dtype);
    if (chunk && !in->with_state) start_from_zero(x, width < c->V);
    run_stages(c->tier, x, width, chunk == 0 || (!in->with_state && !x->zero_state), END);
    if (!chunk) memcpy(start, x->state, (size_t)c->K * (size_t)c->V * 4);
  }
  if (!in->with_state) memset(start, 0, (size_t)c->K * (size_t)c->V * 4);
  check_gaps(&all, FIRST_LEN + c->n, c->V);
  return x;
}

/* The distance of row i of dim numbers. */
static double row_error(const double *x, const double *want, int i, int dim) {
  double error[GDN_DIM_MAX];
  for (int j = 0; j < dim; j++) error[j] = x[i * dim + j] - want[i * dim + j];
  return norm_of(error, dim);
}

/* n rows of dim numbers and what they should be; every row, and all of them. f32: share of a row of middling size.
 * A row's roundings may nearly cancel in the model and, where one falls on the other side of a tie, not in the kernel:
 * each row is allowed half of what the model's rows are off on average. */
static void compare_rows(const char *what, const double *got, const double *want, const double *model, int n, int dim,
                         int n_tokens, double f32) {
  const double size = norm_of(want, n * dim) / sqrt(n);
  double sum = 0, model_sum = 0;
  for (int i = 0; i < n; i++) {
    sum += pow(row_error(got, want, i, dim), 2);
    model_sum += pow(row_error(model, want, i, dim), 2);
  }
  for (int i = 0; i < n; i++) {
    const double allowed = fmax(row_error(model, want, i, dim), sqrt(model_sum / n) / 2);
    check_limit(what, row_error(got, want, i, dim), model_limit(allowed, 1, f32 * size));
  }
  check_limit(what, sqrt(sum), model_limit(sqrt(model_sum), n_tokens, f32 * size * sqrt(n)));
}

/* Out by tokens, the state by rows of K. */
static void bf16_compare(const struct kcase *c, const struct bf16_inputs *in, const struct gdn_chunk *x,
                         const float *start) {
  const int n_out = c->n * c->V;
  double *want = check_alloc((size_t)n_out * 8), *model = check_alloc((size_t)n_out * 8);
  double *got = check_alloc((size_t)n_out * 8), *state = state_numbers(x, start),
         *state_model = state_numbers(x, start);
  const float *out = out_numbers(x);
  numbers_rule(x, state, want);
  numbers_model(x, 0, state_model, model);
  for (int i = 0; i < n_out; i++) {
    got[i] = out[i];
    if (in->out_dtype == GDN_ROWS_BF16) model[i] = check_from_bf16(check_to_bf16((float)model[i]));
  }
  compare_rows("out", got, want, model, c->n, c->V, c->n, f32_share(c));
  compare_rows("state", state_numbers(x, x->state), state, state_model, c->K, c->V, c->n, f32_share(c));
}

double bf16_state_at_limit(const struct kcase *c, const struct chunk_data *d, int n_at, const float *want) {
  struct gdn_chunk *x = make_chunk(c, d, 0, GDN_ROWS_F32);
  double *state = state_numbers(x, d->state), *out = check_alloc((size_t)(GDN_CHUNK * c->V) * 8);
  set_chunk(x, d, 0, FIRST_LEN);
  numbers_model(x, 0, state, out);
  set_chunk(x, d, FIRST_LEN, n_at);
  numbers_model(x, 1, state, out);
  return model_limit(model_error(state, state_numbers(x, want), c->K * c->V), n_at, f32_share(c));
}

static void check_inputs(struct kcase *c, const struct bf16_inputs *in) {
  struct chunk_data d = bf16_data(c, in);
  size_t state_bytes = (size_t)c->K * (size_t)c->V * 4;
  float *start = check_alloc(state_bytes);
  struct gdn_chunk *slices = bf16_run(c, in, &d, 32, start), *x = bf16_run(c, in, &d, c->V, start);
  bf16_compare(c, in, x, start);
  check_same_bits("state in slices", x->state, slices->state, state_bytes, 4);
  check_same_out("out in slices", x, slices);
}

void check_chunk_bf16(struct kcase *c) {
  for (size_t i = 0; i < sizeof bf16_inputs / sizeof bf16_inputs[0]; i++) {
    if (strcmp(bf16_inputs[i].row, c->name) == 0) check_inputs(c, &bf16_inputs[i]);
  }
}
