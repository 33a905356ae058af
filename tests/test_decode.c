/* SPDX-License-Identifier: Apache-2.0
 * gdn_decode in every tier: against float64 over shapes, layouts and state rows, and bit for bit against prefill. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "batch.h"
#include "check.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define N_MAX 40

/* One token in f32: two sums over K in order, up to 256 terms, and a handful of roundings: 17 units of 2^-24. */
#define LIMIT_F32 1e-6

static struct check_tier tiers[CHECK_TIERS_MAX];
static int n_tiers;
static int32_t ones[N_MAX];

static void decode(gdn_ctx *ctx, struct batch *b) {
  gdn_decode_args a = batch_decode_args(b, 0);
  batch_reset(b);
  check_ok("gdn_decode", gdn_decode(ctx, &a));
}

/* More than one sequence each: out of a single token from nothing is a multiple of k . q, which may cancel. */
static const struct batch_shape shapes[] = {
    {1, 1, 32, 32, 5, ones},   {1, 1, 128, 128, 4, ones}, {1, 4, 64, 64, 7, ones},   {2, 2, 96, 160, 9, ones},
    {3, 6, 32, 64, 6, ones},   {2, 4, 160, 96, 5, ones},  {1, 1, 256, 32, 8, ones},  {1, 2, 32, 256, 8, ones},
    {2, 2, 256, 256, 6, ones}, {2, 2, 192, 224, 6, ones}, {4, 8, 128, 128, 6, ones}, {1, 3, 64, 32, N_MAX, ones},
    {1, 1, 64, 64, 0, ones}};

static void decode_shapes_and_layouts_agree_with_float64(void **state) {
  (void)state;
  for (int s = 0; s < COUNT(shapes); s++) {
    for (int states = 0; states < BATCH_N_STATES; states++) {
      struct check_rng r = check_case("shape_%d/states_%d", s, states);
      struct batch *b = batch_make(&shapes[s], &r);
      for (int64_t i = 0; i < b->n_tokens * shapes[s].n_heads_v; i += 5) b->g[i] = i % 2 ? -INFINITY : -26;
      batch_place(b, (s + states) % BATCH_N_LAYOUTS, states, (s + states) % 3, (s + states) % 4 != 3, &r);
      if (s % 2 == 1) {
        b->args.scale = 0.37f;
        b->args.eps = 2.5f;
      }
      if (s % 3 == 2) b->args.flags = 0;
      batch_oracle(b);
      for (int i = 0; i < n_tiers; i++) {
        check_case("shape_%d/states_%d/%s", s, states, tiers[i].name);
        gdn_ctx *ctx = check_ctx(&tiers[i], 1 + s % 3);
        decode(ctx, b);
        batch_check(b, LIMIT_F32);
        gdn_ctx_destroy(ctx);
      }
      check_free_all();
    }
  }
}

static void decode_gives_the_bits_of_prefill_of_one(void **state) {
  (void)state;
  for (int s = 0; s < COUNT(shapes); s++) {
    struct check_rng r = check_case("prefill/shape_%d", s);
    struct batch *b = batch_make(&shapes[s], &r);
    batch_place(b, s % BATCH_N_LAYOUTS, BATCH_POOL, GDN_F32, 1, &r);
    for (int i = 0; i < n_tiers; i++) {
      check_case("prefill/shape_%d/%s", s, tiers[i].name);
      gdn_ctx *ctx = check_ctx(&tiers[i], 2);
      decode(ctx, b);
      struct batch_result x = batch_take(b);
      batch_prefill(ctx, b, GDN_FORM_RECURRENT);
      struct batch_result y = batch_take(b);
      for (int64_t seq = 0; seq < b->shape.n_seqs; seq++) batch_same("decode and prefill", b, &x, seq, b, &y, seq);
      gdn_ctx_destroy(ctx);
    }
    check_free_all();
  }
}

static void decode_any_thread_count_gives_the_same_bits(void **state) {
  (void)state;
  static const int counts[] = {1, 2, 3, 5};
  for (int s = 0; s < COUNT(shapes); s++) {
    struct check_rng r = check_case("threads/shape_%d", s);
    struct batch *b = batch_make(&shapes[s], &r);
    batch_place(b, BATCH_FUSED, BATCH_POOL, GDN_BF16, 1, &r);
    for (int i = 0; i < n_tiers; i++) {
      struct batch_result first = {NULL, NULL};
      for (int c = 0; c < COUNT(counts); c++) {
        check_case("threads/shape_%d/%d/%s", s, counts[c], tiers[i].name);
        gdn_ctx *ctx = check_ctx(&tiers[i], counts[c]);
        decode(ctx, b);
        struct batch_result x = batch_take(b);
        if (c == 0) first = x;
        for (int64_t seq = 0; seq < b->shape.n_seqs; seq++)
          batch_same("against one thread", b, &first, seq, b, &x, seq);
        gdn_ctx_destroy(ctx);
      }
    }
    check_free_all();
  }
}

/* A step in place repeated many times stays with float64: the decay of each step forgets the error of those before. */
static void decode_many_steps_in_place_agree_with_float64(void **state) {
  (void)state;
  static const int32_t lens[] = {150, 150};
  struct batch_shape shape = {1, 2, 64, 96, 2, lens};
  struct check_rng r = check_case("steps");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
  batch_oracle(b);
  for (int i = 0; i < n_tiers; i++) {
    check_case("steps/%s", tiers[i].name);
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    batch_reset(b);
    for (int64_t t = 0; t < lens[0]; t++) {
      gdn_decode_args a = batch_decode_args(b, t);
      check_ok("gdn_decode", gdn_decode(ctx, &a));
    }
    batch_check(b, LIMIT_F32);
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

static void decode_nan_stays_in_its_sequence(void **state) {
  (void)state;
  struct batch_shape shape = {1, 2, 64, 64, 5, ones};
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    struct batch_result clean = {NULL, NULL};
    for (int array = -1; array < 5; array++) {
      struct check_rng r = check_case("nan");
      struct batch *b = batch_make(&shape, &r);
      float *arrays[] = {b->q, b->k, b->v, b->g, b->beta};
      int64_t per_token[] = {64, 64, 128, 2, 2};
      check_case("nan/array_%d/%s", array, tiers[i].name);
      for (int64_t j = 0; array >= 0 && j < per_token[array]; j++) arrays[array][2 * per_token[array] + j] = NAN;
      batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
      decode(ctx, b);
      struct batch_result x = batch_take(b);
      if (array < 0) clean = x;
      for (int64_t seq = 0; seq < shape.n_seqs; seq++) {
        if (seq != 2) batch_same("beside a sequence of NaN", b, &clean, seq, b, &x, seq);
      }
      if (array >= 0 && !isnan(check_from_bf16(x.out[2 * 128]))) check_fail("NaN inputs gave numbers");
    }
    gdn_ctx_destroy(ctx);
    check_free_all();
  }
}

/* Rows 2 GiB apart, of which only a few pages exist. */
static void decode_pool_beyond_4_gib_uses_the_right_rows(void **state) {
  (void)state;
  const int64_t stride = (int64_t)1 << 29, n_rows = 5, block = 2 * 32 * 32;
  size_t bytes = (size_t)(n_rows * stride) * sizeof(float);
  float *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pool == MAP_FAILED) {
    check_skip("pool beyond 4 GiB", "no address space");
    return;
  }
  static const int32_t rows_in[] = {4, 3}, rows_out[] = {2, 3};
  struct batch_shape shape = {1, 2, 32, 32, 2, ones};
  struct check_rng r = check_case("4_gib");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  batch_oracle(b);
  const float *initial = b->args.initial_state.data;
  gdn_decode_args a = batch_decode_args(b, 0);
  a.initial_state = (gdn_states){pool, n_rows, stride, rows_in, GDN_I32, GDN_F32, 0, 0};
  a.final_state = (gdn_states){pool, n_rows, stride, rows_out, GDN_I32, GDN_F32, 0, 0};
  for (int i = 0; i < n_tiers; i++) {
    check_case("4_gib/%s", tiers[i].name);
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int seq = 0; seq < 2; seq++) memcpy(pool + rows_in[seq] * stride, initial + seq * block, (size_t)block * 4);
    check_ok("gdn_decode", gdn_decode(ctx, &a));
    for (int seq = 0; seq < 2; seq++) {
      check_close("state", pool + rows_out[seq] * stride, b->want_states + seq * block, block, LIMIT_F32);
    }
    gdn_ctx_destroy(ctx);
  }
  munmap(pool, bytes);
  check_free_all();
}

static int prepare(void **state) {
  (void)state;
  for (int i = 0; i < N_MAX; i++) ones[i] = 1;
  n_tiers = check_tiers(tiers);
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(decode_shapes_and_layouts_agree_with_float64),
      TEST(decode_gives_the_bits_of_prefill_of_one),
      TEST(decode_any_thread_count_gives_the_same_bits),
      TEST(decode_many_steps_in_place_agree_with_float64),
      TEST(decode_nan_stays_in_its_sequence),
      TEST(decode_pool_beyond_4_gib_uses_the_right_rows),
  };
  return check_summary("test_decode", cmocka_run_group_tests(tests, prepare, NULL));
}
