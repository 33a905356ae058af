/* SPDX-License-Identifier: Apache-2.0
 * What AMX tiles can do at best on the workers of a context: products on registers alone, and a call's own products
 * with nothing between them. */
#ifndef GDN_BENCH_TILES_H
#define GDN_BENCH_TILES_H

#include "bench.h"

struct tiles;
/* Null when out of memory, or where this build has no AMX kernels; ctx runs on the tier amx. */
struct tiles *tiles_create(const struct bench_batch *b, gdn_ctx *ctx, int n_threads);
void tiles_destroy(struct tiles *t);
/* Cases of measure.h; arg is a struct tiles. */
int tiles_products_run(void *arg); /* the chunk form's products of the whole batch, back to back, operands in cache */
int tiles_peak_run(void *arg);     /* as many operations as tiles_peak_flops says */
double tiles_peak_flops(const struct tiles *t);
/* One worker's products of whole chunks of one q/k head, back to back until the clock of measure.h passes end_us: how
 * many chunks. */
int64_t tiles_chunks_until(struct tiles *t, int worker, double end_us);
/* Operations of the chunk form as papers count them: n tokens of a chunk are 4 n n K per q/k head (K K^T, Q K^T) and
 * 6 n K V + 4 n n V per value head, whatever kernels really do. */
double tiles_nominal_flops(const struct bench_batch *b);

#endif
