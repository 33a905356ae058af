/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, states in and out: against their definitions, ref too. */
#include <math.h>
#include <string.h>

#include "inputs.h"
#include "kernel_case.h"
#include "oracle.h"

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

void check_load_rows(struct kcase *c) {
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

void check_norm_rows(struct kcase *c) {
  for (int l2norm = 0; l2norm <= 1; l2norm++) {
    norm_rows_case(c, GDN_ROWS_BF16, l2norm);
    norm_rows_case(c, GDN_ROWS_F32, l2norm);
  }
}

void check_dot_rows(struct kcase *c) {
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

void check_gates(struct kcase *c) {
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

void check_store_rows(struct kcase *c) {
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

void check_state_load(struct kcase *c) {
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

void check_state_store(struct kcase *c) {
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

/* begin and end leave the thread as it was, floating-point control included. */
void check_thread_begin(struct kcase *c) {
  unsigned before = __builtin_ia32_stmxcsr();
  for (int i = 0; i < 2; i++) c->tier->thread_end(c->tier->thread_begin());
  unsigned after = __builtin_ia32_stmxcsr();
  if (before != after) check_fail("floating-point control was %#x, is %#x", before, after);
  BENCH(c, c->ref->thread_begin(), c->tier->thread_begin());
}

void check_thread_end(struct kcase *c) {
  uint32_t saved = c->tier->thread_begin();
  check_dot_rows(c);
  c->tier->thread_end(saved);
  BENCH(c, c->ref->thread_end(saved), c->tier->thread_end(saved));
}
