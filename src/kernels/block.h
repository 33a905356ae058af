/* SPDX-License-Identifier: Apache-2.0
 * A product of bf16 blocks and the vector work that runs beside it, as the bf16 chunk kernels see them. */
#ifndef GDN_BLOCK_H
#define GDN_BLOCK_H

#include <stdint.h>

#include "kernels/kernels.h"

/* A [rows][32 steps] with rows row_bytes apart, B [steps][2 tiles][16 pairs][16 columns][2]. */
struct block {
  const char *a, *b;
  int64_t row_bytes;
  const char *ahead; /* lines to prefetch meanwhile, ahead_bytes apart */
  int64_t ahead_bytes;
};

/* Vector work on a block, in numbered units that may run in any place but in order. */
struct job {
  const struct gdn_chunk *c;
  const float *src;
  float *sums;
  void *dst, *op;
  const float *weights; /* of rows */
  float factor;
  int row, col;
  int fresh;            /* the state was zero */
  const char *ahead[2]; /* lines to prefetch, ahead_rows a unit; null = none */
  int64_t ahead_bytes[2];
  int ahead_rows;
};
typedef void fill_fn(const struct job *j, int unit);

#endif
