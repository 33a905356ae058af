/* SPDX-License-Identifier: Apache-2.0
 * The chunk form's primitives with bf16 products, written once for AMX tiles and for AVX512-BF16 vectors. The including
 * file defines block_product, which multiplies a block of 32 x 32 and meanwhile does the vector work that another block
 * still waits for: every primitive finishes a block one product later.
 *
 * Operands (kernels.h leaves them to the tier); a block is 32 tokens, 32 columns of V or 32 of K:
 *   q, k       [64][K] bf16, the caller's rows as they are: exact. Norms and scale are owed as q_mult and k_mult.
 *   kt         [K][64] bf16, tokens in pairs (j, j + 16) of a block, as in a and t
 *   kk, qk     [3 blocks: (0, 0), (1, 0), (1, 1)][32][32] f32
 *   l          [2 blocks][32][32] f32: the diagonal blocks of L
 *   a          [64][64] bf16
 *   t          [64][64] bf16: T - I of the diagonal blocks, and -L below them: V' = R + (T - I) R for the first 32
 *              tokens, whose V' corrects the R of the others. R itself enters in f32, and no block of T below the
 *              diagonal is ever formed.
 *   state_op   [panels][K / 32][2][16 pairs of K][16 columns][2] bf16, then what they lack of f32 (scan_bf16.h)
 *   delta      [panels][2 blocks of tokens][2][16 pairs][16 columns][2] bf16; delta_out likewise
 * Rows from n on are zero up to a whole block; a second block exists where n > 32. */
#ifndef GDN_CHUNK_BF16_H
#define GDN_CHUNK_BF16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "block.h"
#include "convert.h"
#include "kernels.h"
#include "vec_avx512bf16.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))
/* Lines of the next chunk that a product of a full block prefetches. */
enum { AHEAD_V = 32 };
enum { BLOCK = 32, BLOCK_ELEMS = BLOCK * BLOCK, OP_BYTES = 2 * BLOCK_ELEMS };

/* Whether the chunk is the common case: whole, bf16 throughout, output lines whole. */
static inline int is_full(const struct gdn_chunk *c) {
  const uint64_t lines = (uint64_t)(uintptr_t)c->out_rows.data | 2 * (uint64_t)c->out_rows.stride_elems;
  return c->n == GDN_CHUNK && c->v_rows.dtype == GDN_ROWS_BF16 && c->out_rows.dtype == GDN_ROWS_BF16 && lines % 64 == 0;
}

/* Calls body with head size and fullness as constants where they are the tuned ones. */
#define SPECIALISE(body, c, col, n_cols)                                                                               \
  do {                                                                                                                 \
    const int full = is_full(c);                                                                                       \
    if (full && (c)->dim_k == 128)                                                                                     \
      body(c, col, n_cols, 128, 1);                                                                                    \
    else if (full && (c)->dim_k == 64)                                                                                 \
      body(c, col, n_cols, 64, 1);                                                                                     \
    else                                                                                                               \
      body(c, col, n_cols, (c)->dim_k, 0);                                                                             \
  } while (0)

/* 32 elements of a row. */
static ALWAYS_INLINE void load_32(const struct gdn_rows *rows, int64_t row, int col, __m512 *x, __m512 *y) {
  const int64_t at = row * rows->stride_elems + col;
  if (rows->dtype == GDN_ROWS_F32) {
    const float *src = (const float *)rows->data + at;
    *x = _mm512_loadu_ps(src);
    *y = _mm512_loadu_ps(src + 16);
    return;
  }
  const uint16_t *src = (const uint16_t *)rows->data + at;
  if (rows->dtype == GDN_ROWS_F16) {
    *x = v16_load_f16(src);
    *y = v16_load_f16(src + 16);
    return;
  }
  const __m512i v = _mm512_loadu_si512(src);
  *x = v32_first(v);
  *y = v32_second(v);
}

static ALWAYS_INLINE void store_32(const struct gdn_rows_out *rows, int64_t row, int col, __m512 x, __m512 y) {
  const int64_t at = row * rows->stride_elems + col;
  if (rows->dtype == GDN_ROWS_F32) {
    _mm512_storeu_ps((float *)rows->data + at, x);
    _mm512_storeu_ps((float *)rows->data + at + 16, y);
  } else if (rows->dtype == GDN_ROWS_F16) {
    v16_store_f16((uint16_t *)rows->data + at, x);
    v16_store_f16((uint16_t *)rows->data + at + 16, y);
  } else {
    _mm512_storeu_si512((uint16_t *)rows->data + at, v32_to_bf16(x, y));
  }
}

/* Tiles of rows in block b. */
static ALWAYS_INLINE int block_tiles(const struct gdn_chunk *c, int b, const int full) {
  return full || c->n > BLOCK * b + 16 ? 2 : 1;
}

static ALWAYS_INLINE void multiply(const struct block *p, int tiles, int steps, const float *init, float *out,
                                   fill_fn *fill, const struct job *job, int units, const int n_ahead) {
  if (tiles == 2)
    block_product(p, 2, 1, steps, init, out, fill, job, units, n_ahead);
  else
    block_product(p, 1, 1, steps, init, out, fill, job, units, n_ahead);
}

static ALWAYS_INLINE void fill_none(const struct job *j, int unit) {
  (void)j;
  (void)unit;
}

static ALWAYS_INLINE void drain(fill_fn *fill, const struct job *j, int units) {
#pragma GCC unroll 1
  for (int u = 0; u < units; u++) fill(j, u);
}

/* ---- q/k head ---- */

/* dst [whole blocks][K] = rows, rounded to bf16 unless they are; mult = 1 / norm times scale, the norm that of the
 * rounded row, which is loaded once. */
static ALWAYS_INLINE void copy_rows(const struct gdn_chunk *c, const struct gdn_rows *rows, float scale, uint16_t *dst,
                                    float *mult, const int dim_k) {
  for (int i = 0; i < c->n; i += 16) {
    __m512 sums[16];
    const int n = c->n - i < 16 ? c->n - i : 16;
    for (int r = n; r < 16; r++) sums[r] = _mm512_setzero_ps();
    for (int r = 0; r < n; r++) {
      __m512 sum = _mm512_setzero_ps();
      for (int j = 0; j < dim_k; j += 32) {
        __m512i x;
        if (rows->dtype == GDN_ROWS_BF16) {
          x = _mm512_loadu_si512((const uint16_t *)rows->data + (i + r) * rows->stride_elems + j);
        } else {
          __m512 first, second;
          load_32(rows, i + r, j, &first, &second);
          x = v32_to_bf16(first, second);
        }
        _mm512_store_si512(dst + (i + r) * dim_k + j, x);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
      }
      sums[r] = sum;
    }
    const __m512 norm = _mm512_sqrt_ps(_mm512_add_ps(v16_sum_each(sums), _mm512_set1_ps(c->eps)));
    const __m512 m = c->l2norm ? _mm512_div_ps(_mm512_set1_ps(scale), norm) : _mm512_set1_ps(scale);
    _mm512_store_ps(mult + i, _mm512_maskz_mov_ps(v16_mask(n), m));
  }
  for (int i = (c->n + 15) / 16 * 16; i < GDN_CHUNK; i += 16) _mm512_store_ps(mult + i, _mm512_setzero_ps());
  const int whole = (c->n + BLOCK - 1) / BLOCK * BLOCK;
  memset(dst + c->n * dim_k, 0, sizeof(*dst) * (size_t)((whole - c->n) * dim_k));
}

/* pairs [blocks of tokens][K / 32][2][16][16 tokens] = k [..][K / 2] transposed, in elements of a pair of bf16. */
static ALWAYS_INLINE void transpose_pairs(const struct gdn_chunk *c, float *pairs, const int dim_k) {
  for (int i = 0; i < c->n; i += 16)
#pragma GCC unroll 1
    for (int j = 0; j < dim_k / 2; j += 4) {
      __m512 r[4];
      v16_load_transposed_16x4((const float *)c->k + i * (dim_k / 2) + j, dim_k / 2, r);
      float *dst = pairs + i / BLOCK * (dim_k / 2 * BLOCK) + j / 16 * 512 + i / 16 % 2 * 256 + j % 16 * 16;
      for (int x = 0; x < 4; x++) _mm512_store_ps(dst + 16 * x, r[x]);
    }
  for (int i = (c->n + 15) / 16 * 16; i % BLOCK; i += 16)
    for (int j = 0; j < dim_k / 2; j++) {
      float *dst = pairs + i / BLOCK * (dim_k / 2 * BLOCK) + j / 16 * 512 + i / 16 % 2 * 256 + j % 16 * 16;
      _mm512_store_ps(dst, _mm512_setzero_ps());
    }
}

/* Rows 2 u and 2 u + 1 of kt in one block of tokens, from row j->row on. */
static ALWAYS_INLINE void kt_unit(const struct job *j, int u) {
  u += j->row;
  const float *src = j->src + u / 16 * 512 + u % 16 * 16;
  uint16_t *dst = (uint16_t *)j->dst + u * 2 * GDN_CHUNK;
  const __m512i x = _mm512_load_si512(src), y = _mm512_load_si512(src + 256);
  _mm512_store_si512(dst, _mm512_mask_blend_epi16(0xaaaaaaaau, x, _mm512_slli_epi32(y, 16)));
  _mm512_store_si512(dst + GDN_CHUNK, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y));
}

/* The products of the lower triangle, in an order in which the first four have rows of kt to make meanwhile. */
static ALWAYS_INLINE void chunk_qk_body(const struct gdn_chunk *c, const int dim_k, const int full) {
  float *const pairs = c->hot;
  const int n_products = full || c->n > BLOCK ? 6 : 2, quarter = dim_k / 4;
  copy_rows(c, &c->q_rows, c->scale, c->q, c->q_mult, dim_k);
  copy_rows(c, &c->k_rows, 1, c->k, c->k_mult, dim_k);
  transpose_pairs(c, pairs, dim_k);
#pragma GCC unroll 1
  for (int i = 0; i < n_products; i++) {
    const int of_q = i % 2, row = i >= 2, col = i >= 4; /* k k, q k of blocks (0, 0), (1, 0), (1, 1) */
    const int made = row;                               /* block of tokens of kt */
    const struct job j = {
        .src = pairs + made * (dim_k / 2 * BLOCK), .dst = (uint16_t *)c->kt + made * BLOCK, .row = of_q * quarter};
    const struct block p = {.a = (const char *)(of_q ? c->q : c->k) + row * BLOCK * 2 * dim_k,
                            .row_bytes = 2 * dim_k,
                            .b = (const char *)(pairs + col * (dim_k / 2 * BLOCK))};
    float *const dst = (of_q ? c->qk : c->kk) + (row + col) * BLOCK_ELEMS;
    block_product(&p, 2, row != col, dim_k / 32, NULL, dst, kt_unit, &j, i < 4 ? quarter : 0, 0);
  }
}

static inline void chunk_qk_bf16(const struct gdn_chunk *c) {
  if (c->n == GDN_CHUNK && c->dim_k == 128)
    chunk_qk_body(c, 128, 1);
  else if (c->n == GDN_CHUNK && c->dim_k == 64)
    chunk_qk_body(c, 64, 1);
  else
    chunk_qk_body(c, c->dim_k, 0);
}

/* ---- value head: gates, masks, solve ---- */

/* x shifted up by s lanes, from lanes filled with ones. */
#define SHIFT_UP(x, s)                                                                                                 \
  _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(x), _mm512_castps_si512(ones), 16 - (s)))
#define SHIFT_DOWN(x, fill, s)                                                                                         \
  _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(fill), _mm512_castps_si512(x), s))

static inline float row_elem(const struct gdn_rows *rows, int i) {
  return gdn_load_elem(rows->data, i * rows->stride_elems, rows->dtype);
}

/* Gates of the next chunk: a line each where heads are many. */
static inline void prefetch_elems(const struct gdn_chunk *c, const struct gdn_rows *rows) {
  const int64_t bytes = rows->stride_elems * (rows->dtype == GDN_ROWS_F32 ? 4 : 2);
  const char *at = (const char *)rows->data + c->n * bytes;
  if (!rows->data) return;
  for (int i = 0; i < c->next_n; i++) __builtin_prefetch(at + i * bytes, 0, 2);
}

/* Products of decays instead of exponentials of sums: exp(-inf) = 0 needs no care, and every factor is one step. */
static inline void chunk_gates_bf16(const struct gdn_chunk *c) {
  const __m512 ones = _mm512_set1_ps(1);
  if (c->next_n) {
    prefetch_elems(c, &c->g_rows);
    prefetch_elems(c, &c->beta_rows);
  }
  for (int i = 0; i < c->n; i++) {
    c->decay[i] = c->g_rows.data ? row_elem(&c->g_rows, i) : 0;
    c->beta[i] = c->beta_rows.data ? row_elem(&c->beta_rows, i) : 1;
  }
  __m512 d[5] = {ones, ones, ones, ones, ones}, carry = ones;
  for (int v = 0; v < 4; v++) {
    const __mmask16 live = v16_mask(c->n > 16 * v ? c->n - 16 * v : 0);
    d[v] = _mm512_mask_mov_ps(ones, live, v16_exp(_mm512_load_ps(c->decay + 16 * v)));
    _mm512_store_ps(c->decay + 16 * v, d[v]);
    _mm512_store_ps(c->beta + 16 * v, _mm512_maskz_mov_ps(live, _mm512_load_ps(c->beta + 16 * v)));
    __m512 x = d[v];
    x = _mm512_mul_ps(x, SHIFT_UP(x, 1));
    x = _mm512_mul_ps(x, SHIFT_UP(x, 2));
    x = _mm512_mul_ps(x, SHIFT_UP(x, 4));
    x = _mm512_mul_ps(_mm512_mul_ps(x, SHIFT_UP(x, 8)), carry);
    _mm512_store_ps(c->decay_in + 16 * v, _mm512_maskz_mov_ps(live, x));
    carry = _mm512_permutexvar_ps(_mm512_set1_epi32(15), x);
  }
  *c->decay_all = _mm512_cvtss_f32(carry);
  carry = ones;
  for (int v = 3; v >= 0; v--) {
    __m512 x = SHIFT_DOWN(d[v], d[v + 1], 1);
    x = _mm512_mul_ps(x, SHIFT_DOWN(x, ones, 1));
    x = _mm512_mul_ps(x, SHIFT_DOWN(x, ones, 2));
    x = _mm512_mul_ps(x, SHIFT_DOWN(x, ones, 4));
    x = _mm512_mul_ps(_mm512_mul_ps(x, SHIFT_DOWN(x, ones, 8)), carry);
    const __mmask16 live = v16_mask(c->n > 16 * v ? c->n - 16 * v : 0);
    _mm512_store_ps(c->decay_out + 16 * v, _mm512_maskz_mov_ps(live, x));
    carry = _mm512_permutexvar_ps(_mm512_setzero_si512(), x);
  }
}

/* Rows 16 g .. 16 g + 15. decays[b] lane j holds exp(G_i - G_j) k_mult_j of block b of 16 tokens and is carried from
 * row to row: one multiplication each, no exponential. */
static ALWAYS_INLINE void mask_rows(const struct gdn_chunk *c, const int g, __m512 decays[4]) {
  const __m512 zero = _mm512_setzero_ps();
  const int n = c->n - 16 * g < 16 ? c->n - 16 * g : 16;
  for (int r = 0; r < n; r++) {
    const int i = 16 * g + r;
    const __mmask16 below = (__mmask16)((1u << r) - 1);
    const __m512 decay = _mm512_set1_ps(c->decay[i]);
    const __m512 q = _mm512_set1_ps(c->q_mult[i]), k = _mm512_set1_ps(c->beta[i] * c->k_mult[i]);
    const __m512 minus_k = _mm512_sub_ps(zero, k);
    __m512 l[4] = {zero, zero, zero, zero}, a[4] = {zero, zero, zero, zero};
#pragma GCC unroll 4
    for (int b = 0; b <= g; b++) {
      const int64_t at = (g / 2 + b / 2) * BLOCK_ELEMS + (i % BLOCK) * BLOCK + b % 2 * 16;
      const __m512 factor = g / 2 != b / 2 ? minus_k : k;
      if (b == g) {
        decays[b] = _mm512_maskz_mul_ps(below, decays[b], decay);
        l[b] = _mm512_maskz_mul_ps(below, _mm512_mul_ps(decays[b], factor), _mm512_load_ps(c->kk + at));
        decays[b] = _mm512_mask_mov_ps(decays[b], (__mmask16)(1u << r), _mm512_set1_ps(c->k_mult[i]));
        a[b] =
            _mm512_maskz_mul_ps((__mmask16)(below << 1 | 1), _mm512_mul_ps(decays[b], q), _mm512_load_ps(c->qk + at));
      } else {
        decays[b] = _mm512_mul_ps(decays[b], decay);
        l[b] = _mm512_mul_ps(_mm512_mul_ps(decays[b], factor), _mm512_load_ps(c->kk + at));
        a[b] = _mm512_mul_ps(_mm512_mul_ps(decays[b], q), _mm512_load_ps(c->qk + at));
      }
    }
    float *l_row = c->l + i * BLOCK;
    uint16_t *a_row = (uint16_t *)c->a + i * GDN_CHUNK, *t_row = (uint16_t *)c->t + i * GDN_CHUNK;
    _mm512_store_ps(l_row, l[g / 2 * 2]);
    if (g % 2) _mm512_store_ps(l_row + 16, l[g]);
    _mm512_store_si512(a_row, v16_pack_pair(a[0], a[1]));
    if (g < 2) continue;
    _mm512_store_si512(a_row + BLOCK, v16_pack_pair(a[2], a[3]));
    _mm512_store_si512(t_row, v16_pack_pair(l[0], l[1]));
  }
}

static inline void chunk_mask_bf16(const struct gdn_chunk *c) {
  __m512 decays[4];
  for (int b = 0; b < 4; b++) decays[b] = _mm512_setzero_ps();
  mask_rows(c, 0, decays);
  if (c->n > 16) mask_rows(c, 1, decays);
  if (c->n > 32) mask_rows(c, 2, decays);
  if (c->n > 48) mask_rows(c, 3, decays);
  const size_t tail = (size_t)(-c->n & (BLOCK - 1));
  memset(c->l + c->n * BLOCK, 0, tail * BLOCK * sizeof(float));
  memset((uint16_t *)c->a + c->n * GDN_CHUNK, 0, tail * GDN_CHUNK * sizeof(uint16_t));
  memset((uint16_t *)c->t + c->n * GDN_CHUNK, 0, tail * GDN_CHUNK * sizeof(uint16_t));
}

/* x [16][16] -= L x for a strictly lower L with rows of 32. Its one copy serves all blocks. */
static __attribute__((noinline)) void substitute(const float *l, float *x) {
  __m512 r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(x + 16 * i);
#pragma GCC unroll 16
  for (int j = 0; j < 15; j++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (i > j) r[i] = _mm512_fnmadd_ps(_mm512_set1_ps(l[i * BLOCK + j]), r[j], r[i]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_ps(x + 16 * i, r[i]);
}

/* x [16][16] = -L - L y for a block of L with rows of 32; y null = 0. */
static ALWAYS_INLINE void start_block(const float *l, const float *y, float *x) {
  for (int half = 0; half < 16; half += 8) {
    __m512 r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_load_ps(l + (half + i) * BLOCK));
    for (int j = 0; y && j < 16; j++) {
      const __m512 row = _mm512_load_ps(y + 16 * j);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) r[i] = _mm512_fnmadd_ps(_mm512_set1_ps(l[(half + i) * BLOCK + j]), row, r[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) _mm512_store_ps(x + 16 * (half + i), r[i]);
  }
}

/* t [32 rows] = (I + L)^-1 - I of one diagonal block: N = -L - L N by forward substitution. */
static __attribute__((noinline)) void solve_block(const float *l, uint16_t *t) {
  float x[3][256] __attribute__((aligned(64))); /* N of rows 0..15, then of rows 16..31: first columns, last columns */
  const float *l_left = l + 16 * BLOCK, *l_right = l_left + 16;
  start_block(l, NULL, x[0]);
  substitute(l, x[0]);
  start_block(l_left, x[0], x[1]);
  substitute(l_right, x[1]);
  start_block(l_right, NULL, x[2]);
  substitute(l_right, x[2]);
  for (int i = 0; i < 16; i++) {
    const __m512 first = _mm512_load_ps(x[0] + 16 * i);
    const __m512 left = _mm512_load_ps(x[1] + 16 * i), right = _mm512_load_ps(x[2] + 16 * i);
    _mm512_store_si512(t + i * GDN_CHUNK, v16_pack_pair(first, _mm512_setzero_ps()));
    _mm512_store_si512(t + (16 + i) * GDN_CHUNK, v16_pack_pair(left, right));
  }
}

static inline void chunk_solve_bf16(const struct gdn_chunk *c) {
  solve_block(c->l, c->t);
  if (c->n > BLOCK) solve_block(c->l + BLOCK_ELEMS, (uint16_t *)c->t + BLOCK * GDN_CHUNK + BLOCK);
}

#endif
