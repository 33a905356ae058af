/* SPDX-License-Identifier: Apache-2.0
 * What AMX tiles can do at best, by the kernels' own tile loops. */
#include "tiles.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "measure.h"

static int64_t chunk_count(const struct bench_batch *b, int64_t seq) {
  return (b->cu_seqlens[seq + 1] - b->cu_seqlens[seq] + GDN_CHUNK - 1) / GDN_CHUNK;
}

/* Tokens of chunk i of a sequence; sequences start at position 0. */
static int chunk_tokens(const struct bench_batch *b, int64_t seq, int64_t i) {
  int64_t left = b->cu_seqlens[seq + 1] - b->cu_seqlens[seq] - i * GDN_CHUNK;
  return left < GDN_CHUNK ? (int)left : GDN_CHUNK;
}

double tiles_nominal_flops(const struct bench_batch *b) {
  double flops = 0;
  for (int64_t s = 0; s < b->n_seqs; s++)
    for (int64_t i = 0; i < chunk_count(b, s); i++) {
      double n = chunk_tokens(b, s, i), k = b->dim_k, v = b->dim_v;
      flops += 4 * n * n * k * b->heads + (6 * n * k * v + 4 * n * n * v) * b->v_heads;
    }
  return flops;
}

#ifdef GDN_HAVE_AMX
#include "tile_products.h"

#define PRODUCT_FLOPS (2.0 * 16 * 16 * 32)
/* What one worker reads and writes: q, k, kt, t, a, state, R, V', and the sums. */
#define OPERAND_BYTES ((size_t)1 << 20)

struct tiles {
  const struct bench_batch *batch;
  gdn_ctx *ctx;
  int n_threads;
  char *operands;      /* [n_threads][OPERAND_BYTES] */
  int64_t peak_rounds; /* of four products, each worker */
  int64_t n_items;     /* chunks times q/k heads */
  int32_t *tokens;     /* [n_items / heads] of each chunk */
  atomic_llong next;
};

/* bf16 in -2 .. -0.5 and 0.5 .. 2: tiles of zeros run faster than tiles of numbers where power limits the clock. */
static void fill_random(uint16_t *x, int64_t n) {
  uint64_t state = 1;
  for (int64_t i = 0; i < n; i++) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    x[i] = (uint16_t)((state >> 63) << 15 | (0x3f00 + (state >> 40) % 256));
  }
}

struct tiles *tiles_create(const struct bench_batch *b, gdn_ctx *ctx, int n_threads) {
  struct tiles *t = calloc(1, sizeof *t);
  int64_t n_chunks = 0;
  for (int64_t s = 0; s < b->n_seqs; s++) n_chunks += chunk_count(b, s);
  if (!t) return NULL;
  t->batch = b;
  t->ctx = ctx;
  t->n_threads = n_threads;
  t->n_items = n_chunks * b->heads;
  t->peak_rounds = (int64_t)(tiles_nominal_flops(b) / n_threads / (4 * PRODUCT_FLOPS)) + 1;
  t->operands = bench_alloc(n_threads, OPERAND_BYTES);
  t->tokens = calloc((size_t)n_chunks, sizeof *t->tokens);
  if (!t->operands || !t->tokens) {
    tiles_destroy(t);
    return NULL;
  }
  fill_random((uint16_t *)t->operands, (int64_t)n_threads * (int64_t)OPERAND_BYTES / 2);
  int64_t at = 0;
  for (int64_t s = 0; s < b->n_seqs; s++)
    for (int64_t i = 0; i < chunk_count(b, s); i++) t->tokens[at++] = chunk_tokens(b, s, i);
  return t;
}

void tiles_destroy(struct tiles *t) {
  if (!t) return;
  free(t->operands);
  free(t->tokens);
  free(t);
}

static void products_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct tiles *t = arg;
  const struct bench_batch *b = t->batch;
  char *operands = t->operands + (size_t)worker * OPERAND_BYTES;
  int64_t item;
  (void)n_workers;
  tile_products_begin();
  while ((item = atomic_fetch_add(&t->next, 1)) < t->n_items)
    tile_products_chunk(t->tokens[item / b->heads], b->dim_k, b->dim_v, b->v_heads / b->heads, operands);
  tile_products_end();
}

int tiles_products_run(void *arg) {
  struct tiles *t = arg;
  atomic_store(&t->next, 0);
  return bench_check(gdn_ctx_run(t->ctx, products_worker, t), "gdn_ctx_run");
}

int64_t tiles_chunks_until(struct tiles *t, int worker, double end_us) {
  const struct bench_batch *b = t->batch;
  int64_t n = 0;
  tile_products_begin();
  do {
    tile_products_chunk(GDN_CHUNK, b->dim_k, b->dim_v, b->v_heads / b->heads,
                        t->operands + (size_t)worker * OPERAND_BYTES);
    n++;
  } while (measure_now_us() < end_us);
  tile_products_end();
  return n;
}

static void peak_worker(void *arg, int32_t worker, int32_t n_workers) {
  const struct tiles *t = arg;
  (void)n_workers;
  tile_products_begin();
  tile_products_peak(t->peak_rounds, t->operands + (size_t)worker * OPERAND_BYTES);
  tile_products_end();
}

int tiles_peak_run(void *arg) {
  struct tiles *t = arg;
  return bench_check(gdn_ctx_run(t->ctx, peak_worker, t), "gdn_ctx_run");
}

double tiles_peak_flops(const struct tiles *t) {
  return 4 * PRODUCT_FLOPS * (double)t->peak_rounds * t->n_threads;
}

#else

struct tiles *tiles_create(const struct bench_batch *b, gdn_ctx *ctx, int n_threads) {
  (void)b, (void)ctx, (void)n_threads;
  return NULL;
}

void tiles_destroy(struct tiles *t) {
  (void)t;
}

int tiles_products_run(void *arg) {
  (void)arg;
  return BENCH_UNABLE;
}

int64_t tiles_chunks_until(struct tiles *t, int worker, double end_us) {
  (void)t, (void)worker, (void)end_us;
  return 0;
}

int tiles_peak_run(void *arg) {
  (void)arg;
  return BENCH_UNABLE;
}

double tiles_peak_flops(const struct tiles *t) {
  (void)t;
  return 0;
}

#endif
