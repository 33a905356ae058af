/* SPDX-License-Identifier: Apache-2.0
 * Batches for the paged tests; see paged_batch.h. */
#include "paged_batch.h"

#include <string.h>

/* ---- tokens ---- */

struct vocabulary vocabulary_make(int n_heads_k, int n_heads_v, int dim_k, int dim_v, int32_t n_ids,
                                  struct check_rng *r) {
  struct vocabulary w = {n_heads_k, n_heads_v, dim_k, dim_v, n_ids, NULL, NULL, NULL, NULL, NULL};
  int64_t n_qk = (int64_t)n_ids * n_heads_k * dim_k, n_gates = (int64_t)n_ids * n_heads_v, n_v = n_gates * dim_v;
  w.q = check_alloc((size_t)n_qk * sizeof *w.q);
  w.k = check_alloc((size_t)n_qk * sizeof *w.k);
  w.v = check_alloc((size_t)n_v * sizeof *w.v);
  w.g = check_alloc((size_t)n_gates * sizeof *w.g);
  w.beta = check_alloc((size_t)n_gates * sizeof *w.beta);
  for (int64_t i = 0; i < n_qk; i++) {
    w.q[i] = check_to_bf16((float)check_normal(r));
    w.k[i] = check_to_bf16((float)check_normal(r));
  }
  for (int64_t i = 0; i < n_v; i++) w.v[i] = check_to_bf16((float)check_normal(r));
  for (int64_t i = 0; i < n_gates; i++) {
    w.g[i] = (float)check_uniform(r, -0.3, 0);
    w.beta[i] = (float)check_uniform(r, 0, 1);
  }
  return w;
}

int64_t vocabulary_row(const struct vocabulary *w) {
  return (int64_t)w->n_heads_v * w->dim_v * w->dim_k;
}

struct token_batch token_batch_make(const struct vocabulary *w, int64_t n_max) {
  struct token_batch b = {.words = w, .n_max = n_max};
  size_t qk = (size_t)(n_max * w->n_heads_k * w->dim_k), v = (size_t)(n_max * w->n_heads_v * w->dim_v);
  size_t gates = (size_t)(n_max * w->n_heads_v);
  b.q = check_alloc(qk * sizeof *b.q);
  b.k = check_alloc(qk * sizeof *b.k);
  b.v = check_alloc(v * sizeof *b.v);
  b.out = check_alloc(v * sizeof *b.out);
  b.g = check_alloc(gates * sizeof *b.g);
  b.beta = check_alloc(gates * sizeof *b.beta);
  return b;
}

size_t token_out_bytes(const struct token_batch *b) {
  return (size_t)(b->words->n_heads_v * b->words->dim_v) * sizeof *b->out;
}

const uint16_t *token_out(const struct token_batch *b, int64_t t) {
  return b->out + t * b->words->n_heads_v * b->words->dim_v;
}

void token_batch_clear(struct token_batch *b) {
  check_poison(b->out, (size_t)b->n * token_out_bytes(b));
  b->n = 0;
}

void token_batch_add(struct token_batch *b, const int32_t *ids, int64_t n) {
  const struct vocabulary *w = b->words;
  int64_t qk = (int64_t)w->n_heads_k * w->dim_k, v = (int64_t)w->n_heads_v * w->dim_v, gates = w->n_heads_v;
  if (b->n + n > b->n_max) check_fail("token_batch_add: more than %lld tokens", (long long)b->n_max);
  for (int64_t i = 0; i < n; i++, b->n++) {
    memcpy(b->q + b->n * qk, w->q + ids[i] * qk, (size_t)qk * sizeof *b->q);
    memcpy(b->k + b->n * qk, w->k + ids[i] * qk, (size_t)qk * sizeof *b->k);
    memcpy(b->v + b->n * v, w->v + ids[i] * v, (size_t)v * sizeof *b->v);
    memcpy(b->g + b->n * gates, w->g + ids[i] * gates, (size_t)gates * sizeof *b->g);
    memcpy(b->beta + b->n * gates, w->beta + ids[i] * gates, (size_t)gates * sizeof *b->beta);
  }
}

gdn_prefill_args token_batch_prefill(const struct token_batch *b, int64_t n_seqs, const int64_t *cu_seqlens,
                                     int32_t form) {
  const struct vocabulary *w = b->words;
  return (gdn_prefill_args){.struct_size = sizeof(gdn_prefill_args),
                            .flags = GDN_L2NORM_QK,
                            .form = form,
                            .n_seqs = n_seqs,
                            .n_tokens = b->n,
                            .n_heads_k = w->n_heads_k,
                            .n_heads_v = w->n_heads_v,
                            .dim_k = w->dim_k,
                            .dim_v = w->dim_v,
                            .cu_seqlens = cu_seqlens,
                            .cu_seqlens_dtype = GDN_I64,
                            .q = {.data = b->q},
                            .k = {.data = b->k},
                            .v = {.data = b->v},
                            .g = {.data = b->g},
                            .beta = {.data = b->beta},
                            .out = {.data = b->out}};
}

gdn_decode_args token_batch_decode(const struct token_batch *b) {
  const struct vocabulary *w = b->words;
  return (gdn_decode_args){.struct_size = sizeof(gdn_decode_args),
                           .flags = GDN_L2NORM_QK,
                           .n_seqs = b->n,
                           .n_heads_k = w->n_heads_k,
                           .n_heads_v = w->n_heads_v,
                           .dim_k = w->dim_k,
                           .dim_v = w->dim_v,
                           .q = {.data = b->q},
                           .k = {.data = b->k},
                           .v = {.data = b->v},
                           .g = {.data = b->g},
                           .beta = {.data = b->beta},
                           .out = {.data = b->out}};
}

void plain_run(gdn_ctx *ctx, struct token_batch *b, const int32_t *ids, int64_t n, int64_t prefix, int32_t form,
               const float *in, float *out) {
  int64_t cu[2] = {0, n};
  token_batch_clear(b);
  token_batch_add(b, ids, n);
  gdn_prefill_args a = token_batch_prefill(b, 1, cu, form);
  if (in != NULL) a.initial_state = (gdn_states){.data = (float *)(uintptr_t)in, .n_rows = 1};
  a.final_state = (gdn_states){.data = out, .n_rows = 1};
  a.prefix_lens = &prefix;
  a.prefix_lens_dtype = GDN_I64;
  check_ok("gdn_prefill", gdn_prefill(ctx, &a));
}

/* ---- page tables ---- */

struct table_batch table_batch_make(int64_t n_seqs_max, int64_t n_indices_max) {
  struct table_batch t = {.n_seqs_max = n_seqs_max, .n_indices_max = n_indices_max};
  const int64_t n[5] = {n_indices_max, n_seqs_max + 1, n_seqs_max, n_seqs_max + 1, n_seqs_max};
  int64_t **const wide[5] = {&t.indices, &t.indptr, &t.last_page_len, &t.cu_seqlens, &t.prefix_lens};
  for (int i = 0; i < 5; i++) {
    *wide[i] = check_alloc((size_t)n[i] * sizeof(int64_t));
    t.narrow[i] = check_alloc((size_t)n[i] * sizeof(int32_t));
  }
  table_batch_clear(&t);
  return t;
}

void table_batch_clear(struct table_batch *t) {
  t->n_seqs = t->n_indices = 0;
  t->indptr[0] = t->cu_seqlens[0] = 0;
}

void table_batch_add(struct table_batch *t, const int64_t *pages, int64_t page_size, int64_t len, int64_t n_new) {
  int64_t n_pages = (len + page_size - 1) / page_size;
  if (t->n_seqs == t->n_seqs_max || t->n_indices + n_pages > t->n_indices_max) check_fail("table_batch_add: full");
  memcpy(t->indices + t->n_indices, pages, (size_t)n_pages * sizeof *pages);
  t->n_indices += n_pages;
  t->last_page_len[t->n_seqs] = len - (n_pages - 1) * page_size;
  t->prefix_lens[t->n_seqs] = len - n_new;
  t->n_seqs++;
  t->indptr[t->n_seqs] = t->n_indices;
  t->cu_seqlens[t->n_seqs] = t->cu_seqlens[t->n_seqs - 1] + n_new;
}

gdn_page_table table_batch_take(struct table_batch *t, int64_t n_pages, int64_t page_size, int32_t dtype, int decode) {
  const int64_t *const wide[5] = {t->indices, t->indptr, t->last_page_len, t->cu_seqlens, t->prefix_lens};
  const int64_t n[5] = {t->n_indices, t->n_seqs + 1, t->n_seqs, t->n_seqs + 1, t->n_seqs};
  const void *data[5];
  for (int i = 0; i < 5; i++) {
    for (int64_t j = 0; j < n[i]; j++) t->narrow[i][j] = (int32_t)wide[i][j];
    data[i] = dtype == GDN_I64 ? (const void *)wide[i] : t->narrow[i];
  }
  return (gdn_page_table){.struct_size = sizeof(gdn_page_table),
                          .n_seqs = t->n_seqs,
                          .n_pages = n_pages,
                          .page_size = page_size,
                          .n_page_indices = t->n_indices,
                          .page_indices = data[0],
                          .page_indptr = data[1],
                          .last_page_len = data[2],
                          .cu_seqlens = decode ? NULL : data[3],
                          .prefix_lens = data[4],
                          .index_dtype = dtype};
}

gdn_slots slots_of(const gdn_page_table *table) {
  gdn_slots slots = {.struct_size = sizeof slots};
  size_t bytes = 0;
  check_ok("gdn_paged_slots_bytes", gdn_paged_slots_bytes(table, &bytes));
  void *memory = check_alloc_tight(bytes);
  check_ok("gdn_paged_slots", gdn_paged_slots(table, memory, bytes, &slots));
  return slots;
}
