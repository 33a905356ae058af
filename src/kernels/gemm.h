/* SPDX-License-Identifier: Apache-2.0
 * Row-major view of libxsmm's batch-reduce product in f32; gemm.c is the only user of libxsmm.h.
 * Handles are made once per pair of head sizes and are immutable; running one allocates nothing. */
#ifndef GDN_GEMM_H
#define GDN_GEMM_H

#include <stdint.h>

/* C [m][n] = A [m][k] B [k][n], or C += with accumulate; leading dimensions in elements. */
struct gdn_gemm_shape {
  int m, n, k, lda, ldb, ldc;
  int accumulate;
};

struct gdn_gemm {
  struct gdn_gemm_shape shape;
  void (*jit)(void); /* libxsmm kernel; null = plain loop */
};

/* Index b stands for 16 (b + 1) rows, or for that many columns of a triangular operand. */
struct gdn_gemms {
  int dim_k, dim_v;
  struct gdn_gemm scores[4];  /* [16][16 (b + 1)] = q or k [16][K] . kt [K][64] */
  struct gdn_gemm project[4]; /* [16 (b + 1)][32] = q or k [][K] . state panel [K][32], into [64][V] */
  struct gdn_gemm tri[4];     /* [16][32] = t [16][16 (b + 1)] . [..][V] */
  struct gdn_gemm tri_add[4]; /* [16][32] += a [16][16 (b + 1)] . [..][V] */
  struct gdn_gemm update[4];  /* state panel [K][32] += kt [K][16 (b + 1)] . [..][V] */
};

/* Makes one product; falls back to the plain loop where libxsmm has no kernel. */
void gdn_gemm_make(struct gdn_gemm *g, struct gdn_gemm_shape shape);
void gdn_gemm_run(const struct gdn_gemm *g, const float *a, const float *b, float *c);
/* All products of the chunk form; use_jit 0 = plain loops. */
void gdn_gemms_make(struct gdn_gemms *g, int dim_k, int dim_v, int use_jit);
const char *gdn_gemm_provider(void);        /* "libxsmm", or "own" where it makes no kernels, only plain loops run */
const char *gdn_gemm_libxsmm_version(void); /* "1.17.0", of the headers built against */

#endif
