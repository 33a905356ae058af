/* SPDX-License-Identifier: Apache-2.0
 * The f32 product that tiers without matrix hardware are measured by: 64 x 128 x 128, operands in a worker's cache. */
#ifndef GDN_BENCH_F32_PRODUCTS_H
#define GDN_BENCH_F32_PRODUCTS_H

#include "bench.h"
#include "kernels/gemm.h"

#define F32_PRODUCT_FLOPS (2.0 * 64 * 128 * 128)

struct f32_products {
  struct gdn_gemm gemm;
  float *operands; /* of each worker */
};

/* Each worker fills its own operands. Status as everywhere in the bench, with its text printed. */
int f32_products_create(struct f32_products *p, gdn_ctx *ctx, int n_threads);
void f32_products_destroy(struct f32_products *p);
/* One product on a worker's operands. */
void f32_products_one(const struct f32_products *p, int worker);

#endif
