/* SPDX-License-Identifier: Apache-2.0
 * Several tokens per sequence: verify, states after each token, commit, against one token at a time: bit for bit, but
 * for the outputs of a verify after its first token, which have a bound. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "inputs.h"
#include "oracle.h"
#include "verify_bound.h"

static struct check_tier tiers[CHECK_TIERS_MAX];
static gdn_ctx *contexts[CHECK_TIERS_MAX];
static int n_tiers;

/* A batch of T tokens run one at a time from its initial states in a float32 pool of one row per sequence. */
struct steps {
  int T, n_seqs, n_heads, dim_v;
  int64_t row;   /* elements of a row */
  float *states; /* [T + 1][n_seqs][row]: before the first token, after each */
  float *pool;
  char *out; /* [n_seqs][T][n_heads][dim_v] */
};

static gdn_tensor shifted(gdn_tensor t, int64_t token, int n_tokens) {
  if (t.data == NULL) return t;
  t.data = (const char *)t.data + token * t.token_stride_elems * inputs_bytes(t.dtype);
  t.token_stride_elems *= n_tokens;
  return t;
}

static gdn_decode_args nth_token(const struct inputs *x, int64_t t) {
  gdn_decode_args a = x->decode;
  int n = x->spec.n_tokens;
  a.n_tokens = 0;
  a.q = shifted(a.q, t, n);
  a.k = shifted(a.k, t, n);
  a.v = shifted(a.v, t, n);
  a.g = shifted(a.g, t, n);
  a.beta = shifted(a.beta, t, n);
  a.raw_gates.a = shifted(a.raw_gates.a, t, n);
  a.raw_gates.b = shifted(a.raw_gates.b, t, n);
  a.out.data = (char *)a.out.data + t * a.out.token_stride_elems * inputs_bytes(a.out.dtype);
  a.out.token_stride_elems *= n;
  return a;
}

static gdn_states packed(const struct inputs *x, void *data, int64_t n_rows) {
  return (gdn_states){.data = data, .n_rows = n_rows, .dtype = GDN_F32, .layout = x->spec.layout_in};
}

static struct steps run_steps(const struct inputs *x, gdn_ctx *ctx) {
  const struct inputs_spec *s = &x->spec;
  struct steps r = {.T = s->n_tokens, .n_seqs = s->n_seqs, .n_heads = x->n_heads, .dim_v = s->dim_v};
  const gdn_states *in = &x->decode.initial_state;
  size_t bytes;
  r.row = (int64_t)x->n_heads * s->dim_v * s->dim_k;
  size_t all = (size_t)(s->n_seqs * r.row) * 4;
  r.states = check_alloc(all * (size_t)(r.T + 1));
  r.pool = check_alloc(all);
  memset(r.pool, 0, all);
  for (int i = 0; i < s->n_seqs; i++) {
    int64_t row = oracle_row(in, i);
    for (int64_t j = 0; row >= 0 && j < r.row; j++)
      r.pool[i * r.row + j] = (float)oracle_number(in->data, row * in->row_stride_elems + j, in->dtype);
  }
  memcpy(r.states, r.pool, all);
  for (int t = 0; t < r.T; t++) {
    gdn_decode_args a = nth_token(x, t);
    a.initial_state = a.final_state = packed(x, r.pool, s->n_seqs);
    check_ok("gdn_decode", gdn_decode(ctx, &a));
    memcpy(r.states + (t + 1) * s->n_seqs * r.row, r.pool, all);
  }
  r.out = inputs_take_out(x, &bytes);
  return r;
}

static const float *state_after(const struct steps *s, int64_t seq, int64_t n) {
  return s->states + (n * s->n_seqs + seq) * s->row;
}

static struct inputs *verify_case(const char *name, int i, int n_tokens) {
  struct check_rng r = check_case("%s_%d", name, i);
  struct inputs_spec s = inputs_random(&r);
  s.n_tokens = n_tokens;
  s.state_in = i % 3 == 0 ? s.state_in : GDN_F32;
  return inputs_make(&s, &r);
}

/* ---- what the outputs of a verify may be off ---- */

#define UNIT 0x1p-24

/* Relative, of a row of q or k as float32 makes it: half the error of the norm's sum, and a handful of roundings. */
static double row_error(const gdn_prefill_args *a) {
  return UNIT * ((a->flags & GDN_L2NORM_QK) != 0 ? a->dim_k / 2 + 8 : 2);
}

/* And of a decay: its logarithm to 16 units, where it is one of raw gates, and the exponential to 4. */
static double decay_error(const gdn_prefill_args *a, double decay) {
  return decay > 0 && (a->flags & GDN_LINEAR_G) == 0 ? UNIT * (4 + 16 * fabs(log(decay))) : 0;
}

static void make_row(const gdn_prefill_args *a, enum oracle_array which, int64_t t, int64_t h, double scale,
                     double *row) {
  double sum = a->eps != 0 ? (double)a->eps : 1e-6;
  oracle_row_of(a, which, t, h, row);
  for (int i = 0; i < a->dim_k; i++) sum += row[i] * row[i];
  if ((a->flags & GDN_L2NORM_QK) != 0) scale /= sqrt(sum);
  for (int i = 0; i < a->dim_k; i++) row[i] *= scale;
}

/* Of head h of sequence seq, memory for it included. */
static struct verify_head head_of(const struct inputs *x, int64_t seq, int h) {
  const gdn_prefill_args *a = &x->prefill;
  const int64_t n = x->spec.n_tokens, K = a->dim_k, V = a->dim_v;
  double *q = check_alloc(sizeof *q * (size_t)(n * (2 * K + V + 3) + K * V)), error = 0;
  double *k = q + n * K, *v = k + n * K, *decay = v + n * V, *beta = decay + n, *errors = beta + n;
  for (int64_t t = 0; t < n; t++) {
    make_row(a, ORACLE_Q, seq * n + t, h, a->scale != 0 ? (double)a->scale : 1 / sqrt((double)K), q + t * K);
    make_row(a, ORACLE_K, seq * n + t, h, 1, k + t * K);
    oracle_row_of(a, ORACLE_V, seq * n + t, h, v + t * V);
    oracle_gates(a, seq * n + t, h, decay + t, beta + t);
    error += decay_error(a, decay[t]);
    errors[t] = error + 2 * row_error(a) + UNIT * 8; /* two rows make a product of keys; the rest is for beta */
  }
  oracle_load_state(a, seq, h, errors + n);
  return (struct verify_head){.n = (int)n,
                              .dim_k = (int)K,
                              .dim_v = (int)V,
                              .q = q,
                              .k = k,
                              .decay = decay,
                              .beta = beta,
                              .v = v,
                              .state = errors + n,
                              .input_error = errors};
}

/* [n_seqs T][n_heads][dim_v]: what out may differ from x->want_out. */
static double *make_limits(const struct inputs *x) {
  const struct inputs_spec *s = &x->spec;
  const int64_t n = s->n_tokens, V = s->dim_v;
  double *limits = check_alloc(sizeof *limits * (size_t)(s->n_seqs * n * x->n_heads * V));
  double *out = check_alloc(sizeof *out * (size_t)(n * V)), *limit = check_alloc(sizeof *limit * (size_t)(n * V));
  for (int64_t seq = 0; seq < s->n_seqs; seq++)
    for (int h = 0; h < x->n_heads; h++) {
      struct verify_head head = head_of(x, seq, h);
      verify_bound(&head, out, limit);
      for (int64_t t = 0; t < n; t++)
        memcpy(limits + ((seq * n + t) * x->n_heads + h) * V, limit + t * V, sizeof *limit * (size_t)V);
    }
  return limits;
}

static void check_bound(const struct inputs *x, const void *out, const double *limits) {
  const int64_t n = (int64_t)x->spec.n_seqs * x->spec.n_tokens * x->n_heads * x->spec.dim_v;
  for (int64_t i = 0; i < n; i++)
    check_limit("out, as a share of its bound",
                inputs_excess(oracle_number(out, i, x->spec.out), x->want_out[i], x->spec.out) / limits[i], 1);
}

/* ---- verify ---- */

/* The first count tokens of each sequence, of two dense outs. */
static void same_tokens(const char *what, const struct inputs *x, const char *out, const char *other, int count) {
  const int T = x->spec.n_tokens;
  const size_t token = (size_t)(x->n_heads * x->spec.dim_v * inputs_bytes(x->spec.out));
  for (int k = 0; k < x->spec.n_seqs * T; k++)
    if (k % T < count)
      check_same_bits(what, out + (size_t)k * token, other + (size_t)k * token, token,
                      (size_t)inputs_bytes(x->spec.out));
}

static gdn_decode_args verify_args(const struct inputs *x) {
  gdn_decode_args a = x->decode;
  a.final_state = (gdn_states){0};
  return a;
}

static const char *run_out(struct inputs *x, gdn_ctx *ctx, const gdn_decode_args *a) {
  size_t bytes;
  inputs_reset(x);
  check_ok("gdn_decode", gdn_decode(ctx, a));
  return inputs_take_out(x, &bytes);
}

static void verify_is_within_its_bound_and_leaves_states(void **state) {
  (void)state;
  for (int i = 0; i < 60; i++) {
    struct inputs *x = verify_case("verify", i, i == 59 ? GDN_DECODE_TOKENS_MAX : 1 + i % 9);
    double *limits = make_limits(x);
    for (int t = 0; t < n_tiers; t++) {
      check_case("verify_%d/%s", i, tiers[t].name);
      inputs_reset(x);
      struct steps steps = run_steps(x, contexts[t]);
      gdn_decode_args a = verify_args(x);
      const char *out = run_out(x, contexts[t], &a);
      same_tokens("first token", x, out, steps.out, 1);
      check_bound(x, out, limits);
      check_same_bits("states", x->pool_out, x->start, x->pool_out_bytes, 2);
    }
    check_free_all();
  }
}

/* A single sequence out of x, as a batch of its own. */
static gdn_decode_args only_sequence(const struct inputs *x, int seq, int64_t *row) {
  gdn_decode_args a = verify_args(x);
  const int64_t first = (int64_t)seq * x->spec.n_tokens;
  *row = oracle_row(&a.initial_state, seq);
  a.n_seqs = 1;
  a.initial_state.rows = row;
  a.initial_state.rows_dtype = GDN_I64;
  a.q = shifted(a.q, first, 1);
  a.k = shifted(a.k, first, 1);
  a.v = shifted(a.v, first, 1);
  a.g = shifted(a.g, first, 1);
  a.beta = shifted(a.beta, first, 1);
  a.raw_gates.a = shifted(a.raw_gates.a, first, 1);
  a.raw_gates.b = shifted(a.raw_gates.b, first, 1);
  a.out.data = (char *)a.out.data + first * a.out.token_stride_elems * inputs_bytes(a.out.dtype);
  return a;
}

/* More workers mean smaller slices of V. */
static void verify_gives_the_same_bits_in_any_batch_and_on_any_threads(void **state) {
  (void)state;
  static const int threads[] = {1, 3, 16};
  for (int t = 0; t < n_tiers; t++)
    for (int c = 0; c < 3; c++) {
      gdn_ctx *ctx = check_ctx(&tiers[t], threads[c]);
      for (int i = 0; i < 12; i++) {
        size_t bytes;
        struct inputs *x = verify_case("parts", i, 2 + i % 5);
        gdn_decode_args a = verify_args(x);
        check_case("parts_%d/threads_%d/%s", i, threads[c], tiers[t].name);
        const char *want = run_out(x, contexts[t], &a), *out = run_out(x, ctx, &a);
        same_tokens("out with other threads", x, out, want, x->spec.n_tokens);
        inputs_reset(x);
        for (int seq = 0; seq < x->spec.n_seqs; seq++) {
          int64_t row;
          a = only_sequence(x, seq, &row);
          check_ok("gdn_decode", gdn_decode(ctx, &a));
        }
        out = inputs_take_out(x, &bytes);
        same_tokens("out of sequences alone", x, out, want, x->spec.n_tokens);
        check_free_all();
      }
      gdn_ctx_destroy(ctx);
    }
}

/* A sequence whose states are stored has the bits of single steps, one of the same batch without is a verify. */
static void each_sequence_of_a_batch_is_stored_or_verified_by_itself(void **state) {
  (void)state;
  for (int i = 0; i < 20; i++) {
    struct check_rng r = check_case("mixed_%d", i);
    struct inputs_spec s = inputs_random(&r);
    int64_t rows[8];
    s.n_seqs = 3;
    s.n_tokens = 2 + i % 4;
    s.layout_in = GDN_LAYOUT_VK;
    struct inputs *x = inputs_make(&s, &r);
    for (int k = 0; k < 3; k++) rows[k] = k == 1 ? -1 : k;
    int64_t row = (int64_t)x->n_heads * s.dim_k * s.dim_v;
    float *pool = check_alloc((size_t)(3 * row) * 4);
    for (int t = 0; t < n_tiers; t++) {
      check_case("mixed_%d/%s", i, tiers[t].name);
      inputs_reset(x);
      struct steps steps = run_steps(x, contexts[t]);
      gdn_decode_args a = verify_args(x);
      const char *verified = run_out(x, contexts[t], &a);
      a.final_state = packed(x, pool, 3);
      a.final_state.rows = rows;
      a.final_state.rows_dtype = GDN_I64;
      const char *out = run_out(x, contexts[t], &a);
      size_t seq = (size_t)(s.n_tokens * x->n_heads * s.dim_v * inputs_bytes(s.out));
      for (size_t k = 0; k < 3; k++)
        check_same_bits(k == 1 ? "out of the verified" : "out of the stored", out + k * seq,
                        (k == 1 ? verified : steps.out) + k * seq, seq, (size_t)inputs_bytes(s.out));
    }
    check_free_all();
  }
}

/* With a decay of 0 a quotient of decays would be NaN. */
static void verify_forgets_with_decay_zero(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    struct check_rng r = check_case("forget_%d", i);
    struct inputs_spec s = inputs_random(&r);
    s.gates = GATES_LOG;
    s.n_tokens = 6;
    s.strides = STRIDES_DENSE;
    struct inputs *x = inputs_make(&s, &r);
    const int64_t n = (int64_t)s.n_seqs * s.n_tokens * x->n_heads;
    float *g = check_alloc((size_t)n * sizeof *g);
    for (int64_t k = 0; k < n; k++) g[k] = (k / x->n_heads + i) % 3 == 0 ? -INFINITY : -0.1f;
    x->decode.g.data = x->prefill.g.data = g;
    inputs_oracle(x);
    double *limits = make_limits(x);
    for (int t = 0; t < n_tiers; t++) {
      check_case("forget_%d/%s", i, tiers[t].name);
      gdn_decode_args a = verify_args(x);
      check_bound(x, run_out(x, contexts[t], &a), limits);
    }
    check_free_all();
  }
}

/* ---- states ---- */

/* Outputs of sequences of which any state is stored are those of single steps. */
static void check_stored_outputs(const struct inputs *x, const struct steps *s, const int64_t *rows) {
  size_t bytes;
  const char *out = inputs_take_out(x, &bytes);
  const size_t token = (size_t)(x->n_heads * x->spec.dim_v * inputs_bytes(x->spec.out));
  for (int seq = 0; seq < s->n_seqs; seq++) {
    int stored = 0;
    for (int t = 0; t < s->T; t++) stored |= rows[seq * s->T + t] >= 0;
    const size_t at = (size_t)(seq * s->T) * token;
    if (stored) check_same_bits("out", out + at, s->out + at, (size_t)s->T * token, (size_t)inputs_bytes(x->spec.out));
  }
}

/* Rows of all tokens in reverse order, each third one skipped. */
static void states_after_each_token_are_those_of_single_steps(void **state) {
  (void)state;
  for (int i = 0; i < 60; i++) {
    int T = 1 + i % 8;
    struct inputs *x = verify_case("token_states", i, T);
    int n = x->spec.n_seqs * T;
    int64_t row = (int64_t)x->n_heads * x->spec.dim_k * x->spec.dim_v, rows[64];
    float *pool = check_alloc((size_t)(n * row) * 4);
    for (int k = 0; k < n; k++) rows[k] = (k + i) % 3 == 0 ? -1 : n - 1 - k;
    for (int t = 0; t < n_tiers; t++) {
      check_case("token_states_%d/%s", i, tiers[t].name);
      inputs_reset(x);
      struct steps steps = run_steps(x, contexts[t]);
      inputs_reset(x);
      check_poison(pool, (size_t)(n * row) * 4);
      gdn_decode_args a = x->decode;
      a.final_state = (gdn_states){0};
      a.token_states = packed(x, pool, n);
      a.token_states.rows = rows;
      a.token_states.rows_dtype = GDN_I64;
      if (i % 2 == 0) a.out.data = NULL;
      check_ok("gdn_decode", gdn_decode(contexts[t], &a));
      if (i % 2) check_stored_outputs(x, &steps, rows);
      for (int k = 0; k < n; k++) {
        const float *got = pool + (n - 1 - k) * row;
        if (rows[k] >= 0)
          check_same_bits("state after a token", got, state_after(&steps, k / T, k % T + 1), (size_t)row * 4, 4);
        else if (!check_is_poison(got, (size_t)row * 4))
          check_fail("a skipped row was written");
      }
    }
    check_free_all();
  }
}

static void commit_of_n_tokens_equals_n_steps(void **state) {
  (void)state;
  for (int i = 0; i < 60; i++) {
    int T = 1 + i % 8;
    struct inputs *x = verify_case("commit", i, T);
    int n = x->spec.n_seqs, counts[8];
    int64_t counts_64[8], row = (int64_t)x->n_heads * x->spec.dim_k * x->spec.dim_v;
    float *pool = check_alloc((size_t)(n * row) * 4);
    for (int k = 0; k < n; k++) counts_64[k] = counts[k] = (k * 3 + i) % (T + 1);
    for (int t = 0; t < n_tiers; t++) {
      check_case("commit_%d/%s", i, tiers[t].name);
      inputs_reset(x);
      struct steps steps = run_steps(x, contexts[t]);
      inputs_reset(x);
      memcpy(pool, steps.states, (size_t)(n * row) * 4);
      gdn_decode_args a = x->decode;
      a.token_counts = i % 2 ? (const void *)counts_64 : counts;
      a.token_counts_dtype = i % 2 ? GDN_I64 : GDN_I32;
      a.initial_state = a.final_state = packed(x, pool, n);
      a.out.data = NULL;
      if (i % 4 < 2) a.q.data = NULL;
      check_ok("gdn_decode", gdn_decode(contexts[t], &a));
      for (int k = 0; k < n; k++)
        check_same_bits("committed state", pool + k * row, state_after(&steps, k, counts[k]), (size_t)row * 4, 4);
      if (!check_is_poison(x->out, x->out_bytes)) check_fail("out was written");
    }
    check_free_all();
  }
}

/* With counts, the rows of out of the other tokens stay as they are, and the others' bits do not depend on counts. */
static void tokens_beyond_the_count_are_not_written(void **state) {
  (void)state;
  for (int i = 0; i < 20; i++) {
    int T = 2 + i % 5, counts[8];
    struct inputs *x = verify_case("counts", i, T);
    for (int k = 0; k < x->spec.n_seqs; k++) counts[k] = (k + i) % (T + 1);
    for (int t = 0; t < n_tiers; t++) {
      size_t bytes;
      check_case("counts_%d/%s", i, tiers[t].name);
      gdn_decode_args a = verify_args(x);
      const char *all = run_out(x, contexts[t], &a);
      a.token_counts = counts;
      inputs_reset(x);
      check_ok("gdn_decode", gdn_decode(contexts[t], &a));
      const char *out = inputs_take_out(x, &bytes);
      size_t token = bytes / (size_t)(x->spec.n_seqs * T);
      for (int k = 0; k < x->spec.n_seqs * T; k++) {
        if (k % T < counts[k / T])
          check_same_bits("out", out + (size_t)k * token, all + (size_t)k * token, token,
                          (size_t)inputs_bytes(x->spec.out));
        else if (!check_is_poison(out + (size_t)k * token, token))
          check_fail("token %d was written", k);
      }
    }
    check_free_all();
  }
}

/* A 16-bit state is rounded once per row and call, so the first token agrees whatever comes after it. */
static void first_token_has_the_bits_of_decode_and_prefill(void **state) {
  (void)state;
  static const int32_t floats[] = {GDN_BF16, GDN_F16, GDN_F32};
  for (int i = 0; i < 60; i++) {
    struct check_rng r = check_case("first_%d", i);
    struct inputs_spec s = inputs_random(&r);
    s.n_tokens = 4;
    s.state_in = s.state_out = floats[i % 3];
    s.layout_out = s.layout_in = 1 + i / 3 % 2;
    struct inputs *x = inputs_make(&s, &r);
    int n = s.n_seqs;
    int64_t row = (int64_t)x->n_heads * s.dim_k * s.dim_v, rows[32], cu[9];
    size_t row_bytes = (size_t)(row * inputs_bytes(s.state_in));
    char *pools[3];
    for (int k = 0; k < 3; k++) pools[k] = check_alloc((size_t)n * row_bytes);
    for (int k = 0; k < 4 * n; k++) rows[k] = k % 4 == 0 ? k / 4 : -1;
    for (int k = 0; k <= n; k++) cu[k] = k;
    for (int t = 0; t < n_tiers; t++) {
      size_t bytes;
      const char *outs[3];
      check_case("first_%d/%s", i, tiers[t].name);
      for (int call = 0; call < 3; call++) {
        gdn_states to = {.data = pools[call], .n_rows = n, .dtype = s.state_in, .layout = s.layout_in};
        gdn_decode_args one = nth_token(x, 0), four = x->decode;
        gdn_prefill_args p = x->prefill;
        inputs_reset(x);
        one.final_state = p.final_state = to;
        four.final_state = (gdn_states){0};
        four.token_states = to;
        four.token_states.rows = rows;
        four.token_states.rows_dtype = GDN_I64;
        p.n_tokens = n;
        p.cu_seqlens = cu;
        p.cu_seqlens_dtype = GDN_I64;
        p.form = GDN_FORM_RECURRENT;
        p.q = one.q, p.k = one.k, p.v = one.v, p.g = one.g, p.beta = one.beta, p.out = one.out;
        p.raw_gates = one.raw_gates;
        check_ok("call", call == 0   ? gdn_decode(contexts[t], &one)
                         : call == 1 ? gdn_decode(contexts[t], &four)
                                     : gdn_prefill(contexts[t], &p));
        outs[call] = inputs_take_out(x, &bytes);
      }
      size_t token = bytes / (size_t)(4 * n);
      for (int call = 1; call < 3; call++) {
        for (int k = 0; k < n; k++)
          check_same_bits("out", outs[0] + (size_t)(4 * k) * token, outs[call] + (size_t)(4 * k) * token, token, 2);
        check_same_bits("state", pools[0], pools[call], (size_t)n * row_bytes, (size_t)inputs_bytes(s.state_in));
      }
    }
    check_free_all();
  }
}

/* Stored rows whose numbers are not finite take a path of their own. */
static void nan_and_infinity_reach_narrow_states(void **state) {
  (void)state;
  static const int32_t floats[] = {GDN_BF16, GDN_F16};
  for (int i = 0; i < 16; i++) {
    struct check_rng r = check_case("nan_%d", i);
    struct inputs_spec s = inputs_random(&r);
    s.state_in = s.state_out = floats[i % 2];
    s.layout_in = s.layout_out = 1 + i / 2 % 2;
    s.v = s.q = GDN_F32;
    s.strides = STRIDES_DENSE;
    s.gates = GATES_ABSENT;
    s.heads = HEADS_MORE_V;
    s.n_seqs = 1;
    struct inputs *x = inputs_make(&s, &r);
    float *v = check_alloc(sizeof *v * (size_t)(x->n_heads * s.dim_v));
    memcpy(v, x->decode.v.data, sizeof *v * (size_t)(x->n_heads * s.dim_v));
    const int bad = (i * 11) % s.dim_v;
    const uint32_t nan_bits = 0x7fffffff; /* to which rounding as of a number would add a carry */
    v[bad] = INFINITY;
    if (i / 4 % 2) memcpy(v + bad, &nan_bits, sizeof nan_bits);
    x->decode.v.data = v;
    for (int t = 0; t < n_tiers; t++) {
      size_t bytes;
      check_case("nan_%d/%s", i, tiers[t].name);
      inputs_reset(x);
      check_ok("gdn_decode", gdn_decode(contexts[t], &x->decode));
      const void *states = inputs_take_states(x, &x->decode.final_state, &bytes);
      for (int64_t e = 0; e < (int64_t)x->n_heads * s.dim_v * s.dim_k; e++) {
        double got = oracle_number(states, e, s.state_out);
        if (e / s.dim_k == bad ? isfinite(got) : !isfinite(got))
          check_fail("element %lld of row %lld: %g", (long long)(e % s.dim_k), (long long)(e / s.dim_k), got);
        if (e / s.dim_k == bad && i / 4 % 2 && !isnan(got)) check_fail("NaN became %g", got);
      }
    }
    check_free_all();
  }
}

static void bad_arguments_are_named(void **state) {
  (void)state;
  struct check_rng r = check_case("bad");
  struct inputs_spec s = inputs_plain(HEADS_EQUAL, GATES_LOG, 3);
  struct inputs *x = inputs_make(&s, &r);
  gdn_ctx *ctx = contexts[0];
  inputs_reset(x);
  const int32_t counts_high[] = {3, 4}, counts_low[] = {-1, 0}, far[] = {0, 0, 0, 0, 0, 5};
  const int32_t twice[] = {0, 2, -1, -1, 2, -1}, over_final[] = {1, -1, -1, -1, -1, -1};
  const int32_t last_is_final[] = {-1, -1, 1, -1, -1, 3}, other_reads[] = {3, -1, -1, -1, -1, -1};
  const int32_t none[] = {-1, -1}, short_counts[] = {1, 1}, unused[] = {-1, 1, 3, -1, 1, -1};
#define BAD(status, name, ...)                                                                                         \
  do {                                                                                                                 \
    gdn_decode_args a = x->decode;                                                                                     \
    __VA_ARGS__;                                                                                                       \
    check_refused(gdn_decode(ctx, &a), status, name);                                                                  \
  } while (0)
#define POINTS(r) (a.token_states = x->decode.final_state, a.token_states.rows = (r))
  BAD(GDN_E_SIZE, "n_tokens = -1", a.n_tokens = -1);
  BAD(GDN_E_SIZE, "n_tokens = 33", a.n_tokens = 33);
  BAD(GDN_E_LENGTHS, "token_counts[1] = 4", a.token_counts = counts_high);
  BAD(GDN_E_LENGTHS, "token_counts[0] = -1", a.token_counts = counts_low);
  BAD(GDN_E_DTYPE, "token_counts_dtype = 1", (a.token_counts = counts_high, a.token_counts_dtype = GDN_F32));
  BAD(GDN_E_ROW, "token_states.rows[5] = 5", POINTS(far));
  BAD(GDN_E_ROW_CONFLICT, "token_states row 2", POINTS(twice));
  BAD(GDN_E_ROW_CONFLICT, "row 1", POINTS(over_final));
  BAD(GDN_E_ROW_CONFLICT, "row 3", (POINTS(other_reads), a.final_state.rows = none));
  BAD(GDN_E_SIZE, "token_states.n_rows = 5", POINTS(NULL));
  BAD(GDN_E_NULL, "token_states.data", (POINTS(far), a.token_states.data = NULL));
  BAD(GDN_E_DTYPE, "token_states.dtype = 4", (POINTS(far), a.token_states.dtype = GDN_I64));
  BAD(GDN_E_NULL, "out.data", (a.out.data = NULL, a.final_state = (gdn_states){0}));
  BAD(GDN_E_NULL, "q.data", a.q.data = NULL);
  BAD(GDN_E_NULL, "k.data", (a.k.data = NULL, a.out.data = NULL));
  gdn_paged_args paged = {.struct_size = sizeof paged, .pool = x->decode.initial_state};
  gdn_decode_args d = x->decode;
  d.initial_state = d.final_state = (gdn_states){0};
  check_refused(gdn_decode_paged(ctx, &d, &paged), GDN_E_OPTION, "n_tokens = 3");
  d.n_tokens = 1;
  d.token_counts = short_counts;
  check_refused(gdn_decode_paged(ctx, &d, &paged), GDN_E_OPTION, "token_counts");
  d.token_counts = NULL;
  d.token_states = x->decode.final_state;
  check_refused(gdn_decode_paged(ctx, &d, &paged), GDN_E_OPTION, "token_states");
  if (!check_is_poison(x->out, x->out_bytes)) check_fail("out was written");
  check_same_bits("states", x->pool_out, x->start, x->pool_out_bytes, 4);
  /* The state after the last token and the final state are one. */
  gdn_decode_args a = x->decode;
  POINTS(last_is_final);
  check_ok("gdn_decode", gdn_decode(ctx, &a));
  a.token_counts = short_counts; /* then the last token is another one, and rows of later ones are not used */
  check_ok("gdn_decode", gdn_decode(ctx, &a));
  POINTS(unused);
  check_ok("gdn_decode", gdn_decode(ctx, &a));
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
      TEST(verify_is_within_its_bound_and_leaves_states),
      TEST(verify_gives_the_same_bits_in_any_batch_and_on_any_threads),
      TEST(each_sequence_of_a_batch_is_stored_or_verified_by_itself),
      TEST(verify_forgets_with_decay_zero),
      TEST(states_after_each_token_are_those_of_single_steps),
      TEST(commit_of_n_tokens_equals_n_steps),
      TEST(tokens_beyond_the_count_are_not_written),
      TEST(first_token_has_the_bits_of_decode_and_prefill),
      TEST(nan_and_infinity_reach_narrow_states),
      TEST(bad_arguments_are_named),
  };
  return check_summary("test_verify", cmocka_run_group_tests(tests, prepare, end));
}
