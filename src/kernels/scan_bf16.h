/* SPDX-License-Identifier: Apache-2.0
 * Columns of V in the bf16 chunk form: W, output, state; see chunk_bf16.h. What a product leaves for vectors, and they
 * for the next, stays in c->hot: a line written outside the first-level cache costs four cycles, inside it one. Vector
 * work runs under a later product; what the last product leaves is done alone. */
#ifndef GDN_SCAN_BF16_H
#define GDN_SCAN_BF16_H

#include "chunk_bf16.h"

/* ---- W = R + (T - I) R ---- */

struct delta_hot {
  float sums[BLOCK_ELEMS];      /* of the first 32 tokens: k S, then R, then W */
  float second[2][BLOCK_ELEMS]; /* of the others, for even and odd panels */
  char ops[2][OP_BYTES];        /* R, the second without what is due to it from the first 32 tokens' W */
  float v_weights[GDN_CHUNK], s_weights[GDN_CHUNK];
};
_Static_assert(sizeof(struct delta_hot) <= GDN_HOT_BYTES, "what passes between V' and its operands");

/* Tokens r and r + 16 of the block from token row on: R, of v and k S, in place of k S; op null = nobody needs it
 * packed. */
static ALWAYS_INLINE void residual_rows(const struct job *j, float *sums, const int row, int r, char *op,
                                        const int full) {
  const struct gdn_chunk *c = j->c;
  const struct delta_hot *hot = j->hot;
  const __mmask16 old = c->zero_state ? 0 : 0xffff;
  __m512 x[4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const int i = row + 16 * h + r;
    float *own = sums + (16 * h + r) * BLOCK;
    const __mmask16 live = full || i < c->n ? 0xffff : 0;
    const __m512 of_v = _mm512_set1_ps(hot->v_weights[i]), of_s = _mm512_set1_ps(hot->s_weights[i]);
    __m512 v0 = _mm512_setzero_ps(), v1 = v0;
    if (full) {
      const __m512i v = _mm512_loadu_si512(j->rows + i * j->row_bytes);
      v0 = v32_first(v);
      v1 = v32_second(v);
    } else if (live) {
      load_32(&c->v_rows, i, j->col, &v0, &v1);
    }
    const __m512 s0 = _mm512_maskz_loadu_ps(old & live, own), s1 = _mm512_maskz_loadu_ps(old & live, own + 16);
    x[2 * h] = _mm512_fnmadd_ps(of_s, s0, _mm512_mul_ps(of_v, v0));
    x[2 * h + 1] = _mm512_fnmadd_ps(of_s, s1, _mm512_mul_ps(of_v, v1));
    _mm512_store_ps(own, x[2 * h]);
    _mm512_store_ps(own + 16, x[2 * h + 1]);
  }
  if (!op) return;
  _mm512_store_si512(op + 64 * r, v16_pack_pair(x[0], x[2]));
  _mm512_store_si512(op + 64 * r + 1024, v16_pack_pair(x[1], x[3]));
}

/* Tokens r and r + 16 of a block of R or W as operand. */
static ALWAYS_INLINE void pack_rows(const float *sums, int r, char *op) {
  sums += r * BLOCK;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++)
    _mm512_store_si512(op + 64 * r + 1024 * h,
                       v16_pack_pair(_mm512_load_ps(sums + 16 * h), _mm512_load_ps(sums + 16 * BLOCK + 16 * h)));
}

/* Under the first block's k S, of the panel before: W of the first block, R of the second. */
static ALWAYS_INLINE void under_first(const struct job *j, int r, const int full) {
  pack_rows(((struct delta_hot *)j->hot)->sums, r, j->op);
  if (full || j->c->n > BLOCK) residual_rows(j, j->sums, BLOCK, r, NULL, full);
}

/* Under the second block's k S: what T11 needs of the panel before, and the first block's R. */
static ALWAYS_INLINE void under_second(const struct job *j, int r, const int behind, const int full) {
  struct delta_hot *hot = j->hot;
  if (behind && (full || j->c->n > BLOCK)) pack_rows(j->sums, r, hot->ops[1]);
  residual_rows(j, hot->sums, 0, r, hot->ops[0], full);
}

static ALWAYS_INLINE void first_unit(const struct job *j, int r) {
  under_first(j, r, 0);
}

static ALWAYS_INLINE void first_unit_full(const struct job *j, int r) {
  under_first(j, r, 1);
}

static ALWAYS_INLINE void second_unit(const struct job *j, int r) {
  under_second(j, r, j->behind, 0);
}

static ALWAYS_INLINE void second_unit_full(const struct job *j, int r) {
  under_second(j, r, 1, 1);
}

static ALWAYS_INLINE void second_unit_of_first_panel(const struct job *j, int r) {
  under_second(j, r, 0, 1);
}

static ALWAYS_INLINE void pack_unit(const struct job *j, int r) {
  pack_rows(j->sums, r, ((struct delta_hot *)j->hot)->ops[1]);
}

static ALWAYS_INLINE void second_delta_unit(const struct job *j, int r) {
  pack_rows(j->sums, r, (char *)j->op + OP_BYTES);
}

/* Weights of v and k S in R. */
static ALWAYS_INLINE void weigh_residual(const struct gdn_chunk *c, struct delta_hot *hot) {
  for (int i = 0; i < (c->n > BLOCK ? 64 : 32); i += 16) {
    const __mmask16 live = v16_mask(c->n > i ? c->n - i : 0);
    const __m512 decay = _mm512_load_ps(c->decay_in + i);
    const __m512 v = _mm512_mul_ps(_mm512_load_ps(c->beta + i), _mm512_load_ps(c->k_mult + i)), s = lambdas(c, i);
    _mm512_store_ps(hot->v_weights + i,
                    *c->steep ? v : _mm512_div_ps(v, _mm512_mask_mov_ps(_mm512_set1_ps(1), live, decay)));
    _mm512_store_ps(hot->s_weights + i, *c->steep ? _mm512_mul_ps(s, decay) : s);
  }
}

/* Five products a panel, of both blocks of tokens, and the vector work under each:
 *   k0 S of p        W of the first block of p - 1, R of its second
 *   T10 of p - 1
 *   k1 S of p        operand R of the second block of p - 1, R of the first of p
 *   T11 of p - 1
 *   T00 of p         W of the second block of p - 1
 * behind: there is a panel before, the at-th of the call's; here: there is panel p, the next. */
static ALWAYS_INLINE void delta_panel(const struct gdn_chunk *c, int p, int at, const int dim_k, const int full,
                                      const int behind, const int here) {
  struct delta_hot *hot = c->hot;
  const int two = full || c->n > BLOCK, has_state = !c->zero_state;
  const int tiles[2] = {block_tiles(c, 0, full), block_tiles(c, 1, full)};
  float *const own = hot->second[p % 2], *const old = hot->second[(p + 1) % 2];
  const struct block k0 = {
      .a = c->k, .row_bytes = 2 * dim_k, .b = (const char *)c->state_op + (int64_t)p * dim_k * 64, .steps = dim_k / 32};
  const struct block k1 = {.a = k0.a + BLOCK * 2 * dim_k, .row_bytes = 2 * dim_k, .b = k0.b, .steps = dim_k / 32};
  struct job j = {.c = c,
                  .hot = hot,
                  .sums = old,
                  .op = (char *)c->delta + 2 * at * OP_BYTES,
                  .row_bytes = 2 * c->v_rows.stride_elems,
                  .rows = (const char *)c->v_rows.data + 2 * BLOCK * (p - behind),
                  .col = BLOCK * (p - behind),
                  .behind = behind};
  const struct block t00 = {.a = c->t, .row_bytes = 2 * GDN_CHUNK, .b = hot->ops[0], .steps = 1};
  const struct block t10 = {.a = t00.a + BLOCK * 2 * GDN_CHUNK, .row_bytes = 2 * GDN_CHUNK, .b = j.op, .steps = 1};
  const struct block t11 = {.a = t10.a + 64, .row_bytes = 2 * GDN_CHUNK, .b = hot->ops[1], .steps = 1};
  fill_fn *const under_k0 = full ? first_unit_full : first_unit;
  fill_fn *const under_k1 = !full ? second_unit : behind ? second_unit_full : second_unit_of_first_panel;
  if (here && has_state)
    multiply(&k0, NULL, tiles[0], NULL, hot->sums, under_k0, &j, behind ? 16 : 0, 0);
  else if (behind)
    drain(under_k0, &j, 16);
  if (behind && two) multiply(&t10, NULL, tiles[1], old, old, fill_none, &j, 0, 0);
  if (here) {
    j.col = BLOCK * p;
    j.rows = (const char *)c->v_rows.data + 2 * BLOCK * p;
    if (has_state && two)
      multiply(&k1, NULL, tiles[1], NULL, own, under_k1, &j, 16, 0);
    else
      drain(under_k1, &j, 16);
  } else if (two) {
    drain(pack_unit, &j, 16);
  }
  if (behind && two) multiply(&t11, NULL, tiles[1], old, old, fill_none, &j, 0, 0);
  if (here)
    multiply(&t00, NULL, tiles[0], hot->sums, hot->sums, second_delta_unit, &j, behind && two ? 16 : 0, 0);
  else if (two)
    drain(second_delta_unit, &j, 16);
}

/* A panel ends while the next is under way: the last round only ends one. */
static ALWAYS_INLINE void chunk_delta_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  const int first = col / BLOCK, stop = (col + n_cols) / BLOCK;
  weigh_residual(c, c->hot);
  if (full) {
    delta_panel(c, first, 0, dim_k, 1, 0, 1);
#pragma GCC unroll 1
    for (int p = first + 1; p < stop; p++) delta_panel(c, p, p - first - 1, dim_k, 1, 1, 1);
    delta_panel(c, stop, stop - first - 1, dim_k, 1, 1, 0);
    return;
  }
#pragma GCC unroll 1
  for (int p = first; p <= stop; p++) delta_panel(c, p, p > first ? p - first - 1 : 0, dim_k, 0, p > first, p < stop);
}

/* ---- output and state ---- */

/* The state between chunks: the bits of its floats in two halves, rounded, so that the upper one is the bf16 operand
 * and both are exact together. x + 0x8000 = u | a and y + 0x8000 = v | b make lines of v | u and of a | b: two lines
 * where float and operand are three. */
static ALWAYS_INLINE void split_rows(__m512 x, __m512 y, char *upper, char *lower) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_rol_epi32(_mm512_add_epi32(_mm512_castps_si512(x), half), 16);
  const __m512i b = _mm512_add_epi32(_mm512_castps_si512(y), half);
  _mm512_store_si512(upper, _mm512_mask_blend_epi16(0xaaaaaaaau, a, b));
  _mm512_store_si512(lower, _mm512_mask_blend_epi16(0xaaaaaaaau, b, a));
}

static ALWAYS_INLINE void join_rows(const char *upper, const char *lower, __m512 *x, __m512 *y) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i u = _mm512_load_si512(upper), l = _mm512_load_si512(lower);
  const __m512i a = _mm512_rol_epi32(_mm512_mask_blend_epi16(0xaaaaaaaau, u, l), 16);
  const __m512i b = _mm512_mask_blend_epi16(0xaaaaaaaau, l, u);
  *x = _mm512_castsi512_ps(_mm512_sub_epi32(a, half));
  *y = _mm512_castsi512_ps(_mm512_sub_epi32(b, half));
}

/* Rows 2 r and 2 r + 1 of a block of the state, decayed, plus sums, which may owe the decay too. */
static ALWAYS_INLINE void state_unit(const struct job *j, int r) {
  char *upper = (char *)j->op + 64 * r, *lower = (char *)j->dst + 64 * r;
  const float *sums = j->src + 2 * BLOCK * r;
  const __m512 decay = _mm512_set1_ps(j->factor), of_sums = _mm512_set1_ps(j->sums_factor);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    __m512 x = _mm512_mul_ps(of_sums, _mm512_load_ps(sums + 16 * h)), s, t;
    __m512 y = _mm512_mul_ps(of_sums, _mm512_load_ps(sums + BLOCK + 16 * h));
    if (!j->fresh) {
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

struct out_hot {
  float sums[2][BLOCK_ELEMS]; /* of each block of tokens */
  float weights[GDN_CHUNK];
};
_Static_assert(sizeof(struct out_hot) <= GDN_HOT_BYTES, "what passes between products and output");

/* Tokens 2 r and 2 r + 1 of a block. */
static ALWAYS_INLINE void out_rows(const struct job *j, int r, const int full) {
  const struct gdn_chunk *c = j->c;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const int at = 2 * r + h;
    if (!full && j->row + at >= c->n) return;
    const __m512 w = _mm512_set1_ps(j->weights[at]);
    const __m512 x = _mm512_mul_ps(w, _mm512_load_ps(j->src + at * BLOCK));
    const __m512 y = _mm512_mul_ps(w, _mm512_load_ps(j->src + at * BLOCK + 16));
    if (full) /* past the caches: to lines that were fetched in time it took half as long again */
      _mm512_stream_si512((__m512i *)((char *)j->dst + at * j->row_bytes), v32_to_bf16(x, y));
    else
      store_32(&c->out_rows, j->row + at, j->col, x, y);
  }
}

static ALWAYS_INLINE void out_unit(const struct job *j, int r) {
  out_rows(j, r, 0);
}

static ALWAYS_INLINE void out_unit_full(const struct job *j, int r) {
  out_rows(j, r, 1);
}

/* Tokens 2 r and 2 r + 1 of a block of q S in a steep chunk, decayed. */
static ALWAYS_INLINE void decay_unit(const struct job *j, int r) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    float *x = j->sums + 2 * BLOCK * r + 16 * i;
    _mm512_store_ps(x, _mm512_mul_ps(_mm512_set1_ps(j->c->decay_in[j->row + 2 * r + i / 2]), _mm512_load_ps(x)));
  }
}

/* Lines of v that the next chunk has where this one has block b of panel p. */
static ALWAYS_INLINE void plan_lines(const struct gdn_chunk *c, int p, int b, const int full, struct block *in) {
  in->ahead = in->b; /* nothing: the same line again */
  if (!full || c->next_n < GDN_CHUNK) return;
  in->ahead = (const char *)((const uint16_t *)c->next_v.data + b * BLOCK * c->next_v.stride_elems + p * BLOCK);
  in->ahead_bytes = 2 * c->next_v.stride_elems;
}

/* Block b of tokens of panel p, the at-th of the call's, over what j says of the block before. Then j is of this. */
static ALWAYS_INLINE void out_block(const struct gdn_chunk *c, int p, int at, const int b, const int dim_k,
                                    const int full, int units, struct job *j) {
  struct out_hot *hot = c->hot;
  const int tiles = block_tiles(c, b, full), n_ahead = full ? AHEAD_V : 0;
  fill_fn *const fill = full ? out_unit_full : out_unit;
  float *const sums = hot->sums[b];
  struct block q = {.a = (const char *)c->q + b * BLOCK * 2 * dim_k,
                    .row_bytes = 2 * dim_k,
                    .b = (const char *)c->state_op + (int64_t)p * dim_k * 64,
                    .steps = dim_k / 32};
  struct block a = {.a = (const char *)(*c->steep ? c->a : c->qk_op) + b * BLOCK * 2 * GDN_CHUNK,
                    .row_bytes = 2 * GDN_CHUNK,
                    .b = (const char *)c->delta + 2 * at * OP_BYTES,
                    .steps = b + 1};
  plan_lines(c, p, b, full, &q);
  if (c->zero_state) {
    a.ahead = q.ahead;
    a.ahead_bytes = q.ahead_bytes;
    drain(fill, j, units);
    multiply(&a, NULL, tiles, NULL, sums, fill_none, j, 0, n_ahead);
  } else if (*c->steep) {
    const struct job decay = {.c = c, .sums = sums, .row = BLOCK * b};
    drain(fill, j, units);
    multiply(&q, NULL, tiles, NULL, sums, fill_none, j, 0, n_ahead);
    drain(decay_unit, &decay, 16);
    multiply(&a, NULL, tiles, sums, sums, fill_none, j, 0, 0);
  } else {
    multiply(&q, &a, tiles, NULL, sums, fill, j, units, n_ahead);
  }
  j->src = sums;
  j->weights = hot->weights + BLOCK * b;
  j->dst = (char *)c->out_rows.data + BLOCK * b * j->row_bytes + 2 * BLOCK * p;
  j->row = BLOCK * b;
  j->col = BLOCK * p;
}

static ALWAYS_INLINE void chunk_out_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                         const int full) {
  struct out_hot *hot = c->hot;
  const int two = full || c->n > BLOCK, first = col / BLOCK, stop = (col + n_cols) / BLOCK;
  struct job j = {.c = c, .row_bytes = 2 * c->out_rows.stride_elems};
  for (int i = 0; i < BLOCK * (two + 1); i += 16) {
    const __m512 q = _mm512_load_ps(c->q_mult + i);
    _mm512_store_ps(hot->weights + i, *c->steep ? q : _mm512_mul_ps(q, _mm512_load_ps(c->decay_in + i)));
  }
  out_block(c, first, 0, 0, dim_k, full, 0, &j);
  if (two) out_block(c, first, 0, 1, dim_k, full, 16, &j);
#pragma GCC unroll 1
  for (int p = first + 1; p < stop; p++) {
    out_block(c, p, p - first, 0, dim_k, full, 16, &j);
    if (two) out_block(c, p, p - first, 1, dim_k, full, 16, &j);
  }
  drain(full ? out_unit_full : out_unit, &j, 16);
}

/* Tokens r and r + 16 of a block of W, weighted. */
static ALWAYS_INLINE void reweigh(const struct job *j, int r) {
  const __m512 f = _mm512_set1_ps(j->weights[r]), g = _mm512_set1_ps(j->weights[r + 16]);
  for (int h = 0; h < 2; h++) {
    const __m512i pair = _mm512_load_si512((const char *)j->src + 64 * r + 1024 * h);
    const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 y = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
    _mm512_store_si512((char *)j->op + 64 * r + 1024 * h, v16_pack_pair(_mm512_mul_ps(f, x), _mm512_mul_ps(g, y)));
  }
}

/* ops = a panel of W, weighted. */
static ALWAYS_INLINE void reweigh_panel(const char *w, const float *weights, int blocks, char *ops) {
  for (int b = 0; b < blocks; b++) {
    const struct job j = {
        .src = (const float *)(w + b * OP_BYTES), .op = ops + b * OP_BYTES, .weights = weights + b * BLOCK};
    drain(reweigh, &j, 16);
  }
}

/* The b-th line of rows of the next chunk's q and k, to be fetched under block b of the call's at-th panel: what is
 * given of them is spread over the panels, q before k. One panel alone fetches k. Returns how many rows. */
static ALWAYS_INLINE int plan_rows(const struct gdn_chunk *c, int at, int panels, int b, struct block *in) {
  const int both = c->next_q.data && c->next_k.data, of_q = both ? panels / 2 : c->next_q.data ? panels : 0;
  const struct gdn_rows *next = at < of_q ? &c->next_q : &c->next_k;
  const int first = at < of_q ? 0 : of_q, share = at < of_q ? of_q : panels - of_q;
  const int rows = (GDN_CHUNK + share - 1) / share;
  if (c->next_n < GDN_CHUNK || !next->data || next->dtype != GDN_ROWS_BF16) return 0;
  in->ahead_bytes = 2 * next->stride_elems;
  in->ahead = (const char *)next->data + (at - first) * rows * in->ahead_bytes + 2 * BLOCK * b;
  return rows;
}

/* Round i: block i of the state, from col on, over what j says of the block before; then j is of this one. */
static ALWAYS_INLINE void state_round(const struct gdn_chunk *c, int i, int col, int n_cols, const int dim_k,
                                      const int full, int units, struct job *j) {
  const int blocks = dim_k / BLOCK, b = i % blocks, p = i / blocks;
  float *const sums = (float *)c->hot + i % 2 * BLOCK_ELEMS;
  struct block in = {.a = (const char *)c->kt + b * BLOCK * 2 * GDN_CHUNK,
                     .row_bytes = 2 * GDN_CHUNK,
                     .b = (const char *)(*c->steep ? c->delta_out : c->delta) + 2 * p * OP_BYTES,
                     .steps = full || c->n > BLOCK ? 2 : 1};
  const int n_ahead = plan_rows(c, p, n_cols / BLOCK, b, &in);
  block_product(&in, NULL, 2, 1, NULL, sums, state_unit, j, units, n_ahead);
  *j = state_block(c, (col / BLOCK + p) * dim_k * BLOCK + b * BLOCK_ELEMS);
  j->src = sums;
  j->factor = *c->decay_all;
  j->sums_factor = *c->steep ? 1 : *c->decay_all;
  j->fresh = c->zero_state;
}

static ALWAYS_INLINE void chunk_state_body(const struct gdn_chunk *c, int col, int n_cols, const int dim_k,
                                           const int full) {
  const int panels = n_cols / BLOCK, rounds = panels * (dim_k / BLOCK);
  struct job j = {0};
  for (int p = 0; p < panels && *c->steep; p++)
    reweigh_panel((const char *)c->delta + 2 * p * OP_BYTES, c->decay_out, c->n > BLOCK ? 2 : 1,
                  (char *)c->delta_out + 2 * p * OP_BYTES);
  state_round(c, 0, col, n_cols, dim_k, full, 0, &j);
#pragma GCC unroll 1
  for (int i = 1; i < rounds; i++) state_round(c, i, col, n_cols, dim_k, full, 16, &j);
  drain(state_unit, &j, 16);
}

/* The state after the first n_at tokens is decay S + sums_factor K^T (weights W). */
static inline void chunk_state_at_bf16(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels) {
  float sums[BLOCK_ELEMS] __attribute__((aligned(64))), weights[GDN_CHUNK] __attribute__((aligned(64)));
  char ops[2 * OP_BYTES] __attribute__((aligned(64)));
  const int blocks = n_at > BLOCK ? 2 : 1, first = col / BLOCK;
  const __m512 decay = _mm512_set1_ps(c->decay_in[n_at - 1]), of_sums = *c->steep ? _mm512_set1_ps(1) : decay;
  float after = 1; /* in a steep chunk, the decays between a token and n_at */
  for (int i = GDN_CHUNK - 1; i >= 0; i--) {
    weights[i] = i < n_at ? after : 0;
    if (i < n_at && *c->steep) after *= c->decay[i];
  }
  for (int p = first; p < (col + n_cols) / BLOCK; p++) {
    reweigh_panel((const char *)c->delta + 2 * (p - first) * OP_BYTES, weights, blocks, ops);
    for (int b = 0; b < c->dim_k / BLOCK; b++) {
      const struct block in = {
          .a = (const char *)c->kt + b * BLOCK * 2 * GDN_CHUNK, .row_bytes = 2 * GDN_CHUNK, .b = ops, .steps = blocks};
      struct job state = state_block(c, (p * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS);
      float *dst = panels + ((p - first) * (c->dim_k / BLOCK) + b) * BLOCK_ELEMS;
      state.sums = dst;
      block_product(&in, NULL, 2, 1, NULL, sums, fill_none, &state, 0, 0);
      if (!c->zero_state) drain(end_unit, &state, 16);
      for (int i = 0; i < BLOCK_ELEMS; i += 16) {
        const __m512 x = _mm512_mul_ps(of_sums, _mm512_load_ps(sums + i));
        _mm512_store_ps(dst + i, c->zero_state ? x : _mm512_fmadd_ps(decay, _mm512_load_ps(dst + i), x));
      }
    }
  }
}

#endif
