/* SPDX-License-Identifier: Apache-2.0
 * The shared object through gdn.h alone: every error with its text and untouched outputs, struct sizes, aliasing,
 * contexts, threads and fork. */
#define _GNU_SOURCE /* cpu_set_t */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "batch.h"
#include "check.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static gdn_ctx *ctx;

/* ---- valid calls to spoil ---- */

enum { H = 2, HV = 4, K = 64, V = 32, N_SEQS = 3, N_TOKENS = 8 };
#define BLOCK ((int64_t)HV * V * K)

static const int32_t prefill_lens[N_SEQS] = {5, 0, 3}, decode_lens[N_SEQS] = {1, 1, 1};

/* The pool's rows: sequences 0 and 2 of the batch read and write them in place or elsewhere. */
static struct batch *valid_batch(int decode) {
  struct batch_shape shape = {H, HV, K, V, N_SEQS, decode ? decode_lens : prefill_lens};
  struct check_rng r = check_case("%s", decode ? "decode" : "prefill");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_PADDED, BATCH_POOL, GDN_F32, 1, &r);
  batch_reset(b);
  return b;
}

/* ---- errors ---- */

static void expect(const char *call, const struct batch *b, gdn_status got, gdn_status want, const char *name,
                   const char *value) {
  check_case("%s: %s, %s %s", call, gdn_status_name(want), name, value);
  if (got != want) check_fail("returned %s (%s)", gdn_status_name(got), got != GDN_OK ? gdn_last_error() : "");
  const char *text = gdn_last_error();
  if (strstr(text, name) == NULL || strstr(text, value) == NULL) check_fail("the text is \"%s\"", text);
  if (!check_is_poison(b->args.out.data, (size_t)b->out_elems * 2)) check_fail("out was written");
  check_same_bits("states", b->states, b->states_start, (size_t)b->states_elems * 4, 4);
}

/* A valid call, one change (the rest of the arguments), one status, and a text with argument and value. */
#define BAD_PREFILL(status, name, value, ...)                                                                          \
  do {                                                                                                                 \
    gdn_prefill_args a = prefill->args;                                                                                \
    int32_t form_out = 77;                                                                                             \
    __VA_ARGS__;                                                                                                       \
    expect("gdn_prefill", prefill, gdn_prefill(ctx, &a), status, name, value);                                         \
    expect("gdn_prefill_form", prefill, gdn_prefill_form(ctx, &a, &form_out), status, name, value);                    \
    if (form_out != 77) check_fail("form was written");                                                                \
  } while (0)
#define BAD_DECODE(status, name, value, ...)                                                                           \
  do {                                                                                                                 \
    gdn_decode_args a = batch_decode_args(decode, 0);                                                                  \
    __VA_ARGS__;                                                                                                       \
    expect("gdn_decode", decode, gdn_decode(ctx, &a), status, name, value);                                            \
  } while (0)
#define BAD(status, name, value, ...)                                                                                  \
  do {                                                                                                                 \
    BAD_PREFILL(status, name, value, __VA_ARGS__);                                                                     \
    BAD_DECODE(status, name, value, __VA_ARGS__);                                                                      \
  } while (0)
#define TWO_CALLS()                                                                                                    \
  struct batch *prefill = valid_batch(0), *decode = valid_batch(1);                                                    \
  gdn_decode_args valid_decode = batch_decode_args(decode, 0);                                                         \
  check_ok("gdn_prefill", gdn_prefill(ctx, &prefill->args));                                                           \
  check_ok("gdn_decode", gdn_decode(ctx, &valid_decode));                                                              \
  batch_reset(prefill);                                                                                                \
  batch_reset(decode)

static void errors_null_pointers_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  int32_t form = 77;
  expect("gdn_prefill", prefill, gdn_prefill(NULL, &prefill->args), GDN_E_NULL, "ctx", "null");
  expect("gdn_prefill", prefill, gdn_prefill(ctx, NULL), GDN_E_NULL, "args", "null");
  expect("gdn_prefill_form", prefill, gdn_prefill_form(ctx, &prefill->args, NULL), GDN_E_NULL, "form", "null");
  expect("gdn_prefill_form", prefill, gdn_prefill_form(NULL, &prefill->args, &form), GDN_E_NULL, "ctx", "null");
  expect("gdn_decode", decode, gdn_decode(NULL, &valid_decode), GDN_E_NULL, "ctx", "null");
  expect("gdn_decode", decode, gdn_decode(ctx, NULL), GDN_E_NULL, "args", "null");
  BAD(GDN_E_NULL, "q.data", "null", a.q.data = NULL);
  BAD(GDN_E_NULL, "k.data", "null", a.k.data = NULL);
  BAD(GDN_E_NULL, "v.data", "null", a.v.data = NULL);
  BAD_PREFILL(GDN_E_NULL, "out.data", "null", a.out.data = NULL);
  BAD_DECODE(GDN_E_NULL, "out.data", "null", (a.out.data = NULL, a.final_state = (gdn_states){0}));
  BAD(GDN_E_NULL, "initial_state.data", "null", a.initial_state.data = NULL);
  BAD(GDN_E_NULL, "final_state.data", "null", a.final_state.data = NULL);
  BAD_PREFILL(GDN_E_NULL, "cu_seqlens", "null", a.cu_seqlens = NULL);
  BAD_PREFILL(GDN_E_NULL, "checkpoint_cu_starts", "null",
              (a.checkpoints = a.final_state, a.checkpoint_every_n_tokens = 2));
  check_free_all();
}

static void errors_flags_options_and_types_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  BAD(GDN_E_FLAGS, "flags", "0x5", a.flags = 5);
  BAD(GDN_E_FLAGS, "flags", "0x80000000", a.flags = 1u << 31);
  BAD_PREFILL(GDN_E_OPTION, "form", "3", a.form = 3);
  BAD_PREFILL(GDN_E_OPTION, "form", "-1", a.form = -1);
  BAD_PREFILL(GDN_E_OPTION, "schedule", "3", a.schedule = 3);
  BAD_PREFILL(GDN_E_OPTION, "reserved_2", "9", a.reserved_2 = 9);
  BAD(GDN_E_OPTION, "q.reserved", "7", a.q.reserved = 7);
  BAD(GDN_E_OPTION, "out.reserved", "-7", a.out.reserved = -7);
  BAD(GDN_E_OPTION, "raw_gates.reserved", "5", a.raw_gates.reserved = 5);
  BAD(GDN_E_DTYPE, "q.dtype", "3", a.q.dtype = GDN_I32);
  BAD(GDN_E_DTYPE, "k.dtype", "99", a.k.dtype = 99);
  BAD(GDN_E_DTYPE, "v.dtype", "-1", a.v.dtype = -1);
  BAD(GDN_E_DTYPE, "g.dtype", "2", a.g.dtype = GDN_BF16);
  BAD(GDN_E_DTYPE, "beta.dtype", "3", a.beta.dtype = GDN_I32);
  BAD(GDN_E_DTYPE, "out.dtype", "4", a.out.dtype = GDN_I64);
  BAD(GDN_E_DTYPE, "initial_state.dtype", "3", a.initial_state.dtype = GDN_I32);
  BAD(GDN_E_DTYPE, "final_state.dtype", "33", a.final_state.dtype = 33);
  BAD(GDN_E_DTYPE, "initial_state.rows_dtype", "1", a.initial_state.rows_dtype = GDN_F32);
  BAD(GDN_E_DTYPE, "final_state.rows_dtype", "2", a.final_state.rows_dtype = GDN_BF16);
  BAD_PREFILL(GDN_E_DTYPE, "cu_seqlens_dtype", "1", a.cu_seqlens_dtype = GDN_F32);
  check_free_all();
}

static void errors_sizes_and_values_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  BAD(GDN_E_SIZE, "n_seqs", "-1", a.n_seqs = -1);
  BAD(GDN_E_SIZE, "n_seqs", "1099511627776", a.n_seqs = (int64_t)1 << 40);
  BAD_PREFILL(GDN_E_SIZE, "n_tokens", "-8", a.n_tokens = -8);
  BAD_PREFILL(GDN_E_SIZE, "n_tokens", "1099511627776", a.n_tokens = (int64_t)1 << 40);
  BAD(GDN_E_SIZE, "initial_state.n_rows", "-5", a.initial_state.n_rows = -5);
  BAD(GDN_E_SIZE, "final_state.n_rows", "-1", a.final_state.n_rows = -1);
  BAD(GDN_E_SIZE, "initial_state.n_rows", "2", (a.initial_state.rows = NULL, a.initial_state.n_rows = 2));
  BAD(GDN_E_SIZE, "final_state.n_rows", "2", (a.final_state.rows = NULL, a.final_state.n_rows = 2));
  BAD(GDN_E_SIZE, "final_state.n_rows", "4611686018427387904", a.final_state.n_rows = (int64_t)1 << 62);
  static const int32_t dims[] = {0, -32, 1, 16, 33, 63, 288, 1 << 20};
  for (int i = 0; i < COUNT(dims); i++) {
    char text[16];
    snprintf(text, sizeof text, "%d", (int)dims[i]);
    BAD(GDN_E_DIM, "dim_k", text, a.dim_k = dims[i]);
    BAD(GDN_E_DIM, "dim_v", text, a.dim_v = dims[i]);
  }
  BAD(GDN_E_HEADS, "n_heads_k", "0", a.n_heads_k = 0);
  BAD(GDN_E_HEADS, "n_heads_k", "-2", a.n_heads_k = -2);
  BAD(GDN_E_HEADS, "n_heads_v", "0", a.n_heads_v = 0);
  BAD(GDN_E_HEADS, "n_heads_v", "-4", a.n_heads_v = -4);
  BAD(GDN_E_HEADS, "n_heads_v", "3", a.n_heads_v = 3);
  BAD(GDN_E_HEADS, "n_heads_v", "1", a.n_heads_v = 1);
  BAD(GDN_E_VALUE, "scale", "nan", a.scale = NAN);
  BAD(GDN_E_VALUE, "scale", "inf", a.scale = INFINITY);
  BAD(GDN_E_VALUE, "eps", "nan", a.eps = NAN);
  BAD(GDN_E_VALUE, "eps", "inf", a.eps = INFINITY);
  BAD(GDN_E_VALUE, "eps", "-1", a.eps = -1);
  check_free_all();
}

static void errors_strides_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  BAD(GDN_E_STRIDE, "q.token_stride_elems", "-1", a.q.token_stride_elems = -1);
  BAD(GDN_E_STRIDE, "q.head_stride_elems", "-64", a.q.head_stride_elems = -64);
  BAD(GDN_E_STRIDE, "k.token_stride_elems", "-2", a.k.token_stride_elems = -2);
  BAD(GDN_E_STRIDE, "k.head_stride_elems", "-3", a.k.head_stride_elems = -3);
  BAD(GDN_E_STRIDE, "v.token_stride_elems", "-4", a.v.token_stride_elems = -4);
  BAD(GDN_E_STRIDE, "v.head_stride_elems", "-5", a.v.head_stride_elems = -5);
  BAD(GDN_E_STRIDE, "g.token_stride_elems", "-6", a.g.token_stride_elems = -6);
  BAD(GDN_E_STRIDE, "beta.head_stride_elems", "-7", a.beta.head_stride_elems = -7);
  BAD(GDN_E_STRIDE, "out.token_stride_elems", "-8", a.out.token_stride_elems = -8);
  BAD(GDN_E_STRIDE, "out.head_stride_elems", "-9", a.out.head_stride_elems = -9);
  BAD(GDN_E_STRIDE, "q", "9223372036854775807", a.q.token_stride_elems = INT64_MAX);
  BAD(GDN_E_STRIDE, "out", "31", a.out.head_stride_elems = V - 1);
  BAD(GDN_E_STRIDE, "out", "127", (a.out.head_stride_elems = 0, a.out.token_stride_elems = HV * V - 1));
  BAD(GDN_E_STRIDE, "initial_state.row_stride_elems", "8191", a.initial_state.row_stride_elems = BLOCK - 1);
  BAD(GDN_E_STRIDE, "final_state.row_stride_elems", "-8192", a.final_state.row_stride_elems = -BLOCK);
  check_free_all();
}

static void errors_lengths_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  (void)decode;
  static const int32_t late[] = {1, 5, 5, 8}, falling[] = {0, 5, 4, 8}, shorter[] = {0, 5, 5, 7},
                       longer[] = {0, 5, 5, 9};
  static const int64_t negative[] = {0, -5, 5, 8};
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[0]", "1", a.cu_seqlens = late);
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[2]", "4", a.cu_seqlens = falling);
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[3]", "7", a.cu_seqlens = shorter);
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[3]", "9", a.cu_seqlens = longer);
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[1]", "-5", (a.cu_seqlens = negative, a.cu_seqlens_dtype = GDN_I64));
  BAD_PREFILL(GDN_E_LENGTHS, "cu_seqlens[3]", "8", a.n_tokens = 7);
  check_free_all();
}

/* rows as int32 and as int64 */
#define BAD_ROWS(status, name, value, pool, ...)                                                                       \
  do {                                                                                                                 \
    static const int32_t rows_32[] = {__VA_ARGS__};                                                                    \
    static const int64_t rows_64[] = {__VA_ARGS__};                                                                    \
    BAD(status, name, value, a.pool.rows = rows_32);                                                                   \
    BAD(status, name, value, (a.pool.rows = rows_64, a.pool.rows_dtype = GDN_I64));                                    \
  } while (0)

static void errors_rows_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  BAD_ROWS(GDN_E_ROW, "initial_state.rows[2]", "9", initial_state, 0, -1, 9);
  BAD_ROWS(GDN_E_ROW, "initial_state.rows[0]", "-2", initial_state, -2, -1, 1);
  BAD_ROWS(GDN_E_ROW, "final_state.rows[2]", "9", final_state, 0, -1, 9);
  BAD_ROWS(GDN_E_ROW, "final_state.rows[1]", "-7", final_state, 0, -7, 1);
  static const int64_t far_row[] = {0, -1, (int64_t)1 << 32};
  BAD(GDN_E_ROW, "final_state.rows[2]", "4294967296",
      (a.final_state.rows = far_row, a.final_state.rows_dtype = GDN_I64));

  static const int32_t fresh[] = {-1, -1, -1}, twice[] = {3, -1, 3}, from_4[] = {4, -1, 5}, to_4[] = {7, -1, 4};
  static const int32_t from_2[] = {2, -1, 2}, crossed[] = {1, -1, 0};
  BAD(GDN_E_ROW_CONFLICT, "final_state", "3", a.initial_state.rows = fresh, a.final_state.rows = twice);
  BAD(GDN_E_ROW_CONFLICT, "final_state", "4", a.initial_state.rows = from_4, a.final_state.rows = to_4);
  /* Without rows, sequence i has row i. */
  BAD(GDN_E_ROW_CONFLICT, "final_state", "2", a.initial_state.rows = from_2, a.final_state.rows = NULL);
  BAD(GDN_E_ROW_CONFLICT, "final_state", "0", a.initial_state.rows = NULL, a.final_state.rows = crossed);
  check_free_all();
}

/* ---- checkpoints ---- */

#define BAD_CHECKPOINTS(status, name, value, ...)                                                                      \
  BAD_PREFILL(status, name, value, a.checkpoints = pool, a.checkpoint_every_n_tokens = 2,                              \
              a.checkpoint_cu_starts = starts, __VA_ARGS__)

static void errors_checkpoints_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  (void)decode;
  static const int32_t starts[] = {0, 2, 2, 3}, wrong[] = {0, 2, 2, 4}, late[] = {1, 3, 3, 4},
                       odd_prefix[] = {0, 0, -1};
  static const int32_t same_row[] = {3, 3, 4}, outside[] = {3, 4, 99};
  const gdn_states pool = {.data = check_alloc((size_t)(9 * BLOCK) * sizeof(float)), .n_rows = 9};
  BAD_CHECKPOINTS(GDN_E_SIZE, "checkpoint_every_n_tokens", "-2", a.checkpoint_every_n_tokens = -2);
  BAD_CHECKPOINTS(GDN_E_DTYPE, "checkpoint_cu_starts_dtype", "2", a.checkpoint_cu_starts_dtype = GDN_BF16);
  BAD_CHECKPOINTS(GDN_E_DTYPE, "prefix_lens_dtype", "2", (a.prefix_lens = starts, a.prefix_lens_dtype = GDN_BF16));
  BAD_CHECKPOINTS(GDN_E_DTYPE, "checkpoints.dtype", "4", a.checkpoints.dtype = GDN_I64);
  BAD_CHECKPOINTS(GDN_E_LENGTHS, "checkpoint_cu_starts", "4", a.checkpoint_cu_starts = wrong);
  BAD_CHECKPOINTS(GDN_E_LENGTHS, "checkpoint_cu_starts", "1", a.checkpoint_cu_starts = late);
  BAD_CHECKPOINTS(GDN_E_LENGTHS, "prefix_lens", "-1", a.prefix_lens = odd_prefix);
  BAD_CHECKPOINTS(GDN_E_ROW, "checkpoints.rows[2]", "99", a.checkpoints.rows = outside);
  BAD_CHECKPOINTS(GDN_E_ROW_CONFLICT, "checkpoints", "3", a.checkpoints.rows = same_row);
  BAD_CHECKPOINTS(GDN_E_SIZE, "checkpoints.n_rows", "2", a.checkpoints.n_rows = 2);
  BAD_CHECKPOINTS(GDN_E_ALIAS, "checkpoints", "q", a.checkpoints.data = (void *)(uintptr_t)a.q.data);
  if (!check_is_poison(pool.data, (size_t)(9 * BLOCK) * sizeof(float))) check_fail("a checkpoint was written");
  check_free_all();
}

/* ---- aliasing ---- */

static void errors_overlaps_are_named(void **state) {
  (void)state;
  TWO_CALLS();
  /* Addresses only: nothing may be read or written before the overlap is found. */
#define OVER(field) (void *)(uintptr_t)((const char *)a.field + 2)
  BAD(GDN_E_ALIAS, "out", "q", a.out.data = OVER(q.data));
  BAD(GDN_E_ALIAS, "out", "k", a.out.data = OVER(k.data));
  BAD(GDN_E_ALIAS, "out", "v", a.out.data = OVER(v.data));
  BAD(GDN_E_ALIAS, "out", "v", a.out.data = (void *)(uintptr_t)a.v.data);
  BAD(GDN_E_ALIAS, "out", "g", a.out.data = OVER(g.data));
  BAD(GDN_E_ALIAS, "out", "beta", a.out.data = OVER(beta.data));
  BAD(GDN_E_ALIAS, "out", "final_state", a.out.data = OVER(final_state.data));
  BAD(GDN_E_ALIAS, "out", "initial_state", (a.out.data = OVER(initial_state.data), a.final_state = (gdn_states){0}));
  BAD(GDN_E_ALIAS, "out", "initial_state.rows", a.out.data = OVER(initial_state.rows));
  BAD(GDN_E_ALIAS, "out", "final_state.rows", a.out.data = OVER(final_state.rows));
  BAD_PREFILL(GDN_E_ALIAS, "out", "cu_seqlens", a.out.data = OVER(cu_seqlens));
  /* A pool of 9 rows covers several neighbours: which one is named depends on where they lie. */
  BAD(GDN_E_ALIAS, "final_state", "overlaps", a.final_state.data = (void *)(uintptr_t)a.q.data);
  BAD(GDN_E_ALIAS, "final_state", "overlaps", a.final_state.data = (void *)(uintptr_t)a.v.data);
  BAD(GDN_E_ALIAS, "final_state", "overlaps", a.final_state.data = (void *)(uintptr_t)a.g.data);
  BAD(GDN_E_ALIAS, "final_state", "initial_state", a.final_state.data = (float *)a.initial_state.data + BLOCK / 2);
  BAD(GDN_E_ALIAS, "final_state", "initial_state", a.final_state.row_stride_elems = BLOCK);
  BAD(GDN_E_ALIAS, "final_state", "overlaps", a.final_state.data = (void *)(uintptr_t)a.initial_state.rows);
#undef OVER
  check_free_all();
}

/* One row per token of q, k, v and out: they interleave and never meet. */
static void alias_out_inside_a_fused_buffer_is_accepted(void **state) {
  (void)state;
  struct batch_shape shape = {H, HV, K, V, N_SEQS, prefill_lens};
  struct check_rng r = check_case("fused_out");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_NO_STATES, GDN_F32, 1, &r);
  check_ok("gdn_prefill", gdn_prefill(ctx, &b->args));
  struct batch_result apart = batch_take(b);
  int64_t qk = H * K, v = HV * V, stride = 2 * qk + 2 * v, old = b->args.q.token_stride_elems;
  uint16_t *fused = check_alloc((size_t)(N_TOKENS * stride) * 2);
  for (int t = 0; t < N_TOKENS; t++) {
    memcpy(fused + t * stride, (const uint16_t *)b->args.q.data + t * old, (size_t)(2 * qk + v) * 2);
  }
  gdn_prefill_args a = b->args;
  a.q.data = fused;
  a.k.data = fused + qk;
  a.v.data = fused + 2 * qk;
  a.q.token_stride_elems = a.k.token_stride_elems = a.v.token_stride_elems = stride;
  a.out = (gdn_tensor_out){.data = fused + 2 * qk + v, .token_stride_elems = stride};
  check_ok("gdn_prefill", gdn_prefill(ctx, &a));
  for (int t = 0; t < N_TOKENS; t++) {
    check_same_bits("out", fused + t * stride + 2 * qk + v, apart.out + t * v, (size_t)v * 2, 2);
    check_same_bits("inputs", fused + t * stride, (const uint16_t *)b->args.q.data + t * old, (size_t)(2 * qk + v) * 2,
                    2);
  }
  check_free_all();
}

static void alias_rows_that_do_not_conflict_are_accepted(void **state) {
  (void)state;
  TWO_CALLS();
  static const int32_t shared[] = {6, 6, 6}, apart[] = {0, 1, 2}, in_place[] = {2, -1, 0};
  static const int32_t empty_in[] = {1, 0, -1}, empty_out[] = {0, 0, 2};
  gdn_prefill_args a = prefill->args;
  a.initial_state.rows = shared;
  a.final_state.rows = apart;
  check_ok("a row read by many", gdn_prefill(ctx, &a));
  a.initial_state.rows = a.final_state.rows = in_place;
  check_ok("rows in place", gdn_prefill(ctx, &a));
  a.initial_state.rows = a.final_state.rows = NULL;
  check_ok("all rows in place", gdn_prefill(ctx, &a));
  a.initial_state.rows = empty_in;
  a.final_state.rows = empty_out;
  check_ok("rows of a sequence without tokens", gdn_prefill(ctx, &a));
  gdn_decode_args d = batch_decode_args(decode, 0);
  d.initial_state.rows = shared;
  d.final_state.rows = apart;
  check_ok("a row read by many", gdn_decode(ctx, &d));
  check_free_all();
}

/* ---- accepted values ---- */

static void values_int64_indices_give_the_same_bits(void **state) {
  (void)state;
  struct batch *b = valid_batch(0);
  const int32_t *cu = b->args.cu_seqlens, *in = b->args.initial_state.rows, *out = b->args.final_state.rows;
  int64_t cu_64[N_SEQS + 1], in_64[N_SEQS], out_64[N_SEQS];
  for (int i = 0; i <= N_SEQS; i++) cu_64[i] = cu[i];
  for (int i = 0; i < N_SEQS; i++) {
    in_64[i] = in[i];
    out_64[i] = out[i];
  }
  check_ok("gdn_prefill", gdn_prefill(ctx, &b->args));
  struct batch_result x = batch_take(b);
  batch_reset(b);
  gdn_prefill_args a = b->args;
  a.cu_seqlens = cu_64;
  a.initial_state.rows = in_64;
  a.final_state.rows = out_64;
  a.cu_seqlens_dtype = a.initial_state.rows_dtype = a.final_state.rows_dtype = GDN_I64;
  check_ok("gdn_prefill", gdn_prefill(ctx, &a));
  struct batch_result y = batch_take(b);
  for (int i = 0; i < N_SEQS; i++) batch_same("int64 indices", b, &x, i, b, &y, i);
  check_free_all();
}

/* Negative scales and growing gates are computed as written. */
static void values_positive_gates_and_negative_scales_are_accepted(void **state) {
  (void)state;
  struct batch_shape shape = {H, HV, K, V, N_SEQS, prefill_lens};
  struct check_rng r = check_case("positive_gates");
  struct batch *b = batch_make(&shape, &r);
  for (int i = 0; i < N_TOKENS * HV; i++) b->g[i] = 0.25f;
  batch_place(b, BATCH_DENSE, BATCH_POOL, GDN_F32, 1, &r);
  b->args.scale = -0.5f;
  b->args.form = GDN_FORM_RECURRENT; /* f32 in every tier */
  batch_oracle(b);
  check_ok("gdn_prefill", gdn_prefill(ctx, &b->args));
  batch_check(b, 1e-6);
  check_free_all();
}

static void values_prefill_form_is_what_was_asked_for(void **state) {
  (void)state;
  struct batch *b = valid_batch(0);
  int32_t form = 0;
  check_ok("gdn_prefill_form", gdn_prefill_form(ctx, &b->args, &form));
  if (form != GDN_FORM_RECURRENT && form != GDN_FORM_CHUNK) check_fail("default form %d", (int)form);
  for (int32_t asked = GDN_FORM_RECURRENT; asked <= GDN_FORM_CHUNK; asked++) {
    b->args.form = asked;
    check_ok("gdn_prefill_form", gdn_prefill_form(ctx, &b->args, &form));
    if (form != asked) check_fail("form %d became %d", (int)asked, (int)form);
  }
  if (!check_is_poison(b->args.out.data, (size_t)b->out_elems * 2)) check_fail("out was written");
  check_free_all();
}

/* ---- struct sizes ---- */

/* A caller of a later version: the same fields, then some that this library does not know. */
#define FUTURE_BYTES 64
#define FUTURE(type, value, tail_byte)                                                                                 \
  struct {                                                                                                             \
    type known;                                                                                                        \
    unsigned char tail[FUTURE_BYTES];                                                                                  \
  } future = {.known = (value)};                                                                                       \
  future.tail[FUTURE_BYTES - 1] = (tail_byte);                                                                         \
  future.known.struct_size = sizeof future

static void sizes_too_small_or_absurd_are_errors(void **state) {
  (void)state;
  TWO_CALLS();
  BAD(GDN_E_STRUCT_SIZE, "struct_size", "0", a.struct_size = 0);
  BAD(GDN_E_STRUCT_SIZE, "struct_size", "8", a.struct_size = 8);
  BAD(GDN_E_STRUCT_SIZE, "struct_size", "1099511627776", a.struct_size = (size_t)1 << 40);
  gdn_ctx_args args = {.struct_size = 3};
  gdn_ctx *made = NULL;
  expect("gdn_ctx_create", prefill, gdn_ctx_create(&args, &made), GDN_E_STRUCT_SIZE, "struct_size", "3");
  gdn_info info = {.struct_size = 5};
  expect("gdn_ctx_info", prefill, gdn_ctx_info(ctx, &info), GDN_E_STRUCT_SIZE, "struct_size", "5");
  if (made != NULL || info.cpu != NULL) check_fail("an output was written");
  check_free_all();
}

static void sizes_of_later_versions_work_while_unknown_fields_are_zero(void **state) {
  (void)state;
  TWO_CALLS();
  {
    FUTURE(gdn_prefill_args, prefill->args, 0);
    check_ok("gdn_prefill", gdn_prefill(ctx, &future.known));
    batch_reset(prefill);
    future.tail[FUTURE_BYTES - 1] = 1;
    expect("gdn_prefill", prefill, gdn_prefill(ctx, &future.known), GDN_E_STRUCT_SIZE, "struct_size", "");
    future.tail[FUTURE_BYTES - 1] = 0;
    future.tail[0] = 1;
    expect("gdn_prefill", prefill, gdn_prefill(ctx, &future.known), GDN_E_STRUCT_SIZE, "struct_size", "");
  }
  {
    FUTURE(gdn_decode_args, batch_decode_args(decode, 0), 0);
    check_ok("gdn_decode", gdn_decode(ctx, &future.known));
    batch_reset(decode);
    future.tail[0] = 1;
    expect("gdn_decode", decode, gdn_decode(ctx, &future.known), GDN_E_STRUCT_SIZE, "struct_size", "");
  }
  {
    const gdn_ctx_args one_thread = {.n_threads = 1};
    gdn_ctx *made = NULL;
    FUTURE(gdn_ctx_args, one_thread, 0);
    check_ok("gdn_ctx_create", gdn_ctx_create(&future.known, &made));
    gdn_ctx_destroy(made);
    future.tail[0] = 1;
    made = NULL;
    expect("gdn_ctx_create", prefill, gdn_ctx_create(&future.known, &made), GDN_E_STRUCT_SIZE, "struct_size", "");
    if (made != NULL) check_fail("ctx was written");
  }
  {
    const gdn_info empty = {.n_tiers = 0};
    FUTURE(gdn_info, empty, 0x5a);
    check_ok("gdn_ctx_info", gdn_ctx_info(ctx, &future.known));
    if (future.known.cpu == NULL || future.tail[FUTURE_BYTES - 1] != 0x5a) check_fail("info of a later version");
  }
  check_free_all();
}

/* ---- contexts ---- */

static void expect_create(const gdn_ctx_args *args, gdn_status want, const char *name, const char *value) {
  check_case("gdn_ctx_create: %s %s", name, value);
  gdn_ctx *made = (gdn_ctx *)&made;
  gdn_status got = gdn_ctx_create(args, &made);
  if (got != want) check_fail("returned %s", gdn_status_name(got));
  if (made != (gdn_ctx *)&made) check_fail("ctx was written");
  const char *text = gdn_last_error();
  if (strstr(text, name) == NULL || strstr(text, value) == NULL) check_fail("the text is \"%s\"", text);
}

static void context_bad_arguments_are_named(void **state) {
  (void)state;
  gdn_ctx_args a = {.struct_size = sizeof a};
  if (gdn_ctx_create(&a, NULL) != GDN_E_NULL) check_fail("null ctx");
  a.n_threads = -3;
  expect_create(&a, GDN_E_SIZE, "n_threads", "-3");
  a.n_threads = 1 << 30;
  expect_create(&a, GDN_E_SIZE, "n_threads", "1073741824");
  a.n_threads = 1;
  a.isa = 99;
  expect_create(&a, GDN_E_OPTION, "isa", "99");
  a.isa = -1;
  expect_create(&a, GDN_E_OPTION, "isa", "-1");
  a.isa = 0;
  a.pin = 7;
  expect_create(&a, GDN_E_OPTION, "pin", "7");
  check_case("null");
  gdn_info info = {.struct_size = sizeof info};
  if (gdn_ctx_info(NULL, &info) != GDN_E_NULL || strstr(gdn_last_error(), "ctx") == NULL) check_fail("null ctx");
  if (gdn_ctx_info(ctx, NULL) != GDN_E_NULL || strstr(gdn_last_error(), "info") == NULL) check_fail("null info");
  if (gdn_ctx_run(ctx, NULL, NULL) != GDN_E_NULL || strstr(gdn_last_error(), "fn") == NULL) check_fail("null fn");
  gdn_ctx_destroy(NULL);
}

/* GDN_ISA for one block, then what it was. */
static char *set_isa(const char *value) {
  const char *old = getenv("GDN_ISA");
  char *kept = old != NULL ? strdup(old) : NULL;
  if (value != NULL) {
    setenv("GDN_ISA", value, 1);
  } else {
    unsetenv("GDN_ISA");
  }
  return kept;
}

static void restore_isa(char *kept) {
  if (kept != NULL) {
    setenv("GDN_ISA", kept, 1);
  } else {
    unsetenv("GDN_ISA");
  }
  free(kept);
}

/* The tier of a context made with these two caps must be cap, or lower where the machine lacks it. */
static void expect_tier(const char *env, int32_t isa, int cap) {
  check_case("GDN_ISA=%s isa=%d", env != NULL ? env : "(unset)", (int)isa);
  char *kept = set_isa(env);
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 1, .isa = isa, .pin = GDN_PIN_OFF};
  gdn_info info = {.struct_size = sizeof info};
  gdn_ctx *made = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
  check_ok("gdn_ctx_info", gdn_ctx_info(made, &info));
  int highest = 0;
  for (int i = 0; i < info.n_tiers; i++) {
    const gdn_tier_info *t = &info.tiers[i];
    if (t->available) highest = i;
    if (t->available && i > cap) check_fail("%s is not capped", t->name);
    if ((t->available != 0) != (t->reason[0] == '\0')) check_fail("%s: reason \"%s\"", t->name, t->reason);
    if (i > cap && strstr(t->reason, "capped") == NULL && strstr(t->reason, "lacks") == NULL &&
        strstr(t->reason, "build") == NULL && strstr(t->reason, "system") == NULL) {
      check_fail("%s: reason \"%s\"", t->name, t->reason);
    }
  }
  if (strcmp(info.isa, info.tiers[highest].name) != 0) check_fail("tier %s is chosen", info.isa);
  gdn_ctx_destroy(made);
  restore_isa(kept);
}

static void context_tier_is_capped_by_argument_and_environment(void **state) {
  (void)state;
  static const char *const names[] = {"ref", "avx2", "avx512", "avx512bf16", "amx"};
  for (int env = 0; env <= COUNT(names); env++) {
    for (int isa = 0; isa <= COUNT(names); isa++) {
      int cap_env = env == COUNT(names) ? COUNT(names) : env, cap_isa = isa == 0 ? COUNT(names) : isa - 1;
      expect_tier(env == COUNT(names) ? NULL : names[env], isa, cap_env < cap_isa ? cap_env : cap_isa);
    }
  }
  static const char *const bad[] = {"avx3", "AVX2", "ref ", "1"};
  for (int i = 0; i < COUNT(bad); i++) {
    char *kept = set_isa(bad[i]);
    gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 1};
    expect_create(&a, GDN_E_OPTION, "GDN_ISA", bad[i]);
    restore_isa(kept);
  }
}

static void context_info_tells_what_was_made(void **state) {
  (void)state;
  check_case("info");
  for (int n = 1; n <= 3; n += 2) {
    gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = n, .pin = n == 1 ? GDN_PIN_ON : GDN_PIN_OFF};
    gdn_info info = {.struct_size = sizeof info};
    gdn_ctx *made = NULL;
    check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
    check_ok("gdn_ctx_info", gdn_ctx_info(made, &info));
    const char *const texts[] = {info.cpu, info.isa, info.placement, info.product_provider, info.libxsmm_version};
    for (int i = 0; i < COUNT(texts); i++) {
      if (texts[i] == NULL || texts[i][0] == '\0') check_fail("text %d is empty", i);
    }
    if (info.n_threads != n) check_fail("n_threads = %d", (int)info.n_threads);
    if (info.n_cores < 1) check_fail("n_cores = %d", (int)info.n_cores);
    if (info.n_tiers != 5 || strcmp(info.tiers[0].name, "ref") != 0 || !info.tiers[0].available) check_fail("tiers");
    if (n == 3 && info.pinned) check_fail("pinned against GDN_PIN_OFF");
    if (info.struct_size != sizeof info) check_fail("struct_size changed");
    if (strcmp(info.product_provider, "libxsmm") != 0 && strcmp(info.product_provider, "own") != 0) {
      check_fail("product provider %s", info.product_provider);
    }
    gdn_ctx_destroy(made);
  }
}

static void context_null_arguments_mean_defaults(void **state) {
  (void)state;
  check_case("defaults");
  gdn_ctx *made = NULL;
  gdn_info info = {.struct_size = sizeof info};
  check_ok("gdn_ctx_create", gdn_ctx_create(NULL, &made));
  check_ok("gdn_ctx_info", gdn_ctx_info(made, &info));
  if (info.n_threads < 1 || info.n_threads > info.n_cores) check_fail("%d threads", (int)info.n_threads);
  gdn_ctx_destroy(made);
}

static void context_leaves_the_callers_affinity_alone(void **state) {
  (void)state;
  check_case("affinity");
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 2, .pin = GDN_PIN_ON};
  gdn_ctx *made = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
  struct batch *b = valid_batch(0);
  check_ok("gdn_prefill", gdn_prefill(made, &b->args));
  sched_getaffinity(0, sizeof after, &after);
  if (!CPU_EQUAL(&before, &after)) check_fail("affinity changed");
  gdn_ctx_destroy(made);
  check_free_all();
}

static void context_two_at_once_agree(void **state) {
  (void)state;
  struct batch *b = valid_batch(0);
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 2};
  gdn_ctx *made[2] = {NULL, NULL};
  struct batch_result x[4];
  for (int i = 0; i < 2; i++) check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made[i]));
  for (int i = 0; i < 4; i++) {
    batch_reset(b);
    check_ok("gdn_prefill", gdn_prefill(made[i % 2], &b->args));
    x[i] = batch_take(b);
    if (i == 2) gdn_ctx_destroy(made[0]);
    for (int seq = 0; i > 0 && seq < N_SEQS; seq++) batch_same("two contexts", b, &x[0], seq, b, &x[i], seq);
  }
  gdn_ctx_destroy(made[1]);
  check_free_all();
}

/* ---- threads ---- */

enum { N_CALLERS = 4, N_CALLS = 50 };

struct caller {
  struct batch *b;
  struct batch_result want;
  gdn_ctx *ctx;
  int n_errors, n_differences;
  char last_error[64];
};

static void *call_repeatedly(void *arg) {
  struct caller *c = arg;
  gdn_prefill_args bad = c->b->args;
  bad.dim_k = 40 + 32 * (int32_t)(c->want.out[0] % 7); /* an error text of this thread's own */
  char want_text[32];
  snprintf(want_text, sizeof want_text, "dim_k = %d", (int)bad.dim_k);
  for (int i = 0; i < N_CALLS; i++) {
    batch_reset(c->b);
    if (gdn_prefill(c->ctx, &c->b->args) != GDN_OK) c->n_errors++;
    size_t bytes = (size_t)c->b->out_elems * 2;
    if (memcmp(c->b->args.out.data, c->want.out, bytes) != 0) c->n_differences++;
    if (gdn_prefill(c->ctx, &bad) != GDN_E_DIM || strstr(gdn_last_error(), want_text) == NULL) c->n_errors++;
  }
  return NULL;
}

static void threads_calls_on_one_context_take_turns(void **state) {
  (void)state;
  static const int32_t lens[] = {70, 3};
  struct batch_shape shape = {1, 2, 32, 32, 2, lens};
  struct caller callers[N_CALLERS];
  pthread_t threads[N_CALLERS];
  for (int i = 0; i < N_CALLERS; i++) {
    struct check_rng r = check_case("callers/%d", i);
    struct caller *c = &callers[i];
    memset(c, 0, sizeof *c);
    c->ctx = ctx;
    c->b = batch_make(&shape, &r);
    batch_place(c->b, BATCH_DENSE, BATCH_POOL, GDN_F32, 1, &r);
    batch_reset(c->b);
    check_ok("gdn_prefill", gdn_prefill(ctx, &c->b->args));
    c->want = batch_take(c->b);
  }
  for (int i = 0; i < N_CALLERS; i++) {
    if (pthread_create(&threads[i], NULL, call_repeatedly, &callers[i]) != 0) check_fail("pthread_create");
  }
  for (int i = 0; i < N_CALLERS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < N_CALLERS; i++) {
    check_case("callers/%d", i);
    if (callers[i].n_errors != 0) check_fail("%d calls gave the wrong status or text", callers[i].n_errors);
    if (callers[i].n_differences != 0) check_fail("%d calls gave other bits", callers[i].n_differences);
  }
  check_free_all();
}

static void note_worker(void *arg, int32_t worker, int32_t n_workers) {
  int *runs = arg;
  if (worker >= 0 && worker < 8 && n_workers == 3) runs[worker]++;
}

static void threads_run_calls_every_worker_once(void **state) {
  (void)state;
  check_case("run");
  int runs[8] = {0};
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 3, .pin = GDN_PIN_OFF};
  gdn_ctx *made = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
  for (int i = 0; i < 10; i++) check_ok("gdn_ctx_run", gdn_ctx_run(made, note_worker, runs));
  for (int i = 0; i < 8; i++) {
    if (runs[i] != (i < 3 ? 10 : 0)) check_fail("worker %d ran %d times", i, runs[i]);
  }
  gdn_ctx_destroy(made);
}

/* ---- fork ---- */

/* Exit code of the child: 0, or which check failed. */
static int child_checks(struct batch *b) {
  gdn_decode_args d = batch_decode_args(b, 0);
  gdn_info info = {.struct_size = sizeof info};
  int runs[8], form;
  alarm(20);
  if (gdn_prefill(ctx, &b->args) != GDN_E_FORK || strstr(gdn_last_error(), "ctx") == NULL) return 1;
  if (!check_is_poison(b->args.out.data, (size_t)b->out_elems * 2)) return 2;
  if (gdn_decode(ctx, &d) != GDN_E_FORK) return 3;
  if (gdn_ctx_info(ctx, &info) != GDN_E_FORK) return 4;
  if (gdn_ctx_run(ctx, note_worker, runs) != GDN_E_FORK) return 5;
  if (gdn_prefill_form(ctx, &b->args, &form) != GDN_E_FORK) return 6;
  gdn_ctx_destroy(ctx);
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 1, .pin = GDN_PIN_OFF};
  gdn_ctx *own = NULL;
  if (gdn_ctx_create(&a, &own) != GDN_OK) return 7;
  if (gdn_prefill(own, &b->args) != GDN_OK) return 8;
  gdn_ctx_destroy(own);
  return 0;
}

#ifdef __SANITIZE_THREAD__
enum { THREAD_SANITIZER = 1 };
#else
enum { THREAD_SANITIZER = 0 };
#endif

static void fork_child_gets_an_error_and_can_make_its_own(void **state) {
  (void)state;
  if (THREAD_SANITIZER) {
    check_skip("fork", "the thread sanitizer starts no threads in a forked child");
    return;
  }
  struct batch *b = valid_batch(1);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) _exit(child_checks(b));
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    check_fail("child: %s %d", WIFEXITED(status) ? "check" : "signal",
               WIFEXITED(status) ? WEXITSTATUS(status) : status);
  }
  check_ok("gdn_prefill in the parent after fork", gdn_prefill(ctx, &b->args));
  check_free_all();
}

/* ---- no memory, no threads: in a child, whose limits are its own ---- */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

/* No more address space than now and some bytes. */
static void limit_memory(size_t spare_bytes) {
  long pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld", &pages) != 1) _exit(99);
  fclose(f);
  struct rlimit limit = {0, 0};
  limit.rlim_cur = limit.rlim_max = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + spare_bytes;
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(98);
}

static int child_without_memory(void) {
  enum { MANY = 1 << 20 };
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 1, .pin = GDN_PIN_OFF};
  gdn_ctx *own = NULL;
  if (gdn_ctx_create(&a, &own) != GDN_OK) return 1;
  struct batch *b = valid_batch(0);
  int32_t *cu = check_alloc(sizeof *cu * (MANY + 1)), *rows = check_alloc(sizeof *rows * MANY);
  for (int i = 0; i <= MANY; i++) cu[i] = i < N_TOKENS ? i : N_TOKENS;
  for (int i = 0; i < MANY; i++) rows[i] = -1;
  gdn_prefill_args call = b->args;
  call.n_seqs = MANY;
  call.cu_seqlens = cu;
  call.initial_state.rows = call.final_state.rows = rows;
  if (gdn_prefill(own, &b->args) != GDN_OK) return 5; /* scratch of that shape is there from now on */
  batch_reset(b);
  limit_memory(1 << 20);
  if (gdn_prefill(own, &call) != GDN_E_NOMEM || strstr(gdn_last_error(), "1048576") == NULL) return 2;
  if (!check_is_poison(b->args.out.data, (size_t)b->out_elems * 2)) return 3;
  if (gdn_prefill(own, &b->args) != GDN_OK) return 4; /* the context is as good as before */
  gdn_ctx_destroy(own);
  return 0;
}

static int child_without_threads(void) {
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 4000, .pin = GDN_PIN_OFF};
  gdn_ctx *own = NULL;
  limit_memory((size_t)64 << 20);
  gdn_status status = gdn_ctx_create(&a, &own);
  if (status != GDN_E_THREADS && status != GDN_E_NOMEM) return 1;
  if (own != NULL || strstr(gdn_last_error(), "4000") == NULL) return 2;
  a.n_threads = 1;
  if (gdn_ctx_create(&a, &own) != GDN_OK) return 3;
  gdn_ctx_destroy(own);
  return 0;
}

static void expect_child(int (*fn)(void)) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(fn());
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    check_fail("child: %s %d", WIFEXITED(status) ? "check" : "signal",
               WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
}

static void limits_no_memory_is_an_error(void **state) {
  (void)state;
  check_case("no_memory");
  expect_child(child_without_memory);
}

static void limits_no_threads_is_an_error(void **state) {
  (void)state;
  check_case("no_threads");
  expect_child(child_without_threads);
}

#else

static void limits_no_memory_is_an_error(void **state) {
  (void)state;
  check_skip("no memory", "a sanitizer needs its own");
}

static void limits_no_threads_is_an_error(void **state) {
  (void)state;
  check_skip("no threads", "a sanitizer needs its own memory");
}

#endif

static void limits_scratch_limit_is_kept(void **state) {
  (void)state;
  check_case("scratch_limit");
  struct batch *prefill = valid_batch(0);
  gdn_ctx_args a = {.struct_size = sizeof a, .scratch_limit_bytes = 1000};
  gdn_ctx *made = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
  expect("gdn_prefill", prefill, gdn_prefill(made, &prefill->args), GDN_E_NOMEM, "scratch_limit_bytes", "1000");
  gdn_ctx_destroy(made);
  a.scratch_limit_bytes = 1 << 28;
  check_ok("gdn_ctx_create", gdn_ctx_create(&a, &made));
  check_ok("gdn_prefill", gdn_prefill(made, &prefill->args));
  gdn_ctx_destroy(made);
  check_free_all();
}

/* ---- texts ---- */

static void texts_every_status_has_its_name(void **state) {
  (void)state;
  check_case("names");
#define NAME(status)                                                                                                   \
  if (strcmp(gdn_status_name(status), #status) != 0) check_fail(#status " is called %s", gdn_status_name(status))
  NAME(GDN_OK);
  NAME(GDN_E_NULL);
  NAME(GDN_E_STRUCT_SIZE);
  NAME(GDN_E_FLAGS);
  NAME(GDN_E_OPTION);
  NAME(GDN_E_DTYPE);
  NAME(GDN_E_SIZE);
  NAME(GDN_E_DIM);
  NAME(GDN_E_HEADS);
  NAME(GDN_E_STRIDE);
  NAME(GDN_E_LENGTHS);
  NAME(GDN_E_ROW);
  NAME(GDN_E_ROW_CONFLICT);
  NAME(GDN_E_ALIAS);
  NAME(GDN_E_VALUE);
  NAME(GDN_E_NOMEM);
  NAME(GDN_E_THREADS);
  NAME(GDN_E_FORK);
#undef NAME
  static const gdn_status unknown[] = {1, -18, -1000, INT32_MIN, INT32_MAX};
  for (int i = 0; i < COUNT(unknown); i++) {
    if (gdn_status_name(unknown[i]) == NULL) check_fail("no name for %d", (int)unknown[i]);
  }
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", GDN_VERSION_MAJOR, GDN_VERSION_MINOR, GDN_VERSION_PATCH);
  if (gdn_version() != GDN_VERSION || strcmp(gdn_version_string(), version) != 0) check_fail("version");
}

static void *first_text(void *arg) {
  *(int *)arg = strcmp(gdn_last_error(), "") == 0;
  return NULL;
}

static void texts_a_thread_starts_without_an_error(void **state) {
  (void)state;
  check_case("first_text");
  pthread_t thread;
  int empty = 0;
  gdn_ctx_create(NULL, NULL);
  if (pthread_create(&thread, NULL, first_text, &empty) != 0) check_fail("pthread_create");
  pthread_join(thread, NULL);
  if (!empty) check_fail("another thread's error shows");
}

static int make_ctx(void **state) {
  (void)state;
  gdn_ctx_args a = {.struct_size = sizeof a, .n_threads = 2, .pin = GDN_PIN_OFF};
  return gdn_ctx_create(&a, &ctx) != GDN_OK;
}

static int destroy_ctx(void **state) {
  (void)state;
  gdn_ctx_destroy(ctx);
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(errors_null_pointers_are_named),
      TEST(errors_flags_options_and_types_are_named),
      TEST(errors_sizes_and_values_are_named),
      TEST(errors_strides_are_named),
      TEST(errors_lengths_are_named),
      TEST(errors_rows_are_named),
      TEST(errors_checkpoints_are_named),
      TEST(errors_overlaps_are_named),
      TEST(alias_out_inside_a_fused_buffer_is_accepted),
      TEST(alias_rows_that_do_not_conflict_are_accepted),
      TEST(values_int64_indices_give_the_same_bits),
      TEST(values_positive_gates_and_negative_scales_are_accepted),
      TEST(values_prefill_form_is_what_was_asked_for),
      TEST(sizes_too_small_or_absurd_are_errors),
      TEST(sizes_of_later_versions_work_while_unknown_fields_are_zero),
      TEST(context_bad_arguments_are_named),
      TEST(context_tier_is_capped_by_argument_and_environment),
      TEST(context_info_tells_what_was_made),
      TEST(context_null_arguments_mean_defaults),
      TEST(context_leaves_the_callers_affinity_alone),
      TEST(context_two_at_once_agree),
      TEST(threads_calls_on_one_context_take_turns),
      TEST(threads_run_calls_every_worker_once),
      TEST(fork_child_gets_an_error_and_can_make_its_own),
      TEST(limits_no_memory_is_an_error),
      TEST(limits_no_threads_is_an_error),
      TEST(limits_scratch_limit_is_kept),
      TEST(texts_every_status_has_its_name),
      TEST(texts_a_thread_starts_without_an_error),
  };
  return check_summary("test_api", cmocka_run_group_tests(tests, make_ctx, destroy_ctx));
}
