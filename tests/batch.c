/* SPDX-License-Identifier: Apache-2.0
 * Packed batches in guarded caller memory; see batch.h. */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "oracle.h"

static int64_t state_elems(const struct batch_shape *s) {
  return (int64_t)s->n_heads_v * s->dim_v * s->dim_k;
}

struct batch *batch_make(const struct batch_shape *shape, struct check_rng *r) {
  struct batch *b = check_alloc(sizeof *b);
  memset(b, 0, sizeof *b);
  b->shape = *shape;
  b->cu_seqlens = check_alloc_tight(sizeof(int32_t) * (size_t)(shape->n_seqs + 1));
  b->cu_seqlens[0] = 0;
  for (int i = 0; i < shape->n_seqs; i++) b->cu_seqlens[i + 1] = b->cu_seqlens[i] + shape->lens[i];
  check_protect(b->cu_seqlens);
  b->n_tokens = b->cu_seqlens[shape->n_seqs];
  int64_t n_qk = b->n_tokens * shape->n_heads_k * shape->dim_k, n_gates = b->n_tokens * shape->n_heads_v;
  int64_t n_v = n_gates * shape->dim_v;
  b->q = check_alloc(sizeof(float) * (size_t)n_qk);
  b->k = check_alloc(sizeof(float) * (size_t)n_qk);
  b->v = check_alloc(sizeof(float) * (size_t)n_v);
  b->g = check_alloc(sizeof(float) * (size_t)n_gates);
  b->beta = check_alloc(sizeof(float) * (size_t)n_gates);
  for (int64_t i = 0; i < n_qk; i++) {
    b->q[i] = (float)check_normal(r);
    b->k[i] = (float)check_normal(r);
  }
  for (int64_t i = 0; i < n_v; i++) b->v[i] = (float)check_normal(r);
  for (int64_t i = 0; i < n_gates; i++) {
    b->g[i] = (float)check_uniform(r, -0.5, 0);
    b->beta[i] = (float)check_uniform(r, 0, 1);
  }
  return b;
}

/* ---- arrays ---- */

static int dtype_bytes(int32_t dtype) {
  return dtype == GDN_F32 ? 4 : 2;
}

/* Strides of a layout; returns the elements from the first to the last one. */
static int64_t choose_strides(enum batch_layout layout, int64_t n_tokens, int64_t n_heads, int64_t dim,
                              int64_t *token_stride, int64_t *head_stride) {
  *head_stride = dim;
  *token_stride = n_heads * dim;
  if (layout == BATCH_PADDED) {
    *head_stride = dim + 3;
    *token_stride = n_heads * (dim + 3) + 10;
  } else if (layout == BATCH_HEAD_MAJOR) {
    *token_stride = dim;
    *head_stride = (n_tokens > 0 ? n_tokens : 1) * dim;
  }
  return n_tokens == 0 ? 0 : (n_tokens - 1) * *token_stride + (n_heads - 1) * *head_stride + dim;
}

static void fill_array(const gdn_tensor *x, const float *numbers, int64_t n_tokens, int64_t n_heads, int64_t dim) {
  int64_t head_stride = x->head_stride_elems != 0 ? x->head_stride_elems : dim;
  int64_t token_stride = x->token_stride_elems != 0 ? x->token_stride_elems : n_heads * dim;
  for (int64_t t = 0; t < n_tokens; t++) {
    for (int64_t h = 0; h < n_heads; h++) {
      for (int64_t i = 0; i < dim; i++) {
        int64_t at = t * token_stride + h * head_stride + i;
        float value = numbers[(t * n_heads + h) * dim + i];
        if (x->dtype == GDN_F32) {
          ((float *)(uintptr_t)x->data)[at] = value;
        } else {
          ((uint16_t *)(uintptr_t)x->data)[at] = check_to_bf16(value);
        }
      }
    }
  }
}

static gdn_tensor place_array(const float *numbers, int64_t n_tokens, int64_t n_heads, int64_t dim, int32_t dtype,
                              enum batch_layout layout) {
  gdn_tensor x = {.dtype = dtype};
  int64_t elems = choose_strides(layout, n_tokens, n_heads, dim, &x.token_stride_elems, &x.head_stride_elems);
  if (layout == BATCH_DENSE) x.token_stride_elems = x.head_stride_elems = 0;
  void *data = check_alloc_tight((size_t)elems * (size_t)dtype_bytes(dtype));
  x.data = data;
  fill_array(&x, numbers, n_tokens, n_heads, dim);
  check_protect(data);
  return x;
}

/* One row per token: q, then k, then v, then a part that is somebody else's. */
static void place_fused(struct batch *b) {
  const struct batch_shape *s = &b->shape;
  int64_t qk = (int64_t)s->n_heads_k * s->dim_k, v = (int64_t)s->n_heads_v * s->dim_v;
  int64_t stride = 2 * qk + v + 24;
  uint16_t *data = check_alloc((size_t)(b->n_tokens * stride) * sizeof *data);
  b->args.q = (gdn_tensor){.data = data, .token_stride_elems = stride, .dtype = GDN_BF16};
  b->args.k = b->args.v = b->args.q;
  b->args.k.data = data + qk;
  b->args.v.data = data + 2 * qk;
  fill_array(&b->args.q, b->q, b->n_tokens, s->n_heads_k, s->dim_k);
  fill_array(&b->args.k, b->k, b->n_tokens, s->n_heads_k, s->dim_k);
  fill_array(&b->args.v, b->v, b->n_tokens, s->n_heads_v, s->dim_v);
  check_protect(data);
}

/* ---- states ---- */

static void random_row(float *row, int64_t n, struct check_rng *r) {
  for (int64_t i = 0; i < n; i++) row[i] = (float)(0.3 * check_normal(r));
}

static void place_packed(struct batch *b, struct check_rng *r) {
  int64_t elems = b->shape.n_seqs * state_elems(&b->shape);
  float *initial = check_alloc_tight((size_t)elems * sizeof(float));
  random_row(initial, elems, r);
  check_protect(initial);
  b->states = check_alloc_tight((size_t)elems * sizeof(float));
  b->states_elems = elems;
  b->args.initial_state = (gdn_states){.data = initial, .n_rows = b->shape.n_seqs};
  b->args.final_state = (gdn_states){.data = b->states, .n_rows = b->shape.n_seqs};
}

static void place_pool(struct batch *b, struct check_rng *r) {
  int n = b->shape.n_seqs, n_rows = 2 * n + 3;
  int64_t stride = state_elems(&b->shape) + 5;
  int32_t *order = check_alloc(sizeof *order * (size_t)n_rows);
  int32_t *rows_in = check_alloc_tight(sizeof *rows_in * (size_t)n);
  int32_t *rows_out = check_alloc_tight(sizeof *rows_out * (size_t)n);
  b->states_elems = (n_rows - 1) * stride + state_elems(&b->shape);
  b->states = check_alloc_tight((size_t)b->states_elems * sizeof(float));
  for (int i = 0; i < n_rows; i++) order[i] = i;
  for (int i = n_rows - 1; i > 0; i--) {
    int j = (int)(check_random_u64(r) % (uint64_t)(i + 1)), kept = order[i];
    order[i] = order[j];
    order[j] = kept;
  }
  for (int i = 0; i < n; i++) {
    rows_in[i] = i % 4 == 3 ? -1 : order[i];
    rows_out[i] = i % 5 == 4 ? -1 : i % 3 == 0 && rows_in[i] >= 0 ? rows_in[i] : order[n + i];
  }
  if (n > 5) rows_in[5] = rows_in[1];
  for (int i = 0; i < n; i++) {
    if (rows_in[i] >= 0) random_row(b->states + rows_in[i] * stride, state_elems(&b->shape), r);
  }
  check_protect(rows_in);
  check_protect(rows_out);
  b->args.initial_state = (gdn_states){b->states, n_rows, stride, rows_in, GDN_I32, GDN_F32, 0, 0};
  b->args.final_state = (gdn_states){b->states, n_rows, stride, rows_out, GDN_I32, GDN_F32, 0, 0};
}

/* The block of sequence seq in final_state, or null if none is stored. */
static float *final_block(const struct batch *b, int64_t seq) {
  const gdn_states *s = &b->args.final_state;
  if (s->data == NULL || b->shape.lens[seq] == 0) return NULL;
  int64_t row = s->rows != NULL ? ((const int32_t *)s->rows)[seq] : seq;
  if (row < 0) return NULL;
  return (float *)s->data + row * (s->row_stride_elems != 0 ? s->row_stride_elems : state_elems(&b->shape));
}

/* ---- a batch as a call ---- */

void batch_place(struct batch *b, enum batch_layout layout, enum batch_states states, int32_t beta_dtype, int with_g,
                 struct check_rng *r) {
  const struct batch_shape *s = &b->shape;
  int64_t n = b->n_tokens;
  b->args = (gdn_prefill_args){.struct_size = sizeof b->args,
                               .flags = GDN_L2NORM_QK,
                               .n_seqs = s->n_seqs,
                               .n_tokens = n,
                               .n_heads_k = s->n_heads_k,
                               .n_heads_v = s->n_heads_v,
                               .dim_k = s->dim_k,
                               .dim_v = s->dim_v,
                               .cu_seqlens = b->cu_seqlens};
  enum batch_layout other = layout == BATCH_FUSED ? BATCH_PADDED : layout;
  if (layout == BATCH_FUSED) {
    place_fused(b);
  } else {
    b->args.q = place_array(b->q, n, s->n_heads_k, s->dim_k, GDN_BF16, layout);
    b->args.k = place_array(b->k, n, s->n_heads_k, s->dim_k, GDN_BF16, layout);
    b->args.v = place_array(b->v, n, s->n_heads_v, s->dim_v, GDN_BF16, layout);
  }
  if (with_g) b->args.g = place_array(b->g, n, s->n_heads_v, 1, GDN_F32, other);
  if (beta_dtype != 0) b->args.beta = place_array(b->beta, n, s->n_heads_v, 1, beta_dtype, other);
  gdn_tensor_out *out = &b->args.out;
  b->out_elems = choose_strides(other, n, s->n_heads_v, s->dim_v, &out->token_stride_elems, &out->head_stride_elems);
  out->data = check_alloc_tight((size_t)b->out_elems * sizeof(uint16_t));
  if (layout == BATCH_DENSE) out->token_stride_elems = out->head_stride_elems = 0;
  b->states = NULL;
  b->states_elems = 0;
  if (states == BATCH_PACKED) place_packed(b, r);
  if (states == BATCH_POOL) place_pool(b, r);
  b->states_start = check_alloc((size_t)b->states_elems * sizeof(float));
  if (b->states != NULL) memcpy(b->states_start, b->states, (size_t)b->states_elems * sizeof(float));
}

void batch_oracle(struct batch *b) {
  size_t out_bytes = (size_t)(b->n_tokens * b->shape.n_heads_v * b->shape.dim_v) * sizeof(double);
  size_t state_bytes = (size_t)(b->shape.n_seqs * state_elems(&b->shape)) * sizeof(double);
  b->want_out = check_alloc(out_bytes);
  b->want_states = check_alloc(state_bytes);
  b->model_out = check_alloc(out_bytes);
  b->model_states = check_alloc(state_bytes);
  batch_reset(b);
  oracle_prefill(&b->args, b->want_out, b->want_states);
  model_prefill(&model_bf16, &b->args, b->model_out, b->model_states);
}

void batch_reset(struct batch *b) {
  check_poison(b->args.out.data, (size_t)b->out_elems * sizeof(uint16_t));
  if (b->states != NULL) memcpy(b->states, b->states_start, (size_t)b->states_elems * sizeof(float));
}

static uint16_t *out_row(const struct batch *b, int64_t t, int64_t h) {
  const gdn_tensor_out *out = &b->args.out;
  int64_t head_stride = out->head_stride_elems != 0 ? out->head_stride_elems : b->shape.dim_v;
  int64_t token_stride =
      out->token_stride_elems != 0 ? out->token_stride_elems : (int64_t)b->shape.n_heads_v * b->shape.dim_v;
  return (uint16_t *)out->data + t * token_stride + h * head_stride;
}

struct batch_result batch_take(const struct batch *b) {
  size_t row_bytes = (size_t)b->shape.dim_v * sizeof(uint16_t), block_bytes = (size_t)state_elems(&b->shape) * 4;
  struct batch_result x;
  x.out = check_alloc((size_t)(b->n_tokens * b->shape.n_heads_v) * row_bytes);
  x.states = check_alloc((size_t)b->shape.n_seqs * block_bytes);
  for (int64_t t = 0; t < b->n_tokens; t++) {
    for (int64_t h = 0; h < b->shape.n_heads_v; h++) {
      memcpy(x.out + (t * b->shape.n_heads_v + h) * b->shape.dim_v, out_row(b, t, h), row_bytes);
    }
  }
  for (int64_t i = 0; i < b->shape.n_seqs; i++) {
    const float *block = final_block(b, i);
    if (block != NULL) {
      memcpy(x.states + i * state_elems(&b->shape), block, block_bytes);
    } else {
      memset(x.states + i * state_elems(&b->shape), 0, block_bytes);
    }
  }
  return x;
}

void batch_same(const char *what, const struct batch *a, const struct batch_result *x, int64_t i, const struct batch *b,
                const struct batch_result *y, int64_t j) {
  int64_t token_elems = (int64_t)a->shape.n_heads_v * a->shape.dim_v, block = state_elems(&a->shape);
  check_same_bits(what, x->out + a->cu_seqlens[i] * token_elems, y->out + b->cu_seqlens[j] * token_elems,
                  (size_t)(a->shape.lens[i] * token_elems) * 2, 2);
  if (final_block(a, i) == NULL || final_block(b, j) == NULL) return;
  check_same_bits(what, x->states + i * block, y->states + j * block, (size_t)block * 4, 4);
}

/* With the elements themselves back to what they were, the buffers must be as before the call. */
static void check_untouched(struct batch *b) {
  size_t row_bytes = (size_t)b->shape.dim_v * sizeof(uint16_t), block_bytes = (size_t)state_elems(&b->shape) * 4;
  for (int64_t t = 0; t < b->n_tokens; t++) {
    for (int64_t h = 0; h < b->shape.n_heads_v; h++) check_poison(out_row(b, t, h), row_bytes);
  }
  if (!check_is_poison(b->args.out.data, (size_t)b->out_elems * sizeof(uint16_t))) {
    check_fail("out: a byte between the rows was written");
  }
  for (int64_t i = 0; i < b->shape.n_seqs; i++) {
    float *block = final_block(b, i);
    if (block != NULL) memcpy(block, b->states_start + (block - b->states), block_bytes);
  }
  if (b->states != NULL) {
    check_same_bits("states that nobody writes", b->states, b->states_start, (size_t)b->states_elems * 4, 4);
  }
}

/* Limits of out and of the state of sequence i; bf16: from what rounded operands cost. */
static double out_limit(const struct batch *b, double limit, int bf16) {
  int64_t n = b->n_tokens * b->shape.n_heads_v * b->shape.dim_v;
  /* Beyond the rounding to bf16, only elements next to a tie show an error: a small share of the f32 one. */
  if (!bf16) return limit / 8;
  uint16_t *x = check_alloc((size_t)n * sizeof *x);
  for (int64_t j = 0; j < n; j++) x[j] = check_to_bf16((float)b->model_out[j]);
  return model_limit(check_error_bf16(x, b->want_out, n), b->n_tokens * b->shape.n_heads_v, limit);
}

static double state_limit(const struct batch *b, int64_t i, double limit, int bf16) {
  int64_t n = state_elems(&b->shape);
  double error = model_error(b->model_states + i * n, b->want_states + i * n, n);
  return bf16 ? model_limit(error, b->shape.lens[i] * b->shape.n_heads_v, limit) : limit;
}

static void check_results(struct batch *b, double limit, int bf16) {
  int64_t n_out = b->n_tokens * b->shape.n_heads_v * b->shape.dim_v, block = state_elems(&b->shape);
  struct batch_result x = batch_take(b);
  check_close_bf16("out", x.out, b->want_out, n_out, out_limit(b, limit, bf16));
  for (int64_t i = 0; i < b->shape.n_seqs; i++) {
    if (final_block(b, i) == NULL) continue;
    check_close("final state", x.states + i * block, b->want_states + i * block, block, state_limit(b, i, limit, bf16));
  }
  check_untouched(b);
}

void batch_check(struct batch *b, double limit) {
  check_results(b, limit, 0);
}

void batch_check_form(struct batch *b, const struct check_tier *tier, double limit) {
  check_results(b, limit, tier->bf16_chunks && b->args.form == GDN_FORM_CHUNK);
}

void batch_prefill(gdn_ctx *ctx, struct batch *b, int32_t form) {
  batch_reset(b);
  b->args.form = form;
  check_ok("gdn_prefill", gdn_prefill(ctx, &b->args));
}

/* Token t of every sequence, as an array whose tokens are the sequences. */
static gdn_tensor nth_token(gdn_tensor x, int64_t t, int64_t len, int64_t n_heads, int64_t dim) {
  if (x.data == NULL) return x;
  int64_t token_stride = x.token_stride_elems != 0 ? x.token_stride_elems : n_heads * dim;
  x.data = (const char *)x.data + t * token_stride * dtype_bytes(x.dtype != 0 ? x.dtype : GDN_BF16);
  x.token_stride_elems = len * token_stride;
  return x;
}

gdn_decode_args batch_decode_args(const struct batch *b, int64_t t) {
  const struct batch_shape *s = &b->shape;
  int64_t len = s->n_seqs > 0 ? s->lens[0] : 1;
  gdn_tensor out = {b->args.out.data, b->args.out.token_stride_elems, b->args.out.head_stride_elems, GDN_BF16, 0};
  out = nth_token(out, t, len, s->n_heads_v, s->dim_v);
  return (gdn_decode_args){.struct_size = sizeof(gdn_decode_args),
                           .flags = b->args.flags,
                           .n_seqs = s->n_seqs,
                           .n_heads_k = s->n_heads_k,
                           .n_heads_v = s->n_heads_v,
                           .dim_k = s->dim_k,
                           .dim_v = s->dim_v,
                           .scale = b->args.scale,
                           .eps = b->args.eps,
                           .q = nth_token(b->args.q, t, len, s->n_heads_k, s->dim_k),
                           .k = nth_token(b->args.k, t, len, s->n_heads_k, s->dim_k),
                           .v = nth_token(b->args.v, t, len, s->n_heads_v, s->dim_v),
                           .g = nth_token(b->args.g, t, len, s->n_heads_v, 1),
                           .beta = nth_token(b->args.beta, t, len, s->n_heads_v, 1),
                           .out = {(void *)(uintptr_t)out.data, out.token_stride_elems, out.head_stride_elems, 0, 0},
                           .initial_state = t == 0 ? b->args.initial_state : b->args.final_state,
                           .final_state = b->args.final_state};
}
