/* SPDX-License-Identifier: Apache-2.0
 * gdn_gating against float64, on extreme values, and bit for bit against gates fused into decode and prefill. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "inputs.h"
#include "oracle.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define N_HEADS_MAX 100
/* Three functions in f32 one after the other, each good to a unit or two of 2^-24; g also has the rounding of
 * a + dt_bias, down to -34, of which exp makes as many units. */
#define LIMIT_BETA (8 * 0x1p-24)
#define LIMIT_G ((8 + 34) * 0x1p-24)

static struct check_tier tiers[CHECK_TIERS_MAX];
static gdn_ctx *contexts[CHECK_TIERS_MAX];
static int n_tiers;

static gdn_tensor wide_array(int64_t n_tokens, int n_heads, int32_t dtype, int pad, double lo, double hi,
                             struct check_rng *r) {
  int64_t head_stride = 1 + pad, token_stride = n_heads * head_stride + pad;
  int64_t n = (n_tokens - 1) * token_stride + (n_heads - 1) * head_stride + 1;
  void *data = check_alloc_tight((size_t)n * (size_t)inputs_bytes(dtype));
  for (int64_t i = 0; i < n; i++) inputs_put(data, i, dtype, check_uniform(r, lo, hi));
  check_protect(data);
  return (gdn_tensor){data, token_stride, head_stride, dtype, 0};
}

/* g and beta, dense, of n_tokens tokens. */
static gdn_gating_args gating_args(const gdn_raw_gates *raw, int64_t n_tokens, int n_heads, float *g, float *beta) {
  return (gdn_gating_args){.struct_size = sizeof(gdn_gating_args),
                           .n_tokens = n_tokens,
                           .n_heads = n_heads,
                           .raw_gates = *raw,
                           .g = {.data = g},
                           .beta = {.data = beta}};
}

static void relative(const char *what, double got, double want, double limit) {
  if (want == 0 || fabs(want) < 1e-37)
    check_limit(what, fabs(got - want), 1e-37);
  else
    check_limit(what, fabs(got - want) / fabs(want), limit);
}

static void gating_agrees_with_float64(void **state) {
  (void)state;
  static const int32_t floats[] = {GDN_F32, GDN_BF16, GDN_F16};
  static const int heads[] = {1, 3, 8, 17, 32, 64, 65, N_HEADS_MAX};
  for (int i = 0; i < 48; i++) {
    struct check_rng r = check_case("gating_%d", i);
    int n_heads = heads[i % COUNT(heads)], pad = i % 3;
    int64_t n = 1 + i * 5;
    gdn_tensor a_log = wide_array(1, n_heads, floats[i % 3], 0, -8, 3, &r);
    gdn_tensor bias = wide_array(1, n_heads, floats[i / 2 % 3], 0, -4, 4, &r);
    gdn_raw_gates raw = {.a = wide_array(n, n_heads, floats[i / 3 % 3], pad, -30, 30, &r),
                         .b = wide_array(n, n_heads, floats[i / 4 % 3], pad, -30, 30, &r),
                         .a_log = a_log.data,
                         .dt_bias = i % 5 ? bias.data : NULL,
                         .a_log_dtype = a_log.dtype,
                         .dt_bias_dtype = bias.dtype,
                         .softplus_threshold = i % 4 == 3 ? 2.5f : 0};
    float *g = check_alloc_tight((size_t)(n * n_heads) * 4), *beta = check_alloc_tight((size_t)(n * n_heads) * 4);
    for (int t = 0; t < n_tiers; t++) {
      check_case("gating_%d/%s", i, tiers[t].name);
      gdn_gating_args args = gating_args(&raw, n, n_heads, g, beta);
      check_ok("gdn_gating", gdn_gating(contexts[t], &args));
      for (int64_t k = 0; k < n * n_heads; k++) {
        relative("g", g[k], oracle_log_decay(&raw, n_heads, k / n_heads, k % n_heads), LIMIT_G);
        relative("beta", beta[k], oracle_beta(&raw, n_heads, k / n_heads, k % n_heads), LIMIT_BETA);
      }
      /* A token alone, and one half alone into head-major arrays. */
      float one[N_HEADS_MAX], *turned = check_alloc((size_t)(n * n_heads) * 4);
      gdn_gating_args last = args;
      last.n_tokens = 1;
      last.raw_gates.a.data = (const char *)raw.a.data + (n - 1) * raw.a.token_stride_elems * inputs_bytes(raw.a.dtype);
      last.raw_gates.b.data = last.beta.data = NULL;
      last.g.data = one;
      check_ok("gdn_gating", gdn_gating(contexts[t], &last));
      check_same_bits("g of one token", one, g + (n - 1) * n_heads, (size_t)n_heads * 4, 4);
      args.raw_gates.a.data = args.raw_gates.a_log = args.raw_gates.dt_bias = args.g.data = NULL;
      args.beta = (gdn_tensor_out){turned, 1, n, GDN_F32, 0};
      check_ok("gdn_gating", gdn_gating(contexts[t], &args));
      for (int64_t k = 0; k < n * n_heads; k++)
        check_same_bits("beta turned", turned + k % n_heads * n + k / n_heads, beta + k, 4, 4);
    }
    check_free_all();
  }
}

/* Every extreme value with every other: numbers, and the ones that the header promises. */
static void extreme_values_give_no_nan(void **state) {
  (void)state;
  static const float values[] = {0,     -0.0f,  1,      -1,      20,       20.001f,  -20,       88,        -88,
                                 1e30f, -1e30f, 1e-30f, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, 0x1p-149f, -0x1p-149f};
  enum { N = COUNT(values) };
  for (int t = 0; t < n_tiers; t++) {
    check_case("extreme/%s", tiers[t].name);
    for (int bias = 0; bias < N; bias++) {
      float a[N * N], biases[N], g[N * N], beta[N * N];
      for (int i = 0; i < N * N; i++) a[i] = values[i / N];
      for (int i = 0; i < N; i++) biases[i] = values[bias];
      const gdn_raw_gates raw = {.a = {.data = a}, .b = {.data = a}, .a_log = values, .dt_bias = biases};
      gdn_gating_args args = gating_args(&raw, N, N, g, beta);
      check_ok("gdn_gating", gdn_gating(contexts[t], &args));
      for (int i = 0; i < N * N; i++) {
        float x = values[i / N], rate = values[i % N];
        if (!(g[i] <= 0)) check_fail("g = %g of a %g, a_log %g, dt_bias %g", g[i], x, rate, values[bias]);
        if (!(beta[i] >= 0 && beta[i] <= 1)) check_fail("beta = %g of %g", beta[i], x);
        if (rate == -INFINITY && g[i] != 0) check_fail("a_log -inf must not decay");
        if (isinf(x) && x < 0 && values[bias] < 1e30f && g[i] != 0) check_fail("a -inf must not decay");
        if (rate == INFINITY && x == 1 && values[bias] == 1 && expf(g[i]) != 0) check_fail("a_log inf must forget");
      }
    }
    float nan = NAN, one = 1, g, beta;
    const gdn_raw_gates raw = {.a = {.data = &nan}, .b = {.data = &nan}, .a_log = &one};
    gdn_gating_args args = gating_args(&raw, 1, 1, &g, &beta);
    check_ok("gdn_gating", gdn_gating(contexts[t], &args));
    if (!isnan(g) || !isnan(beta)) check_fail("NaN must stay");
  }
}

/* Linear decays of 0, 1 and subnormal size through the forms that take their logarithm. */
static void extreme_linear_decays_are_those_of_their_logs(void **state) {
  (void)state;
  static const float values[] = {0, 1, 0x1p-140f, FLT_MIN, 0.5f, 0.99999994f, 1.5f};
  for (int i = 0; i < 24; i++) {
    struct check_rng r = check_case("linear_%d", i);
    struct inputs_spec s = inputs_random(&r);
    s.gates = GATES_LINEAR;
    s.n_tokens = i % 2 ? 7 : 70;
    s.strides = STRIDES_DENSE;
    s.out = s.state_in = s.state_out = GDN_F32;
    struct inputs *x = inputs_make(&s, &r);
    int64_t n = (int64_t)s.n_seqs * s.n_tokens * x->n_heads;
    float *alpha = check_alloc((size_t)n * 4);
    for (int64_t k = 0; k < n; k++) alpha[k] = k % 4 == 3 ? values[k / 4 % COUNT(values)] : 0.9f;
    x->prefill.g.data = alpha;
    inputs_oracle(x);
    for (int t = 0; t < n_tiers; t++)
      for (int form = GDN_FORM_RECURRENT; form <= GDN_FORM_CHUNK; form++) {
        check_case("linear_%d/%s/form_%d", i, tiers[t].name, form);
        inputs_reset(x);
        x->prefill.form = form;
        check_ok("gdn_prefill", gdn_prefill(contexts[t], &x->prefill));
        inputs_check(x, 4e-6, form == GDN_FORM_CHUNK && tiers[t].bf16_chunks);
      }
    check_free_all();
  }
}

static void fused_gates_give_the_bits_of_gating(void **state) {
  (void)state;
  for (int i = 0; i < 40; i++) {
    struct check_rng r = check_case("fused_%d", i);
    struct inputs_spec s = inputs_random(&r);
    s.gates = GATES_RAW;
    s.n_tokens = i % 3 == 0 ? 1 : i % 3 == 1 ? 5 : 70;
    struct inputs *x = inputs_make(&s, &r);
    int64_t n = (int64_t)s.n_seqs * s.n_tokens;
    float *g = check_alloc((size_t)(n * x->n_heads) * 4), *beta = check_alloc((size_t)(n * x->n_heads) * 4);
    for (int t = 0; t < n_tiers; t++)
      for (int call = 0; call < 3; call++) {
        size_t out_bytes, state_bytes;
        void *out[2], *states[2];
        check_case("fused_%d/%s/call_%d", i, tiers[t].name, call);
        if (call == 2 && s.n_tokens > GDN_DECODE_TOKENS_MAX) continue;
        gdn_gating_args args = gating_args(&x->prefill.raw_gates, n, x->n_heads, g, beta);
        check_ok("gdn_gating", gdn_gating(contexts[t], &args));
        for (int given = 0; given < 2; given++) {
          gdn_prefill_args p = x->prefill;
          gdn_decode_args d = x->decode;
          p.form = GDN_FORM_RECURRENT + call % 2;
          if (given) {
            p.raw_gates = d.raw_gates = (gdn_raw_gates){0};
            p.g.data = d.g.data = g;
            p.beta.data = d.beta.data = beta;
          }
          inputs_reset(x);
          check_ok("call", call == 2 ? gdn_decode(contexts[t], &d) : gdn_prefill(contexts[t], &p));
          out[given] = inputs_take_out(x, &out_bytes);
          states[given] = inputs_take_states(x, &x->prefill.final_state, &state_bytes);
        }
        check_same_bits("out", out[0], out[1], out_bytes, (size_t)inputs_bytes(s.out));
        check_same_bits("states", states[0], states[1], state_bytes, (size_t)inputs_bytes(s.state_out));
      }
    check_free_all();
  }
}

static void bad_arguments_are_named(void **state) {
  (void)state;
  static float a[32], out[4][32];
  const gdn_raw_gates raw = {.a = {.data = a}, .b = {.data = a}, .a_log = a};
  const gdn_gating_args good = gating_args(&raw, 4, 8, out[0], out[1]);
  check_case("bad");
  check_refused(gdn_gating(NULL, &good), GDN_E_NULL, "ctx");
  check_refused(gdn_gating(contexts[0], NULL), GDN_E_NULL, "args");
#define BAD(status, name, ...)                                                                                         \
  do {                                                                                                                 \
    gdn_gating_args x = good;                                                                                          \
    __VA_ARGS__;                                                                                                       \
    check_refused(gdn_gating(contexts[0], &x), status, name);                                                          \
  } while (0)
  BAD(GDN_E_STRUCT_SIZE, "struct_size", x.struct_size = 3);
  BAD(GDN_E_SIZE, "n_tokens = -1", x.n_tokens = -1);
  BAD(GDN_E_HEADS, "n_heads = 0", x.n_heads = 0);
  BAD(GDN_E_NULL, "raw_gates.a.data is null", (x.raw_gates.a.data = NULL, x.raw_gates.a_log = NULL));
  BAD(GDN_E_NULL, "raw_gates.b.data is null", x.raw_gates.b.data = NULL);
  BAD(GDN_E_NULL, "g.data is null", x.g.data = NULL);
  BAD(GDN_E_NULL, "beta.data is null", x.beta.data = NULL);
  BAD(GDN_E_NULL, "a_log is null", x.raw_gates.a_log = NULL);
  BAD(GDN_E_DTYPE, "g.dtype = 2", x.g.dtype = GDN_BF16);
  BAD(GDN_E_DTYPE, "raw_gates.b.dtype = 3", x.raw_gates.b.dtype = GDN_I32);
  BAD(GDN_E_STRIDE, "beta", x.beta.head_stride_elems = 4, x.beta.token_stride_elems = 4);
  BAD(GDN_E_VALUE, "softplus_threshold", x.raw_gates.softplus_threshold = NAN);
  BAD(GDN_E_ALIAS, "g at", x.g.data = out[1]);
  BAD(GDN_E_ALIAS, "raw_gates.a", x.g.data = a);
#undef BAD
  gdn_gating_args empty = {.struct_size = sizeof empty, .n_heads = 8};
  check_ok("gdn_gating of nothing", gdn_gating(contexts[0], &empty));
  for (int i = 0; i < 64; i++)
    if (out[i / 32][i % 32] != 0) check_fail("an output was written");
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
      TEST(gating_agrees_with_float64),
      TEST(extreme_values_give_no_nan),
      TEST(extreme_linear_decays_are_those_of_their_logs),
      TEST(fused_gates_give_the_bits_of_gating),
      TEST(bad_arguments_are_named),
  };
  return check_summary("test_gates", cmocka_run_group_tests(tests, prepare, end));
}
