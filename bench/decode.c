/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench decode: one step, of one or several tokens per sequence, against a plain read-modify-write sweep over the
 * same states. */
#include "bench.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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
  bench_scale_fn scale;
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

bench_scale_fn bench_scale_for(const char *isa) {
  static const bench_scale_fn scales[] = {
      [BENCH_SSE2] = scale_sse2, [BENCH_AVX2] = scale_avx2, [BENCH_AVX512] = scale_avx512};
  return scales[bench_vectors_for(isa)];
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

/* The last two with several tokens only, of which CALL then is a verify: no state is written. */
enum { CASE_CALL, CASE_SWEEP, CASE_ONE_TOKEN, CASE_COMMIT, N_CASES };

struct decode {
  const struct bench_options *options;
  struct bench_session session;
  struct bench_batch batch;
  struct sweep sweep;
  struct call calls[N_CASES];
  struct measure_case cases[N_CASES];
  int n_cases;
};

static int64_t state_bytes(const struct decode *d) {
  const int64_t elem_bytes = d->options->state == GDN_F32 ? 4 : 2;
  return d->batch.n_seqs * batch_state_elems(&d->batch) * elem_bytes;
}

/* The states as 16-bit numbers in the first half of their memory: there is always one of those at or before the float
 * that it is made from. */
static void narrow_states(struct decode *d) {
  const int64_t n = d->batch.n_seqs * batch_state_elems(&d->batch);
  char *states = (char *)d->batch.states;
  for (int64_t i = 0; i < n; i++) {
    float x;
    memcpy(&x, states + i * 4, 4);
    const uint16_t narrow = d->options->state == GDN_F16 ? 0x2c00 /* 2^-4 */ : bench_f32_to_bf16(x);
    memcpy(states + i * 2, &narrow, 2);
  }
}

static void make_sweep(struct decode *d) {
  struct sweep *s = &d->sweep;
  s->ctx = d->session.ctx;
  s->states = d->batch.states;
  s->block_elems = 32 * (int64_t)d->batch.dim_k;
  s->n_blocks = state_bytes(d) / (int64_t)sizeof(float) / s->block_elems;
  s->scale = bench_scale_for(d->session.info.isa);
  s->factor = 1.0f;
}

static void use_raw_gates(gdn_decode_args *args) {
  static const float zeros[4096];
  args->raw_gates = (gdn_raw_gates){.a = args->g, .b = args->beta, .a_log = zeros, .dt_bias = zeros};
  args->g.data = args->beta.data = NULL;
}

gdn_decode_args bench_decode_args(const struct bench_batch *b, const struct bench_options *o) {
  const gdn_states pool = {.data = b->states, .n_rows = b->n_seqs, .dtype = o->state, .layout = o->layout};
  gdn_decode_args args = {.struct_size = sizeof args,
                          .flags = GDN_L2NORM_QK,
                          .n_seqs = b->n_seqs,
                          .n_tokens = (int32_t)o->tokens,
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
                          .final_state = pool};
  if (o->raw_gates) {
    use_raw_gates(&args);
  }
  return args;
}

static void make_calls(struct decode *d) {
  const struct bench_options *o = d->options;
  const gdn_decode_args args = bench_decode_args(&d->batch, o);
  for (int i = 0; i < N_CASES; i++) {
    d->calls[i] = (struct call){.ctx = d->session.ctx, .args = args};
  }
  d->calls[CASE_ONE_TOKEN].args.n_tokens = 1;
  d->calls[CASE_COMMIT].args.out.data = NULL;
  if (o->tokens > 1) {
    d->calls[CASE_CALL].args.final_state.data = NULL;
  }
}

static int prepare(struct decode *d) {
  const struct bench_options *o = d->options;
  int status = bench_open(o, &d->session);
  if (status != BENCH_OK) {
    return status;
  }
  struct bench_batch *b = &d->batch;
  b->n_seqs = o->batch;
  b->n_tokens = o->batch * o->tokens;
  b->heads = (int)o->heads;
  b->v_heads = (int)o->v_heads;
  b->dim_k = (int)o->dim_k;
  b->dim_v = (int)o->dim_v;
  status = batch_create(b, d->session.ctx, false);
  if (status == BENCH_OK) {
    if (o->state != GDN_F32) {
      narrow_states(d);
    }
    make_sweep(d);
    make_calls(d);
  }
  return status;
}

static int measure(struct decode *d) {
  d->n_cases = d->options->tokens > 1 ? N_CASES : CASE_ONE_TOKEN;
  for (int i = 0; i < N_CASES; i++) {
    d->cases[i] = (struct measure_case){.run = call_run, .arg = &d->calls[i]};
  }
  d->cases[CASE_SWEEP] = (struct measure_case){.run = sweep_run, .arg = &d->sweep};
  return measure_interleaved(d->cases, d->n_cases, d->options->seconds, "decode");
}

/* ---- report ---- */

/* Every state is read once, and written once but by a verify. */
static double moved_bytes(const struct decode *d, int which) {
  const int written = which != CASE_CALL || d->options->tokens == 1;
  return (1.0 + written) * (double)state_bytes(d);
}

static double bytes_per_s(const struct decode *d, int which) {
  return moved_bytes(d, which) / d->cases[which].stats.median_us * 1e6;
}

static double efficiency(const struct decode *d) {
  return d->cases[CASE_SWEEP].stats.median_us / d->cases[CASE_CALL].stats.median_us;
}

/* Time of a verify of all tokens, in calls of one token. */
static double over_one_token(const struct decode *d) {
  return d->cases[CASE_CALL].stats.median_us / d->cases[CASE_ONE_TOKEN].stats.median_us;
}

static const char *state_name(const struct decode *d) {
  return d->options->state == GDN_F32 ? "f32" : d->options->state == GDN_BF16 ? "bf16" : "f16";
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
  json_int(&j, "tokens", d->options->tokens);
  json_string(&j, "state", state_name(d));
  json_string(&j, "layout", d->options->layout == GDN_LAYOUT_KV ? "kv" : "vk");
  json_string(&j, "gates", d->options->raw_gates ? "raw" : "given");
  json_string(&j, "isa", d->session.info.isa);
  json_int(&j, "threads", d->session.info.n_threads);
  stats_json(&j, &d->cases[CASE_CALL].stats);
  json_number(&j, "tokens_per_s", (double)b->n_tokens / d->cases[CASE_CALL].stats.median_us * 1e6);
  json_number(&j, "moved_bytes", moved_bytes(d, CASE_CALL));
  json_number(&j, "state_bytes_per_s", bytes_per_s(d, CASE_CALL));
  json_number(&j, "rmw_bytes_per_s", bytes_per_s(d, CASE_SWEEP));
  json_number(&j, "efficiency", efficiency(d));
  json_int(&j, "scratch_bytes", (int64_t)bench_scratch_bytes(&d->session));
  json_begin_object(&j, "rmw");
  stats_json(&j, &d->cases[CASE_SWEEP].stats);
  json_end_object(&j);
  for (int i = CASE_ONE_TOKEN; i < d->n_cases; i++) {
    json_begin_object(&j, i == CASE_COMMIT ? "commit" : "one_token");
    stats_json(&j, &d->cases[i].stats);
    json_end_object(&j);
  }
  if (d->n_cases > CASE_ONE_TOKEN) {
    json_number(&j, "over_one_token", over_one_token(d));
  }
  bench_conditions_json(&j, &d->session);
  json_end_object(&j);
}

static int print_text(const struct decode *d) {
  static const char *const headers[] = {"", "median us", "p10", "p90", "runs", "GB/s"};
  static const char *const names[] = {[CASE_CALL] = "decode",
                                      [CASE_SWEEP] = "read-modify-write sweep",
                                      [CASE_ONE_TOKEN] = "decode of one token",
                                      [CASE_COMMIT] = "commit of all tokens"};
  const struct bench_batch *b = &d->batch;
  bench_conditions_print(&d->session);
  printf(
      "decode of %lld sequence%s, tokens %lld, heads %d, value heads %d, K %d, V %d: %.1f MB of %s states, layout %s, "
      "gates %s\n\n",
      (long long)b->n_seqs, b->n_seqs == 1 ? "" : "s", (long long)d->options->tokens, b->heads, b->v_heads, b->dim_k,
      b->dim_v, (double)state_bytes(d) * 1e-6, state_name(d), d->options->layout == GDN_LAYOUT_KV ? "kv" : "vk",
      d->options->raw_gates ? "raw" : "given");
  struct table t;
  table_begin(&t, 6, headers);
  for (int i = 0; i < d->n_cases; i++) {
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
         (double)b->n_tokens / d->cases[CASE_CALL].stats.median_us * 1e6);
  if (d->n_cases > CASE_ONE_TOKEN) {
    printf("%lld tokens take %.2f times as long as one\n", (long long)d->options->tokens, over_one_token(d));
  }
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
