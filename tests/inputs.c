/* SPDX-License-Identifier: Apache-2.0
 * Calls with inputs as engines have them; see inputs.h. */
#include "inputs.h"

#include <math.h>
#include <string.h>

#include "model.h"
#include "oracle.h"

static const int32_t floats[] = {GDN_BF16, GDN_F16, GDN_F32};

int inputs_bytes(int32_t dtype) {
  return dtype == GDN_F32 ? 4 : 2;
}

/* Through float64, whose own rounding is the nearest one: the unit of the last place is added and taken away. */
static uint16_t to_f16(double x) {
  int exponent;
  double a = fabs(x);
  if (isnan(x)) return 0x7e00;
  uint16_t sign = signbit(x) ? 0x8000 : 0;
  frexp(a, &exponent);
  if (a >= 65520) return sign | 0x7c00;
  int e = a == 0 || exponent < -13 ? -13 : exponent;
  uint32_t units = (uint32_t)nearbyint(ldexp(a, 11 - e)); /* in units of 2^(e - 11) */
  return (uint16_t)(sign | (units + ((uint32_t)(e + 13) << 10)));
}

void inputs_put(void *data, int64_t at, int32_t dtype, double value) {
  if (dtype == GDN_F32)
    ((float *)data)[at] = (float)value;
  else
    ((uint16_t *)data)[at] = dtype == GDN_F16 ? to_f16(value) : check_to_bf16((float)value);
}

static int pick(struct check_rng *r, int n) {
  return (int)(check_random_u64(r) % (uint64_t)n);
}

struct inputs_spec inputs_random(struct check_rng *r) {
  static const int dims[] = {32, 64, 96, 128};
  struct inputs_spec s = {.heads = pick(r, N_HEADS),
                          .gates = pick(r, N_GATES),
                          .strides = pick(r, N_STRIDES),
                          .dim_k = dims[pick(r, 3)],
                          .dim_v = dims[pick(r, 4)],
                          .n_seqs = 1 + pick(r, 5),
                          .n_tokens = 1,
                          .q = floats[pick(r, 3)],
                          .k = floats[pick(r, 3)],
                          .v = floats[pick(r, 3)],
                          .out = floats[pick(r, 3)],
                          .beta = floats[pick(r, 3)],
                          .raw = floats[pick(r, 3)],
                          .index = pick(r, 2) ? GDN_I64 : GDN_I32,
                          .state_in = floats[pick(r, 3)],
                          .state_out = floats[pick(r, 3)],
                          .layout_in = 1 + pick(r, 2),
                          .layout_out = 1 + pick(r, 2),
                          .in_place = pick(r, 2)};
  return s;
}

struct inputs_spec inputs_plain(enum inputs_heads heads, enum inputs_gates gates, int n_tokens) {
  return (struct inputs_spec){.heads = heads,
                              .gates = gates,
                              .dim_k = 32,
                              .dim_v = 32,
                              .n_seqs = 2,
                              .n_tokens = n_tokens,
                              .q = GDN_BF16,
                              .k = GDN_BF16,
                              .v = GDN_BF16,
                              .out = GDN_F32,
                              .beta = GDN_F32,
                              .raw = GDN_F32,
                              .index = GDN_I32,
                              .state_in = GDN_F32,
                              .state_out = GDN_F32,
                              .layout_in = GDN_LAYOUT_VK,
                              .layout_out = GDN_LAYOUT_VK,
                              .in_place = 1};
}

/* ---- arrays ---- */

enum numbers { NORMAL, LOG_DECAY, DECAY, UNIT, WIDE };

static double number(enum numbers kind, struct check_rng *r) {
  switch (kind) {
  case LOG_DECAY:
    return check_uniform(r, -0.5, 0);
  case DECAY:
    return check_uniform(r, 0.5, 1);
  case UNIT:
    return check_uniform(r, 0, 1);
  case WIDE:
    return check_uniform(r, -6, 3);
  default:
    return check_normal(r);
  }
}

static void fill(const gdn_tensor *t, int64_t n_tokens, int n_heads, int dim, enum numbers kind, struct check_rng *r) {
  for (int64_t i = 0; i < n_tokens * n_heads * dim; i++) {
    int64_t token = i / dim / n_heads, head = i / dim % n_heads;
    int64_t at = token * t->token_stride_elems + head * t->head_stride_elems + i % dim;
    inputs_put((void *)(uintptr_t)t->data, at, t->dtype, number(kind, r));
  }
}

static int64_t set_strides(enum inputs_strides strides, int64_t n_tokens, int n_heads, int dim, gdn_tensor *t) {
  t->head_stride_elems = strides == STRIDES_PADDED ? dim + 3 : dim;
  t->token_stride_elems = n_heads * t->head_stride_elems + (strides == STRIDES_PADDED ? 7 : 0);
  if (strides == STRIDES_HEAD_MAJOR) {
    t->token_stride_elems = dim;
    t->head_stride_elems = n_tokens * dim;
  }
  return (n_tokens - 1) * t->token_stride_elems + (n_heads - 1) * t->head_stride_elems + dim;
}

static gdn_tensor place(const struct inputs_spec *s, int n_heads, int dim, int32_t dtype, enum numbers kind,
                        struct check_rng *r) {
  int64_t n_tokens = (int64_t)s->n_seqs * s->n_tokens;
  gdn_tensor t = {.dtype = dtype};
  int64_t elems = set_strides(s->strides, n_tokens, n_heads, dim, &t);
  void *data = check_alloc_tight((size_t)elems * (size_t)inputs_bytes(dtype));
  t.data = data;
  fill(&t, n_tokens, n_heads, dim, kind, r);
  check_protect(data);
  return t;
}

static void place_qkv(struct inputs *x, int h_q, int h_k, int h_v, struct check_rng *r) {
  struct inputs_spec *s = &x->spec;
  gdn_prefill_args *a = &x->prefill;
  if (s->strides != STRIDES_FUSED) {
    a->q = place(s, h_q, s->dim_k, s->q, NORMAL, r);
    a->k = place(s, h_k, s->dim_k, s->k, NORMAL, r);
    a->v = place(s, h_v, s->dim_v, s->v, NORMAL, r);
    return;
  }
  s->k = s->v = s->q;
  int64_t n = (int64_t)s->n_seqs * s->n_tokens, q = h_q * s->dim_k, k = h_k * s->dim_k, bytes = inputs_bytes(s->q);
  int64_t stride = q + k + h_v * s->dim_v + 5;
  char *data = check_alloc((size_t)(n * stride * bytes));
  a->q = (gdn_tensor){data, stride, s->dim_k, s->q, 0};
  a->k = (gdn_tensor){data + q * bytes, stride, s->dim_k, s->q, 0};
  a->v = (gdn_tensor){data + (q + k) * bytes, stride, s->dim_v, s->q, 0};
  fill(&a->q, n, h_q, s->dim_k, NORMAL, r);
  fill(&a->k, n, h_k, s->dim_k, NORMAL, r);
  fill(&a->v, n, h_v, s->dim_v, NORMAL, r);
  check_protect(data);
}

static const void *place_heads(int n_heads, int32_t dtype, double lo, double hi, struct check_rng *r) {
  void *data = check_alloc_tight((size_t)n_heads * (size_t)inputs_bytes(dtype));
  for (int h = 0; h < n_heads; h++) inputs_put(data, h, dtype, check_uniform(r, lo, hi));
  check_protect(data);
  return data;
}

static void place_gates(struct inputs *x, struct check_rng *r) {
  const struct inputs_spec *s = &x->spec;
  gdn_prefill_args *a = &x->prefill;
  gdn_raw_gates *raw = &a->raw_gates;
  enum inputs_gates gates = s->gates;
  if (gates == GATES_LOG || gates == GATES_RAW_B) a->g = place(s, x->n_heads, 1, GDN_F32, LOG_DECAY, r);
  if (gates == GATES_LINEAR) a->g = place(s, x->n_heads, 1, GDN_F32, DECAY, r);
  if (gates == GATES_LINEAR) a->flags |= GDN_LINEAR_G;
  if (gates == GATES_LOG || gates == GATES_LINEAR || gates == GATES_RAW_A)
    a->beta = place(s, x->n_heads, 1, s->beta, UNIT, r);
  if (gates == GATES_RAW || gates == GATES_RAW_A) {
    raw->a = place(s, x->n_heads, 1, s->raw, WIDE, r);
    raw->a_log = place_heads(x->n_heads, s->raw, -3, 0.5, r);
    if (s->n_seqs % 2 == 1) raw->dt_bias = place_heads(x->n_heads, s->raw, -2, 2, r);
    if (s->n_seqs == 2) raw->softplus_threshold = 1.5f;
    raw->a_log_dtype = raw->dt_bias_dtype = s->raw;
  }
  if (gates == GATES_RAW || gates == GATES_RAW_B) raw->b = place(s, x->n_heads, 1, s->raw, WIDE, r);
}

/* ---- states and index arrays ---- */

static const void *place_ints(int32_t dtype, const int64_t *values, int n) {
  void *data = check_alloc_tight((size_t)n * (dtype == GDN_I64 ? 8 : 4));
  for (int i = 0; i < n; i++) {
    if (dtype == GDN_I64)
      ((int64_t *)data)[i] = values[i];
    else
      ((int32_t *)data)[i] = (int32_t)values[i];
  }
  check_protect(data);
  return data;
}

/* Rows 1, 3, 5, .. are read, or none by every fourth sequence; in place the same are written, else 0, 2, 4, .. */
static void place_states(struct inputs *x, struct check_rng *r) {
  struct inputs_spec *s = &x->spec;
  int64_t row = (int64_t)x->n_heads * s->dim_v * s->dim_k, stride = row + 5, n_rows = 2 * s->n_seqs + 1;
  int64_t read[8], write[8], cu[9];
  s->in_place = s->in_place && s->state_in == s->state_out && s->layout_in == s->layout_out;
  for (int i = 0; i < s->n_seqs; i++) {
    read[i] = i % 4 == 3 ? -1 : 2 * i + 1;
    write[i] = i % 4 == 2 ? -1 : s->in_place && read[i] >= 0 ? read[i] : 2 * i;
  }
  x->pool_in_bytes = (size_t)((n_rows - 1) * stride + row) * (size_t)inputs_bytes(s->state_in);
  x->pool_in = check_alloc_tight(x->pool_in_bytes);
  x->pool_out = x->pool_in;
  x->pool_out_bytes = x->pool_in_bytes;
  for (int i = 0; i < s->n_seqs; i++)
    for (int64_t j = 0; read[i] >= 0 && j < row; j++)
      inputs_put(x->pool_in, read[i] * stride + j, s->state_in, 0.3 * check_normal(r));
  if (!s->in_place) {
    x->pool_out_bytes = x->pool_in_bytes / (size_t)inputs_bytes(s->state_in) * (size_t)inputs_bytes(s->state_out);
    x->pool_out = check_alloc_tight(x->pool_out_bytes);
    check_protect(x->pool_in);
  }
  x->start = check_alloc(x->pool_out_bytes);
  memcpy(x->start, x->pool_out, x->pool_out_bytes);
  x->prefill.initial_state = (gdn_states){x->pool_in, n_rows,      stride,       place_ints(s->index, read, s->n_seqs),
                                          s->index,   s->state_in, s->layout_in, 0};
  x->prefill.final_state = (gdn_states){
      x->pool_out, n_rows, stride, place_ints(s->index, write, s->n_seqs), s->index, s->state_out, s->layout_out, 0};
  for (int i = 0; i <= s->n_seqs; i++) cu[i] = (int64_t)i * s->n_tokens;
  x->prefill.cu_seqlens = place_ints(s->index, cu, s->n_seqs + 1);
  x->prefill.cu_seqlens_dtype = s->index;
}

struct inputs *inputs_make(const struct inputs_spec *spec, struct check_rng *r) {
  struct inputs *x = check_alloc(sizeof *x);
  memset(x, 0, sizeof *x);
  x->spec = *spec;
  struct inputs_spec *s = &x->spec;
  int h_k = 2, h_v = s->heads == HEADS_MORE_V ? 6 : 2, h_q = s->heads == HEADS_MORE_Q ? 6 : 2;
  int64_t n = (int64_t)s->n_seqs * s->n_tokens;
  gdn_prefill_args *a = &x->prefill;
  x->n_heads = oracle_heads(h_q, h_v);
  *a = (gdn_prefill_args){.struct_size = sizeof *a,
                          .flags = s->n_seqs == 4 ? 0 : GDN_L2NORM_QK,
                          .n_seqs = s->n_seqs,
                          .n_tokens = n,
                          .n_heads_k = h_k,
                          .n_heads_v = h_v,
                          .dim_k = s->dim_k,
                          .dim_v = s->dim_v,
                          .n_heads_q = s->heads == HEADS_MORE_Q ? h_q : 0};
  /* Without norm, keys of norm 2 would let states grow by (1 - 4 beta) per token. */
  if (s->n_seqs == 4) a->flags |= s->n_tokens > 1 ? GDN_L2NORM_QK : 0;
  place_qkv(x, h_q, h_k, h_v, r);
  place_gates(x, r);
  place_states(x, r);
  gdn_tensor out = {0};
  x->out_bytes = (size_t)(set_strides(s->strides, n, x->n_heads, s->dim_v, &out) * inputs_bytes(s->out));
  x->out = check_alloc_tight(x->out_bytes);
  a->out = (gdn_tensor_out){x->out, out.token_stride_elems, out.head_stride_elems, s->out, 0};
  x->decode = (gdn_decode_args){.struct_size = sizeof x->decode,
                                .flags = a->flags,
                                .n_tokens = s->n_tokens,
                                .n_seqs = s->n_seqs,
                                .n_heads_k = h_k,
                                .n_heads_v = h_v,
                                .n_heads_q = a->n_heads_q,
                                .dim_k = s->dim_k,
                                .dim_v = s->dim_v,
                                .q = a->q,
                                .k = a->k,
                                .v = a->v,
                                .g = a->g,
                                .beta = a->beta,
                                .raw_gates = a->raw_gates,
                                .out = a->out,
                                .initial_state = a->initial_state,
                                .final_state = a->final_state};
  size_t out_bytes = sizeof(double) * (size_t)(n * x->n_heads * s->dim_v);
  size_t states_bytes = sizeof(double) * (size_t)s->n_seqs * (size_t)x->n_heads * (size_t)(s->dim_v * s->dim_k);
  x->want_out = check_alloc(out_bytes);
  x->want_states = check_alloc(states_bytes);
  x->model_out = check_alloc(out_bytes);
  x->model_states = check_alloc(states_bytes);
  inputs_oracle(x);
  return x;
}

void inputs_oracle(struct inputs *x) {
  oracle_prefill(&x->prefill, x->want_out, x->want_states);
  model_prefill(&model_bf16, &x->prefill, x->model_out, x->model_states);
}

void inputs_reset(struct inputs *x) {
  check_poison(x->out, x->out_bytes);
  memcpy(x->pool_out, x->start, x->pool_out_bytes);
}

/* ---- results ---- */

static char *out_row(const struct inputs *x, int64_t token, int64_t head) {
  const gdn_tensor_out *o = &x->prefill.out;
  return (char *)o->data + (token * o->token_stride_elems + head * o->head_stride_elems) * inputs_bytes(o->dtype);
}

void *inputs_take_out(const struct inputs *x, size_t *bytes) {
  int64_t n = (int64_t)x->spec.n_seqs * x->spec.n_tokens;
  size_t row = (size_t)x->spec.dim_v * (size_t)inputs_bytes(x->spec.out);
  char *dense = check_alloc(*bytes = (size_t)(n * x->n_heads) * row);
  for (int64_t i = 0; i < n * x->n_heads; i++)
    memcpy(dense + (size_t)i * row, out_row(x, i / x->n_heads, i % x->n_heads), row);
  return dense;
}

void *inputs_take_states(const struct inputs *x, const gdn_states *pool, size_t *bytes) {
  const struct inputs_spec *s = &x->spec;
  size_t size = (size_t)inputs_bytes(pool->dtype);
  int64_t block = (int64_t)s->dim_v * s->dim_k, n = s->n_seqs * x->n_heads * block;
  char *dense = check_alloc(*bytes = (size_t)n * size);
  memset(dense, 0, *bytes);
  for (int64_t e = 0; e < n; e++) {
    int64_t row = oracle_row(pool, e / block / x->n_heads), h = e / block % x->n_heads;
    int j = (int)(e % block / s->dim_k), i = (int)(e % s->dim_k);
    if (row < 0) continue;
    int64_t at = oracle_state_at(pool, x->n_heads, s->dim_k, s->dim_v, row, h, j, i);
    memcpy(dense + (size_t)e * size, (const char *)pool->data + (size_t)at * size, size);
  }
  return dense;
}

/* Half a unit in the last place of want; 0 for f32, whose rounding is part of the limit. */
static double half_ulp(double want, int32_t dtype) {
  int exponent;
  frexp(want, &exponent);
  if (dtype == GDN_F32) return 0;
  if (dtype == GDN_F16) return ldexp(1.0, (exponent < -13 ? -13 : exponent) - 12);
  return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 9);
}

double inputs_excess(double number, double want, int32_t dtype) {
  return fmax(fabs(number - want) - half_ulp(want, dtype), 0);
}

/* n numbers of n_rows tokens and heads. model null: limit alone. */
static void compare(const char *what, const void *got, int32_t dtype, const double *want, const double *model,
                    int64_t n, int64_t n_rows, double limit) {
  double error2 = 0, norm2 = 0, model2 = 0;
  uint32_t own;
  for (int64_t i = 0; i < n; i++) {
    double e = inputs_excess(oracle_number(got, i, dtype), want[i], dtype);
    if (!(e <= 1e6))
      check_fail("%s: element %lld: %g instead of %g", what, (long long)i, oracle_number(got, i, dtype), want[i]);
    norm2 += want[i] * want[i];
    error2 += e * e;
    if (model == NULL) continue;
    inputs_put(&own, 0, dtype, model[i]);
    e = inputs_excess(oracle_number(&own, 0, dtype), want[i], dtype);
    model2 += e * e;
  }
  if (model != NULL) limit = model_limit(norm2 > 0 ? sqrt(model2 / norm2) : 0, n_rows, limit);
  check_limit(what, error2 == 0 ? 0 : sqrt(error2 / norm2), limit);
}

/* With the written elements back to what they were, everything must be as before. */
static void check_untouched(struct inputs *x) {
  const struct inputs_spec *s = &x->spec;
  const gdn_states *f = &x->prefill.final_state;
  int64_t n = (int64_t)s->n_seqs * s->n_tokens;
  size_t size = (size_t)inputs_bytes(s->state_out), row_bytes = (size_t)(x->n_heads * s->dim_v * s->dim_k) * size;
  for (int64_t i = 0; i < n * x->n_heads; i++)
    check_poison(out_row(x, i / x->n_heads, i % x->n_heads), (size_t)(s->dim_v * inputs_bytes(s->out)));
  if (!check_is_poison(x->out, x->out_bytes)) check_fail("out: a byte between the rows was written");
  for (int i = 0; i < s->n_seqs; i++) {
    int64_t row = oracle_row(f, i);
    size_t at = (size_t)(row * f->row_stride_elems) * size;
    if (row >= 0) memcpy((char *)x->pool_out + at, (char *)x->start + at, row_bytes);
  }
  check_same_bits("states that nobody writes", x->pool_out, x->start, x->pool_out_bytes, 2);
}

void inputs_check(struct inputs *x, double limit, int bf16) {
  const struct inputs_spec *s = &x->spec;
  size_t bytes;
  int64_t row = (int64_t)x->n_heads * s->dim_v * s->dim_k, n = (int64_t)s->n_seqs * s->n_tokens;
  const void *out = inputs_take_out(x, &bytes);
  compare("out", out, s->out, x->want_out, bf16 ? x->model_out : NULL, n * x->n_heads * s->dim_v, n * x->n_heads,
          limit);
  const char *states = inputs_take_states(x, &x->prefill.final_state, &bytes);
  for (int i = 0; i < s->n_seqs; i++)
    if (oracle_row(&x->prefill.final_state, i) >= 0)
      compare("final state", states + i * row * inputs_bytes(s->state_out), s->state_out, x->want_states + i * row,
              bf16 ? x->model_states + i * row : NULL, row, (int64_t)s->n_tokens * x->n_heads, limit);
  check_untouched(x);
}
