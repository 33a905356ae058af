/* SPDX-License-Identifier: Apache-2.0
 * Rows, gates, recurrent form and decode step for AVX-512 F, BW, DQ, VL. */
#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "kernels/kernels.h"
#include "kernels/vec_avx512.h"

#define INLINE static inline __attribute__((always_inline))

/* 16 elements from element i on. */
INLINE __m512 load_as(const void *data, int64_t i, int bf16) {
  return bf16 ? v16_load_bf16((const uint16_t *)data + i) : _mm512_loadu_ps((const float *)data + i);
}

INLINE void load_rows(int n, int dim, struct gdn_rows src, int bf16, float *restrict dst, int64_t ld) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += 16)
      _mm512_storeu_ps(dst + i * ld + j, load_as(src.data, i * src.stride_elems + j, bf16));
}

static void gdn_load_rows_avx512(int n, int dim, struct gdn_rows src, float *dst, int64_t ld) {
  if (src.dtype == GDN_ROWS_BF16)
    load_rows(n, dim, src, 1, dst, ld);
  else
    load_rows(n, dim, src, 0, dst, ld);
}

INLINE void norm_rows(int n, int dim, struct gdn_rows src, int bf16, float eps, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++) {
    __m512 s0 = _mm512_setzero_ps(), s1 = _mm512_setzero_ps();
    float *row = dst + (ptrdiff_t)i * dim;
    for (int j = 0; j < dim; j += 32) {
      const __m512 x0 = load_as(src.data, i * src.stride_elems + j, bf16);
      const __m512 x1 = load_as(src.data, i * src.stride_elems + j + 16, bf16);
      _mm512_storeu_ps(row + j, x0);
      _mm512_storeu_ps(row + j + 16, x1);
      s0 = _mm512_fmadd_ps(x0, x0, s0);
      s1 = _mm512_fmadd_ps(x1, x1, s1);
    }
    const __m512 factor = _mm512_set1_ps(mult / sqrtf(v16_sum(_mm512_add_ps(s0, s1)) + eps));
    for (int j = 0; j < dim; j += 16) _mm512_storeu_ps(row + j, _mm512_mul_ps(factor, _mm512_loadu_ps(row + j)));
  }
}

INLINE void scale_rows(int n, int dim, struct gdn_rows src, int bf16, float mult, float *restrict dst) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < dim; j += 16)
      _mm512_storeu_ps(dst + (ptrdiff_t)i * dim + j,
                       _mm512_mul_ps(_mm512_set1_ps(mult), load_as(src.data, i * src.stride_elems + j, bf16)));
}

static void gdn_norm_rows_avx512(int n, int dim, struct gdn_rows src, int l2norm, float eps, float mult, float *dst) {
  if (l2norm && src.dtype == GDN_ROWS_BF16)
    norm_rows(n, dim, src, 1, eps, mult, dst);
  else if (l2norm)
    norm_rows(n, dim, src, 0, eps, mult, dst);
  else if (src.dtype == GDN_ROWS_BF16)
    scale_rows(n, dim, src, 1, mult, dst);
  else
    scale_rows(n, dim, src, 0, mult, dst);
}

static void gdn_dot_rows_avx512(int n, int dim, const float *a, const float *b, float *restrict dot) {
  for (int i = 0; i < n; i++, a += dim, b += dim) {
    __m512 s0 = _mm512_setzero_ps(), s1 = _mm512_setzero_ps();
    for (int j = 0; j < dim; j += 32) {
      s0 = _mm512_fmadd_ps(_mm512_loadu_ps(a + j), _mm512_loadu_ps(b + j), s0);
      s1 = _mm512_fmadd_ps(_mm512_loadu_ps(a + j + 16), _mm512_loadu_ps(b + j + 16), s1);
    }
    dot[i] = v16_sum(_mm512_add_ps(s0, s1));
  }
}

/* m <= 16 elements, stride_elems apart, from element i on; then zeros. */
static __m512 load_strided(const struct gdn_rows *r, int64_t i, int m) {
  float x[16] = {0};
  for (int l = 0; l < m; l++) {
    const int64_t at = (i + l) * r->stride_elems;
    if (r->dtype == GDN_ROWS_BF16)
      x[l] = _mm512_cvtss_f32(v16_load_bf16_tail((const uint16_t *)r->data + at, 1));
    else
      x[l] = ((const float *)r->data)[at];
  }
  return _mm512_loadu_ps(x);
}

static void gdn_gates_avx512(int n, struct gdn_rows g, struct gdn_rows beta, float *decay, float *beta_f32) {
  for (int i = 0; i < n; i += 16) {
    const int m = n - i < 16 ? n - i : 16;
    const __m512 one = _mm512_set1_ps(1.0f);
    v16_store_tail(decay + i, m, g.data ? v16_exp(load_strided(&g, i, m)) : one);
    v16_store_tail(beta_f32 + i, m, beta.data ? load_strided(&beta, i, m) : one);
  }
}

static void gdn_store_rows_avx512(int n, int dim, const float *src, int64_t ld, struct gdn_rows_out dst) {
  for (int i = 0; i < n; i++, src += ld) {
    if (dst.dtype == GDN_ROWS_BF16) {
      uint16_t *row = (uint16_t *)dst.data + i * dst.stride_elems;
      for (int j = 0; j < dim; j += 16) v16_store_bf16(row + j, _mm512_loadu_ps(src + j));
    } else {
      float *row = (float *)dst.data + i * dst.stride_elems;
      for (int j = 0; j < dim; j += 16) _mm512_storeu_ps(row + j, _mm512_loadu_ps(src + j));
    }
  }
}

static void gdn_state_load_avx512(int n_cols, int dim_k, const float *restrict rows, float *restrict panels) {
  for (int col = 0; col < n_cols; col += 16) {
    const float *src = rows + (ptrdiff_t)col * dim_k;
    float *dst = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    for (int j = 0; j < dim_k; j += 4) {
      __m512 r[4];
      v16_load_transposed_16x4(src + j, dim_k, r);
      for (int i = 0; i < 4; i++) _mm512_store_ps(dst + (j + i) * GDN_PANEL, r[i]);
    }
  }
}

static void gdn_state_store_avx512(int n_cols, int dim_k, const float *restrict panels, float *restrict rows) {
  for (int col = 0; col < n_cols; col += 16) {
    const float *src = panels + (ptrdiff_t)(col / GDN_PANEL) * dim_k * GDN_PANEL + col % GDN_PANEL;
    float *dst = rows + (ptrdiff_t)col * dim_k;
    for (int j = 0; j < dim_k; j += 16) {
      __m512 r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(src + (j + i) * GDN_PANEL);
      v16_transpose(r);
      for (int i = 0; i < 16; i++) _mm512_storeu_ps(dst + (ptrdiff_t)i * dim_k + j, r[i]);
    }
  }
}

/* The 32 columns of a panel: by value, so that they stay in registers. */
struct v32 {
  __m512 a, b;
};

INLINE struct v32 v32_zero(void) {
  return (struct v32){_mm512_setzero_ps(), _mm512_setzero_ps()};
}

INLINE struct v32 v32_load(const float *p) {
  return (struct v32){_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)};
}

INLINE void v32_store(float *p, struct v32 x) {
  _mm512_storeu_ps(p, x.a);
  _mm512_storeu_ps(p + 16, x.b);
}

INLINE struct v32 v32_mul(__m512 f, struct v32 x) {
  return (struct v32){_mm512_mul_ps(f, x.a), _mm512_mul_ps(f, x.b)};
}

INLINE struct v32 v32_fma(__m512 f, struct v32 x, struct v32 y) {
  return (struct v32){_mm512_fmadd_ps(f, x.a, y.a), _mm512_fmadd_ps(f, x.b, y.b)};
}

INLINE struct v32 v32_fnma(__m512 f, struct v32 x, struct v32 y) {
  return (struct v32){_mm512_fnmadd_ps(f, x.a, y.a), _mm512_fnmadd_ps(f, x.b, y.b)};
}

INLINE struct v32 v32_add(struct v32 x, struct v32 y) {
  return (struct v32){_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)};
}

struct dots {
  struct v32 x, y;
};

/* Chain l: the rows j = l, l + 8, l + 16, .. of a panel. */
INLINE struct dots sweep_chain(int l, int dim_k, float *restrict s, int update, __m512 decay, struct v32 d,
                               const float *restrict k, int dots, const float *restrict k_next,
                               const float *restrict q_next) {
  struct dots sum = {v32_zero(), v32_zero()};
  for (int block = l; block < dim_k; block += 32)
#pragma GCC unroll 4
    for (int j = block; j < block + 32; j += 8) {
      struct v32 r = v32_load(s + j * GDN_PANEL);
      if (update) {
        r = v32_fma(_mm512_set1_ps(k[j]), d, v32_mul(decay, r));
        v32_store(s + j * GDN_PANEL, r);
      }
      if (dots) {
        sum.x = v32_fma(_mm512_set1_ps(k_next[j]), r, sum.x);
        sum.y = v32_fma(_mm512_set1_ps(q_next[j]), r, sum.y);
      }
    }
  return sum;
}

/* As sweep of recur_avx2.c, to the same bits. One panel at a time: two would share the broadcasts, but fill a
 * first-level cache of 32 KB at dim_k 128 (Zen 4: 60 to 95 GFLOP/s for two, 114 for one). */
INLINE struct dots sweep(int dim_k, float *restrict s, int update, __m512 decay, struct v32 d, const float *restrict k,
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
  __m512 decay = _mm512_setzero_ps();
  struct v32 d = v32_zero();
  struct dots sum = sweep(dim_k, s, 0, decay, d, k, 1, k, q);
  for (int t = 0;; t++) {
    decay = _mm512_set1_ps(a->decay[t]);
    d = v32_mul(_mm512_set1_ps(a->beta[t]), v32_fnma(decay, sum.x, v32_load(a->v + t * a->ld + col)));
    v32_store(a->out + t * a->ld + col, v32_fma(_mm512_set1_ps(a->kq[t]), d, v32_mul(decay, sum.y)));
    for (int i = 0; t < a->ahead.n_rows && i < a->ahead.n; i++)
      __builtin_prefetch(a->ahead.line[i] + t * a->ahead.stride_bytes[i]);
    if (t + 1 == a->n) break;
    sum = sweep(dim_k, s, 1, decay, d, k, 1, k + dim_k, q + dim_k);
    k += dim_k;
    q += dim_k;
  }
  sweep(dim_k, s, 1, decay, d, k, 0, k, q);
}

static void gdn_recur_avx512(const struct gdn_recur *a) {
  assert(a->n >= 1 && a->dim_k % GDN_PANEL == 0 && a->n_cols % GDN_PANEL == 0);
  for (int col = 0; col < a->n_cols; col += GDN_PANEL) recur_panel(a, col);
}

/* decode_step stays that of AVX2: it is bound by memory, and 256-bit vectors along K give the bits of sweep. */
void gdn_fill_recur_avx512(struct gdn_kernels *t) {
  t->recur_cols = GDN_PANEL;
  t->load_rows = gdn_load_rows_avx512;
  t->norm_rows = gdn_norm_rows_avx512;
  t->dot_rows = gdn_dot_rows_avx512;
  t->gates = gdn_gates_avx512;
  t->store_rows = gdn_store_rows_avx512;
  t->state_load = gdn_state_load_avx512;
  t->state_store = gdn_state_store_avx512;
  t->recur = gdn_recur_avx512;
}
