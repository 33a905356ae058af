/* SPDX-License-Identifier: Apache-2.0
 * The f32 product that tiers without matrix hardware are measured by. */
#include "f32_products.h"

#include <stdlib.h>

#define M 64
#define N 128
#define K 128
#define ELEMS (M * K + K * N + M * N)

static void fill_worker(void *arg, int32_t worker, int32_t n_workers) {
  float *operands = ((struct f32_products *)arg)->operands + (int64_t)worker * ELEMS;
  (void)n_workers;
  for (int i = 0; i < ELEMS; i++) {
    operands[i] = (float)(i % 17) * 0.01f;
  }
}

int f32_products_create(struct f32_products *p, gdn_ctx *ctx, int n_threads) {
  p->operands = bench_alloc((int64_t)n_threads * ELEMS, sizeof(float));
  if (!p->operands) {
    return bench_error("out of memory for reference products");
  }
  gdn_gemm_make(&p->gemm, (struct gdn_gemm_shape){.m = M, .n = N, .k = K, .lda = K, .ldb = N, .ldc = N});
  return bench_check(gdn_ctx_run(ctx, fill_worker, p), "gdn_ctx_run");
}

void f32_products_destroy(struct f32_products *p) {
  free(p->operands);
}

void f32_products_one(const struct f32_products *p, int worker) {
  float *a = p->operands + (int64_t)worker * ELEMS;
  gdn_gemm_run(&p->gemm, a, a + M * K, a + M * K + K * N);
}
