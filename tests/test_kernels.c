/* SPDX-License-Identifier: Apache-2.0
 * Every primitive of every tier against its definition or against ref, over edge shapes: outputs start as NaN between
 * guard bytes, inputs end at an unmapped page. --bench times the tested calls. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "check.h"
#include "inputs.h"
#include "kernels/gemm.h"
#include "kernels/kernels.h"
#include "oracle.h"
#include "platform.h"

/* One check of one primitive: shape, the table under test, and ref. */
struct kcase {
  const struct gdn_kernels *ref, *tier;
  int n, K, V;
  const char *name; /* of the primitive */
  struct check_rng rng;
};

static int bench_mode;

/* ---- timing ---- */

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static int compare_double(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

#define BENCH_RUNS 31

/* Median time of one call, of BENCH_RUNS runs of about 20 us each. */
#define MEDIAN_NS(result, call)                                                                                        \
  do {                                                                                                                 \
    double times[BENCH_RUNS], begin_ns = now_ns();                                                                     \
    int per_run = 0;                                                                                                   \
    while (now_ns() - begin_ns < 2e4) {                                                                                \
      (call);                                                                                                          \
      per_run++;                                                                                                       \
    }                                                                                                                  \
    for (int run = 0; run < BENCH_RUNS; run++) {                                                                       \
      begin_ns = now_ns();                                                                                             \
      for (int i = 0; i < per_run; i++) (call);                                                                        \
      times[run] = (now_ns() - begin_ns) / per_run;                                                                    \
    }                                                                                                                  \
    qsort(times, BENCH_RUNS, sizeof times[0], compare_double);                                                         \
    (result) = times[BENCH_RUNS / 2];                                                                                  \
  } while (0)

#define BENCH(c, ref_call, tier_call)                                                                                  \
  do {                                                                                                                 \
    if (bench_mode) {                                                                                                  \
      double ref_ns, tier_ns;                                                                                          \
      MEDIAN_NS(ref_ns, ref_call);                                                                                     \
      MEDIAN_NS(tier_ns, tier_call);                                                                                   \
      printf("%s/n%d_k%d_v%d/%s  %.0f ns  %.2f x ref\n", (c)->name, (c)->n, (c)->K, (c)->V, (c)->tier->tier, tier_ns,  \
             ref_ns / tier_ns);                                                                                        \
    }                                                                                                                  \
  } while (0)

/* ---- inputs ---- */

static float *alloc_f32(int64_t n) {
  return check_alloc((size_t)n * sizeof(float));
}

static float *uniform_f32(struct check_rng *r, int64_t n, double lo, double hi) {
  float *x = alloc_f32(n);
  for (int64_t i = 0; i < n; i++) x[i] = (float)check_uniform(r, lo, hi);
  return x;
}

static int elem_bytes(int32_t dtype) {
  return dtype == GDN_ROWS_BF16 ? 2 : 4;
}

static void row_put(const struct gdn_rows *rows, int i, int j, float x) {
  int64_t at = i * rows->stride_elems + j;
  if (rows->dtype == GDN_ROWS_BF16) {
    ((uint16_t *)(uintptr_t)rows->data)[at] = check_to_bf16(x);
  } else {
    ((float *)(uintptr_t)rows->data)[at] = x;
  }
}

static float row_get(const struct gdn_rows *rows, int i, int j) {
  int64_t at = i * rows->stride_elems + j;
  return rows->dtype == GDN_ROWS_BF16 ? check_from_bf16(((const uint16_t *)rows->data)[at])
                                      : ((const float *)rows->data)[at];
}

/* Rows of dim random elements that end at an unmapped page, with a poisoned gap between rows. */
static struct gdn_rows random_rows(struct check_rng *r, int n, int dim, int gap, int32_t dtype, double lo, double hi) {
  struct gdn_rows rows = {NULL, dim + gap, dtype};
  rows.data = check_alloc_tight(((size_t)(n - 1) * (size_t)(dim + gap) + (size_t)dim) * (size_t)elem_bytes(dtype));
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < dim; j++) row_put(&rows, i, j, (float)check_uniform(r, lo, hi));
  }
  return rows;
}

/* Output rows likewise; nothing but poison so far. */
static struct gdn_rows_out poison_rows(int n, int dim, int gap, int32_t dtype) {
  struct gdn_rows_out rows = {NULL, dim + gap, dtype};
  rows.data = check_alloc_tight(((size_t)(n - 1) * (size_t)(dim + gap) + (size_t)dim) * (size_t)elem_bytes(dtype));
  return rows;
}

/* Between the rows nothing may have been written. */
static void check_gaps(const struct gdn_rows_out *rows, int n, int dim) {
  size_t bytes = (size_t)elem_bytes(rows->dtype);
  for (int i = 0; i + 1 < n; i++) {
    const char *gap = (const char *)rows->data + ((size_t)(i * rows->stride_elems) + (size_t)dim) * bytes;
    if (!check_is_poison(gap, (size_t)(rows->stride_elems - dim) * bytes)) check_fail("write after row %d", i);
  }
}

/* A state [n_cols][dim_k] in caller memory: at any 4-byte alignment, and then with one element of slack at the end. */
static float *caller_state(int n_cols, int dim_k, int odd) {
  return check_alloc_tight(((size_t)n_cols * (size_t)dim_k + (odd ? 1 : 0)) * sizeof(float));
}

/* ---- rows, gates, states: against their definitions, ref too ---- */

#define N_F16 65536

/* Every float16 there is. */
static void load_every_f16(struct kcase *c) {
  uint16_t *src = check_alloc(N_F16 * sizeof *src);
  float *got = alloc_f32(N_F16);
  for (int i = 0; i < N_F16; i++) src[i] = (uint16_t)i;
  c->tier->load_rows(N_F16 / 32, 32, (struct gdn_rows){src, 32, GDN_ROWS_F16}, got, 32);
  for (int i = 0; i < N_F16; i++) {
    double want = oracle_number(src, i, GDN_F16);
    if (isnan(want) ? !isnan(got[i]) : got[i] != want) check_fail("f16 %#x became %g", i, (double)got[i]);
  }
}

/* Every float16, the ties between neighbours, and the floats beside those. */
static void store_every_f16(struct kcase *c) {
  uint16_t *all = check_alloc(N_F16 * sizeof *all), *got = check_alloc(N_F16 * sizeof *got), want;
  float *src = alloc_f32(N_F16);
  for (int i = 0; i < N_F16; i++) all[i] = (uint16_t)i;
  for (int kind = 0; kind < 4; kind++) {
    for (int i = 0; i < N_F16; i++) {
      double x = oracle_number(all, i, GDN_F16), next = oracle_number(all, (i + 1) % N_F16, GDN_F16);
      double tie = isinf(next) ? copysign(65520, x) : (x + next) / 2;
      src[i] = kind == 0 ? (float)x : kind == 1 ? (float)tie : nextafterf((float)tie, kind == 2 ? 1e9f : -1e9f);
    }
    c->tier->store_rows(N_F16 / 32, 32, src, 32, (struct gdn_rows_out){got, 32, GDN_ROWS_F16});
    for (int i = 0; i < N_F16; i++) {
      inputs_put(&want, 0, GDN_F16, src[i]);
      if (isnan(src[i]) ? !isnan(oracle_number(got, i, GDN_F16)) : got[i] != want)
        check_fail("%.9g became f16 %#x instead of %#x", (double)src[i], got[i], want);
    }
  }
}

static void check_load_rows(struct kcase *c) {
  for (int32_t dtype = GDN_ROWS_F32; dtype <= GDN_ROWS_BF16; dtype++) {
    struct gdn_rows src = random_rows(&c->rng, c->n, c->K, 3, dtype, -2, 2);
    struct gdn_rows_out dst = poison_rows(c->n, c->K, 32, GDN_ROWS_F32);
    float *got = alloc_f32((int64_t)c->n * dst.stride_elems);
    c->tier->load_rows(c->n, c->K, src, got, dst.stride_elems);
    dst.data = got;
    check_gaps(&dst, c->n, c->K);
    for (int i = 0; i < c->n; i++) {
      for (int j = 0; j < c->K; j++) {
        if (got[i * dst.stride_elems + j] != row_get(&src, i, j)) check_fail("element %d of row %d", j, i);
      }
    }
    BENCH(c, c->ref->load_rows(c->n, c->K, src, got, c->K), c->tier->load_rows(c->n, c->K, src, got, c->K));
  }
  if (c->n == 1) load_every_f16(c);
}

static void norm_rows_case(struct kcase *c, int32_t dtype, int l2norm) {
  struct gdn_rows src = random_rows(&c->rng, c->n, c->K, 5, dtype, -2, 2);
  int64_t n_elems = (int64_t)c->n * c->K;
  for (int j = 0; j < c->K; j++) {
    row_put(&src, c->n / 2, j, 0);
    row_put(&src, c->n - 1, j, 1e-4f / sqrtf((float)c->K));
  }
  const float eps = 1e-6f, mult = 0.08838834764f;
  float *got = alloc_f32(n_elems), *one = alloc_f32(c->K);
  double *want = check_alloc((size_t)n_elems * sizeof(double));
  for (int i = 0; i < c->n; i++) {
    double sum = 0;
    for (int j = 0; j < c->K; j++) sum += (double)row_get(&src, i, j) * (double)row_get(&src, i, j);
    for (int j = 0; j < c->K; j++) {
      double x = row_get(&src, i, j);
      want[i * c->K + j] = l2norm ? (double)mult * x / sqrt(sum + (double)eps) : (double)(float)((double)mult * x);
    }
  }
  c->tier->norm_rows(c->n, c->K, src, l2norm, eps, mult, got);
  /* Without the norm one product, rounded once. With it, sums of up to K squares in at least 8 partial sums and a few
   * roundings after: K / 8 + 4 units of 2^-24 at worst, half of that on the result. */
  for (int i = 0; i < c->n; i++) {
    check_close(l2norm ? "normalised row" : "row", got + i * c->K, want + i * c->K, c->K,
                l2norm ? (c->tier == c->ref ? c->K : c->K / 8 + 8) * 0x1p-24 : 0);
    struct gdn_rows single = src;
    single.data = (const char *)src.data + i * src.stride_elems * elem_bytes(dtype);
    c->tier->norm_rows(1, c->K, single, l2norm, eps, mult, one);
    check_same_bits("a row alone", got + i * c->K, one, (size_t)c->K * 4, 4);
  }
  BENCH(c, c->ref->norm_rows(c->n, c->K, src, l2norm, eps, mult, got),
        c->tier->norm_rows(c->n, c->K, src, l2norm, eps, mult, got));
}

static void check_norm_rows(struct kcase *c) {
  for (int l2norm = 0; l2norm <= 1; l2norm++) {
    norm_rows_case(c, GDN_ROWS_BF16, l2norm);
    norm_rows_case(c, GDN_ROWS_F32, l2norm);
  }
}

static void check_dot_rows(struct kcase *c) {
  int64_t n_elems = (int64_t)c->n * c->K;
  float *a = uniform_f32(&c->rng, n_elems, -1, 1), *b = uniform_f32(&c->rng, n_elems, -1, 1);
  float *dot = alloc_f32(c->n), *one = alloc_f32(1);
  c->tier->dot_rows(c->n, c->K, a, b, dot);
  for (int i = 0; i < c->n; i++) {
    double want = 0, size = 0;
    for (int j = 0; j < c->K; j++) {
      double x = (double)a[i * c->K + j] * (double)b[i * c->K + j];
      want += x;
      size += fabs(x);
    }
    check_limit("dot product over sum of magnitudes", fabs((double)dot[i] - want) / size, c->K * 0x1p-24);
    c->tier->dot_rows(1, c->K, a + i * c->K, b + i * c->K, one);
    check_same_bits("a row alone", dot + i, one, 4, 4);
  }
  BENCH(c, c->ref->dot_rows(c->n, c->K, a, b, dot), c->tier->dot_rows(c->n, c->K, a, b, dot));
}

/* exp to a few units in the last place (a polynomial after argument reduction); results below the normal range may be
 * flushed to zero. */
static void check_exp_near(const char *what, double got, double x, double limit) {
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

static void check_exp(const char *what, double got, double x) {
  check_exp_near(what, got, x, 4 * 0x1p-24);
}

static const float gate_values[] = {0,     -INFINITY, -90,    -26,     -110, -1000, 0.01f,  3,     -0.0f,
                                    -88.f, NAN,       -87.3f, -103.9f, 80.f, 88.f,  -1e-9f, 1e-9f, -3e38f};

static void run_gates(const struct gdn_kernels *k, int n, struct gdn_rows g, struct gdn_rows beta, float *decay,
                      float *beta_f32) {
  struct gdn_gates a = {.n = n, .threshold = 20, .g = g, .beta = beta, .g_out = decay, .beta_out = beta_f32};
  k->gates(&a);
}

static void gates_case(struct kcase *c, int with_g, int32_t beta_dtype) {
  struct gdn_rows none = {NULL, 0, GDN_ROWS_F32};
  struct gdn_rows g = random_rows(&c->rng, c->n, 1, 2, GDN_ROWS_F32, -4, 0);
  struct gdn_rows beta = beta_dtype ? random_rows(&c->rng, c->n, 1, 1, beta_dtype, 0, 1) : none;
  int n_values = (int)(sizeof gate_values / sizeof gate_values[0]);
  for (int i = 0; i < c->n; i++) {
    if (i % 2 == 0 || c->n == 1) row_put(&g, i, 0, gate_values[(i / 2 + c->K / 32) % n_values]);
  }
  float *decay = alloc_f32(c->n), *beta_f32 = alloc_f32(c->n), *one = alloc_f32(2);
  run_gates(c->tier, c->n, with_g ? g : none, beta, decay, beta_f32);
  for (int i = 0; i < c->n; i++) {
    check_exp("decay", decay[i], with_g ? (double)row_get(&g, i, 0) : 0);
    float want_beta = beta_dtype ? row_get(&beta, i, 0) : 1;
    if (beta_f32[i] != want_beta) check_fail("beta[%d] = %g instead of %g", i, (double)beta_f32[i], (double)want_beta);
    struct gdn_rows g_one = with_g ? g : none;
    if (with_g) g_one.data = (const float *)g.data + i * g.stride_elems;
    run_gates(c->tier, 1, g_one, none, one, one + 1);
    if (!isnan(decay[i])) check_same_bits("a gate alone", decay + i, one, 4, 4);
  }
  BENCH(c, run_gates(c->ref, c->n, with_g ? g : none, beta, decay, beta_f32),
        run_gates(c->tier, c->n, with_g ? g : none, beta, decay, beta_f32));
}

static void check_gates(struct kcase *c) {
  gates_case(c, 1, GDN_ROWS_F32);
  gates_case(c, 1, GDN_ROWS_BF16);
  gates_case(c, 0, GDN_ROWS_F32);
  gates_case(c, 1, 0);
  gates_case(c, 0, 0);
}

/* Ties both ways, overflow to infinity, denormals, and values that are not numbers. */
static const uint32_t store_values[] = {0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7fffff, 0xff7fffff,
                                        0x7f800000, 0xff800000, 0x00000001, 0x00008000, 0x00018000, 0x80008001,
                                        0x7fc00000, 0xffffffff, 0x7f800001, 0x00000000, 0x80000000, 0x007fffff};

static void check_store_rows(struct kcase *c) {
  int64_t ld = c->V + 32;
  float *src = uniform_f32(&c->rng, c->n * ld, -2, 2);
  int n_values = (int)(sizeof store_values / sizeof store_values[0]);
  for (int64_t i = 0; i < c->n * ld; i += 3) memcpy(src + i, store_values + (i / 3) % n_values, 4);
  for (int32_t dtype = GDN_ROWS_F32; dtype <= GDN_ROWS_BF16; dtype++) {
    struct gdn_rows_out dst = poison_rows(c->n, c->V, 7, dtype);
    c->tier->store_rows(c->n, c->V, src, ld, dst);
    check_gaps(&dst, c->n, c->V);
    for (int i = 0; i < c->n; i++) {
      for (int j = 0; j < c->V; j++) {
        float x = src[i * ld + j];
        int64_t at = i * dst.stride_elems + j;
        if (dtype == GDN_ROWS_F32) {
          check_same_bits("f32 element", (float *)dst.data + at, &x, 4, 4);
        } else if (isnan(x)) {
          if (!isnan(check_from_bf16(((uint16_t *)dst.data)[at])))
            check_fail("nan became %#x", ((uint16_t *)dst.data)[at]);
        } else {
          uint16_t want = check_to_bf16(x);
          check_same_bits("bf16 element", (uint16_t *)dst.data + at, &want, 2, 2);
        }
      }
    }
    BENCH(c, c->ref->store_rows(c->n, c->V, src, ld, dst), c->tier->store_rows(c->n, c->V, src, ld, dst));
  }
  if (c->n == 1) store_every_f16(c);
}

static int64_t panel_at(int K, int col, int i) {
  return ((int64_t)(col / GDN_PANEL) * K + i) * GDN_PANEL + col % GDN_PANEL;
}

/* A [V, K] float state. */
static struct gdn_state_ref f32_rows(const struct kcase *c, const float *rows) {
  return (struct gdn_state_ref){.data = (void *)(uintptr_t)rows, .stride_elems = c->K, .dtype = GDN_ROWS_F32};
}

static void check_state_load(struct kcase *c) {
  int64_t n_elems = (int64_t)c->V * c->K;
  float *rows = caller_state(c->V, c->K, c->n % 2), *panels = alloc_f32(n_elems);
  for (int64_t i = 0; i < n_elems; i++) rows[i] = (float)check_normal(&c->rng);
  c->tier->state_load(c->V, c->K, f32_rows(c, rows), panels);
  for (int col = 0; col < c->V; col++) {
    for (int i = 0; i < c->K; i++) {
      if (panels[panel_at(c->K, col, i)] != rows[(int64_t)col * c->K + i]) check_fail("column %d, k %d", col, i);
    }
  }
  struct gdn_state_ref state = f32_rows(c, rows);
  BENCH(c, c->ref->state_load(c->V, c->K, state, panels), c->tier->state_load(c->V, c->K, state, panels));
}

static void check_state_store(struct kcase *c) {
  int64_t n_elems = (int64_t)c->V * c->K;
  float *rows = caller_state(c->V, c->K, c->n % 2), *panels = uniform_f32(&c->rng, n_elems, -1, 1);
  c->tier->state_store(c->V, c->K, panels, f32_rows(c, rows));
  for (int col = 0; col < c->V; col++) {
    for (int i = 0; i < c->K; i++) {
      if (panels[panel_at(c->K, col, i)] != rows[(int64_t)col * c->K + i]) check_fail("column %d, k %d", col, i);
    }
  }
  if (c->n % 2 != 0 && !check_is_poison(rows + n_elems, 4)) check_fail("write after the last row");
  struct gdn_state_ref state = f32_rows(c, rows);
  BENCH(c, c->ref->state_store(c->V, c->K, panels, state), c->tier->state_store(c->V, c->K, panels, state));
}

/* ---- recurrent form ---- */

/* n tokens of one value head: what recur and decode_step take. */
struct tokens {
  float *q, *k, *kq, *decay, *beta, *v; /* v [n][V] */
  float *state;                         /* [V][K], in caller memory */
};

static struct tokens random_tokens(struct kcase *c) {
  int n = c->n, K = c->K;
  double unit = sqrt(3.0 / K); /* rows of norm about 1 */
  struct tokens t;
  t.q = uniform_f32(&c->rng, (int64_t)n * K, -unit, unit);
  t.k = uniform_f32(&c->rng, (int64_t)n * K, -unit, unit);
  t.kq = alloc_f32(n);
  t.decay = uniform_f32(&c->rng, n, 0.5, 1);
  t.beta = uniform_f32(&c->rng, n, 0, 1);
  t.v = uniform_f32(&c->rng, (int64_t)n * c->V, -1, 1);
  t.state = caller_state(c->V, K, n % 2);
  for (int64_t i = 0; i < (int64_t)c->V * K; i++) t.state[i] = (float)(0.3 * check_normal(&c->rng));
  for (int i = 0; i < n; i++) {
    double sum = 0;
    for (int j = 0; j < K; j++) sum += (double)t.k[i * K + j] * (double)t.q[i * K + j];
    t.kq[i] = (float)sum;
  }
  if (n > 20) t.decay[20] = 0;
  if (n > 3) t.beta[3] = 0;
  return t;
}

/* Runs tokens [from, to) over all of V in slices of width columns. */
static void recur_slices(const struct gdn_kernels *k, const struct kcase *c, const struct tokens *t, int width,
                         int from, int to, float *out, float *panels) {
  for (int col = 0; col < c->V; col += width) {
    struct gdn_recur a = {.n = to - from,
                          .dim_k = c->K,
                          .n_cols = c->V - col < width ? c->V - col : width,
                          .q = t->q + (int64_t)from * c->K,
                          .k = t->k + (int64_t)from * c->K,
                          .kq = t->kq + from,
                          .decay = t->decay + from,
                          .beta = t->beta + from,
                          .v = t->v + (int64_t)from * c->V + col,
                          .out = out + (int64_t)from * c->V + col,
                          .ld = c->V,
                          .state = panels + (int64_t)col * c->K};
    k->recur(&a);
  }
}

/* Two f32 evaluations of the same sums over K, with and without FMA: each is off by a few 2^-24 of sums that do not
 * cancel much, and the rule with |k| near 1 and beta <= 1 does not amplify what tokens hand on. */
static double recur_limit(const struct kcase *c) {
  return 0x1p-24 * (8 + c->K / 8);
}

static void check_recur(struct kcase *c) {
  struct tokens t = random_tokens(c);
  int64_t n_state = (int64_t)c->V * c->K, n_out = (int64_t)c->n * c->V;
  size_t state_bytes = (size_t)n_state * 4, out_bytes = (size_t)n_out * 4;
  float *start = alloc_f32(n_state), *want = alloc_f32(n_state), *want_out = alloc_f32(n_out);
  float *state = alloc_f32(n_state), *out = alloc_f32(n_out);
  float *state_2 = alloc_f32(n_state), *out_2 = alloc_f32(n_out);
  c->ref->state_load(c->V, c->K, f32_rows(c, t.state), start);
  memcpy(want, start, state_bytes);
  recur_slices(c->ref, c, &t, 32, 0, c->n, want_out, want);
  memcpy(state, start, state_bytes);
  recur_slices(c->tier, c, &t, 32, 0, c->n, out, state);
  check_close_f32("out", out, want_out, n_out, recur_limit(c));
  check_close_f32("state", state, want, n_state, recur_limit(c));

  memcpy(state_2, start, state_bytes);
  recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, out_2, state_2);
  check_same_bits("out in slices of recur_cols", out, out_2, out_bytes, 4);
  check_same_bits("state in slices of recur_cols", state, state_2, state_bytes, 4);

  for (int split = 1; split < c->n; split = split * 2 + 1) {
    memcpy(state_2, start, state_bytes);
    recur_slices(c->tier, c, &t, 32, 0, split, out_2, state_2);
    recur_slices(c->tier, c, &t, 32, split, c->n, out_2, state_2);
    check_same_bits("out of a split run", out, out_2, out_bytes, 4);
    check_same_bits("state of a split run", state, state_2, state_bytes, 4);
  }

  memcpy(state_2, start, state_bytes);
  memcpy(out_2, t.v, out_bytes);
  struct tokens in_place = t;
  in_place.v = out_2;
  recur_slices(c->tier, c, &in_place, c->tier->recur_cols, 0, c->n, out_2, state_2);
  check_same_bits("out over v", out, out_2, out_bytes, 4);
  BENCH(c, recur_slices(c->ref, c, &t, c->ref->recur_cols, 0, c->n, want_out, want),
        recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, out, state));
}

static void step(const struct gdn_kernels *k, const struct kcase *c, const struct tokens *t, int i, int col, int n_cols,
                 const float *state_in, float *state_out, float *out) {
  int64_t offset = (int64_t)col * c->K;
  struct gdn_decode_step a = {.dim_k = c->K,
                              .n_cols = n_cols,
                              .q = t->q + (int64_t)i * c->K,
                              .k = t->k + (int64_t)i * c->K,
                              .kq = t->kq[i],
                              .decay = t->decay[i],
                              .beta = t->beta[i],
                              .v = t->v + (int64_t)i * c->V + col,
                              .out = out + col,
                              .state_in = f32_rows(c, state_in != NULL ? state_in + offset : NULL),
                              .state_out = f32_rows(c, state_out != NULL ? state_out + offset : NULL)};
  k->decode_step(&a);
}

static void check_decode_step(struct kcase *c) {
  struct tokens t = random_tokens(c);
  int64_t n_state = (int64_t)c->V * c->K;
  size_t state_bytes = (size_t)n_state * 4, out_bytes = (size_t)c->V * 4;
  float *want = caller_state(c->V, c->K, 0), *want_out = alloc_f32(c->V);
  float *state = caller_state(c->V, c->K, c->n % 2), *out = alloc_f32(c->V), *out_2 = alloc_f32(c->V);
  step(c->ref, c, &t, 0, 0, c->V, t.state, want, want_out);
  step(c->tier, c, &t, 0, 0, c->V, t.state, state, out);
  check_close_f32("out", out, want_out, c->V, recur_limit(c));
  check_close_f32("state", state, want, n_state, recur_limit(c));

  step(c->tier, c, &t, 0, 0, c->V, t.state, NULL, out_2);
  check_same_bits("out without a stored state", out, out_2, out_bytes, 4);
  float *pieces = caller_state(c->V, c->K, 0);
  memcpy(pieces, t.state, state_bytes);
  for (int col = 0; col < c->V; col += 32) step(c->tier, c, &t, 0, col, 32, pieces, pieces, out_2);
  check_same_bits("out in place and in slices", out, out_2, out_bytes, 4);
  check_same_bits("state in place and in slices", state, pieces, state_bytes, 4);

  memset(pieces, 0, state_bytes);
  step(c->tier, c, &t, 0, 0, c->V, pieces, pieces, out);
  step(c->tier, c, &t, 0, 0, c->V, NULL, state, out_2);
  check_same_bits("out of the zero state", out, out_2, out_bytes, 4);
  check_same_bits("zero state", pieces, state, state_bytes, 4);

  float *panels = alloc_f32(n_state), *all_out = alloc_f32((int64_t)c->n * c->V);
  c->tier->state_load(c->V, c->K, f32_rows(c, t.state), panels);
  recur_slices(c->tier, c, &t, c->tier->recur_cols, 0, c->n, all_out, panels);
  memcpy(pieces, t.state, state_bytes);
  for (int i = 0; i < c->n; i++) {
    step(c->tier, c, &t, i, 0, c->V, pieces, pieces, out);
    check_same_bits("out against recur", all_out + (int64_t)i * c->V, out, out_bytes, 4);
  }
  c->tier->state_store(c->V, c->K, panels, f32_rows(c, state));
  check_same_bits("state against recur", pieces, state, state_bytes, 4);
  BENCH(c, step(c->ref, c, &t, 0, 0, c->V, pieces, pieces, out), step(c->tier, c, &t, 0, 0, c->V, pieces, pieces, out));
}

/* ---- chunk form ---- */

enum stage { QK, GATES, MASK, SOLVE, BEGIN, RESIDUAL, DELTA, OUT, STATE };

/* Two chunks of one value head: a full one, whose leftovers in scratch the second must not see, and one of n tokens. */
struct chunk_data {
  struct gdn_rows q, k, v, g, beta;
  float *state; /* panels */
};

#define FIRST_LEN GDN_CHUNK

/* Head sizes whose product handles were made, for plain loops and for libxsmm. */
static const struct gdn_gemms *gemms_for(int K, int V, int use_jit) {
  static struct gdn_gemms made[2][GDN_DIM_MAX / 32][GDN_DIM_MAX / 32];
  struct gdn_gemms *g = &made[use_jit][K / 32 - 1][V / 32 - 1];
  if (g->dim_k == 0) gdn_gemms_make(g, K, V, use_jit);
  return g;
}

static struct chunk_data random_chunks(struct kcase *c) {
  int n = FIRST_LEN + c->n;
  struct chunk_data d;
  d.q = random_rows(&c->rng, n, c->K, 32, GDN_ROWS_BF16, -1, 1);
  d.k = random_rows(&c->rng, n, c->K, 7, GDN_ROWS_BF16, -1, 1);
  d.v = random_rows(&c->rng, n, c->V, 0, GDN_ROWS_BF16, -1, 1);
  d.g = random_rows(&c->rng, n, 1, 3, GDN_ROWS_F32, -0.3, 0);
  d.beta = random_rows(&c->rng, n, 1, 1, c->n % 2 != 0 ? GDN_ROWS_F32 : GDN_ROWS_BF16, 0, 1);
  static const float rare[] = {-INFINITY, -90, -26, 0, 0.02f, -1000};
  for (int i = 5; i < c->n; i += 9) row_put(&d.g, FIRST_LEN + i, 0, rare[i / 9 % 6]);
  for (int j = 0; j < c->K && c->n > 15; j++) row_put(&d.k, FIRST_LEN + 14, j, 0);
  d.state = uniform_f32(&c->rng, (int64_t)c->K * c->V, -0.5, 0.5);
  return d;
}

static struct gdn_rows rows_from(struct gdn_rows rows, int i) {
  rows.data = (const char *)rows.data + i * rows.stride_elems * elem_bytes(rows.dtype);
  return rows;
}

/* Scratch of its own, as poison, and the inputs at the first chunk. */
static struct gdn_chunk *make_chunk(const struct kcase *c, const struct chunk_data *d, int use_jit, int32_t out_dtype) {
  const int64_t C = GDN_CHUNK, K = c->K, V = c->V;
  struct gdn_chunk *x = check_alloc(sizeof *x);
  *x = (struct gdn_chunk){.dim_k = c->K, .dim_v = c->V, .l2norm = 1, .scale = 1 / sqrtf((float)c->K), .eps = 1e-6f};
  x->gemms = gemms_for(c->K, c->V, use_jit);
  x->q = alloc_f32(C * K);
  x->k = alloc_f32(C * K);
  x->kt = alloc_f32(C * K);
  x->q_mult = alloc_f32(C);
  x->k_mult = alloc_f32(C);
  x->decay = alloc_f32(C);
  x->kk = alloc_f32(C * C);
  x->qk = alloc_f32(C * C);
  x->gate_hi = alloc_f32(C);
  x->gate_lo = alloc_f32(C);
  x->decay_in = alloc_f32(C);
  x->decay_out = alloc_f32(C);
  x->beta = alloc_f32(C);
  x->decay_all = alloc_f32(1);
  x->l = alloc_f32(C * C);
  x->a = alloc_f32(C * C);
  x->t = alloc_f32(C * C);
  x->state = alloc_f32(K * V);
  memcpy(x->state, d->state, (size_t)(K * V) * 4);
  x->state_op = alloc_f32(K * V);
  x->resid = check_alloc((size_t)(C * V) * 6);
  x->inter = alloc_f32(C * V);
  x->delta_f32 = alloc_f32(C * V);
  x->delta = alloc_f32(C * V);
  x->delta_out = alloc_f32(C * V);
  x->out_rows = poison_rows(FIRST_LEN + c->n, c->V, 9, out_dtype);
  return x;
}

static void set_chunk(struct gdn_chunk *x, const struct chunk_data *d, int start, int n) {
  x->n = n;
  x->n16 = (n + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK;
  x->q_rows = rows_from(d->q, start);
  x->k_rows = rows_from(d->k, start);
  x->v_rows = rows_from(d->v, start);
  x->g_rows = rows_from(d->g, start);
  x->beta_rows = rows_from(d->beta, start);
}

static void run_columns(const struct gdn_kernels *k, struct gdn_chunk *x, int col, int n_cols, enum stage last) {
  void (*const per_slice[])(const struct gdn_chunk *, int, int) = {k->chunk_residual, k->chunk_delta, k->chunk_out,
                                                                   k->chunk_state};
  for (int s = RESIDUAL; s <= (int)last; s++) per_slice[s - RESIDUAL](x, col, n_cols);
}

/* Primitives up to last, over columns in slices of width. */
static void run_stages(const struct gdn_kernels *k, struct gdn_chunk *x, int width, int begin, enum stage last) {
  void (*const per_head[])(const struct gdn_chunk *) = {k->chunk_qk, k->chunk_gates, k->chunk_mask, k->chunk_solve};
  for (int s = QK; s <= SOLVE && s <= (int)last; s++) per_head[s](x);
  for (int col = 0; col < x->dim_v; col += width) {
    int n_cols = x->dim_v - col < width ? x->dim_v - col : width;
    if (begin && last >= BEGIN) k->chunk_begin(x, col, n_cols);
    run_columns(k, x, col, n_cols, last);
  }
}

/* The first chunk whole, the second up to last. */
static struct gdn_chunk *run_chunks(const struct kcase *c, const struct gdn_kernels *k, const struct chunk_data *d,
                                    int width, enum stage last, int32_t out_dtype) {
  struct gdn_chunk *x = make_chunk(c, d, k != c->ref, out_dtype);
  struct gdn_rows_out all = x->out_rows;
  set_chunk(x, d, 0, FIRST_LEN);
  x->next_n = c->n;
  x->next_q = rows_from(d->q, FIRST_LEN);
  x->next_k = rows_from(d->k, FIRST_LEN);
  x->next_v = rows_from(d->v, FIRST_LEN);
  run_stages(k, x, width, 1, STATE);
  set_chunk(x, d, FIRST_LEN, c->n);
  x->next_n = 0;
  x->out_rows.data = (char *)all.data + FIRST_LEN * all.stride_elems * elem_bytes(all.dtype);
  run_stages(k, x, width, 0, last);
  check_gaps(&all, FIRST_LEN + (last >= OUT ? c->n : 0), c->V);
  return x;
}

/* Elements of the 16-blocks on and below the diagonal of [64][64], packed. */
static int64_t lower_blocks(const float *m, int n16, float *packed) {
  int64_t at = 0;
  for (int i = 0; i < n16; i++) {
    for (int j = 0; j < (i / GDN_BLOCK + 1) * GDN_BLOCK; j++) packed[at++] = m[i * GDN_CHUNK + j];
  }
  return at;
}

/* Elements of size at most magnitude, sums that may cancel: their errors go with the magnitude. */
static void check_lower(const char *what, const float *got, const float *want, int n16, double magnitude,
                        double limit) {
  float x[GDN_CHUNK * GDN_CHUNK], y[GDN_CHUNK * GDN_CHUNK];
  int64_t n = lower_blocks(got, n16, x);
  lower_blocks(want, n16, y);
  for (int64_t i = 0; i < n; i++) check_limit(what, fabs((double)x[i] - (double)y[i]) / magnitude, limit);
}

/* f32 sums over K and over up to 64 tokens in two orders. */
static double chunk_limit(const struct kcase *c) {
  return 0x1p-24 * (24 + c->K / 4);
}

/* Two chunks twice, by ref and by the tier; in slices of 32 and of all columns the tier's bits must be the same. */
struct pair {
  struct gdn_chunk *ref, *tier;
};

static struct pair run_pair(struct kcase *c, enum stage last, int32_t out_dtype) {
  struct chunk_data d = random_chunks(c);
  struct pair p = {run_chunks(c, c->ref, &d, c->V, last, out_dtype), run_chunks(c, c->tier, &d, c->V, last, out_dtype)};
  if (last < RESIDUAL) return p;
  struct gdn_chunk *slices = run_chunks(c, c->tier, &d, 32, last, out_dtype);
  size_t row_bytes = (size_t)c->V * 4;
  if (last == RESIDUAL) check_same_bits("inter in slices", p.tier->inter, slices->inter, (size_t)c->n * row_bytes, 4);
  if (last >= DELTA)
    check_same_bits("delta in slices", p.tier->delta_f32, slices->delta_f32, (size_t)c->n * row_bytes, 4);
  for (int i = 0; last >= OUT && i < c->n; i++) {
    int64_t at = i * slices->out_rows.stride_elems * elem_bytes(out_dtype);
    check_same_bits("out in slices", (char *)p.tier->out_rows.data + at, (char *)slices->out_rows.data + at,
                    (size_t)(c->V * elem_bytes(out_dtype)), (size_t)elem_bytes(out_dtype));
  }
  if (last >= STATE) check_same_bits("state in slices", p.tier->state, slices->state, (size_t)c->K * row_bytes, 4);
  return p;
}

static void check_chunk_qk(struct kcase *c) {
  struct pair p = run_pair(c, QK, GDN_ROWS_F32);
  check_lower("kk", p.tier->kk, p.ref->kk, p.tier->n16, 1, chunk_limit(c));
  check_lower("qk", p.tier->qk, p.ref->qk, p.tier->n16, p.tier->scale, chunk_limit(c));
  const struct gdn_chunk *x = p.tier;
  for (int i = 0; i < x->n; i++) {
    for (int j = 0; j <= i; j++) {
      double kk = 0, ni = 0, nj = 0;
      for (int m = 0; m < c->K; m++) {
        double a = row_get(&x->k_rows, i, m), b = row_get(&x->k_rows, j, m);
        kk += a * b;
        ni += a * a;
        nj += b * b;
      }
      kk /= sqrt((ni + 1e-6) * (nj + 1e-6));
      check_limit("k . k of normalised keys", fabs((double)x->kk[i * GDN_CHUNK + j] - kk), chunk_limit(c));
    }
  }
  BENCH(c, c->ref->chunk_qk(p.ref), c->tier->chunk_qk(p.tier));
}

/* G_i from the gates in float64, each raised to -110 as the contract says. */
static void gate_sums(const struct gdn_chunk *x, double sum[GDN_CHUNK]) {
  double s = 0;
  for (int i = 0; i < x->n; i++) {
    double g = row_get(&x->g_rows, i, 0);
    s += g < -110 ? -110 : g;
    sum[i] = s;
  }
}

static void check_chunk_gates(struct kcase *c) {
  const struct gdn_chunk *x = run_pair(c, GATES, GDN_ROWS_F32).tier;
  double sum[GDN_CHUNK];
  gate_sums(x, sum);
  for (int i = 0; i < GDN_CHUNK; i++) {
    if (i >= x->n) {
      if (x->decay_out[i] != 0 || x->beta[i] != 0) check_fail("decay_out or beta at %d is not 0", i);
      continue;
    }
    /* Two floats hold 48 bits; an addition that keeps its rounding error loses next to nothing. */
    double gate = (double)x->gate_hi[i] + (double)x->gate_lo[i];
    check_limit("sum of gates", fabs(gate - sum[i]) / (1 + fabs(sum[i])), 0x1p-40);
    check_exp("decay_in", x->decay_in[i], sum[i]);
    double after = sum[x->n - 1] - sum[i]; /* rounded to f32 before exp takes it */
    check_exp_near("decay_out", x->decay_out[i], after, (4 + fabs(after)) * 0x1p-24);
    if (x->beta[i] != row_get(&x->beta_rows, i, 0)) check_fail("beta[%d] = %g", i, (double)x->beta[i]);
  }
  check_exp("decay_all", x->decay_all[0], sum[x->n - 1]);

  struct gdn_chunk absent = *x;
  absent.g_rows.data = absent.beta_rows.data = NULL;
  c->tier->chunk_gates(&absent);
  for (int i = 0; i < x->n; i++) {
    if (x->decay_in[i] != 1 || x->decay_out[i] != 1 || x->beta[i] != 1) check_fail("absent gates at %d", i);
  }
  BENCH(c, c->ref->chunk_gates(x), c->tier->chunk_gates(x));
}

static void check_chunk_mask(struct kcase *c) {
  struct pair p = run_pair(c, MASK, GDN_ROWS_F32);
  const struct gdn_chunk *x = p.tier;
  check_lower("l", x->l, p.ref->l, x->n16, 1, chunk_limit(c));
  for (int i = 0; i < x->n16; i++) {
    double sum = 0;
    for (int j = (i / GDN_BLOCK + 1) * GDN_BLOCK - 1; j >= 0; j--) {
      double want = 0;
      if (i < x->n && j < i) {
        double g = row_get(&x->g_rows, j + 1, 0);
        sum += g < -110 ? -110 : g;
        want = (double)x->beta[i] * exp(sum) * (double)x->kk[i * GDN_CHUNK + j];
      }
      check_limit("l element", fabs((double)x->l[i * GDN_CHUNK + j] - want), 8 * 0x1p-24);
    }
  }
  BENCH(c, c->ref->chunk_mask(p.ref), c->tier->chunk_mask(p.tier));
}

/* With the zero state and unit rows of v, delta is T diag(beta): (I + L) delta must be diag(beta), delta triangular. */
static void check_chunk_solve(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  memset(x->state, 0, (size_t)c->K * (size_t)c->V * 4);
  for (int i = 0; i < c->n; i++) {
    for (int j = 0; j < c->V; j++) row_put(&d.v, FIRST_LEN + i, j, i == j);
  }
  set_chunk(x, &d, FIRST_LEN, c->n);
  run_stages(c->tier, x, c->V, 1, DELTA);
  int n_cols = c->V < c->n ? c->V : c->n;
  for (int i = 0; i < c->n; i++) {
    for (int j = 0; j < n_cols; j++) {
      double sum = x->delta_f32[i * c->V + j], size = fabs(sum);
      if (j > i && sum != 0) check_fail("T is not lower triangular at %d, %d", i, j);
      for (int m = 0; m < i; m++) {
        double term = (double)x->l[i * GDN_CHUNK + m] * (double)x->delta_f32[m * c->V + j];
        sum += term;
        size += fabs(term);
      }
      /* A backward stable solve leaves a residual of a few 2^-24 of the terms that it sums. */
      check_limit("(I + L) T = I", fabs(sum - (i == j ? (double)x->beta[i] : 0)), 16 * 0x1p-24 * (size + 0.01));
    }
  }
  BENCH(c, c->ref->chunk_solve(x), c->tier->chunk_solve(x));
}

/* What begin makes shows in the product of q with the state. */
static void check_chunk_begin(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  set_chunk(x, &d, FIRST_LEN, c->n);
  run_stages(c->tier, x, c->V, 1, RESIDUAL);
  double *want = check_alloc((size_t)c->n * (size_t)c->V * sizeof(double));
  for (int i = 0; i < c->n; i++) {
    double norm = 1e-6;
    for (int m = 0; m < c->K; m++) norm += (double)row_get(&x->q_rows, i, m) * (double)row_get(&x->q_rows, i, m);
    for (int j = 0; j < c->V; j++) {
      double sum = 0;
      for (int m = 0; m < c->K; m++) sum += (double)row_get(&x->q_rows, i, m) * (double)d.state[panel_at(c->K, j, m)];
      want[i * c->V + j] = sum / sqrt(norm * c->K);
    }
  }
  check_close("inter", x->inter, want, (int64_t)c->n * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_begin(x, 0, c->V), c->tier->chunk_begin(x, 0, c->V));
}

static void check_chunk_residual(struct kcase *c) {
  struct pair p = run_pair(c, RESIDUAL, GDN_ROWS_F32);
  check_close_f32("inter", p.tier->inter, p.ref->inter, (int64_t)c->n * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_residual(p.ref, 0, c->V), c->tier->chunk_residual(p.tier, 0, c->V));
}

static void check_chunk_delta(struct kcase *c) {
  struct pair p = run_pair(c, DELTA, GDN_ROWS_F32);
  check_close_f32("delta", p.tier->delta_f32, p.ref->delta_f32, (int64_t)p.tier->n16 * c->V, chunk_limit(c));
  BENCH(c, c->ref->chunk_delta(p.ref, 0, c->V), c->tier->chunk_delta(p.tier, 0, c->V));
}

static void check_chunk_out(struct kcase *c) {
  for (int32_t dtype = GDN_ROWS_F32; dtype <= GDN_ROWS_BF16; dtype++) {
    struct pair p = run_pair(c, OUT, dtype);
    float *got = alloc_f32(c->V), *want = alloc_f32(c->V);
    double error = 0, norm = 0;
    for (int i = 0; i < c->n; i++) {
      struct gdn_rows a = {p.tier->out_rows.data, p.tier->out_rows.stride_elems, dtype};
      struct gdn_rows b = {p.ref->out_rows.data, p.ref->out_rows.stride_elems, dtype};
      for (int j = 0; j < c->V; j++) {
        got[j] = row_get(&a, i, j);
        want[j] = row_get(&b, i, j);
        error += (double)(got[j] - want[j]) * (double)(got[j] - want[j]);
        norm += (double)want[j] * (double)want[j];
      }
    }
    /* As bf16, the few elements that round the other way are off by 2^-8: 1e-3 is one in fifteen of them. */
    check_limit("out", sqrt(error / norm), dtype == GDN_ROWS_F32 ? chunk_limit(c) : 1e-3);
    BENCH(c, c->ref->chunk_out(p.ref, 0, c->V), c->tier->chunk_out(p.tier, 0, c->V));
  }
}

static void check_chunk_state(struct kcase *c) {
  struct pair p = run_pair(c, STATE, GDN_ROWS_F32);
  check_close_f32("state", p.tier->state, p.ref->state, (int64_t)c->K * c->V, chunk_limit(c));
  /* The operand that comes with the new state is the one that begin would make of it. */
  struct gdn_chunk *x = p.tier;
  size_t inter_bytes = (size_t)c->n * (size_t)c->V * 4;
  float *inter = alloc_f32((int64_t)c->n * c->V);
  c->tier->chunk_residual(x, 0, c->V);
  memcpy(inter, x->inter, inter_bytes);
  c->tier->chunk_begin(x, 0, c->V);
  c->tier->chunk_residual(x, 0, c->V);
  check_same_bits("inter after begin on the new state", inter, x->inter, inter_bytes, 4);
  BENCH(c, c->ref->chunk_state(p.ref, 0, c->V), c->tier->chunk_state(p.tier, 0, c->V));
}

static int bf16_chunks(const struct kcase *c) {
  return strcmp(c->tier->tier, "avx512bf16") == 0 || strcmp(c->tier->tier, "amx") == 0;
}

/* The state inside a chunk is the one that a chunk of those tokens leaves, and asking for it changes nothing else. */
static void check_chunk_state_at(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *undisturbed = run_chunks(c, c->tier, &d, c->V, STATE, GDN_ROWS_F32);
  int64_t n_state = (int64_t)c->K * c->V;
  float *whole = alloc_f32(n_state), *panels = alloc_f32(n_state);
  for (int n_at = 1; n_at < c->n; n_at = n_at * 3 + 2) {
    struct gdn_chunk *x = run_chunks(c, c->tier, &d, c->V, OUT, GDN_ROWS_F32);
    c->tier->chunk_state_at(x, n_at, 0, c->V, whole);
    for (int col = 0; col < c->V; col += 32) {
      /* A bf16 tier's V' holds the columns of the last calls only. */
      struct gdn_chunk *part = bf16_chunks(c) ? run_chunks(c, c->tier, &d, 32, OUT, GDN_ROWS_F32) : x;
      if (bf16_chunks(c)) run_columns(c->tier, part, col, 32, OUT);
      c->tier->chunk_state_at(part, n_at, col, 32, panels + (int64_t)col * c->K);
    }
    check_same_bits("state inside the chunk in slices", whole, panels, (size_t)n_state * 4, 4);
    struct kcase part = *c;
    part.n = n_at;
    struct gdn_chunk *want = run_chunks(&part, c->ref, &d, c->V, STATE, GDN_ROWS_F32);
    /* As bf16, V' of two chunks and a prefix of one. */
    check_close_f32("state inside the chunk", whole, want->state, n_state, bf16_chunks(c) ? 4e-3 : chunk_limit(c));
    c->tier->chunk_state(x, 0, c->V);
    check_same_bits("state after it", x->state, undisturbed->state, (size_t)n_state * 4, 4);
  }
  if (c->n > 1) {
    struct pair p = {run_chunks(c, c->ref, &d, c->V, OUT, GDN_ROWS_F32),
                     run_chunks(c, c->tier, &d, c->V, OUT, GDN_ROWS_F32)};
    BENCH(c, c->ref->chunk_state_at(p.ref, c->n - 1, 0, c->V, whole),
          c->tier->chunk_state_at(p.tier, c->n - 1, 0, c->V, whole));
  }
}

/* ---- chunk form of tiers whose products have bf16 operands ---- */

/* Their operands and what passes between their primitives are their own affair, so every primitive is checked through
 * out and state of a chunk, by float64 from the state before it, with inputs that bring it out. */
struct bf16_inputs {
  const char *row;
  int l2norm, with_gates, with_state, unit_v, with_v;
  int whole_lines; /* out in whole cache lines, next rows known: what a full chunk takes a shorter way for */
  int32_t out_dtype;
};

static const struct bf16_inputs bf16_inputs[] = {
    {"chunk_qk", 0, 1, 1, 0, 1, 0, GDN_ROWS_F32},     {"chunk_gates", 1, 0, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_mask", 1, 1, 0, 1, 1, 0, GDN_ROWS_F32},   {"chunk_solve", 1, 0, 0, 1, 1, 0, GDN_ROWS_F32},
    {"chunk_begin", 1, 1, 1, 0, 0, 0, GDN_ROWS_F32},  {"chunk_residual", 1, 1, 1, 0, 1, 0, GDN_ROWS_F32},
    {"chunk_delta", 1, 0, 1, 0, 1, 0, GDN_ROWS_F32},  {"chunk_out", 1, 1, 1, 0, 1, 0, GDN_ROWS_BF16},
    {"chunk_state", 1, 1, 1, 0, 1, 1, GDN_ROWS_BF16},
};

/* Roundings to bf16 are of up to 2^-8 and independent: a sum of terms that were rounded is off by that of the root of
 * the sum of their squares, and the sizes below are at least that root, of everything that goes into a number. Where
 * one term is all there is, two factors were rounded. */
#define BF16_LIMIT (2 * 0x1p-8)

/* What float64 makes of a chunk, and the sizes of what is added up: out [n][V], of a token; state [V][K], of a column.
 * */
struct bf16_want {
  double *out, *out_size, *state, *state_size;
};

static double norm_of(const double *x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sqrt(sum);
}

static void row_double(const struct gdn_chunk *x, const struct gdn_rows *rows, int i, double mult, double *row) {
  for (int j = 0; j < x->dim_k; j++) row[j] = row_get(rows, i, j);
  if (x->l2norm) {
    double norm = norm_of(row, x->dim_k);
    mult /= sqrt(norm * norm + (double)x->eps);
  }
  for (int j = 0; j < x->dim_k; j++) row[j] *= mult;
}

static struct bf16_want bf16_make_want(const struct gdn_chunk *x, const float *start) {
  const int K = x->dim_k, V = x->dim_v;
  struct bf16_want w = {check_alloc((size_t)(x->n * V) * 8), check_alloc((size_t)x->n * 8),
                        check_alloc((size_t)(V * K) * 8), check_alloc((size_t)V * 8)};
  double column[GDN_DIM_MAX], all = 0, decay_in = 1, q[GDN_DIM_MAX], k[GDN_CHUNK][GDN_DIM_MAX];
  double local[GDN_CHUNK], size[GDN_CHUNK]; /* of token j: exp(G_i - G_j), and the size of its V' */
  for (int v = 0; v < V; v++) {
    for (int j = 0; j < K; j++) w.state[v * K + j] = start[panel_at(K, v, j)];
    column[v] = norm_of(w.state + v * K, K);
    w.state_size[v] = 0;
  }
  all = norm_of(column, V) / sqrt(K);
  for (int i = 0; i < x->n; i++) {
    double decay = x->g_rows.data != NULL ? exp((double)row_get(&x->g_rows, i, 0)) : 1;
    double beta = x->beta_rows.data != NULL ? row_get(&x->beta_rows, i, 0) : 1, sum = 0;
    row_double(x, &x->k_rows, i, 1, k[i]);
    row_double(x, &x->q_rows, i, (double)x->scale, q);
    double k_norm = norm_of(k[i], K), q_norm = norm_of(q, K);
    decay_in *= decay;
    for (int v = 0; v < V; v++) {
      double *s = w.state + v * K, kept = 0, seen = 0;
      for (int j = 0; j < K; j++) kept += (s[j] *= decay) * k[i][j];
      double delta = beta * ((double)row_get(&x->v_rows, i, v) - kept);
      for (int j = 0; j < K; j++) seen += (s[j] += delta * k[i][j]) * q[j];
      w.out[i * V + v] = seen;
      sum += delta * delta;
      w.state_size[v] =
          decay * w.state_size[v] + k_norm * (fabs(delta) + beta * decay_in * k_norm * column[v] / sqrt(K));
    }
    size[i] = sqrt(sum) + beta * decay_in * all * k_norm;
    local[i] = 1;
    w.out_size[i] = q_norm * decay_in * all;
    for (int j = 0; j <= i; j++) {
      double dot = 0;
      if (j < i) local[j] *= decay;
      for (int m = 0; m < K; m++) dot += q[m] * k[j][m];
      w.out_size[i] += fabs(local[j] * dot) * size[j];
    }
  }
  return w;
}

static struct chunk_data bf16_data(struct kcase *c, const struct bf16_inputs *in) {
  struct chunk_data d = random_chunks(c);
  int n = FIRST_LEN + c->n;
  if (in->whole_lines) d.v = random_rows(&c->rng, n, c->V, 32, GDN_ROWS_BF16, -1, 1);
  for (int i = 0; i < n && !in->l2norm; i++) {
    for (int j = 0; j < c->K; j++) { /* norms about 1 */
      row_put(&d.q, i, j, row_get(&d.q, i, j) * sqrtf(3.0f / (float)c->K));
      row_put(&d.k, i, j, row_get(&d.k, i, j) * sqrtf(3.0f / (float)c->K));
    }
  }
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < c->V; j++) {
      if (in->unit_v) row_put(&d.v, i, j, i % GDN_CHUNK == j);
      if (!in->with_v) row_put(&d.v, i, j, 0);
    }
  }
  if (!in->with_gates) d.g.data = d.beta.data = NULL;
  return d;
}

static struct gdn_rows maybe_rows(struct gdn_rows rows, int i) {
  return rows.data != NULL ? rows_from(rows, i) : rows;
}

/* Two chunks, the first always of full length; width columns at a time. start gets the state between them. */
static struct gdn_chunk *bf16_run(struct kcase *c, const struct bf16_inputs *in, const struct chunk_data *d, int width,
                                  float *start) {
  struct gdn_chunk *x = make_chunk(c, d, 1, in->out_dtype);
  struct chunk_data ungated = *d;
  ungated.g = ungated.beta = d->q; /* set_chunk needs rows */
  x->l2norm = in->l2norm;
  if (in->whole_lines) x->out_rows = poison_rows(FIRST_LEN + c->n, c->V, 32, in->out_dtype);
  struct gdn_rows_out all = x->out_rows;
  for (int chunk = 0; chunk < 2; chunk++) {
    int from = chunk * FIRST_LEN;
    set_chunk(x, in->with_gates ? d : &ungated, from, chunk ? c->n : FIRST_LEN);
    x->g_rows = maybe_rows(d->g, from);
    x->beta_rows = maybe_rows(d->beta, from);
    x->next_n = chunk ? 0 : c->n;
    x->next_q = rows_from(d->q, FIRST_LEN);
    x->next_k = rows_from(d->k, FIRST_LEN);
    x->next_v = rows_from(d->v, FIRST_LEN);
    x->out_rows.data = (char *)all.data + from * all.stride_elems * elem_bytes(all.dtype);
    if (chunk && !in->with_state) memset(x->state, 0, (size_t)c->K * (size_t)c->V * 4);
    if (chunk) memcpy(start, x->state, (size_t)c->K * (size_t)c->V * 4);
    run_stages(c->tier, x, width, chunk == 0 || !in->with_state, STATE);
  }
  check_gaps(&all, FIRST_LEN + c->n, c->V);
  return x;
}

static void bf16_compare(const struct kcase *c, const struct bf16_inputs *in, const struct gdn_chunk *x,
                         const struct bf16_want *w) {
  struct gdn_rows out = {x->out_rows.data, x->out_rows.stride_elems, in->out_dtype};
  double error[GDN_DIM_MAX];
  for (int i = 0; i < c->n; i++) {
    for (int v = 0; v < c->V; v++) error[v] = (double)row_get(&out, i, v) - w->out[i * c->V + v];
    double own = in->out_dtype == GDN_ROWS_BF16 ? norm_of(w->out + i * c->V, c->V) : 0;
    check_limit("out of a token over what it is made of", norm_of(error, c->V) / (w->out_size[i] + own + 1e-30),
                BF16_LIMIT);
  }
  for (int v = 0; v < c->V; v++) {
    for (int j = 0; j < c->K; j++) error[j] = (double)x->state[panel_at(c->K, v, j)] - w->state[v * c->K + j];
    double own = norm_of(w->state + v * c->K, c->K) * 0x1p-15; /* f32 sums, decays as products of up to 64 */
    check_limit("column of the state over what is added", (norm_of(error, c->K) - own) / (w->state_size[v] + 1e-30),
                BF16_LIMIT);
  }
}

static void check_bf16(struct kcase *c) {
  const struct bf16_inputs *in = bf16_inputs;
  while (strcmp(in->row, c->name) != 0) in++;
  struct chunk_data d = bf16_data(c, in);
  size_t state_bytes = (size_t)c->K * (size_t)c->V * 4;
  float *start = check_alloc(state_bytes);
  struct gdn_chunk *slices = bf16_run(c, in, &d, 32, start), *x = bf16_run(c, in, &d, c->V, start);
  struct bf16_want w = bf16_make_want(x, start);
  bf16_compare(c, in, x, &w);
  check_same_bits("state in slices", x->state, slices->state, state_bytes, 4);
  for (int i = 0; i < c->n; i++) {
    int64_t at = i * x->out_rows.stride_elems * elem_bytes(in->out_dtype);
    check_same_bits("out in slices", (char *)x->out_rows.data + at, (char *)slices->out_rows.data + at,
                    (size_t)(c->V * elem_bytes(in->out_dtype)), (size_t)elem_bytes(in->out_dtype));
  }
}

/* begin and end leave the thread as it was, floating-point control included. */
static void check_thread_begin(struct kcase *c) {
  unsigned before = __builtin_ia32_stmxcsr();
  for (int i = 0; i < 2; i++) c->tier->thread_end(c->tier->thread_begin());
  unsigned after = __builtin_ia32_stmxcsr();
  if (before != after) check_fail("floating-point control was %#x, is %#x", before, after);
  BENCH(c, c->ref->thread_begin(), c->tier->thread_begin());
}

static void check_thread_end(struct kcase *c) {
  uint32_t saved = c->tier->thread_begin();
  check_dot_rows(c);
  c->tier->thread_end(saved);
  BENCH(c, c->ref->thread_end(saved), c->tier->thread_end(saved));
}

/* ---- the walk ---- */

/* A row of GDN_KERNEL_LIST without a check_<row> above does not compile. */
static const struct {
  const char *name;
  void (*fn)(struct kcase *);
} checks[] = {
#define CHECK_ROW(name) {#name, check_##name},
    GDN_KERNEL_LIST(CHECK_ROW)
#undef CHECK_ROW
};

static const int test_lens[] = {1, 15, 16, 17, 33, 63, 64};
static const int test_dims[][2] = {{32, 32},  {64, 64},  {96, 128}, {128, 96}, {128, 128},
                                   {160, 32}, {32, 160}, {256, 64}, {64, 256}, {256, 256}};
/* Where vectors are emulated. */
static const int quick_dims[][2] = {{32, 64}, {64, 32}, {128, 128}, {160, 96}};
static const int bench_lens[] = {64};
static const int bench_dims[][2] = {{64, 64}, {128, 128}};

static const struct gdn_kernels *begun;

/* A failed check leaves its thread begun. */
static int kernel_teardown(void **state) {
  if (begun != NULL) begun->thread_end(0);
  begun = NULL;
  return check_teardown(state);
}

static void run_check(size_t row, const struct gdn_kernels *ref, const struct gdn_kernels *tier) {
  const int *lens = bench_mode ? bench_lens : test_lens;
  const int(*dims)[2] = bench_mode ? bench_dims : check_quick() ? quick_dims : test_dims;
  size_t n_lens = bench_mode ? 1 : sizeof test_lens / sizeof test_lens[0];
  size_t n_dims = bench_mode ? 2 : check_quick() ? 4 : sizeof test_dims / sizeof test_dims[0];
  for (size_t i = 0; i < n_dims; i++) {
    for (size_t j = 0; j < n_lens; j++) {
      struct kcase c = {
          .ref = ref, .tier = tier, .n = lens[j], .K = dims[i][0], .V = dims[i][1], .name = checks[row].name};
      c.rng = check_case("%s/n%d_k%d_v%d/%s", c.name, c.n, c.K, c.V, tier->tier);
      /* The check of begin and end calls them itself. */
      int chunk = strncmp(c.name, "chunk_", 6) == 0;
      if (chunk) begun = c.tier;
      uint32_t saved = chunk ? c.tier->thread_begin() : 0;
      if (chunk && bf16_chunks(&c) && strcmp(c.name, "chunk_state_at") != 0 && !bench_mode)
        check_bf16(&c);
      else
        checks[row].fn(&c);
      if (chunk) c.tier->thread_end(saved);
      begun = NULL;
      check_free_all();
    }
  }
}

/* Tiers that the processor has and that GDN_ISA, if set, does not cap. */
static int tier_usable(int i, const struct gdn_cpu *cpu) {
  static int capped;
  const char *cap = getenv("GDN_ISA");
  char text[128];
  if (i > 0 && cap != NULL && strcmp(gdn_tiers[i - 1].name, cap) == 0) capped = 1;
  if (gdn_tiers[i].fill == NULL) {
    check_skip(gdn_tiers[i].name, "not in this build");
  } else if ((gdn_tiers[i].cpu_flags & ~cpu->flags) != 0) {
    check_skip(gdn_tiers[i].name, gdn_cpu_missing(cpu, gdn_tiers[i].cpu_flags, text, sizeof text));
  } else if (capped) {
    check_skip(gdn_tiers[i].name, "capped by GDN_ISA");
  } else if (!check_tier_wanted(gdn_tiers[i].name)) {
    return 0;
  } else {
    return 1;
  }
  return 0;
}

#define N_CHECKS (sizeof checks / sizeof checks[0])
#define MAX_TIERS 8

/* One cmocka test: a primitive of a tier. For ref itself definitions and identities are what is checked. */
struct kernel_test {
  size_t row;
  int tier;
  char name[64];
};

static void kernel_agrees(void **state) {
  const struct kernel_test *test = *state;
  struct gdn_kernels ref, tier;
  gdn_kernels_fill(&ref, 0);
  gdn_kernels_fill(&tier, test->tier);
  run_check(test->row, &ref, test->tier == 0 ? &ref : &tier);
}

/* A table has no null entry, and each tier really is another one. */
static void kernels_tables_are_complete(void **state) {
  (void)state;
  for (int i = 0; i < gdn_n_tiers; i++) {
    if (gdn_tiers[i].fill == NULL) continue;
    check_case("table/%s", gdn_tiers[i].name);
    struct gdn_kernels t;
    memset(&t, 0, sizeof t);
    gdn_kernels_fill(&t, i);
    if (strcmp(t.tier, gdn_tiers[i].name) != 0) check_fail("names itself %s", t.tier);
    if (t.recur_cols != 32 && t.recur_cols != 64) check_fail("recur_cols = %d", t.recur_cols);
#define CHECK_ENTRY(name)                                                                                              \
  if (t.name == NULL) check_fail(#name " is null");
    GDN_KERNEL_LIST(CHECK_ENTRY)
#undef CHECK_ENTRY
  }
}

int main(int argc, char **argv) {
  static struct kernel_test kernel_tests[MAX_TIERS * N_CHECKS];
  static struct CMUnitTest tests[1 + MAX_TIERS * N_CHECKS];
  struct gdn_cpu cpu;
  size_t n = 0;
  bench_mode = argc > 1 && strcmp(argv[1], "--bench") == 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  gdn_cpu_detect(&cpu);
  if (strstr(cpu.name, "emulated") != NULL) printf("emulated: every tier above ref\n");
  for (int i = 0; i < gdn_n_tiers && i < MAX_TIERS; i++) {
    if (!tier_usable(i, &cpu)) continue;
    for (size_t row = 0; row < N_CHECKS; row++) {
      struct kernel_test *t = &kernel_tests[n];
      t->row = row;
      t->tier = i;
      snprintf(t->name, sizeof t->name, "%s/%s", checks[row].name, gdn_tiers[i].name);
      tests[n++] = (struct CMUnitTest){t->name, kernel_agrees, NULL, kernel_teardown, t};
    }
  }
  tests[n++] = (struct CMUnitTest)cmocka_unit_test(kernels_tables_are_complete);
  return check_summary("test_kernels", _cmocka_run_group_tests("kernels", tests, n, NULL, NULL));
}
