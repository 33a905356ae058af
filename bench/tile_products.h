/* SPDX-License-Identifier: Apache-2.0
 * The tile loops of the amx tier with nothing between them; the file behind is built with that tier's flags. */
#ifndef GDN_BENCH_TILE_PRODUCTS_H
#define GDN_BENCH_TILE_PRODUCTS_H

#include <stdint.h>

/* Around everything else, in each thread. */
void tile_products_begin(void);
void tile_products_end(void);
/* Four products of 16 x 16 x 32 a round, on registers alone, which hold 4 KiB of operands. */
void tile_products_peak(int64_t rounds, const char *operands);
/* Those of one chunk of n tokens: one q/k head and its group of value heads. operands: 1 MiB of bf16, aligned to 64. */
void tile_products_chunk(int n, int dim_k, int dim_v, int group, char *operands);
/* C [m][n] f32 = A [m][k] B, or C += with accumulate; sizes multiples of 32. B and C in panels of 32 columns: [n / 32]
 * [k / 32][2][16 pairs][16][2] and [n / 32][m][32]. */
void tile_products_whole(int m, int n, int k, int accumulate, const char *a, const char *b, float *c);

#endif
