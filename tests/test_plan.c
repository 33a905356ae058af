/* SPDX-License-Identifier: Apache-2.0
 * Plans: every unit of every lane is in exactly one task, long sequences come first, spans and chunks end where they
 * must. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "engine.h"

enum { SEQS_MAX = 40 };

struct shape {
  struct gdn_batch batch;
  int32_t cu_seqlens[SEQS_MAX + 1], prefix_lens[SEQS_MAX], cu_starts[SEQS_MAX + 1];
};

static int uniform(struct check_rng *r, int lo, int hi) {
  return lo + (int)(check_random_u64(r) % (uint64_t)(hi - lo + 1));
}

/* Random lengths with many zeros, ones and a few long ones. */
static void random_shape(struct check_rng *r, struct shape *s) {
  struct gdn_batch *b = &s->batch;
  memset(s, 0, sizeof *s);
  b->n_seqs = uniform(r, 0, SEQS_MAX);
  b->n_heads_k = uniform(r, 1, 5);
  b->n_heads_v = b->n_heads_k * uniform(r, 1, 80);
  b->dim_k = 32 * uniform(r, 1, 8);
  b->dim_v = 32 * uniform(r, 1, 8);
  for (int i = 0; i < b->n_seqs; i++) {
    int len = uniform(r, 0, 3) ? uniform(r, 0, 130) : uniform(r, 0, 5000);
    s->cu_seqlens[i + 1] = s->cu_seqlens[i] + len;
    s->prefix_lens[i] = uniform(r, 0, 300);
  }
  b->n_tokens = s->cu_seqlens[b->n_seqs];
  b->cu_seqlens = (struct gdn_ints){s->cu_seqlens, 0};
  b->prefix_lens = (struct gdn_ints){s->prefix_lens, 0};
}

static void add_checkpoints(struct shape *s, int every) {
  s->batch.checkpoint_every = every;
  for (int i = 0; i < s->batch.n_seqs; i++) {
    int len = s->cu_seqlens[i + 1] - s->cu_seqlens[i];
    s->cu_starts[i + 1] = s->cu_starts[i] + (s->prefix_lens[i] + len) / every - s->prefix_lens[i] / every;
  }
  s->batch.checkpoint_cu_starts = (struct gdn_ints){s->cu_starts, 0};
}

/* Marks each task's units; all of a lane's must be marked once, those of sequences in windows not at all. */
static void check_cover(const struct gdn_plan *plan, const struct gdn_batch *b) {
  size_t n_units = (size_t)plan->n_units, n_lanes = (size_t)b->n_seqs * (size_t)b->n_heads_k;
  char *seen = calloc(n_lanes * n_units + 1, 1);
  assert_non_null(seen);
  for (int64_t i = 0; i < plan->n_tasks; i++) {
    struct gdn_task t = gdn_plan_task(plan, i);
    if (t.n_units < 1 || t.n_units > plan->n_slots || t.unit + t.n_units > plan->n_units)
      check_fail("task %lld: units %d + %d of %d, slots %d", (long long)i, t.unit, t.n_units, plan->n_units,
                 plan->n_slots);
    for (int u = t.unit; u < t.unit + t.n_units; u++)
      seen[((size_t)t.seq * (size_t)b->n_heads_k + (size_t)t.head) * n_units + (size_t)u]++;
  }
  for (int64_t i = 0; i < plan->n_wide * b->n_heads_k; i++)
    for (size_t u = 0; u < n_units; u++)
      seen[((size_t)plan->order[i / b->n_heads_k] * (size_t)b->n_heads_k + (size_t)(i % b->n_heads_k)) * n_units + u]++;
  for (size_t i = 0; i < n_lanes * n_units; i++) {
    int want = gdn_batch_len(b, (int64_t)(i / n_units) / b->n_heads_k) > 0;
    if (seen[i] != want) check_fail("unit %zu is in %d tasks, expected %d", i, seen[i], want);
  }
  free(seen);
}

static void plan_random_lengths_covers_every_unit_once(void **state) {
  (void)state;
  struct gdn_plan plan = {0};
  for (int i = 0; i < 400; i++) {
    struct check_rng r = check_case("plan/%d", i);
    struct shape s;
    random_shape(&r, &s);
    struct gdn_plan_options o = {.n_threads = uniform(&r, 1, 64),
                                 .grain = uniform(&r, 1, s.batch.dim_v / 32),
                                 .prep_percent = uniform(&r, 0, 100),
                                 .schedule = uniform(&r, GDN_SCHEDULE_DEFAULT, GDN_SCHEDULE_WINDOWS)};
    assert_int_equal(gdn_plan_make(&plan, &s.batch, &o), 0);
    check_cover(&plan, &s.batch);
    if (o.schedule == GDN_SCHEDULE_LANES) assert_int_equal(plan.n_wide, 0);
  }
  gdn_plan_free(&plan);
}

/* A sequence whose lane is more than half an even share runs in windows, whatever else is in the batch. */
static void plan_one_long_sequence_runs_in_windows(void **state) {
  (void)state;
  struct gdn_plan plan = {0};
  struct shape s;
  check_case("plan/one_long");
  memset(&s, 0, sizeof s);
  s.batch = (struct gdn_batch){.n_seqs = 3, .n_heads_k = 4, .n_heads_v = 8, .dim_k = 128, .dim_v = 128};
  const int32_t cu[] = {0, 64, 64 + 4096, 2 * 64 + 4096};
  memcpy(s.cu_seqlens, cu, sizeof cu);
  s.batch.n_tokens = cu[3];
  s.batch.cu_seqlens = (struct gdn_ints){s.cu_seqlens, 0};
  struct gdn_plan_options o = {.n_threads = 16, .grain = 4};
  assert_int_equal(gdn_plan_make(&plan, &s.batch, &o), 0);
  assert_int_equal(plan.n_wide, 1);
  assert_int_equal(plan.order[0], 1);
  o.n_threads = 2; /* four lanes, two workers */
  assert_int_equal(gdn_plan_make(&plan, &s.batch, &o), 0);
  assert_int_equal(plan.n_wide, 0);
  gdn_plan_free(&plan);
}

static void span_checkpoints_end_at_absolute_multiples(void **state) {
  (void)state;
  for (int i = 0; i < 400; i++) {
    struct check_rng r = check_case("span/%d", i);
    struct shape s;
    random_shape(&r, &s);
    int every = uniform(&r, 1, 200);
    add_checkpoints(&s, every);
    for (int64_t seq = 0; seq < s.batch.n_seqs; seq++) {
      struct gdn_span span = gdn_span_first(&s.batch, seq);
      int64_t token = s.cu_seqlens[seq], point = s.cu_starts[seq];
      while (gdn_span_next(&s.batch, &span)) {
        assert_int_equal(span.token, token);
        assert_true(span.end > token);
        token = span.end;
        if (span.checkpoint < 0) continue;
        assert_int_equal(span.checkpoint, point++);
        assert_int_equal((s.prefix_lens[seq] + token - s.cu_seqlens[seq]) % every, 0);
      }
      assert_int_equal(token, s.cu_seqlens[seq + 1]);
      assert_int_equal(point, s.cu_starts[seq + 1]);
    }
  }
}

static void chunks_end_at_absolute_multiples_of_64(void **state) {
  (void)state;
  for (int i = 0; i < 400; i++) {
    struct check_rng r = check_case("chunks/%d", i);
    struct shape s;
    random_shape(&r, &s);
    for (int64_t seq = 0; seq < s.batch.n_seqs; seq++) {
      int64_t token = s.cu_seqlens[seq], stop = s.cu_seqlens[seq + 1], n = 0;
      for (; token < stop; n++) {
        int64_t end = gdn_chunk_end(&s.batch, seq, token);
        assert_true(end > token && end <= stop && end - token <= GDN_CHUNK);
        if (end < stop) assert_int_equal((s.prefix_lens[seq] + end - s.cu_seqlens[seq]) % GDN_CHUNK, 0);
        token = end;
      }
      assert_int_equal(gdn_seq_chunks(&s.batch, seq), n);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plan_random_lengths_covers_every_unit_once),
      cmocka_unit_test(plan_one_long_sequence_runs_in_windows),
      cmocka_unit_test(span_checkpoints_end_at_absolute_multiples),
      cmocka_unit_test(chunks_end_at_absolute_multiples_of_64),
  };
  return check_summary("test_plan", cmocka_run_group_tests(tests, NULL, NULL));
}
