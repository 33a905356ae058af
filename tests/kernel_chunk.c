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

void make_gentle(const struct kcase *c, struct chunk_data *d) {
  for (int i = 0; i < FIRST_LEN + c->n; i++) row_put(&d->g, i, 0, fmaxf(row_get(&d->g, i, 0), -0.6f));
}

struct gdn_rows rows_from(struct gdn_rows rows, int i) {
  rows.data = (const char *)rows.data + i * rows.stride_elems * elem_bytes(rows.dtype);
  return rows;
}

/* Scratch of x, of which C, K and V are the sizes: its name, the primitive that makes it, its bytes. */
#define CHUNK_BUFFERS(X)                                                                                               \
  X(q, QK, C *K * 4)                                                                                                   \
  X(k, QK, C *K * 4)                                                                                                   \
  X(kt, QK, C *K * 4)                                                                                                  \
  X(q_mult, QK, C * 4)                                                                                                 \
  X(k_mult, QK, C * 4)                                                                                                 \
  X(kk, QK, C *C * 4)                                                                                                  \
  X(qk, QK, C *C * 4)                                                                                                  \
  X(qk_op, QK, C *C * 2)                                                                                               \
  X(decay, GATES, C * 4)                                                                                               \
  X(gate_hi, GATES, C * 4)                                                                                             \
  X(gate_lo, GATES, C * 4)                                                                                             \
  X(decay_in, GATES, C * 4)                                                                                            \
  X(decay_out, GATES, C * 4)                                                                                           \
  X(decay_all, GATES, 4)                                                                                               \
  X(steep, GATES, 4)                                                                                                   \
  X(beta, GATES, C * 4)                                                                                                \
  X(l, MASK, C *C * 4)                                                                                                 \
  X(a, MASK, C *C * 4)                                                                                                 \
  X(t, MASK, C *C * 4)                                                                                                 \
  X(state_op, BEGIN, K *V * 4)                                                                                         \
  X(resid, DELTA, C *V * 4)                                                                                            \
  X(delta_f32, DELTA, C *V * 4)                                                                                        \
  X(delta, DELTA, C *V * 4)                                                                                            \
  X(delta_out, DELTA, C *V * 4)                                                                                        \
  X(inter, OUT, C *V * 4)

struct gdn_chunk *make_chunk(const struct kcase *c, const struct chunk_data *d, int use_jit, int32_t out_dtype) {
  const int64_t C = GDN_CHUNK, K = c->K, V = c->V;
  struct gdn_chunk *x = check_alloc(sizeof *x);
  *x = (struct gdn_chunk){.dim_k = c->K, .dim_v = c->V, .l2norm = 1, .scale = 1 / sqrtf((float)c->K), .eps = 1e-6f};
  x->gemms = gemms_for(c->K, c->V, use_jit);
#define MAKE_BUFFER(name, made_by, bytes) x->name = check_alloc((size_t)(bytes));
  CHUNK_BUFFERS(MAKE_BUFFER)
#undef MAKE_BUFFER
  x->hot = check_alloc(GDN_HOT_BYTES);
  x->state = alloc_f32(K * V);
  memcpy(x->state, d->state, (size_t)(K * V) * 4);
  x->out_rows = poison_rows(FIRST_LEN + c->n, c->V, 9, out_dtype);
  return x;
}

/* What a primitive makes or uses as scratch, so that reading it first shows. Tiers of bf16 operands keep the state in
 * state_op and make state of it. */
static void spoil(const struct gdn_kernels *k, const struct gdn_chunk *x, enum stage stage) {
  const int64_t C = GDN_CHUNK, K = x->dim_k, V = x->dim_v;
#define SPOIL_BUFFER(name, made_by, bytes)                                                                             \
  if (stage == (made_by)) check_poison(x->name, (size_t)(bytes));
  CHUNK_BUFFERS(SPOIL_BUFFER)
#undef SPOIL_BUFFER
  check_poison(x->hot, GDN_HOT_BYTES);
  if (stage == END && bf16_chunks(k)) check_poison(x->state, (size_t)(K * V) * 4);
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

void start_from_zero(struct gdn_chunk *x, int in_memory) {
  const size_t bytes = (size_t)x->dim_k * (size_t)x->dim_v * 4;
  x->zero_state = !in_memory;
  memset(x->state, 0, bytes);
  if (in_memory) return;
  check_poison(x->state, bytes);
  check_poison(x->state_op, bytes);
}

void run_columns(const struct gdn_kernels *k, struct gdn_chunk *x, int col, int n_cols, enum stage last) {
  void (*const per_slice[])(const struct gdn_chunk *, int, int) = {k->chunk_delta, k->chunk_out, k->chunk_state,
                                                                   k->chunk_end};
  for (int s = DELTA; s <= (int)last; s++) {
    if (n_cols == x->dim_v) spoil(k, x, (enum stage)s);
    per_slice[s - DELTA](x, col, n_cols);
  }
}

void run_stages(const struct gdn_kernels *k, struct gdn_chunk *x, int width, int begin, enum stage last) {
  void (*const per_head[])(const struct gdn_chunk *) = {k->chunk_qk, k->chunk_gates, k->chunk_mask, k->chunk_solve};
  for (int s = QK; s <= SOLVE && s <= (int)last; s++) {
    if (width >= x->dim_v) spoil(k, x, (enum stage)s);
    per_head[s](x);
  }
  for (int col = 0; col < x->dim_v; col += width) {
    int n_cols = x->dim_v - col < width ? x->dim_v - col : width;
    if (begin && last >= BEGIN) {
      if (n_cols == x->dim_v) spoil(k, x, BEGIN);
      k->chunk_begin(x, col, n_cols);
    }
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

float *out_numbers(const struct gdn_chunk *x) {
  struct gdn_rows out = {x->out_rows.data, x->out_rows.stride_elems, x->out_rows.dtype};
  float *numbers = alloc_f32((int64_t)x->n * x->dim_v);
  for (int i = 0; i < x->n; i++) {
    for (int j = 0; j < x->dim_v; j++) numbers[i * x->dim_v + j] = row_get(&out, i, j);
  }
  return numbers;
}

void check_same_out(const char *what, const struct gdn_chunk *a, const struct gdn_chunk *b) {
  check_same_bits(what, out_numbers(a), out_numbers(b), (size_t)(a->n * a->dim_v) * 4, 4);
}

double chunk_limit(const struct kcase *c) {
  return 0x1p-24 * (24 + c->K / 4);
}
