/* SPDX-License-Identifier: Apache-2.0
 * One token per sequence, straight on state rows in caller memory: each row is read once and written once. */
#include "engine.h"

void gdn_token_step(const struct gdn_kernels *kernels, const struct gdn_batch *b, struct gdn_token *t, int64_t seq,
                    int64_t token, int head_v, int col, int n_cols) {
  int head = head_v / (b->n_heads_v / b->n_heads_k);
  if (t->token != token || t->head != head) {
    kernels->norm_rows(1, b->dim_k, gdn_array_rows(&b->q, token, head), b->l2norm, b->eps, b->scale, t->q);
    kernels->norm_rows(1, b->dim_k, gdn_array_rows(&b->k, token, head), b->l2norm, b->eps, 1.0f, t->k);
    kernels->dot_rows(1, b->dim_k, t->k, t->q, &t->kq);
    t->token = token;
    t->head = head;
  }
  struct gdn_rows v = gdn_array_rows(&b->v, token, head_v);
  struct gdn_rows_out out = gdn_array_rows_out(&b->out, token, head_v);
  v.data = (const char *)v.data + (size_t)col * (size_t)gdn_dtype_bytes(v.dtype);
  out.data = (char *)out.data + (size_t)col * (size_t)gdn_dtype_bytes(out.dtype);
  kernels->load_rows(1, n_cols, v, t->v, n_cols);
  struct gdn_decode_step step = {.dim_k = b->dim_k, .n_cols = n_cols, .q = t->q, .k = t->k, .kq = t->kq, .v = t->v,
                                 .out = t->v};
  kernels->gates(1, gdn_array_rows(&b->g, token, head_v), gdn_array_rows(&b->beta, token, head_v), &step.decay,
                 &step.beta);
  step.state_in = gdn_pool_state(&b->initial, b, gdn_pool_row(&b->initial, seq), head_v, col);
  step.state_out = gdn_pool_state(&b->final, b, gdn_pool_row(&b->final, seq), head_v, col);
  kernels->decode_step(&step);
  kernels->store_rows(1, n_cols, t->v, n_cols, out);
}

/* Items are slices of n_cols columns, numbered by sequence, value head, slice. Every worker starts on an equal share of
 * neighbours, the same one in every call of a shape, so that small states stay in its core's cache; then it helps. */
struct decode_job {
  struct gdn_ctx *ctx;
  const struct gdn_batch *batch;
  int n_cols;
};

static void decode_item(const struct decode_job *job, struct gdn_token *t, int64_t item) {
  const struct gdn_batch *b = job->batch;
  int n_slices = b->dim_v / job->n_cols;
  int64_t lane = item / n_slices;
  int64_t seq = lane / b->n_heads_v;
  gdn_token_step(&job->ctx->kernels, b, t, seq, seq, (int)(lane % b->n_heads_v), (int)(item % n_slices) * job->n_cols,
                 job->n_cols);
}

static void decode_worker(void *arg, int worker, int n_workers) {
  const struct decode_job *job = arg;
  struct gdn_token t;
  t.token = -1;
  for (int i = 0; i < n_workers; i++) {
    struct gdn_share *share = &job->ctx->shares[(worker + i) % n_workers];
    for (;;) {
      int64_t item = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed);
      if (item >= share->end)
        break;
      decode_item(job, &t, item);
    }
  }
}

/* Columns of an item: all of V, halved while there are fewer than 4 items a worker and panels stay whole. */
static int slice_cols(const struct gdn_batch *b, int n_workers) {
  int n_cols = b->dim_v;
  while (n_cols % (2 * GDN_PANEL) == 0 &&
         b->n_seqs * b->n_heads_v * (b->dim_v / n_cols) < 4 * (int64_t)n_workers && n_workers > 1)
    n_cols /= 2;
  return n_cols;
}

gdn_status gdn_run_decode(gdn_ctx *ctx, const struct gdn_batch *batch) {
  struct decode_job job = {ctx, batch, slice_cols(batch, ctx->n_threads)};
  int64_t n_items = batch->n_seqs * batch->n_heads_v * (batch->dim_v / job.n_cols);
  if (!n_items)
    return GDN_OK;
  for (int w = 0; w < ctx->n_threads; w++) {
    atomic_store_explicit(&ctx->shares[w].next, n_items * w / ctx->n_threads, memory_order_relaxed);
    ctx->shares[w].end = n_items * (w + 1) / ctx->n_threads;
  }
  gdn_team_run(ctx->team, decode_worker, &job);
  return GDN_OK;
}
