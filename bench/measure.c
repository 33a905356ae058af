/* SPDX-License-Identifier: Apache-2.0
 * Clock, percentiles and the interleaving of the things measured. */
#include "measure.h"

#include "bench.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define RUNS_MIN 5
#define RUNS_MAX 20000
#define WARM_UP_CALLS 2
/* A sample lasts at least so long: the clock and waking the workers then cost under a hundredth of it. */
#define SAMPLE_MIN_US 500.0
#define CALLS_MAX 10000

double measure_now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

void measure_json(struct json *j, const struct measure_stats *s) {
  json_number(j, "median_us", s->median_us);
  json_number(j, "p10_us", s->p10_us);
  json_number(j, "p90_us", s->p90_us);
  json_int(j, "runs", s->runs);
  json_int(j, "calls_per_run", s->calls_per_run);
}

void measure_cells(struct table *t, const struct measure_stats *s, int decimals) {
  table_cell(t, "%.*f", decimals, s->median_us);
  table_cell(t, "%.*f", decimals, s->p10_us);
  table_cell(t, "%.*f", decimals, s->p90_us);
  table_cell(t, "%lld", (long long)s->runs);
}

static int compare_doubles(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Of sorted values; between two ranks the straight line. */
static double percentile(const double *sorted, int64_t n, double fraction) {
  double rank = fraction * (double)(n - 1);
  int64_t below = (int64_t)rank;
  int64_t above = below + 1 < n ? below + 1 : below;
  return sorted[below] + (rank - (double)below) * (sorted[above] - sorted[below]);
}

struct measure_stats measure_percentiles(double *values, int64_t n) {
  qsort(values, (size_t)n, sizeof *values, compare_doubles);
  return (struct measure_stats){.median_us = percentile(values, n, 0.5),
                                .p10_us = percentile(values, n, 0.1),
                                .p90_us = percentile(values, n, 0.9),
                                .runs = n};
}

static int time_calls(const struct measure_case *c, int64_t n_calls, double *call_us) {
  double start = measure_now_us();
  for (int64_t i = 0; i < n_calls; i++) {
    int status = c->run(c->arg);
    if (status != 0) {
      return status;
    }
  }
  *call_us = (measure_now_us() - start) / (double)n_calls;
  return 0;
}

/* The first calls touch memory and generate code; the last one tells how many calls make a sample. */
static int warm_up(struct measure_case *c) {
  double call_us = 0;
  for (int i = 0; i < WARM_UP_CALLS; i++) {
    int status = time_calls(c, 1, &call_us);
    if (status != 0) {
      return status;
    }
  }
  double calls = ceil(SAMPLE_MIN_US / fmax(call_us, SAMPLE_MIN_US / CALLS_MAX));
  c->stats.calls_per_run = (int64_t)calls;
  return 0;
}

void measure_progress(const char *format, ...) {
  if (!isatty(STDERR_FILENO)) {
    return;
  }
  va_list args;
  fputs("\r\033[K", stderr);
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fflush(stderr);
}

void measure_progress_clear(void) {
  measure_progress("%s", "");
}

/* samples [n_cases][RUNS_MAX]; *n_runs counts complete rounds. */
static int run_rounds(struct measure_case *cases, int n_cases, double seconds, const char *label, double *samples,
                      int64_t *n_runs) {
  double start = measure_now_us();
  double shown = 0;
  for (*n_runs = 0; *n_runs < RUNS_MAX; ++*n_runs) {
    double spent = measure_now_us() - start;
    if (*n_runs >= RUNS_MIN && spent >= seconds * 1e6) {
      break;
    }
    if (spent - shown > 1e5 || *n_runs == 0) {
      measure_progress("%s: run %lld, %.1f of %.1f s", label, (long long)*n_runs + 1, spent * 1e-6, seconds);
      shown = spent;
    }
    for (int i = 0; i < n_cases; i++) {
      if (!cases[i].run) {
        continue;
      }
      int status = time_calls(&cases[i], cases[i].stats.calls_per_run, &samples[i * RUNS_MAX + *n_runs]);
      if (status != 0) {
        return status;
      }
    }
  }
  return 0;
}

int measure_interleaved(struct measure_case *cases, int n_cases, double seconds, const char *label) {
  double *samples = malloc((size_t)n_cases * RUNS_MAX * sizeof *samples);
  if (!samples) {
    return bench_error("out of memory for timing samples");
  }
  int status = 0;
  measure_progress("%s: warming up", label);
  for (int i = 0; i < n_cases && status == 0; i++) {
    status = cases[i].run ? warm_up(&cases[i]) : 0;
  }
  int64_t n_runs = 0;
  if (status == 0) {
    status = run_rounds(cases, n_cases, seconds, label, samples, &n_runs);
  }
  measure_progress_clear();
  for (int i = 0; i < n_cases && status == 0; i++) {
    if (!cases[i].run) {
      continue;
    }
    const int64_t calls_per_run = cases[i].stats.calls_per_run;
    cases[i].stats = measure_percentiles(samples + (int64_t)i * RUNS_MAX, n_runs);
    cases[i].stats.calls_per_run = calls_per_run;
  }
  free(samples);
  return status;
}
