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
  int steps;
  const char *ahead; /* lines to prefetch meanwhile, ahead_bytes apart */
  int64_t ahead_bytes;
};

/* Vector work on a block, in numbered units that may run in any place but in order. */
struct job {
  const struct gdn_chunk *c;
  void *hot; /* what the primitive keeps in c->hot */
  const float *src;
  float *sums;
  void *dst, *op;
  const float *weights;      /* of rows */
  const char *rows;          /* v in the caller's memory */
  int64_t row_bytes;         /* from one of rows to the next, or of dst where that is out */
  float factor, sums_factor; /* of the state, of sums */
  int row, col;
  int fresh;  /* the state was zero */
  int behind; /* there is a panel before */
};
typedef void fill_fn(const struct job *j, int unit);

#endif
