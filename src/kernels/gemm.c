/* SPDX-License-Identifier: Apache-2.0
 * Products of the chunk form through libxsmm's f32 batch-reduce kernels, of 1.17 or of 2.x.
 * libxsmm is column-major: C = A B of row-major operands is its C^T = B^T A^T, so operands and sizes swap. */
#include "gemm.h"

#include <libxsmm.h>

#include "kernels.h"

/* Every product here is one block. Cutting k into batches of 16, which would let one kernel serve every length, was
 * up to 4 % slower with 1.17 on AVX2; a batch of one is within 1 % of the kernel without a batch (Zen 4). */
static const unsigned long long one_block = 1;

#if LIBXSMM_CONFIG_VERSION_MAJOR >= 2

static void (*dispatch(const struct gdn_gemm_shape *s))(void) {
  const libxsmm_gemm_shape shape =
      libxsmm_create_gemm_shape(s->n, s->m, s->k, s->ldb, s->lda, s->ldc, LIBXSMM_DATATYPE_F32, LIBXSMM_DATATYPE_F32,
                                LIBXSMM_DATATYPE_F32, LIBXSMM_DATATYPE_F32);
  const libxsmm_gemm_batch_reduce_config batch =
      libxsmm_create_gemm_batch_reduce_config(LIBXSMM_GEMM_BATCH_REDUCE_STRIDE, 0, 0, 0);
  const libxsmm_bitfield flags = s->accumulate ? LIBXSMM_GEMM_FLAG_NONE : LIBXSMM_GEMM_FLAG_BETA_0;
  return (void (*)(void))libxsmm_dispatch_brgemm(shape, flags, LIBXSMM_GEMM_PREFETCH_NONE, batch);
}

static void run_jit(void (*jit)(void), const float *a, const float *b, float *c) {
  libxsmm_gemm_param p = {0};
  p.op.tertiary = (void *)&one_block;
  p.a.primary = (void *)b;
  p.b.primary = (void *)a;
  p.c.primary = c;
  ((libxsmm_gemmfunction)jit)(&p);
}

#else

static void (*dispatch(const struct gdn_gemm_shape *s))(void) {
  const float alpha = 1, beta = s->accumulate ? 1 : 0;
  const int flags = LIBXSMM_GEMM_FLAG_NONE, prefetch = LIBXSMM_GEMM_PREFETCH_NONE;
  return (void (*)(void))libxsmm_smmdispatch_reducebatch_strd(s->n, s->m, s->k, 0, 0, &s->ldb, &s->lda, &s->ldc, &alpha,
                                                              &beta, &flags, &prefetch);
}

static void run_jit(void (*jit)(void), const float *a, const float *b, float *c) {
  ((libxsmm_smmfunction_reducebatch_strd)jit)(b, a, c, &one_block);
}

#endif

static void run_plain(const struct gdn_gemm_shape *s, const float *a, const float *b, float *c) {
  for (int i = 0; i < s->m; i++) {
    float *restrict row = c + (int64_t)i * s->ldc;
    if (!s->accumulate)
      for (int j = 0; j < s->n; j++) row[j] = 0;
    for (int p = 0; p < s->k; p++) {
      const float x = a[(int64_t)i * s->lda + p];
      const float *b_row = b + (int64_t)p * s->ldb;
      for (int j = 0; j < s->n; j++) row[j] += x * b_row[j];
    }
  }
}

void gdn_gemm_make(struct gdn_gemm *g, struct gdn_gemm_shape shape) {
  g->shape = shape;
  g->jit = dispatch(&shape);
}

void gdn_gemm_run(const struct gdn_gemm *g, const float *a, const float *b, float *c) {
  if (g->jit)
    run_jit(g->jit, a, b, c);
  else
    run_plain(&g->shape, a, b, c);
}

static void make(struct gdn_gemm *g, struct gdn_gemm_shape shape, int use_jit) {
  if (use_jit)
    gdn_gemm_make(g, shape);
  else
    *g = (struct gdn_gemm){.shape = shape};
}

void gdn_gemms_make(struct gdn_gemms *g, int dim_k, int dim_v, int use_jit) {
  g->dim_k = dim_k;
  g->dim_v = dim_v;
  for (int b = 0; b < GDN_CHUNK / GDN_BLOCK; b++) {
    const int len = GDN_BLOCK * (b + 1);
    make(&g->scores[b], (struct gdn_gemm_shape){GDN_BLOCK, len, dim_k, dim_k, GDN_CHUNK, GDN_CHUNK, 0}, use_jit);
    make(&g->project[b], (struct gdn_gemm_shape){len, GDN_PANEL, dim_k, dim_k, GDN_PANEL, dim_v, 0}, use_jit);
    make(&g->tri[b], (struct gdn_gemm_shape){GDN_BLOCK, GDN_PANEL, len, GDN_CHUNK, dim_v, dim_v, 0}, use_jit);
    make(&g->tri_add[b], (struct gdn_gemm_shape){GDN_BLOCK, GDN_PANEL, len, GDN_CHUNK, dim_v, dim_v, 1}, use_jit);
    make(&g->update[b], (struct gdn_gemm_shape){dim_k, GDN_PANEL, len, GDN_CHUNK, dim_v, GDN_PANEL, 1}, use_jit);
  }
}

const char *gdn_gemm_provider(void) {
  struct gdn_gemm probe;
  gdn_gemm_make(&probe, (struct gdn_gemm_shape){GDN_BLOCK, GDN_PANEL, GDN_BLOCK, GDN_CHUNK, GDN_PANEL, GDN_PANEL, 0});
  return probe.jit ? "libxsmm" : "own";
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

const char *gdn_gemm_libxsmm_version(void) {
  return TEXT(LIBXSMM_CONFIG_VERSION_MAJOR) "." TEXT(LIBXSMM_CONFIG_VERSION_MINOR) "." TEXT(
      LIBXSMM_CONFIG_VERSION_UPDATE);
}
