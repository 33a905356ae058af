/* SPDX-License-Identifier: Apache-2.0
 * One or several tokens on states in caller memory, written once for every vector width and element type. The including
 * file defines, beside what recur_f32.h asks for:
 *   halves(a, b): a in the lower half of the lanes, b in the upper;
 *   sums_of_rows(x, y): the sums of 8 rows from the LANES chains of each;
 *   load_pair(a, b, even, odd): LANES bfloat16 of two rows as floats, a's elements with even index in the lower half of
 *     even, b's in the upper, and so on; store_pair, its inverse, finite: there is no NaN among them;
 *   even_twice(x), odd_twice(x): lanes 0, 2, 4, .. or 1, 3, 5, .. in both halves;
 *   sums_of_pair(even, odd): from chains in such vectors four partial sums of each row, a's in the lower half. */
#ifndef GDN_DECODE_F32_H
#define GDN_DECODE_F32_H

#include "kernels/recur_f32.h"

/* ---- [V, K]: along K ----
 * Blocks of 8 rows, whose sums are finished together. Vectors lie along K, one chain a lane. */

#define DECODE_ROWS 8
/* Rows that go together. 16 vector registers are too few for 4, which yet is 2 % faster than 2 there. */
#define GROUP 4
/* How far ahead the state is fetched to the first-level cache, and, if gdn_decode_step.far, to the second. Rows side by
 * side are not a pattern that hardware prefetchers follow. Of the sweep's bandwidth, dim_k 128, f32, medians:
 *                                       near    far    both
 *   Zen 4, 1 thread, from memory         .45    .77    .85
 *   Emerald Rapids, 16, from memory      .96   1.02   1.09
 *   Emerald Rapids, 1, from L3           .83    .91    .98
 *   Emerald Rapids, 16, from L3          .85    .79    .81
 * May reach past the rows, which a prefetch is free to do. */
#define NEAR_BYTES 4096
#define FAR_BYTES 16384

static const float decode_zeros[GDN_DIM_MAX];

/* Rows of a state, dense; ld is dim_k, 0 for the zero state. */
struct decode_rows {
  const void *data;
  int64_t ld;
  int dtype;
};

INLINE struct decode_rows decode_rows_of(const struct gdn_state_ref *s, int dtype) {
  return s->data ? (struct decode_rows){s->data, s->stride_elems, dtype} : (struct decode_rows){decode_zeros, 0, dtype};
}

struct decode_gates {
  float decay, beta, kq;
};

/* From the sums of 8 rows to d and out, which may be v; the same operations as in finish_token. Tells whether d is
 * finite. */
INLINE int decode_finish(struct decode_gates g, struct row_sums sum, const float *v, float *out, float *d) {
  const __m256 decay = _mm256_set1_ps(g.decay);
  const __m256 t = _mm256_fnmadd_ps(decay, sum.x, _mm256_loadu_ps(v));
  const __m256 delta = _mm256_mul_ps(_mm256_set1_ps(g.beta), t);
  _mm256_storeu_ps(d, delta);
  _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_set1_ps(g.kq), delta, _mm256_mul_ps(decay, sum.y)));
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), delta);
  return _mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_LT_OQ)) == 0xff;
}

/* ---- one token ---- */

/* GROUP rows from row on, and GROUP earlier ones, by then in the first-level cache. */
struct decode_group {
  int dim_k, dots, update, far;
  const float *k, *q;
  struct decode_rows in;
  int64_t row, old_row;
  vec decay;
  const float *d; /* [GROUP] of the earlier rows */
  void *out;      /* rows as in's */
};

/* dots: x = in . k, y = in . q, chain by chain. update: out = decay in + d k^T for the earlier rows. Both at once, so
 * that reading overlaps with arithmetic and writing. */
INLINE void decode_group(struct decode_group s, vec x[GROUP], vec y[GROUP]) {
  const int bytes = s.in.dtype == GDN_ROWS_F32 ? 4 : 2;
  const char *ahead = (const char *)s.in.data + s.row * s.in.ld * bytes;
  vec d[GROUP];
#pragma GCC unroll 4
  for (int i = 0; i < GROUP; i++) {
    x[i] = y[i] = vec_set1(0);
    d[i] = vec_set1(s.d[i]);
  }
  for (int block = 0; block < s.dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += LANES) {
      const vec k = vec_load(s.k + j);
      if (s.dots) {
        const vec q = vec_load(s.q + j);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++) {
          const vec e = load_as(s.in.data, (s.row + i) * s.in.ld + j, s.in.dtype);
          if ((j * GROUP + i * LANES) * bytes % 64 == 0) {
            const char *line = ahead + (j * GROUP + i * LANES) * bytes;
            _mm_prefetch(line + NEAR_BYTES, _MM_HINT_T0);
            if (s.far) _mm_prefetch(line + FAR_BYTES, _MM_HINT_T1);
          }
          x[i] = vec_fmadd(k, e, x[i]);
          y[i] = vec_fmadd(q, e, y[i]);
        }
      }
      if (!s.update) continue;
#pragma GCC unroll 4
      for (int i = 0; i < GROUP; i++) {
        const vec e = vec_mul(s.decay, load_as(s.in.data, (s.old_row + i) * s.in.ld + j, s.in.dtype));
        store_as(s.out, (s.old_row + i) * s.dim_k + j, s.in.dtype, vec_fmadd(d[i], k, e));
      }
    }
}

/* dots: the block of rows from row on. update: the block before. */
INLINE void decode_block(const struct gdn_decode_step *a, int row, int dtype, int far, int dots, int update, float *d) {
  vec x[DECODE_ROWS], y[DECODE_ROWS];
#pragma GCC unroll 4
  for (int i = 0; i < DECODE_ROWS; i += GROUP)
    decode_group((struct decode_group){.dim_k = a->dim_k,
                                       .dots = dots,
                                       .update = update,
                                       .far = far,
                                       .k = a->k,
                                       .q = a->q,
                                       .in = decode_rows_of(&a->state_in, dtype),
                                       .row = row + i,
                                       .old_row = row + i - DECODE_ROWS,
                                       .decay = vec_set1(a->decay),
                                       .d = d + i,
                                       .out = a->state_out.data},
                 x + i, y + i);
  if (dots)
    decode_finish((struct decode_gates){a->decay, a->beta, a->kq}, sums_of_rows(x, y), a->v + row, a->out + row, d);
}

INLINE void decode_v_major(const struct gdn_decode_step *a, int dtype, int far) {
  float d[DECODE_ROWS] = {0};
  decode_block(a, 0, dtype, far, 1, 0, d);
  for (int row = DECODE_ROWS; row < a->n_cols; row += DECODE_ROWS)
    if (a->state_out.data)
      decode_block(a, row, dtype, far, 1, 1, d);
    else
      decode_block(a, row, dtype, far, 1, 0, d);
  if (a->state_out.data) decode_block(a, a->n_cols, dtype, far, 0, 1, d);
}

/* ---- one token on bfloat16 ----
 * Conversion would cost more than the arithmetic if it kept elements in order. Rows i and i + 4 make a vector of pairs
 * of neighbours, of which a shift and a mask make floats: even ones, odd ones. */

#define PAIRS (LANES == 16 ? 2 : 1) /* that go together */

struct pair {
  vec even, odd;
};

struct bf16_step {
  int dim_k;
  int64_t ld; /* 0 for the zero state */
  const uint16_t *in;
  uint16_t *out;
  float k[2 * GDN_DIM_MAX], q[2 * GDN_DIM_MAX]; /* per LANES elements even ones twice, then odd ones twice */
};

INLINE void split_pairs(int dim_k, const float *restrict x, float *restrict split) {
  for (int j = 0; j < dim_k; j += LANES) {
    vec_store(split + 2 * j, even_twice(vec_load(x + j)));
    vec_store(split + 2 * j + LANES, odd_twice(vec_load(x + j)));
  }
}

/* As decode_group, on rows row + i and row + i + 4 for i in 0 .. PAIRS - 1. finite: d is. */
INLINE void bf16_group(const struct bf16_step *s, int row, int dots, int update, int finite, vec decay, const float *d,
                       struct pair x[PAIRS], struct pair y[PAIRS]) {
  const uint16_t *in = s->in + row * s->ld, *old = in - (update ? DECODE_ROWS * s->ld : 0);
  const char *ahead = (const char *)in + NEAR_BYTES + row % DECODE_ROWS * s->ld * 2;
  vec d_pair[PAIRS];
#pragma GCC unroll 2
  for (int i = 0; i < PAIRS; i++) {
    x[i].even = x[i].odd = y[i].even = y[i].odd = vec_set1(0);
    d_pair[i] = halves(d[i], d[i + 4]);
  }
  for (int block = 0; block < s->dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += LANES) {
      const vec k_even = vec_load(s->k + 2 * j), k_odd = vec_load(s->k + 2 * j + LANES);
      if (dots) {
        const vec q_even = vec_load(s->q + 2 * j), q_odd = vec_load(s->q + 2 * j + LANES);
#pragma GCC unroll 2
        for (int i = 0; i < PAIRS; i++) {
          struct pair e;
          load_pair(in + i * s->ld + j, in + (i + 4) * s->ld + j, &e.even, &e.odd);
          if ((j * PAIRS + i * LANES) % 16 == 0) _mm_prefetch(ahead + (j * PAIRS + i * LANES) * 4, _MM_HINT_T0);
          x[i].even = vec_fmadd(k_even, e.even, x[i].even);
          x[i].odd = vec_fmadd(k_odd, e.odd, x[i].odd);
          y[i].even = vec_fmadd(q_even, e.even, y[i].even);
          y[i].odd = vec_fmadd(q_odd, e.odd, y[i].odd);
        }
      }
      if (!update) continue;
#pragma GCC unroll 2
      for (int i = 0; i < PAIRS; i++) {
        struct pair e;
        load_pair(old + i * s->ld + j, old + (i + 4) * s->ld + j, &e.even, &e.odd);
        e.even = vec_fmadd(d_pair[i], k_even, vec_mul(decay, e.even));
        e.odd = vec_fmadd(d_pair[i], k_odd, vec_mul(decay, e.odd));
        uint16_t *out = s->out + (ptrdiff_t)(row - DECODE_ROWS + i) * s->dim_k + j;
        store_pair(out, out + (ptrdiff_t)4 * s->dim_k, e.even, e.odd, finite);
      }
    }
}

/* finite: d is. Tells whether the new one is. */
INLINE int bf16_block(const struct gdn_decode_step *a, const struct bf16_step *s, int row, int dots, int update,
                      int finite, float *d) {
  struct pair x[4], y[4];
  __m256 t_x[4], t_y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i += PAIRS)
    bf16_group(s, row + i, dots, update, finite, vec_set1(a->decay), d + i, x + i, y + i);
  if (!dots) return 0;
  for (int i = 0; i < 4; i++) {
    t_x[i] = sums_of_pair(x[i].even, x[i].odd);
    t_y[i] = sums_of_pair(y[i].even, y[i].odd);
  }
  return decode_finish((struct decode_gates){a->decay, a->beta, a->kq},
                       (struct row_sums){v8_sum_quarters(t_x), v8_sum_quarters(t_y)}, a->v + row, a->out + row, d);
}

static void decode_bf16(const struct gdn_decode_step *a) {
  float d[DECODE_ROWS] = {0};
  const struct decode_rows in = decode_rows_of(&a->state_in, GDN_ROWS_BF16);
  struct bf16_step s = {.dim_k = a->dim_k, .ld = in.ld, .in = in.data, .out = a->state_out.data};
  split_pairs(a->dim_k, a->k, s.k);
  split_pairs(a->dim_k, a->q, s.q);
  int finite = bf16_block(a, &s, 0, 1, 0, 0, d);
  for (int row = DECODE_ROWS; row < a->n_cols; row += DECODE_ROWS)
    if (!s.out)
      bf16_block(a, &s, row, 1, 0, 0, d);
    else if (finite)
      finite = bf16_block(a, &s, row, 1, 1, 1, d);
    else
      finite = bf16_block(a, &s, row, 1, 1, 0, d);
  if (s.out) bf16_block(a, &s, a->n_cols, 0, 1, 0, d);
}

/* ---- several tokens ----
 * Two blocks of 8 rows at a time stay in the first-level cache while all tokens pass over them, in turns, so that the
 * end of one block's sums hides behind the other's arithmetic. */

struct token_block {
  int dim_k, row;
  struct decode_rows in;      /* caller memory, whose rows row .. row + 7 the first two passes read */
  float *rows;                /* [8][dim_k] after the update */
  const float *k_old, *k, *q; /* of the update, of the dots */
  vec decay;
  float d[DECODE_ROWS];
};

/* update: rows = decay in + d k_old^T. dots: x and y of the result, chain by chain. GROUP rows from row on. */
INLINE void token_group(const struct token_block *s, struct decode_rows in, int64_t row, int i0, int update, int dots,
                        vec x[GROUP], vec y[GROUP]) {
  vec d[GROUP];
#pragma GCC unroll 4
  for (int i = 0; i < GROUP; i++) {
    x[i] = y[i] = vec_set1(0);
    d[i] = vec_set1(s->d[i0 + i]);
  }
  for (int block = 0; block < s->dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += LANES) {
      const vec k_old = update ? vec_load(s->k_old + j) : vec_set1(0);
      const vec k = dots ? vec_load(s->k + j) : vec_set1(0), q = dots ? vec_load(s->q + j) : vec_set1(0);
#pragma GCC unroll 4
      for (int i = 0; i < GROUP; i++) {
        vec e = load_as(in.data, (row + i) * in.ld + j, in.dtype);
        if (update) {
          e = vec_fmadd(d[i], k_old, vec_mul(s->decay, e));
          vec_store(s->rows + (ptrdiff_t)(i0 + i) * s->dim_k + j, e);
        }
        if (dots) {
          x[i] = vec_fmadd(k, e, x[i]);
          y[i] = vec_fmadd(q, e, y[i]);
        }
      }
    }
}

INLINE void token_pass(struct token_block *s, struct decode_rows in, int64_t row, int update, int dots,
                       struct decode_gates gates, const float *v, float *out) {
  vec x[DECODE_ROWS], y[DECODE_ROWS];
#pragma GCC unroll 4
  for (int i = 0; i < DECODE_ROWS; i += GROUP) token_group(s, in, row + i, i, update, dots, x + i, y + i);
  if (dots) decode_finish(gates, sums_of_rows(x, y), v, out, s->d);
}

/* Pass t: the update by token t - 1 and the sums of token t; 0 has no update, n no sums. */
INLINE void token_pass_at(const struct gdn_decode_tokens *a, struct token_block *s, int t, int dtype) {
  const struct decode_rows memory = {s->in.data, s->in.ld, dtype}, rows = {s->rows, s->dim_k, GDN_ROWS_F32};
  struct decode_gates gates = {0};
  const float *v = NULL;
  float *out = NULL;
  if (t > 0) {
    s->k_old = a->k + (ptrdiff_t)(t - 1) * a->dim_k;
    s->decay = vec_set1(a->decay[t - 1]);
  }
  if (t < a->n) {
    s->k = a->k + (ptrdiff_t)t * a->dim_k;
    s->q = a->q + (ptrdiff_t)t * a->dim_k;
    gates = (struct decode_gates){a->decay[t], a->beta[t], a->kq[t]};
    v = a->v + (ptrdiff_t)t * a->n_cols + s->row;
    out = a->out + (ptrdiff_t)t * a->n_cols + s->row;
  }
  if (t == 0)
    token_pass(s, memory, s->row, 0, 1, gates, v, out);
  else if (t == 1 && t < a->n)
    token_pass(s, memory, s->row, 1, 1, gates, v, out);
  else if (t == 1)
    token_pass(s, memory, s->row, 1, 0, gates, v, out);
  else if (t < a->n)
    token_pass(s, rows, 0, 1, 1, gates, v, out);
  else
    token_pass(s, rows, 0, 1, 0, gates, v, out);
}

static void token_store(const struct token_block *s, const struct gdn_state_ref *to) {
  const struct gdn_rows_out out = {(char *)to->data +
                                       (ptrdiff_t)s->row * to->stride_elems * (to->dtype == GDN_ROWS_F32 ? 4 : 2),
                                   to->stride_elems, to->dtype};
  recur_store_rows(DECODE_ROWS, s->dim_k, s->rows, s->dim_k, out);
}

/* Part t of n of the rows FAR_BYTES ahead of 8 rows. On Zen 4, verifying 4 tokens took 1.5 times as long with all of
 * them fetched at once, and up to a tenth longer with one at a time inside the loops.
 * Inline, since gcc drops calls of a function that does nothing but prefetch. */
INLINE void token_fetch(int dim_k, struct decode_rows in, int64_t row, int t, int n) {
  const int bytes = in.dtype == GDN_ROWS_F32 ? 4 : 2, lines = DECODE_ROWS * dim_k * bytes / 64;
  const char *ahead = (const char *)in.data + row * in.ld * bytes + FAR_BYTES;
  for (int i = lines * t / n; i < lines * (t + 1) / n; i++) _mm_prefetch(ahead + (ptrdiff_t)i * 64, _MM_HINT_T1);
}

/* All tokens on the blocks' rows. */
INLINE void token_blocks(const struct gdn_decode_tokens *a, struct token_block s[2], int dtype) {
  for (int t = 0; t <= a->n; t++) {
    const struct gdn_state_ref *token_state = t && a->token_states ? &a->token_states[t - 1] : NULL;
    if (token_state && !token_state->data) token_state = NULL;
    if (t == a->n && !a->state_out.data && !token_state) return;
    for (int h = 0; h < 2; h++) {
      if (t < a->n) token_fetch(a->dim_k, s[h].in, s[h].row, t, a->n);
      token_pass_at(a, &s[h], t, dtype);
    }
    for (int h = 0; h < 2; h++) {
      if (token_state) token_store(&s[h], token_state);
      if (t == a->n && a->state_out.data) token_store(&s[h], &a->state_out);
    }
  }
}

INLINE void decode_tokens(const struct gdn_decode_tokens *a, int dtype) {
  _Alignas(64) float rows[2][DECODE_ROWS * GDN_DIM_MAX];
  const struct decode_rows in = decode_rows_of(&a->state_in, dtype);
  struct token_block s[2] = {{.dim_k = a->dim_k, .in = in, .rows = rows[0]},
                             {.dim_k = a->dim_k, .in = in, .rows = rows[1]}};
  for (int row = 0; row < a->n_cols; row += 2 * DECODE_ROWS) {
    s[0].row = row;
    s[1].row = row + DECODE_ROWS;
    token_blocks(a, s, dtype);
  }
}

/* ---- several tokens, no state stored ----
 * Then nobody needs the updates, 6 of 14 multiplications and additions per element for 4 tokens: all sums are taken on
 * the state before the first token, and what tokens in between add to it comes in by products of their keys. */

/* Tokens that go together, so that an element is loaded, and converted, once for as many as registers have room for the
 * chains of GROUP rows. 1 and 8 rows took a tenth longer with AVX-512, 2 and 2 rows 4 % with AVX2 (Zen 4, batch 64, 4
 * tokens, f32). */
#define VERIFY_TOKENS (LANES == 16 ? 2 : 1)

struct verify {
  float left[GDN_TOKENS_MAX]; /* of the first state at token t: the product of the decays up to its own */
  /* [t][s], s < t: k_s . k_t and k_s . q_t, times the decays after s up to t. */
  float kk[GDN_TOKENS_MAX][GDN_TOKENS_MAX], kq[GDN_TOKENS_MAX][GDN_TOKENS_MAX];
};

static void verify_weights(const struct gdn_decode_tokens *a, struct verify *w) {
  float kk[GDN_TOKENS_MAX], kq[GDN_TOKENS_MAX];
  for (int gap = 1; gap < a->n; gap++) {
    const ptrdiff_t later = (ptrdiff_t)gap * a->dim_k;
    recur_dot_rows(a->n - gap, a->dim_k, a->k, a->k + later, kk);
    recur_dot_rows(a->n - gap, a->dim_k, a->k, a->q + later, kq);
    for (int s = 0; s + gap < a->n; s++) {
      w->kk[s + gap][s] = kk[s];
      w->kq[s + gap][s] = kq[s];
    }
  }
  for (int s = 0; s < a->n; s++) {
    float left = 1;
    w->left[s] = s ? w->left[s - 1] * a->decay[s] : a->decay[s];
    for (int t = s + 1; t < a->n; t++) {
      left *= a->decay[t];
      w->kk[t][s] *= left;
      w->kq[t][s] *= left;
    }
  }
}

/* Chains of a token's sums over 8 rows. */
struct verify_chains {
  vec x[DECODE_ROWS], y[DECODE_ROWS];
};

/* c[u] for tokens t + u, u < n, and GROUP rows, i0 .. of the block from row on. */
INLINE void verify_group(const struct gdn_decode_tokens *a, struct decode_rows in, int64_t row, int i0, int t, int n,
                         struct verify_chains *c) {
  const float *k = a->k + (ptrdiff_t)t * a->dim_k, *q = a->q + (ptrdiff_t)t * a->dim_k;
#pragma GCC unroll 2
  for (int u = 0; u < n; u++)
#pragma GCC unroll 4
    for (int i = i0; i < i0 + GROUP; i++) c[u].x[i] = c[u].y[i] = vec_set1(0);
  for (int block = 0; block < a->dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += LANES) {
      vec k_j[VERIFY_TOKENS], q_j[VERIFY_TOKENS];
#pragma GCC unroll 2
      for (int u = 0; u < n; u++) {
        k_j[u] = vec_load(k + (ptrdiff_t)u * a->dim_k + j);
        q_j[u] = vec_load(q + (ptrdiff_t)u * a->dim_k + j);
      }
#pragma GCC unroll 4
      for (int i = i0; i < i0 + GROUP; i++) {
        const vec e = load_as(in.data, (row + i) * in.ld + j, in.dtype);
#pragma GCC unroll 2
        for (int u = 0; u < n; u++) {
          c[u].x[i] = vec_fmadd(k_j[u], e, c[u].x[i]);
          c[u].y[i] = vec_fmadd(q_j[u], e, c[u].y[i]);
        }
      }
    }
}

INLINE void verify_sums(const struct gdn_decode_tokens *a, struct decode_rows in, int64_t row, int t, int n,
                        struct row_sums *sum) {
  struct verify_chains c[VERIFY_TOKENS];
#pragma GCC unroll 2
  for (int i0 = 0; i0 < DECODE_ROWS; i0 += GROUP) verify_group(a, in, row, i0, t, n, c);
#pragma GCC unroll 2
  for (int u = 0; u < n; u++) sum[u] = sums_of_rows(c[u].x, c[u].y);
}

/* From the sums of 8 rows to the outputs of all tokens, which may be v; the first one's as decode_finish makes it. */
INLINE void verify_finish(const struct gdn_decode_tokens *a, const struct verify *w, int row,
                          const struct row_sums *sum) {
  __m256 d[GDN_TOKENS_MAX];
  for (int t = 0; t < a->n; t++) {
    const ptrdiff_t at = (ptrdiff_t)t * a->n_cols + row;
    const __m256 left = _mm256_set1_ps(w->left[t]);
    __m256 rest = _mm256_fnmadd_ps(left, sum[t].x, _mm256_loadu_ps(a->v + at)), out = _mm256_mul_ps(left, sum[t].y);
    for (int s = 0; s < t; s++) {
      rest = _mm256_fnmadd_ps(_mm256_set1_ps(w->kk[t][s]), d[s], rest);
      out = _mm256_fmadd_ps(_mm256_set1_ps(w->kq[t][s]), d[s], out);
    }
    d[t] = _mm256_mul_ps(_mm256_set1_ps(a->beta[t]), rest);
    _mm256_storeu_ps(a->out + at, _mm256_fmadd_ps(_mm256_set1_ps(a->kq[t]), d[t], out));
  }
}

INLINE void verify_tokens(const struct gdn_decode_tokens *a, int dtype) {
  const struct decode_rows in = decode_rows_of(&a->state_in, dtype);
  struct verify w;
  struct row_sums sum[GDN_TOKENS_MAX];
  verify_weights(a, &w);
  for (int row = 0; row < a->n_cols; row += DECODE_ROWS) {
    for (int t = 0; t < a->n; t += VERIFY_TOKENS) {
      token_fetch(a->dim_k, in, row, t / VERIFY_TOKENS, (a->n + VERIFY_TOKENS - 1) / VERIFY_TOKENS);
      if (t + VERIFY_TOKENS <= a->n)
        verify_sums(a, in, row, t, VERIFY_TOKENS, sum + t);
      else
        verify_sums(a, in, row, t, 1, sum + t);
    }
    verify_finish(a, &w, row, sum);
  }
}

static int stores_a_state(const struct gdn_decode_tokens *a) {
  for (int t = 0; a->token_states && t < a->n; t++)
    if (a->token_states[t].data) return 1;
  return a->state_out.data != NULL;
}

static void recur_decode_tokens(const struct gdn_decode_tokens *a) {
  const int dtype = a->state_in.data ? a->state_in.dtype : GDN_ROWS_F32;
  assert(a->n >= 1 && a->n <= GDN_TOKENS_MAX && a->n_cols % GDN_PANEL == 0);
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX);
  if (stores_a_state(a))
    BY_DTYPE(dtype, decode_tokens(a, DTYPE));
  else
    BY_DTYPE(dtype, verify_tokens(a, DTYPE));
}

/* ---- [K, V]: along V ----
 * Whole rows, blocks of 32 of them: panels of 32 columns lie a power of two apart, and share a few sets of the
 * first-level cache. The chains of all columns are kept in memory, each touched once per block. */

#define CHAIN_ROWS (32 / LANES) /* of a block */

/* One chain of a block, from row j on, into x and y, [n_cols] each. */
INLINE void k_major_chain(const struct gdn_decode_step *a, const void *in, int64_t ld, int dtype, int j, int first,
                          float *restrict x, float *restrict y) {
  const int bytes = dtype == GDN_ROWS_F32 ? 4 : 2;
  vec k[CHAIN_ROWS], q[CHAIN_ROWS];
  for (int i = 0; i < CHAIN_ROWS; i++) {
    k[i] = vec_set1(a->k[j + i * LANES]);
    q[i] = vec_set1(a->q[j + i * LANES]);
  }
  for (int c = 0; c < a->n_cols; c += LANES) {
    vec sx = first ? vec_set1(0) : vec_load(x + c), sy = first ? vec_set1(0) : vec_load(y + c);
#pragma GCC unroll 4
    for (int i = 0; i < CHAIN_ROWS; i++) {
      const int64_t at = (j + i * LANES) * ld + c;
      const vec e = load_as(in, at, dtype);
      if (c * bytes % 64 == 0) _mm_prefetch((const char *)in + (at + 32 * ld) * bytes, _MM_HINT_T1);
      sx = vec_fmadd(k[i], e, sx);
      sy = vec_fmadd(q[i], e, sy);
    }
    vec_store(x + c, sx);
    vec_store(y + c, sy);
  }
}

/* Of a column's chains, which lie n apart, l and, where there are 16, l + 8. */
INLINE vec eighth_of_chains(const float *x, int n, int l) {
  const vec a = vec_load(x + l * n);
  return LANES == 16 ? vec_add(a, vec_load(x + (l + 8) * n)) : a;
}

INLINE vec quarter_of_chains(const float *x, int n, int l) {
  return vec_add(eighth_of_chains(x, n, l), eighth_of_chains(x, n, l + 4));
}

/* Their sum in the order of sweep. */
INLINE vec add_chains(const float *x, int n) {
  return vec_add(vec_add(quarter_of_chains(x, n, 0), quarter_of_chains(x, n, 2)),
                 vec_add(quarter_of_chains(x, n, 1), quarter_of_chains(x, n, 3)));
}

INLINE void k_major_update(const struct gdn_decode_step *a, const void *in, int64_t ld, int dtype, int out_dtype,
                           const float *restrict d) {
  const vec decay = vec_set1(a->decay);
  const int64_t out_ld = a->state_out.stride_elems;
  for (int j = 0; j < a->dim_k; j++) {
    const vec k = vec_set1(a->k[j]);
    for (int c = 0; c < a->n_cols; c += LANES)
      store_as(a->state_out.data, j * out_ld + c, out_dtype,
               vec_fmadd(k, vec_load(d + c), vec_mul(decay, load_as(in, j * ld + c, dtype))));
  }
}

static int all_finite(const float *d, int n) {
  int finite = 1;
  for (int i = 0; i < n; i++) finite &= fabsf(d[i]) <= FLT_MAX;
  return finite;
}

INLINE void decode_k_major(const struct gdn_decode_step *a, int dtype) {
  const void *in = a->state_in.data ? a->state_in.data : (const void *)decode_zeros;
  const int64_t ld = a->state_in.data ? a->state_in.stride_elems : 0;
  const int n = a->n_cols;
  float x[LANES * GDN_DIM_MAX], y[LANES * GDN_DIM_MAX], d[GDN_DIM_MAX];
  for (int j = 0; j < a->dim_k; j += 32)
    for (int l = 0; l < LANES; l++)
      if (j == 0)
        k_major_chain(a, in, ld, dtype, l, 1, x + l * n, y + l * n);
      else
        k_major_chain(a, in, ld, dtype, j + l, 0, x + l * n, y + l * n);
  const vec decay = vec_set1(a->decay), beta = vec_set1(a->beta), kq = vec_set1(a->kq);
  for (int c = 0; c < n; c += LANES) {
    const vec delta = vec_mul(beta, vec_fnmadd(decay, add_chains(x + c, n), vec_load(a->v + c)));
    vec_store(d + c, delta);
    vec_store(a->out + c, vec_fmadd(kq, delta, vec_mul(decay, add_chains(y + c, n))));
  }
  if (!a->state_out.data) return;
  if (dtype == GDN_ROWS_BF16 && all_finite(d, n))
    k_major_update(a, in, ld, dtype, STORE_FINITE_BF16, d);
  else
    k_major_update(a, in, ld, dtype, dtype, d);
}

static void recur_decode_step(const struct gdn_decode_step *a) {
  const struct gdn_state_ref *s = a->state_in.data ? &a->state_in : &a->state_out;
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX && a->n_cols % GDN_PANEL == 0);
  if (s->data && s->k_major)
    BY_DTYPE(s->dtype, decode_k_major(a, DTYPE));
  else if (s->data && s->dtype == GDN_ROWS_BF16)
    decode_bf16(a);
  else if (s->data && s->dtype == GDN_ROWS_F16)
    decode_v_major(a, GDN_ROWS_F16, 1);
  else if (a->far)
    decode_v_major(a, GDN_ROWS_F32, 1);
  else
    decode_v_major(a, GDN_ROWS_F32, 0);
}

#endif
