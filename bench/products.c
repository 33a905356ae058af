/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench products: the amx tier's products, by its own tile loops and by libxsmm's AMX brgemm where libxsmm is 2.0
 * or later, in turns on one worker, operands in cache. Which of the two the tier uses was chosen by this: for panels of
 * 32 columns they are within 2 % of each other, and only the own loops have room for vector work between products. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"

#ifdef GDN_HAVE_AMX
#include <libxsmm.h>

#include "tile_products.h"

#define OPERAND_BYTES ((int64_t)1 << 18)
/* Of one run: the tile configuration, set once a run, then costs under a thousandth. */
#define RUN_FLOPS 2e8

enum { N_PRODUCTS = 8, OWN = 0, JIT = 1, SIDES = 2 };

/* C [m][n] f32 (+)= A [m][k] bf16, row after row, times B [k][n] in pairs along k. */
struct product {
  const char *what;
  int m, n, k, accumulate;
};

/* One side of one product. own: B and C in panels of 32 columns; libxsmm: in whole rows. */
struct side {
  const struct product *product;
  gdn_ctx *ctx;
  int n_calls; /* of one run */
  char *a, *b;
  float *c;
#if LIBXSMM_CONFIG_VERSION_MAJOR >= 2
  libxsmm_gemmfunction run;
  libxsmm_tilecfgfunction configure, release;
#endif
};

struct products {
  const struct bench_options *options;
  struct bench_session session;
  struct product products[N_PRODUCTS];
  struct side sides[N_PRODUCTS][SIDES];
  struct measure_case cases[N_PRODUCTS * SIDES];
  double difference[N_PRODUCTS]; /* of the two results, relative L2 */
};

static double flops(const struct product *p) {
  return 2.0 * p->m * p->n * p->k;
}

static void own_worker(void *arg, int32_t worker, int32_t n_workers) {
  const struct side *s = arg;
  const struct product *p = s->product;
  (void)n_workers;
  if (worker != 0) return;
  tile_products_begin();
  for (int i = 0; i < s->n_calls; i++) tile_products_whole(p->m, p->n, p->k, p->accumulate, s->a, s->b, s->c);
  tile_products_end();
}

static int own_run(void *arg) {
  struct side *s = arg;
  return bench_check(gdn_ctx_run(s->ctx, own_worker, s), "gdn_ctx_run");
}

#if LIBXSMM_CONFIG_VERSION_MAJOR >= 2

static void jit_worker(void *arg, int32_t worker, int32_t n_workers) {
  const struct side *s = arg;
  unsigned long long one = 1;
  libxsmm_gemm_param p = {0};
  (void)n_workers;
  if (worker != 0) return;
  /* Column-major: the transposes, in reverse order. */
  p.op.tertiary = &one;
  p.a.primary = s->b;
  p.b.primary = s->a;
  p.c.primary = s->c;
  s->configure(NULL);
  for (int i = 0; i < s->n_calls; i++) s->run(&p);
  s->release(NULL);
}

static int jit_run(void *arg) {
  struct side *s = arg;
  return bench_check(gdn_ctx_run(s->ctx, jit_worker, s), "gdn_ctx_run");
}

/* 0 where libxsmm makes no such kernel. */
static int dispatch(struct side *s) {
  const struct product *p = s->product;
  const libxsmm_gemm_shape shape =
      libxsmm_create_gemm_shape(p->n, p->m, p->k, p->n, p->k, p->n, LIBXSMM_DATATYPE_BF16, LIBXSMM_DATATYPE_BF16,
                                LIBXSMM_DATATYPE_F32, LIBXSMM_DATATYPE_F32);
  const libxsmm_gemm_batch_reduce_config batch =
      libxsmm_create_gemm_batch_reduce_config(LIBXSMM_GEMM_BATCH_REDUCE_STRIDE, 0, 0, 0);
  const libxsmm_bitfield flags = LIBXSMM_GEMM_FLAG_VNNI_A | (p->accumulate ? 0u : (unsigned)LIBXSMM_GEMM_FLAG_BETA_0);
  const libxsmm_bitfield no_setup = LIBXSMM_GEMM_FLAG_NO_SETUP_TILECONFIG;
  const libxsmm_bitfield no_reset = LIBXSMM_GEMM_FLAG_NO_RESET_TILECONFIG;
  s->run = libxsmm_dispatch_brgemm(shape, flags | no_setup | no_reset, LIBXSMM_GEMM_PREFETCH_NONE, batch);
  s->configure = libxsmm_dispatch_tilecfg_gemm(shape, flags | no_reset);
  s->release = libxsmm_dispatch_tilecfg_gemm(shape, flags | no_setup);
  return s->run && s->configure && s->release;
}

#else

static int jit_run(void *arg) {
  (void)arg;
  return BENCH_UNABLE;
}

static int dispatch(struct side *s) {
  (void)s;
  return 0;
}

#endif

/* ---- operands ---- */

static void make_products(struct products *p) {
  const int k = (int)p->options->dim_k, v = (int)p->options->dim_v;
  const struct product all[N_PRODUCTS] = {{"K S and Q S, a panel", 64, 32, k, 0},
                                          {"the same, whole", 64, v, k, 0},
                                          {"N R and L V', a panel", 32, 32, 32, 1},
                                          {"the same, whole", 32, v, 32, 1},
                                          {"A V', a panel", 64, 32, 64, 0},
                                          {"the same, whole", 64, v, 64, 0},
                                          {"K V' of the state, a panel", k, 32, 64, 0},
                                          {"the same, whole", k, v, 64, 0}};
  memcpy(p->products, all, sizeof all);
}

/* Element [i][j] of B or C where panels of 32 columns follow each other. */
static int64_t panel_c(const struct product *p, int i, int j) {
  return ((int64_t)(j / 32) * (p->m / 32) + i / 32) * 1024 + i % 32 * 32 + j % 32;
}

static int64_t panel_b(const struct product *p, int i, int j) {
  return (int64_t)(j / 32) * p->k * 32 + i / 32 * 1024 + j % 32 / 16 * 512 + i % 32 / 2 * 32 + j % 16 * 2 + i % 2;
}

static int make_sides(struct products *p, int i) {
  const struct product *x = &p->products[i];
  struct side *sides = p->sides[i];
  uint64_t state = (uint64_t)i + 1;
  for (int side = 0; side < SIDES; side++) {
    sides[side] = (struct side){.product = x, .ctx = p->session.ctx, .n_calls = (int)(RUN_FLOPS / flops(x)) + 1};
    sides[side].a = bench_alloc(3 * OPERAND_BYTES, 1);
    if (!sides[side].a) return bench_error("out of memory for products");
    memset(sides[side].a, 0, 3 * OPERAND_BYTES);
    sides[side].b = sides[side].a + OPERAND_BYTES;
    sides[side].c = (float *)(sides[side].b + OPERAND_BYTES);
  }
  for (int e = 0; e < x->m * x->k + x->k * x->n; e++) {
    const int at = e - x->m * x->k, row = at / x->n, column = at % x->n;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const uint16_t number = (uint16_t)((state >> 63) << 15 | (0x3f00 + (state >> 40) % 256)); /* 0.5 .. 2, -2 .. -0.5 */
    if (at < 0) {
      ((uint16_t *)sides[OWN].a)[e] = ((uint16_t *)sides[JIT].a)[e] = number;
    } else {
      ((uint16_t *)sides[OWN].b)[panel_b(x, row, column)] = number;
      ((uint16_t *)sides[JIT].b)[(row / 2 * x->n + column) * 2 + row % 2] = number;
    }
  }
  const int jit = dispatch(&sides[JIT]);
  p->cases[SIDES * i + OWN] = (struct measure_case){.run = own_run, .arg = &sides[OWN]};
  p->cases[SIDES * i + JIT] = (struct measure_case){.run = jit ? jit_run : NULL, .arg = &sides[JIT]};
  return BENCH_OK;
}

/* Of a single call each, on sums of zero. */
static int compare(struct products *p, int i) {
  const struct product *x = &p->products[i];
  struct side *sides = p->sides[i];
  double error = 0, norm = 0;
  p->difference[i] = NAN;
  if (!p->cases[SIDES * i + JIT].run) return BENCH_OK;
  for (int side = 0; side < SIDES; side++) {
    const int n_calls = sides[side].n_calls;
    sides[side].n_calls = 1;
    int status = p->cases[SIDES * i + side].run(&sides[side]);
    sides[side].n_calls = n_calls;
    if (status != BENCH_OK) return status;
  }
  for (int row = 0; row < x->m; row++)
    for (int column = 0; column < x->n; column++) {
      const double a = sides[OWN].c[panel_c(x, row, column)], b = sides[JIT].c[row * x->n + column];
      error += (a - b) * (a - b);
      norm += a * a;
    }
  p->difference[i] = sqrt(error / norm);
  return BENCH_OK;
}

/* ---- report ---- */

/* Of one product. */
static double gflops(const struct products *p, int i, int side) {
  return flops(&p->products[i]) * p->sides[i][side].n_calls / p->cases[SIDES * i + side].stats.median_us * 1e-3;
}

static double own_over_libxsmm(const struct products *p, int i) {
  return p->cases[SIDES * i + JIT].run ? gflops(p, i, OWN) / gflops(p, i, JIT) : NAN;
}

static void print_json(const struct products *p) {
  struct json j = {.file = stdout};
  json_begin_object(&j, NULL);
  json_string(&j, "command", "products");
  json_string(&j, "isa", p->session.info.isa);
  json_string(&j, "product_provider", p->session.info.product_provider);
  json_begin_array(&j, "products");
  for (int i = 0; i < N_PRODUCTS; i++) {
    const struct product *x = &p->products[i];
    json_begin_object(&j, NULL);
    json_int(&j, "m", x->m);
    json_int(&j, "n", x->n);
    json_int(&j, "k", x->k);
    json_bool(&j, "accumulate", x->accumulate);
    json_number(&j, "own_gflops", gflops(p, i, OWN));
    json_number(&j, "libxsmm_gflops", p->cases[SIDES * i + JIT].run ? gflops(p, i, JIT) : NAN);
    json_number(&j, "own_over_libxsmm", own_over_libxsmm(p, i));
    json_number(&j, "rel_l2", p->difference[i]);
    json_end_object(&j);
  }
  json_end_array(&j);
  bench_conditions_json(&j, &p->session);
  json_end_object(&j);
}

static int print_text(const struct products *p) {
  static const char *const headers[] = {"product", "m", "n", "k", "own GFLOP/s", "libxsmm", "own / libxsmm", "rel L2"};
  bench_conditions_print(&p->session);
  printf("products of the chunk form in bf16 on tiles, one worker, operands in cache\n\n");
  struct table t;
  table_begin(&t, 8, headers);
  for (int i = 0; i < N_PRODUCTS; i++) {
    const struct product *x = &p->products[i];
    const int both = p->cases[SIDES * i + JIT].run != NULL;
    table_cell(&t, "%s", x->what);
    table_cell(&t, "%d", x->m);
    table_cell(&t, "%d", x->n);
    table_cell(&t, "%d", x->k);
    table_cell(&t, "%.0f", gflops(p, i, OWN));
    table_cell(&t, both ? "%.0f" : "-", both ? gflops(p, i, JIT) : 0);
    table_cell(&t, both ? "%.2f" : "-", own_over_libxsmm(p, i));
    table_cell(&t, both ? "%.1e" : "-", p->difference[i]);
  }
  return table_end(&t, stdout) ? BENCH_OK : bench_error("out of memory for the table");
}

static int measure(struct products *p) {
  int status = BENCH_OK;
  make_products(p);
  for (int i = 0; i < N_PRODUCTS && status == BENCH_OK; i++) {
    status = make_sides(p, i);
    if (status == BENCH_OK) status = compare(p, i);
  }
  if (status == BENCH_OK) {
    status = measure_interleaved(p->cases, N_PRODUCTS * SIDES, p->options->seconds, "products");
  }
  if (status == BENCH_OK && p->options->json) {
    print_json(p);
  } else if (status == BENCH_OK) {
    status = print_text(p);
  }
  for (int i = 0; i < N_PRODUCTS * SIDES; i++) free(p->sides[i / SIDES][i % SIDES].a);
  return status;
}

int bench_products(const struct bench_options *o) {
  struct products p = {.options = o};
  struct bench_options one = *o;
  one.threads = 1;
  int status = bench_open(&one, &p.session);
  if (status == BENCH_OK && strcmp(p.session.info.isa, "amx") != 0) {
    status = bench_error("products: tile products need the tier amx; the tier here is %s", p.session.info.isa);
  } else if (o->dim_k % 32 != 0 || o->dim_v % 32 != 0) {
    status =
        bench_error("--dim-k %lld, --dim-v %lld: expected multiples of 32", (long long)o->dim_k, (long long)o->dim_v);
  } else if (status == BENCH_OK) {
    status = measure(&p);
  }
  bench_close(&p.session);
  return status;
}

#else

int bench_products(const struct bench_options *o) {
  (void)o;
  return bench_error("products: this build has no tile products");
}

#endif
