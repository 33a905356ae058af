/* SPDX-License-Identifier: Apache-2.0
 * Timing: medians of interleaved runs. */
#ifndef GDN_BENCH_MEASURE_H
#define GDN_BENCH_MEASURE_H

#include <stdint.h>

#include "report.h"

struct measure_stats {
  double median_us, p10_us, p90_us; /* of one call */
  int64_t runs;                     /* timed samples */
  int64_t calls_per_run;            /* calls of one sample, following each other */
};

/* One of the things timed against each other. run returns 0, or an exit status that ends the measurement. */
struct measure_case {
  int (*run)(void *arg); /* null: left out */
  void *arg;
  struct measure_stats stats; /* result */
};

double measure_now_us(void);
/* Of n values, which it sorts: median_us, p10_us and p90_us, whatever they count. */
struct measure_stats measure_percentiles(double *values, int64_t n);

/* Its members; and its cells median, p10, p90, runs. */
void measure_json(struct json *j, const struct measure_stats *s);
void measure_cells(struct table *t, const struct measure_stats *s, int decimals);

/* One line on stderr that replaces the last one, if stderr is a terminal. */
__attribute__((format(printf, 1, 2))) void measure_progress(const char *format, ...);
void measure_progress_clear(void);

/* Rounds that time every case once, in order, until the seconds are spent and at least 5 rounds are done, so that
 * whatever slows the machine meanwhile hits all cases alike. Short calls are timed several in a row.
 * Shows progress on stderr if that is a terminal. 0, or the exit status of a case that failed. */
int measure_interleaved(struct measure_case *cases, int n_cases, double seconds, const char *label);

#endif
