/* SPDX-License-Identifier: Apache-2.0
 * The chunk form with AVX512-BF16 vectors in the place of tiles. */
#include <immintrin.h>

#include "block.h"

/* x += 8 rows of A, from a on, times B. */
static inline __attribute__((always_inline)) void add_products(const struct block *p, const char *a, __m512 x[8][2]) {
  for (int s = 0; s < p->steps; s++)
    for (int k = 0; k < 16; k++) {
      const char *b = p->b + 2048 * s + 64 * k;
      const __m512i b0 = _mm512_load_si512(b), b1 = _mm512_load_si512(b + 1024);
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) {
        const __m512i pair = _mm512_set1_epi32(*(const int32_t *)(a + r * p->row_bytes + 64 * s + 4 * k));
        x[r][0] = _mm512_dpbf16_ps(x[r][0], (__m512bh)pair, (__m512bh)b0);
        x[r][1] = _mm512_dpbf16_ps(x[r][1], (__m512bh)pair, (__m512bh)b1);
      }
    }
}

/* c [16 tiles][32] = init (null = 0) + A B of p, + A B of more (null = none), 8 rows at a time; before that, lines are
 * fetched, and fill for every unit. */
static inline __attribute__((always_inline)) void block_product(const struct block *p, const struct block *more,
                                                                const int tiles, const int upper, const float *init,
                                                                float *c, fill_fn *fill, const struct job *job,
                                                                const int units, const int n_ahead) {
  (void)upper;
  for (int e = 0; e < n_ahead; e++) __builtin_prefetch(p->ahead + e * p->ahead_bytes, 0, 2);
#pragma GCC unroll 1
  for (int u = 0; u < units; u++) fill(job, u);
  for (int i = 0; i < 16 * tiles; i += 8) {
    __m512 x[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) x[r][h] = init ? _mm512_load_ps(init + (i + r) * 32 + 16 * h) : _mm512_setzero_ps();
    add_products(p, p->a + i * p->row_bytes, x);
    if (more) add_products(more, more->a + i * more->row_bytes, x);
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) _mm512_store_ps(c + (i + r) * 32 + 16 * h, x[r][h]);
  }
}

#include "scan_bf16.h"

static void gdn_chunk_qk_avx512bf16(const struct gdn_chunk *c) {
  chunk_qk_bf16(c);
}

static void gdn_chunk_gates_avx512bf16(const struct gdn_chunk *c) {
  chunk_gates_bf16(c);
}

static void gdn_chunk_mask_avx512bf16(const struct gdn_chunk *c) {
  FLUSH_IF_STEEP(c, chunk_mask_bf16(c));
}

static void gdn_chunk_solve_avx512bf16(const struct gdn_chunk *c) {
  FLUSH_IF_STEEP(c, chunk_solve_bf16(c));
}

static void gdn_chunk_begin_avx512bf16(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_begin_bf16(c, col, n_cols);
}

static void gdn_chunk_end_avx512bf16(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_end_bf16(c, col, n_cols);
}

static void gdn_chunk_delta_avx512bf16(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_delta_body, c, col, n_cols));
}

static void gdn_chunk_out_avx512bf16(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_out_body, c, col, n_cols));
}

static void gdn_chunk_state_avx512bf16(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_state_body, c, col, n_cols));
}

static void gdn_chunk_state_at_avx512bf16(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  FLUSH_IF_STEEP(c, chunk_state_at_bf16(c, n_at, col, n_cols, panels));
}

static uint32_t gdn_thread_begin_avx512bf16(void) {
  return 0;
}

/* Output went past the caches: it must be seen before the call is seen to be over. */
static void gdn_thread_end_avx512bf16(uint32_t saved) {
  (void)saved;
  _mm_sfence();
}

void gdn_fill_chunk_avx512bf16(struct gdn_kernels *t) {
  t->knows_zero = 1;
  t->chunk_qk = gdn_chunk_qk_avx512bf16;
  t->chunk_gates = gdn_chunk_gates_avx512bf16;
  t->chunk_mask = gdn_chunk_mask_avx512bf16;
  t->chunk_solve = gdn_chunk_solve_avx512bf16;
  t->chunk_begin = gdn_chunk_begin_avx512bf16;
  t->chunk_end = gdn_chunk_end_avx512bf16;
  t->chunk_delta = gdn_chunk_delta_avx512bf16;
  t->chunk_out = gdn_chunk_out_avx512bf16;
  t->chunk_state = gdn_chunk_state_avx512bf16;
  t->chunk_state_at = gdn_chunk_state_at_avx512bf16;
  t->thread_begin = gdn_thread_begin_avx512bf16;
  t->thread_end = gdn_thread_end_avx512bf16;
}
