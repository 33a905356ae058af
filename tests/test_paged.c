/* SPDX-License-Identifier: Apache-2.0
 * Paged prefill and decode through the shared library: bits of the uninterrupted run, checkpoints, page and chunk
 * edges, huge pools, the golden case. test_paged_model.c has the long random run, test_paged_api.c the errors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "check.h"
#include "oracle.h"
#include "paged_batch.h"

static struct check_tier tiers[CHECK_TIERS_MAX];
static int n_tiers;

static const struct {
  int32_t form;
  const char *name;
} forms[] = {{GDN_FORM_RECURRENT, "recurrent"}, {GDN_FORM_CHUNK, "chunk"}};
#define N_FORMS 2
static const int threads[] = {1, 2, 3, 7};
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* f32 arithmetic over a few hundred tokens, as in test_prefill.c. */
#define LIMIT_F32 1e-6
/* On inputs as here, rounding operands to bf16 costs a state 1.7e-3 to 2.2e-3 (model.h, test_prefill.c); two states cut
 * into chunks at other places, each so much. */
#define LIMIT_BF16 (1.41421356 * 2.2e-3)

/* Between two f32 results, or one and float64 on hundreds of tokens. */
static double limit_of(const struct check_tier *tier, int f) {
  return check_form_limit(tier, forms[f].form, 2 * LIMIT_F32, LIMIT_BF16);
}

/* A pool of n rows, apart by stride floats, all poison. */
struct pool {
  float *data;
  int64_t n, row, stride;
};

static struct pool pool_make(int64_t n, int64_t row, int64_t pad) {
  struct pool p = {NULL, n, row, row + pad};
  p.data = check_alloc((size_t)(n * p.stride) * sizeof(float));
  return p;
}

static size_t pool_bytes(const struct pool *p) {
  return (size_t)(p->n * p->stride) * sizeof(float);
}

static float *pool_row(const struct pool *p, int64_t page) {
  return p->data + page * p->stride;
}

static size_t row_bytes(const struct pool *p) {
  return (size_t)p->row * sizeof(float);
}

static gdn_paged_args paged_args(const struct pool *p, const gdn_page_table *table, const gdn_slots *slots) {
  return (gdn_paged_args){.struct_size = sizeof(gdn_paged_args),
                          .pool = {.data = p->data, .n_rows = p->n, .row_stride_elems = p->stride},
                          .table = table,
                          .slots = slots};
}

static int32_t *random_ids(const struct vocabulary *w, int64_t n, struct check_rng *r) {
  int32_t *ids = check_alloc(sizeof *ids * (size_t)n);
  for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(check_random_u64(r) % (uint64_t)w->n_ids);
  return ids;
}

/* One sequence: tokens [prefix, len) of ids on its pages. */
static void prefill_one(gdn_ctx *ctx, const struct pool *p, struct token_batch *b, struct table_batch *t,
                        const int32_t *ids, const int64_t *pages, int64_t page_size, int64_t prefix, int64_t len,
                        int32_t form) {
  token_batch_clear(b);
  token_batch_add(b, ids + prefix, len - prefix);
  table_batch_clear(t);
  table_batch_add(t, pages, page_size, len, len - prefix);
  gdn_page_table table = table_batch_take(t, p->n, page_size, GDN_I32, 0);
  gdn_paged_args paged = paged_args(p, &table, NULL);
  gdn_prefill_args a = token_batch_prefill(b, 1, t->cu_seqlens, form);
  check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged));
}

/* ---- the example of the specification ---- */

static void example_case(const struct check_tier *tier, int f) {
  struct check_rng r = check_case("example/%s/%s", forms[f].name, tier->name);
  struct vocabulary w = vocabulary_make(2, 4, 32, 64, 300, &r);
  struct token_batch whole = token_batch_make(&w, 2500), b = token_batch_make(&w, 2500);
  struct table_batch t = table_batch_make(1, 3);
  struct pool p = pool_make(16, vocabulary_row(&w), 7), before = pool_make(16, vocabulary_row(&w), 7);
  int32_t *ids = random_ids(&w, 2500, &r);
  float *want = check_alloc(row_bytes(&p) * 3);
  gdn_ctx *ctx = check_ctx(tier, 2);
  for (int i = 0; i < 3; i++) /* the states after 1024, 2048 and 2500 tokens */
    plain_run(ctx, &whole, ids, i == 2 ? 2500 : 1024 * (i + 1), 0, forms[f].form, NULL, want + i * p.row);
  /* Another request made the shared pages [7, 3]. */
  prefill_one(ctx, &p, &b, &t, ids, (const int64_t[]){7, 3}, 1024, 0, 2048, forms[f].form);
  check_same_bits("page 7", pool_row(&p, 7), want, row_bytes(&p), 4);
  check_same_bits("page 3", pool_row(&p, 3), want + p.row, row_bytes(&p), 4);
  memcpy(before.data, p.data, pool_bytes(&p));
  prefill_one(ctx, &p, &b, &t, ids, (const int64_t[]){7, 3, 12}, 1024, 2048, 2500, forms[f].form);
  check_same_bits("page 12", pool_row(&p, 12), want + 2 * p.row, row_bytes(&p), 4);
  check_same_bits("out", token_out(&b, 0), token_out(&whole, 2048), 452 * token_out_bytes(&b), 2);
  memcpy(pool_row(&p, 12), pool_row(&before, 12), row_bytes(&p));
  check_same_bits("all other pages", p.data, before.data, pool_bytes(&p), 4);
  gdn_ctx_destroy(ctx);
  check_free_all();
}

static void paged_example_of_2500_tokens_reads_page_3_and_writes_page_12(void **state) {
  (void)state;
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) example_case(&tiers[t], f);
  }
}

/* ---- resuming ---- */

enum { RESUME_LEN = 700, RESUME_PAGE = 128 };

struct resume {
  struct vocabulary w;
  struct token_batch whole, b;
  struct table_batch t;
  struct pool p;
  int32_t *ids;
  float *want; /* final state of the whole run */
  double limit;
  int other_form; /* a chunk that a call leaves short may take the other form, of other bits */
};

/* Prefill up to split, then the rest, on pages. Bits where they are promised, elsewhere the bound. */
static void resume_case(struct resume *x, gdn_ctx *ctx, int f, int64_t split) {
  static const int64_t pages[] = {4, 0, 7, 2, 6, 1};
  check_poison(x->p.data, pool_bytes(&x->p));
  prefill_one(ctx, &x->p, &x->b, &x->t, x->ids, pages, RESUME_PAGE, 0, split, forms[f].form);
  int bits = split % 64 == 0 || forms[f].form == GDN_FORM_RECURRENT;
  check_same_bits("out before", token_out(&x->b, 0), token_out(&x->whole, 0),
                  (size_t)(split - x->other_form * (split % 64)) * token_out_bytes(&x->b), 2);
  prefill_one(ctx, &x->p, &x->b, &x->t, x->ids, pages, RESUME_PAGE, split, RESUME_LEN, forms[f].form);
  if (bits) {
    check_same_bits("out", token_out(&x->b, 0), token_out(&x->whole, split),
                    (size_t)(RESUME_LEN - split) * token_out_bytes(&x->b), 2);
    check_same_bits("state", pool_row(&x->p, pages[5]), x->want, row_bytes(&x->p), 4);
  } else {
    check_close_f32("state", pool_row(&x->p, pages[5]), x->want, x->p.row, x->limit);
  }
}

static void resume_shape(int n_heads_k, int n_heads_v) {
  static const int64_t splits[] = {128, 256, 640, 64, 192, 448, 1, 63, 65, 127, 129, 333, 699};
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) {
      struct check_rng r = check_case("resume/h%d/%s/%s", n_heads_k, forms[f].name, tiers[t].name);
      struct resume x = {.w = vocabulary_make(n_heads_k, n_heads_v, 64, 64, 300, &r)};
      x.whole = token_batch_make(&x.w, RESUME_LEN);
      x.b = token_batch_make(&x.w, RESUME_LEN);
      x.t = table_batch_make(1, 6);
      x.p = pool_make(8, vocabulary_row(&x.w), 5);
      x.ids = random_ids(&x.w, RESUME_LEN, &r);
      x.want = check_alloc(row_bytes(&x.p));
      x.limit = limit_of(&tiers[t], f);
      x.other_form = tiers[t].bf16_chunks && forms[f].form == GDN_FORM_CHUNK;
      gdn_ctx *ctx = check_ctx(&tiers[t], 1);
      plain_run(ctx, &x.whole, x.ids, RESUME_LEN, 0, forms[f].form, NULL, x.want);
      gdn_ctx_destroy(ctx);
      for (int n = 0; n < COUNT(threads); n++) {
        ctx = check_ctx(&tiers[t], threads[n]);
        for (int s = 0; s < COUNT(splits); s++) {
          check_case("resume/h%d/%s/%s/threads_%d/split_%d", n_heads_k, forms[f].name, tiers[t].name, threads[n],
                     (int)splits[s]);
          resume_case(&x, ctx, f, splits[s]);
        }
        gdn_ctx_destroy(ctx);
      }
      check_free_all();
    }
  }
}

static void paged_resume_gives_the_bits_of_the_whole_run(void **state) {
  (void)state;
  resume_shape(1, 1);
  resume_shape(2, 4);
}

/* ---- checkpoints of the unpaged call ---- */

enum { POINTS_SEQS = 5 };

struct points {
  struct vocabulary w;
  struct token_batch b;
  int64_t cu[POINTS_SEQS + 1], prefix[POINTS_SEQS], starts[POINTS_SEQS + 1];
  int64_t every;
  float *initial; /* [POINTS_SEQS] rows */
  double *want;   /* [starts[POINTS_SEQS]] rows */
};

/* Where checkpoint j of sequence i lies, in tokens of the batch. */
static int64_t point_token(const struct points *x, int i, int64_t j) {
  return x->cu[i] + (x->prefix[i] / x->every + 1 + j) * x->every - x->prefix[i];
}

/* float64 from the sequence's start to each checkpoint. */
static void points_oracle(struct points *x) {
  int64_t row = vocabulary_row(&x->w), n_out = x->b.n * x->w.n_heads_v * x->w.dim_v;
  double *out = check_alloc((size_t)n_out * sizeof *out);
  x->want = check_alloc((size_t)(x->starts[POINTS_SEQS] * row) * sizeof(double));
  for (int i = 0; i < POINTS_SEQS; i++) {
    for (int64_t j = 0; j < x->starts[i + 1] - x->starts[i]; j++) {
      int32_t cu[2] = {(int32_t)x->cu[i], (int32_t)point_token(x, i, j)};
      gdn_prefill_args a = token_batch_prefill(&x->b, 1, NULL, 0);
      a.cu_seqlens = cu;
      a.cu_seqlens_dtype = GDN_I32;
      a.initial_state = (gdn_states){.data = x->initial + i * row, .n_rows = 1};
      oracle_prefill(&a, out, x->want + (x->starts[i] + j) * row);
    }
  }
}

static void points_make(struct points *x, int n_heads_k, int n_heads_v, const int64_t *lens, int64_t every,
                        struct check_rng *r) {
  static const int64_t prefixes[POINTS_SEQS] = {0, 37, 64, 1000, 49};
  memset(x, 0, sizeof *x);
  x->w = vocabulary_make(n_heads_k, n_heads_v, 32, 64, 300, r);
  x->every = every;
  int64_t row = vocabulary_row(&x->w);
  x->b = token_batch_make(&x->w, 1000);
  for (int i = 0; i < POINTS_SEQS; i++) {
    x->prefix[i] = prefixes[i];
    x->cu[i + 1] = x->cu[i] + lens[i];
    x->starts[i + 1] = x->starts[i] + (prefixes[i] + lens[i]) / every - prefixes[i] / every;
  }
  token_batch_add(&x->b, random_ids(&x->w, x->cu[POINTS_SEQS], r), x->cu[POINTS_SEQS]);
  x->initial = check_alloc((size_t)(POINTS_SEQS * row) * sizeof(float));
  for (int64_t i = 0; i < POINTS_SEQS * row; i++) x->initial[i] = (float)(0.3 * check_normal(r));
  check_protect(x->initial);
  points_oracle(x);
}

struct points_result {
  uint16_t *out;
  float *final, *points;
  size_t out_bytes, final_bytes, points_bytes;
};

/* One call; kept results in blocks of their own. */
static struct points_result points_call(gdn_ctx *ctx, struct points *x, int f, int with) {
  int64_t row = vocabulary_row(&x->w), n = x->starts[POINTS_SEQS], stride = row + 2;
  struct points_result y = {NULL,
                            NULL,
                            NULL,
                            (size_t)x->b.n * token_out_bytes(&x->b),
                            (size_t)(POINTS_SEQS * row) * 4,
                            (size_t)(n * stride) * 4};
  y.out = check_alloc(y.out_bytes);
  y.final = check_alloc(y.final_bytes);
  y.points = check_alloc(y.points_bytes);
  gdn_prefill_args a = token_batch_prefill(&x->b, POINTS_SEQS, x->cu, forms[f].form);
  a.out.data = y.out;
  a.initial_state = (gdn_states){.data = x->initial, .n_rows = POINTS_SEQS};
  a.final_state = (gdn_states){.data = y.final, .n_rows = POINTS_SEQS};
  a.prefix_lens = x->prefix;
  a.prefix_lens_dtype = GDN_I64;
  if (with) {
    a.checkpoint_every_n_tokens = x->every;
    a.checkpoint_cu_starts = x->starts;
    a.checkpoint_cu_starts_dtype = GDN_I64;
    a.checkpoints = (gdn_states){.data = y.points, .n_rows = n, .row_stride_elems = stride};
  }
  check_ok("gdn_prefill", gdn_prefill(ctx, &a));
  return y;
}

static void points_case(const struct check_tier *tier, int f, int n_heads_k, int n_heads_v, const int64_t *lens,
                        int64_t every) {
  struct check_rng r = check_case("checkpoints/every_%d/h%d/%s/%s", (int)every, n_heads_k, forms[f].name, tier->name);
  struct points x;
  points_make(&x, n_heads_k, n_heads_v, lens, every, &r);
  int64_t row = vocabulary_row(&x.w), n = x.starts[POINTS_SEQS];
  gdn_ctx *ctx = check_ctx(tier, 1);
  struct points_result without = points_call(ctx, &x, f, 0), first = points_call(ctx, &x, f, 1);
  gdn_ctx_destroy(ctx);
  for (int64_t i = 0; i < n; i++)
    check_close("checkpoint", first.points + i * (row + 2), x.want + i * row, row, limit_of(tier, f));
  for (int i = 0; i < POINTS_SEQS; i++) { /* a checkpoint at the end is the final state */
    if ((x.prefix[i] + lens[i]) % every == 0 && lens[i] > 0)
      check_same_bits("last checkpoint", first.points + (x.starts[i + 1] - 1) * (row + 2), first.final + i * row,
                      (size_t)row * 4, 4);
  }
  for (int t = 1; t < COUNT(threads); t++) {
    ctx = check_ctx(tier, threads[t]);
    struct points_result y = points_call(ctx, &x, f, 1);
    gdn_ctx_destroy(ctx);
    check_case("checkpoints/every_%d/h%d/%s/%s/threads_%d", (int)every, n_heads_k, forms[f].name, tier->name,
               threads[t]);
    check_same_bits("out", y.out, without.out, y.out_bytes, 2);
    check_same_bits("final", y.final, without.final, y.final_bytes, 4);
    check_same_bits("checkpoints, gaps included", y.points, first.points, y.points_bytes, 4);
  }
  check_free_all();
}

static void checkpoints_of_any_spacing_agree_and_change_no_bit(void **state) {
  (void)state;
  static const int64_t every[] = {1, 7, 50, 64, 96, 100, 128, 192};
  /* One long sequence: windows in chunk form when there are several threads. Then even ones: lanes. */
  static const int64_t lens[2][POINTS_SEQS] = {{0, 263, 1, 24, 15}, {64, 91, 65, 100, 128}};
  for (int t = 0; t < n_tiers; t++) {
    for (int i = 0; i < COUNT(every); i++) {
      for (int f = 0; f < N_FORMS; f++) {
        points_case(&tiers[t], f, 1, 1, lens[0], every[i]);
        points_case(&tiers[t], f, 2, 4, lens[i % 2], every[i]);
      }
    }
  }
}

/* Read, written and checkpoint rows in three pools of different strides, or in one with padded rows. */
static void general_slots_case(const struct check_tier *tier, int f, int one_pool) {
  struct check_rng r = check_case("general slots/%s/%s/%s", one_pool ? "one pool" : "three", forms[f].name, tier->name);
  static const int64_t lens[POINTS_SEQS] = {100, 90, 0, 80, 79}, every = 50;
  struct points x;
  points_make(&x, 1, 2, lens, every, &r);
  gdn_ctx *ctx = check_ctx(tier, 3);
  struct points_result want = points_call(ctx, &x, f, 1);
  int64_t row = vocabulary_row(&x.w), n = x.starts[POINTS_SEQS];
  struct pool in = pool_make(40, row, 3), out = one_pool ? in : pool_make(40, row, 11);
  struct pool points = one_pool ? in : pool_make(40, row, 0), before = pool_make(40, row, 3);
  /* Sequence 0 runs in place and ends at a checkpoint, which shares its row; 1 is not stored; 2 is empty. */
  const int32_t read[POINTS_SEQS] = {5, 6, 7, 8, 9}, write[POINTS_SEQS] = {5, -1, 20, 22, 23};
  int64_t point_rows[32];
  if (n > 32) check_fail("%lld checkpoints", (long long)n);
  for (int64_t i = 0; i < n; i++) point_rows[i] = i % 3 == 2 ? -1 : 39 - i;
  if (one_pool) point_rows[x.starts[1] - 1] = 5;
  for (int i = 0; i < POINTS_SEQS; i++) memcpy(pool_row(&in, read[i]), x.initial + i * row, (size_t)row * 4);
  memcpy(before.data, in.data, pool_bytes(&in));
  token_batch_clear(&x.b);
  x.b.n = x.cu[POINTS_SEQS];
  gdn_prefill_args a = token_batch_prefill(&x.b, POINTS_SEQS, x.cu, forms[f].form);
  a.initial_state = (gdn_states){in.data, in.n, in.stride, read, GDN_I32, GDN_F32, 0, 0};
  a.final_state = (gdn_states){out.data, out.n, out.stride, write, GDN_I32, GDN_F32, 0, 0};
  a.checkpoints = (gdn_states){points.data, points.n, points.stride, point_rows, GDN_I64, GDN_F32, 0, 0};
  a.prefix_lens = x.prefix;
  a.checkpoint_cu_starts = x.starts;
  a.prefix_lens_dtype = a.checkpoint_cu_starts_dtype = GDN_I64;
  a.checkpoint_every_n_tokens = every;
  check_ok("gdn_prefill", gdn_prefill(ctx, &a));
  check_same_bits("out", x.b.out, want.out, want.out_bytes, 2);
  for (int64_t i = 0; i < n; i++) {
    if (point_rows[i] < 0) continue;
    check_same_bits("checkpoint", pool_row(&points, point_rows[i]), want.points + i * (row + 2), (size_t)row * 4, 4);
  }
  for (int i = 0; i < POINTS_SEQS; i++) {
    if (write[i] < 0 || lens[i] == 0) continue;
    check_same_bits("final", pool_row(&out, write[i]), want.final + i * row, (size_t)row * 4, 4);
    check_poison(pool_row(&out, write[i]), (size_t)row * 4);
  }
  for (int64_t i = 0; i < n; i++)
    if (point_rows[i] >= 0) check_poison(pool_row(&points, point_rows[i]), (size_t)row * 4);
  if (one_pool) memcpy(pool_row(&in, 5), pool_row(&before, 5), (size_t)row * 4);
  check_same_bits("rows of nobody", in.data, before.data, pool_bytes(&in), 4);
  if (!check_is_poison(out.data, one_pool ? 0 : pool_bytes(&out)) ||
      !check_is_poison(points.data, one_pool ? 0 : pool_bytes(&points)))
    check_fail("a byte between the rows was written");
  gdn_ctx_destroy(ctx);
  check_free_all();
}

static void prefill_rows_may_lie_in_one_padded_pool_or_in_three(void **state) {
  (void)state;
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) {
      general_slots_case(&tiers[t], f, 0);
      general_slots_case(&tiers[t], f, 1);
    }
  }
}

/* ---- page and chunk edges ---- */

static const int64_t edge_prefixes[] = {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257};
static const int64_t edge_lens[] = {0, 1, 2, 63, 64, 65, 127, 128, 129, 192};
enum { EDGE_SEQS = 14 * 10, EDGE_LEN = 449, EDGE_PAGES = 8 };

struct edges {
  struct vocabulary w;
  struct token_batch b, plain;
  struct table_batch t;
  struct pool p, before;
  int32_t *ids; /* all sequences run the same tokens */
  float *want;  /* [EDGE_LEN + 1] final states of plain runs of each length */
  uint16_t *want_out;
};

static void edge_pages(int seq, int64_t *pages) {
  for (int j = 0; j < EDGE_PAGES; j++) pages[j] = (seq * EDGE_PAGES + j) * 9 % (EDGE_SEQS * EDGE_PAGES);
}

/* All sequences in one call: from 0 to their prefix, or from there on. */
static void edge_call(struct edges *x, gdn_ctx *ctx, int f, int64_t page_size, int second) {
  int64_t pages[EDGE_PAGES];
  token_batch_clear(&x->b);
  table_batch_clear(&x->t);
  for (int i = 0; i < EDGE_SEQS; i++) {
    int64_t prefix = edge_prefixes[i / 10], n = edge_lens[i % 10];
    int64_t from = second ? prefix : 0, to = second ? prefix + n : prefix;
    if (to == 0) continue; /* nothing before, nothing new: no pages */
    edge_pages(i, pages);
    token_batch_add(&x->b, x->ids + from, to - from);
    table_batch_add(&x->t, pages, page_size, to, to - from);
  }
  gdn_page_table table = table_batch_take(&x->t, x->p.n, page_size, second ? GDN_I64 : GDN_I32, 0);
  gdn_slots slots = slots_of(&table);
  gdn_paged_args paged = paged_args(&x->p, NULL, &slots);
  gdn_prefill_args a = token_batch_prefill(&x->b, x->t.n_seqs, x->t.cu_seqlens, forms[f].form);
  check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged));
}

static void edge_compare(const char *what, const float *got, const float *want, int64_t n, int bits, double limit) {
  if (bits) {
    check_same_bits(what, got, want, (size_t)n * 4, 4);
  } else {
    check_close_f32(what, got, want, n, limit);
  }
}

/* Every page of every sequence holds the state after its last token. */
static void edge_check(struct edges *x, const struct check_tier *tier, int f, int64_t page_size) {
  int64_t pages[EDGE_PAGES], at = 0;
  for (int i = 0; i < EDGE_SEQS; i++) {
    int64_t prefix = edge_prefixes[i / 10], n = edge_lens[i % 10], len = prefix + n;
    if (len == 0) continue;
    check_case("edges/page_%d/prefix_%d/len_%d/%s", (int)page_size, (int)prefix, (int)n, forms[f].name);
    int bits = forms[f].form == GDN_FORM_RECURRENT || prefix % 64 == 0;
    edge_pages(i, pages);
    for (int64_t j = 0; j * page_size < len; j++) {
      int64_t end = (j + 1) * page_size < len ? (j + 1) * page_size : len;
      /* What the first call left at its end, this one did not touch if it had nothing to do. */
      int same = bits || end <= prefix;
      if (n == 0 && end == len) same = 1;
      edge_compare("page", pool_row(&x->p, pages[j]), x->want + end * x->p.row, x->p.row, same, limit_of(tier, f));
      memcpy(pool_row(&x->p, pages[j]), pool_row(&x->before, pages[j]), row_bytes(&x->p));
    }
    const uint16_t *want = x->want_out + prefix * x->w.n_heads_v * x->w.dim_v;
    int64_t n_same = tier->bf16_chunks && forms[f].form == GDN_FORM_CHUNK ? n / 64 * 64 : n; /* as in resume_case */
    if (bits) check_same_bits("out", token_out(&x->b, at), want, (size_t)n_same * token_out_bytes(&x->b), 2);
    at += n;
  }
  check_same_bits("pages of nobody", x->p.data, x->before.data, pool_bytes(&x->p), 4);
}

static void edge_tier(struct edges *x, const struct check_tier *tier, int f) {
  gdn_ctx *ctx = check_ctx(tier, 3);
  for (int64_t n = 1; n <= EDGE_LEN; n++)
    plain_run(ctx, &x->plain, x->ids, n, 0, forms[f].form, NULL, x->want + n * x->p.row);
  memcpy(x->want_out, x->plain.out, EDGE_LEN * token_out_bytes(&x->plain));
  for (int64_t page_size = 64; page_size <= 192; page_size += 64) {
    check_case("edges/page_%d/%s/%s", (int)page_size, forms[f].name, tier->name);
    check_poison(x->p.data, pool_bytes(&x->p));
    memcpy(x->before.data, x->p.data, pool_bytes(&x->p));
    edge_call(x, ctx, f, page_size, 0);
    edge_call(x, ctx, f, page_size, 1);
    edge_check(x, tier, f, page_size);
  }
  gdn_ctx_destroy(ctx);
}

static void paged_prefix_and_length_around_every_edge_agree(void **state) {
  (void)state;
  struct check_rng r = check_case("edges");
  struct edges x = {.w = vocabulary_make(1, 1, 32, 32, 300, &r)};
  x.b = token_batch_make(&x.w, EDGE_SEQS * 300);
  x.plain = token_batch_make(&x.w, EDGE_LEN);
  x.t = table_batch_make(EDGE_SEQS, EDGE_SEQS * EDGE_PAGES);
  x.p = pool_make(EDGE_SEQS * EDGE_PAGES, vocabulary_row(&x.w), 1);
  x.before = pool_make(x.p.n, x.p.row, 1);
  x.ids = random_ids(&x.w, EDGE_LEN, &r);
  x.want = check_alloc((size_t)(EDGE_LEN + 1) * row_bytes(&x.p));
  x.want_out = check_alloc(EDGE_LEN * token_out_bytes(&x.b));
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) edge_tier(&x, &tiers[t], f);
  }
  check_free_all();
}

/* ---- decode ---- */

/* Decodes from 62 tokens to beyond the third page: every state is the recurrent run's, old pages stay. */
static void decode_case(const struct check_tier *tier, int n_threads) {
  enum { SEQS = 3, FROM = 62, TO = 140 };
  struct check_rng r = check_case("decode/%s/threads_%d", tier->name, n_threads);
  struct vocabulary w = vocabulary_make(2, 2, 64, 32, 300, &r);
  struct token_batch b = token_batch_make(&w, SEQS + 1), plain = token_batch_make(&w, TO);
  struct table_batch t = table_batch_make(SEQS + 1, 3 * SEQS + 1);
  struct pool p = pool_make(3 * SEQS + 3, vocabulary_row(&w), 9);
  int32_t *ids = random_ids(&w, TO, &r), padding = 0;
  float *want = check_alloc((TO + 1) * row_bytes(&p));
  uint16_t *want_out = check_alloc(TO * token_out_bytes(&b));
  gdn_ctx *ctx = check_ctx(tier, n_threads);
  const int64_t pages[SEQS][3] = {{9, 2, 5}, {0, 8, 1}, {7, 4, 3}}, scratch = 10;
  for (int64_t n = 1; n <= TO; n++) plain_run(ctx, &plain, ids, n, 0, GDN_FORM_RECURRENT, NULL, want + n * p.row);
  memcpy(want_out, plain.out, TO * token_out_bytes(&b));
  for (int i = 0; i < SEQS; i++) memcpy(pool_row(&p, pages[i][0]), want + (FROM + i) * p.row, row_bytes(&p));
  for (int64_t len = FROM + 1; len <= TO - SEQS; len++) {
    token_batch_clear(&b);
    table_batch_clear(&t);
    for (int i = 0; i < SEQS; i++) {
      token_batch_add(&b, ids + len + i - 1, 1);
      table_batch_add(&t, pages[i], 64, len + i, 1);
    }
    token_batch_add(&b, &padding, 1);
    table_batch_add(&t, &scratch, 64, 2, 1);
    gdn_page_table table = table_batch_take(&t, p.n, 64, len % 2 ? GDN_I32 : GDN_I64, 1);
    gdn_paged_args paged = paged_args(&p, &table, NULL);
    gdn_decode_args a = token_batch_decode(&b);
    check_ok("gdn_decode_paged", gdn_decode_paged(ctx, &a, &paged));
    for (int i = 0; i < SEQS; i++) {
      check_same_bits("out", token_out(&b, i), want_out + (len + i - 1) * w.n_heads_v * w.dim_v, token_out_bytes(&b),
                      2);
      for (int64_t j = 0; j * 64 < len + i; j++) {
        int64_t end = (j + 1) * 64 < len + i ? (j + 1) * 64 : len + i;
        check_same_bits("page", pool_row(&p, pages[i][j]), want + end * p.row, row_bytes(&p), 4);
      }
    }
  }
  if (!check_is_poison(pool_row(&p, 11), row_bytes(&p)) || !check_is_poison(pool_row(&p, 6), row_bytes(&p)))
    check_fail("a page of nobody was written");
  gdn_ctx_destroy(ctx);
  check_free_all();
}

static void paged_decode_opens_pages_with_the_bits_of_prefill(void **state) {
  (void)state;
  for (int t = 0; t < n_tiers; t++) {
    decode_case(&tiers[t], 1);
    decode_case(&tiers[t], 3);
  }
}

/* ---- shared pages, empty and padded sequences, layers ---- */

static void paged_many_sequences_read_one_page(void **state) {
  (void)state;
  enum { SEQS = 40, PREFIX = 128 };
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) {
      struct check_rng r = check_case("shared/%s/%s", forms[f].name, tiers[t].name);
      struct vocabulary w = vocabulary_make(1, 2, 32, 32, 300, &r);
      struct token_batch b = token_batch_make(&w, SEQS * 70), one = token_batch_make(&w, PREFIX);
      struct table_batch table_of = table_batch_make(SEQS + 2, 3 * (SEQS + 2));
      struct pool p = pool_make(SEQS + 8, vocabulary_row(&w), 2);
      int32_t *ids = random_ids(&w, PREFIX + SEQS * 70, &r);
      float *want = check_alloc(SEQS * row_bytes(&p)), *shared = check_alloc(2 * row_bytes(&p));
      uint16_t *want_out = check_alloc(SEQS * 70 * token_out_bytes(&b));
      const int64_t prefix_pages[] = {3, 1}, scratch = 0;
      gdn_ctx *ctx = check_ctx(&tiers[t], 2);
      prefill_one(ctx, &p, &b, &table_of, ids, prefix_pages, 64, 0, PREFIX, forms[f].form);
      memcpy(shared, pool_row(&p, 3), row_bytes(&p));
      memcpy(shared + p.row, pool_row(&p, 1), row_bytes(&p));
      int64_t at = 0;
      for (int i = 0; i < SEQS; i++) { /* each alone */
        int64_t n = 1 + i % 64;
        plain_run(ctx, &one, ids + PREFIX + 70 * i, n, PREFIX, forms[f].form, shared + p.row, want + i * p.row);
        memcpy(want_out + at * w.n_heads_v * w.dim_v, one.out, (size_t)n * token_out_bytes(&b));
        at += n;
      }
      token_batch_clear(&b);
      table_batch_clear(&table_of);
      for (int i = 0; i < SEQS; i++) {
        token_batch_add(&b, ids + PREFIX + 70 * i, 1 + i % 64);
        table_batch_add(&table_of, (const int64_t[]){3, 1, 4 + i}, 64, PREFIX + 1 + i % 64, 1 + i % 64);
        if (i == 7) table_batch_add(&table_of, prefix_pages, 64, PREFIX, 0); /* empty, on pages that others read */
        if (i == 9) table_batch_add(&table_of, &scratch, 64, 17, 0);         /* padded */
      }
      gdn_page_table table = table_batch_take(&table_of, p.n, 64, GDN_I32, 0);
      gdn_paged_args paged = paged_args(&p, &table, NULL);
      gdn_prefill_args a = token_batch_prefill(&b, table_of.n_seqs, table_of.cu_seqlens, forms[f].form);
      check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged));
      check_same_bits("out", b.out, want_out, (size_t)at * token_out_bytes(&b), 2);
      for (int i = 0; i < SEQS; i++) check_same_bits("page", pool_row(&p, 4 + i), want + i * p.row, row_bytes(&p), 4);
      check_same_bits("shared page 3", pool_row(&p, 3), shared, row_bytes(&p), 4);
      check_same_bits("shared page 1", pool_row(&p, 1), shared + p.row, row_bytes(&p), 4);
      if (!check_is_poison(pool_row(&p, 0), row_bytes(&p)) || !check_is_poison(pool_row(&p, 2), row_bytes(&p)))
        check_fail("a page without new tokens was written");
      gdn_ctx_destroy(ctx);
      check_free_all();
    }
  }
}

static void paged_batch_without_new_tokens_writes_nothing(void **state) {
  (void)state;
  struct check_rng r = check_case("empty");
  struct vocabulary w = vocabulary_make(1, 1, 32, 32, 10, &r);
  struct token_batch b = token_batch_make(&w, 4);
  struct table_batch t = table_batch_make(4, 8);
  struct pool p = pool_make(6, vocabulary_row(&w), 0);
  gdn_ctx *ctx = check_ctx(&tiers[0], 2);
  for (int seqs = 0; seqs < 3; seqs++) {
    table_batch_clear(&t);
    for (int i = 0; i < seqs; i++) table_batch_add(&t, (const int64_t[]){2 * i, 2 * i + 1}, 64, 100, 0);
    gdn_page_table table = table_batch_take(&t, p.n, 64, GDN_I32, 0);
    gdn_slots slots = slots_of(&table);
    gdn_paged_args paged[2] = {paged_args(&p, &table, NULL), paged_args(&p, NULL, &slots)};
    for (int i = 0; i < 2; i++) {
      gdn_prefill_args a = token_batch_prefill(&b, seqs, t.cu_seqlens, 0);
      check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged[i]));
      gdn_decode_args d = token_batch_decode(&b);
      if (seqs == 0) check_ok("gdn_decode_paged", gdn_decode_paged(ctx, &d, &paged[i]));
    }
  }
  if (!check_is_poison(p.data, pool_bytes(&p))) check_fail("a page was written");
  gdn_ctx_destroy(ctx);
  check_free_all();
}

/* Slots lie in read-only memory while the layers of a step use them: nothing is made anew. */
static void paged_slots_serve_every_layer_of_a_step(void **state) {
  (void)state;
  enum { LAYERS = 6, SEQS = 3 };
  struct check_rng r = check_case("layers");
  struct vocabulary w = vocabulary_make(1, 2, 32, 32, 300, &r);
  struct token_batch b = token_batch_make(&w, 400);
  struct table_batch t = table_batch_make(SEQS, 9);
  int32_t *ids = random_ids(&w, 400, &r);
  gdn_ctx *ctx = check_ctx(&tiers[n_tiers - 1], 2);
  const int64_t pages[SEQS][3] = {{0, 4, 8}, {1, 5, 3}, {2, 7, 6}};
  for (int step = 0; step < 2; step++) {
    token_batch_clear(&b);
    table_batch_clear(&t);
    for (int i = 0; i < SEQS; i++) {
      int64_t n = step ? 1 : 100 + 30 * i;
      token_batch_add(&b, ids + 10 * i, n);
      table_batch_add(&t, pages[i], 64, step ? 129 + i : n, n);
    }
    gdn_page_table table = table_batch_take(&t, 9, 64, GDN_I64, step);
    gdn_slots slots = slots_of(&table);
    check_protect(slots.read_rows); /* the start of the block */
    for (int layer = 0; layer < LAYERS; layer++) {
      struct pool p = pool_make(9, vocabulary_row(&w), layer), q = pool_make(9, vocabulary_row(&w), layer);
      for (int64_t i = 0; step && i < 9 * p.stride; i++) p.data[i] = q.data[i] = (float)check_normal(&r);
      gdn_paged_args by_slots = paged_args(&p, NULL, &slots), by_table = paged_args(&q, &table, NULL);
      gdn_prefill_args a = token_batch_prefill(&b, SEQS, t.cu_seqlens, 0);
      gdn_decode_args d = token_batch_decode(&b);
      check_ok("slots", step ? gdn_decode_paged(ctx, &d, &by_slots) : gdn_prefill_paged(ctx, &a, &by_slots));
      check_ok("table", step ? gdn_decode_paged(ctx, &d, &by_table) : gdn_prefill_paged(ctx, &a, &by_table));
      check_same_bits("by slots and by table", p.data, q.data, pool_bytes(&p), 4);
    }
  }
  gdn_ctx_destroy(ctx);
  check_free_all();
}

/* ---- pools beyond 4 GiB and 2^31 elements ---- */

static void huge_case(const struct check_tier *tier, int f) {
  enum { FAR_PAGES = 300 };
  struct check_rng r = check_case("huge pool/%s/%s", forms[f].name, tier->name);
  struct vocabulary w = vocabulary_make(1, 2, 32, 32, 300, &r);
  struct token_batch b = token_batch_make(&w, 200), plain = token_batch_make(&w, 200);
  struct table_batch t = table_batch_make(1, 4);
  /* 64 MiB apart: row 64 starts at 4 GiB, row 128 at 2^31 elements. */
  struct pool p = {NULL, FAR_PAGES, vocabulary_row(&w), 16 << 20};
  int32_t *ids = random_ids(&w, 200, &r);
  float *want = check_alloc(row_bytes(&p));
  p.data = mmap(NULL, pool_bytes(&p), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p.data == MAP_FAILED) {
    check_skip("a pool of 18.75 GiB", "no address space");
    check_free_all();
    return;
  }
  const int64_t pages[] = {64, 299, 128, 127};
  gdn_ctx *ctx = check_ctx(tier, 2);
  prefill_one(ctx, &p, &b, &t, ids, pages, 64, 0, 100, forms[f].form);
  prefill_one(ctx, &p, &b, &t, ids, pages, 64, 100, 192, GDN_FORM_RECURRENT);
  token_batch_clear(&b);
  token_batch_add(&b, ids + 192, 1);
  table_batch_clear(&t);
  table_batch_add(&t, pages, 64, 193, 1);
  gdn_page_table table = table_batch_take(&t, p.n, 64, GDN_I32, 1);
  gdn_paged_args paged = paged_args(&p, &table, NULL);
  gdn_decode_args a = token_batch_decode(&b);
  check_ok("gdn_decode_paged", gdn_decode_paged(ctx, &a, &paged));
  const int64_t ends[] = {64, 128, 192, 193};
  for (int j = 0; j < 4; j++) {
    plain_run(ctx, &plain, ids, ends[j], 0, j == 0 ? forms[f].form : GDN_FORM_RECURRENT, NULL, want);
    edge_compare("page", pool_row(&p, pages[j]), want, p.row, j == 0 || forms[f].form == GDN_FORM_RECURRENT,
                 limit_of(tier, f));
  }
  for (int64_t i = 0; i < FAR_PAGES; i++) { /* the memory of all other rows was never touched: still zero */
    if (i == 64 || i == 299 || i == 127 || i == 128) continue;
    for (int64_t j = 0; j < 16; j++)
      if (pool_row(&p, i)[j] != 0) check_fail("row %d was written", (int)i);
  }
  munmap(p.data, pool_bytes(&p));
  gdn_ctx_destroy(ctx);
  check_free_all();
}

static void paged_pool_beyond_4_gib_uses_the_right_rows(void **state) {
  (void)state;
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) huge_case(&tiers[t], f);
  }
}

/* ---- golden ---- */

#define GOLDEN_OUT_LIMIT 1.8e-3
#define GOLDEN_STATE_LIMIT 1e-5
#define GOLDEN_OUT_LIMIT_BF16 3.5e-3
#define GOLDEN_STATE_LIMIT_BF16 3e-3

struct golden {
  void *q, *k, *v, *g, *beta, *cu, *initial, *out, *final, *prefix, *page_size, *starts, *checkpoints;
  int64_t q_shape[4], v_shape[4], n_seqs, row;
};

static struct golden golden_load(void) {
  const char *dir = GDN_GOLDEN_DIR "/paged_k128";
  struct golden x;
  int64_t shape[4];
  check_load_npy(dir, "q", "<u2", x.q_shape, &x.q);
  check_load_npy(dir, "k", "<u2", shape, &x.k);
  check_load_npy(dir, "v", "<u2", x.v_shape, &x.v);
  check_load_npy(dir, "g", "<f4", shape, &x.g);
  check_load_npy(dir, "beta", "<u2", shape, &x.beta);
  x.n_seqs = check_load_npy(dir, "cu_seqlens", "<i4", shape, &x.cu) - 1;
  check_load_npy(dir, "initial_state", "<f4", shape, &x.initial);
  check_load_npy(dir, "out", "<f4", shape, &x.out);
  x.row = check_load_npy(dir, "final_state", "<f4", shape, &x.final) / x.n_seqs;
  check_load_npy(dir, "prefix_lens", "<i4", shape, &x.prefix);
  check_load_npy(dir, "page_size", "<i4", shape, &x.page_size);
  check_load_npy(dir, "checkpoint_cu_starts", "<i4", shape, &x.starts);
  check_load_npy(dir, "checkpoints", "<f4", shape, &x.checkpoints);
  return x;
}

/* Page j of sequence i is page 1 + i + j * n_seqs of the pool; page 0 belongs to nobody. */
static void golden_case(const struct golden *x, const struct check_tier *tier, int f) {
  const int32_t *cu = x->cu, *prefix = x->prefix, *starts = x->starts;
  const int64_t page_size = *(const int32_t *)x->page_size;
  check_case("golden/paged_k128/%s/%s", forms[f].name, tier->name);
  int64_t n_pages = 1, pages[64];
  for (int64_t i = 0; i < x->n_seqs; i++) {
    int64_t n = (prefix[i] + cu[i + 1] - cu[i] + page_size - 1) / page_size;
    if (n > 64) check_fail("a sequence of %d pages", (int)n);
    n_pages = 1 + n * x->n_seqs > n_pages ? 1 + n * x->n_seqs : n_pages;
  }
  struct pool p = pool_make(n_pages, x->row, 0);
  struct table_batch t = table_batch_make(x->n_seqs, n_pages);
  for (int64_t i = 0; i < x->n_seqs; i++) {
    for (int j = 0; j < 64; j++) pages[j] = 1 + i + j * x->n_seqs;
    table_batch_add(&t, pages, page_size, prefix[i] + cu[i + 1] - cu[i], cu[i + 1] - cu[i]);
    if (prefix[i] > 0)
      memcpy(pool_row(&p, pages[(prefix[i] - 1) / page_size]), (const float *)x->initial + i * x->row, row_bytes(&p));
  }
  int64_t n_out = x->v_shape[0] * x->v_shape[1] * x->v_shape[2];
  uint16_t *out = check_alloc((size_t)n_out * sizeof *out);
  gdn_page_table table = table_batch_take(&t, n_pages, page_size, GDN_I32, 0);
  gdn_paged_args paged = paged_args(&p, &table, NULL);
  gdn_prefill_args a = {.struct_size = sizeof a,
                        .flags = GDN_L2NORM_QK,
                        .form = forms[f].form,
                        .n_seqs = x->n_seqs,
                        .n_tokens = x->q_shape[0],
                        .n_heads_k = (int32_t)x->q_shape[1],
                        .n_heads_v = (int32_t)x->v_shape[1],
                        .dim_k = (int32_t)x->q_shape[2],
                        .dim_v = (int32_t)x->v_shape[2],
                        .cu_seqlens = cu,
                        .q = {.data = x->q},
                        .k = {.data = x->k},
                        .v = {.data = x->v},
                        .g = {.data = x->g},
                        .beta = {.data = x->beta, .dtype = GDN_BF16},
                        .out = {.data = out}};
  gdn_ctx *ctx = check_ctx(tier, 2);
  check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged));
  gdn_ctx_destroy(ctx);
  const double limit = check_form_limit(tier, a.form, GOLDEN_STATE_LIMIT, GOLDEN_STATE_LIMIT_BF16);
  check_limit("out", check_rel_l2_bf16(out, x->out, n_out),
              check_form_limit(tier, a.form, GOLDEN_OUT_LIMIT, GOLDEN_OUT_LIMIT_BF16));
  for (int64_t i = 0; i < x->n_seqs; i++) {
    int64_t len = prefix[i] + cu[i + 1] - cu[i], last = 1 + i + (len - 1) / page_size * x->n_seqs;
    check_close_f32("final state", pool_row(&p, last), (const float *)x->final + i * x->row, x->row, limit);
    for (int64_t j = starts[i]; j < starts[i + 1]; j++) {
      int64_t page = prefix[i] / page_size + j - starts[i];
      check_close_f32("checkpoint", pool_row(&p, 1 + i + page * x->n_seqs), (const float *)x->checkpoints + j * x->row,
                      x->row, limit);
    }
  }
  if (!check_is_poison(p.data, row_bytes(&p))) check_fail("page 0 was written");
}

static void paged_golden_case_agrees_with_its_checkpoints(void **state) {
  (void)state;
  for (int t = 0; t < n_tiers; t++) {
    for (int f = 0; f < N_FORMS; f++) {
      check_case("golden/paged_k128");
      struct golden x = golden_load();
      golden_case(&x, &tiers[t], f);
      check_free_all();
    }
  }
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
      TEST(paged_example_of_2500_tokens_reads_page_3_and_writes_page_12),
      TEST(paged_resume_gives_the_bits_of_the_whole_run),
      TEST(checkpoints_of_any_spacing_agree_and_change_no_bit),
      TEST(prefill_rows_may_lie_in_one_padded_pool_or_in_three),
      TEST(paged_prefix_and_length_around_every_edge_agree),
      TEST(paged_decode_opens_pages_with_the_bits_of_prefill),
      TEST(paged_many_sequences_read_one_page),
      TEST(paged_batch_without_new_tokens_writes_nothing),
      TEST(paged_slots_serve_every_layer_of_a_step),
      TEST(paged_pool_beyond_4_gib_uses_the_right_rows),
      TEST(paged_golden_case_agrees_with_its_checkpoints),
  };
  return check_summary("test_paged", cmocka_run_group_tests(tests, find_tiers, NULL));
}
