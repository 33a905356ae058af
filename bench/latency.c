/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench latency: what a call costs beside its work: checks, handing a job to the workers, waking them. */
#include "bench.h"

#include <stdlib.h>
#include <time.h>

#include "measure.h"

/* Longer than workers wait before they sleep. */
#define ASLEEP_NS 1000000
#define CALLS_PER_RUN 100
#define RUNS_MAX 4096

enum { DIM = 32 };

/* One way of calling, in rows or each call after a pause. */
struct latency_case {
  const char *key, *name;
  int (*call)(gdn_ctx *ctx);
  bool after_pause;
  struct measure_stats stats;
};

static int call_empty(gdn_ctx *ctx) {
  const gdn_decode_args args = {.struct_size = sizeof args, .n_heads_k = 1, .n_heads_v = 1, .dim_k = DIM, .dim_v = DIM};
  return bench_check(gdn_decode(ctx, &args), "gdn_decode");
}

static void do_nothing(void *arg, int32_t worker, int32_t n_workers) {
  (void)arg;
  (void)worker;
  (void)n_workers;
}

static int call_workers(gdn_ctx *ctx) {
  return bench_check(gdn_ctx_run(ctx, do_nothing, NULL), "gdn_ctx_run");
}

static int call_small(gdn_ctx *ctx) {
  static uint16_t qkv[DIM], out[DIM];
  const gdn_decode_args args = {.struct_size = sizeof args,
                                .n_seqs = 1,
                                .n_heads_k = 1,
                                .n_heads_v = 1,
                                .dim_k = DIM,
                                .dim_v = DIM,
                                .q = {.data = qkv},
                                .k = {.data = qkv},
                                .v = {.data = qkv},
                                .out = {.data = out}};
  return bench_check(gdn_decode(ctx, &args), "gdn_decode");
}

static const struct latency_case cases[] = {
    {.key = "empty_call", .name = "decode of no sequences", .call = call_empty},
    {.key = "hand_over", .name = "empty job, workers awake", .call = call_workers},
    {.key = "wake_up", .name = "empty job, workers asleep", .call = call_workers, .after_pause = true},
    {.key = "small_call", .name = "decode of one small head, awake", .call = call_small},
    {.key = "small_call_asleep", .name = "the same, asleep", .call = call_small, .after_pause = true},
};

enum { N_CASES = sizeof cases / sizeof *cases, N_POINTS_MAX = 2 };

/* A context of one size and its cases. */
struct point {
  struct bench_session session;
  struct latency_case cases[N_CASES];
};

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* us: of one call. */
static int time_run(gdn_ctx *ctx, const struct latency_case *c, int n_calls, double *us) {
  const struct timespec pause = {.tv_nsec = ASLEEP_NS};
  if (c->after_pause) {
    nanosleep(&pause, NULL);
  }
  const double start_us = measure_now_us();
  for (int i = 0; i < n_calls; i++) {
    int status = c->call(ctx);
    if (status != BENCH_OK) {
      return status;
    }
  }
  *us = (measure_now_us() - start_us) / n_calls;
  return BENCH_OK;
}

static int measure_case(gdn_ctx *ctx, struct latency_case *c, double seconds) {
  static double us[RUNS_MAX];
  const double end_us = measure_now_us() + seconds * 1e6;
  const int n_calls = c->after_pause ? 1 : CALLS_PER_RUN;
  int n = 0;
  do {
    int status = time_run(ctx, c, n_calls, &us[n++]);
    if (status != BENCH_OK) {
      return status;
    }
  } while (n < RUNS_MAX && (n < 5 || measure_now_us() < end_us));
  qsort(us, (size_t)n, sizeof *us, compare);
  c->stats = (struct measure_stats){
      .median_us = us[n / 2], .p10_us = us[n / 10], .p90_us = us[n * 9 / 10], .runs = n, .calls_per_run = n_calls};
  return BENCH_OK;
}

static int measure_point(struct point *p, const struct bench_options *o, double seconds) {
  int status = bench_open(o, &p->session);
  for (int i = 0; i < N_CASES && status == BENCH_OK; i++) {
    p->cases[i] = cases[i];
    measure_progress("latency: %d threads, %s", p->session.info.n_threads, cases[i].name);
    status = call_small(p->session.ctx);
    if (status == BENCH_OK) {
      status = measure_case(p->session.ctx, &p->cases[i], seconds / N_CASES);
    }
  }
  measure_progress_clear();
  return status;
}

/* ---- report ---- */

static void print_json(const struct point *points, int n_points) {
  struct json j = {.file = stdout};
  json_begin_object(&j, NULL);
  json_string(&j, "command", "latency");
  json_string(&j, "isa", points[0].session.info.isa);
  json_begin_array(&j, "points");
  for (int p = 0; p < n_points; p++) {
    json_begin_object(&j, NULL);
    json_int(&j, "threads", points[p].session.info.n_threads);
    for (int i = 0; i < N_CASES; i++) {
      json_begin_object(&j, cases[i].key);
      measure_json(&j, &points[p].cases[i].stats);
      json_end_object(&j);
    }
    json_end_object(&j);
  }
  json_end_array(&j);
  bench_conditions_json(&j, &points[n_points - 1].session);
  json_end_object(&j);
}

static int print_text(const struct point *points, int n_points) {
  static const char *const headers[] = {"", "threads", "median us", "p10", "p90", "runs"};
  bench_conditions_print(&points[n_points - 1].session);
  printf("\n");
  struct table t;
  table_begin(&t, 6, headers);
  for (int i = 0; i < N_CASES; i++) {
    for (int p = 0; p < n_points; p++) {
      table_cell(&t, "%s", cases[i].name);
      table_cell(&t, "%d", points[p].session.info.n_threads);
      measure_cells(&t, &points[p].cases[i].stats, 2);
    }
  }
  return table_end(&t, stdout) ? BENCH_OK : bench_error("out of memory for the table");
}

/* One thread and all of them, one context after the other; or what --threads asks for. */
int bench_latency(const struct bench_options *o) {
  static struct point points[N_POINTS_MAX];
  struct bench_options at = *o;
  int n_points = 0, status = BENCH_OK;
  for (int p = 0; p < N_POINTS_MAX && status == BENCH_OK; p++) {
    at.threads = o->threads ? o->threads : p == 0 ? 1 : 0;
    status = measure_point(&points[p], &at, o->seconds / N_POINTS_MAX);
    n_points++;
    if (o->threads) {
      break;
    }
  }
  if (status == BENCH_OK && o->json) {
    print_json(points, n_points);
  } else if (status == BENCH_OK) {
    status = print_text(points, n_points);
  }
  for (int p = 0; p < n_points; p++) {
    bench_close(&points[p].session);
  }
  return status;
}
