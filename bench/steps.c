/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench steps: where the time of a chunk goes. One worker takes every primitive of the chunk form through a batch
 * as a lane does, with the clock read between them. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <x86intrin.h>

#include "kernels/gemm.h"
#include "kernels/kernels.h"
#include "measure.h"
#include "platform.h"

#define ROUNDS_MIN 5
#define ROUNDS_MAX 1000
#define ARENA_BYTES ((size_t)8 << 20)
/* Dependent multiplications of four cycles each, to tell the core's clock. */
#define CHAIN_LENGTH 20000
#define CHAIN_CYCLES (4.0 * CHAIN_LENGTH)

enum { STEP_QK, STEP_GATES, STEP_MASK, STEP_SOLVE, STEP_DELTA, STEP_OUT, STEP_STATE, N_STEPS };
static const char *const step_names[N_STEPS] = {"qk", "gates", "mask", "solve", "delta", "out", "state"};

struct steps {
  const struct bench_options *options;
  struct bench_session session;
  struct bench_batch batch;
  struct gdn_kernels kernels;
  struct gdn_gemms gemms;
  struct gdn_chunk chunk; /* its buffers */
  char *arena;
  float *states[2]; /* state and state_op of a q/k head's value heads */
  int64_t n_qk, n_heads;
  uint64_t ticks[N_STEPS];        /* of one round */
  double us[N_STEPS][ROUNDS_MAX]; /* of one call of the step, by round */
  double total_us[ROUNDS_MAX];    /* of a value head and chunk */
  double cycles_per_us[ROUNDS_MAX];
  struct measure_stats stats[N_STEPS], total, clock;
  int64_t n_rounds;
};

/* ---- one lane ---- */

static void *take(char **at, int64_t elems, int64_t elem_bytes) {
  void *taken = *at;
  *at += (elems * elem_bytes + GDN_ALIGN_BYTES - 1) / GDN_ALIGN_BYTES * GDN_ALIGN_BYTES;
  return taken;
}

static int place(struct steps *s) {
  const struct bench_batch *b = &s->batch;
  const int64_t square = GDN_CHUNK * GDN_CHUNK, k = GDN_CHUNK * b->dim_k, v = GDN_CHUNK * b->dim_v;
  const int group = b->v_heads / b->heads;
  char *at = s->arena = bench_alloc((int64_t)ARENA_BYTES + 2 * (int64_t)group * b->dim_k * b->dim_v * 4, 1);
  if (!at) return bench_error("out of memory for a chunk's buffers");
  struct gdn_chunk *c = &s->chunk;
  *c = (struct gdn_chunk){.dim_k = b->dim_k,
                          .dim_v = b->dim_v,
                          .l2norm = 1,
                          .scale = 1 / sqrtf((float)b->dim_k),
                          .eps = 1e-6F,
                          .gemms = &s->gemms};
  void **const passing[] = {(void **)&c->kk, (void **)&c->qk, (void **)&c->l};
  void **const of_k[] = {&c->q, &c->k, &c->kt};
  void **const of_v[] = {&c->resid, (void **)&c->inter, &c->delta, &c->delta_out};
  void **const rows[] = {(void **)&c->q_mult,    (void **)&c->k_mult,   (void **)&c->gate_hi,   (void **)&c->gate_lo,
                         (void **)&c->decay,     (void **)&c->decay_in, (void **)&c->decay_out, (void **)&c->beta,
                         (void **)&c->decay_all, (void **)&c->steep};
  c->hot = take(&at, GDN_HOT_BYTES, 1);
  for (size_t i = 0; i < sizeof passing / sizeof *passing; i++) *passing[i] = take(&at, square, 4);
  for (size_t i = 0; i < sizeof of_v / sizeof *of_v; i++) *of_v[i] = take(&at, v, 4);
  c->delta_f32 = c->delta;
  for (size_t i = 0; i < sizeof of_k / sizeof *of_k; i++) *of_k[i] = take(&at, k, 4);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = take(&at, GDN_CHUNK, 4);
  c->qk_op = take(&at, square, 2);
  c->a = take(&at, square, 4);
  c->t = take(&at, square, 4);
  for (int i = 0; i < 2; i++) s->states[i] = take(&at, (int64_t)group * b->dim_k * b->dim_v, 4);
  return BENCH_OK;
}

/* The rows of a head, from token on. */
static struct gdn_rows rows_of(const void *x, int32_t dtype, int64_t token, int head, int heads, int dim) {
  const int64_t at = (token * heads + head) * dim * (dtype == GDN_ROWS_F32 ? 4 : 2);
  return (struct gdn_rows){(const char *)x + at, (int64_t)heads * dim, dtype};
}

static void lap(struct steps *s, int step, uint64_t *since) {
  const uint64_t now = __rdtsc();
  s->ticks[step] += now - *since;
  *since = now;
}

static void run_head(struct steps *s, int head_v, int head_of_group, int64_t token, int zero, uint64_t *clock) {
  const struct bench_batch *b = &s->batch;
  const struct gdn_kernels *k = &s->kernels;
  struct gdn_chunk *c = &s->chunk;
  const int64_t state = (int64_t)head_of_group * b->dim_k * b->dim_v;
  c->g_rows = rows_of(b->g, GDN_ROWS_F32, token, head_v, b->v_heads, 1);
  c->beta_rows = rows_of(b->beta, GDN_ROWS_F32, token, head_v, b->v_heads, 1);
  c->v_rows = rows_of(b->v, GDN_ROWS_BF16, token, head_v, b->v_heads, b->dim_v);
  c->next_v = rows_of(b->v, GDN_ROWS_BF16, token + c->n, head_v, b->v_heads, b->dim_v);
  c->out_rows = (struct gdn_rows_out){b->out + (token * b->v_heads + head_v) * b->dim_v, (int64_t)b->v_heads * b->dim_v,
                                      GDN_ROWS_BF16};
  c->state = s->states[0] + state;
  c->state_op = s->states[1] + state;
  c->zero_state = k->knows_zero && zero;
  k->chunk_gates(c);
  lap(s, STEP_GATES, clock);
  k->chunk_mask(c);
  lap(s, STEP_MASK, clock);
  k->chunk_solve(c);
  lap(s, STEP_SOLVE, clock);
  if (zero && !c->zero_state) {
    memset(c->state, 0, (size_t)b->dim_k * (size_t)b->dim_v * sizeof *c->state);
    k->chunk_begin(c, 0, b->dim_v);
    *clock = __rdtsc();
  }
  for (int col = 0; col < b->dim_v; col += k->scan_cols) {
    const int n_cols = b->dim_v - col < k->scan_cols ? b->dim_v - col : k->scan_cols;
    k->chunk_delta(c, col, n_cols);
    lap(s, STEP_DELTA, clock);
    k->chunk_out(c, col, n_cols);
    lap(s, STEP_OUT, clock);
    k->chunk_state(c, col, n_cols);
    lap(s, STEP_STATE, clock);
  }
  s->n_heads++;
}

static void run_lane(struct steps *s, int head, int64_t token, int64_t stop) {
  const struct bench_batch *b = &s->batch;
  struct gdn_chunk *c = &s->chunk;
  const int group = b->v_heads / b->heads;
  for (const int64_t start = token; token < stop; token += c->n) {
    const int64_t left = stop - token, after = left - GDN_CHUNK;
    c->n = left < GDN_CHUNK ? (int)left : GDN_CHUNK;
    c->n16 = (c->n + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK;
    c->next_n = after < 0 ? 0 : after < GDN_CHUNK ? (int)after : GDN_CHUNK;
    c->q_rows = rows_of(b->q, GDN_ROWS_BF16, token, head, b->heads, b->dim_k);
    c->k_rows = rows_of(b->k, GDN_ROWS_BF16, token, head, b->heads, b->dim_k);
    uint64_t clock = __rdtsc();
    s->kernels.chunk_qk(c);
    lap(s, STEP_QK, &clock);
    s->n_qk++;
    for (int i = 0; i < group; i++) {
      c->next_k = c->next_q = (struct gdn_rows){NULL, 0, 0};
      if (i == 0) c->next_k = rows_of(b->k, GDN_ROWS_BF16, token + c->n, head, b->heads, b->dim_k);
      if (i == group - 1) c->next_q = rows_of(b->q, GDN_ROWS_BF16, token + c->n, head, b->heads, b->dim_k);
      run_head(s, head * group + i, i, token, token == start, &clock);
    }
  }
}

/* ---- rounds ---- */

static double chain(void) {
  double x = 1;
  const double start = measure_now_us();
  for (int i = 0; i < CHAIN_LENGTH; i++) __asm__ volatile("mulsd %0, %0" : "+x"(x));
  return CHAIN_CYCLES / (measure_now_us() - start);
}

static void run_round(struct steps *s) {
  const struct bench_batch *b = &s->batch;
  const int64_t r = s->n_rounds++;
  memset(s->ticks, 0, sizeof s->ticks);
  s->n_qk = s->n_heads = 0;
  s->cycles_per_us[r] = chain();
  const double start = measure_now_us();
  const uint64_t first = __rdtsc();
  for (int64_t seq = 0; seq < b->n_seqs; seq++)
    for (int head = 0; head < b->heads; head++) run_lane(s, head, b->cu_seqlens[seq], b->cu_seqlens[seq + 1]);
  const double us = measure_now_us() - start, us_per_tick = us / (double)(__rdtsc() - first);
  for (int i = 0; i < N_STEPS; i++)
    s->us[i][r] = (double)s->ticks[i] * us_per_tick / (double)(i == STEP_QK ? s->n_qk : s->n_heads);
  s->total_us[r] = us / (double)s->n_heads;
}

static void steps_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct steps *s = arg;
  (void)n_workers;
  if (worker != 0) return;
  const uint32_t saved = s->kernels.thread_begin();
  run_round(s); /* warms up */
  s->n_rounds = 0;
  const double end = measure_now_us() + s->options->seconds * 1e6;
  while (s->n_rounds < ROUNDS_MIN || (s->n_rounds < ROUNDS_MAX && measure_now_us() < end)) run_round(s);
  s->kernels.thread_end(saved);
}

static int measure(struct steps *s) {
  int status = bench_check(gdn_ctx_run(s->session.ctx, steps_worker, s), "gdn_ctx_run");
  if (status != BENCH_OK) return status;
  for (int i = 0; i < N_STEPS; i++) {
    s->stats[i] = measure_percentiles(s->us[i], s->n_rounds);
    s->stats[i].calls_per_run = i == STEP_QK ? s->n_qk : s->n_heads;
  }
  s->total = measure_percentiles(s->total_us, s->n_rounds);
  s->total.calls_per_run = s->n_heads;
  s->clock = measure_percentiles(s->cycles_per_us, s->n_rounds);
  return BENCH_OK;
}

/* ---- report ---- */

static int64_t chunk_count(const struct steps *s) {
  return s->n_heads / s->batch.v_heads;
}

static void print_json(const struct steps *s) {
  struct json j = {.file = stdout};
  const struct bench_batch *b = &s->batch;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "steps");
  json_string(&j, "lens", s->options->lens);
  json_int(&j, "heads", b->heads);
  json_int(&j, "v_heads", b->v_heads);
  json_int(&j, "dim_k", b->dim_k);
  json_int(&j, "dim_v", b->dim_v);
  json_string(&j, "isa", s->kernels.tier);
  json_int(&j, "chunks", chunk_count(s));
  json_number(&j, "core_cycles_per_us", s->clock.median_us);
  json_begin_object(&j, "value_head_and_chunk");
  measure_json(&j, &s->total);
  json_end_object(&j);
  for (int i = 0; i < N_STEPS; i++) {
    json_begin_object(&j, step_names[i]);
    measure_json(&j, &s->stats[i]);
    json_end_object(&j);
  }
  bench_conditions_json(&j, &s->session);
  json_end_object(&j);
}

static void step_row(struct table *t, const struct steps *s, const char *name, const struct measure_stats *stats) {
  table_cell(t, "%s", name);
  measure_cells(t, stats, 2);
  table_cell(t, "%.1f", stats->median_us * s->clock.median_us * 1e-3);
}

static int print_text(const struct steps *s) {
  static const char *const headers[] = {"step", "median us", "p10", "p90", "rounds", "thousand cycles"};
  bench_conditions_print(&s->session);
  printf("steps of %s, heads %d, value heads %d, K %d, V %d; qk per chunk and q/k head, others per value head\n\n",
         s->options->lens, s->batch.heads, s->batch.v_heads, s->batch.dim_k, s->batch.dim_v);
  struct table t;
  table_begin(&t, 6, headers);
  for (int i = 0; i < N_STEPS; i++) step_row(&t, s, step_names[i], &s->stats[i]);
  step_row(&t, s, "value head and chunk", &s->total);
  return table_end(&t, stdout) ? BENCH_OK : bench_error("out of memory for the table");
}

static int tier_of(const char *name) {
  for (int i = 0; i < gdn_n_tiers; i++)
    if (strcmp(gdn_tiers[i].name, name) == 0) return i;
  return 0;
}

int bench_steps(const struct bench_options *o) {
  struct steps *s = calloc(1, sizeof *s);
  if (!s) return bench_error("out of memory for the rounds");
  s->options = o;
  struct bench_options one = *o;
  one.threads = 1;
  struct bench_batch *b = &s->batch;
  *b = (struct bench_batch){
      .heads = (int)o->heads, .v_heads = (int)o->v_heads, .dim_k = (int)o->dim_k, .dim_v = (int)o->dim_v};
  int status = bench_parse_lens(o->lens, b);
  if (status == BENCH_OK && b->v_heads % b->heads != 0)
    status = bench_error("--heads %d, --v-heads %d: expected a multiple of the first", b->heads, b->v_heads);
  if (status == BENCH_OK && (b->dim_k % GDN_PANEL != 0 || b->dim_v % GDN_PANEL != 0))
    status = bench_error("--dim-k %d, --dim-v %d: expected multiples of %d", b->dim_k, b->dim_v, GDN_PANEL);
  if (status == BENCH_OK) status = bench_open(&one, &s->session);
  if (status == BENCH_OK) status = batch_create(b, s->session.ctx, false);
  if (status == BENCH_OK) {
    gdn_kernels_fill(&s->kernels, tier_of(s->session.info.isa));
    gdn_gemms_make(&s->gemms, b->dim_k, b->dim_v, 1);
    status = place(s);
  }
  if (status == BENCH_OK) status = measure(s);
  if (status == BENCH_OK && o->json)
    print_json(s);
  else if (status == BENCH_OK)
    status = print_text(s);
  free(s->arena);
  batch_destroy(b);
  bench_close(&s->session);
  free(s);
  return status;
}
