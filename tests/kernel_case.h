/* SPDX-License-Identifier: Apache-2.0
 * What the checks of kernels share; see test_kernels.c. A check of a primitive is check_<row of GDN_KERNEL_LIST>. */
#ifndef GDN_TESTS_KERNEL_CASE_H
#define GDN_TESTS_KERNEL_CASE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "kernels/kernels.h"

/* One check of one primitive: shape, the table under test, and ref. */
struct kcase {
  const struct gdn_kernels *ref, *tier;
  int n, K, V;
  const char *name; /* of the primitive */
  struct check_rng rng;
};

/* One check a row; a row without does not link. */
#define KERNEL_CHECK(name) void check_##name(struct kcase *c);
GDN_KERNEL_LIST(KERNEL_CHECK)
#undef KERNEL_CHECK

/* kernel_chunk_bf16.c: the row of c where products have bf16 operands. */
void check_chunk_bf16(struct kcase *c);
/* Whether they have in this tier. */
int bf16_chunks(const struct gdn_kernels *k);

/* ---- inputs ---- */

float *alloc_f32(int64_t n);
float *uniform_f32(struct check_rng *r, int64_t n, double lo, double hi);

int elem_bytes(int32_t dtype);
void row_put(const struct gdn_rows *rows, int i, int j, float x);
float row_get(const struct gdn_rows *rows, int i, int j);
/* Rows of dim random elements that end at an unmapped page, with a poisoned gap between rows. */
struct gdn_rows random_rows(struct check_rng *r, int n, int dim, int gap, int32_t dtype, double lo, double hi);
/* Output rows likewise; nothing but poison so far. */
struct gdn_rows_out poison_rows(int n, int dim, int gap, int32_t dtype);
/* Between the rows nothing may have been written. */
void check_gaps(const struct gdn_rows_out *rows, int n, int dim);

/* A state [n_cols][dim_k] in caller memory: at any 4-byte alignment, and then with one element of slack at the end. */
float *caller_state(int n_cols, int dim_k, int odd);
/* A [V, K] float state. */
struct gdn_state_ref f32_rows(const struct kcase *c, const float *rows);
/* Element i of column col of panels. */
int64_t panel_at(int K, int col, int i);

/* exp(x) to a relative error; results below the normal range may be flushed to zero. */
void check_exp_near(const char *what, double got, double x, double limit);
/* To a few units in the last place. */
void check_exp(const char *what, double got, double x);

/* ---- timing ---- */

extern int kernel_bench; /* 1: time the tested calls */
double kernel_now_ns(void);
/* Of n numbers, which are put in order. */
double kernel_median(double *x, int n);

#define BENCH_RUNS 31

/* Median time of one call, of BENCH_RUNS runs of about 20 us each. */
#define MEDIAN_NS(result, call)                                                                                        \
  do {                                                                                                                 \
    double times[BENCH_RUNS], begin_ns = kernel_now_ns();                                                              \
    int per_run = 0;                                                                                                   \
    while (kernel_now_ns() - begin_ns < 2e4) {                                                                         \
      (call);                                                                                                          \
      per_run++;                                                                                                       \
    }                                                                                                                  \
    for (int run = 0; run < BENCH_RUNS; run++) {                                                                       \
      begin_ns = kernel_now_ns();                                                                                      \
      for (int i = 0; i < per_run; i++) (call);                                                                        \
      times[run] = (kernel_now_ns() - begin_ns) / per_run;                                                             \
    }                                                                                                                  \
    (result) = kernel_median(times, BENCH_RUNS);                                                                       \
  } while (0)

#define BENCH(c, ref_call, tier_call)                                                                                  \
  do {                                                                                                                 \
    if (kernel_bench) {                                                                                                \
      double ref_ns, tier_ns;                                                                                          \
      MEDIAN_NS(ref_ns, ref_call);                                                                                     \
      MEDIAN_NS(tier_ns, tier_call);                                                                                   \
      printf("%s/n%d_k%d_v%d/%s  %.0f ns  %.2f x ref\n", (c)->name, (c)->n, (c)->K, (c)->V, (c)->tier->tier, tier_ns,  \
             ref_ns / tier_ns);                                                                                        \
    }                                                                                                                  \
  } while (0)

#endif
