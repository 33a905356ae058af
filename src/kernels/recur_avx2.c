/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step for AVX2 and FMA. */
#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "kernels/kernels.h"
#include "kernels/vec_avx2.h"

#define INLINE static inline __attribute__((always_inline))

/* 8 elements from element i on. */
INLINE __m256 load_as(const void *data, int64_t i, int bf16) {
  return bf16 ? v8_load_bf16((const uint16_t *)data + i) : _mm256_loadu_ps((const float *)data + i);
}

INLINE void load_rows(int n, int dim, struct gdn_rows src, int bf16, float *restrict dst, int64_t ld) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += 8)
      _mm256_storeu_ps(dst + i * ld + j, load_as(src.data, i * src.stride_elems + j, bf16));
}

static void gdn_load_rows_avx2(int n, int dim, struct gdn_rows src, float *dst, int64_t ld) {
  if (src.dtype == GDN_ROWS_BF16)
    load_rows(n, dim, src, 1, dst, ld);
  else
    load_rows(n, dim, src, 0, dst, ld);
}

INLINE void norm_rows(int n, int dim, struct gdn_rows src, int bf16, float eps, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++) {
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    float *row = dst + (ptrdiff_t)i * dim;
    for (int j = 0; j < dim; j += 32)
      for (int c = 0; c < 4; c++) {
        const __m256 x = load_as(src.data, i * src.stride_elems + j + 8 * c, bf16);
        _mm256_storeu_ps(row + j + 8 * c, x);
        s[c] = _mm256_fmadd_ps(x, x, s[c]);
      }
    const float sum = v8_sum(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
    const __m256 factor = _mm256_set1_ps(mult / sqrtf(sum + eps));
    for (int j = 0; j < dim; j += 8) _mm256_storeu_ps(row + j, _mm256_mul_ps(factor, _mm256_loadu_ps(row + j)));
  }
}

INLINE void scale_rows(int n, int dim, struct gdn_rows src, int bf16, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += 8)
      _mm256_storeu_ps(dst + (ptrdiff_t)i * dim + j,
                       _mm256_mul_ps(_mm256_set1_ps(mult), load_as(src.data, i * src.stride_elems + j, bf16)));
}

static void gdn_norm_rows_avx2(int n, int dim, struct gdn_rows src, int l2norm, float eps, float mult, float *dst) {
  if (l2norm && src.dtype == GDN_ROWS_BF16)
    norm_rows(n, dim, src, 1, eps, mult, dst);
  else if (l2norm)
    norm_rows(n, dim, src, 0, eps, mult, dst);
  else if (src.dtype == GDN_ROWS_BF16)
    scale_rows(n, dim, src, 1, mult, dst);
  else
    scale_rows(n, dim, src, 0, mult, dst);
}

static void gdn_dot_rows_avx2(int n, int dim, const float *a, const float *b, float *restrict dot) {
  for (int i = 0; i < n; i++, a += dim, b += dim) {
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int j = 0; j < dim; j += 32)
      for (int c = 0; c < 4; c++)
        s[c] = _mm256_fmadd_ps(_mm256_loadu_ps(a + j + 8 * c), _mm256_loadu_ps(b + j + 8 * c), s[c]);
    dot[i] = v8_sum(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
  }
}

/* m <= 8 elements, stride_elems apart, from element i on; then zeros. */
static __m256 load_strided(const struct gdn_rows *r, int64_t i, int m) {
  float x[8] = {0};
  for (int l = 0; l < m; l++) {
    const int64_t at = (i + l) * r->stride_elems;
    if (r->dtype == GDN_ROWS_BF16)
      x[l] = _mm256_cvtss_f32(v8_load_bf16_tail((const uint16_t *)r->data + at, 1));
    else
      x[l] = ((const float *)r->data)[at];
  }
  return _mm256_loadu_ps(x);
}

static void gdn_gates_avx2(int n, struct gdn_rows g, struct gdn_rows beta, float *decay, float *beta_f32) {
  for (int i = 0; i < n; i += 8) {
    const int m = n - i < 8 ? n - i : 8;
    const __m256 one = _mm256_set1_ps(1.0f);
    v8_store_tail(decay + i, m, g.data ? v8_exp(load_strided(&g, i, m)) : one);
    v8_store_tail(beta_f32 + i, m, beta.data ? load_strided(&beta, i, m) : one);
  }
}

static void gdn_store_rows_avx2(int n, int dim, const float *src, int64_t ld, struct gdn_rows_out dst) {
  for (int i = 0; i < n; i++, src += ld) {
    if (dst.dtype == GDN_ROWS_BF16) {
      uint16_t *row = (uint16_t *)dst.data + i * dst.stride_elems;
      for (int j = 0; j < dim; j += 16)
        _mm256_storeu_si256((__m256i *)(row + j), v8_to_bf16x2(_mm256_loadu_ps(src + j), _mm256_loadu_ps(src + j + 8)));
    } else {
      float *row = (float *)dst.data + i * dst.stride_elems;
      for (int j = 0; j < dim; j += 8) _mm256_storeu_ps(row + j, _mm256_loadu_ps(src + j));
    }
  }
}

static void gdn_state_load_avx2(int n_cols, int dim_k, const float *restrict rows, float *restrict panels) {
  for (int col = 0; col < n_cols; col += 8) {
    const float *src = rows + (ptrdiff_t)col * dim_k;
    float *dst = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    for (int j = 0; j < dim_k; j += 8) {
      __m256 r[8];
      v8_load_transposed(src + j, dim_k, r);
      for (int i = 0; i < 8; i++) _mm256_store_ps(dst + (j + i) * GDN_PANEL, r[i]);
    }
  }
}

static void gdn_state_store_avx2(int n_cols, int dim_k, const float *restrict panels, float *restrict rows) {
  for (int col = 0; col < n_cols; col += 8) {
    const float *src = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    float *dst = rows + (ptrdiff_t)col * dim_k;
    for (int j = 0; j < dim_k; j += 8) {
      __m256 r[8];
      v8_load_transposed(src + j * GDN_PANEL, GDN_PANEL, r);
      for (int i = 0; i < 8; i++) _mm256_storeu_ps(dst + (ptrdiff_t)i * dim_k + j, r[i]);
    }
  }
}

/* The 32 columns of a panel: by value, so that they stay in registers. */
struct v32 {
  __m256 a, b, c, d;
};

INLINE struct v32 v32_zero(void) {
  return (struct v32){_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
}

INLINE struct v32 v32_load(const float *p) {
  return (struct v32){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24)};
}

INLINE void v32_store(float *p, struct v32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
  _mm256_storeu_ps(p + 16, x.c);
  _mm256_storeu_ps(p + 24, x.d);
}

INLINE struct v32 v32_mul(__m256 f, struct v32 x) {
  return (struct v32){_mm256_mul_ps(f, x.a), _mm256_mul_ps(f, x.b), _mm256_mul_ps(f, x.c), _mm256_mul_ps(f, x.d)};
}

INLINE struct v32 v32_fma(__m256 f, struct v32 x, struct v32 y) {
  return (struct v32){_mm256_fmadd_ps(f, x.a, y.a), _mm256_fmadd_ps(f, x.b, y.b), _mm256_fmadd_ps(f, x.c, y.c),
                      _mm256_fmadd_ps(f, x.d, y.d)};
}

INLINE struct v32 v32_fnma(__m256 f, struct v32 x, struct v32 y) {
  return (struct v32){_mm256_fnmadd_ps(f, x.a, y.a), _mm256_fnmadd_ps(f, x.b, y.b), _mm256_fnmadd_ps(f, x.c, y.c),
                      _mm256_fnmadd_ps(f, x.d, y.d)};
}

INLINE struct v32 v32_add(struct v32 x, struct v32 y) {
  return (struct v32){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b), _mm256_add_ps(x.c, y.c),
                      _mm256_add_ps(x.d, y.d)};
}

struct dots {
  struct v32 x, y;
};

/* Chain l: the rows j = l, l + 8, l + 16, .. of a panel. */
INLINE struct dots sweep_chain(int l, int dim_k, float *restrict s, int update, __m256 decay, struct v32 d,
                               const float *restrict k, int dots, const float *restrict k_next,
                               const float *restrict q_next) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int block = l; block < dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      struct v32 r = v32_load(s + j * GDN_PANEL);
      if (update) {
        r = v32_fma(_mm256_broadcast_ss(k + j), d, v32_mul(decay, r));
        v32_store(s + j * GDN_PANEL, r);
      }
      if (dots) {
        sum.x = v32_fma(_mm256_broadcast_ss(k_next + j), r, sum.x);
        sum.y = v32_fma(_mm256_broadcast_ss(q_next + j), r, sum.y);
      }
    }
  return sum;
}

/* One sweep over a panel [dim_k][32]. update: s = decay s + d k^T, in place. dots: x = s k_next and y = s q_next of
 * the result. Bound by 4 multiply slots per vector of the state.
 * The order of a sum is the one that suits decode_step, whose vectors lie along K: 8 chains, chain l over
 * j = l, l + 8, l + 16, ..; then (0 + 4) + (1 + 5) + (2 + 6) + (3 + 7). */
INLINE struct dots sweep(int dim_k, float *restrict s, int update, __m256 decay, struct v32 d, const float *restrict k,
                         int dots, const float *restrict k_next, const float *restrict q_next) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int l = 0; l < 4; l++) {
    struct dots a = sweep_chain(l, dim_k, s, update, decay, d, k, dots, k_next, q_next);
    const struct dots b = sweep_chain(l + 4, dim_k, s, update, decay, d, k, dots, k_next, q_next);
    a.x = v32_add(a.x, b.x);
    a.y = v32_add(a.y, b.y);
    sum.x = l ? v32_add(sum.x, a.x) : a.x;
    sum.y = l ? v32_add(sum.y, a.y) : a.y;
  }
  return sum;
}

static void recur_panel(const struct gdn_recur *a, int col) {
  const int dim_k = a->dim_k;
  const float *k = a->k, *q = a->q;
  float *s = a->state + (ptrdiff_t)col * dim_k;
  __m256 decay = _mm256_setzero_ps();
  struct v32 d = v32_zero();
  struct dots sum = sweep(dim_k, s, 0, decay, d, k, 1, k, q);
  for (int t = 0;; t++) {
    decay = _mm256_set1_ps(a->decay[t]);
    d = v32_mul(_mm256_set1_ps(a->beta[t]), v32_fnma(decay, sum.x, v32_load(a->v + t * a->ld + col)));
    v32_store(a->out + t * a->ld + col, v32_fma(_mm256_set1_ps(a->kq[t]), d, v32_mul(decay, sum.y)));
    for (int i = 0; t < a->ahead.n_rows && i < a->ahead.n; i++)
      __builtin_prefetch(a->ahead.line[i] + t * a->ahead.stride_bytes[i]);
    if (t + 1 == a->n) break;
    sum = sweep(dim_k, s, 1, decay, d, k, 1, k + dim_k, q + dim_k);
    k += dim_k;
    q += dim_k;
  }
  sweep(dim_k, s, 1, decay, d, k, 0, k, q);
}

static void gdn_recur_avx2(const struct gdn_recur *a) {
  assert(a->n >= 1 && a->dim_k % GDN_PANEL == 0 && a->n_cols % GDN_PANEL == 0);
  for (int col = 0; col < a->n_cols; col += GDN_PANEL) recur_panel(a, col);
}

#define DECODE_ROWS 8 /* rows of a block, whose chains are added together */
/* How far ahead the state is fetched to the second-level cache. Two rows at a time are not a pattern that hardware
 * prefetchers follow: without this, 0.35 of the bandwidth at dim_k 128 on Zen 4, with it 0.9; 8 to 32 KB are alike,
 * and fetching to the first level is no help. May reach past the rows, which a prefetch is free to do. */
#define DECODE_AHEAD_BYTES 16384

/* Two rows of a block and two of an earlier one. dots: x = in . k, y = in . q, as 8 chains each. update:
 * old_out = decay old_in + d k^T. Both at once, so that reading overlaps with arithmetic and writing. */
INLINE void decode_pair(int dim_k, const float *restrict k, const float *restrict q, int dots, const float *in,
                        __m256 x[2], __m256 y[2], int update, __m256 decay, const float *d, const float *old_in,
                        float *old_out) {
  const __m256 d0 = _mm256_broadcast_ss(d), d1 = _mm256_broadcast_ss(d + 1);
  __m256 x0 = _mm256_setzero_ps(), x1 = x0, y0 = x0, y1 = x0;
  for (int block = 0; block < dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      const __m256 kj = _mm256_loadu_ps(k + j);
      if (dots) {
        const __m256 qj = _mm256_loadu_ps(q + j);
        const __m256 r0 = _mm256_loadu_ps(in + j), r1 = _mm256_loadu_ps(in + dim_k + j);
        _mm_prefetch((const char *)in + DECODE_AHEAD_BYTES + 8 * j, _MM_HINT_T1);
        x0 = _mm256_fmadd_ps(kj, r0, x0);
        y0 = _mm256_fmadd_ps(qj, r0, y0);
        x1 = _mm256_fmadd_ps(kj, r1, x1);
        y1 = _mm256_fmadd_ps(qj, r1, y1);
      }
      if (update) {
        const __m256 r0 = _mm256_mul_ps(decay, _mm256_loadu_ps(old_in + j));
        const __m256 r1 = _mm256_mul_ps(decay, _mm256_loadu_ps(old_in + dim_k + j));
        _mm256_storeu_ps(old_out + j, _mm256_fmadd_ps(d0, kj, r0));
        _mm256_storeu_ps(old_out + dim_k + j, _mm256_fmadd_ps(d1, kj, r1));
      }
    }
  x[0] = x0, x[1] = x1;
  y[0] = y0, y[1] = y1;
}

/* The sums of 8 rows from their chains, in the order of sweep: lane i belongs to row i. */
INLINE __m256 sum_chains(const __m256 r[8]) {
  __m256 t[4], c[4];
  for (int i = 0; i < 4; i++)
    t[i] = _mm256_add_ps(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  V8_TRANSPOSE_4X4(t[0], t[1], t[2], t[3], c[0], c[1], c[2], c[3]);
  return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(c[0], c[1]), c[2]), c[3]);
}

/* From the chains of 8 rows to d and out; the same operations as in recur_panel. */
INLINE void decode_finish(const struct gdn_decode_step *a, int col, const __m256 x[8], const __m256 y[8], float d[8]) {
  const __m256 decay = _mm256_set1_ps(a->decay);
  const __m256 t = _mm256_fnmadd_ps(decay, sum_chains(x), _mm256_loadu_ps(a->v + col));
  const __m256 delta = _mm256_mul_ps(_mm256_set1_ps(a->beta), t);
  _mm256_storeu_ps(d, delta);
  _mm256_storeu_ps(a->out + col, _mm256_fmadd_ps(_mm256_set1_ps(a->kq), delta, _mm256_mul_ps(decay, sum_chains(y))));
}

/* dots: the block of rows from col on. update: the block before, by then in the first-level cache. */
INLINE void decode_block(const struct gdn_decode_step *a, int col, int dots, int update, float d[DECODE_ROWS]) {
  static const float zeros[DECODE_ROWS * GDN_DIM_MAX];
  const ptrdiff_t pair = 2 * a->dim_k, at = (ptrdiff_t)col * a->dim_k, old = at - DECODE_ROWS * a->dim_k;
  const float *in = a->state_in ? a->state_in + at : zeros;
  const float *old_in = a->state_in && update ? a->state_in + old : zeros;
  float *old_out = update ? a->state_out + old : NULL;
  __m256 x[DECODE_ROWS], y[DECODE_ROWS];
  for (int i = 0; i < DECODE_ROWS / 2; i++)
    decode_pair(a->dim_k, a->k, a->q, dots, in + i * pair, x + 2 * i, y + 2 * i, update, _mm256_set1_ps(a->decay),
                d + 2 * i, old_in + i * pair, update ? old_out + i * pair : NULL);
  if (dots) decode_finish(a, col, x, y, d);
}

static void gdn_decode_step_avx2(const struct gdn_decode_step *a) {
  float d[DECODE_ROWS] = {0};
  assert(a->dim_k % GDN_PANEL == 0 && a->dim_k <= GDN_DIM_MAX && a->n_cols % GDN_PANEL == 0);
  decode_block(a, 0, 1, 0, d);
  for (int col = DECODE_ROWS; col < a->n_cols; col += DECODE_ROWS)
    if (a->state_out)
      decode_block(a, col, 1, 1, d);
    else
      decode_block(a, col, 1, 0, d);
  if (a->state_out) decode_block(a, a->n_cols, 0, 1, d);
}

void gdn_fill_recur_avx2(struct gdn_kernels *t) {
  t->recur_cols = GDN_PANEL;
  t->load_rows = gdn_load_rows_avx2;
  t->norm_rows = gdn_norm_rows_avx2;
  t->dot_rows = gdn_dot_rows_avx2;
  t->gates = gdn_gates_avx2;
  t->store_rows = gdn_store_rows_avx2;
  t->state_load = gdn_state_load_avx2;
  t->state_store = gdn_state_store_avx2;
  t->recur = gdn_recur_avx2;
  t->decode_step = gdn_decode_step_avx2;
}
