/* SPDX-License-Identifier: Apache-2.0
 * src/paged: page tables to rows, against a walk token by token, and every fault a table can have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "paged/paged.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

static struct gdn_ints wide(const int64_t *data) {
  return (struct gdn_ints){data, 1};
}

static struct gdn_pages_fault make(const struct gdn_pages *p, struct gdn_slot_rows *rows) {
  size_t bytes = gdn_slots_bytes(p->n_seqs, p->n_indices);
  return gdn_slots_make(p, check_alloc_tight(bytes), rows);
}

/* ---- the example of the specification ---- */

/* 2500 tokens on pages [7, 3, 12] of 1024 tokens, n_new of them new. */
static struct gdn_slot_rows example(int64_t n_new) {
  static const int32_t indices[] = {7, 3, 12}, indptr[] = {0, 3}, last[] = {452};
  int64_t cu[] = {0, n_new};
  struct gdn_pages p = {.n_seqs = 1,
                        .n_pages = 16,
                        .page_size = 1024,
                        .n_indices = 3,
                        .indices = {indices, 0},
                        .indptr = {indptr, 0},
                        .last_len = {last, 0},
                        .cu_seqlens = wide(cu)};
  struct gdn_slot_rows rows;
  struct gdn_pages_fault f = make(&p, &rows);
  if (f.error) check_fail("fault %d", (int)f.error);
  if (rows.prefix_lens[0] != 2500 - n_new) check_fail("prefix %lld", (long long)rows.prefix_lens[0]);
  if (rows.write_rows[0] != 12) check_fail("write row %lld", (long long)rows.write_rows[0]);
  if (rows.n_tokens != n_new) check_fail("%lld tokens", (long long)rows.n_tokens);
  return rows;
}

static void slots_example_of_2500_tokens_uses_its_pages(void **state) {
  (void)state;
  check_case("example/452 new");
  struct gdn_slot_rows r = example(452);
  assert_int_equal(r.read_rows[0], 3);
  assert_int_equal(r.n_checkpoints, 0);
  assert_int_equal(r.checkpoint_cu_starts[1], 0);
  check_case("example/all new");
  r = example(2500);
  assert_int_equal(r.read_rows[0], -1);
  assert_int_equal(r.n_checkpoints, 2);
  assert_int_equal(r.checkpoint_rows[0], 7);
  assert_int_equal(r.checkpoint_rows[1], 3);
  check_case("example/prefix inside page 3");
  r = example(1000);
  assert_int_equal(r.read_rows[0], 3);
  assert_int_equal(r.n_checkpoints, 1);
  assert_int_equal(r.checkpoint_rows[0], 3);
  check_case("example/prefix inside the last page");
  r = example(1);
  assert_int_equal(r.read_rows[0], 12);
  assert_int_equal(r.n_checkpoints, 0);
  check_free_all();
}

/* ---- every boundary, token by token ---- */

struct walk {
  int64_t read, write, n_points, points[8];
};

/* What a sequence of len tokens, n_new of them new, does to pages 10, 11, ..: one token after the other. */
static struct walk walk(int64_t page_size, int64_t len, int64_t n_new) {
  struct walk w = {-1, -1, 0, {0}};
  for (int64_t t = len - n_new; t < len; t++) {
    if (t == len - n_new && t > 0) w.read = 10 + (t - 1) / page_size;
    w.write = 10 + t / page_size;
    if ((t + 1) % page_size == 0) w.points[w.n_points++] = t + 1 == len ? -1 : 10 + t / page_size;
  }
  return w;
}

static void boundary_case(int64_t page_size, int64_t len, int64_t n_new, int decode) {
  static const int64_t indices[] = {10, 11, 12, 13, 14, 15};
  int64_t n_indices = (len + page_size - 1) / page_size, indptr[] = {0, n_indices}, cu[] = {0, n_new};
  int64_t last = len - (n_indices - 1) * page_size, prefix = len - n_new;
  struct gdn_pages p = {.n_seqs = 1,
                        .n_pages = 16,
                        .page_size = page_size,
                        .n_indices = n_indices,
                        .indices = wide(indices),
                        .indptr = wide(indptr),
                        .last_len = wide(&last),
                        .cu_seqlens = wide(decode ? NULL : cu),
                        .prefix_lens = wide(&prefix)};
  struct gdn_slot_rows r;
  struct gdn_pages_fault f = make(&p, &r);
  struct walk w = walk(page_size, len, n_new);
  if (decode) w.n_points = 0;
  if (f.error)
    check_fail("page %lld, len %lld, new %lld: fault %d", (long long)page_size, (long long)len, (long long)n_new,
               (int)f.error);
  int same = r.read_rows[0] == w.read && r.write_rows[0] == w.write && r.prefix_lens[0] == prefix &&
             r.n_tokens == n_new && r.n_checkpoints == w.n_points && r.checkpoint_cu_starts[0] == 0 &&
             r.checkpoint_cu_starts[1] == w.n_points;
  for (int64_t j = 0; same && j < w.n_points; j++) same = r.checkpoint_rows[j] == w.points[j];
  if (!same)
    check_fail("page %lld, len %lld, new %lld: rows differ from the walk", (long long)page_size, (long long)len,
               (long long)n_new);
}

static void slots_boundaries_agree_with_a_walk_over_tokens(void **state) {
  (void)state;
  static const int64_t sizes[] = {64, 128, 1024};
  static const int64_t offsets[] = {-65, -64, -63, -2, -1, 0, 1, 2, 63, 64, 65};
  for (int64_t s = 0; s < COUNT(sizes); s++) {
    check_case("boundaries/page_%lld", (long long)sizes[s]);
    for (int64_t i = 0; i < 5 * COUNT(offsets); i++) {
      int64_t len = i / COUNT(offsets) * sizes[s] + offsets[i % COUNT(offsets)];
      for (int64_t j = 0; j < 5 * COUNT(offsets); j++) {
        int64_t prefix = j / COUNT(offsets) * sizes[s] + offsets[j % COUNT(offsets)];
        if (len < 1 || prefix < 0 || prefix > len) continue;
        boundary_case(sizes[s], len, len - prefix, 0);
        if (prefix > 0 && len == prefix + 1) boundary_case(sizes[s], len, 1, 1);
      }
      check_free_all();
    }
  }
}

/* ---- faults ---- */

/* A good table of four sequences on pages of 64: 100 tokens of which 40 new, 64 of which all new, no new ones on a
 * scratch page, 70 of which 6 new on a page shared with the first. Cases spoil one entry. */
struct small {
  int64_t indices[6], indptr[5], last[4], cu[5], prefix[4];
};

static const struct small good = {
    {3, 7, 9, 1, 3, 5}, {0, 2, 3, 4, 6}, {36, 64, 5, 6}, {0, 36, 100, 100, 106}, {64, 0, 5, 64}};

static struct gdn_pages small_pages(const struct small *t, int decode) {
  return (struct gdn_pages){.n_seqs = 4,
                            .n_pages = 10,
                            .page_size = 64,
                            .n_indices = 6,
                            .indices = wide(t->indices),
                            .indptr = wide(t->indptr),
                            .last_len = wide(t->last),
                            .cu_seqlens = wide(decode ? NULL : t->cu),
                            .prefix_lens = wide(decode ? NULL : t->prefix)};
}

static void expect(const char *name, const struct small *t, int decode, enum gdn_pages_error error, int64_t seq,
                   int64_t value, int64_t other) {
  check_case("fault/%s", name);
  struct gdn_pages p = small_pages(t, decode);
  struct gdn_slot_rows rows;
  struct gdn_pages_fault f = make(&p, &rows);
  if (f.error != error || f.seq != seq || f.value != value || f.other != other) {
    check_fail("error %d seq %lld value %lld other %lld, expected %d %lld %lld %lld", (int)f.error, (long long)f.seq,
               (long long)f.value, (long long)f.other, (int)error, (long long)seq, (long long)value, (long long)other);
  }
  check_free_all();
}

#define FAULT(decode, error, seq, value, other, ...)                                                                   \
  do {                                                                                                                 \
    struct small t = good;                                                                                             \
    __VA_ARGS__;                                                                                                       \
    expect(#__VA_ARGS__, &t, decode, error, seq, value, other);                                                        \
  } while (0)

static void slots_faults_are_told_apart(void **state) {
  (void)state;
  FAULT(0, GDN_PAGES_OK, 0, 0, 0, (void)0);
  FAULT(0, GDN_PAGES_INDPTR, 0, 1, 0, t.indptr[0] = 1);
  FAULT(0, GDN_PAGES_INDPTR, 2, 1, 0, t.indptr[2] = 1);
  FAULT(0, GDN_PAGES_INDPTR, 2, 7, 0, t.indptr[2] = 7);
  FAULT(0, GDN_PAGES_INDPTR, 4, INT64_MAX, 0, t.indptr[4] = INT64_MAX);
  FAULT(0, GDN_PAGES_INDPTR, 2, INT64_MIN, 0, t.indptr[2] = INT64_MIN);
  FAULT(0, GDN_PAGES_INDPTR, 4, 5, 0,
        (t.indptr[4] = 5, t.last[3] = 64, t.cu[4] = 164, t.prefix[3] = 0, t.indices[4] = 2));
  FAULT(0, GDN_PAGES_NO_PAGE, 2, 0, 0, t.indptr[3] = 3);
  FAULT(0, GDN_PAGES_LAST_LEN, 0, 0, 0, t.last[0] = 0);
  FAULT(0, GDN_PAGES_LAST_LEN, 1, 65, 0, t.last[1] = 65);
  FAULT(0, GDN_PAGES_LAST_LEN, 3, -1, 0, t.last[3] = -1);
  FAULT(0, GDN_PAGES_CU_SEQLENS, 0, 1, 0, t.cu[0] = 1);
  FAULT(0, GDN_PAGES_CU_SEQLENS, 3, 99, 0, t.cu[3] = 99);
  FAULT(0, GDN_PAGES_TOO_SHORT, 1, 63, 64, t.last[1] = 63);
  FAULT(0, GDN_PAGES_TOO_SHORT, 0, 100, 101, t.cu[1] = 101);
  FAULT(0, GDN_PAGES_TOO_SHORT, 3, 70, INT64_MAX - 100, t.cu[4] = INT64_MAX);
  FAULT(0, GDN_PAGES_PREFIX, 3, 65, 64, t.prefix[3] = 65);
  FAULT(0, GDN_PAGES_PREFIX, 0, 64, 65, t.last[0] = 37);
  FAULT(0, GDN_PAGES_ID, 1, 10, 2, t.indices[2] = 10);
  FAULT(0, GDN_PAGES_ID, 2, -1, 3, t.indices[3] = -1);
  FAULT(0, GDN_PAGES_TWICE, 0, 3, 0, t.indices[1] = 3);
  FAULT(0, GDN_PAGES_TWO_WRITERS, 1, 7, 0, t.indices[2] = 7);
  FAULT(0, GDN_PAGES_TWO_WRITERS, 3, 9, 1, t.indices[5] = 9);
  FAULT(0, GDN_PAGES_READ_WRITE, 3, 9, 1, t.indices[4] = 9);
  FAULT(0, GDN_PAGES_READ_WRITE, 0, 5, 3, t.indices[0] = 5);
  /* A sequence without new tokens reads and writes nothing, whatever its pages are to others. */
  FAULT(0, GDN_PAGES_OK, 0, 0, 0, t.indices[3] = 9);
  FAULT(0, GDN_PAGES_ID, 2, 99, 3, t.indices[3] = 99);
  /* Decode. */
  FAULT(1, GDN_PAGES_OK, 0, 0, 0, (void)0);
  FAULT(1, GDN_PAGES_OK, 0, 0, 0, t.last[3] = 1);
  FAULT(1, GDN_PAGES_NO_TOKEN, 1, 1, 0, t.last[1] = 1);
  FAULT(1, GDN_PAGES_TWO_WRITERS, 2, 9, 1, t.indices[3] = 9);
  FAULT(1, GDN_PAGES_READ_WRITE, 0, 1, 2, (t.last[0] = 1, t.indices[0] = 1));
}

/* ---- random tables ---- */

/* Whether sequence i writes, or reads, page: straight from the definition. */
static int writes(const struct small *t, int64_t i, int64_t page) {
  int64_t n = t->indptr[i + 1] - t->indptr[i], n_new = t->cu[i + 1] - t->cu[i];
  for (int64_t j = 0; j < n; j++) {
    int64_t end = j == n - 1 ? (n - 1) * 64 + t->last[i] : (j + 1) * 64;
    if (t->indices[t->indptr[i] + j] == page && n_new && end > t->prefix[i]) return 1;
  }
  return 0;
}

static int reads(const struct small *t, int64_t i, int64_t page) {
  if (t->cu[i + 1] == t->cu[i] || t->prefix[i] == 0) return 0;
  return t->indices[t->indptr[i] + (t->prefix[i] - 1) / 64] == page;
}

static int is_good(const struct small *t) {
  for (int64_t i = 0; i < 4; i++) {
    for (int64_t a = t->indptr[i]; a < t->indptr[i + 1]; a++) {
      for (int64_t b = a + 1; b < t->indptr[i + 1]; b++) {
        if (t->indices[a] == t->indices[b]) return 0;
      }
      for (int64_t j = 0; j < 4; j++) {
        if (j == i || !writes(t, i, t->indices[a])) continue;
        if (writes(t, j, t->indices[a]) || reads(t, j, t->indices[a])) return 0;
      }
    }
  }
  return 1;
}

static void slots_random_tables_are_refused_if_and_only_if_they_conflict(void **state) {
  (void)state;
  struct check_rng r = check_case("random tables");
  int n_good = 0;
  for (int round = 0; round < 20000; round++) {
    struct small t = good;
    for (int i = 0; i < 6; i++) t.indices[i] = (int64_t)(check_random_u64(&r) % 10);
    for (int i = 0; i < 4; i++) {
      int64_t n = t.indptr[i + 1] - t.indptr[i];
      t.last[i] = 1 + (int64_t)(check_random_u64(&r) % 64);
      int64_t len = (n - 1) * 64 + t.last[i];
      int64_t n_new = (int64_t)(check_random_u64(&r) % (uint64_t)(len + 1)) * (int64_t)(check_random_u64(&r) % 3 != 0);
      t.cu[i + 1] = t.cu[i] + n_new;
      t.prefix[i] = len - n_new;
    }
    struct gdn_pages p = small_pages(&t, 0);
    struct gdn_slot_rows rows;
    char memory[2048];
    int64_t *aligned = (int64_t *)(void *)(memory + (8 - (uintptr_t)memory % 8) % 8);
    if (gdn_slots_bytes(4, 6) > sizeof memory - 8) check_fail("the buffer is too small");
    int fine = gdn_slots_make(&p, aligned, &rows).error == GDN_PAGES_OK;
    if (fine != is_good(&t)) check_fail("round %d: %s", round, fine ? "taken" : "refused");
    for (int i = 0; fine && i < 4; i++) {
      if (rows.read_rows[i] >= 0 && !reads(&t, i, rows.read_rows[i])) check_fail("round %d: read row", round);
      if (rows.write_rows[i] >= 0 && !writes(&t, i, rows.write_rows[i])) check_fail("round %d: write row", round);
    }
    n_good += fine;
  }
  if (n_good < 500 || n_good > 19500) check_fail("%d of 20000 tables are good: the test shows little", n_good);
}

/* ---- memory ---- */

static void slots_bytes_grow_with_either_count(void **state) {
  (void)state;
  check_case("slots_bytes");
  for (int64_t n = 0; n < 300; n++) {
    for (int64_t m = 0; m < 300; m += 7) {
      size_t bytes = gdn_slots_bytes(n, m);
      if (gdn_slots_bytes(n + 1, m) < bytes || gdn_slots_bytes(n, m + 1) < bytes) check_fail("%d %d", (int)n, (int)m);
    }
  }
  if (gdn_slots_bytes(INT32_MAX, INT32_MAX) < (size_t)INT32_MAX * 8) check_fail("wraps around");
}

static void slots_of_many_sequences_fill_their_memory_only(void **state) {
  (void)state;
  check_case("4096 sequences of 5 pages");
  enum { N = 4096, PAGES = 5 };
  int32_t *indices = check_alloc_tight(sizeof *indices * N * PAGES),
          *indptr = check_alloc_tight(sizeof *indptr * (N + 1));
  int32_t *last = check_alloc_tight(sizeof *last * N), *cu = check_alloc_tight(sizeof *cu * (N + 1));
  for (int i = 0; i < N * PAGES; i++) indices[i] = i % PAGES < 2 ? i % PAGES : i; /* two shared pages each */
  for (int i = 0; i <= N; i++) {
    indptr[i] = i * PAGES;
    cu[i] = i * 128;
    if (i < N) last[i] = 10;
  }
  check_protect(indices);
  check_protect(indptr);
  struct gdn_pages p = {.n_seqs = N,
                        .n_pages = N * PAGES,
                        .page_size = 64,
                        .n_indices = N * PAGES,
                        .indices = {indices, 0},
                        .indptr = {indptr, 0},
                        .last_len = {last, 0},
                        .cu_seqlens = {cu, 0}};
  struct gdn_slot_rows r;
  struct gdn_pages_fault f = make(&p, &r);
  if (f.error) check_fail("fault %d of %lld", (int)f.error, (long long)f.seq);
  for (int64_t i = 0; i < N; i++) {
    if (r.read_rows[i] != i * PAGES + 2 || r.write_rows[i] != i * PAGES + 4 || r.prefix_lens[i] != 138 ||
        r.checkpoint_cu_starts[i] != 2 * i || r.checkpoint_rows[2 * i] != i * PAGES + 2 ||
        r.checkpoint_rows[2 * i + 1] != i * PAGES + 3) {
      check_fail("rows of sequence %lld", (long long)i);
    }
  }
  assert_int_equal(r.n_checkpoints, 2 * N);
  assert_int_equal(r.n_tokens, 128 * N);
  check_free_all();
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
#define TEST(name) cmocka_unit_test_teardown(name, check_teardown)
  const struct CMUnitTest tests[] = {
      TEST(slots_example_of_2500_tokens_uses_its_pages),
      TEST(slots_boundaries_agree_with_a_walk_over_tokens),
      TEST(slots_faults_are_told_apart),
      TEST(slots_random_tables_are_refused_if_and_only_if_they_conflict),
      TEST(slots_bytes_grow_with_either_count),
      TEST(slots_of_many_sequences_fill_their_memory_only),
  };
  return check_summary("test_slots", cmocka_run_group_tests(tests, NULL, NULL));
}
