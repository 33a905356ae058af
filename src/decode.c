/* SPDX-License-Identifier: Apache-2.0
 * Decode. One token per sequence runs straight on state rows in caller memory: each row is read once and written once.
 * So do several tokens on [V, K] states, and one where the states differ in type: read once, written where asked for; a
 * task with nothing to write takes all sums on the first state (gdn_decode_tokens_fn).
 * On [K, V] states they run on panels of 32 columns, read and written as often. */
#include "prefill.h"

#include <string.h>

/* q and k of n tokens and one q head; zero q where nobody wants out. */
static void make_qk(const struct gdn_kernels *kernels, const struct gdn_batch *b, int64_t token, int head, int n,
                    float *q, float *k, float *kq) {
  kernels->norm_rows(n, b->dim_k, gdn_array_rows(&b->k, token, head), b->l2norm, b->eps, 1.0f, k);
  if (b->q.data)
    kernels->norm_rows(n, b->dim_k, gdn_array_rows(&b->q, token, head), b->l2norm, b->eps, b->scale, q);
  else
    memset(q, 0, sizeof *q * (size_t)n * (size_t)b->dim_k);
  kernels->dot_rows(n, b->dim_k, k, q, kq);
}

void gdn_token_step(const struct gdn_kernels *kernels, const struct gdn_batch *b, struct gdn_token *t, int64_t seq,
                    int64_t token, int head_v, int col, int n_cols) {
  int head = head_v / (b->n_heads_v / b->n_heads_k);
  if (t->token != token || t->head != head) {
    make_qk(kernels, b, token, head, 1, t->q, t->k, &t->kq);
    t->token = token;
    t->head = head;
  }
  kernels->load_rows(1, n_cols, gdn_rows_from(gdn_array_rows(&b->v, token, head_v), col), t->v, n_cols);
  struct gdn_decode_step step = {
      .dim_k = b->dim_k, .n_cols = n_cols, .q = t->q, .k = t->k, .kq = t->kq, .v = t->v, .out = t->v};
  struct gdn_gates gates = gdn_batch_gates(b, token, head_v, 1);
  gates.g_out = &step.decay;
  gates.beta_out = &step.beta;
  kernels->gates(&gates);
  step.state_in = gdn_pool_state(&b->initial, b, gdn_pool_row(&b->initial, seq), head_v, col);
  step.state_out = gdn_pool_state(&b->final, b, gdn_pool_row(&b->final, seq), head_v, col);
  step.far = t->far;
  kernels->decode_step(&step);
  if (b->out.data)
    kernels->store_rows(1, n_cols, t->v, n_cols, gdn_rows_out_from(gdn_array_rows_out(&b->out, token, head_v), col));
}

int gdn_token_step_fits(const struct gdn_batch *b) {
  const struct gdn_pool *in = &b->initial, *out = &b->final;
  return !in->data || !out->data || (in->dtype == out->dtype && in->k_major == out->k_major);
}

/* Items are slices of n_cols columns, numbered by sequence, value head, slice. Every worker starts on an equal share of
 * neighbours, the same one in every call of a shape, so that small states stay in its core's cache; then it helps. */
struct decode_job {
  struct gdn_ctx *ctx;
  const struct gdn_batch *batch;
  int n_cols;
  int one_token; /* gdn_token_step does everything */
  int on_rows;   /* decode_rows does, else decode_panel */
  int far;       /* the states do not fit the last-level cache, or one worker has it for itself */
};

struct decode_place {
  int64_t seq;
  int head_v, col;
};

static struct decode_place place_of(const struct decode_job *job, int64_t item) {
  const int n_slices = job->batch->dim_v / job->n_cols, n_heads = job->batch->n_heads_v;
  const int64_t lane = item / n_slices;
  return (struct decode_place){lane / n_heads, (int)(lane % n_heads), (int)(item % n_slices) * job->n_cols};
}

/* ---- several tokens ---- */

/* What a worker has made for a sequence; kept while consecutive items share it. */
struct decode_scratch {
  float *q, *k;                       /* [T][dim_k] */
  float *kq, *decay, *beta;           /* [T] */
  float *v;                           /* [T][dim_v], then the output */
  float *panel;                       /* [dim_k][32] */
  struct gdn_state_ref *token_states; /* [T] */
  int64_t seq;
  int head_k, head_v; /* -1 = nothing made yet */
};

static size_t carve_scratch(const struct gdn_batch *b, char *memory, struct decode_scratch *s) {
  struct gdn_carver c = {memory, 0};
  const int64_t n = b->tokens_per_seq;
  s->q = gdn_carve_floats(&c, n * b->dim_k);
  s->k = gdn_carve_floats(&c, n * b->dim_k);
  s->kq = gdn_carve_floats(&c, n);
  s->decay = gdn_carve_floats(&c, n);
  s->beta = gdn_carve_floats(&c, n);
  s->v = gdn_carve_floats(&c, n * b->dim_v);
  s->panel = gdn_carve_floats(&c, (int64_t)b->dim_k * GDN_PANEL);
  s->token_states = gdn_carve(&c, (size_t)n * sizeof *s->token_states);
  s->seq = s->head_k = s->head_v = -1;
  return c.bytes;
}

static void make_tokens(const struct decode_job *job, struct decode_scratch *s, int64_t seq, int head_v) {
  const struct gdn_batch *b = job->batch;
  const int64_t token = gdn_batch_start(b, seq);
  const int n = (int)gdn_batch_len(b, seq), head_k = head_v / (b->n_heads_v / b->n_heads_k);
  if (s->seq != seq || s->head_k != head_k) make_qk(&job->ctx->kernels, b, token, head_k, n, s->q, s->k, s->kq);
  if (s->seq != seq || s->head_v != head_v) {
    struct gdn_gates gates = gdn_batch_gates(b, token, head_v, n);
    gates.g_out = s->decay;
    gates.beta_out = s->beta;
    job->ctx->kernels.gates(&gates);
  }
  s->seq = seq;
  s->head_k = head_k;
  s->head_v = head_v;
}

/* Memory to fetch while a panel is computed: as many bytes as a panel's, of what is read after it. Panels of a [K, V]
 * state are interleaved; there it is the panel's share of the next head. */
static const char *read_next(const struct gdn_batch *b, int64_t seq, int head_v, int col) {
  const struct gdn_pool *in = &b->initial;
  int64_t row = gdn_pool_row(in, seq);
  const int64_t head_bytes = (int64_t)b->dim_v * b->dim_k * gdn_dtype_bytes(in->dtype);
  int64_t at = (int64_t)col * b->dim_k * gdn_dtype_bytes(in->dtype);
  at += in->k_major ? head_bytes : head_bytes / (b->dim_v / GDN_PANEL);
  if (at >= head_bytes) {
    at -= head_bytes;
    head_v++;
  }
  if (head_v == b->n_heads_v) {
    row = seq + 1 < b->n_seqs ? gdn_pool_row(in, seq + 1) : -1;
    head_v = 0;
  }
  const char *head = gdn_pool_state(in, b, row, head_v, 0).data;
  return head ? head + at : NULL;
}

/* One panel through all tokens of its sequence. */
static void decode_panel(const struct decode_job *job, const struct decode_scratch *s, int head_v, int col) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  const int64_t seq = s->seq, token = gdn_batch_start(b, seq), n = gdn_batch_len(b, seq);
  const struct gdn_state_ref in = gdn_pool_state(&b->initial, b, gdn_pool_row(&b->initial, seq), head_v, col);
  const struct gdn_state_ref out = gdn_pool_state(&b->final, b, gdn_pool_row(&b->final, seq), head_v, col);
  const char *next = read_next(b, seq, head_v, col);
  int64_t next_bytes = (int64_t)GDN_PANEL * b->dim_k * gdn_dtype_bytes(b->initial.dtype);
  kernels->load_rows((int)n, GDN_PANEL, gdn_rows_from(gdn_array_rows(&b->v, token, head_v), col), s->v, GDN_PANEL);
  if (in.data)
    kernels->state_load(GDN_PANEL, b->dim_k, in, s->panel);
  else
    memset(s->panel, 0, sizeof *s->panel * GDN_PANEL * (size_t)b->dim_k);
  for (int64_t t = 0, end; t < n; t = end) {
    int64_t row = -1;
    for (end = t; end < n && row < 0; end++) row = gdn_pool_row(&b->checkpoints, token + end);
    struct gdn_recur r = {.n = (int)(end - t),
                          .dim_k = b->dim_k,
                          .n_cols = GDN_PANEL,
                          .q = s->q + t * b->dim_k,
                          .k = s->k + t * b->dim_k,
                          .kq = s->kq + t,
                          .decay = s->decay + t,
                          .beta = s->beta + t,
                          .v = s->v + t * GDN_PANEL,
                          .out = s->v + t * GDN_PANEL,
                          .ld = GDN_PANEL,
                          .state = s->panel,
                          .no_state = end == n && row < 0 && !out.data,
                          .next = next_bytes > 0 ? next : NULL,
                          .next_bytes = next_bytes};
    kernels->recur(&r);
    if (r.next) next += r.n * (int64_t)b->dim_k * GDN_LINE_BYTES;
    next_bytes -= r.n * (int64_t)b->dim_k * GDN_LINE_BYTES;
    if (row >= 0)
      kernels->state_store(GDN_PANEL, b->dim_k, s->panel, gdn_pool_state(&b->checkpoints, b, row, head_v, col));
  }
  if (b->out.data)
    kernels->store_rows((int)n, GDN_PANEL, s->v, GDN_PANEL,
                        gdn_rows_out_from(gdn_array_rows_out(&b->out, token, head_v), col));
  if (out.data) kernels->state_store(GDN_PANEL, b->dim_k, s->panel, out);
}

_Static_assert(GDN_DECODE_TOKENS_MAX <= GDN_TOKENS_MAX, "kernels have room for a sequence's tokens");

/* Columns [col, col + n_cols) through all tokens of their sequence, straight on rows in caller memory. */
static void decode_rows(const struct decode_job *job, const struct decode_scratch *s, int head_v, int col) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  const int64_t seq = s->seq, token = gdn_batch_start(b, seq);
  const int n = (int)gdn_batch_len(b, seq), n_cols = job->n_cols;
  kernels->load_rows(n, n_cols, gdn_rows_from(gdn_array_rows(&b->v, token, head_v), col), s->v, n_cols);
  for (int t = 0; t < n; t++)
    s->token_states[t] = gdn_pool_state(&b->checkpoints, b, gdn_pool_row(&b->checkpoints, token + t), head_v, col);
  const struct gdn_decode_tokens tokens = {
      .n = n,
      .dim_k = b->dim_k,
      .n_cols = n_cols,
      .q = s->q,
      .k = s->k,
      .kq = s->kq,
      .decay = s->decay,
      .beta = s->beta,
      .v = s->v,
      .out = s->v,
      .state_in = gdn_pool_state(&b->initial, b, gdn_pool_row(&b->initial, seq), head_v, col),
      .state_out = gdn_pool_state(&b->final, b, gdn_pool_row(&b->final, seq), head_v, col),
      .token_states = s->token_states};
  kernels->decode_tokens(&tokens);
  if (b->out.data)
    kernels->store_rows(n, n_cols, s->v, n_cols, gdn_rows_out_from(gdn_array_rows_out(&b->out, token, head_v), col));
}

/* ---- all of them ---- */

/* Inlined, since gcc drops calls of a function that does nothing but prefetch. */
#define FETCHES static inline __attribute__((always_inline))

FETCHES void fetch_rows(const void *data, int64_t stride_elems, int32_t dtype, int n, int dim) {
  const int elem_bytes = gdn_dtype_bytes(dtype);
  for (int i = 0; data && i < n; i++)
    for (int at = 0; at < dim * elem_bytes; at += GDN_LINE_BYTES)
      __builtin_prefetch((const char *)data + i * stride_elems * elem_bytes + at);
}

/* What an item reads beside its state, and writes: while it waited for these rows it would not read its state. */
FETCHES void fetch_inputs(const struct decode_job *job, int64_t item) {
  const struct gdn_batch *b = job->batch;
  const struct decode_place p = place_of(job, item);
  const int64_t token = gdn_batch_start(b, p.seq);
  const int n = (int)gdn_batch_len(b, p.seq), group = b->n_heads_v / b->n_heads_k;
  struct gdn_rows r = gdn_rows_from(gdn_array_rows(&b->v, token, p.head_v), p.col);
  fetch_rows(r.data, r.stride_elems, r.dtype, n, job->n_cols);
  if (b->out.data) {
    const struct gdn_rows_out out = gdn_rows_out_from(gdn_array_rows_out(&b->out, token, p.head_v), p.col);
    fetch_rows(out.data, out.stride_elems, out.dtype, n, job->n_cols);
  }
  r = gdn_array_rows(&b->g, token, p.head_v);
  fetch_rows(r.data, r.stride_elems, r.dtype, n, 1);
  r = gdn_array_rows(&b->beta, token, p.head_v);
  fetch_rows(r.data, r.stride_elems, r.dtype, n, 1);
  if (p.head_v % group != 0 || p.col != 0) return; /* the item before has the same q and k */
  r = gdn_array_rows(&b->q, token, p.head_v / group);
  fetch_rows(r.data, r.stride_elems, r.dtype, n, b->dim_k);
  r = gdn_array_rows(&b->k, token, p.head_v / group);
  fetch_rows(r.data, r.stride_elems, r.dtype, n, b->dim_k);
}

static void decode_item(const struct decode_job *job, struct gdn_token *t, struct decode_scratch *s, int64_t item) {
  const struct gdn_batch *b = job->batch;
  const struct decode_place p = place_of(job, item);
  if (!gdn_batch_len(b, p.seq)) return;
  if (job->one_token) {
    gdn_token_step(&job->ctx->kernels, b, t, p.seq, p.seq, p.head_v, p.col, job->n_cols);
    return;
  }
  make_tokens(job, s, p.seq, p.head_v);
  if (job->on_rows)
    decode_rows(job, s, p.head_v, p.col);
  else
    for (int col = p.col; col < p.col + job->n_cols; col += GDN_PANEL) decode_panel(job, s, p.head_v, col);
}

static void decode_worker(void *arg, int worker, int n_workers) {
  const struct decode_job *job = arg;
  struct gdn_token t;
  struct decode_scratch s;
  t.token = -1;
  t.far = job->far;
  if (!job->one_token) carve_scratch(job->batch, job->ctx->scratch[worker].block, &s);
  for (int i = 0; i < n_workers; i++) {
    struct gdn_share *share = &job->ctx->shares[(worker + i) % n_workers];
    for (;;) {
      int64_t item = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed);
      if (item >= share->end) break;
      if (item + 1 < share->end) fetch_inputs(job, item + 1);
      decode_item(job, &t, &s, item);
    }
  }
}

/* Columns of an item: all of V, halved while there are fewer than 4 items a worker and panels stay whole. */
static int slice_cols(const struct gdn_batch *b, int n_workers) {
  int n_cols = b->dim_v;
  while (n_cols % (2 * GDN_PANEL) == 0 && b->n_seqs * b->n_heads_v * (b->dim_v / n_cols) < 4 * (int64_t)n_workers &&
         n_workers > 1)
    n_cols /= 2;
  return n_cols;
}

static int64_t state_bytes(const struct gdn_batch *b) {
  return b->n_seqs * b->n_heads_v * b->dim_v * b->dim_k * gdn_dtype_bytes(b->initial.dtype);
}

gdn_status gdn_run_decode(gdn_ctx *ctx, const struct gdn_batch *batch) {
  struct decode_job job = {.ctx = ctx,
                           .batch = batch,
                           .n_cols = slice_cols(batch, ctx->n_threads),
                           .one_token =
                               batch->tokens_per_seq == 1 && !batch->checkpoint_every && gdn_token_step_fits(batch),
                           .on_rows = !batch->initial.k_major && !batch->final.k_major && !batch->checkpoints.k_major,
                           .far = ctx->n_threads == 1 || state_bytes(batch) > ctx->cpu.cache_bytes};
  int64_t n_items = batch->n_seqs * batch->n_heads_v * (batch->dim_v / job.n_cols);
  struct decode_scratch s;
  if (!n_items) return GDN_OK;
  gdn_status status = job.one_token ? GDN_OK : gdn_context_reserve(ctx, carve_scratch(batch, NULL, &s), 0);
  if (status) return status;
  for (int w = 0; w < ctx->n_threads; w++) {
    atomic_store_explicit(&ctx->shares[w].next, n_items * w / ctx->n_threads, memory_order_relaxed);
    ctx->shares[w].end = n_items * (w + 1) / ctx->n_threads;
  }
  gdn_team_run(ctx->team, decode_worker, &job);
  return GDN_OK;
}
