/* SPDX-License-Identifier: Apache-2.0
 * Combinations of inputs in every tier: kinds of gates, head counts, state dtypes and layouts all with each other, the
 * rest at random; prefill in both forms, decode and paged calls, against float64 and bit for bit against each other. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "inputs.h"
#include "oracle.h"

/* Sums over K and up to 70 tokens in f32; gates go through exp and log. */
#define LIMIT_RECURRENT 1e-6
#define LIMIT_CHUNK 2e-6

static struct check_tier tiers[CHECK_TIERS_MAX];
static gdn_ctx *contexts[CHECK_TIERS_MAX];
static int n_tiers;

struct result {
  void *out, *states;
  size_t out_bytes, states_bytes;
};

static struct result take(const struct inputs *x) {
  struct result r;
  r.out = inputs_take_out(x, &r.out_bytes);
  r.states = inputs_take_states(x, &x->prefill.final_state, &r.states_bytes);
  return r;
}

/* Decode's sequences that store no state are verifies, of which only the first token has prefill's bits. */
static void same(const char *what, const struct inputs *x, const struct result *a, const struct result *b) {
  const int T = x->spec.n_tokens;
  const size_t token = a->out_bytes / (size_t)(x->spec.n_seqs * T);
  for (int i = 0; i < x->spec.n_seqs; i++) {
    const size_t at = (size_t)(i * T) * token;
    const size_t n = oracle_row(&x->decode.final_state, i) < 0 ? 1 : (size_t)T;
    check_same_bits(what, (char *)a->out + at, (char *)b->out + at, n * token, (size_t)inputs_bytes(x->spec.out));
  }
  check_same_bits(what, a->states, b->states, a->states_bytes, (size_t)inputs_bytes(x->spec.state_out));
}

static void prefill(struct inputs *x, gdn_ctx *ctx, int32_t form) {
  inputs_reset(x);
  x->prefill.form = form;
  check_ok("gdn_prefill", gdn_prefill(ctx, &x->prefill));
}

/* One batch through decode and both forms of prefill. */
static void run_tier(struct inputs *x, int tier, int with_decode) {
  struct result decoded;
  gdn_ctx *ctx = contexts[tier];
  if (with_decode) {
    inputs_reset(x);
    check_ok("gdn_decode", gdn_decode(ctx, &x->decode));
    decoded = take(x);
    inputs_check(x, LIMIT_RECURRENT, 0);
  }
  prefill(x, ctx, GDN_FORM_RECURRENT);
  if (with_decode) {
    struct result prefilled = take(x);
    same("decode and prefill", x, &decoded, &prefilled);
  }
  inputs_check(x, LIMIT_RECURRENT, 0);
  prefill(x, ctx, GDN_FORM_CHUNK);
  inputs_check(x, LIMIT_CHUNK, tiers[tier].bf16_chunks);
}

static void combinations(int n_tokens) {
  static const int32_t floats[] = {GDN_BF16, GDN_F16, GDN_F32};
  for (int i = 0; i < N_HEADS * N_GATES * 3 * 3 * 2 * 2; i++) {
    struct check_rng r = check_case("combination_%d/t%d", i, n_tokens);
    struct inputs_spec s = inputs_random(&r);
    s.heads = i % N_HEADS;
    s.gates = i / N_HEADS % N_GATES;
    s.state_in = floats[i / (N_HEADS * N_GATES) % 3];
    s.state_out = floats[i / (N_HEADS * N_GATES * 3) % 3];
    s.layout_in = 1 + i / (N_HEADS * N_GATES * 9) % 2;
    s.layout_out = 1 + i / (N_HEADS * N_GATES * 18) % 2;
    s.n_tokens = n_tokens;
    if (n_tokens > GDN_DECODE_TOKENS_MAX && i % 7 != 0) continue;
    struct inputs *x = inputs_make(&s, &r);
    for (int t = 0; t < n_tiers; t++) {
      check_case("combination_%d/t%d/%s", i, n_tokens, tiers[t].name);
      run_tier(x, t, n_tokens <= GDN_DECODE_TOKENS_MAX);
    }
    check_free_all();
  }
}

static void one_token_of_every_combination_agrees_with_float64(void **state) {
  (void)state;
  combinations(1);
}

static void five_tokens_of_every_combination_agree_with_float64(void **state) {
  (void)state;
  combinations(5);
}

static void more_than_a_chunk_agrees_with_float64(void **state) {
  (void)state;
  combinations(70);
}

/* ---- paged ---- */

/* Page 2 i + 1 for sequence i, as inputs_make numbers the rows that are read; for each of them. */
static gdn_page_table table_of(const struct inputs *x, int64_t *indices, int64_t *indptr, int64_t *last_len, int len) {
  int n = x->spec.n_seqs;
  for (int i = 0; i < n; i++) {
    indices[i] = 2 * i + 1;
    last_len[i] = len;
    indptr[i] = i;
  }
  indptr[n] = n;
  return (gdn_page_table){.struct_size = sizeof(gdn_page_table),
                          .n_seqs = n,
                          .n_pages = 2 * n + 1,
                          .page_size = 64,
                          .n_page_indices = n,
                          .page_indices = indices,
                          .page_indptr = indptr,
                          .last_page_len = last_len,
                          .index_dtype = GDN_I64};
}

/* The pages that a call wrote against the rows that the unpaged call wrote. */
static void same_pages(const struct inputs *x, const void *pool, const void *out) {
  size_t bytes;
  const void *got = inputs_take_out(x, &bytes);
  check_same_bits("out", got, out, bytes, (size_t)inputs_bytes(x->spec.out));
  check_same_bits("pool", x->pool_in, pool, x->pool_in_bytes, 2);
}

static void paged_case(int i) {
  int64_t indices[8], indptr[9], last_len[8];
  struct check_rng r = check_case("paged_%d", i);
  struct inputs_spec s = inputs_random(&r);
  s.state_out = s.state_in;
  s.layout_out = s.layout_in;
  s.in_place = 1;
  s.n_tokens = i % 2 == 0 ? 1 : 37;
  struct inputs *x = inputs_make(&s, &r);
  gdn_page_table table = table_of(x, indices, indptr, last_len, s.n_tokens + i % 2);
  gdn_paged_args paged = {.struct_size = sizeof paged, .pool = x->prefill.initial_state, .table = &table};
  paged.pool.rows = NULL;
  gdn_states rows = x->prefill.initial_state;
  rows.rows = indices;
  rows.rows_dtype = GDN_I64;
  last_len[0] += i % 4 == 1 ? 20 : 0;
  for (int t = 0; t < n_tiers; t++) {
    check_case("paged_%d/%s", i, tiers[t].name);
    for (int decode = 0; decode < 2; decode++) {
      size_t bytes;
      if (decode && s.n_tokens > 1) continue;
      for (int k = 0; decode && k < s.n_seqs; k++) last_len[k] = 2 + k;
      gdn_prefill_args p = x->prefill;
      gdn_decode_args d = x->decode;
      int64_t read[8], prefix[8];
      for (int k = 0; k < s.n_seqs; k++) {
        prefix[k] = last_len[k] - s.n_tokens;
        read[k] = prefix[k] > 0 ? indices[k] : -1;
      }
      p.final_state = d.final_state = rows;
      p.initial_state = d.initial_state = rows;
      p.initial_state.rows = d.initial_state.rows = read;
      p.prefix_lens = prefix;
      p.prefix_lens_dtype = GDN_I64;
      p.form = GDN_FORM_DEFAULT;
      inputs_reset(x);
      check_ok("unpaged", decode ? gdn_decode(contexts[t], &d) : gdn_prefill(contexts[t], &p));
      const void *out = inputs_take_out(x, &bytes);
      void *pool = check_alloc(x->pool_in_bytes);
      memcpy(pool, x->pool_in, x->pool_in_bytes);
      inputs_reset(x);
      p.initial_state = p.final_state = d.initial_state = d.final_state = (gdn_states){0};
      p.prefix_lens = NULL;
      check_ok("paged",
               decode ? gdn_decode_paged(contexts[t], &d, &paged) : gdn_prefill_paged(contexts[t], &p, &paged));
      same_pages(x, pool, out);
    }
  }
  check_free_all();
}

static void paged_calls_give_the_bits_of_unpaged_ones(void **state) {
  (void)state;
  for (int i = 0; i < 80; i++) paged_case(i);
}

/* ---- what is refused ---- */

static void combinations_that_do_not_exist_are_refused_by_name(void **state) {
  (void)state;
  gdn_ctx *ctx = contexts[0];
  struct check_rng r = check_case("refused");
  struct inputs_spec s = inputs_plain(HEADS_MORE_Q, GATES_RAW, 1);
  struct inputs *x = inputs_make(&s, &r);
  static const float gate[64];
#define BAD(status, name, ...)                                                                                         \
  do {                                                                                                                 \
    {                                                                                                                  \
      gdn_prefill_args a = x->prefill;                                                                                 \
      __VA_ARGS__;                                                                                                     \
      check_refused(gdn_prefill(ctx, &a), status, name);                                                               \
    }                                                                                                                  \
    gdn_decode_args a = x->decode;                                                                                     \
    __VA_ARGS__;                                                                                                       \
    check_refused(gdn_decode(ctx, &a), status, name);                                                                  \
  } while (0)
  inputs_reset(x);
  BAD(GDN_E_HEADS, "n_heads_q = -1", a.n_heads_q = -1);
  BAD(GDN_E_HEADS, "n_heads_q = 3 is not", a.n_heads_q = 3);
  BAD(GDN_E_HEADS, "n_heads_q = 1 is not", a.n_heads_q = 1);
  BAD(GDN_E_HEADS, "n_heads_v = 4 must", (a.n_heads_q = 4, a.n_heads_v = 4));
  BAD(GDN_E_OPTION, "g and raw_gates.a", a.g.data = gate);
  BAD(GDN_E_OPTION, "beta and raw_gates.b", a.beta.data = gate);
  BAD(GDN_E_OPTION, "GDN_LINEAR_G", a.flags |= GDN_LINEAR_G);
  BAD(GDN_E_NULL, "raw_gates.a_log is null", a.raw_gates.a_log = NULL);
  BAD(GDN_E_NULL, "raw_gates.a.data is null", a.raw_gates.a.data = NULL);
  BAD(GDN_E_DTYPE, "raw_gates.a.dtype = 3", a.raw_gates.a.dtype = GDN_I32);
  BAD(GDN_E_DTYPE, "raw_gates.b.dtype = 4", a.raw_gates.b.dtype = GDN_I64);
  BAD(GDN_E_DTYPE, "raw_gates.a_log_dtype = 77", a.raw_gates.a_log_dtype = 77);
  BAD(GDN_E_DTYPE, "raw_gates.dt_bias_dtype = -2", a.raw_gates.dt_bias_dtype = -2);
  BAD(GDN_E_VALUE, "softplus_threshold", a.raw_gates.softplus_threshold = -1);
  BAD(GDN_E_VALUE, "softplus_threshold", a.raw_gates.softplus_threshold = NAN);
  BAD(GDN_E_STRIDE, "raw_gates.a.token_stride", a.raw_gates.a.token_stride_elems = -1);
  BAD(GDN_E_OPTION, "initial_state.layout = 3", a.initial_state.layout = 3);
  BAD(GDN_E_OPTION, "final_state.layout = -1", a.final_state.layout = -1);
  BAD(GDN_E_DTYPE, "final_state.dtype = 3", a.final_state.dtype = GDN_I32);
  /* One memory seen as two kinds of rows. */
  BAD(GDN_E_ALIAS, "overlaps initial_state", a.initial_state.layout = GDN_LAYOUT_KV);
  BAD(GDN_E_ALIAS, "overlaps initial_state", a.initial_state.dtype = GDN_BF16);
  BAD(GDN_E_ALIAS, "raw_gates.a_log", a.out.data = (void *)(uintptr_t)a.raw_gates.a_log);
  BAD(GDN_E_ALIAS, "raw_gates.b", a.out.data = (void *)(uintptr_t)a.raw_gates.b.data);
#undef BAD
  if (!check_is_poison(x->out, x->out_bytes)) check_fail("out was written");
  check_same_bits("states", x->pool_out, x->start, x->pool_out_bytes, 4);
  check_free_all();
}

static int prepare(void **state) {
  (void)state;
  n_tiers = check_contexts(tiers, contexts);
  return 0;
}

static int end(void **state) {
  (void)state;
  check_contexts_end(contexts, n_tiers);
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(one_token_of_every_combination_agrees_with_float64),
      TEST(five_tokens_of_every_combination_agree_with_float64),
      TEST(more_than_a_chunk_agrees_with_float64),
      TEST(paged_calls_give_the_bits_of_unpaged_ones),
      TEST(combinations_that_do_not_exist_are_refused_by_name),
  };
  return check_summary("test_inputs", cmocka_run_group_tests(tests, prepare, end));
}
