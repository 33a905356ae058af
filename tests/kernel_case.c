/* SPDX-License-Identifier: Apache-2.0
 * What the checks of kernels share; see kernel_case.h. */
#include "kernel_case.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <time.h>

int kernel_bench;

/* ---- timing ---- */

double kernel_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static int compare_double(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double kernel_median(double *x, int n) {
  qsort(x, (size_t)n, sizeof x[0], compare_double);
  return x[n / 2];
}

int bf16_chunks(const struct gdn_kernels *k) {
  return strcmp(k->tier, "avx512bf16") == 0 || strcmp(k->tier, "amx") == 0;
}

/* ---- inputs ---- */

float *alloc_f32(int64_t n) {
  return check_alloc((size_t)n * sizeof(float));
}

float *uniform_f32(struct check_rng *r, int64_t n, double lo, double hi) {
  float *x = alloc_f32(n);
  for (int64_t i = 0; i < n; i++) x[i] = (float)check_uniform(r, lo, hi);
  return x;
}

int elem_bytes(int32_t dtype) {
  return dtype == GDN_ROWS_BF16 ? 2 : 4;
}

void row_put(const struct gdn_rows *rows, int i, int j, float x) {
  int64_t at = i * rows->stride_elems + j;
  if (rows->dtype == GDN_ROWS_BF16) {
    ((uint16_t *)(uintptr_t)rows->data)[at] = check_to_bf16(x);
  } else {
    ((float *)(uintptr_t)rows->data)[at] = x;
  }
}

float row_get(const struct gdn_rows *rows, int i, int j) {
  int64_t at = i * rows->stride_elems + j;
  return rows->dtype == GDN_ROWS_BF16 ? check_from_bf16(((const uint16_t *)rows->data)[at])
                                      : ((const float *)rows->data)[at];
}

struct gdn_rows random_rows(struct check_rng *r, int n, int dim, int gap, int32_t dtype, double lo, double hi) {
  struct gdn_rows rows = {NULL, dim + gap, dtype};
  rows.data = check_alloc_tight(((size_t)(n - 1) * (size_t)(dim + gap) + (size_t)dim) * (size_t)elem_bytes(dtype));
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < dim; j++) row_put(&rows, i, j, (float)check_uniform(r, lo, hi));
  }
  return rows;
}

struct gdn_rows_out poison_rows(int n, int dim, int gap, int32_t dtype) {
  struct gdn_rows_out rows = {NULL, dim + gap, dtype};
  rows.data = check_alloc_tight(((size_t)(n - 1) * (size_t)(dim + gap) + (size_t)dim) * (size_t)elem_bytes(dtype));
  return rows;
}

void check_gaps(const struct gdn_rows_out *rows, int n, int dim) {
  size_t bytes = (size_t)elem_bytes(rows->dtype);
  for (int i = 0; i + 1 < n; i++) {
    const char *gap = (const char *)rows->data + ((size_t)(i * rows->stride_elems) + (size_t)dim) * bytes;
    if (!check_is_poison(gap, (size_t)(rows->stride_elems - dim) * bytes)) check_fail("write after row %d", i);
  }
}

float *caller_state(int n_cols, int dim_k, int odd) {
  return check_alloc_tight(((size_t)n_cols * (size_t)dim_k + (odd ? 1 : 0)) * sizeof(float));
}

int64_t panel_at(int K, int col, int i) {
  return ((int64_t)(col / GDN_PANEL) * K + i) * GDN_PANEL + col % GDN_PANEL;
}

struct gdn_state_ref f32_rows(const struct kcase *c, const float *rows) {
  return (struct gdn_state_ref){.data = (void *)(uintptr_t)rows, .stride_elems = c->K, .dtype = GDN_ROWS_F32};
}

/* exp to a few units in the last place (a polynomial after argument reduction); results below the normal range may be
 * flushed to zero. */
void check_exp_near(const char *what, double got, double x, double limit) {
  double want = exp(x);
  if (isnan(x)) {
    if (!isnan(got)) check_fail("%s: exp(nan) = %g", what, got);
  } else if (want > FLT_MAX) {
    if (!(got >= (double)FLT_MAX / 1.00001)) check_fail("%s: exp(%g) = %g", what, x, got);
  } else if (want < (double)FLT_MIN) {
    check_limit(what, fabs(got - want), FLT_MIN);
    if (x == -INFINITY && got != 0) check_fail("%s: exp(-inf) = %g", what, got);
  } else {
    check_limit(what, fabs(got - want) / want, limit);
  }
}

void check_exp(const char *what, double got, double x) {
  check_exp_near(what, got, x, 4 * 0x1p-24);
}
