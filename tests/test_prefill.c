/* SPDX-License-Identifier: Apache-2.0
 * gdn_prefill in every tier and both forms: against float64 over shapes, layouts and inputs that random data never
 * reaches, against the golden cases, and against itself where bits must agree. */
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

#include "batch.h"
#include "check.h"
#include "model.h"
#include "oracle.h"

static struct check_tier tiers[CHECK_TIERS_MAX];
static int n_tiers;

static const struct {
  int32_t form;
  const char *name;
} forms[] = {{GDN_FORM_RECURRENT, "recurrent"}, {GDN_FORM_CHUNK, "chunk"}};
#define N_FORMS ((int)(sizeof forms / sizeof forms[0]))

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* f32 arithmetic on inputs without amplification: sums over K of up to 256 terms and what at most a few hundred tokens
 * hand on. 1e-6 is 17 units of 2^-24; measured errors are 1 to 8. */
#define LIMIT_F32 1e-6

/* Calls every tier in both forms on b and compares. */
static void all_tiers(struct batch *b, const char *name, double limit) {
  batch_oracle(b);
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("%s/%s/%s", name, forms[f].name, tiers[i].name);
      batch_prefill(ctx, b, forms[f].form);
      batch_check_form(b, &tiers[i], limit);
    }
    gdn_ctx_destroy(ctx);
  }
}

/* ---- inputs ---- */

/* Row i of q or k, of any head. */
static float *key_row(const struct batch *b, float *rows, int64_t t, int64_t h) {
  return rows + (t * b->shape.n_heads_k + h) * b->shape.dim_k;
}

static void all_gates(struct batch *b, float g, float beta) {
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_v; i++) {
    b->g[i] = g;
    b->beta[i] = beta;
  }
}

/* Every key is the head's first one plus noise of that share of its norm. */
static void similar_keys(struct batch *b, double noise, struct check_rng *r) {
  for (int64_t t = 1; t < b->n_tokens; t++) {
    for (int64_t h = 0; h < b->shape.n_heads_k; h++) {
      const float *first = key_row(b, b->k, 0, h);
      float *key = key_row(b, b->k, t, h);
      for (int i = 0; i < b->shape.dim_k; i++) key[i] = first[i] + (float)(noise * check_normal(r));
    }
  }
  all_gates(b, 0, 1);
}

static void scale_rows(struct batch *b, float *rows, double norm_lo, double norm_hi, struct check_rng *r) {
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_k; i++) {
    float *row = rows + i * b->shape.dim_k;
    double sum = 0, norm = check_uniform(r, norm_lo, norm_hi);
    for (int j = 0; j < b->shape.dim_k; j++) sum += (double)row[j] * (double)row[j];
    for (int j = 0; j < b->shape.dim_k; j++) row[j] *= (float)(norm / sqrt(sum));
  }
}

static void fill_random(struct batch *b, struct check_rng *r) {
  (void)b;
  (void)r;
}

static void fill_correlated(struct batch *b, struct check_rng *r) {
  similar_keys(b, 0.05, r);
}

static void fill_identical(struct batch *b, struct check_rng *r) {
  similar_keys(b, 0, r);
}

static void fill_raw_stable(struct batch *b, struct check_rng *r) {
  scale_rows(b, b->k, 1, 3, r);
  scale_rows(b, b->q, 1, 3, r);
  all_gates(b, -0.05f, 0.2f);
}

static void fill_raw_unstable(struct batch *b, struct check_rng *r) {
  scale_rows(b, b->k, 2, 3, r);
  scale_rows(b, b->q, 1, 3, r);
  all_gates(b, 0, 1);
}

static void fill_no_decay(struct batch *b, struct check_rng *r) {
  (void)r;
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_v; i++) b->g[i] = 0;
}

static void fill_strong_decay(struct batch *b, struct check_rng *r) {
  (void)r;
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_v; i++) b->g[i] = -26;
}

/* The value g at some tokens of otherwise undecayed sequences. */
static void rare_gate(struct batch *b, float g, int64_t every) {
  fill_no_decay(b, NULL);
  for (int64_t t = 7; t < b->n_tokens; t += every) {
    for (int64_t h = 0; h < b->shape.n_heads_v; h++) b->g[t * b->shape.n_heads_v + h] = g;
  }
}

static void fill_one_strong(struct batch *b, struct check_rng *r) {
  (void)r;
  rare_gate(b, -90, 31);
}

static void fill_minus_infinity(struct batch *b, struct check_rng *r) {
  (void)r;
  rare_gate(b, -INFINITY, 23);
}

static void fill_all_minus_infinity(struct batch *b, struct check_rng *r) {
  (void)r;
  all_gates(b, -INFINITY, 0.7f);
}

/* The sum over a chunk exceeds what f32 holds to a thousandth, while differences between neighbours stay small. */
static void fill_strong_then_weak(struct batch *b, struct check_rng *r) {
  for (int64_t t = 0; t < b->n_tokens; t++) {
    for (int64_t h = 0; h < b->shape.n_heads_v; h++) {
      b->g[t * b->shape.n_heads_v + h] = t % 16 < 6 ? -100 : (float)check_uniform(r, -1e-3, 0);
    }
  }
}

static void fill_zero_rows(struct batch *b, struct check_rng *r) {
  for (int64_t t = 0; t < b->n_tokens; t++) {
    for (int64_t h = 0; h < b->shape.n_heads_k; h++) {
      size_t bytes = sizeof(float) * (size_t)b->shape.dim_k;
      if (check_random_u64(r) % 3 == 0) memset(key_row(b, b->k, t, h), 0, bytes);
      if (check_random_u64(r) % 3 == 0) memset(key_row(b, b->q, t, h), 0, bytes);
    }
  }
}

static void fill_tiny_norms(struct batch *b, struct check_rng *r) {
  scale_rows(b, b->k, 1e-4, 1e-4, r);
  scale_rows(b, b->q, 1e-4, 1e-4, r);
}

static void fill_growing(struct batch *b, struct check_rng *r) {
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_v; i++) b->g[i] = (float)check_uniform(r, 0, 0.02);
}

static void fill_zero_beta(struct batch *b, struct check_rng *r) {
  for (int64_t i = 0; i < b->n_tokens * b->shape.n_heads_v; i++) b->beta[i] = check_random_u64(r) % 2 ? 0 : 1;
}

static const int32_t mixed_lens[] = {65, 0, 1, 63, 64, 17, 130, 2, 48};
static const int32_t short_lens[] = {12, 9, 16, 1};

/* LIMIT_F32 where nothing amplifies. Elsewhere the reason stands in the row. */
static const struct family {
  const char *name;
  void (*fill)(struct batch *b, struct check_rng *r);
  uint32_t flags;
  int short_only;
  double limit; /* in f32; what bf16 operands add is computed for each input, see model.h */
} families[] = {
    {"random", fill_random, GDN_L2NORM_QK, 0, LIMIT_F32},
    /* Keys that nearly repeat: d is the difference of nearly equal numbers, and stays while g = 0 and beta = 1. */
    {"correlated_keys", fill_correlated, GDN_L2NORM_QK, 0, 2e-6},
    {"identical_keys", fill_identical, GDN_L2NORM_QK, 0, 2e-6},
    {"raw_keys_stable", fill_raw_stable, 0, 0, LIMIT_F32},
    /* beta |k|^2 is 4 to 9: a token multiplies error and state along its key by 3 to 8; their ratio stays. */
    {"raw_keys_unstable", fill_raw_unstable, 0, 1, 2e-6},
    {"no_decay", fill_no_decay, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"strong_decay", fill_strong_decay, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"one_token_at_-90", fill_one_strong, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"some_at_-inf", fill_minus_infinity, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"all_at_-inf", fill_all_minus_infinity, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"strong_then_weak", fill_strong_then_weak, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"zero_rows", fill_zero_rows, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"norms_of_1e-4", fill_tiny_norms, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"growing", fill_growing, GDN_L2NORM_QK, 0, LIMIT_F32},
    {"beta_0_or_1", fill_zero_beta, GDN_L2NORM_QK, 0, LIMIT_F32},
};

static void prefill_input_families_agree_with_float64(void **state) {
  (void)state;
  for (int i = 0; i < COUNT(families); i++) {
    const struct family *f = &families[i];
    struct batch_shape shape = {1, 2, 64, 96, COUNT(mixed_lens), mixed_lens};
    if (f->short_only) {
      shape.n_seqs = COUNT(short_lens);
      shape.lens = short_lens;
    }
    struct check_rng r = check_case("%s", f->name);
    struct batch *b = batch_make(&shape, &r);
    f->fill(b, &r);
    batch_place(b, i % BATCH_N_LAYOUTS, i % 2 == 0 ? BATCH_POOL : BATCH_PACKED, i % 3 == 0 ? GDN_BF16 : GDN_F32, 1, &r);
    b->args.flags = f->flags;
    all_tiers(b, f->name, f->limit);
    check_free_all();
  }
}

/* ---- shapes ---- */

static const struct {
  int H, Hv, K, V;
} shapes[] = {{1, 1, 32, 32},  {1, 1, 128, 128}, {1, 4, 64, 64},   {2, 2, 96, 160},  {3, 6, 32, 64},
              {2, 4, 160, 96}, {1, 1, 256, 32},  {1, 2, 32, 256},  {1, 1, 256, 256}, {2, 2, 192, 224},
              {4, 4, 64, 32},  {1, 3, 128, 64},  {2, 6, 224, 128}, {1, 1, 96, 192}};

static void prefill_shapes_and_layouts_agree_with_float64(void **state) {
  (void)state;
  static const int32_t lens[] = {64, 5, 0, 65, 17, 1, 33};
  for (int i = 0; i < COUNT(shapes); i++) {
    struct batch_shape shape = {shapes[i].H, shapes[i].Hv, shapes[i].K, shapes[i].V, COUNT(lens), lens};
    char name[96];
    snprintf(name, sizeof name, "shape_h%d_hv%d_k%d_v%d", shapes[i].H, shapes[i].Hv, shapes[i].K, shapes[i].V);
    struct check_rng r = check_case("%s", name);
    struct batch *b = batch_make(&shape, &r);
    int32_t beta_dtype = i % 3 == 0 ? 0 : i % 3 == 1 ? GDN_BF16 : GDN_F32;
    batch_place(b, (i + 1) % BATCH_N_LAYOUTS, i % BATCH_N_STATES, beta_dtype, i % 4 != 2, &r);
    if (i % 2 == 1) {
      b->args.scale = 0.37f;
      b->args.eps = 3.5f;
    }
    if (i % 4 == 0) {
      b->args.q.dtype = b->args.k.dtype = b->args.v.dtype = b->args.g.dtype = GDN_DTYPE_DEFAULT;
      b->args.out.dtype = GDN_BF16;
    }
    all_tiers(b, name, LIMIT_F32);
    check_free_all();
  }
}

static void prefill_lengths_around_chunks_agree_with_float64(void **state) {
  (void)state;
  static const int32_t lens[] = {0, 1, 15, 16, 17, 31, 63, 64, 65, 79, 127, 128, 129, 200};
  for (int i = 0; i < COUNT(lens); i++) {
    struct batch_shape shape = {1, 2, 32, 64, 1, &lens[i]};
    char name[32];
    snprintf(name, sizeof name, "length_%d", (int)lens[i]);
    struct check_rng r = check_case("%s", name);
    struct batch *b = batch_make(&shape, &r);
    batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
    all_tiers(b, name, LIMIT_F32);
    check_free_all();
  }
}

/* In bf16 a single token rounds S, then V' and A: each off by 1.66e-3 in the root mean square, and no term of out or
 * state has more than two of them. */
#define ONE_TOKEN_BF16 (1.5 * 1.66e-3)

#define MANY (check_quick() ? 2000 : 70000)

static void prefill_70000_sequences_of_one_token_agree_with_float64(void **state) {
  (void)state;
  int32_t *lens = malloc(sizeof *lens * MANY), *rows_in = malloc(sizeof *rows_in * MANY);
  int32_t *rows_out = malloc(sizeof *rows_out * MANY);
  for (int i = 0; i < MANY; i++) {
    lens[i] = 1;
    rows_in[i] = i % 7 == 0 ? -1 : i % 50;
    rows_out[i] = i % 1000 == 999 ? 50 + i / 1000 : -1;
  }
  struct batch_shape shape = {1, 1, 32, 32, MANY, lens};
  struct check_rng r = check_case("70000_sequences");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_DENSE, BATCH_NO_STATES, GDN_F32, 1, &r);
  int64_t n_rows = 50 + MANY / 1000, block = 32 * 32;
  float *pool = check_alloc((size_t)(n_rows * block) * sizeof *pool);
  for (int64_t i = 0; i < 50 * block; i++) pool[i] = (float)check_normal(&r);
  b->args.initial_state = (gdn_states){pool, n_rows, 0, rows_in, GDN_I32, GDN_F32, 0, 0};
  b->args.final_state = (gdn_states){pool, n_rows, 0, rows_out, GDN_I32, GDN_F32, 0, 0};
  double *want = check_alloc(sizeof(double) * (size_t)(MANY * 32));
  double *want_states = check_alloc(sizeof(double) * (size_t)(MANY * block));
  gdn_prefill_args *a = &b->args;
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("70000_sequences/%s/%s", forms[f].name, tiers[i].name);
      batch_prefill(ctx, b, forms[f].form);
      if (i == 0 && f == 0) {
        const gdn_states kept = a->final_state;
        a->final_state = (gdn_states){0};
        oracle_prefill(a, want, want_states);
        a->final_state = kept;
      }
      const double limit = check_form_limit(&tiers[i], forms[f].form, LIMIT_F32, ONE_TOKEN_BF16);
      check_close_bf16("out", a->out.data, want, (int64_t)MANY * 32, limit);
      for (int seq = 999; seq < MANY; seq += 1000) {
        check_close("state", pool + rows_out[seq] * block, want_states + seq * block, block, limit);
      }
      check_poison(pool + 50 * block, (size_t)((n_rows - 50) * block) * sizeof *pool);
    }
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
  free(lens);
  free(rows_in);
  free(rows_out);
}

static void prefill_one_sequence_of_70000_tokens_agrees_with_float64(void **state) {
  (void)state;
  const int32_t lens[] = {MANY};
  struct batch_shape shape = {1, 1, 32, 32, 1, lens};
  struct check_rng r = check_case("70000_tokens");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
  all_tiers(b, "70000_tokens", LIMIT_F32);
  check_free_all();
}

static void prefill_empty_batch_writes_nothing(void **state) {
  (void)state;
  static const int32_t lens[] = {0, 0, 0};
  for (int n_seqs = 0; n_seqs <= 3; n_seqs += 3) {
    struct batch_shape shape = {2, 4, 64, 64, n_seqs, lens};
    struct check_rng r = check_case("empty_%d", n_seqs);
    struct batch *b = batch_make(&shape, &r);
    batch_place(b, BATCH_DENSE, BATCH_POOL, GDN_F32, 1, &r);
    all_tiers(b, n_seqs == 0 ? "no_sequences" : "empty_sequences", 0);
    check_free_all();
  }
}

/* Rows beyond 4 GiB: a pool of rows 2 GiB apart, of which only a few pages exist. */
static void prefill_pool_beyond_4_gib_uses_the_right_rows(void **state) {
  (void)state;
  const int64_t stride = (int64_t)1 << 29, n_rows = 5, block = 2 * 32 * 32;
  size_t bytes = (size_t)(n_rows * stride) * sizeof(float);
  float *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pool == MAP_FAILED) {
    check_skip("pool beyond 4 GiB", "no address space");
    return;
  }
  static const int32_t lens[] = {70, 3}, rows_in[] = {4, 3}, rows_out[] = {2, 3};
  struct batch_shape shape = {1, 2, 32, 32, 2, lens};
  struct check_rng r = check_case("4_gib");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  batch_oracle(b);
  const float *initial = b->args.initial_state.data;
  b->args.initial_state = (gdn_states){pool, n_rows, stride, rows_in, GDN_I32, GDN_F32, 0, 0};
  b->args.final_state = (gdn_states){pool, n_rows, stride, rows_out, GDN_I32, GDN_F32, 0, 0};
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("4_gib/%s/%s", forms[f].name, tiers[i].name);
      for (int seq = 0; seq < 2; seq++) memcpy(pool + rows_in[seq] * stride, initial + seq * block, (size_t)block * 4);
      b->args.form = forms[f].form;
      check_ok("gdn_prefill", gdn_prefill(ctx, &b->args));
      for (int seq = 0; seq < 2; seq++) {
        const double *want = b->want_states + seq * block;
        double bf16 = model_limit(model_error(b->model_states + seq * block, want, block), lens[seq] * 2, LIMIT_F32);
        check_close("state", pool + rows_out[seq] * stride, want, block,
                    check_form_limit(&tiers[i], forms[f].form, LIMIT_F32, bf16));
      }
    }
    gdn_ctx_destroy(ctx);
  }
  munmap(pool, bytes);
  check_free_all();
}

/* ---- same bits ---- */

static void same_batch(const char *what, const struct batch *b, const struct batch_result *x,
                       const struct batch_result *y) {
  for (int64_t i = 0; i < b->shape.n_seqs; i++) batch_same(what, b, x, i, b, y, i);
}

/* One shape per schedule: many lanes, one long prompt with few heads, a single head whose V is all there is to cut. */
static const int32_t lanes_lens[] = {70, 3, 64, 129, 1, 0, 20}, long_lens[] = {333}, two_lens[] = {200, 1};
static const struct batch_shape thread_shapes[] = {{2, 4, 64, 96, COUNT(lanes_lens), lanes_lens},
                                                   {1, 1, 128, 128, 1, long_lens},
                                                   {1, 1, 32, 256, 1, long_lens},
                                                   {1, 3, 96, 32, 2, two_lens}};

static void prefill_any_thread_count_gives_the_same_bits(void **state) {
  (void)state;
  static const int counts[] = {1, 2, 3, 5};
  for (int s = 0; s < COUNT(thread_shapes); s++) {
    struct check_rng r = check_case("threads/shape_%d", s);
    struct batch *b = batch_make(&thread_shapes[s], &r);
    batch_place(b, BATCH_FUSED, BATCH_POOL, GDN_BF16, 1, &r);
    for (int i = 0; i < n_tiers; i++) {
      struct batch_result first[N_FORMS] = {{NULL, NULL}};
      for (int c = 0; c < COUNT(counts); c++) {
        gdn_ctx *ctx = check_ctx(&tiers[i], counts[c]);
        for (int f = 0; f < N_FORMS; f++) {
          check_case("threads/shape_%d/%d/%s/%s", s, counts[c], forms[f].name, tiers[i].name);
          for (int32_t schedule = GDN_SCHEDULE_DEFAULT; schedule <= GDN_SCHEDULE_WINDOWS; schedule++) {
            b->args.schedule = schedule;
            batch_prefill(ctx, b, forms[f].form);
            struct batch_result x = batch_take(b);
            if (c == 0 && schedule == 0) first[f] = x;
            same_batch("against one thread, schedule 0", b, &first[f], &x);
          }
        }
        gdn_ctx_destroy(ctx);
      }
    }
    check_free_all();
  }
}

/* Threads that run and rest at random, more than there are cores, so that workers stop anywhere. */
#define N_DISTURBERS 3
static atomic_int disturbing;

static void *disturb(void *seed) {
  struct check_rng r = {*(const uint64_t *)seed};
  while (atomic_load(&disturbing)) {
    for (uint64_t n = check_random_u64(&r) % 20000; n > 0; n--) __asm__ volatile("");
    const struct timespec rest = {0, (long)(check_random_u64(&r) % 100000)};
    if (check_random_u64(&r) % 4 == 0) nanosleep(&rest, NULL);
  }
  return NULL;
}

static void repeat_disturbed(gdn_ctx *ctx, struct batch *b, int n) {
  pthread_t threads[N_DISTURBERS];
  uint64_t seeds[N_DISTURBERS];
  static const int32_t schedules[] = {GDN_SCHEDULE_LANES, GDN_SCHEDULE_WINDOWS};
  batch_prefill(ctx, b, GDN_FORM_CHUNK);
  struct batch_result first = batch_take(b);
  atomic_store(&disturbing, 1);
  for (int i = 0; i < N_DISTURBERS; i++) {
    seeds[i] = (uint64_t)i;
    if (pthread_create(&threads[i], NULL, disturb, &seeds[i]) != 0) check_fail("no thread");
  }
  int same = 1;
  size_t out_bytes = (size_t)b->out_elems * 2, states_bytes = (size_t)b->states_elems * 4;
  char *want_out = check_alloc(out_bytes), *want_states = check_alloc(states_bytes);
  memcpy(want_out, b->args.out.data, out_bytes);
  memcpy(want_states, b->states, states_bytes);
  for (int i = 0; i < n && same; i++) {
    b->args.schedule = schedules[i % 2];
    batch_prefill(ctx, b, GDN_FORM_CHUNK);
    same = memcmp(want_out, b->args.out.data, out_bytes) == 0 && memcmp(want_states, b->states, states_bytes) == 0;
  }
  atomic_store(&disturbing, 0);
  for (int i = 0; i < N_DISTURBERS; i++) pthread_join(threads[i], NULL);
  struct batch_result last = batch_take(b);
  same_batch("a disturbed call", b, &first, &last);
  b->args.schedule = GDN_SCHEDULE_DEFAULT;
}

static void prefill_500_disturbed_repeats_give_the_same_bits(void **state) {
  (void)state;
  static const int32_t lens[] = {700, 65};
  struct batch_shape shape = {1, 2, 64, 96, COUNT(lens), lens};
  struct check_rng r = check_case("disturbed");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_POOL, GDN_F32, 1, &r);
  for (int i = 0; i < n_tiers; i++) {
    check_case("disturbed/%s", tiers[i].name);
    gdn_ctx *ctx = check_ctx(&tiers[i], 3);
    repeat_disturbed(ctx, b, i + 1 < n_tiers || check_quick() ? 50 : 500);
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

/* The arguments for tokens [from, to) of sequence seq alone, with states of its own. */
static gdn_prefill_args part_of(const struct batch *b, int64_t seq, int64_t from, int64_t to, const int32_t cu[2],
                                float *initial, float *final) {
  const struct batch_shape *s = &b->shape;
  gdn_prefill_args a = b->args;
  int64_t t = b->cu_seqlens[seq] + from;
  gdn_tensor *in[] = {&a.q, &a.k, &a.v, &a.g, &a.beta};
  int64_t dense[] = {(int64_t)s->n_heads_k * s->dim_k, (int64_t)s->n_heads_k * s->dim_k,
                     (int64_t)s->n_heads_v * s->dim_v, s->n_heads_v, s->n_heads_v};
  for (int i = 0; i < COUNT(in); i++) {
    int64_t stride = in[i]->token_stride_elems != 0 ? in[i]->token_stride_elems : dense[i];
    if (in[i]->data != NULL) in[i]->data = (const char *)in[i]->data + t * stride * (in[i]->dtype == GDN_F32 ? 4 : 2);
  }
  int64_t stride = a.out.token_stride_elems != 0 ? a.out.token_stride_elems : dense[2];
  a.out.data = (uint16_t *)a.out.data + t * stride;
  a.prefix_lens = NULL;
  if (from == 0 && seq == 0) a.prefix_lens = b->args.prefix_lens;
  a.n_seqs = 1;
  a.n_tokens = to - from;
  a.cu_seqlens = cu;
  a.initial_state = (gdn_states){.data = initial, .n_rows = initial != NULL};
  a.final_state = (gdn_states){.data = final, .n_rows = final != NULL};
  return a;
}

static void prefill_alone_or_packed_gives_the_same_bits(void **state) {
  (void)state;
  struct batch_shape shape = {2, 4, 64, 96, COUNT(lanes_lens), lanes_lens};
  int64_t block = 4 * 64 * 96;
  struct check_rng r = check_case("packed");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2), *alone = check_ctx(&tiers[i], 3);
    for (int f = 0; f < N_FORMS; f++) {
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result packed = batch_take(b);
      batch_reset(b);
      for (int64_t seq = 0; seq < shape.n_seqs; seq++) {
        check_case("packed/sequence_%d/%s/%s", (int)seq, forms[f].name, tiers[i].name);
        int32_t cu[2] = {0, shape.lens[seq]};
        float *initial = (float *)b->args.initial_state.data + seq * block;
        gdn_prefill_args a = part_of(b, seq, 0, shape.lens[seq], cu, initial, b->states + seq * block);
        check_ok("gdn_prefill", gdn_prefill(alone, &a));
      }
      struct batch_result single = batch_take(b);
      same_batch("alone against packed", b, &packed, &single);
    }
    gdn_ctx_destroy(ctx);
    gdn_ctx_destroy(alone);
  }
  check_free_all();
}

static void prefill_split_over_calls_gives_the_same_bits(void **state) {
  (void)state;
  static const int32_t lens[] = {200};
  static const int splits[] = {64, 128, 192, 1, 2, 17, 63, 65, 100, 199}; /* first those that the chunk form takes */
  struct batch_shape shape = {1, 2, 96, 64, 1, lens};
  struct check_rng r = check_case("split");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_PADDED, BATCH_PACKED, GDN_F32, 1, &r);
  float *between = check_alloc(sizeof(float) * 2 * 96 * 64);
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result whole = batch_take(b);
      for (int s = 0; s < (forms[f].form == GDN_FORM_CHUNK ? 3 : COUNT(splits)); s++) {
        check_case("split/%d/%s/%s", splits[s], forms[f].name, tiers[i].name);
        int32_t cu_first[2] = {0, splits[s]}, cu_second[2] = {0, lens[0] - splits[s]};
        batch_reset(b);
        gdn_prefill_args a = part_of(b, 0, 0, splits[s], cu_first, b->args.initial_state.data, between);
        check_ok("gdn_prefill", gdn_prefill(ctx, &a));
        a = part_of(b, 0, splits[s], lens[0], cu_second, between, b->states);
        check_ok("gdn_prefill", gdn_prefill(ctx, &a));
        struct batch_result parts = batch_take(b);
        same_batch("in two calls", b, &whole, &parts);
      }
    }
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

/* Chunks end at absolute multiples of 64, wherever the call starts. */
static void prefill_split_after_a_prefix_gives_the_same_bits(void **state) {
  (void)state;
  static const int32_t lens[] = {200}, prefix[] = {37}, rest_prefix[] = {128};
  struct batch_shape shape = {1, 2, 64, 64, 1, lens};
  struct check_rng r = check_case("prefix_split");
  struct batch *b = batch_make(&shape, &r);
  batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
  b->args.prefix_lens = prefix;
  batch_oracle(b);
  int split = 128 - prefix[0];
  float *between = check_alloc(sizeof(float) * 2 * 64 * 64);
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("prefix_split/%s/%s", forms[f].name, tiers[i].name);
      int32_t cu_first[2] = {0, split}, cu_second[2] = {0, lens[0] - split};
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result whole = batch_take(b);
      batch_reset(b);
      gdn_prefill_args a = part_of(b, 0, 0, split, cu_first, b->args.initial_state.data, between);
      check_ok("gdn_prefill", gdn_prefill(ctx, &a));
      a = part_of(b, 0, split, lens[0], cu_second, between, b->states);
      a.prefix_lens = rest_prefix;
      check_ok("gdn_prefill", gdn_prefill(ctx, &a));
      struct batch_result parts = batch_take(b);
      same_batch("in two calls", b, &whole, &parts);
      batch_check_form(b, &tiers[i], LIMIT_F32);
    }
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

/* Every checkpoint against float64 on the tokens up to it; skipped rows stay; out and final states keep their bits. */
static void checkpoints_case(struct batch *b, const int64_t *prefix, int64_t every) {
  const struct batch_shape *s = &b->shape;
  int64_t block = (int64_t)s->n_heads_v * s->dim_v * s->dim_k, stride = block + 3, n_points = 0;
  int32_t *starts = check_alloc_tight(sizeof *starts * (size_t)(s->n_seqs + 1));
  starts[0] = 0;
  for (int i = 0; i < s->n_seqs; i++) {
    starts[i + 1] = starts[i] + (int32_t)((prefix[i] + s->lens[i]) / every - prefix[i] / every);
  }
  n_points = starts[s->n_seqs];
  int64_t *rows = check_alloc_tight(sizeof *rows * (size_t)n_points);
  for (int64_t i = 0; i < n_points; i++) rows[i] = i % 5 == 3 ? -1 : n_points - 1 - i;
  float *points = check_alloc((size_t)(n_points * stride) * sizeof *points);
  double *out = check_alloc(sizeof *out * (size_t)(b->n_tokens * s->n_heads_v * s->dim_v));
  double *want = check_alloc(sizeof *want * (size_t)(n_points * block));
  double *model = check_alloc(sizeof *model * (size_t)(n_points * block));
  int64_t *n_rows = check_alloc(sizeof *n_rows * (size_t)n_points);
  for (int i = 0; i < s->n_seqs; i++) {
    for (int64_t j = starts[i]; j < starts[i + 1]; j++) {
      int32_t cu[2] = {0, (int32_t)((prefix[i] / every + 1 + j - starts[i]) * every - prefix[i])};
      gdn_prefill_args a = part_of(b, i, 0, cu[1], cu, (float *)b->args.initial_state.data + i * block, NULL);
      oracle_prefill(&a, out, want + j * block);
      struct model inside = model_bf16;
      n_rows[j] = cu[1] * s->n_heads_v;
      inside.inside = 1;
      a.prefix_lens = prefix + i;
      a.prefix_lens_dtype = GDN_I64;
      model_prefill(&inside, &a, out, model + j * block);
    }
  }
  for (int t = 0; t < n_tiers; t++) {
    gdn_ctx *ctx = check_ctx(&tiers[t], 3);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("checkpoints/every_%d/%s/%s", (int)every, forms[f].name, tiers[t].name);
      b->args.checkpoint_every_n_tokens = 0;
      b->args.checkpoint_cu_starts = NULL;
      b->args.checkpoints = (gdn_states){0};
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result without = batch_take(b);
      b->args.checkpoint_every_n_tokens = every;
      b->args.checkpoint_cu_starts = starts;
      b->args.checkpoints = (gdn_states){points, n_points, stride, rows, GDN_I64, GDN_F32, 0, 0};
      check_poison(points, (size_t)(n_points * stride) * sizeof *points);
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result with = batch_take(b);
      same_batch("with and without checkpoints", b, &without, &with);
      for (int64_t i = 0; i < n_points; i++) {
        if (rows[i] < 0) continue;
        double bf16 = model_limit(model_error(model + i * block, want + i * block, block), n_rows[i], LIMIT_F32);
        check_close("checkpoint", points + rows[i] * stride, want + i * block, block,
                    check_form_limit(&tiers[t], forms[f].form, LIMIT_F32, bf16));
        check_poison(points + rows[i] * stride, (size_t)block * sizeof *points);
      }
      if (!check_is_poison(points, (size_t)(n_points * stride) * sizeof *points))
        check_fail("a skipped row was written");
    }
    gdn_ctx_destroy(ctx);
  }
}

static void prefill_checkpoints_agree_with_float64(void **state) {
  (void)state;
  static const int32_t lens[] = {130, 0, 64, 1, 33};
  static const int64_t prefix[] = {37, 64, 0, 63, 2048};
  static const int64_t every[] = {64, 16, 1, 30, 100, 128, 5000};
  struct batch_shape shape = {1, 2, 32, 64, COUNT(lens), lens};
  for (int i = 0; i < COUNT(every); i++) {
    struct check_rng r = check_case("checkpoints/every_%d", (int)every[i]);
    struct batch *b = batch_make(&shape, &r);
    batch_place(b, i % BATCH_N_LAYOUTS, BATCH_PACKED, GDN_F32, 1, &r);
    b->args.prefix_lens = prefix;
    b->args.prefix_lens_dtype = GDN_I64;
    checkpoints_case(b, prefix, every[i]);
    check_free_all();
  }
}

static void prefill_of_n_gives_the_bits_of_n_decodes(void **state) {
  (void)state;
  static const int32_t lens[] = {70, 70, 70};
  static const struct batch_shape decode_shapes[] = {
      {1, 2, 64, 96, 3, lens}, {2, 2, 128, 128, 2, lens}, {1, 1, 256, 32, 1, lens}};
  for (int s = 0; s < COUNT(decode_shapes); s++) {
    struct check_rng r = check_case("decodes/shape_%d", s);
    struct batch *b = batch_make(&decode_shapes[s], &r);
    batch_place(b, s, BATCH_PACKED, s == 1 ? GDN_BF16 : GDN_F32, s != 2, &r);
    for (int i = 0; i < n_tiers; i++) {
      check_case("decodes/shape_%d/%s", s, tiers[i].name);
      gdn_ctx *ctx = check_ctx(&tiers[i], 2);
      batch_prefill(ctx, b, GDN_FORM_RECURRENT);
      struct batch_result whole = batch_take(b);
      batch_reset(b);
      for (int64_t t = 0; t < lens[0]; t++) {
        gdn_decode_args a = batch_decode_args(b, t);
        check_ok("gdn_decode", gdn_decode(ctx, &a));
      }
      struct batch_result steps = batch_take(b);
      same_batch("n decodes against prefill", b, &whole, &steps);
      gdn_ctx_destroy(ctx);
    }
    check_free_all();
  }
}

static void prefill_default_form_is_one_of_the_two(void **state) {
  (void)state;
  struct check_rng r = check_case("default_form");
  struct batch *b = batch_make(&thread_shapes[0], &r);
  batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  size_t out_bytes = (size_t)(b->n_tokens * b->shape.n_heads_v * b->shape.dim_v) * 2;
  for (int i = 0; i < n_tiers; i++) {
    check_case("default_form/%s", tiers[i].name);
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    batch_prefill(ctx, b, GDN_FORM_DEFAULT);
    struct batch_result chosen = batch_take(b);
    int matches = 0;
    for (int f = 0; f < N_FORMS; f++) {
      batch_prefill(ctx, b, forms[f].form);
      struct batch_result x = batch_take(b);
      matches += memcmp(chosen.out, x.out, out_bytes) == 0;
    }
    if (matches != 1) check_fail("its bits are those of %d forms", matches);
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

/* ---- what must not matter ---- */

/* In each array in turn, one sequence is NaN: the others keep their bits. */
static void prefill_nan_stays_in_its_sequence(void **state) {
  (void)state;
  static const int32_t lens[] = {66, 30, 66, 1};
  struct batch_shape shape = {1, 2, 64, 64, COUNT(lens), lens};
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      struct batch_result clean = {NULL, NULL};
      for (int array = -1; array < 5; array++) {
        struct check_rng r = check_case("nan");
        struct batch *b = batch_make(&shape, &r);
        float *arrays[] = {b->q, b->k, b->v, b->g, b->beta};
        int64_t per_token[] = {64, 64, 128, 2, 2};
        check_case("nan/array_%d/%s/%s", array, forms[f].name, tiers[i].name);
        for (int64_t j = 0; array >= 0 && j < lens[1] * per_token[array]; j++) {
          arrays[array][lens[0] * per_token[array] + j] = NAN;
        }
        batch_place(b, BATCH_FUSED, BATCH_PACKED, GDN_F32, 1, &r);
        batch_prefill(ctx, b, forms[f].form);
        struct batch_result x = batch_take(b);
        if (array < 0) clean = x;
        for (int64_t seq = 0; seq < shape.n_seqs; seq++) {
          if (seq != 1) batch_same("beside a sequence of NaN", b, &clean, seq, b, &x, seq);
        }
        int64_t at = (int64_t)lens[0] * 128;
        if (array >= 0 && !isnan(check_from_bf16(x.out[at + 128]))) check_fail("NaN inputs gave numbers");
      }
    }
    gdn_ctx_destroy(ctx);
    check_free_all();
  }
}

/* Scratch that holds whatever malloc left there, then the leftovers of a call on NaN. */
static void prefill_scratch_contents_do_not_matter(void **state) {
  (void)state;
  static const int32_t lens[] = {64, 37, 65, 3}, nan_lens[] = {128, 128, 128, 128};
  struct batch_shape shape = {1, 2, 64, 96, COUNT(lens), lens}, nan_shape = {1, 2, 64, 96, COUNT(nan_lens), nan_lens};
  struct check_rng r = check_case("scratch");
  struct batch *b = batch_make(&shape, &r), *dirt = batch_make(&nan_shape, &r);
  batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  for (int64_t i = 0; i < dirt->n_tokens * 64; i++) dirt->q[i] = dirt->k[i] = NAN;
  for (int64_t i = 0; i < dirt->n_tokens * 2; i++) dirt->g[i] = dirt->beta[i] = NAN;
  for (int64_t i = 0; i < dirt->n_tokens * 2 * 96; i++) dirt->v[i] = NAN;
  batch_place(dirt, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  batch_oracle(b);
  for (int i = 0; i < n_tiers; i++) {
    for (int f = 0; f < N_FORMS; f++) {
      check_case("scratch/%s/%s", forms[f].name, tiers[i].name);
      /* New heap blocks become 0xfefe...: -1.7e38, which no sum survives. */
      mallopt(M_MMAP_THRESHOLD, 32 << 20);
      mallopt(M_PERTURB, 1);
      gdn_ctx *ctx = check_ctx(&tiers[i], 2);
      batch_prefill(ctx, b, forms[f].form);
      mallopt(M_PERTURB, 0);
      batch_check_form(b, &tiers[i], LIMIT_F32);
      batch_prefill(ctx, dirt, forms[f].form);
      batch_prefill(ctx, b, forms[f].form);
      batch_check_form(b, &tiers[i], LIMIT_F32);
      gdn_ctx_destroy(ctx);
    }
  }
  check_free_all();
}

static void prefill_scratch_does_not_grow_with_tokens(void **state) {
  (void)state;
  static const int32_t short_prompt[] = {512}, long_prompt[] = {4096};
  struct check_rng r = check_case("scratch_bytes");
  struct batch_shape shape = {1, 1, 64, 64, 1, short_prompt}, long_shape = {1, 1, 64, 64, 1, long_prompt};
  struct batch *a = batch_make(&shape, &r), *b = batch_make(&long_shape, &r);
  batch_place(a, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  batch_place(b, BATCH_DENSE, BATCH_PACKED, GDN_F32, 1, &r);
  for (int i = 0; i < n_tiers; i++) {
    for (int f = 0; f < N_FORMS; f++) {
      check_case("scratch_bytes/%s/%s", forms[f].name, tiers[i].name);
      gdn_ctx *ctx = check_ctx(&tiers[i], 2);
      gdn_info info = {.struct_size = sizeof info};
      batch_prefill(ctx, a, forms[f].form);
      check_ok("gdn_ctx_info", gdn_ctx_info(ctx, &info));
      uint64_t before = info.scratch_bytes;
      batch_prefill(ctx, b, forms[f].form);
      check_ok("gdn_ctx_info", gdn_ctx_info(ctx, &info));
      if (before == 0) check_fail("no scratch");
      if (info.scratch_bytes > before) {
        check_fail("%llu bytes for 512 tokens, %llu for 4096", (unsigned long long)before,
                   (unsigned long long)info.scratch_bytes);
      }
      gdn_ctx_destroy(ctx);
    }
  }
  check_free_all();
}

/* ---- golden cases ---- */

static const char *const golden_names[] = {"varlen_k64", "varlen_k128", "strong_decay_k128", "paged_k128"};

/* The bf16 rounding of out alone is 1.7e-3; f32 states were rounded once. */
#define GOLDEN_OUT_LIMIT 1.8e-3
#define GOLDEN_STATE_LIMIT 1e-5
/* The level of GPU kernels. */
#define GOLDEN_OUT_LIMIT_BF16 3.5e-3
#define GOLDEN_STATE_LIMIT_BF16 3e-3

/* Sequences without tokens store nothing; the others are compared together. */
static void golden_states(const gdn_prefill_args *a, const float *want, double limit) {
  const int32_t *cu = a->cu_seqlens;
  const float *state = a->final_state.data;
  int64_t block = (int64_t)a->n_heads_v * a->dim_v * a->dim_k, n = 0;
  float *x = check_alloc((size_t)(a->n_seqs * block) * sizeof *x),
        *y = check_alloc((size_t)(a->n_seqs * block) * sizeof *y);
  for (int64_t i = 0; i < a->n_seqs; i++) {
    if (cu[i] == cu[i + 1]) {
      if (!check_is_poison(state + i * block, (size_t)block * 4))
        check_fail("a state of an empty sequence was written");
      continue;
    }
    memcpy(x + n, state + i * block, (size_t)block * 4);
    memcpy(y + n, want + i * block, (size_t)block * 4);
    n += block;
  }
  check_limit("state", check_rel_l2_f32(x, y, n), limit);
}

static void golden_case(const char *name) {
  char dir[512];
  int64_t qk_shape[4], v_shape[4], shape[4];
  void *q, *k, *v, *g, *beta, *cu, *initial, *want_out, *want_state;
  snprintf(dir, sizeof dir, "%s/%s", GDN_GOLDEN_DIR, name);
  check_case("golden/%s", name);
  check_load_npy(dir, "q", "<u2", qk_shape, &q);
  check_load_npy(dir, "k", "<u2", qk_shape, &k);
  check_load_npy(dir, "v", "<u2", v_shape, &v);
  check_load_npy(dir, "g", "<f4", shape, &g);
  check_load_npy(dir, "beta", "<u2", shape, &beta);
  int64_t n_seqs = check_load_npy(dir, "cu_seqlens", "<i4", shape, &cu) - 1;
  check_load_npy(dir, "initial_state", "<f4", shape, &initial);
  int64_t n_out = check_load_npy(dir, "out", "<f4", shape, &want_out);
  int64_t n_state = check_load_npy(dir, "final_state", "<f4", shape, &want_state);
  uint16_t *out = check_alloc((size_t)n_out * sizeof *out);
  float *state = check_alloc((size_t)n_state * sizeof *state);
  gdn_prefill_args a = {.struct_size = sizeof a,
                        .flags = GDN_L2NORM_QK,
                        .n_seqs = n_seqs,
                        .n_tokens = qk_shape[0],
                        .n_heads_k = (int32_t)qk_shape[1],
                        .n_heads_v = (int32_t)v_shape[1],
                        .dim_k = (int32_t)qk_shape[2],
                        .dim_v = (int32_t)v_shape[2],
                        .cu_seqlens = cu,
                        .q = {.data = q},
                        .k = {.data = k},
                        .v = {.data = v},
                        .g = {.data = g},
                        .beta = {.data = beta, .dtype = GDN_BF16},
                        .out = {.data = out},
                        .initial_state = {.data = initial, .n_rows = n_seqs},
                        .final_state = {.data = state, .n_rows = n_seqs}};
  for (int i = 0; i < n_tiers; i++) {
    gdn_ctx *ctx = check_ctx(&tiers[i], 2);
    for (int f = 0; f < N_FORMS; f++) {
      check_case("golden/%s/%s/%s", name, forms[f].name, tiers[i].name);
      check_poison(out, (size_t)n_out * sizeof *out);
      check_poison(state, (size_t)n_state * sizeof *state);
      a.form = forms[f].form;
      check_ok("gdn_prefill", gdn_prefill(ctx, &a));
      check_limit("out", check_rel_l2_bf16(out, want_out, n_out),
                  check_form_limit(&tiers[i], a.form, GOLDEN_OUT_LIMIT, GOLDEN_OUT_LIMIT_BF16));
      golden_states(&a, want_state, check_form_limit(&tiers[i], a.form, GOLDEN_STATE_LIMIT, GOLDEN_STATE_LIMIT_BF16));
    }
    gdn_ctx_destroy(ctx);
  }
  check_free_all();
}

static void prefill_golden_cases_agree(void **state) {
  (void)state;
  for (int i = 0; i < COUNT(golden_names); i++) golden_case(golden_names[i]);
}

static int find_tiers(void **state) {
  (void)state;
  n_tiers = check_tiers(tiers);
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(prefill_input_families_agree_with_float64),
      TEST(prefill_shapes_and_layouts_agree_with_float64),
      TEST(prefill_lengths_around_chunks_agree_with_float64),
      TEST(prefill_70000_sequences_of_one_token_agree_with_float64),
      TEST(prefill_one_sequence_of_70000_tokens_agrees_with_float64),
      TEST(prefill_empty_batch_writes_nothing),
      TEST(prefill_pool_beyond_4_gib_uses_the_right_rows),
      TEST(prefill_any_thread_count_gives_the_same_bits),
      TEST(prefill_500_disturbed_repeats_give_the_same_bits),
      TEST(prefill_alone_or_packed_gives_the_same_bits),
      TEST(prefill_split_over_calls_gives_the_same_bits),
      TEST(prefill_split_after_a_prefix_gives_the_same_bits),
      TEST(prefill_checkpoints_agree_with_float64),
      TEST(prefill_of_n_gives_the_bits_of_n_decodes),
      TEST(prefill_default_form_is_one_of_the_two),
      TEST(prefill_nan_stays_in_its_sequence),
      TEST(prefill_scratch_contents_do_not_matter),
      TEST(prefill_scratch_does_not_grow_with_tokens),
      TEST(prefill_golden_cases_agree),
  };
  return check_summary("test_prefill", cmocka_run_group_tests(tests, find_tiers, NULL));
}
