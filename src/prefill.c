/* SPDX-License-Identifier: Apache-2.0
 * Prefill: picks the form, plans tasks, runs them on the workers. */
#include "prefill.h"

#include <string.h>

#define STREAM_STATES_BYTES (INT64_C(32) << 20)

struct gdn_columns gdn_columns_at(const struct gdn_batch *b, const struct gdn_task *t, int unit, int most) {
  int panels = b->dim_v / GDN_PANEL, group = b->n_heads_v / b->n_heads_k;
  struct gdn_columns c = {t->head * group + unit / panels, unit % panels * GDN_PANEL, 0, unit - t->unit};
  int left = panels - unit % panels, here = t->unit + t->n_units - unit;
  c.n_cols = (left < here ? left : here) * GDN_PANEL;
  if (c.n_cols > most) c.n_cols = most;
  return c;
}

struct gdn_rows gdn_rows_from(struct gdn_rows r, int col) {
  r.data = (const char *)r.data + (size_t)col * (size_t)gdn_dtype_bytes(r.dtype);
  return r;
}

struct gdn_rows_out gdn_rows_out_from(struct gdn_rows_out r, int col) {
  r.data = (char *)r.data + (size_t)col * (size_t)gdn_dtype_bytes(r.dtype);
  return r;
}

void gdn_states_load(const struct gdn_prefill_job *job, const struct gdn_task *t, float *state) {
  const struct gdn_batch *b = job->batch;
  int64_t row = gdn_pool_row(&b->initial, t->seq);
  struct gdn_columns c;
  GDN_EACH_COLUMNS(b, t, b->dim_v, u, c) {
    float *panels = state + (int64_t)c.slot * b->dim_k * GDN_PANEL;
    if (row >= 0)
      job->ctx->kernels.state_load(c.n_cols, b->dim_k, gdn_pool_state(&b->initial, b, row, c.head, c.col), panels);
    else
      memset(panels, 0, (size_t)c.n_cols * (size_t)b->dim_k * sizeof(float));
  }
}

void gdn_states_store(const struct gdn_prefill_job *job, const struct gdn_task *t, const struct gdn_pool *pool,
                      int64_t row, const float *state) {
  const struct gdn_batch *b = job->batch;
  struct gdn_columns c;
  if (row < 0) return;
  GDN_EACH_COLUMNS(b, t, b->dim_v, u, c) {
    struct gdn_state_ref to = gdn_pool_state(pool, b, row, c.head, c.col);
    to.stream = job->stream_states;
    job->ctx->kernels.state_store(c.n_cols, b->dim_k, state + (int64_t)c.slot * b->dim_k * GDN_PANEL, to);
  }
}

/* States of a call that are more than the caches would keep for the next one. */
static int streams_states(const struct gdn_batch *b) {
  const int64_t row = (int64_t)b->n_heads_v * b->dim_v * b->dim_k * (int64_t)sizeof(float);
  return b->n_seqs * row >= STREAM_STATES_BYTES;
}

int gdn_prefill_choose_form(const gdn_ctx *ctx, const struct gdn_batch *b) {
  return b->form != GDN_FORM_DEFAULT ? b->form : gdn_plan_form(gdn_tiers[ctx->tier].isa, b->dim_k, b->dim_v);
}

static void prefill_worker(void *arg, int worker, int n_workers) {
  struct gdn_prefill_job *job = arg;
  const struct gdn_plan *plan = &job->ctx->plan;
  char *scratch = job->ctx->scratch[worker].block;
  uint32_t saved = job->ctx->kernels.thread_begin();
  if (job->windows) gdn_windows_run(job, worker, n_workers, scratch);
  for (;;) {
    int64_t i = atomic_fetch_add_explicit(&job->next, plan->claim, memory_order_relaxed);
    int64_t end = i + plan->claim < plan->n_tasks ? i + plan->claim : plan->n_tasks;
    if (i >= end) break;
    for (; i < end; i++) {
      struct gdn_task t = gdn_plan_task(plan, i);
      if (job->form == GDN_FORM_CHUNK)
        gdn_chunk_task(job, &t, scratch);
      else
        gdn_recur_task(job, &t, scratch);
    }
  }
  job->ctx->kernels.thread_end(saved);
}

/* Everything that can fail for want of memory. */
static gdn_status prepare(struct gdn_prefill_job *job, struct gdn_windows *windows) {
  gdn_ctx *ctx = job->ctx;
  const struct gdn_batch *b = job->batch;
  const int chunked = job->form == GDN_FORM_CHUNK;
  const struct gdn_plan_options options = {.n_threads = ctx->n_threads,
                                           .schedule = chunked ? b->schedule : GDN_SCHEDULE_LANES,
                                           .prep_percent = chunked ? 100 : 25,
                                           .grain = (chunked ? b->dim_v : ctx->kernels.recur_cols) / GDN_PANEL};
  if (gdn_plan_make(&ctx->plan, b, &options))
    return gdn_fail(GDN_E_NOMEM, "no memory to plan n_seqs = %lld", (long long)b->n_seqs);
  if (chunked && !(job->gemms = gdn_context_gemms(ctx, b->dim_k, b->dim_v)))
    return gdn_fail(GDN_E_NOMEM, "no memory for products of dim_k = %d, dim_v = %d", b->dim_k, b->dim_v);
  const size_t shared_bytes = ctx->plan.n_wide ? gdn_windows_bytes(job, windows) : 0;
  gdn_status status =
      gdn_context_reserve(ctx, chunked ? gdn_chunk_scratch_bytes(job) : gdn_recur_scratch_bytes(job), shared_bytes);
  if (!status && shared_bytes) gdn_windows_begin(job, windows, ctx->shared.block);
  return status;
}

gdn_status gdn_run_prefill(gdn_ctx *ctx, const struct gdn_batch *b) {
  struct gdn_prefill_job job = {
      .ctx = ctx, .batch = b, .form = gdn_prefill_choose_form(ctx, b), .stream_states = streams_states(b)};
  struct gdn_windows windows;
  if (!b->n_tokens) return GDN_OK;
  gdn_status status = prepare(&job, &windows);
  if (!status) gdn_team_run(ctx->team, prefill_worker, &job);
  return status;
}
