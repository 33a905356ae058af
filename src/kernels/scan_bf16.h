/* SPDX-License-Identifier: Apache-2.0
 * Columns of V in the bf16 chunk form: V', output, state; see chunk_bf16.h. What a product leaves for vectors, and they
 * for the next, stays in c->hot: a line written outside the first-level cache costs four cycles, inside it one. Vector
 * work runs under a later product, and every loop takes one round more, without products, for the last of it. */
#ifndef GDN_SCAN_BF16_H
#define GDN_SCAN_BF16_H

#include "chunk_bf16.h"

/* ---- V' = R + (T - I) R ---- */

/* Tokens r and r + 16 of a block: R = beta v - (beta exp(G) / norm) (k S), in place of k S. */
static ALWAYS_INLINE void residual_rows(const struct job *j, int r, const int full) {
  const struct gdn_chunk *c = j->c;
  const __mmask16 old = c->zero_state ? 0 : 0xffff;
  __m512 x[4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const int i = j->row + 16 * h + r;
    float *sums = j->sums + (16 * h + r) * BLOCK;
    const __mmask16 live = full || i < c->n ? 0xffff : 0;
    const __m512 beta = _mm512_set1_ps(c->beta[i]), weight = _mm512_set1_ps(j->weights[i]);
    __m512 v0 = _mm512_setzero_ps(), v1 = v0;
    if (full) {
      const __m512i v = _mm512_loadu_si512((const uint16_t *)c->v_rows.data + i * c->v_rows.stride_elems + j->col);
      v0 = v32_first(v);
      v1 = v32_second(v);
    } else if (live) {
      load_32(&c->v_rows, i, j->col, &v0, &v1);
    }
    const __m512 s0 = _mm512_maskz_loadu_ps(old & live, sums), s1 = _mm512_maskz_loadu_ps(old & live, sums + 16);
    x[2 * h] = _mm512_fnmadd_ps(weight, s0, _mm512_mul_ps(beta, v0));
    x[2 * h + 1] = _mm512_fnmadd_ps(weight, s1, _mm512_mul_ps(beta, v1));
    _mm512_store_ps(sums, x[2 * h]);
    _mm512_store_ps(sums + 16, x[2 * h + 1]);
  }
  if (!j->op) return;
  _mm512_store_si512((char *)j->op + 64 * r, v16_pack_pair(x[0], x[2]));
  _mm512_store_si512((char *)j->op + 64 * r + 1024, v16_pack_pair(x[1], x[3]));
}

/* Tokens r and r + 16 of a block of V'. */
static ALWAYS_INLINE void delta_rows(const struct job *j, int r) {
  const float *src = j->sums + r * BLOCK;
  char *op = (char *)j->op + 64 * r, *out = (char *)j->dst + 64 * r;
  const __m512 f = _mm512_set1_ps(j->weights[r]), g = _mm512_set1_ps(j->weights[r + 16]);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const __m512 x = _mm512_load_ps(src + 16 * h), y = _mm512_load_ps(src + 16 * BLOCK + 16 * h);
    _mm512_store_si512(op + 1024 * h, v16_pack_pair(x, y));
    _mm512_store_si512(out + 1024 * h, v16_pack_pair(_mm512_mul_ps(f, x), _mm512_mul_ps(g, y)));
  }
}

/* Tokens r and r + 16 of the second block's R, corrected by the first one's V'. */
static ALWAYS_INLINE void pack_rows(const struct job *j, int r) {
  const float *src = j->sums + r * BLOCK;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++)
    _mm512_store_si512((char *)j->op + 64 * r + 1024 * h,
                       v16_pack_pair(_mm512_load_ps(src + 16 * h), _mm512_load_ps(src + 16 * BLOCK + 16 * h)));
}

/* The vector work of both blocks of tokens. */
enum { FIRST_RESIDUAL, SECOND_RESIDUAL, FIRST_DELTA, SECOND_PACK, SECOND_DELTA, DELTA_JOBS };

static ALWAYS_INLINE void under_first(const struct job *j, int r, const int full) {
  if (j[FIRST_DELTA].sums) delta_rows(j + FIRST_DELTA, r);
  if (j[SECOND_RESIDUAL].sums) residual_rows(j + SECOND_RESIDUAL, r, full);
}

static ALWAYS_INLINE void under_second(const struct job *j, int r, const int full) {
  if (j[SECOND_PACK].sums) pack_rows(j + SECOND_PACK, r);
  if (j[FIRST_RESIDUAL].sums) residual_rows(j + FIRST_RESIDUAL, r, full);
}

static ALWAYS_INLINE void under_first_unit(const struct job *j, int r) {
  under_first(j, r, 0);
}

static ALWAYS_INLINE void under_first_unit_full(const struct job *j, int r) {
  under_first(j, r, 1);
}

static ALWAYS_INLINE void under_second_unit(const struct job *j, int r) {
  under_second(j, r, 0);
}

static ALWAYS_INLINE void under_second_unit_full(const struct job *j, int r) {
  under_second(j, r, 1);
}

static ALWAYS_INLINE void second_delta_unit(const struct job *j, int r) {
  delta_rows(j + SECOND_DELTA, r);
}

/* Weights of k S in R, and of V' in the state. */
static ALWAYS_INLINE void weigh_delta(const struct gdn_chunk *c, float *in, float *out) {
  for (int i = 0; i < (c->n > BLOCK ? 64 : 32); i += 16) {
    const __m512 k_mult = _mm512_load_ps(c->k_mult + i);
    _mm512_store_ps(in + i,
                    _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c->beta + i), k_mult), _mm512_load_ps(c->decay_in + i)));
    _mm512_store_ps(out + i, _mm512_mul_ps(k_mult, _mm512_load_ps(c->decay_out + i)));
  }
}

/* Five products a panel: k S of both blocks of tokens, and between them, for the panel before, what T adds. Under the
 * first k S runs what that panel's products of the first block have left, under the second what those of the second.
 * Sums: k S, then R, then V'. The round after the last panel only finishes it; a product not due has no steps. */
static ALWAYS_INLINE void chunk_delta_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  float *const sums = c->hot, *const second_sums = sums + BLOCK_ELEMS; /* [BLOCK_ELEMS]; twice, in turns */
  char *const ops = (char *)(sums + 3 * BLOCK_ELEMS);                  /* [2][OP_BYTES] */
  float in_weights[GDN_CHUNK] __attribute__((aligned(64))), out_weights[GDN_CHUNK] __attribute__((aligned(64)));
  const int two = full || c->n > BLOCK, first = col / BLOCK, stop = (col + n_cols) / BLOCK;
  weigh_delta(c, in_weights, out_weights);
  const struct block t00 = {.a = c->t, .row_bytes = 2 * GDN_CHUNK, .b = ops};
  struct block t10 = {.a = t00.a + BLOCK * 2 * GDN_CHUNK, .row_bytes = 2 * GDN_CHUNK};
  const struct block t11 = {.a = t10.a + 64, .row_bytes = 2 * GDN_CHUNK, .b = ops + OP_BYTES};
  struct job j[DELTA_JOBS] = {[FIRST_RESIDUAL] = {.c = c, .op = ops, .weights = in_weights},
                              [SECOND_RESIDUAL] = {.c = c, .weights = in_weights, .row = BLOCK},
                              [FIRST_DELTA] = {.weights = out_weights},
                              [SECOND_PACK] = {.op = ops + OP_BYTES},
                              [SECOND_DELTA] = {.weights = out_weights + BLOCK}};
#pragma GCC unroll 1
  for (int p = first; p <= stop; p++) {
    const int behind = p > first && two, steps = p == stop || c->zero_state ? 0 : dim_k / 32;
    float *const own = second_sums + (p - first) % 2 * BLOCK_ELEMS;
    float *const old = second_sums + (p - first + 1) % 2 * BLOCK_ELEMS;
    struct block k = {.a = c->k, .row_bytes = 2 * dim_k, .b = (const char *)c->state_op + p * dim_k * 64};
    j[FIRST_RESIDUAL].sums = p < stop ? sums : NULL;
    j[FIRST_DELTA].sums = p > first ? sums : NULL;
    j[SECOND_RESIDUAL].sums = j[SECOND_PACK].sums = j[SECOND_DELTA].sums = behind ? old : NULL;
    multiply(&k, block_tiles(c, 0, full), steps, NULL, sums, full ? under_first_unit_full : under_first_unit, j,
             p > first ? 16 : 0, 0);
    multiply(&t10, block_tiles(c, 1, full), behind ? 1 : 0, old, old, fill_none, NULL, 0, 0);
    j[FIRST_RESIDUAL].col = j[SECOND_RESIDUAL].col = BLOCK * p;
    k.a += BLOCK * 2 * dim_k;
    multiply(&k, block_tiles(c, 1, full), two ? steps : 0, NULL, own, full ? under_second_unit_full : under_second_unit,
             j, 16, 0);
    multiply(&t11, block_tiles(c, 1, full), behind ? 1 : 0, old, old, fill_none, NULL, 0, 0);
    multiply(&t00, block_tiles(c, 0, full), p < stop ? 1 : 0, sums, sums, second_delta_unit, j, behind ? 16 : 0, 0);
    j[FIRST_DELTA].op = (char *)c->delta + 2 * (p - first) * OP_BYTES;
    j[FIRST_DELTA].dst = (char *)c->delta_out + 2 * (p - first) * OP_BYTES;
    j[SECOND_DELTA].op = (char *)j[FIRST_DELTA].op + OP_BYTES;
    j[SECOND_DELTA].dst = (char *)j[FIRST_DELTA].dst + OP_BYTES;
    t10.b = (const char *)j[FIRST_DELTA].op;
  }
}

/* ---- output and state ---- */

/* Lines of the next chunk's q and k, for the second-level cache. */
static ALWAYS_INLINE void ahead_unit(const struct job *j, int r) {
#pragma GCC unroll 2
  for (int t = 0; t < 2; t++)
    for (int i = 0; j->ahead[t] && i < j->ahead_rows; i++)
      __builtin_prefetch(j->ahead[t] + (r * j->ahead_rows + i) * j->ahead_bytes[t], 0, 2);
}

/* The state between chunks: the bits of its floats in two halves, rounded, so that the upper one is the bf16 operand
 * and both are exact together: bits + 0x8000 = upper << 16 | lower. Two lines where float and operand are three. */
static ALWAYS_INLINE void split_rows(__m512 x, __m512 y, char *upper, char *lower) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(_mm512_castps_si512(x), half), b = _mm512_add_epi32(_mm512_castps_si512(y), half);
  _mm512_store_si512(upper, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b));
  _mm512_store_si512(lower, _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16)));
}

static ALWAYS_INLINE void join_rows(const char *upper, const char *lower, __m512 *x, __m512 *y) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i u = _mm512_load_si512(upper), l = _mm512_load_si512(lower);
  const __m512i a = _mm512_mask_blend_epi16(0xaaaaaaaau, l, _mm512_slli_epi32(u, 16));
  const __m512i b = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(l, 16), u);
  *x = _mm512_castsi512_ps(_mm512_sub_epi32(a, half));
  *y = _mm512_castsi512_ps(_mm512_sub_epi32(b, half));
}

/* Rows 2 r and 2 r + 1 of a block of the state, decayed, plus sums. */
static ALWAYS_INLINE void state_unit(const struct job *j, int r) {
  ahead_unit(j, r);
  char *upper = (char *)j->op + 64 * r, *lower = (char *)j->dst + 64 * r;
  const float *sums = j->src + 2 * BLOCK * r;
  const __m512 decay = _mm512_set1_ps(j->factor);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    __m512 x = _mm512_load_ps(sums + 16 * h), y = _mm512_load_ps(sums + BLOCK + 16 * h);
    if (!j->fresh) {
      __m512 s, t;
      join_rows(upper + 1024 * h, lower + 1024 * h, &s, &t);
      x = _mm512_fmadd_ps(decay, s, x);
      y = _mm512_fmadd_ps(decay, t, y);
    }
    split_rows(x, y, upper + 1024 * h, lower + 1024 * h);
  }
}

/* Rows 2 r and 2 r + 1 of a block, from and to floats. */
static ALWAYS_INLINE void begin_unit(const struct job *j, int r) {
  const float *x = j->src + 2 * BLOCK * r;
  for (int h = 0; h < 2; h++)
    split_rows(_mm512_load_ps(x + 16 * h), _mm512_load_ps(x + BLOCK + 16 * h), (char *)j->op + 64 * r + 1024 * h,
               (char *)j->dst + 64 * r + 1024 * h);
}

static ALWAYS_INLINE void end_unit(const struct job *j, int r) {
  for (int h = 0; h < 2; h++) {
    __m512 x, y;
    join_rows((const char *)j->op + 64 * r + 1024 * h, (const char *)j->dst + 64 * r + 1024 * h, &x, &y);
    _mm512_store_ps(j->sums + 2 * BLOCK * r + 16 * h, x);
    _mm512_store_ps(j->sums + 2 * BLOCK * r + BLOCK + 16 * h, y);
  }
}

/* Block at: elements of the state before it. */
static ALWAYS_INLINE struct job state_block(const struct gdn_chunk *c, int64_t at) {
  uint16_t *upper = c->state_op;
  return (struct job){.op = upper + at, .dst = upper + (int64_t)c->dim_k * c->dim_v + at};
}

static inline void chunk_begin_bf16(const struct gdn_chunk *c, int col, int n_cols) {
  for (int at = col * c->dim_k; at < (col + n_cols) * c->dim_k; at += BLOCK_ELEMS) {
    struct job j = state_block(c, at);
    j.src = c->state + at;
    drain(begin_unit, &j, 16);
  }
}

static inline void chunk_end_bf16(const struct gdn_chunk *c, int col, int n_cols) {
  for (int at = col * c->dim_k; at < (col + n_cols) * c->dim_k; at += BLOCK_ELEMS) {
    struct job j = state_block(c, at);
    j.sums = c->state + at;
    drain(end_unit, &j, 16);
  }
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
    if (full) /* past the caches: to lines that were fetched in time it took half as long again */
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

/* Lines of v that the next chunk has where this one has block b of panel p. */
static ALWAYS_INLINE void plan_lines(const struct gdn_chunk *c, int p, int b, const int full, struct block *in) {
  in->ahead = in->b; /* nothing: the same line again */
  if (!full || c->next_n < GDN_CHUNK) return;
  in->ahead = (const char *)((const uint16_t *)c->next_v.data + b * BLOCK * c->next_v.stride_elems + p * BLOCK);
  in->ahead_bytes = 2 * c->next_v.stride_elems;
}

/* Blocks of tokens of all panels, and a round after the last that only stores it. */
static ALWAYS_INLINE void chunk_out_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                         const int full) {
  float(*const sums)[2 * BLOCK_ELEMS] = c->hot; /* of a block of tokens: q S, A V' */
  float weights[GDN_CHUNK] __attribute__((aligned(64)));
  const int blocks = full || c->n > BLOCK ? 2 : 1, first = col / BLOCK, rounds = n_cols / BLOCK * blocks;
  for (int i = 0; i < BLOCK * blocks; i += 16)
    _mm512_store_ps(weights + i, _mm512_mul_ps(_mm512_load_ps(c->q_mult + i), _mm512_load_ps(c->decay_in + i)));
  struct job j = {.c = c, .weights = weights};
  if (c->zero_state) memset(sums, 0, 2 * sizeof(*sums));
#pragma GCC unroll 1
  for (int i = 0; i <= rounds; i++) {
    const int b = i % blocks, p = first + i / blocks, live = i < rounds;
    struct block q = {.a = (const char *)c->q + b * BLOCK * 2 * dim_k,
                      .row_bytes = 2 * dim_k,
                      .b = (const char *)c->state_op + p * dim_k * 64};
    const struct block a = {.a = (const char *)c->a + b * BLOCK * 2 * GDN_CHUNK,
                            .row_bytes = 2 * GDN_CHUNK,
                            .b = (const char *)c->delta + 2 * (p - first) * OP_BYTES};
    plan_lines(c, p, b, full, &q);
    multiply(&q, block_tiles(c, b, full), live && !c->zero_state ? dim_k / 32 : 0, NULL, sums[b],
             full ? out_unit_full : out_unit, &j, i ? 16 : 0, full ? AHEAD_V : 0);
    multiply(&a, block_tiles(c, b, full), live ? b + 1 : 0, NULL, sums[b] + BLOCK_ELEMS, fill_none, NULL, 0, 0);
    j.src = sums[b];
    j.row = BLOCK * b;
    j.col = BLOCK * p;
  }
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

static ALWAYS_INLINE void chunk_state_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  float(*const sums)[BLOCK_ELEMS] = c->hot; /* of two blocks, in turns */
  const int steps = full || c->n > BLOCK ? 2 : 1, blocks = dim_k / BLOCK, first = col / BLOCK;
  const int rounds = n_cols / BLOCK * blocks;
  struct job j = {0};
#pragma GCC unroll 1
  for (int i = 0; i <= rounds; i++) {
    const int b = i % blocks, p = first + i / blocks;
    const struct block in = {.a = (const char *)c->kt + b * BLOCK * 2 * GDN_CHUNK,
                             .row_bytes = 2 * GDN_CHUNK,
                             .b = (const char *)c->delta_out + 2 * (p - first) * OP_BYTES};
    block_product(&in, 2, 1, i < rounds ? steps : 0, NULL, sums[i % 2], state_unit, &j, i ? 16 : 0, 0);
    j = state_block(c, (p * blocks + b) * BLOCK_ELEMS);
    j.src = sums[i % 2];
    j.factor = *c->decay_all;
    j.fresh = c->zero_state;
    plan_ahead(c, p, b, &j);
  }
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
      struct job state = state_block(c, (p * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS);
      float *dst = panels + ((p - first) * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS;
      state.sums = dst;
      block_product(&in, 2, 1, blocks, NULL, sums, fill_none, NULL, 0, 0);
      if (!c->zero_state) drain(end_unit, &state, 16);
      for (int i = 0; i < BLOCK_ELEMS; i += 16)
        _mm512_store_ps(dst + i, c->zero_state
                                     ? _mm512_load_ps(sums + i)
                                     : _mm512_fmadd_ps(decay, _mm512_load_ps(dst + i), _mm512_load_ps(sums + i)));
    }
  }
}

#endif
