/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench paged: requests that share a prefix, with and without its cached pages, then decode steps; and what the
 * page tables themselves cost. */
#include "bench.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "measure.h"

/* Requests on pages of the pool: all pages of their own, or those of the full-page prefix shared. */
struct side {
  int64_t first_page, n_shared, n_own; /* page j < n_shared of every request is j, the others lie from first_page on */
  int64_t n_new;                       /* tokens that each request prefills */
  struct bench_batch tokens;           /* of all requests' prefills */
  int64_t *indices, *indptr, *last, *cu;
  gdn_slots slots, decode_slots;
  void *memory, *decode_memory; /* that these lie in */
};

enum { SIDE_REUSE, SIDE_RECOMPUTE, N_SIDES };
/* Timed in groups of two that alternate, so that each finds the caches as the other left them. */
enum {
  CASE_REUSE,
  CASE_RECOMPUTE,
  CASE_PAGES,
  CASE_ROWS,
  CASE_DECODE,
  CASE_DECODE_ROWS,
  CASE_SLOTS,
  CASE_DECODE_SLOTS,
  N_CASES
};

struct paged {
  const struct bench_options *options;
  struct bench_session session;
  int64_t n_requests, prompt, n_steps, page_size, n_pages; /* prompt: prefix and suffix */
  struct side sides[N_SIDES];
  struct bench_batch step; /* one token of every request */
  uint16_t *step_out;      /* of the other side */
  float *pool;
  bool bitwise_equal;
  int32_t form;
  struct measure_case cases[N_CASES];
};

/* ---- tables and calls ---- */

static int64_t page_count(const struct paged *p, int64_t len) {
  return (len + p->page_size - 1) / p->page_size;
}

static int64_t page_of(const struct side *s, int64_t request, int64_t j) {
  return j < s->n_shared ? j : s->first_page + request * s->n_own + j - s->n_shared;
}

/* The table of all requests at len tokens each; decode if n_new is 0. Valid until the side's next one. */
static gdn_page_table table_at(const struct paged *p, struct side *s, int64_t len, int64_t n_new) {
  int64_t n = page_count(p, len), at = 0;
  s->indptr[0] = s->cu[0] = 0;
  for (int64_t i = 0; i < p->n_requests; i++) {
    for (int64_t j = 0; j < n; j++) {
      s->indices[at++] = page_of(s, i, j);
    }
    s->indptr[i + 1] = at;
    s->last[i] = len - (n - 1) * p->page_size;
    s->cu[i + 1] = (i + 1) * n_new;
  }
  return (gdn_page_table){.struct_size = sizeof(gdn_page_table),
                          .n_seqs = p->n_requests,
                          .n_pages = p->n_pages,
                          .page_size = p->page_size,
                          .n_page_indices = at,
                          .page_indices = s->indices,
                          .page_indptr = s->indptr,
                          .last_page_len = s->last,
                          .cu_seqlens = n_new ? s->cu : NULL,
                          .index_dtype = GDN_I64};
}

static gdn_paged_args pool_of(const struct paged *p, const gdn_page_table *table, const gdn_slots *slots) {
  return (gdn_paged_args){.struct_size = sizeof(gdn_paged_args),
                          .pool = {.data = p->pool, .n_rows = p->n_pages, .dtype = GDN_F32},
                          .table = table,
                          .slots = slots};
}

static gdn_prefill_args prefill_args(const struct paged *p, const struct bench_batch *b, int64_t n_seqs,
                                     int64_t n_tokens, const int64_t *cu) {
  gdn_prefill_args a = batch_prefill_args(b, p->options->form);
  a.n_seqs = n_seqs;
  a.n_tokens = n_tokens;
  a.cu_seqlens = cu;
  a.cu_seqlens_dtype = GDN_I64;
  return a;
}

static gdn_decode_args decode_args(const struct paged *p, uint16_t *out) {
  gdn_decode_args a = batch_decode_args(&p->step);
  a.n_seqs = p->n_requests;
  a.out.data = out;
  return a;
}

static gdn_states rows_of(const struct paged *p, const int64_t *rows) {
  return (gdn_states){.data = p->pool, .n_rows = p->n_pages, .rows = rows, .rows_dtype = GDN_I64, .dtype = GDN_F32};
}

/* ---- what is timed ---- */

static int run_side(const struct paged *p, const struct side *s) {
  gdn_prefill_args a = prefill_args(p, &s->tokens, p->n_requests, p->n_requests * s->n_new, s->cu);
  gdn_paged_args pages = pool_of(p, NULL, &s->slots);
  return bench_check(gdn_prefill_paged(p->session.ctx, &a, &pages), "gdn_prefill_paged");
}

static int run_reuse(void *arg) {
  const struct paged *p = arg;
  return run_side(p, &p->sides[SIDE_REUSE]);
}

static int run_recompute(void *arg) {
  const struct paged *p = arg;
  return run_side(p, &p->sides[SIDE_RECOMPUTE]);
}

/* The same as run_reuse without pages: a caller that has made the rows itself. */
static int run_rows(void *arg) {
  const struct paged *p = arg;
  const struct side *s = &p->sides[SIDE_REUSE];
  gdn_prefill_args a = prefill_args(p, &s->tokens, p->n_requests, p->n_requests * s->n_new, s->cu);
  a.initial_state = rows_of(p, s->slots.read_rows);
  a.final_state = rows_of(p, s->slots.write_rows);
  a.prefix_lens = s->slots.prefix_lens;
  a.prefix_lens_dtype = a.checkpoint_cu_starts_dtype = GDN_I64;
  a.checkpoint_every_n_tokens = p->page_size;
  a.checkpoint_cu_starts = s->slots.checkpoint_cu_starts;
  a.checkpoints = rows_of(p, s->slots.checkpoint_rows);
  return bench_check(gdn_prefill(p->session.ctx, &a), "gdn_prefill");
}

static int run_decode(void *arg) {
  const struct paged *p = arg;
  gdn_decode_args a = decode_args(p, p->step.out);
  gdn_paged_args pages = pool_of(p, NULL, &p->sides[SIDE_REUSE].decode_slots);
  return bench_check(gdn_decode_paged(p->session.ctx, &a, &pages), "gdn_decode_paged");
}

static int run_decode_rows(void *arg) {
  const struct paged *p = arg;
  const gdn_slots *slots = &p->sides[SIDE_REUSE].decode_slots;
  gdn_decode_args a = decode_args(p, p->step.out);
  a.initial_state = rows_of(p, slots->read_rows);
  a.final_state = rows_of(p, slots->write_rows);
  return bench_check(gdn_decode(p->session.ctx, &a), "gdn_decode");
}

/* Arrays of a table of the batch's final size; slots are made in memory of their own. */
static int make_slots(const gdn_page_table *table, void **memory, gdn_slots *slots) {
  size_t bytes = 0;
  int status = bench_check(gdn_paged_slots_bytes(table, &bytes), "gdn_paged_slots_bytes");
  if (status == BENCH_OK && !*memory && !(*memory = bench_alloc((int64_t)bytes, 1))) {
    status = bench_error("out of memory for %zu bytes of slots", bytes);
  }
  slots->struct_size = sizeof *slots;
  return status != BENCH_OK ? status : bench_check(gdn_paged_slots(table, *memory, bytes, slots), "gdn_paged_slots");
}

/* Both time the library's part only: their tables stay as they are. */
struct slots_case {
  gdn_page_table table;
  void *memory;
};

static int run_slots(void *arg) {
  struct slots_case *c = arg;
  gdn_slots slots;
  return make_slots(&c->table, &c->memory, &slots);
}

/* ---- setting up ---- */

static int make_side(const struct paged *p, struct side *s, int64_t most_pages) {
  const int64_t n = p->n_requests;
  s->indices = bench_alloc(n * most_pages, sizeof *s->indices);
  s->indptr = bench_alloc(n + 1, sizeof *s->indptr);
  s->last = bench_alloc(n, sizeof *s->last);
  s->cu = bench_alloc(n + 1, sizeof *s->cu);
  if (!s->indices || !s->indptr || !s->last || !s->cu) {
    return bench_error("out of memory for the pages of %lld requests", (long long)n);
  }
  return BENCH_OK;
}

static int make_tokens(const struct paged *p, struct bench_batch *b, int64_t n_tokens) {
  const struct bench_options *o = p->options;
  *b = (struct bench_batch){.n_tokens = n_tokens,
                            .heads = (int)o->heads,
                            .v_heads = (int)o->v_heads,
                            .dim_k = (int)o->dim_k,
                            .dim_v = (int)o->dim_v};
  return batch_create(b, p->session.ctx, false);
}

static void copy_tokens(struct bench_batch *to, int64_t to_token, const struct bench_batch *from, int64_t token,
                        int64_t n) {
  const int64_t qk = (int64_t)to->heads * to->dim_k, v = (int64_t)to->v_heads * to->dim_v, gates = to->v_heads;
  memcpy(to->q + to_token * qk, from->q + token * qk, (size_t)(n * qk) * sizeof *to->q);
  memcpy(to->k + to_token * qk, from->k + token * qk, (size_t)(n * qk) * sizeof *to->k);
  memcpy(to->v + to_token * v, from->v + token * v, (size_t)(n * v) * sizeof *to->v);
  memcpy(to->g + to_token * gates, from->g + token * gates, (size_t)(n * gates) * sizeof *to->g);
  memcpy(to->beta + to_token * gates, from->beta + token * gates, (size_t)(n * gates) * sizeof *to->beta);
}

/* All requests begin with the first one's prefix; the side that reuses pages gets what comes after them. */
static void share_prefix(struct paged *p) {
  struct side *reuse = &p->sides[SIDE_REUSE], *recompute = &p->sides[SIDE_RECOMPUTE];
  for (int64_t i = 0; i < p->n_requests; i++) {
    if (i > 0) {
      copy_tokens(&recompute->tokens, i * p->prompt, &recompute->tokens, 0, p->options->prefix);
    }
    copy_tokens(&reuse->tokens, i * reuse->n_new, &recompute->tokens, (i + 1) * p->prompt - reuse->n_new, reuse->n_new);
  }
}

static int make_pool(struct paged *p) {
  const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  const double bytes = (double)p->n_pages * (double)batch_state_elems(&p->step) * sizeof(float);
  if (bytes > 0.8 * memory) {
    return bench_error("%lld pages of states need %.1f GiB, the machine has %.1f", (long long)p->n_pages,
                       bytes / 0x1p30, memory / 0x1p30);
  }
  p->pool = bench_alloc(p->n_pages * batch_state_elems(&p->step), sizeof *p->pool);
  p->step_out = bench_alloc(p->n_requests * p->options->v_heads * p->options->dim_v, sizeof *p->step_out);
  return p->pool && p->step_out ? BENCH_OK : bench_error("out of memory for %lld pages", (long long)p->n_pages);
}

static int prepare(struct paged *p) {
  const struct bench_options *o = p->options;
  struct side *reuse = &p->sides[SIDE_REUSE], *recompute = &p->sides[SIDE_RECOMPUTE];
  p->n_requests = o->requests;
  p->prompt = o->prefix + o->suffix;
  p->n_steps = o->steps;
  p->page_size = o->page_size;
  const int64_t most = page_count(p, p->prompt + p->n_steps);
  reuse->n_shared = o->prefix / p->page_size;
  reuse->n_own = most - reuse->n_shared;
  reuse->first_page = reuse->n_shared;
  reuse->n_new = p->prompt - reuse->n_shared * p->page_size;
  recompute->n_own = most;
  recompute->first_page = reuse->first_page + p->n_requests * reuse->n_own;
  recompute->n_new = p->prompt;
  p->n_pages = recompute->first_page + p->n_requests * most;
  int status = bench_open(o, &p->session);
  for (int i = 0; i < N_SIDES && status == BENCH_OK; i++) {
    status = make_side(p, &p->sides[i], most);
    if (status == BENCH_OK) {
      status = make_tokens(p, &p->sides[i].tokens, p->n_requests * p->sides[i].n_new);
    }
  }
  if (status == BENCH_OK) {
    status = make_tokens(p, &p->step, p->n_requests);
  }
  if (status == BENCH_OK) {
    share_prefix(p);
    status = make_pool(p);
  }
  return status;
}

/* ---- the requests, once, on both sides ---- */

/* What some earlier request left: the full pages of the prefix. */
static int cache_prefix(struct paged *p) {
  struct side *s = &p->sides[SIDE_REUSE];
  const int64_t n = s->n_shared * p->page_size, requests = p->n_requests;
  if (n == 0) {
    return BENCH_OK;
  }
  p->n_requests = 1;
  gdn_page_table table = table_at(p, s, n, n);
  p->n_requests = requests;
  gdn_paged_args pages = pool_of(p, &table, NULL);
  gdn_prefill_args a = prefill_args(p, &p->sides[SIDE_RECOMPUTE].tokens, 1, n, s->cu);
  return bench_check(gdn_prefill_paged(p->session.ctx, &a, &pages), "gdn_prefill_paged");
}

static bool same_states(const struct paged *p, int64_t len) {
  const size_t bytes = (size_t)batch_state_elems(&p->step) * sizeof(float);
  bool same = true;
  for (int64_t i = 0; i < p->n_requests; i++) {
    for (int64_t j = 0; j < page_count(p, len); j++) {
      const char *pool = (const char *)p->pool;
      same = same && memcmp(pool + (size_t)page_of(&p->sides[SIDE_REUSE], i, j) * bytes,
                            pool + (size_t)page_of(&p->sides[SIDE_RECOMPUTE], i, j) * bytes, bytes) == 0;
    }
  }
  return same;
}

static bool same_prefill_out(const struct paged *p) {
  const struct side *reuse = &p->sides[SIDE_REUSE], *recompute = &p->sides[SIDE_RECOMPUTE];
  const int64_t token = (int64_t)p->step.v_heads * p->step.dim_v;
  bool same = true;
  for (int64_t i = 0; i < p->n_requests; i++) {
    same = same && memcmp(reuse->tokens.out + i * reuse->n_new * token,
                          recompute->tokens.out + ((i + 1) * p->prompt - reuse->n_new) * token,
                          (size_t)(reuse->n_new * token) * sizeof(uint16_t)) == 0;
  }
  return same;
}

/* One step on both sides, with their tables. */
static int decode_both(struct paged *p, int64_t len) {
  int status = BENCH_OK;
  for (int i = 0; i < N_SIDES && status == BENCH_OK; i++) {
    gdn_page_table table = table_at(p, &p->sides[i], len, 0);
    gdn_paged_args pages = pool_of(p, &table, NULL);
    gdn_decode_args a = decode_args(p, i == SIDE_REUSE ? p->step.out : p->step_out);
    status = bench_check(gdn_decode_paged(p->session.ctx, &a, &pages), "gdn_decode_paged");
  }
  const int64_t n = p->n_requests * p->step.v_heads * p->step.dim_v;
  p->bitwise_equal = p->bitwise_equal && memcmp(p->step.out, p->step_out, (size_t)n * sizeof *p->step_out) == 0;
  return status;
}

static int run_requests(struct paged *p) {
  int status = cache_prefix(p);
  for (int i = 0; i < N_SIDES && status == BENCH_OK; i++) {
    struct side *s = &p->sides[i];
    gdn_page_table table = table_at(p, s, p->prompt, s->n_new);
    status = make_slots(&table, &s->memory, &s->slots);
    if (status == BENCH_OK) {
      status = run_side(p, s);
    }
  }
  p->bitwise_equal = status == BENCH_OK && same_prefill_out(p) && same_states(p, p->prompt);
  const struct side *s = &p->sides[SIDE_REUSE];
  gdn_prefill_args a = prefill_args(p, &s->tokens, p->n_requests, p->n_requests * s->n_new, s->cu);
  if (status == BENCH_OK) {
    status = bench_check(gdn_prefill_form(p->session.ctx, &a, &p->form), "gdn_prefill_form");
  }
  for (int64_t t = 1; t <= p->n_steps && status == BENCH_OK; t++) {
    measure_progress("paged: decode step %lld", (long long)t);
    status = decode_both(p, p->prompt + t);
  }
  measure_progress_clear();
  p->bitwise_equal = p->bitwise_equal && status == BENCH_OK && same_states(p, p->prompt + p->n_steps);
  return status;
}

/* ---- measuring ---- */

static int measure(struct paged *p) {
  struct side *s = &p->sides[SIDE_REUSE], other = *s;
  struct slots_case prefill = {.memory = NULL}, decode = {.memory = NULL};
  /* The prefill table and cu_seqlens stay in the side's arrays; the decode table gets its own. */
  int status = make_side(p, &other, s->n_shared + s->n_own);
  if (status == BENCH_OK) {
    decode.table = table_at(p, &other, p->prompt + p->n_steps, 0);
    prefill.table = table_at(p, s, p->prompt, s->n_new);
    status = make_slots(&decode.table, &s->decode_memory, &s->decode_slots);
  }
  /* Its cu_seqlens are used again as well. */
  table_at(p, &p->sides[SIDE_RECOMPUTE], p->prompt, p->prompt);
  int (*const runs[N_CASES])(void *) = {run_reuse,  run_recompute,   run_reuse, run_rows,
                                        run_decode, run_decode_rows, run_slots, run_slots};
  for (int i = 0; i < N_CASES; i++) {
    p->cases[i] = (struct measure_case){.run = runs[i], .arg = p};
  }
  p->cases[CASE_SLOTS].arg = &prefill;
  p->cases[CASE_DECODE_SLOTS].arg = &decode;
  for (int i = 0; i < N_CASES && status == BENCH_OK; i += 2) {
    status = measure_interleaved(p->cases + i, 2, p->options->seconds / (N_CASES / 2), "paged");
  }
  free(prefill.memory);
  free(decode.memory);
  free(other.indices);
  free(other.indptr);
  free(other.last);
  free(other.cu);
  return status;
}

/* ---- report ---- */

static double median_us(const struct paged *p, int which) {
  return p->cases[which].stats.median_us;
}

static double state_bytes(const struct paged *p, int side) {
  const struct side *s = &p->sides[side];
  return (double)(s->n_shared + p->n_requests * s->n_own) * (double)batch_state_elems(&p->step) * sizeof(float);
}

/* Of a decode step of all layers, what making its slots once takes. */
static double slots_share(const struct paged *p) {
  return median_us(p, CASE_DECODE_SLOTS) / (median_us(p, CASE_DECODE) * (double)p->options->layers);
}

static void case_json(struct json *j, const char *key, const struct measure_stats *s) {
  json_begin_object(j, key);
  measure_json(j, s);
  json_end_object(j);
}

static const char *const case_keys[N_CASES] = {"reuse",  "recompute",   "pages", "rows",
                                               "decode", "decode_rows", "slots", "decode_slots"};

static void print_json(const struct paged *p) {
  struct json j = {.file = stdout};
  const struct bench_options *o = p->options;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "paged");
  json_int(&j, "requests", p->n_requests);
  json_int(&j, "prefix", o->prefix);
  json_int(&j, "suffix", o->suffix);
  json_int(&j, "steps", p->n_steps);
  json_int(&j, "page_size", p->page_size);
  json_int(&j, "reused_tokens", p->sides[SIDE_REUSE].n_shared * p->page_size);
  json_int(&j, "heads", o->heads);
  json_int(&j, "v_heads", o->v_heads);
  json_int(&j, "dim_k", o->dim_k);
  json_int(&j, "dim_v", o->dim_v);
  json_string(&j, "isa", p->session.info.isa);
  json_string(&j, "form", bench_form_name(p->form));
  json_int(&j, "threads", p->session.info.n_threads);
  json_number(&j, "reuse_us", median_us(p, CASE_REUSE));
  json_number(&j, "recompute_us", median_us(p, CASE_RECOMPUTE));
  json_number(&j, "speedup", median_us(p, CASE_RECOMPUTE) / median_us(p, CASE_REUSE));
  json_bool(&j, "bitwise_equal", p->bitwise_equal);
  json_number(&j, "decode_us", median_us(p, CASE_DECODE));
  json_number(&j, "slots_us", median_us(p, CASE_SLOTS));
  json_number(&j, "decode_slots_us", median_us(p, CASE_DECODE_SLOTS));
  json_int(&j, "layers", o->layers);
  json_number(&j, "slots_share", slots_share(p));
  json_number(&j, "paged_overhead", median_us(p, CASE_PAGES) / median_us(p, CASE_ROWS) - 1);
  json_number(&j, "decode_paged_overhead", median_us(p, CASE_DECODE) / median_us(p, CASE_DECODE_ROWS) - 1);
  json_number(&j, "reuse_state_bytes", state_bytes(p, SIDE_REUSE));
  json_number(&j, "recompute_state_bytes", state_bytes(p, SIDE_RECOMPUTE));
  json_begin_object(&j, "cases");
  for (int i = 0; i < N_CASES; i++) {
    case_json(&j, case_keys[i], &p->cases[i].stats);
  }
  json_end_object(&j);
  bench_conditions_json(&j, &p->session);
  json_end_object(&j);
}

static int print_text(const struct paged *p) {
  static const char *const headers[] = {"one layer", "median us", "p10", "p90", "runs"};
  static const char *const names[N_CASES] = {"prefill, prefix reused", "prefill, prefix recomputed",
                                             "prefill by slots",       "prefill by rows, without pages",
                                             "decode by slots",        "decode by rows, without pages",
                                             "slots of the prefill",   "slots of the decode step"};
  const struct bench_options *o = p->options;
  bench_conditions_print(&p->session);
  printf("%lld request%s of %lld + %lld tokens and %lld steps on pages of %lld, %lld tokens of the prefix cached\n"
         "heads %lld, value heads %lld, K %lld, V %lld\n\n",
         (long long)p->n_requests, p->n_requests == 1 ? "" : "s", (long long)o->prefix, (long long)o->suffix,
         (long long)p->n_steps, (long long)p->page_size, (long long)(p->sides[SIDE_REUSE].n_shared * p->page_size),
         (long long)o->heads, (long long)o->v_heads, (long long)o->dim_k, (long long)o->dim_v);
  struct table t;
  table_begin(&t, 5, headers);
  for (int i = 0; i < N_CASES; i++) {
    table_cell(&t, "%s", names[i]);
    measure_cells(&t, &p->cases[i].stats, 1);
  }
  bool complete = table_end(&t, stdout);
  printf("\nspeedup %.2f, results %s, states %.1f MB reused, %.1f MB recomputed\n"
         "pages cost %+.2f %% of the prefill, %+.2f %% of the decode step, slots %.4f %% of a step of %lld layers\n",
         median_us(p, CASE_RECOMPUTE) / median_us(p, CASE_REUSE), p->bitwise_equal ? "bitwise equal" : "DIFFER",
         state_bytes(p, SIDE_REUSE) * 1e-6, state_bytes(p, SIDE_RECOMPUTE) * 1e-6,
         100 * (median_us(p, CASE_PAGES) / median_us(p, CASE_ROWS) - 1),
         100 * (median_us(p, CASE_DECODE) / median_us(p, CASE_DECODE_ROWS) - 1), 100 * slots_share(p),
         (long long)o->layers);
  return complete ? BENCH_OK : bench_error("out of memory for the table");
}

static void destroy(struct paged *p) {
  for (int i = 0; i < N_SIDES; i++) {
    struct side *s = &p->sides[i];
    batch_destroy(&s->tokens);
    free(s->indices);
    free(s->indptr);
    free(s->last);
    free(s->cu);
    free(s->memory);
    free(s->decode_memory);
  }
  batch_destroy(&p->step);
  free(p->step_out);
  free(p->pool);
  bench_close(&p->session);
}

int bench_paged(const struct bench_options *o) {
  struct paged p = {.options = o};
  int status = prepare(&p);
  if (status == BENCH_OK) {
    status = run_requests(&p);
  }
  if (status == BENCH_OK) {
    status = measure(&p);
  }
  if (status == BENCH_OK && o->json) {
    print_json(&p);
  } else if (status == BENCH_OK) {
    status = print_text(&p);
  }
  destroy(&p);
  return status != BENCH_OK ? status : p.bitwise_equal ? BENCH_OK : BENCH_FAILED;
}
