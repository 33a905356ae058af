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
 *   state_op   [panels][K / 32][2][16 pairs of K][16 columns][2] bf16
 *   resid      [panels][2][32][32] f32, then [panels][2] blocks in the form of delta
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

static ALWAYS_INLINE void chunk_qk_body(const struct gdn_chunk *c, const int dim_k, const int full) {
  float pairs[GDN_CHUNK * GDN_DIM_MAX / 2] __attribute__((aligned(64)));
  const int steps = dim_k / 32, two = full || c->n > BLOCK;
  copy_rows(c, &c->q_rows, c->scale, c->q, c->q_mult, dim_k);
  copy_rows(c, &c->k_rows, 1, c->k, c->k_mult, dim_k);
  transpose_pairs(c, pairs, dim_k);
  struct job j = {.c = c, .src = pairs, .dst = c->kt};
  struct block p = {.a = (const char *)c->k, .row_bytes = 2 * dim_k, .b = (const char *)pairs};
  block_product(&p, 2, 0, steps, NULL, c->kk, kt_unit, &j, dim_k / 4, 0);
  p.a = c->q;
  j.row = dim_k / 4;
  block_product(&p, 2, 0, steps, NULL, c->qk, kt_unit, &j, dim_k / 4, 0);
  if (!two) return;
  j = (struct job){.c = c, .src = pairs + dim_k / 2 * BLOCK, .dst = (uint16_t *)c->kt + BLOCK};
  const int64_t below = BLOCK * 2 * dim_k;
  p.a = (const char *)c->k + below;
  block_product(&p, 2, 1, steps, NULL, c->kk + BLOCK_ELEMS, kt_unit, &j, dim_k / 4, 0);
  p.a = (const char *)c->q + below;
  j.row = dim_k / 4;
  block_product(&p, 2, 1, steps, NULL, c->qk + BLOCK_ELEMS, kt_unit, &j, dim_k / 4, 0);
  p.b = (const char *)(pairs + dim_k / 2 * BLOCK);
  block_product(&p, 2, 0, steps, NULL, c->qk + 2 * BLOCK_ELEMS, fill_none, &j, 0, 0);
  p.a = (const char *)c->k + below;
  block_product(&p, 2, 0, steps, NULL, c->kk + 2 * BLOCK_ELEMS, fill_none, &j, 0, 0);
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

/* x [16 rows] -= L x for a strictly lower L with rows of 32. */
static ALWAYS_INLINE void substitute(const float *l, __m512 x[16]) {
#pragma GCC unroll 16
  for (int j = 0; j < 15; j++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (i > j) x[i] = _mm512_fnmadd_ps(_mm512_set1_ps(l[i * BLOCK + j]), x[j], x[i]);
}

static ALWAYS_INLINE void load_negated(const float *l, __m512 x[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_load_ps(l + i * BLOCK));
}

/* t [32 rows] = (I + L)^-1 - I of one diagonal block: N = -L - L N by forward substitution. */
static __attribute__((noinline)) void solve_block(const float *l, uint16_t *t) {
  __m512 x[16], first[16], left[16];
  load_negated(l, x);
  substitute(l, x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    _mm512_store_si512(t + i * GDN_CHUNK, v16_pack_pair(x[i], _mm512_setzero_ps()));
    _mm512_store_ps((float *)&first[i], x[i]);
  }
  const float *l_left = l + 16 * BLOCK, *l_right = l_left + 16;
  load_negated(l_left, x);
  for (int j = 0; j < 16; j++) {
    const __m512 row = _mm512_load_ps((const float *)&first[j]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = _mm512_fnmadd_ps(_mm512_set1_ps(l_left[i * BLOCK + j]), row, x[i]);
  }
  substitute(l_right, x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_ps((float *)&left[i], x[i]);
  load_negated(l_right, x);
  substitute(l_right, x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    _mm512_store_si512(t + (16 + i) * GDN_CHUNK, v16_pack_pair(_mm512_load_ps((const float *)&left[i]), x[i]));
}

static inline void chunk_solve_bf16(const struct gdn_chunk *c) {
  solve_block(c->l, c->t);
  if (c->n > BLOCK) solve_block(c->l + BLOCK_ELEMS, (uint16_t *)c->t + BLOCK * GDN_CHUNK + BLOCK);
}

/* ---- columns of V ---- */

/* Lines of the next chunk's q and k, for the second-level cache. */
static ALWAYS_INLINE void ahead_unit(const struct job *j, int r) {
#pragma GCC unroll 2
  for (int t = 0; t < 2; t++)
    for (int i = 0; j->ahead[t] && i < j->ahead_rows; i++)
      __builtin_prefetch(j->ahead[t] + (r * j->ahead_rows + i) * j->ahead_bytes[t], 0, 2);
}

/* Rows 2 r and 2 r + 1 of a block of the state; src (null = 0) is added to the decayed state. */
static ALWAYS_INLINE void state_unit(const struct job *j, int r) {
  ahead_unit(j, r);
  float *s = (float *)j->dst + 2 * BLOCK * r;
  char *op = (char *)j->op + 64 * r;
  __m512 x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) x[i] = _mm512_load_ps(s + 16 * i);
  if (j->src) {
    const __m512 decay = _mm512_set1_ps(j->factor);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      x[i] = _mm512_fmadd_ps(decay, x[i], _mm512_load_ps(j->src + 2 * BLOCK * r + 16 * i));
      _mm512_store_ps(s + 16 * i, x[i]);
    }
  }
  _mm512_store_si512(op, v16_pack_pair(x[0], x[2]));
  _mm512_store_si512(op + 1024, v16_pack_pair(x[1], x[3]));
}

/* The same where the state was zero. */
static ALWAYS_INLINE void state_unit_fresh(const struct job *j, int r) {
  ahead_unit(j, r);
  float *s = (float *)j->dst + 2 * BLOCK * r;
  char *op = (char *)j->op + 64 * r;
  __m512 x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_load_ps(j->src + 2 * BLOCK * r + 16 * i);
    _mm512_store_ps(s + 16 * i, x[i]);
  }
  _mm512_store_si512(op, v16_pack_pair(x[0], x[2]));
  _mm512_store_si512(op + 1024, v16_pack_pair(x[1], x[3]));
}

static inline void chunk_begin_bf16(const struct gdn_chunk *c, int col, int n_cols) {
  for (int at = col * c->dim_k; at < (col + n_cols) * c->dim_k; at += BLOCK_ELEMS) {
    const struct job j = {.dst = c->state + at, .op = (uint16_t *)c->state_op + at};
    drain(state_unit, &j, 16);
  }
}

/* Tokens r and r + 16 of a block: R = beta v - (beta exp(G) / norm) (k S). */
static ALWAYS_INLINE void residual_rows(const struct job *j, int r, const int full) {
  const struct gdn_chunk *c = j->c;
  float *dst = (float *)j->dst + r * BLOCK;
  __m512 x[4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const int i = j->row + 16 * h + r;
    const float *src = j->src + (16 * h + r) * BLOCK;
    const int live = full || i < c->n;
    const __mmask16 mask = live ? 0xffff : 0;
    const __m512 beta = _mm512_set1_ps(c->beta[i]), weight = _mm512_set1_ps(j->weights[i]);
    __m512 v0 = _mm512_setzero_ps(), v1 = v0;
    if (full) {
      const __m512i v = _mm512_loadu_si512((const uint16_t *)c->v_rows.data + i * c->v_rows.stride_elems + j->col);
      v0 = v32_first(v);
      v1 = v32_second(v);
    } else if (live) {
      load_32(&c->v_rows, i, j->col, &v0, &v1);
    }
    v0 = _mm512_mul_ps(beta, v0);
    v1 = _mm512_mul_ps(beta, v1);
    if (full) {
      x[2 * h] = _mm512_fnmadd_ps(weight, _mm512_load_ps(src), v0);
      x[2 * h + 1] = _mm512_fnmadd_ps(weight, _mm512_load_ps(src + 16), v1);
    } else {
      x[2 * h] = _mm512_maskz_fnmadd_ps(mask, weight, _mm512_load_ps(src), v0);
      x[2 * h + 1] = _mm512_maskz_fnmadd_ps(mask, weight, _mm512_load_ps(src + 16), v1);
    }
    _mm512_store_ps(dst + 16 * h * BLOCK, x[2 * h]);
    _mm512_store_ps(dst + 16 * h * BLOCK + 16, x[2 * h + 1]);
  }
  if (!j->op) return;
  _mm512_store_si512((char *)j->op + 64 * r, v16_pack_pair(x[0], x[2]));
  _mm512_store_si512((char *)j->op + 64 * r + 1024, v16_pack_pair(x[1], x[3]));
}

/* The packed part of resid, behind the f32 part. */
static inline char *resid_ops(const struct gdn_chunk *c) {
  return (char *)c->resid + c->dim_v * GDN_CHUNK * 4;
}

static ALWAYS_INLINE void residual_unit(const struct job *j, int r) {
  residual_rows(j, r, 0);
}

static ALWAYS_INLINE void residual_unit_full(const struct job *j, int r) {
  residual_rows(j, r, 1);
}

static ALWAYS_INLINE void chunk_residual_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                              const int full) {
  float sums[2][BLOCK_ELEMS] __attribute__((aligned(64)));
  float weights[GDN_CHUNK] __attribute__((aligned(64)));
  fill_fn *const unit = full ? residual_unit_full : residual_unit;
  const int blocks = full || c->n > BLOCK ? 2 : 1, first = col / BLOCK;
  for (int i = 0; i < BLOCK * blocks; i += 16)
    _mm512_store_ps(weights + i,
                    _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c->beta + i), _mm512_load_ps(c->k_mult + i)),
                                  _mm512_load_ps(c->decay_in + i)));
  struct job j = {0};
  if (c->zero_state) memset(sums[0], 0, sizeof(sums[0]));
  for (int p = first; p < (col + n_cols) / BLOCK; p++)
    for (int b = 0; b < blocks; b++) {
      const struct block in = {.a = (const char *)c->k + b * BLOCK * 2 * dim_k,
                               .row_bytes = 2 * dim_k,
                               .b = (const char *)c->state_op + p * dim_k * 64};
      float *out = sums[c->zero_state ? 0 : b];
      if (c->zero_state)
        drain(unit, &j, p == first && b == 0 ? 0 : 16);
      else if (p == first && b == 0)
        multiply(&in, block_tiles(c, b, full), dim_k / 32, NULL, out, fill_none, NULL, 0, 0);
      else
        multiply(&in, block_tiles(c, b, full), dim_k / 32, NULL, out, unit, &j, 16, 0);
      float *resid = (float *)c->resid + (2 * (p - first) + b) * BLOCK_ELEMS;
      char *op = resid_ops(c) + 2 * (p - first) * OP_BYTES;
      j = (struct job){.c = c,
                       .src = out,
                       .dst = resid,
                       .op = b ? NULL : op,
                       .row = BLOCK * b,
                       .col = BLOCK * p,
                       .weights = weights};
    }
  drain(unit, &j, 16);
}

/* Tokens r and r + 16 of a block of V'. */
static ALWAYS_INLINE void delta_unit(const struct job *j, int r) {
  const float *src = j->src + r * BLOCK;
  char *op = (char *)j->op + 64 * r, *out = (char *)j->dst + 64 * r;
  const __m512 f = _mm512_set1_ps(j->weights[r]), g = _mm512_set1_ps(j->weights[r + 16]);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const __m512 x = _mm512_load_ps(src + 16 * h), y = _mm512_load_ps(src + 16 * BLOCK + 16 * h);
    _mm512_store_si512(op + 1024 * h, v16_pack_pair(x, y));
    _mm512_store_si512(out + 1024 * h, v16_pack_pair(_mm512_mul_ps(f, x), _mm512_mul_ps(g, y)));
  }
}

/* Tokens r and r + 16 of the second block's R. */
static ALWAYS_INLINE void pack_unit(const struct job *j, int r) {
  const float *src = j->src + r * BLOCK;
  char *op = (char *)j->op + 64 * r;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++)
    _mm512_store_si512(op + 1024 * h,
                       v16_pack_pair(_mm512_load_ps(src + 16 * h), _mm512_load_ps(src + 16 * BLOCK + 16 * h)));
}

/* The three products go panel by panel, each in place of the R it corrects; the vector work of a panel follows under
 * the next panel's product. A single panel has none to hide under. */
static ALWAYS_INLINE void chunk_delta_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  (void)dim_k;
  float weights[GDN_CHUNK] __attribute__((aligned(64)));
  const int two = full || c->n > BLOCK, last = n_cols / BLOCK - 1;
  enum { first = 0 };
  (void)col;
  for (int i = 0; i < (two ? 64 : 32); i += 16)
    _mm512_store_ps(weights + i, _mm512_mul_ps(_mm512_load_ps(c->k_mult + i), _mm512_load_ps(c->decay_out + i)));
  char *const ops = resid_ops(c);
  struct job j = {0};
  struct block in = {.a = c->t, .row_bytes = 2 * GDN_CHUNK};
  for (int p = first; p <= last; p++) {
    in.b = ops + 2 * p * OP_BYTES;
    float *resid = (float *)c->resid + 2 * p * BLOCK_ELEMS;
    if (p == first)
      multiply(&in, block_tiles(c, 0, full), 1, resid, resid, fill_none, NULL, 0, 0);
    else
      multiply(&in, block_tiles(c, 0, full), 1, resid, resid, delta_unit, &j, 16, 0);
    j = (struct job){.src = resid,
                     .op = (char *)c->delta + 2 * p * OP_BYTES,
                     .dst = (char *)c->delta_out + 2 * p * OP_BYTES,
                     .weights = weights};
  }
  if (!two || first == last) drain(delta_unit, &j, 16);
  if (!two) return;
  in.a = (const char *)c->t + BLOCK * 2 * GDN_CHUNK;
  for (int p = first; p <= last; p++) {
    in.b = (const char *)c->delta + 2 * p * OP_BYTES;
    float *resid = (float *)c->resid + (2 * p + 1) * BLOCK_ELEMS;
    if (p > first)
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, pack_unit, &j, 16, 0);
    else if (first == last)
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, fill_none, NULL, 0, 0);
    else
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, delta_unit, &j, 16, 0);
    j = (struct job){.src = resid, .op = ops + (2 * p + 1) * OP_BYTES};
  }
  if (first == last) drain(pack_unit, &j, 16);
  in.a += 64;
  for (int p = first; p <= last; p++) {
    in.b = ops + (2 * p + 1) * OP_BYTES;
    float *resid = (float *)c->resid + (2 * p + 1) * BLOCK_ELEMS;
    if (p > first)
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, delta_unit, &j, 16, 0);
    else if (first == last)
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, fill_none, NULL, 0, 0);
    else
      multiply(&in, block_tiles(c, 1, full), 1, resid, resid, pack_unit, &j, 16, 0);
    j = (struct job){.src = resid,
                     .op = (char *)c->delta + (2 * p + 1) * OP_BYTES,
                     .dst = (char *)c->delta_out + (2 * p + 1) * OP_BYTES,
                     .weights = weights + BLOCK};
  }
  drain(delta_unit, &j, 16);
}

/* Tokens 2 r and 2 r + 1 of a block: out = exp(G) / norm (q S) + A V'. */
static ALWAYS_INLINE void out_rows(const struct job *j, int r, const int full) {
  const struct gdn_chunk *c = j->c;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const int at = 2 * r + h, i = j->row + at;
    if (!full && i >= c->n) return;
    const __m512 w = _mm512_set1_ps(j->weights[i]);
    const float *inter = j->src + at * BLOCK, *local = inter + BLOCK_ELEMS;
    const __m512 x = _mm512_fmadd_ps(w, _mm512_load_ps(inter), _mm512_load_ps(local));
    const __m512 y = _mm512_fmadd_ps(w, _mm512_load_ps(inter + 16), _mm512_load_ps(local + 16));
    if (full) /* past the caches: nobody here reads it again */
      _mm512_stream_si512((__m512i *)((uint16_t *)c->out_rows.data + i * c->out_rows.stride_elems + j->col),
                          v32_to_bf16(x, y));
    else
      store_32(&c->out_rows, i, j->col, x, y);
  }
}

static ALWAYS_INLINE void out_unit(const struct job *j, int r) {
  out_rows(j, r, 0);
}

static ALWAYS_INLINE void out_unit_full(const struct job *j, int r) {
  out_rows(j, r, 1);
}

static ALWAYS_INLINE void chunk_out_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                         const int full) {
  float sums[2][2 * BLOCK_ELEMS] __attribute__((aligned(64)));
  float weights[GDN_CHUNK] __attribute__((aligned(64)));
  fill_fn *const unit = full ? out_unit_full : out_unit;
  const int blocks = full || c->n > BLOCK ? 2 : 1, first = col / BLOCK;
  for (int i = 0; i < BLOCK * blocks; i += 16)
    _mm512_store_ps(weights + i, _mm512_mul_ps(_mm512_load_ps(c->q_mult + i), _mm512_load_ps(c->decay_in + i)));
  struct job j = {0};
  if (c->zero_state) memset(sums, 0, sizeof(sums));
  for (int p = first; p < (col + n_cols) / BLOCK; p++)
    for (int b = 0; b < blocks; b++) {
      struct block in = {.a = (const char *)c->q + b * BLOCK * 2 * dim_k,
                         .row_bytes = 2 * dim_k,
                         .b = (const char *)c->state_op + p * dim_k * 64};
      if (full && c->next_n == GDN_CHUNK) {
        in.ahead = (const char *)((const uint16_t *)c->next_v.data + b * BLOCK * c->next_v.stride_elems + p * BLOCK);
        in.ahead_bytes = 2 * c->next_v.stride_elems;
      } else { /* nothing: the same line again */
        in.ahead = in.b;
      }
      if (c->zero_state)
        drain(unit, &j, p == first && b == 0 ? 0 : 16);
      else if (p == first && b == 0)
        multiply(&in, block_tiles(c, b, full), dim_k / 32, NULL, sums[b], fill_none, NULL, 0, full ? AHEAD_V : 0);
      else
        multiply(&in, block_tiles(c, b, full), dim_k / 32, NULL, sums[b], unit, &j, 16, full ? AHEAD_V : 0);
      in = (struct block){.a = (const char *)c->a + b * BLOCK * 2 * GDN_CHUNK,
                          .row_bytes = 2 * GDN_CHUNK,
                          .b = (const char *)c->delta + 2 * (p - first) * OP_BYTES};
      if (b)
        multiply(&in, block_tiles(c, b, full), 2, NULL, sums[b] + BLOCK_ELEMS, fill_none, NULL, 0, 0);
      else
        multiply(&in, block_tiles(c, b, full), 1, NULL, sums[b] + BLOCK_ELEMS, fill_none, NULL, 0, 0);
      j = (struct job){.c = c, .src = sums[b], .row = BLOCK * b, .col = BLOCK * p, .weights = weights};
    }
  drain(unit, &j, 16);
}

/* Rows that one unit of block (p, b) fetches: line b of each row in share p of the panels. */
static ALWAYS_INLINE void plan_ahead(const struct gdn_chunk *c, int p, int b, struct job *j) {
  const struct gdn_rows *next[2] = {&c->next_q, &c->next_k};
  const int panels = c->dim_v / BLOCK, share = (GDN_CHUNK / 16 + panels - 1) / panels; /* rows a unit */
  j->ahead_rows = share;
  for (int t = 0; t < 2; t++) {
    j->ahead[t] = NULL;
    if (c->next_n < GDN_CHUNK || !next[t]->data || next[t]->dtype != GDN_ROWS_BF16 || 16 * share * p >= GDN_CHUNK)
      continue;
    j->ahead_bytes[t] = 2 * next[t]->stride_elems;
    j->ahead[t] = (const char *)next[t]->data + 16 * share * p * j->ahead_bytes[t] + 2 * BLOCK * b;
  }
}

static ALWAYS_INLINE void update_state(const struct gdn_chunk *c, int col, int n_cols, const int dim_k, const int full,
                                       fill_fn *unit) {
  float sums[2][BLOCK_ELEMS] __attribute__((aligned(64)));
  const int two = full || c->n > BLOCK, first = col / BLOCK;
  struct job j = {0};
  for (int p = first; p < (col + n_cols) / BLOCK; p++)
    for (int b = 0; b < dim_k / BLOCK; b++) {
      const struct block in = {.a = (const char *)c->kt + b * BLOCK * 2 * GDN_CHUNK,
                               .row_bytes = 2 * GDN_CHUNK,
                               .b = (const char *)c->delta_out + 2 * (p - first) * OP_BYTES};
      if (p == first && b == 0)
        block_product(&in, 2, 1, two ? 2 : 1, NULL, sums[b % 2], fill_none, NULL, 0, 0);
      else if (two)
        block_product(&in, 2, 1, 2, NULL, sums[b % 2], unit, &j, 16, 0);
      else
        block_product(&in, 2, 1, 1, NULL, sums[b % 2], unit, &j, 16, 0);
      const int64_t at = (p * (dim_k / BLOCK) + b) * BLOCK_ELEMS;
      j = (struct job){
          .src = sums[b % 2], .dst = c->state + at, .op = (uint16_t *)c->state_op + at, .factor = *c->decay_all};
      plan_ahead(c, p, b, &j);
    }
  drain(unit, &j, 16);
}

static ALWAYS_INLINE void chunk_state_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  if (c->zero_state)
    update_state(c, col, n_cols, dim_k, full, state_unit_fresh);
  else
    update_state(c, col, n_cols, dim_k, full, state_unit);
}

/* Tokens r and r + 16 of a block of V', weighted anew. */
static ALWAYS_INLINE void reweigh(const struct job *j, int r) {
  const __m512 f = _mm512_set1_ps(j->weights[r]), g = _mm512_set1_ps(j->weights[r + 16]);
  for (int h = 0; h < 2; h++) {
    const __m512i pair = _mm512_load_si512((const char *)j->src + 64 * r + 1024 * h);
    const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 y = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
    _mm512_store_si512((char *)j->op + 64 * r + 1024 * h, v16_pack_pair(_mm512_mul_ps(f, x), _mm512_mul_ps(g, y)));
  }
}

static inline void chunk_state_at_bf16(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  float sums[BLOCK_ELEMS] __attribute__((aligned(64))), weights[GDN_CHUNK] __attribute__((aligned(64)));
  char ops[2 * OP_BYTES] __attribute__((aligned(64)));
  const int blocks = n_at > BLOCK ? 2 : 1, first = col / BLOCK;
  const __m512 decay = _mm512_set1_ps(c->decay_in[n_at - 1]);
  float after = 1; /* the decays between a token and n_at */
  for (int i = GDN_CHUNK - 1; i >= 0; i--) {
    weights[i] = i < n_at ? after * c->k_mult[i] : 0;
    if (i < n_at) after *= c->decay[i];
  }
  for (int p = first; p < (col + n_cols) / BLOCK; p++) {
    for (int b = 0; b < blocks; b++) {
      const struct job j = {.src = (const float *)((const char *)c->delta + (2 * (p - first) + b) * OP_BYTES),
                            .op = ops + b * OP_BYTES,
                            .weights = weights + b * BLOCK};
      drain(reweigh, &j, 16);
    }
    for (int b = 0; b < c->dim_k / BLOCK; b++) {
      const struct block in = {
          .a = (const char *)c->kt + b * BLOCK * 2 * GDN_CHUNK, .row_bytes = 2 * GDN_CHUNK, .b = ops};
      const float *state = c->state + (p * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS;
      float *dst = panels + ((p - first) * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS;
      block_product(&in, 2, 1, blocks, NULL, sums, fill_none, NULL, 0, 0);
      for (int i = 0; i < BLOCK_ELEMS; i += 16)
        _mm512_store_ps(dst + i, c->zero_state
                                     ? _mm512_load_ps(sums + i)
                                     : _mm512_fmadd_ps(decay, _mm512_load_ps(state + i), _mm512_load_ps(sums + i)));
    }
  }
}

#endif
