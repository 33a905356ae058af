/* SPDX-License-Identifier: Apache-2.0
 * Paged calls become calls on rows: checks page tables, gives faults their status and text. */
#include <inttypes.h>
#include <string.h>

#include "engine.h"

#define MAX_COUNT INT32_MAX

gdn_status gdn_check_table_size(const gdn_page_table *table, struct gdn_pages *pages) {
  gdn_page_table t;
  gdn_status status = gdn_check_struct(table, "table", sizeof t, &t, sizeof t);
  if (status) return status;
  if (t.n_seqs < 0 || t.n_seqs > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "table.n_seqs = %" PRId64 ": expected 0 .. %d", t.n_seqs, MAX_COUNT);
  if (t.n_page_indices < 0 || t.n_page_indices > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "table.n_page_indices = %" PRId64 ": expected 0 .. %d", t.n_page_indices, MAX_COUNT);
  if (t.index_dtype != GDN_DTYPE_DEFAULT && t.index_dtype != GDN_I32 && t.index_dtype != GDN_I64)
    return gdn_fail(GDN_E_DTYPE, "table.index_dtype = %d: expected GDN_I32 or GDN_I64", t.index_dtype);
  if (t.reserved) return gdn_fail(GDN_E_OPTION, "table.reserved = %d: expected 0", t.reserved);
  int wide = t.index_dtype == GDN_I64;
  *pages = (struct gdn_pages){.n_seqs = t.n_seqs,
                              .n_pages = t.n_pages,
                              .page_size = t.page_size,
                              .n_indices = t.n_page_indices,
                              .indices = {t.page_indices, wide},
                              .indptr = {t.page_indptr, wide},
                              .last_len = {t.last_page_len, wide},
                              .cu_seqlens = {t.cu_seqlens, wide},
                              .prefix_lens = {t.prefix_lens, wide}};
  return GDN_OK;
}

gdn_status gdn_check_table(const gdn_page_table *table, struct gdn_pages *p) {
  gdn_status status = gdn_check_table_size(table, p);
  if (status) return status;
  if (p->n_pages < 0 || p->n_pages > INT64_MAX / 4)
    return gdn_fail(GDN_E_SIZE, "table.n_pages = %" PRId64 ": expected 0 .. %" PRId64, p->n_pages, INT64_MAX / 4);
  if (p->page_size < GDN_CHUNK || p->page_size % GDN_CHUNK || p->page_size > MAX_COUNT)
    return gdn_fail(GDN_E_SIZE, "table.page_size = %" PRId64 ": expected a multiple of %d in %d .. %d", p->page_size,
                    GDN_CHUNK, GDN_CHUNK, MAX_COUNT);
  if (!p->indptr.data) return gdn_fail(GDN_E_NULL, "table.page_indptr is null");
  if (!p->indices.data && p->n_indices) return gdn_fail(GDN_E_NULL, "table.page_indices is null");
  if (!p->last_len.data && p->n_seqs) return gdn_fail(GDN_E_NULL, "table.last_page_len is null");
  return GDN_OK;
}

/* The text of what gdn_slots_make found. */
static gdn_status page_fail(const struct gdn_pages *p, const struct gdn_pages_fault *f) {
  switch (f->error) {
  case GDN_PAGES_OK:
    return GDN_OK;
  case GDN_PAGES_INDPTR:
    return gdn_fail(GDN_E_LENGTHS,
                    "page_indptr[%" PRId64 "] = %" PRId64 ": offsets start at 0, do not decrease and end at %" PRId64,
                    f->seq, f->value, p->n_indices);
  case GDN_PAGES_NO_PAGE:
    return gdn_fail(GDN_E_LENGTHS, "page_indptr[%" PRId64 "]: sequence %" PRId64 " owns 0 pages, expected at least 1",
                    f->seq + 1, f->seq);
  case GDN_PAGES_LAST_LEN:
    return gdn_fail(GDN_E_LENGTHS, "last_page_len[%" PRId64 "] = %" PRId64 ": expected 1 .. page_size = %" PRId64,
                    f->seq, f->value, p->page_size);
  case GDN_PAGES_CU_SEQLENS:
    return gdn_fail(GDN_E_LENGTHS, "cu_seqlens[%" PRId64 "] = %" PRId64 ": offsets start at 0 and do not decrease",
                    f->seq, f->value);
  case GDN_PAGES_TOO_SHORT:
    return gdn_fail(GDN_E_LENGTHS,
                    "page_indptr: the pages of sequence %" PRId64 " hold %" PRId64 " tokens, fewer than its %" PRId64
                    " new ones",
                    f->seq, f->value, f->other);
  case GDN_PAGES_NO_TOKEN:
    return gdn_fail(GDN_E_LENGTHS,
                    "last_page_len[%" PRId64 "]: sequence %" PRId64 " holds %" PRId64
                    " token, decode needs one before the new one",
                    f->seq, f->seq, f->value);
  case GDN_PAGES_PREFIX:
    return gdn_fail(GDN_E_LENGTHS,
                    "prefix_lens[%" PRId64 "] = %" PRId64 ", but pages and new tokens leave a prefix of %" PRId64,
                    f->seq, f->value, f->other);
  case GDN_PAGES_ID:
    return gdn_fail(GDN_E_PAGE,
                    "page_indices[%" PRId64 "] = %" PRId64 " of sequence %" PRId64
                    ": expected 0 .. n_pages - 1 = %" PRId64,
                    f->other, f->value, f->seq, p->n_pages - 1);
  case GDN_PAGES_TWICE:
    return gdn_fail(GDN_E_PAGE, "page_indices: page %" PRId64 " stands twice in sequence %" PRId64, f->value, f->seq);
  case GDN_PAGES_TWO_WRITERS:
    return gdn_fail(GDN_E_ROW_CONFLICT,
                    "page_indices: page %" PRId64 " is written by sequences %" PRId64 " and %" PRId64, f->value,
                    f->other, f->seq);
  case GDN_PAGES_READ_WRITE:
    return gdn_fail(GDN_E_ROW_CONFLICT,
                    "page_indices: page %" PRId64 " is read by sequence %" PRId64 " and written by sequence %" PRId64,
                    f->value, f->seq, f->other);
  }
  return gdn_fail(GDN_E_PAGE, "page_indices: fault %d", (int)f->error);
}

static int overlaps(const struct gdn_ints *a, int64_t n, const void *memory, size_t bytes) {
  uintptr_t start = (uintptr_t)a->data, end = start + (size_t)n * (a->wide ? 8 : 4);
  return a->data && n > 0 && start < (uintptr_t)memory + bytes && (uintptr_t)memory < end;
}

gdn_status gdn_check_slots_memory(const struct gdn_pages *p, const void *memory, size_t bytes) {
  const struct {
    const char *name;
    const struct gdn_ints *ints;
    int64_t n;
  } arrays[] = {{"page_indices", &p->indices, p->n_indices},
                {"page_indptr", &p->indptr, p->n_seqs + 1},
                {"last_page_len", &p->last_len, p->n_seqs},
                {"cu_seqlens", &p->cu_seqlens, p->n_seqs + 1},
                {"prefix_lens", &p->prefix_lens, p->n_seqs}};
  if ((uintptr_t)memory % sizeof(int64_t))
    return gdn_fail(GDN_E_VALUE, "memory at %p: expected an address divisible by %zu", memory, sizeof(int64_t));
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
    if (overlaps(arrays[i].ints, arrays[i].n, memory, bytes))
      return gdn_fail(GDN_E_ALIAS, "memory at %p overlaps table.%s at %p", memory, arrays[i].name,
                      arrays[i].ints->data);
  return GDN_OK;
}

gdn_status gdn_make_slots(const struct gdn_pages *p, void *memory, gdn_slots *slots) {
  struct gdn_slot_rows rows;
  struct gdn_pages_fault f = gdn_slots_make(p, memory, &rows);
  if (f.error) return page_fail(p, &f);
  *slots =
      (gdn_slots){sizeof *slots,  p->n_seqs,       rows.n_tokens,    rows.n_checkpoints,        p->page_size,
                  rows.read_rows, rows.write_rows, rows.prefix_lens, rows.checkpoint_cu_starts, rows.checkpoint_rows};
  return GDN_OK;
}

/* ---- where a paged call's rows come from ---- */

/* Rows made anew from the table in memory. */
static gdn_status slots_from_table(const gdn_paged_args *a, int64_t n_seqs, struct gdn_ints cu_seqlens,
                                   struct gdn_scratch *memory, gdn_slots *slots) {
  struct gdn_pages pages;
  gdn_status status = gdn_check_table(a->table, &pages);
  if (status) return status;
  if (pages.n_pages > a->pool.n_rows)
    return gdn_fail(GDN_E_SIZE, "table.n_pages = %" PRId64 ": paged.pool has n_rows = %" PRId64, pages.n_pages,
                    a->pool.n_rows);
  if (pages.n_seqs != n_seqs)
    return gdn_fail(GDN_E_SIZE, "table.n_seqs = %" PRId64 ": the call has n_seqs = %" PRId64, pages.n_seqs, n_seqs);
  pages.cu_seqlens = cu_seqlens;
  size_t bytes = gdn_slots_bytes(pages.n_seqs, pages.n_indices);
  if (gdn_scratch_reserve(memory, bytes)) return gdn_fail(GDN_E_NOMEM, "no memory for %zu bytes of slots", bytes);
  return gdn_make_slots(&pages, memory->block, slots);
}

static gdn_status check_slot_rows(const char *name, const int64_t *rows, int64_t n, int64_t n_rows) {
  for (int64_t i = 0; i < n; i++)
    if (rows[i] < -1 || rows[i] >= n_rows)
      return gdn_fail(GDN_E_ROW, "slots.%s[%" PRId64 "] = %" PRId64 ": expected -1 .. %" PRId64, name, i, rows[i],
                      n_rows - 1);
  return GDN_OK;
}

/* Ready slots fit the call and the pool; whether they are the batch's own, only the caller knows. */
static gdn_status check_slots(const gdn_slots *s, int64_t n_seqs, int64_t n_tokens, int64_t n_rows) {
  const struct {
    const char *name;
    const int64_t *data;
    int64_t n;
  } arrays[] = {{"read_rows", s->read_rows, s->n_seqs},
                {"write_rows", s->write_rows, s->n_seqs},
                {"prefix_lens", s->prefix_lens, s->n_seqs},
                {"checkpoint_cu_starts", s->checkpoint_cu_starts, 1},
                {"checkpoint_rows", s->checkpoint_rows, s->n_checkpoints}};
  if (s->n_seqs != n_seqs || n_seqs < 0)
    return gdn_fail(GDN_E_SIZE, "slots.n_seqs = %" PRId64 ": the call has n_seqs = %" PRId64, s->n_seqs, n_seqs);
  if (s->n_tokens != n_tokens)
    return gdn_fail(GDN_E_SIZE, "slots.n_tokens = %" PRId64 ": the call has n_tokens = %" PRId64, s->n_tokens,
                    n_tokens);
  if (s->page_size < GDN_CHUNK || s->page_size % GDN_CHUNK)
    return gdn_fail(GDN_E_SIZE, "slots.page_size = %" PRId64 ": expected a positive multiple of %d", s->page_size,
                    GDN_CHUNK);
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
    if (arrays[i].n && !arrays[i].data) return gdn_fail(GDN_E_NULL, "slots.%s is null", arrays[i].name);
  if (s->checkpoint_cu_starts[n_seqs] != s->n_checkpoints)
    return gdn_fail(GDN_E_LENGTHS, "slots.n_checkpoints = %" PRId64 ": slots.checkpoint_cu_starts ends at %" PRId64,
                    s->n_checkpoints, s->checkpoint_cu_starts[n_seqs]);
  gdn_status status = check_slot_rows("read_rows", s->read_rows, n_seqs, n_rows);
  if (!status) status = check_slot_rows("write_rows", s->write_rows, n_seqs, n_rows);
  return status ? status : check_slot_rows("checkpoint_rows", s->checkpoint_rows, s->n_checkpoints, n_rows);
}

/* The rows of a call of n_seqs sequences and n_tokens tokens: paged's slots, or made from its table. */
static gdn_status find_slots(const gdn_paged_args *a, int64_t n_seqs, int64_t n_tokens, struct gdn_ints cu_seqlens,
                             struct gdn_scratch *memory, gdn_slots *slots) {
  if (!a->table == !a->slots)
    return gdn_fail(GDN_E_OPTION, "paged.table and paged.slots are both %s: expected exactly one",
                    a->table ? "given" : "null");
  if (a->pool.rows) return gdn_fail(GDN_E_OPTION, "paged.pool.rows is given: rows come from the pages");
  if (!a->pool.data) return gdn_fail(GDN_E_NULL, "paged.pool.data is null");
  if (a->table) return slots_from_table(a, n_seqs, cu_seqlens, memory, slots);
  gdn_status status = gdn_check_struct(a->slots, "slots", sizeof *slots, slots, sizeof *slots);
  return status ? status : check_slots(slots, n_seqs, n_tokens, a->pool.n_rows);
}

static gdn_states pool_rows(const gdn_states *pool, const int64_t *rows) {
  gdn_states s = *pool;
  s.rows = rows;
  s.rows_dtype = GDN_I64;
  return s;
}

/* ---- the calls ---- */

static gdn_status must_be_absent(int given, const char *name) {
  return given ? gdn_fail(GDN_E_OPTION, "%s is given: in a paged call it comes from the pages", name) : GDN_OK;
}

static gdn_status states_absent(const gdn_states *initial, const gdn_states *final) {
  gdn_status status = must_be_absent(initial->data || initial->rows, "initial_state");
  return status ? status : must_be_absent(final->data || final->rows, "final_state");
}

static gdn_status checkpoints_absent(const gdn_prefill_args *a) {
  gdn_status status = must_be_absent(a->prefix_lens != NULL, "prefix_lens");
  if (!status) status = must_be_absent(a->checkpoints.data || a->checkpoints.rows, "checkpoints");
  if (!status) status = must_be_absent(a->checkpoint_cu_starts != NULL, "checkpoint_cu_starts");
  return status ? status : must_be_absent(a->checkpoint_every_n_tokens != 0, "checkpoint_every_n_tokens");
}

gdn_status gdn_unpage_prefill(const gdn_prefill_args *args, const gdn_paged_args *paged, struct gdn_scratch *memory,
                              gdn_prefill_args *u) {
  gdn_paged_args p;
  gdn_slots slots;
  struct gdn_batch b;
  gdn_status status = gdn_check_struct(args, "args", sizeof *u, u, sizeof *u);
  if (!status) status = gdn_check_struct(paged, "paged", sizeof p, &p, sizeof p);
  if (!status) status = states_absent(&u->initial_state, &u->final_state);
  if (!status) status = checkpoints_absent(u);
  if (!status) status = gdn_check_lengths(u, &b);
  if (!status) status = find_slots(&p, u->n_seqs, u->n_tokens, b.cu_seqlens, memory, &slots);
  if (status) return status;
  u->struct_size = sizeof *u;
  u->initial_state = pool_rows(&p.pool, slots.read_rows);
  u->final_state = pool_rows(&p.pool, slots.write_rows);
  u->checkpoints = pool_rows(&p.pool, slots.checkpoint_rows);
  u->prefix_lens = slots.prefix_lens;
  u->checkpoint_cu_starts = slots.checkpoint_cu_starts;
  u->prefix_lens_dtype = u->checkpoint_cu_starts_dtype = GDN_I64;
  u->checkpoint_every_n_tokens = slots.page_size;
  return GDN_OK;
}

/* Pages say nothing about tokens that may be taken back. */
static gdn_status one_token(const gdn_decode_args *a) {
  if (a->n_tokens < 0 || a->n_tokens > 1)
    return gdn_fail(GDN_E_OPTION, "n_tokens = %d: a paged call takes 1; give the rows of ready slots to gdn_decode",
                    a->n_tokens);
  gdn_status status = must_be_absent(a->token_counts != NULL, "token_counts");
  return status ? status : must_be_absent(a->token_states.data || a->token_states.rows, "token_states");
}

gdn_status gdn_unpage_decode(const gdn_decode_args *args, const gdn_paged_args *paged, struct gdn_scratch *memory,
                             gdn_decode_args *u) {
  gdn_paged_args p;
  gdn_slots slots;
  gdn_status status = gdn_check_struct(args, "args", sizeof *u, u, sizeof *u);
  if (!status) status = gdn_check_struct(paged, "paged", sizeof p, &p, sizeof p);
  if (!status) status = states_absent(&u->initial_state, &u->final_state);
  if (!status) status = one_token(u);
  if (!status) status = find_slots(&p, u->n_seqs, u->n_seqs, (struct gdn_ints){NULL, 0}, memory, &slots);
  if (status) return status;
  u->struct_size = sizeof *u;
  u->initial_state = pool_rows(&p.pool, slots.read_rows);
  u->final_state = pool_rows(&p.pool, slots.write_rows);
  return GDN_OK;
}
