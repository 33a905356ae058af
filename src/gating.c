/* SPDX-License-Identifier: Apache-2.0
 * Raw gates to arrays of log decay and beta: the call of its own; prefill and decode do the same on their way. */
#include "engine.h"

#define TOKENS_PER_CLAIM 64

struct gating_job {
  struct gdn_ctx *ctx;
  const struct gdn_gating *gating;
  atomic_llong next;
};

/* Element i of x to head head + i of a token. */
static void scatter(const struct gdn_array *a, int64_t token, int head, const float *x, int n) {
  float *row = (float *)a->data + token * a->token_stride_elems + head * a->head_stride_elems;
  for (int i = 0; a->data && i < n; i++) row[i * a->head_stride_elems] = x[i];
}

/* Along the heads, which mostly are adjacent, so that a_log and dt_bias are vectors too. */
static void gate_token(const struct gating_job *job, int64_t token) {
  const struct gdn_batch *b = &job->gating->batch;
  _Alignas(GDN_ALIGN_BYTES) float g[GDN_CHUNK], beta[GDN_CHUNK];
  for (int head = 0; head < b->n_heads_v; head += GDN_CHUNK) {
    struct gdn_gates gates = gdn_batch_gates(b, token, head, 0);
    gates.n = b->n_heads_v - head < GDN_CHUNK ? b->n_heads_v - head : GDN_CHUNK;
    gates.as_log = 1;
    gates.g.stride_elems = b->g.head_stride_elems;
    gates.beta.stride_elems = b->beta.head_stride_elems;
    gates.a_log.stride_elems = gates.dt_bias.stride_elems = 1;
    gates.g_out = g;
    gates.beta_out = beta;
    job->ctx->kernels.gates(&gates);
    scatter(&job->gating->g, token, head, g, gates.n);
    scatter(&job->gating->beta, token, head, beta, gates.n);
  }
}

static void gating_worker(void *arg, int worker, int n_workers) {
  struct gating_job *job = arg;
  const int64_t n_tokens = job->gating->batch.n_tokens;
  (void)worker;
  (void)n_workers;
  for (;;) {
    int64_t token = atomic_fetch_add_explicit(&job->next, TOKENS_PER_CLAIM, memory_order_relaxed);
    if (token >= n_tokens) break;
    for (int64_t end = token + TOKENS_PER_CLAIM; token < end && token < n_tokens; token++) gate_token(job, token);
  }
}

void gdn_run_gating(gdn_ctx *ctx, const struct gdn_gating *gating) {
  struct gating_job job = {.ctx = ctx, .gating = gating};
  if (gating->batch.n_tokens) gdn_team_run(ctx->team, gating_worker, &job);
}
