/* SPDX-License-Identifier: Apache-2.0
 * The chunk form of tiers whose products have bf16 operands. */
#include <math.h>
#include <string.h>

#include "kernel_chunk.h"

/* Their operands and what passes between their primitives are their own affair, so every primitive is checked through
 * out and state of a chunk, by float64 from the state before it, with inputs that bring it out. */
struct bf16_inputs {
  const char *row;
  int l2norm, with_gates, with_state, unit_v, with_v;
  int whole_lines; /* out in whole cache lines, next rows known: what a full chunk takes a shorter way for */
  int32_t out_dtype;
};

static const struct bf16_inputs bf16_inputs[] = {
    {"chunk_qk", 0, 1, 1, 0, 1, 0, GDN_ROWS_F32},     {"chunk_gates", 1, 0, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_mask", 1, 1, 0, 1, 1, 0, GDN_ROWS_F32},   {"chunk_solve", 1, 0, 0, 1, 1, 0, GDN_ROWS_F32},
    {"chunk_begin", 1, 1, 1, 0, 0, 0, GDN_ROWS_F32},  {"chunk_residual", 1, 1, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_delta", 1, 0, 1, 0, 1, 0, GDN_ROWS_F32},  {"chunk_out", 1, 1, 1, 0, 1, 0, GDN_ROWS_BF16},
    {"chunk_state", 1, 1, 1, 0, 1, 1, GDN_ROWS_BF16},
};

/* Roundings to bf16 are of up to 2^-8 and independent: a sum of terms that were rounded is off by that of the root of
 * the sum of their squares, and the sizes below are at least that root, of everything that goes into a number. Where
 * one term is all there is, two factors were rounded. */
#define BF16_LIMIT (2 * 0x1p-8)

/* What float64 makes of a chunk, and the sizes of what is added up: out [n][V], of a token; state [V][K], of a column.
 * */
struct bf16_want {
  double *out, *out_size, *state, *state_size;
};

static double norm_of(const double *x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sqrt(sum);
}

static void row_double(const struct gdn_chunk *x, const struct gdn_rows *rows, int i, double mult, double *row) {
  for (int j = 0; j < x->dim_k; j++) row[j] = row_get(rows, i, j);
  if (x->l2norm) {
    double norm = norm_of(row, x->dim_k);
    mult /= sqrt(norm * norm + (double)x->eps);
  }
  for (int j = 0; j < x->dim_k; j++) row[j] *= mult;
}

static struct bf16_want bf16_make_want(const struct gdn_chunk *x, const float *start) {
  const int K = x->dim_k, V = x->dim_v;
  struct bf16_want w = {check_alloc((size_t)(x->n * V) * 8), check_alloc((size_t)x->n * 8),
                        check_alloc((size_t)(V * K) * 8), check_alloc((size_t)V * 8)};
  double column[GDN_DIM_MAX], all = 0, decay_in = 1, q[GDN_DIM_MAX], k[GDN_CHUNK][GDN_DIM_MAX];
  double local[GDN_CHUNK], size[GDN_CHUNK]; /* of token j: exp(G_i - G_j), and the size of its V' */
  for (int v = 0; v < V; v++) {
    for (int j = 0; j < K; j++) w.state[v * K + j] = start[panel_at(K, v, j)];
    column[v] = norm_of(w.state + v * K, K);
    w.state_size[v] = 0;
  }
  all = norm_of(column, V) / sqrt(K);
  for (int i = 0; i < x->n; i++) {
    double decay = x->g_rows.data != NULL ? exp((double)row_get(&x->g_rows, i, 0)) : 1;
    double beta = x->beta_rows.data != NULL ? row_get(&x->beta_rows, i, 0) : 1, sum = 0;
    row_double(x, &x->k_rows, i, 1, k[i]);
    row_double(x, &x->q_rows, i, (double)x->scale, q);
    double k_norm = norm_of(k[i], K), q_norm = norm_of(q, K);
    decay_in *= decay;
    for (int v = 0; v < V; v++) {
      double *s = w.state + v * K, kept = 0, seen = 0;
      for (int j = 0; j < K; j++) kept += (s[j] *= decay) * k[i][j];
      double delta = beta * ((double)row_get(&x->v_rows, i, v) - kept);
      for (int j = 0; j < K; j++) seen += (s[j] += delta * k[i][j]) * q[j];
      w.out[i * V + v] = seen;
      sum += delta * delta;
      w.state_size[v] =
          decay * w.state_size[v] + k_norm * (fabs(delta) + beta * decay_in * k_norm * column[v] / sqrt(K));
    }
    size[i] = sqrt(sum) + beta * decay_in * all * k_norm;
    local[i] = 1;
    w.out_size[i] = q_norm * decay_in * all;
    for (int j = 0; j <= i; j++) {
      double dot = 0;
      if (j < i) local[j] *= decay;
      for (int m = 0; m < K; m++) dot += q[m] * k[j][m];
      w.out_size[i] += fabs(local[j] * dot) * size[j];
    }
  }
  return w;
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
  if (!in->with_gates) d.g.data = d.beta.data = NULL;
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
    set_chunk(x, in->with_gates ? d : &ungated, from, chunk ? c->n : FIRST_LEN);
    x->g_rows = maybe_rows(d->g, from);
    x->beta_rows = maybe_rows(d->beta, from);
    x->next_n = chunk ? 0 : c->n;
    x->next_q = rows_from(d->q, FIRST_LEN);
    x->next_k = rows_from(d->k, FIRST_LEN);
    x->next_v = rows_from(d->v, FIRST_LEN);
    x->out_rows.data = (char *)all.data + from * all.stride_elems * elem_bytes(all.dtype);
    if (chunk && !in->with_state) memset(x->state, 0, (size_t)c->K * (size_t)c->V * 4);
    if (chunk) memcpy(start, x->state, (size_t)c->K * (size_t)c->V * 4);
    run_stages(c->tier, x, width, chunk == 0 || !in->with_state, STATE);
  }
  check_gaps(&all, FIRST_LEN + c->n, c->V);
  return x;
}

static void bf16_compare(const struct kcase *c, const struct bf16_inputs *in, const struct gdn_chunk *x,
                         const struct bf16_want *w) {
  struct gdn_rows out = {x->out_rows.data, x->out_rows.stride_elems, in->out_dtype};
  double error[GDN_DIM_MAX];
  for (int i = 0; i < c->n; i++) {
    for (int v = 0; v < c->V; v++) error[v] = (double)row_get(&out, i, v) - w->out[i * c->V + v];
    double own = in->out_dtype == GDN_ROWS_BF16 ? norm_of(w->out + i * c->V, c->V) : 0;
    check_limit("out of a token over what it is made of", norm_of(error, c->V) / (w->out_size[i] + own + 1e-30),
                BF16_LIMIT);
  }
  for (int v = 0; v < c->V; v++) {
    for (int j = 0; j < c->K; j++) error[j] = (double)x->state[panel_at(c->K, v, j)] - w->state[v * c->K + j];
    double own = norm_of(w->state + v * c->K, c->K) * 0x1p-15; /* f32 sums, decays as products of up to 64 */
    check_limit("column of the state over what is added", (norm_of(error, c->K) - own) / (w->state_size[v] + 1e-30),
                BF16_LIMIT);
  }
}

void check_chunk_bf16(struct kcase *c) {
  const struct bf16_inputs *in = bf16_inputs;
  while (strcmp(in->row, c->name) != 0) in++;
  struct chunk_data d = bf16_data(c, in);
  size_t state_bytes = (size_t)c->K * (size_t)c->V * 4;
  float *start = check_alloc(state_bytes);
  struct gdn_chunk *slices = bf16_run(c, in, &d, 32, start), *x = bf16_run(c, in, &d, c->V, start);
  struct bf16_want w = bf16_make_want(x, start);
  bf16_compare(c, in, x, &w);
  check_same_bits("state in slices", x->state, slices->state, state_bytes, 4);
  for (int i = 0; i < c->n; i++) {
    int64_t at = i * x->out_rows.stride_elems * elem_bytes(in->out_dtype);
    check_same_bits("out in slices", (char *)x->out_rows.data + at, (char *)slices->out_rows.data + at,
                    (size_t)(c->V * elem_bytes(in->out_dtype)), (size_t)elem_bytes(in->out_dtype));
  }
}
