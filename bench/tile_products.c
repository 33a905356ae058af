/* SPDX-License-Identifier: Apache-2.0
 * The chunk form's products on tiles, as chunk_bf16.h orders them, without the vector work. */
#include "tile_products.h"

#include "kernels/tile_amx.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE void fill_none(const struct job *j, int unit) {
  (void)j;
  (void)unit;
}

void tile_products_begin(void) {
  tiles_configure();
}

void tile_products_end(void) {
  _tile_release();
}

void tile_products_peak(int64_t rounds, const char *operands) {
  TILE_LOAD(4, operands, 64);
  TILE_LOAD(5, operands + 1024, 64);
  TILE_LOAD(6, operands + 2048, 64);
  TILE_LOAD(7, operands + 3072, 64);
  for (int64_t i = 0; i < rounds; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

struct operands {
  char *q, *k, *kt, *t, *a, *state, *resid, *delta;
  float *sums;
};

/* Operands one after the other, as a lane's scratch has them. */
static struct operands place(char *at, int dim_k, int dim_v) {
  struct operands o;
  const int64_t qk = 64 * 2 * dim_k, v = 64 * 2 * dim_v;
  o.q = at;
  o.k = o.q + qk;
  o.kt = o.k + qk;
  o.t = o.kt + qk;
  o.a = o.t + 8192;
  o.state = o.a + 8192;
  o.resid = o.state + (int64_t)2 * dim_k * dim_v;
  o.delta = o.resid + v;
  o.sums = (float *)(o.delta + v);
  return o;
}

static ALWAYS_INLINE void multiply_two(const struct block *p, const struct block *more, int tiles, const int upper,
                                       const float *init, float *c) {
  const struct job none = {0};
  if (tiles == 2)
    block_product(p, more, 2, upper, init, c, fill_none, &none, 0, 0);
  else
    block_product(p, more, 1, upper, init, c, fill_none, &none, 0, 0);
}

static ALWAYS_INLINE void multiply(const char *a, int64_t row_bytes, const char *b, int tiles, const int upper,
                                   int steps, const float *init, float *c) {
  const struct block p = {.a = a, .b = b, .row_bytes = row_bytes, .steps = steps};
  multiply_two(&p, NULL, tiles, upper, init, c);
}

static void head_qk(const struct operands *o, int n, const int dim_k) {
  const int two = n > 32;
  for (int i = 0; i < 2; i++) {
    const char *rows = i ? o->q : o->k;
    multiply(rows, 2 * dim_k, o->kt, 2, 0, dim_k / 32, NULL, o->sums);
    if (!two) continue;
    multiply(rows + 64 * dim_k, 2 * dim_k, o->kt, 2, 1, dim_k / 32, NULL, o->sums);
    multiply(rows + 64 * dim_k, 2 * dim_k, o->kt + 64 * dim_k, 2, 0, dim_k / 32, NULL, o->sums);
  }
}

/* One value head: R, V', O and S, in their blocks of 32. */
static ALWAYS_INLINE void head_v(const struct operands *o, int n, const int dim_k, const int dim_v) {
  const int blocks = n > 32 ? 2 : 1;
  const int tiles[2] = {n > 16 ? 2 : 1, n > 48 ? 2 : 1};
  for (int v = 0; v < dim_v / 32; v++) {
    const char *state = o->state + 64 * dim_k * v, *delta = o->delta + 4096 * v;
    for (int b = 0; b < blocks; b++)
      multiply(o->k + 64 * dim_k * b, 2 * dim_k, state, tiles[b], 1, dim_k / 32, NULL, o->sums + 1024 * b);
    multiply(o->t, 128, o->resid + 4096 * v, tiles[0], 1, 1, o->sums, o->sums);
    if (blocks == 2) {
      multiply(o->t + 4096, 128, delta, tiles[1], 1, 1, o->sums, o->sums);
      multiply(o->t + 4096 + 64, 128, o->resid + 4096 * v + 2048, tiles[1], 1, 1, o->sums, o->sums);
    }
    for (int b = 0; b < blocks; b++) {
      const struct block q = {.a = o->q + 64 * dim_k * b, .row_bytes = 2 * dim_k, .b = state, .steps = dim_k / 32};
      const struct block a = {.a = o->a + 4096 * b, .row_bytes = 128, .b = delta, .steps = b + 1};
      multiply_two(&q, &a, tiles[b], 1, NULL, o->sums + 1024 * b);
    }
    for (int b = 0; b < dim_k / 32; b++)
      multiply(o->kt + 4096 * b, 128, delta, 2, 1, blocks, NULL, o->sums + 1024 * (b % 2));
  }
}

void tile_products_chunk(int n, int dim_k, int dim_v, int group, char *operands) {
  const struct operands o = place(operands, dim_k, dim_v);
  head_qk(&o, n, dim_k);
  for (int i = 0; i < group; i++) {
    if (dim_k == 128)
      head_v(&o, n, 128, dim_v);
    else if (dim_k == 64)
      head_v(&o, n, 64, dim_v);
    else
      head_v(&o, n, dim_k, dim_v);
  }
}

static ALWAYS_INLINE void whole(int m, int n, const int k, const int accumulate, const char *a, const char *b,
                                float *c) {
  for (int j = 0; j < n / 32; j++)
    for (int i = 0; i < m / 32; i++) {
      float *block = c + ((int64_t)j * (m / 32) + i) * 1024;
      multiply(a + (int64_t)i * 64 * k, 2 * k, b + (int64_t)j * 64 * k, 2, 1, k / 32, accumulate ? block : NULL, block);
    }
}

/* Lengths as constants where the kernels have them so. */
void tile_products_whole(int m, int n, int k, int accumulate, const char *a, const char *b, float *c) {
  if (k == 32 && accumulate)
    whole(m, n, 32, 1, a, b, c);
  else if (k == 64 && !accumulate)
    whole(m, n, 64, 0, a, b, c);
  else if (k == 128 && !accumulate)
    whole(m, n, 128, 0, a, b, c);
  else
    whole(m, n, k, accumulate, a, b, c);
}
