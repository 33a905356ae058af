/* SPDX-License-Identifier: Apache-2.0
 * The recurrent form: slices of V run through the tokens one by one, states in panels. */
#include "prefill.h"

/* Tokens whose q and k are made ready at once. A state slice comes into the first-level cache once per block. */
#define RECUR_BLOCK 64

void gdn_recur_carve(struct gdn_carver *c, const struct gdn_prefill_job *job, struct gdn_recur_scratch *s) {
  const struct gdn_batch *b = job->batch;
  s->q = gdn_carve_floats(c, RECUR_BLOCK * b->dim_k);
  s->k = gdn_carve_floats(c, RECUR_BLOCK * b->dim_k);
  s->kq = gdn_carve_floats(c, RECUR_BLOCK);
  s->decay = gdn_carve_floats(c, RECUR_BLOCK);
  s->beta = gdn_carve_floats(c, RECUR_BLOCK);
  s->v = gdn_carve_floats(c, RECUR_BLOCK * job->ctx->kernels.recur_cols);
}

static void ahead_add(struct gdn_ahead *a, const void *row, int line, int64_t stride_elems, int32_t dtype) {
  if (a->n == GDN_AHEAD_MAX) return;
  a->line[a->n] = (const char *)row + (ptrdiff_t)line * GDN_LINE_BYTES;
  a->stride_bytes[a->n++] = stride_elems * gdn_dtype_bytes(dtype);
}

static int row_lines(int dim, int32_t dtype) {
  return dim * gdn_dtype_bytes(dtype) / GDN_LINE_BYTES;
}

/* What columns c, run number run of n_runs, fetch of the next n_rows tokens: their own v and out, their share of q, k.
 * */
static struct gdn_ahead ahead_of(const struct gdn_batch *b, const struct gdn_columns *c, int head_k, int run,
                                 int n_runs, int64_t token, int n_rows) {
  struct gdn_ahead a = {.n = 0, .n_rows = n_rows};
  if (n_rows <= 0) return a;
  struct gdn_rows q = gdn_array_rows(&b->q, token, head_k), k = gdn_array_rows(&b->k, token, head_k);
  struct gdn_rows v = gdn_rows_from(gdn_array_rows(&b->v, token, c->head), c->col);
  struct gdn_rows_out out = gdn_rows_out_from(gdn_array_rows_out(&b->out, token, c->head), c->col);
  for (int line = 0; line < row_lines(c->n_cols, v.dtype); line++) ahead_add(&a, v.data, line, v.stride_elems, v.dtype);
  for (int line = 0; line < row_lines(c->n_cols, out.dtype); line++)
    ahead_add(&a, out.data, line, out.stride_elems, out.dtype);
  for (int line = run; line < row_lines(b->dim_k, q.dtype); line += n_runs)
    ahead_add(&a, q.data, line, q.stride_elems, q.dtype);
  for (int line = run; line < row_lines(b->dim_k, k.dtype); line += n_runs)
    ahead_add(&a, k.data, line, k.stride_elems, k.dtype);
  return a;
}

/* n tokens from token on, all units of the task; the n_more after them are fetched meanwhile. */
static void recur_block(const struct gdn_prefill_job *job, const struct gdn_task *t, const struct gdn_recur_scratch *s,
                        float *state, int64_t token, int n, int n_more) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  kernels->norm_rows(n, b->dim_k, gdn_array_rows(&b->q, token, t->head), b->l2norm, b->eps, b->scale, s->q);
  kernels->norm_rows(n, b->dim_k, gdn_array_rows(&b->k, token, t->head), b->l2norm, b->eps, 1.0f, s->k);
  kernels->dot_rows(n, b->dim_k, s->k, s->q, s->kq);
  struct gdn_columns c;
  int head = -1;
  GDN_EACH_COLUMNS(b, t, kernels->recur_cols, u, c) {
    if (c.head != head) {
      struct gdn_gates gates = gdn_batch_gates(b, token, c.head, n);
      gates.g_out = s->decay;
      gates.beta_out = s->beta;
      kernels->gates(&gates);
    }
    head = c.head;
    kernels->load_rows(n, c.n_cols, gdn_rows_from(gdn_array_rows(&b->v, token, head), c.col), s->v, c.n_cols);
    struct gdn_recur r = {.n = n,
                          .dim_k = b->dim_k,
                          .n_cols = c.n_cols,
                          .q = s->q,
                          .k = s->k,
                          .kq = s->kq,
                          .decay = s->decay,
                          .beta = s->beta,
                          .v = s->v,
                          .out = s->v,
                          .ld = c.n_cols,
                          .state = state + (int64_t)c.slot * b->dim_k * GDN_PANEL,
                          .ahead = ahead_of(b, &c, t->head, u - t->unit, t->n_units, token + n, n_more)};
    kernels->recur(&r);
    kernels->store_rows(n, c.n_cols, s->v, c.n_cols,
                        gdn_rows_out_from(gdn_array_rows_out(&b->out, token, head), c.col));
  }
}

void gdn_recur_tokens(const struct gdn_prefill_job *job, const struct gdn_task *t, const struct gdn_recur_scratch *s,
                      float *state, int64_t token, int64_t end) {
  for (; token < end; token += RECUR_BLOCK) {
    int64_t left = end - token, n = left < RECUR_BLOCK ? left : RECUR_BLOCK;
    recur_block(job, t, s, state, token, (int)n, (int)(left - n < RECUR_BLOCK ? left - n : RECUR_BLOCK));
  }
}

/* Whether a sequence is one token and nothing is due after it but its final state. */
static int is_one_token(const struct gdn_batch *b, int64_t seq) {
  if (gdn_batch_len(b, seq) != 1 || !gdn_token_step_fits(b)) return 0;
  return !b->checkpoint_every || (gdn_batch_prefix(b, seq) + 1) % b->checkpoint_every != 0;
}

/* A single token needs no working state: it runs on the rows as decode does, with the same bits. */
static void recur_one_token(const struct gdn_prefill_job *job, const struct gdn_task *t) {
  const struct gdn_batch *b = job->batch;
  struct gdn_token token;
  token.token = -1;
  token.far = 1;
  struct gdn_columns c;
  GDN_EACH_COLUMNS(b, t, b->dim_v, u, c)
  gdn_token_step(&job->ctx->kernels, b, &token, t->seq, gdn_batch_start(b, t->seq), c.head, c.col, c.n_cols);
}

static float *task_carve(struct gdn_carver *c, const struct gdn_prefill_job *job, struct gdn_recur_scratch *s) {
  gdn_recur_carve(c, job, s);
  return gdn_carve_floats(c, (int64_t)job->ctx->plan.n_slots * job->batch->dim_k * GDN_PANEL);
}

size_t gdn_recur_scratch_bytes(const struct gdn_prefill_job *job) {
  struct gdn_carver c = {NULL, 0};
  struct gdn_recur_scratch s;
  task_carve(&c, job, &s);
  return c.bytes;
}

void gdn_recur_task(const struct gdn_prefill_job *job, const struct gdn_task *t, char *scratch) {
  const struct gdn_batch *b = job->batch;
  if (is_one_token(b, t->seq)) {
    recur_one_token(job, t);
    return;
  }
  struct gdn_carver c = {scratch, 0};
  struct gdn_recur_scratch s;
  float *state = task_carve(&c, job, &s);
  struct gdn_span span = gdn_span_first(b, t->seq);
  gdn_states_load(job, t, state);
  while (gdn_span_next(b, &span)) {
    gdn_recur_tokens(job, t, &s, state, span.token, span.end);
    if (span.checkpoint >= 0)
      gdn_states_store(job, t, &b->checkpoints, gdn_pool_row(&b->checkpoints, span.checkpoint), state);
  }
  gdn_states_store(job, t, &b->final, gdn_pool_row(&b->final, t->seq), state);
}
