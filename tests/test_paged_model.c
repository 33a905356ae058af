/* SPDX-License-Identifier: Apache-2.0
 * A pool driven through thousands of prefills, decodes, forks, frees and re-uses of pages, next to a model that keeps
 * every sequence's states apart and runs plain unpaged calls. After each call the whole pool must be, bit for bit, what
 * the model says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "paged_batch.h"

enum { N_PAGES = 48, N_SEQS = 10, PAGES_MAX = 5, PAD = 3, N_SCRATCH = 2, N_BATCH_TOKENS = 2048 };

/* A live sequence: its tokens and its pages. The state after page j, or after the last token, is the page's row. */
struct sequence {
  int64_t len; /* 0 = none */
  int64_t pages[PAGES_MAX];
  int32_t ids[PAGES_MAX * 128];
};

struct model {
  gdn_ctx *ctx[2]; /* with one thread and with several */
  int32_t form;
  int64_t page_size, row, stride;
  struct vocabulary words;
  struct token_batch batch, plain;
  struct table_batch table;
  float *pool, *want; /* [N_PAGES][stride]; the first N_SCRATCH rows are scratch pages of padded sequences */
  int users[N_PAGES];
  struct sequence seqs[N_SEQS];
  struct check_rng r;
  int64_t n_prefills, n_decodes, n_forks, n_frees, n_tokens;
};

static int64_t below(struct model *m, int64_t n) {
  return (int64_t)(check_random_u64(&m->r) % (uint64_t)n);
}

static float *want_row(const struct model *m, int64_t page) {
  return m->want + page * m->stride;
}

static int64_t page_count(const struct model *m, int64_t len) {
  return (len + m->page_size - 1) / m->page_size;
}

/* ---- pages ---- */

/* A page that nobody uses; -1 if there is none. */
static int64_t take_page(struct model *m) {
  int64_t start = below(m, N_PAGES);
  for (int64_t i = 0; i < N_PAGES; i++) {
    int64_t page = (start + i) % N_PAGES;
    if (page < N_SCRATCH || m->users[page] != 0) continue;
    m->users[page] = 1;
    return page;
  }
  return -1;
}

static void drop_page(struct model *m, int64_t page) {
  if (--m->users[page] > 0) return;
  check_poison(m->pool + page * m->stride, (size_t)m->row * sizeof(float));
  check_poison(want_row(m, page), (size_t)m->row * sizeof(float));
}

static void free_sequence(struct model *m, struct sequence *s) {
  for (int64_t j = 0; j < page_count(m, s->len); j++) drop_page(m, s->pages[j]);
  m->n_frees += s->len > 0;
  s->len = 0;
}

/* Gives s pages for len tokens in all; 0 and nothing changed if the pool or the sequence is full. */
static int grow(struct model *m, struct sequence *s, int64_t len) {
  int64_t have = page_count(m, s->len), need = page_count(m, len);
  if (need > PAGES_MAX) return 0;
  for (int64_t j = have; j < need; j++) {
    s->pages[j] = take_page(m);
    if (s->pages[j] >= 0) continue;
    while (--j >= have) m->users[s->pages[j]] = 0;
    return 0;
  }
  return 1;
}

/* ---- the model's side of a call ---- */

/* Runs n new tokens of s as plain calls that end at page ends, and compares their output with the paged call's. */
static void model_run(struct model *m, struct sequence *s, int64_t n, int64_t batch_token, int decode) {
  for (int64_t end = s->len + n; s->len < end;) {
    int64_t prefix = s->len, stop = (prefix / m->page_size + 1) * m->page_size;
    if (stop > end) stop = end;
    const float *in = prefix > 0 ? want_row(m, s->pages[(prefix - 1) / m->page_size]) : NULL;
    float *out = want_row(m, s->pages[(stop - 1) / m->page_size]);
    plain_run(m->ctx[0], &m->plain, s->ids + prefix, stop - prefix, prefix, decode ? GDN_FORM_RECURRENT : m->form, in,
              out);
    check_same_bits("out", token_out(&m->batch, batch_token), token_out(&m->plain, 0),
                    (size_t)(stop - prefix) * token_out_bytes(&m->batch), 2);
    batch_token += stop - prefix;
    s->len = stop;
  }
}

static void compare_pools(const struct model *m) {
  check_same_bits("pool", m->pool, m->want, (size_t)(N_PAGES * m->stride) * sizeof(float), 4);
}

/* ---- calls ---- */

struct pick {
  int seq[N_SEQS + N_SCRATCH]; /* -1 = padded */
  int64_t n_new[N_SEQS + N_SCRATCH];
  int n;
};

static void add_pick(struct model *m, struct pick *p, int seq, int64_t n_new, int64_t page, int64_t padded_len) {
  struct sequence *s = seq >= 0 ? &m->seqs[seq] : NULL;
  p->seq[p->n] = seq;
  p->n_new[p->n++] = n_new;
  if (s != NULL) {
    for (int64_t i = 0; i < n_new; i++) s->ids[s->len + i] = (int32_t)below(m, m->words.n_ids);
    token_batch_add(&m->batch, s->ids + s->len, n_new);
    table_batch_add(&m->table, s->pages, m->page_size, s->len + n_new, n_new);
  } else {
    int32_t id = 0;
    token_batch_add(&m->batch, &id, n_new);
    table_batch_add(&m->table, &page, m->page_size, padded_len, n_new);
  }
}

/* The call with its table or with slots, on one thread or several. */
static void paged_call(struct model *m, int decode) {
  int32_t dtype = below(m, 2) ? GDN_I64 : GDN_I32;
  gdn_page_table table = table_batch_take(&m->table, N_PAGES, m->page_size, dtype, decode);
  if (below(m, 2)) table.prefix_lens = NULL;
  gdn_slots slots = {.struct_size = sizeof slots};
  gdn_paged_args paged = {.struct_size = sizeof paged,
                          .pool = {.data = m->pool, .n_rows = N_PAGES, .row_stride_elems = m->stride},
                          .table = &table};
  int64_t memory[1024];
  if (below(m, 2)) {
    check_ok("gdn_paged_slots", gdn_paged_slots(&table, memory, sizeof memory, &slots));
    paged.table = NULL;
    paged.slots = &slots;
  }
  gdn_ctx *ctx = m->ctx[below(m, 2)];
  if (decode) {
    gdn_decode_args a = token_batch_decode(&m->batch);
    check_ok("gdn_decode_paged", gdn_decode_paged(ctx, &a, &paged));
  } else {
    gdn_prefill_args a = token_batch_prefill(&m->batch, m->table.n_seqs, m->table.cu_seqlens, m->form);
    check_ok("gdn_prefill_paged", gdn_prefill_paged(ctx, &a, &paged));
  }
}

static void run_picks(struct model *m, const struct pick *p, int decode) {
  if (m->table.n_seqs == 0) return;
  paged_call(m, decode);
  int64_t token = 0;
  for (int i = 0; i < p->n; i++) {
    if (p->seq[i] >= 0) model_run(m, &m->seqs[p->seq[i]], p->n_new[i], token, decode);
    token += p->n_new[i];
    m->n_tokens += p->n_new[i];
  }
  /* Padded decode sequences leave whatever in their scratch pages. */
  if (decode) memcpy(m->want, m->pool, (size_t)(N_SCRATCH * m->stride) * sizeof(float));
  compare_pools(m);
}

static void begin_call(struct model *m, struct pick *p) {
  p->n = 0;
  token_batch_clear(&m->batch);
  table_batch_clear(&m->table);
}

static int64_t random_length(struct model *m) {
  const int64_t edges[] = {1, 63, 64, 65, m->page_size - 1, m->page_size, m->page_size + 1, 2 * m->page_size, 0};
  int64_t i = below(m, 16);
  return i < 9 ? edges[i] : 1 + below(m, 150);
}

static void prefill(struct model *m) {
  struct pick p;
  begin_call(m, &p);
  for (int i = 0; i < N_SEQS; i++) {
    struct sequence *s = &m->seqs[i];
    int64_t n_new = random_length(m);
    if (below(m, 3) == 0 || (s->len == 0 && n_new == 0) || !grow(m, s, s->len + n_new)) continue;
    add_pick(m, &p, i, n_new, 0, 0);
  }
  if (below(m, 3) == 0) add_pick(m, &p, -1, 0, below(m, N_SCRATCH), 1 + below(m, m->page_size));
  run_picks(m, &p, 0);
  m->n_prefills++;
}

static void decode(struct model *m) {
  struct pick p;
  begin_call(m, &p);
  for (int i = 0; i < N_SEQS; i++) {
    struct sequence *s = &m->seqs[i];
    if (s->len == 0 || below(m, 4) == 0 || !grow(m, s, s->len + 1)) continue;
    add_pick(m, &p, i, 1, 0, 0);
  }
  for (int i = 0; i < N_SCRATCH; i++) {
    if (below(m, 3) == 0) add_pick(m, &p, -1, 1, i, 2 + below(m, m->page_size - 1));
  }
  run_picks(m, &p, 1);
  m->n_decodes++;
}

/* A place gets a prefix of another sequence: its full pages shared, or also a copy of the page it stops in. */
static void fork_sequence(struct model *m) {
  struct sequence *from = &m->seqs[below(m, N_SEQS)], *to = &m->seqs[below(m, N_SEQS)];
  if (to == from || from->len == 0) return;
  free_sequence(m, to);
  int64_t shared = from->len / m->page_size, len = shared * m->page_size;
  if (shared > 0 && below(m, 2)) len = (shared = 1 + below(m, shared)) * m->page_size;
  int copy = len < from->len && shared == from->len / m->page_size && below(m, 2);
  if (len == 0 && !copy) return;
  if (copy) {
    to->pages[shared] = take_page(m);
    if (to->pages[shared] < 0) return;
    size_t bytes = (size_t)m->row * sizeof(float);
    memcpy(want_row(m, to->pages[shared]), want_row(m, from->pages[shared]), bytes);
    memcpy(m->pool + to->pages[shared] * m->stride, want_row(m, from->pages[shared]), bytes);
    len = from->len;
  }
  for (int64_t j = 0; j < shared; j++) {
    to->pages[j] = from->pages[j];
    m->users[to->pages[j]]++;
  }
  memcpy(to->ids, from->ids, sizeof to->ids);
  to->len = len;
  m->n_forks++;
}

static void step(struct model *m) {
  int64_t kind = below(m, 10);
  if (kind < 3) {
    prefill(m);
  } else if (kind < 7) {
    decode(m);
  } else if (kind < 9) {
    fork_sequence(m);
  } else {
    free_sequence(m, &m->seqs[below(m, N_SEQS)]);
  }
}

/* ---- cases ---- */

static void model_make(struct model *m, const struct check_tier *tier, int32_t form, int64_t page_size) {
  m->ctx[0] = check_ctx(tier, 1);
  m->ctx[1] = check_ctx(tier, 3);
  m->form = form;
  m->page_size = page_size;
  m->words = vocabulary_make(1, 2, 32, 32, 500, &m->r);
  m->row = vocabulary_row(&m->words);
  m->stride = m->row + PAD;
  m->batch = token_batch_make(&m->words, N_BATCH_TOKENS);
  m->plain = token_batch_make(&m->words, PAGES_MAX * page_size);
  m->table = table_batch_make(N_SEQS + N_SCRATCH, N_SEQS * PAGES_MAX + N_SCRATCH);
  m->pool = check_alloc((size_t)(N_PAGES * m->stride) * sizeof(float));
  m->want = check_alloc((size_t)(N_PAGES * m->stride) * sizeof(float));
}

static void model_case(const struct check_tier *tier, int32_t form, int64_t page_size, int n_steps) {
  static struct model m;
  memset(&m, 0, sizeof m);
  m.r = check_case("model/%s/%s/page_%d", tier->name, form == GDN_FORM_CHUNK ? "chunk" : "recurrent", (int)page_size);
  model_make(&m, tier, form, page_size);
  for (int i = 0; i < n_steps; i++) step(&m);
  for (int i = 0; i < N_SEQS; i++) free_sequence(&m, &m.seqs[i]);
  for (int64_t i = N_SCRATCH; i < N_PAGES; i++) {
    if (m.users[i] != 0) check_fail("page %lld is still in use", (long long)i);
  }
  compare_pools(&m);
  printf("model: %lld prefills, %lld decodes, %lld forks, %lld frees, %lld tokens\n", (long long)m.n_prefills,
         (long long)m.n_decodes, (long long)m.n_forks, (long long)m.n_frees, (long long)m.n_tokens);
  gdn_ctx_destroy(m.ctx[0]);
  gdn_ctx_destroy(m.ctx[1]);
  check_free_all();
}

static void paged_pool_agrees_with_a_model_of_apart_states(void **state) {
  (void)state;
  struct check_tier tiers[CHECK_TIERS_MAX];
  int n_tiers = check_tiers(tiers);
  for (int t = 0; t < n_tiers; t++) {
    model_case(&tiers[t], GDN_FORM_RECURRENT, 64, 2000);
    model_case(&tiers[t], GDN_FORM_RECURRENT, 128, 1000);
    model_case(&tiers[t], GDN_FORM_CHUNK, 64, 1000);
    model_case(&tiers[t], GDN_FORM_CHUNK, 128, 1000);
  }
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(paged_pool_agrees_with_a_model_of_apart_states, check_teardown)};
  return check_summary("test_paged_model", cmocka_run_group_tests(tests, NULL, NULL));
}
