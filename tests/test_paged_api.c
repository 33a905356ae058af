/* SPDX-License-Identifier: Apache-2.0
 * Every error of the paged calls through the shared library: its status, the argument and the value in its text, and
 * not a byte written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "paged_batch.h"

enum { N_PAGES = 10, PAGE = 64, SEQS = 4, TOKENS = 106, PAD = 5 };

/* A good table, prefill: 100 tokens of which 36 new, 64 all new, none new on a scratch page, 70 of which 6 new on page
 * 3 that the first reads too. As decode: one token each. */
static const int64_t good_indices[] = {3, 7, 9, 1, 3, 5}, good_indptr[] = {0, 2, 3, 4, 6};
static const int64_t good_last[] = {36, 64, 5, 6}, good_cu[] = {0, 36, 100, 100, 106}, good_prefix[] = {64, 0, 5, 64};

struct call {
  int64_t indices[6], indptr[5], last[4], cu[5], prefix[4];
  int64_t read_rows[4], write_rows[4], slot_prefix[4], starts[5], checkpoint_rows[4];
  gdn_page_table table;
  gdn_slots slots;
  gdn_paged_args paged;
  gdn_prefill_args prefill;
  gdn_decode_args decode;
  size_t memory_bytes;
};

static gdn_ctx *ctx;
static struct vocabulary words;
static struct token_batch tokens;
static float *pool;
static char *memory;
static size_t memory_bytes, pool_bytes;

static void make_call(struct call *c) {
  memset(c, 0, sizeof *c);
  memcpy(c->indices, good_indices, sizeof good_indices);
  memcpy(c->indptr, good_indptr, sizeof good_indptr);
  memcpy(c->last, good_last, sizeof good_last);
  memcpy(c->cu, good_cu, sizeof good_cu);
  memcpy(c->prefix, good_prefix, sizeof good_prefix);
  c->table = (gdn_page_table){sizeof c->table, SEQS,    N_PAGES, PAGE,      6,       c->indices,
                              c->indptr,       c->last, c->cu,   c->prefix, GDN_I64, 0};
  c->paged =
      (gdn_paged_args){.struct_size = sizeof c->paged,
                       .pool = {.data = pool, .n_rows = N_PAGES, .row_stride_elems = vocabulary_row(&words) + PAD},
                       .table = &c->table};
  c->slots.struct_size = sizeof c->slots;
  c->memory_bytes = memory_bytes;
  tokens.n = TOKENS;
  c->prefill = token_batch_prefill(&tokens, SEQS, c->cu, 0);
  tokens.n = SEQS;
  c->decode = token_batch_decode(&tokens);
}

/* Ready slots of the table, in arrays that cases may spoil. */
static void ready_slots(struct call *c, int decode) {
  if (decode) {
    c->table.cu_seqlens = NULL;
    c->table.prefix_lens = NULL;
  }
  check_ok("gdn_paged_slots", gdn_paged_slots(&c->table, memory, memory_bytes, &c->slots));
  memcpy(c->read_rows, c->slots.read_rows, sizeof c->read_rows);
  memcpy(c->write_rows, c->slots.write_rows, sizeof c->write_rows);
  memcpy(c->slot_prefix, c->slots.prefix_lens, sizeof c->slot_prefix);
  memcpy(c->starts, c->slots.checkpoint_cu_starts, sizeof c->starts);
  memcpy(c->checkpoint_rows, c->slots.checkpoint_rows, (size_t)c->slots.n_checkpoints * 8);
  c->slots.read_rows = c->read_rows;
  c->slots.write_rows = c->write_rows;
  c->slots.prefix_lens = c->slot_prefix;
  c->slots.checkpoint_cu_starts = c->starts;
  c->slots.checkpoint_rows = c->checkpoint_rows;
  c->paged.table = NULL;
  c->paged.slots = &c->slots;
}

static void expect(const char *what, const char *call, gdn_status got, gdn_status status, const char *name,
                   const char *value) {
  check_case("%s: %s", call, what);
  const char *text = gdn_last_error();
  if (got != status)
    check_fail("%s instead of %s (%s)", gdn_status_name(got), gdn_status_name(status), got ? text : "");
  if (strstr(text, name) == NULL || strstr(text, value) == NULL)
    check_fail("\"%s\" does not name %s and %s", text, name, value);
  if (!check_is_poison(pool, pool_bytes)) check_fail("a page was written");
  if (!check_is_poison(tokens.out, TOKENS * token_out_bytes(&tokens))) check_fail("out was written");
}

enum { SLOTS = 1, PREFILL = 2, DECODE = 4, ALL = 7 };

static void bad_table(const char *what, struct call *c, int calls, gdn_status status, const char *name,
                      const char *value) {
  if (calls & SLOTS) {
    struct call kept = *c;
    if (calls == (SLOTS | DECODE)) c->table.cu_seqlens = NULL;
    gdn_status got = gdn_paged_slots(&c->table, memory, c->memory_bytes, &c->slots);
    expect(what, "gdn_paged_slots", got, status, name, value);
    check_same_bits("slots after an error", &c->slots, &kept.slots, sizeof c->slots, 1);
  }
  if (calls & PREFILL) {
    expect(what, "gdn_prefill_paged", gdn_prefill_paged(ctx, &c->prefill, &c->paged), status, name, value);
  }
  if (calls & DECODE) {
    if (c->table.prefix_lens == c->prefix) c->table.prefix_lens = NULL; /* those of the prefill call */
    expect(what, "gdn_decode_paged", gdn_decode_paged(ctx, &c->decode, &c->paged), status, name, value);
  }
}

#define BAD(calls, status, name, value, ...)                                                                           \
  do {                                                                                                                 \
    struct call c;                                                                                                     \
    make_call(&c);                                                                                                     \
    __VA_ARGS__;                                                                                                       \
    bad_table(#__VA_ARGS__, &c, calls, status, name, value);                                                           \
  } while (0)
#define BAD_DECODE(status, name, value, ...)                                                                           \
  BAD(SLOTS | DECODE, status, name, value, (c.table.prefix_lens = NULL, __VA_ARGS__))

static void errors_of_table_fields_are_named(void **state) {
  (void)state;
  BAD(ALL, GDN_E_STRUCT_SIZE, "table.struct_size", "= 8", c.table.struct_size = 8);
  BAD(ALL, GDN_E_SIZE, "table.n_seqs", "= -1", c.table.n_seqs = -1);
  BAD(ALL, GDN_E_SIZE, "table.n_page_indices", "= -6", c.table.n_page_indices = -6);
  BAD(ALL, GDN_E_SIZE, "table.n_pages", "= -1", c.table.n_pages = -1);
  BAD(ALL, GDN_E_SIZE, "table.page_size", "= 0", c.table.page_size = 0);
  BAD(ALL, GDN_E_SIZE, "table.page_size", "= 96", c.table.page_size = 96);
  BAD(ALL, GDN_E_SIZE, "table.page_size", "= -64", c.table.page_size = -64);
  BAD(ALL, GDN_E_SIZE, "table.page_size", "= 1", c.table.page_size = 1);
  BAD(ALL, GDN_E_DTYPE, "table.index_dtype", "= 2", c.table.index_dtype = GDN_BF16);
  BAD(ALL, GDN_E_NULL, "table.page_indices", "null", c.table.page_indices = NULL);
  BAD(ALL, GDN_E_NULL, "table.page_indptr", "null", c.table.page_indptr = NULL);
  BAD(ALL, GDN_E_NULL, "table.last_page_len", "null", c.table.last_page_len = NULL);
  BAD(PREFILL | DECODE, GDN_E_SIZE, "table.n_seqs = 3", "n_seqs = 4", c.table.n_seqs = 3);
  BAD(PREFILL | DECODE, GDN_E_SIZE, "table.n_pages = 11", "n_rows = 10", c.table.n_pages = 11);
}

static void errors_of_table_contents_are_named(void **state) {
  (void)state;
  BAD(ALL, GDN_E_LENGTHS, "page_indptr[0]", "= 1", c.indptr[0] = 1);
  BAD(ALL, GDN_E_LENGTHS, "page_indptr[2]", "= 1", c.indptr[2] = 1);
  BAD(ALL, GDN_E_LENGTHS, "page_indptr[2]", "= 7", c.indptr[2] = 7);
  BAD(ALL, GDN_E_LENGTHS, "page_indptr[4] = 6", "end at 5", c.table.n_page_indices = 5);
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "page_indptr[4] = 5", "end at 6",
      (c.indptr[4] = 5, c.last[3] = 6, c.prefix[3] = 0, c.indices[4] = 2));
  BAD(ALL, GDN_E_LENGTHS, "page_indptr[3]", "0 pages", c.indptr[3] = 3);
  BAD(ALL, GDN_E_LENGTHS, "last_page_len[0]", "= 0", c.last[0] = 0);
  BAD(ALL, GDN_E_LENGTHS, "last_page_len[1]", "= 65", (c.last[1] = 65, c.table.prefix_lens = NULL));
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "sequence 1", "63 tokens", c.last[1] = 63);
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "prefix_lens[3] = 65", "64", c.prefix[3] = 65);
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "prefix_lens[0] = 64", "128", /* a page too many */
      (c.indptr[1] = 3, c.indptr[2] = 4, c.indptr[3] = 5, c.table.n_page_indices = 7,
       c.table.page_indices = (int64_t[]){3, 7, 2, 9, 1, 3, 5}, c.indptr[4] = 7));
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "cu_seqlens[0]", "= 1", c.cu[0] = 1);
  BAD(SLOTS | PREFILL, GDN_E_LENGTHS, "cu_seqlens[3]", "99", c.cu[3] = 99);
  BAD(SLOTS | PREFILL, GDN_E_PAGE, "page_indices[2] = 10", "9", c.indices[2] = 10);
  BAD(SLOTS | PREFILL, GDN_E_PAGE, "page_indices[3] = -1", "sequence 2", c.indices[3] = -1);
  BAD(SLOTS | PREFILL, GDN_E_PAGE, "page 3", "sequence 0", c.indices[1] = 3);
  BAD(SLOTS | PREFILL, GDN_E_ROW_CONFLICT, "page 7 is written", "0 and 1", c.indices[2] = 7);
  BAD(SLOTS | PREFILL, GDN_E_ROW_CONFLICT, "page 9 is read by sequence 3", "written by sequence 1", c.indices[4] = 9);
  BAD_DECODE(GDN_E_LENGTHS, "prefix_lens[1] = 62", "63", c.table.prefix_lens = (int64_t[]){99, 62, 4, 69});
  BAD_DECODE(GDN_E_PAGE, "page_indices[5] = 11", "sequence 3", c.indices[5] = 11);
  BAD_DECODE(GDN_E_LENGTHS, "last_page_len[1]", "1 token", c.last[1] = 1);
  BAD_DECODE(GDN_E_PAGE, "page 3", "sequence 3", c.indices[5] = 3);
  BAD_DECODE(GDN_E_ROW_CONFLICT, "page 9 is written", "1 and 2", c.indices[3] = 9);
  BAD_DECODE(GDN_E_ROW_CONFLICT, "page 1 is read by sequence 0", "written by sequence 2",
             (c.last[0] = 1, c.indices[0] = 1));
}

static void errors_of_slots_calls_are_named(void **state) {
  (void)state;
  BAD(SLOTS, GDN_E_SIZE, "memory_bytes = 15", "at least", c.memory_bytes = 15);
  BAD(SLOTS, GDN_E_STRUCT_SIZE, "slots.struct_size", "= 0", c.slots.struct_size = 0);
  BAD(SLOTS, GDN_E_ALIAS, "table.page_indptr", "overlaps", c.table.page_indptr = memory + 16);
  BAD(SLOTS, GDN_E_ALIAS, "table.prefix_lens", "overlaps", c.table.prefix_lens = memory);
  struct call c;
  make_call(&c);
  size_t bytes = 77;
  expect("null", "gdn_paged_slots", gdn_paged_slots(NULL, memory, memory_bytes, &c.slots), GDN_E_NULL, "table", "null");
  expect("null", "gdn_paged_slots", gdn_paged_slots(&c.table, NULL, memory_bytes, &c.slots), GDN_E_NULL, "memory",
         "null");
  expect("null", "gdn_paged_slots", gdn_paged_slots(&c.table, memory, memory_bytes, NULL), GDN_E_NULL, "slots", "null");
  expect("odd address", "gdn_paged_slots", gdn_paged_slots(&c.table, memory + 4, memory_bytes - 8, &c.slots),
         GDN_E_VALUE, "memory", "divisible by 8");
  expect("null", "gdn_paged_slots_bytes", gdn_paged_slots_bytes(&c.table, NULL), GDN_E_NULL, "bytes", "null");
  expect("null", "gdn_paged_slots_bytes", gdn_paged_slots_bytes(NULL, &bytes), GDN_E_NULL, "table", "null");
  c.table.n_seqs = -3;
  expect("n_seqs", "gdn_paged_slots_bytes", gdn_paged_slots_bytes(&c.table, &bytes), GDN_E_SIZE, "n_seqs", "-3");
  assert_int_equal(bytes, 77);
}

static void errors_of_paged_args_are_named(void **state) {
  (void)state;
  static const int64_t some[SEQS + 1];
  enum { BOTH = PREFILL | DECODE };
  BAD(BOTH, GDN_E_STRUCT_SIZE, "paged.struct_size", "= 4", c.paged.struct_size = 4);
  BAD(BOTH, GDN_E_STRUCT_SIZE, "args.struct_size", "= 4", c.prefill.struct_size = c.decode.struct_size = 4);
  BAD(BOTH, GDN_E_OPTION, "paged.table and paged.slots", "both null", c.paged.table = NULL);
  BAD(BOTH, GDN_E_OPTION, "paged.table and paged.slots", "both given", c.paged.slots = &c.slots);
  BAD(BOTH, GDN_E_OPTION, "paged.pool.rows", "given", c.paged.pool.rows = some);
  BAD(BOTH, GDN_E_NULL, "paged.pool.data", "null", c.paged.pool.data = NULL);
  BAD(BOTH, GDN_E_DTYPE, "paged.pool.dtype", "= 4", c.paged.pool.dtype = GDN_I64);
  BAD(BOTH, GDN_E_STRIDE, "paged.pool.row_stride_elems", "= 7", c.paged.pool.row_stride_elems = 7);
  BAD(BOTH, GDN_E_ALIAS, "paged.pool", "overlaps q", c.paged.pool.data = (void *)(uintptr_t)c.prefill.q.data);
  BAD(BOTH, GDN_E_OPTION, "initial_state", "given",
      (c.prefill.initial_state.data = pool, c.decode.initial_state.data = pool));
  BAD(BOTH, GDN_E_OPTION, "final_state", "given",
      (c.prefill.final_state.rows = some, c.decode.final_state.rows = some));
  BAD(PREFILL, GDN_E_OPTION, "prefix_lens", "given", c.prefill.prefix_lens = some);
  BAD(PREFILL, GDN_E_OPTION, "checkpoints", "given", c.prefill.checkpoints.data = pool);
  BAD(PREFILL, GDN_E_OPTION, "checkpoint_cu_starts", "given", c.prefill.checkpoint_cu_starts = some);
  BAD(PREFILL, GDN_E_OPTION, "checkpoint_every_n_tokens", "given", c.prefill.checkpoint_every_n_tokens = 64);
  BAD(PREFILL, GDN_E_LENGTHS, "cu_seqlens[4] = 106", "n_tokens = 105", c.prefill.n_tokens = 105);
  BAD(BOTH, GDN_E_DIM, "dim_k", "33", c.prefill.dim_k = c.decode.dim_k = 33);
  struct call c;
  make_call(&c);
  expect("null", "gdn_prefill_paged", gdn_prefill_paged(NULL, &c.prefill, &c.paged), GDN_E_NULL, "ctx", "null");
  expect("null", "gdn_prefill_paged", gdn_prefill_paged(ctx, NULL, &c.paged), GDN_E_NULL, "args", "null");
  expect("null", "gdn_prefill_paged", gdn_prefill_paged(ctx, &c.prefill, NULL), GDN_E_NULL, "paged", "null");
  expect("null", "gdn_decode_paged", gdn_decode_paged(NULL, &c.decode, &c.paged), GDN_E_NULL, "ctx", "null");
  expect("null", "gdn_decode_paged", gdn_decode_paged(ctx, NULL, &c.paged), GDN_E_NULL, "args", "null");
  expect("null", "gdn_decode_paged", gdn_decode_paged(ctx, &c.decode, NULL), GDN_E_NULL, "paged", "null");
}

#define BAD_SLOTS(status, name, value, ...)                                                                            \
  do {                                                                                                                 \
    BAD(PREFILL, status, name, value, (ready_slots(&c, 0), __VA_ARGS__));                                              \
    BAD(DECODE, status, name, value, (ready_slots(&c, 1), __VA_ARGS__));                                               \
  } while (0)

static void errors_of_ready_slots_are_named(void **state) {
  (void)state;
  BAD_SLOTS(GDN_E_STRUCT_SIZE, "slots.struct_size", "= 16", c.slots.struct_size = 16);
  BAD_SLOTS(GDN_E_SIZE, "slots.n_seqs = 5", "n_seqs = 4", c.slots.n_seqs = 5);
  BAD_SLOTS(GDN_E_SIZE, "slots.n_tokens = 9", "n_tokens = ", c.slots.n_tokens = 9);
  BAD_SLOTS(GDN_E_SIZE, "slots.page_size", "= 100", c.slots.page_size = 100);
  BAD_SLOTS(GDN_E_NULL, "slots.read_rows", "null", c.slots.read_rows = NULL);
  BAD_SLOTS(GDN_E_NULL, "slots.write_rows", "null", c.slots.write_rows = NULL);
  BAD_SLOTS(GDN_E_NULL, "slots.prefix_lens", "null", c.slots.prefix_lens = NULL);
  BAD_SLOTS(GDN_E_NULL, "slots.checkpoint_cu_starts", "null", c.slots.checkpoint_cu_starts = NULL);
  BAD_SLOTS(GDN_E_LENGTHS, "slots.n_checkpoints", "= 3", c.slots.n_checkpoints = 3);
  BAD_SLOTS(GDN_E_ROW, "slots.read_rows[1]", "= 10", c.read_rows[1] = 10);
  BAD_SLOTS(GDN_E_ROW, "slots.write_rows[3]", "= -2", c.write_rows[3] = -2);
  BAD_SLOTS(GDN_E_ROW_CONFLICT, "row 5 is written", "0 and 3", c.write_rows[0] = 5);
  BAD_SLOTS(GDN_E_ROW_CONFLICT, "row 9 is read by sequence 3", "written by sequence 1", c.read_rows[3] = 9);
  BAD_SLOTS(GDN_E_ALIAS, "out at", "overlaps", c.slots.read_rows = memcpy(memory, c.read_rows, sizeof c.read_rows),
            c.prefill.out.data = c.decode.out.data = memory);
  BAD(PREFILL, GDN_E_NULL, "slots.checkpoint_rows", "null", (ready_slots(&c, 0), c.slots.checkpoint_rows = NULL));
  BAD(PREFILL, GDN_E_ROW, "slots.checkpoint_rows[0]", "= 12", (ready_slots(&c, 0), c.checkpoint_rows[0] = 12));
  BAD(PREFILL, GDN_E_ROW_CONFLICT, "row 5 is written", "1 and 3", (ready_slots(&c, 0), c.checkpoint_rows[0] = 5));
  BAD(PREFILL, GDN_E_LENGTHS, "prefix_lens[0]", "-1", (ready_slots(&c, 0), c.slot_prefix[0] = -1));
  BAD(PREFILL, GDN_E_LENGTHS, "checkpoint_cu_starts[1]", "0 checkpoints",
      (ready_slots(&c, 0), c.starts[1] = 1, c.starts[2] = c.starts[3] = c.starts[4] = 1));
}

/* All the above spoil something good: unspoilt, every call succeeds. */
static void good_calls_succeed(void **state) {
  (void)state;
  struct call c;
  check_case("good calls");
  for (int decode = 0; decode < 2; decode++) {
    for (int slots = 0; slots < 2; slots++) {
      make_call(&c);
      if (decode) c.table.prefix_lens = NULL;
      if (slots) ready_slots(&c, decode);
      check_ok("call",
               decode ? gdn_decode_paged(ctx, &c.decode, &c.paged) : gdn_prefill_paged(ctx, &c.prefill, &c.paged));
    }
  }
  make_call(&c);
  c.slots.struct_size = sizeof c.slots + 8; /* of a later version */
  struct {
    gdn_slots known;
    uint64_t later;
  } larger = {.known = {.struct_size = sizeof larger}, .later = 42};
  check_ok("gdn_paged_slots", gdn_paged_slots(&c.table, memory, memory_bytes, &larger.known));
  assert_int_equal(larger.later, 42);
  assert_int_equal(larger.known.struct_size, sizeof larger);
}

static int set_up(void **state) {
  (void)state;
  struct check_tier tiers[CHECK_TIERS_MAX];
  check_tiers(tiers);
  struct check_rng r = check_case("set up");
  words = vocabulary_make(1, 2, 32, 32, TOKENS, &r);
  tokens = token_batch_make(&words, TOKENS);
  int32_t ids[TOKENS];
  for (int i = 0; i < TOKENS; i++) ids[i] = i;
  token_batch_add(&tokens, ids, TOKENS);
  pool_bytes = (size_t)(N_PAGES * (vocabulary_row(&words) + PAD)) * sizeof(float);
  pool = check_alloc(pool_bytes);
  memory_bytes = 4096;
  memory = check_alloc(memory_bytes);
  ctx = check_ctx(&tiers[0], 2);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  gdn_ctx_destroy(ctx);
  check_free_all();
  return 0;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(errors_of_table_fields_are_named), cmocka_unit_test(errors_of_table_contents_are_named),
      cmocka_unit_test(errors_of_slots_calls_are_named),  cmocka_unit_test(errors_of_paged_args_are_named),
      cmocka_unit_test(errors_of_ready_slots_are_named),  cmocka_unit_test(good_calls_succeed),
  };
  return check_summary("test_paged_api", cmocka_run_group_tests(tests, set_up, tear_down));
}
