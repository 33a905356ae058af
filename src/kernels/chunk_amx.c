/* SPDX-License-Identifier: Apache-2.0
 * The chunk form on AMX tiles. */
#include "tile_amx.h"

#include "scan_bf16.h"

static void gdn_chunk_qk_amx(const struct gdn_chunk *c) {
  chunk_qk_bf16(c);
}

static void gdn_chunk_gates_amx(const struct gdn_chunk *c) {
  chunk_gates_bf16(c);
}

static void gdn_chunk_mask_amx(const struct gdn_chunk *c) {
  FLUSH_IF_STEEP(c, chunk_mask_bf16(c));
}

static void gdn_chunk_solve_amx(const struct gdn_chunk *c) {
  FLUSH_IF_STEEP(c, chunk_solve_bf16(c));
}

static void gdn_chunk_begin_amx(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_begin_bf16(c, col, n_cols);
}

static void gdn_chunk_end_amx(const struct gdn_chunk *c, int col, int n_cols) {
  chunk_end_bf16(c, col, n_cols);
}

static void gdn_chunk_delta_amx(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_delta_body, c, col, n_cols));
}

static void gdn_chunk_out_amx(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_out_body, c, col, n_cols));
}

static void gdn_chunk_state_amx(const struct gdn_chunk *c, int col, int n_cols) {
  FLUSH_IF_STEEP(c, SPECIALISE(chunk_state_body, c, col, n_cols));
}

static void gdn_chunk_state_at_amx(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  FLUSH_IF_STEEP(c, chunk_state_at_bf16(c, n_at, col, n_cols, panels));
}

static uint32_t gdn_thread_begin_amx(void) {
  tiles_configure();
  return 0;
}

/* Output went past the caches: it must be seen before the call is seen to be over. */
static void gdn_thread_end_amx(uint32_t saved) {
  (void)saved;
  _mm_sfence();
  _tile_release();
}

void gdn_fill_chunk_amx(struct gdn_kernels *t) {
  t->knows_zero = 1;
  t->chunk_min = 5; /* 1 thread, H 16, Hv 32, K = V = 128, 64 sequences of 4: 24.6 ms as chunks, 22.8 token by token */
  t->chunk_qk = gdn_chunk_qk_amx;
  t->chunk_gates = gdn_chunk_gates_amx;
  t->chunk_mask = gdn_chunk_mask_amx;
  t->chunk_solve = gdn_chunk_solve_amx;
  t->chunk_begin = gdn_chunk_begin_amx;
  t->chunk_end = gdn_chunk_end_amx;
  t->chunk_delta = gdn_chunk_delta_amx;
  t->chunk_out = gdn_chunk_out_amx;
  t->chunk_state = gdn_chunk_state_amx;
  t->chunk_state_at = gdn_chunk_state_at_amx;
  t->thread_begin = gdn_thread_begin_amx;
  t->thread_end = gdn_thread_end_amx;
}
