/* SPDX-License-Identifier: Apache-2.0
 * The chunk form's primitives with bf16 products, written once for AMX tiles and for AVX512-BF16 vectors. The including
 * file defines block_product, which multiplies a block of 32 x 32 and meanwhile does the vector work that another block
 * still waits for: every primitive finishes a block one product later.
 *
 * Where decays stand. A row of V' is kept as W_i = V'_i / (norm_i exp(G_i)), norm_i that of k_i. With
 * lambda_i = beta_i / norm_i^2,
 *   W_i = beta_i v_i / (norm_i exp(G_i)) - lambda_i (k_i S) - sum over j < i of lambda_i (k_i . k_j) W_j
 *   out_i = scale / norm of q_i exp(G_i) (q_i S + sum over j <= i of (q_i . k_j) W_j),  S <- exp(G_C) (S + K^T W):
 * no decay inside a triangle, one q K^T for all value heads of a q/k head, one W for output and state, and every row of
 * output is one sum. As rows are scaled as a whole, this costs nothing but range: V'_i / norm_i has to stay 2^60 away
 * from the ends of float's, and a larger share would leave less of it, a smaller one make more chunks steep. Where some
 * exp(G_i) is not within 2^-60 .. 2^60 the chunk is steep and decays stand inside: W_i = V'_i / norm_i, and
 *   L_ij = lambda_i exp(G_i - G_j) (k_i . k_j),  A_ij = exp(G_i - G_j) (q_i . k_j),
 *   out_i = scale / norm of q_i (exp(G_i) q_i S + A W),  S <- exp(G_C) S + K^T (exp(G_C - G) W).
 *
 * Operands (kernels.h leaves them to the tier); a block is 32 tokens, 32 columns of V or 32 of K:
 *   q, k       [64][K] bf16, the caller's rows as they are: exact. Norms and scale are owed as q_mult and k_mult.
 *   kt         [K][64] bf16, tokens in pairs (j, j + 16) of a block, as in qk_op, a and t
 *   kk, qk     [3 blocks: (0, 0), (1, 0), (1, 1)][32][32] f32
 *   qk_op      [64][64] bf16, of qk
 *   l, a       of steep chunks only: as kk, exp(G_i - G_j) kk_ij; as qk_op
 *   t          [64][64] bf16: T - I of the diagonal blocks, and -L below them: W = R + (T - I) R for the first 32
 *              tokens, whose W corrects the R of the others. R itself enters in f32, and no block of T below the
 *              diagonal is ever formed.
 *   state_op   [panels][K / 32][2][16 pairs of K][16 columns][2] bf16, then what they lack of f32 (scan_bf16.h)
 *   delta      W, [panels][2 blocks of tokens][2][16 pairs][16 columns][2] bf16; delta_out likewise, if steep
 * Rows from n on are zero up to a whole block; a second block exists where n > 32. */
#ifndef GDN_CHUNK_BF16_H
#define GDN_CHUNK_BF16_H

#include <float.h>
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

/* Decays of steep chunks pass through denormal numbers, each operation on which takes as long as a hundred others.
 * Between these two they are zero, as they are for tiles anyway. Memory is the fence that keeps arithmetic there. */
static inline uint32_t flush_denormals(void) {
  const uint32_t csr = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(csr | 0x8040);
  __asm__ volatile("" ::: "memory");
  return csr;
}

static inline void restore_csr(uint32_t csr) {
  __asm__ volatile("" ::: "memory");
  __builtin_ia32_ldmxcsr(csr);
}

/* Makes the call, in a steep chunk without denormals. */
#define FLUSH_IF_STEEP(c, call)                                                                                        \
  do {                                                                                                                 \
    const uint32_t csr = *(c)->steep ? flush_denormals() : 0;                                                          \
    call;                                                                                                              \
    if (*(c)->steep) restore_csr(csr);                                                                                 \
  } while (0)

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

static ALWAYS_INLINE void drain(fill_fn *fill, const struct job *j, int units) {
#pragma GCC unroll 1
  for (int u = 0; u < units; u++) fill(j, u);
}

static ALWAYS_INLINE void multiply(const struct block *p, const struct block *more, int tiles, const float *init,
                                   float *out, fill_fn *fill, const struct job *job, const int units,
                                   const int n_ahead) {
  if (tiles == 2)
    block_product(p, more, 2, 1, init, out, fill, job, units, n_ahead);
  else
    block_product(p, more, 1, 1, init, out, fill, job, units, n_ahead);
}

static ALWAYS_INLINE void fill_none(const struct job *j, int unit) {
  (void)j;
  (void)unit;
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

/* Row r of a block of q K^T for out; j->row 1: the block is on the diagonal, above which it is not there. */
static ALWAYS_INLINE void qk_unit(const struct job *j, int r) {
  const uint32_t live = j->row ? 0xffffffffu >> (31 - r) : 0xffffffffu;
  const __m512 first = _mm512_maskz_loadu_ps((__mmask16)live, j->src + r * BLOCK);
  const __m512 second = _mm512_maskz_loadu_ps((__mmask16)(live >> 16), j->src + r * BLOCK + 16);
  _mm512_store_si512((uint16_t *)j->op + r * GDN_CHUNK, v16_pack_pair(first, second));
}

static ALWAYS_INLINE struct job qk_job(const struct gdn_chunk *c, int row, int col) {
  return (struct job){.src = c->qk + (row + col) * BLOCK_ELEMS,
                      .op = (uint16_t *)c->qk_op + row * BLOCK * GDN_CHUNK + col * BLOCK,
                      .row = row == col};
}

/* q K^T and K K^T in block (row, col). */
static ALWAYS_INLINE struct block qk_block(const struct gdn_chunk *c, int of_q, int row, int col, const int dim_k) {
  return (struct block){.a = (const char *)(of_q ? c->q : c->k) + row * BLOCK * 2 * dim_k,
                        .row_bytes = 2 * dim_k,
                        .b = (const char *)c->hot + col * (dim_k / 2 * BLOCK) * 4,
                        .steps = dim_k / 32};
}

/* The products of the lower triangle. The first four have rows of kt to make meanwhile, of a block of tokens each two,
 * the last two rows of qk_op. */
static ALWAYS_INLINE void chunk_qk_body(const struct gdn_chunk *c, const int dim_k, const int full) {
  float *const pairs = c->hot;
  const int two = full || c->n > BLOCK, quarter = dim_k / 4;
  copy_rows(c, &c->q_rows, c->scale, c->q, c->q_mult, dim_k);
  copy_rows(c, &c->k_rows, 1, c->k, c->k_mult, dim_k);
  transpose_pairs(c, pairs, dim_k);
#pragma GCC unroll 1
  for (int i = 0; i < 2 * (two + 1); i++) {
    const int of_q = i % 2, row = i / 2;
    const struct job j = {
        .src = pairs + row * (dim_k / 2 * BLOCK), .dst = (uint16_t *)c->kt + row * BLOCK, .row = of_q * quarter};
    const struct block p = qk_block(c, of_q, row, 0, dim_k);
    block_product(&p, NULL, 2, row, NULL, (of_q ? c->qk : c->kk) + row * BLOCK_ELEMS, kt_unit, &j, quarter, 0);
  }
  struct job j = qk_job(c, 0, 0);
  if (!two) {
    drain(qk_unit, &j, 32);
    return;
  }
#pragma GCC unroll 1
  for (int of_q = 0; of_q < 2; of_q++) {
    const struct block p = qk_block(c, of_q, 1, 1, dim_k);
    block_product(&p, NULL, 2, 0, NULL, (of_q ? c->qk : c->kk) + 2 * BLOCK_ELEMS, qk_unit, &j, 32, 0);
    j = qk_job(c, 1, of_q);
  }
  drain(qk_unit, &j, 32);
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
  const uint32_t csr = flush_denormals();
  for (int i = 0; i < c->n; i++) {
    c->decay[i] = c->g_rows.data ? row_elem(&c->g_rows, i) : 0;
    c->beta[i] = c->beta_rows.data ? row_elem(&c->beta_rows, i) : 1;
  }
  const __m512 least = _mm512_set1_ps(0x1p-60f), most = _mm512_set1_ps(0x1p60f);
  __m512 d[5] = {ones, ones, ones, ones, ones}, carry = ones;
  __mmask16 gentle = 0xffff;
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
    gentle &= _mm512_cmp_ps_mask(least, x, _CMP_LT_OQ) & _mm512_cmp_ps_mask(x, most, _CMP_LT_OQ);
    carry = _mm512_permutexvar_ps(_mm512_set1_epi32(15), x);
  }
  *c->decay_all = _mm512_cvtss_f32(carry);
  *c->steep = gentle != 0xffff;
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
  restore_csr(csr);
}

/* Rows 16 g .. 16 g + 15. decays[b] lane j holds exp(G_i - G_j) of block b of 16 tokens and is carried from row to row:
 * one multiplication each, no exponential. */
static ALWAYS_INLINE void mask_rows(const struct gdn_chunk *c, const int g, __m512 decays[4]) {
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
  const int n = c->n - 16 * g < 16 ? c->n - 16 * g : 16;
  for (int r = 0; r < n; r++) {
    const int i = 16 * g + r;
    const __mmask16 below = (__mmask16)((1u << r) - 1);
    const __m512 decay = _mm512_set1_ps(c->decay[i]);
    __m512 a[4] = {zero, zero, zero, zero};
#pragma GCC unroll 4
    for (int b = 0; b <= g; b++) {
      const int64_t at = (g / 2 + b / 2) * BLOCK_ELEMS + (i % BLOCK) * BLOCK + b % 2 * 16;
      const __mmask16 left = b == g ? below : 0xffff;
      decays[b] = _mm512_maskz_mul_ps(left, decays[b], decay);
      _mm512_store_ps(c->l + at, _mm512_maskz_mul_ps(left, decays[b], _mm512_maskz_loadu_ps(left, c->kk + at)));
      if (b == g) decays[b] = _mm512_mask_mov_ps(decays[b], (__mmask16)(1u << r), one);
      const __mmask16 seen = b == g ? (__mmask16)(below << 1 | 1) : 0xffff;
      a[b] = _mm512_maskz_mul_ps(seen, decays[b], _mm512_maskz_loadu_ps(seen, c->qk + at));
    }
    uint16_t *row = (uint16_t *)c->a + i * GDN_CHUNK;
    _mm512_store_si512(row, v16_pack_pair(a[0], a[1]));
    if (g > 1) _mm512_store_si512(row + BLOCK, v16_pack_pair(a[2], a[3]));
  }
}

static inline void chunk_mask_bf16(const struct gdn_chunk *c) {
  __m512 decays[4];
  if (!*c->steep) return;
  for (int b = 0; b < 4; b++) decays[b] = _mm512_setzero_ps();
  mask_rows(c, 0, decays);
  if (c->n > 16) mask_rows(c, 1, decays);
  if (c->n > 32) mask_rows(c, 2, decays);
  if (c->n > 48) mask_rows(c, 3, decays);
  const int tail = -c->n & (BLOCK - 1), row = c->n % BLOCK * BLOCK;
  memset((uint16_t *)c->a + c->n * GDN_CHUNK, 0, sizeof(uint16_t) * (size_t)(tail * GDN_CHUNK));
  for (int block = c->n > BLOCK ? 1 : 0; block <= (c->n > BLOCK ? 2 : 0); block++)
    memset(c->l + block * BLOCK_ELEMS + row, 0, sizeof(float) * (size_t)(tail * BLOCK));
}

/* x [16][16] += L x for a strictly lower L with rows of 32. Its one copy serves all blocks. */
static __attribute__((noinline)) void substitute(const float *l, float *x) {
  __m512 r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(x + 16 * i);
#pragma GCC unroll 16
  for (int j = 0; j < 15; j++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (i > j) r[i] = _mm512_fmadd_ps(_mm512_set1_ps(l[i * BLOCK + j]), r[j], r[i]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_ps(x + 16 * i, r[i]);
}

/* x [16][16] = L + L y for a block of L with rows of 32; y null = 0. */
static ALWAYS_INLINE void start_block(const float *l, const float *y, float *x) {
  for (int half = 0; half < 16; half += 8) {
    __m512 r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = _mm512_load_ps(l + (half + i) * BLOCK);
    for (int j = 0; y && j < 16; j++) {
      const __m512 row = _mm512_load_ps(y + 16 * j);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) r[i] = _mm512_fmadd_ps(_mm512_set1_ps(l[(half + i) * BLOCK + j]), row, r[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) _mm512_store_ps(x + 16 * (half + i), r[i]);
  }
}

/* t [32 rows] = T - I of one diagonal block, N = -L - L N by forward substitution; L_ij = lambda_i l_ij below the
 * diagonal. */
static __attribute__((noinline)) void solve_block(const float *l, const float *lambda, uint16_t *t) {
  float minus_l[BLOCK_ELEMS] __attribute__((aligned(64)));
  float x[3][256] __attribute__((aligned(64))); /* N of rows 0..15, then of rows 16..31: first columns, last columns */
  const float *left = minus_l + 16 * BLOCK, *right = left + 16;
  for (int i = 0; i < BLOCK; i++) {
    const uint32_t below = (1u << i) - 1;
    const __m512 minus = _mm512_set1_ps(-lambda[i]);
    const __m512 first = _mm512_maskz_loadu_ps((__mmask16)below, l + i * BLOCK);
    const __m512 second = _mm512_maskz_loadu_ps((__mmask16)(below >> 16), l + i * BLOCK + 16);
    _mm512_store_ps(minus_l + i * BLOCK, _mm512_mul_ps(minus, first));
    _mm512_store_ps(minus_l + i * BLOCK + 16, _mm512_mul_ps(minus, second));
  }
  start_block(minus_l, NULL, x[0]);
  substitute(minus_l, x[0]);
  start_block(left, x[0], x[1]);
  substitute(right, x[1]);
  start_block(right, NULL, x[2]);
  substitute(right, x[2]);
  for (int i = 0; i < 16; i++) {
    const __m512 first = _mm512_load_ps(x[0] + 16 * i);
    const __m512 left_n = _mm512_load_ps(x[1] + 16 * i), right_n = _mm512_load_ps(x[2] + 16 * i);
    _mm512_store_si512(t + i * GDN_CHUNK, v16_pack_pair(first, _mm512_setzero_ps()));
    _mm512_store_si512(t + (16 + i) * GDN_CHUNK, v16_pack_pair(left_n, right_n));
  }
}

/* beta / norm^2 of 16 tokens; norms below 5e-20, whose squares' inverses overflow, count as that. */
static ALWAYS_INLINE __m512 lambdas(const struct gdn_chunk *c, int i) {
  const __m512 k_mult = _mm512_load_ps(c->k_mult + i);
  return _mm512_mul_ps(_mm512_load_ps(c->beta + i),
                       _mm512_min_ps(_mm512_set1_ps(FLT_MAX), _mm512_mul_ps(k_mult, k_mult)));
}

static inline void chunk_solve_bf16(const struct gdn_chunk *c) {
  const float *l = *c->steep ? c->l : c->kk;
  uint16_t *t = c->t;
  float lambda[GDN_CHUNK] __attribute__((aligned(64)));
  for (int i = 0; i < GDN_CHUNK; i += 16) _mm512_store_ps(lambda + i, lambdas(c, i));
  solve_block(l, lambda, t);
  if (c->n <= BLOCK) return;
  t += BLOCK * GDN_CHUNK;
  for (int i = 0; i < BLOCK; i++) {
    const __m512 minus = _mm512_set1_ps(-lambda[BLOCK + i]);
    const float *row = l + BLOCK_ELEMS + i * BLOCK;
    _mm512_store_si512(t + i * GDN_CHUNK, v16_pack_pair(_mm512_mul_ps(minus, _mm512_load_ps(row)),
                                                        _mm512_mul_ps(minus, _mm512_load_ps(row + 16))));
  }
  solve_block(l + 2 * BLOCK_ELEMS, lambda + BLOCK, t + BLOCK);
}

#endif
