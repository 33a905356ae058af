/* SPDX-License-Identifier: Apache-2.0
 * Every argument check. Reads what the caller passed, writes only the batch and the row set. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine.h"

#define MAX_HEADS 65536
#define MAX_COUNT INT32_MAX

/* ---- structs and plain fields ---- */

gdn_status gdn_check_struct(const void *src, const char *what, size_t min_bytes, void *dst, size_t dst_bytes) {
  if (!src) return gdn_fail(GDN_E_NULL, "%s is null", what);
  size_t bytes;
  memcpy(&bytes, src, sizeof bytes);
  if (bytes < min_bytes || bytes > 1u << 16)
    return gdn_fail(GDN_E_STRUCT_SIZE, "%s.struct_size = %zu: expected %zu (sizeof the struct) .. %u", what, bytes,
                    min_bytes, 1u << 16);
  for (size_t i = dst_bytes; i < bytes; i++)
    if (((const unsigned char *)src)[i])
      return gdn_fail(GDN_E_STRUCT_SIZE,
                      "%s.struct_size = %zu: byte %zu is set, but this version of the library knows %zu bytes", what,
                      bytes, i, dst_bytes);
  memset(dst, 0, dst_bytes);
  memcpy(dst, src, bytes < dst_bytes ? bytes : dst_bytes);
  return GDN_OK;
}

/* n_heads_q is 0 or more than n_heads_k when every q head has its own state. */
static gdn_status check_heads(const struct gdn_batch *b, int n_heads_q) {
  if (b->n_heads_k < 1 || b->n_heads_k > MAX_HEADS)
    return gdn_fail(GDN_E_HEADS, "n_heads_k = %d: expected 1 .. %d", b->n_heads_k, MAX_HEADS);
  if (b->n_heads_v < 1 || b->n_heads_v > MAX_HEADS)
    return gdn_fail(GDN_E_HEADS, "n_heads_v = %d: expected 1 .. %d", b->n_heads_v, MAX_HEADS);
  if (n_heads_q < 0 || n_heads_q > MAX_HEADS)
    return gdn_fail(GDN_E_HEADS, "n_heads_q = %d: expected 0 .. %d", n_heads_q, MAX_HEADS);
  if (b->n_heads_v % b->n_heads_k)
    return gdn_fail(GDN_E_HEADS, "n_heads_v = %d is not a multiple of n_heads_k = %d", b->n_heads_v, b->n_heads_k);
  if (!n_heads_q || n_heads_q == b->n_heads_k) return GDN_OK;
  if (n_heads_q % b->n_heads_k)
    return gdn_fail(GDN_E_HEADS, "n_heads_q = %d is not a multiple of n_heads_k = %d", n_heads_q, b->n_heads_k);
  if (b->n_heads_k != b->n_heads_v)
    return gdn_fail(GDN_E_HEADS, "n_heads_q = %d is above n_heads_k = %d: then n_heads_v = %d must equal n_heads_k",
                    n_heads_q, b->n_heads_k, b->n_heads_v);
  return GDN_OK;
}

static gdn_status check_shape(const struct gdn_batch *b, int n_heads_q, uint32_t flags) {
  const uint32_t known = GDN_L2NORM_QK | GDN_LINEAR_G;
  if (flags & ~known) return gdn_fail(GDN_E_FLAGS, "flags = 0x%x: unknown bits 0x%x", flags, flags & ~known);
  if (b->form < GDN_FORM_DEFAULT || b->form > GDN_FORM_CHUNK)
    return gdn_fail(GDN_E_OPTION, "form = %d: not one of GDN_FORM_*", b->form);
  if (b->schedule < GDN_SCHEDULE_DEFAULT || b->schedule > GDN_SCHEDULE_WINDOWS)
    return gdn_fail(GDN_E_OPTION, "schedule = %d: not one of GDN_SCHEDULE_*", b->schedule);
  if (b->n_seqs < 0 || b->n_seqs > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "n_seqs = %" PRId64 ": expected 0 .. %d", b->n_seqs, MAX_COUNT);
  if (b->n_tokens < 0 || b->n_tokens > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "n_tokens = %" PRId64 ": expected 0 .. %d", b->n_tokens, MAX_COUNT);
  gdn_status status = check_heads(b, n_heads_q);
  if (status) return status;
  if (b->dim_k < 32 || b->dim_k > GDN_DIM_MAX || b->dim_k % 32)
    return gdn_fail(GDN_E_DIM, "dim_k = %d: expected a multiple of 32 in 32 .. %d", b->dim_k, GDN_DIM_MAX);
  if (b->dim_v < 32 || b->dim_v > GDN_DIM_MAX || b->dim_v % 32)
    return gdn_fail(GDN_E_DIM, "dim_v = %d: expected a multiple of 32 in 32 .. %d", b->dim_v, GDN_DIM_MAX);
  if (!isfinite(b->scale)) return gdn_fail(GDN_E_VALUE, "scale = %g: expected a finite number", (double)b->scale);
  if (!isfinite(b->eps) || b->eps < 0)
    return gdn_fail(GDN_E_VALUE, "eps = %g: expected a finite number, 0 or more", (double)b->eps);
  return GDN_OK;
}

/* A q head is a lane of its own, and the heads of k and v are shared. Returns how many q heads share one. */
static int spread_q_heads(struct gdn_batch *b, int n_heads_q) {
  const int share = n_heads_q ? n_heads_q / b->n_heads_k : 1;
  if (share > 1) b->n_heads_k = b->n_heads_v = n_heads_q;
  return share;
}

static gdn_status check_reserved(const char *name, int32_t value) {
  return value ? gdn_fail(GDN_E_OPTION, "%s = %d: expected 0", name, value) : GDN_OK;
}

static gdn_status check_ints(const char *name, const void *data, int32_t dtype, struct gdn_ints *ints) {
  if (dtype != GDN_DTYPE_DEFAULT && dtype != GDN_I32 && dtype != GDN_I64)
    return gdn_fail(GDN_E_DTYPE, "%s_dtype = %d: expected GDN_I32 or GDN_I64", name, dtype);
  *ints = (struct gdn_ints){data, dtype == GDN_I64};
  return GDN_OK;
}

static gdn_status check_cu_seqlens(const void *cu_seqlens, int32_t dtype, struct gdn_batch *b) {
  gdn_status status = check_ints("cu_seqlens", cu_seqlens, dtype, &b->cu_seqlens);
  if (status) return status;
  const struct gdn_ints *cu = &b->cu_seqlens;
  if (!cu->data) return gdn_fail(GDN_E_NULL, "cu_seqlens is null");
  if (gdn_int(cu, 0) != 0) return gdn_fail(GDN_E_LENGTHS, "cu_seqlens[0] = %" PRId64 ": expected 0", gdn_int(cu, 0));
  for (int64_t i = 0; i < b->n_seqs; i++)
    if (gdn_int(cu, i + 1) < gdn_int(cu, i))
      return gdn_fail(GDN_E_LENGTHS,
                      "cu_seqlens[%" PRId64 "] = %" PRId64 " is below cu_seqlens[%" PRId64 "] = %" PRId64, i + 1,
                      gdn_int(cu, i + 1), i, gdn_int(cu, i));
  if (gdn_int(cu, b->n_seqs) != b->n_tokens)
    return gdn_fail(GDN_E_LENGTHS, "cu_seqlens[%" PRId64 "] = %" PRId64 ": expected n_tokens = %" PRId64, b->n_seqs,
                    gdn_int(cu, b->n_seqs), b->n_tokens);
  return GDN_OK;
}

/* ---- arrays ---- */

/* Memory an array covers: n_outer blocks outer bytes apart, each n_inner runs of run bytes, inner bytes apart. */
struct region {
  const char *name;
  uintptr_t start;
  int64_t n_outer, outer, n_inner, inner, run;
};

static int64_t region_block(const struct region *r) {
  return (r->n_inner - 1) * r->inner + r->run;
}

static int64_t region_span(const struct region *r) {
  return (r->n_outer - 1) * r->outer + region_block(r);
}

/* Whether spans [0, span_a) and [offset, offset + span_b), both repeated every stride bytes, meet. */
static int periodic_overlap(int64_t offset, int64_t span_a, int64_t span_b, int64_t stride) {
  int64_t d = offset % stride;
  d = d < 0 ? d + stride : d;
  return d < span_a || d + span_b > stride;
}

/* Never false for regions that share a byte; true for some that interleave in ways engines do not use. */
static int regions_overlap(const struct region *a, const struct region *b) {
  if (a->n_outer < 1 || b->n_outer < 1) return 0;
  if (a->start + (uintptr_t)region_span(a) <= b->start || b->start + (uintptr_t)region_span(b) <= a->start) return 0;
  int64_t offset = (int64_t)(b->start - a->start);
  if (a->outer == b->outer && region_block(a) <= a->outer && region_block(b) <= b->outer &&
      !periodic_overlap(offset, region_block(a), region_block(b), a->outer))
    return 0;
  if (a->inner == b->inner && a->outer % a->inner == 0 && b->outer % a->inner == 0 && a->run <= a->inner &&
      b->run <= b->inner && !periodic_overlap(offset, a->run, b->run, a->inner))
    return 0;
  return 1;
}

struct array_spec {
  const char *name;
  int64_t n_tokens;
  int n_heads, share, dim;
  unsigned dtypes; /* bit d: dtype d is taken */
  int32_t dtype_default;
  int optional, output;
};

#define FLOATS (1u << GDN_F32 | 1u << GDN_BF16 | 1u << GDN_F16)

static const char *dtype_list(unsigned dtypes) {
  return dtypes == FLOATS ? "GDN_F32, GDN_BF16 or GDN_F16" : "GDN_F32";
}

/* Strides in bytes must keep the whole array below 2^62. */
static int strides_fit(const struct array_spec *s, int64_t token, int64_t head, int bytes) {
  int64_t a, c, sum;
  if (__builtin_mul_overflow(token, s->n_tokens, &a) || __builtin_mul_overflow(head, (int64_t)s->n_heads, &c) ||
      __builtin_add_overflow(a, c, &sum))
    return 0;
  return sum < (INT64_MAX / 4 - s->dim) / bytes;
}

static gdn_status check_array(const struct array_spec *s, const gdn_tensor *t, struct gdn_array *a) {
  memset(a, 0, sizeof *a);
  a->share = s->share;
  if (!t->data) {
    if (s->optional || !s->n_tokens) return GDN_OK;
    return gdn_fail(GDN_E_NULL, "%s.data is null", s->name);
  }
  char reserved[48];
  snprintf(reserved, sizeof reserved, "%s.reserved", s->name);
  if (check_reserved(reserved, t->reserved)) return GDN_E_OPTION;
  a->dtype = t->dtype == GDN_DTYPE_DEFAULT ? s->dtype_default : t->dtype;
  if (a->dtype < 0 || a->dtype > 31 || !(s->dtypes >> a->dtype & 1))
    return gdn_fail(GDN_E_DTYPE, "%s.dtype = %d: expected %s", s->name, t->dtype, dtype_list(s->dtypes));
  if (t->token_stride_elems < 0)
    return gdn_fail(GDN_E_STRIDE, "%s.token_stride_elems = %" PRId64 ": negative", s->name, t->token_stride_elems);
  if (t->head_stride_elems < 0)
    return gdn_fail(GDN_E_STRIDE, "%s.head_stride_elems = %" PRId64 ": negative", s->name, t->head_stride_elems);
  a->data = (char *)(uintptr_t)t->data;
  a->head_stride_elems = t->head_stride_elems ? t->head_stride_elems : s->dim;
  a->token_stride_elems = t->token_stride_elems ? t->token_stride_elems : (int64_t)s->n_heads * s->dim;
  if (!strides_fit(s, a->token_stride_elems, a->head_stride_elems, gdn_dtype_bytes(a->dtype)))
    return gdn_fail(GDN_E_STRIDE, "%s strides %" PRId64 " and %" PRId64 ": the array exceeds the address space",
                    s->name, a->token_stride_elems, a->head_stride_elems);
  int64_t token_block = (s->n_heads - 1) * a->head_stride_elems + s->dim;
  int64_t head_block = (s->n_tokens - 1) * a->token_stride_elems + s->dim;
  int apart = (a->head_stride_elems >= s->dim && (s->n_tokens <= 1 || a->token_stride_elems >= token_block)) ||
              (a->token_stride_elems >= s->dim && (s->n_heads == 1 || a->head_stride_elems >= head_block));
  if (s->output && !apart)
    return gdn_fail(GDN_E_STRIDE,
                    "%s.token_stride_elems = %" PRId64 ", head_stride_elems = %" PRId64 ": elements overlap", s->name,
                    a->token_stride_elems, a->head_stride_elems);
  return GDN_OK;
}

/* n_heads: of the batch. */
static struct region array_region(const char *name, const struct gdn_array *a, int64_t n_tokens, int n_heads, int dim) {
  int bytes = gdn_dtype_bytes(a->dtype);
  struct region r = {name,
                     (uintptr_t)a->data,
                     n_tokens,
                     a->token_stride_elems * bytes,
                     n_heads / a->share,
                     a->head_stride_elems * bytes,
                     (int64_t)dim * bytes};
  return r;
}

/* What a call passes as tokens. */
struct tokens {
  const gdn_tensor *q, *k, *v, *g, *beta;
  const gdn_tensor_out *out;
  const gdn_raw_gates *raw;
  uint32_t flags;
  int share;      /* see spread_q_heads */
  int only_state; /* out and q may be absent */
};

/* A float array of one element per head. */
static gdn_status check_head_array(const char *name, const void *data, int32_t dtype, struct gdn_rows *rows) {
  const int32_t type = dtype == GDN_DTYPE_DEFAULT ? GDN_F32 : dtype;
  if (type < 0 || type > 31 || !(FLOATS >> type & 1))
    return gdn_fail(GDN_E_DTYPE, "%s_dtype = %d: expected %s", name, dtype, dtype_list(FLOATS));
  *rows = (struct gdn_rows){data, 0, type};
  return GDN_OK;
}

/* Everything of raw gates but the arrays a and b. */
static gdn_status check_raw(const gdn_raw_gates *raw, int64_t n_tokens, struct gdn_batch *b) {
  if (check_reserved("raw_gates.reserved", raw->reserved)) return GDN_E_OPTION;
  const float threshold = raw->softplus_threshold;
  if (!(threshold >= 0))
    return gdn_fail(GDN_E_VALUE, "raw_gates.softplus_threshold = %g: expected 0 or more", (double)threshold);
  b->softplus_threshold = threshold > 0 ? threshold : 20;
  if (raw->a.data && !raw->a_log) return gdn_fail(GDN_E_NULL, "raw_gates.a_log is null, but raw_gates.a is given");
  if (n_tokens && !raw->a.data && (raw->a_log || raw->dt_bias))
    return gdn_fail(GDN_E_NULL, "raw_gates.a.data is null, but raw_gates.%s is given",
                    raw->a_log ? "a_log" : "dt_bias");
  gdn_status status = check_head_array("raw_gates.a_log", raw->a_log, raw->a_log_dtype, &b->a_log);
  return status ? status : check_head_array("raw_gates.dt_bias", raw->dt_bias, raw->dt_bias_dtype, &b->dt_bias);
}

/* Which of g, beta and raw gates are used. */
static gdn_status check_gates(const struct tokens *t, struct gdn_batch *b) {
  if (t->raw->a.data && t->g->data) return gdn_fail(GDN_E_OPTION, "g and raw_gates.a are both given: expected one");
  if (t->raw->b.data && t->beta->data)
    return gdn_fail(GDN_E_OPTION, "beta and raw_gates.b are both given: expected one");
  if (t->raw->a.data && t->flags & GDN_LINEAR_G)
    return gdn_fail(GDN_E_OPTION, "flags = 0x%x: GDN_LINEAR_G is for g, but raw_gates.a is given", t->flags);
  b->g_mode = t->raw->a.data ? GDN_GATE_RAW : t->flags & GDN_LINEAR_G ? GDN_GATE_ALPHA : GDN_GATE_LOG;
  b->beta_sigmoid = t->raw->b.data != NULL;
  return check_raw(t->raw, b->n_tokens, b);
}

static gdn_status check_arrays(const struct tokens *t, struct gdn_batch *b) {
  const unsigned f32 = 1u << GDN_F32;
  const gdn_tensor out = {t->out->data, t->out->token_stride_elems, t->out->head_stride_elems, t->out->dtype,
                          t->out->reserved};
  const int h_k = b->n_heads_k, h_v = b->n_heads_v, share = t->share, no_q = t->only_state && !out.data;
  const int raw_a = t->raw->a.data != NULL, raw_b = t->raw->b.data != NULL;
  const struct {
    struct array_spec spec;
    const gdn_tensor *tensor;
    struct gdn_array *array;
  } rows[] = {
      {{"q", b->n_tokens, h_k, 1, b->dim_k, FLOATS, GDN_BF16, no_q, 0}, t->q, &b->q},
      {{"k", b->n_tokens, h_k / share, share, b->dim_k, FLOATS, GDN_BF16, 0, 0}, t->k, &b->k},
      {{"v", b->n_tokens, h_v / share, share, b->dim_v, FLOATS, GDN_BF16, 0, 0}, t->v, &b->v},
      {{raw_a ? "raw_gates.a" : "g", b->n_tokens, h_v, 1, 1, raw_a ? FLOATS : f32, GDN_F32, 1, 0},
       raw_a ? &t->raw->a : t->g,
       &b->g},
      {{raw_b ? "raw_gates.b" : "beta", b->n_tokens, h_v, 1, 1, FLOATS, GDN_F32, 1, 0},
       raw_b ? &t->raw->b : t->beta,
       &b->beta},
      {{"out", b->n_tokens, h_v, 1, b->dim_v, FLOATS, GDN_BF16, t->only_state, 1}, &out, &b->out},
  };
  gdn_status status = check_gates(t, b);
  for (size_t i = 0; !status && i < sizeof rows / sizeof *rows; i++)
    status = check_array(&rows[i].spec, rows[i].tensor, rows[i].array);
  return status;
}

/* ---- state rows ---- */

static const char *pool_name(const struct gdn_batch *b, const char *own) {
  return b->pool_name ? b->pool_name : own;
}

/* What error texts call the rows that are written after some tokens. */
static const char *points_name(const struct gdn_batch *b) {
  return b->cu_seqlens.data ? "checkpoints" : "token_states";
}

static int64_t first_point(const struct gdn_batch *b, int64_t seq) {
  return b->checkpoint_cu_starts.data ? gdn_int(&b->checkpoint_cu_starts, seq) : seq * b->tokens_per_seq;
}

/* Rows of all sequences; in decode a sequence with fewer tokens leaves some of its own unused. */
static int64_t n_points(const struct gdn_batch *b) {
  return b->checkpoint_every ? first_point(b, b->n_seqs) : 0;
}

/* A pool of which n states are used. */
static gdn_status check_pool(const char *name, const gdn_states *s, const struct gdn_batch *b, int64_t n,
                             struct gdn_pool *p) {
  memset(p, 0, sizeof *p);
  if (!s->data) {
    if (s->rows) return gdn_fail(GDN_E_NULL, "%s.data is null, but %s.rows is given", name, name);
    return GDN_OK;
  }
  p->dtype = s->dtype == GDN_DTYPE_DEFAULT ? GDN_F32 : s->dtype;
  if (p->dtype < 0 || p->dtype > 31 || !(FLOATS >> p->dtype & 1))
    return gdn_fail(GDN_E_DTYPE, "%s.dtype = %d: expected %s", name, s->dtype, dtype_list(FLOATS));
  if (s->layout < GDN_LAYOUT_DEFAULT || s->layout > GDN_LAYOUT_KV)
    return gdn_fail(GDN_E_OPTION, "%s.layout = %d: not one of GDN_LAYOUT_*", name, s->layout);
  p->k_major = s->layout == GDN_LAYOUT_KV;
  char rows_name[48];
  snprintf(rows_name, sizeof rows_name, "%s.rows", name);
  gdn_status status = check_ints(rows_name, s->rows, s->rows ? s->rows_dtype : GDN_DTYPE_DEFAULT, &p->rows);
  if (status) return status;
  int64_t row_elems = (int64_t)b->n_heads_v * b->dim_v * b->dim_k, total;
  if (s->n_rows < 0) return gdn_fail(GDN_E_SIZE, "%s.n_rows = %" PRId64 ": negative", name, s->n_rows);
  if (s->row_stride_elems && s->row_stride_elems < row_elems)
    return gdn_fail(GDN_E_STRIDE, "%s.row_stride_elems = %" PRId64 ": a row has %" PRId64 " elements", name,
                    s->row_stride_elems, row_elems);
  p->data = s->data;
  p->n_rows = s->n_rows;
  p->row_stride_elems = s->row_stride_elems ? s->row_stride_elems : row_elems;
  if (__builtin_mul_overflow(p->row_stride_elems, p->n_rows, &total) || total > INT64_MAX / 8)
    return gdn_fail(GDN_E_SIZE, "%s.n_rows = %" PRId64 ": the pool exceeds the address space", name, p->n_rows);
  if (!p->rows.data && p->n_rows < n)
    return gdn_fail(GDN_E_SIZE, "%s.n_rows = %" PRId64 " without rows: expected at least %" PRId64, name, p->n_rows, n);
  for (int64_t i = 0; p->rows.data && i < n; i++)
    if (gdn_int(&p->rows, i) < -1 || gdn_int(&p->rows, i) >= p->n_rows)
      return gdn_fail(GDN_E_ROW, "%s[%" PRId64 "] = %" PRId64 ": expected -1 .. %" PRId64, rows_name, i,
                      gdn_int(&p->rows, i), p->n_rows - 1);
  return GDN_OK;
}

static struct region pool_region(const char *name, const struct gdn_pool *p, const struct gdn_batch *b) {
  int64_t elem_bytes = gdn_dtype_bytes(p->dtype), bytes = (int64_t)b->n_heads_v * b->dim_v * b->dim_k * elem_bytes;
  struct region r = {name, (uintptr_t)p->data, p->n_rows, p->row_stride_elems * elem_bytes, 1, bytes, bytes};
  return r;
}

static gdn_status row_set_reset(struct gdn_row_set *set, int64_t n) {
  int64_t need = 16;
  while (need < 2 * n) need *= 2;
  if (set->allocated < need) {
    int64_t *keys = gdn_mem_alloc((size_t)need * sizeof *keys), *seqs = gdn_mem_alloc((size_t)need * sizeof *seqs);
    if (!keys || !seqs) {
      gdn_mem_free(keys);
      gdn_mem_free(seqs);
      return gdn_fail(GDN_E_NOMEM, "no memory to check the rows of n_seqs = %" PRId64, n);
    }
    gdn_mem_free(set->keys);
    gdn_mem_free(set->seqs);
    *set = (struct gdn_row_set){keys, seqs, need, need};
  }
  set->capacity = need;
  memset(set->keys, 0, (size_t)need * sizeof *set->keys);
  return GDN_OK;
}

/* Slot of a key: the one that holds it, or the free one where it belongs. */
static int64_t row_set_slot(const struct gdn_row_set *set, int64_t key) {
  uint64_t h = (uint64_t)key * UINT64_C(0x9E3779B97F4A7C15);
  int64_t i = (int64_t)(h >> 32) & (set->capacity - 1);
  while (set->keys[i] && set->keys[i] != key + 1) i = (i + 1) & (set->capacity - 1);
  return i;
}

static int same_pool(const struct gdn_pool *a, const struct gdn_pool *b) {
  return a->data && a->data == b->data && a->row_stride_elems == b->row_stride_elems && a->dtype == b->dtype &&
         a->k_major == b->k_major;
}

/* Enters row of pool number which as written by seq. */
static gdn_status enter_writer(struct gdn_row_set *set, const char *name, int which, int64_t row, int64_t seq) {
  int64_t slot = row_set_slot(set, 2 * row + which);
  if (set->keys[slot])
    return gdn_fail(GDN_E_ROW_CONFLICT, "%s row %" PRId64 " is written by sequences %" PRId64 " and %" PRId64, name,
                    row, set->seqs[slot], seq);
  set->keys[slot] = 2 * row + which + 1;
  set->seqs[slot] = seq;
  return GDN_OK;
}

static gdn_status enter_writers(const struct gdn_batch *b, struct gdn_row_set *set, int64_t seq) {
  const struct gdn_pool *final = &b->final, *points = &b->checkpoints;
  int64_t final_row = gdn_pool_row(final, seq);
  gdn_status status = final_row < 0 ? GDN_OK : enter_writer(set, pool_name(b, "final_state"), 0, final_row, seq);
  if (status || !b->checkpoint_every) return status;
  int together = same_pool(points, final);
  int64_t at = first_point(b, seq);
  int64_t end = b->checkpoint_cu_starts.data ? first_point(b, seq + 1) : at + gdn_batch_len(b, seq);
  int at_stop = (gdn_batch_prefix(b, seq) + gdn_batch_len(b, seq)) % b->checkpoint_every == 0;
  for (; !status && at < end; at++) {
    int64_t row = gdn_pool_row(points, at);
    /* The last checkpoint may be the final state itself. */
    if (row < 0 || (together && row == final_row && at == end - 1 && at_stop)) continue;
    status = enter_writer(set, pool_name(b, points_name(b)), !together, row, seq);
  }
  return status;
}

/* No row is written twice; none is read by one sequence and written by another. Sequences without tokens do neither. */
static gdn_status check_row_conflicts(const struct gdn_batch *b, struct gdn_row_set *set) {
  const struct gdn_pool *in = &b->initial;
  int which = same_pool(in, &b->final) ? 0 : same_pool(in, &b->checkpoints) ? 1 : -1;
  int packed = !b->final.rows.data && !in->rows.data && !b->checkpoint_every;
  if (packed || (!b->final.data && !b->checkpoints.data)) return GDN_OK;
  gdn_status status = row_set_reset(set, b->n_seqs + n_points(b));
  for (int64_t i = 0; !status && i < b->n_seqs; i++)
    if (gdn_batch_len(b, i)) status = enter_writers(b, set, i);
  for (int64_t i = 0; !status && which >= 0 && i < b->n_seqs; i++) {
    int64_t row = gdn_pool_row(in, i);
    if (row < 0 || !gdn_batch_len(b, i)) continue;
    int64_t slot = row_set_slot(set, 2 * row + which);
    if (set->keys[slot] && set->seqs[slot] != i)
      status = gdn_fail(GDN_E_ROW_CONFLICT,
                        "row %" PRId64 " is read by sequence %" PRId64
                        " (initial_state) and written by sequence %" PRId64 " (%s)",
                        row, i, set->seqs[slot], which ? points_name(b) : "final_state or checkpoints");
  }
  return status;
}

/* ---- overlaps ---- */

static struct region ints_region(const char *name, const struct gdn_ints *a, int64_t n) {
  struct region r = {name, (uintptr_t)a->data, n > 0, 1, 1, 1, n * (a->wide ? 8 : 4)};
  return r;
}

static struct region head_region(const char *name, const struct gdn_rows *a, const struct gdn_batch *b) {
  struct region r = {name, (uintptr_t)a->data, 1, 1, 1, 1, (int64_t)b->n_heads_v * gdn_dtype_bytes(a->dtype)};
  return r;
}

/* Outputs may not overlap anything, but state pools may be one and the same. */
static gdn_status check_overlaps(const struct gdn_batch *b) {
  enum { OUT, FINAL, CHECKPOINTS, INITIAL, N_POOLS_END };
  const struct gdn_pool *const pools[N_POOLS_END] = {NULL, &b->final, &b->checkpoints, &b->initial};
  const int in_decode = !b->cu_seqlens.data;
  struct region all[] = {
      array_region("out", &b->out, b->n_tokens, b->n_heads_v, b->dim_v),
      pool_region(pool_name(b, "final_state"), &b->final, b),
      pool_region(pool_name(b, points_name(b)), &b->checkpoints, b),
      pool_region(pool_name(b, "initial_state"), &b->initial, b),
      array_region("q", &b->q, b->n_tokens, b->n_heads_k, b->dim_k),
      array_region("k", &b->k, b->n_tokens, b->n_heads_k, b->dim_k),
      array_region("v", &b->v, b->n_tokens, b->n_heads_v, b->dim_v),
      array_region(b->g_mode == GDN_GATE_RAW ? "raw_gates.a" : "g", &b->g, b->n_tokens, b->n_heads_v, 1),
      array_region(b->beta_sigmoid ? "raw_gates.b" : "beta", &b->beta, b->n_tokens, b->n_heads_v, 1),
      head_region("raw_gates.a_log", &b->a_log, b),
      head_region("raw_gates.dt_bias", &b->dt_bias, b),
      ints_region("token_counts", &b->token_counts, b->n_seqs),
      ints_region("cu_seqlens", &b->cu_seqlens, b->n_seqs + 1),
      ints_region("prefix_lens", &b->prefix_lens, b->n_seqs),
      ints_region("initial_state.rows", &b->initial.rows, b->n_seqs),
      ints_region("final_state.rows", &b->final.rows, b->n_seqs),
      ints_region("checkpoint_cu_starts", &b->checkpoint_cu_starts, b->checkpoint_every ? b->n_seqs + 1 : 0),
      ints_region(in_decode ? "token_states.rows" : "checkpoints.rows", &b->checkpoints.rows, n_points(b)),
  };
  const int n = (int)(sizeof all / sizeof *all);
  for (int i = OUT; i < INITIAL; i++)
    for (int j = i + 1; j < n; j++) {
      int one_pool = i > OUT && j < N_POOLS_END && same_pool(pools[i], pools[j]);
      if (all[i].start && all[j].start && !one_pool && regions_overlap(&all[i], &all[j]))
        return gdn_fail(GDN_E_ALIAS, "%s at %p overlaps %s at %p", all[i].name, (void *)all[i].start, all[j].name,
                        (void *)all[j].start);
    }
  return GDN_OK;
}

/* ---- calls ---- */

static void set_defaults(struct gdn_batch *b) {
  if (!b->scale) b->scale = 1.0f / sqrtf((float)b->dim_k);
  if (!b->eps) b->eps = 1e-6f;
}

static gdn_status check_states(const gdn_states *initial, const gdn_states *final, struct gdn_row_set *set,
                               struct gdn_batch *b) {
  gdn_status status = check_pool(pool_name(b, "initial_state"), initial, b, b->n_seqs, &b->initial);
  if (!status) status = check_pool(pool_name(b, "final_state"), final, b, b->n_seqs, &b->final);
  if (!status) status = check_overlaps(b);
  if (!status) status = check_row_conflicts(b, set);
  return status;
}

static gdn_status check_prefix_lens(const gdn_prefill_args *a, struct gdn_batch *b) {
  gdn_status status = check_ints("prefix_lens", a->prefix_lens, a->prefix_lens_dtype, &b->prefix_lens);
  for (int64_t i = 0; !status && b->prefix_lens.data && i < b->n_seqs; i++)
    if (gdn_int(&b->prefix_lens, i) < 0 || gdn_int(&b->prefix_lens, i) > INT64_MAX / 4)
      status = gdn_fail(GDN_E_LENGTHS, "prefix_lens[%" PRId64 "] = %" PRId64 ": expected 0 .. %" PRId64, i,
                        gdn_int(&b->prefix_lens, i), INT64_MAX / 4);
  return status;
}

/* Offsets must leave each sequence as many rows as it has checkpoints. */
static gdn_status check_checkpoints(const gdn_prefill_args *a, struct gdn_batch *b) {
  const int64_t every = b->checkpoint_every = a->checkpoint_every_n_tokens;
  struct gdn_ints *starts = &b->checkpoint_cu_starts;
  if (every < 0) return gdn_fail(GDN_E_SIZE, "checkpoint_every_n_tokens = %" PRId64 ": negative", every);
  if (!every && (a->checkpoints.data || a->checkpoint_cu_starts))
    return gdn_fail(GDN_E_SIZE, "checkpoint_every_n_tokens = 0, but %s is given",
                    a->checkpoints.data ? "checkpoints.data" : "checkpoint_cu_starts");
  if (!every) return GDN_OK;
  if (!a->checkpoint_cu_starts)
    return gdn_fail(GDN_E_NULL, "checkpoint_cu_starts is null, but checkpoint_every_n_tokens = %" PRId64, every);
  gdn_status status =
      check_ints("checkpoint_cu_starts", a->checkpoint_cu_starts, a->checkpoint_cu_starts_dtype, starts);
  if (status) return status;
  if (gdn_int(starts, 0))
    return gdn_fail(GDN_E_LENGTHS, "checkpoint_cu_starts[0] = %" PRId64 ": expected 0", gdn_int(starts, 0));
  for (int64_t i = 0; i < b->n_seqs; i++) {
    int64_t prefix = gdn_batch_prefix(b, i), n = (prefix + gdn_batch_len(b, i)) / every - prefix / every;
    if (gdn_int(starts, i + 1) != gdn_int(starts, i) + n)
      return gdn_fail(GDN_E_LENGTHS,
                      "checkpoint_cu_starts[%" PRId64 "] = %" PRId64 ": expected %" PRId64 ", sequence %" PRId64
                      " has %" PRId64 " checkpoints",
                      i + 1, gdn_int(starts, i + 1), gdn_int(starts, i) + n, i, n);
  }
  int64_t n = n_points(b);
  if (n && !a->checkpoints.data)
    return gdn_fail(GDN_E_NULL, "checkpoints.data is null, but the batch has %" PRId64 " checkpoints", n);
  return check_pool(pool_name(b, "checkpoints"), &a->checkpoints, b, n, &b->checkpoints);
}

gdn_status gdn_check_lengths(const gdn_prefill_args *a, struct gdn_batch *b) {
  *b = (struct gdn_batch){.n_seqs = a->n_seqs,
                          .n_tokens = a->n_tokens,
                          .n_heads_k = a->n_heads_k,
                          .n_heads_v = a->n_heads_v,
                          .dim_k = a->dim_k,
                          .dim_v = a->dim_v,
                          .form = a->form,
                          .schedule = a->schedule,
                          .l2norm = (a->flags & GDN_L2NORM_QK) != 0,
                          .scale = a->scale,
                          .eps = a->eps};
  gdn_status status = check_shape(b, a->n_heads_q, a->flags);
  return status ? status : check_cu_seqlens(a->cu_seqlens, a->cu_seqlens_dtype, b);
}

gdn_status gdn_check_prefill(const gdn_prefill_args *args, const char *pool, struct gdn_row_set *set,
                             struct gdn_batch *b) {
  gdn_prefill_args a;
  gdn_status status = gdn_check_struct(args, "args", sizeof a, &a, sizeof a);
  if (!status) status = check_reserved("reserved_2", a.reserved_2);
  if (!status) status = gdn_check_lengths(&a, b);
  if (status) return status;
  b->pool_name = pool;
  const struct tokens tokens = {
      &a.q, &a.k, &a.v, &a.g, &a.beta, &a.out, &a.raw_gates, a.flags, spread_q_heads(b, a.n_heads_q), 0};
  status = check_arrays(&tokens, b);
  if (!status) status = check_prefix_lens(&a, b);
  if (!status) status = check_checkpoints(&a, b);
  if (status) return status;
  set_defaults(b);
  return check_states(&a.initial_state, &a.final_state, set, b);
}

/* The fields that say how many tokens there are. */
static gdn_status check_token_counts(const gdn_decode_args *a, struct gdn_batch *b) {
  if (a->n_tokens < 0 || a->n_tokens > GDN_DECODE_TOKENS_MAX)
    return gdn_fail(GDN_E_SIZE, "n_tokens = %d: expected 0 .. %d", a->n_tokens, GDN_DECODE_TOKENS_MAX);
  gdn_status status = check_shape(b, a->n_heads_q, a->flags);
  if (!status && b->n_tokens > MAX_COUNT)
    status = gdn_fail(GDN_E_SIZE, "n_seqs = %" PRId64 " of n_tokens = %d: expected at most %d tokens", b->n_seqs,
                      a->n_tokens, MAX_COUNT);
  if (!status) status = check_ints("token_counts", a->token_counts, a->token_counts_dtype, &b->token_counts);
  for (int64_t i = 0; !status && b->token_counts.data && i < b->n_seqs; i++)
    if (gdn_int(&b->token_counts, i) < 0 || gdn_int(&b->token_counts, i) > b->tokens_per_seq)
      status = gdn_fail(GDN_E_LENGTHS, "token_counts[%" PRId64 "] = %" PRId64 ": expected 0 .. n_tokens = %" PRId64, i,
                        gdn_int(&b->token_counts, i), b->tokens_per_seq);
  return status;
}

gdn_status gdn_check_decode(const gdn_decode_args *args, const char *pool, struct gdn_row_set *set,
                            struct gdn_batch *b) {
  gdn_decode_args a;
  gdn_status status = gdn_check_struct(args, "args", sizeof a, &a, sizeof a);
  if (status) return status;
  const int per_seq = a.n_tokens ? a.n_tokens : 1;
  *b = (struct gdn_batch){.n_seqs = a.n_seqs,
                          .n_heads_k = a.n_heads_k,
                          .n_heads_v = a.n_heads_v,
                          .dim_k = a.dim_k,
                          .dim_v = a.dim_v,
                          .l2norm = (a.flags & GDN_L2NORM_QK) != 0,
                          .scale = a.scale,
                          .eps = a.eps,
                          .tokens_per_seq = per_seq,
                          .checkpoint_every = a.token_states.data != NULL,
                          .pool_name = pool};
  if (a.n_seqs > 0 && a.n_seqs <= MAX_COUNT) b->n_tokens = a.n_seqs * per_seq;
  status = check_token_counts(&a, b);
  if (status) return status;
  const struct tokens tokens = {&a.q,
                                &a.k,
                                &a.v,
                                &a.g,
                                &a.beta,
                                &a.out,
                                &a.raw_gates,
                                a.flags,
                                spread_q_heads(b, a.n_heads_q),
                                a.final_state.data || a.token_states.data};
  status = check_arrays(&tokens, b);
  if (!status) status = check_pool(points_name(b), &a.token_states, b, b->n_tokens, &b->checkpoints);
  if (status) return status;
  set_defaults(b);
  return check_states(&a.initial_state, &a.final_state, set, b);
}

/* ---- gates alone ---- */

static gdn_status check_gating_arrays(const gdn_gating_args *a, struct gdn_gating *x) {
  const int64_t n = a->n_tokens;
  const struct {
    const char *in_name, *out_name;
    const gdn_tensor *in;
    const gdn_tensor_out *out;
    struct gdn_array *in_array, *out_array;
  } rows[] = {{"raw_gates.a", "g", &a->raw_gates.a, &a->g, &x->batch.g, &x->g},
              {"raw_gates.b", "beta", &a->raw_gates.b, &a->beta, &x->batch.beta, &x->beta}};
  for (int i = 0; i < 2; i++) {
    const gdn_tensor out = {rows[i].out->data, rows[i].out->token_stride_elems, rows[i].out->head_stride_elems,
                            rows[i].out->dtype, rows[i].out->reserved};
    const struct array_spec in_spec = {rows[i].in_name, n, a->n_heads, 1, 1, FLOATS, GDN_F32, !out.data, 0};
    const struct array_spec out_spec = {rows[i].out_name, n,       a->n_heads,        1, 1,
                                        1u << GDN_F32,    GDN_F32, !rows[i].in->data, 1};
    gdn_status status = check_array(&in_spec, rows[i].in, rows[i].in_array);
    if (!status) status = check_array(&out_spec, &out, rows[i].out_array);
    if (status) return status;
  }
  if (n && !x->g.data && !x->beta.data)
    return gdn_fail(GDN_E_NULL, "raw_gates.a.data and raw_gates.b.data are null: nothing to do");
  return GDN_OK;
}

static gdn_status check_gating_overlaps(const struct gdn_gating *x) {
  const struct gdn_batch *b = &x->batch;
  const int n_heads = b->n_heads_v;
  const struct region all[] = {array_region("g", &x->g, b->n_tokens, n_heads, 1),
                               array_region("beta", &x->beta, b->n_tokens, n_heads, 1),
                               array_region("raw_gates.a", &b->g, b->n_tokens, n_heads, 1),
                               array_region("raw_gates.b", &b->beta, b->n_tokens, n_heads, 1),
                               head_region("raw_gates.a_log", &b->a_log, b),
                               head_region("raw_gates.dt_bias", &b->dt_bias, b)};
  for (int i = 0; i < 2; i++)
    for (int j = i + 1; j < (int)(sizeof all / sizeof *all); j++)
      if (all[i].start && all[j].start && regions_overlap(&all[i], &all[j]))
        return gdn_fail(GDN_E_ALIAS, "%s at %p overlaps %s at %p", all[i].name, (void *)all[i].start, all[j].name,
                        (void *)all[j].start);
  return GDN_OK;
}

gdn_status gdn_check_gating(const gdn_gating_args *args, struct gdn_gating *x) {
  gdn_gating_args a;
  gdn_status status = gdn_check_struct(args, "args", sizeof a, &a, sizeof a);
  if (!status) status = check_reserved("reserved", a.reserved);
  if (status) return status;
  memset(x, 0, sizeof *x);
  x->batch = (struct gdn_batch){.n_tokens = a.n_tokens,
                                .n_heads_k = a.n_heads,
                                .n_heads_v = a.n_heads,
                                .g_mode = GDN_GATE_RAW,
                                .beta_sigmoid = 1};
  if (a.n_tokens < 0 || a.n_tokens > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "n_tokens = %" PRId64 ": expected 0 .. %d", a.n_tokens, MAX_COUNT);
  if (a.n_heads < 1 || a.n_heads > MAX_HEADS)
    return gdn_fail(GDN_E_HEADS, "n_heads = %d: expected 1 .. %d", a.n_heads, MAX_HEADS);
  status = check_raw(&a.raw_gates, a.n_tokens, &x->batch);
  if (!status) status = check_gating_arrays(&a, x);
  return status ? status : check_gating_overlaps(x);
}
