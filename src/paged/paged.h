/* SPDX-License-Identifier: Apache-2.0
 * Layer 2: page table -> pool rows. Integers only: no states, no context, no allocation. */
#ifndef GDN_PAGED_H
#define GDN_PAGED_H

#include <stddef.h>
#include <stdint.h>

#include "ints.h"

/* A page table whose counts, types and pointers are in order; what the arrays hold is checked here. */
struct gdn_pages {
  int64_t n_seqs, n_pages, page_size, n_indices;
  struct gdn_ints indices, indptr, last_len;
  struct gdn_ints cu_seqlens;  /* absent = decode */
  struct gdn_ints prefix_lens; /* absent = not to be compared */
};

/* What gdn_slots of gdn.h tells; all arrays inside one block of memory. */
struct gdn_slot_rows {
  int64_t *read_rows, *write_rows, *prefix_lens, *checkpoint_cu_starts, *checkpoint_rows;
  int64_t n_tokens, n_checkpoints;
};

/* What is wrong with a table; the caller makes a status and a text of it. */
enum gdn_pages_error {
  GDN_PAGES_OK,
  GDN_PAGES_INDPTR,      /* page_indptr[seq] = value: does not start at 0, decreases, or ends elsewhere */
  GDN_PAGES_NO_PAGE,     /* sequence seq owns no page */
  GDN_PAGES_LAST_LEN,    /* last_page_len[seq] = value */
  GDN_PAGES_CU_SEQLENS,  /* cu_seqlens[seq] = value does not start at 0 or decreases */
  GDN_PAGES_TOO_SHORT,   /* the pages of seq hold value tokens, fewer than its new ones */
  GDN_PAGES_NO_TOKEN,    /* decode: seq has no token before the new one */
  GDN_PAGES_PREFIX,      /* prefix_lens[seq] = value, other = what pages and new tokens say */
  GDN_PAGES_ID,          /* page_indices[other] = value of seq is out of range */
  GDN_PAGES_TWICE,       /* page value stands twice in seq */
  GDN_PAGES_TWO_WRITERS, /* page value is written by seq and by other */
  GDN_PAGES_READ_WRITE   /* page value is read by seq and written by other */
};

struct gdn_pages_fault {
  enum gdn_pages_error error;
  int64_t seq, value, other;
};

/* Bytes for the arrays of n_seqs sequences with n_indices pages, and the memory that checking them takes. */
size_t gdn_slots_bytes(int64_t n_seqs, int64_t n_indices);
/* Checks everything, then fills rows, all inside memory of gdn_slots_bytes. */
struct gdn_pages_fault gdn_slots_make(const struct gdn_pages *pages, void *memory, struct gdn_slot_rows *rows);

#endif
