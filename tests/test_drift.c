/* SPDX-License-Identifier: Apache-2.0
 * Thousands of decode steps in place next to float64: states of float32 within the bound of a single step, and how far
 * 16-bit states drift, whose rounding at every step adds up until the decay forgets it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "oracle.h"

enum { H = 2, HV = 4, K = 64, V = 64, BLOCK = 64 };

static struct check_tier tiers[CHECK_TIERS_MAX];
static int n_tiers;

/* Tokens of one sequence, BLOCK at a time, so that float64 can follow. */
struct tokens {
  uint16_t q[BLOCK * H * K], k[BLOCK * H * K], v[BLOCK * HV * V];
  float g[BLOCK * HV], beta[BLOCK * HV], out[BLOCK * HV * V];
};

static void draw(struct tokens *t, double slowest, struct check_rng *r) {
  for (int i = 0; i < BLOCK * H * K; i++) {
    t->q[i] = check_to_bf16((float)check_normal(r));
    t->k[i] = check_to_bf16((float)check_normal(r));
  }
  for (int i = 0; i < BLOCK * HV * V; i++) t->v[i] = check_to_bf16((float)check_normal(r));
  for (int i = 0; i < BLOCK * HV; i++) {
    /* Heads decay at different rates, the slowest as exp(-slowest). */
    t->g[i] = (float)(check_uniform(r, -1, 0) * slowest * pow(30, i % HV));
    t->beta[i] = (float)check_uniform(r, 0, 1);
  }
}

static double distance(const void *got, int32_t dtype, const double *want, int64_t n) {
  double error2 = 0, norm2 = 0;
  for (int64_t i = 0; i < n; i++) {
    double e = oracle_number(got, i, dtype) - want[i];
    error2 += e * e;
    norm2 += want[i] * want[i];
  }
  return sqrt(error2 / norm2);
}

/* Runs steps; the largest distance of out and of the state at the end of a block. */
static void run(gdn_ctx *ctx, int32_t dtype, int n_steps, double slowest, struct check_rng *r, double *out_error,
                double *state_error) {
  const int64_t block = (int64_t)HV * V * K;
  struct tokens *t = calloc(1, sizeof *t);
  double *states = calloc((size_t)block, 8), *want = calloc((size_t)BLOCK * HV * V, 8);
  void *pool = calloc((size_t)block, 4);
  gdn_states own = {.data = pool, .n_rows = 1, .dtype = dtype};
  *out_error = *state_error = 0;
  for (int done = 0; done < n_steps; done += BLOCK) {
    draw(t, slowest, r);
    for (int i = 0; i < BLOCK; i++) {
      gdn_decode_args a = {.struct_size = sizeof a,
                           .flags = GDN_L2NORM_QK,
                           .n_seqs = 1,
                           .n_heads_k = H,
                           .n_heads_v = HV,
                           .dim_k = K,
                           .dim_v = V,
                           .q = {.data = t->q + i * H * K},
                           .k = {.data = t->k + i * H * K},
                           .v = {.data = t->v + i * HV * V},
                           .g = {.data = t->g + i * HV},
                           .beta = {.data = t->beta + i * HV},
                           .out = {.data = t->out + i * HV * V, .dtype = GDN_F32},
                           .initial_state = own,
                           .final_state = own};
      check_ok("gdn_decode", gdn_decode(ctx, &a));
    }
    oracle_continue(&(gdn_prefill_args){.flags = GDN_L2NORM_QK,
                                        .n_seqs = 1,
                                        .n_tokens = BLOCK,
                                        .n_heads_k = H,
                                        .n_heads_v = HV,
                                        .dim_k = K,
                                        .dim_v = V,
                                        .q = {.data = t->q},
                                        .k = {.data = t->k},
                                        .v = {.data = t->v},
                                        .g = {.data = t->g},
                                        .beta = {.data = t->beta}},
                    want, states);
    *out_error = fmax(*out_error, distance(t->out, GDN_F32, want, BLOCK * HV * V));
    *state_error = fmax(*state_error, distance(pool, dtype, states, block));
  }
  free(t);
  free(states);
  free(want);
  free(pool);
}

static void f32_states_stay_within_the_bound_of_f32(void **state) {
  (void)state;
  for (int i = 0; i < n_tiers; i++) {
    double out, states;
    struct check_rng r = check_case("f32/%s", tiers[i].name);
    gdn_ctx *ctx = check_ctx(&tiers[i], 1);
    run(ctx, GDN_F32, 16384, 1e-4, &r, &out, &states);
    printf("16384 steps, f32 states, %s: out %.3g, state %.3g\n", tiers[i].name, out, states);
    check_limit("out", out, 1e-6);
    check_limit("state", states, 1e-6);
    gdn_ctx_destroy(ctx);
  }
}

/* The measured drift; beta renews a state even where nothing decays, so that it levels out. */
static void narrow_states_drift_within_their_bound(void **state) {
  (void)state;
  static const struct {
    const char *name;
    int32_t dtype;
    double limit;
  } kinds[] = {{"bf16", GDN_BF16, 3e-2}, {"f16", GDN_F16, 4e-3}};
  for (int i = 0; i < n_tiers; i++)
    for (int k = 0; k < 2; k++) {
      double out, states;
      struct check_rng r = check_case("%s/%s", kinds[k].name, tiers[i].name);
      gdn_ctx *ctx = check_ctx(&tiers[i], 1);
      run(ctx, kinds[k].dtype, 4096, 1e-4, &r, &out, &states);
      printf("4096 steps, %s states, %s: out %.3g, state %.3g\n", kinds[k].name, tiers[i].name, out, states);
      check_limit("out", out, kinds[k].limit);
      check_limit("state", states, kinds[k].limit);
      gdn_ctx_destroy(ctx);
    }
}

static int prepare(void **state) {
  (void)state;
  n_tiers = check_tiers(tiers);
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(f32_states_stay_within_the_bound_of_f32),
      TEST(narrow_states_drift_within_their_bound),
  };
  return check_summary("test_drift", cmocka_run_group_tests(tests, prepare, NULL));
}
