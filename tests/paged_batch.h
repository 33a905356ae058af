/* SPDX-License-Identifier: Apache-2.0
 * Batches for the paged tests: a vocabulary of random tokens, calls gathered from it by id, page tables built sequence
 * by sequence. Buffers are made once and serve thousands of calls. */
#ifndef GDN_TESTS_PAGED_BATCH_H
#define GDN_TESTS_PAGED_BATCH_H

#include <stdint.h>

#include "check.h"
#include "gdn.h"

/* ---- tokens ---- */

struct vocabulary {
  int n_heads_k, n_heads_v, dim_k, dim_v;
  int32_t n_ids;
  uint16_t *q, *k, *v; /* [n_ids][heads][dim] */
  float *g, *beta;     /* [n_ids][n_heads_v] */
};

struct vocabulary vocabulary_make(int n_heads_k, int n_heads_v, int dim_k, int dim_v, int32_t n_ids,
                                  struct check_rng *r);
/* Floats of one state row. */
int64_t vocabulary_row(const struct vocabulary *w);

/* The tokens of one call, dense, and its output. */
struct token_batch {
  const struct vocabulary *words;
  int64_t n, n_max;
  uint16_t *q, *k, *v, *out;
  float *g, *beta;
};

struct token_batch token_batch_make(const struct vocabulary *w, int64_t n_max);
/* No tokens, poisoned output. */
void token_batch_clear(struct token_batch *b);
void token_batch_add(struct token_batch *b, const int32_t *ids, int64_t n);
/* Calls on all tokens of b, without states. cu_seqlens [n_seqs + 1] int64. */
gdn_prefill_args token_batch_prefill(const struct token_batch *b, int64_t n_seqs, const int64_t *cu_seqlens,
                                     int32_t form);
gdn_decode_args token_batch_decode(const struct token_batch *b);
/* Output of token t. */
const uint16_t *token_out(const struct token_batch *b, int64_t t);
size_t token_out_bytes(const struct token_batch *b);

/* The yardstick: one sequence's tokens in one unpaged call. in null = zero state; in and out are dense rows. */
void plain_run(gdn_ctx *ctx, struct token_batch *b, const int32_t *ids, int64_t n, int64_t prefix, int32_t form,
               const float *in, float *out);

/* ---- page tables ---- */

struct table_batch {
  int64_t n_seqs, n_indices, n_seqs_max, n_indices_max;
  int64_t *indices, *indptr, *last_page_len, *cu_seqlens, *prefix_lens;
  int32_t *narrow[5]; /* the same as int32, in this order */
};

struct table_batch table_batch_make(int64_t n_seqs_max, int64_t n_indices_max);
void table_batch_clear(struct table_batch *t);
/* A sequence that has len tokens after the call, n_new of them new, on pages [ceil(len / page_size)]. */
void table_batch_add(struct table_batch *t, const int64_t *pages, int64_t page_size, int64_t len, int64_t n_new);
/* The table of a prefill call, or with decode = 1 of a decode call. */
gdn_page_table table_batch_take(struct table_batch *t, int64_t n_pages, int64_t page_size, int32_t dtype, int decode);

/* Slots of a table, in a block of exactly the bytes that the library asks for. */
gdn_slots slots_of(const gdn_page_table *table);

#endif
