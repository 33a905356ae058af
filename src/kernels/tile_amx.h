/* SPDX-License-Identifier: Apache-2.0
 * Products of bf16 blocks on AMX tiles. Tiles 0..3 hold a 32 x 32 block of sums, 4 and 5 its rows, 6 and 7 its columns:
 * every tile that is loaded feeds two products, and the load is done before the 16 cycles of each product are over. */
#ifndef GDN_TILE_AMX_H
#define GDN_TILE_AMX_H

#include <immintrin.h>
#include <stdint.h>

#include "block.h"

/* All eight tiles 16 rows of 64 bytes. */
static inline void tiles_configure(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config __attribute__((aligned(64))) = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  /* The compiler believes that only the first eight bytes are read. */
  __asm__ volatile("" : "+m"(config));
  _tile_loadconfig(&config);
}

/* The compiler takes a tile load for a statement that reads no memory: stores must not move across it. */
#define TILE_LOAD(tile, from, stride)                                                                                  \
  do {                                                                                                                 \
    __asm__ volatile("" ::: "memory");                                                                                 \
    _tile_loadd(tile, from, stride);                                                                                   \
  } while (0)

/* The slot-th of the products of a step: loads its tiles, multiplies. */
#define TILE_PRODUCT(slot)                                                                                             \
  do {                                                                                                                 \
    if ((slot) == 0) {                                                                                                 \
      TILE_LOAD(4, a, row_bytes);                                                                                      \
      TILE_LOAD(6, b, 64);                                                                                             \
      _tile_dpbf16ps(0, 4, 6);                                                                                         \
    } else if ((slot) == 1) {                                                                                          \
      TILE_LOAD(7, b + 1024, 64);                                                                                      \
      if (upper) _tile_dpbf16ps(1, 4, 7);                                                                              \
    } else if ((slot) == 2) {                                                                                          \
      TILE_LOAD(5, a + 16 * row_bytes, row_bytes);                                                                     \
      _tile_dpbf16ps(2, 5, 6);                                                                                         \
    } else {                                                                                                           \
      _tile_dpbf16ps(3, 5, 7);                                                                                         \
    }                                                                                                                  \
  } while (0)

/* The products of one step, and what is to be done between them. */
#define TILE_STEP(between)                                                                                             \
  do {                                                                                                                 \
    TILE_PRODUCT(0);                                                                                                   \
    between(0);                                                                                                        \
    TILE_PRODUCT(1);                                                                                                   \
    between(1);                                                                                                        \
    if (tiles == 2) {                                                                                                  \
      TILE_PRODUCT(2);                                                                                                 \
      between(2);                                                                                                      \
      TILE_PRODUCT(3);                                                                                                 \
      between(3);                                                                                                      \
    }                                                                                                                  \
    a += 64;                                                                                                           \
    b += 2048;                                                                                                         \
  } while (0)

/* c [16 tiles][32] = init (null = 0) + A B of p, + A B of more (null = none). Rows of A are row_bytes apart; B is
 * [steps][2][16][16][2]. Unless upper, the block of c above the diagonal is left as it is. Between the products of p,
 * fill gets every number below units: vector work of another block, for the cycles in which tiles keep the ports free.
 * Steps are a loop, the products of one are not: all of it unrolled, a chunk's code does not fit the instruction cache;
 * with products in the loop as well, the address of every unit is made anew, and the state takes a fifth longer. */
static inline __attribute__((always_inline)) void block_product(const struct block *p, const struct block *more,
                                                                const int tiles, const int upper, const float *init,
                                                                float *c, fill_fn *fill, const struct job *job,
                                                                const int units, const int n_ahead) {
  const int slots = 2 * tiles * p->steps, per_slot = (units + slots - 1) / slots,
            per_ahead = (n_ahead + slots - 1) / slots;
  const int64_t ahead_bytes = p->ahead_bytes;
  int64_t row_bytes = p->row_bytes;
  const char *a = p->a, *b = p->b, *ahead = p->ahead;
  const struct job j = *job; /* a copy, which stores of fill cannot alias: its fields stay in registers */
  int unit = 0;
  if (init) {
    TILE_LOAD(0, init, 128);
    TILE_LOAD(1, init + 16, 128);
    if (tiles == 2) {
      TILE_LOAD(2, init + 512, 128);
      TILE_LOAD(3, init + 528, 128);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
#define TILE_BETWEEN(slot)                                                                                             \
  do {                                                                                                                 \
    for (int e = 0; e < per_ahead; e++, ahead += ahead_bytes) __builtin_prefetch(ahead, 0, 2);                         \
    for (int e = 0; e < per_slot; e++)                                                                                 \
      if (units % slots == 0 || unit + (slot)*per_slot + e < units) fill(&j, unit + (slot)*per_slot + e);              \
  } while (0)
#define TILE_NOTHING(slot)
#pragma GCC unroll 1
  for (int s = 0; s < p->steps; s++, unit += 2 * tiles * per_slot) TILE_STEP(TILE_BETWEEN);
  if (more) {
    a = more->a;
    b = more->b;
    row_bytes = more->row_bytes;
#pragma GCC unroll 1
    for (int s = 0; s < more->steps; s++) TILE_STEP(TILE_NOTHING);
  }
#undef TILE_BETWEEN
#undef TILE_NOTHING
  _tile_stored(0, c, 128);
  if (upper) _tile_stored(1, c + 16, 128);
  if (tiles == 2) {
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
  }
}

#endif
