/* SPDX-License-Identifier: Apache-2.0
 * Pool rows of a paged batch: checks the table against the batch and itself, then derives the rows. */
#include "paged/paged.h"

#include <string.h>

/* One owned page while the table is checked: open addressing by id. */
struct owner {
  int64_t page;   /* id + 1; 0 = free */
  int64_t seq;    /* the last sequence, of those entered, that owns it */
  int64_t writer; /* the sequence that writes it, -1 = none */
};

/* The caller's block: rows first, then what only the checks need. */
struct memory_map {
  struct gdn_slot_rows rows;
  struct owner *owners;
  int64_t capacity;
};

static int64_t owners_capacity(int64_t n_indices) {
  int64_t n = 16;
  while (n < 2 * n_indices) n *= 2;
  return n;
}

size_t gdn_slots_bytes(int64_t n_seqs, int64_t n_indices) {
  size_t words = (size_t)(4 * n_seqs + 1 + n_indices);
  return words * sizeof(int64_t) + (size_t)owners_capacity(n_indices) * sizeof(struct owner);
}

static struct memory_map map_memory(const struct gdn_pages *p, void *memory) {
  struct memory_map m;
  int64_t *at = memory;
  m.rows =
      (struct gdn_slot_rows){at, at + p->n_seqs, at + 2 * p->n_seqs, at + 3 * p->n_seqs, at + 4 * p->n_seqs + 1, 0, 0};
  m.capacity = owners_capacity(p->n_indices);
  m.owners = (struct owner *)(m.rows.checkpoint_rows + p->n_indices);
  return m;
}

static struct owner *find_owner(const struct memory_map *m, int64_t page) {
  int64_t i = (int64_t)(((uint64_t)page * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & (m->capacity - 1);
  while (m->owners[i].page && m->owners[i].page != page + 1) i = (i + 1) & (m->capacity - 1);
  return &m->owners[i];
}

static struct gdn_pages_fault fault(enum gdn_pages_error error, int64_t seq, int64_t value, int64_t other) {
  return (struct gdn_pages_fault){error, seq, value, other};
}

/* A sequence as the table sees it. */
struct owned {
  int64_t first, n;      /* its pages in page_indices */
  int64_t prefix, n_new; /* tokens */
};

static int64_t new_tokens(const struct gdn_pages *p, int64_t seq) {
  return p->cu_seqlens.data ? gdn_int(&p->cu_seqlens, seq + 1) - gdn_int(&p->cu_seqlens, seq) : 1;
}

/* Offsets and lengths of one sequence; o is set when all is well. */
static struct gdn_pages_fault check_lengths(const struct gdn_pages *p, int64_t seq, struct owned *o) {
  o->first = gdn_int(&p->indptr, seq);
  int64_t end = gdn_int(&p->indptr, seq + 1);
  if (end < o->first || end > p->n_indices) return fault(GDN_PAGES_INDPTR, seq + 1, end, 0);
  o->n = end - o->first;
  if (o->n == 0) return fault(GDN_PAGES_NO_PAGE, seq, 0, 0);
  int64_t last = gdn_int(&p->last_len, seq);
  if (last < 1 || last > p->page_size) return fault(GDN_PAGES_LAST_LEN, seq, last, 0);
  if (p->cu_seqlens.data && gdn_int(&p->cu_seqlens, seq + 1) < gdn_int(&p->cu_seqlens, seq))
    return fault(GDN_PAGES_CU_SEQLENS, seq + 1, gdn_int(&p->cu_seqlens, seq + 1), 0);
  int64_t total = (o->n - 1) * p->page_size + last;
  o->n_new = new_tokens(p, seq);
  o->prefix = total - o->n_new;
  if (o->prefix < 0) return fault(GDN_PAGES_TOO_SHORT, seq, total, o->n_new);
  if (!p->cu_seqlens.data && o->prefix == 0) return fault(GDN_PAGES_NO_TOKEN, seq, total, 0);
  if (p->prefix_lens.data && gdn_int(&p->prefix_lens, seq) != o->prefix)
    return fault(GDN_PAGES_PREFIX, seq, gdn_int(&p->prefix_lens, seq), o->prefix);
  return fault(GDN_PAGES_OK, 0, 0, 0);
}

/* Enters the pages of one sequence; those that end after its prefix are written if it has new tokens. */
static struct gdn_pages_fault enter_pages(const struct gdn_pages *p, const struct memory_map *m, int64_t seq,
                                          const struct owned *o) {
  int64_t first_written = o->n_new ? o->prefix / p->page_size : o->n;
  for (int64_t j = 0; j < o->n; j++) {
    int64_t page = gdn_int(&p->indices, o->first + j);
    if (page < 0 || page >= p->n_pages) return fault(GDN_PAGES_ID, seq, page, o->first + j);
    struct owner *w = find_owner(m, page);
    if (!w->page) *w = (struct owner){page + 1, -1, -1};
    if (w->seq == seq) return fault(GDN_PAGES_TWICE, seq, page, 0);
    w->seq = seq;
    if (j < first_written) continue;
    if (w->writer >= 0) return fault(GDN_PAGES_TWO_WRITERS, seq, page, w->writer);
    w->writer = seq;
  }
  return fault(GDN_PAGES_OK, 0, 0, 0);
}

/* Rows of one sequence; its checkpoints follow those of the sequences before it. */
static void fill_rows(const struct gdn_pages *p, struct gdn_slot_rows *r, int64_t seq, const struct owned *o) {
  r->prefix_lens[seq] = o->prefix;
  r->checkpoint_cu_starts[seq] = r->n_checkpoints;
  r->n_tokens += o->n_new;
  r->read_rows[seq] = r->write_rows[seq] = -1;
  if (!o->n_new) return;
  if (o->prefix) r->read_rows[seq] = gdn_int(&p->indices, o->first + (o->prefix - 1) / p->page_size);
  r->write_rows[seq] = gdn_int(&p->indices, o->first + o->n - 1);
  if (!p->cu_seqlens.data) return;
  /* The state at the very end is the final one: its page is the write row, so its checkpoint is skipped. */
  int64_t end = (o->prefix + o->n_new) / p->page_size;
  for (int64_t j = o->prefix / p->page_size; j < end; j++)
    r->checkpoint_rows[r->n_checkpoints++] = j == o->n - 1 ? -1 : gdn_int(&p->indices, o->first + j);
}

struct gdn_pages_fault gdn_slots_make(const struct gdn_pages *p, void *memory, struct gdn_slot_rows *rows) {
  struct memory_map m = map_memory(p, memory);
  struct owned o;
  memset(m.owners, 0, (size_t)m.capacity * sizeof *m.owners);
  if (gdn_int(&p->indptr, 0)) return fault(GDN_PAGES_INDPTR, 0, gdn_int(&p->indptr, 0), 0);
  if (p->cu_seqlens.data && gdn_int(&p->cu_seqlens, 0))
    return fault(GDN_PAGES_CU_SEQLENS, 0, gdn_int(&p->cu_seqlens, 0), 0);
  for (int64_t seq = 0; seq < p->n_seqs; seq++) {
    struct gdn_pages_fault f = check_lengths(p, seq, &o);
    if (!f.error) f = enter_pages(p, &m, seq, &o);
    if (f.error) return f;
    fill_rows(p, &m.rows, seq, &o);
  }
  m.rows.checkpoint_cu_starts[p->n_seqs] = m.rows.n_checkpoints;
  if (gdn_int(&p->indptr, p->n_seqs) != p->n_indices)
    return fault(GDN_PAGES_INDPTR, p->n_seqs, gdn_int(&p->indptr, p->n_seqs), 0);
  for (int64_t seq = 0; seq < p->n_seqs; seq++) {
    int64_t row = m.rows.read_rows[seq];
    const struct owner *w = row < 0 ? NULL : find_owner(&m, row);
    if (w && w->writer >= 0 && w->writer != seq) return fault(GDN_PAGES_READ_WRITE, seq, row, w->writer);
  }
  *rows = m.rows;
  return fault(GDN_PAGES_OK, 0, 0, 0);
}
