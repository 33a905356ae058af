/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench decode: one step against a plain read-modify-write sweep over the same states. */
#include "bench.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "measure.h"

/* Whatever the build type: this stands for what a compiler makes of plain loops. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast")
#endif

/* ---- the sweep ---- */

#define CLAIMS_PER_WORKER 16

/* Blocks of 32 rows of a state, the unit that the library hands out too, claimed in runs. The sweep and the call
 * share one pool, so that either finds it in the caches as the other would. */
struct sweep {
  gdn_ctx *ctx;
  float *states;
  int64_t n_blocks, block_elems;
  void (*scale)(float *x, int64_t n, float factor);
  float factor; /* 1, which the compiler does not know: states keep their values */
  atomic_llong next;
};

static inline __attribute__((always_inline)) void scale(float *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i++) {
    x[i] *= factor;
  }
}

static void scale_sse2(float *x, int64_t n, float factor) {
  scale(x, n, factor);
}

BENCH_TARGET_AVX2 static void scale_avx2(float *x, int64_t n, float factor) {
  scale(x, n, factor);
}

BENCH_TARGET_AVX512 static void scale_avx512(float *x, int64_t n, float factor) {
  scale(x, n, factor);
}

static void sweep_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct sweep *s = arg;
  int64_t run = s->n_blocks / ((int64_t)n_workers * CLAIMS_PER_WORKER) + 1;
  (void)worker;
  for (int64_t first; (first = atomic_fetch_add(&s->next, run)) < s->n_blocks;) {
    int64_t n = first + run < s->n_blocks ? run : s->n_blocks - first;
    s->scale(s->states + first * s->block_elems, n * s->block_elems, s->factor);
  }
}

static int sweep_run(void *arg) {
  struct sweep *s = arg;
  atomic_store(&s->next, 0);
  return bench_check(gdn_ctx_run(s->ctx, sweep_worker, s), "gdn_ctx_run");
}

/* ---- the call ---- */

struct call {
  gdn_ctx *ctx;
  gdn_decode_args args;
};

static int call_run(void *arg) {
  struct call *c = arg;
  return bench_check(gdn_decode(c->ctx, &c->args), "gdn_decode");
}

enum { CASE_CALL, CASE_SWEEP, N_CASES };

struct decode {
  const struct bench_options *options;
  struct bench_session session;
  struct bench_batch batch;
  struct sweep sweep;
  struct call call;
  struct measure_case cases[N_CASES];
};

static void make_sweep(struct decode *d) {
  static void (*const scales[])(float *, int64_t, float) = {
      [BENCH_SSE2] = scale_sse2, [BENCH_AVX2] = scale_avx2, [BENCH_AVX512] = scale_avx512};
  struct sweep *s = &d->sweep;
  s->ctx = d->session.ctx;
  s->states = d->batch.states;
  s->block_elems = 32 * (int64_t)d->batch.dim_k;
  s->n_blocks = d->batch.n_seqs * batch_state_elems(&d->batch) / s->block_elems;
  s->scale = scales[bench_vectors_for(d->session.info.isa)];
  s->factor = 1.0f;
}

static void make_call(struct decode *d) {
  const struct bench_batch *b = &d->batch;
  const gdn_states pool = {.data = b->states, .n_rows = b->n_seqs, .dtype = GDN_F32};
  d->call = (struct call){.ctx = d->session.ctx,
                          .args = {.struct_size = sizeof d->call.args,
                                   .flags = GDN_L2NORM_QK,
                                   .n_seqs = b->n_seqs,
                                   .n_heads_k = b->heads,
                                   .n_heads_v = b->v_heads,
                                   .dim_k = b->dim_k,
                                   .dim_v = b->dim_v,
                                   .q = {.data = b->q, .dtype = GDN_BF16},
                                   .k = {.data = b->k, .dtype = GDN_BF16},
                                   .v = {.data = b->v, .dtype = GDN_BF16},
                                   .g = {.data = b->g, .dtype = GDN_F32},
                                   .beta = {.data = b->beta, .dtype = GDN_F32},
                                   .out = {.data = b->out, .dtype = GDN_BF16},
                                   .initial_state = pool,
                                   .final_state = pool}};
}

static int prepare(struct decode *d) {
  const struct bench_options *o = d->options;
  int status = bench_open(o, &d->session);
  if (status != BENCH_OK) {
    return status;
  }
  struct bench_batch *b = &d->batch;
  b->n_seqs = o->batch;
  b->n_tokens = o->batch;
  b->heads = (int)o->heads;
  b->v_heads = (int)o->v_heads;
  b->dim_k = (int)o->dim_k;
  b->dim_v = (int)o->dim_v;
  status = batch_create(b, d->session.ctx, false);
  if (status == BENCH_OK) {
    make_sweep(d);
    make_call(d);
  }
  return status;
}

static int measure(struct decode *d) {
  d->cases[CASE_CALL] = (struct measure_case){.run = call_run, .arg = &d->call};
  d->cases[CASE_SWEEP] = (struct measure_case){.run = sweep_run, .arg = &d->sweep};
  return measure_interleaved(d->cases, N_CASES, d->options->seconds, "decode");
}

/* ---- report ---- */

/* Every state is read once and written once. */
static double moved_bytes(const struct decode *d) {
  return 2.0 * sizeof(float) * (double)batch_state_elems(&d->batch) * (double)d->batch.n_seqs;
}

static double bytes_per_s(const struct decode *d, int which) {
  return moved_bytes(d) / d->cases[which].stats.median_us * 1e6;
}

static double efficiency(const struct decode *d) {
  return d->cases[CASE_SWEEP].stats.median_us / d->cases[CASE_CALL].stats.median_us;
}

static void stats_json(struct json *j, const struct measure_stats *s) {
  json_number(j, "median_us", s->median_us);
  json_number(j, "p10_us", s->p10_us);
  json_number(j, "p90_us", s->p90_us);
  json_int(j, "runs", s->runs);
  json_int(j, "calls_per_run", s->calls_per_run);
}

static void print_json(const struct decode *d) {
  struct json j = {.file = stdout};
  const struct bench_batch *b = &d->batch;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "decode");
  json_int(&j, "batch", b->n_seqs);
  json_int(&j, "heads", b->heads);
  json_int(&j, "v_heads", b->v_heads);
  json_int(&j, "dim_k", b->dim_k);
  json_int(&j, "dim_v", b->dim_v);
  json_string(&j, "isa", d->session.info.isa);
  json_int(&j, "threads", d->session.info.n_threads);
  stats_json(&j, &d->cases[CASE_CALL].stats);
  json_number(&j, "tokens_per_s", (double)b->n_seqs / d->cases[CASE_CALL].stats.median_us * 1e6);
  json_number(&j, "moved_bytes", moved_bytes(d));
  json_number(&j, "state_bytes_per_s", bytes_per_s(d, CASE_CALL));
  json_number(&j, "rmw_bytes_per_s", bytes_per_s(d, CASE_SWEEP));
  json_number(&j, "efficiency", efficiency(d));
  json_int(&j, "scratch_bytes", (int64_t)bench_scratch_bytes(&d->session));
  json_begin_object(&j, "rmw");
  stats_json(&j, &d->cases[CASE_SWEEP].stats);
  json_end_object(&j);
  bench_conditions_json(&j, &d->session);
  json_end_object(&j);
}

static int print_text(const struct decode *d) {
  static const char *const headers[] = {"", "median us", "p10", "p90", "runs", "GB/s"};
  static const char *const names[] = {[CASE_CALL] = "decode", [CASE_SWEEP] = "read-modify-write sweep"};
  const struct bench_batch *b = &d->batch;
  bench_conditions_print(&d->session);
  printf("decode of %lld sequence%s, heads %d, value heads %d, K %d, V %d: %.1f MB of states read and written\n\n",
         (long long)b->n_seqs, b->n_seqs == 1 ? "" : "s", b->heads, b->v_heads, b->dim_k, b->dim_v,
         moved_bytes(d) * 0.5e-6);
  struct table t;
  table_begin(&t, 6, headers);
  for (int i = 0; i < N_CASES; i++) {
    const struct measure_stats *s = &d->cases[i].stats;
    table_cell(&t, "%s", names[i]);
    table_cell(&t, "%.1f", s->median_us);
    table_cell(&t, "%.1f", s->p10_us);
    table_cell(&t, "%.1f", s->p90_us);
    table_cell(&t, "%lld", (long long)s->runs);
    table_cell(&t, "%.2f", bytes_per_s(d, i) * 1e-9);
  }
  bool complete = table_end(&t, stdout);
  printf("\nefficiency %.3f, %.0f tokens/s\n", efficiency(d),
         (double)b->n_seqs / d->cases[CASE_CALL].stats.median_us * 1e6);
  return complete ? BENCH_OK : bench_error("out of memory for the table");
}

int bench_decode(const struct bench_options *o) {
  struct decode d = {.options = o};
  int status = prepare(&d);
  if (status == BENCH_OK) {
    status = measure(&d);
  }
  if (status == BENCH_OK && o->json) {
    print_json(&d);
  } else if (status == BENCH_OK) {
    status = print_text(&d);
  }
  batch_destroy(&d.batch);
  bench_close(&d.session);
  return status;
}
