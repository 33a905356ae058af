/* SPDX-License-Identifier: Apache-2.0
 * Inputs, scratch and runs of two chunks; see kernel_chunk.h. */
#include "kernel_chunk.h"

#include <math.h>
#include <string.h>

#include "kernels/gemm.h"

/* Head sizes whose product handles were made, for plain loops and for libxsmm. */
static const struct gdn_gemms *gemms_for(int K, int V, int use_jit) {
  static struct gdn_gemms made[2][GDN_DIM_MAX / 32][GDN_DIM_MAX / 32];
  struct gdn_gemms *g = &made[use_jit][K / 32 - 1][V / 32 - 1];
  if (g->dim_k == 0) gdn_gemms_make(g, K, V, use_jit);
  return g;
}

struct chunk_data random_chunks(struct kcase *c) {
  int n = FIRST_LEN + c->n;
  struct chunk_data d;
  d.q = random_rows(&c->rng, n, c->K, 32, GDN_ROWS_BF16, -1, 1);
  d.k = random_rows(&c->rng, n, c->K, 7, GDN_ROWS_BF16, -1, 1);
  d.v = random_rows(&c->rng, n, c->V, 0, GDN_ROWS_BF16, -1, 1);
  d.g = random_rows(&c->rng, n, 1, 3, GDN_ROWS_F32, -0.3, 0);
  d.beta = random_rows(&c->rng, n, 1, 1, c->n % 2 != 0 ? GDN_ROWS_F32 : GDN_ROWS_BF16, 0, 1);
  static const float rare[] = {-INFINITY, -90, -26, 0, 0.02f, -1000};
  for (int i = 5; i < c->n; i += 9) row_put(&d.g, FIRST_LEN + i, 0, rare[i / 9 % 6]);
  for (int j = 0; j < c->K && c->n > 15; j++) row_put(&d.k, FIRST_LEN + 14, j, 0);
  d.state = uniform_f32(&c->rng, (int64_t)c->K * c->V, -0.5, 0.5);
  return d;
}

struct gdn_rows rows_from(struct gdn_rows rows, int i) {
  rows.data = (const char *)rows.data + i * rows.stride_elems * elem_bytes(rows.dtype);
  return rows;
}

struct gdn_chunk *make_chunk(const struct kcase *c, const struct chunk_data *d, int use_jit, int32_t out_dtype) {
  const int64_t C = GDN_CHUNK, K = c->K, V = c->V;
  struct gdn_chunk *x = check_alloc(sizeof *x);
  *x = (struct gdn_chunk){.dim_k = c->K, .dim_v = c->V, .l2norm = 1, .scale = 1 / sqrtf((float)c->K), .eps = 1e-6f};
  x->gemms = gemms_for(c->K, c->V, use_jit);
  x->q = alloc_f32(C * K);
  x->k = alloc_f32(C * K);
  x->kt = alloc_f32(C * K);
  x->q_mult = alloc_f32(C);
  x->k_mult = alloc_f32(C);
  x->decay = alloc_f32(C);
  x->kk = alloc_f32(C * C);
  x->qk = alloc_f32(C * C);
  x->gate_hi = alloc_f32(C);
  x->gate_lo = alloc_f32(C);
  x->decay_in = alloc_f32(C);
  x->decay_out = alloc_f32(C);
  x->beta = alloc_f32(C);
  x->decay_all = alloc_f32(1);
  x->l = alloc_f32(C * C);
  x->a = alloc_f32(C * C);
  x->t = alloc_f32(C * C);
  x->state = alloc_f32(K * V);
  memcpy(x->state, d->state, (size_t)(K * V) * 4);
  x->state_op = alloc_f32(K * V);
  x->resid = check_alloc((size_t)(C * V) * 6);
  x->inter = alloc_f32(C * V);
  x->delta_f32 = alloc_f32(C * V);
  x->delta = alloc_f32(C * V);
  x->delta_out = alloc_f32(C * V);
  x->out_rows = poison_rows(FIRST_LEN + c->n, c->V, 9, out_dtype);
  return x;
}

void set_chunk(struct gdn_chunk *x, const struct chunk_data *d, int start, int n) {
  x->n = n;
  x->n16 = (n + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK;
  x->q_rows = rows_from(d->q, start);
  x->k_rows = rows_from(d->k, start);
  x->v_rows = rows_from(d->v, start);
  x->g_rows = rows_from(d->g, start);
  x->beta_rows = rows_from(d->beta, start);
}

void run_columns(const struct gdn_kernels *k, struct gdn_chunk *x, int col, int n_cols, enum stage last) {
  void (*const per_slice[])(const struct gdn_chunk *, int, int) = {k->chunk_residual, k->chunk_delta, k->chunk_out,
                                                                   k->chunk_state};
  for (int s = RESIDUAL; s <= (int)last; s++) per_slice[s - RESIDUAL](x, col, n_cols);
}

void run_stages(const struct gdn_kernels *k, struct gdn_chunk *x, int width, int begin, enum stage last) {
  void (*const per_head[])(const struct gdn_chunk *) = {k->chunk_qk, k->chunk_gates, k->chunk_mask, k->chunk_solve};
  for (int s = QK; s <= SOLVE && s <= (int)last; s++) per_head[s](x);
  for (int col = 0; col < x->dim_v; col += width) {
    int n_cols = x->dim_v - col < width ? x->dim_v - col : width;
    if (begin && last >= BEGIN) k->chunk_begin(x, col, n_cols);
    run_columns(k, x, col, n_cols, last);
  }
}

struct gdn_chunk *run_chunks(const struct kcase *c, const struct gdn_kernels *k, const struct chunk_data *d, int width,
                             enum stage last, int32_t out_dtype) {
  struct gdn_chunk *x = make_chunk(c, d, k != c->ref, out_dtype);
  struct gdn_rows_out all = x->out_rows;
  set_chunk(x, d, 0, FIRST_LEN);
  x->next_n = c->n;
  x->next_q = rows_from(d->q, FIRST_LEN);
  x->next_k = rows_from(d->k, FIRST_LEN);
  x->next_v = rows_from(d->v, FIRST_LEN);
  run_stages(k, x, width, 1, STATE);
  set_chunk(x, d, FIRST_LEN, c->n);
  x->next_n = 0;
  x->out_rows.data = (char *)all.data + FIRST_LEN * all.stride_elems * elem_bytes(all.dtype);
  run_stages(k, x, width, 0, last);
  check_gaps(&all, FIRST_LEN + (last >= OUT ? c->n : 0), c->V);
  return x;
}
